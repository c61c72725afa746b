"""A checkpoint as the source of an expert pack: its experts as matrices, its other tensors as bytes, its hash.

Reads leave no pages behind: a source is larger than memory. All methods may be called from several threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mosaic_c.bind import BLOCK, CODE_NAMES, F8, SCALE_DTYPES, matrix_bytes, scale_bytes
from mosaic_c.checkpoint import INDEX, SINGLE, Checkpoint, TensorTable
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import open_regular, parse, read_exact, show, shown_path
from mosaic_c.origin import CHUNK, folder_hash
from mosaic_c.pack_format import Format
from mosaic_c.pack_tensors import SCALE, Stored
from mosaic_c.quantise import Unfit, quantise, spread, widen

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


_SLAB = 1 << 19  # values of a matrix that are converted at once, but whole blocks of rows


@dataclass(frozen=True)
class Piece:
    """A tensor of the source's file. stored: what it is in the pack, None: the scale of another, whose entry covers
    it. turned: it becomes that, followed by its scales; else it is copied."""

    name: str
    dtype: str
    offset: int
    source_bytes: int
    stored: Stored | None
    turned: bool = False

    @property
    def nbytes(self) -> int:
        """In the pack, the scales that follow too."""
        return self.stored.nbytes if self.turned and self.stored else self.source_bytes


@dataclass(frozen=True)
class Shard:
    """A safetensors file to be written: its header, and what follows, of one file of the source."""

    file: int
    name: str
    header: bytes
    pieces: list[Piece]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(x.nbytes for x in self.pieces)

    @property
    def tensors(self) -> Iterator[str]:
        for x in self.pieces:
            yield x.name
            if x.turned and x.stored and x.stored.scale_header:
                yield x.name + SCALE


def stored_in(table: TensorTable, name: str) -> Stored:
    """How a checkpoint has a tensor: a matrix of FP8 with the scales beside it, or as its header says."""
    info, scale = table[name], table.get(name + SCALE)
    if info.dtype == "F8_E4M3" and scale is not None and len(info.shape) == 2:
        found = Stored(Format(info.dtype, scale.dtype, (BLOCK, BLOCK)), info.shape)
        if scale.dtype in SCALE_DTYPES and found.scale_header == (scale.dtype, scale.shape):
            return found
    return Stored(Format(info.dtype), info.shape)


def _identity(path: str) -> tuple[int, ...]:
    try:
        st = os.stat(path)
    except OSError:
        return ()
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns


class Source:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        config = _identity(os.path.join(os.path.abspath(path), "config.json"))
        self.checkpoint = Checkpoint.open(path)
        self.folder = self.checkpoint.folder
        if self.checkpoint.pack is not None:
            raise UsageError(
                f"{shown_path(self.folder)}: an expert pack already ({self.checkpoint.pack.format}); convert from "
                "the checkpoint that it was made of"
            )
        located = self.checkpoint.locate()  # refuses tensors that nobody knows
        self.plan, self.experts = located.plan, located.experts
        if not self.experts:
            raise UsageError(
                f"{shown_path(self.folder)}: this model has no routed experts to convert"
            )
        self._seen = {path: _identity(path) for path in map(str, self.checkpoint.files)}
        self._seen[str(self.folder / "config.json")] = config
        self._fds = [open_regular(path)[0] for path in self.checkpoint.files]
        for fd in self._fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_unchanged(self) -> None:
        """Refuses a source whose files are no longer those that were opened: its hash would be of other bytes."""
        for path, seen in self._seen.items():
            if _identity(path) != seen:
                raise MosaicError(
                    f"{shown_path(path)}: changed while it was being converted; wait until it is complete and convert "
                    "again", "ESTALE",
                )  # fmt: skip

    # ---- experts -----------------------------------------------------------------------------

    def stored(self, layer: int, expert: int, part: int) -> tuple[str, np.ndarray, str, np.ndarray]:
        """(dtype, its bytes, dtype of the scales or "", their bytes) of a matrix."""
        t = self.experts[layer][expert][part]
        raw = self._read(int(t["file"]), int(t["offset"]), int(matrix_bytes(t)))
        if t["scale_file"] < 0:
            return CODE_NAMES[t["dtype"]], raw, "", raw[:0]
        scales = self._read(int(t["scale_file"]), int(t["scale_offset"]), int(scale_bytes(t)))
        return CODE_NAMES[t["dtype"]], raw, CODE_NAMES[t["scale_dtype"]], scales

    def values(self, layer: int, expert: int, part: int) -> np.ndarray:
        """A matrix (rows, cols) as float32; FP8 times its scales."""
        t = self.experts[layer][expert][part]
        rows, cols = int(t["rows"]), int(t["cols"])
        dtype, raw, kind, scales = self.stored(layer, expert, part)
        w = widen(raw, dtype).reshape(rows, cols)
        if not kind:
            return w
        block = int(t["block_rows"]), int(t["block_cols"])
        each = widen(scales, kind).reshape(-(-rows // block[0]), -1)
        return w * spread(each, block, rows, cols)

    def expert_bytes(self, layer: int) -> int:
        """Of all experts of a layer, scales too."""
        e = self.experts[layer]
        return int(matrix_bytes(e).sum() + scale_bytes(e).sum())

    def is_fp8(self, layer: int, part: int) -> bool:
        """All experts of a layer have this matrix in FP8, with scales of one dtype."""
        t = self.experts[layer][:, part]
        return bool((t["dtype"] == F8).all() and (t["scale_dtype"] == t["scale_dtype"][0]).all())

    def scale_dtype(self, layer: int, part: int) -> str:
        return CODE_NAMES[self.experts[layer][0, part]["scale_dtype"]]

    def _read(self, file: int, offset: int, count: int) -> np.ndarray:
        fd = self._fds[file]
        raw = read_exact(fd, count, offset, self.checkpoint.files[file])
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(raw, np.uint8)

    # ---- everything else ---------------------------------------------------------------------

    def shards(self, dense: Format | None = None) -> list[Shard]:
        """The source's files without the experts; a file of experts alone is left out. dense: the matrices of the
        layers (ModelPlan.matrices) become this."""
        table, gone = self.checkpoint.tensors, set(self._expert_names())
        wanted = {w.name for w in self.plan.matrices()} if dense else set()
        members: dict[int, list[Piece]] = {}
        for name, info in table.items():
            if name in gone:
                continue
            base = name.removesuffix(SCALE)
            scale = base != name and base in table and stored_in(table, base).form.scale is not None
            target = base if scale else name
            stored = stored_in(table, target)
            turned = target in wanted and dense is not None and dense.dtype != stored.form.dtype
            if scale and turned:
                continue
            if turned:
                assert dense is not None
                stored = Stored(dense, info.shape)
            piece = Piece(
                name, info.dtype, info.offset, info.nbytes, None if scale else stored, turned
            )
            members.setdefault(info.file, []).append(piece)
        return [self._shard(file, members[file]) for file in sorted(members)]

    def _shard(self, file: int, pieces: list[Piece]) -> Shard:
        entries, at = dict[str, object](), 0
        if metadata := self._metadata(file):
            entries["__metadata__"] = metadata

        def add(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
            nonlocal at
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size

        pieces.sort(key=lambda x: x.offset)
        for x in pieces:
            if not x.turned or x.stored is None:
                add(x.name, x.dtype, self.checkpoint.tensors[x.name].shape, x.nbytes)
                continue
            scales = x.stored.form.scale_nbytes(*x.stored.shape)
            add(x.name, *x.stored.header, x.nbytes - scales)
            if x.stored.scale_header:
                add(x.name + SCALE, *x.stored.scale_header, scales)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return Shard(file, self.checkpoint.names[file], header, pieces)

    def contents(self, file: int, x: Piece) -> Iterator[bytes | memoryview]:
        """The bytes of a piece as the pack has them, those of the embedding in whole rows. Raises MosaicError for
        values that its format cannot hold."""
        if not x.turned or x.stored is None:
            line = x.source_bytes // self.plan.vocab if x.name == self.plan.embed.name else 1
            yield from (memoryview(c) for c in self.chunks(file, x.offset, x.source_bytes, line))
            return
        scales = []
        for w in self.slabs(x):
            try:
                codes, scale = quantise(w, x.stored.form)
            except Unfit as error:
                where = shown_path(self.checkpoint.files[file])
                raise MosaicError(
                    f"{where}: tensor {show(x.name)}: {error}; {x.stored.form.name} cannot hold it", error.code
                ) from None  # fmt: skip
            scales.append(scale)
            yield codes
        yield b"".join(scales)

    def scales_of(self, x: Piece) -> Iterator[memoryview]:
        """The bytes of the scales of a matrix that is copied: they lie elsewhere."""
        if not x.turned and x.stored is not None and x.stored.form.scale is not None:
            info = self.checkpoint.tensors[x.name + SCALE]
            yield from (memoryview(c) for c in self.chunks(info.file, info.offset, info.nbytes))

    def slabs(self, x: Piece) -> Iterator[np.ndarray]:
        """The rows of a matrix as float32, whole blocks of rows at a time; FP8 times its scales."""
        info, stored = self.checkpoint.tensors[x.name], stored_in(self.checkpoint.tensors, x.name)
        (rows, cols), scales = stored.shape, None
        if stored.scale_header is not None:
            s = self.checkpoint.tensors[x.name + SCALE]
            scales = widen(self._read(s.file, s.offset, s.nbytes), s.dtype).reshape(s.shape)
        line, slab = x.source_bytes // rows, max(_SLAB // cols // BLOCK, 1) * BLOCK
        for row in range(0, rows, slab):
            n = min(slab, rows - row)
            raw = self._read(info.file, x.offset + row * line, n * line)
            w = widen(raw, x.dtype).reshape(n, cols)
            if scales is not None:
                w = w * spread(scales[row // BLOCK :][: -(-n // BLOCK)], (BLOCK, BLOCK), n, cols)
            yield w

    def chunks(self, file: int, offset: int, count: int, unit: int = 1) -> Iterator[np.ndarray]:
        """A range of a file, in multiples of `unit`."""
        while count:
            n = min(max(CHUNK // unit, 1) * unit, count)
            yield self._read(file, offset, n)
            offset, count = offset + n, count - n

    @property
    def indexed(self) -> bool:
        return self.checkpoint.names != [SINGLE] or os.path.lexists(self.folder / INDEX)

    def texts(self) -> list[Path]:
        """The folder's other files: configs, tokenizer, template, licence."""
        return sorted(
            x for x in self.folder.iterdir()
            if x.is_file() and x.name[0] != "." and x.name != INDEX and x.suffix not in _WEIGHTS
        )  # fmt: skip

    def _expert_names(self) -> Iterator[str]:
        for layer in self.plan.moe_layers:
            e = layer.experts
            assert e is not None
            for name in (*e.fused, *(p.format(e=i) for p in e.per_expert for i in range(e.count))):
                yield from (name, name + SCALE)

    def _metadata(self, file: int) -> object:
        path, fd = self.checkpoint.files[file], self._fds[file]
        n = int.from_bytes(read_exact(fd, 8, 0, path), "little")
        return parse(read_exact(fd, n, 8, path), shown_path(path)).get("__metadata__")

    # ---- hash --------------------------------------------------------------------------------

    @property
    def hashed_bytes(self) -> int:
        return sum(self.checkpoint.sizes)

    def sha256(self, threads: int, progress: Callable[[int], object]) -> str:
        """Of what `sha256sum` prints for config.json and then the weight files, by name."""
        return folder_hash(self.folder, self.checkpoint.names, threads, progress)
