"""Reads a pack back beside the checkpoint that it was made of: every CRC, every expert's values by the engine's own
decode within what the format rounds, every other tensor byte for byte unless it was to become FP8.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mosaic_c import engine_pure
from mosaic_c.bind import SCALE
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.convert import in_order, record_crc
from mosaic_c.convert_source import FP8, Piece, Source
from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import open_regular, read_exact, show, shown_path
from mosaic_c.pack import PARTS, Pack, PackLayer
from mosaic_c.quantise import rounding, spread, widen


def compare(
    source: Source, path: Path, sha256: str, experts: str | None, threads: int, bar: tqdm
) -> int:
    """How many experts were compared, all of them. Raises MosaicError at the first difference.

    sha256: of the source; experts: the format that the pack is to have, None: any. bar: counts the source's bytes.
    """
    checkpoint = Checkpoint.open(path)
    checkpoint.locate()
    pack = checkpoint.pack
    where = shown_path(path)
    if pack is None:
        raise MosaicError(f"{where}: not an expert pack", "EINVAL")
    if pack.source.get("sha256") != sha256:
        raise MosaicError(
            f"{where}: made of another source: its manifest has sha256 {show(pack.source.get('sha256'))}, "
            f"{shown_path(source.folder)} has {sha256}", "EFORMAT",
        )  # fmt: skip
    if experts not in (None, pack.format):
        raise UsageError(f"{where}: expected experts in {experts}, got {pack.format}")
    _dense(source, checkpoint, bar)
    for number, layer in enumerate(pack.layers):
        _layer(source, path, pack, number, layer, threads, bar)
    return sum(x.count for x in pack.layers)


def _dense(source: Source, made: Checkpoint, bar: tqdm) -> None:
    """Every other tensor: equal, or within the rounding of FP8 where the pack has FP8 and the source has not."""
    fp8 = any(
        made.tensors[x.name].dtype == FP8.dtype
        for shard in source.shards(fp8=True) for x in shard.pieces if x.rows and x.name in made.tensors
    )  # fmt: skip
    shards = source.shards(fp8)
    names = {name for shard in shards for name in shard.tensors}
    if odd := sorted(names ^ set(made.tensors)):
        raise MosaicError(
            f"{shown_path(made.folder)}: tensor {show(odd[0])} is not in both", "EFORMAT"
        )
    for shard in shards:
        for x in shard.pieces:
            got, expected = made.tensors[x.name], source.checkpoint.tensors[x.name]
            dtype = FP8.dtype if x.rows else expected.dtype
            if (got.dtype, got.shape) != (dtype, expected.shape):
                raise MosaicError(
                    f"{shown_path(made.folder)}: tensor {show(x.name)}: expected {dtype} {list(expected.shape)}, got "
                    f"{got.dtype} {list(got.shape)}", "EFORMAT",
                )  # fmt: skip
            same = (
                _near(source, made, shard.file, x)
                if x.rows
                else _equal(source, made, shard.file, x)
            )
            if not same:
                how = "differs from the source's" + (" by more than fp8 rounds" if x.rows else "")
                where = shown_path(made.files[got.file])
                raise MosaicError(f"{where}: tensor {show(x.name)} {how}", "EFORMAT")
            bar.update(x.source_bytes)


def _equal(source: Source, made: Checkpoint, file: int, x: Piece) -> bool:
    at = 0
    for chunk in source.chunks(file, x.offset, x.source_bytes):
        if _read(made, x.name, at, len(chunk)) != chunk.tobytes():
            return False
        at += len(chunk)
    return True


def _near(source: Source, made: Checkpoint, file: int, x: Piece) -> bool:
    scale_name, row = x.name + SCALE, 0
    info = made.tensors[scale_name]
    count = info.nbytes * 8 // BITS[info.dtype]
    scales = engine_pure.decode(info.dtype, _read(made, scale_name, 0, info.nbytes), count)
    scales = scales.reshape(info.shape)
    for w in source.slabs(file, x):
        raw = _read(made, x.name, row * x.cols, w.size)
        codes = engine_pure.decode(FP8.dtype, raw, w.size).reshape(w.shape)
        scale = scales[row // 128 : -(-(row + len(w)) // 128)]
        off = np.abs(codes * spread(scale, FP8.block, *w.shape) - w)
        if not (off <= rounding(w, codes, scale, FP8)).all():
            return False
        row += len(w)
    return True


def _read(made: Checkpoint, name: str, at: int, count: int) -> bytes:
    """Bytes of a tensor of the pack."""
    info = made.tensors[name]
    path = made.files[info.file]
    fd, _ = open_regular(path)
    try:
        raw = read_exact(fd, count, info.offset + at, path)
        os.posix_fadvise(fd, info.offset + at, count, os.POSIX_FADV_DONTNEED)
        return raw
    finally:
        os.close(fd)


def _layer(
    source: Source, folder: Path, pack: Pack, number: int, x: PackLayer, threads: int, bar: tqdm
) -> None:
    path = folder / pack.files[x.file]
    fd, _ = open_regular(path)

    def one(expert: int) -> None:
        at = x.offset + expert * x.record_bytes
        raw = read_exact(fd, x.record_bytes, at, path)
        os.posix_fadvise(fd, at, x.record_bytes, os.POSIX_FADV_DONTNEED)
        what = f"{shown_path(path)}: layer {number}, expert {expert}: its record"
        crc = record_crc(number, expert, raw)
        if crc != x.crc[expert]:
            raise MosaicError(
                f"{what} at byte {at} is damaged: expected CRC-32C {int(x.crc[expert]):08x}, got {crc:08x}",
                "EFORMAT",
            )
        for part in range(3):
            if text := difference(source, x, raw, number, expert, part):
                raise MosaicError(f"{what}: {PARTS[part]} {text}", "EFORMAT")

    try:
        for _ in in_order(threads, one, range(x.count)):
            bar.update(source.expert_bytes(number) // x.count)
    finally:
        os.close(fd)


def difference(source: Source, x: PackLayer, raw: bytes, layer: int, expert: int, part: int) -> str:
    """What of a matrix lies further from the source than its format rounds; empty: nothing."""
    form, (rows, cols) = x.formats[part], x.shapes[part]
    codes, scale = decoded(x, raw, part)
    dtype, stored, kind, scales = source.stored(layer, expert, part)
    if dtype == form.dtype == "F8_E4M3":
        at = x.parts[part]
        same = raw[at : at + form.nbytes(rows, cols)] == stored.tobytes()
        same = same and np.array_equal(scale.ravel(), widen(scales, kind), equal_nan=True)
        return "" if same else "has other FP8 codes or scales than the source"
    w = source.values(layer, expert, part)
    got = codes * spread(scale, form.block, rows, cols)
    bad = ~(np.abs(got - w) <= rounding(w, codes, scale, form))
    if not bad.any():
        return ""
    r, c = (int(i) for i in np.argwhere(bad)[0])
    return f"has {got[r, c]:g} at row {r}, column {c}, the source {w[r, c]:g}: more than {form.name} rounds"


def decoded(x: PackLayer, raw: bytes, part: int) -> tuple[np.ndarray, np.ndarray]:
    """(values (rows, cols) without scales, scales of the blocks) of a record, by the engine's decode."""
    form, (rows, cols) = x.formats[part], x.shapes[part]
    assert form.scale is not None
    per_byte = 8 // BITS[form.dtype]
    wide = -(-cols // per_byte) * per_byte  # rows end with whole bytes
    at, to = x.parts[part], x.parts[3 + part]
    values = engine_pure.decode(form.dtype, raw[at : at + form.nbytes(rows, cols)], rows * wide)
    n = form.scales(rows, cols)
    scale = engine_pure.decode(form.scale, raw[to : to + form.scale_nbytes(rows, cols)], n)
    return values.reshape(rows, wide)[:, :cols], scale.reshape(-(-rows // form.block[0]), -1)
