"""The half of `doctor` that looks at a folder: its disk, how fast that reads, and the model in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mosaic_c import disk
from mosaic_c.errors import MosaicError
from mosaic_c.findings import Finding, Roots, budget_of
from mosaic_c.jsonfile import reason, shown_path
from mosaic_c.limits import default_threads, format_size
from mosaic_c.pack import largest_file

SLOW = 200e6  # bytes/s; a solid-state disk reads several times that


def folder_disk(path: str | os.PathLike[str], roots: Roots) -> Iterator[Finding]:
    folder = Path(os.path.realpath(path))
    if not os.path.isdir(path):
        what = "not a folder" if os.path.lexists(path) else "no such folder"
        yield Finding(
            "folder", "error", f"{shown_path(path)}: {what}", "name a model's folder or any other"
        )
        return
    try:
        os.scandir(folder).close()
    except OSError as error:
        text = f"{shown_path(path)}: cannot be read: {reason(error)}"
        yield Finding("folder", "error", text, "let this user read it")
        return
    mount = disk.mount_of(folder, roots.proc)
    device = None if mount is None else disk.device_of(mount, roots.sys)
    yield _file_system(mount)
    in_memory = mount is not None and mount.kind in disk.MEMORY
    if not in_memory:
        yield _device(device)
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    yield Finding("free space", "ok", f"{format_size(free)} on {mount.point if mount else folder}",
                  data={"free": free})  # fmt: skip
    if roots.seconds:
        yield from _speed(folder, in_memory, device, roots)


def _file_system(mount: disk.Mount | None) -> Finding:
    if mount is None:
        return Finding("file system", "note", "not known: /proc/self/mountinfo does not tell")
    text = f"{mount.kind} on {mount.point} ({mount.source})"
    data = asdict(mount)
    local = "copy the model to a local disk"
    if mount.kind in disk.NETWORK or mount.kind.startswith("fuse"):
        what = "through FUSE" if mount.kind.startswith("fuse") else "over a network or from a host"
        return Finding("file system", "warning", f"{text}: read {what}", local, data)
    if mount.kind in disk.MEMORY:
        return Finding(
            "file system", "warning", f"{text}: these files take memory themselves", local, data
        )
    if mount.kind in ("overlay", "aufs"):
        advice = "keep models on a mounted volume, not in a container's layers"
        return Finding("file system", "note", f"{text}: layers of a container", advice, data)
    squeezed = [x for x in mount.options if x.startswith(("compress=", "compress-force="))]
    if mount.kind in ("zfs", "squashfs", "erofs") or squeezed:
        what = "may be compressed: then direct reads are refused or slower"
        return Finding("file system", "note", f"{text}: {what}", "", data)
    return Finding("file system", "ok", text, data=data)


def _device(device: disk.Device | None) -> Finding:
    if device is None:
        return Finding("disk", "note", "no block device is known below this folder")
    text = f"{device.name}" + (f" over {', '.join(device.over)}" if device.over else "")
    data = asdict(device)
    if device.how == "rotational":
        advice = "move the model to a solid-state disk: each expert is a seek"
        return Finding("disk", "warning", f"{text}: rotational", advice, data)
    if device.how == "virtual":
        return Finding("disk", "ok", f"{text}: virtual, what lies under it is not told", "", data)
    level = "note" if device.how == "unknown" else "ok"
    return Finding("disk", level, f"{text}: {device.how}", "", data)


def _speed(
    folder: Path, in_memory: bool, device: disk.Device | None, roots: Roots
) -> Iterator[Finding]:
    try:
        speed = disk.measure(folder, largest_file(folder), in_memory, roots.seconds)
    except (OSError, MosaicError) as error:
        advice = (
            ""
            if os.access(folder, os.W_OK)
            else "name a folder that you may write to, or with a model"
        )
        why = reason(error) if isinstance(error, OSError) else str(error)
        yield Finding("read speed", "note", f"not measured: {why}", advice)
        return
    data = asdict(speed)
    if speed.reason:
        yield Finding("read speed", "note", f"not measured: {speed.reason}", "", data)
        return
    if speed.direct:
        yield Finding("direct reads", "ok", "work (O_DIRECT)")
    else:
        yield Finding(
            "direct reads", "note", f"{speed.why_not}: experts are read through the page cache"
        )
    text = (
        f"{speed.bytes_s / 1e6:.0f} MB/s: {speed.reads} random reads of 1 MiB of {speed.file} in "
        f"{speed.seconds:.2f} s, {disk.IN_FLIGHT} at a time, "
    )
    text += "by the engine's reader; " if speed.engine else "without the engine, which is faster; "
    text += "direct" if speed.direct else "buffered, its page cache dropped before"
    if device is not None and device.how == "virtual":
        text += "; a host's cache may be in it"
    elif speed.reads * disk.BLOCK > speed.file_bytes:
        text += "; more than the file has: the disk's own cache may be in it"
    if speed.bytes_s < SLOW:
        yield Finding(
            "read speed", "warning", text, "expect seconds for a token; use a faster disk", data
        )
    else:
        yield Finding("read speed", "ok", text, data=data)


def model(path: str | os.PathLike[str], roots: Roots) -> Iterator[Finding]:
    """Of a folder that holds a model or a part of one; nothing for any other."""
    folder = Path(path)
    if not os.path.isdir(path):
        return
    if not (folder / "config.json").exists() and not any(folder.glob("*.safetensors*")):
        yield Finding("model", "ok", "not a model's folder: no config.json, no safetensors")
        return
    from mosaic_c.model import TOKENIZER
    from mosaic_c.opening import plan_model

    budget = budget_of(roots)
    try:
        threads = default_threads(roots.limits())
        checkpoint, located, plan = plan_model(folder, budget or 1 << 62, threads=threads, vram=0)
    except MosaicError as error:
        advice = {"EUNSUPPORTED": "", "EIO": "download it again", "ENOENT": "download the rest"}
        yield Finding(
            "model", "error", str(error), advice.get(error.code, ""), {"code": error.code}
        )
        return
    size = sum(checkpoint.sizes)
    text = f"{located.plan.family}, complete: {len(checkpoint.files)} file(s), {format_size(size)}"
    yield Finding("model", "ok", text, data={"family": located.plan.family, "bytes": size})
    if (folder / TOKENIZER).is_file():
        yield Finding("tokenizer", "ok", TOKENIZER)
    else:
        advice = f"download {TOKENIZER} of the model"
        yield Finding("tokenizer", "warning", f"no {TOKENIZER}: token ids only", advice)
    rows = re.search(r"(?m)^Max open files\s+(\d+)", roots.read("proc/self/limits"))
    if rows and int(rows[1]) < len(checkpoint.files) + 32:
        text = f"{rows[1]} open files are fewer than {len(checkpoint.files)} shards and some need"
        yield Finding("open files", "error", text, f"ulimit -n {len(checkpoint.files) + 256}")
    if budget is None:
        return
    data = {"floor": plan.floor, "useful": plan.useful, "budget": budget}
    text = f"needs {format_size(plan.floor)} at least, keeps a token's experts from {format_size(plan.useful)} on"
    if not plan.fits:
        advice = (
            f"free memory until {format_size(plan.floor)} fit, or give generate a smaller --ctx"
        )
        yield Finding(
            "model memory", "error", f"{text}; the budget is {format_size(budget)}", advice, data
        )
    elif budget < plan.useful:
        yield Finding(
            "model memory", "note", f"{text}; most is read again for each token", "", data
        )
    else:
        yield Finding("model memory", "ok", text, data=data)
