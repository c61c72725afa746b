"""Expert packs: a checkpoint folder whose routed experts lie in record files beside its dense shards.

Reads mosaic.json, the manifest that says where each expert's record lies and in what format, and checks it
against the plan of config.json and the files; docs/format.md draws the bytes. Everything in it is hostile
input. Records are not read here: each one is checked by its CRC whenever the engine reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import few, load, open_regular, show, shown_path
from mosaic_c.plan import Experts, ModelPlan

MANIFEST = "mosaic.json"
KIND = "expert pack"
VERSION = 1
FEATURES = ("crc32c",)  # all that a reader of this version knows, and every pack needs
RECORDS = "experts-{:05d}.bin"
MAX_MANIFEST = 64_000_000  # bytes
RECORD_ALIGN = 4096  # of records
PART_ALIGN = 64  # of the six parts of a record
PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Format:
    """How a matrix is stored, rows one after the other, each from a whole byte on.

    block: rows and columns that share a scale (cols 0: the whole row); scale None: no scales, block (0, 0).
    """

    dtype: str
    scale: str | None = None
    block: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """As people call it: int4-row, int4-g64, mxfp4, fp8, bf16."""
        name = {"INT4": "int4", "I8": "int8", "F4": "mxfp4", "F8_E4M3": "fp8"}.get(
            self.dtype, self.dtype.lower()
        )
        if self.scale is None or self.block in ((128, 128), (1, 32)) and self.dtype[0] == "F":
            return name
        return f"{name}-g{self.block[1]}" if self.block[1] else f"{name}-row"

    def nbytes(self, rows: int, cols: int) -> int:
        return rows * -(-cols * BITS[self.dtype] // 8)

    def scales(self, rows: int, cols: int) -> int:
        """How many scales."""
        if self.scale is None:
            return 0
        return -(-rows // self.block[0]) * -(-cols // (self.block[1] or cols))

    def scale_nbytes(self, rows: int, cols: int) -> int:
        return self.scales(rows, cols) * BITS[self.scale] // 8 if self.scale else 0


_GROUPS = ((1, 0), (1, 32), (1, 64), (1, 128))
# What the engine computes with (mosaic_c/dtype.c): dtype -> scale dtypes, blocks.
ALLOWED: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "F32": ((), ()),
    "BF16": ((), ()),
    "F16": ((), ()),
    "F8_E4M3": (("F32", "BF16", "F8_E8M0"), ((128, 128), (1, 0))),
    "F4": (("F8_E8M0",), ((1, 32),)),
    "INT4": (("F32", "BF16", "F16"), _GROUPS),
    "I8": (("F32", "BF16", "F16"), _GROUPS),
}


@dataclass(frozen=True)
class PackLayer:
    """The experts of one layer: equal records one after the other, from `offset` of a file on.

    file: index into Pack.files. formats: of gate, up, down. parts: where gate, up, down and then their scales
    begin in a record. crc: (count,) uint32, of each expert's record.
    """

    file: int
    offset: int
    count: int
    formats: tuple[Format, Format, Format]
    shapes: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    record_bytes: int
    crc: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.count * self.record_bytes


@dataclass(frozen=True)
class Pack:
    """A manifest that was found good. files, sizes: names in the folder and bytes of the record files;
    layers: for each layer of the plan that has experts; source: what the manifest says of its origin."""

    files: list[str]
    sizes: list[int]
    layers: list[PackLayer]
    source: dict[str, Any]

    @property
    def format(self) -> str:
        """The name of the format of all layers and matrices, or the names of all of them."""
        return ", ".join(sorted({f.name for x in self.layers for f in x.formats}))


def shapes_of(e: Experts) -> tuple[tuple[int, int], ...]:
    """(rows, cols) of gate, up, down."""
    return (e.width, e.hidden), (e.width, e.hidden), (e.hidden, e.width)


def lay_out(
    formats: Sequence[Format], shapes: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], int]:
    """(where gate, up, down and their scales begin, bytes of the whole record)."""
    at, parts = 0, []
    pairs = list(zip(formats, shapes, strict=True))
    for size in (*(f.nbytes(*s) for f, s in pairs), *(f.scale_nbytes(*s) for f, s in pairs)):
        parts.append(at := -(-at // PART_ALIGN) * PART_ALIGN)
        at += size
    return tuple(parts), -(-at // RECORD_ALIGN) * RECORD_ALIGN


def read(folder: Path, plan: ModelPlan, files: bool = True) -> Pack | None:
    """The pack that a folder is; None: it has no manifest and no record files. files False: the record files are
    not looked at, and need not be there.

    Raises MosaicError of one line: ENOENT, EIO for missing or short files, EUNSUPPORTED for another version or
    a feature this reader does not know, EFORMAT for everything that breaks a rule or contradicts config.json.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        if os.path.lexists(folder / RECORDS.format(1)):
            raise MosaicError(
                f"{shown_path(folder)}: record files without their manifest {MANIFEST}; copy it too",
                code="ENOENT",
            )
        return None
    return _Reader(folder, shown_path(path), plan, files).read(load(path, MAX_MANIFEST))


