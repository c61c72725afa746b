"""Makes an expert pack of an official checkpoint: the routed experts in a format of docs/format.md, one record
an expert; every other tensor byte for byte as it is, but for the matrices of the layers where `dense` asks.

    DST.partial/journal    what is finished and on disk, a JSON line each; the first line says of what and into what
    DST.partial/pack/      becomes DST by one rename when all is there

A run that was killed is continued by the same command: what the journal names is kept, the rest is written again.
Records have fixed places and depend on the source alone, so the bytes do not show in how many runs they were made.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from mosaic_c import engine_pure, pack_tensors
from mosaic_c import pack as packs
from mosaic_c.checkpoint import INDEX, Checkpoint
from mosaic_c.convert_place import (
    FOLDER,
    JOURNAL,
    check_partial,
    check_place,
    create,
    open_own,
    partial_of,
)
from mosaic_c.convert_source import Shard, Source
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import path_text, pieces, reason, show, shown_path
from mosaic_c.limits import MAX_THREADS, default_threads, format_size, read_limits
from mosaic_c.pack import Pack, PackLayer, lay_out, shapes_of
from mosaic_c.pack_format import Format
from mosaic_c.pack_tensors import Stored
from mosaic_c.quantise import Unfit, quantise, widen
from mosaic_c.synth_shapes import LABEL
from mosaic_c.synth_stream import writing

FORMATS = {
    form.name: form
    for form in (
        Format("INT4", "F16", (1, 64)),
        Format("INT4", "F16", (1, 32)),
        Format("INT4", "F32", (1, 0)),
        Format("F4", "F8_E8M0", (1, 32)),
        Format("F8_E4M3", "F32", (128, 128)),
        Format("BF16"),
    )
}
DENSE = {
    "fp8": FORMATS["fp8"],
    "int8": Format("I8", "F16", (1, 128)),
    "bf16": FORMATS["bf16"],
    "int4-g64": FORMATS["int4-g64"],
}
# What config.json must say for the loader to take FP8 matrices.
QUANTISED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FILE_BYTES = 4_000_000_000  # of record files; a layer is never divided
_SPARE = 16 << 20  # room asked for beyond the tensors: manifest, index
T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """What was written. bytes: all files together; resumed: bytes kept of an earlier run; verified: experts that
    were read back and compared with the source; written False: dst was there, and only that was done."""

    path: str
    source: str
    sha256: str
    format: str
    dense: str
    layers: int
    experts: int
    bytes: int
    resumed: int
    verified: int
    written: bool
    seconds: float


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    experts: str | None,
    verify: bool = False,
    progress: bool = True,
    threads: int | None = None,
    file_bytes: int = FILE_BYTES,
    dense: str | None = None,
) -> Summary:
    """Writes the pack dst of the checkpoint src; experts: a name of FORMATS; dense: one of DENSE, for the matrices
    of the layers that official FP8 releases have in FP8, None: as they are. progress: a bar on stderr. verify: reads
    it back beside the source, and of a dst that exists does just that (experts None: whatever it has).

    UsageError for arguments that make no sense or an existing dst, MosaicError for a source that cannot be
    converted, a disk that is too small or fails. dst does not exist then; DST.partial keeps what was done.
    """
    from mosaic_c.convert_check import compare

    start = time.monotonic()
    out = Path(os.path.abspath(_without_nul(dst)))
    check_place(_without_nul(src), out)
    there = os.path.lexists(out)
    if there and not verify:
        raise UsageError(
            f"{shown_path(out)} exists already: remove it or choose another folder", "EEXIST"
        )
    if experts not in FORMATS and not (there and experts is None):
        got = "no expert format" if experts is None else f"unknown expert format {experts!r}"
        raise UsageError(f"{got}: expected one of {', '.join(FORMATS)}")
    if dense is not None and dense not in DENSE:
        raise UsageError(f"unknown dense format {dense!r}: expected {', '.join(DENSE)}")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"{threads} threads make no sense: expected 1 to {MAX_THREADS}")
    threads = threads or default_threads(read_limits())
    with Source(src) as source:
        resumed = verified = 0
        if there:
            with _bar("hash", source.hashed_bytes, progress) as bar:
                sha256 = source.sha256(threads, bar.update)
        else:
            assert experts is not None
            job = _Job(source, out, experts, dense, threads, file_bytes)
            try:
                resumed, sha256 = job.run(progress)
            except OSError as error:
                what = f"{shown_path(error.filename or out)}: {reason(error)}"
                code = "ENOSPC" if error.errno == errno.ENOSPC else "EIO"
                raise MosaicError(f"cannot write the pack: {what}", code) from None
        if verify:
            with _bar("verify", source.hashed_bytes, progress) as bar:
                verified = compare(source, out, sha256, (experts, dense), threads, bar)
            source.check_unchanged()
    pack = Checkpoint.open(out).pack
    assert pack is not None
    return Summary(
        path=str(out),
        source=str(source.folder),
        sha256=sha256,
        format=pack.format,
        dense=pack.dense_format,
        layers=len(pack.layers),
        experts=sum(x.count for x in pack.layers),
        bytes=sum(x.stat().st_size for x in out.iterdir()),
        resumed=resumed,
        verified=verified,
        written=not there,
        seconds=time.monotonic() - start,
    )


def _without_nul(path: str | os.PathLike[str]) -> str:
    text = path_text(path)
    if "\0" in text:
        raise UsageError(f"path {show(text)}: expected no NUL in it")
    return text


def _bar(what: str, total: int, progress: bool) -> tqdm:
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not progress)


def plan(source: Source, form: Format, sha256: str, file_bytes: int) -> Pack:
    """Where every record will lie; its CRCs are still to come."""
    origin: dict[str, Any] = {"sha256": sha256}
    if source.checkpoint.config.get(LABEL):
        origin["synthetic"] = True
    layers, sizes = list[PackLayer](), [0]
    for i, moe in enumerate(source.plan.moe_layers):
        e = moe.experts
        assert e is not None
        a, b, c = (_format(source, form, i, part) for part in range(3))
        parts, size = lay_out((a, b, c), shapes_of(e))
        if sizes[-1] and sizes[-1] + e.count * size > file_bytes:
            sizes.append(0)
        crc = np.zeros(e.count, np.uint32)
        layers.append(
            PackLayer(len(sizes) - 1, sizes[-1], e.count, (a, b, c), shapes_of(e), parts, size, crc)
        )
        sizes[-1] += layers[-1].nbytes
    names = [packs.RECORDS.format(i + 1) for i in range(len(sizes))]
    matrices = tuple(w.name for w in source.plan.matrices())
    return Pack(names, sizes, layers, origin, {}, {}, matrices)


def _format(source: Source, form: Format, layer: int, part: int) -> Format:
    """FP8 of an FP8 source keeps its scales as they are, else scales are float32."""
    if form.dtype == "F8_E4M3" and source.is_fp8(layer, part):
        return Format(form.dtype, source.scale_dtype(layer, part), form.block)
    return form


def record(source: Source, x: PackLayer, layer: int, expert: int) -> tuple[bytearray, int]:
    """The bytes of an expert's record and their CRC."""
    out = bytearray(x.record_bytes)
    for part, form in enumerate(x.formats):
        try:
            codes, scales = _matrix(source, form, layer, expert, part)
        except Unfit as error:
            raise MosaicError(
                f"{shown_path(source.folder)}: layer {layer}, expert {expert}, {packs.PARTS[part]}: {error}; "
                f"{form.name} cannot hold it", error.code,
            ) from None  # fmt: skip
        for at, raw in ((x.parts[part], codes), (x.parts[3 + part], scales)):
            out[at : at + len(raw)] = raw
    return out, record_crc(layer, expert, out)


