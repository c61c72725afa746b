"""Routing traces: which experts each MoE layer chose for each token, as text.

    # n_layer=8                    header lines: "#", then key=value (or a remark)
    # n_expert=256
    # n_expert_used=6              optional: every line then has exactly so many experts
    phase,step,layer,experts       optional column line
    decode,0,3,9 3 0 1 117 30      one line per token step and MoE layer, best expert first

The reader takes nothing on trust: every error names file, line, what was expected and what was
found. The writer serves `generate --trace`; what it writes the reader accepts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import shown_path

PHASES = ("prefill", "decode")
COLUMNS = "phase,step,layer,experts"
# A trace describes a real model; more than this is a damaged header, not a bigger machine.
_MAX_DIM = 1 << 20
_MAX_LINE = 1 << 20  # characters; a file that is no trace may be one endless line
_HEADER = re.compile(r"#\s*([A-Za-z_]\w*)=(.*)", re.ASCII)
# Eighteen digits fit an int64; isdigit() alone would let other scripts' digits through.
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Trace:
    """A trace in arrays. Line i chose ids[start[i] : start[i + 1]].

    phase (n_line,) indexes PHASES; step and token (n_line,) int64: step as written, token counting
    from 0 and stepping where phase or step changes; layer (n_line,) int32; start (n_line + 1,)
    int64; ids int32. n_expert_used is None where the header does not say.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int | None
    header: dict[str, str]
    phase: np.ndarray
    step: np.ndarray
    token: np.ndarray
    layer: np.ndarray
    start: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.layer)

    def select(self, phase: str) -> Trace:
        """The lines of one phase ("prefill" or "decode"), or all of them ("all")."""
        if phase == "all":
            return self
        if phase not in PHASES:
            raise UsageError(f"unknown phase {phase!r}: expected prefill, decode or all")
        keep = self.phase == PHASES.index(phase)
        counts = np.diff(self.start)
        return Trace(
            self.n_layer,
            self.n_expert,
            self.n_expert_used,
            self.header,
            self.phase[keep],
            self.step[keep],
            self.token[keep],
            self.layer[keep],
            _starts(counts[keep]),
            self.ids[np.repeat(keep, counts)],
        )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).astype(np.int64)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace; MosaicError "FILE:LINE: ..." for anything that breaks the format."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return _Reader(os.fspath(path)).read(file)
    except UnicodeDecodeError as error:
        raise MosaicError(f"{os.fspath(path)}: not UTF-8 text: {error}", "EFORMAT") from None
    except OSError as error:
        raise MosaicError(f"{shown_path(path)}: cannot read: {error.strerror}", "EIO") from None


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 0
        self.header: dict[str, str] = {}

    def fail(self, message: str, line: int | None = None) -> MosaicError:
        return MosaicError(f"{self.path}:{line or self.line}: {message}", "EFORMAT")

    def number(self, text: str, what: str, end: int | None = None) -> int:
        if not _NUMBER.fullmatch(text):
            raise self.fail(f"expected a whole number as {what}, got {text[:40]!r}")
        value = int(text)
        if end is not None and value >= end:
            raise self.fail(f"{what} {value} is out of range: expected 0 to {end - 1}")
        return value

    def dim(self, key: str, required: bool) -> int | None:
        if key not in self.header:
            if required:
                raise self.fail(f"no header line '#{key}=...' before the first data line")
            return None
        value = self.number(self.header[key], key, _MAX_DIM + 1)
        if value < 1:
            raise self.fail(f"{key} must be at least 1, got {value}")
        return value

    def read(self, file: TextIO) -> Trace:
        dims: tuple[int, int, int | None] | None = None
        phases, steps, layers, counts, ids, lines = [], [], [], [], [], []
        while raw := file.readline(_MAX_LINE):
            self.line += 1
            if len(raw) == _MAX_LINE:
                raise self.fail(
                    f"expected a line of less than {_MAX_LINE} characters, got a longer one"
                )
            text = raw.rstrip("\r\n")
            if text.startswith("#"):
                self.header_line(text, dims is not None)
                continue
            if text == COLUMNS and dims is None:
                continue
            if dims is None:
                dims = self.dims()
            phase, step, layer, experts = self.data_line(text, dims)
            phases.append(phase)
            steps.append(step)
            layers.append(layer)
            counts.append(len(experts))
            ids.extend(experts)
            lines.append(self.line)
        if dims is None:
            raise self.fail("no data lines: expected 'phase,step,layer,experts'", self.line or 1)
        phase_a, step_a = np.array(phases, np.uint8), np.array(steps, np.int64)
        layer_a = np.array(layers, np.int32)
        self.check_unique(phase_a, step_a, layer_a, lines)
        change = (np.diff(step_a) != 0) | (np.diff(phase_a.astype(np.int8)) != 0)
        return Trace(
            *dims,
            self.header,
            phase_a,
            step_a,
            _starts(change),
            layer_a,
            _starts(np.array(counts, np.int64)),
            np.array(ids, np.int32),
        )

    def header_line(self, text: str, after_data: bool) -> None:
        match = _HEADER.fullmatch(text)
        if match is None:
            return  # a remark
        key, value = match[1], match[2].strip()
        if after_data or key in self.header:
            why = "after the data" if after_data else "a second time"
            raise self.fail(f"header '{key}=' {why}: expected once, before the first data line")
        self.header[key] = value

    def dims(self) -> tuple[int, int, int | None]:
        n_layer = self.dim("n_layer", True)
        n_expert = self.dim("n_expert", True)
        used = self.dim("n_expert_used", False)
        assert n_layer is not None and n_expert is not None
        if used is not None and used > n_expert:
            raise self.fail(f"n_expert_used {used} is larger than n_expert {n_expert}")
        return n_layer, n_expert, used

    def data_line(
        self, text: str, dims: tuple[int, int, int | None]
    ) -> tuple[int, int, int, list[int]]:
        n_layer, n_expert, used = dims
        fields = text.split(",")
        if len(fields) != 4:
            raise self.fail(f"expected 4 fields, 'phase,step,layer,experts', got {text[:60]!r}")
        if fields[0] not in PHASES:
            raise self.fail(f"expected phase 'prefill' or 'decode', got {fields[0][:40]!r}")
        step = self.number(fields[1], "step")
        layer = self.number(fields[2], "layer", n_layer)
        experts = [self.number(x, "expert", n_expert) for x in fields[3].split()]
        if len(set(experts)) != len(experts):
            twice = next(x for i, x in enumerate(experts) if x in experts[:i])
            raise self.fail(f"expert {twice} twice in one line")
        if not experts or (used is not None and len(experts) != used):
            want = f"{used} experts" if used else "at least one expert"
            raise self.fail(f"expected {want}, got {len(experts)}")
        return PHASES.index(fields[0]), step, layer, experts

    def check_unique(
        self, phase: np.ndarray, step: np.ndarray, layer: np.ndarray, lines: list[int]
    ) -> None:
        """One line per token step and layer: a second one is a trace written twice."""
        order = np.lexsort((layer, step, phase))
        same = np.ones(max(len(order) - 1, 0), bool)
        for column in (phase, step, layer):
            same &= column[order][1:] == column[order][:-1]
        if not same.any():
            return
        # lexsort is stable, so the later of two equal lines comes second.
        i = int(order[1:][same].min())
        raise self.fail(
            f"a second line for {PHASES[phase[i]]} step {step[i]}, layer {layer[i]}", lines[i]
        )


