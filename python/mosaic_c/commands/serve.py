"""`serve`: an HTTP server in the protocol of OpenAI's chat and completion endpoints."""

from __future__ import annotations

import argparse
import re
import signal
import socket
from pathlib import Path
from typing import Any

from mosaic_c.commands.options import add_model_options, model_options
from mosaic_c.commands.report import progress_bar, say
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import format_size, parse_size
from mosaic_c.names import DEMO, demo_folder

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# One part in so many of the budget is for kept states. Not measured: it is taken from the expert cache, whose misses
# cost every token a little, while a state that is missing costs one request its whole prompt.
STATE_SHARE = 8
SAVE_S = 30.0  # at the end, for kept states to reach their files: as long as many a service manager waits


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "serve",
        help="answer HTTP requests as OpenAI's API does",
        description="Serves one model to the clients of OpenAI's API: /v1/chat/completions, /v1/completions, "
        "/v1/models, and /health and /metrics. Ctrl-C or SIGTERM ends it; running answers get --drain seconds.",
    )
    p = parser.add_argument
    add_model_options(parser, default=DEMO)
    p("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: %(default)s, this machine "
      "alone)")  # fmt: skip
    p(
        "--port",
        type=int,
        default=8080,
        metavar="N",
        help="port, 0: a free one (default: %(default)s)",
    )
    p(
        "--api-key",
        metavar="KEY",
        help="what clients must send as Authorization: Bearer KEY (default: none needed); other users of the machine "
        "can read it in the list of processes",
    )
    p("--api-key-file", metavar="FILE", help="the same, from the first line of a file")
    p("--name", metavar="NAME", help="the model's id for clients (default: that of its folder)")
    p("--parallel", type=int, default=4, metavar="N", help="answers at once, each with a whole context (default: "
      "%(default)s)")  # fmt: skip
    p(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; more get 429 (default: %(default)s)",
    )
    p("--state-dir", metavar="DIR", help="keep states of conversations there, also over a restart; they hold what was "
      "said (default: in memory alone)")  # fmt: skip
    p(
        "--state-ram",
        metavar="SIZE",
        help=f"memory for kept states (default: 1/{STATE_SHARE} of the budget)",
    )
    p("--state-disk", default="8G", metavar="SIZE", help="of all files in --state-dir; the states used longest ago go "
      "(default: %(default)s)")  # fmt: skip
    p("--cors", action="append", default=[], metavar="ORIGIN", help="web pages that may ask, such as "
      "http://localhost:3000, or * for all; may be repeated (default: none)")  # fmt: skip
    p("--max-body", default="4M", metavar="SIZE", help="of a request (default: %(default)s)")
    p("--keep-alive", type=float, default=15.0, metavar="SECONDS", help="a comment in streams that are silent so long, "
      "0: never (default: %(default)s)")  # fmt: skip
    p("--drain", type=float, default=10.0, metavar="SECONDS", help="for running answers at the end (default: "
      "%(default)s)")  # fmt: skip
    p("--isa", metavar="NAME", help="kernel set (default: the best of this CPU)")
    p("--verbose", "-v", action="store_true", help="every effective value on stderr")
    p(
        "--quiet",
        "-q",
        action="store_true",
        help="no progress, no notes of what is usual; the line that says where it listens stays",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    limits = _checked(args)
    args.api_key = _key(args)
    try:
        import llguidance  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MosaicError(
            f"serve needs packages that are not installed ({error.name}): pip install '.[serve]'",
            "ENOENT",
        ) from None
    from mosaic_c.scheduler import Scheduler
    from mosaic_c.server.app import Service
    from mosaic_c.server.listen import make_server
    from mosaic_c.server.wire import Limits
    from mosaic_c.states import States

    folder = Path(args.model) if args.model is not None else demo_folder()
    if not (folder / "tokenizer.json").is_file():
        raise MosaicError(f"{folder}: no tokenizer.json, so no text: a server needs one", "ENOENT")
    listening = _bind(args.host, args.port)
    with listening:
        # Before the budget is divided, so that what they take is measured.
        tokenizer, grammars = _text(folder)
        with _open(args, folder, tokenizer) as model:
            budget = (
                model.memory.budget // STATE_SHARE
                if args.state_ram is None
                else limits["state_ram"]
            )
            folder_of = None if args.state_dir is None else Path(args.state_dir)
            states = States(model, budget, folder_of, limits["state_disk"])
            scheduler = Scheduler(model, states, most=args.parallel, queue=args.queue)
            try:
                service = Service(
                    scheduler,
                    _prompter(model, grammars),
                    args.name or model_name(folder),
                    fingerprint=f"fp_{model.fingerprint().hex()[:12]}",
                    api_key=args.api_key,
                    origins=tuple(args.cors),
                    limits=Limits(
                        body=limits["max_body"], ping_s=args.keep_alive, drain_s=args.drain
                    ),
                )
                server = make_server(
                    service,
                    args.host,
                    args.port,
                    lambda: _tell(args, service, model, listening, grammars),
                )
                server.run([listening])
            finally:
                scheduler.close()
                if args.state_dir is None:
                    states.clear()
                else:
                    states.close(SAVE_S)
    if server.signal == signal.SIGINT:
        say("interrupted")
        return 130
    return 0


def _checked(args: argparse.Namespace) -> dict[str, int]:
    """Values that would only fail after the model is loaded."""
    for name, low, high in (("port", 0, 65535), ("parallel", 1, 1024), ("queue", 0, 100_000)):
        value = getattr(args, name)
        if not low <= value <= high:
            raise UsageError(f"--{name}: expected {low} to {high}, got {value}")
    for name in ("keep_alive", "drain"):
        value = getattr(args, name)
        if not 0 <= value <= 86400:
            raise UsageError(
                f"--{name.replace('_', '-')}: expected 0 to 86400 seconds, got {value}"
            )
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+|null", origin):
            raise UsageError(
                f"--cors: expected an origin such as http://localhost:3000, or *, got {origin!r}"
            )
    sizes = {"max_body": parse_size(args.max_body, "max-body")}
    if sizes["max_body"] < 1024:
        raise UsageError(f"--max-body: expected at least 1K, got {args.max_body}")
    sizes["state_disk"] = parse_size(args.state_disk, "state-disk")
    if args.state_ram is not None:
        sizes["state_ram"] = parse_size(args.state_ram, "state-ram")
    return sizes


def _key(args: argparse.Namespace) -> str | None:
    """The key that clients must send, from wherever it was given."""
    key, option = args.api_key, "--api-key"
    if args.api_key_file is not None:
        if key is not None:
            raise UsageError("give --api-key or --api-key-file, not both")
        option = f"--api-key-file {args.api_key_file}"
        try:
            with open(args.api_key_file, "rb") as file:
                key = file.readline(4096).decode("latin-1").strip()
        except OSError as error:
            raise MosaicError(f"{option}: {error.strerror}", "EIO") from None
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UsageError(
            f"{option}: expected printable ASCII without spaces, at least one character"
        )
    return key


def _bind(host: str, port: int) -> socket.socket:
    """The port, taken before the model is loaded; nobody can connect before it is."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise MosaicError(
            f"--host {host}: {getattr(error, 'strerror', None) or error}", "EIO"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise MosaicError(
            f"cannot listen on {host} port {port}: {error.strerror}; another --port may be free",
            "EIO",
        ) from None
    return sock


def _text(folder: Path) -> tuple[Any, Any]:
    """(tokenizer, grammars); in place of grammars the error that says why there are none."""
    from mosaic_c.checkpoint import Checkpoint
    from mosaic_c.generation import stop_ids
    from mosaic_c.server.grammar import Grammars
    from mosaic_c.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder)
    checkpoint = Checkpoint.open(folder)
    stops = stop_ids(checkpoint.generation_config, checkpoint.config, tokenizer)
    try:
        return tokenizer, Grammars((folder / "tokenizer.json").read_text(encoding="utf-8"), stops)
    except MosaicError as error:
        return tokenizer, error


def _open(args: argparse.Namespace, folder: Path, tokenizer: Any) -> Any:
    from mosaic_c.opening import open_model

    with progress_bar(args, "loading", "layers") as bar:
        model = open_model(
            folder,
            isa=args.isa,
            on_load=bar,
            tokenizer=tokenizer,
            sessions=args.parallel,
            waiting=args.queue,
            **model_options(args),
        )
    for note in model.memory.warnings:
        say(f"note: {note}")
    for note in () if args.quiet else model.stats().notes():
        say(f"note: {note}")
    model.on_note = lambda note: say(f"note: {note}")
    return model


def _prompter(model: Any, grammars: Any) -> Any:
    from mosaic_c.server.prompts import Prompter

    if not isinstance(grammars, MosaicError):
        grammars.fit(model.vocab)

    def get() -> Any:
        if isinstance(grammars, MosaicError):
            raise grammars
        return grammars

    return Prompter(
        model.tokenizer, room=model.ctx, vocab=model.vocab, config=model.config,
        generation_config=model.generation_config, grammars=get,
    )  # fmt: skip


def model_name(folder: Path) -> str:
    """What clients call a model: its folder's name, ORG/NAME for a snapshot of the Hugging Face cache."""
    parts = folder.resolve().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name or "model"


def _tell(
    args: argparse.Namespace, service: Any, model: Any, sock: socket.socket, grammars: Any
) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if args.host not in LOOPBACK and args.api_key is None:
        say(
            f"note: {args.host} may be reached by others and no key is needed: give one by --api-key-file"
        )
    if isinstance(grammars, MosaicError):
        say(f"note: no tools and no response_format: {grammars}")
    for name in () if args.quiet else service.prompter.unused:
        say(f"note: {name} has no effect here")
    if args.verbose:
        say(
            f"budget {format_size(model.memory.budget)} ({model.memory.reason}), {args.parallel} at once, {args.queue} "
            f"may wait, bodies of {format_size(service.limits.body)}, kept states "
            f"{format_size(service.scheduler.states.byte_budget)}, {model.memory.threads} threads"
        )
    say(f"serving {service.name} (context {model.ctx}) at http://{shown}:{port}/v1")
