"""Opening a folder: configs, index, shards, headers; every rule has its own message."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from helpers_checkpoint import (
    QWEN3,
    QWEN35,
    changed,
    data_bytes,
    header_of,
    refusal,
    tensors_of,
    write_checkpoint,
    write_index,
    write_raw,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic_c import engine, engine_pure, pack_format
from mosaic_c.checkpoint import DTYPE_CODES, TENSOR_DTYPE, Checkpoint, TensorInfo
from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError
from mosaic_c.families import plan_for
from mosaic_c.header import Columns, read_header

PLAN = plan_for(QWEN3)
TENSORS = tensors_of(PLAN)
TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def halves(name: str) -> str:
    return TWO["layers.1." in name]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "single", QWEN3, TENSORS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", QWEN3, TENSORS, halves)


def refused(folder: Path, *words: str, code: str | None = None) -> str:
    return refusal(lambda: Checkpoint.open(folder), *words, code=code)


def opened(tmp_path: Path, header: object, data: int) -> Columns:
    """read_header of a file with this header: bytes, text, or a value for JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    write_raw(path, raw, data)
    columns = Columns()
    read_header(path, columns)
    return columns


def bad_header(tmp_path: Path, header: object, *words: str, data: int = 0, code: str = "EFORMAT"):
    text = refusal(lambda: opened(tmp_path, header, data), "x.safetensors", *words, code=code)
    assert str(tmp_path) in text


