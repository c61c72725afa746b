"""What `doctor` says of GPUs, on recorded drivers and a device that is a fake (fake_gpu.py)."""

import pytest
from fake_gpu import MIB, WHY, FakeGpu

from mosaic_c import doctor_gpu, engine
from mosaic_c.errors import MosaicError
from mosaic_c.findings import LEVELS, Roots

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Aug 1 00:00:00 UTC 2025\nGCC version: 12\n"


@pytest.fixture
def find(tmp_path):
    roots = Roots(tmp_path / "proc", tmp_path / "sys", tmp_path / "cgroup", 0)

    def find(driver=""):
        if driver:
            file = tmp_path / "proc/driver/nvidia/version"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(VERSION.format(driver))
        found = list(doctor_gpu.gpu(roots))
        assert found and all(
            f.topic == "gpu" and f.level in LEVELS and "\n" not in f.text for f in found
        )
        return found

    return find


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@pytest.mark.parametrize(("why", "nvcc", "words"), [
    (WHY, None, "install the CUDA toolkit"),
    (WHY, "/usr/bin/nvcc", "MOSAIC_CUDA=1 pip install"),
    ("this build has no GPU tier: nvcc failed: x", "/usr/bin/nvcc", "mend that"),
])  # fmt: skip
def test_a_build_without(find, monkeypatch, why, nvcc, words):
    monkeypatch.setattr(engine, "gpu", lambda: why)
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: nvcc)
    (found,) = find()
    assert found.level == "note" and why in found.text and not found.advice
    (found,) = find("580.95.05")
    assert found.level == "warning" and "580.95.05" in found.text and words in found.advice


def test_a_build_without_that_was_asked_for(find, monkeypatch):
    monkeypatch.setattr(engine, "gpu", lambda: "no GPU tier: built with MOSAIC_CUDA=0")
    (found,) = find("580.95.05")
    assert found.level == "note" and "MOSAIC_CUDA=1" in found.advice


def test_a_device(find, gpu):
    (found,) = find("580.95.05")
    assert found.level == "ok" and not found.advice
    for words in (
        "Test GPU",
        "7 GiB free of 8 GiB",
        "capability 8.6",
        "CUDA 13.0",
        "built with 12.4",
    ):
        assert words in found.text
    gpu.info["free"] = 100 * MIB
    assert find()[0].level == "note" and "nvidia-smi" in find()[0].advice


@pytest.mark.parametrize(("change", "words", "advice"), [
    ({"name": "emulated GPU"}, "for tests", "MOSAIC_CUDA=auto"),
])  # fmt: skip
def test_a_device_that_is_no_good(find, gpu, change, words, advice):
    gpu.info |= change
    (found,) = find()
    assert found.level == "warning" and words in found.text and advice in found.advice


def test_no_device_for_a_build_with_cuda(find, gpu):
    gpu.probe_error = MosaicError("no NVIDIA driver here", "ESYS")
    (found,) = find()
    assert (
        found.level == "note" and "no NVIDIA" in found.text and "nothing is amiss" in found.advice
    )
    gpu.probe_error = MosaicError("the NVIDIA driver is of CUDA 12.0 and this build", "ESYS")
    (found,) = find()  # in WSL2 /proc does not show it
    assert found.level == "warning" and "update the driver" in found.advice
    (found,) = find("470.1")
    assert found.level == "warning" and "update the driver" in found.advice


def test_several_devices(find, gpu):
    gpu.info["devices"] = 20
    assert len(find()) == doctor_gpu.DEVICES
    gpu.info["devices"] = 2
    real = engine.gpu_probe

    def probe(device=0):
        if device:
            raise MosaicError("GPU 1: lost", "ESYS")
        return real(device)

    engine.gpu_probe = probe  # the fixture puts the real one back
    first, second = find()
    assert first.level == "ok" and second.level == "warning" and "GPU 1: lost" in second.text