def largest_file(folder: Path) -> Path | None:
    """The largest file of weights in a folder: its safetensors files, and the record files that a manifest names.
    Nothing is checked: a manifest that cannot be read names none."""
    found = list(folder.glob("*.safetensors"))
    try:
        entries = load(folder / MANIFEST, MAX_MANIFEST).get("files")
    except MosaicError:
        entries = None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and _is_record_file(entry.get("name")):
            found.append(folder / entry["name"])
    sizes = {path: path.stat().st_size for path in found if path.is_file()}
    return max(sizes, key=sizes.__getitem__, default=None)


def _is_record_file(name: object) -> bool:
    """The plain name of a .bin file."""
    return isinstance(name, str) and name.endswith(".bin") and not any(c in name for c in "/\\\0")


class _Reader:
    def __init__(self, folder: Path, where: str, plan: ModelPlan, look: bool = True) -> None:
        self.folder, self.where, self.plan, self.look = folder, where, plan, look

    def read(self, m: dict[str, Any]) -> Pack:
        self._head(m)
        source = self._want(m, "source", dict, "an object")
        if source.get("synthetic") is not True and not _is_sha256(source.get("sha256")):
            self._fail('source: expected "sha256" of 64 hex digits, or "synthetic": true', source)
        files, sizes = self._files(self._want(m, "files", list, "a list"))
        entries = self._want(m, "layers", list, "a list")
        experts = [x.experts for x in self.plan.moe_layers if x.experts]
        if len(entries) != len(experts):
            self._fail(f"layers: config.json has {len(experts)} layers with experts", len(entries))
        layers = [
            self._layer(f"layers[{i}]", x, experts[i], len(files)) for i, x in enumerate(entries)
        ]
        self._tile(files, sizes, layers)
        return Pack(files, sizes, layers, source)

    def _head(self, m: dict[str, Any]) -> None:
        if m.get("mosaic_c") != KIND:
            self._fail(f'"mosaic_c": expected {show(KIND)}', m.get("mosaic_c"))
        version = self._want(m, "version", int, "an integer")
        if version != VERSION:
            self._fail(f"version: this build reads version {VERSION}", version, "EUNSUPPORTED")
        order = self._want(m, "byte_order", str, "a string")
        if order != "little":
            self._fail('byte_order: expected "little"', order, "EUNSUPPORTED")
        features = self._want(m, "features", list, "a list")
        unknown = [x for x in features if not isinstance(x, str) or x not in FEATURES]
        if unknown:
            self._fail(
                f"features: this pack needs {few(unknown)}, this build knows {few(list(FEATURES))}; a newer "
                "version may read it", features, "EUNSUPPORTED",
            )  # fmt: skip
        if missing := [x for x in FEATURES if x not in features]:
            self._fail(f"features: version {VERSION} expects {few(missing)}", features)

    def _files(self, entries: list[Any]) -> tuple[list[str], list[int]]:
        names: list[str] = []
        sizes: list[int] = []
        for i, entry in enumerate(entries):
            at = f"files[{i}]"
            if not isinstance(entry, dict):
                self._fail(f"{at}: expected an object", entry)
            name = self._want(entry, "name", str, "a string", at)
            if name in names or not _is_record_file(name):
                self._fail(
                    f"{at}: expected the plain name of a .bin file in this folder, once", name
                )
            size = claimed = self._whole(entry, "bytes", at)
            if self.look:
                fd, size = open_regular(self.folder / name)
                os.close(fd)
            if size != claimed:
                raise MosaicError(
                    f"{shown_path(self.folder / name)}: {MANIFEST} expects {claimed} bytes, got {size}; "
                    f"{'resume the copy' if size < claimed else 'not the file it describes'}",
                    code="EIO" if size < claimed else "EFORMAT",
                )
            names.append(name)
            sizes.append(size)
        return names, sizes

    def _layer(self, at: str, entry: object, e: Experts, files: int) -> PackLayer:
        if not isinstance(entry, dict):
            self._fail(f"{at}: expected an object", entry)
        file, offset = self._whole(entry, "file", at), self._whole(entry, "offset", at)
        if file >= files:
            self._fail(f"{at}: file: the pack has {files}, counted from 0", file)
        count = self._whole(entry, "experts", at)
        if count != e.count:
            self._fail(f"{at}: experts: config.json has {e.count}", count)
        shapes, formats = shapes_of(e), []
        for part, shape in zip(PARTS, shapes, strict=True):
            formats.append(self._format(f"{at}: {part}", entry.get(part), shape))
        parts, size = lay_out(formats, shapes)
        claimed = self._whole(entry, "record_bytes", at)
        if claimed != size:
            self._fail(f"{at}: record_bytes: formats and shapes make {size}", claimed)
        digits = self._want(entry, "crc32c", str, "a string", at)
        try:
            crc = np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint32)
        except ValueError:
            crc = np.zeros(0, np.uint32)
        if len(crc) != count or len(digits) != 8 * count:
            self._fail(f"{at}: crc32c: expected 8 hex digits for each of {count} experts", digits)
        a, b, c = formats
        return PackLayer(file, offset, count, (a, b, c), shapes, parts, size, crc)

    def _format(self, at: str, entry: object, shape: tuple[int, int]) -> Format:
        if not isinstance(entry, dict):
            self._fail(f"{at}: expected an object", entry)
        dtype, layout = entry.get("dtype"), entry.get("layout")
        if not isinstance(dtype, str) or dtype not in ALLOWED:
            self._fail(f"{at}: dtype: expected one of {', '.join(ALLOWED)}", dtype, "EUNSUPPORTED")
        if layout != "rows":
            self._fail(f'{at}: layout: expected "rows"', layout, "EUNSUPPORTED")
        if not _same(entry.get("shape"), shape):
            self._fail(f"{at}: shape: config.json makes it {list(shape)}", entry.get("shape"))
        scales, blocks = ALLOWED[dtype]
        scale, block = entry.get("scale_dtype"), entry.get("block")
        if not scales:
            if scale is not None or block is not None:
                self._fail(f"{at}: {dtype} takes no scale_dtype and no block", scale or block)
            return Format(dtype)
        if not isinstance(scale, str) or scale not in scales:
            self._fail(f"{at}: scale_dtype: {dtype} takes {' or '.join(scales)}", scale)
        for known in blocks:
            if _same(block, known):
                return Format(dtype, scale, known)
        expected = ", ".join(str(list(x)) for x in blocks)
        self._fail(f"{at}: block: {dtype} takes one of {expected} (0: the whole row)", block)

    def _tile(self, files: list[str], sizes: list[int], layers: list[PackLayer]) -> None:
        """Layers fill the files without overlap or hole."""
        end = [0] * len(files)
        for i in sorted(range(len(layers)), key=lambda i: (layers[i].file, layers[i].offset)):
            x = layers[i]
            if x.offset != end[x.file]:
                what = "overlap" if x.offset < end[x.file] else "leave a hole"
                self._fail(
                    f"layers[{i}]: its records {what} in {show(files[x.file])}: expected offset "
                    f"{end[x.file]}", x.offset,
                )  # fmt: skip
            end[x.file] += x.nbytes
        for name, size, used in zip(files, sizes, end, strict=True):
            if used != size:
                self._fail(f"{show(name)} has {size} bytes, expected as many as its records", used)

    def _want(self, entry: dict[str, Any], key: str, kind: type, text: str, at: str = "") -> Any:
        value = entry.get(key)
        if type(value) is not kind:
            self._fail(f"{at}{': ' if at else ''}{key}: expected {text}", value)
        return value

    def _whole(self, entry: dict[str, Any], key: str, at: str) -> int:
        value = self._want(entry, key, int, "a whole number", at)
        if not 0 <= value < 2**62:
            self._fail(f"{at}: {key}: expected 0 or more, below 2^62", value)
        return value

    def _fail(self, rule: str, got: object, code: str = "EFORMAT") -> Any:
        raise MosaicError(f"{self.where}: {rule}, got {show(got)}", code=code)


