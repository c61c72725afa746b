"""Proves on one model that settings change speed and memory, never a bit: promise 2 of docs/design.md.

A baseline (everything as `generate` has it) and then one setting at a time, and all extremes together, on
the same prompt, greedy. Of every position's logits a digest is kept, so memory does not grow with the run;
where one differs, the baseline is run again up to there for its values. One model is open at a time, each in a
forked process: all start from the same memory, so that a budget fits for all or for none, and a crash is one
row's failure.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c import engine, modes, vram
from mosaic_c.bind import Located
from mosaic_c.budget import largest_chunk, plan_memory
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import show
from mosaic_c.model import TOKENIZER, Model
from mosaic_c.opening import open_model, plan_model
from mosaic_c.session import Session, token_ids
from mosaic_c.stats import Stats

PROMPT = "The quick brown fox jumps over the lazy dog. Then it sits down in the shade, and"
PROMPT_IDS = 24  # of it at most; so many random ids where there is no tokenizer
MAX_TOKENS = 1 << 20
ROWS = 8  # logits of so many positions at once; the memory plan keeps room for 16
# What a system or a budget may refuse to a setting; anything else is a failure.
REFUSALS = ("EBUDGET", "EINVAL", "ENOMEM", "ESYS", "EUNSUPPORTED")


@dataclass(frozen=True)
class Setting:
    """options: of open_model, beside ram and ctx. piece: tokens of the prompt in one call, 0: all."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    piece: int = 0


@dataclass
class Run:
    """digests: one for the logits behind each position, NaN canonical. row: the kept logits (vocab,), of the first
    position that differs from an earlier run or of one that was asked for; at: that position, -1 none."""

    digests: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    not_finite: int = 0
    row: np.ndarray | None = None
    at: int = -1
    stats: Stats | None = None


@dataclass(frozen=True)
class Difference:
    """The first logit that differs. index -1: the baseline, run again, no longer differs."""

    position: int
    index: int
    baseline: float
    got: float
    count: int  # logits of this position that differ
    repeats: bool  # the baseline, run again, has the bits it had

    def text(self, prompt: int) -> str:
        """One line; prompt: its number of tokens."""
        step = self.position - prompt + 2  # the logits behind the prompt choose token 1
        where = f"prompt position {self.position}" if step < 1 else f"token {step}"
        unsteady = "the baseline, run again, gives other bits than before"
        if self.index < 0:
            return f"{where}: {unsteady}"
        text = (
            f"{where}, logit {self.index}: {_value(self.baseline)} in the baseline, {_value(self.got)} here; "
            f"{self.count} logits of this position differ"
        )
        return text if self.repeats else f"{text}; {unsteady}"


@dataclass(frozen=True)
class Row:
    """status: baseline, equal, differs, refused (by system or budget) or failed; reason: of the last two.

    exercised: the statistics show that the setting took effect; evidence: what they show."""

    setting: str
    status: str
    tokens_equal: bool | None = None
    logits_equal: bool | None = None
    exercised: bool = False
    evidence: str = ""
    reason: str = ""
    difference: Difference | None = None
    peak_rss: int = 0
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.status in ("differs", "failed")


@dataclass(frozen=True)
class Report:
    """rows[0] is the baseline. prompt: token ids; tokens: what the baseline chose."""

    model: str
    budget: int
    prompt: list[int]
    tokens: list[int]
    not_finite: int  # logits of the baseline that are NaN or infinite
    rows: list[Row]

    @property
    def good(self) -> bool:
        return not any(row.bad for row in self.rows)


# progress(number of this run, name, what is being done, done, of)
Progress = Callable[[int, str, str, int, int], None]


@dataclass(frozen=True)
class Job:
    """What all runs share. options: of open_model. ids: the prompt; tokens: how many are generated."""

    folder: Path
    options: dict[str, Any]
    ids: list[int]
    tokens: int
    gpu_wanted: bool = False  # asked for by --vram or --gpu: then its refusal is a failure


