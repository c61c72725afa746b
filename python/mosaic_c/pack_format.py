"""Formats of matrices in a pack, as a manifest names them: docs/format.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mosaic_c.dtypes import BITS


@dataclass(frozen=True)
class Format:
    """How a matrix is stored, rows one after the other, each from a whole byte on.

    block: rows and columns that share a scale (cols 0: the whole row); scale None: no scales, block (0, 0).
    """

    dtype: str
    scale: str | None = None
    block: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """As people call it: int4-row, int4-g64, mxfp4, fp8, bf16."""
        name = {"INT4": "int4", "I8": "int8", "F4": "mxfp4", "F8_E4M3": "fp8"}.get(
            self.dtype, self.dtype.lower()
        )
        if self.scale is None or self.block in ((128, 128), (1, 32)) and self.dtype[0] == "F":
            return name
        return f"{name}-g{self.block[1]}" if self.block[1] else f"{name}-row"

    def nbytes(self, rows: int, cols: int) -> int:
        return rows * -(-cols * BITS[self.dtype] // 8)

    def scales(self, rows: int, cols: int) -> int:
        """How many scales."""
        if self.scale is None:
            return 0
        return -(-rows // self.block[0]) * -(-cols // (self.block[1] or cols))

    def scale_nbytes(self, rows: int, cols: int) -> int:
        return self.scales(rows, cols) * BITS[self.scale] // 8 if self.scale else 0


_GROUPS = ((1, 0), (1, 32), (1, 64), (1, 128))
# What the engine computes with (mosaic_c/dtype.c): dtype -> scale dtypes, blocks.
ALLOWED: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "F32": ((), ()),
    "BF16": ((), ()),
    "F16": ((), ()),
    "F8_E4M3": (("F32", "BF16", "F8_E8M0"), ((128, 128), (1, 0))),
    "F4": (("F8_E8M0",), ((1, 32),)),
    "INT4": (("F32", "BF16", "F16"), _GROUPS),
    "I8": (("F32", "BF16", "F16"), _GROUPS),
}


def read_format(entry: object, at: str, shape: tuple[int, ...], fail: Callable[..., Any]) -> Format:
    """The format that an entry of a manifest gives to a matrix of this shape; fail(rule, got, code) raises."""
    if not isinstance(entry, dict):
        fail(f"{at}: expected an object", entry)
    dtype, layout = entry.get("dtype"), entry.get("layout")
    if not isinstance(dtype, str) or dtype not in ALLOWED:
        fail(f"{at}: dtype: expected one of {', '.join(ALLOWED)}", dtype, "EUNSUPPORTED")
    if layout != "rows":
        fail(f'{at}: layout: expected "rows"', layout, "EUNSUPPORTED")
    if not _same(entry.get("shape"), shape):
        fail(f"{at}: shape: config.json makes it {list(shape)}", entry.get("shape"))
    scales, blocks = ALLOWED[dtype]
    scale, block = entry.get("scale_dtype"), entry.get("block")
    if not scales:
        if scale is not None or block is not None:
            fail(f"{at}: {dtype} takes no scale_dtype and no block", scale or block)
        return Format(dtype)
    if not isinstance(scale, str) or scale not in scales:
        fail(f"{at}: scale_dtype: {dtype} takes {' or '.join(scales)}", scale)
    for known in blocks:
        if _same(block, known):
            return Format(dtype, scale, known)
    expected = ", ".join(str(list(x)) for x in blocks)
    return fail(f"{at}: block: {dtype} takes one of {expected} (0: the whole row)", block)


def _same(value: object, wanted: tuple[int, ...]) -> bool:
    """A JSON list of just these integers (true is no 1)."""
    return isinstance(value, list) and (*value,) == wanted and all(type(x) is int for x in value)


def describe(form: Format, shape: tuple[int, ...]) -> dict[str, Any]:
    """The entry: read_format gives the format back."""
    scaled = {"scale_dtype": form.scale, "block": list(form.block)} if form.scale else {}
    return {"dtype": form.dtype, "shape": list(shape), "layout": "rows"} | scaled
