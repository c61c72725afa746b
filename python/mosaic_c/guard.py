"""The memory budget while running: when the expert cache has to shrink, how far, and when it may grow again.

Watch reads what memory is in use; Guard is arithmetic over such readings, with no clock and no file of its
own. Neither touches the cache: the model does, between layers.

What the cache may take under a bound is its room: the limit, less what must stay free, less all that is
used by others. A cache that, full, would be larger than its room is pressure: it shrinks at once to the room
less a margin. It grows again in small steps after some quiet, never beyond the room less that margin (up to
its full size where the room is enough for that). So a steady load, however high, moves it once; a load that comes and
goes faster than the cache grows meets a patience that doubles with each return.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mosaic_c.limits import Bound, format_size, memory_groups, read_bounds, read_process

EVERY = 0.1  # seconds between two readings
SHARE = 700  # a reading takes at most one part in SHARE of the time, or comes once a STEP
REGROUP = 5.0  # seconds after which control groups are looked for again
GIB = 1 << 30

QUIET = 2.0  # seconds without pressure before the cache grows
OVER = 30.0  # ... and, at its full size, before an episode is over
STEP = 1.0  # seconds between two steps of growth, or two counts of page faults, and at most between readings
RECENT = 10.0  # seconds after which an earlier look says nothing of how others grow
FAULTS = 50  # major faults a second: fewer cost a few percent at most
BUDGET = "the memory budget"


@dataclass(frozen=True)
class Reading:
    """now: seconds. used: bytes of this process, resident or swapped out. faults: major ones since it started.
    bounds: the budget and whatever else limits memory."""

    now: float
    used: int
    swapped: int
    faults: int
    bounds: tuple[Bound, ...]


class Watch:
    """Reads the state of memory, from folders that may be replaced by recorded ones. budget: of this process.
    clock: seconds, only advancing."""

    def __init__(
        self,
        budget: int,
        proc: str | os.PathLike[str] = "/proc",
        cgroup: str | os.PathLike[str] = "/sys/fs/cgroup",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._due = clock, float("-inf")
        self._budget, self._proc, self._cgroup = budget, Path(proc), Path(cgroup)
        self._groups: list[tuple[int, list[Path]]] = []
        self._found = float("-inf")

    def ready(self) -> bool:
        """Whether it is time to look."""
        return self._clock() >= self._due

    def read(self) -> Reading | None:
        """Memory as it is now; None where the process itself cannot be read."""
        cpu, now = time.thread_time(), self._clock()
        if now - self._found >= REGROUP:
            self._groups, self._found = memory_groups(self._proc, self._cgroup), now
        process, bounds = read_process(self._proc), read_bounds(self._groups, self._proc)
        # of this thread alone: where the machine is busy or pages, looking often matters most
        cost = time.thread_time() - cpu
        self._due = now + min(max(EVERY, SHARE * cost), STEP)
        if process is None:
            return None
        resident, swapped, faults = process
        used = resident + swapped
        return Reading(now, used, swapped, faults, (Bound(BUDGET, self._budget, used), *bounds))


def margin(bound: Bound) -> int:
    """What a shrink frees beyond the need, so that the next one is not due at once."""
    return min(bound.limit // 64, GIB // 4)


def keep(bound: Bound) -> int:
    """What stays free: the kernel needs some room to work in, a budget is all ours."""
    return 0 if bound.source == BUDGET else 2 * margin(bound)


class Guard:
    """How many slots pressure allows the cache: `allowed`, from floor to full, of `unit` bytes each."""

    def __init__(self, full: int, floor: int, unit: int) -> None:
        self.full, self.floor, self.unit = full, floor, unit
        self.allowed = full
        self.shrinks = 0  # times that it was lowered
        self._said: set[str] = set()  # in this episode
        self._pressed = self._stepped = self._counted = self._looked = float("-inf")
        self._patience = QUIET
        self._grew = False  # since the last shrink
        self._others: dict[str, int] = {}  # what others used at the last look, by bound
        self._faults, self._rate, self._strikes = 0, 0.0, 0

    def decide(self, reading: Reading, cached: int, slots: int) -> str | None:
        """Sets `allowed`. cached: bytes of experts in memory. slots: what the cache would have without
        pressure, at most full. Returns what the user should know: one line at the start of an episode, one
        when the floor is reached."""
        if reading.now - self._looked > RECENT:
            self._others.clear()
        self._looked = reading.now
        slots = min(self.allowed, slots)  # that it has now
        rooms = [(self._room(b, reading, cached), margin(b), b) for b in reading.bounds]
        over = [(r - self._surge(b, reading), spare, b) for r, spare, b in rooms]
        full = slots * self.unit  # what it comes to: a cache that fills is faster than any look
        over = [(r - spare, b) for r, spare, b in over if full > r]
        if over:
            room, bound = min(over, key=lambda r: r[0])
            wanted = room // self.unit
            used = (reading.used if bound.used is None else bound.used) + max(full - cached, 0)
            why = f"{format_size(used)} wanted of {format_size(bound.limit)} ({bound.source})"
        elif self._thrashing(reading):
            wanted = min(slots, -(-cached // self.unit))
            wanted -= max(1, wanted // 8)
            why = f"{self._rate:.0f} major page faults a second"
        else:
            free = all(room >= self.full * self.unit for room, _, _ in rooms)
            most = self.full if free else min(r - spare for r, spare, _ in rooms) // self.unit
            self._relax(reading.now, most)
            return None
        self._pressed = reading.now
        if self._grew:
            self._patience, self._grew = min(2 * self._patience, 300.0), False
        before, self.allowed = self.allowed, max(min(wanted, slots), self.floor)
        self.shrinks += self.allowed < before
        return self._note(why, slots, wanted <= self.floor)

    @staticmethod
    def _room(b: Bound, reading: Reading, cached: int) -> int:
        used = reading.used if b.used is None else b.used
        return b.limit - keep(b) - max(used - cached, 0)

    def _surge(self, b: Bound, reading: Reading) -> int:
        """What others may take until the next look: as much as since the last. Less than the margin is met by
        what stays free; the process's own growth is planned for."""
        if b.source == BUDGET or b.used is None:
            return 0
        others = b.used - reading.used
        last, self._others[b.source] = self._others.get(b.source, others), others
        return others - last if others - last > margin(b) else 0

    def _relax(self, now: float, most: int) -> None:
        """A step towards the slots that there is room for."""
        quiet = now - self._pressed
        if self.allowed == self.full:
            if quiet >= max(OVER, self._patience):
                self._said.clear()
                self._patience = QUIET
            return
        if quiet < self._patience or now - self._stepped < STEP:
            return
        step = max(1, self.full // 64, (self.full - self.allowed) // 8)
        if most > self.allowed:
            self.allowed = min(self.allowed + step, most)
            self._stepped, self._grew = now, True

    def _thrashing(self, reading: Reading) -> bool:
        """Whether pages come back from disk in two counts in a row, for want of memory. A burst is code that
        runs for the first time; with memory to spare it is a file that someone reads through a mapping."""
        passed = reading.now - self._counted
        if passed < STEP:
            return False
        self._rate = (reading.faults - self._faults) / passed
        self._faults, self._counted = reading.faults, reading.now
        known = [b for b in reading.bounds if b.source != BUDGET and b.used is not None]
        tight = any(b.limit - b.used < min(b.limit // 4, GIB) for b in known)
        short = reading.swapped > 0 or tight or not known
        self._strikes = self._strikes + 1 if self._rate >= FAULTS and short else 0
        return self._strikes >= 2

    def _note(self, why: str, slots: int, floor: bool) -> str | None:
        parts = []
        if self.allowed < slots and "shrink" not in self._said:
            self._said.add("shrink")
            parts.append(
                f"the expert cache shrinks from {slots} to {self.allowed} slots, until that ends"
            )
        if floor and "floor" not in self._said:
            self._said.add("floor")
            parts.append(
                f"{self.floor} slots are the floor: close sessions, lower --ctx, or raise the limit"
            )
        return f"memory is short: {why}; {'; '.join(parts)}" if parts else None
