"""What strangers do to a server: who may ask, large, slow and broken requests, clients that leave, and its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("uvicorn")

import httpx
from helpers_server import Scripted, post, prompter, read_answer, running

from mosaic_c.errors import MosaicError
from mosaic_c.names import demo_folder
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


def error_of(body):
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def still_answers(server):
    r = httpx.post(
        server.url + CHAT, json=ASK, timeout=20, headers=getattr(server, "headers", None)
    )
    assert r.status_code == 200 and r.json()["choices"][0]["message"]["content"] == "one two three"


@pytest.fixture(scope="module")
def plain(prompts):
    limits = Limits(body=20_000, body_s=0.6, head_s=0.6, ping_s=0.1, drain_s=0.5)
    with running(Scripted(prompts.tokenizer, "one two three"), prompts, limits=limits) as server:
        yield server


# ---- who may ask ----


def test_a_key_is_needed_where_there_is_one(prompts):
    with running(Scripted(prompts.tokenizer, "one two three"), prompts, api_key="s3cret") as server:
        for given in (
            None,
            "",
            "Bearer",
            "Bearer wrong",
            "Basic s3cret",
            "Bearer s3cret2",
            "Bearer \xe4",
            "s3cret",
        ):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            for method, path in (
                ("POST", CHAT),
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("GET", "/none"),
            ):
                r = httpx.request(method, server.url + path, headers=headers, content=b"{}" * 1000)
                assert r.status_code == 401 and error_of(r.content)["code"] == "invalid_api_key"
                assert r.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.url + "/health").status_code == 200
        server.headers = {"Authorization": "Bearer s3cret"}
        still_answers(server)


def test_web_pages_may_ask_only_where_they_are_named(prompts):
    page = {"Origin": "http://a.example"}
    scheduler = Scripted(prompts.tokenizer, "one two three")
    with running(scheduler, prompts) as server:
        r = httpx.post(server.url + CHAT, json=ASK, headers=page)
        assert r.status_code == 403 and "access-control-allow-origin" not in r.headers
        assert httpx.options(server.url + CHAT, headers=page).status_code == 403
    assert scheduler.requests == []
    with running(scheduler, prompts, origins=("http://a.example",)) as server:
        r = httpx.post(server.url + CHAT, json=ASK, headers=page)
        assert (
            r.status_code == 200 and r.headers["access-control-allow-origin"] == "http://a.example"
        )
        asked = {
            **page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert httpx.options(server.url + CHAT, headers=asked).status_code == 200
        r = httpx.post(server.url + CHAT, json=ASK, headers={"Origin": "http://b.example"})
        assert r.status_code == 403


def test_paths_and_methods_that_are_not_there(plain):
    for method, path, status in (("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", CHAT, 405),
                                 ("PUT", "/v1/models", 405), ("GET", "/v1/models/x%2F..%2F", 404)):  # fmt: skip
        r = httpx.request(method, plain.url + path)
        assert r.status_code == status
        error_of(r.content)


# ---- large, slow and broken requests ----


def test_a_body_that_is_too_long_is_not_read(plain):
    for declared in (True, False):
        with plain.raw() as sock:
            if declared:  # nothing is sent: the answer comes all the same
                sock.sendall(
                    f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n".encode()
                )
            else:
                sock.sendall(
                    f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
                )
                sock.sendall(b"5000\r\n" + b" " * 0x5000 + b"\r\n")
            status, headers, body = read_answer(sock)
            assert status == 413 and error_of(body)["code"] == "body_too_large"
            assert headers["connection"] == "close" and sock.recv(1) == b""
    still_answers(plain)


def test_a_client_that_sends_all_of_it_still_sees_the_answer(plain):
    for _ in range(3):
        r = httpx.post(plain.url + CHAT, content=b" " * 8_000_000, timeout=20)
        assert r.status_code == 413
    still_answers(plain)


def test_what_follows_a_refused_body_is_not_taken_for_a_request(plain):
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with plain.raw() as sock:
        body = smuggled * 3000
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        status, _, _ = read_answer(sock)
        assert status == 413 and sock.recv(1) == b""


def test_answers_come_in_order_on_one_connection(plain):
    with plain.raw() as sock:
        for body, status in ((ASK, 200), (b"{", 400), ({"messages": 1}, 400), (ASK, 200)):
            sock.sendall(post(CHAT, body))
            got, _, data = read_answer(sock)
            assert got == status and (status == 200 or error_of(data))


def test_a_body_that_does_not_arrive_is_given_up(plain):
    with plain.raw() as sock:
        sock.sendall(post(CHAT, ASK)[:-5])
        began = time.monotonic()
        status, headers, body = read_answer(sock)
        assert (
            status == 408
            and error_of(body)["code"] == "timeout"
            and headers["connection"] == "close"
        )
        assert 0.4 < time.monotonic() - began < 5
    with plain.raw() as sock:  # one byte at a time is no excuse
        request = post(CHAT, ASK)
        head = request.index(b"\r\n\r\n") + 4
        sock.sendall(request[:head])
        began = time.monotonic()
        for byte in request[head:]:
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - began < 5
    still_answers(plain)


def test_a_head_that_does_not_arrive_is_given_up(plain):
    for start in (b"", b"POST /v1/chat", post(CHAT, ASK) + b"GET /he"):
        with plain.raw() as sock:
            sock.sendall(start)
            if start.startswith(b"POST /v1/chat/"):
                assert read_answer(sock)[0] == 200
            began = time.monotonic()
            assert sock.recv(1) == b""
            assert time.monotonic() - began < 5


def test_large_heads_and_what_is_no_http_are_refused(plain):
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
                 b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: a\r\n" * 20_000 + b"\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x00",
                 b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                 b"Content-Length: -5\r\n\r\n{}", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
                 b"Content-Length: 3\r\n\r\n{}"):  # fmt: skip
        with plain.raw() as sock:
            try:
                sock.sendall(data)
                status, _, body = read_answer(sock)
            except ConnectionError:
                continue
            assert status in (400, 431)
            error_of(body)
    still_answers(plain)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 19_000, b"\xff", b'{"messages": "\\ud800"}', b'{"seed": NaN}']
)
def test_broken_bodies_are_400(plain, body):
    r = httpx.post(plain.url + CHAT, content=body)
    assert r.status_code == 400 and error_of(r.content)["type"] == "invalid_request_error"


def test_a_client_may_ask_whether_to_send(plain):
    with plain.raw() as sock:
        request = post(CHAT, ASK, "Expect: 100-continue\r\n")
        head = request.index(b"\r\n\r\n") + 4
        sock.sendall(request[:head])
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(request[head:])
        assert read_answer(sock)[0] == 200


# ---- waiting, leaving, errors ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_at_once(prompts, stream):
    scheduler = Scripted(prompts.tokenizer, "word " * 400, pause=0.05)
    with running(scheduler, prompts) as server:
        with server.raw() as sock:
            sock.sendall(post(CHAT, {**ASK, "stream": stream}))
            wait(lambda: scheduler.tickets)
            if stream:
                said = b""
                while b'"content":"w' not in said:
                    said += sock.recv(65536)
        wait(lambda: scheduler.tickets[0].over, 2)
        assert scheduler.tickets[0].finish_reason == "cancel"
        wait(lambda: server.service.metrics.disconnected == 1, 2)


def test_a_client_that_leaves_while_it_waits_is_cancelled(prompts):
    hold = threading.Event()
    scheduler = Scripted(prompts.tokenizer, "one", hold=hold)
    with running(scheduler, prompts) as server:
        for stream in (False, True):
            with server.raw() as sock:
                sock.sendall(post(CHAT, {**ASK, "stream": stream}))
                wait(lambda: scheduler.tickets)
            wait(lambda: scheduler.tickets[0].over, 2)
            scheduler.tickets.clear()
        hold.set()


def test_a_client_that_does_not_read_is_cancelled(prompts):
    scheduler = Scripted(prompts.tokenizer, "word " * 1900)
    limits = Limits(stall_s=0.3, ping_s=0, drain_s=0.5)
    with running(scheduler, prompts, limits=limits) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", server.port))
        # more than the kernel takes in for a client that does not
        sock.sendall(post(CHAT, {**ASK, "stream": True, "logprobs": True, "top_logprobs": 20}))
        wait(lambda: server.service.metrics.disconnected == 1)
        assert scheduler.tickets[0].over
        still_answers_with = httpx.get(server.url + "/health").status_code
    assert still_answers_with == 200


def test_a_full_queue_is_429_and_says_when_to_come_back(prompts):
    hold = threading.Event()
    scheduler = Scripted(prompts.tokenizer, "one two three", hold=hold, queue=1)
    with running(scheduler, prompts) as server:
        first = server.raw()
        first.sendall(post(CHAT, ASK))
        wait(lambda: scheduler.tickets)
        for stream in (False, True):
            r = httpx.post(server.url + CHAT, json={**ASK, "stream": stream})
            assert r.status_code == 429 and r.headers["retry-after"] == "7"
            assert error_of(r.content)["type"] == "rate_limit_error"
        hold.set()
        assert read_answer(first)[0] == 200
        first.close()
        still_answers(server)


def test_silence_is_filled_with_comments_that_clients_skip(prompts):
    hold = threading.Event()
    scheduler = Scripted(prompts.tokenizer, "one two three", hold=hold)
    with running(scheduler, prompts, limits=Limits(ping_s=0.05, drain_s=1)) as server:
        threading.Timer(0.5, hold.set).start()
        with httpx.stream("POST", server.url + CHAT, json={**ASK, "stream": True}) as r:
            text = r.read().decode()
        assert text.count(": keep-alive\n\n") >= 2
        hold.clear()
        threading.Timer(0.3, hold.set).start()
        with server.client() as client:
            chunks = client.chat.completions.create(model="demo", stream=True, **ASK)
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two three"
    hold.clear()
    with running(scheduler, prompts, limits=Limits(ping_s=0, drain_s=1)) as server:
        threading.Timer(0.3, hold.set).start()
        text = httpx.post(server.url + CHAT, json={**ASK, "stream": True}).text
        assert all(line.startswith("data: ") for line in text.split("\n\n") if line)


def test_an_error_of_the_engine_reaches_the_client(prompts):
    broken = MosaicError("shard 3 at 4096: expected 512 bytes, got 0", "EIO")
    for error, code in ((broken, "EIO"), (RuntimeError("secret at 0x1234"), "internal_error")):
        scheduler = Scripted(prompts.tokenizer, "one", error=error)
        with running(scheduler, prompts) as server:
            r = httpx.post(server.url + CHAT, json=ASK)
            assert r.status_code == 500 and "secret" not in r.text and "shard" not in r.text
            text = httpx.post(server.url + CHAT, json={**ASK, "stream": True}).text
            events = [e.removeprefix("data: ") for e in text.split("\n\n") if e]
            assert error_of(events[-2]) and events[-1] == "[DONE]" and "secret" not in text
            assert "shard" not in text and error_of(events[-2])["code"] == code


def test_no_part_of_a_character_goes_out(prompts):
    text = "caf\u00e9 \U0001f600 \u65e5\u672c"
    for limit in range(1, 20):
        scheduler = Scripted(prompts.tokenizer, text)
        with running(scheduler, prompts) as server:
            raw = httpx.post(
                server.url + CHAT, json={**ASK, "stream": True, "max_tokens": limit}
            ).content
        said = "".join(
            json.loads(e[6:])["choices"][0]["delta"].get("content") or ""
            for e in raw.decode("utf-8").split("\n\n")
            if e.startswith("data: {")
        )
        assert text.startswith(said.rstrip("\ufffd")) and said.count("\ufffd") <= 1
        if said == text:
            break
    assert said == text


# ---- the end ----


def test_an_answer_that_runs_is_finished_and_no_new_one_begins(prompts):
    scheduler = Scripted(prompts.tokenizer, "one two three", pause=0.2)
    with running(scheduler, prompts, limits=Limits(drain_s=5)) as server:
        with server.raw() as sock, server.raw() as other:
            other.sendall(post(CHAT, ASK)[:40])
            sock.sendall(post(CHAT, {**ASK, "stream": True}))
            wait(lambda: scheduler.tickets)
            server.server.stop()
            assert b'"finish_reason":"stop"' in read_answer(sock)[2]
    assert scheduler.closed


def test_an_answer_that_takes_too_long_is_ended_with_an_error(prompts):
    scheduler = Scripted(prompts.tokenizer, "word " * 1000, pause=0.1)
    began = time.monotonic()
    with running(scheduler, prompts, limits=Limits(drain_s=0.3)) as server:
        with server.raw() as sock:
            sock.sendall(post(CHAT, {**ASK, "stream": True}))
            wait(lambda: scheduler.tickets)
            server.server.stop()
            data = read_answer(sock)[2]
    assert b"shutting_down" in data and b"data: [DONE]" in data
    assert time.monotonic() - began < 6


def test_the_command_ends_by_signals_and_finds_states_again(tmp_path):
    options = [
        "--ram",
        "400M",
        "--port",
        "0",
        "--drain",
        "1",
        "--ctx",
        "512",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    long = {"messages": [{"role": "user", "content": "Tell me a story. " * 20}], "max_tokens": 3}
    reused = []
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        command = [sys.executable, "-m", "mosaic_c", "serve", *options]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ
        ) as process:
            try:
                line = process.stderr.readline()
                assert line.startswith("serving demo (context 512) at http://127.0.0.1:"), line
                url = line.split(" at ")[1].strip() + "/chat/completions"
                r = httpx.post(url, json=long, timeout=20)
                reused.append(r.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
                body = {**ASK, "ignore_eos": True, "stream": True}
                with httpx.stream("POST", url, json=body, timeout=20) as stream:
                    next(stream.iter_bytes())
                    process.send_signal(number)
                assert process.wait(15) == status
                assert "Traceback" not in process.stderr.read()
            finally:
                process.kill()
    assert reused[0] == 0 and reused[1] > 90


@pytest.mark.parametrize(
    ("args", "text"),
    [(["--port", "70000"], "--port"), (["--parallel", "0"], "--parallel"), (["--api-key", ""], "--api-key"),
     (["--cors", "here"], "--cors"), (["--max-body", "10"], "--max-body"), (["--drain", "nan"], "--drain"),
     (["--host", "no such host"], "--host")],
)  # fmt: skip
def test_bad_options_are_one_line(args, text, capsys):
    from mosaic_c.cli import main

    assert main(["serve", *args]) in (1, 2)
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def test_a_port_in_use_is_one_line(capsys):
    from mosaic_c.cli import main

    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert main(["serve", "--port", str(sock.getsockname()[1])]) == 1
    assert "cannot listen" in capsys.readouterr().err


def test_the_command_line_loads_nothing_of_it():
    code = (
        "import sys; from mosaic_c import cli; cli.parser(); "
        "sys.exit(any(m.split('.')[0] in ('starlette', 'uvicorn', 'llguidance') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=30).returncode == 0


def test_many_large_bodies_at_once_are_bounded(prompts):
    limits = Limits(body=50_000, body_s=5, drain_s=0.2)
    with running(Scripted(prompts.tokenizer, "one two three"), prompts, limits=limits) as server:
        socks = [server.raw() for _ in range(6)]
        for sock in socks:
            sock.sendall(post(CHAT, b" " * 49_999)[:-1])
        wait(lambda: server.service.bodies.bytes >= 4 * 49_000 - 1)
        for sock in socks:
            sock.sendall(b" ")
        got = sorted(read_answer(sock)[0] for sock in socks)
        for sock in socks:
            sock.close()
        assert got == [400] * 4 + [429] * 2
        assert server.service.bodies.bytes == 0
        still_answers(server)


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    from mosaic_c.cli import main

    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert main(["serve", "--port", "0"]) == 1
    assert "pip install '.[serve]'" in capsys.readouterr().err
