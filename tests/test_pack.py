"""Expert packs: opened like any checkpoint, the same bits in every placement, and nothing that differs from
its manifest ever computed with. The record reader here is written from docs/format.md alone."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import open_small
from helpers_checkpoint import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import mosaic_c
from mosaic_c import MosaicError, UsageError, engine, engine_pure, pack, pack_format, synth
from mosaic_c.bind import matrix_bytes, scale_bytes
from mosaic_c.checkpoint import DTYPE_CODES, Checkpoint
from mosaic_c.cli import main
from mosaic_c.opening import plan_model
from mosaic_c.synth_shapes import RECORDS

FORMATS = tuple(RECORDS)
PROMPT = [(37 * i + 5) % 500 for i in range(90)]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format -> a tiny pack of it; "release" -> the same model in the layout of the release."""
    root = tmp_path_factory.mktemp("packs")
    for name in ("release", *FORMATS):
        records = None if name == "release" else name
        synth.write(root / name, "tiny", uniform=True, progress=False, records=records)
    return {name: root / name for name in ("release", *FORMATS)}


@pytest.fixture(scope="module")
def logits(packs: dict[str, Path]) -> dict[str, np.ndarray]:
    """Of the prompt, by the scalar kernels, every expert cached."""
    return {name: run(folder, isa="scalar")[0] for name, folder in packs.items()}


def run(folder: Path, **options: Any) -> tuple[np.ndarray, Any]:
    with open_small(folder, **options) as model, model.session() as session:
        return session.forward(PROMPT), model.stats()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


def manifest(folder: Path) -> Any:
    return json.loads((folder / "mosaic.json").read_text())


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "m"))


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