class TraceWriter:
    """Writes a trace line by line; flushed and checked by close(). Usable as a context manager.

    MosaicError when the file cannot be written, ValueError for lines the reader would refuse (those
    are programming errors).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_layer: int,
        n_expert: int,
        n_expert_used: int,
        header: dict[str, str] | None = None,
    ) -> None:
        if not 1 <= n_expert_used <= n_expert or n_layer < 1:
            raise ValueError(f"{n_layer} layers, {n_expert_used} of {n_expert} experts")
        self.path = os.fspath(path)
        self.shape = (n_layer, n_expert, n_expert_used)
        try:
            self._file: TextIO | None = open(self.path, "w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise self._failed(error) from None
        keys = {"n_layer": n_layer, "n_expert": n_expert, "n_expert_used": n_expert_used}
        self._write("# routing trace: one line per (token step, MoE layer), best expert first\n")
        for key, value in (keys | (header or {})).items():
            self._write(f"# {key}={' '.join(str(value).split())}\n")
        self._write(COLUMNS + "\n")

    def add(self, phase: str, step: int, layer: int, experts: Iterable[int]) -> None:
        """One line: the experts, best first, that `layer` chose at `step` of `phase`."""
        n_layer, n_expert, used = self.shape
        ids = [int(x) for x in experts]
        fits = len(ids) == used == len(set(ids)) and min(ids) >= 0 and max(ids) < n_expert
        if phase not in PHASES or step < 0 or not 0 <= layer < n_layer or not fits:
            raise ValueError(f"bad trace line: {phase!r}, step {step}, layer {layer}, {ids}")
        self._write(f"{phase},{step},{layer},{' '.join(map(str, ids))}\n")

    def close(self) -> None:
        """Flushes; MosaicError when the disk refused part of it. Closing twice does nothing."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                raise self._failed(error) from None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _failed(self, error: OSError) -> MosaicError:
        return MosaicError(f"{self.path}: cannot write the trace: {error.strerror}", "EIO")

    def _write(self, text: str) -> None:
        if self._file is None:
            raise ValueError("the trace is closed")
        try:
            self._file.write(text)
        except OSError as error:
            raise self._failed(error) from None
