"""Describes the extension to cffi (API mode): declarations from the public header, all of mosaic_c/*.c.

The header is the one source of truth: what lies between its two markers is read as it is, and the C
compiler checks every declaration against it.
"""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "mosaic_c"


def declarations() -> str:
    text = (ENGINE / "mosaic_c.h").read_text(encoding="ascii")
    return text.split("/* cffi begin */")[1].split("/* cffi end */")[0]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "mosaic_c._engine",
    '#include "mosaic_c.h"',
    # setuptools wants paths relative to the folder of setup.py
    sources=[*sorted(f"mosaic_c/{path.name}" for path in ENGINE.glob("*.c")), "mosaic_c/cuda/stub.c"],
    include_dirs=["mosaic_c"],
    define_macros=[("_GNU_SOURCE", None)],
    # -ffp-contract=off and no fast-math: the arithmetic is part of the interface
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall"],
    libraries=["m", "pthread"],
)
