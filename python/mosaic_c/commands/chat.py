"""`chat`: a conversation with a model, on a terminal or by lines of stdin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosaic_c.commands.options import add_model_options, add_sampling_options, model_options
from mosaic_c.commands.report import progress_bar, say, say_values, written
from mosaic_c.errors import MosaicError
from mosaic_c.names import DEMO, demo_folder

MAX_LINE = 8 << 20  # bytes of one line of stdin; the longest context is some 4 MB of text


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "chat",
        help="talk with a model",
        description="A conversation with a model, by its own chat template. On a terminal with history, editing and "
        "a line of numbers (needs pip install '.[chat]'); elsewhere each line of stdin is a message and the answers "
        "go to stdout. /help lists the commands.",
    )
    p = parser.add_argument
    add_model_options(parser, default=DEMO)
    p("--system", metavar="TEXT", help="the system message")
    p(
        "--no-think",
        action="store_true",
        help="ask the chat template for an answer without thinking",
    )
    p(
        "-n",
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer (default: the room left)",
    )
    add_sampling_options(parser)
    p("--isa", metavar="NAME", help="kernel set (default: the best of this CPU)")
    p(
        "--verbose",
        "-v",
        action="store_true",
        help="every effective value, and what each turn reused and took",
    )
    p("--quiet", "-q", action="store_true", help="no progress bars, no note of the default model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mosaic_c.commands.chat_talk import Talk, thinking_note
    from mosaic_c.conversation import Conversation
    from mosaic_c.dialogue import Settings
    from mosaic_c.opening import open_model
    from mosaic_c.tokenizer import Tokenizer

    terminal = _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    screens = (
        _terminal() if terminal else None
    )  # before a model is opened: what it needs may be missing
    folder = Path(args.model) if args.model is not None else demo_folder()
    if args.model is None and not args.quiet:
        say(
            "no --model: the small one that comes with mosaic_c tells stories and answers questions about a text"
        )
    settings = Settings(
        args.temp, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed, args.max_new_tokens,
        False if args.no_think else None,
    )  # fmt: skip
    tokenizer = Tokenizer(folder)  # before the budget is divided, so that it is measured
    with progress_bar(args, "loading", "layers") as bar:
        model = open_model(
            folder, isa=args.isa, on_load=bar, tokenizer=tokenizer, **model_options(args)
        )
    with model, Conversation(model, args.system, settings) as conversation:
        for note in (*model.memory.warnings, *model.stats().notes()):
            say(f"note: {note}")
        for line in thinking_note(conversation):
            say(line)
        if args.verbose:
            say_values(model)
        screen: Any = screens.Terminal(args, model) if screens else Plain(args, model)
        model.on_note = lambda text: screen.note(f"note: {text}")
        name = DEMO if folder == demo_folder() else args.model
        talk = Talk(conversation, screen, name, args.verbose)
        return screens.converse(talk, screen) if screens else _lines(talk)


def _terminal() -> Any:
    try:
        import prompt_toolkit  # noqa: F401
    except ImportError:
        raise MosaicError(
            "a conversation on a terminal needs prompt_toolkit: pip install '.[chat]' (or pipe the messages in)",
            "ENOENT",
        ) from None
    from mosaic_c.commands import chat_terminal

    return chat_terminal


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


class Plain:
    """Answers to stdout; thinking, notes and progress to stderr."""

    def __init__(self, args: argparse.Namespace, model: Any) -> None:
        self._args, self._model = args, model
        self._bar: Any = None
        self._ends = {"content": "\n", "reasoning": "\n"}  # how the text so far ends

    def note(self, text: str) -> None:
        self._line("reasoning")
        if self._bar is not None:
            self._bar.say(text)
        else:
            say(text)

    def part(self, kind: str, text: str) -> None:
        written(sys.stdout if kind == "content" else sys.stderr, text)
        self._ends[kind] = text[-1]

    def end(self) -> None:
        for kind in self._ends:
            self._line(kind)

    def _line(self, kind: str) -> None:
        if self._ends[kind] != "\n":
            self.part(kind, "\n")

    @contextmanager
    def progress(self, total: int) -> Iterator[Any]:
        with progress_bar(self._args, "prompt", "tokens", self._model, total) as self._bar:
            yield self._bar
        self._bar = None


def _lines(talk: Any) -> int:
    """Answers the messages of stdin; what a message's lines are: see chat_talk."""
    for text in _messages(talk):
        if not talk.line(text):
            break
        if talk.interrupted:
            raise KeyboardInterrupt
    return 1 if talk.failed else 0


def _messages(talk: Any) -> Iterator[str]:
    from mosaic_c.commands.chat_talk import is_open

    if sys.stdin is None:
        return
    held = ""
    while data := sys.stdin.buffer.readline(MAX_LINE + 1):
        if len(data) > MAX_LINE or len(held) > MAX_LINE:
            raise MosaicError(
                f"stdin: expected a message of at most {MAX_LINE} bytes, got more", "ECONTEXT"
            )
        try:
            held += data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise MosaicError(
                f"stdin: byte {error.start} of a line is not UTF-8", "EFORMAT"
            ) from None
        line = held.rstrip("\r\n")
        if is_open(line):
            continue
        if line.endswith("\\") and not line.startswith('"""'):
            held = line[:-1] + "\n"
            continue
        held = ""
        yield line
    if held.strip():
        yield held.rstrip("\r\n")
