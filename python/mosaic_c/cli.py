"""The command line: finds the subcommand, turns errors into one line and an exit status.

Text goes to stdout; progress, statistics and warnings to stderr. Exit status: 0 done, 1 failed, 2 wrong
usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mosaic_c
from mosaic_c import names
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import shown_path

COMMANDS = (
    "generate",
    "chat",
    "inspect",
    "plan",
    "synth",
    "convert",
    "pull",
    "simulate",
    "bench",
    "verify",
    "doctor",
    "serve",
)
PATHS = ("model", "path", "config", "src", "dst", "trace", "routing", "compare", "plot", "source", "text",
         "folder", "state_dir", "api_key_file")  # fmt: skip
# the argument of a command that is a model's folder or name, beside --model
MODELS = {"inspect": "path", "doctor": "path", "convert": "src", "plan": "config"}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mosaic_c",
        description="Runs Mixture-of-Experts language models far larger than memory.",
    )
    top.add_argument("--version", action="version", version=f"mosaic_c {mosaic_c.__version__}")
    sub = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"mosaic_c.commands.{name}").add_parser(sub)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    # A closed stream is None in Python: what would go there goes nowhere.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and goes on
    real, sys.stderr = sys.stderr, _Notes(sys.stderr)
    try:
        return _main(argv)
    finally:
        sys.stderr = real


def _main(argv: Sequence[str] | None) -> int:
    command = ""
    try:
        with _whole():
            commands = parser()
        args = commands.parse_args(argv)
        command = f" {args.command}"
        _check_paths(args)
        _find_models(args)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is left to say, also at exit.
        _forget(sys.stdout)
        return 1
    except OSError as error:
        what = "" if error.filename is None else f"{shown_path(error.filename)}: "
        print(f"mosaic_c{command}: {what}{error.strerror or error}", file=sys.stderr)
        _forget(sys.stdout)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except MosaicError as error:
        print(f"mosaic_c{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except MemoryError:
        print(f"mosaic_c{command}: out of memory; give a smaller --ram", file=sys.stderr)
        return 1


def _check_paths(args: argparse.Namespace) -> None:
    """Refuses empty paths: they come of unset variables of a shell, and Python takes them for this folder."""
    for name in PATHS:
        value = getattr(args, name, None)
        if "" in (value if isinstance(value, list) else [value]):
            raise UsageError(f"{name}: expected a file or folder, got ''")


def _find_models(args: argparse.Namespace) -> None:
    """Turns names of models into their folders; paths stay as they were given."""
    for name in ("model", MODELS.get(args.command)):
        value = getattr(args, name, None) if name else None
        if value is not None and (found := names.find(value)) != Path(value):
            setattr(args, name, str(found))


class _Notes:
    """stderr. Notes and progress are not worth the work they are about: a full disk or a closed pipe under them
    silences them and ends nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _forget(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _forget(self._stream)


@contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C waits for what is inside: numpy makes a page of advice of an import that is cut short."""
    noted: list[int] = []
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if ours:
            signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    except ValueError:  # not the main thread: no interrupts here
        ours = False
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if noted:
        raise KeyboardInterrupt


def _forget(stream: Any) -> None:
    """What is still buffered has nowhere to go: without this the interpreter complains at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass
