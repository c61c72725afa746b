"""Reads a pack back beside the checkpoint that it was made of: every CRC, every expert's values by the engine's own
decode within what the format rounds, every other tensor and its CRC: byte for byte, or within the rounding of the
format that it has now.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mosaic_c import engine_pure
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.convert import DENSE, in_order, record_crc
from mosaic_c.convert_source import CHUNK, Piece, Source, stored_in
from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import open_regular, read_exact, show, shown_path
from mosaic_c.pack import MANIFEST, PARTS, Pack, PackLayer
from mosaic_c.pack_format import Format
from mosaic_c.pack_tensors import SCALE, Stored
from mosaic_c.quantise import rounding, spread, widen


def compare(
    source: Source, path: Path, sha256: str, wanted: tuple[str | None, str | None], threads: int,
    bar: tqdm,
) -> int:  # fmt: skip
    """How many experts were compared, all of them. Raises MosaicError at the first difference.

    sha256: of the source; wanted: names of the formats that experts and dense matrices are to have, None: any. bar:
    counts the source's bytes.
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
    experts, dense = wanted
    if experts not in (None, pack.format):
        raise UsageError(f"{where}: expected experts in {experts}, got {pack.format}")
    if dense is not None and pack.dense_format != DENSE[dense].name:
        raise UsageError(f"{where}: expected dense matrices in {dense}, got {pack.dense_format}")
    try:
        _dense(source, checkpoint, bar)
        for number, layer in enumerate(pack.layers):
            _layer(source, path, pack, number, layer, threads, bar)
    except MosaicError as error:
        if error.code != "EFORMAT":
            raise
        raise MosaicError(f"{error}; remove {where} and convert again", "EFORMAT") from None
    return sum(x.count for x in pack.layers)


def _dense(source: Source, made: Checkpoint, bar: tqdm) -> None:
    """Every other tensor: equal, or a matrix of the layers within the rounding of the format that the pack has."""
    assert made.pack is not None
    matrices = {w.name for w in source.plan.matrices()}
    listed = made.pack.tensors or {
        x.name: stored_in(made.tensors, x.name)
        for shard in source.shards() for x in shard.pieces if x.stored and x.name in made.tensors
    }  # fmt: skip
    names = {x.name for shard in source.shards() for x in shard.pieces if x.stored}
    if odd := sorted(names ^ set(listed)):
        raise MosaicError(
            f"{shown_path(made.folder)}: tensor {show(odd[0])} is not in both", "EFORMAT"
        )
    for shard in source.shards():
        for x in shard.pieces:
            if x.stored is None:  # a scale, compared with the tensor that it scales
                continue
            got = listed[x.name]
            near = got.form != x.stored.form and x.name in matrices
            if got.shape != x.stored.shape or not (near or got.form == x.stored.form):
                raise MosaicError(
                    f"{shown_path(made.folder)}: tensor {show(x.name)}: expected {x.stored.form.name} "
                    f"{list(x.stored.shape)}, got {got.form.name} {list(got.shape)}", "EFORMAT",
                )  # fmt: skip
            same = _near(source, made, x, got) if near else _equal(source, made, shard.file, x)
            where = shown_path(made.files[made.tensors[x.name].file])
            if not same:
                how = "differs from the source's" + (
                    f" by more than {got.form.name} rounds" if near else ""
                )
                raise MosaicError(f"{where}: tensor {show(x.name)} {how}", "EFORMAT")
            if made.pack.tensors is not None:
                _crcs(made, where, x.name, got)
            bar.update(x.source_bytes)


