"""Expert packs: a checkpoint folder whose routed experts lie in record files beside its dense shards.

Reads mosaic.json, the manifest that says where each expert's record lies and in what format, and checks it
against the plan of config.json and the files; docs/format.md draws the bytes. Everything in it is hostile
input. Records are not read here: each one is checked by its CRC whenever the engine reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c import pack_tensors
from mosaic_c.errors import MosaicError
from mosaic_c.jsonfile import few, load, open_regular, parse, read_small, show, shown_path
from mosaic_c.pack_format import Format, describe, read_format
from mosaic_c.pack_tensors import Stored
from mosaic_c.plan import Experts, ModelPlan

MANIFEST = "mosaic.json"
KIND = "expert pack"
VERSION = 1
# What a reader of this version knows: CRCs of records, which every pack has, and the list of all other tensors.
FEATURES = ("crc32c", pack_tensors.FEATURE)
RECORDS = "experts-{:05d}.bin"
MAX_MANIFEST = 64_000_000  # bytes
RECORD_ALIGN = 4096  # of records
PART_ALIGN = 64  # of the six parts of a record
PARTS = ("gate", "up", "down")


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
    layers: for each layer of the plan that has experts; source: what the manifest says of its origin;
    tensors: the others by name, texts: CRCs of files beside them (pack_tensors.py), both None in packs that list
    neither; matrices: names of those tensors that are matrices of the layers."""

    files: list[str]
    sizes: list[int]
    layers: list[PackLayer]
    source: dict[str, Any]
    tensors: dict[str, Stored] | None = None
    texts: dict[str, int] | None = None
    matrices: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """The name of the format of all layers and matrices, or the names of all of them."""
        return ", ".join(sorted({f.name for x in self.layers for f in x.formats}))

    @property
    def dense(self) -> list[Stored]:
        """How the matrices of the layers are stored; empty: the pack does not say."""
        return [self.tensors[x] for x in self.matrices if x in self.tensors] if self.tensors else []

    @property
    def dense_format(self) -> str:
        """The name of their formats, "" where the pack does not say."""
        return ", ".join(sorted({x.form.name for x in self.dense}))


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
    raw, where = read_small(path, MAX_MANIFEST), shown_path(path)
    m = parse(raw, where)
    if pack_tensors.SEAL in m:
        pack_tensors.check_seal(raw, m, where)
    return _Reader(folder, where, plan, files).read(m)


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
        if pack_tensors.FEATURE not in m["features"]:
            if pack_tensors.SEAL in m:
                self._fail(
                    f"features: its {pack_tensors.SEAL} expects {show(FEATURES[1])}", m["features"]
                )
            return Pack(files, sizes, layers, source)
        if pack_tensors.SEAL not in m:
            self._fail(f"{pack_tensors.SEAL}: expected 8 hex digits", None)
        tensors = pack_tensors.read_tensors(m.get("tensors"), self._fail)
        texts = pack_tensors.read_texts(m.get("texts"), self._fail)
        if self.look:
            pack_tensors.check_texts(self.folder, texts)
        for w in self.plan.matrices():
            if w.name in tensors and tensors[w.name].shape != w.shape:
                got = list(tensors[w.name].shape)
                self._fail(
                    f"tensors: {show(w.name)}: shape: config.json makes it {list(w.shape)}", got
                )
        names = tuple(w.name for w in self.plan.matrices())
        return Pack(files, sizes, layers, source, tensors, texts, names)

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
        if FEATURES[0] not in features:
            self._fail(f"features: version {VERSION} expects {show(FEATURES[0])}", features)

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
            formats.append(read_format(entry.get(part), f"{at}: {part}", shape, self._fail))
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


def _is_sha256(value: object) -> bool:
    digits = "0123456789abcdef"
    return isinstance(value, str) and len(value) == 64 and all(c in digits for c in value)


# ---- writing -------------------------------------------------------------------------------------


def manifest(pack: Pack) -> bytes:
    """The manifest as the bytes of its file; read() gives the pack back."""
    m = {
        "mosaic_c": KIND,
        "version": VERSION,
        "byte_order": "little",
        "features": list(FEATURES if pack.tensors is not None else FEATURES[:1]),
        "source": pack.source,
        "files": [
            {"name": name, "bytes": size} for name, size in zip(pack.files, pack.sizes, strict=True)
        ],
        "layers": [dict(_entry(x)) for x in pack.layers],
    }
    if pack.tensors is None or pack.texts is None:
        return _json(m)
    texts = {name: f"{crc:08x}" for name, crc in pack.texts.items()}
    return sealed(m | {"texts": texts, "tensors": pack_tensors.entries(pack.tensors)})


def sealed(m: dict[str, Any]) -> bytes:
    """The bytes of a manifest that lists tensors, with its own CRC."""
    return pack_tensors.seal(_json(m | {pack_tensors.SEAL: f"{0:08x}"}))


def _json(m: dict[str, Any]) -> bytes:
    return json.dumps(m, indent=2).encode() + b"\n"


def _entry(x: PackLayer) -> Iterator[tuple[str, Any]]:
    yield from (("file", x.file), ("offset", x.offset), ("experts", x.count))
    yield "record_bytes", x.record_bytes
    for part, form, shape in zip(PARTS, x.formats, x.shapes, strict=True):
        yield part, describe(form, shape)
    yield "crc32c", x.crc.astype(">u4").tobytes().hex()
