"""One sequence: its tokens, and the handle of its KV pages, conv and recurrent state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mosaic_c import engine
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import path_text, show

if TYPE_CHECKING:
    from mosaic_c.model import Model

Progress = Callable[[int, int], None]  # (token-layers done, in all)


class Session:
    """One sequence: KV pages, conv and recurrent state, and the tokens they stand for."""

    def __init__(self, model: Model, handle: engine.SessionHandle, tokens: list[int]) -> None:
        self._model, self._handle, self._tokens = model, handle, tokens
        self._snapshots: list[int] = []

    def check(self, model: Model | None = None) -> None:
        self._model._alive()
        if self._handle.closed:
            raise MosaicError("the session is closed", "ECLOSED")
        if model is not None and model is not self._model:
            raise UsageError("forward: a session of another model")

    @property
    def position(self) -> int:
        """Tokens evaluated."""
        self.check()
        return self._handle.position

    @property
    def tokens(self) -> list[int]:
        """The evaluated tokens, a copy. The list behind it may run ahead of the C state, and is cut to its
        position here: they agree on whichever side of a change an interrupt falls."""
        return self._tokens[: self.position]

    @property
    def room(self) -> int:
        """Tokens that still fit into the context."""
        return self._model.ctx - self.position

    @property
    def snapshots(self) -> list[int]:
        """Positions that snapshot() has kept, ascending."""
        return list(self._snapshots)

    def forward(
        self, ids: Sequence[int], last: bool = False, *, progress: Progress | None = None
    ) -> np.ndarray:
        """Evaluates ids: logits (n, vocab) float32 behind each token, or (vocab,) with last."""
        if last:
            return self._model.forward([(self, ids)], progress=progress)[0]
        ids, at = token_ids(ids, self._model.vocab), 0
        self._model.check_room(self, len(ids))
        out = np.empty((len(ids), self._model.vocab), np.float32)

        def take(which: int, x: np.ndarray, first: int, count: int, last: bool) -> None:
            nonlocal at
            pick = np.arange(first, first + count, dtype=np.int32)
            self._model.head.forward(x, pick, out[at : at + count])
            at += count

        self._model._run([(self, ids)], take, progress)
        return out

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities (n - 1,) float64 of ids[1:], each given all before; evaluates ids."""
        targets = token_ids(ids, self._model.vocab)
        out = np.empty(max(len(targets) - 1, 0))

        def give(at: int, z: np.ndarray) -> None:
            z = z[: len(out) - at]
            top = z.max(axis=1, keepdims=True)
            norm = np.log(np.exp(z - top, dtype=np.float64).sum(axis=1))
            picked = z[np.arange(len(z)), targets[at + 1 : at + 1 + len(z)]]
            out[at : at + len(z)] = picked - top[:, 0].astype(np.float64) - norm

        self.each(ids, give)
        return out

    def each(self, ids: Sequence[int], give: Callable[[int, np.ndarray], None]) -> None:
        """Evaluates ids; give(at, logits (n, vocab) float32) gets those behind ids[at], ids[at + 1] and on, up to 16
        at a time, without the (len(ids), vocab) array."""
        at = 0

        def take(which: int, x: np.ndarray, first: int, count: int, last: bool) -> None:
            nonlocal at
            for i in range(first, first + count, 16):
                pick = np.arange(i, min(i + 16, first + count), dtype=np.int32)
                give(at, self._model._logits(x, pick))
                at += len(pick)

        self._model._run([(self, ids)], take)

    def snapshot(self) -> None:
        """Keeps the state at this position, so that rewind can come back to it."""
        self.check()
        self._model._with_room(self._handle.snapshot)
        if self.position not in self._snapshots:
            self._snapshots.append(self.position)

    def forget(self, n: int) -> None:
        """Gives up the snapshot at position n."""
        self.check()
        if n not in self._snapshots:
            raise MosaicError(f"no snapshot at position {show(n)}", "ERANGE")
        self._snapshots.remove(n)
        self._handle.forget(n)

    def rewind(self, n: int) -> None:
        """Back to position n: any for attention alone; with recurrent state 0 or a kept snapshot's."""
        self.check()
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or abs(n) >= 2**62:
            raise UsageError(f"rewind: expected a position, got {n!r}")
        self._handle.rewind(int(n))
        self._snapshots = [p for p in self._snapshots if p <= n]

    def rest(self) -> None:
        """Gives up half of its state's memory, until it is evaluated again: for a session that is only kept."""
        self.check()
        self._handle.rest()
        self._model._regrow()

    def fork(self) -> Session:
        """An independent copy; KV pages are shared until one of the two writes."""
        self.check()
        copy = Session(self._model, self._model._with_room(self._handle.fork), self.tokens)
        copy._snapshots = self.snapshots
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything to a file, or nothing."""
        self.check()
        path = path_text(path)
        if "\0" in path:
            raise MosaicError(f"path {path!r}: expected no NUL in it", "EINVAL")
        target = os.path.realpath(path)  # a link stays, and its target is written
        if os.path.lexists(target) and not os.path.isfile(target):
            raise MosaicError(f"{path}: expected a file or a new name, it is neither", "EINVAL")
        meta = np.asarray(self.tokens, np.int32).tobytes()
        self._handle.save(target, self._model.fingerprint(), meta)

    def extend(self, ids: np.ndarray) -> None:
        """Notes tokens that are about to be committed."""
        self._tokens[self.position :] = ids.tolist()

    def close(self) -> None:
        """Gives pages and state back."""
        self._handle.close()
        self._model._regrow()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class WithProgress:
    """A session whose prefill reports to a progress function."""

    def __init__(self, session: Session, progress: Progress | None) -> None:
        self._session, self._progress = session, progress

    @property
    def position(self) -> int:
        return self._session.position

    @property
    def room(self) -> int:
        return self._session.room

    def forward(self, ids: Sequence[int], last: bool = True) -> np.ndarray:
        progress = self._progress if len(ids) > 1 else None
        return self._session.forward(ids, last, progress=progress)


def pairs(work: Sequence[tuple[Session, Sequence[int]]]) -> list[tuple[Session, Sequence[int]]]:
    """The work of a forward call as a list; UsageError for what is not sessions with their ids."""
    try:
        return [(session, ids) for session, ids in work]
    except (TypeError, ValueError):
        raise UsageError(
            "forward: expected a list of (session, token ids), got "
            + (type(work).__name__ if not isinstance(work, list) else "other entries")
        ) from None


def common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many leading tokens of two sequences agree."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if len(differ) else n


def token_ids(ids: Sequence[int], vocab: int) -> np.ndarray:
    """Checked ids as int32. Raises UsageError for what is not a sequence of ids below vocab."""
    try:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    except (TypeError, ValueError):
        raise UsageError(
            f"token ids: expected a sequence of integers, got {type(ids).__name__}"
        ) from None
    if array.size == 0:
        return np.empty(0, np.int32)
    large = array.dtype == object and all(type(x) is int for x in array.flat)  # beyond 64 bits
    if array.ndim != 1 or (array.dtype.kind not in "iu" and not large):
        raise UsageError(
            f"token ids: expected integers in one dimension, got {array.dtype} {array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab:
        raise UsageError(f"token id: expected 0..{vocab - 1}, got {show(low if low < 0 else high)}")
    return array.astype(np.int32)