def verify(
    path: str | os.PathLike[str],
    ram: str | int | None = None,
    tokens: int = 16,
    prompt: str | None = None,
    started: Callable[[list[Setting], int], None] = lambda settings, prompt: None,
    progress: Progress = lambda *args: None,
    row: Callable[[Row], None] = lambda row: None,
    size: str | int | None = None,
    gpu: int = 0,
) -> Report:
    """Runs the model of a folder in every way, all but one without a GPU. size: of VRAM in that one, None: the least
    that works, 0: no such run; gpu: its device. prompt: a text, or ids as "1,2,3"; None: a short text, or without
    a tokenizer random ids, always the same. started gets all settings and the number of prompt tokens before the
    first run, row each row as it is known. MosaicError where the baseline cannot run.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise UsageError(f"--tokens {tokens} is out of range: expected 1 to {MAX_TOKENS}")
    job, todo = _prepare(Path(path), ram, tokens, prompt, vram.wish(size, 1, gpu))
    started(todo, len(job.ids))
    rows: list[Row] = []
    base = Run()
    for i, setting in enumerate(todo):
        at = time.perf_counter()

        def tell(what: str, done: int, of: int, i: int = i, name: str = setting.name) -> None:
            progress(i, name, what, done, of)

        if i == 0:
            base = _run(job, setting, tell)
            result = Row(
                setting.name,
                "baseline",
                evidence=_baseline(base.stats),
                peak_rss=base.stats.peak_rss,
            )
        else:
            result = _compare(job, setting, base, tell)
        rows.append(replace(result, seconds=time.perf_counter() - at))
        row(rows[-1])
    return Report(str(job.folder), base.stats.budget, job.ids, base.tokens, base.not_finite, rows)


def settings(
    threads: int, floors: dict[str, int], tier: dict[str, Any] | None = None
) -> list[Setting]:
    """The baseline, then what is compared with it. threads: of the baseline; floors: the fewest slots by policy,
    0 where the model has no experts; tier: options of a run with a GPU, None: this build has none. A policy decides
    only where not all fits: each gets its smallest cache."""
    isas = engine.isas()
    other = {"threads": 1 if threads > 1 else 2}
    out = [Setting("baseline"), Setting(f"threads {other['threads']}", other)]
    extremes = other | {"isa": isas[-1], "io": "pread"}
    for policy, slots in floors.items():
        if slots:
            tiny = {"slots": slots} | ({} if policy == "auto" else {"policy": policy})
            out.append(Setting(f"policy {policy}, fewest slots", tiny))
            extremes |= tiny
    out += [Setting(f"io {mode}", {"io": mode}) for mode in engine.IO_MODES if mode != "auto"]
    out += [Setting(f"isa {isa}", {"isa": isa}) for isa in isas[1:]]
    if tier is not None:
        out.append(Setting("gpu, few slots", tier))
    out.append(Setting("prompt token by token", piece=1))
    return [*out, Setting("all at once", extremes, piece=1)]


def _prepare(
    folder: Path, ram: str | int | None, tokens: int, prompt: str | None, asked: vram.Wish
) -> tuple[Job, list[Setting]]:
    tokenizer = None
    if (folder / TOKENIZER).is_file():  # before any budget is divided, so that it is measured
        from mosaic_c.tokenizer import Tokenizer

        tokenizer = Tokenizer(folder)
    ids = _ids(prompt, tokenizer)
    ctx = (PROMPT_IDS if ids is None else len(ids)) + tokens
    try:
        _, located, memory = plan_model(folder, ram, ctx=ctx, text=tokenizer is not None, vram=0)
    except UsageError as error:
        if not str(error).startswith("ctx: "):
            raise
        raise UsageError(
            f"--tokens {tokens} behind {ctx - tokens} of the prompt: {error}"
        ) from None
    if ids is None:
        ids = np.random.default_rng(0).integers(0, located.plan.vocab, PROMPT_IDS).tolist()
    token_ids(ids, located.plan.vocab)
    floors = {
        policy: plan_memory(
            located, budget=memory.budget, reason="", threads=1, lanes=1, ctx=ctx, policy=policy
        ).hard
        for policy in modes.MODEL_POLICIES
    }
    options = {"ram": ram, "ctx": ctx, "tokenizer": tokenizer, "vram": 0}
    todo = settings(memory.threads, floors, _tier(located, asked, largest_chunk(located.plan, ctx)))
    wanted = asked.size is not None or asked.device != 0
    return Job(folder, options, ids, tokens, wanted), todo


def _tier(located: Located, asked: vram.Wish, chunk: int) -> dict[str, Any] | None:
    """Options of a run on the GPU: a cache as small as can be, which every expert enters when it is called. The
    device is not looked at: runs are forked, and no fork can use a GPU that its parent did."""
    if asked.size == 0:
        return None
    offer = vram.possible(located, asked)
    if isinstance(offer, str):
        if asked.size is not None:
            raise vram.refusal(asked, offer)
        return None
    size = offer.least(chunk) if asked.size is None else asked.size
    return {"vram": size, "hot_after": asked.after, "gpu": asked.device}


def _ids(prompt: str | None, tokenizer: Any) -> list[int] | None:
    """Token ids of a prompt; None: none was given and there is no tokenizer."""
    if prompt is None:
        return None if tokenizer is None else tokenizer.encode(PROMPT)[:PROMPT_IDS]
    parts = prompt.replace(",", " ").split()
    if parts and all(p.isascii() and p.isdigit() for p in parts):
        if "," in prompt or tokenizer is None:
            return [int(p) for p in parts]
    if tokenizer is None:
        raise UsageError(
            f"--prompt {show(prompt)}: the folder has no {TOKENIZER}, expected token ids such as 1,2,3"
        )
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UsageError(f"--prompt {show(prompt)}: expected at least one token")
    return ids


# ---- runs ----


def _run(
    job: Job,
    setting: Setting,
    tell: Callable[[str, int, int], None],
    against: list[bytes] | None = None,
    until: int | None = None,
) -> Run:
    """run_here in a process of its own. MosaicError of it, or ECRASH where it ended without a word."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    args = (ours, theirs, job, setting, against, until)
    child = context.Process(target=_child, args=args, daemon=True)
    try:
        with _interrupts_wait():
            child.start()
        theirs.close()
        while True:
            message = ours.recv()
            if isinstance(message, Run):
                return message
            if isinstance(message, Exception):
                raise message
            tell(*message)
    except EOFError:
        child.join()
        raise MosaicError(
            f"the run ended without a result, exit status {child.exitcode} (-9: killed, often for memory)",
            "ECRASH",
        ) from None
    finally:
        ours.close()
        if child.pid is not None:
            child.kill()  # after its result it has nothing left to do
            child.join()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Python drops what a handler raises inside the hooks of a fork: an interrupt is raised afterwards. Blocking
    the signal is not enough, a thread of numpy's takes it. The child goes on ignoring it and is ended by us."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go elsewhere
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if caught and before is not signal.SIG_IGN:
        raise KeyboardInterrupt


