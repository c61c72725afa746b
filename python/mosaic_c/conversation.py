"""A conversation with a model: messages in, answers out in pieces, and the state of it used again.

Owns: the messages, their rendering to token ids, and one session that follows them. Promises: the answer to a message
is the one that a fresh session would give to the whole conversation, token for token; only tokens whose state is not
held are evaluated; a turn that fails leaves the messages as they were; nothing is cut without saying so. How the state
is used again: templates render earlier answers anew (without their thinking, trimmed), so each turn renders all
messages, takes the longest prefix that the session holds too, goes back to the nearest state it can, and evaluates
the rest. Attention alone can go back to any position; recurrent state to where it was kept, which is at the ends of
messages. Knows nothing of terminals.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mosaic_c import generation, sampling
from mosaic_c.chat import encode_chat
from mosaic_c.dialogue import Message, Settings, Usage, loops
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.reasoning import CONTENT, REASONING, Markers, Part, Reasoning, ends_inside
from mosaic_c.session import common
from mosaic_c.template import chat_template, variables_of
from mosaic_c.tokenizer import Detokenizer, check_fits, check_text

if TYPE_CHECKING:
    from mosaic_c.model import Model
    from mosaic_c.session import Session

THINK = "enable_thinking"  # the variable by which templates switch thinking
KEPT = 32  # states kept to go back to, at most
KEPT_SHARE = 16  # and at most this part of the memory budget
# Tokens: a call of few costs the reads of their experts, so a state is not kept so near to another. Where the two cost
# the same depends on the model, and was not measured.
NEAR = 16

Progress = Callable[[int, int], None]


class Conversation:
    """Messages, settings and the session of a conversation with a model (mosaic_c.open's).

    messages: what was said, a system message first; usage: of the last turn; knows_think: whether the template lets
    thinking be switched. Raises MosaicError ENOENT for a model without tokenizer or chat template. For one thread;
    stop() may come from another, or from a signal handler.
    """

    def __init__(
        self, model: Model, system: str | None = None, settings: Settings | None = None
    ) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        source = chat_template(self.tokenizer.folder, self.tokenizer.config)
        if source is None:
            raise MosaicError(
                "the model has no chat template, and a conversation needs one; `generate --raw` continues plain text",
                "ENOENT",
            )
        self._template = source
        self.markers = Markers.of(self.tokenizer, source)
        self.knows_think = THINK in variables_of(source)
        self.messages: list[Message] = []
        self.settings = settings or Settings()
        self.check(self.settings)
        self.usage = Usage()
        config = model.generation_config
        self._stop_ids = generation.stop_ids(config, model.config, self.tokenizer)
        self._session: Session | None = None
        self._hybrid = bool(model.plan.delta_layers)
        self._turn: Turn | None = None
        self._retries = 0  # answers that the last message had before this one
        self._stop = False
        self._used: int | None = None
        if system is not None:
            self.system(system)

    # ---- what is said ----

    def say(self, text: str) -> Turn:
        """Answers a message: iterate over the result. Raises ECONTEXT, with the ways out, for what does not fit."""
        self._idle()
        check_text(text)
        if not text:
            raise UsageError("the message is empty: expected at least one character")
        self._turn = Turn(self, [*self.messages, Message("user", text)], 0)
        return self._turn

    def retry(self) -> Turn:
        """Answers the last message once more, with the next seed."""
        self._idle()
        at = self._question()
        self._turn = Turn(self, self.messages[: at + 1], self._retries + 1)
        return self._turn

    def undo(self) -> str:
        """Takes the last message and its answer back; returns the message."""
        self._idle()
        at = self._question()
        text = self.messages[at].content
        self._set(self.messages[:at])
        return text

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self._idle()
        self._set([m for m in self.messages[:1] if m.role == "system"])

    def system(self, text: str) -> None:
        """Sets the system message; "" takes it away."""
        self._idle()
        check_text(text)
        rest = [m for m in self.messages if m.role != "system"]
        self._set([Message("system", text), *rest] if text else rest)

    def load(self, messages: Sequence[Message]) -> None:
        """Puts other messages in place of all."""
        self._idle()
        self._set(list(messages))

    def stop(self) -> None:
        """Stops the answer that is being given; what was given of it stays in the conversation."""
        self._stop = True

    # ---- settings and numbers ----

    def set(self, **changed: Any) -> None:
        """Changes settings, by the names of Settings; UsageError for values out of range."""
        settings = replace(self.settings, **changed)
        self.check(settings)
        self.settings, self._used = settings, None

    def check(self, settings: Settings) -> None:
        sampling.resolve(self.model.generation_config, **settings.sampling())
        most = settings.max_new_tokens
        if most is not None and most < 1:
            raise UsageError(f"max_new_tokens: expected an integer >= 1, got {most}")

    @property
    def used(self) -> int:
        """Tokens of the conversation as it is rendered next."""
        if self._used is None:
            asked = any(m.role == "user" for m in self.messages)  # some templates want a question
            self._used = len(self.render(self.messages, False)) if asked else 0
        return self._used

    @property
    def left(self) -> int:
        """Tokens that the context has room for."""
        return max(self.model.ctx - self.used, 0)

    def render(self, messages: Sequence[Message], prompt: bool) -> list[int]:
        """Token ids of messages; prompt: with the generation prompt behind them."""
        variables: dict[str, Any] = {}
        if self.settings.think is not None and self.knows_think:
            variables[THINK] = self.settings.think
        for message in messages:
            check_fits(self.tokenizer, message.content, self.model.ctx)
        return encode_chat(
            self.tokenizer,
            [m.shown() for m in messages],
            template=self._template,
            add_generation_prompt=prompt,
            variables=variables,
        )

    # ---- state ----

    def save_state(self, path: str | os.PathLike[str]) -> bool:
        """Writes the session to a file, as far back as the next turn will need it (a file has no kept states); False
        when nothing of it is of use then."""
        self._idle()
        session = self._session
        if session is None:
            return False
        n = self._nearest(session, self.render([*self.messages, Message("user", ".")], True))
        if n > 0:
            with session.fork() as copy:
                copy.rewind(n)
                copy.save(path)
        return n > 0

    def load_state(self, path: str | os.PathLike[str]) -> int:
        """Takes a session from a file in place of the present one; how many tokens it holds. They need not be of this
        conversation: only what both have in common is used."""
        self.close()  # first: the pool of pages may not hold both
        self._session = self.model.session(load=path)
        return self._session.position

    def close(self) -> None:
        """Gives the session back; the conversation can go on, with a new one."""
        self._idle()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _question(self) -> int:
        """Where the last message of the user is."""
        asked = [i for i, m in enumerate(self.messages) if m.role == "user"]
        if not asked:
            raise UsageError("there is no message yet")
        return asked[-1]

    def _set(self, messages: list[Message], retries: int = 0) -> None:
        self.messages, self._used, self._retries = messages, None, retries

    def _idle(self) -> None:
        """Ends an answer that nobody iterates to its end."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.close()

    def _resume(self, ids: Sequence[int]) -> tuple[Session, int, str]:
        """A session that holds the first n of ids, as many as can be, and why it does not hold more."""
        if self._session is None:
            self._session = self.model.session()
        session = self._session
        held = session.tokens
        same = common(held, ids)
        n = self._nearest(session, ids)
        why = ""
        if n < len(held):
            why = "the last answer is given anew"
            if same < len(ids):
                why = f"the conversation differs from token {same} on"
            if n < min(same, len(ids) - 1):
                why += f", the nearest kept state is at {n}"
        session.rewind(n)
        if n == len(held):
            self._keep(
                session
            )  # the end of the last answer: where the next message can be undone to
        return session, n, why

    def _nearest(self, session: Session, ids: Sequence[int]) -> int:
        """How many of ids a session can come back to; one is left to evaluate."""
        n = min(common(session.tokens, ids), len(ids) - 1)
        if self._hybrid and n < session.position:
            n = max((p for p in session.snapshots if p <= n), default=0)
        return n

    def _keep(self, session: Session) -> None:
        """Keeps the state at this position where going back needs it; the oldest go when they take too much memory. No
        memory for it is no failure: a later turn then evaluates more."""
        if not self._hybrid or session.position in (0, *session.snapshots):
            return
        before = self.model.stats().resident["state"]
        try:
            session.snapshot()
        except MosaicError as error:
            if error.code not in ("EBUDGET", "ENOMEM"):
                raise
            return
        size = self.model.stats().resident["state"] - before
        most = min(KEPT, self.model.memory.budget // KEPT_SHARE // max(size, 1))
        for at in session.snapshots[: -max(most, 2)]:
            session.forget(at)


class Turn(Iterator[Part]):
    """An answer as it is made: iterate it for parts (reasoning.REASONING or CONTENT, text).

    evaluated: tokens of the prompt to evaluate; on_progress: called with (done, of) while they are. When the iteration
    ends, by itself, by stop() or by close(), the message and its answer are in the conversation, unless no token of an
    answer had come or something failed: then nothing has changed. stopped, unfinished (still in its thinking), looping
    (its end says the same again and again) and usage tell of the answer.
    """

    def __init__(self, conversation: Conversation, messages: list[Message], retry: int) -> None:
        self.on_progress: Progress | None = None
        self.stopped = self.unfinished = self.looping = False
        self._owner, self._messages, self._retry = conversation, messages, retry
        c, ctx = conversation, conversation.model.ctx
        self._ids = c.render(messages, True)
        if len(self._ids) >= ctx:
            raise MosaicError(
                f"the conversation is full: with this message it has {len(self._ids)} tokens, and the context has room "
                f"for {ctx} with the answer; /undo takes the last exchange back, /reset begins anew, a larger --ctx "
                "holds more",
                "ECONTEXT",
            )
        last = len(self._ids) - 1
        self._edge = min(common(self._ids, c.render(messages, False)), last)
        self._before = 0  # where the messages before the last one end
        if c._hybrid and len(messages) > 2:
            self._before = common(self._ids, c.render(messages[:-1], False))
        settings = c.settings.sampling()
        if settings["seed"] is not None:
            settings["seed"] = (settings["seed"] + retry) % 2**64
        self.sampling = sampling.resolve(c.model.generation_config, **settings)
        c._stop = False
        self._session, n, why = c._resume(self._ids)
        seed = None if self.sampling.greedy else self.sampling.seed
        self.usage = c.usage = Usage(len(self._ids), n, why, seed=seed)
        self.evaluated = self.usage.evaluated
        self._parts = self._run()

    def __next__(self) -> Part:
        return next(self._parts)

    def close(self) -> None:
        """Ends the answer here."""
        self._parts.close()

    @property
    def cut(self) -> str:
        """What ended the answer before its time: "max_new_tokens", "context" or nothing."""
        if self.usage.finish_reason != "length":
            return ""
        most = self._owner.settings.max_new_tokens
        return "max_new_tokens" if self.usage.answer_tokens == most else "context"

    def _run(self) -> Iterator[Part]:
        c, usage = self._owner, self.usage
        prompt = self._ids[self._edge :]
        split = Reasoning(c.markers, ends_inside(c.tokenizer, c.markers, prompt))
        texts = {CONTENT: "", REASONING: ""}
        tokens: list[int] = []

        def take(parts: list[Part]) -> list[Part]:
            for kind, text in parts:
                texts[kind] += text
            return parts

        usage.finish_reason = "failed"  # unless it ends otherwise
        try:
            try:
                for piece in self._pieces(tokens):
                    usage.reasoning_tokens += not split.closed
                    yield from take(split.push(piece))
            except _Stopped:
                self.stopped = True
            yield from take(split.finish())
        except GeneratorExit:
            self.stopped = True
            take(split.finish())
            raise
        except BaseException:
            tokens.clear()
            raise
        finally:
            if self.stopped:
                usage.finish_reason = "stopped"
            self.unfinished, self.looping = not split.closed, loops(tokens)
            if tokens:
                thought = texts[REASONING].strip()
                answer = Message("assistant", texts[CONTENT], thought, self.stopped)
                c._set([*self._messages, answer], self._retry)

    def _pieces(self, tokens: list[int]) -> Iterator[generation.Piece]:
        """The pieces of the answer, their tokens noted in tokens as they come."""
        c, usage, started = self._owner, self.usage, time.perf_counter()
        self._prefill()
        held = self._session.position
        run = generation.generate(
            _Watched(self._session, self._progress),
            self._ids[held:],
            sampler=sampling.Sampler(self.sampling),
            stop_ids=c._stop_ids,
            max_new_tokens=c.settings.max_new_tokens,
            history=self._ids[:held],
            detokenizer=Detokenizer(c.tokenizer, self._ids),
        )
        for piece in run:
            now = time.perf_counter()
            if not tokens:
                usage.prefill_s, started = now - started, now
            usage.decode_s = now - started
            usage.answer_tokens += 1
            tokens.append(piece.token)
            yield piece
            if run.finish_reason is not None:
                usage.finish_reason = run.finish_reason
            elif c._stop:
                raise _Stopped

    def _prefill(self) -> None:
        """Evaluates the prompt as far as generation does not: to the end of the messages where a state has to be kept
        there, else all but the last chunk. In calls of one chunk, so that the chunks before an interrupt or an error
        stay."""
        c, session, ids = self._owner, self._session, self._ids
        watched, chunk = _Watched(session, self._progress), c.model.memory.chunk
        stops = [self._before, self._edge]
        if not c._hybrid:
            rest = len(ids) - 1 - session.position
            stops = [session.position + rest // chunk * chunk]
        elif self._before <= session.position + NEAR:
            stops = [self._edge]
        for end in stops:
            while session.position < end:
                at = session.position
                watched.forward(ids[at : min(at + chunk, end)])
            if session.position == end:
                c._keep(session)

    def _progress(self, done: int, of: int, count: int) -> None:
        """(done, of) of a call with count tokens, as part of the whole prompt."""
        if self._owner._stop:
            raise _Stopped
        before = self._session.position - self.usage.reused
        if self.on_progress is not None and before < self.evaluated:
            self.on_progress(of * before + done * count, of * self.evaluated)


class _Stopped(Exception):
    """Raised between two layers; the call then moves nothing."""


class _Watched:
    """A session every layer of which reports to a function of (done, of, tokens of the call)."""

    def __init__(self, session: Session, progress: Callable[[int, int, int], None]) -> None:
        self._session, self._progress = session, progress

    @property
    def position(self) -> int:
        return self._session.position

    @property
    def room(self) -> int:
        return self._session.room

    def forward(self, ids: Sequence[int], last: bool = True) -> Any:
        count = len(ids)
        return self._session.forward(
            ids, last, progress=lambda done, of: self._progress(done, of, count)
        )
