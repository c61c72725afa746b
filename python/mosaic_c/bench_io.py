"""The disk benchmark: the engine's own reader at random places of a large file, all ways of reading in turns."""

from __future__ import annotations

import os
import shutil
import stat
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c import engine, engine_bench
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import show, shown_path
from mosaic_c.limits import format_size, read_limits, smallest_limit
from mosaic_c.pack import largest_file

BLOCK = 4096
MAX_LANES, MAX_DEPTH = 64, 1024
FEW = 16  # a file must have room for so many reads, or the disk's own cache answers
_CHUNK = 32 << 20
_SPARE = 64 << 20  # left free on the disk


@dataclass(frozen=True)
class Disk:
    """What is read: a path the engine can open, its name for people, its size in bytes."""

    path: str
    name: str
    size: int
    temporary: bool


def check_options(
    modes: Sequence[str],
    lanes: Sequence[int],
    depth: int | None,
    size: int,
    seconds: float,
    runs: int,
) -> None:
    """UsageError for what makes no sense."""
    for mode in modes:
        if mode not in engine.IO_MODES:
            raise UsageError(f"--io {show(mode)}: expected some of {','.join(engine.IO_MODES)}")
    if not modes or not lanes:
        raise UsageError("--io, --lanes: expected at least one of each")
    for n in lanes:
        if not 1 <= n <= MAX_LANES:
            raise UsageError(f"--lanes {n} is out of range: expected 1 to {MAX_LANES}")
    if depth is not None and not max(lanes) <= depth <= MAX_DEPTH:
        raise UsageError(
            f"--depth {depth} is out of range: expected {max(lanes)} (a read for every lane) to {MAX_DEPTH}"
        )
    if size < BLOCK or size % BLOCK:
        raise UsageError(
            f"--size {size}: expected a multiple of {BLOCK} bytes, what direct reads take, such as 3M"
        )
    if not 0 < seconds <= 60:
        raise UsageError(f"--seconds {seconds:g} is out of range: expected more than 0, at most 60")
    if not 1 <= runs <= 99:
        raise UsageError(f"--runs {runs} is out of range: expected 1 to 99")
    need = (max(lanes) + 1 if depth is None else depth) * size
    found = smallest_limit(read_limits())
    if found is not None and found[0] < need + _SPARE:
        raise MosaicError(
            f"{format_size(need)} of memory to read into do not fit: {format_size(found[0])} {found[1]}; "
            "give a smaller --size or --depth",
            "ENOMEM",
        )


@contextmanager
def disk(
    path: str | os.PathLike[str],
    file_size: int,
    size: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Disk]:
    """The file to read: path itself, the largest file of weights in a folder, or a temporary one in it."""
    path = Path(path)
    if path.is_dir():
        largest = largest_file(path)
        if largest is None:
            with _temporary(path, file_size, size, progress) as found:
                yield found
            return
        path = largest
    try:
        st = os.stat(path)
    except OSError as error:
        raise MosaicError(f"{path}: {error.strerror}", "EIO") from None
    if not stat.S_ISREG(st.st_mode):
        raise UsageError(f"{path}: expected a file or a folder")
    _check_size(str(path), st.st_size, size)
    if st.st_blocks * 512 < 0.99 * st.st_size:
        raise MosaicError(
            f"{path}: only {format_size(st.st_blocks * 512)} of {format_size(st.st_size)} are on the disk "
            "(holes, or compressed): reads of it would say nothing about the disk",
            "EINVAL",
        )
    yield Disk(str(path), str(path), st.st_size, False)


def _check_size(name: str, have: int, size: int) -> None:
    if have < FEW * size:
        raise UsageError(
            f"{name}: {format_size(have)} are too few for reads of {format_size(size)}: expected at least "
            f"{format_size(FEW * size)}; give a larger file (--file-size for a temporary one) or a smaller --size"
        )


@contextmanager
def _temporary(
    folder: Path, bytes_: int, size: int, progress: Callable[[int, int], None]
) -> Iterator[Disk]:
    """A file of random bytes that has no name, so that nothing can leave it behind: it goes when this process
    ends, however that happens."""
    name = f"a temporary file in {shown_path(folder)}"
    _check_size(name, bytes_, size)
    free = shutil.disk_usage(folder).free
    if free < bytes_ + _SPARE:
        raise MosaicError(
            f"not enough disk space: {name} takes {format_size(bytes_)}, {format_size(free)} are free; choose "
            "another folder or a smaller --file-size",
            "ENOSPC",
        )
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)).fileno()
            _fill(fd, bytes_, progress)
        except OSError as error:
            raise MosaicError(f"{name}: {error.strerror}", "EIO") from None
        yield Disk(f"/proc/self/fd/{fd}", name, bytes_, True)


def _fill(fd: int, bytes_: int, progress: Callable[[int, int], None]) -> None:
    """Random bytes, on the disk and out of the page cache."""
    rng, done = np.random.default_rng(), 0
    while done < bytes_:
        left = memoryview(rng.bytes(min(_CHUNK, bytes_ - done)))
        while left:
            n = os.write(fd, left)
            left, done = left[n:], done + n
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        progress(done, bytes_)


def usable(file: Disk, modes: Sequence[str], size: int) -> tuple[list[str], list[str]]:
    """(modes that this system can do, why it cannot do the others)."""
    good, reasons = [], []
    for mode in modes:
        try:
            engine_bench.read_file(file.path, mode, 1, 1, size, size, 1e-9, 0)
            good.append(mode)
        except MosaicError as error:
            if error.code != "ESYS":
                raise
            reasons.append(f"{mode} was left out: {error}")
    return good, reasons


def measure(
    file: Disk,
    modes: Sequence[str],
    lanes: Sequence[int],
    depth: int | None,
    size: int,
    align: int = BLOCK,
    seconds: float = 1.0,
    runs: int = 3,
    progress: Callable[[str, int, int], None] = lambda name, i, n: None,
) -> list[dict[str, Any]]:
    """A row for every mode and number of lanes: medians of `runs` runs, which take turns so that a drift of the
    disk meets all alike. depth None: a read for every lane and one that waits; with more the memory read into is
    larger than caches. Offsets are multiples of `align`; of `size` for a mapped file, where pages stay and a
    place can be measured once."""
    rows = [
        {"mode": mode, "lanes": n, "depth": n + 1 if depth is None else depth, "runs": []}
        for mode in modes
        for n in lanes
    ]
    for i in range(runs):
        for k, row in enumerate(rows):
            progress(f"{row['mode']}, {row['lanes']} lanes", i * len(rows) + k, runs * len(rows))
            run = engine_bench.read_file(
                file.path,
                row["mode"],
                row["lanes"],
                row["depth"],
                size,
                size if row["mode"] == "mmap" else align,
                seconds,
                i * 1000 + k,
            )
            row["runs"].append(run)
    for row in rows:
        speeds = [r["bytes"] / r["wall_s"] * 1e-9 for r in row["runs"]]
        row["gbs"], row["min_gbs"], row["max_gbs"] = (
            statistics.median(speeds),
            min(speeds),
            max(speeds),
        )
        row["cpu_s_per_gb"] = statistics.median(r["cpu_s"] / r["bytes"] * 1e9 for r in row["runs"])
        row["direct"] = all(r["direct"] for r in row["runs"])
        row["cached"] = max(r["cached"] for r in row["runs"])
    return rows