def _child(
    ours: Connection,
    pipe: Connection,
    job: Job,
    setting: Setting,
    against: list[bytes] | None,
    until: int | None,
) -> None:
    # The fork copied the parent's end too: left open, it would keep this process writing to a parent that was
    # killed, and then waiting for it, with the whole model in memory.
    ours.close()
    try:
        result: Any = run_here(job, setting, lambda *news: pipe.send(news), against, until)
    except MemoryError:
        result = MosaicError("out of memory", "ENOMEM")
    except BrokenPipeError:  # the parent has gone
        return
    except Exception as error:
        result = error
    with suppress(BrokenPipeError):
        pipe.send(result)


def run_here(
    job: Job,
    setting: Setting,
    tell: Callable[[str, int, int], None],
    against: list[bytes] | None = None,
    until: int | None = None,
) -> Run:
    """One run. against: digests of an earlier one: the first row that differs is kept. until: the run ends with
    this position, whose row is kept."""
    out = Run()
    total = len(job.ids) + job.tokens - 1

    def note(row: np.ndarray) -> None:
        at, digest = len(out.digests), blake2b(row, digest_size=16).digest()
        out.digests.append(digest)
        out.not_finite += row.size - int(np.isfinite(row).sum())
        if at == until or (against is not None and out.row is None and digest != against[at]):
            out.row, out.at = row.copy(), at
        tell("tokens", at + 1, total)

    def step(model: Model, session: Session, ids: list[int]) -> int:
        """Evaluates tokens; the likeliest next one."""
        best = 0

        def take(which: int, x: np.ndarray, first: int, count: int, last: bool) -> None:
            nonlocal best
            for i in range(first, first + count, ROWS):
                n = min(ROWS, first + count - i)
                y = model._logits(x, np.arange(i, i + n, dtype=np.int32))
                y[np.isnan(y)] = np.nan  # any NaN equals any NaN: docs/design.md, section 4
                for row in y:
                    note(row)
                best = int(y[-1].argmax())

        model._run([(session, ids)], take)
        return best

    def load(done: int, of: int) -> None:
        tell("layers loaded", done, of)

    with open_model(job.folder, on_load=load, **job.options | setting.options) as model:
        with model.session() as session:
            ids, piece = job.ids, setting.piece or len(job.ids)
            while True:
                for i in range(0, len(ids), piece):
                    best = step(model, session, ids[i : i + piece])
                out.tokens.append(best)
                if len(out.tokens) == job.tokens or (until is not None and out.at == until):
                    break
                ids = [best]
            out.stats = model.stats()
    return out


