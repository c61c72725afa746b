"""Decode beside the size of the expert cache: one run a size, each in a process of its own.

`python -m mosaic_c.sweep FD` is such a process: the arguments of `point` come as JSON on stdin, its result or an
error goes to stdout, and it ends when the pipe FD does. What is resident there is honest: no run finds the
memory of another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import shown_path
from mosaic_c.modes import PER_LAYER

SLOTS = (2, 4, 8, 16, 32, 64)  # per layer, as far as the model has experts
TOKENS = 80


@dataclass(frozen=True)
class Series:
    """One line of figures: a model, and a trace in place of its routers (None: they choose)."""

    name: str
    model: str
    routing: str | None


def series(model: str, compare: str | None, routing: Sequence[str]) -> list[Series]:
    """One, or two to compare: two models, two traces, or both."""
    models = [model] if compare is None else [model, compare]
    if len(routing) > 2:
        raise UsageError(f"--routing: expected at most two traces, got {len(routing)}")
    if len(routing) > len(models):  # one model, two traces
        models = [model] * 2
        names = [Path(trace).stem for trace in routing]
    else:
        names = [Path(folder).resolve().name for folder in models]
    if len(names) == 2 and names[0] == names[1]:
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=True)]
    traces = [None] * 2 if not routing else [routing[0], routing[-1]]
    return [Series(*one) for one in zip(names, models, traces, strict=False)]


@dataclass(frozen=True)
class Shape:
    """What is told of a series before it runs."""

    layers: int
    experts: int
    top_k: int
    synthetic: bool
    positions: int  # tokens the model can hold
    trace_tokens: int | None


def look(one: Series) -> Shape:
    """Opens headers and trace; errors come before the first run."""
    from mosaic_c.checkpoint import Checkpoint
    from mosaic_c.routing import Routing
    from mosaic_c.synth_shapes import LABEL

    checkpoint = Checkpoint.open(one.model)
    plan = checkpoint.locate().plan
    moe = plan.moe_layers
    if not moe:
        raise UsageError(f"{shown_path(one.model)}: the model has no routed experts")
    tokens = None if one.routing is None else len(Routing(one.routing, plan))
    return Shape(
        len(moe),
        min(m.experts.count for m in moe if m.experts),
        max(m.top_k for m in moe),
        bool(checkpoint.config.get(LABEL)),
        plan.max_positions,
        tokens,
    )


def choose(
    shapes: Sequence[Shape], slots: Sequence[int] | None, tokens: int | None
) -> tuple[list[int], int]:
    """(slots per layer, tokens) of a sweep, checked against what models and traces have."""
    experts = min(s.experts for s in shapes)
    held = [s.trace_tokens for s in shapes if s.trace_tokens is not None]
    if slots is None:
        slots = [n for n in SLOTS if n <= experts]
    for n in slots:
        if not 1 <= n <= experts:
            raise UsageError(
                f"--slots {n} is out of range: the model has {experts} experts a layer"
            )
    most, what = min(s.positions for s in shapes), "positions of the model"
    if held and min(held) <= most:
        most, what = min(held), "tokens of the trace"
    if tokens is None:
        tokens = most if held else min(TOKENS, most)
    if not 1 <= tokens <= most:
        raise UsageError(f"--tokens {tokens} is out of range: expected 1 to the {most} {what}")
    return list(slots), tokens


def point(
    model: str,
    slots: int,
    tokens: int,
    policy: str = "layer-lru",
    routing: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Decodes `tokens` tokens one by one from an empty session and an empty cache of `slots` experts a layer;
    options are open_model's. The model goes on with its own text, drawn with a fixed seed: the same for
    every cache size. tok_s: of the median token's forward pass. rss_python, rss_before, rss: resident with libraries
    loaded, with the model open and no expert touched, at the end; resident: the engine's own count by kind."""
    import numpy as np

    from mosaic_c.budget import process_bytes
    from mosaic_c.opening import open_model
    from mosaic_c.routing import Routing

    python = process_bytes()
    times, token, rng = [], 0, np.random.default_rng(0)
    layers = 1 if policy in PER_LAYER else look(Series("", model, None)).layers
    # without a GPU: hits and sizes are those of the cache in RAM
    with open_model(
        model, ctx=tokens, policy=policy, slots=slots * layers, vram=0, **options
    ) as opened:
        if routing is not None:
            opened.routing = Routing(routing, opened.plan)
        with opened.session() as session:
            before = opened.stats()
            for _ in range(tokens):
                start = time.perf_counter()
                p = session.forward([token], last=True)
                times.append(time.perf_counter() - start)
                np.exp(p - p.max(), out=p)
                np.cumsum(p, out=p)
                token = min(int(np.searchsorted(p, rng.random() * p[-1])), opened.vocab - 1)
            s = opened.stats()
        unit = opened.memory.unit
    return {
        "slots": slots,
        "cache_bytes": slots * layers * unit,
        "hits": s.hits,
        "misses": s.misses,
        "hit_rate": s.hit_rate,
        "bytes_read": s.bytes_read,
        "mb_per_token": s.bytes_read / tokens * 1e-6,
        "rss_python": python,
        "rss_before": before.rss,
        "rss": s.rss,
        "peak_rss": s.peak_rss,
        "resident": s.resident,
        "tok_s": 1 / statistics.median(times),
        "mean_tok_s": tokens / sum(times),
        "times": times,
        "policy": s.policy,
        "io": s.io,
        "lanes": s.lanes,
        "io_tried": s.io_tried,  # into a few slots, which then are resident before the first token
        "threads": s.threads,
        "files_direct": s.files_direct,
        "files_pread": s.files_pread,
    }


