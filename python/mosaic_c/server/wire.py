"""Bytes of a request in, events out, and who is still there: all that touches ASGI's receive and send by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from mosaic_c.server.problem import Problem

Event = MutableMapping[str, Any]  # ASGI's
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
T = TypeVar("T")

MAX_HEAD = 32 << 10  # bytes of a request's head


@dataclass(frozen=True)
class Limits:
    """body: bytes. Seconds: head and body of a request to arrive, idle of a connection between requests, ping between
    events (0: none), stall of a client that does not read, drain of running requests at the end. waiting: requests that
    are read or prepared at once. connections: open at once; each is a file, of which a process often has 1024."""

    body: int = 4 << 20
    head_s: float = 15.0
    body_s: float = 30.0
    idle_s: float = 30.0
    ping_s: float = 15.0
    stall_s: float = 60.0
    drain_s: float = 10.0
    waiting: int = 64
    connections: int = 512


class Gone(Exception):
    """The client is: nobody reads what we would say."""


@dataclass
class Held:
    """Bytes of all bodies that are in memory now, and what answers keep of theirs."""

    bytes: int = 0

    @contextmanager
    def more(self, size: int) -> Iterator[None]:
        self.bytes += size
        try:
            yield
        finally:
            self.bytes -= size


class Body:
    """A request's body while it is read and worked on. As a context manager it gives its share of memory back."""

    def __init__(self, receive: Receive, headers: Any, limits: Limits, held: Held) -> None:
        self._receive, self._limits, self._held = receive, limits, held
        self._size = 0
        text = headers.get("content-length", "")
        self._declared = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.bytes -= self._size

    async def read(self) -> bytes:
        """All of it. Problem 413 without reading what is too long, 408 when it does not come, 429 where those of
        others leave no memory for it."""
        if self._declared > self._limits.body:
            raise self._too_long(str(self._declared))
        try:
            return await asyncio.wait_for(self._read(), self._limits.body_s)
        except asyncio.TimeoutError:
            text = f"the body did not arrive within {self._limits.body_s:g} seconds"
            raise Problem(408, text, code="timeout", headers=CLOSE) from None

    async def _read(self) -> bytes:
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            if self._size + len(part) > self._limits.body:
                raise self._too_long("more")
            if self._held.bytes + len(part) > BODIES * self._limits.body:
                raise busy()
            self._size += len(part)
            self._held.bytes += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_long(self, got: str) -> Problem:
        text = f"the body: expected at most {self._limits.body} bytes, got {got}"
        return Problem(413, text, code="body_too_large", headers=CLOSE)


BODIES = 4  # so many of the largest may be in memory at once
CLOSE = {"Connection": "close"}  # what is left of the request must not be taken for the next one


def busy() -> Problem:
    return Problem(
        429, "too many requests at once", code="busy", headers={"Retry-After": "1", **CLOSE}
    )


async def while_there(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    *others: Coroutine[Any, Any, Any],
    owed: bool = False,
) -> T:
    """The result of work; Gone when the client goes, or one of others ends, before it is done. owed: what work has made
    is given even so, since somebody has to clear it away."""
    working = asyncio.ensure_future(work)
    rest = [asyncio.ensure_future(c) for c in (_disconnected(receive), *others)]
    try:
        await asyncio.wait({working, *rest}, return_when=asyncio.FIRST_COMPLETED)
        # To a connection that is lost work can write all it has at once: both are then done.
        if working.done() and (owed or not any(task.done() for task in rest)):
            return working.result()
        raise Gone
    finally:
        for task in (working, *rest):
            task.cancel()
        await asyncio.gather(working, *rest, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events:
    """A stream of server-sent events to one client."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._send, self._limits = send, limits
        self._last = time.monotonic()
        self._count = 0
        self._waiting: dict[int, float] = {}  # sends that are under way, and when each began

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"), *headers]  # fmt: skip
        await self._send({"type": "http.response.start", "status": 200, "headers": head})

    async def data(self, *texts: str) -> None:
        if texts:
            await self._write(
                "".join(f"data: {t}\n\n" for t in texts).encode("utf-8", "backslashreplace")
            )

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep(self) -> None:
        """Runs beside the stream: comments while nothing is said; ends when the client reads no more, be it text or
        comments."""
        ping, stall = self._limits.ping_s, self._limits.stall_s
        while True:
            await asyncio.sleep(min(1.0, ping / 4 or 1.0, stall / 4))
            now = time.monotonic()
            if self._waiting:
                if now - min(self._waiting.values()) > stall:
                    return
            elif ping and now - self._last >= ping:
                try:
                    await asyncio.wait_for(self._write(b": keep-alive\n\n"), stall)
                except asyncio.TimeoutError:
                    return

    async def _write(self, data: bytes) -> None:
        self._count += 1
        mine = self._count
        self._waiting[mine] = time.monotonic()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            del self._waiting[mine]
        self._last = time.monotonic()
