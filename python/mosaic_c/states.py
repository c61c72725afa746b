"""States of finished sequences, kept so that the next request that begins the same need not evaluate it again.

Owns: which states stay, in memory and on disk, and finding the one that shares the most with new tokens. Promises: a
state is found by its tokens alone and handed out as a copy, so no request sees another's; where a model has recurrent
state only positions are offered that were kept whole. A file that cannot be used is never an error, but a note; it goes
where it is damaged. Files are written by a thread of their own: a caller waits for one only where it needs the memory
of the state that is written. They are read by the caller. Knows nothing of requests or text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from mosaic_c import blocks, engine, engine_pure
from mosaic_c.errors import MosaicError
from mosaic_c.model import Model
from mosaic_c.session import Session, common, token_ids
from mosaic_c.states_disk import DISK_BYTES, Disk

T = TypeVar("T")

# Of one sequence with recurrent state: the first, which may be a system prompt that many share, and the latest.
MOST_SNAPSHOTS = 4
# A file has to save so many tokens more than what memory holds: few are evaluated faster than a state is read. Half a
# page of them; where the two take the same time depends on model and disk, and was not measured.
DISK_GAIN = 32
MOST_LEAVING = (
    4  # states on their way to disk; they still take memory, so what comes too fast is not saved
)
TOKEN_BYTES = 40  # of a session's list in Python: an entry and a number, and four bytes here
NO_ROOM = ("EFULL", "EBUDGET")  # of the page pool and of memory: fewer kept states help


@dataclass(frozen=True)
class StatesStats:
    """kept, bytes: states in memory, and an upper bound of what they take (pages that states share count for each).
    hits: takes that found something; reused_tokens: that these need not evaluate. on_disk: files."""

    kept: int
    bytes: int
    hits: int
    reused_tokens: int
    on_disk: int


@dataclass
class _Kept:
    session: Session
    tokens: np.ndarray
    bytes: int


def furthest(places: Iterable[int], common: int, hybrid: bool) -> int:
    """The furthest position that can be taken where the first `common` tokens agree; places: those with all state."""
    return max((p for p in places if p <= common), default=0) if hybrid else common


class States:
    """Kept states of sequences, found again by their tokens: longest common prefix, least recently used go first.

    byte_budget: what they may take in memory, the expert cache's where the plan has no room for it. folder: states
    that leave memory are kept there in files of disk_bytes in all, and found again after a restart; they hold what
    was said. Any thread may call.
    """

    def __init__(
        self,
        model: Model,
        byte_budget: int,
        folder: Path | None = None,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        self.model, self.byte_budget = model, byte_budget
        self.hybrid = bool(model.plan.delta_layers)
        memory = model.memory
        desc = blocks.state(model.plan, memory.ctx, engine.DTYPES[memory.kv.upper()], 1)
        pool, whole = engine_pure.kv_bytes(desc)
        self._page_bytes = pool // desc["pages"]
        self._snapshot_bytes = (whole - 4 * desc["pages"]) // 2
        self._session_bytes = whole - self._snapshot_bytes  # at rest
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by number, least recently used first
        self._number = self._hits = self._reused = 0
        self._lock = threading.RLock()
        self._disk = None if folder is None else Disk(model, Path(folder), disk_bytes)
        self._writer = _Writer(self._write)
        self._stats = StatesStats(0, 0, 0, 0, 0)
        self._slow_told = False

    # ---- taking ----

    def take(self, ids: Sequence[int], others: Iterable[Session] = ()) -> tuple[Session, int]:
        """An independent session that holds ids[:n], and n: as many as a kept state allows, fewer than len(ids), so
        that there is a token to evaluate. Where there is no room for it, older states go. others: sessions that are in
        use, but not in a call, and may be copied, too."""
        wanted = token_ids(ids, self.model.vocab)
        most = len(wanted) - 1
        with self._lock:
            other, best = self._best(wanted, most, others)
            least = max(best, self._find(wanted, most)[1]) + DISK_GAIN
            session = self._from_disk(wanted, most, least)
            number, n = self._find(wanted, most)  # after that: making room for it may cost states
            if session is None and other is not None and best > n:
                session = self.with_room(other.fork)
                session.rewind(best)
            if session is None and number is not None:
                session = self._copy(number, n)
            if session is None:
                return self.with_room(self.model.session), 0
            n = session.position
            self._hits += 1
            self._reused += n
            self._trim()
            return session, n

    def reach(self, ids: Sequence[int] | np.ndarray) -> int:
        """How many tokens of ids a take would find in memory."""
        with self._lock:
            wanted = token_ids(ids, self.model.vocab)
            return self._find(wanted, len(wanted) - 1)[1]

    def _find(self, ids: np.ndarray, most: int) -> tuple[int | None, int]:
        """(which kept state, how many tokens of ids to take from it)."""
        found, n = None, 0
        for number, kept in self._kept.items():
            places = [*kept.session.snapshots, len(kept.tokens)]
            have = furthest(places, min(common(kept.tokens, ids), most), self.hybrid)
            if have > 0 and have >= n:  # of equals the one used last
                found, n = number, have
        return found, n

    def _copy(self, number: int, n: int) -> Session | None:
        kept = self._kept[number]
        self._kept.move_to_end(number)
        if self.hybrid and n == len(kept.tokens) and n not in kept.session.snapshots:
            # the copy moves on: with this its later self can be taken here, too, and replace what it came from
            with suppress(MosaicError):
                self._spared(number, kept.session.snapshot, 1)
                self._measure(kept)
        copy = self._spared(number, kept.session.fork)
        try:
            copy.rewind(n)
        except MosaicError:  # an interrupt may have come between a snapshot and its note
            copy.close()
            return None
        return copy

    def _best(
        self, ids: np.ndarray, most: int, others: Iterable[Session]
    ) -> tuple[Session | None, int]:
        """The one of others that gives the most, and how many tokens."""
        found, have = None, 0
        for session in others:
            shared = min(common(np.asarray(session.tokens, np.int32), ids), most)
            if (n := furthest(session.snapshots, shared, self.hybrid)) > have:
                found, have = session, n
        return found, have

    def _from_disk(self, ids: np.ndarray, most: int, least: int) -> Session | None:
        """The longest state in a file, where that gives `least` tokens."""
        if self._disk is None:
            return None
        while (found := self._disk.find(ids, most, self.hybrid, least)) is not None:
            path, n = found
            try:
                session = self.with_room(lambda path=path: self.model.session(load=path))
            except MosaicError as error:
                if error.code == "EFORMAT":
                    self._disk.drop(path, str(error))
                elif error.code in (*NO_ROOM, "ENOMEM", "ECLOSED"):
                    return None
                else:  # the disk or the network under it may be well again at the next start
                    self._disk.leave(path, str(error))
                continue
            if len(session.tokens) >= n and common(np.asarray(session.tokens), ids) >= n:
                with suppress(MosaicError):
                    session.rewind(n)
                    self._disk.used(path)
                    return session
            session.close()
            self._disk.drop(path, f"{path}: holds other tokens than its name says")
        return None

    # ---- keeping ----

    def keep(self, session: Session) -> None:
        """From now on its snapshots and its present position may be taken; the caller gives the session away."""
        with self._lock:
            tokens = np.asarray(session.tokens, np.int32)
            places = self._places(session)
            if not len(tokens):
                session.close()
                return
            for number, kept in list(self._kept.items()):
                n = common(kept.tokens, tokens)
                if n == len(tokens) and places <= self._places(kept.session):
                    self._kept.move_to_end(number)  # nothing new
                    session.close()
                    return
                if n == len(kept.tokens) and self._places(kept.session) <= places:
                    del self._kept[number]  # its later self can do all that it could
                    kept.session.close()
            while len(snapshots := session.snapshots) > MOST_SNAPSHOTS:
                session.forget(snapshots[1])
            session.rest()
            self._number += 1
            self._kept[self._number] = kept = _Kept(session, tokens, 0)
            self._measure(kept)
            self._trim()

    def evict(self, spare: int = 0) -> bool:
        """Frees the memory of the state that was used longest ago, after it is on disk where there is a folder; False:
        there is none but the last `spare`."""
        with self._lock:
            if not len(self._writer):
                if len(self._kept) <= spare:
                    return False
                self._leave(self._kept.popitem(last=False)[1])
        self._writer.wait_one()
        return True

    def with_room(self, make: Callable[[], T], most: int | None = None, spare: int = 0) -> T:
        """make(), and again with a kept state less for as long as it finds no room; most: states that may go; spare:
        those used last that may not."""
        gone = 0
        while True:
            try:
                return make()
            except MosaicError as error:
                if error.code not in NO_ROOM or gone == most or not self.evict(spare):
                    raise
                gone += 1

    def clear(self) -> None:
        """Forgets all states in memory; none goes to disk any more."""
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].session.close()
        self._writer.wait(0)

    def flush(self) -> None:
        """Waits until the states that left memory are on disk."""
        self._writer.wait()

    def close(self, seconds: float | None = None) -> None:
        """Saves all states where there is a folder, and forgets them; seconds: none is begun after that time."""
        with self._lock:
            while self._kept:
                self._leave(self._kept.popitem(last=False)[1], late=True)
        self._writer.wait(seconds)

    @property
    def stats(self) -> StatesStats:
        """Those of a moment ago where another thread is at it, which may take as long as a file does."""
        if self._lock.acquire(blocking=False):
            try:
                on_disk = 0 if self._disk is None else len(self._disk)
                self._stats = StatesStats(
                    len(self._kept), self._bytes(), self._hits, self._reused, on_disk
                )
            finally:
                self._lock.release()
        return self._stats

    # ---- within ----

    def _spared(self, number: int, make: Callable[[], T], most: int | None = None) -> T:
        """with_room, but the state of that number stays."""
        self._kept.move_to_end(number)
        return self.with_room(make, most, spare=1)

    def _places(self, session: Session) -> set[int]:
        """Positions that a session offers and others may not: for attention alone its tokens say it all."""
        return {*session.snapshots, session.position} if self.hybrid else set()

    def _measure(self, kept: _Kept) -> None:
        pages = -(-len(kept.tokens) // engine.PAGE_TOKENS) if self._page_bytes else 0
        kept.bytes = (
            self._session_bytes
            + pages * self._page_bytes
            + len(kept.session.snapshots) * self._snapshot_bytes
            + len(kept.tokens) * TOKEN_BYTES
        )

    def _trim(self) -> None:
        while self._bytes() > self.byte_budget:
            self._leave(self._kept.popitem(last=False)[1])

    def _bytes(self) -> int:
        return sum(kept.bytes for kept in self._kept.values())

    def _leave(self, kept: _Kept, late: bool = False) -> None:
        """Out of memory, to disk where there is a folder. late: however many are on their way."""
        if self._disk is None:
            kept.session.close()
        elif late or len(self._writer) < MOST_LEAVING:
            self._writer.put(kept)
        else:
            kept.session.close()
            if not self._slow_told:
                self._slow_told = True
                self.model._note("states leave memory faster than they are written: some are lost")

    def _write(self, kept: _Kept) -> None:
        """Every position that a state offers becomes a file."""
        assert self._disk is not None
        session = kept.session
        try:
            # the longest first: it can no longer be gone back to afterwards
            places = [len(kept.tokens), *reversed(session.snapshots)] if self.hybrid else []
            for n in places or [len(kept.tokens)]:
                session.rewind(n)
                if not self._disk.save(session):
                    break
        except Exception as error:  # whatever it is, others wait behind it
            self.model._note(f"a state was not saved: {error}")


class _Writer:
    """States on their way to disk. Its thread lives as long as there are some; no lock is held while it writes."""

    def __init__(self, write: Callable[[_Kept], None]) -> None:
        self._write = write
        self._changed = threading.Condition()
        self._queue: deque[_Kept] = deque()
        self._count = self._gone = 0  # states here, and since the start

    def __len__(self) -> int:
        return self._count

    def put(self, kept: _Kept) -> None:
        with self._changed:
            self._queue.append(kept)
            self._count += 1
            if self._count == 1:  # no daemon: an interpreter that ends waits for it
                threading.Thread(target=self._work, name="mosaic_c states").start()

    def wait_one(self) -> None:
        """Until one more is gone; at once where there is none."""
        with self._changed:
            before = self._gone
            self._changed.wait_for(lambda: not self._count or self._gone > before)

    def wait(self, seconds: float | None = None) -> None:
        """Until all are gone; after so many seconds those that are not being written are given up."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._count, seconds):
                while self._queue:
                    self._done(self._queue.pop())
                self._changed.wait_for(lambda: not self._count)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    return
                kept = self._queue.popleft()
            try:
                self._write(kept)
            finally:
                with self._changed:
                    self._done(kept)

    def _done(self, kept: _Kept) -> None:
        kept.session.close()
        self._count -= 1
        self._gone += 1
        self._changed.notify_all()
