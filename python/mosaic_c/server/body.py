"""JSON from strangers: strict, bounded, and never more than one line of complaint.

Refused beyond what json refuses: keys given twice, NaN, Infinity and numbers that overflow to it, integers of more
than 40 digits, more than 64 levels, more than 200,000 values, lone surrogates, what is not UTF-8.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from mosaic_c.jsonfile import show
from mosaic_c.server.problem import Problem

MAX_DEPTH = 64
MAX_VALUES = 200_000
MAX_DIGITS = 40
# One without an end goes on to the end: otherwise each of its quotes would be tried as the beginning of another.
_STRING = re.compile(rb'"[^"]*(?:"|\Z)')


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body; Problem 400 otherwise."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _bad(f"the body is not UTF-8: byte {e.start} is 0x{data[e.start]:02x}") from None
    if _marks(data) > MAX_VALUES:
        # Before values are made of it: they take dozens of times the memory of their text.
        raise _bad(f"the body has more than {MAX_VALUES} values")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except RecursionError:
        raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as e:
        raise _bad(f"the body is not JSON: {e.msg} at character {e.pos}") from None
    if not isinstance(value, dict):
        raise _bad(f"the body: expected a JSON object, got {kind(value)}")
    _check(value, "\\ud" in text or "\\uD" in text)
    return value


def within(texts: Iterable[str]) -> bool:
    """Whether JSON inside of a body, all of it together, has no more values than a body may."""
    return sum(_marks(text.encode("utf-8", "replace")) for text in texts) <= MAX_VALUES


def dumps(value: Any) -> str:
    """JSON as it is sent."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _marks(data: bytes) -> int:
    """Commas and openings outside of strings: no fewer than values, but for the outermost one."""
    most = sum(data.count(c) for c in (b",", b"[", b"{"))
    if most <= MAX_VALUES:
        return most
    # Escapes first: within strings they hide quotes, outside of them they end what is JSON.
    bare = _STRING.sub(b"", data.replace(b"\\\\", b"").replace(b'\\"', b""))
    return sum(bare.count(c) for c in (b",", b"[", b"{"))


def _check(value: Any, surrogates: bool) -> None:
    """Depth and text of all values. An explicit stack: recursion has a limit of its own."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _bad(f"the body is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            waiting.extend((v, depth + 1) for v in item.values())
            if surrogates:
                waiting.extend((k, depth + 1) for k in item)
        elif isinstance(item, list):
            waiting.extend((v, depth + 1) for v in item)
        elif surrogates and isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as e:
                raise _bad(
                    f"the body has a lone surrogate, \\u{ord(item[e.start]):04x}, which is no character"
                ) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _bad(f"the body has the key {show(key)} twice")
            seen.add(key)
    return out


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _bad(
            f"the body has an integer of {len(digits)} digits, expected at most {MAX_DIGITS}"
        )
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _bad(f"the body has the number {show(text)}, which is out of range")
    return value


def _constant(name: str) -> None:
    raise _bad(f"the body has the number {name}, which JSON does not allow")


def _bad(message: str) -> Problem:
    return Problem(400, message, code="invalid_json")
