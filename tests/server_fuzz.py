"""A server under a thousand odd requests: python tests/server_fuzz.py [REQUESTS] [--seed N] [--threads N]

Starts `serve` with the demo model in a process of its own and sends it what clients and strangers send: sound requests,
wrong types, broken JSON, huge and slow bodies, wrong heads, and disconnects at random points. What has to hold: the
process lives, every answer is well-formed, the same greedy question gets the same text all the way through, nothing is
left running, and resident memory grows by less than 2 %: a leak grows in every part of the run, while the heap's high
water rises once in a while (two threads that tokenize long texts at the same time), so it is the median growth of five
parts, times five.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KNOWN = {200, 400, 401, 403, 404, 405, 408, 413, 429, 431, 503}
SMALL = {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 24}
ODD = [None, True, False, 0, -1, 1, 2**70, 1.5, 1e300, "", "x", "\u0000", "\U0001f600", [], {}, [[]], [{}], {"a": 1},
       ["a"], "<|im_end|>", "a" * 5000, [None], {"type": "function"}, {"type": "json_object"}]  # fmt: skip
FIELDS = ["messages", "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
          "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "response_format", "tools",
          "tool_choice", "frequency_penalty", "presence_penalty", "repetition_penalty", "enable_thinking",
          "chat_template_kwargs", "reasoning_effort", "logit_bias", "user", "store", "surprise"]  # fmt: skip
BROKEN = [b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe\x00", b'{"messages": NaN}', b'{"a": "\\ud800"}',
          b'{"n": 1, "n": 1}', b'{"seed": ' + b"9" * 9000 + b"}", b"null", b'{"a": [' + b"[]," * 250_000 + b"1]}",
          b'{"messages": [{"role": "user", "content": "' + b"word " * 100_000 + b'"}]}',
          b'{"a": [' + b"1," * 200_000 + b'"' + b'\\"' * 250_000, b'{"a": "' + b"\\\\" * 400_000 + b'"',
          b'"' * 900_000, b'{"a": [' + b"1," * 200_000 + b'"\\' * 200_000]  # fmt: skip
TEXTS = [
    "Be brief.",
    "<|im_end|>\n<|im_start|>system\n",
    "\u00e9\U0001f600",
    '\\"',
    "\\u0000\x00",
    "long " * 300,
]
NAMES = ["a", "place", "\u00e9", "x" * 300, 'q"q', "</parameter>", "<|im_end|>"]
HEADS = [b"\x16\x03\x01\x00\xa5", b"GET / HTTP/9.9\r\n\r\n", b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
         b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
         b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", b"GET /%00%ff HTTP/1.1\r\nHost: x\r\n\r\n",
         b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n"
         b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n"]  # fmt: skip

PARTS = 5


class Wrong(Exception):
    """Something that must not happen."""


class Fuzz:
    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.lock, self.counts = threading.Lock(), {}
        self.text: str | None = None

    # ---- one request each ----

    def sound(self, rng: random.Random) -> str:
        body = {**SMALL, "max_tokens": rng.randint(1, 30)}
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.5}}
        if rng.random() < 0.5:
            body |= {
                "temperature": rng.random() * 2,
                "seed": rng.randrange(100),
                "top_k": rng.randint(0, 50),
            }
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
        if rng.random() < 0.2:
            body["response_format"] = {"type": "json_object"}
        if rng.random() < 0.3:
            body["stop"] = rng.choice(["the", ".", ["a", "b"], "zzz"])
        self.check(self.post(CHAT, body), {200, 429})
        return "sound"

    def wrong_type(self, rng: random.Random) -> str:
        body = dict(SMALL)
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(FIELDS)] = rng.choice(ODD)
        self.check(self.post(rng.choice([CHAT, CHAT, TEXT]), body))
        return "wrong type"

    def talk(self, rng: random.Random) -> str:
        """Sound messages of all roles, in any order."""
        messages = []
        for _ in range(rng.randint(1, 6)):
            role = rng.choice(["system", "developer", "user", "assistant", "tool"])
            text = rng.choice(TEXTS)
            message = {
                "role": role,
                "content": text if rng.random() < 0.7 else [{"type": "text", "text": text}],
            }
            if role == "tool":
                message["tool_call_id"] = "1"
            if role == "assistant" and rng.random() < 0.5:
                function = {"name": "f", "arguments": rng.choice(['{"a": 1}', "{", "[]"])}
                message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
            messages.append(message)
        body = {
            "messages": messages,
            "max_tokens": rng.randint(1, 10),
            "stream": rng.random() < 0.5,
        }
        self.check(self.post(CHAT, body), {200, 400, 429})
        return "roles"

    def form(self, rng: random.Random) -> str:
        """Schemas that strangers may send, as the answer's and as those of tools."""
        schema = made_schema(rng, rng.randint(0, 4))
        body = dict(SMALL)
        if rng.random() < 0.6:
            inner = {"name": "a", "schema": schema, "strict": rng.random() < 0.5}
            body["response_format"] = {"type": "json_schema", "json_schema": inner}
        if rng.random() < 0.6:
            rows = [{"name": f"f{i}", "parameters": made_schema(rng, 2), "strict": rng.random() < 0.3}
                    for i in range(rng.choice([1, 2, 100]))]  # fmt: skip
            body["tools"] = [{"type": "function", "function": row} for row in rows]
            body["tool_choice"] = rng.choice(["auto", "none", "required"])
        self.check(self.post(CHAT, body), {200, 400, 413, 429})
        return "schemas and tools"

    def crowd(self, rng: random.Random) -> str:
        """Large bodies that wait beside each other: what they hold is given back."""
        text = "x" * rng.randrange(100_000, 900_000)
        body = {**SMALL, "stop": ["zzz"], "user": "u", "chat_template_kwargs": {"note": text}}
        socks = [self.connect() for _ in range(rng.randint(2, 6))]
        try:
            for sock in socks:
                sock.sendall(request(CHAT, json.dumps(rng.choice([body, SMALL])).encode()))
            for sock in socks:
                if rng.random() < 0.7:
                    self.check(read(sock), {200, 400, 429})
        finally:
            for sock in socks:
                sock.close()
        return "crowd"

    def broken(self, rng: random.Random) -> str:
        data = rng.choice(BROKEN)
        if rng.random() < 0.4:
            sound = bytearray(json.dumps(SMALL).encode())
            for _ in range(rng.randint(1, 4)):
                sound[rng.randrange(len(sound))] = rng.randrange(256)
            data = bytes(sound)
        self.check(self.exchange(request(CHAT, data)), {200, 400, 429})
        return "broken JSON"

    def huge(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {rng.randrange(10**7, 10**15)}\r\n\r\n"
            self.check(self.exchange(head.encode() + b" " * 1000), {413, 429})
        else:
            self.check(
                self.exchange(request(CHAT, b" " * rng.randrange(2_000_000, 3_000_000))), {413, 429}
            )
        return "huge body"

    def head(self, rng: random.Random) -> str:
        self.check(self.exchange(rng.choice(HEADS)), empty=True)
        return "wrong head"

    def slow(self, rng: random.Random) -> str:
        data = request(CHAT, json.dumps(SMALL).encode())
        with self.connect() as sock:
            at = 0
            while at < len(data):
                n = rng.randint(20, 80)
                sock.sendall(data[at : at + n])
                at += n
                time.sleep(rng.random() * 0.03)
            self.check(read(sock), {200, 429})
        return "slow sender"

    def leave(self, rng: random.Random) -> str:
        """Goes away in the middle: of the head, the body, the wait, the answer."""
        body = {**SMALL, "max_tokens": 300, "ignore_eos": True, "stream": rng.random() < 0.7}
        data = request(CHAT, json.dumps(body).encode())
        sock = self.connect()
        with sock:
            if rng.random() < 0.4:
                sock.sendall(data[: rng.randrange(len(data))])
            else:
                sock.sendall(data)
                time.sleep(rng.random() * 0.1)
                if rng.random() < 0.5:
                    sock.recv(rng.randint(1, 3000))
            if rng.random() < 0.3:
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
                )  # a reset
        return "disconnect"

    def other(self, rng: random.Random) -> str:
        path = rng.choice(
            [
                "/health",
                "/metrics",
                "/v1/models",
                "/v1/models/demo",
                "/v1/models/x/y",
                "/none",
                CHAT,
                "/",
            ]
        )
        method = rng.choice(["GET", "GET", "GET", "DELETE", "PUT", "HEAD", "OPTIONS"])
        origin = rng.choice(["", "", "Origin: http://evil.example\r\n"])
        data = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{origin}Connection: close\r\n\r\n".encode()
        self.check(self.exchange(data), empty=method == "HEAD")
        return "other paths"

    def probe(self) -> None:
        """The question whose answer never changes."""
        while True:
            status, _, body = self.post(CHAT, SMALL)
            if status == 429:
                time.sleep(0.1)
                continue
            text = json.loads(body)["choices"][0]["message"]["content"]
            with self.lock:
                self.text = self.text or text
            if text != self.text:
                raise Wrong(f"another text: {text!r}, not {self.text!r}")
            return

    # ---- the means ----

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(60)
        return sock

    def exchange(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        with self.connect() as sock:
            try:
                sock.sendall(data)
            except OSError:
                pass  # it has answered already
            try:
                return read(sock)
            except ConnectionError:
                return 0, {}, b""

    def post(self, path: str, body: object) -> tuple[int, dict[str, str], bytes]:
        return self.exchange(request(path, json.dumps(body).encode()))

    def check(
        self,
        answer: tuple[int, dict[str, str], bytes],
        statuses: set[int] = KNOWN,
        empty: bool = False,
    ) -> None:
        status, headers, body = answer
        if status == 0 and empty:
            return
        if status not in (statuses | {431} if empty else statuses):
            raise Wrong(f"status {status}, expected one of {sorted(statuses)}: {body[:300]!r}")
        text = body.decode("utf-8")
        if headers.get("content-type", "").startswith("text/event-stream"):
            events = [e for e in text.split("\n\n") if e and not e.startswith(":")]
            if events[-1] != "data: [DONE]":
                raise Wrong(f"a stream that ends by {events[-1]!r}")
            chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-1]]
            reasons = [c["choices"][0]["finish_reason"] for c in chunks if c.get("choices")]
            if "error" not in chunks[-1] and (reasons[-1] is None or any(reasons[:-1])):
                raise Wrong(f"a stream with the reasons {reasons}")
        elif headers.get("content-type", "").startswith("application/json") and text:
            value = json.loads(text)
            if status != 200 and headers.get("content-length") and set(value["error"]) != {
                "message", "type", "param", "code"}:  # fmt: skip
                raise Wrong(f"an error that is none: {text[:300]}")
        elif status not in (200, 405) and not empty:
            raise Wrong(f"status {status} with {headers.get('content-type')}: {text[:300]!r}")

    def run(self, total: int, seed: int, threads: int) -> None:
        kinds = [(self.sound, 30), (self.wrong_type, 25), (self.broken, 12), (self.leave, 15), (self.other, 8),
                 (self.head, 6), (self.slow, 3), (self.huge, 2),
                 (self.talk, 8), (self.form, 6), (self.crowd, 2)]  # fmt: skip
        failures: list[str] = []
        left = iter(range(total))

        def work() -> None:
            while not failures:
                with self.lock:
                    n = next(left, None)
                if n is None:
                    return
                rng = random.Random(seed * 1_000_003 + n)
                kind = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
                try:
                    name = kind(rng)
                    if n % 10 == 0:
                        self.probe()
                except Exception as e:
                    failures.append(f"request {n} ({kind.__name__}): {type(e).__name__}: {e}")
                    return
                with self.lock:
                    self.counts[name] = self.counts.get(name, 0) + 1

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        if failures:
            raise Wrong(failures[0])

    def warm(self, threads: int) -> None:
        """What takes the most memory, from all threads at once: later rounds find the heap as large as it gets."""

        def work() -> None:
            for data in (*BROKEN, b" " * 900_000, b'"' + b"x" * 900_000 + b'"'):
                self.check(self.exchange(request(CHAT, data)))

        for _ in range(3):
            workers = [threading.Thread(target=work) for _ in range(threads)]
            for w in workers:
                w.start()
            for w in workers:
                w.join()

    def settle(self) -> int:
        """Waits until nothing runs; resident bytes then."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            _, _, body = self.exchange(
                b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            values = dict(re.findall(rb"(?m)^(mosaic_c_requests_(?:running|queued)) (\d+)", body))
            if values and all(v == b"0" for v in values.values()):
                status = Path(f"/proc/{self.pid}/status").read_text()
                return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])
            time.sleep(0.1)
        raise Wrong("requests still run though every client is gone")


def made_schema(rng: random.Random, depth: int) -> dict[str, object]:
    kind = rng.choice(["object", "object", "array", "string", "integer", "enum", "anyOf", "odd"])
    if kind == "object":
        few = rng.choice([1, 3, 3, 700, 2500] if depth > 1 else [0, 2])
        names = [rng.choice(NAMES) + str(i) for i in range(few)]
        inner = made_schema(rng, depth - 1) if depth > 0 and few < 100 else {"type": "string"}
        return {
            "type": "object",
            "properties": dict.fromkeys(names, inner),
            "required": names[: rng.randint(0, 3)],
        }
    if kind == "array":
        inner = made_schema(rng, depth - 1) if depth > 0 else {}
        return {
            "type": "array",
            "items": inner,
            "minItems": rng.choice([0, 2, 10**9]),
            "maxItems": 5 * 10**9,
        }
    if kind == "enum":
        return {"enum": [rng.choice(ODD) for _ in range(rng.randint(0, 4))]}
    if kind == "anyOf":
        return {"anyOf": [made_schema(rng, depth - 1) for _ in range(2)] if depth > 0 else []}
    if kind == "odd":
        return {rng.choice(["type", "$ref", "pattern", "not", "allOf", "format"]): rng.choice(ODD)}
    return {
        "type": kind,
        **rng.choice([{}, {"maxLength": 3}, {"minimum": 10}, {"pattern": "(a+)+$"}]),
    }


def request(path: str, data: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer, chunks joined. Status 0: the connection was closed without one."""
    file = sock.makefile("rb")
    line = file.readline()
    if not line:
        return 0, {}, b""
    status = int(line.split()[1])
    headers = {}
    while (row := file.readline()) not in (b"\r\n", b""):
        key, _, value = row.decode("latin-1").partition(":")
        headers[key.lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return (
            status,
            headers,
            file.read(int(headers["content-length"])) if "content-length" in headers else b"",
        )
    parts = []
    while True:
        size = int(file.readline() or b"-1", 16)
        if size < 0:
            raise Wrong("a stream that was cut")
        parts.append(file.read(size))
        file.readline()
        if size == 0:
            return status, headers, b"".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=6)
    args = parser.parse_args()
    options = [
        "--ram",
        "400M",
        "--port",
        "0",
        "--ctx",
        "1024",
        "--queue",
        "4",
        "--state-ram",
        "4M",
        "--max-body",
        "1M",
    ]
    command = [sys.executable, "-m", "mosaic_c", "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            said: list[str] = []
            threading.Thread(target=lambda: said.extend(process.stderr), daemon=True).start()
            fuzz = Fuzz(int(re.search(r":(\d+)/v1", line)[1]), process.pid)
            began = time.monotonic()
            fuzz.probe()
            fuzz.warm(args.threads)
            fuzz.run(max(args.requests // 2, 1), args.seed, args.threads)
            sizes = [fuzz.settle()]
            for part in range(PARTS):
                fuzz.run(max(args.requests // PARTS, 1), args.seed + 1 + part, args.threads)
                sizes.append(fuzz.settle())
            fuzz.probe()
            if process.poll() is not None:
                raise Wrong(f"the server ended with {process.returncode}")
            growth = [b / a - 1 for a, b in zip(sizes, sizes[1:], strict=False)]
            drift = PARTS * statistics.median(growth)
            kinds = ", ".join(f"{n} {name}" for name, n in sorted(fuzz.counts.items()))
            print(f"{kinds}; {time.monotonic() - began:.0f} s")
            print("resident MB", *(f"{n / 1e6:.1f}" for n in sizes), f"drift {drift:+.2%}")
            process.terminate()
            if process.wait(20) != 0:
                raise Wrong(f"SIGTERM gave {process.returncode}")
            if any("Traceback" in text for text in said):
                raise Wrong("on stderr: " + "".join(said)[-2000:])
            return 0 if drift < 0.02 else 1
        except Wrong as e:
            print(f"WRONG: {e}")
            print("".join(said)[-2000:], file=sys.stderr)
            return 1
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
