"""The socket side: uvicorn with the bounds it lacks, and an end that is clean.

A connection whose head does not arrive in time is closed, and so is one that takes no more of its answer. One that was
answered before its body was read is closed only when the client had time to read the answer: closing at once would
reset it. All this rests on insides of uvicorn: pyproject.toml names the versions.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mosaic_c.server import wire
from mosaic_c.server.app import Service, make_app
from mosaic_c.server.body import dumps
from mosaic_c.server.problem import Problem

LINGER_S, LINGER_BYTES = 2.0, 64 << 20
FORCE_S = 3.0  # behind the drain, for tasks that do not end by themselves


class _Lingering:
    """A transport whose close() lets the other side finish first: what it still sends is read and thrown away."""

    def __init__(self, transport: Any, protocol: Protocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._protocol.lingering or self._transport.is_closing()

    def close(self) -> None:
        if self._protocol.unread and not self.is_closing():
            self._protocol.linger()
        elif not self._protocol.lingering:
            self._protocol.finish()


class Protocol(H11Protocol):
    """uvicorn's, with time limits for heads and for clients that do not read, a bound of connections and a lingering
    close. make_server() sets limits."""

    limits = wire.Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lingering = self._lost = False
        self._dropped = 0
        self._late: asyncio.TimerHandle | None = None  # for a head that is due
        self._stalled: asyncio.TimerHandle | None = None  # for bytes that nobody takes
        self._real: Any = None

    def connection_made(self, transport: Any) -> None:
        self._real = transport
        super().connection_made(_Lingering(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.limits.connections:
            self._refuse()
        else:
            self._watch(True)

    def data_received(self, data: bytes) -> None:
        if self.lingering:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._real.abort()
            return
        super().data_received(data)
        self._watch(True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Of the next request nothing may have come: then the connection is idle, which uvicorn has a timer for.
        self._watch(bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None and not self._real.is_closing():
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True  # what follows may close once more, and must start no timer
        for timer in (self._late, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the protocol's form; where an answer has begun it can only be cut."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._real.abort()
            return
        self._tell(Problem(400, msg, code="invalid_http"), b"Bad Request")
        self.finish()

    def _refuse(self) -> None:
        """One connection too many. Where even those that are being refused are that many, without a word."""
        if len(self.connections) > 2 * self.limits.connections:
            self._real.abort()
            return
        self._tell(Problem(503, "too many connections", code="busy"), b"Service Unavailable")
        self.linger()

    def _tell(self, problem: Problem, reason: bytes) -> None:
        body = dumps(problem.body()).encode("utf-8")
        head = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reply = h11.Response(status_code=problem.status, headers=head, reason=reason)
        for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
            self._real.write(self.conn.send(event))

    @property
    def unread(self) -> bool:
        """Whether the request was answered before all of it came."""
        return self.cycle is not None and self.cycle.more_body

    def linger(self) -> None:
        self.lingering = True
        if self._real.can_write_eof():
            self._real.write_eof()
        self._real.resume_reading()
        self.loop.call_later(LINGER_S, self.finish)

    def finish(self) -> None:
        """Closes once all is sent, or when the client has taken no more of it for too long."""
        self._real.close()
        self._await_reader()

    def _await_reader(self) -> None:
        if self._stalled is None and not self._lost:
            self._stalled = self.loop.call_later(self.limits.stall_s, self._real.abort)

    def _watch(self, due: bool) -> None:
        """Starts the clock when a head is due, stops it while a request runs."""
        between = self.cycle is None or self.cycle.response_complete
        if self._late is not None and not between:
            self._late.cancel()
            self._late = None
        elif self._late is None and between and due and not self._real.is_closing():
            self._late = self.loop.call_later(self.limits.head_s, self.finish)


class Server(uvicorn.Server):
    """Ends by signals, and by stop() from any thread: no new requests, those that run have drain_s to end."""

    def __init__(
        self, config: uvicorn.Config, service: Service, ready: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self.service, self._ready = service, ready
        self.signal: int | None = None
        self._drain: threading.Thread | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising the signal again at the end: the caller has things to close."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._signalled) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        self.signal = self.signal or number
        self.stop()

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: Any = None) -> None:
        self.service.closing = True
        scheduler, seconds = self.service.scheduler, self.service.limits.drain_s
        self._drain = threading.Thread(
            target=scheduler.close, args=(seconds,), name="mosaic_c drain"
        )
        self._drain.start()
        await super().shutdown(sockets)
        # Nobody is left, or nobody is waited for any more: what still runs ends now.
        await asyncio.to_thread(scheduler.close)
        await asyncio.to_thread(self._drain.join)
        self.service.close()


def make_server(
    service: Service, host: str, port: int, ready: Callable[[], None] | None = None
) -> Server:
    """ready: called once clients can connect."""
    limits = service.limits
    protocol = type("Protocol", (Protocol,), {"limits": limits})
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=wire.MAX_HEAD,
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=round(limits.drain_s + FORCE_S),
    )
    return Server(config, service, ready)
