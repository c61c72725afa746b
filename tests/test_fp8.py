"""FP8 E4M3 against ml_dtypes, value by value, and through every kernel set."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import engine, engine_pure

CODES = np.arange(256, dtype=np.uint8)
VALUES = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def equal(a, b):
    """Bits, except that any NaN equals any NaN."""
    return np.all((a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b)))


def blocks(scale, rows, cols):
    return np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[:rows, :cols]


def test_all_codes():
    assert np.isnan(VALUES[[0x7F, 0xFF]]).all() and np.isnan(VALUES).sum() == 2
    assert equal(engine_pure.decode("F8_E4M3", CODES.tobytes(), 256), VALUES)
    assert np.signbit(engine_pure.decode("F8_E4M3", b"\x80", 1)[0])
    assert engine_pure.decode("F8_E4M3", b"\x01\x07", 2).tolist() == [2.0**-9, 7 * 2.0**-9]


@pytest.mark.parametrize("isa", engine.isas())
@pytest.mark.parametrize("n_tok", [1, 2, 5])
def test_all_codes_through_gemv_and_gemm(isa, n_tok):
    """Row r holds code r alone, at column r: the products are the values themselves (times a power of two)."""
    w = np.zeros((256, 256), np.uint8)
    w[CODES, CODES] = CODES
    scale = np.array([[1, 2], [0.5, 4]], np.float32)
    x = np.tile(np.float32([1, -2, 0.25, 8, 1])[:n_tok, None], (1, 256))
    with np.errstate(invalid="ignore"):
        want = VALUES * np.diag(blocks(scale, 256, 256)) * x
    for dtype, raw in (
        ("F32", scale.tobytes()),
        ("BF16", scale.astype(ml_dtypes.bfloat16).tobytes()),
    ):
        got = engine_pure.gemm(isa, "F8_E4M3", w.tobytes(), 256, 256, x, dtype, raw)
        # +0 + -0 is +0 in a sum, so a code -0 gives +0 here
        assert equal(got + np.float32(0), want + np.float32(0))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    n_tok=st.integers(1, 6),
    dtype=st.sampled_from(["F8_E4M3", "BF16", "F16", "F32"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_near_float64_and_equal_in_every_kernel_set(rows, cols, n_tok, dtype, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tok, cols), np.float32)
    scale, raw_scale = np.ones((1, 1), np.float32), None
    if dtype == "F8_E4M3":
        codes = rng.integers(0, 256, (rows, cols), np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        raw, w = codes.tobytes(), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scale = rng.uniform(0.01, 2, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
        raw_scale = scale.tobytes()
    else:
        kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
        stored = rng.standard_normal((rows, cols)).astype(kind)
        raw, w = stored.tobytes(), stored.astype(np.float64)
    full = w * (blocks(scale, rows, cols) if dtype == "F8_E4M3" else 1)
    want = x.astype(np.float64) @ full.T
    bound = 1e-6 * (np.abs(x) @ np.abs(full).T) + 1e-30
    results = [
        engine_pure.gemm(isa, dtype, raw, rows, cols, x, "F32", raw_scale) for isa in engine.isas()
    ]
    for got in results:
        assert equal(got, results[0])
        assert (np.abs(got - want) <= bound).all()
