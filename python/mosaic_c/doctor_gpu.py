"""What `doctor` says of the GPU tier: how this was built, what devices are here, and what stands between the two."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

from mosaic_c.errors import MosaicError
from mosaic_c.findings import Finding, Roots
from mosaic_c.limits import format_size

DEVICES = 8  # looked at, at most
LITTLE = 1 << 30  # below it a cache of experts is hardly worth having
INSTALL = "pip install --force-reinstall --no-deps ."


def gpu(roots: Roots) -> Iterator[Finding]:
    try:
        from mosaic_c import engine
    except ImportError:  # the finding of the engine says so
        return
    driver = _driver(roots)
    why = engine.gpu()
    if why is not None:
        yield _without(why, driver)
        return
    found, bad = [], []
    for i in range(DEVICES):
        try:
            found.append(_device(i, engine.gpu_probe(i)))
        except MosaicError as error:
            if error.code == "ERANGE" or str(error) in (str(e) for _, e in bad):
                break  # no more of them, or what concerns all
            bad.append((i, error))
    if not found:
        text = f"built with CUDA, but no device can be used, all runs on the CPU: {bad[0][1]}"
        data: dict[str, Any] = {"built": True, "driver": driver}
        there = bool(driver) or "driver is" in str(bad[0][1])  # in WSL2 /proc does not show it
        yield Finding("gpu", "warning" if there else "note", text, _repair(there), data)
        return
    yield from found
    for i, error in bad:
        advice = f"use another one: --gpu {found[0].data['index']}"
        yield Finding("gpu", "warning", f"GPU {i} cannot be used: {error}", advice)


def _driver(roots: Roots) -> str:
    """The version of NVIDIA's kernel module, "" without one."""
    text = roots.read("proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", f"{text} ")
    return found[1] if found else "unknown" if text else ""


def _without(why: str, driver: str) -> Finding:
    data = {"built": False, "driver": driver}
    if not driver:
        return Finding("gpu", "note", f"{why}; no NVIDIA driver in /proc/driver either", data=data)
    if "MOSAIC_CUDA=0" in why:
        return Finding("gpu", "note", f"{why}; NVIDIA driver {driver} is here",
                       f"to use it: MOSAIC_CUDA=1 {INSTALL}", data)  # fmt: skip
    if "nvcc failed" in why:
        advice = f"mend that (MOSAIC_CUDA=1 pip install -v . shows all of it), then MOSAIC_CUDA=1 {INSTALL}"
    elif shutil.which("nvcc") is None:
        advice = f"install the CUDA toolkit, then MOSAIC_CUDA=1 {INSTALL}"
    else:
        advice = f"MOSAIC_CUDA=1 {INSTALL}"
    return Finding("gpu", "warning", f"{why}, so NVIDIA driver {driver} is no use", advice, data)


def _repair(driver: bool) -> str:
    if not driver:
        return "without an NVIDIA GPU nothing is amiss; with one install its driver"
    return "update the driver, and see whether nvidia-smi finds the device; in a container pass the GPU through"


def _device(i: int, info: dict[str, Any]) -> Finding:
    total, free, capability = info["total"], info["free"], info["capability"]
    text = (
        f"GPU {i}: {info['name']}, {format_size(free)} free of {format_size(total)}, compute capability "
        f"{capability // 10}.{capability % 10}, driver for CUDA {_version(info['driver'])}, built with "
        f"{_version(info['runtime'])}"
    )
    data = {"built": True, "index": i} | info
    if "emulat" in info["name"].lower():
        text = f"GPU {i}: {info['name']}, {format_size(free)} free of {format_size(total)}: for tests, slower than none"
        return Finding("gpu", "warning", text, f"MOSAIC_CUDA=auto {INSTALL}", data)
    if free < LITTLE:
        advice = "close what uses it (nvidia-smi lists programs)"
        return Finding("gpu", "note", f"{text}: little to spare", advice, data)
    return Finding("gpu", "ok", text, data=data)


def _version(number: int) -> str:
    """13.0 of 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"
