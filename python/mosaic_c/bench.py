"""The kernel benchmark: the case table of tests/c timed by the engine, the machine it ran on, and a test
of int4 against a known answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c import engine, engine_bench, engine_pure
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import show
from mosaic_c.limits import default_threads, format_size, parse_size, read_limits, smallest_limit


def machine(cache: str | os.PathLike[str] = "/sys/devices/system/cpu/cpu0/cache") -> dict[str, Any]:
    """Features and cores this process may use, and the caches of CPU 0 in bytes (None: unknown)."""
    sizes: dict[int, int] = {}
    for folder in Path(cache).glob("index*"):
        try:
            kind = (folder / "type").read_text(encoding="ascii").strip()
            if kind != "Instruction":
                level = int((folder / "level").read_text(encoding="ascii"))
                sizes[level] = parse_size((folder / "size").read_text(encoding="ascii").strip())
        except (OSError, ValueError, MosaicError):
            continue
    return {
        "cpu": engine.cpu(),
        "isas": engine.isas(),
        "cores": default_threads(read_limits()),
        "l2_bytes": sizes.get(2),
        "l3_bytes": sizes.get(3),
    }


def kernels(
    threads: int | None = None,
    isa: str | None = None,
    only: str = "",
    start: Callable[[dict[str, Any]], None] = lambda limits: None,
    progress: Callable[[str, int, int], None] = lambda name, i, n: None,
    row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """{"limits": ..., "cases": [...]} of the cases whose name holds `only`: one call of C for each, so
    that an interrupt waits for one case at most. start gets the limits, progress the name of each case
    before it runs, row each row (Bench.run) as it comes."""
    threads = read_threads(threads)
    if isa is not None and isa not in engine.isas():
        raise UsageError(f"--isa {show(isa)}: this CPU runs: {' '.join(engine.isas())}")
    picked = [(i, name) for i, name in enumerate(engine_bench.Bench.names()) if only in name]
    if not picked:
        raise UsageError(
            f'--only {show(only)}: no timed case has it in its name, such as "gemm F8_E4M3"'
        )
    need, found = engine_bench.Bench.MIB << 20, smallest_limit(read_limits())
    if found is not None and found[0] < need:
        raise MosaicError(
            f"the benchmark needs {format_size(need)}, far more than caches hold; "
            f"{format_size(found[0])} {found[1]}",
            "ENOMEM",
        )
    bench = engine_bench.Bench(threads, isa)
    limits = bench.limits()
    start(limits)
    cases = []
    for done, (i, name) in enumerate(picked):
        progress(name, done, len(picked))
        for found_row in bench.run(i):
            cases.append(found_row)
            row(found_row)
    bench.close()
    return {"limits": limits, "cases": cases}


def read_threads(threads: int | None) -> int:
    if threads is None:
        return default_threads(read_limits())
    if not 1 <= threads <= 256:
        raise UsageError(f"--threads {threads} is out of range: expected 1 to 256")
    return threads


# ---- int4 ----

_ROWS, _COLS = 32, 128


def _quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int4 by row: (codes 0..15 worth -8..7, scale = absmax / 7 float32)."""
    scale = (np.abs(w).max(axis=1) / np.float32(7)).astype(np.float32)
    return (np.rint(w / scale[:, None]).clip(-8, 7) + 8).astype(np.uint8), scale


def int4_error(w: np.ndarray, isa: str | None = None) -> dict[str, float]:
    """What int4 by row does to weights (rows, cols): decoded by the engine's decode, and as the engine's
    product with the identity; `product` is the largest difference of the two, of absmax."""
    codes, scale = _quantise(w)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).tobytes()
    values = engine_pure.decode("INT4", packed, w.size).reshape(w.shape) * scale[:, None]
    product = engine_pure.gemm(
        isa or engine.isas()[0], "INT4", packed, *w.shape, np.eye(w.shape[1], dtype=np.float32),
        "F32", scale.tobytes(), (1, 0),
    ).T  # fmt: skip
    a, b = w.astype(np.float64).ravel(), values.astype(np.float64).ravel()
    return {
        "relative_rms": float(np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2))),
        "cosine": float(a @ b / np.sqrt((a @ a) * (b @ b))),
        "values_per_byte": w.size / len(packed),
        "values_per_byte_with_scales": w.size / (len(packed) + scale.nbytes),
        "product": float(np.abs(product - values).max() / np.abs(values).max()),
    }


def self_test(isa: str | None = None, matrices: int = 64) -> dict[str, dict[str, float]]:
    """int4_error of 32x128 random data by their distribution, the mean of so many matrices.

    A step of absmax / 7 errs by absmax / (7 sqrt 12) RMS, so the relative error is 4.1 % times the crest
    factor absmax / RMS of a row: 1.7 for uniform data, 2.8 for 128 normal ones, 1.4 for sines."""
    rng = np.random.default_rng(0)
    shape = (_ROWS, _COLS)
    draws: dict[str, Callable[[], np.ndarray]] = {
        "normal": lambda: rng.standard_normal(shape, np.float32),
        "uniform": lambda: rng.random(shape, np.float32) * 2 - 1,
        "sine": lambda: np.sin(rng.random(shape, np.float32) * np.float32(2 * np.pi)),
    }
    out = {}
    for name, draw in draws.items():
        errors = [int4_error(draw(), isa) for _ in range(matrices)]
        out[name] = {key: float(np.mean([e[key] for e in errors])) for key in errors[0]}
    return out
