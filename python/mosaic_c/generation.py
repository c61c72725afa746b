"""The decode loop: prompt in, pieces out.

Owns: when to stop and which text may already be shown. Promises: each chosen token is yielded once
and at once; no token is evaluated that nothing depends on; text of a stop string never comes out.
Knows nothing of how a session computes or how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import MosaicError, UsageError
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


Chooser = Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64]], tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """One chosen token. logprob: natural logarithm, of the model's own distribution.

    text: what became certain with it, which may be "" or more than the token's own.
    """

    token: int
    text: str
    logprob: float


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


class Generation(Iterator[Piece]):
    """A running generation: iterate it for the pieces. Can be iterated once.

    finish_reason: None while running (and after an error or an interrupt), "stop" (a stop token or
    stop string) or "length" (max_new_tokens or the context); already set when the last piece is
    yielded. stopped_by: the stop token's id or the stop string, None otherwise. limit: most tokens
    this run may give. tokens: all chosen so far. The last of them is not evaluated: its logits were
    never needed.
    """

    def __init__(
        self,
        session: Session,
        ids: Sequence[int],
        *,
        sampler: Chooser,
        stop_ids: Iterable[int] = (),
        stop: str | Iterable[str] = (),
        max_new_tokens: int | None = None,
        detokenizer: Detokenizer | None = None,
        ignore_eos: bool = False,
        history: Sequence[int] = (),
    ) -> None:
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None
        self.tokens: list[int] = []
        self._session = session
        self._ids = _checked_ids(ids, "ids")
        self._history = _checked_ids(history, "history") + self._ids
        self._choose = sampler
        self._stop_ids = frozenset() if ignore_eos else frozenset(stop_ids)
        self._stops = StopStrings(stop)
        self._detokenizer = detokenizer
        if detokenizer is None and self._stops.stops:
            raise UsageError("stop strings need a tokenizer, and there is none: use stop token ids")
        self.limit = self._limit(max_new_tokens)
        self._pieces: Generator[Piece, None, None] = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the run early; what was held back is dropped."""
        self._pieces.close()

    def _limit(self, wanted: int | None) -> int:
        whole = isinstance(wanted, (int, np.integer)) and not isinstance(wanted, bool)
        if wanted is not None and not (whole and wanted >= 0):
            raise UsageError(
                f"max_new_tokens: expected an integer >= 0 or None (room left), got {wanted!r}"
            )
        if not self._ids:
            raise UsageError("the prompt is empty: expected at least one token")
        room = self._session.room
        if len(self._ids) > room:
            raise MosaicError(
                f"the prompt has {len(self._ids)} tokens and the context has room for {room}: "
                "shorten it or use a larger context (--ctx)",
                "ECONTEXT",
            )
        # A prompt that fills the context exactly still gives one token: that one is never
        # evaluated.
        left = max(1, room - len(self._ids))
        return left if wanted is None else min(int(wanted), left)

    def _run(self) -> Generator[Piece, None, None]:
        if self.limit == 0:
            self.finish_reason = "length"
            return
        history = np.empty(len(self._history) + min(self.limit, 1024), dtype=np.int64)
        count = len(self._history)
        history[:count] = self._history
        logits = self._session.forward(self._ids, last=True)
        while True:
            token, logprob = self._choose(logits, history[:count])
            self.tokens.append(token)
            text = self._accept(token)
            yield Piece(token, text, logprob)
            if self.finish_reason is not None:
                return
            if count == len(history):
                history = np.concatenate([history, np.empty_like(history)])
            history[count] = token
            count += 1
            logits = self._session.forward([token], last=True)

    def _accept(self, token: int) -> str:
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


def generate(session: Session, ids: Sequence[int], **options: Any) -> Generation:
    """Evaluates ids and continues them, one Piece a token; see Generation for the options.

    sampler: (logits (vocab,) float32, ids so far (n,) int64) -> (token, logprob). stop_ids: tokens
    that end the text; such a token is yielded, its text is not. stop: strings that end the text.
    max_new_tokens: None is the room left. detokenizer: None gives "" as text. ignore_eos: go on
    past stop_ids. history: earlier ids of the session, for the repetition penalty. Bad arguments
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


def _checked_ids(ids: Sequence[int], name: str) -> list[int]:
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        raise UsageError(f"{name}: expected token ids >= 0 in a row, got a nested list") from None
    if array.size == 0:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        raise UsageError(
            f"{name}: expected token ids >= 0 in a row, got {array.dtype} {array.shape}"
        )
    return [int(i) for i in array]
