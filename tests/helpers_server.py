"""For the tests of the server: one on a free port in a thread, a scheduler that says what it is told, raw sockets."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mosaic_c import generation
from mosaic_c.errors import MosaicError
from mosaic_c.names import demo_folder
from mosaic_c.server.app import Service
from mosaic_c.server.grammar import Grammars
from mosaic_c.server.listen import make_server
from mosaic_c.server.prompts import Prompter
from mosaic_c.server.wire import Limits
from mosaic_c.ticket import Full, Progress, Ticket
from mosaic_c.tokenizer import Detokenizer, Tokenizer

STOP = 4095  # <|im_end|> of the demo model

# A template in the manner of thinking models with tools: it opens thinking itself, and shows calls as asked for.
THINKING = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call so: CALL<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
JSON_CALL = '<tool_call>{"name": f, "arguments": a}</tool_call>'
XML_CALL = "<tool_call><function=f><parameter=a>v</parameter></function></tool_call>"


def make_folder(to: Path, template: str | None, extra: tuple[str, ...] = ()) -> Path:
    """The demo model with another template and further tokens behind its vocabulary (which the model cannot say)."""
    to.mkdir()
    for path in demo_folder().iterdir():
        if path.name.startswith("tokenizer"):
            shutil.copy(path, to)
        else:
            (to / path.name).symlink_to(path)
    config = json.loads((to / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    if template is not None:
        config["chat_template"] = template
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    data = json.loads((to / "tokenizer.json").read_text())
    for n, text in enumerate(extra):
        row = {
            "id": 4096 + n,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        data["added_tokens"].append({**row, "normalized": False, "special": False})
    (to / "tokenizer.json").write_text(json.dumps(data))
    return to


def prompter(folder: Path, room: int = 2048, grammars: bool = True) -> Prompter:
    tokenizer = Tokenizer(folder)
    made = Grammars((folder / "tokenizer.json").read_text(), [STOP, 4093]) if grammars else None

    def get() -> Grammars:
        if made is None:
            raise MosaicError("no grammars here", "EGRAMMAR")
        return made

    return Prompter(
        tokenizer,
        room=room,
        vocab=4096,
        config={"eos_token_id": STOP},
        generation_config={},
        grammars=get,
    )


class Scripted:
    """A scheduler without a model: each request is answered with the next of texts (the last one for ever).

    pause: seconds before each token; hold: an Event without which no request begins. What was submitted is in requests.
    A grammar must allow every token of the text: allowed tells whether it did.
    """

    def __init__(self, tokenizer, *texts, pause=0.0, room=2048, queue=64, hold=None, error=None):
        self.tokenizer, self.texts, self.pause, self.room = tokenizer, list(texts), pause, room
        self.queue, self.hold, self.error = queue, hold, error
        self.requests, self.tickets, self.allowed = [], [], True
        self.closed, self.alive = False, True

    def submit(self, request):
        if sum(not t.over for t in self.tickets) >= self.queue:
            raise Full("no place", retry_after=7)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids = [*self.tokenizer.encode(text, bos=False), STOP]
        said = iter(ids)

        def choose(logits, history, allowed=None):
            token = next(said)
            if allowed is not None and not (token < len(allowed) and allowed[token]):
                self.allowed = False
            return token, -0.5

        run = generation.Run(
            request.ids, self.room, sampler=choose, stop_ids=[STOP], stop=request.stop,
            max_new_tokens=request.max_new_tokens, detokenizer=Detokenizer(self.tokenizer, request.ids),
            ignore_eos=request.ignore_eos, constraint=request.constraint, top_logprobs=request.top_logprobs,
        )  # fmt: skip
        ticket = Ticket(len(request.ids), lambda t: t.end("cancel"))
        self.requests.append(request)
        self.tickets.append(ticket)
        threading.Thread(target=self._say, args=(run, ticket), daemon=True).start()
        return ticket

    def _say(self, run, ticket):
        if self.hold is not None:
            self.hold.wait(20)
        ticket.put(Progress(ticket.prompt_tokens, ticket.prompt_tokens))
        if self.error is not None:
            ticket.end(error=self.error)
        logits = np.zeros(4096, np.float32)
        while run.finish_reason is None and not ticket.over:
            time.sleep(self.pause)
            piece = run.accept(logits)
            ticket.put(piece, run.finish_reason)

    def close(self, drain=0.0):
        end = time.monotonic() + drain
        while time.monotonic() < end and any(not t.over for t in self.tickets):
            time.sleep(0.01)
        for ticket in self.tickets:
            ticket.end(error=MosaicError("the model is shut down", "ECLOSED"))
        self.closed = True


class Running:
    """A server that listens. url, port; service: what is behind it."""

    def __init__(self, service, server, port):
        self.service, self.server, self.port = service, server, port
        self.url = f"http://127.0.0.1:{port}"

    def raw(self):
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(20)
        return sock

    def client(self, **options):
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options
        )


@contextmanager
def running(scheduler, prompts, **options):
    """A Running with the given scheduler and Prompter; options: of Service."""
    limits = options.pop("limits", Limits(drain_s=1.0))
    service = Service(scheduler, prompts, "demo", limits=limits, **options)
    sock = socket.create_server(("127.0.0.1", 0))
    server = make_server(service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(service, server, sock.getsockname()[1])
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
        sock.close()


def read_answer(sock):
    """(status, headers, body) of one answer on a raw socket; the body by content-length or to the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return 0, {}, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    length = headers.get("content-length")
    while length is None or len(body) < int(length):
        part = sock.recv(65536)
        if not part:
            break
        body += part
    return int(lines[0].split()[1]), headers, body


def post(path, body, extra=""):
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
    return head.encode() + data
