"""The tensors beside the experts in the manifest of a pack: how each is stored, and its CRC.

Formats that safetensors has no type for lie in its files as types that it has: INT4 as U8, two to a byte. A scale is a
tensor of its own there, NAME_scale_inv; here it belongs to the tensor it scales. Everything read is hostile input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mosaic_c.dtypes import SAFETENSORS
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import pieces, show, shown_path
from mosaic_c.pack_format import Format, describe, read_format

FEATURE = "tensors"  # of a manifest that lists them, the CRCs of TEXTS and its own
SCALE = "_scale_inv"  # added to the name of a tensor that has scales
SEAL = "manifest_crc32c"
TEXTS = ("config.json", "tokenizer.json")  # a digit that flips there is wrong text as well


def crc32c(data: Any, crc: int = 0) -> int:
    from mosaic_c import engine_pure  # folders are looked at where the extension does not load, too

    return engine_pure.crc32c(data, crc)


@dataclass(frozen=True)
class Stored:
    """form, shape: what the values are; crc: of the tensor's bytes, then of its scales'; rows: of the embedding,
    the CRC of each row (uint32), since rows are read one by one."""

    form: Format
    shape: tuple[int, ...]
    crc: int = 0
    rows: np.ndarray | None = None

    @property
    def header(self) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) in a safetensors file."""
        if self.form.dtype != "INT4":
            return self.form.dtype, self.shape
        return "U8", (*self.shape[:-1], -(-self.shape[-1] // 2))

    @property
    def scale_header(self) -> tuple[str, tuple[int, ...]] | None:
        """The same of its scales."""
        if self.form.scale is None:
            return None
        (rows, cols), block = self.shape, self.form.block
        return self.form.scale, (-(-rows // block[0]), -(-cols // (block[1] or cols)))

    @property
    def nbytes(self) -> int:
        """Of a matrix, scales too."""
        rows, cols = self.shape
        return self.form.nbytes(rows, cols) + self.form.scale_nbytes(rows, cols)


# ---- reading -------------------------------------------------------------------------------------


def read_tensors(entries: object, fail: Callable[..., Any]) -> dict[str, Stored]:
    """Of a manifest's `tensors`; fail(rule, got) raises."""
    if not isinstance(entries, dict):
        fail("tensors: expected an object of tensor names", entries)
    return {name: _stored(x, f"tensors: {show(name)}", fail) for name, x in entries.items()}


def read_texts(texts: object, fail: Callable[..., Any]) -> dict[str, int]:
    """Name -> CRC, of a manifest's `texts`."""
    if not isinstance(texts, dict) or not texts.keys() <= set(TEXTS) or TEXTS[0] not in texts:
        fail(f"texts: expected an object of {' and '.join(TEXTS)}", texts)
    crcs = dict[str, int]()
    for name, digits in texts.items():
        if (crc := hex_crcs(digits, 1)) is None:
            fail(f"texts: {show(name)}: expected 8 hex digits", digits)
        crcs[name] = int(crc[0])
    return crcs


def _stored(entry: object, at: str, fail: Callable[..., Any]) -> Stored:
    if not isinstance(entry, dict):
        fail(f"{at}: expected an object", entry)
    shape, dtype = entry.get("shape"), entry.get("dtype")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        fail(f"{at}: shape: expected a list of whole numbers", shape)
    plain = entry.get("scale_dtype") is None and entry.get("block") is None
    if plain and isinstance(dtype, str) and dtype in SAFETENSORS and entry.get("layout") == "rows":
        form = Format(
            dtype
        )  # of any type and rank: what the engine computes with is bind.py's to say
    else:
        form = read_format(entry, at, tuple(shape), fail)
        if len(shape) != 2:
            fail(f"{at}: shape: {form.name} needs a matrix", shape)
    crc, rows = hex_crcs(entry.get("crc32c"), 1), entry.get("rows_crc32c")
    if crc is None:
        fail(f"{at}: crc32c: expected 8 hex digits", entry.get("crc32c"))
    each = None if rows is None else hex_crcs(rows, shape[0] if len(shape) == 2 else 0)
    if rows is not None and each is None:
        fail(f"{at}: rows_crc32c: expected 8 hex digits for each row of a matrix", rows)
    return Stored(form, tuple(shape), int(crc[0]), each)


def hex_crcs(digits: object, count: int) -> np.ndarray | None:
    """(count,) uint32 of 8 lower-case hex digits each; None: not that."""
    if not isinstance(digits, str) or not re.fullmatch(r"[0-9a-f]*", digits):
        return None
    if len(digits) != 8 * count:
        return None
    return np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)


def check_headers(
    tensors: Mapping[str, Any], stored: Mapping[str, Stored], folder: Path, manifest: str
) -> None:
    """What the safetensors files hold is what the manifest lists, in just these types and shapes."""
    scales = set[str]()
    for name, x in stored.items():
        for key, want in ((name, x.header), (name + SCALE, x.scale_header)):
            if want is None:
                continue
            if key not in tensors:
                _refuse(
                    folder, key, f"{manifest} lists it, the safetensors files have no such tensor"
                )
            got = tensors[key]
            if (got.dtype, got.shape) != want:
                _refuse(
                    folder, key, f"{manifest} makes it {want[0]} {list(want[1])}, got {got.dtype} {list(got.shape)}"
                )  # fmt: skip
            if key != name:
                scales.add(key)
    for name in tensors:
        if (name in scales) == (name in stored):
            _refuse(folder, name, f"{manifest} lists it {'twice' if name in scales else 'nowhere'}")


def _refuse(folder: Path, name: str, text: str) -> NoReturn:
    raise MosaicError(f"{shown_path(folder)}: tensor {show(name)}: {text}", "EFORMAT")


def check_texts(folder: Path, texts: Mapping[str, int]) -> None:
    for name, crc in texts.items():
        got = file_crc(folder / name)
        if got != crc:
            raise MosaicError(
                f"{shown_path(folder / name)}: not as it was when the pack was made: CRC-32C expected {crc:08x}, got "
                f"{got:08x}; restore the file, or convert again", "EFORMAT",
            )  # fmt: skip


def file_crc(path: Path) -> int:
    crc = 0
    for part in pieces(path):
        crc = crc32c(part, crc)
    return crc


def check_seal(raw: bytes, m: Mapping[str, Any], where: str) -> None:
    """The CRC of the manifest itself: of its bytes, with 0 for each digit of the CRC."""
    digits = m.get(SEAL)
    crc = hex_crcs(digits, 1)
    text = f'"{SEAL}": "{digits}"'.encode("utf-8", "replace")
    if crc is None or raw.count(text) != 1:
        raise MosaicError(f"{where}: {SEAL}: expected 8 hex digits, got {show(digits)}", "EFORMAT")
    got = crc32c(raw.replace(text, f'"{SEAL}": "{0:08x}"'.encode()))
    if got != crc[0]:
        raise MosaicError(
            f"{where}: damaged or edited: CRC-32C expected {digits}, got {got:08x}; restore the file", "EFORMAT"
        )  # fmt: skip


# ---- writing -------------------------------------------------------------------------------------


def entries(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """`tensors` of a manifest; read_tensors gives them back."""
    return {name: _entry(x) for name, x in stored.items()}


def _entry(x: Stored) -> dict[str, Any]:
    rows = {} if x.rows is None else {"rows_crc32c": x.rows.astype(">u4").tobytes().hex()}
    return describe(x.form, x.shape) | {"crc32c": f"{x.crc:08x}"} | rows


def seal(text: bytes) -> bytes:
    """A manifest whose SEAL is 8 zeros, with its CRC in their place."""
    zeros = f'"{SEAL}": "{0:08x}"'.encode()
    assert text.count(zeros) == 1
    return text.replace(zeros, f'"{SEAL}": "{crc32c(text):08x}"'.encode())
