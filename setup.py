"""Builds the one C extension, mosaic_c._engine, with whatever C compiler Python finds, and with CUDA where it is
wanted and there (MOSAIC_CUDA, see python/mosaic_c/_cuda_build.py)."""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

if not sys.platform.startswith("linux"):
    sys.exit(f"mosaic_c runs on Linux (on Windows use WSL2); this is {sys.platform}")

# By its path: the package itself may need what is not installed yet.
spec = importlib.util.spec_from_file_location(
    "_cuda_build", Path(__file__).resolve().parent / "python/mosaic_c/_cuda_build.py"
)
cuda = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = cuda
spec.loader.exec_module(cuda)


class Build(build_ext):
    def build_extension(self, ext):
        folder = Path(self.build_temp)
        try:
            gpu = cuda.parts(os.environ, folder)
        except cuda.BuildError as error:
            sys.exit(f"mosaic_c: {error}")
        if gpu.warning:
            cuda.warn(gpu.warning)
        ext.sources += gpu.sources
        ext.extra_objects += gpu.objects
        ext.define_macros += gpu.macros
        ext.library_dirs += gpu.library_dirs
        ext.libraries += gpu.libraries
        ext.extra_link_args += gpu.link_args
        # another choice than last time builds anew, though no source has changed
        choice = folder / "cuda.txt"
        folder.mkdir(parents=True, exist_ok=True)
        if not choice.exists() or choice.read_text() != repr(gpu):
            choice.write_text(repr(gpu))
        ext.depends += [str(choice), *gpu.objects]
        super().build_extension(ext)


setup(
    package_dir={"": "python"},
    cffi_modules=["python/mosaic_c/_build.py:ffibuilder"],
    cmdclass={"build_ext": Build},
)
