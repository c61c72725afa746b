"""What `chat` does with a line: a message is answered, a command obeyed. How lines come in and answers are shown is
the business of a Screen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from mosaic_c import dialogue
from mosaic_c.conversation import Conversation, Turn
from mosaic_c.dialogue import NAMES
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import show, shown_path
from mosaic_c.limits import format_size

BLOCK = '"""'  # around a message of several lines
OFF = ("default", "none")


class Screen(Protocol):
    """Where answers and notes go."""

    def note(self, text: str) -> None:
        """A line of its own."""
        ...

    def part(self, kind: str, text: str) -> None:
        """The next part of the answer."""
        ...

    def end(self) -> None:
        """The answer is complete: what follows begins a line."""
        ...

    def progress(self, total: int) -> AbstractContextManager[Any]:
        """A bar over the prompt of an answer, with close()."""
        ...


class Talk:
    """A conversation at a screen. failed: whether any line failed; interrupted: whether an answer was stopped."""

    def __init__(
        self, conversation: Conversation, screen: Screen, name: str, verbose: bool = False
    ) -> None:
        self.conversation, self.screen = conversation, screen
        self.name, self.verbose = name, verbose
        self.failed = self.interrupted = False
        self._hits: float | None = None  # of the last turn's experts, the share found in memory
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "these lines"),
            "reset": (self._reset, "forget the conversation, keep the system message"),
            "stats": (self._stats, "what the last turn reused and took, memory, speed"),
            "system": (self._system, "TEXT: set the system message (nothing: take it away)"),
            "save": (self._save, "FILE [state]: write the conversation (and the model's state)"),
            "load": (self._load, "FILE: go on with a saved conversation"),
            "undo": (self._undo, "take the last message and its answer back"),
            "retry": (self._retry, "answer the last message once more"),
            "set": (self._set, f"NAME VALUE: {', '.join(NAMES)} (VALUE default: as the model says)"),
            "quit": (self._quit, "leave, as Ctrl-D does"),
        }  # fmt: skip

    def line(self, text: str) -> bool:
        """Does what a line says; False: the user wants to leave. Errors are one line on the screen."""
        try:
            name, rest = command(text)
            # several lines are a paste, code most likely; /system alone takes a text that long
            if name != "system" and "\n" in text.strip():
                name = None
            if name in self._commands:
                self._commands[name][0](rest)
                return name != "quit"
            if name is not None:
                raise UsageError(
                    f"unknown command {show('/' + name)}: /help lists them; a message that starts with / is written //"
                )
            if text.strip():
                self._answer(self.conversation.say(unpacked(text)))
        except MosaicError as error:
            self.failed = True
            self.screen.note(str(error))
        return True

    def status(self) -> str:
        """One line of numbers."""
        c, stats = self.conversation, self.conversation.model.stats()
        parts = []
        if c.usage.answer_tokens:
            parts.append(f"{c.usage.tok_s:.1f} tok/s")
        if self._hits is not None:
            parts.append(f"hits {100 * self._hits:.0f} %")
        parts.append(f"RAM {format_size(stats.rss)} of {format_size(stats.budget)}")
        try:
            parts.append(f"context {c.left} of {c.model.ctx} left")
        except MosaicError:  # what the template will not render is said when it is asked for
            parts.append(f"context {c.model.ctx}")
        return " | ".join(parts)

    # ---- an answer ----

    def _answer(self, turn: Turn) -> None:
        c, screen = self.conversation, self.screen
        before = c.model.stats()
        with screen.progress(turn.evaluated) as bar, stopping(c):
            turn.on_progress = bar
            try:
                for kind, text in turn:
                    bar.close()
                    screen.part(kind, text)
            finally:
                bar.close()
                screen.end()
        after = c.model.stats()
        found = after.hits + after.gpu_hits - before.hits - before.gpu_hits
        touched = found + after.misses - before.misses
        self._hits = found / touched if touched else None
        self._after(turn)

    def _after(self, turn: Turn) -> None:
        c, note, usage = self.conversation, self.screen.note, turn.usage
        if turn.stopped:
            self.interrupted = True
            if usage.answer_tokens:
                note(
                    "(stopped; what was said so far stays in the conversation, /undo takes it back)"
                )
            else:
                note("(stopped before the answer began: the conversation is as it was)")
        elif turn.cut == "max_new_tokens":
            note(
                f"(cut after {usage.answer_tokens} tokens: /set max_new_tokens N for longer answers)"
            )
        elif turn.cut:
            note(
                f"(the context of {c.model.ctx} tokens is full, which cut the answer: /undo, /reset, or a larger --ctx)"
            )
        if turn.unfinished and not turn.stopped:
            off = "/set think off" if c.knows_think else "a larger /set max_new_tokens"
            note(f"(it was still thinking: {off} may help)")
        if turn.looping:
            note("(it says the same again and again: /set temperature 0.7, then /retry, may help)")
        if self.verbose:
            note(usage.line() + ("" if usage.seed is None else f", seed {usage.seed}"))

    # ---- commands ----

    def _help(self, rest: str) -> None:
        for name, (_, what) in self._commands.items():
            self.screen.note(f"/{name:<7} {what}")
        self.screen.note(
            f"{BLOCK} begins and ends a message of several lines; a \\ at its end goes on with a line"
        )
        self.screen.note("Ctrl-C stops an answer, Ctrl-D leaves")

    def _reset(self, rest: str) -> None:
        self.conversation.reset()
        self.screen.note("(the conversation is empty)")

    def _stats(self, rest: str) -> None:
        c = self.conversation
        if c.usage.prompt_tokens:
            self.screen.note(f"turn     {c.usage.line()}")
        self.screen.note(
            f"context  {c.used} tokens of the conversation, {c.left} of {c.model.ctx} left"
        )
        for line in c.model.stats().lines():
            self.screen.note(line)

    def _system(self, rest: str) -> None:
        self.conversation.system(rest)
        self.screen.note("(the system message is set)" if rest else "(no system message)")

    def _save(self, rest: str) -> None:
        words = rest.rsplit(maxsplit=1)
        state = len(words) == 2 and words[1] == "state"
        path = os.path.expanduser(words[0] if state else rest)
        if not path:
            raise UsageError("/save: expected a file: /save FILE [state]")
        c = self.conversation
        dialogue.write(path, self.name, c.messages, c.settings)
        beside = ""
        if state and c.save_state(_state(path)):
            beside = f", and the state in {shown_path(_state(path))}"
        self.screen.note(f"({len(c.messages)} messages in {shown_path(path)}{beside})")

    def _load(self, rest: str) -> None:
        path = os.path.expanduser(rest)
        if not path:
            raise UsageError("/load: expected a file: /load FILE")
        model, messages, settings = dialogue.read(path)
        c = self.conversation
        c.check(settings)
        c.load(messages)
        c.set(**{name: getattr(settings, name) for name in NAMES})
        self.screen.note(f"({len(messages)} messages of {shown_path(path)})")
        if model != self.name:
            self.screen.note(f"note: they are of a conversation with {show(model)}")
        if _state(path).is_file():
            try:
                self.screen.note(f"(state of {c.load_state(_state(path))} tokens)")
            except MosaicError as error:
                self.screen.note(
                    f"note: its state is not used, the next turn reads everything: {error}"
                )

    def _undo(self, rest: str) -> None:
        self.screen.note(f"(taken back: {show(self.conversation.undo())})")

    def _retry(self, rest: str) -> None:
        c = self.conversation
        turn = c.retry()
        if turn.sampling.greedy:
            self.screen.note(
                "note: the answer is greedy, so it is the same again; /set temperature 0.8 for another"
            )
        self._answer(turn)

    def _set(self, rest: str) -> None:
        c = self.conversation
        name, _, value = rest.partition(" ")
        if not name:
            given = {n: getattr(c.settings, n) for n in NAMES}
            for n, v in given.items():
                self.screen.note(f"{n:<18} {'default' if v is None else show(v)}")
            return
        if name not in NAMES:
            raise UsageError(
                f"/set: unknown setting {show(name)}: expected one of {', '.join(NAMES)}"
            )
        c.set(**{name: setting(name, value.strip())})
        if name == "think":
            for line in thinking_note(c):
                self.screen.note(line)

    def _quit(self, rest: str) -> None:
        pass


