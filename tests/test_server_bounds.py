"""What a request may cost: hostile hosts and escapes, memory that answers hold, connections, who does not read."""

import gc
import json
import socket
import threading
import time
import weakref

import pytest

pytest.importorskip("uvicorn")

import httpx
from helpers_server import Scripted, post, prompter, read_answer, running

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.names import demo_folder
from mosaic_c.server import body, schema, wire
from mosaic_c.server.listen import Protocol
from mosaic_c.server.problem import Problem
from mosaic_c.server.wire import Limits

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def prompts():
    return prompter(demo_folder())


def wait(what, seconds=10):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- who may ask ----


@pytest.mark.parametrize(
    "host", ["x/health?", "x/health#", "x/health", "/health", "x@y/health?", "[::1]/health?", "x\\health", ""]
)  # fmt: skip
def test_no_host_opens_a_path_that_needs_the_key(prompts, host):
    scheduler = Scripted(prompts.tokenizer, "one two three")
    with running(scheduler, prompts, api_key="s3cret") as server:
        for method, path in (("POST", CHAT), ("GET", "/metrics"), ("GET", "/v1/models")):
            with server.raw() as sock:
                data = post(path, ASK).replace(b"Host: x", b"Host: " + host.encode())
                sock.sendall(data.replace(b"POST", method.encode(), 1))
                assert read_answer(sock)[0] == 401
        with server.raw() as sock:
            sock.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert read_answer(sock)[0] == 200
    assert scheduler.requests == []


# ---- bodies ----


@pytest.mark.parametrize(
    "text",
    [b'"' + b'\\"' * 2_000_000, b'"' + b"\\\\" * 2_000_000, b'\\"' * 2_000_000, b'"' * 4_000_001,
     b'["' + b"\\" * 3_999_999, b'"\\' * 2_000_000],
    ids=["quotes", "backslashes", "outside", "empty", "one run", "mixed"],
)  # fmt: skip
def test_values_are_counted_in_linear_time(text):
    data = b'{"a": [' + b"1," * body.MAX_VALUES + text
    began = time.monotonic()
    with pytest.raises(Problem):
        body.read_json(data)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "text", ["[,{" * 100_000, '\\"[,{' * 60_000, "\\\\", 'a\\\\"' + "," * 300_000, "\\" * 8 + '"' + "[" * 200_001]
)  # fmt: skip
def test_what_stands_in_strings_is_no_value(text):
    data = json.dumps({"a": text, "b": [1, 2]}).encode()
    assert body.read_json(data)["a"] == text


def test_an_answer_keeps_nothing_of_its_body(prompts):
    """Bodies are counted until their request is prepared: what then stays has to be small."""
    hold = threading.Event()
    made = []

    class Spied(dict):
        pass

    def read(data):
        value = Spied(body.read_json(data))
        made.append(weakref.ref(value))
        wish = schema.read_chat(value)
        made.append(weakref.ref(wish))
        made.append(weakref.ref(wish.tools[0]))
        return wish

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mosaic_c.server.app.read_chat", read)
        patch.setattr("mosaic_c.server.app.read_json", lambda data: data)
        scheduler = Scripted(prompts.tokenizer, "one", hold=hold)
        prompts.form, before = wire_form(), prompts.form
        prompts._templates[True], template = prompts._templates[False], prompts._templates[True]
        try:
            with running(scheduler, prompts) as server, server.raw() as sock:
                sock.sendall(post(CHAT, {**ASK, "tools": [tool]}))
                wait(lambda: scheduler.tickets)
                wait(lambda: gc.collect() >= 0 and not any(ref() for ref in made), 5)
                assert len(made) == 3 and server.service.bodies.bytes == 0
                hold.set()
                assert read_answer(sock)[0] == 200
        finally:
            prompts.form, prompts._templates[True] = before, template


def wire_form():
    from mosaic_c.server.grammar import Form

    return Form(xml=False)


def test_names_that_an_answer_keeps_are_counted(prompts):
    from mosaic_c.server.messages import read_tools
    from mosaic_c.server.tools import CallParser, Form

    known = {f"name{i:04}": {"type": "string"} for i in range(1000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": known}}
    tools = read_tools([{"type": "function", "function": function}])
    assert CallParser(Form(xml=True), tools).size == 8000
    assert CallParser(Form(xml=False), tools).size == 0
    held = wire.Held(5)
    with pytest.raises(ValueError), held.more(8000):
        assert held.bytes == 8005
        raise ValueError
    assert held.bytes == 5


def test_variables_of_the_template_are_bounded_and_none_of_the_tokenizer(prompts):
    prompts.names, before = prompts.names | {"bos_token", "note"}, prompts.names
    try:
        for name in ("bos_token", "eos_token", *prompts.tokenizer.variables):
            wish = schema.read_chat({**ASK, "chat_template_kwargs": {name: "x"}})
            with pytest.raises(Problem, match="not to be set here"):
                prompts.chat(wish)
        for size, fine in ((60_000, True), (70_000, False)):
            wish = schema.read_chat({**ASK, "chat_template_kwargs": {"note": "x" * size}})
            if fine:
                prompts.chat(wish)
            else:
                with pytest.raises(Problem, match="at most 65536"):
                    prompts.chat(wish)
    finally:
        prompts.names = before


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**64 - 1])
def test_a_negative_seed_is_one_too(seed):
    assert schema.read_chat({**ASK, "seed": seed}).sampling["seed"] == seed % 2**64


