"""`bench io`: reads that really reach the disk, figures that agree with each other, one-line errors, nothing left."""

import json
import os
from collections import namedtuple

import pytest

from mosaic_c import bench_io, engine, engine_bench
from mosaic_c.cli import main
from mosaic_c.errors import MosaicError

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "large"
    with open(path, "wb") as f:
        f.write(os.urandom(32 * MIB))
        f.flush()
        os.fsync(f.fileno())
    return path


def direct_works(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def bytes_from_disk():
    with open("/proc/self/io", encoding="ascii") as f:
        return int(dict(line.split(": ") for line in f)["read_bytes"])


def test_a_run_and_its_figures(capsys, large):
    args = ["bench", "io", str(large), "--size", "256K", "--lanes", "1,2", "--seconds", "0.1"]
    assert main([*args, "--io", "direct,pread", "--runs", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["file_bytes"] == 32 * MIB and not result["temporary"]
    assert [(r["mode"], r["lanes"], r["depth"]) for r in result["rows"]] == [
        ("direct", 1, 2), ("direct", 2, 3), ("pread", 1, 2), ("pread", 2, 3),
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["direct"] == (row["mode"] == "direct" and direct_works(large))
        assert row["min_gbs"] <= row["gbs"] <= row["max_gbs"] and len(row["runs"]) == 2
        for run in row["runs"]:
            assert run["bytes"] == run["reads"] * (256 << 10) > 0 and run["wall_s"] >= 0.1
            assert 0 < run["cpu_s"] < 3 * run["wall_s"] and run["lanes"] == row["lanes"]
            assert 1 <= run["lanes_ran"] <= row["lanes"]
        speeds = [r["bytes"] / r["wall_s"] * 1e-9 for r in row["runs"]]
        assert row["gbs"] == pytest.approx(sum(speeds) / 2)


@pytest.mark.parametrize("mode", ["direct", "pread"])
def test_reads_come_from_the_disk_and_leave_nothing(large, mode):
    large.read_bytes()  # all of it in the page cache
    before = bytes_from_disk()
    if before == 0:
        pytest.skip("the system does not count reads, or this is a file system in memory")
    run = engine_bench.read_file(str(large), mode, 2, 4, 256 << 10, 4096, 0.2, 1)
    assert run["cached"] == 0
    # what a warm-up of depth reads took is not in bytes; two reads that overlap may share a page
    assert bytes_from_disk() - before >= 0.95 * run["bytes"]
    again = engine_bench.read_file(str(large), mode, 1, 1, MIB, MIB, 0.01, 1)
    assert again["cached"] == 0 and again["lanes_ran"] == 1


def test_the_warm_up_is_not_counted(large):
    run = engine_bench.read_file(str(large), "direct", 2, 5, MIB, MIB, 1e-9, 1)
    assert run["reads"] == 5 and run["bytes"] == 5 * MIB


def test_a_page_that_cannot_be_dropped_is_counted(large):
    import mmap

    with open(large, "r+b") as f, mmap.mmap(f.fileno(), MIB) as m:
        m[0] = 1  # dirty and mapped
        run = engine_bench.read_file(str(large), "pread", 1, 1, MIB, MIB, 0.01, 1)
    assert 0 < run["cached"] < 2 * MIB


def test_a_mode_that_this_system_lacks_is_left_out(monkeypatch, capsys, large):
    real = engine_bench.read_file

    def without_direct(path, mode, *args):
        if mode == "direct":
            raise MosaicError("no such thing here", "ESYS")
        return real(path, mode, *args)

    monkeypatch.setattr(engine_bench, "read_file", without_direct)
    args = ["bench", "io", str(large), "--size", "64K", "--lanes", "1", "--seconds", "0.01"]
    assert main([*args, "--runs", "1"]) == 0
    out = capsys.readouterr().out
    assert "direct was left out: no such thing here" in out and "\npread " in out
    assert main([*args, "--io", "direct"]) == 1  # asked for by name


@pytest.mark.parametrize("mode", [m for m in engine.IO_MODES if m == "mmap"])
def test_a_mapped_file_is_read_once(large, mode):
    before = bytes_from_disk()
    run = engine_bench.read_file(str(large), mode, 4, 8, 256 << 10, 256 << 10, 20.0, 3)
    assert run["bytes"] == 32 * MIB and run["wall_s"] < 20  # every place, then it ends
    if before:
        assert bytes_from_disk() - before >= 32 * MIB


def test_the_temporary_file_leaves_no_trace(capsys, tmp_path):
    args = ["bench", "io", str(tmp_path), "--size", "64K", "--file-size", "4M", "--lanes", "1"]
    fds = len(os.listdir("/proc/self/fd"))
    assert main([*args, "--seconds", "0.05", "--runs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"a temporary file in {tmp_path}, 4 MiB" in out and "times the file" in out
    for mode in engine.IO_MODES:
        assert (f"\n{mode} " in out) == (mode != "auto")
    assert os.listdir(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("write", KeyboardInterrupt),
        ("write", OSError(28, "full")),
        ("read", KeyboardInterrupt),
        ("read", MosaicError("broken")),
    ],
)
def test_nor_does_one_that_ends_early(monkeypatch, capsys, tmp_path, where, error):
    def stop(*args):
        assert os.listdir(tmp_path) == []  # even a kill leaves nothing
        raise error

    monkeypatch.setattr(*((os, "write") if where == "write" else (engine_bench, "read_file")), stop)
    fds = len(os.listdir("/proc/self/fd"))
    status = main(["bench", "io", str(tmp_path), "--file-size", "64M"])
    assert status == (130 if error is KeyboardInterrupt else 1)
    assert os.listdir(tmp_path) == [] and len(os.listdir("/proc/self/fd")) == fds
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_model_folder_gives_its_largest_shard(tmp_path):
    for name, size in (("a.safetensors", 1), ("b.safetensors", 2), ("c.bin", 3)):
        (tmp_path / name).write_bytes(os.urandom(size * MIB))
    with bench_io.disk(tmp_path, 0, 4096) as file:
        assert file.path == str(tmp_path / "b.safetensors") and file.size == 2 * MIB
    (tmp_path / "mosaic.json").write_text('{"files": [{"name": "c.bin"}]}')  # records of a pack
    with bench_io.disk(tmp_path, 0, 4096) as file:
        assert file.path == str(tmp_path / "c.bin") and file.size == 3 * MIB


def fails(capsys, status, args, *words):
    assert main(["bench", "io", *args]) == status
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1, err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--io", "direct,uring9"], ["uring9", "pread"]),
        (["--lanes", "0"], ["0", "1 to 64"]),
        (["--lanes", "1,x"], ["1,x", "whole numbers"]),
        (["--lanes", "4", "--depth", "3"], ["--depth 3", "4"]),
        (["--size", "3MB"], ["3000000", "multiple of 4096"]),
        (["--size", "0"], ["0", "multiple of 4096"]),
        (["--seconds", "0"], ["at most 60"]),
        (["--seconds", "nan"], ["at most 60"]),
        (["--runs", "0"], ["1 to 99"]),
        (["--size", "4M"], ["32 MiB", "64 MiB", "--file-size"]),
    ],
)
def test_usage_errors(capsys, large, args, words):
    fails(capsys, 2, [str(large), *args], *words)


def test_files_that_tell_nothing(capsys, tmp_path):
    holes = tmp_path / "holes"
    with open(holes, "wb") as f:
        f.truncate(64 * MIB)
    fails(capsys, 1, [str(holes)], "holes", "64 MiB")
    fails(capsys, 1, [str(tmp_path / "none")], "none", "No such file")
    fails(capsys, 2, ["/dev/null"], "/dev/null", "a file or a folder")
    fails(capsys, 2, [str(tmp_path), "--file-size", "1M"], "1 MiB", "48 MiB")


def test_a_full_disk_is_told_before_the_work(monkeypatch, capsys, tmp_path):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(bench_io.shutil, "disk_usage", lambda path: usage(100 * MIB))
    fails(capsys, 1, [str(tmp_path), "--file-size", "90M"], "90 MiB", "100 MiB", "--file-size")


def test_too_little_memory(monkeypatch, capsys, large):
    monkeypatch.setattr(bench_io, "smallest_limit", lambda limits: (70 * MIB, "allowed"))
    fails(capsys, 1, [str(large), "--size", "1M", "--lanes", "8"], "9 MiB", "70 MiB allowed")


def test_the_engine_checks_for_itself(large, tmp_path):
    for lanes, depth, size in ((0, 1, 4096), (2, 1, 4096), (1, 1, 4095), (1, 1, 64 * MIB)):
        with pytest.raises(MosaicError):
            engine_bench.read_file(str(large), "pread", lanes, depth, size, 4096, 0.01, 0)
    with pytest.raises(MosaicError, match="not a regular file"):
        engine_bench.read_file(str(tmp_path), "pread", 1, 1, 4096, 4096, 0.01, 0)