# ---- what a pack is ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_records_are_as_the_page_draws_them(packs, name):
    """The first and the last record by a reader of its own: parts, padding, CRC, and where they are found."""
    bits = {"INT4": 4, "F4": 4, "F8_E4M3": 8}
    scale_size = {"F32": 4, "F16": 2, "BF16": 2, "F8_E8M0": 1}
    m, located = manifest(packs[name]), Checkpoint.open(packs[name]).locate()
    for layer, expert in ((0, 0), (3, 15)):
        x = m["layers"][layer]
        path = packs[name] / m["files"][x["file"]]["name"]
        start = x["offset"] + expert * x["record_bytes"]
        record = path.read_bytes()[start : start + x["record_bytes"]]
        assert len(record) == x["record_bytes"] and start % 4096 == len(record) % 4096 == 0
        place = layer.to_bytes(4, "little") + expert.to_bytes(4, "little")
        assert x["crc32c"][8 * expert :][:8] == f"{crc32c(place + record):08x}"
        at, used = 0, bytearray(len(record))
        table = located.experts[layer][expert]
        sizes = []
        for part in ("gate", "up", "down"):
            (rows, cols), block = x[part]["shape"], x[part]["block"]
            wide = block[1] or cols
            scales = -(-rows // block[0]) * -(-cols // wide) * scale_size[x[part]["scale_dtype"]]
            sizes.append((rows * cols * bits[x[part]["dtype"]] // 8, scales))
        for k, size in enumerate([a for a, _ in sizes] + [b for _, b in sizes]):
            at = -(-at // 64) * 64
            assert table[k % 3]["scale_offset" if k > 2 else "offset"] == start + at
            used[at : at + size] = b"\1" * size
            at += size
        assert not any(np.frombuffer(record, np.uint8)[~np.array(list(used), bool)])
        assert [int(n) for n in matrix_bytes(table)] == [a for a, _ in sizes]
        assert [int(n) for n in scale_bytes(table)] == [b for _, b in sizes]
        assert set(table["record"]) == {1} and len(record) - at < 4096


def test_a_table_of_formats_is_the_engines():
    """What the reader lets through is what the engine computes, neither more nor less."""
    x, scale = np.zeros((1, 128), np.float32), bytes(4096)
    blocks = [(r, c) for r in (1, 2, 128) for c in (0, 16, 32, 64, 128, 256)]
    for dtype in DTYPE_CODES:
        scales, known = pack_format.ALLOWED.get(dtype, ((), ()))
        works = set()
        for kind, block in itertools.product(DTYPE_CODES, blocks):
            try:
                engine_pure.gemm("scalar", dtype, bytes(512), 1, 128, x, kind, scale, block)
                works.add((kind, block))
            except MosaicError:
                pass
        assert works == set(itertools.product(scales, known)), dtype


def test_names_of_formats():
    names = [pack.Format(*x).name for x in (
        ("INT4", "F32", (1, 0)), ("INT4", "F16", (1, 32)), ("I8", "F32", (1, 0)), ("I8", "F16", (1, 128)),
        ("F4", "F8_E8M0", (1, 32)), ("F8_E4M3", "BF16", (128, 128)), ("F8_E4M3", "F32", (1, 0)), ("BF16",),
    )]  # fmt: skip
    assert names == [
        "int4-row", "int4-g32", "int8-row", "int8-g128", "mxfp4", "fp8", "fp8-row", "bf16",
    ]  # fmt: skip
    assert FORMATS == ("int4-row", "int4-g64", "mxfp4", "fp8")


def test_crc32c_of_the_engine():
    assert engine_pure.crc32c(b"123456789") == crc32c(b"123456789") == 0xE3069283
    data = np.arange(5000, dtype=np.uint16)
    assert (
        engine_pure.crc32c(data[100:].copy(), engine_pure.crc32c(data[:100].copy()))
        == engine_pure.crc32c(data)
        == crc32c(data.tobytes())
    )


# ---- running -------------------------------------------------------------------------------------


def test_fp8_records_give_the_bits_of_the_release(logits):
    assert same(logits["fp8"], logits["release"])
    assert not any(same(logits[a], logits[b]) for a, b in itertools.combinations(FORMATS, 2))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FORMATS),
    slots=st.integers(4, 64),
    threads=st.integers(1, 3),
    io=st.sampled_from(["pread", "direct", "auto"]),
    policy=st.sampled_from(["lru", "lfu", "auto"]),
    isa=st.sampled_from(engine.isas()),
)
def test_any_setting_gives_the_same_bits(
    name, slots, threads, io, policy, isa, packs, logits
) -> None:
    got, stats = run(packs[name], slots=slots, threads=threads, io=io, policy=policy, isa=isa)
    assert same(got, logits[name])
    assert (stats.slots, stats.threads, stats.isa, stats.io_asked) == (slots, threads, isa, io)
    assert stats.misses == 64
    if policy != "auto":  # which may refuse a slot
        assert (stats.evictions > 0) == (slots < 64)


@pytest.mark.parametrize("name", FORMATS)
def test_generates(packs, name, capsys):
    args = ["generate", "hello", "--model", str(packs[name]), "-n", "5", "--temp", "0", "--ram"]
    assert main([*args, "400M"]) == 0
    assert capsys.readouterr().out
    assert main(["plan", "--model", str(packs[name]), "--ram", "1G"]) == 0


@pytest.mark.parametrize("name", ["int4-row", "fp8"])
@pytest.mark.parametrize("threads", [1, 8])
def test_scales_and_quantised_activations_are_planned(packs, name, threads):
    options = {"ram": "400M", "threads": threads, "ctx": 256}
    _, located, memory = plan_model(packs[name], **options)
    items = {item.name: item for item in memory.items}
    assert items["expert scales"].bytes == 0 and "their experts" in items["expert scales"].note
    assert memory.slab == manifest(packs[name])["layers"][0]["record_bytes"]
    each = items["quantised activations"].bytes // threads
    assert (each > 32 * 96) == (name == "int4-row") and (each == 0) == (name == "fp8")
    with mosaic_c.open(packs[name], **options | {"ram": memory.floor}) as model:
        model.session().forward(PROMPT)
        now = model.engine.stats()
        if each:  # the engine takes just that for threads; blocks share one scratch
            scratch = items["scratch"].bytes + items["quantised activations"].bytes
            assert now.mem_peak[3] <= scratch + 65536
            assert now.mem_now[3] >= items["quantised activations"].bytes
        assert sum(now.mem_peak) <= now.budget
    assert sum(len(e) for e in located.experts) == memory.experts == 64


def test_inspect_adds_up(packs, capsys):
    for name in FORMATS:
        assert main(["inspect", "--json", str(packs[name])]) == 0
        r = json.loads(capsys.readouterr().out)
        assert sum(p["bytes"] for p in r["parts"].values()) == r["tensor_bytes"]
        assert r["records"]["format"] == name and r["records"]["source"]["synthetic"] is True
        files = [x for x in packs[name].iterdir() if x.suffix in (".safetensors", ".bin")]
        assert r["file_bytes"] == sum(x.stat().st_size for x in files) and r["files"] == len(files)
        assert main(["inspect", str(packs[name])]) == 0
        assert f"expert records    {name}, " in capsys.readouterr().out
    assert main(["inspect", "--json", str(packs["release"])]) == 0
    assert json.loads(capsys.readouterr().out)["records"] is None


def test_layers_of_different_formats(packs, tmp_path, logits):
    """Formats may differ by layer: the first from one pack, the others from another."""
    folder = copied(packs["int4-g64"], tmp_path)
    m, other = manifest(folder), manifest(packs["mxfp4"])
    shutil.copy(packs["mxfp4"] / "experts-00001.bin", folder / "other.bin")
    data = (folder / "experts-00001.bin").read_bytes()
    size = m["layers"][0]["record_bytes"] * 16
    (folder / "experts-00001.bin").write_bytes(data[size:])
    (folder / "other.bin").write_bytes((folder / "other.bin").read_bytes()[:size])
    m["layers"][0] = other["layers"][0] | {"file": 1}
    for i in (1, 2, 3):
        m["layers"][i]["offset"] -= size
    m["files"] = [
        {"name": "experts-00001.bin", "bytes": len(data) - size},
        {"name": "other.bin", "bytes": size},
    ]
    (folder / "mosaic.json").write_text(json.dumps(m))
    got, _ = run(folder)
    assert got.shape == logits["mxfp4"].shape and np.isfinite(got).all()
    assert same(got, run(folder, slots=5, io="pread", isa="scalar")[0])
    assert not same(got, logits["int4-g64"]) and not same(got, logits["mxfp4"])


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("io", ["pread", "direct"])
def test_any_byte_that_flips_is_noticed(packs, tmp_path, name, io, logits):
    folder = copied(packs[name], tmp_path)
    path, x = folder / "experts-00001.bin", manifest(folder)["layers"][2]
    size = x["record_bytes"]
    rng = np.random.default_rng(5)
    with open_small(folder, io=io, slots=4) as model:
        for at in (0, size - 1, *rng.integers(0, size, 12).tolist()):
            expert = int(rng.integers(16))
            where = x["offset"] + expert * size + at
            with path.open("r+b") as f:
                f.seek(where)
                byte = f.read(1)[0]
                f.seek(where)
                f.write(bytes([byte ^ 1 << at % 8]))
            with model.session() as session:
                with pytest.raises(MosaicError) as caught:
                    session.forward(PROMPT)
                assert session.position == 0
            text = str(caught.value)
            assert caught.value.code == "EFORMAT" and text.isprintable()
            assert f"layer 2, expert {expert}: its record" in text and str(path) in text
            with path.open("r+b") as f:
                f.seek(where)
                f.write(bytes([byte]))
        with model.session() as session:
            assert same(session.forward(PROMPT), logits[name])


def test_records_that_changed_places(packs, tmp_path, capsys):
    """Also where the CRCs moved along: they cover the numbers of layer and expert."""
    folder = copied(packs["int4-row"], tmp_path)
    m, path = manifest(folder), folder / "experts-00001.bin"
    size, data = m["layers"][0]["record_bytes"], bytearray(path.read_bytes())
    data[: 2 * size] = data[size : 2 * size] + data[:size]
    path.write_bytes(data)
    args = ["generate", "hello there, all of you", "--model", str(folder), "-n", "2", "--ram"]
    for _ in range(2):
        assert main([*args, "400M"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "layer 0, expert" in err and "Traceback" not in err
        crc = m["layers"][0]["crc32c"]
        m["layers"][0]["crc32c"] = crc[8:16] + crc[:8] + crc[16:]
        (folder / "mosaic.json").write_text(json.dumps(m))


def test_the_largest_file_of_weights(packs, tmp_path):
    assert pack.largest_file(packs["int4-row"]) == packs["int4-row"] / "experts-00001.bin"
    assert pack.largest_file(packs["release"]) == packs["release"] / "model.safetensors"
    assert pack.largest_file(tmp_path) is None
    outside = tmp_path / "outside.bin"
    outside.write_bytes(bytes(1 << 20))
    for change in (put("files.0.name", "../outside.bin"), put("files", 7), put("files.0", [])):
        (tmp_path / "m").mkdir()
        folder = copied(packs["int4-row"], tmp_path / "m")
        m = manifest(folder)
        change(m)
        (folder / "mosaic.json").write_text(json.dumps(m))
        assert pack.largest_file(folder) == folder / "model.safetensors"
        shutil.rmtree(tmp_path / "m")


# ---- manifests -----------------------------------------------------------------------------------


def put(path: str, value: object) -> Any:
    """A change of a manifest: "layers.0.gate.dtype" -> value; ... removes the key."""

    def change(m: Any) -> None:
        *keys, last = (int(k) if k.isdigit() else k for k in path.split("."))
        for key in keys:
            m = m[key]
        if value is ...:
            del m[last]
        else:
            m[last] = value

    return change


FMT, UNS = "EFORMAT", "EUNSUPPORTED"
BAD = [
    (put("mosaic_c", "x"), FMT, ['"mosaic_c": expected "expert pack", got "x"']),
    (put("version", 2), UNS, ["version: this build reads version 1, got 2"]),
    (put("version", True), FMT, ["version: expected an integer, got true"]),
    (put("version", ...), FMT, ["version: expected an integer, got null"]),
    (put("byte_order", "big"), UNS, ['byte_order: expected "little", got "big"']),
    (put("features", ["crc32c", "lanes-first"]), UNS, ['this pack needs "lanes-first"']),
    (put("features", ["crc32c", 7]), UNS, ["this pack needs 7"]),
    (put("features", []), FMT, ['version 1 expects "crc32c"']),
    (put("features", {}), FMT, ["features: expected a list"]),
    (put("source", {}), FMT, ["source: expected", "sha256"]),
    (put("source", {"sha256": "G" * 64}), FMT, ["source: expected"]),
    (put("files", []), FMT, ["layers[0]: file: the pack has 0"]),
    (put("files.0", 3), FMT, ["files[0]: expected an object, got 3"]),
    (put("files.0.name", "../x.bin"), FMT, ["files[0]: expected the plain name of a .bin file"]),
    (put("files.0.name", "config.json"), FMT, ["plain name of a .bin file"]),
    (put("files.0.name", "gone.bin"), "ENOENT", ["gone.bin: no such file"]),
    (put("files.0.bytes", 524289), "EIO", ["mosaic.json expects 524289 bytes, got 524288"]),
    (put("files.0.bytes", 4096), FMT, ["mosaic.json expects 4096 bytes, got 524288"]),
    (put("files.0.bytes", -1), FMT, ["files[0]: bytes: expected 0 or more"]),
    (put("files.0.bytes", 2**70), FMT, ["files[0]: bytes: expected 0 or more, below 2^62"]),
    (lambda m: m["files"].append(m["files"][0]), FMT, ["files[1]: expected the plain name", "once"]),
    (put("layers", 4), FMT, ["layers: expected a list, got 4"]),
    (lambda m: m["layers"].pop(), FMT, ["config.json has 4 layers with experts, got 3"]),
    (put("layers.1", []), FMT, ["layers[1]: expected an object"]),
    (put("layers.1.file", 1), FMT, ["layers[1]: file: the pack has 1, counted from 0, got 1"]),
    (put("layers.1.file", -1), FMT, ["layers[1]: file: expected 0 or more"]),
    (put("layers.1.file", 0.0), FMT, ["layers[1]: file: expected a whole number, got 0.0"]),
    (put("layers.1.offset", 0), FMT, ["layers[1]: its records overlap", "expected offset 131072"]),
    (put("layers.3.offset", 397312), FMT, ["layers[3]: its records leave a hole"]),
    (put("layers.3.offset", 2**63), FMT, ["layers[3]: offset: expected 0 or more, below 2^62"]),
    (put("layers.2.experts", 15), FMT, ["layers[2]: experts: config.json has 16, got 15"]),
    (put("layers.0.record_bytes", 4096), FMT, ["record_bytes: formats and shapes make 8192"]),
    (put("layers.0.gate", ...), FMT, ["layers[0]: gate: expected an object, got null"]),
    (put("layers.0.gate.dtype", "INT3"), UNS, ["layers[0]: gate: dtype: expected one of", "INT4"]),
    (put("layers.0.gate.dtype", "F8_E8M0"), UNS, ["layers[0]: gate: dtype: expected one of"]),
    (put("layers.0.gate.dtype", ["INT4"]), UNS, ["layers[0]: gate: dtype: expected one of"]),
    (put("layers.0.up.layout", "lanes"), UNS, ['layers[0]: up: layout: expected "rows"']),
    (put("layers.0.up.shape", [48, 95]), FMT, ["up: shape: config.json makes it [48, 96], got [48, 95]"]),
    (put("layers.0.down.shape", [96.0, 48]), FMT, ["down: shape: config.json makes it [96, 48]"]),
    (put("layers.0.down.scale_dtype", "F8_E8M0"), FMT, ["INT4 takes F32 or BF16 or F16"]),
    (put("layers.0.down.scale_dtype", ...), FMT, ["scale_dtype: INT4 takes F32 or BF16 or F16, got null"]),
    (put("layers.0.down.block", [1, 48]), FMT, ["block: INT4 takes one of [1, 0], [1, 32]"]),
    (put("layers.0.down.block", [True, 0]), FMT, ["block: INT4 takes one of"]),
    (put("layers.0.down.dtype", "BF16"), FMT, ["BF16 takes no scale_dtype and no block"]),
    (put("layers.0.down.dtype", "I8"), FMT, ["record_bytes: formats and shapes make 12288"]),
    (put("layers.0.crc32c", "00"), FMT, ["crc32c: expected 8 hex digits for each of 16 experts"]),
    (put("layers.0.crc32c", "g" * 128), FMT, ["crc32c: expected 8 hex digits"]),
    (put("layers.0.crc32c", "0 " * 128), FMT, ["crc32c: expected 8 hex digits"]),
    (put("layers.0.crc32c", "00 " * 64), FMT, ["crc32c: expected 8 hex digits"]),
    (put("layers.0.crc32c", [1]), FMT, ["layers[0]: crc32c: expected a string"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "change, code, words", BAD, ids=lambda x: x[0] if isinstance(x, list) else ""
)
def test_every_rule_of_the_manifest(packs, tmp_path, change, code, words):
    folder = copied(packs["int4-row"], tmp_path)
    m = manifest(folder)
    change(m)
    (folder / "mosaic.json").write_text(json.dumps(m))
    text = refusal(lambda: Checkpoint.open(folder), *words, code=code)
    assert text.startswith(str(folder))


def test_folders_that_are_not_whole(packs, tmp_path):
    folder = copied(packs["int4-row"], tmp_path)
    text = (folder / "mosaic.json").read_text()
    (folder / "mosaic.json").write_text(text[:-9])
    refusal(lambda: Checkpoint.open(folder), "mosaic.json is not JSON", code="EFORMAT")
    (folder / "mosaic.json").unlink()
    refusal(lambda: Checkpoint.open(folder), "without their manifest mosaic.json", code="ENOENT")
    (folder / "experts-00001.bin").unlink()
    refusal(lambda: Checkpoint.open(folder).locate(), "missing 192 of the tensors", code="EFORMAT")
    (folder / "mosaic.json").write_text(text)
    refusal(lambda: Checkpoint.open(folder), "experts-00001.bin: no such file", code="ENOENT")
    config = json.loads((folder / "config.json").read_text())
    shutil.copy(packs["int4-row"] / "experts-00001.bin", folder)
    config["text_config"]["moe_intermediate_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    refusal(lambda: Checkpoint.open(folder), "shape: config.json makes it [64, 96]", code="EFORMAT")


def test_bytes_behind_the_last_record(packs, tmp_path):
    folder = copied(packs["int4-row"], tmp_path)
    m, path = manifest(folder), folder / "experts-00001.bin"
    path.write_bytes(path.read_bytes() + bytes(4096))
    m["files"][0]["bytes"] += 4096
    (folder / "mosaic.json").write_text(json.dumps(m))
    refusal(
        lambda: Checkpoint.open(folder), "528384 bytes, expected as many as its records, got 524288",
        code="EFORMAT",
    )  # fmt: skip


def test_experts_in_records_and_in_shards(packs, tmp_path):
    folder = copied(packs["release"], tmp_path)
    for name in ("mosaic.json", "experts-00001.bin"):
        shutil.copy(packs["fp8"] / name, folder)
    refusal(
        lambda: Checkpoint.open(folder).locate(), "experts.0.gate_proj.weight", "lie in records",
        code="EFORMAT",
    )  # fmt: skip


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 20), st.sampled_from([2**31, 2**62, 2**64, 0.5]),
    st.text(max_size=4), st.just([]), st.just({}), st.lists(st.integers(-1, 129), max_size=3),
    st.sampled_from(["F32", "F4", "I8", "F8_E4M3", "F16", "rows"]),
)  # fmt: skip


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Any:
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from leaves(inner, (*at, key))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_manifest_is_opened_or_refused_in_one_line(packs, data):
    """Nothing but a MosaicError comes out of it, and what passes has the plan's shape and lies inside files."""
    folder = packs["int4-row"]
    m = copy.deepcopy(manifest(folder))
    paths = [p for p in leaves(m) if p]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        value = m
        try:
            for key in path[:-1]:
                value = value[key]
            if data.draw(st.booleans()):
                value[path[-1]] = data.draw(JUNK)
            else:
                del value[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    plan = Checkpoint.open(folder).plan
    try:
        got = pack._Reader(folder, "mosaic.json", plan).read(m)
    except MosaicError as error:
        assert str(error).isprintable() and error.code in (
            "EFORMAT",
            "EUNSUPPORTED",
            "EIO",
            "ENOENT",
        )
        return
    for x in got.layers:
        assert x.count == 16 and x.offset + x.nbytes <= got.sizes[x.file]
    assert sum(x.nbytes for x in got.layers) == sum(got.sizes)


def test_a_manifest_read_is_the_manifest_written(packs):
    for name in FORMATS:
        got = Checkpoint.open(packs[name]).pack
        assert got is not None and json.loads(pack.manifest(got)) == manifest(packs[name])


# ---- synth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_synth_depends_on_its_arguments_alone(packs, tmp_path, name):
    synth.write(tmp_path / "a", "tiny", uniform=True, progress=False, records=name)
    for path in sorted(packs[name].iterdir()):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes(), path.name
    synth.write(tmp_path / "b", "tiny", uniform=True, progress=False, records=name, seed=1)
    one, other = (x / "experts-00001.bin" for x in (packs[name], tmp_path / "b"))
    assert one.stat().st_size == other.stat().st_size and one.read_bytes() != other.read_bytes()
    dense = "model.safetensors"
    release = Checkpoint.open(packs["release"])
    mine = Checkpoint.open(packs[name])
    raw, whole = (packs[name] / dense).read_bytes(), (packs["release"] / dense).read_bytes()
    for tensor, info in mine.tensors.items():  # the weights apart from experts are the release's
        a, b = info.offset, release.tensors[tensor].offset
        assert raw[a : a + info.nbytes] == whole[b : b + info.nbytes], tensor


def test_synth_in_several_files(packs, tmp_path, logits):
    folder = tmp_path / "m"
    size = 17 * 8192 * 2  # room for two layers
    s = synth.write(
        folder, "tiny", uniform=True, progress=False, records="int4-row", shard_bytes=size
    )
    m = manifest(folder)
    assert [x["name"] for x in m["files"]] == ["experts-00001.bin", "experts-00002.bin"]
    assert s.files == len([x for x in folder.iterdir() if x.suffix in (".bin", ".safetensors")])
    assert s.records == "int4-row" and s.bytes == sum(x.stat().st_size for x in folder.iterdir())
    assert same(run(folder)[0], logits["int4-row"])


def test_synth_of_bf16_with_records(tmp_path):
    synth.write(tmp_path / "m", "v4-mini", 2, 8, dtype="bf16", progress=False, records="mxfp4")
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert checkpoint.plan.weight_block is None and checkpoint.config["mosaic_c_experts"] == "mxfp4"
    with open_small(tmp_path / "m") as model:
        assert np.isfinite(model.session().forward([1, 2, 3])).all()
    with pytest.raises(UsageError, match="unknown expert format 'int2': expected one of int4-row"):
        synth.write(tmp_path / "x", "tiny", progress=False, records="int2")


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_all_formats_have_one_size(packs, name):
    """Deviations of the matrices, decoded: those of the release's within a quarter, no NaN, codes used."""
    e = Checkpoint.open(packs[name]).locate().experts[1]
    raw = (packs[name] / "experts-00001.bin").read_bytes()
    for k, want in ((0, 96**-0.5), (1, 96**-0.5)):
        t, x = e[3][k], np.eye(96, dtype=np.float32)
        names = {v: k for k, v in DTYPE_CODES.items()}
        at, to = int(t["offset"]), int(t["scale_offset"])
        w = engine_pure.gemm(
            "scalar", names[int(t["dtype"])], raw[at : at + 8192], 48, 96, x, names[int(t["scale_dtype"])],
            raw[to : to + 8192] + bytes(8192), (int(t["block_rows"]), int(t["block_cols"])),
        )  # fmt: skip
        assert 0.7 < w.std() / want < 1.4 and abs(w.mean()) < 0.1 * want
        assert len(np.unique(np.frombuffer(raw[at : at + 2304], np.uint8))) > 100
