"""The mount of a path, and reads that are measured: by the engine or, without it, random, none twice; past the page
cache or said not to be."""

import errno
import fcntl
import os
import sys

import pytest

from mosaic_c import disk


def test_the_mount_of_a_path(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/a rw\n"
        "2 1 8:2 / /data rw master:2 propagate_from:3 - xfs /dev/b rw\n"
        "3 1 8:3 / /data/my\\040models rw - ext4 /dev/c rw\n"
        "4 1 8:4 / /data rw - nfs server:/x rw\n"
        "garbage\n5 1 8:5 / - x\n"
    )

    def at(path):
        return disk.mount_of(path, tmp_path).device

    assert at("/data") == at("/data/x") == "8:4"  # mounted over
    assert at("/data2") == at("/") == "8:1"
    assert at("/data/my models/q") == "8:3" and at("/data/my modelsq") == "8:4"
    assert disk.mount_of("/", tmp_path / "none") is None


def weights(folder, mib):
    with open(folder / "model.safetensors", "wb") as f:
        f.write(os.urandom(1 << 20) * mib)
        f.flush()
        os.fsync(f.fileno())
    return folder / "model.safetensors"


@pytest.fixture
def no_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "mosaic_c.engine_bench", None)


def test_the_engine_reads(tmp_path):
    speed = disk.measure(tmp_path, weights(tmp_path, 64), False, 0.1)
    assert speed.engine and speed.file == "model.safetensors" and speed.file_bytes == 64 << 20
    assert speed.reads > 0 and 0.1 <= speed.seconds < 5
    assert speed.bytes_s == pytest.approx((speed.reads << 20) / speed.seconds)


def test_a_file_that_is_too_short(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(disk, "SMALLEST", 0)
    assert "shorter" in disk.measure(tmp_path, tmp_path / "a.safetensors", False, 0.1).reason


def test_reads_are_random_and_none_twice(tmp_path, monkeypatch, no_extension):
    real, offsets, advice = os.preadv, [], []
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: offsets.append(at) or real(fd, b, at))
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: advice.append((len(offsets), a[3])))
    speed = disk.measure(tmp_path, weights(tmp_path, 70), False, 5.0)
    assert speed.file == "model.safetensors" and speed.reads == 70
    if speed.direct:
        assert offsets.pop(0) == 0 and not advice  # the probe
    assert sorted(offsets) == [i << 20 for i in range(70)] != offsets
    assert not speed.engine and abs(speed.bytes_s - (70 << 20) / speed.seconds) < 1


@pytest.mark.parametrize("at", ["open", "read"])
def test_without_direct_reads_the_page_cache_is_dropped_first(
    tmp_path, monkeypatch, no_extension, at
):
    calls = []
    real_fcntl, real_preadv, real_fadvise = fcntl.fcntl, os.preadv, os.posix_fadvise

    def refuse(fd, command, value=0):
        if at == "open" and command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, value)

    def preadv(fd, buffers, offset):
        if at == "read" and real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        calls.append("read")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: calls.append(a[3]) or real_fadvise(*a))
    speed = disk.measure(tmp_path, weights(tmp_path, 64), False, 5.0)
    assert not speed.direct and "Invalid argument" in speed.why_not and speed.reads == 64
    assert calls[:2] == [os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM]
    assert calls[-1] == os.POSIX_FADV_DONTNEED


def test_a_small_model_is_measured_by_a_temporary_file(tmp_path, monkeypatch, no_extension):
    monkeypatch.setattr(disk, "LARGEST", 16 << 20)
    small = weights(tmp_path, 3)
    speed = disk.measure(tmp_path, small, False, 1.0)
    assert speed.file == "a temporary file" and 8 <= speed.reads <= 16
    assert os.listdir(tmp_path) == ["model.safetensors"]

    def refuse(**options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    assert disk.measure(tmp_path, small, False, 1.0).reads == 3
    with pytest.raises(PermissionError):
        disk.measure(tmp_path, None, False, 1.0)


def test_reads_end_in_time(tmp_path, monkeypatch, no_extension):
    now = iter(range(0, 10**6))
    monkeypatch.setattr(disk.time, "perf_counter", lambda: next(now) * 0.1)
    assert 0 < disk.measure(tmp_path, weights(tmp_path, 64), False, 1.0).reads <= 10