def test_a_panic_while_a_request_is_prepared_is_an_answer(prompts, monkeypatch):
    class Panic(BaseException):
        pass

    def chat(wish):
        raise Panic("at src/secret.rs")

    monkeypatch.setattr(prompts, "chat", chat)
    with running(Scripted(prompts.tokenizer, "one"), prompts) as server:
        for _ in range(3):
            r = httpx.post(server.url + CHAT, json=ASK)
            assert r.status_code == 500 and r.json()["error"]["code"] == "internal_error"
            assert "secret" not in r.text


# ---- answers ----


def test_logprobs_are_kept_as_text(prompts):
    import tracemalloc

    from mosaic_c.generation import Piece
    from mosaic_c.server.replies import ChatReply, TextReply

    top = tuple((i, -float(i)) for i in range(20))
    for kind, read, ask in (
        (ChatReply, schema.read_chat, {**ASK, "logprobs": True, "top_logprobs": 20}),
        (TextReply, schema.read_text, {"prompt": "a", "logprobs": 5}),
    ):
        wish = read(ask)
        ready = prompts.chat(wish) if kind is ChatReply else prompts.text(wish)
        reply = kind(prompts, ready, wish, "demo", "")
        reply.take(Piece(65, "a", -1.0, top))
        tracemalloc.start()
        for i in range(1000):
            reply.take(Piece(40 + i, "a", -1.0, tuple((40 + i + t, p) for t, p in top)))
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
        tracemalloc.stop()
        answer = json.loads(reply.whole("length"))
        logprobs = answer["choices"][0]["logprobs"]
        if kind is ChatReply:
            assert (
                len(logprobs["content"]) == 1001
                and len(logprobs["content"][7]["top_logprobs"]) == 20
            )
        else:
            assert {len(column) for column in logprobs.values()} == {1001}
            assert logprobs["text_offset"][:3] == [0, 1, 2]


def test_a_stop_token_that_ends_nothing_has_logprobs(prompts):
    scheduler = Scripted(prompts.tokenizer, "one<|im_end|>two")
    ask = {**ASK, "logprobs": True, "max_tokens": 20}
    with running(scheduler, prompts) as server:
        rows = []
        for more in ({}, {"ignore_eos": True, "max_tokens": 3}):
            r = httpx.post(server.url + CHAT, json={**ask, **more}).json()
            rows.append([e["token"] for e in r["choices"][0]["logprobs"]["content"]])
    assert rows[0] == ["one"] and rows[1][:2] == ["one", "<|im_end|>"]


# ---- connections ----


def test_connections_are_bounded(prompts):
    scheduler = Scripted(prompts.tokenizer, "one two three")
    with running(scheduler, prompts, limits=Limits(connections=3, drain_s=0.2)) as server:
        socks = [server.raw() for _ in range(3)]
        wait(lambda: len(server.server.server_state.connections) == 3)
        with server.raw() as sock:
            status, headers, data = read_answer(sock)
            assert (status, headers["connection"]) == (503, "close")
            assert json.loads(data)["error"]["code"] == "busy" and sock.recv(1) == b""
        for sock in socks:
            sock.sendall(post(CHAT, ASK))
            assert read_answer(sock)[0] == 200
            sock.close()
        wait(lambda: not server.server.server_state.connections)
        gone = [p for p in gc.get_objects() if isinstance(p, Protocol) and p._lost]
        assert all(p._stalled is None or p._stalled.cancelled() for p in gone)
        assert httpx.get(server.url + "/health").status_code == 200


