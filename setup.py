"""Builds the one C extension, mosaic_c._engine, with whatever C compiler Python finds."""

import sys

from setuptools import setup

if not sys.platform.startswith("linux"):
    sys.exit(f"mosaic_c runs on Linux (on Windows use WSL2); this is {sys.platform}")

setup(
    package_dir={"": "python"},
    cffi_modules=["python/mosaic_c/_build.py:ffibuilder"],
)
