"""The decode loop: prompt in, pieces out.

Owns: when to stop and which text may already be shown. Promises: each chosen token is yielded once
and at once; no token is evaluated that nothing depends on; text of a stop string never comes out.
Knows nothing of how a session computes or how a token is chosen. Run is the loop turned inside out,
for whoever evaluates the tokens of many sequences together; Generation drives one by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import MosaicError, UsageError
from .sampling import best
from .tokenizer import Detokenizer, Tokenizer


class Session(Protocol):
    """What generation needs of a sequence's state."""

    @property
    def position(self) -> int:
        """Tokens evaluated so far."""
        ...

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        ...

    def forward(self, ids: Sequence[int], last: bool = True) -> npt.NDArray[np.float32]:
        """Evaluates ids and returns the logits (vocab,) behind the last one."""
        ...


Chooser = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int32]], tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """One chosen token. logprob: natural logarithm, of the model's own distribution.

    text: what became certain with it, which may be "" or more than the token's own. top: the
    likeliest tokens with their logprobs, best first, where they were asked for.
    """

    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What the text may be, token by token: a grammar."""

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """(n,) which tokens may come next, n at most the vocabulary (what lies behind may not);
        None: any."""
        ...

    def advance(self, token: int) -> None:
        """Takes note of a token that was chosen and belongs to the text."""
        ...


class StopStrings:
    """Passes text on up to the first stop string, holding back only what may be the start of one.

    The match is the one that completes first (the longest of those), however the text is cut into
    pieces.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        try:
            self.stops = [stops] if isinstance(stops, str) else list(stops)
        except TypeError:
            raise UsageError(f"stop: expected strings, got {stops!r}") from None
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"stop: expected strings that are not empty, got {stop!r}")
        self.matched: str | None = None
        self._held = ""
        self._shown: list[bool] = []  # for each held character: is it part of the output?

    def push(self, text: str, shown: bool = True) -> str:
        """Takes more text; returns what can be shown. After a match everything is dropped.

        shown=False: text that counts for matching only (special tokens, which the output leaves
        out).
        """
        if self.matched is not None:
            return ""
        if not self.stops:
            return text if shown else ""
        self._held += text
        self._shown += [shown] * len(text)
        ends = [
            (at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0
        ]
        if ends:
            _, at, self.matched = min(ends)
            out = self._take(at)
            self._take(len(self._held))
            return out
        return self._take(len(self._held) - max(map(self._overlap, self.stops)))

    def flush(self) -> str:
        """Ends the text: returns what was held back."""
        return self._take(len(self._held))

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that starts stop."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _take(self, count: int) -> str:
        out = "".join(
            c for c, shown in zip(self._held[:count], self._shown[:count], strict=True) if shown
        )
        self._held = self._held[count:]
        del self._shown[:count]
        return out


class Run:
    """One sequence's decoding, for a caller that evaluates: pending, then accept, until it is done.

    ids: all so far, what history stands for and the prompt first. pending: those of them to
    evaluate next, the prompt's first, later the last token. finish_reason: None while running,
    "stop" (a stop token or stop string) or "length" (max_new_tokens or the context); set with the
    last piece. stopped_by: the stop token's id or the stop string, None otherwise. limit: most
    tokens this run may give. tokens: all chosen so far; the last of a finished run is never
    pending: nothing depends on its logits.
    """

    def __init__(
        self,
        ids: Sequence[int],
        room: int,
        *,
        sampler: Chooser,
        stop_ids: Iterable[int] = (),
        stop: str | Iterable[str] = (),
        max_new_tokens: int | None = None,
        detokenizer: Detokenizer | None = None,
        ignore_eos: bool = False,
        history: Sequence[int] = (),
        top_logprobs: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        """room: tokens that fit into the context beside what history stands for. top_logprobs,
        constraint: these need a sampling.Sampler; for the rest see generate()."""
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None
        self.tokens: list[int] = []
        prompt, before = _checked_ids(ids, "ids"), _checked_ids(history, "history")
        self._choose = sampler
        self._stop_ids = frozenset() if ignore_eos else frozenset(stop_ids)
        self._stops = StopStrings(stop)
        self._detokenizer = detokenizer
        self._top_logprobs = _checked_top(top_logprobs)
        self._constraint = constraint
        if detokenizer is None and self._stops.stops:
            raise UsageError("stop strings need a tokenizer, and there is none: use stop token ids")
        self.limit = _limit(max_new_tokens, len(prompt), room)
        # The one copy of the ids, and small: a request that waits in a queue holds little else.
        self._ids = np.concatenate([before, prompt])
        self._count, self._at = len(self._ids), len(before)
        if self.limit == 0:
            self._at, self.finish_reason = self._count, "length"

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self._count]

    @property
    def pending(self) -> npt.NDArray[np.int32]:
        return self._ids[self._at : self._count]

    def evaluated(self, n: int) -> None:
        """Notes that the first n of pending were evaluated, or need not be."""
        self._at += n

    def resume(self, n: int) -> None:
        """Notes that a state holds just the first n of ids."""
        self._at = n if self.finish_reason is None else self._count

    def accept(self, logits: npt.NDArray[np.float32]) -> Piece | None:
        """Chooses a token by the logits (vocab,) behind the last of pending, all of which are then
        evaluated; what can be shown with it. None: the run is over."""
        if self.finish_reason is not None:
            return None
        if self._constraint is None:
            token, logprob = self._choose(logits, self.ids)
        else:
            allowed = self._constraint.mask()
            token, logprob = self._choose(logits, self.ids, allowed)  # type: ignore[call-arg]
        top = best(logits, self._top_logprobs) if self._top_logprobs else ()
        if self._constraint is not None and token not in self._stop_ids:
            self._constraint.advance(token)
        self.tokens.append(token)
        text = self._shown(token)
        if self._count == len(self._ids):
            more = min(self.limit - len(self.tokens) + 1, max(self._count, 64))
            self._ids = np.concatenate([self._ids, np.empty(more, np.int32)])
        self._ids[self._count] = token
        self._count += 1
        self._at = self._count - (self.finish_reason is None)
        return Piece(token, text, logprob, top)

    def _shown(self, token: int) -> str:
        """Decides whether token is the last one; returns the text that can be shown with it."""
        stopping = token in self._stop_ids
        full = len(self.tokens) == self.limit
        text = "" if stopping else self._text_of(token)
        if (stopping or full) and self._detokenizer is not None:
            text += self._stops.push(self._detokenizer.finish())
        if self._stops.matched is not None:
            self.finish_reason, self.stopped_by = "stop", self._stops.matched
        elif stopping:
            self.finish_reason, self.stopped_by = "stop", token
        elif full:
            self.finish_reason = "length"
        return text if self.finish_reason is None else text + self._stops.flush()

    def _text_of(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        text = self._stops.push(self._detokenizer.add(token))
        hidden = self._detokenizer.hidden(token) if self._stops.stops else ""
        return text + self._stops.push(hidden, shown=False)


class Generation(Iterator[Piece]):
    """A running generation: iterate it for the pieces. Can be iterated once.

    finish_reason, stopped_by, limit and tokens are those of its Run; finish_reason stays None after
    an error or an interrupt.
    """

    def __init__(self, session: Session, ids: Sequence[int], **options: Any) -> None:
        """options: those of Run."""
        self.run = Run(ids, session.room, **options)
        self._session = session
        self._pieces: Generator[Piece, None, None] = self._each()

    @property
    def finish_reason(self) -> str | None:
        return self.run.finish_reason

    @property
    def stopped_by(self) -> int | str | None:
        return self.run.stopped_by

    @property
    def limit(self) -> int:
        return self.run.limit

    @property
    def tokens(self) -> list[int]:
        return self.run.tokens

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the run early; what was held back is dropped."""
        self._pieces.close()

    def _each(self) -> Generator[Piece, None, None]:
        while len(pending := self.run.pending):
            piece = self.run.accept(self._session.forward(pending.tolist(), last=True))
            assert piece is not None
            yield piece


def generate(session: Session, ids: Sequence[int], **options: Any) -> Generation:
    """Evaluates ids and continues them, one Piece a token; see Generation for the options.

    sampler: (logits (vocab,) float32, ids so far (n,) int32) -> (token, logprob). stop_ids: tokens
    that end the text; such a token is yielded, its text is not. stop: strings that end the text.
    max_new_tokens: None is the room left. detokenizer: None gives "" as text. ignore_eos: go on
    past stop_ids. history: earlier ids of the session, for the repetition penalty. top_logprobs: of
    so many of the likeliest tokens in each piece. constraint: what the text may be. Bad arguments
    and a prompt longer than the room raise here, before anything is evaluated.
    """
    return Generation(session, ids, **options)


def stop_ids(
    generation_config: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> set[int]:
    """Tokens that end a turn: each eos of generation_config, config, text_config, tokenizer."""
    found = set(tokenizer.eos_ids) if tokenizer is not None else set()
    config = config or {}
    text_config = config.get("text_config")
    for where, part in (
        ("generation_config", generation_config or {}),
        ("config", config),
        ("config.text_config", text_config if isinstance(text_config, dict) else {}),
    ):
        eos = part.get("eos_token_id")
        for token in eos if isinstance(eos, (list, tuple)) else [eos]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int):
                raise MosaicError(
                    f"{where}: eos_token_id: expected an id or a list of ids, got {eos!r}",
                    "EFORMAT",
                )
            if token >= 0:  # some configs write -1 for none
                found.add(token)
    return found


def _limit(wanted: int | None, prompt: int, room: int) -> int:
    whole = isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool)
    if wanted is not None and not (whole and wanted >= 0):
        raise UsageError(
            f"max_new_tokens: expected an integer >= 0 or None (room left), got {wanted!r}"
        )
    if not prompt:
        raise UsageError("the prompt is empty: expected at least one token")
    if prompt > room:
        raise MosaicError(
            f"the prompt has {prompt} tokens and the context has room for {room}: "
            "shorten it or use a larger context (--ctx)",
            "ECONTEXT",
        )
    # A prompt that fills the context exactly still gives one token: that one is never evaluated.
    left = max(1, room - prompt)
    return left if wanted is None else min(int(wanted), left)


def _checked_top(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
        raise UsageError(f"top_logprobs: expected an integer >= 0, got {n!r}")
    return int(n)


def _checked_ids(ids: Sequence[int], name: str) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise UsageError(f"{name}: expected token ids >= 0 in a row, got a nested list") from None
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        raise UsageError(
            f"{name}: expected token ids >= 0 in a row, got {array.dtype} {array.shape}"
        )
    if array.max() >= 2**31:
        raise UsageError(f"{name}: expected token ids below 2**31, got {array.max()}")
    return array.astype(np.int32)