def _crcs(made: Checkpoint, where: str, name: str, x: Stored) -> None:
    """Those of the manifest are of the bytes that are there."""
    names = [name] if x.form.scale is None else [name, name + SCALE]
    crc, rows = 0, array("I")
    for key in names:
        size = made.tensors[key].nbytes
        line = size // max(x.shape[0], 1) if x.rows is not None and key == name else CHUNK
        step = max(CHUNK // line, 1) * line
        for at in range(0, size, step):
            raw = _read(made, key, at, min(step, size - at))
            crc = engine_pure.crc32c(raw, crc)
            if x.rows is not None and key == name:
                rows.extend(engine_pure.crc32c(raw[i : i + line]) for i in range(0, len(raw), line))
    if crc != x.crc or (x.rows is not None and not np.array_equal(rows, x.rows)):
        raise MosaicError(
            f"{where}: tensor {show(name)} is damaged: expected CRC-32C {x.crc:08x} in {MANIFEST} and those of its "
            f"rows there, got {crc:08x}", "EFORMAT",
        )  # fmt: skip


def _equal(source: Source, made: Checkpoint, file: int, x: Piece) -> bool:
    """Tensor and scales."""
    pairs = [(x.name, source.chunks(file, x.offset, x.source_bytes))]
    if x.stored is not None and x.stored.form.scale is not None:
        pairs.append((x.name + SCALE, source.scales_of(x)))
    for name, chunks in pairs:
        at = 0
        for chunk in chunks:
            if _read(made, name, at, len(chunk)) != chunk.tobytes():
                return False
            at += len(chunk)
    return True


def _near(source: Source, made: Checkpoint, x: Piece, got: Stored) -> bool:
    form, row = got.form, 0
    scales = np.ones((1, 1), np.float32)
    if form.scale is not None:
        info = made.tensors[x.name + SCALE]
        count = info.nbytes * 8 // BITS[info.dtype]
        scales = engine_pure.decode(form.scale, _read(made, x.name + SCALE, 0, info.nbytes), count)
        scales = scales.reshape(info.shape)
    for w in source.slabs(x):
        line = form.nbytes(1, w.shape[1])
        codes = unpack(form, _read(made, x.name, row * line, len(w) * line), *w.shape)
        up = max(form.block[0], 1)
        scale = scales[row // up : -(-(row + len(w)) // up)]
        if not near(w, codes, scale, form).all():
            return False
        row += len(w)
    return True


def near(w: np.ndarray, codes: np.ndarray, scale: np.ndarray, form: Format) -> np.ndarray:
    """Where codes times scales lie within what the format rounds of w."""
    return np.abs(times(codes, scale, form) - w) <= rounding(w, codes, scale, form)


def times(codes: np.ndarray, scale: np.ndarray, form: Format) -> np.ndarray:
    return codes * spread(scale, form.block, *codes.shape) if form.scale else codes


def unpack(form: Format, raw: bytes, rows: int, cols: int) -> np.ndarray:
    """(rows, cols) values without scales, by the engine's decode; rows end with whole bytes."""
    per_byte = max(8 // BITS[form.dtype], 1)
    wide = -(-cols // per_byte) * per_byte
    return engine_pure.decode(form.dtype, raw, rows * wide).reshape(rows, wide)[:, :cols]


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
    bad = ~near(w, codes, scale, form)
    if not bad.any():
        return ""
    r, c = (int(i) for i in np.argwhere(bad)[0])
    got = times(codes, scale, form)[r, c]
    return (
        f"has {got:g} at row {r}, column {c}, the source {w[r, c]:g}: more than {form.name} rounds"
    )


def decoded(x: PackLayer, raw: bytes, part: int) -> tuple[np.ndarray, np.ndarray]:
    """(values (rows, cols) without scales, scales of the blocks) of a record, by the engine's decode."""
    form, (rows, cols) = x.formats[part], x.shapes[part]
    at, to = x.parts[part], x.parts[3 + part]
    codes = unpack(form, raw[at : at + form.nbytes(rows, cols)], rows, cols)
    if form.scale is None:
        return codes, np.ones((1, 1), np.float32)
    n = form.scales(rows, cols)
    scale = engine_pure.decode(form.scale, raw[to : to + form.scale_nbytes(rows, cols)], n)
    return codes, scale.reshape(-(-rows // form.block[0]), -1)
