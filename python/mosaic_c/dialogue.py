"""What a conversation consists of, without a model: messages, settings, what a turn took, and the file of them.

The file is JSON: {"format": "mosaic_c chat", "version": 1, "model": NAME, "messages": [...], "settings": {...}}.
Reading it is strict: a key that is unknown, missing or of another type is an error that names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mosaic_c import jsonfile
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import show, shown_path

FORMAT, VERSION = "mosaic_c chat", 1
ROLES = ("system", "user", "assistant")
MAX_FILE = 256 << 20  # bytes; the longest context is some 4 MB of text
INTEGERS = ("top_k", "seed", "max_new_tokens")  # settings that are whole numbers


@dataclass(frozen=True)
class Message:
    """One message. stopped: an answer that was stopped before its end."""

    role: str
    content: str
    reasoning: str = ""
    stopped: bool = False

    def shown(self) -> dict[str, str]:
        """As the template sees it."""
        out = {"role": self.role, "content": self.content}
        return out | {"reasoning_content": self.reasoning} if self.reasoning else out


@dataclass(frozen=True)
class Settings:
    """How answers are made. None: as the checkpoint says. think: None is the template's own default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    think: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Those of sampling.resolve."""
        given = asdict(self)
        return {k: v for k, v in given.items() if k not in ("max_new_tokens", "think")}


NAMES = tuple(field.name for field in fields(Settings))


@dataclass
class Usage:
    """What a turn took. reused: tokens of the prompt whose state was held; why: what kept it from being more.

    finish_reason: "stop", "length", "stopped" (by the caller), "failed", None before it runs. seed: None when greedy.
    """

    prompt_tokens: int = 0
    reused: int = 0
    why: str = ""
    answer_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str | None = None
    seed: int | None = None

    @property
    def evaluated(self) -> int:
        return self.prompt_tokens - self.reused

    @property
    def tok_s(self) -> float:
        """Tokens a second of decoding; the first one comes with the prompt."""
        return (self.answer_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def line(self) -> str:
        why = f" ({self.why})" if self.why else ""
        thought = f", {self.reasoning_tokens} of them thinking" if self.reasoning_tokens else ""
        return (
            f"reused {self.reused} of {self.prompt_tokens} tokens{why}, evaluated {self.evaluated} in "
            f"{self.prefill_s:.2f} s; {self.answer_tokens} tokens of answer{thought}, {self.tok_s:.2f} tok/s"
        )


def loops(tokens: Sequence[int], times: int = 4, least: int = 48) -> bool:
    """Whether tokens end in the same words again and again: times of them, together at least so many tokens."""
    n = len(tokens)
    for period in range(1, n // times + 1):
        span = max(times * period, least)
        if span <= n and all(tokens[i] == tokens[i - period] for i in range(n - span + period, n)):
            return True
    return False


# ---- the file ----


def write(
    path: str | os.PathLike[str], model: str, messages: Sequence[Message], settings: Settings
) -> None:
    """Writes a conversation; the file is there as a whole or as it was before."""
    jsonfile.check_writable(path)
    value = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "messages": [_plain(m) for m in messages],
        "settings": {k: v for k, v in asdict(settings).items() if v is not None},
    }
    part = None
    try:
        target = os.path.realpath(path)
        if os.path.lexists(target) and not os.path.isfile(target):
            # renamed over, a device or a pipe would be gone
            raise MosaicError(
                f"{shown_path(path)}: expected a file or a new name, it is neither", "EINVAL"
            )
        # a name of its own, readable by its owner alone: what lies beside is nobody's to lose
        folder, name = os.path.split(target)
        fd, part = tempfile.mkstemp(suffix=".part", prefix=f"{name[:100]}.", dir=folder)
        with open(fd, "w", encoding="utf-8") as f:
            json.dump(value, f, ensure_ascii=False, indent=1)
            f.write("\n")
        os.replace(part, target)
        part = None
    except (OSError, ValueError) as e:
        raise MosaicError(
            f"{shown_path(path)}: cannot write: {jsonfile.reason(e)}", "EIO"
        ) from None
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _plain(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        out["reasoning"] = message.reasoning
    if message.stopped:
        out["stopped"] = True
    return out


def read(path: str | os.PathLike[str]) -> tuple[str, list[Message], Settings]:
    """(model's name, messages, settings) of a file; MosaicError EFORMAT for anything it should not hold."""
    where = shown_path(path)
    value = jsonfile.load(Path(path), MAX_FILE)
    if value.get("format") != FORMAT:
        raise MosaicError(f"{where}: not a conversation that /save wrote", "EFORMAT")
    if value.get("version") != VERSION:
        got = show(value.get("version"))
        raise MosaicError(f"{where}: version {got}, expected {VERSION}", "EFORMAT")
    kinds = {"format": str, "version": int, "model": str, "messages": list, "settings": dict}
    _check(value, kinds, tuple(kinds), where)
    messages = [
        _message(m, f"{where}: messages[{i}]", first=i == 0)
        for i, m in enumerate(value["messages"])
    ]
    return value["model"], messages, _settings(value["settings"], f"{where}: settings")


def _message(value: Any, where: str, first: bool) -> Message:
    kinds = {"role": str, "content": str, "reasoning": str, "stopped": bool}
    _check(value, kinds, ("role", "content"), where)
    role = value["role"]
    if role not in ROLES or (role == "system" and not first):
        expected = "user or assistant (system: the first message only)"
        raise MosaicError(f"{where}: role: expected {expected}, got {show(role)}", "EFORMAT")
    for name in ("content", "reasoning"):
        if any("\ud800" <= c <= "\udfff" for c in value.get(name, "")):
            raise MosaicError(f"{where}: {name}: a lone surrogate, expected Unicode", "EFORMAT")
    return Message(**value)


def _settings(value: Any, where: str) -> Settings:
    number: Any = (int, float)
    kinds = {k: bool if k == "think" else int if k in INTEGERS else number for k in NAMES}
    _check(value, kinds, (), where)
    return Settings(**value)


def _check(value: Any, kinds: dict[str, Any], needed: Sequence[str], where: str) -> None:
    """Keys and types of an object."""
    if not isinstance(value, dict):
        raise MosaicError(f"{where}: expected an object, got {show(value)}", "EFORMAT")
    for key in needed:
        if key not in value:
            raise MosaicError(f"{where}: {key} is missing", "EFORMAT")
    for key, item in value.items():
        if key not in kinds:
            known = ", ".join(kinds)
            raise MosaicError(f"{where}: unknown key {show(key)}, expected {known}", "EFORMAT")
        kind = kinds[key]
        wrong = isinstance(item, bool) and kind is not bool
        if wrong or not isinstance(item, kind):
            names = {str: "a string", int: "an integer", bool: "true or false", list: "a list"}
            names |= {dict: "an object"}
            expected = names.get(kind, "a number")
            raise MosaicError(f"{where}: {key}: expected {expected}, got {show(item)}", "EFORMAT")
