"""Reads a pack back beside the checkpoint that it was made of: every CRC, every expert's values by the engine's own
decode within what the format rounds, every other tensor byte for byte.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mosaic_c import engine_pure
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.convert import in_order, record_crc
from mosaic_c.convert_source import Source
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
    names = [name for shard in source.shards() for name in shard.tensors]
    if set(names) != set(made.tensors):
        odd = sorted(set(names) ^ set(made.tensors))
        raise MosaicError(
            f"{shown_path(made.folder)}: tensor {show(odd[0])} is not in both", "EFORMAT"
        )
    for name in names:
        a, b = source.checkpoint.tensors[name], made.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise MosaicError(
                f"{shown_path(made.folder)}: tensor {show(name)}: expected {a.dtype} {list(a.shape)}, got {b.dtype} "
                f"{list(b.shape)}", "EFORMAT",
            )  # fmt: skip
        fd, _ = open_regular(made.files[b.file])
        try:
            at = b.offset
            for chunk in source.chunks(a.file, a.offset, a.nbytes):
                if read_exact(fd, len(chunk), at, made.files[b.file]) != chunk.tobytes():
                    raise MosaicError(
                        f"{shown_path(made.files[b.file])}: tensor {show(name)} differs from the source's",
                        "EFORMAT",
                    )
                os.posix_fadvise(fd, at, len(chunk), os.POSIX_FADV_DONTNEED)
                at += len(chunk)
                bar.update(len(chunk))
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
