"""How much memory and how many cores this process may use, how much memory is in use, and sizes as text.

Everything is read from two folders, /proc and /sys/fs/cgroup, which callers may replace by recorded
ones. Control groups of version 1 and 2 are both looked at, also side by side (a hybrid system
mounts version 1 controllers and an empty version 2 tree): the smallest limit of any ancestor wins.
What is absent or unreadable sets no limit; nothing here writes or caches.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mosaic_c.errors import MosaicError, UsageError

# "No limit" in version 1 is LONG_MAX rounded down to a page, which depends on the page size.
_UNLIMITED = 1 << 60
_MIB = 1 << 20
MAX_THREADS = 256  # compute threads of an engine
# What is left to the kernel, to other processes and to measuring errors when no budget is given.
_KEEP = 4  # one part in _KEEP


@dataclass(frozen=True)
class Limits:
    """Bytes and cores; None where the system does not say or sets no limit.

    cgroup_source and cpu_source are the files that set the limits. affinity counts the CPUs in the
    affinity mask (at least 1); cpu_quota is in cores, such as 1.5.
    """

    mem_available: int | None
    mem_total: int | None
    cgroup_limit: int | None
    cgroup_source: str | None
    cpu_quota: float | None
    cpu_source: str | None
    affinity: int


def read_limits(
    proc: str | os.PathLike[str] = "/proc", cgroup: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> Limits:
    """Reads the limits of this process. Never fails: a missing tree reads as "no limit"."""
    mem_total, mem_available = _meminfo(Path(proc))
    memory, cpu = group_limits(proc, cgroup)
    limit, source = min(memory, default=(None, None), key=lambda x: x[0])
    quota, cpu_source = min(cpu, default=(None, None), key=lambda x: x[0])
    affinity = _affinity(Path(proc))
    return Limits(mem_available, mem_total, limit, source, quota, cpu_source, affinity)


def group_limits(
    proc: str | os.PathLike[str] = "/proc", cgroup: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> tuple[list[tuple[int, str]], list[tuple[float, str]]]:
    """Every limit of every control group above this process: (bytes, file), (cores, file)."""
    memory: list[tuple[int, str]] = []
    cpu: list[tuple[float, str]] = []
    for version, controllers, folders in _groups(Path(proc), Path(cgroup)):
        for depth, folder in enumerate(folders):
            if version == 2:
                memory += _memory_files(folder, ("memory.max", "memory.high"))
                cpu += _quota_v2(folder)
                continue
            if "memory" in controllers:
                memory += _memory_files(folder, ("memory.limit_in_bytes",))
                if depth == 0:  # includes ancestors that a container cannot see
                    memory += _hierarchical(folder)
            if "cpu" in controllers:
                cpu += _quota_v1(folder)
    return memory, cpu


@dataclass(frozen=True)
class Bound:
    """A limit that memory runs into, in bytes, and what sets it.

    used: what the kernel cannot take back by itself, so no page cache; None where it does not say.
    """

    source: str
    limit: int
    used: int | None


def memory_groups(
    proc: str | os.PathLike[str] = "/proc", cgroup: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> list[tuple[int, list[Path]]]:
    """(version, folders of this process's memory group and all above it), for read_bounds."""
    found = _groups(Path(proc), Path(cgroup))
    return [(v, folders) for v, controllers, folders in found if v == 2 or "memory" in controllers]


def read_bounds(
    groups: list[tuple[int, list[Path]]], proc: str | os.PathLike[str] = "/proc"
) -> list[Bound]:
    """System memory and every limit of these groups, as they are now.

    Never fails: what cannot be read is not a bound.
    """
    total, available = _meminfo(Path(proc))
    found = []
    if total is not None and available is not None:
        found.append(Bound("system memory", total, max(total - available, 0)))
    for version, folders in groups:
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        seen = _UNLIMITED
        for folder in folders:
            for limit, source in sorted(_memory_files(folder, names))[:1]:
                found.append(Bound(source, limit, _used(folder, version)))
                seen = min(seen, limit)
        if version == 1:  # of an ancestor that a container cannot see: how full it is nobody knows
            above = _hierarchical(folders[0])
            found += [Bound(source, limit, None) for limit, source in above if limit < seen]
    return found


def read_process(proc: str | os.PathLike[str] = "/proc") -> tuple[int, int, int] | None:
    """(bytes resident, bytes swapped out, major page faults so far) of this process; None: unreadable."""
    status = _read(Path(proc) / "self/status")
    kib = {m[1]: int(m[2]) for m in re.finditer(r"(?m)^(VmRSS|VmSwap):\s+(\d+) kB", status)}
    # after the name, which may hold anything: state ppid ... minflt cminflt majflt
    rest = _read(Path(proc) / "self/stat").rpartition(")")[2].split()
    faults = _integer(rest[9]) if len(rest) > 9 else None
    if "VmRSS" not in kib or faults is None:
        return None
    return kib["VmRSS"] * 1024, kib.get("VmSwap", 0) * 1024, faults


def smallest_limit(limits: Limits) -> tuple[int, str] | None:
    """(bytes, what sets it) of the tighter of available memory and control group; None: neither is known."""
    found = []
    if limits.mem_available is not None:
        found.append((limits.mem_available, "available now (MemAvailable)"))
    if limits.cgroup_limit is not None:
        found.append((limits.cgroup_limit, f"allowed by {limits.cgroup_source}"))
    return min(found, key=lambda x: x[0], default=None)


def default_budget(limits: Limits) -> tuple[int, str]:
    """(bytes, reason): the smaller of control group limit and available memory, less a quarter.

    Rounded down to a MiB. MosaicError when neither is known.
    """
    found = smallest_limit(limits)
    if found is None:
        raise MosaicError(
            "cannot tell how much memory may be used: neither MemAvailable in /proc/meminfo nor a "
            "memory control group could be read; pass --ram SIZE"
        )
    size, what = found
    budget = size - size // _KEEP
    budget -= budget % _MIB
    return budget, f"{format_size(budget)} = 3/4 of the {format_size(size)} {what}"


def default_threads(limits: Limits) -> int:
    """As many as usable_cores says, but no more than the engine takes."""
    return min(usable_cores(limits), MAX_THREADS)


def usable_cores(limits: Limits) -> int:
    """min(CPUs in the affinity mask, CPU quota rounded up), at least 1.

    Up, not down: with a quota of 1.5 cores two threads get all of it, one thread only two thirds.
    """
    threads = limits.affinity
    if limits.cpu_quota is not None:
        threads = min(threads, math.ceil(limits.cpu_quota))
    return max(1, threads)


# At most as many digits as any size below 2^63 needs: int() of a text of thousands is an error of its own.
_SIZE = re.compile(
    r"\s*(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})\s*([kmgtpe]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII
)


def parse_size(text: str, name: str = "size") -> int:
    """Bytes of "6G", "1.5GiB", "160M", "512MB" or "100000"; fractions of a byte are dropped.

    K, M, G, T, P, E and KiB, MiB, ... count in 1024, as in systemd and llama.cpp; KB, MB, GB, ... in
    1000. Case does not matter. UsageError for anything else and from 2^63 on; name: the option, for its message.
    """
    return _parse(
        text, name, 1024,
        "is no size: expected a number of bytes, or one with K, M, G, T (1024-based, also KiB, ...) or KB, MB, GB, "
        "TB (1000-based), such as 6G or 1.5GiB",
    )  # fmt: skip


def parse_rate(text: str, name: str = "rate") -> int:
    """Bytes a second of "3G" or "3GB" (both 3e9, as disks and memory are sold and measured) or "3GiB"; else as
    parse_size. At least 1."""
    rate = _parse(
        text, name, 1000,
        "is no rate: expected bytes a second, or a number with K, M, G, T (1000-based, also KB, ...) or KiB, MiB, "
        "GiB, TiB (1024-based), such as 3G",
    )  # fmt: skip
    if rate < 1:
        raise UsageError(f"{name} {text}: expected more than 0 bytes a second, such as 3G")
    return rate


def _parse(text: str, name: str, bare: int, refusal: str) -> int:
    """bare: the base of a letter alone."""
    match = _SIZE.fullmatch(text)
    shown = text if len(text) <= 80 else text[:80] + "..."
    if match is None or (match[3] and not (match[2] and match[4])):
        raise UsageError(f"{name}: {shown!r} {refusal}")
    base = (1024 if match[3] else 1000) if match[4] else bare
    factor = base ** (" KMGTPE".index(match[2].upper()) if match[2] else 0)
    whole, _, fraction = match[1].partition(".")
    # Integers all the way: a float would lose bytes from 2^53 on.
    size = int(whole or "0") * factor
    if fraction:
        size += int(fraction) * factor // 10 ** len(fraction)
    if size >= 1 << 63:
        raise UsageError(f"{name}: {shown!r} is too large: expected less than 8 EiB")
    return size


def format_size(size: int) -> str:
    """ "1.5 GiB", "160 MiB", "999 B": 1024-based, at most two decimals."""
    value, units = float(abs(size)), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    unit = 0
    # 1023.996 would print as 1024: step up as soon as rounding reaches it.
    while round(value, 2) >= 1024 and unit < len(units) - 1:
        value /= 1024
        unit += 1
    text = f"{value:.2f}".rstrip("0").rstrip(".") if unit else f"{value:.0f}"
    return f"{'-' if size < 0 else ''}{text} {units[unit]}"


def format_rate(rate: float) -> str:
    """ "3 GB/s", "0.4295 GB/s": decimal, as `bench io` prints them."""
    return f"{rate / 1e9:.4g} GB/s"


# ---- reading the trees --------------------------------------------------------------------------


def _read(path: Path) -> str:
    """The text of a small file; empty where it is absent or refused."""
    try:  # a third of the time of path.read_text, and the memory guard reads often
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


_MEMINFO = re.compile(r"(?m)^(Mem\w+|Buffers|Cached):\s+(\d+) kB")


def _meminfo(proc: Path) -> tuple[int | None, int | None]:
    """(MemTotal, MemAvailable) in bytes."""
    kib = {m[1]: int(m[2]) for m in _MEMINFO.finditer(_read(proc / "meminfo"))}
    available = kib.get("MemAvailable")
    if available is None and "MemFree" in kib:  # kernels before 3.14
        available = kib["MemFree"] + kib.get("Buffers", 0) + kib.get("Cached", 0)
    total = kib.get("MemTotal")
    return (
        None if total is None else total * 1024,
        None if available is None else available * 1024,
    )


def _affinity(proc: Path) -> int:
    match = re.search(r"(?m)^Cpus_allowed:\s*([0-9a-fA-F,]+)", _read(proc / "self/status"))
    if match:
        return max(1, bin(int(match[1].replace(",", ""), 16)).count("1"))
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[int, list[str], list[Path]]]:
    """(version, controllers, folders from the process's own group up to the mount's root)."""
    roots = _mount_roots(proc)
    for line in _read(proc / "self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and parts[1] == "":
            # A pure version 2 system mounts the tree at the top, a hybrid one in "unified".
            top = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
            yield 2, [], _ancestors(top, cgroup, parts[2], roots)
            continue
        wanted = [x for x in ("memory", "cpu") if x in parts[1].split(",")]
        # "cpuacct,cpu" may be mounted as "cpu,cpuacct", with links named cpu and cpuacct.
        names = [x for x in (parts[1], *wanted) if (cgroup / x).is_dir()]
        if wanted and names:
            yield 1, wanted, _ancestors(cgroup / names[0], cgroup, parts[2], roots)


def _mount_roots(proc: Path) -> dict[str, str]:
    """Mount point below /sys/fs/cgroup ("" or "memory") -> the group that is mounted there.

    A container without its own cgroup namespace is told the host's path of its group, while its
    mount shows that group as the root.
    """
    roots = {}
    for line in _read(proc / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) >= 5 and right.split(" ", 1)[0] in ("cgroup", "cgroup2"):
            point = fields[4].removeprefix("/sys/fs/cgroup")
            if point != fields[4]:
                roots[point.strip("/")] = fields[3]
    return roots


def _ancestors(top: Path, cgroup: Path, path: str, roots: dict[str, str]) -> list[Path]:
    point = "" if top == cgroup else top.name
    root = roots.get(point, "/").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    names = [x for x in path.split("/") if x]
    # A group outside the namespace reads "/../x", one outside the mount does not exist: the root of
    # the mount is then the nearest ancestor that can be seen.
    if ".." in names or not top.joinpath(*names).is_dir():
        names = []
    return [top.joinpath(*names[:n]) for n in range(len(names), -1, -1)]


def _integer(text: str) -> int | None:
    text = text.strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _memory_files(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for name in names:
        value = _integer(_read(folder / name))  # "max" is no number
        if value is not None and 0 <= value < _UNLIMITED:
            yield value, str(folder / name)


def _hierarchical(folder: Path) -> Iterator[tuple[int, str]]:
    match = re.search(r"(?m)^hierarchical_memory_limit (\d+)$", _read(folder / "memory.stat"))
    if match and int(match[1]) < _UNLIMITED:
        yield int(match[1]), str(folder / "memory.stat")


# What memory.stat calls the pages of files, and other memory that is given up on demand. Version 1 counts
# descendants in names of their own; pages of tmpfs are in neither list, as only swap could take them.
_RECLAIMABLE = {
    1: re.compile(r"(?m)^total_(?:in)?active_file (\d+)$"),
    2: re.compile(r"(?m)^(?:inactive_file|active_file|slab_reclaimable) (\d+)$"),
}


def _used(folder: Path, version: int) -> int | None:
    usage = _integer(_read(folder / ("memory.current", "memory.usage_in_bytes")[version == 1]))
    stat = _read(folder / "memory.stat")
    if usage is None or not stat:  # a full group may be full of page cache, which says nothing
        return None
    return max(usage - sum(map(int, _RECLAIMABLE[version].findall(stat))), 0)


def _quota_v2(folder: Path) -> Iterator[tuple[float, str]]:
    parts = _read(folder / "cpu.max").split()  # "max 100000" or "150000 100000"
    if len(parts) == 2:
        yield from _quota(_integer(parts[0]), _integer(parts[1]), folder / "cpu.max")


def _quota_v1(folder: Path) -> Iterator[tuple[float, str]]:
    quota = _integer(_read(folder / "cpu.cfs_quota_us"))  # -1: none
    period = _integer(_read(folder / "cpu.cfs_period_us"))
    yield from _quota(quota, period, folder / "cpu.cfs_quota_us")


def _quota(quota: int | None, period: int | None, source: Path) -> Iterator[tuple[float, str]]:
    if quota is not None and period is not None and quota > 0 and period > 0:
        yield quota / period, str(source)
