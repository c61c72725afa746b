"""Quantisers: every value is the nearest of its grid, by the engine's own decode and by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers_checkpoint import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import engine_pure, quantise
from mosaic_c.convert import DENSE, FORMATS
from mosaic_c.pack_format import Format

ALL = {form.name: form for form in (*FORMATS.values(), *DENSE.values())}
SCALED = tuple(name for name, form in ALL.items() if form.scale)


def round_trip(w: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """(codes decoded by the engine, scales of the blocks)."""
    rows, cols = w.shape
    codes, scales = quantise.quantise(w, form)
    assert (len(codes), len(scales)) == (form.nbytes(rows, cols), form.scale_nbytes(rows, cols))
    wide = len(codes) // rows * (1 if form.dtype in ("F8_E4M3", "I8") else 2)
    values = engine_pure.decode(form.dtype, codes, rows * wide).reshape(rows, wide)[:, :cols]
    scale = engine_pure.decode(form.scale, scales, form.scales(rows, cols))
    return values, scale.reshape(-(-rows // form.block[0]), -1)


def nearest(w: np.ndarray, grid: np.ndarray, each: np.ndarray) -> np.ndarray:
    """The least distance of w from any value of a grid."""
    grid = np.unique(np.concatenate((grid, -grid))).astype(np.float64)
    x = w.astype(np.float64) / each
    i = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    return np.minimum(np.abs(x - grid[i - 1]), np.abs(x - grid[i])) * each


E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
GRIDS = {
    "INT4": np.arange(8.0),
    "I8": np.arange(128.0),
    "F4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "F8_E4M3": E4M3,
}


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(SCALED),
    rows=st.integers(1, 140),
    cols=st.integers(1, 300),
    size=st.floats(-30, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_value_is_the_nearest_of_its_grid(name, rows, cols, size, seed):
    form, rng = ALL[name], np.random.default_rng(seed)
    w = (rng.standard_normal((rows, cols)) * 10.0**size).astype(np.float32)
    w[rng.random(w.shape) < 0.1] = 0
    w[: rows // 3] *= np.float32(1e-6)
    codes, scale = round_trip(w, form)
    each = np.broadcast_to(quantise.spread(scale, form.block, rows, cols), w.shape).astype(
        np.float64
    )
    got = codes.astype(np.float64) * each
    assert (np.abs(got - w) <= quantise.rounding(w, codes, scale, form)).all()
    some = each > (1e-30 if form.scale == "F32" else 0)
    best = nearest(w, GRIDS[form.dtype], np.where(each > 0, each, 1))
    assert (np.abs(got - w)[some] <= (best + 1e-6 * np.abs(w))[some]).all()
    assert (got[each == 0] == 0).all() and (got[w == 0] == 0).all()
    top = quantise.absmax(w, form.block)
    full = {"INT4": 7, "I8": 127, "F8_E4M3": 448}.get(form.dtype)
    if full and form.scale == "F32":
        assert np.allclose(scale * np.float32(full), top, rtol=1e-6, atol=1e-42)
    elif form.dtype == "F4":
        usable = (top > 1e-30) & (scale > 0)
        assert (4 * scale <= top)[usable].all() and (top < 8 * scale)[usable].all()


def test_mxfp4_by_hand():
    """OCP MX: ties to the even code, saturation above 6, the exponent of the largest less two."""
    row = np.array(
        [4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.01, 7.9, -0.3, -7, 0.26, 0], np.float32
    )
    w = np.stack([row, row * np.float32(2.0**-20), np.zeros(14, np.float32)])
    codes, scale = round_trip(w, FORMATS["mxfp4"])
    want = [4, 0, 1, 1, 2, 2, 4, 4, 6, 6, -0.5, -6, 0.5, 0]
    assert codes[0].tolist() == codes[1].tolist() == want and not codes[2].any()
    assert scale[:2, 0].tolist() == [1, 2.0**-20]


def test_e4m3_of_every_half_way():
    """Against ml_dtypes, which rounds ties to even too."""
    known = np.concatenate((E4M3, (E4M3[1:] + E4M3[:-1]) / 2)).astype(np.float32)
    x = np.concatenate(
        (known, np.nextafter(known, np.float32(0)), np.nextafter(known, np.float32(448)))
    )
    x = np.minimum(np.concatenate((x, -x)), 448)
    want = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert quantise._to_e4m3(x).tolist() == want.tolist()
    assert quantise._to_e4m3(np.float32([1e9, -np.inf])).tolist() == [0x7E, 0xFE]
    assert np.array_equal(quantise.E4M3[:127], E4M3)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bf16_is_that_of_ml_dtypes(values):
    """Rounded once, ties to even; what would be infinite is refused."""
    w = np.array([values], np.float32)
    want = w.astype(ml_dtypes.bfloat16)
    if np.isinf(want.astype(np.float32)).any():
        refusal(lambda: quantise.quantise(w, ALL["bf16"]), "is too large", code="EFORMAT")
        return
    codes, scales = quantise.quantise(w, ALL["bf16"])
    assert (codes, scales) == (want.tobytes(), b"")
    values = engine_pure.decode("BF16", codes, w.size).reshape(w.shape)
    off = np.abs(values.astype(np.float64) - w)
    assert (off <= quantise.rounding(w, values, values, ALL["bf16"])).all()


@pytest.mark.parametrize("name", tuple(ALL))
def test_what_no_format_holds(name):
    for bad in (np.nan, np.inf, -np.inf):
        w = np.ones((3, 40), np.float32)
        w[1, 33] = bad
        refusal(lambda w=w: quantise.quantise(w, ALL[name]), "NaN or infinite", code="EFORMAT")
    if ALL[name].scale == "F16":
        refusal(
            lambda: quantise.quantise(np.full((1, 5), 1e7, np.float32), ALL[name]),
            "too large for F16",
        )


def test_int4_by_row_of_normal_values():
    """The error that design.md names for normal data: 11.7 % of the values' RMS on 32x128."""
    w = np.random.default_rng(1).standard_normal((32, 128)).astype(np.float32)
    codes, scale = round_trip(w, FORMATS["int4-row"])
    error = np.sqrt(np.mean((codes * scale - w) ** 2) / np.mean(w**2))
    assert 0.10 < error < 0.13
