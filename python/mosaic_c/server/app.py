"""The application: routes, who may ask, and what happens between a body and its answer.

Service holds what all requests share. Nothing slow runs on the event loop: bodies are parsed, rendered and tokenized in
a few threads, and the scheduler has its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mosaic_c.errors import MosaicError
from mosaic_c.server import wire
from mosaic_c.server.body import dumps, read_json
from mosaic_c.server.metrics import Metrics
from mosaic_c.server.problem import Problem, problem_of
from mosaic_c.server.prompts import Prompter
from mosaic_c.server.replies import ChatReply, Reply, TextReply
from mosaic_c.server.schema import ChatWish, TextWish, read_chat, read_text
from mosaic_c.ticket import Request as Wanted
from mosaic_c.ticket import Ticket

if TYPE_CHECKING:
    from mosaic_c.generation import Piece
    from mosaic_c.scheduler import Scheduler

log = logging.getLogger("mosaic_c.server")
Made = tuple[Ticket, Reply]
Start = Callable[[bytes], Made]
THREADS = 2  # that prepare requests; each may hold a body and its tokens


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("utf-8", "backslashreplace")


def answer_of(problem: Problem) -> Response:
    return Json(problem.body(), problem.status, headers=problem.headers)


class Service:
    """One model, served. name: its id for clients; origins: web pages that may ask ("*": all)."""

    def __init__(
        self,
        scheduler: Scheduler,
        prompter: Prompter,
        name: str,
        *,
        fingerprint: str = "",
        api_key: str | None = None,
        origins: tuple[str, ...] = (),
        limits: wire.Limits | None = None,
    ) -> None:
        self.scheduler, self.prompter, self.name, self.fingerprint = (
            scheduler,
            prompter,
            name,
            fingerprint,
        )
        self.limits = limits or wire.Limits()
        self.metrics = Metrics()
        self.created = int(time.time())
        self.closing = False
        self._key = None if api_key is None else api_key.encode("utf-8")
        self._origins = origins
        self._threads = ThreadPoolExecutor(THREADS, "mosaic_c prepare")
        self._preparing = 0
        self.bodies = wire.Held()

    # ---- who may ask ----

    def admit(self, request: Request) -> None:
        """Raises the Problem of who may not."""
        # What came in one piece was not held against the parser's own limit.
        head = sum(len(k) + len(v) for k, v in request.headers.raw) + len(request.scope["raw_path"])
        if head + len(request.scope["query_string"]) > wire.MAX_HEAD:
            raise Problem(
                431, f"the head: expected at most {wire.MAX_HEAD} bytes", headers=wire.CLOSE
            )
        origin = request.headers.get("origin")
        # Browsers name the page that asks. Without this rule any page could use the server of whoever looks at it.
        if origin is not None and "*" not in self._origins and origin not in self._origins:
            raise Problem(
                403,
                "pages of other origins may not ask: start the server with --cors",
                headers=wire.CLOSE,
            )
        # the path of the request line, which routes go by; request.url holds what the Host header says
        if self._key is not None and request.scope["path"] != "/health":
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                raise Problem(
                    401,
                    "expected the server's API key as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer", **wire.CLOSE},
                )
        if self.closing and request.method == "POST":
            raise Problem(
                503, "the server is shutting down", code="shutting_down", headers=wire.CLOSE
            )

    # ---- small endpoints ----

    async def health(self, request: Request) -> Response:
        if not self.scheduler.alive and not self.closing:
            return Json({"status": "failed"}, 503)
        return Json({"status": "closing" if self.closing else "ok"}, 503 if self.closing else 200)

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return Json(self._card())

    async def show_metrics(self, request: Request) -> Response:
        stats = await asyncio.to_thread(self.scheduler.stats)
        return PlainTextResponse(self.metrics.text(stats), media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "mosaic_c",
            "context_length": self.prompter.room,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Problem(
                404,
                f"model: {dumps(name)[:200]} is not served here, only {dumps(self.name)}",
                param="model",
                code="model_not_found",
            )

    # ---- answers ----

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self._start_chat, "messages")

    async def text(self, request: Request) -> Response:
        return await self._answer(request, self._start_text, "prompt")

    async def _answer(self, request: Request, start: Start, field: str) -> Response:
        if self._preparing >= self.limits.waiting:
            raise wire.busy()
        self._preparing += 1
        try:
            with wire.Body(request.receive, request.headers, self.limits, self.bodies) as body:
                data = await body.read()
                began = time.monotonic()
                work = self._in_thread(start, data, field)
                del data
                made = await wire.while_there(request.receive, work, owed=True)
        except wire.Gone:
            return self._gone()
        finally:
            self._preparing -= 1
        if isinstance(made, Problem):
            raise made
        ticket, reply = made
        if reply.stream:
            return Stream(self, ticket, reply, began)
        try:
            with self.bodies.more(reply.size):
                whole = await wire.while_there(request.receive, self._whole(ticket, reply, began))
        except wire.Gone:
            return self._gone()
        except Exception as e:
            raise self._explained(e, field) from None
        finally:
            ticket.cancel()
        return Response(whole.encode("utf-8", "backslashreplace"), media_type=Json.media_type)

    def _gone(self) -> Response:
        self.metrics.disconnected += 1
        return Response(status_code=499)  # nobody reads it

    async def _in_thread(self, start: Start, data: bytes, field: str) -> Made | Problem:
        future = self._threads.submit(self._made, start, data, field)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # The thread may be past the point where it submits; what it made has no reader. Its memory is counted until
            # it is through.
            future.add_done_callback(_abandon)
            future.cancel()
            await asyncio.wait({waiting})
            raise

    def _made(self, start: Start, data: bytes, field: str) -> Made | Problem:
        """In a thread. An error is returned without where it was raised: the frames hold the body and all that was
        made of it, and would until the next full collection of garbage. Panics of tokenizers and llguidance are no
        Exceptions."""
        try:
            return start(data)
        except BaseException as e:
            problem = self._explained(e, field)
            traceback.clear_frames(e.__traceback__)
            problem.__context__ = problem.__cause__ = None
            return problem.with_traceback(None)

    def _start_chat(self, data: bytes) -> tuple[Ticket, Reply]:
        wish = read_chat(read_json(data))
        self._check_model(wish.model)
        return self._submit(wish, self.prompter.chat(wish), ChatReply)

    def _start_text(self, data: bytes) -> tuple[Ticket, Reply]:
        wish = read_text(read_json(data))
        self._check_model(wish.model)
        return self._submit(wish, self.prompter.text(wish), TextReply)

    def _submit(
        self, wish: ChatWish | TextWish, prepared: Any, kind: type[Reply]
    ) -> tuple[Ticket, Reply]:
        reply = kind(self.prompter, prepared, wish, self.name, self.fingerprint)
        ticket = self.scheduler.submit(
            Wanted(
                ids=prepared.ids,
                sampling=prepared.sampling,
                max_new_tokens=wish.max_tokens,
                stop=wish.stop,
                ignore_eos=wish.ignore_eos,
                top_logprobs=wish.top_logprobs if wish.logprobs else 0,
                constraint=prepared.constraint,
                keep_at=prepared.keep_at,
            )
        )
        return ticket, reply

    async def _whole(self, ticket: Ticket, reply: Reply, began: float) -> str:
        async for piece in self.pieces(ticket, reply, began):
            reply.take(piece)
        if ticket.finish_reason == "cancel":
            raise Problem(503, "the answer was cancelled", code="shutting_down")
        return reply.whole(ticket.finish_reason)

    async def pieces(self, ticket: Ticket, reply: Reply, began: float) -> Any:
        """The pieces of a ticket, counted."""
        first = True
        async for event in ticket.stream():
            reply.reused = ticket.reused
            if not hasattr(event, "token"):
                continue
            piece: Piece = event
            if first:
                first = False
                self.metrics.first_token.add(time.monotonic() - began)
            yield piece
        self.metrics.whole.add(time.monotonic() - began)

    def _explained(self, error: BaseException, field: str) -> Problem:
        problem = problem_of(error, field)
        if problem.status == 500 and not isinstance(error, Problem):
            known = isinstance(error, MosaicError)
            log.error("a request failed: %s", error, exc_info=None if known else error)
        return problem

    def explained(self, error: Exception) -> Problem:
        return self._explained(error, "messages")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Stream(Response):
    """An answer as events. Once it began, errors are events too."""

    def __init__(self, service: Service, ticket: Ticket, reply: Reply, began: float) -> None:
        super().__init__()
        self._service, self._ticket, self._reply, self._began = service, ticket, reply, began

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service = self._service
        events = wire.Events(send, service.limits)
        try:
            await events.start([(b"x-request-id", self._reply.identity.encode("ascii"))])
            with service.bodies.more(self._reply.size):
                await wire.while_there(receive, self._say(events), events.keep())
            await events.end()
        except wire.Gone:
            service.metrics.disconnected += 1
        finally:
            self._ticket.cancel()

    async def _say(self, events: wire.Events) -> None:
        ticket, reply = self._ticket, self._reply
        try:
            await events.data(*reply.first())
            async for piece in self._service.pieces(ticket, reply, self._began):
                await events.data(*reply.push(piece))
            if ticket.finish_reason == "cancel":
                raise Problem(503, "the answer was cancelled", code="shutting_down")
            await events.data(*reply.finish(ticket.finish_reason), "[DONE]")
        except wire.Gone:
            raise
        except Exception as e:
            await events.data(dumps(self._service.explained(e).body()), "[DONE]")


def _abandon(future: Any) -> None:
    if not future.cancelled() and isinstance(future.result(), tuple):
        future.result()[0].cancel()


class Gate:
    """Around all routes: who may ask, errors as the protocol's objects, counts."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._service.admit(Request(scope))
            await self._app(scope, receive, noted)
        except Exception as e:
            if status:  # the answer has begun: nothing can be said any more
                raise
            await answer_of(self._service.explained(e))(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._service.metrics.requests[path, status] += 1


PATHS = ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")


def make_app(service: Service) -> Starlette:
    async def wrong(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "no such path", 405: "another method is expected here"}
        path = dumps(request.scope["path"])[:200]
        text = f"{what.get(error.status_code, str(error.detail))}: {request.method} {path}"
        problem = Problem(error.status_code, text, headers={**wire.CLOSE, **(error.headers or {})})
        return answer_of(problem)

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return answer_of(error)

    middleware = [Middleware(Gate, service=service)]
    if service._origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(service._origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                max_age=600,
            ),
        )
    return Starlette(
        routes=[
            Route("/health", service.health),
            Route("/metrics", service.show_metrics),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.text, methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: wrong, Problem: problem},
    )
