"""Many requests, one batch: a thread that evaluates the tokens of all of them together.

Owns: who runs, who waits, how much of a prompt is evaluated beside the others' next tokens. Promises: an expert that is
read once serves all; a request gives the bits that it gives alone; one request's error is its own; a cancelled one
hears nothing more at once, and computing for it ends at the next layer, or, where it shares a step of single tokens
with others, with that step. Knows nothing of text formats or networks: it takes ids and gives pieces.
"""

from __future__ import annotations

import atexit
import copy
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mosaic_c import generation
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.model import Model
from mosaic_c.sampling import Sampler
from mosaic_c.session import Session, common, token_ids
from mosaic_c.states import NO_ROOM, States, StatesStats, furthest
from mosaic_c.stats import Stats
from mosaic_c.ticket import Full, Progress, Request, Ticket
from mosaic_c.tokenizer import Detokenizer

__all__ = ["Full", "Progress", "Request", "Scheduler", "SchedulerStats", "Ticket"]

# Tokens of prompts in a step that others wait for. A compromise that was not measured: a small slice makes the others'
# next token come soon, a large one reads each expert for more tokens of the prompt.
SLICE = 256
# Tokens in common that are worth waiting for while another request evaluates them: a page of the KV cache, which a copy
# then shares. Whether fewer would be worth it was not measured.
SHARED = 64
IDLE_SECONDS = 2.0  # between looks at the machine's memory while there is nothing to do
PROGRESS_SECONDS = 0.2  # between reports within a step
MOST_RETRY = 60


@dataclass(frozen=True)
class SchedulerStats:
    """running, queued: requests now. done, cancelled, failed: since the start. tokens_in: of prompts, evaluated;
    tokens_out: chosen; reused_tokens: of prompts, taken over from kept states. steps: forward calls; batch_sizes: how
    many of them had so many sequences. states, model: theirs."""

    running: int
    queued: int
    done: int
    cancelled: int
    failed: int
    tokens_in: int
    tokens_out: int
    reused_tokens: int
    steps: int
    batch_sizes: dict[int, int]
    states: StatesStats
    model: Stats


class _Job:
    """A request with its decoding, and a session while it runs."""

    def __init__(self, ticket: Ticket, run: generation.Run, keep_at: Sequence[int] = ()) -> None:
        self.ticket, self.run, self.keep_at = ticket, run, keep_at
        self.session: Session | None = None
        self.started: float | None = None  # when it left the queue

    @property
    def prompt(self) -> np.ndarray:
        return self.run.ids[: self.ticket.prompt_tokens]

    def wanted(self) -> int:
        """Tokens that may be evaluated before the state has to be kept."""
        assert self.session is not None
        at = self.session.position
        stops = [p - at for p in self.keep_at if p > at]
        return min([len(self.run.pending), *stops])

    def progress(self, more: float = 0) -> Progress:
        assert self.session is not None
        total = self.ticket.prompt_tokens
        return Progress(min(self.session.position + int(more), total), total)


