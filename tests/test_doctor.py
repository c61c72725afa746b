"""`doctor` on recorded systems: what it finds, at which level, and that nothing makes it fall over."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import VECTORS
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import cli, disk, doctor, engine
from mosaic_c.errors import MosaicError
from mosaic_c.findings import LEVELS, Roots

GIB = 1 << 30
MODEL = VECTORS / "qwen35_fp8"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {data:<20} unlimited            bytes
Max open files            {files:<20} 4096                 files
Max locked memory         8388608              8388608              bytes
Max address space         {space:<20} unlimited            bytes
"""
EXT4 = "27 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"


class System:
    """A healthy machine in a temporary folder: 8 cores, 16 GiB, a solid-state disk."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.home.mkdir()
        self.roots = Roots(root / "proc", root / "sys", root / "cgroup", 0)
        self.put(
            "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\nSwapTotal: 0 kB\n"
        )
        self.put("proc/self/status", "Name:\tpython\nCpus_allowed:\tff\nTHP_enabled:\t1\n")
        self.put("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU 3000\n")
        self.put("proc/sys/vm/overcommit_memory", "0\n")
        self.put("proc/self/mountinfo", EXT4)
        self.put("proc/self/cgroup", "0::/\n")
        self.put("cgroup/cgroup.controllers", "cpu memory\n")
        self.put("sys/devices/system/cpu/online", "0-7\n")
        self.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.limits()
        self.device("8:0", "pci0/ata1/block/sda", rotational=0)
        self.device("8:1", "pci0/ata1/block/sda/sda1")

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def limits(self, files="1024", space="unlimited", data="unlimited") -> None:
        self.put("proc/self/limits", LIMITS.format(files=files, space=space, data=data))

    def device(self, number: str, path: str, rotational=None, slaves=()) -> None:
        if rotational is None:
            self.put(f"sys/devices/{path}/partition", "1\n")
        else:
            self.put(f"sys/devices/{path}/queue/rotational", f"{rotational}\n")
        for slave in slaves:
            link = self.root / f"sys/devices/{path}/slaves" / os.path.basename(slave)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(self.root / f"sys/devices/{slave}")
        for link in (f"sys/dev/block/{number}", f"sys/class/block/{os.path.basename(path)}"):
            (self.root / link).parent.mkdir(parents=True, exist_ok=True)
            (self.root / link).unlink(missing_ok=True)
            (self.root / link).symlink_to(self.root / f"sys/devices/{path}")

    def examine(self, path=None) -> dict[str, list]:
        out: dict[str, list] = {}
        for f in doctor.examine(self.home if path is None else path, self.roots):
            assert f.level in LEVELS and "\n" not in f.text + f.advice and f.text
            json.dumps(f.data)
            out.setdefault(f.topic, []).append(f)
        return out

    def one(self, topic: str, path=None):
        (found,) = self.examine(path)[topic]
        return found


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def test_a_healthy_machine_has_nothing_to_say(system):
    found = system.examine()
    bad = [
        f for fs in found.values() for f in fs if f.level != "ok" and f.topic not in ("gpu", "cpu")
    ]
    assert not bad
    want = {
        "python",
        "packages",
        "engine",
        "cpu",
        "cores",
        "threads",
        "memory",
        "budget",
        "huge pages",
        "swap",
    }
    want |= {
        "overcommit",
        "open files",
        "locked memory",
        "address space",
        "file system",
        "disk",
        "free space",
        "model",
    }
    assert want <= set(found)
    assert "12 GiB available of 16 GiB" in found["memory"][0].text
    assert (
        found["cpu"][0].text.startswith("Some CPU 3000: ")
        and engine.isas()[0] in found["cpu"][0].text
    )
    assert found["budget"][0].data["budget"] == 9 * GIB
    assert found["locked memory"][0].text == "8 MiB"


def test_the_real_machine(tmp_path):
    found = {f.topic: f for f in doctor.examine(tmp_path)}
    assert "not known" not in found["memory"].text + found["open files"].text
    assert not os.listdir(tmp_path)  # the measured file is gone
    assert found["engine"].data["build"] == engine.build()


def test_huge_pages(system):
    place = "sys/kernel/mm/transparent_hugepage/enabled"
    system.put(place, "always madvise [never]\n")
    found = system.one("huge pages")
    assert found.level == "warning" and "3 to 5 times" in found.text
    assert found.advice == f"echo madvise | sudo tee /{place}"
    system.put(place, "[always] madvise never\n")
    assert system.one("huge pages").level == "ok"
    system.put("proc/self/status", "Cpus_allowed:\tff\nTHP_enabled:\t0\n")
    assert system.examine()["huge pages"][0].level == "warning"
    (system.root / place).unlink()
    assert system.examine()["huge pages"][1].level == "note"


@pytest.mark.parametrize(
    ("quota", "level"), [("50000", "warning"), ("150000", "note"), ("900000", "ok")]
)
def test_cpu_quota(system, quota, level):
    system.put("cgroup/cpu.max", f"{quota} 100000\n")
    found = system.examine()
    assert found["cpu quota"][0].level == level
    assert f"{int(quota) / 100000:g} cores" in found["cpu quota"][0].text
    assert str(system.root / "cgroup/cpu.max") in found["cpu quota"][0].text
    assert found["threads"][0].text.startswith({"warning": "1 ", "note": "2 ", "ok": "8 "}[level])


def test_one_core_of_eight(system):
    system.put("proc/self/status", "Cpus_allowed:\t04\n")
    found = system.examine()
    assert (
        found["cores"][0].level == "note"
        and found["cores"][0].text == "1 in the affinity mask of 8 online"
    )
    assert found["threads"][0].text.startswith("1 ")
    system.put("sys/devices/system/cpu/online", "0,2-3\n")
    assert "of 3 online" in system.one("cores").text


def test_every_group_limit_is_named(system):
    system.put("proc/self/cgroup", "0::/a/b\n")
    system.put("cgroup/a/memory.max", f"{3 * GIB}\n")
    system.put("cgroup/a/b/memory.max", f"{GIB}\n")
    system.put("cgroup/a/b/memory.current", f"{GIB // 2}\n")
    system.put("cgroup/a/b/memory.high", f"{32 << 20}\n")
    found = {f.data["file"].split("/cgroup/")[1]: f for f in system.examine()["control group"]}
    assert {k: f.level for k, f in found.items()} == {
        "a/memory.max": "ok", "a/b/memory.max": "warning", "a/b/memory.high": "error",
    }  # fmt: skip
    assert "512 MiB in use" in found["a/b/memory.max"].text
    assert system.one("budget").data["budget"] == 24 << 20


def test_little_memory(system):
    system.put("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    assert system.one("memory").level == "warning"
    system.put("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 40000 kB\n")
    assert system.one("memory").level == "error"


def test_swap(system):
    memory = (
        "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\nSwapTotal: 1048576 kB\nSwapFree: {} kB\n"
    )
    for free, level in ((1048576, "note"), (1000, "warning")):
        system.put("proc/meminfo", memory.format(free))
        assert system.one("swap").level == level


def test_strict_overcommit(system):
    system.put("proc/sys/vm/overcommit_memory", "2\n")
    memory = "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB\nCommitLimit: {} kB\nCommitted_AS: 2097152 kB\n"
    for limit, level in ((6 << 20, "warning"), (40 << 20, "note")):
        system.put("proc/meminfo", memory.format(limit))
        assert system.one("overcommit").level == level
    system.put("proc/meminfo", memory.format(6 << 20))
    assert (
        "4 GiB" in system.one("overcommit").text
        and "--ram 3072M" in system.one("overcommit").advice
    )


def test_process_limits(system):
    system.limits(space=str(4 * GIB))
    assert system.one("address space").level == "warning"
    system.limits(data=str(4 * GIB))
    assert system.one("data size").level == "warning" and "address space" not in system.examine()
    for files, level in (("256", "ok"), ("128", "warning"), ("32", "error"), ("unlimited", "ok")):
        system.limits(files=files)
        assert system.one("open files").level == level
    system.limits(files="33")
    assert [f.level for f in system.examine(MODEL)["open files"]] == ["error", "error"]  # 6 shards


# ---- disks ----


def mounted(system, kind, device="0:50", source="x", options="rw"):
    system.put("proc/self/mountinfo", f"1 0 {device} / / rw - {kind} {source} {options}\n")
    return system.examine()


@pytest.mark.parametrize(
    ("kind", "options", "level", "word"),
    [
        ("nfs4", "rw", "warning", "network"),
        ("9p", "rw", "warning", "network"),
        ("virtiofs", "rw", "warning", "host"),
        ("fuse.sshfs", "rw", "warning", "FUSE"),
        ("fuseblk", "rw", "warning", "FUSE"),
        ("tmpfs", "rw", "warning", "take memory"),
        ("overlay", "rw,lowerdir=/a", "note", "container"),
        ("btrfs", "rw,compress=zstd:3", "note", "compressed"),
        ("btrfs", "rw", "ok", "btrfs"),
        ("xfs", "rw", "ok", "xfs"),
    ],
)
def test_file_systems(system, kind, options, level, word):
    found = mounted(system, kind, options=options)
    (f,) = found["file system"]
    assert f.level == level and word in f.text
    assert ("disk" in found) == (kind != "tmpfs")


def test_disk_types(system):
    assert system.one("disk").text == "sda: solid state"  # of the partition 8:1
    system.device("8:0", "pci0/ata1/block/sda", rotational=1)
    assert system.one("disk").level == "warning" and "seek" in system.one("disk").advice
    system.device("254:0", "pci0/virtio1/block/vda", rotational=1)  # says nothing there
    assert mounted(system, "ext4", "254:0")["disk"][0].text.startswith("vda: virtual")
    system.device("259:0", "pci0/nvme/nvme0/nvme0n1", rotational=0)
    assert mounted(system, "ext4", "259:0")["disk"][0].text == "nvme0n1: solid state"
    slaves = ("pci0/nvme/nvme0/nvme0n1", "pci0/ata1/block/sda")
    system.device("253:0", "virtual/block/dm-0", rotational=0, slaves=slaves)
    found = mounted(system, "ext4", "253:0")["disk"][0]
    assert found.level == "warning" and found.text == "dm-0 over nvme0n1, sda: rotational"
    system.device("7:0", "virtual/block/loop0", rotational=0)
    assert mounted(system, "ext4", "7:0")["disk"][0].text.startswith("loop0: virtual")
    # btrfs numbers its mounts itself
    assert mounted(system, "btrfs", "0:33", "/dev/sda1")["disk"][0].text == "sda: rotational"
    assert mounted(system, "nfs", "0:34", "server:/x")["disk"][0].level == "note"
    (system.root / "sys/devices/pci0/ata1/block/sda/queue/rotational").unlink()
    assert mounted(system, "ext4", "8:1")["disk"][0].text == "sda: unknown"


@pytest.mark.parametrize(
    ("speed", "level", "words"),
    [
        (disk.Speed("x", True, "", 9, 1.0, 9e8, 9 << 20), "ok", "900 MB/s"),
        (
            disk.Speed("x", True, "", 9, 1.0, 9e8, 8 << 20),
            "ok",
            "the engine's reader; direct; more",
        ),
        (disk.Speed("x", True, "", 9, 1.0, 9e8, 9 << 20, False), "ok", "without the engine"),
        (disk.Speed("x", False, "no", 9, 1.0, 9e7, 9 << 20), "warning", "page cache dropped"),
        (MosaicError("bad sector", "EIO"), "note", "bad sector"),
        (disk.Speed("x", True, reason="because"), "note", "because"),
        (OSError(errno.EROFS, "Read-only file system"), "note", "Read-only"),
    ],
)
def test_speed_findings(system, monkeypatch, speed, level, words):
    def measure(*args):
        if isinstance(speed, Exception):
            raise speed
        return speed

    monkeypatch.setattr(disk, "measure", measure)
    system.roots = Roots(system.roots.proc, system.roots.sys, system.roots.cgroup, 1.0)
    found = system.examine()
    assert found["read speed"][0].level == level and words in found["read speed"][0].text
    if isinstance(speed, disk.Speed) and speed.reads:
        assert (found["direct reads"][0].level == "ok") == speed.direct
    system.device("8:0", "pci0/virtio1/block/sda", rotational=0)
    system.device("8:1", "pci0/virtio1/block/sda/sda1")
    assert ("host's cache" in system.one("read speed").text) == (level in ("ok", "warning"))


def test_records_of_a_pack_are_measured(system, monkeypatch):
    folder, asked = system.root / "pack", []
    folder.mkdir()
    for name, size in (("model.safetensors", 1), ("experts-00001.bin", 2)):
        (folder / name).write_bytes(bytes(size))
    (folder / "mosaic.json").write_text('{"files": [{"name": "experts-00001.bin"}]}')
    monkeypatch.setattr(
        disk,
        "measure",
        lambda _, file, *rest: asked.append(file) or disk.Speed("", True, reason="x"),
    )
    system.roots = Roots(system.roots.proc, system.roots.sys, system.roots.cgroup, 1.0)
    system.examine(folder)
    assert asked == [folder / "experts-00001.bin"]


def test_files_in_memory_are_not_measured(system):
    system.roots = Roots(system.roots.proc, system.roots.sys, system.roots.cgroup, 1.0)
    found = mounted(system, "tmpfs")
    assert "there is no disk" in found["read speed"][0].text and "direct reads" not in found


# ---- models ----


@pytest.fixture
def copy(system):
    shutil.copytree(MODEL, system.root / "model")
    return system.root / "model"


def test_a_model(system, copy):
    found = system.examine(copy)
    assert (
        found["model"][0].level == "ok"
        and "qwen3_5_moe, complete: 6 file(s)" in found["model"][0].text
    )
    assert found["tokenizer"][0].level == "warning"
    assert found["model memory"][0].level == "ok"
    (copy / "tokenizer.json").write_text("{}")
    assert system.one("tokenizer", copy).level == "ok"


def test_a_model_that_does_not_run(system, copy):
    config = json.loads((copy / "config.json").read_text())
    shards = sorted(copy.glob("*.safetensors"))
    (copy / "config.json").write_text(
        json.dumps(config | {"architectures": ["Other"], "model_type": "other"})
    )
    found = system.one("model", copy)
    assert found.level == "error" and "not supported" in found.text
    (copy / "config.json").write_text(json.dumps(config))
    data = shards[0].read_bytes()
    shards[0].write_bytes(data[:-10])
    assert system.one("model", copy).level == "error"
    shards[0].unlink()
    found = system.one("model", copy)
    assert found.level == "error" and shards[0].name in found.text and "download" in found.advice
    (copy / "config.json").unlink()
    assert "no config.json" in system.one("model", copy).text


def test_a_model_that_does_not_fit(system):
    system.put("cgroup/memory.max", f"{64 << 20}\n")
    found = system.one("model memory", MODEL)
    assert found.level == "error" and "the budget is 48 MiB" in found.text


def test_folders_that_are_none(system):
    system.put("home/file", "x")
    for path, word in (
        (system.home / "no", "no such"),
        (system.home / "file", "not a folder"),
        ("", "no such"),
    ):
        found = system.examine(path)
        assert found["folder"][0].level == "error" and word in found["folder"][0].text
        assert "model" not in found and "disk" not in found


# ---- the installation ----


@pytest.mark.parametrize(
    ("build", "level"),
    [
        ("gcc 1.2, optimized", "ok"),
        ("gcc 1.2, not optimized", "warning"),
        ("gcc 1.2, optimized, fast-math", "error"),
        ("gcc 1.2, optimized, AVX everywhere", "note"),
        ("gcc 1.2, not optimized, fast-math", "error"),
        ("gcc 1.2, not optimized, sanitized, AVX everywhere", "warning"),
    ],
)
def test_builds(system, monkeypatch, build, level):
    monkeypatch.setattr(engine, "build", lambda: build)
    found = system.one("engine")
    assert found.level == level and build in found.text and bool(found.advice) == (level != "ok")


def test_the_build_is_told_by_the_compiler():
    compiler, words = engine.build().split(", ", 1)
    assert compiler.split()[0] in ("gcc", "clang") and compiler.split()[1][0].isdigit()
    assert "optimized" in words and "fast-math" not in words


def test_packages(system, monkeypatch):
    real = doctor.importlib.metadata.version

    def version(name):
        if name == "tqdm":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return {"numpy": "1.2.9", "cffi": "1.100"}.get(name) or real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    bad = [f for f in system.examine()["packages"] if f.level == "error"]
    assert [f.text.split()[0] for f in bad] == ["numpy", "tqdm"]
    assert all(f.advice.startswith("pip install") for f in bad)


def test_scalar_only(system, monkeypatch):
    monkeypatch.setattr(engine, "isas", lambda: ["scalar"])
    monkeypatch.setattr(engine, "cpu", lambda: "")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert system.one("cpu").level == "warning"
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert system.one("cpu").level == "note"


def test_a_missing_extension_is_found(tmp_path):
    code = (
        "import sys; sys.modules['mosaic_c._engine'] = None\n"
        "from mosaic_c import cli; sys.exit(cli.main(['doctor', sys.argv[1]]))"
    )
    r = subprocess.run(
        [sys.executable, "-c", code, MODEL], capture_output=True, text=True, timeout=60
    )
    assert r.returncode == 1 and "Traceback" not in r.stderr
    assert "the extension does not load" in r.stdout and "memory" in r.stdout


# ---- whatever is missing ----


def test_nothing_there(tmp_path):
    roots = Roots(tmp_path / "p", tmp_path / "s", tmp_path / "c", 0)
    found = {f.topic: f for f in doctor.examine(tmp_path, roots)}
    assert found["memory"].level == found["budget"].level == "warning"
    for topic in ("huge pages", "swap", "overcommit", "process limits", "file system"):
        assert found[topic].level == "note" and "not known" in found[topic].text
    assert not [f for f in found.values() if f.level == "error"]


def test_foreign_names_stay_in_their_line(system):
    system.put("proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/x\\012y rw\n")
    assert system.one("file system").text == "ext4 on / (/dev/x?y)"


def test_unreadable(system, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    found = doctor.examine(system.home, system.roots)
    assert {"memory", "huge pages", "file system"} <= {f.topic for f in found}


FILES = (
    "proc/meminfo", "proc/self/status", "proc/cpuinfo", "proc/sys/vm/overcommit_memory", "proc/self/mountinfo",
    "proc/self/cgroup", "proc/self/limits", "cgroup/memory.max", "cgroup/cpu.max",
    "sys/devices/system/cpu/online", "sys/kernel/mm/transparent_hugepage/enabled",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_in_any_file(data, tmp_path_factory):
    system = System(tmp_path_factory.mktemp("any"))
    for name in FILES:
        file = system.root / name
        text = file.read_bytes() if file.exists() else b"1"
        what = data.draw(st.sampled_from(["as it is", "cut", "bytes", "number", "folder"]))
        if what == "folder":
            file.unlink(missing_ok=True)
            file.mkdir()
        elif what != "as it is":
            n = data.draw(st.integers(0, len(text)))
            noise = data.draw(st.binary(max_size=40))
            huge = str(data.draw(st.integers(-(10**30), 10**30))).encode()
            file.write_bytes({"cut": text[:n], "bytes": text[:n] + noise, "number": huge}[what])
    system.examine()
    shutil.rmtree(system.root)


# ---- the command ----


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(disk, "LARGEST", 16 << 20)
    status = cli.main(["doctor", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert status == (1 if result["counts"]["error"] else 0)
    assert sum(result["counts"].values()) == len(result["findings"])
    assert {"topic", "level", "text", "advice", "data"} == set(result["findings"][0])
    assert cli.main(["doctor", str(tmp_path / "none")]) == 1
    out = capsys.readouterr().out
    assert (
        "error    folder" in out and "-> name a model's folder" in out and out.endswith("1 error\n")
    )
