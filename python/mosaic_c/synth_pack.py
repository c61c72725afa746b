"""Experts of a synthetic model as the records of an expert pack (pack.py, docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mosaic_c import engine_pure
from mosaic_c.pack import RECORDS, Format, Pack, PackLayer, lay_out
from mosaic_c.synth_shapes import Shape, Tensor
from mosaic_c.synth_stream import Stream, writing
from mosaic_c.synth_values import Tiles


def plan(spec: Shape, form: Format, source: dict[str, Any], file_bytes: int) -> Pack:
    """Where every record will lie; its CRCs are still to come. Layers fill files of at most file_bytes and
    are never divided."""
    up, down = (spec.width, spec.hidden), (spec.hidden, spec.width)
    forms, shapes = (form, form, form), (up, up, down)
    parts, size = lay_out(forms, shapes)
    layers, sizes = list[PackLayer](), [0]
    for _ in range(spec.layers):
        if sizes[-1] and sizes[-1] + spec.experts * size > file_bytes:
            sizes.append(0)
        crc = np.zeros(spec.experts, np.uint32)
        layers.append(
            PackLayer(len(sizes) - 1, sizes[-1], spec.experts, forms, shapes, parts, size, crc)
        )
        sizes[-1] += layers[-1].nbytes
    return Pack([RECORDS.format(i + 1) for i in range(len(sizes))], sizes, layers, source)


def write(
    folder: Path, pack: Pack, tensors: Iterable[tuple[int, Tensor]], tiles: Tiles, bar: tqdm
) -> None:
    """Writes the record files and fills in the CRCs. tensors, numbered: expert by expert gate, up, down, each
    followed by its scales."""
    source = iter(tensors)
    for number, name in enumerate(pack.files):
        with writing(folder / name, pack.sizes[number], bar) as file:
            for index, layer in enumerate(pack.layers):
                if layer.file != number:
                    continue
                for e in range(layer.count):
                    six = list(islice(source, 6))
                    layer.crc[e] = _record(file, layer, (index, e), six[::2] + six[1::2], tiles)


def _record(
    file: Stream,
    layer: PackLayer,
    place: tuple[int, int],
    tensors: list[tuple[int, Tensor]],
    tiles: Tiles,
) -> int:
    """One record; its CRC, which covers layer and expert too."""
    crc, at = engine_pure.crc32c(np.array(place, "<u4")), 0
    forms = layer.formats * 2
    for k, ((number, t), begin) in enumerate(zip(tensors, layer.parts, strict=True)):
        rows, cols = layer.shapes[k % 3]
        crc, at = _pad(file, crc, at, begin)
        count = t.count if k >= 3 else forms[k].nbytes(rows, cols) // t.item
        for part in tiles.values(t.dist, t.dtype, count, number):
            raw = memoryview(part).cast("B")
            file.add(raw)
            crc, at = engine_pure.crc32c(raw, crc), at + len(raw)
    return _pad(file, crc, at, layer.record_bytes)[0]


def _pad(file: Stream, crc: int, at: int, to: int) -> tuple[int, int]:
    if to == at:
        return crc, at
    zeros = bytes(to - at)
    file.add(zeros)
    return engine_pure.crc32c(zeros, crc), to