def entry(dtype: object = "F32", shape: object = (2,), span: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


# ---- what opens ----------------------------------------------------------------------------------


def test_single_file_without_index(single: Path) -> None:
    c = Checkpoint.open(single)
    assert c.files == [single.resolve() / "model.safetensors"] and c.names == ["model.safetensors"]
    assert c.sizes == [c.files[0].stat().st_size]
    assert c.config == QWEN3 and c.generation_config == {} and c.plan == PLAN
    assert set(c.tensors) == set(TENSORS) and len(c.tensors) == len(TENSORS)
    header = header_of(TENSORS)
    start = 8 + len(json.dumps(header))
    for name, (dtype, shape) in TENSORS.items():
        begin, end = header[name]["data_offsets"]
        assert c.tensors[name] == TensorInfo(0, dtype, shape, start + begin, end - begin)
    assert "nope" not in c.tensors and c.tensors.row("nope") == -1
    with pytest.raises(KeyError):
        c.tensors["nope"]


def test_shards_follow_the_index_whatever_they_are_called(tmp_path: Path) -> None:
    names = {"0": "layers-0.safetensors", "1": "model-1-of-61.safetensors"}

    def place(name: str) -> str:
        parts = name.split(".")
        return names[parts[2]] if parts[1] == "layers" else "outside.safetensors"

    c = Checkpoint.open(write_checkpoint(tmp_path, QWEN3, TENSORS, place))
    for name in TENSORS:
        assert c.names[c.tensors[name].file] == place(name)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not named by the index, never read")
    assert Checkpoint.open(tmp_path).names == c.names


def test_links_of_the_hugging_face_cache(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(sharded.iterdir())):
        path.rename(blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    c = Checkpoint.open(snapshot)
    assert all(path.parent == blobs.resolve() for path in c.files)
    assert sorted(c.names) == list(TWO)
    refused(tmp_path, "Hugging Face cache", "snapshots/", code="ENOENT")
    c.files[0].unlink()
    refused(snapshot, c.names[0], "1 of 2 shards missing", code="ENOENT")


def test_relative_path(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single.parent)
    assert Checkpoint.open("single").files[0].is_absolute()


def test_mc_tensor_layout() -> None:
    """The numpy record is mc_tensor of mosaic_c.h, field for field as a C compiler lays it out."""
    assert TENSOR_DTYPE.itemsize == struct.calcsize("@iiqqqiiqiiiI") == 64
    offsets = {name: TENSOR_DTYPE.fields[name][1] for name in TENSOR_DTYPE.names}
    assert offsets == {
        "file": 0, "dtype": 4, "offset": 8, "rows": 16, "cols": 24,
        "scale_file": 32, "scale_dtype": 36, "scale_offset": 40, "block_rows": 48, "block_cols": 52,
        "record": 56, "crc": 60,
    }  # fmt: skip
    assert DTYPE_CODES == engine.DTYPES


@pytest.mark.parametrize("dtype", pack_format.ALLOWED)
def test_a_type_is_as_wide_here_as_in_c(dtype: str) -> None:
    """By the slab of an expert whose scales lie elsewhere."""
    side, (scales, blocks) = 4096, pack_format.ALLOWED[dtype]
    size = side * side * BITS[dtype] // 8
    e = np.zeros((1, 3), TENSOR_DTYPE)
    e["dtype"], e["rows"], e["cols"], e["offset"] = (
        DTYPE_CODES[dtype],
        side,
        side,
        [0, size, 2 * size],
    )
    e["scale_file"] = -1
    wanted = 0
    if scales:
        e["scale_file"], e["scale_dtype"] = 1, DTYPE_CODES[scales[0]]
        (rows, cols) = e["block_rows"], e["block_cols"] = blocks[0]
        wanted = 3 * (side // rows) * (side // (cols or side)) * BITS[scales[0]] // 8
    slab, resident = engine_pure.expert_slab(e)
    assert 3 * size <= slab <= 3 * size + 8192 and wanted <= resident <= wanted + 1024


# ---- the folder and its configs ------------------------------------------------------------------


def test_folder(tmp_path: Path, single: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such folder", code="ENOENT")
    refused(Path("\0"), "cannot read", code="EIO")
    refusal(lambda: Checkpoint.open(""), "no such folder", code="ENOENT")
    refused(single / "config.json", "config.json", "a file; expected the folder", code="EIO")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "empty", "no config.json", code="ENOENT")
    (empty / "model.gguf").touch()
    refused(empty, "GGUF files are not supported")
    if os.getuid():
        empty.chmod(0)
        refused(empty, "cannot read this folder", "Permission denied", code="EIO")
        empty.chmod(0o700)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text, words",
    [
        (b"", ["not JSON"]),
        (b"{", ["not JSON"]),
        (b'{"a": 1,}', ["not JSON"]),
        (b'\xff{"a": 1}', ["not UTF-8", "byte 0 is 0xff"]),
        (b'\xef\xbb\xbf{"a": 1}', ["not JSON"]),
        (b"[]", ["must be a JSON object", "an array"]),
        (b"null", ["must be a JSON object", "null"]),
        (b'"x"', ["must be a JSON object", "a string"]),
        (b"1e999", ["must be a JSON object", "a number out of range"]),
        (b'{"a": NaN}', ["NaN"]),
        (b'{"a": -Infinity}', ["-Infinity"]),
        (b'{"a": 1, "b": {"x": 0, "c": 1, "c": 2}}', ['"c" twice']),
        (b'{"a": ' + b"[" * 100_000, ["nested too deeply"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["5000 digits"]),
    ],
)
def test_json_of_configs(single: Path, name: str, text: bytes, words: list[str]) -> None:
    (single / name).write_bytes(text)
    refused(single, str(single / name), *words, code="EFORMAT")


def test_config_that_is_no_file(single: Path) -> None:
    (single / "config.json").unlink()
    os.mkfifo(single / "config.json")
    refused(single, "config.json", "not a regular file", code="EIO")
    (single / "config.json").unlink()
    (single / "config.json").symlink_to("/dev/zero")
    refused(single, "config.json", "not a regular file", code="EIO")
    (single / "config.json").unlink()
    with (single / "config.json").open("wb") as f:
        f.truncate(1 << 40)
    refused(single, "config.json", "at most 64000000", str(1 << 40))


def test_unknown_family_names_the_known(single: Path) -> None:
    config = changed(changed(QWEN3, "model_type", "llama"), "architectures", ["LlamaForCausalLM"])
    (single / "config.json").write_text(json.dumps(config))
    refused(
        single, "config.json", '"llama"', "LlamaForCausalLM", "qwen3_5_moe", "qwen3_moe",
        "qwen2_moe", code="EUNSUPPORTED",
    )  # fmt: skip


def test_quantisation_beside_the_config(single: Path) -> None:
    text = '{"producer": {}, "quantization": {"quant_algo": "NVFP4"}}'
    (single / "hf_quant_config.json").write_text(text)
    refused(single, "hf_quant_config.json", '"NVFP4"', "not supported", code="EUNSUPPORTED")


# ---- index and shards ----------------------------------------------------------------------------


def test_missing_shards_are_all_named(sharded: Path) -> None:
    for name in TWO:
        (sharded / name).unlink()
    refused(sharded, "2 of 2 shards missing", *TWO, "resume the download", code="ENOENT")


def test_no_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "model.safetensors.index.json", TWO[0], TWO[1], "download", code="ENOENT")
    for name in TWO:
        (sharded / name).unlink()
    refused(sharded, "no safetensors files", code="ENOENT")


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\b.safetensors",
     "a\0.safetensors", 7, None, ["model.safetensors"], {}, True],
)  # fmt: skip
def test_index_entries(single: Path, name: object) -> None:
    write_index(single, dict.fromkeys(TENSORS, name))
    refused(single, "index.json", json.dumps(name), "expected the plain name", code="EFORMAT")


