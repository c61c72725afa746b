"""Small files and JSON from folders nobody vouches for: strict, bounded, always a one-line error.

Refused beyond what json refuses: keys given twice, NaN and Infinity, integers of more than
1000 digits, nesting that exhausts the stack, text that is not UTF-8. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mosaic_c.errors import MosaicError, UsageError

MAX_DIGITS = 1000  # of an integer; tokenizer configs hold 10**30, Python itself stops at 4300
MAX_SHOWN = 160  # characters of foreign text in a message
Pairs = list[tuple[str, Any]]


def show(value: object) -> str:
    """Foreign text or value for a message: quoted, printable ASCII, one line, cut when long."""
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as it is, or quoted where printing it would break the line or the encoding."""
    text = os.fsdecode(path)
    return text if text.isprintable() else show(text)


def path_text(path: object) -> str:
    """A caller's path as text; UsageError for what is none."""
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"path: expected a text or a path, got {show(path)}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises what would keep a file from being written, before the work whose result it is to hold."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise MosaicError(f"{shown_path(path)}: there is no folder {shown_path(parent)}", "ENOENT")
    if os.path.isdir(path):
        raise MosaicError(f"{shown_path(path)}: a folder; expected a file or a new name", "EINVAL")
    target = path if os.path.exists(path) else parent
    if not os.access(target, os.W_OK):
        raise MosaicError(
            f"{shown_path(path)}: cannot be written: no permission, or read-only", "EIO"
        )


def few(names: list[str], total: int | None = None, limit: int = 5) -> str:
    """The first names, quoted, and how many there are in all when more."""
    total = len(names) if total is None else total
    rest = f", ... ({total} in all)" if total > min(limit, len(names)) else ""
    return ", ".join(show(x) for x in names[:limit]) + rest


def open_regular(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a regular file; a pipe or device is refused instead of waited for.

    Raises MosaicError: ENOENT when it is not there, EIO when it is not regular or not readable.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MosaicError(f"{shown_path(path)}: no such file", code="ENOENT") from None
    except (OSError, ValueError) as e:
        raise MosaicError(f"{shown_path(path)}: cannot open: {reason(e)}", code="EIO") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise MosaicError(f"{shown_path(path)}: not a regular file", code="EIO")
    return fd, info.st_size


def reason(error: Exception) -> str:
    """Why a system call failed, without the path that the caller already names."""
    text = getattr(error, "strerror", None) or str(error)
    return text if text.isprintable() else show(text)


def read_exact(fd: int, count: int, offset: int, path: Path) -> bytes:
    """count bytes at offset; short reads are continued, an early end is EIO."""
    parts: list[bytes] = []
    while count > 0:
        try:
            part = os.pread(fd, min(count, 1 << 30), offset)
        except OSError as e:
            raise MosaicError(
                f"{shown_path(path)}: cannot read {count} bytes at {offset}: {reason(e)}",
                code="EIO",
            ) from None
        if not part:
            raise MosaicError(
                f"{shown_path(path)}: the file ends at byte {offset}, {count} more expected",
                code="EIO",
            )
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def pieces(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    """A whole file, so many bytes at a time."""
    fd, end = open_regular(path)
    try:
        for at in range(0, end, size):
            yield read_exact(fd, min(size, end - at), at, path)
    finally:
        os.close(fd)


def read_small(path: Path, limit: int) -> bytes:
    """A whole file of at most limit bytes."""
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise MosaicError(
                f"{shown_path(path)}: {size} bytes, expected at most {limit}", code="EFORMAT"
            )
        return read_exact(fd, size, 0, path)
    finally:
        os.close(fd)


def parse(data: bytes, where: str, hook: Callable[[Pairs], Any] | None = None) -> dict[str, Any]:
    """A JSON object from bytes; EFORMAT otherwise.

    where: what the bytes are, for messages. hook: makes each object from its (key, value) pairs; it
    must refuse keys given twice itself (see unique).
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise MosaicError(
            f"{where} is not UTF-8 (byte {e.start} is 0x{data[e.start]:02x})", code="EFORMAT"
        ) from None
    try:
        value = json.loads(
            text, object_pairs_hook=hook or unique, parse_int=_int, parse_constant=_constant
        )
    except _Refused as e:
        raise MosaicError(f"{where} {e}", code="EFORMAT") from None
    except RecursionError:
        raise MosaicError(f"{where} is nested too deeply", code="EFORMAT") from None
    except ValueError as e:
        detail = (
            f"{e.msg.removesuffix(' at')} at character {e.pos}"
            if isinstance(e, json.JSONDecodeError)
            else str(e)
        )
        raise MosaicError(f"{where} is not JSON: {detail}", code="EFORMAT") from None
    if not isinstance(value, dict):
        raise MosaicError(f"{where} must be a JSON object, got {_kind(value)}", code="EFORMAT")
    return value


def load(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most limit bytes."""
    return parse(read_small(path, limit), shown_path(path))


def unique(pairs: Pairs) -> dict[str, Any]:
    """A dict from pairs; keys given twice are refused."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"has the key {show(key)} twice")
            seen.add(key)
    return out


class _Refused(Exception):
    """A rule of this module, raised from inside the json scanner."""


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"has an integer of {len(digits)} digits, expected at most {MAX_DIGITS}")
    return int(digits)


def _constant(name: str) -> None:
    raise _Refused(f"has the number {name}, which JSON does not allow")


def _kind(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "a number out of range"
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
