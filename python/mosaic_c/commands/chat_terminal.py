"""`chat` on a terminal: editing, history, pasting and a line of numbers by prompt_toolkit.

Enter sends, Alt-Enter begins a line; so does Enter inside a block of triple quotes or behind a backslash. A paste is
one message, whatever lines it has. While an answer streams the terminal is the plain one, and Ctrl-C stops it.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.utils import is_dumb_terminal

from mosaic_c.commands.chat_talk import Talk, is_open
from mosaic_c.commands.report import progress_bar, visible
from mosaic_c.jsonfile import reason, shown_path
from mosaic_c.names import state_folder

DIM, BRIGHT = "\x1b[2m", "\x1b[0m"
LEAVE = "(Ctrl-D or /quit leaves)"


class Terminal:
    """Shows answers, with thinking dimmed, and notes."""

    def __init__(self, args: argparse.Namespace, model: Any) -> None:
        self._args, self._model = args, model
        self._bar: Any = None
        self._marks = not is_dumb_terminal()
        self._kind = "content"
        self._end = "\n"  # the last character shown

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        self._line()
        self._write(self._dim(text) + "\n")

    def part(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._line()
            self._kind = kind
        text = visible(text)
        self._write(self._dim(text) if kind == "reasoning" else text)
        self._end = text[-1:] or self._end

    def end(self) -> None:
        self._line()
        self._kind = "content"

    def _line(self) -> None:
        if self._end != "\n":
            self._write("\n")
        self._end = "\n"

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{BRIGHT}" if self._marks else text

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    @contextmanager
    def progress(self, total: int) -> Iterator[Any]:
        with progress_bar(self._args, "prompt", "tokens", self._model, total) as self._bar:
            yield self._bar
        self._bar = None


def converse(talk: Talk, screen: Terminal) -> int:
    """Reads lines until the user leaves."""
    session = prompt(_history(screen))
    screen.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        numbers = " " + talk.status()  # once: they change only by an answer
        try:
            text = session.prompt(bottom_toolbar=numbers)
        except KeyboardInterrupt:
            screen.note(LEAVE)
            continue
        except EOFError:
            return 0
        try:
            if not talk.line(text):
                return 0
        except KeyboardInterrupt:
            screen.end()
            screen.note("(interrupted)")


def prompt(history: History, **streams: Any) -> PromptSession[str]:
    """The line editor. streams: input and output in place of the terminal's."""
    return PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
        history=history,
        reserve_space_for_menu=0,
        **streams,
    )


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        text = buffer.text
        if is_open(text):
            buffer.insert_text("\n")
        elif text.endswith("\\") and buffer.cursor_position == len(text):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


def _history(screen: Terminal) -> History:
    """What was typed before, kept in a file for this user alone."""
    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError(errno.EINVAL, "expected a file")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except OSError as error:
        screen.note(f"note: no history: {shown_path(path)}: {reason(error)}")
        return InMemoryHistory()
    return _Kept(str(path), screen)


class _Kept(FileHistory):
    """A history whose disk may be full: told once, and kept in memory from then on."""

    def __init__(self, path: str, screen: Terminal) -> None:
        super().__init__(path)
        self._screen, self._failed = screen, False

    def store_string(self, string: str) -> None:
        if self._failed:
            return
        try:
            super().store_string(string)
        except OSError as error:
            self._failed = True
            self._screen.note(f"note: history is no longer kept: {reason(error)}")