def test_a_connection_may_be_idle_for_longer_than_a_head_may_take(prompts):
    limits = Limits(head_s=0.3, idle_s=1.2, drain_s=0.2)
    with running(Scripted(prompts.tokenizer, "one"), prompts, limits=limits) as server:
        with server.raw() as sock:
            sock.sendall(post(CHAT, ASK))
            assert read_answer(sock)[0] == 200
            time.sleep(0.7)
            sock.sendall(post(CHAT, ASK))
            assert read_answer(sock)[0] == 200
            began = time.monotonic()
            assert sock.recv(1) == b"" and 0.8 < time.monotonic() - began < 5
        with server.raw() as sock:  # a head that has begun is due all the same
            sock.sendall(post(CHAT, ASK))
            assert read_answer(sock)[0] == 200
            sock.sendall(b"POST /v1")
            began = time.monotonic()
            assert sock.recv(1) == b"" and time.monotonic() - began < 0.9


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_is_cut_off(prompts, stream, monkeypatch):
    """Also where an answer is whole and all of it was given to the connection."""
    scheduler = Scripted(prompts.tokenizer, "word " * 1900)
    limits = Limits(stall_s=0.4, ping_s=0.05, drain_s=0.2)
    ask = {**ASK, "stream": stream, "logprobs": True, "top_logprobs": 20}
    # more than the kernel takes in for a client that does not
    monkeypatch.setattr("mosaic_c.server.replies.Reply.whole", lambda *_: "x" * 20_000_000)
    with running(scheduler, prompts, limits=limits) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post(CHAT, ask))
        wait(lambda: scheduler.tickets)
        wait(lambda: not server.server.server_state.connections)
        assert scheduler.tickets[0].over


def test_a_comment_that_nobody_takes_is_found_out():
    import asyncio

    async def run():
        sent = []

        async def send(event):
            sent.append(event)
            if len(sent) > 1:
                await asyncio.sleep(60)

        events = wire.Events(send, Limits(ping_s=0.05, stall_s=0.2))
        await events.data("x")
        await asyncio.wait_for(events.keep(), 5)
        assert len(sent) == 2

    asyncio.run(run())


def test_a_text_that_nobody_takes_is_found_out_beside_a_comment_that_was_taken():
    import asyncio

    async def run():
        sent = []

        async def send(event):
            sent.append(event["body"])
            await asyncio.sleep(0.15 if event["body"].startswith(b":") else 60)

        events = wire.Events(send, Limits(ping_s=0.05, stall_s=0.4))
        keep = asyncio.ensure_future(events.keep())
        await asyncio.sleep(0.15)
        text = asyncio.ensure_future(events.data("x"))
        await asyncio.wait_for(keep, 5)
        text.cancel()
        assert sent[0].startswith(b":") and sent[1].startswith(b"data")

    asyncio.run(run())


def test_a_client_that_leaves_while_its_request_is_prepared_is_never_answered(prompts):
    scheduler = Scripted(prompts.tokenizer, "one", hold=threading.Event())
    begun, go = threading.Event(), threading.Event()

    def slow(wish, chat=prompts.chat):
        begun.set()
        assert go.wait(10)
        return chat(wish)

    with pytest.MonkeyPatch.context() as patch, running(scheduler, prompts) as server:
        patch.setattr(prompts, "chat", slow)
        socks = [server.raw() for _ in range(4)]
        for sock in socks:
            sock.sendall(post(CHAT, ASK))
        assert begun.wait(10)
        wait(lambda: server.service._preparing == 4)
        for sock in socks:
            sock.close()
        wait(lambda: server.service._preparing == 2)  # the others had not begun
        assert server.service.bodies.bytes > 0
        go.set()
        wait(lambda: server.service.metrics.disconnected == 4)
        wait(lambda: all(t.over for t in scheduler.tickets))
        assert len(scheduler.tickets) == 2 and server.service.bodies.bytes == 0


# ---- the command ----


def test_a_key_may_come_from_a_file(tmp_path):
    import argparse

    from mosaic_c.commands.serve import _key

    def key(file, given=None):
        return _key(argparse.Namespace(api_key=given, api_key_file=file))

    path = tmp_path / "key"
    path.write_text("s3cret\nand more\n")
    assert key(str(path)) == "s3cret" and key(None) is None and key(None, "a") == "a"
    with pytest.raises(UsageError, match="not both"):
        key(str(path), "a")
    path.write_text("two words\n")
    with pytest.raises(UsageError, match="key: expected printable"):
        key(str(path))
    with pytest.raises(MosaicError, match="No such file"):
        key(str(tmp_path / "none"))


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_leaves_out_what_is_usual(quiet, monkeypatch, capsys):
    import argparse
    from types import SimpleNamespace

    from mosaic_c.commands import serve

    seen = {}

    def open_model(folder, **options):
        seen.update(options)
        options["on_load"](1, 2)
        memory = SimpleNamespace(warnings=["less than wished"])
        return SimpleNamespace(
            memory=memory, stats=lambda: SimpleNamespace(notes=lambda: ["usual"])
        )

    monkeypatch.setattr("mosaic_c.opening.open_model", open_model)
    monkeypatch.setattr(serve, "model_options", lambda args: {})
    args = argparse.Namespace(isa=None, parallel=2, queue=3, quiet=quiet, verbose=False)
    serve._open(args, None, None)
    err = capsys.readouterr().err
    assert "less than wished" in err and ("usual" in err) != quiet and seen["sessions"] == 2
