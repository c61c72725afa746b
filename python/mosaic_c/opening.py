"""Opening a model: from a folder and the caller's wishes to a memory plan, and to a loaded Model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mosaic_c import engine, engine_pure, modes, names, origin
from mosaic_c import vram as gpu_cache
from mosaic_c.bind import Located
from mosaic_c.budget import MB, MemoryPlan, largest_chunk, plan_memory, require_fit
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.errors import UsageError
from mosaic_c.limits import (
    MAX_THREADS,
    default_budget,
    default_threads,
    format_size,
    parse_size,
    read_limits,
    smallest_limit,
    usable_cores,
)
from mosaic_c.model import TOKENIZER, Model
from mosaic_c.session import Progress

MAX_SESSIONS = 1024


def plan_model(
    path: str | os.PathLike[str],
    ram: str | int | None = None,
    ctx: int | None = None,
    threads: int | None = None,
    io: str = "auto",
    policy: str = "auto",
    slots: int | None = None,
    kv: str = "bf16",
    text: bool = False,
    source: str | os.PathLike[str] | None = None,
    vram: str | int | None = None,
    hot_after: int | None = None,
    gpu: int = 0,
    sessions: int = 1,
    waiting: int = 0,
) -> tuple[Checkpoint, Located, MemoryPlan]:
    """(checkpoint, located tensors, memory plan) of a folder; reads headers, loads nothing. Looks at the GPU unless
    vram is 0: a process that has done so must not fork and use it there.

    text: the tokenizer is loaded already, so that the process as it is has it. source, vram, hot_after, gpu, sessions:
    as for open_model.
    """
    asked = gpu_cache.wish(vram, hot_after, gpu)
    _one_of("io", io, engine.IO_MODES)
    if io == "uring" and (missing := engine.io_modes()[io]) is not None:
        raise UsageError(
            f"io: expected a mode that this system has, got uring: {missing}; use auto"
        )
    _one_of("policy", policy, modes.MODEL_POLICIES)
    _one_of("kv", kv, ("f32", "bf16"))
    limits = read_limits()
    if ram is None:
        budget, reason = default_budget(limits)
    elif isinstance(ram, str):
        budget, reason = parse_size(ram, "ram"), "--ram"
    else:
        budget, reason = _whole("ram", ram, 2**62), "--ram"
    notes = []
    if threads is None:
        threads, cores = default_threads(limits), usable_cores(limits)
        if threads < cores:
            notes.append(f"{threads} compute threads, the most there can be, for {cores} cores")
    else:
        threads = _whole("threads", threads, MAX_THREADS)
    ctx = None if ctx is None else _whole("ctx", ctx, 2**31)
    slots = None if slots is None else _whole("slots", slots, 2**31)
    sessions = _whole("sessions", sessions, MAX_SESSIONS)
    checkpoint = Checkpoint.open(path)
    if source is not None:
        origin.check(checkpoint, source)
    located = checkpoint.locate()
    slab = max((engine_pure.expert_slab(a)[0] for a in located.experts), default=0)
    # before the plan: the driver's memory in this process is measured with Python's
    offer = gpu_cache.look(located, asked, largest_chunk(located.plan, ctx))
    known: dict[str, Any] = {
        "budget": budget, "reason": reason, "threads": threads, "lanes": engine.io_most(io, slab), "ctx": ctx,
        "kv": kv, "policy": policy, "slots": slots, "mapped": io == "mmap",
        "later": 0 if text else _tokenizer_bytes(checkpoint.folder),
        "sessions": sessions, "waiting": waiting,
    }  # fmt: skip
    memory = plan_memory(located, **known, gpu=offer)
    if not memory.fits and asked.size is None and not isinstance(offer, str):
        memory = plan_memory(located, **known, gpu="the memory budget has no room for its copies")
    limit = smallest_limit(limits)
    if limit is not None and budget > limit[0]:
        note = f"the budget of {format_size(budget)} is more than the {format_size(limit[0])} {limit[1]}: "
        notes.append(note + "a cache larger than memory is slower than a small one")
    memory = replace(memory, warnings=(*memory.warnings, *notes))
    return checkpoint, located, memory


def open_model(
    path: str | os.PathLike[str],
    ram: str | int | None = None,
    ctx: int | None = None,
    vram: str | int | None = None,
    threads: int | None = None,
    io: str = "auto",
    policy: str = "auto",
    slots: int | None = None,
    kv: str = "bf16",
    isa: str | None = None,
    on_load: Progress | None = None,
    tokenizer: Any = None,
    source: str | os.PathLike[str] | None = None,
    hot_after: int | None = None,
    gpu: int = 0,
    sessions: int = 1,
    waiting: int = 0,
) -> Model:
    """Opens a Hugging Face folder, or the pulled model of that name (names.find). See docs/design.md section 8 for
    the arguments.

    ram: bytes or "6G", the bound of this whole process; None: what limits.default_budget says. ctx: tokens a
    session may hold; None: min(model limit, 32768, what fits). slots: experts in the cache (per layer for
    layer-lru); None: what the budget leaves. isa: a kernel set of engine.isas(); None: the best. on_load: called with
    (parts loaded, parts). tokenizer: the folder's, where it is loaded already; otherwise memory is kept for it and it
    is loaded when text is needed. source: what an expert pack must have been made of, its hash (12 hex digits or
    more) or a folder (origin.check). sessions: sequences that run at once, each with a whole context; what more of
    them need (and the page pool has no more pages for them) comes from the expert cache. waiting: requests that
    may wait in a scheduler's queue, for whose tokens memory is kept.

    vram: bytes or "3.2G" of the GPU for experts that are called often; None: what is free there less a margin, nothing
    where there is no GPU; 0: CUDA is not touched. hot_after: calls in the last 16 tokens that an expert needs
    beyond those of the one it replaces there, 1 to 16; None: 3. gpu: the number of the device. A device that fails is
    given up with a note; the call that waits for it just then fails.
    """
    if isa is not None:
        _one_of("isa", isa, engine.isas())
    checkpoint, located, memory = plan_model(
        names.find(path),
        ram,
        ctx,
        threads,
        io,
        policy,
        slots,
        kv,
        tokenizer is not None,
        source,
        vram,
        hot_after,
        gpu,
        sessions,
        waiting,
    )
    require_fit(memory)
    model = Model(checkpoint, located.plan, memory, io, isa, tokenizer)
    del checkpoint  # the table of all tensors may take megabytes
    try:
        model.load(located, on_load)
    except BaseException:
        model.close()
        raise
    return model


def _tokenizer_bytes(folder: Path) -> int:
    """Memory that a tokenizer may take: 148 MB less Python's own 40 for the 12.8 MB file of Qwen3.5."""
    path = folder / TOKENIZER
    return 9 * path.stat().st_size + 4 * MB if path.is_file() else 0


def _one_of(name: str, value: object, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _whole(name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{name}: expected a whole number from 1 to {most}, got {value!r}")
    return value
