"""The benchmarks that are linked into the extension (tests/c/bench.h, bench_io.h), in the manner of engine.py."""

from __future__ import annotations

import os
from typing import Any

from mosaic_c._engine import ffi, lib
from mosaic_c.engine import IO_MODES, Handle, call, create, text


class Bench(Handle):
    """The kernel benchmark (tests/c/bench.h): creating it measures the limits, a second or two."""

    MIB = lib.MC_BENCH_MIB
    LIMITS = (None, "read", "fma")

    def __init__(self, threads: int, isa: str | None) -> None:
        name = ffi.NULL if isa is None else ffi.new("char[]", isa.encode())
        self._own = create(lib.mc_bench_create, "mc_bench", threads, name)

    def limits(self) -> dict[str, Any]:
        own = self.pin()
        c = lib.mc_bench_limits_of(own[0])
        reads = [{"name": text(r.name), "gbs": r.gbs} for r in c.read[0 : c.n_read]]
        names = ("threads", "read_bytes", "read_gbs", "fma_gflops")
        return {"isa": text(c.isa)} | {n: getattr(c, n) for n in names} | {"reads": reads}

    @staticmethod
    def names() -> list[str]:
        """Of the cases, by their numbers."""
        out, names = ffi.new("char[128]"), []
        for i in range(lib.mc_bench_cases()):
            call(lib.mc_bench_name, i, out, len(out))
            names.append(text(out))
        return names

    def run(self, i: int) -> list[dict[str, Any]]:
        """Case i, timed: rows with the fields of mc_bench_row."""
        rows = ffi.new("mc_bench_row[]", lib.MC_BENCH_ROWS)
        names = (
            "times", "median_s", "min_s", "bytes", "flops", "gbs", "gflops", "read_gbs", "of_read",
            "of_fma", "ratio",
        )  # fmt: skip
        return [
            {"name": text(r.name)}
            | {name: getattr(r, name) for name in names}
            | {"limit": self.LIMITS[r.limit], "s": list(r.s)}
            for r in rows[0 : call(lib.mc_bench_run, self, i, rows)]
        ]


def read_file(
    path: str, mode: str, lanes: int, depth: int, size: int, align: int, seconds: float, seed: int
) -> dict[str, Any]:
    """One run of mc_bench_io: the fields of mc_bench_io_run."""
    opts = {
        "mode": IO_MODES[mode], "lanes": lanes, "depth": depth, "mapped": mode == "mmap", "align": align,
        "size": size, "seconds": seconds, "seed": seed,
    }  # fmt: skip
    out = ffi.new("mc_bench_io_run *")
    call(lib.mc_bench_io, os.fsencode(path), ffi.new("mc_bench_io_opts *", opts), out)
    names = ("reads", "bytes", "cached", "wall_s", "cpu_s", "lanes", "lanes_ran")
    return {name: getattr(out, name) for name in names} | {"direct": bool(out.direct)}
