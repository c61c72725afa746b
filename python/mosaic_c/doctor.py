"""What this machine, this installation and one folder mean for running models: findings, each with a level and a
way out.

Everything is read from /proc, /sys and /sys/fs/cgroup, which callers may replace by recorded trees. Whatever is
missing or unreadable is a finding too, never an exception.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mosaic_c.doctor_folder import folder_disk, model
from mosaic_c.doctor_gpu import gpu
from mosaic_c.errors import MosaicError
from mosaic_c.findings import LEVELS, Finding, Roots, budget_of
from mosaic_c.jsonfile import reason
from mosaic_c.limits import default_budget, default_threads, format_size, group_limits

MIB, GIB = 1 << 20, 1 << 30
PROCESS = 64 * MIB  # Python, its packages and a tokenizer, before any model
REAL = 2 * GIB  # the smallest real Mixture-of-Experts models want about this
FILES = 256  # shards of the largest releases, and some
EXTENSION = "install again with a C compiler: pip install --force-reinstall --no-deps ."


def examine(path: str | os.PathLike[str] = ".", roots: Roots | None = None) -> list[Finding]:
    """All findings, of the machine first and then of a folder."""
    roots = roots or Roots()
    found: list[Finding] = []
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", lambda: packages()),
        ("engine", lambda: build()),
        ("cpu", lambda: cpu(roots)),
        ("cores", lambda: cores(roots)),
        ("memory", lambda: memory(roots)),
        ("huge pages", lambda: huge_pages(roots)),
        ("swap", lambda: swap(roots)),
        ("overcommit", lambda: overcommit(roots)),
        ("process limits", lambda: process_limits(roots)),
        ("gpu", lambda: gpu(roots)),
        ("disk", lambda: folder_disk(path, roots)),
        ("model", lambda: model(path, roots)),
    ]
    for topic, check in checks:
        try:
            found += check()
        except (OSError, ValueError, ImportError, MosaicError) as error:
            what = str(error) if isinstance(error, MosaicError) else reason(error)
            found.append(Finding(topic, "note", f"not known: {what}"))
    # names of mounts, groups and processors are foreign text: each finding stays one line
    return [replace(f, text="".join(c if c.isprintable() else "?" for c in f.text)) for f in found]


def report(findings: list[Finding]) -> dict[str, Any]:
    """JSON values: findings and how many there are of each level."""
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    return {"findings": [asdict(f) for f in findings], "counts": counts}


# ---- the installation ----


def packages() -> Iterator[Finding]:
    """Python and what the package's own metadata asks for."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    if "microsoft" in platform.release().lower():
        yield Finding(
            "python",
            "note",
            f"{system} (WSL)",
            "keep models inside WSL: /mnt/c is many times slower",
        )
    else:
        yield Finding("python", "ok", system)
    try:
        wanted = importlib.metadata.requires("mosaic_c") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", "note", "mosaic_c runs without being installed", "pip install -e ."
        )
        return
    versions: dict[str, str] = {}
    for line in wanted:
        match = re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*$", line)  # others belong to extras
        if not match:
            continue
        name, least = match[1], match[2]
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                "packages", "error", f"{name} is missing", f"pip install '{name}>={least}'"
            )
            continue
        if _version(versions[name]) < _version(least):
            text = f"{name} {versions[name]} is too old, expected {least} or later"
            yield Finding("packages", "error", text, f"pip install -U '{name}>={least}'")
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding("packages", "ok", text or "none asked for", data=versions)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", text)[:3])


def build() -> Iterator[Finding]:
    try:
        from mosaic_c import engine
    except ImportError as error:
        yield Finding("engine", "error", f"the extension does not load: {reason(error)}", EXTENSION)
        return
    words = engine.build().split(", ")
    bad = {
        "fast-math": ("error", "results are not the canonical ones"),
        "not optimized": ("warning", "many times slower than it could be"),
        "sanitized": ("warning", "slow, for tests only"),
        "AVX everywhere": ("note", "it ends with SIGILL on a CPU without AVX"),
    }
    modes = engine.io_modes()
    text = (
        f"{engine.build()}; reads by {', '.join(m for m, refused in modes.items() if not refused)}"
    )
    text += "".join(f"; not by {m}: {refused}" for m, refused in modes.items() if refused)
    hit = [bad[w] for w in words if w in bad]
    level = max((h[0] for h in hit), key=LEVELS.index, default="ok")
    data = {"build": engine.build(), "io": modes}
    if hit:
        text += f": {'; '.join(h[1] for h in hit)}"
        yield Finding("engine", level, text, f"unset CFLAGS and {EXTENSION}", data)
    else:
        yield Finding("engine", "ok", text, data=data)