def test_index_of_another_kind(single: Path) -> None:
    write_index(single, dict.fromkeys(TENSORS, "pytorch_model.bin"))
    refused(single, '"pytorch_model.bin"', "expected a .safetensors file")
    for value in (None, [], {}, "x"):
        write_index(single, value)
        refused(single, "index.json", "weight_map must map", json.dumps(value))


def test_index_that_forgets_model_safetensors(sharded: Path, single: Path) -> None:
    (single / "model.safetensors").rename(sharded / "model.safetensors")
    refused(sharded, "both model.safetensors and", "remove one", code="EFORMAT")


def test_index_names_a_tensor_its_shard_lacks(sharded: Path) -> None:
    place = {name: halves(name) for name in TENSORS}
    write_index(sharded, {**place, "model.extra.weight": TWO[1]})
    refused(sharded, "index.json", "1 tensors", '"model.extra.weight"', TWO[1], code="EFORMAT")
    place["model.norm.weight"] = TWO[1]
    write_index(sharded, place)
    refused(sharded, '"model.norm.weight"', TWO[1])


def test_same_tensor_in_two_shards(sharded: Path) -> None:
    def place(name: str) -> str:
        return TWO[0]

    both = {**{n: s for n, s in TENSORS.items() if halves(n) == TWO[1]}}
    both["model.norm.weight"] = TENSORS["model.norm.weight"]
    header = header_of(both)
    write_raw(sharded / TWO[1], json.dumps(header).encode(), data_bytes(header))
    refused(sharded, '"model.norm.weight"', "two shards", *TWO, code="EFORMAT")


def test_strange_shard_names_stay_on_one_line(sharded: Path) -> None:
    write_index(sharded, dict.fromkeys(TENSORS, "a\n\ud800\x1b[31m.safetensors"))
    refused(sharded, "missing", "\\ud800", "\\u001b")


# ---- the file around its header ------------------------------------------------------------------


def test_truncated_shard(sharded: Path) -> None:
    path = sharded / TWO[1]
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(
        sharded, str(path), "truncated", f"expects {size} bytes", f"got {size - 1}",
        "resume the download", code="EIO",
    )  # fmt: skip
    os.truncate(path, 100)
    refused(sharded, str(path), "truncated inside its header", "got 100", code="EIO")
    for size in (0, 7):
        os.truncate(path, size)
        refused(sharded, str(path), f"{size} bytes", "expected a header of 8 bytes", code="EIO")


def test_shard_that_is_no_file(sharded: Path) -> None:
    path = sharded / TWO[0]
    path.unlink()
    os.mkfifo(path)
    refused(sharded, str(path), "not a regular file", code="EIO")
    path.unlink()
    path.mkdir()
    refused(sharded, str(path), "not a regular file", code="EIO")