class Scheduler:
    """One thread that runs all requests of a model in one batch.

    most: requests that run at once; queue: that may wait, first come first served. While it is in use nobody else may
    call the model's engine.cancel. Close it before the model.
    """

    def __init__(self, model: Model, states: States, *, most: int = 4, queue: int = 64) -> None:
        for name, value, least in (("most", most, 1), ("queue", queue, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}: expected a whole number >= {least}, got {value!r}")
        self.model, self.states, self.most, self.queue = model, states, most, queue
        self._tokenizer = model.tokenizer if model.has_tokenizer else None
        self._stop_ids = generation.stop_ids(model.generation_config, model.config, self._tokenizer)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._step: list[tuple[_Job, int]] = []  # what is being evaluated now: tokens of each
        self._share = 0.0  # of that, done
        self._interrupted = False
        self._crowded = (
            False  # a request gave its place up for want of pages: no new one until one ends
        )
        self._closing = self._stopping = False
        self._died = ""  # what ended the thread before its time
        self._counts: Counter[str] = Counter()
        self._batches: Counter[int] = Counter()
        self._seconds = 1.0  # that a request takes, lately
        self._thread = threading.Thread(target=self._work, name="mosaic_c scheduler", daemon=True)
        self._thread.start()
        # a thread that is inside C while the interpreter ends would outlive what it works on
        atexit.register(self.close)

    # ---- for clients ----

    def submit(self, request: Request) -> Ticket:
        """Queues a request. Raises Full, UsageError, or MosaicError ECONTEXT for a prompt that is too long."""
        model = self.model
        ids = token_ids(request.ids, model.vocab)
        for p in request.keep_at:
            if isinstance(p, bool) or not isinstance(p, int) or not 1 <= p <= len(ids):
                raise UsageError(f"keep_at: expected positions from 1 to {len(ids)}, got {p!r}")
        tokenizer = self._tokenizer
        run = generation.Run(
            ids,
            model.ctx,
            sampler=Sampler(request.sampling),
            stop_ids=self._stop_ids,
            stop=request.stop,
            max_new_tokens=request.max_new_tokens,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, ids),
            ignore_eos=request.ignore_eos,
            top_logprobs=request.top_logprobs,
            constraint=request.constraint,
        )
        ticket = Ticket(len(ids), self._cancel)
        # where attention alone goes back to any position, a stop for a snapshot would only cut the prompt up
        job = _Job(ticket, run, request.keep_at if self.states.hybrid else ())
        with self._changed:
            if self._closing:
                raise MosaicError(f"the scheduler is closed{self._died}", "ECLOSED")
            if len(self._waiting) + len(self._running) >= self.most + self.queue:
                retry = math.ceil(self._seconds * (len(self._waiting) + 1) / self.most)
                raise Full(
                    f"{len(self._waiting)} requests are waiting and no more may: try again later",
                    retry_after=min(max(retry, 1), MOST_RETRY),
                )
            self._waiting.append(job)
            if len(self._step) == 1 and self._step[0][1] > SLICE and self._share < 0.5:
                self._interrupt()  # a long slice was right while nobody waited for it
            self._changed.notify()
        return ticket

    def stats(self) -> SchedulerStats:
        states, model = self.states.stats, self.model.stats()
        names = ("done", "cancelled", "failed", "tokens_in", "tokens_out", "reused_tokens", "steps")
        with self._lock:
            return SchedulerStats(
                running=len(self._running),
                queued=len(self._waiting),
                **{name: self._counts[name] for name in names},
                batch_sizes=dict(sorted(self._batches.items())),
                states=states,
                model=model,
            )

    @property
    def alive(self) -> bool:
        """Whether its thread runs; without it nothing is ever answered."""
        return self._thread.is_alive()

    def close(self, drain: float = 0.0) -> None:
        """Takes no more requests, lets those that are there run on for `drain` seconds, ends the rest with an error
        and the thread with them. Twice is fine."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._waiting or self._running), max(drain, 0))
            for job in [*self._running, *self._waiting]:
                job.ticket.cancelled = True
                job.ticket.end(error=MosaicError("the model is shut down", "ECLOSED"))
            self._stopping = True
            if self._step:
                self._interrupt()
            self._changed.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            ticket.cancelled = True
            ticket.end("cancel")
            mine = any(job.ticket is ticket for job, _ in self._step)
            if mine and (len(self._step) == 1 or any(n > 1 for _, n in self._step)):
                self._interrupt()  # a step of single tokens is over sooner than it could be done again
            self._changed.notify_all()

    def _interrupt(self) -> None:
        """Ends the step at its next layer; under the lock, while there is one."""
        self._interrupted = True
        with suppress(MosaicError):  # the model was closed: that ends the step, too
            self.model.engine.cancel()

    # ---- the thread ----

    def _work(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._died = f": its thread has ended: {type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._closing = self._stopping = True
                for job in [*self._running, *self._waiting]:  # none but after an error
                    job.ticket.end(error=MosaicError(f"no answer{self._died}"))
                self._running.clear()
                self._waiting.clear()
                self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                busy = bool(self._waiting or self._running)
                if not busy and self._stopping:
                    return
                if not busy:
                    self._changed.wait(IDLE_SECONDS)
                    busy = bool(self._waiting or self._running)
            try:
                if busy:
                    self._turn()
                elif not self._stopping:
                    self.model.relieve()
            # Not foreseen: whoever is there hears of it, and the thread goes on. A panic in a library written in Rust
            # is no Exception.
            except BaseException as error:
                for job in [*self._running, *self._waiting]:
                    with suppress(BaseException):
                        self._end(job, error)

    def _turn(self) -> None:
        """Takes in who fits, and moves all that run by one step."""
        for job in [*self._running, *self._waiting]:
            if job.ticket.cancelled:
                self._end(job)
        self._admit()
        step = shares(self._running, self.model.memory.chunk)
        with self._lock:
            step = [(job, n) for job, n in step if not job.ticket.cancelled]
            if not step:
                return
            self._step, self._share = step, 0.0
        try:
            rows = self._forward(step)
        except MosaicError as error:
            interrupted = self._over()
            if interrupted and error.code == "ECANCEL":
                return  # the next turn goes on without whoever is gone
            if error.code in NO_ROOM and self._made_room():
                return
            for job, _ in step:
                self._end(job, error)
            return
        except BaseException as error:
            self._over()
            for job, _ in step:
                self._end(job, error)
            return
        self._over()
        with self._lock:
            self._counts["steps"] += 1
            self._batches[len(step)] += 1
        for (job, n), row in zip(step, rows, strict=True):
            self._moved(job, n, row)

    def _forward(self, step: list[tuple[_Job, int]]) -> list[np.ndarray]:
        work = [(job.session, job.run.pending[:n].tolist()) for job, n in step]
        prompts = [(job, n) for job, n in step if n > 1]
        told = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal told
            self._share = done / total
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                for job, n in prompts:
                    job.ticket.put(job.progress(n * self._share))

        return self.model.forward(work, progress=progress if prompts else None)

    def _over(self) -> bool:
        """The step has ended; whether it was interrupted."""
        with self._lock:
            self._step = []
            interrupted, self._interrupted = self._interrupted, False
            if interrupted:
                with suppress(MosaicError):
                    self.model.engine.cancel(False)
            return interrupted

    def _admit(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for job in waiting:
            if self._crowded or len(self._running) >= self.most:
                return
            if self._soon(job):
                continue
            try:
                others = [other.session for other in self._running if other.session is not None]
                session, reused = self.states.take(job.run.ids, others)
            except MosaicError as error:
                if error.code in NO_ROOM and self._running:
                    return  # one of those that run will end
                self._end(job, error)
                continue
            job.session = session
            job.run.resume(reused)
            job.started = job.started or time.monotonic()
            with self._lock:
                self._waiting.remove(job)
                self._running.append(job)
                if not job.run.tokens:
                    self._counts["reused_tokens"] += reused
            if not job.run.tokens:
                job.ticket.reused = reused
                job.ticket.put(job.progress())
            if job.run.finish_reason is not None:  # no token was wanted
                self._end(job)

    def _soon(self, job: _Job) -> bool:
        """Whether a prompt that is being evaluated will soon hold the beginning of this one, too: then it waits."""
        have = None
        for other in self._running:
            if other.run.tokens or other.session is None:
                continue
            shared = min(common(other.prompt, job.prompt), len(job.prompt) - 1)
            n = furthest(other.keep_at, shared, self.states.hybrid)
            if other.session.position < n and n >= SHARED:
                have = self.states.reach(job.prompt) if have is None else have
                if n - have >= SHARED:
                    return True
        return False

    def _moved(self, job: _Job, n: int, row: np.ndarray) -> None:
        """A request after a step in which n of its tokens were evaluated; row: the logits behind them."""
        session, run = job.session, job.run
        assert session is not None
        prompt = not run.tokens
        if prompt:
            self._counts["tokens_in"] += n
        if session.position in job.keep_at:
            with suppress(MosaicError):  # without it a later request evaluates more
                self.states.with_room(session.snapshot, 1)  # and one state is all that it is worth
        if n < len(run.pending):
            run.evaluated(n)
            if prompt:
                job.ticket.put(job.progress())
            return
        if job.ticket.cancelled:
            run.evaluated(n)
            return
        try:
            piece = run.accept(row)
        except BaseException as error:
            self._end(job, error)
            return
        if prompt:
            job.ticket.put(job.progress())
        self._counts["tokens_out"] += 1
        job.ticket.stopped_by = run.stopped_by
        if piece is not None:
            job.ticket.put(piece, run.finish_reason)
        if run.finish_reason is not None:
            self._end(job)

    def _end(self, job: _Job, error: BaseException | None = None) -> None:
        """A request leaves: done, cancelled, or with its error. What its session holds is kept unless it failed."""
        if error is not None:
            job.ticket.end(error=_for_reader(error))
        else:
            job.ticket.end(job.run.finish_reason)
        what = "failed" if error is not None else "cancelled" if job.ticket.cancelled else "done"
        session, job.session = job.session, None
        if session is not None and error is None:
            try:
                self.states.keep(session)
            except MosaicError:
                session.close()
        elif session is not None:
            session.close()
        with self._changed:
            if job in self._running:
                self._running.remove(job)
                self._crowded = False
            elif job in self._waiting:
                self._waiting.remove(job)
            self._counts[what] += 1
            if what == "done" and job.started is not None:
                self._seconds += 0.2 * (time.monotonic() - job.started - self._seconds)
            self._changed.notify_all()

    def _made_room(self) -> bool:
        """A step found no page, or no memory: a kept state goes, or else the request that came last waits again."""
        if self.states.evict():
            return True
        if len(self._running) < 2:
            return False
        job = self._running[-1]
        assert job.session is not None
        job.session.close()
        job.session = None
        with self._lock:
            self._running.pop()
            self._waiting.appendleft(job)
            self._crowded = True
        return True


def _for_reader(error: BaseException) -> Exception:
    """A copy, since each reader adds a traceback of its own; an Exception, for that is what readers handle."""
    if isinstance(error, Exception):
        with suppress(Exception):  # some cannot be copied
            same = copy.copy(error)
            if type(same) is type(error):
                return same
    return MosaicError(f"{type(error).__name__}: {error}")


def shares(jobs: Sequence[_Job], chunk: int) -> list[tuple[_Job, int]]:
    """How many tokens of each request the next step evaluates.

    One of each that has no more; of prompts beside others SLICE together, the same share for each, and what a shorter
    one leaves is the longer ones'. A prompt alone gets a whole chunk, which reads each expert once.
    """
    prompts = [job for job in jobs if len(job.run.pending) > 1]
    left = max(min(chunk if len(jobs) == 1 else SLICE, chunk - len(jobs) + len(prompts)), 1)
    counts = {id(job): 1 for job in jobs}
    wanted = sorted(((job.wanted(), i) for i, job in enumerate(prompts)))
    for k, (want, i) in enumerate(wanted):
        n = min(want, -(-left // (len(wanted) - k)))
        counts[id(prompts[i])] = n
        left -= n
    return [(job, n) for job in jobs if (n := counts[id(job)])]
