"""What lies under a folder: file system, device, free space, whether direct reads work, and how fast they are.

Mounts and devices are read from /proc and /sys, which callers may replace by recorded ones. What is absent
or unreadable is None or empty; only probe() and measure() touch the disk itself.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mosaic_c.jsonfile import reason

BLOCK = 1 << 20  # of a measured read
SMALLEST, LARGEST = 64 << 20, 256 << 20  # a file that is worth measuring; a temporary one at most
IN_FLIGHT = 2  # as many as the engine has direct readers
NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs",
    "virtiofs", "vboxsf", "drvfs",
)  # fmt: skip
MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo. device: "major:minor"; options: of the mount and of the file system."""

    device: str
    point: str
    kind: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Device:
    """A block device. name: as in /sys/block. how: "rotational", "virtual" (a host's or another device's), "solid
    state" or "unknown"; over: the names of what it is made of (device mapper, RAID)."""

    name: str
    how: str
    over: tuple[str, ...] = ()


def mount_of(path: str | os.PathLike[str], proc: str | os.PathLike[str] = "/proc") -> Mount | None:
    """The mount that an absolute path lies in; None where mountinfo does not say."""
    best = None
    for line in _read(Path(proc) / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        a, b = left.split(), right.split()
        if len(a) < 6 or len(b) < 2:
            continue
        point = _unescape(a[4])
        inside = point == "/" or f"{os.fspath(path)}/".startswith(point.rstrip("/") + "/")
        # a later mount on the same point hides the earlier one
        if inside and (best is None or len(point) >= len(best.point)):
            options = (*a[5].split(","), *(b[2].split(",") if len(b) > 2 else ()))
            best = Mount(a[2], point, b[0], _unescape(b[1]), options)
    return best


def device_of(mount: Mount, sys: str | os.PathLike[str] = "/sys") -> Device | None:
    """The block device of a mount; None where it has none (network, memory, overlay) or is unknown."""
    folder = Path(sys) / "dev/block" / mount.device
    if not folder.exists() and mount.source.startswith("/dev/"):
        # btrfs and others number their mounts themselves, and name the device
        folder = Path(sys) / "class/block" / os.path.basename(os.path.realpath(mount.source))
    if not folder.exists():
        return None
    return _device(Path(os.path.realpath(folder)), 0)


def _device(folder: Path, depth: int) -> Device:
    if (folder / "partition").exists():
        folder = folder.parent
    try:
        slaves = sorted(os.listdir(folder / "slaves"))
    except OSError:
        slaves = []
    rotational = _read(folder / "queue/rotational").strip()
    if slaves and depth < 8:
        below = [_device(Path(os.path.realpath(folder / "slaves" / s)), depth + 1) for s in slaves]
        ways = [d.how for d in below]
        worst = min(ways, key=("rotational", "unknown", "virtual", "solid state").index)
        return Device(folder.name, worst, tuple(d.name for d in below))
    path = folder.as_posix()
    if re.search(r"/virtio\d|/vbd-|/xen|VMBUS|/vmbus", path) or "/virtual/" in path:
        how = "virtual"
    else:
        how = {"1": "rotational", "0": "solid state"}.get(rotational, "unknown")
    return Device(folder.name, how)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- reading ----


@dataclass(frozen=True)
class Speed:
    """What was measured. file: its name, or "a temporary file"; file_bytes: its size, which `reads` may exceed. direct:
    past the page cache by O_DIRECT; why_not: why it was not. engine: by the engine's reader into huge pages, else
    by plain reads into small ones. bytes_s: 0 where reads could not be measured, reason then says why."""

    file: str
    direct: bool
    why_not: str = ""
    reads: int = 0
    seconds: float = 0.0
    bytes_s: float = 0.0
    file_bytes: int = 0
    engine: bool = True
    reason: str = ""


def measure(folder: Path, largest: Path | None, in_memory: bool, seconds: float = 1.0) -> Speed:
    """Random reads of 1 MiB, two at a time, for so many seconds: by the engine's reader, as `bench io` has it. Where
    the extension does not load, by plain reads, no block twice.

    largest: the file to read; None or a small one: a temporary file where one can be made, which takes as long again
    to write. in_memory: nothing is measured. OSError where no file can be read or made, MosaicError where a read of
    the engine fails.
    """
    if in_memory:
        return Speed("", False, reason="files here are memory: there is no disk to measure")
    name, file = _file(folder, largest, seconds)
    with file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        if size < BLOCK:
            return Speed(name, False, reason="the file is shorter than 1 MiB")
        why_not = probe(fd)
        try:
            by_engine, (reads, took) = True, _by_engine(fd, seconds)
        except ImportError:
            by_engine, (reads, took) = False, _plainly(fd, size // BLOCK, seconds, bool(why_not))
        if why_not:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    rate = reads * BLOCK / took
    return Speed(name, not why_not, why_not, reads, took, rate, size, by_engine)


def _by_engine(fd: int, seconds: float) -> tuple[int, float]:
    """(reads, seconds in all). ImportError where the extension does not load."""
    from mosaic_c.engine_bench import read_file

    # a read waits beside those under way; any multiple of 4 KiB, as experts lie
    run = read_file(
        f"/proc/self/fd/{fd}", "direct", IN_FLIGHT, IN_FLIGHT + 1, BLOCK, 4096, seconds, 1
    )
    return run["reads"], run["wall_s"]


def _plainly(fd: int, blocks: int, seconds: float, buffered: bool) -> tuple[int, float]:
    """(reads, seconds in all). Raises the first OSError of a reader."""
    if buffered:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    order = iter(random.sample(range(blocks), blocks))
    done: list[int] = []
    errors: list[OSError] = []
    start = time.perf_counter()

    def reader() -> None:
        buffer = mmap.mmap(-1, BLOCK)
        while (block := next(order, None)) is not None:
            if time.perf_counter() - start > seconds or errors:
                return
            try:
                os.preadv(fd, [buffer], block * BLOCK)
            except OSError as error:
                errors.append(error)
                return
            done.append(block)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return len(done), time.perf_counter() - start


def probe(fd: int) -> str:
    """Turns O_DIRECT on for a descriptor and reads a block with it; why not, and then it is off. "": it works."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    buffer = mmap.mmap(-1, 4096)  # O_DIRECT wants aligned memory: pages are
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        return f"the file system refuses O_DIRECT: {reason(error)}"
    try:
        os.preadv(fd, [buffer], 0)
        return ""
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"a direct read of 4 KiB failed: {reason(error)}"


def _file(folder: Path, largest: Path | None, seconds: float) -> tuple[str, IO[bytes]]:
    """(what it is, the open file)."""
    if largest is None or largest.stat().st_size < SMALLEST:
        try:
            return "a temporary file", _temporary(folder, seconds)
        except OSError:
            if largest is None:
                raise
    return largest.name, open(largest, "rb", buffering=0)


def _temporary(folder: Path, seconds: float) -> IO[bytes]:
    """A file without a name, so that nothing is left whatever happens; as large as a quarter of the free space, the
    time and LARGEST allow, and on the disk."""
    free = os.statvfs(folder)
    room = min(LARGEST, free.f_bavail * free.f_frsize // 4)
    file = tempfile.TemporaryFile(dir=folder, buffering=0)
    try:
        until = time.monotonic() + seconds
        for _ in range(room // (8 * BLOCK)):
            file.write(random.randbytes(8 * BLOCK))  # noise: nothing to compress or deduplicate
            os.fsync(file.fileno())
            if time.monotonic() > until:
                break
    except BaseException:
        file.close()
        raise
    return file