def drop_pages(folder: str | os.PathLike[str]) -> None:
    """Drops a model's files from the page cache: a run must not find what another one left."""
    for path in filter(Path.is_file, Path(folder).iterdir()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fresh_point(**arguments: Any) -> dict[str, Any]:
    """`point` in a new process, with the model's pages dropped. Its errors are raised here; an interrupt ends it."""
    drop_pages(arguments["model"])
    theirs, ours = (
        os.pipe()
    )  # nothing is written: it closes when this process ends, however that happens
    try:
        child = subprocess.run(
            [sys.executable, "-m", "mosaic_c.sweep", str(theirs)],
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to see; it then kills the other
            pass_fds=(theirs,),
        )
    finally:
        os.close(theirs)
        os.close(ours)
    if child.returncode < 0:
        raise MosaicError(
            f"the run with {arguments['slots']} slots was ended by signal {-child.returncode}"
            + (": out of memory? give a smaller --ram" if child.returncode == -9 else "")
        )
    try:
        out = json.loads(child.stdout)
    except ValueError:
        last = child.stderr.strip().rpartition("\n")[2]
        raise MosaicError(f"the run with {arguments['slots']} slots failed: {last}") from None
    if "error" in out:
        raise (UsageError if out["usage"] else MosaicError)(out["error"], out["code"])
    return out


def sweep(
    many: Sequence[Series],
    slots: Sequence[int],
    progress: Callable[[str, int, int], None] = lambda name, i, n: None,
    rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    **arguments: Any,
) -> list[list[dict[str, Any]]]:
    """For each size the results (`point`) of every series; rows gets them as they come."""
    out = []
    for n in slots:
        found = []
        for i, one in enumerate(many):
            progress(f"{one.name}, {n} slots", len(out) * len(many) + i, len(slots) * len(many))
            found.append(fresh_point(model=one.model, routing=one.routing, slots=n, **arguments))
        out.append(found)
        rows(found)
    return out


def _end_with(pipe: int) -> None:
    """Ends this process as soon as the other end of the pipe is closed: the one that wanted the result is gone."""
    os.read(pipe, 1)
    os._exit(1)


def _main() -> None:
    if len(sys.argv) > 1:
        threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        out = point(**json.load(sys.stdin))
    except MosaicError as error:
        out = {"error": str(error), "usage": isinstance(error, UsageError), "code": error.code}
    except MemoryError:
        out = {"error": "out of memory; give a smaller --ram", "usage": False, "code": "ENOMEM"}
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    _main()
