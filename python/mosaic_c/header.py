"""The header of one safetensors file: parsed, and every rule of the format checked.

    8 bytes   little-endian length n of the header
    n bytes   JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    the rest  the tensors, back to back: no overlap, no hole, nothing after the last

Each rule has its own message: file, tensor, expected, got. Knows nothing of models.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mosaic_c.dtypes import BITS, SAFETENSORS
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import Pairs, open_regular, parse, read_exact, show, shown_path, unique

MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
MAX_BYTES = 2**63 - 1

DTYPES = tuple(SAFETENSORS)
_DTYPE_CODE = {name: i for i, name in enumerate(DTYPES)}
_ENTRY = frozenset(("dtype", "shape", "data_offsets"))


@dataclass
class Columns:
    """The tensors of one or more files, a column per property; row i belongs to names[i].

    dtype is an index into DTYPES, shape one into shapes, begin a byte offset in the file.
    """

    names: list[str] = field(default_factory=list)
    dtype: array[int] = field(default_factory=lambda: array("b"))
    shape: array[int] = field(default_factory=lambda: array("i"))
    begin: array[int] = field(default_factory=lambda: array("q"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    shapes: dict[tuple[int, ...], int] = field(default_factory=dict)


def read_header(path: Path, into: Columns) -> tuple[int, int]:
    """Appends the tensors of a file to the columns; (how many, bytes of the file).

    Raises MosaicError, EIO for a file cut short and EFORMAT for a broken rule.
    """
    where = shown_path(path)
    fd, size = open_regular(path)
    try:
        # No readahead, and nothing left behind: pages of the shards count towards a memory budget.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        text = _header_bytes(fd, size, path, where)
        os.posix_fadvise(fd, 0, 8 + len(text) + os.sysconf("SC_PAGESIZE"), os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    start = 8 + len(text)
    entries = parse(text, f"{where}: the header", _compact)
    del text
    _check_metadata(entries.pop("__metadata__", None), where)
    first = len(into.names)
    for name, entry in entries.items():
        if type(entry) is not tuple:
            _fail(where, name, "needs exactly dtype, shape and data_offsets", entry)
        _append(name, entry, start, into, where)
    _check_layout(into, first, start, size, where)
    return len(into.names) - first, size


def _header_bytes(fd: int, size: int, path: Path, where: str) -> bytes:
    if size < 8:
        raise MosaicError(
            f"{where}: not a safetensors file: {size} bytes, expected a header of 8 bytes or more; "
            "download it again",
            code="EIO",
        )
    lead = read_exact(fd, 8, 0, path)
    if lead == b"version ":
        raise MosaicError(
            f"{where}: a Git LFS pointer instead of the data ({size} bytes); run `git lfs pull`",
            code="EFORMAT",
        )
    n = int.from_bytes(lead, "little")
    if n > MAX_HEADER:
        raise MosaicError(
            f"{where}: header too large: it claims {n} bytes, expected at most {MAX_HEADER}; "
            "not a safetensors file?",
            code="EFORMAT",
        )
    if n > size - 8:
        raise MosaicError(
            f"{where}: truncated inside its header: expected at least {8 + n} bytes, got {size}; "
            "resume the download",
            code="EIO",
        )
    return read_exact(fd, n, 8, path)


def _compact(pairs: Pairs) -> Any:
    """JSON objects of the header; a tensor's becomes (dtype, shape, data_offsets) at once."""
    out = unique(pairs)
    if len(out) == 3 and out.keys() == _ENTRY and type(out["dtype"]) not in (tuple, dict):
        return out["dtype"], out["shape"], out["data_offsets"]
    return out


def _check_metadata(value: object, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise MosaicError(
            f"{where}: __metadata__ must map strings to strings, got {show(value)}",
            code="EFORMAT",
        )


def _append(name: str, entry: tuple[Any, Any, Any], start: int, into: Columns, where: str) -> None:
    """Checks one tensor by itself: types, dtype, shape, and that its size equals its byte range."""
    dtype, shape, span = entry
    code = _DTYPE_CODE.get(dtype) if type(dtype) is str else None
    if code is None:
        _fail(where, name, f"unknown dtype, expected one of {', '.join(DTYPES)}", dtype)
    if type(shape) is not list or any(type(d) is not int or d < 0 for d in shape):
        _fail(where, name, "shape must be a list of non-negative integers", shape)
    if (
        type(span) is not list
        or len(span) != 2
        or type(span[0]) is not int
        or type(span[1]) is not int
        or not 0 <= span[0] <= span[1]
    ):
        _fail(where, name, "data_offsets must be two integers, 0 <= begin <= end", span)
    begin, end = span
    if start + end > MAX_BYTES:
        _fail(where, name, f"data_offsets overflow, expected at most {MAX_BYTES}", span)
    count = 1
    for d in shape:
        count *= d
        if count > MAX_BYTES:
            _fail(where, name, f"shape overflows, expected at most {MAX_BYTES} elements", shape)
    bits = count * BITS[dtype]
    if bits != 8 * (end - begin):
        _fail(
            where,
            name,
            f"{dtype} {list(shape)} takes {-(-bits // 8)} bytes, data_offsets give",
            end - begin,
        )
    into.names.append(name)
    into.dtype.append(code)
    into.shape.append(into.shapes.setdefault(tuple(shape), len(into.shapes)))
    into.begin.append(start + begin)
    into.nbytes.append(end - begin)


def _check_layout(c: Columns, first: int, start: int, size: int, where: str) -> None:
    """Rows first.. together fill the file from byte start to its end, without overlap or hole."""
    begin = np.array(c.begin[first:], np.int64)
    end = begin + np.array(c.nbytes[first:], np.int64)
    order = np.lexsort((end, begin))
    begin, end = begin[order], end[order]
    before = np.concatenate(([start], end[:-1])) if len(end) else end
    bad = np.flatnonzero(begin != before)
    if len(bad):
        i = int(bad[0])
        name = c.names[first + int(order[i])]
        if begin[i] < before[i]:
            other = c.names[first + int(order[i - 1])]
            raise MosaicError(
                f"{where}: tensors {show(other)} and {show(name)} overlap: the second must begin "
                f"at byte {int(before[i]) - start} of the data, got {int(begin[i]) - start}",
                code="EFORMAT",
            )
        raise MosaicError(
            f"{where}: hole before tensor {show(name)}: it must begin at byte "
            f"{int(before[i]) - start} of the data, got {int(begin[i]) - start}",
            code="EFORMAT",
        )
    expected = int(end[-1]) if len(end) else start
    if expected > size:
        raise MosaicError(
            f"{where}: truncated: its header expects {expected} bytes, got {size} "
            f"({expected - size} missing); resume the download",
            code="EIO",
        )
    if expected < size:
        raise MosaicError(
            f"{where}: {size - expected} bytes after the last tensor: its header expects "
            f"{expected} bytes in all, got {size}",
            code="EFORMAT",
        )


def _fail(where: str, name: str, rule: str, got: object) -> NoReturn:
    raise MosaicError(f"{where}: tensor {show(name)}: {rule}, got {show(got)}", code="EFORMAT")
