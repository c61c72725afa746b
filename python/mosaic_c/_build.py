"""Describes the extension to cffi (API mode): declarations from three headers, all of mosaic_c/*.c and the
benchmarks of tests/c. setup.py adds one of mosaic_c/cuda/ (_cuda_build.py).

The headers are the one source of truth: what lies between their two markers is read as it is, and the
C compiler checks every declaration against it. mosaic_c.h is the engine's. The case table of tests/c
is both the unit test and the benchmark, and ships so that users can run it (`mosaic_c bench kernels`):
bench.h is its face, bench_io.h that of `mosaic_c bench io`.
"""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
BENCH = ("bench", "bench_io", "cases", "cases_moe", "peaks", "yardstick")


def declarations(header: str) -> str:
    text = (ROOT / header).read_text(encoding="ascii")
    return text.split("/* cffi begin */")[1].split("/* cffi end */")[0]


ffibuilder = FFI()
for header in ("mosaic_c/mosaic_c.h", "tests/c/bench.h", "tests/c/bench_io.h"):
    ffibuilder.cdef(declarations(header))
ffibuilder.set_source(
    "mosaic_c._engine",
    '#include "mosaic_c.h"\n#include "bench.h"\n#include "bench_io.h"',
    # setuptools wants paths relative to the folder of setup.py
    sources=[
        *sorted(f"mosaic_c/{path.name}" for path in (ROOT / "mosaic_c").glob("*.c")),
        *(f"tests/c/{name}.c" for name in BENCH),
    ],
    include_dirs=["mosaic_c", "tests/c"],
    define_macros=[("_GNU_SOURCE", None)],
    # -ffp-contract=off and no fast-math: the arithmetic is part of the interface
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall"],
    libraries=["m", "pthread"],
)