def setting(name: str, text: str) -> float | int | bool | None:
    """The value of a setting as a user writes it."""
    if text.lower() in OFF:
        return None
    if name == "think":
        known = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
        if text.lower() not in known:
            raise UsageError(f"/set think: expected on, off or default, got {show(text)}")
        return known[text.lower()]
    whole = name in dialogue.INTEGERS
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "an integer" if whole else "a number"
        raise UsageError(f"/set {name}: expected {kind} or default, got {show(text)}") from None


def thinking_note(c: Conversation) -> Iterator[str]:
    """What to say where thinking was switched and the template has no switch."""
    if c.settings.think is not None and not c.knows_think:
        has = c.markers.end is not None
        then = "the model decides" if has else "the model has no thinking"
        yield f"note: the chat template knows no switch for thinking: {then}"


def command(text: str) -> tuple[str | None, str]:
    """(name, rest) of a line that is a command; None for a message."""
    if not text.startswith("/") or text.startswith("//"):
        return None, text
    parts = text[1:].split(maxsplit=1)
    return (parts or [""])[0], parts[1].strip() if len(parts) > 1 else ""


def unpacked(text: str) -> str:
    """A message without what made it one: the block's quotes, the first of two slashes."""
    if text.startswith("//") and "\n" not in text:
        return text[1:]
    inner = text.strip()
    if inner.startswith(BLOCK):
        inner = inner[len(BLOCK) :].removesuffix(BLOCK)
        return inner.strip("\n")
    return text


def is_open(text: str) -> bool:
    """Whether text is a block that has not ended."""
    inner = text.strip()
    return inner.startswith(BLOCK) and not (len(inner) >= 6 and inner.endswith(BLOCK))


@contextmanager
def stopping(c: Conversation) -> Iterator[None]:
    """Ctrl-C inside stops the answer between two layers, in place of an exception anywhere."""
    try:
        before = signal.signal(signal.SIGINT, lambda number, frame: c.stop())
    except ValueError:  # not the main thread: nothing to catch
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _state(path: str) -> Path:
    return Path(f"{path}.state")
