"""A Hugging Face checkpoint folder, or an expert pack: config.json, the shards' headers, and where each
tensor lies.

Opening reads a few megabytes of headers and no weights. Everything in the folder is hostile input:
whatever is wrong ends as one MosaicError of one line. bind.py gives the tensors their meaning.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mosaic_c import families
from mosaic_c import pack as packs
from mosaic_c.errors import MosaicError
from mosaic_c.header import DTYPES, MAX_HEADER, Columns, read_header
from mosaic_c.jsonfile import few, load, path_text, reason, show, shown_path
from mosaic_c.pack_tensors import check_headers
from mosaic_c.plan import ModelPlan

if TYPE_CHECKING:
    from mosaic_c.bind import Located

MAX_CONFIG = 64_000_000  # bytes of config.json and its like
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# mc_tensor and the dtype codes of mosaic_c.h, byte for byte: arrays of this go to C as they are.
TENSOR_DTYPE = np.dtype(
    [
        ("file", np.int32),  # -1: the tensor is absent
        ("dtype", np.int32),
        ("offset", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("scale_file", np.int32),  # -1: no scale
        ("scale_dtype", np.int32),
        ("scale_offset", np.int64),
        ("block_rows", np.int32),  # elements that share a scale; cols 0: the whole row
        ("block_cols", np.int32),
        ("record", np.int32),  # 1: part of a record, whose CRC is `crc`
        ("crc", np.uint32),
    ],
    align=True,
)
DTYPE_CODES = {
    "F32": 0, "BF16": 1, "F16": 2, "F8_E4M3": 3, "F4": 4, "INT4": 5, "I8": 6, "F8_E8M0": 7,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """file: index into Checkpoint.files; offset and nbytes: bytes, from the start of that file."""

    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorTable(Mapping[str, TensorInfo]):
    """Name -> TensorInfo, kept as columns (64,196 tensors take about 15 MB, mostly their names).

    Columns, one element a row: file int32, dtype int8 (index into header.DTYPES), shape int32
    (index into shapes), offset and nbytes int64.
    """

    def __init__(self, rows: dict[str, int], file: array[int], c: Columns) -> None:
        self._rows = rows
        self.file = np.array(file, np.int32)
        self.dtype = np.array(c.dtype, np.int8)
        self.shape = np.array(c.shape, np.int32)
        self.offset = np.array(c.begin, np.int64)
        self.nbytes = np.array(c.nbytes, np.int64)
        self.shapes = list(c.shapes)
        self._shape_ids = c.shapes

    def row(self, name: str) -> int:
        """The row of a tensor, -1 when there is none."""
        return self._rows.get(name, -1)

    def shape_id(self, shape: tuple[int, ...]) -> int:
        """What the shape column holds for this shape, -1 when no tensor has it."""
        return self._shape_ids.get(shape, -1)

    def at(self, row: int) -> TensorInfo:
        return TensorInfo(
            int(self.file[row]),
            DTYPES[self.dtype[row]],
            self.shapes[self.shape[row]],
            int(self.offset[row]),
            int(self.nbytes[row]),
        )

    def __getitem__(self, name: str) -> TensorInfo:
        return self.at(self._rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder. files: absolute real paths; TensorInfo.file and Span.file index them.

    names: what the folder calls those files (in the Hugging Face cache they are links).
    sizes: their bytes. pack: the experts lie in record files, which come last of the files; or None.
    """

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    plan: ModelPlan
    files: list[Path]
    names: list[str]
    sizes: list[int]
    tensors: TensorTable
    pack: packs.Pack | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Reads and validates configs and headers. Raises MosaicError: ENOENT for what is
        missing, EIO for what is unreadable or cut short, EFORMAT for what breaks a rule,
        EUNSUPPORTED for what is well-formed but not implemented."""
        folder = _folder(path)
        config = _config(folder)
        generation = folder / "generation_config.json"
        generation_config = load(generation, MAX_CONFIG) if os.path.lexists(generation) else {}
        plan = families.plan_for(config, shown_path(folder / "config.json"))
        names, index = _shards(folder)
        _check_present(folder, names)
        tensors, sizes = _read_all([folder / name for name in names])
        _check_index(folder / INDEX, index, names, tensors)
        pack = packs.read(folder, plan)
        if pack is not None and pack.tensors is not None:
            check_headers(tensors, pack.tensors, folder, packs.MANIFEST)
        if pack is not None:
            names, sizes = names + pack.files, sizes + pack.sizes
        files = [Path(os.path.realpath(folder / name)) for name in names]
        return cls(folder, config, generation_config, plan, files, names, sizes, tensors, pack)

    def locate(self, plan: ModelPlan | None = None) -> Located:
        """The plan (the checkpoint's own by default) with every weight found; see bind.locate."""
        from mosaic_c.bind import locate

        return locate(self, plan or self.plan)


def _folder(path: str | os.PathLike[str]) -> Path:
    path = path_text(path)
    shown = shown_path(path) or '""'
    try:
        folder = Path(os.path.abspath(path))
        os.stat(path)  # "" is no folder
        with os.scandir(folder):
            return folder
    except FileNotFoundError:
        raise MosaicError(f"{shown}: no such folder", code="ENOENT") from None
    except NotADirectoryError:
        problem = "a file; expected the folder that holds config.json and the safetensors files"
    except (OSError, ValueError) as e:
        problem = f"cannot read this folder: {reason(e)}"
    raise MosaicError(f"{shown}: {problem}", code="EIO")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not os.path.exists(path):
        found = "expected a Hugging Face checkpoint folder"
        if (folder / "snapshots").is_dir():
            found = "this is a Hugging Face cache folder: name the one under snapshots/ instead"
        elif any(folder.glob("*.gguf")):
            found = "GGUF files are not supported, expected Hugging Face safetensors"
        raise MosaicError(f"{shown_path(folder)}: no config.json: {found}", code="ENOENT")
    config = load(path, MAX_CONFIG)
    beside = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and os.path.lexists(beside):
        quant = load(beside, MAX_CONFIG).get("quantization")
        algo = quant.get("quant_algo") if isinstance(quant, dict) else quant
        raise MosaicError(
            f"{shown_path(beside)}: quantisation {show(algo)} is not supported, expected none or "
            'quant_method "fp8" in config.json',
            code="EUNSUPPORTED",
        )
    return config


def _shards(folder: Path) -> tuple[list[str], dict[str, int]]:
    """(file names, tensor name -> index of its file; empty without an index file)."""
    single = os.path.lexists(folder / SINGLE)
    if not os.path.lexists(folder / INDEX):
        if single:
            return [SINGLE], {}
        found = sorted(x.name for x in folder.glob("*.safetensors"))
        raise MosaicError(
            f"{shown_path(folder)}: neither {INDEX} nor {SINGLE}, found "
            f"{few(found, limit=3) if found else 'no safetensors files'}; "
            f"{'download the index too' if found else 'expected a Hugging Face checkpoint'}",
            code="ENOENT",
        )
    where = shown_path(folder / INDEX)
    weight_map = load(folder / INDEX, MAX_HEADER).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MosaicError(
            f"{where}: weight_map must map tensor names to files, got {show(weight_map)}",
            code="EFORMAT",
        )
    position: dict[str, int] = {}
    for tensor, name in weight_map.items():
        if type(name) is not str or name not in position:
            _check_entry(where, tensor, name)
            position[name] = len(position)
        weight_map[tensor] = position[name]
    if single and SINGLE not in position:
        raise MosaicError(
            f"{shown_path(folder)}: both {SINGLE} and {INDEX}, which does not name it; remove one",
            code="EFORMAT",
        )
    return list(position), weight_map


def _check_entry(where: str, tensor: str, name: object) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        problem = "expected the plain name of a file in this folder"
    elif not name.endswith(".safetensors"):
        problem = "expected a .safetensors file"
    else:
        return
    raise MosaicError(
        f"{where}: tensor {show(tensor)} is said to be in {show(name)}, {problem}",
        code="EFORMAT",
    )


def _check_present(folder: Path, names: list[str]) -> None:
    missing = [x for x in names if not os.path.exists(folder / x)]
    if missing:
        raise MosaicError(
            f"{shown_path(folder)}: {len(missing)} of {len(names)} shards missing: "
            f"{few(missing, limit=len(missing))}; resume the download",
            code="ENOENT",
        )


def _read_all(paths: list[Path]) -> tuple[TensorTable, list[int]]:
    columns, file, rows, sizes = Columns(), array("i"), dict[str, int](), []
    for i, path in enumerate(paths):
        first = len(columns.names)
        count, size = read_header(path, columns)
        sizes.append(size)
        file.extend([i] * count)
        for row in range(first, first + count):
            name = columns.names[row]
            if rows.setdefault(name, row) != row:
                raise MosaicError(
                    f"tensor {show(name)} is in two shards: {shown_path(paths[file[rows[name]]])} "
                    f"and {shown_path(path)}",
                    code="EFORMAT",
                )
    return TensorTable(rows, file, columns), sizes


def _check_index(
    where: Path, index: dict[str, int], names: list[str], tensors: TensorTable
) -> None:
    """Every tensor is in the shard that the index names."""
    lost = []
    for tensor, position in index.items():
        row = tensors.row(tensor)
        if row < 0 or tensors.file[row] != position:
            lost.append(tensor)
    if lost:
        raise MosaicError(
            f"{shown_path(where)}: {len(lost)} tensors are not in the shard it names: "
            f"{few(lost, limit=3)}, expected in {show(names[index[lost[0]]])}",
            code="EFORMAT",
        )