def _same(value: object, pair: tuple[int, int]) -> bool:
    """A JSON list of just these integers (true is no 1)."""
    return isinstance(value, list) and [type(x) for x in value] == [int, int] and (*value,) == pair


def _is_sha256(value: object) -> bool:
    digits = "0123456789abcdef"
    return isinstance(value, str) and len(value) == 64 and all(c in digits for c in value)


# ---- writing -------------------------------------------------------------------------------------


def manifest(pack: Pack) -> dict[str, Any]:
    """The manifest as a JSON value; read() gives the pack back."""
    return {
        "mosaic_c": KIND,
        "version": VERSION,
        "byte_order": "little",
        "features": list(FEATURES),
        "source": pack.source,
        "files": [
            {"name": name, "bytes": size} for name, size in zip(pack.files, pack.sizes, strict=True)
        ],
        "layers": [dict(_entry(x)) for x in pack.layers],
    }


def _entry(x: PackLayer) -> Iterator[tuple[str, Any]]:
    yield from (("file", x.file), ("offset", x.offset), ("experts", x.count))
    yield "record_bytes", x.record_bytes
    for part, form, shape in zip(PARTS, x.formats, x.shapes, strict=True):
        scaled = {"scale_dtype": form.scale, "block": list(form.block)} if form.scale else {}
        yield part, {"dtype": form.dtype, "shape": list(shape), "layout": "rows"} | scaled
    yield "crc32c", x.crc.astype(">u4").tobytes().hex()
