"""What commands that run a model say on stderr: notes, effective values, progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from mosaic_c.limits import format_size


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_values(model: Any) -> None:
    from mosaic_c import vram

    memory, stats = model.memory, model.stats()
    for item in memory.items:
        say(f"{item.name}: {format_size(item.bytes)} {item.note}".rstrip())
    if memory.tier is None:
        say(f"no GPU: {memory.no_tier}")
    else:
        for line in vram.lines(memory.tier):
            say(line)
    say(
        f"budget {format_size(memory.budget)} ({memory.reason}), context {memory.ctx}, chunks of {memory.chunk}, "
        f"{memory.threads} threads, kernels {stats.isa}, policy {stats.policy}, io {stats.io}, {stats.lanes} at once "
        f"({stats.files_direct} files direct, {stats.files_pread} pread), KV {memory.kv}"
    )
    if stats.io_tried:
        tried = ", ".join(f"{io} x{lanes} {gbs:.2f}" for io, lanes, gbs in stats.io_tried)
        say(f"io {stats.io_asked}, GB/s measured: {tried}")


class Bar:
    """A tqdm bar with the time left, on a terminal (elsewhere with --verbose), gone when the work is done. It
    appears only when that takes longer than a second."""

    def __init__(self, label: str, unit: str, model: Any, total: int | None, quiet: bool) -> None:
        self._label, self._unit, self._model, self._total = label, unit, model, total
        self._bar: Any = None
        self._quiet = quiet

    def __call__(self, done: int, of: int) -> None:
        if self._quiet:
            return
        if self._bar is None:
            from tqdm import tqdm

            total = self._total or of
            self._bar = tqdm(
                total=total, desc=self._label, unit=f" {self._unit}", delay=1.0, mininterval=0.2,
                file=sys.stderr, dynamic_ncols=True, leave=False, bar_format=(
                    "{l_bar}{bar}| {n:.0f}/{total:.0f}{unit} [{elapsed}<{remaining}{postfix}]"
                ),
            )  # fmt: skip
            self._read = self._bytes()
        self._bar.n = self._bar.total * done / of
        if self._model is not None:
            self._bar.set_postfix_str(f"{(self._bytes() - self._read) / 1e6:.0f} MB read", False)
        self._bar.update(0)

    def clear(self) -> None:
        """Makes room for a line above the bar."""
        if self._bar is not None and not self._quiet:
            self._bar.clear()

    def say(self, text: str) -> None:
        """A line of its own, above the bar if one is there."""
        self.clear()
        say(text)

    def _bytes(self) -> int:
        return 0 if self._model is None else self._model.engine.stats().bytes_read

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._quiet = True


@contextmanager
def progress_bar(
    args: argparse.Namespace, label: str, unit: str, model: Any = None, total: int | None = None
) -> Iterator[Bar]:
    terminal = sys.stderr is not None and sys.stderr.isatty()
    bar = Bar(label, unit, model, total, args.quiet or not (terminal or args.verbose))
    try:
        yield bar
    finally:
        bar.close()


def visible(text: str) -> str:
    """Text without what a terminal would obey: a model's words move no cursor."""
    return "".join(
        c if c >= " " and not "\x7f" <= c <= "\x9f" or c in "\n\t" else ascii(c)[1:-1] for c in text
    )


def written(stream: TextIO, text: str) -> None:
    """Writes a model's words at once: as they are, but for a terminal."""
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()
