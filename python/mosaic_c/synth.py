"""Writes synthetic checkpoints: random weights in the layout of an official release or in an expert pack,
labelled so.

They stand in for models that are too large to fetch: same names, shapes, dtypes, byte order and
sharding, routers with a Zipf-like preference, text that is noise. Bytes depend on the arguments
alone. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mosaic_c import pack as packs
from mosaic_c import synth_pack
from mosaic_c import synth_shapes as shapes
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import shown_path
from mosaic_c.limits import format_size
from mosaic_c.synth_shapes import LABEL, SHAPES, Shape, Tensor
from mosaic_c.synth_stream import writing
from mosaic_c.synth_values import ITEMSIZE, Tiles

SHARD_BYTES = 4_000_000_000
_SPARE = 16 << 20  # room asked for beyond the tensors: headers, index, tokenizer
_DTYPE_ORDER = {"F32": 0, "BF16": 1, "F8_E4M3": 2}  # as the official writer sorts, before names
MAX_LAYERS, MAX_EXPERTS = 1024, 4096  # what the families accept


@dataclass(frozen=True)
class Summary:
    """What was written. bytes: all files together; parameters: scales not counted; records: the format
    of the experts of a pack, None for the layout of the release."""

    path: str
    shape: str
    dtype: str
    layers: int
    experts: int
    parameters: int
    tensors: int
    files: int
    bytes: int
    seconds: float
    records: str | None = None


def write(
    dst: str | os.PathLike[str],
    shape: str,
    layers: int | None = None,
    experts: int | None = None,
    dtype: str = "fp8",
    uniform: bool = False,
    seed: int = 0,
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
    records: str | None = None,
) -> Summary:
    """Writes a checkpoint of a named shape into the new folder dst.

    layers and experts (per layer) override the shape's; dtype is "fp8" or "bf16"; uniform leaves
    the routers without preference. records: a name of synth_shapes.RECORDS: an expert pack with
    experts of that format instead of the layout of the release. progress: a bar on stderr.
    UsageError for arguments that make no sense or an existing dst, MosaicError when the disk is too
    small or fails; dst does not exist
    afterwards, nor does anything half written.
    """
    dst = Path(os.path.abspath(dst))
    spec = _spec(shape, layers, experts, dtype, seed)
    if records is not None and records not in shapes.RECORDS:
        raise UsageError(
            f"unknown expert format {records!r}: expected one of {', '.join(shapes.RECORDS)}"
        )
    if os.path.lexists(dst):
        raise UsageError(
            f"{shown_path(dst)} exists already: remove it or choose another folder", "EEXIST"
        )
    tensors = list(shapes.tensors(spec, dtype, uniform, seed, records))
    shards = _shards(spec, dtype, tensors, shard_bytes)
    total = dense = sum(_bytes(t) for _, members in shards for _, t in members)
    planned = None
    if records is not None:
        source = {"synthetic": True, "shape": shape, "seed": seed, "uniform": uniform}
        planned = synth_pack.plan(spec, shapes.RECORDS[records], source, shard_bytes)
        total += sum(planned.sizes)
    start = time.monotonic()
    temporary = dst.with_name(f"{dst.name}.partial-{os.getpid()}")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        _sweep(dst)
        _check_disk(dst.parent, total + _SPARE)
        temporary.mkdir()
    except OSError as error:
        raise _failed(error, dst) from None
    try:
        with tqdm(
            total=total, unit="B", unit_scale=True, desc=f"synth {shape}", disable=not progress
        ) as bar:
            tiles = Tiles(seed)
            for name, members in shards:
                _write_shard(temporary / name, members, tiles, bar)
            if planned is not None:
                numbered = ((i, t) for i, t in enumerate(tensors) if t.recorded)
                synth_pack.write(temporary, planned, numbered, tiles, bar)
                (temporary / packs.MANIFEST).write_bytes(packs.manifest(planned))
        _write_texts(temporary, spec, dtype, uniform, seed, shards, dense, records)
        size = sum(x.stat().st_size for x in temporary.iterdir())
        temporary.rename(dst)
    except OSError as error:
        raise _failed(error, dst) from None
    finally:  # also after Ctrl-C; after the rename there is nothing to remove
        shutil.rmtree(temporary, ignore_errors=True)
    return Summary(
        path=str(dst),
        shape=shape,
        dtype=dtype,
        layers=spec.layers,
        experts=spec.experts,
        parameters=sum(t.count for t in tensors if not t.is_scale),
        tensors=len(tensors),
        files=len(shards) + (len(planned.files) if planned else 0),
        bytes=size,
        seconds=time.monotonic() - start,
        records=records,
    )


def _sweep(dst: Path) -> None:
    """Removes what a killed run for the same folder left behind: DST.partial-PID of no living process."""
    for path in dst.parent.glob(f"{glob.escape(dst.name)}.partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)


def _spec(shape: str, layers: int | None, experts: int | None, dtype: str, seed: int) -> Shape:
    if shape not in SHAPES:
        raise UsageError(f"unknown shape {shape!r}: expected one of {', '.join(SHAPES)}")
    if dtype not in ("bf16", "fp8"):
        raise UsageError(f"unknown dtype {dtype!r}: expected bf16 or fp8")
    if seed < 0:
        raise UsageError(f"seed {seed} is out of range: expected 0 or more")
    spec = SHAPES[shape]
    spec = replace(spec, layers=layers or spec.layers, experts=experts or spec.experts)
    if layers is not None and not 1 <= layers <= MAX_LAYERS:
        raise UsageError(f"{layers} layers are out of range: expected 1 to {MAX_LAYERS}")
    if experts is not None and not spec.top_k <= experts <= MAX_EXPERTS:
        raise UsageError(
            f"{experts} experts per layer are out of range: {shape} uses {spec.top_k} per token, "
            f"expected {spec.top_k} to {MAX_EXPERTS}"
        )
    return spec


def _failed(error: OSError, dst: Path) -> MosaicError:
    where = error.filename or dst
    return MosaicError(f"cannot write the checkpoint: {shown_path(where)}: {error.strerror}", "EIO")


def _check_disk(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise MosaicError(
            f"not enough disk space: needs {format_size(need)}, {folder} has {format_size(free)} "
            "free; choose another folder, or a smaller model with --layers or --experts-per-layer",
            "ENOSPC",
        )


# ---- safetensors --------------------------------------------------------------------------------

_Members = list[tuple[int, Tensor]]  # (number of the tensor in the model, tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.count * ITEMSIZE[tensor.dtype]


def _shards(
    spec: Shape, dtype: str, tensors: Iterable[Tensor], shard_bytes: int
) -> list[tuple[str, _Members]]:
    """Names of safetensors files and their tensors, in the order of the bytes.

    One file per layer and one for the rest where the release does so; else tensors fill files of
    shard_bytes in model order (an expert may end up in two) and a single file has no number.
    """
    dense = [(i, t) for i, t in enumerate(tensors) if not t.recorded]
    if spec.shard_by_layer and dtype == "fp8":
        layered: dict[int | None, _Members] = {}
        for i, t in dense:
            layered.setdefault(t.layer, []).append((i, t))
        parts = [
            ("outside" if layer is None else f"layers-{layer}", members)
            for layer, members in layered.items()
        ]
    else:
        filled: list[_Members] = [[]]
        size = 0
        for i, t in dense:
            if filled[-1] and size + _bytes(t) > shard_bytes:
                filled.append([])
                size = 0
            filled[-1].append((i, t))
            size += _bytes(t)
        n = len(filled)
        parts = [
            ("model" if n == 1 else f"model-{i:05d}-of-{n:05d}", members)
            for i, members in enumerate(filled, 1)
        ]
    return [
        (
            f"{name}.safetensors",
            sorted(members, key=lambda m: (_DTYPE_ORDER[m[1].dtype], m[1].name)),
        )
        for name, members in parts
    ]


def _header(members: _Members) -> bytes:
    """Length and JSON, padded with spaces to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", LABEL: "true"}}
    at = 0
    for _, t in members:
        end = at + _bytes(t)
        entries[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _values(members: _Members, tiles: Tiles) -> Iterator[np.ndarray]:
    for i, t in members:
        if t.column0 is None:
            yield from tiles.values(t.dist, t.dtype, t.count, i)
        else:
            yield from tiles.rows(t.dist, t.dtype, t.count // len(t.column0), i, t.column0)


def _write_shard(path: Path, members: _Members, tiles: Tiles, bar: tqdm) -> None:
    header = _header(members)
    with writing(path, len(header) + sum(_bytes(t) for _, t in members), bar) as file:
        file.add(header)
        for part in _values(members, tiles):
            file.add(memoryview(part).cast("B"))
    bar.update(-len(header))


# ---- the other files ----------------------------------------------------------------------------


def _write_texts(
    folder: Path,
    spec: Shape,
    dtype: str,
    uniform: bool,
    seed: int,
    shards: list[tuple[str, _Members]],
    total: int,
    records: str | None,
) -> None:
    config = shapes.config(spec, dtype) | {"mosaic_c_seed": seed, "mosaic_c_uniform": uniform}
    if records is not None:
        config["mosaic_c_experts"] = records
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", shapes.generation_config(spec))
    if len(shards) > 1:
        weight_map = {t.name: name for name, members in shards for _, t in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    if spec.vocab >= 300:
        _write_tokenizer(folder / "tokenizer.json", spec)
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(spec))
    options = f"--shape {spec.name} --layers {spec.layers} --experts-per-layer {spec.experts}"
    options += f" --dtype {dtype} --seed {seed}" + (" --uniform" if uniform else "")
    options += f" --experts {records}" if records else ""
    (folder / "README.md").write_text(
        f"# Synthetic checkpoint ({spec.name})\n\n"
        "The weights in this folder are random numbers in the file layout of a real model. They "
        "were never trained:\nwhatever text comes out is noise. Made for tests and measurements "
        f"with\n\n    python -m mosaic_c synth DST {options}\n",
        encoding="utf-8",
    )


def _write_json(path: Path, value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)  # piecemeal: an index is several MB of text
        file.write("\n")


_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _write_tokenizer(path: Path, spec: Shape) -> None:
    """tokenizer.json: ids 0..255 are the bytes, the rest invented words, which only come out.

    Text goes in byte by byte (no merges); every id of the vocabulary has a text. The vocabulary is
    written as it is made: as one object it would be the largest thing in memory here.
    """
    special = dict(zip(spec.specials, _SPECIALS, strict=True))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    shell = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags, "special": True} for i, text in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {},
            "merges": [],
        },
    }
    head, tail = json.dumps(shell).split('"vocab": {}')
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(head + '"vocab": {')
        texts = enumerate(_byte_chars())
        file.write(",\n".join(f"{json.dumps(text, ensure_ascii=False)}: {i}" for i, text in texts))
        # The specials stand in the vocabulary too: `tokenizers` renumbers those that do not.
        words = map(_word, itertools.count())
        for i in range(256, spec.vocab):
            file.write(f',\n"{special.get(i) or next(words)}": {i}')
        file.write("}" + tail + "\n")


def _tokenizer_config(spec: Shape) -> dict:
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": _SPECIALS[2],
        "model_max_length": spec.max_positions,
        "pad_token": _SPECIALS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, extra = [], 256
    for byte in range(256):
        chars.append(chr(byte if byte in keep else extra))
        extra += byte not in keep
    return chars


def _word(i: int) -> str:
    """A space and 1 to 3 syllables: all different, pronounceable, in no language."""
    syllables = []
    while i >= 0:
        i, digit = divmod(i, 80)
        syllables.append("bdfghjklmnprstvz"[digit // 5] + "aeiou"[digit % 5])
        i -= 1
    return chr(0x120) + "".join(reversed(syllables))  # U+0120 stands for the space
