"""Limits of memory and CPU, read from recorded /proc and /sys/fs/cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import (
    MAX_THREADS,
    Bound,
    Limits,
    default_budget,
    default_threads,
    format_rate,
    format_size,
    memory_groups,
    parse_rate,
    parse_size,
    read_bounds,
    read_limits,
    read_process,
    usable_cores,
)

GIB = 1 << 30
V1_NONE = "9223372036854771712\n"


class Tree:
    """A /proc and a /sys/fs/cgroup in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.put("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
        self.put("proc/self/status", "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n")

    def put(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def read(self) -> Limits:
        return read_limits(self.proc, self.cgroup)

    def bounds(self) -> list[Bound]:
        return read_bounds(memory_groups(self.proc, self.cgroup), self.proc)

    def source(self, path: str) -> str:
        return str(self.proc.parent / path)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_absent_trees(tmp_path):
    limits = read_limits(tmp_path / "no", tmp_path / "none")
    assert (limits.mem_available, limits.mem_total, limits.cgroup_limit) == (None, None, None)
    assert (limits.cgroup_source, limits.cpu_quota, limits.cpu_source) == (None, None, None)
    assert limits.affinity == len(os.sched_getaffinity(0))
    with pytest.raises(MosaicError, match="--ram"):
        default_budget(limits)


def test_no_groups(tree):
    limits = tree.read()
    assert limits == Limits(8 * GIB, 16 * GIB, None, None, None, None, 8)
    assert default_budget(limits)[0] == 6 * GIB
    assert default_threads(limits) == 8


def test_more_cores_than_threads(tree):
    tree.put("proc/self/status", f"Cpus_allowed:\t{'f' * 75}\n")
    limits = tree.read()
    assert (usable_cores(limits), default_threads(limits)) == (300, MAX_THREADS)


def test_v2_plain(tree):
    tree.put("proc/self/cgroup", "0::/app.slice/run.scope\n")
    tree.put("cgroup/cgroup.controllers", "cpu memory\n")
    tree.put("cgroup/app.slice/memory.max", "max\n")
    tree.put("cgroup/app.slice/run.scope/memory.max", f"{4 * GIB}\n")
    tree.put("cgroup/app.slice/run.scope/memory.high", "max\n")
    tree.put("cgroup/app.slice/run.scope/cpu.max", "150000 100000\n")
    limits = tree.read()
    assert limits.cgroup_limit == 4 * GIB
    assert limits.cgroup_source == tree.source("cgroup/app.slice/run.scope/memory.max")
    assert limits.cpu_quota == 1.5
    assert limits.cpu_source == tree.source("cgroup/app.slice/run.scope/cpu.max")
    assert default_threads(limits) == 2
    budget, reason = default_budget(limits)
    assert budget == 3 * GIB
    assert "4 GiB" in reason and "run.scope/memory.max" in reason and "3/4" in reason


@pytest.mark.parametrize(
    ("place", "name"),
    [("", "memory.max"), ("/a", "memory.max"), ("/a/b", "memory.high"), ("/a/b/c", "memory.high")],
)
def test_v2_nested_smallest_ancestor_wins(tree, place, name):
    tree.put("proc/self/cgroup", "0::/a/b/c\n")
    for folder in ("", "/a", "/a/b", "/a/b/c"):
        tree.put(f"cgroup{folder}/memory.max", f"{5 * GIB}\n")
        tree.put(f"cgroup{folder}/memory.high", "max\n")
    tree.put(f"cgroup{place}/{name}", f"{GIB}\n")
    limits = tree.read()
    assert limits.cgroup_limit == GIB
    assert limits.cgroup_source == tree.source(f"cgroup{place}/{name}")


def test_v2_quota_of_an_ancestor(tree):
    tree.put("proc/self/cgroup", "0::/a/b\n")
    tree.put("cgroup/a/cpu.max", "50000 100000\n")
    tree.put("cgroup/a/b/cpu.max", "max 100000\n")
    assert tree.read().cpu_quota == 0.5
    assert default_threads(tree.read()) == 1


def test_v1(tree):
    tree.put("proc/self/cgroup", "5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    tree.put("cgroup/memory/memory.limit_in_bytes", V1_NONE)
    tree.put("cgroup/memory/docker/memory.limit_in_bytes", f"{2 * GIB}\n")
    tree.put("cgroup/memory/docker/x/memory.limit_in_bytes", f"{6 * GIB}\n")
    tree.put("cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "250000\n")
    tree.put("cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n")
    tree.put("cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "-1\n")
    tree.put("cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n")
    limits = tree.read()
    assert limits.cgroup_limit == 2 * GIB
    assert limits.cgroup_source == tree.source("cgroup/memory/docker/memory.limit_in_bytes")
    assert limits.cpu_quota == 2.5
    assert default_threads(limits) == 3


def test_v1_controllers_mounted_one_by_one(tree):
    tree.put("proc/self/cgroup", "3:cpuacct,cpu:/\n")
    tree.put("cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    tree.put("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    (tree.cgroup / "cpuacct").mkdir()
    assert tree.read().cpu_quota == 1.0


def test_v1_limit_of_an_ancestor_outside_the_mount(tree):
    tree.put("proc/self/cgroup", "5:memory:/\n")
    tree.put("cgroup/memory/memory.limit_in_bytes", V1_NONE)
    tree.put("cgroup/memory/memory.stat", f"cache 1\nhierarchical_memory_limit {3 * GIB}\nx 2\n")
    limits = tree.read()
    assert limits.cgroup_limit == 3 * GIB
    assert limits.cgroup_source == tree.source("cgroup/memory/memory.stat")


@pytest.mark.parametrize("none", [V1_NONE, "18446744073709551615\n", "-1\n", "max\n", "", "4 GB\n"])
def test_unlimited_or_unreadable_values(tree, none):
    tree.put("proc/self/cgroup", "5:memory:/x\n0::/x\n")
    for path in ("cgroup/memory/x/memory.limit_in_bytes", "cgroup/unified/x/memory.max"):
        tree.put(path, none)
    assert tree.read().cgroup_limit is None
    tree.put("cgroup/unified/x/memory.high", f"{GIB}\n")
    assert tree.read().cgroup_limit == GIB


def test_hybrid_with_empty_unified(tree):
    """Version 1 controllers and an empty version 2 tree beside them."""
    tree.put("proc/self/cgroup", "9:name=systemd:/\n4:memory:/job/1\n1:cpu:/\n0::/\n")
    tree.put("cgroup/unified/cgroup.procs", "1\n")
    tree.put("cgroup/systemd/cgroup.procs", "1\n")
    tree.put("cgroup/memory/memory.limit_in_bytes", V1_NONE)
    tree.put("cgroup/memory/job/1/memory.limit_in_bytes", f"{GIB}\n")
    tree.put("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    tree.put("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    limits = tree.read()
    assert (limits.cgroup_limit, limits.cpu_quota) == (GIB, None)


@pytest.mark.parametrize("path", ["/docker/abc", "/../../host.slice", "/kubepods/../x"])
@pytest.mark.parametrize("version", [1, 2])
def test_container_sees_only_its_own_group_as_root(tree, path, version):
    if version == 2:
        tree.put("proc/self/cgroup", f"0::{path}\n")
        tree.put("cgroup/memory.max", f"{GIB}\n")
    else:
        tree.put("proc/self/cgroup", f"4:memory:{path}\n")
        tree.put("cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    # Outside the tree: must not be reached by "..".
    tree.put("host.slice/memory.max", "4096\n")
    assert tree.read().cgroup_limit == GIB


def test_mount_root_names_the_group(tree):
    """The host's path in /proc/self/cgroup, a child group below the mounted one."""
    tree.put("proc/self/cgroup", "4:memory:/docker/abc/child\n")
    tree.put(
        "proc/self/mountinfo",
        "30 20 0:2 / /proc rw - proc proc rw\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n",
    )
    tree.put("cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    tree.put("cgroup/memory/child/memory.limit_in_bytes", f"{GIB}\n")
    limits = tree.read()
    assert limits.cgroup_limit == GIB
    assert limits.cgroup_source == tree.source("cgroup/memory/child/memory.limit_in_bytes")


def test_unreadable_and_damaged_files(tree):
    tree.put("proc/self/cgroup", "garbage\n\n::\n0::/a\nx:memory\n")
    (tree.cgroup / "a" / "memory.max").mkdir(parents=True)  # a folder where a file belongs
    tree.put("cgroup/a/cpu.max", "lots\n")
    tree.put("proc/meminfo", "\xff\x00 nonsense\nMemTotal: many kB\n")
    tree.put("proc/self/status", "Cpus_allowed:\tzz\n")
    limits = tree.read()
    assert (limits.mem_available, limits.cgroup_limit, limits.cpu_quota) == (None, None, None)
    assert limits.affinity >= 1


def test_old_kernel_without_mem_available(tree):
    tree.put("proc/meminfo", "MemTotal: 4096 kB\nMemFree: 100 kB\nBuffers: 20 kB\nCached: 3 kB\n")
    assert tree.read().mem_available == 123 * 1024


def test_affinity_mask_of_many_words(tree):
    tree.put("proc/self/status", "Cpus_allowed:\tf0000000,00000000,00000003\n")
    assert tree.read().affinity == 6


def test_budget_takes_the_smaller_and_rounds_to_mib():
    limits = Limits(10 * GIB + 12345, 16 * GIB, 12 * GIB, "/cg/memory.max", None, None, 2)
    budget, reason = default_budget(limits)
    assert budget % (1 << 20) == 0
    assert 0 <= (10 * GIB + 12345) * 3 // 4 - budget < 1 << 20
    assert "MemAvailable" in reason and "\n" not in reason


def test_this_machine():
    limits = read_limits()
    assert limits.mem_total and 0 < limits.mem_available <= limits.mem_total
    assert limits.affinity == len(os.sched_getaffinity(0))
    assert 1 <= default_threads(limits) <= limits.affinity
    assert 0 < default_budget(limits)[0] <= limits.mem_total


# ---- what is in use ----

SYSTEM = Bound("system memory", 16 * GIB, 8 * GIB)


def test_bounds_of_absent_trees(tmp_path):
    assert read_bounds(memory_groups(tmp_path / "no", tmp_path / "none"), tmp_path / "no") == []
    assert read_process(tmp_path) is None


def test_bounds_v2_page_cache_is_not_use(tree):
    """Every ancestor with a limit, each with its own use; the smaller of max and high."""
    tree.put("proc/self/cgroup", "0::/a/b\n")
    tree.put("cgroup/a/memory.max", f"{4 * GIB}\n")
    tree.put("cgroup/a/memory.high", "max\n")
    tree.put("cgroup/a/memory.current", f"{4 * GIB - 4096}\n")
    tree.put(
        "cgroup/a/memory.stat",
        f"anon {GIB}\nfile {3 * GIB}\nshmem {GIB}\ninactive_anon {GIB}\ninactive_file {GIB}\n"
        f"active_file {GIB}\nslab_reclaimable 8192\nworkingset_refault_file 7\n",
    )
    tree.put("cgroup/a/b/memory.max", f"{2 * GIB}\n")
    tree.put("cgroup/a/b/memory.high", f"{GIB}\n")
    tree.put("cgroup/a/b/memory.current", "5000\n")
    tree.put("cgroup/a/b/memory.stat", "inactive_file 9000\n")  # read a moment later
    assert tree.bounds() == [
        SYSTEM,
        Bound(tree.source("cgroup/a/b/memory.high"), GIB, 0),
        Bound(tree.source("cgroup/a/memory.max"), 4 * GIB, 2 * GIB - 4096 - 8192),
    ]


def test_bounds_v1_count_descendants(tree):
    tree.put("proc/self/cgroup", "5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
    tree.put("cgroup/unified/cgroup.procs", "1\n")  # hybrid: an empty tree of version 2
    tree.put("cgroup/memory/memory.limit_in_bytes", V1_NONE)
    tree.put("cgroup/memory/docker/x/memory.limit_in_bytes", V1_NONE)
    tree.put("cgroup/memory/docker/memory.limit_in_bytes", f"{2 * GIB}\n")
    tree.put("cgroup/memory/docker/memory.usage_in_bytes", f"{2 * GIB}\n")
    tree.put(
        "cgroup/memory/docker/memory.stat",
        f"cache 0\nactive_file 0\ninactive_file 0\ntotal_cache {GIB}\ntotal_shmem 4096\n"
        f"total_inactive_file {GIB // 2}\ntotal_active_file {GIB // 4}\n",
    )
    assert tree.bounds() == [
        SYSTEM,
        Bound(tree.source("cgroup/memory/docker/memory.limit_in_bytes"), 2 * GIB, 5 * GIB // 4),
    ]
    tree.put("cgroup/memory/docker/memory.limit_in_bytes", f"{GIB}\n")  # lowered: noticed
    assert tree.bounds()[1].limit == GIB


def test_bounds_that_do_not_say_how_full_they_are(tree):
    """A limit without use or without statistics, and the limit of an ancestor outside the mount."""
    tree.put("proc/self/cgroup", "5:memory:/x\n")
    tree.put("cgroup/memory/x/memory.limit_in_bytes", f"{2 * GIB}\n")
    source = tree.source("cgroup/memory/x/memory.limit_in_bytes")
    assert tree.bounds() == [SYSTEM, Bound(source, 2 * GIB, None)]
    tree.put("cgroup/memory/x/memory.usage_in_bytes", "4096\n")
    assert tree.bounds() == [SYSTEM, Bound(source, 2 * GIB, None)]
    tree.put("cgroup/memory/x/memory.stat", f"hierarchical_memory_limit {GIB}\n")
    above = Bound(tree.source("cgroup/memory/x/memory.stat"), GIB, None)
    assert tree.bounds() == [SYSTEM, Bound(source, 2 * GIB, 4096), above]
    tree.put("cgroup/memory/x/memory.stat", f"hierarchical_memory_limit {2 * GIB}\n")
    assert tree.bounds() == [SYSTEM, Bound(source, 2 * GIB, 4096)]
    tree.put("proc/meminfo", "nonsense\n")
    assert tree.bounds() == [Bound(source, 2 * GIB, 4096)]


def test_memory_of_the_process(tree):
    tree.put("proc/self/stat", "7 (a b) c) S 1 2 3 4 5 6 7 8 99 10 11\n")
    assert read_process(tree.proc) is None
    tree.put("proc/self/status", "Name:\tx\nVmHWM:\t   9 kB\nVmRSS:\t   5 kB\nVmSwap:\t  2 kB\n")
    assert read_process(tree.proc) == (5120, 2048, 99)
    tree.put("proc/self/stat", "7 (python) S 1\n")
    assert read_process(tree.proc) is None
    resident, _, faults = read_process()
    assert resident > 1 << 20 and faults >= 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("100000", 100000),
        ("100000B", 100000),
        ("160M", 160 << 20),
        ("6G", 6 << 30),
        ("6g", 6 << 30),
        ("6 GiB", 6 << 30),
        ("1.5GiB", 3 << 29),
        (".5k", 512),
        ("2.K", 2048),
        ("512MB", 512_000_000),
        ("512mb", 512_000_000),
        ("1TB", 10**12),
        ("1T", 1 << 40),
        (" 3 kib ", 3072),
        ("9007199254740993", 9007199254740993),
        ("7.999999P", 9007198128841085),
        ("7E", 7 << 60),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("3G", 3 * 10**9),
        ("3g", 3 * 10**9),
        ("3GB", 3 * 10**9),
        ("3GiB", 3 << 30),
        ("1.5M", 1_500_000),
        ("500 MB", 5 * 10**8),
        ("1", 1),
        ("7E", 7 * 10**18),
    ],
)
def test_parse_rate(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "3Gi", "0", "0.0001K", "10E", "-1", "3GB/h"])
def test_parse_rate_refuses(text):
    with pytest.raises(UsageError) as caught:
        parse_rate(text, "--disk")
    assert str(caught.value).startswith("--disk") and text in str(caught.value)


def test_format_rate():
    assert format_rate(3e9) == "3 GB/s" and format_rate(429_496_729) == "0.4295 GB/s"


@pytest.mark.parametrize(
    "text",
    ["", " ", "G", "-1", "+1", "1e9", "1,5G", "6 GG", "6Gi", "6iB", "1.2.3", "nan", "inf", "0x10",
     "６G", "6G!", "8388608T", "8E", "9223372036854775808", "9" * 5000, "1." + "9" * 5000],
)  # fmt: skip
def test_parse_size_refuses(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--disk")
    said = str(caught.value)
    assert "\n" not in said and said.startswith("--disk: ") and len(said) < 300
    assert repr(text) in said or (len(text) > 80 and text[:80] in said)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (160 << 20, "160 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (6 << 30, "6 GiB"),
        (37_454_789_472, "34.88 GiB"),
        (-(5 << 20), "-5 MiB"),
        (1 << 62, "4 EiB"),
    ],
)
def test_format_size(size, text):
    assert format_size(size) == text


@given(st.integers(0, (1 << 60) - 1))
def test_format_then_parse_is_close(size):
    assert abs(parse_size(format_size(size)) - size) <= size * 0.005 + 1
