"""A checkpoint as the source of an expert pack: its experts as matrices, its other tensors as bytes, its hash.

Reads leave no pages behind: a source is larger than memory. All methods may be called from several threads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mosaic_c.bind import CODE_NAMES, F8, SCALE, matrix_bytes, scale_bytes
from mosaic_c.checkpoint import INDEX, SINGLE, Checkpoint
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import open_regular, parse, read_exact, show, shown_path
from mosaic_c.pack import Format
from mosaic_c.plan import Attention, Weight
from mosaic_c.quantise import Unfit, quantise, spread, widen

CHUNK = 4 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


FP8 = Format("F8_E4M3", "F32", (128, 128))  # of dense matrices that are converted
_SLAB = 1024  # rows of such a matrix at once, a multiple of its block


@dataclass(frozen=True)
class Piece:
    """A tensor of the source's file. rows, cols: it becomes FP8, followed by its scales; 0: it is copied."""

    name: str
    dtype: str
    offset: int
    source_bytes: int
    rows: int = 0
    cols: int = 0

    @property
    def nbytes(self) -> int:
        """In the pack, scales too."""
        if not self.rows:
            return self.source_bytes
        return FP8.nbytes(self.rows, self.cols) + FP8.scale_nbytes(self.rows, self.cols)


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
            if x.rows:
                yield x.name + SCALE


class Source:
    def __init__(self, path: str | os.PathLike[str]) -> None:
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

    def shards(self, fp8: bool = False) -> list[Shard]:
        """The source's files without the experts; a file of experts alone is left out. fp8: matrices of the layers
        become FP8, where official FP8 releases have it."""
        table, gone = self.checkpoint.tensors, set(self._expert_names())
        wanted = {w.name for w in self._matrices()} if fp8 else set()
        members: dict[int, list[Piece]] = {}
        for name, info in table.items():
            if name in gone:
                continue
            rows, cols = info.shape if name in wanted and info.dtype != FP8.dtype else (0, 0)
            piece = Piece(name, info.dtype, info.offset, info.nbytes, rows, cols)
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
            if not x.rows:
                add(x.name, x.dtype, self.checkpoint.tensors[x.name].shape, x.nbytes)
                continue
            size = FP8.scale_nbytes(x.rows, x.cols)
            add(x.name, FP8.dtype, (x.rows, x.cols), x.nbytes - size)
            assert FP8.scale is not None
            add(x.name + SCALE, FP8.scale, (-(-x.rows // 128), -(-x.cols // 128)), size)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return Shard(file, self.checkpoint.names[file], header, pieces)

    def contents(self, file: int, x: Piece) -> Iterator[bytes | memoryview]:
        """The bytes of a piece as the pack has them. Raises MosaicError for values that FP8 cannot hold."""
        if not x.rows:
            yield from (memoryview(c) for c in self.chunks(file, x.offset, x.source_bytes))
            return
        scales = []
        for w in self.slabs(file, x):
            try:
                codes, scale = quantise(w, FP8)
            except Unfit as error:
                where = shown_path(self.checkpoint.files[file])
                raise MosaicError(f"{where}: tensor {show(x.name)}: {error}", error.code) from None
            scales.append(scale)
            yield codes
        yield b"".join(scales)

    def slabs(self, file: int, x: Piece) -> Iterator[np.ndarray]:
        """The rows of a matrix as float32, whole blocks of rows at a time."""
        for row in range(0, x.rows, _SLAB):
            n, line = min(_SLAB, x.rows - row), x.source_bytes // x.rows
            raw = self._read(file, x.offset + row * line, n * line)
            yield widen(raw, x.dtype).reshape(n, x.cols)

    def _matrices(self) -> Iterator[Weight]:
        """What official FP8 releases have in FP8: no embedding, head, router, gate of the shared expert, nor what
        makes the decay and the rate of the delta rule."""
        for layer in self.plan.layers:
            mixer, mlp = layer.mixer, layer.moe.shared
            if isinstance(mixer, Attention):
                yield from (mixer.q, mixer.k, mixer.v, mixer.o)
            else:
                yield from (mixer.qkv, mixer.z, mixer.out)
            if mlp is not None:
                yield from (mlp.gate, mlp.up, mlp.down)

    def chunks(self, file: int, offset: int, count: int) -> Iterator[np.ndarray]:
        while count:
            n = min(CHUNK, count)
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
        names = ["config.json", *sorted(self.checkpoint.names)]
        with ThreadPoolExecutor(threads) as pool:
            digests = pool.map(lambda name: self._sha256(name, progress), names)
            lines = [f"{x}  {name}\n" for x, name in zip(digests, names, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _sha256(self, name: str, progress: Callable[[int], object]) -> str:
        path, out, at = self.folder / name, hashlib.sha256(), 0
        fd, size = open_regular(path)
        try:
            while at < size:
                raw = read_exact(fd, min(CHUNK, size - at), at, path)
                out.update(raw)
                os.posix_fadvise(fd, at, len(raw), os.POSIX_FADV_DONTNEED)
                at += len(raw)
                if name != "config.json":
                    progress(len(raw))
        finally:
            os.close(fd)
        return out.hexdigest()
