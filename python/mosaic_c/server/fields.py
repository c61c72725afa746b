"""Fields of a body, taken one by one; what is left at the end was not understood and is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mosaic_c.jsonfile import show
from mosaic_c.server.body import kind
from mosaic_c.server.problem import Problem, refuse


class Fields:
    """The fields of one object. null counts as absent, as in OpenAI's clients.

    where: the object's own name, "" for the body. Every take_ method returns None for what is absent.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise refuse(where or "body", f"expected an object, got {kind(value)}")
        self._left: dict[str, Any] = dict(value)
        self._where = where

    def name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def has(self, key: str) -> bool:
        return self._left.get(key) is not None

    def take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def text(self, key: str, most: int | None = None) -> str | None:
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise refuse(self.name(key), f"expected a string, got {kind(value)}")
        if most is not None and len(value) > most:
            raise refuse(self.name(key), f"expected at most {most} characters, got {len(value)}")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise refuse(self.name(key), f"expected true or false, got {kind(value)}")
        return value

    def whole(self, key: str, low: int, high: int) -> int | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise refuse(self.name(key), f"expected a whole number, got {_shown(value)}")
        if not low <= value <= high:
            raise refuse(
                self.name(key), f"expected a whole number from {low} to {high}, got {value}"
            )
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(self.name(key), f"expected a number, got {_shown(value)}")
        if not low <= value <= high:
            raise refuse(self.name(key), f"expected a number from {low:g} to {high:g}, got {value}")
        return float(value)

    def choice(self, key: str, options: tuple[str, ...]) -> str | None:
        value = self.text(key)
        if value is not None and value not in options:
            raise refuse(self.name(key), f"expected one of {', '.join(options)}, got {show(value)}")
        return value

    def part(self, key: str) -> Fields | None:
        """An object inside this one."""
        value = self.take(key)
        return None if value is None else Fields(value, self.name(key))

    def rows(self, key: str, most: int) -> list[Any] | None:
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise refuse(self.name(key), f"expected an array, got {kind(value)}")
        if len(value) > most:
            raise refuse(self.name(key), f"expected at most {most} entries, got {len(value)}")
        return value

    def unsupported(self, rules: Mapping[str, tuple[Callable[[Any], bool], str]]) -> None:
        """Fields of the protocol that this server does not have: fine only where they ask for nothing.

        rules: name -> (does this value ask for nothing?, why it is refused otherwise).
        """
        for key, (harmless, why) in rules.items():
            value = self.take(key)
            if value is not None and not harmless(value):
                raise refuse(self.name(key), f"not supported: {why}", "unsupported_parameter")

    def rest(self) -> dict[str, Any]:
        """Everything that is left, taken."""
        left, self._left = self._left, {}
        return left

    def end(self) -> None:
        """Refuses what nobody took."""
        for key in self._left:
            name = self.name(key if key.isprintable() and len(key) < 100 else show(key))
            raise Problem(
                400, f"{name}: this server has no such field", param=name, code="unknown_parameter"
            )


def _shown(value: Any) -> str:
    return show(value) if isinstance(value, (int, float)) else kind(value)