def test_unreadable_shard(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def pread(fd: int, count: int, offset: int) -> bytes:
        if offset >= 8:
            raise OSError(5, "Input/output error")
        return real(fd, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    refused(sharded, "cannot read", "Input/output error", code="EIO")
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real(fd, min(count, 3), offset))
    Checkpoint.open(sharded)  # short reads are continued


def test_header_size(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_raw(path, b"{}", 0, length=100_000_001)
    words = ("x.safetensors", "header too large", "claims 100000001", "at most 100000000")
    refusal(lambda: read_header(path, Columns()), *words, code="EFORMAT")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    refusal(lambda: read_header(path, Columns()), "Git LFS pointer", "git lfs pull")
    path.write_bytes(b"<!DOCTYPE html>" * 20)
    refusal(lambda: read_header(path, Columns()), "header too large", "not a safetensors file")


# ---- the header ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, words",
    [
        (b"", ["the header is not JSON"]),
        (b"{", ["the header is not JSON"]),
        (b'{"\xff": 1}', ["the header is not UTF-8"]),
        (b"[]", ["must be a JSON object", "an array"]),
        (b'{"a": NaN}', ["NaN"]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"a": {"dtype": "F32", "shape": [' + b"1" * 2000 + b"]}}", ["2000 digits"]),
        (b'{"a": 1, "a": 1}', ['"a" twice']),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', ['"dtype" twice']),
        (b'{"__metadata__": {"x": "1", "x": "2"}}', ['"x" twice']),
    ],
)
def test_json_of_headers(tmp_path: Path, header: bytes, words: list[str]) -> None:
    bad_header(tmp_path, header, *words)


@pytest.mark.parametrize("value", [1, [], "x", {"a": 1}, {"a": {"b": "c"}}, entry()])
def test_metadata(tmp_path: Path, value: object) -> None:
    bad_header(tmp_path, {"__metadata__": value}, "__metadata__", "strings to strings")
    opened(tmp_path, {"__metadata__": {"format": "pt"}, "t": entry()}, 8)


@pytest.mark.parametrize(
    "value, words",
    [
        (7, ["needs exactly dtype, shape and data_offsets", "got 7"]),
        ({"dtype": "F32", "shape": [2]}, ["needs exactly", "got {"]),
        ({**entry(), "more": 1}, ["needs exactly", '"more"']),
        (entry(dtype="F33"), ["unknown dtype", "F8_E4M3", 'got "F33"']),
        (entry(dtype=1), ["unknown dtype", "got 1"]),
        (entry(dtype=["F32"]), ["unknown dtype"]),
        (entry(shape=2), ["shape must be a list", "got 2"]),
        (entry(shape=[-2]), ["shape must be", "got [-2]"]),
        (entry(shape=[2.0]), ["shape must be", "got [2.0]"]),
        (entry(shape=[True, 2]), ["shape must be", "got [true, 2]"]),
        (entry(shape=["2"]), ["shape must be"]),
        (entry(shape=[2**40, 2**40]), ["shape overflows", "elements", str(2**40)]),
        (entry(shape=[2**63, 2]), ["shape overflows"]),
        (entry(shape=[10**30]), ["shape overflows"]),
        (entry(shape=[3]), ["F32 [3] takes 12 bytes", "data_offsets give, got 8"]),
        (entry(shape=[]), ["F32 [] takes 4 bytes", "got 8"]),
        (entry(dtype="F4", shape=[3], span=[0, 2]), ["F4 [3] takes 2 bytes", "got 2"]),
        (entry(span=8), ["data_offsets must be two integers", "got 8"]),
        (entry(span=[0, 8, 8]), ["data_offsets must be two"]),
        (entry(span=[0]), ["data_offsets must be two"]),
        (entry(span=[0.0, 8]), ["data_offsets must be two", "got [0.0, 8]"]),
        (entry(span=[False, 8]), ["data_offsets must be two", "got [false, 8]"]),
        (entry(span=["0", "8"]), ["data_offsets must be two"]),
        (entry(span=[-8, 0]), ["0 <= begin <= end", "got [-8, 0]"]),
        (entry(span=[8, 0]), ["0 <= begin <= end", "got [8, 0]"]),
        (entry(span=[0, 2**63]), ["data_offsets overflow", str(2**63)]),
        (entry(span=[10**30, 10**31]), ["data_offsets overflow"]),
    ],
)
def test_one_tensor(tmp_path: Path, value: object, words: list[str]) -> None:
    bad_header(tmp_path, {"some.weight": value}, 'tensor "some.weight"', *words, data=8)


@pytest.mark.parametrize(
    "spans, data, words",
    [
        ([(0, 8), (4, 12)], 12, ['"t0" and "t1" overlap', "begin at byte 8", "got 4"]),
        ([(4, 12), (0, 8)], 12, ['"t1" and "t0" overlap', "begin at byte 8", "got 4"]),
        ([(0, 8), (0, 8)], 8, ["overlap", "got 0"]),
        ([(0, 8), (12, 20)], 20, ['hole before tensor "t1"', "begin at byte 8", "got 12"]),
        ([(4, 12)], 12, ['hole before tensor "t0"', "begin at byte 0", "got 4"]),
        ([(0, 8), (8, 16)], 17, ["1 bytes after the last tensor"]),
    ],
)
def test_layout(tmp_path: Path, spans: list[tuple[int, int]], data: int, words: list[str]) -> None:
    bad_header(
        tmp_path, {f"t{i}": entry(span=s) for i, s in enumerate(spans)}, *words, data=data
    )  # fmt: skip


def test_layouts_that_are_fine(tmp_path: Path) -> None:
    assert opened(tmp_path, {}, 0).names == []
    bad_header(tmp_path, {}, "3 bytes after the last tensor", data=3)
    header = {"b": entry(span=(8, 16)), "z": entry(shape=(0, 5), span=(8, 8)), "a": entry()}
    columns = opened(tmp_path, json.dumps(header).encode() + b"   ", 16)
    assert columns.names == ["b", "z", "a"] and list(columns.nbytes) == [8, 0, 8]
    columns = opened(tmp_path, {"s": entry(dtype="F4", shape=(2, 3), span=(0, 3))}, 3)
    assert list(columns.nbytes) == [3]


def test_tensors_named_like_the_keys_of_one(tmp_path: Path) -> None:
    at = {"dtype": entry(span=(0, 8)), "shape": entry(span=(8, 16))}
    columns = opened(tmp_path, {**at, "data_offsets": entry(span=(16, 24))}, 24)
    assert columns.names == ["dtype", "shape", "data_offsets"]


# ---- fuzzing: whatever the bytes, a MosaicError of one line or success ---------------------------

FUZZ = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", "F8_E4M3", "dtype", "shape", "data_offsets", "silu", "fp8"])
)  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4),
    max_leaves=10,
)


def survives(call) -> None:
    try:
        call()
    except MosaicError as e:
        assert str(e).isprintable() and str(e).isascii() and len(str(e)) < 4000


@FUZZ
@given(data=st.binary(max_size=200))
def test_fuzz_file_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    survives(lambda: read_header(path, Columns()))
    write_raw(path, data, 8)
    survives(lambda: read_header(path, Columns()))


@FUZZ
@given(st.data())
def test_fuzz_header_bytes(tmp_path: Path, data: st.DataObject) -> None:
    """A good header with bytes flipped, inserted or cut."""
    header = {"a": entry(), "b.weight": entry("BF16", (2, 3), (8, 20)), "__metadata__": {"x": "y"}}
    raw = bytearray(json.dumps(header).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["flip", "insert", "cut"]))
        if how == "flip":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            raw[at:at] = data.draw(st.sampled_from([b'"', b"{", b"]", b"0", b"-", b"e9", b"\xff"]))
        elif len(raw) > 1:
            del raw[at]
    survives(lambda: opened(tmp_path, bytes(raw), 20))