# ---- processor and memory ----


def cpu(roots: Roots) -> Iterator[Finding]:
    from mosaic_c import engine

    info = roots.read("proc/cpuinfo")
    name = re.search(r"(?m)^(?:model name|Model|Hardware)\s*:\s*(.+)$", info)
    isas, features = engine.isas(), engine.cpu()
    text = f"{name[1] if name else 'unknown model'}: {features or 'no vector extension known'}; "
    text += f"kernels {isas[0]}" + (f", also {', '.join(isas[1:])}" if isas[1:] else "")
    data = {"features": features.split(), "isas": isas}
    if isas[0] != "scalar":
        yield Finding("cpu", "ok", text, data=data)
    elif platform.machine() in ("x86_64", "AMD64"):
        advice = "use a CPU with AVX2 and FMA; in a virtual machine pass the host's CPU through"
        yield Finding("cpu", "warning", f"{text}: many times slower than AVX2", advice, data)
    else:
        yield Finding(
            "cpu", "note", f"{text}: there are no vector kernels for this CPU yet", "", data
        )


def cores(roots: Roots) -> Iterator[Finding]:
    limits = roots.limits()
    online = _count(roots.read("sys/devices/system/cpu/online"))
    data = {"affinity": limits.affinity, "online": online, "quota": limits.cpu_quota}
    text = f"{limits.affinity} in the affinity mask" + (f" of {online} online" if online else "")
    if online and limits.affinity < online:
        advice = (
            "taskset, a cpuset or the container allows no more: widen it if the others are free"
        )
        yield Finding("cores", "note", text, advice, data)
    else:
        yield Finding("cores", "ok", text, data=data)
    for quota, source in group_limits(roots.proc, roots.cgroup)[1]:
        if quota >= limits.affinity:
            yield Finding("cpu quota", "ok", f"{quota:g} cores, more than the mask has ({source})")
            continue
        level = "warning" if quota < 1 else "note"
        text = f"{quota:g} cores by {source}: threads stand still when it is used up"
        yield Finding("cpu quota", level, text, "raise the container's CPU limit", {"file": source})
    yield Finding("threads", "ok", f"{default_threads(limits)} by default")


