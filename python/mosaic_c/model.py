"""An open model and its sessions: binds a located checkpoint to the engine, and runs layers in order.

Nothing here touches a weight. A forward call cuts its tokens into chunks, and each chunk costs one C call
for the mixer and one for the experts of every layer; the sessions move at the end or not at all.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mosaic_c import blocks, engine, engine_pure, identity, memory_table, vram
from mosaic_c.bind import Located
from mosaic_c.budget import MemoryPlan
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.guard import Guard, Watch
from mosaic_c.jsonfile import path_text, shown_path
from mosaic_c.plan import Attention, ModelPlan, Weight
from mosaic_c.routing import checked
from mosaic_c.session import Progress, Session, WithProgress, pairs, token_ids
from mosaic_c.stats import Counters, Stats, collect

TOKENIZER = "tokenizer.json"
SESSION_SLACK = 8192  # page table and rounding


class Model:
    """Weights, cache and threads. Use as a context manager, or close() it.

    folder, config, plan, memory: what was opened and how memory was divided. ctx: tokens a session may hold.
    trace: a trace.TraceWriter that receives every layer's routing, or None. routing: None, or
    (MoE layer, positions (n,)) -> expert ids (n, top_k) int32 to use in place of the router's (routing.Routing).
    notes: what the memory guard and the GPU tier had to say, the latest last; on_note: called with each.
    """

    def __init__(
        self, checkpoint: Checkpoint, plan: ModelPlan, memory: MemoryPlan, io: str, isa: str | None,
        tokenizer: Any,
    ) -> None:  # fmt: skip
        self.folder, self.files = checkpoint.folder, checkpoint.files
        self.config, self.generation_config = checkpoint.config, checkpoint.generation_config
        self.plan, self.memory = plan, memory
        self.ctx, self.vocab = memory.ctx, plan.vocab
        self.trace: Any = None
        self.routing: Callable[[int, np.ndarray], np.ndarray] | None = None
        self.slots = memory.slots
        self.guard, self.watch = Guard(memory.slots, memory.hard, memory.unit), Watch(memory.budget)
        self.notes: deque[str] = deque(maxlen=100)
        self.on_note: Callable[[str], None] | None = None
        self.gpu_note = ""  # why there is no tier, though one was planned
        self.counters = Counters()
        self._closed = False
        self._traced = 0
        self._identities: list[tuple[int, ...]] = []
        self._fingerprint: bytes | None = None
        self.layers: list[tuple[engine.Mixer, engine.Moe, int]] = []
        self.store: engine.Store | None = None
        self.kv: engine.Kv | None = None
        self.embed: engine.Linear | None = None
        self.head: engine.Head | None = None
        self._steps: list[engine.Step] = []
        self._lock, self._compute = threading.RLock(), threading.Lock()
        self._x = np.zeros((memory.chunk, plan.hidden), np.float32)  # hidden states of a chunk
        self._routed = [np.zeros((memory.chunk, m.top_k), np.int32) for m in plan.moe_layers]
        self._io, self._tokenizer = io, tokenizer
        self.engine = engine.Engine(
            memory.threads, 0, io, max(memory.engine_budget, 1), isa, memory.lanes
        )

    # ---- loading ----

    def load(self, located: Located, on_load: Progress | None) -> None:
        """Binds every tensor and sizes the cache; on_load(parts done, parts)."""
        try:
            self._load(located, on_load)
        except MosaicError as error:
            raise located.named(error) from None

    def _load(self, located: Located, on_load: Progress | None) -> None:
        plan, memory, e = self.plan, self.memory, self.engine
        files = np.array([e.file(str(path)) for path in self.files], np.int32)
        self._identities = [identity.of(path) for path in self.files]
        ids = files.tolist()
        total, done = len(plan.layers) + 1, 0

        def find(weight: Weight | None) -> dict[str, int]:
            return engine.tensor(None if weight is None else located.span(weight), ids)

        dtype = engine.DTYPES[memory.kv.upper()]
        self.kv = engine.Kv(e, blocks.state(plan, memory.ctx, dtype, memory.sessions))
        n_moe = 0
        moe_layers = plan.moe_layers
        if moe_layers:
            most = max(m.experts.count for m in moe_layers)
            top_k = max(m.top_k for m in moe_layers)
            self.store = engine.Store(e, len(moe_layers), most, top_k, memory.policy)
        kinds = {"attn": 0, "delta": 0}
        for layer in plan.layers:
            kind = "attn" if isinstance(layer.mixer, Attention) else "delta"
            args = (kinds[kind], plan.hidden)
            if kind == "attn":
                desc = blocks.attention(layer.mixer, *args, memory.ctx, memory.chunk, find)
            else:
                desc = blocks.delta(layer.mixer, *args, memory.chunk, find)
            kinds[kind] += 1
            mixer = engine.Mixer(e, kind, desc)
            experts, index = None, -1
            if layer.moe.experts is not None:
                experts, index = located.experts[n_moe].copy(), n_moe
                for name in ("file", "scale_file"):
                    column = experts[name]
                    experts[name] = np.where(column >= 0, files[column], -1)
                n_moe += 1
            desc = blocks.moe(layer.moe, max(index, 0), plan.hidden, memory.chunk, find)
            self.layers.append((mixer, engine.Moe(e, self.store, desc, experts), index))
            done += 1
            if on_load is not None:
                on_load(done, total)
        if self.store is not None:
            if memory.tier is not None:
                self._without_gpu(vram.start(self.store, memory.tier))
            self.store.open(memory.slots, memory.ahead)
        self.embed = engine.Linear(e, find(plan.embed), memory.embedding)
        if located.row_crc is not None and not memory.embedding:
            self.embed.check_rows(located.row_crc)
        head = self.embed if plan.head is None else engine.Linear(e, find(plan.head))
        self.head = engine.Head(e, blocks.norm(plan.final_norm, find), head, memory.chunk)
        if on_load is not None:
            on_load(total, total)

    def close(self) -> None:
        """Frees everything; sessions of the model can no longer be used. A forward call in another thread
        ends with an error at its next layer."""
        if not self._closed:
            self._closed = True
            self.engine.cancel()
            parts = [part for layer in self.layers for part in layer[:2]]
            for part in (*parts, self.store, self.kv, self.embed, self.head, self.engine):
                if part is not None:
                    part.close()
            self._steps.clear()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _alive(self) -> None:
        if self._closed:
            raise MosaicError("the model is closed", "ECLOSED")

    # ---- sessions and forward ----

    def session(self, load: str | os.PathLike[str] | None = None) -> Session:
        """A new, empty sequence, or one that was saved by this very model with the same kv."""
        self._alive()
        if load is None:
            return Session(self, self._with_room(lambda: engine.SessionHandle.new(self.kv)), [])
        room, path = 8 * self.ctx + 64, path_text(load)
        handle, meta = self._with_room(
            lambda: engine.SessionHandle.load(self.kv, path, self.fingerprint(), room)
        )
        ids = np.frombuffer(meta[: len(meta) // 4 * 4], np.int32)
        good = len(meta) == 4 * handle.position and (len(ids) == 0 or 0 <= ids.min())
        if not good or (len(ids) and ids.max() >= self.vocab):
            raise MosaicError(
                f"{path}: expected {handle.position} token ids below {self.vocab}",
                "EFORMAT",
            )
        return Session(self, handle, ids.tolist())

    def forward(
        self,
        work: Sequence[tuple[Session, Sequence[int]]],
        *,
        progress: Progress | None = None,
    ) -> list[np.ndarray]:
        """Evaluates each session's tokens together; the logits (vocab,) behind the last of each.

        Either every session moves or, on an error or an interrupt, none does.
        """
        work = pairs(work)
        ends = np.empty((len(work), self.plan.hidden), np.float32)  # hidden states behind each
        rows: list[np.ndarray] = []
        left = len(work)

        def take(which: int, x: np.ndarray, first: int, count: int, last: bool) -> None:
            nonlocal left
            if not last:
                return
            ends[which] = x[first + count - 1]
            left -= 1
            for i in range(0, 0 if left else len(work), self.memory.chunk):
                part = ends[i : i + self.memory.chunk]  # together: the head is read once
                rows.extend(self._logits(part, np.arange(len(part), dtype=np.int32)))

        self._run(work, take, progress)
        return rows

    def check_room(self, session: Session, count: int) -> None:
        """Raises EFULL where count more tokens do not fit into the session's context."""
        if count > session.room:
            raise MosaicError(
                f"context full: {session.position} tokens held, {count} more wanted, the context is "
                f"{self.ctx}; open the model with a larger ctx",
                "EFULL",
            )

    def _logits(self, x: np.ndarray, pick: np.ndarray) -> np.ndarray:
        y = np.empty((len(pick), self.vocab), np.float32)
        self.head.forward(x, pick, y)
        return y

    def _run(
        self,
        work: Sequence[tuple[Session, Sequence[int]]],
        take: Callable[[int, np.ndarray, int, int, bool], None],
        progress: Progress | None = None,
    ) -> None:
        """The forward pass. take(which, x, first, count, last): rows first..first+count of the hidden
        states x belong to work[which]; last: they end its tokens."""
        self._alive()
        sessions = [s for s, _ in work]
        tokens = [token_ids(ids, self.vocab) for _, ids in work]
        if not work or any(len(t) == 0 for t in tokens):
            raise UsageError("forward: expected at least one token for every session")
        before = []
        for s, t in zip(sessions, tokens, strict=True):
            if not isinstance(s, Session):
                raise UsageError(f"forward: expected a session of this model, got {s!r}")
            s.check(self)
            self.check_room(s, len(t))
            before.append(s.position)
        decode = all(len(t) == 1 and p > 0 for t, p in zip(tokens, before, strict=True))
        routing: list[list[np.ndarray]] = []
        started = time.perf_counter()
        step, layers, trace, x_all = self._step(), self.layers, self.trace, self._x
        routers = self.routing
        try:
            handles = [s._handle for s in sessions]
            self._with_room(lambda: step.begin(handles))  # one that was at rest needs memory again
            done, total = [0] * len(work), sum(map(len, tokens))
            while sum(done) < total:
                room, counts = self.memory.chunk, []
                for i, t in enumerate(tokens):
                    counts.append(min(len(t) - done[i], room))
                    room -= counts[i]
                ids = np.concatenate(
                    [t[d : d + c] for t, d, c in zip(tokens, done, counts, strict=True)]
                )
                spans = zip(before, done, counts, strict=True)
                places = np.concatenate([np.arange(b + d, b + d + c) for b, d, c in spans])
                with self._compute:  # calls of other threads take turns chunk by chunk
                    step.chunk(counts)
                    x = x_all[: len(ids)]
                    self.embed.pick(ids, x)
                    for n, (mixer, moe, index) in enumerate(layers):
                        if self.watch.ready():
                            self.relieve()
                        mixer.forward(step, x)
                        record = trace is not None and index >= 0
                        forced = None
                        if routers is not None and index >= 0:
                            top_k = self._routed[index].shape[1]
                            forced = checked(routers(index, places), len(ids), top_k, index)
                        moe.forward(step, x, self._routed[index] if record else None, forced)
                        if progress is not None:
                            at = sum(done) * len(layers) + (n + 1) * len(ids)
                            progress(at, total * len(layers))
                    if trace is not None:
                        routing.append(
                            [r.ravel()[: r.shape[1] * len(ids)].copy() for r in self._routed]
                        )
                    first = 0
                    for i, c in enumerate(counts):
                        done[i] += c
                        if c:
                            take(i, x, first, c, done[i] == len(tokens[i]))
                        first += c
            self._look_at_gpu()  # before the commit: what its listener raises moves no session
            for s, t in zip(sessions, tokens, strict=True):
                s.extend(t)
            step.commit()
        except BaseException as error:
            step.abort()
            with suppress(Exception):  # a listener's; this error matters more
                self._look_at_gpu()
            if self._closed and isinstance(error, MosaicError):
                raise MosaicError("the model was closed during the call", "ECLOSED") from error
            raise
        finally:
            with self._lock:
                if not self._closed:
                    self._steps.append(step)
        self.counters.add(decode, total, time.perf_counter() - started)
        for chunk in routing:
            self._record(trace, "decode" if decode else "prefill", chunk)

    def _record(self, trace: Any, phase: str, chunk: list[np.ndarray]) -> None:
        """Lines of one chunk: a step is one token of one sequence, numbered in order of evaluation."""
        rows = [
            routed.reshape(-1, m.top_k)
            for routed, m in zip(chunk, self.plan.moe_layers, strict=True)
        ]
        for t in range(len(rows[0])):
            for index, routed in enumerate(rows):
                trace.add(phase, self._traced, index, routed[t].tolist())
            self._traced += 1

    def _step(self) -> engine.Step:
        with self._lock:
            return self._steps.pop() if self._steps else engine.Step(self.engine)

    def _with_room(self, make: Callable[[], Any]) -> Any:
        """make(); when it does not fit the budget, the expert cache gives up the slots it needs."""
        with self._lock:
            try:
                return make()
            except MosaicError as error:
                if error.code != "EBUDGET" or self.store is None:
                    raise
                before = error
            desc = blocks.state(self.plan, self.ctx, engine.DTYPES[self.memory.kv.upper()])
            state = engine_pure.kv_bytes(desc)[1]
            slots = self.slots - -(-(state + SESSION_SLACK - self._free()) // self.memory.unit)
            if slots < self.memory.hard or slots >= self.slots:
                raise MosaicError(
                    f"no memory for another session: it needs {state} bytes and the expert cache is at its "
                    f"floor of {self.memory.hard} slots; close a session or raise --ram",
                    "EBUDGET",
                ) from before
            self.store.resize(slots)
            self.slots = slots
            return make()

    def relieve(self) -> None:
        """Looks at memory: where it is short the expert cache shrinks, and later grows back. Forward calls do
        so by themselves; a program that waits long between them may. While another thread computes a layer the
        cache keeps its size, so the call waits for that layer."""
        reading = self.watch.read()
        # whoever holds the lock makes or ends a session: not worth waiting for
        if reading is None or self.store is None or not self._lock.acquire(blocking=False):
            return
        try:
            held = self.engine.stats().held
            note = self.guard.decide(reading, held * self.memory.slab, self._most())
            self._fit()
        finally:
            self._lock.release()
        if note is not None:
            self._note(note)

    def _note(self, note: str) -> None:
        self.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)

    def _look_at_gpu(self) -> None:
        if self.memory.tier is not None and not self.gpu_note:
            with suppress(MosaicError):  # closed meanwhile
                self._without_gpu(engine.text(self.engine.stats().gpu_note))

    def _without_gpu(self, why: str) -> None:
        """The tier is not there, or no longer; "": it is. Told once, whoever finds out."""
        with self._lock:
            if not why or self.gpu_note:
                return
            self.gpu_note = why
        self._note(why)

    def _regrow(self) -> None:
        """Gives the expert cache back what closed sessions have freed."""
        with self._lock:
            if not self._closed and self.store is not None:
                self._fit()

    def _fit(self) -> None:
        """The cache at the size that sessions and pressure leave it."""
        slots = min(self._most(), self.guard.allowed)
        if slots == self.slots:
            return
        self.store.resize(slots)
        self.slots = slots

    def _most(self) -> int:
        """Slots that sessions leave the cache."""
        return min(self.memory.slots, self.slots + self._free() // self.memory.unit)

    def _free(self) -> int:
        """Bytes of the budget that the engine does not use."""
        c = self.engine.stats()
        return c.budget - sum(c.mem_now)

    # ---- text ----

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            from mosaic_c.tokenizer import Tokenizer

            self._tokenizer = Tokenizer(self.folder)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can go in and out."""
        return self._tokenizer is not None or (self.folder / TOKENIZER).is_file()

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        session: Session | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Continues a text or token ids; iterate over the result for pieces (token, text, logprob).

        None means what the checkpoint's generation_config says (greedy unless do_sample), the room left, a
        fresh seed. Token ids need no tokenizer: pieces then have text "" where the folder has none.
        """
        from mosaic_c import generation, sampling
        from mosaic_c.tokenizer import Detokenizer, encode_within

        config = self.generation_config
        text = isinstance(prompt, str)
        tokenizer = self.tokenizer if text or self.has_tokenizer else None
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: expected one of this model's, got {session!r}")
        target_room = self.ctx if session is None else session.room
        ids = (
            encode_within(tokenizer, prompt, target_room)
            if text
            else token_ids(prompt, self.vocab).tolist()
        )
        settings = sampling.resolve(
            config, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty, seed=seed,
        )  # fmt: skip
        target = self.session() if session is None else session
        history = target.tokens
        run = generation.generate(
            WithProgress(target, progress),
            ids,
            sampler=sampling.Sampler(settings),
            stop_ids=generation.stop_ids(config, self.config, tokenizer),
            stop=() if stop is None else stop,
            max_new_tokens=max_new_tokens,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, history + ids),
            ignore_eos=ignore_eos,
            history=history,
        )
        run.sampling, run.session = settings, target
        return run

    def stats(self) -> Stats:
        """Counters and memory since the model was opened."""
        self._alive()
        c = self.engine.stats()
        return collect(c, self.counters, self.memory, self._io, self.guard, self.gpu_note)

    def memory_table(self) -> memory_table.Table:
        """What takes RAM and VRAM now."""
        return memory_table.measure(self.stats(), self.memory)

    def fingerprint(self) -> bytes:
        """32 bytes that identify these weights: config, and 16 samples of 4 KiB of every shard.

        Raises MosaicError ESTALE where a shard on disk is no longer the one that was opened.
        """
        if [identity.of(path) for path in self.files] != self._identities:
            raise MosaicError(
                f"{shown_path(self.folder)}: the weights on disk changed since the model was opened; open it again",
                "ESTALE",
            )
        if self._fingerprint is None:
            self._fingerprint = identity.fingerprint(self.config, self.files)
        return self._fingerprint