def record_crc(layer: int, expert: int, raw: bytes | bytearray) -> int:
    return engine_pure.crc32c(raw, engine_pure.crc32c(np.array((layer, expert), "<u4")))


def _matrix(
    source: Source, form: Format, layer: int, expert: int, part: int
) -> tuple[bytes, bytes]:
    if form.dtype == "F8_E4M3":
        dtype, raw, kind, scales = source.stored(layer, expert, part)
        if dtype == form.dtype:  # rounding again would change what is FP8 already
            wide = scales if kind == form.scale else widen(scales, kind)
            return raw.tobytes(), wide.tobytes()
    return quantise(source.values(layer, expert, part), form)


def in_order(threads: int, work: Callable[[int], T], items: Iterable[int]) -> Iterator[T]:
    """work of each item by several threads, results in order; after an error nothing new is begun."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)


class _Job:
    def __init__(
        self, source: Source, dst: Path, experts: str, dense: str | None, threads: int,
        file_bytes: int,
    ) -> None:  # fmt: skip
        self.source, self.dst, self.experts, self.threads = source, dst, experts, threads
        self.dense = dense
        self.partial = partial_of(dst)
        self.folder = self.partial / FOLDER
        self.pack = plan(source, FORMATS[experts], "", file_bytes)
        assert self.pack.tensors is not None
        self.tensors = self.pack.tensors
        self.sha256 = ""
        self.shards = source.shards(None if dense is None else DENSE[dense])
        self.texts = source.texts()
        self.known = {x.name for x in (*self.shards, *self.texts)} | {*self.pack.files}
        self.known |= {packs.MANIFEST, INDEX}

    def run(self, progress: bool) -> tuple[int, str]:
        """All of it; (bytes that an earlier run had finished, hash of the source)."""
        total = sum(self.pack.sizes) + sum(x.nbytes for x in self.shards)
        check_partial(self.partial, self.known)
        self._check_disk(total + sum(x.stat().st_size for x in self.texts) + _SPARE)
        whole = total + self.source.hashed_bytes
        with self._locked() as journal, _bar(f"convert {self.experts}", whole, progress) as bar:
            self.sha256 = self.source.sha256(self.threads, bar.update)
            self.pack.source["sha256"] = self.sha256
            done = self._resume(journal)
            kept = 0
            for shard in self.shards:
                if shard.name in done:
                    kept += shard.nbytes
                else:
                    found = self._write_shard(shard, bar)
                    self.source.check_unchanged()
                    _note(journal, {"file": shard.name, "tensors": pack_tensors.entries(found)})
                    self.tensors |= found
            for i, layer in enumerate(self.pack.layers):
                if i in done:
                    kept += layer.nbytes
                else:
                    self._write_layer(i, layer, bar)
                    self.source.check_unchanged()
                    _note(journal, {"layer": i, "crc32c": layer.crc.astype(">u4").tobytes().hex()})
            bar.update(kept)
            self._write_texts()
            self._finish()
        return kept, self.sha256

    def _check_disk(self, need: int) -> None:
        need -= sum(x.stat().st_blocks * 512 for x in self.folder.glob("*"))
        parent = self.dst.parent
        while not parent.exists():
            parent = parent.parent
        free = shutil.disk_usage(parent).free
        if free < need:
            raise MosaicError(
                f"not enough disk space: needs {format_size(need)}, {shown_path(parent)} has {format_size(free)} "
                "free; choose another folder, or a smaller format with --experts", "ENOSPC",
            )  # fmt: skip

    # ---- journal -----------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The journal, held by this process alone."""
        self.partial.mkdir(parents=True, exist_ok=True)
        fd = open_own(self.partial / JOURNAL)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # of the file that has this name: one that was finished meanwhile has removed it
                held = os.path.samestat(os.fstat(fd), os.lstat(self.partial / JOURNAL))
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise UsageError(
                    f"{shown_path(self.partial)}: another convert is writing it", "EBUSY"
                )
            if os.path.lexists(self.dst):  # before the work, and what was begun here goes
                if not self.folder.is_dir():
                    self._remove_partial()
                raise UsageError(f"{shown_path(self.dst)} exists already, since just now", "EEXIST")
            if not self.folder.is_dir():  # none yet, or the pack it was about is there, renamed
                os.ftruncate(fd, 0)
                self.folder.mkdir()
            yield fd
        finally:
            os.close(fd)

    def _resume(self, journal: int) -> set[str | int]:
        """What is finished: names of files, and numbers of layers, whose CRCs are taken from the journal."""
        head = {
            "journal": 2, "source": self.sha256, "experts": self.experts, "dense": self.dense,
            "files": [[a, b] for a, b in zip(self.pack.files, self.pack.sizes, strict=True)],
        }  # fmt: skip
        text = b""
        while part := os.pread(journal, 1 << 20, len(text)):
            text += part
        whole = text[: text.rfind(b"\n") + 1]  # a line that a kill cut is as good as none
        os.ftruncate(journal, len(whole))
        os.lseek(journal, 0, os.SEEK_END)
        done = set[str | int]()
        try:
            lines = [json.loads(x) for x in whole.splitlines()]
            ours = not lines or lines[0] == head
            for line in lines[1:] if ours else ():
                if "file" in line:
                    self.tensors |= pack_tensors.read_tensors(line["tensors"], _foreign)
                    done.add(line["file"])
                else:
                    crc = np.frombuffer(bytes.fromhex(line["crc32c"]), ">u4")
                    self.pack.layers[line["layer"]].crc[:] = crc
                    done.add(line["layer"])
        except (ValueError, TypeError, LookupError, RecursionError):  # not written by us
            ours = False
        if not ours:
            raise UsageError(
                f"{shown_path(self.partial)} is of another conversion (other source or format): remove it, or choose "
                "another folder", "EEXIST",
            )  # fmt: skip
        if not lines:
            _note(journal, head)
        return done

    # ---- files -------------------------------------------------------------------------------

    def _write_shard(self, shard: Shard, bar: tqdm) -> dict[str, Stored]:
        """Its tensors, with their CRCs."""
        path, found = self.folder / shard.name, dict[str, Stored]()
        path.unlink(missing_ok=True)
        with writing(path, shard.nbytes, bar) as file:
            file.add(shard.header)
            for piece in shard.pieces:
                crc, embed, rows = 0, self.source.plan.embed, array("I")
                line = piece.nbytes // embed.shape[0] if piece.name == embed.name else 0
                for chunk in self.source.contents(shard.file, piece):
                    file.add(chunk)
                    crc = engine_pure.crc32c(chunk, crc)
                    for at in range(0, len(chunk), line) if line else ():
                        rows.append(engine_pure.crc32c(chunk[at : at + line]))
                for chunk in self.source.scales_of(piece):
                    crc = engine_pure.crc32c(chunk, crc)
                if piece.stored is not None:
                    each = np.array(rows, np.uint32) if line else None
                    found[piece.name] = replace(piece.stored, crc=crc, rows=each)
        return found

    def _write_layer(self, number: int, layer: PackLayer, bar: tqdm) -> None:
        path = self.folder / self.pack.files[layer.file]
        fd = open_own(path)

        def one(expert: int) -> int:
            raw, crc = record(self.source, layer, number, expert)
            at, rest = layer.offset + expert * layer.record_bytes, memoryview(raw)
            while rest:
                n = os.pwrite(fd, rest, at)
                at, rest = at + n, rest[n:]
            return crc

        try:
            for expert, crc in enumerate(in_order(self.threads, one, range(layer.count))):
                layer.crc[expert] = crc
                bar.update(layer.record_bytes)
                if expert % 32 == 31:  # what is written shall not fill the page cache
                    os.fdatasync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _write_texts(self) -> None:
        for path in self.texts:
            _whole(self.folder / path.name, pieces(path))
        self.source.check_unchanged()
        if self.dense == "fp8" and self.source.plan.weight_block is None:
            config = self.source.checkpoint.config | {"quantization_config": QUANTISED}
            _whole(self.folder / "config.json", [_json(config)])
        if self.source.indexed:
            size = sum(shard.nbytes - len(shard.header) for shard in self.shards)
            weight_map = {name: shard.name for shard in self.shards for name in shard.tensors}
            index = {
                "metadata": {"total_size": size},
                "weight_map": dict(sorted(weight_map.items())),
            }
            _whole(self.folder / INDEX, [_json(index)])
        assert self.pack.texts is not None
        for name in pack_tensors.TEXTS:
            if (self.folder / name).exists():
                self.pack.texts[name] = pack_tensors.file_crc(self.folder / name)
        _whole(self.folder / packs.MANIFEST, [packs.manifest(self.pack)])

    def _finish(self) -> None:
        """One rename; before it everything is on disk, after it only the journal is left to remove.

        What an earlier run had finished may have been removed or cut since: the pack is opened under its old name.
        """
        check_partial(self.partial, self.known)
        try:
            Checkpoint.open(self.folder).locate()
        except MosaicError as error:
            raise MosaicError(
                f"damaged since an earlier run: remove {shown_path(self.partial)} and convert again ({error})",
                error.code,
            ) from None
        _sync(self.folder)
        if os.path.lexists(self.dst):  # rename would replace an empty folder
            raise UsageError(f"{shown_path(self.dst)} exists already, since just now", "EEXIST")
        os.rename(self.folder, self.dst)
        _sync(self.dst.parent)
        self._remove_partial()

    def _remove_partial(self) -> None:
        with suppress(OSError):
            (self.partial / JOURNAL).unlink()
            self.partial.rmdir()


def _foreign(rule: str, got: object, code: str = "") -> Any:
    raise ValueError(rule)


def _note(journal: int, line: dict[str, Any]) -> None:
    rest = memoryview(json.dumps(line).encode() + b"\n")
    while rest:
        rest = rest[os.write(journal, rest) :]
    os.fsync(journal)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _whole(path: Path, data: Iterable[bytes]) -> None:
    with open(create(path), "wb") as file:
        for part in data:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