def _count(text: str) -> int:
    """CPUs of "0-3,8"; 0 where it is not such a list."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return 0
    ends = [[int(x) for x in part.split("-")] for part in text.split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)


def memory(roots: Roots) -> Iterator[Finding]:
    limits = roots.limits()
    total, free = limits.mem_total, limits.mem_available
    if free is None:
        yield Finding(
            "memory", "warning", "available memory is not known", "pass --ram SIZE to every command"
        )
    else:
        text = f"{format_size(free)} available" + (f" of {format_size(total)}" if total else "")
        advice = "close other programs, or use a machine with more memory"
        yield _size("memory", free, text, advice, {"total": total, "available": free})
    for limit, source in group_limits(roots.proc, roots.cgroup)[0]:
        text = f"{format_size(limit)} by {source}"
        used = _used(Path(source).parent)
        text += "" if used is None else f", {format_size(used)} in use"
        data = {"limit": limit, "file": source, "used": used}
        yield _size("control group", limit, text, "raise the container's memory limit", data)
    try:
        budget, why = default_budget(limits)
    except MosaicError as error:
        yield Finding("budget", "warning", str(error), "pass --ram SIZE")
        return
    yield Finding("budget", "ok", f"without --ram {why}", data={"budget": budget})


def _used(folder: Path) -> int | None:
    for name in ("memory.current", "memory.usage_in_bytes"):
        try:
            return int((folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def _size(topic: str, size: int, text: str, advice: str, data: dict[str, Any]) -> Finding:
    if size < PROCESS:
        return Finding(
            topic, "error", f"{text}: Python and a tokenizer alone take that", advice, data
        )
    if size < REAL:
        return Finding(topic, "warning", f"{text}: enough for small models only", advice, data)
    return Finding(topic, "ok", text, data=data)


def huge_pages(roots: Roots) -> Iterator[Finding]:
    place = "/sys/kernel/mm/transparent_hugepage/enabled"
    text = roots.read(place[1:])
    mode = re.search(r"\[(\w+)\]", text)
    advice = f"echo madvise | sudo tee {place}"
    slow = "direct reads into small pages are 3 to 5 times slower"
    if re.search(r"(?m)^THP_enabled:\s*0", roots.read("proc/self/status")):
        yield Finding(
            "huge pages", "warning", f"switched off for this process: {slow}", "start it otherwise"
        )
    if mode is None:
        yield Finding("huge pages", "note", f"not known, {place} says nothing: without them {slow}")
    elif mode[1] == "never":
        yield Finding("huge pages", "warning", f"never: {slow}", advice, {"enabled": "never"})
    else:
        yield Finding("huge pages", "ok", mode[1], data={"enabled": mode[1]})


def _meminfo(roots: Roots) -> dict[str, int]:
    text = roots.read("proc/meminfo")
    return {m[1]: int(m[2]) * 1024 for m in re.finditer(r"(?m)^(\w+):\s+(\d+) kB", text)}


def swap(roots: Roots) -> Iterator[Finding]:
    info = _meminfo(roots)
    total = info.get("SwapTotal")
    if total is None:
        yield Finding("swap", "note", "not known")
    elif not total:
        yield Finding("swap", "ok", "none")
    else:
        used = total - info.get("SwapFree", total)
        text = f"{format_size(total)}, {format_size(used)} in use"
        advice = (
            "a cache in swap is slower than reading again: keep --ram under the memory available"
        )
        level = "warning" if used > total // 2 else "note"
        yield Finding("swap", level, text, advice, {"total": total, "used": used})


def overcommit(roots: Roots) -> Iterator[Finding]:
    mode = roots.number("proc/sys/vm/overcommit_memory")
    if mode != 2:
        text = {0: "heuristic", 1: "always"}.get(mode, "not known")
        yield Finding("overcommit", "note" if mode is None else "ok", text)
        return
    info = _meminfo(roots)
    room = info.get("CommitLimit", 0) - info.get("Committed_AS", 0)
    data = {"room": room}
    text = f"strict (vm.overcommit_memory=2): {format_size(max(room, 0))} may still be allocated"
    budget = budget_of(roots)
    if budget is not None and room < budget:
        advice = f"sysctl vm.overcommit_memory=0, or --ram {max(room * 3 // 4 // MIB, 1)}M"
        yield Finding("overcommit", "warning", f"{text}, less than the budget", advice, data)
    else:
        yield Finding("overcommit", "note", text, "", data)


def process_limits(roots: Roots) -> Iterator[Finding]:
    text = roots.read("proc/self/limits")
    # "Max open files            1024                 4096                 files": the first is in force
    rows = {m[1]: m[2] for m in re.finditer(r"(?m)^Max ([a-z ]+?)\s{2,}(\d+|unlimited)\s", text)}
    values = {k: math.inf if v == "unlimited" else int(v) for k, v in rows.items()}
    budget = budget_of(roots) or 0
    for name, option in (("address space", "-v"), ("data size", "-d")):
        size = values.get(name, math.inf)
        if size < budget + GIB:  # shared libraries and stacks of threads count too
            shown = f"{format_size(int(size))}, less than the budget needs"
            yield Finding(name, "warning", shown, f"ulimit {option} unlimited, or a smaller --ram")
    locked, files = values.get("locked memory"), values.get("open files")
    if files is None:
        yield Finding("process limits", "note", "not known")
        return
    level = "ok" if files >= FILES else "warning" if files >= 64 else "error"
    advice = "" if level == "ok" else "ulimit -n 1024: a model's shards are all open at once"
    yield Finding("open files", level, f"{files:g}", advice, {"limit": rows["open files"]})
    if locked is not None:
        shown = "unlimited" if locked == math.inf else format_size(int(locked))
        yield Finding("locked memory", "ok", shown, data={"limit": rows["locked memory"]})
    if all(values.get(name, math.inf) == math.inf for name in ("address space", "data size")):
        yield Finding("address space", "ok", "unlimited")
