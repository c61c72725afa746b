"""A request and the receipt for it: what comes back from a scheduler, for threads and for asyncio.

Promises: events arrive in order, each once; a reader that goes away cancels its request; nothing that a reader does,
or its event loop that is gone, reaches the thread that computes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from mosaic_c.errors import MosaicError
from mosaic_c.generation import Constraint, Piece
from mosaic_c.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """What to continue, and how. Everything but ids has the meaning it has for generation.Run.

    keep_at: positions in ids, 1 to len(ids), where the state is worth a snapshot for later requests: the end of a
    system prompt, that of the last message.
    """

    ids: list[int]
    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    constraint: Constraint | None = None
    keep_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Progress:
    """Tokens of the prompt evaluated so far, those taken over from a kept state included."""

    done: int
    total: int


class Full(MosaicError):
    """The queue has no place. retry_after: seconds after which one may be free."""

    def __init__(self, message: str, code: str = "EBUSY", retry_after: int = 1) -> None:
        super().__init__(message, code)
        self.retry_after = retry_after


Event = Piece | Progress


class Ticket:
    """A request under way. One reader takes its events, by events() or stream().

    prompt_tokens: of the request. reused: of these, taken over from a kept state; known with the first event.
    finish_reason: None while it runs and after an error, "stop", "length" or "cancel"; set with the last event.
    stopped_by: the stop token's id or the stop string.
    """

    def __init__(self, prompt_tokens: int, cancel: Callable[[Ticket], None]) -> None:
        self.prompt_tokens, self.reused = prompt_tokens, 0
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None
        self.cancelled = False
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._error: BaseException | None = None
        self._over = False
        self._ready = threading.Condition()
        self._wake: Callable[[], object] | None = None

    def events(self) -> Iterator[Event]:
        """The events, each as soon as it is there; raises the request's error at the end."""
        try:
            while True:
                with self._ready:
                    self._ready.wait_for(lambda: self._events or self._over)
                    if not self._events:
                        break
                    event = self._events.popleft()
                yield event
        finally:
            self.cancel()  # no effect on what is over
        if self._error is not None:
            raise self._error

    async def stream(self) -> AsyncIterator[Event]:
        """The same for asyncio."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        with self._ready:
            self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        try:
            while True:
                ready.clear()
                with self._ready:
                    event = self._events.popleft() if self._events else None
                    over = self._over
                if event is not None:
                    yield event
                elif over:
                    break
                else:
                    await ready.wait()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ends the request at once; what it has given so far can still be read."""
        if not self._over:
            self._cancel(self)

    # ---- for the scheduler ----

    @property
    def over(self) -> bool:
        return self._over

    def put(self, event: Event, finish_reason: str | None = None) -> None:
        """One more event; with finish_reason it is the last."""
        with self._ready:
            if not self._over:
                self._events.append(event)
                self._over, self.finish_reason = finish_reason is not None, finish_reason
                self._tell()

    def end(self, finish_reason: str | None = None, error: BaseException | None = None) -> bool:
        """Ends it with a reason or with an error; False: it was over before."""
        with self._ready:
            if self._over:
                return False
            self._over, self.finish_reason, self._error = True, finish_reason, error
            self._tell()
            return True

    def _tell(self) -> None:
        self._ready.notify_all()
        if self._wake is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._wake()
