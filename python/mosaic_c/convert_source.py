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
from mosaic_c.errors import UsageError
from mosaic_c.jsonfile import open_regular, parse, read_exact, shown_path
from mosaic_c.quantise import spread, widen

CHUNK = 4 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


@dataclass(frozen=True)
class Shard:
    """A safetensors file to be written: its header, and the parts (offset, bytes) of the source's file that follow.

    tensors: their names, in that order.
    """

    file: int
    name: str
    header: bytes
    parts: list[tuple[int, int]]
    tensors: list[str]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(n for _, n in self.parts)


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

    def shards(self) -> list[Shard]:
        """The source's files without the experts; a file of experts alone is left out."""
        table, gone = self.checkpoint.tensors, set(self._expert_names())
        members: dict[int, list[tuple[int, str]]] = {}
        for row, name in enumerate(table):
            if name not in gone:
                members.setdefault(int(table.file[row]), []).append((int(table.offset[row]), name))
        out = []
        for file in sorted(members):
            entries, parts, at = dict[str, object](), [], 0
            if metadata := self._metadata(file):
                entries["__metadata__"] = metadata
            names = [name for _, name in sorted(members[file])]
            for name in names:
                info = table[name]
                end = at + info.nbytes
                entries[name] = {
                    "dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, end],
                }  # fmt: skip
                parts.append((info.offset, info.nbytes))
                at = end
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            header = len(text).to_bytes(8, "little") + text
            out.append(Shard(file, self.checkpoint.names[file], header, parts, names))
        return out

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
        """Of what `sha256sum` prints for config.json and the weight files, by name."""
        names = sorted({"config.json", *self.checkpoint.names})
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