@FUZZ
@given(header=st.dictionaries(st.text(max_size=8), JSON | st.fixed_dictionaries(
    {"dtype": LEAVES, "shape": JSON, "data_offsets": JSON}), max_size=4))  # fmt: skip
def test_fuzz_header_json(tmp_path: Path, header: dict[str, object]) -> None:
    survives(lambda: opened(tmp_path, header, 8))


@FUZZ
@given(name=st.sampled_from(["config.json", "generation_config.json", "hf_quant_config.json",
                             "model.safetensors.index.json"]), value=JSON)  # fmt: skip
def test_fuzz_other_json(tmp_path: Path, name: str, value: object) -> None:
    folder = write_checkpoint(tmp_path / "f", QWEN3, TENSORS)
    for path in folder.glob("*.json"):
        path.unlink()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    (folder / name).write_text(json.dumps(value))
    survives(lambda: Checkpoint.open(folder))
    write_index(folder, value)
    survives(lambda: Checkpoint.open(folder))


@FUZZ
@given(key=st.sampled_from([*QWEN35["text_config"], "quantization_config", "rope_scaling",
                            "rope_theta", "num_local_experts"]), value=JSON)  # fmt: skip
def test_fuzz_config_values(key: str, value: object) -> None:
    survives(lambda: plan_for(changed(QWEN35, f"text_config.{key}", value)))
    survives(lambda: plan_for(changed(QWEN3, key, value)))
    config = changed(QWEN3, "quantization_config", {"quant_method": "fp8", key: value})
    survives(lambda: plan_for(config))
