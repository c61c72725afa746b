"""Matrices of float32 into the formats of expert packs, and how far a format may round.

All is numpy on one matrix (rows, cols) at a time; bytes are as docs/format.md draws them. Rounding is to
nearest, ties to even, by the scale as it is stored: what decodes is what was rounded to.
"""

from __future__ import annotations

import numpy as np

from mosaic_c.errors import MosaicError
from mosaic_c.pack_format import Format

# Half the distance to the neighbours of each magnitude of E2M1; above 6 whatever is below 8 saturates.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_REACH = np.array([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1, 2], np.float32)
_F8_MAX, _E8M0_BIAS = 448.0, 127
_BF16_MAX = np.float32(2.0**128 - 2.0**119)  # what is above rounds to infinity from half a step on
_FULL = {
    "INT4": 7.0,
    "I8": 127.0,
    "F8_E4M3": _F8_MAX,
}  # the largest code, which scales are made for
_SLACK = 1e-5  # of a scale or value: what float32 loses in w / scale and in code * scale


class Unfit(MosaicError):
    """Values that a format cannot hold; the message names no place, the caller does."""


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of BF16 (uint16) as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Finite float32 as bits of BF16 (uint16)."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Powers of two by their codes; 255 is NaN."""
    powers = np.ldexp(np.float32(1), codes.astype(np.int32) - _E8M0_BIAS).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), powers)


def e4m3_table() -> np.ndarray:
    """(256,) float32: the value of each code of E4M3FN."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, (code & 7).astype(np.float64)
    value = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


E4M3 = e4m3_table()


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored scales or weights (uint8 bytes) as float32, exactly; FP8 codes unscaled."""
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "BF16":
        return bf16(raw.view(np.uint16))
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return e8m0(raw) if dtype == "F8_E8M0" else E4M3[raw]


def spread(scales: np.ndarray, block: tuple[int, int], rows: int, cols: int) -> np.ndarray:
    """The scale of each element; the last blocks may be partial."""
    wide = scales if block[1] == 0 else np.repeat(scales, block[1], axis=1)[:, :cols]
    return wide if block[0] == 1 else np.repeat(wide, block[0], axis=0)[:rows]


def absmax(w: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block."""
    rows, cols = w.shape
    out = np.abs(w)
    if block[0] > 1:
        out = np.maximum.reduceat(out, np.arange(0, rows, block[0]), axis=0)
    return np.maximum.reduceat(out, np.arange(0, cols, block[1] or cols), axis=1)


def quantise(w: np.ndarray, form: Format) -> tuple[bytes, bytes]:
    """(weights, scales) of a float32 matrix as a pack holds them. Raises Unfit."""
    rows, cols = w.shape
    top = absmax(w, form.block if form.scale else (1, 0))
    if not np.isfinite(top).all():
        raise Unfit("a weight is NaN or infinite", "EFORMAT")
    if form.dtype == "BF16":
        if (top > _BF16_MAX).any():
            raise Unfit(f"a weight of {float(top.max()):g} is too large", "EFORMAT")
        return to_bf16(np.ascontiguousarray(w)).tobytes(), b""
    if form.dtype == "F4":
        # OCP MX: the exponent of the largest, less that of 4; frexp's is one more.
        exponent = np.frexp(top)[1].astype(np.int32) - 3 + _E8M0_BIAS
        stored = np.where(top > 0, np.clip(exponent, 0, 254), 0).astype(np.uint8)
        scale = e8m0(stored)
        codes = _pack(_to_e2m1(_divided(w, scale, form, rows, cols)))
    elif form.dtype == "INT4":
        stored, scale = _scales(top / np.float32(7), form)
        q = np.rint(_divided(w, scale, form, rows, cols))
        codes = _pack((np.clip(q, -7, 7) + 8).astype(np.uint8))
    elif form.dtype == "I8":
        stored, scale = _scales(top / np.float32(127), form)
        q = np.rint(_divided(w, scale, form, rows, cols))
        codes = np.clip(q, -127, 127).astype(np.int8)
    elif form.dtype == "F8_E4M3":
        stored, scale = _scales(top / np.float32(_F8_MAX), form)
        codes = _to_e4m3(_divided(w, scale, form, rows, cols))
    else:
        raise ValueError(f"no quantiser for {form}")
    return codes.tobytes(), stored.tobytes()


def _scales(want: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """(as stored, as decoded)."""
    if form.scale == "F32":
        return want, want
    if form.scale == "BF16":
        bits = to_bf16(want)
        return bits, bf16(bits)
    with np.errstate(over="ignore"):
        half = want.astype(np.float16)
    if not np.isfinite(half).all():
        raise Unfit(
            f"weights up to {_FULL[form.dtype] * float(want.max()):g} are too large for F16 scales",
            "EFORMAT",
        )
    return half, half.astype(np.float32)


def _divided(w: np.ndarray, scale: np.ndarray, form: Format, rows: int, cols: int) -> np.ndarray:
    """w / scale; 0 where the scale is 0 (a block of zeros, or of values below what its type holds)."""
    each = spread(scale, form.block, rows, cols)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        out = w / each
    if not scale.all():
        out = np.where(each == 0, np.float32(0), out)
    return out


def _to_e2m1(x: np.ndarray) -> np.ndarray:
    a = np.abs(x)
    code = (x < 0).astype(np.uint8) << 3
    # A tie goes to the even code: the midpoint above an odd one rounds up, above an even one down.
    for middle, up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5, 0)):
        code += a >= middle if up else a > middle
    return code


def _to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bits of E4M3 (uint8); saturates at 448, so never the code of NaN."""
    a = np.minimum(np.abs(x), np.float32(_F8_MAX))
    bits = a.view(np.uint32)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20).astype(np.int32) - (120 << 3)
    small = np.rint(a * np.float32(512)).astype(np.int32)  # 8 is the first normal code
    code = np.where(a < 2.0**-6, small, normal).astype(np.uint8)
    return code | (np.signbit(x).astype(np.uint8) << 7)


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two to a byte, the first in the low half; a row of odd length ends with half a byte."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def rounding(w: np.ndarray, codes: np.ndarray, scale: np.ndarray, form: Format) -> np.ndarray:
    """How far each decoded value may lie from w. codes: decoded but unscaled (rows, cols); scale: decoded, of any
    shape where the format has none."""
    if form.dtype == "BF16":  # half a step: 7 bits of fraction, subnormals below 2^-126
        return np.ldexp(np.float32(w != 0), np.maximum(np.frexp(w)[1] - 1, -126) - 8)
    each = spread(scale, form.block, *w.shape)
    if form.dtype in ("INT4", "I8"):
        reach = np.full_like(codes, 0.5)
    elif form.dtype == "F4":
        reach = _E2M1_REACH[np.searchsorted(_E2M1, np.abs(codes))]
    else:  # half a step: 3 bits of fraction, subnormals below 2^-6
        exponent = np.maximum(np.frexp(codes)[1] - 1, -6)
        reach = np.ldexp(np.float32(0.5), exponent - 3)
    # A scale of fewer bits than float32 can be too small for the largest value, which then saturates.
    full = _FULL.get(form.dtype)
    lost = 0.0
    if full is not None:
        short = np.maximum(absmax(w, form.block) - np.float32(full) * scale, 0)
        lost = spread(short, form.block, *w.shape)
    return reach * each + lost + np.float32(_SLACK) * np.abs(w) + np.float32(2.0**-149)