def _compare(job: Job, setting: Setting, base: Run, tell: Callable[[str, int, int], None]) -> Row:
    try:
        run = _run(job, setting, tell, against=base.digests)
    except MosaicError as error:
        wanted = job.gpu_wanted and "vram" in setting.options
        status = "refused" if error.code in REFUSALS and not wanted else "failed"
        return Row(setting.name, status, reason=str(error))
    exercised, evidence = _evidence(setting, run.stats, base.stats)
    facts = {
        "tokens_equal": run.tokens == base.tokens,
        "logits_equal": run.row is None,
        "exercised": exercised,
        "evidence": evidence,
        "peak_rss": run.stats.peak_rss,
    }
    if run.row is None:
        return Row(setting.name, "equal", **facts)
    again = _run(job, Setting("baseline"), tell, until=run.at)
    a, b = again.row, run.row
    differs = np.flatnonzero(a.view(np.int32) != b.view(np.int32))
    at = int(differs[0]) if len(differs) else -1
    repeats = again.digests[run.at] == base.digests[run.at]
    difference = Difference(run.at, at, float(a[at]), float(b[at]), len(differs), repeats)
    return Row(setting.name, "differs", **facts, difference=difference)


# ---- what the statistics prove ----


def _ways(stats: Stats) -> str:
    return (
        f"experts by {stats.io}; {stats.files_direct} files read directly, {stats.files_pread} not"
    )


def _baseline(stats: Stats) -> str:
    return (
        f"{stats.slots} slots, {stats.evictions} evictions, policy {stats.policy}; {stats.threads_ran} of "
        f"{stats.threads} threads ran; {stats.isa}; {_ways(stats)}; prompt in one call"
    )


def _evidence(setting: Setting, stats: Stats, base: Stats) -> tuple[bool, str]:
    """Whether every part of a setting took effect, and was another in the baseline; what shows it."""
    options, proofs = setting.options, []
    if "slots" in options:
        text = f"{stats.slots} slots, {stats.misses} misses, {stats.evictions} evictions"
        proofs.append((stats.misses > stats.slots < base.slots, text))  # not all could stay
    if "policy" in options:
        proofs.append((stats.policy == options["policy"], f"policy {stats.policy}"))
    if "threads" in options:
        text = f"threads that ran: {stats.threads_ran}, in the baseline {base.threads_ran}"
        ran = stats.threads_ran == options["threads"]
        proofs.append((ran and stats.threads_ran != base.threads_ran, text))
    if "io" in options:
        mode, fell_back = options["io"], stats.files_pread > 0
        proofs.append((stats.io == mode and fell_back == (mode == "pread"), _ways(stats)))
    if "isa" in options:
        proofs.append((stats.isa == options["isa"] != base.isa, stats.isa))
    if "vram" in options:
        text = f"{stats.gpu_hits} experts computed on the GPU, {stats.gpu_promotions} brought, "
        text += f"{stats.gpu_evictions} evicted of {stats.gpu_slots} slots" + (
            f": {stats.gpu_note}" if stats.gpu_note else ""
        )
        proofs.append((stats.gpu_hits > 0 and not stats.gpu_note, text))
    if setting.piece:
        calls, of = (s.hits + s.gpu_hits + s.misses for s in (stats, base))
        text = f"{calls} expert calls, in the baseline {of}"  # a call serves all tokens of a chunk
        proofs.append((calls != of, text))
    return all(ok for ok, _ in proofs), "; ".join(text for _, text in proofs)


def _value(x: float) -> str:
    return f"{x:.9g} ({np.float32(x).view(np.uint32):#010x})"
