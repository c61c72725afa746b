"""Dense matrices of packs in every format: what is turned, the values computed with, the same bits in every placement;
and no byte of a pack that differs from its manifest is ever computed with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VECTORS, open_small
from helpers_checkpoint import refusal

from mosaic_c import MosaicError, convert_check, engine, synth
from mosaic_c.bind import SCALE
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.cli import main
from mosaic_c.convert import DENSE, convert
from mosaic_c.footprint import measure
from mosaic_c.opening import plan_model
from mosaic_c.pack import sealed
from mosaic_c.pack_format import Format

PROMPT = [(37 * i + 5) % 500 for i in range(40)]
SOME, FEW = PROMPT[:12], [1, 2, 3, 4, 5]
TURNED = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj",
          "down_proj"}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    for dtype in ("fp8", "bf16"):
        synth.write(root / dtype, "tiny", dtype=dtype, uniform=True, progress=False)
    return {dtype: root / dtype for dtype in ("fp8", "bf16")}


@pytest.fixture(scope="module")
def packs(sources, tmp_path_factory) -> dict[tuple[str, str], Path]:
    root, out = tmp_path_factory.mktemp("packs"), {}
    for dtype, source in sources.items():
        for name in DENSE:
            out[dtype, name] = root / f"{dtype}-{name}"
            s = convert(source, out[dtype, name], "bf16", verify=True, progress=False, dense=name)
            assert (s.format, s.dense, s.verified) == ("bf16", DENSE[name].name, 64)
    return out


def logits(folder: Path, ids: Any = PROMPT, **options: Any) -> np.ndarray:
    with open_small(folder, **options) as model, model.session() as session:
        return session.forward(ids)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "mosaic.json").read_text())


def raw(c: Checkpoint, name: str) -> bytes:
    info = c.tensors[name]
    return c.files[info.file].read_bytes()[info.offset :][: info.nbytes]


def values(c: Checkpoint, name: str) -> np.ndarray:
    """A matrix of a pack as float32, decoded by the engine."""
    assert c.pack is not None and c.pack.tensors is not None
    x = c.pack.tensors[name]
    codes = convert_check.unpack(x.form, raw(c, name), *x.shape)
    if x.scale_header is None:
        return codes
    kind, shape = x.scale_header
    scales = convert_check.unpack(Format(kind), raw(c, name + SCALE), *shape)
    return convert_check.times(codes, scales, x.form)


# ---- what is turned ------------------------------------------------------------------------------


def test_matrices_of_the_layers_are_turned_and_nothing_else(sources, packs):
    for (dtype, name), folder in packs.items():
        a, b = Checkpoint.open(sources[dtype]), Checkpoint.open(folder)
        assert b.pack is not None and b.pack.tensors is not None
        matrices = {w.name for w in a.plan.matrices()}
        assert {x.split(".")[-2] for x in matrices} == TURNED
        stays = DENSE[name].dtype == a.tensors[min(matrices)].dtype
        for tensor, x in b.pack.tensors.items():
            if tensor in matrices and not stays:
                assert x.form == DENSE[name]
                assert (tensor + SCALE in b.tensors) == (DENSE[name].scale is not None)
                continue
            assert raw(a, tensor) == raw(b, tensor)
            if tensor + SCALE in a.tensors:
                assert raw(a, tensor + SCALE) == raw(b, tensor + SCALE)
        assert b.pack.dense_format == DENSE[name].name
        listed = {x for x in b.tensors if not x.endswith(SCALE)}
        assert listed == set(b.pack.tensors) == {x for x in a.tensors if x in listed}
        assert measure(b.config, pack=b.pack).columns[0].resident == DENSE[name].name


def test_bf16_of_an_fp8_source_is_rounded_once(sources, packs):
    a, b = Checkpoint.open(sources["fp8"]), Checkpoint.open(packs["fp8", "bf16"])
    fp8 = Checkpoint.open(packs["fp8", "fp8"])
    for w in a.plan.matrices():
        exact = values(fp8, w.name)
        bits = exact.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)
        assert np.array_equal(values(b, w.name), rounded), w.name


@pytest.mark.parametrize("name", ["int8", "bf16", "int4-g64"])
def test_computes_with_the_rounded_values(name, tmp_path):
    """Logits are those of a float32 source that holds what the matrices decode to; integer weights meet quantised
    activations, which round as well."""
    source, dst = VECTORS / "qwen35_text_f32", tmp_path / "p"
    convert(source, dst, "bf16", progress=False, dense=name, verify=True)
    rounded = Path(shutil.copytree(source, tmp_path / "rounded"))
    a, b = Checkpoint.open(rounded), Checkpoint.open(dst)
    for w in a.plan.matrices():
        info = a.tensors[w.name]
        with a.files[info.file].open("r+b") as f:
            f.seek(info.offset)
            f.write(values(b, w.name).astype(np.float32).tobytes())
    convert(rounded, tmp_path / "q", "bf16", progress=False)
    want, got = logits(tmp_path / "q", FEW), logits(dst, FEW)
    assert np.abs(got - want).max() < (0.05 if name == "int4-g64" else 1e-4) * np.abs(want).max()


@pytest.mark.parametrize("model", sorted(x.parent.name for x in VECTORS.glob("*/config.json")))
def test_every_family_in_eight_and_four_bits(model, tmp_path):
    """Partial blocks, rows of half bytes, biases, tied heads, several shards."""
    for experts, dense in (("int4-g32", "int8"), ("mxfp4", "int4-g64")):
        dst = tmp_path / dense
        assert convert(VECTORS / model, dst, experts, verify=True, progress=False, dense=dense)
        assert np.isfinite(logits(dst, FEW)).all()


def test_formats_may_differ_by_layer(tmp_path):
    """A file of one pack in the place of another's, and its entries in the manifest."""
    source, a, b = VECTORS / "qwen35_fp8", tmp_path / "a", tmp_path / "b"
    for folder, dense in ((a, "int8"), (b, "int4-g64")):
        convert(source, folder, "mxfp4", progress=False, dense=dense)
    c, m, other = Checkpoint.open(a), manifest(a), manifest(b)
    q = next(w.name for w in c.plan.matrices())
    file = c.tensors[q].file
    shutil.copyfile(b / c.names[file], a / c.names[file])
    refusal(lambda: logits(a, FEW), "mosaic.json makes it I8")
    for name in m["tensors"]:
        if c.tensors[name].file == file:
            m["tensors"][name] = other["tensors"][name]
    (a / "mosaic.json").write_bytes(sealed(m))
    s = convert(source, a, None, verify=True, progress=False)
    assert s.dense == "int4-g64, int8-g128" and s.verified
    assert logits(a, FEW).tobytes() == logits(a, FEW, isa="scalar", slots=9).tobytes()


# ---- placement -----------------------------------------------------------------------------------


def test_any_setting_gives_the_same_bits(packs):
    for key, folder in packs.items():
        if key[0] != "bf16":
            continue
        want = logits(folder, SOME, isa="scalar").tobytes()
        for isa in engine.isas():
            more = {"threads": 3} if isa == engine.isas()[0] else {"slots": 5, "io": "pread"}
            assert logits(folder, SOME, isa=isa, **more).tobytes() == want, (key, isa, more)
        with open_small(folder) as model, model.session() as s:
            assert b"".join(s.forward([i]).tobytes() for i in SOME) == want


def test_memory_is_planned(packs):
    sizes = {}
    for name in DENSE:
        _, located, memory = plan_model(packs["bf16", name], ram="400M", ctx=256, threads=2)
        items = {x.name: x.bytes for x in memory.items}
        sizes[name] = items["dense weights"]
        assert (items["quantised activations"] > 0) == (name == "int4-g64")
        with open_small(packs["bf16", name], ram=memory.floor, threads=2) as model:
            model.session().forward(PROMPT)
            now = model.engine.stats()
            assert sum(now.mem_peak) <= now.budget and now.mem_now[0] <= sizes[name]
    assert sizes["int4-g64"] < sizes["fp8"] < sizes["int8"] < sizes["bf16"]


# ---- damage --------------------------------------------------------------------------------------


def flipped(path: Path, at: int, call: Callable[[], Any]) -> Any:
    """call() with one bit of a file turned, which is turned back."""

    def flip() -> None:
        with path.open("r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1 << at % 8]))

    flip()
    try:
        return call()
    finally:
        flip()


def test_no_byte_that_flips_is_computed_with(packs, tmp_path):
    """Anywhere in a pack: an error of one line, or a byte that nothing reads (metadata of a header)."""
    rng = np.random.default_rng(7)
    for key in (("fp8", "fp8"), ("bf16", "int8")):
        folder = Path(shutil.copytree(packs[key], tmp_path / key[1]))
        want = logits(folder, range(512), ctx=512).tobytes()
        for name in (
            "mosaic.json",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "experts-00001.bin",
        ):
            path = folder / name
            size = path.stat().st_size
            head = 8 + int.from_bytes(path.read_bytes()[:8], "little") if name[0] == "model" else 0
            places = {
                0,
                size - 1,
                *rng.integers(0, size, 12).tolist(),
                *rng.integers(0, head or 1, 6).tolist(),
            }
            for at in places:
                try:
                    got = flipped(path, at, lambda f=folder: logits(f, range(512), ctx=512))
                except MosaicError as error:
                    assert str(error).isprintable()
                else:
                    assert name == "model.safetensors" and at < 300 and got.tobytes() == want, (
                        name,
                        at,
                    )


@pytest.mark.parametrize("name", ["fp8", "int8", "int4-g64"])
def test_damage_names_the_tensor(packs, tmp_path, name):
    folder = Path(shutil.copytree(packs["bf16", name], tmp_path / "p"))
    c = Checkpoint.open(folder)
    for key in sorted(c.tensors)[::3]:
        info, tensor = c.tensors[key], key.removesuffix(SCALE)
        if "embed_tokens" in key:
            continue
        call = lambda: refusal(lambda: logits(folder, FEW), code="EFORMAT")  # noqa: E731
        text = flipped(c.files[info.file], info.offset + info.nbytes - 1, call)
        assert (
            f'tensor "{tensor}": {c.files[info.file]}, byte' in text and "CRC-32C expected" in text
        )


@pytest.mark.parametrize("options", [{}, {"slots": 4, "ram": "1G"}])
def test_damage_of_a_row_of_the_embedding(packs, tmp_path, options):
    """In memory it is found when the model opens; read by row, when the row is asked for, and no other suffers."""
    folder = Path(shutil.copytree(packs["bf16", "int8"], tmp_path / "p"))
    c = Checkpoint.open(folder)
    info = c.tensors["model.language_model.embed_tokens.weight"]
    path, at = c.files[info.file], info.offset + 7 * 96 * 2
    if not options:
        text = flipped(path, at, lambda: refusal(lambda: logits(folder, [1], **options)))
        assert "embed_tokens.weight" in text
        return

    def run() -> None:
        with open_small(folder, **options) as model, model.session() as s:
            assert not model.memory.embedding
            before = s.forward([6, 8])
            refusal(
                lambda: s.forward([6, 7]), f"{path}, byte {at}: row 7 of the embedding", "CRC-32C expected",
                code="EFORMAT",
            )  # fmt: skip
            assert s.position == 2
            s.rewind(0)
            assert s.forward([6, 8]).tobytes() == before.tobytes()

    flipped(path, at, run)


def test_verify_finds_values_and_crcs(sources, packs, tmp_path):
    folder = Path(shutil.copytree(packs["fp8", "int8"], tmp_path / "p"))
    again = lambda: convert(sources["fp8"], folder, None, verify=True, progress=False)  # noqa: E731
    c, m = Checkpoint.open(folder), manifest(folder)
    name = min(w.name for w in c.plan.matrices())
    info = c.tensors[name]
    call = lambda: refusal(again, f'tensor "{name}" differs from', "int8-g128 rounds")  # noqa: E731
    flipped(c.files[info.file], info.offset // 8 * 8 + 14, call)  # its bit 6 is half of 127
    for key in ("crc32c", "rows_crc32c"):
        entry = m["tensors"]["model.language_model.embed_tokens.weight"]
        kept, entry[key] = entry[key], "0" * len(entry[key])
        (folder / "mosaic.json").write_bytes(sealed(m))
        refusal(again, 'embed_tokens.weight" is damaged', "expected CRC-32C", code="EFORMAT")
        entry[key] = kept
    (folder / "mosaic.json").write_bytes(sealed(m))
    assert again().verified == 64
    refusal(
        lambda: convert(sources["fp8"], folder, None, verify=True, progress=False, dense="fp8"),
        "expected dense matrices in fp8, got int8-g128", code="EINVAL",
    )  # fmt: skip


Q = "model.language_model.layers.3.self_attn.q_proj.weight"
NORM = "model.language_model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("tensors"), "tensors: expected an object"),
        (lambda m: m.update(tensors=[]), "tensors: expected an object"),
        (lambda m: m["tensors"].pop(Q), 'q_proj.weight": mosaic.json lists it nowhere'),
        (lambda m: m["tensors"].update(x=m["tensors"][NORM]), '"x": mosaic.json lists it, the safetensors'),
        (lambda m: m["tensors"].update({Q: 1}), 'q_proj.weight": expected an object'),
        (lambda m: m["tensors"][Q].update(dtype="I9"), "dtype: expected one of"),
        (lambda m: m["tensors"][Q].update(dtype="F8_E4M3"), "scale_dtype: F8_E4M3 takes F32 or"),
        (lambda m: m["tensors"][Q].update(scale_dtype="F32"), "mosaic.json makes it F32 [256, 1], got F16"),
        (lambda m: m["tensors"][Q].update(block=[1, 64]), "mosaic.json makes it F16 [256, 2], got F16 [256, 1]"),
        (lambda m: m["tensors"][Q].update(block=[1, True]), "block: I8 takes one of"),
        (lambda m: m["tensors"][Q].update(layout="tiles"), 'layout: expected "rows"'),
        (lambda m: m["tensors"][Q].update(shape=[96, 256]), "config.json makes it [256, 96], got [96, 256]"),
        (lambda m: m["tensors"][Q].update(shape=[-1, 2]), "shape: expected a list of whole numbers"),
        (lambda m: m["tensors"][Q].update(crc32c="xyz"), "crc32c: expected 8 hex digits"),
        (lambda m: m["tensors"][Q].update(crc32c="00000000"), "CRC-32C expected 00000000"),
        (lambda m: m["tensors"][NORM].update(dtype="F16"), "mosaic.json makes it F16 [96], got BF16 [96]"),
        (lambda m: m["tensors"][NORM].update(scale_dtype="F32"), "norm.weight"),
        (lambda m: [x.pop("rows_crc32c", 0) for x in m["tensors"].values()], "no rows_crc32c for the embedding"),
        (lambda m: [x.update(rows_crc32c="00") for x in m["tensors"].values()], "8 hex digits for each row"),
        (lambda m: m.pop("texts"), "texts: expected an object of config.json"),
        (lambda m: m.update(texts={"../x": "00000000"}), "texts: expected an object of config.json"),
        (lambda m: m["texts"].update({"config.json": 5}), 'texts: "config.json": expected 8 hex digits'),
        (lambda m: m["texts"].update({"config.json": "00000000"}), "config.json: not as it was when"),
        (lambda m: m["features"].append("holes"), "this pack needs"),
        (lambda m: m["features"].remove("crc32c"), 'features: version 1 expects "crc32c"'),
        (lambda m: m["features"].remove("tensors"), 'features: its manifest_crc32c expects "tensors"'),
        (lambda m: m.update(version=2), "version: this build reads version 1"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_match(packs, tmp_path, change, words):
    folder = Path(shutil.copytree(packs["bf16", "int8"], tmp_path / "p"))
    m = manifest(folder)
    change(m)
    (folder / "mosaic.json").write_bytes(sealed(m))
    refusal(lambda: logits(folder, FEW), words)
    assert main(["plan", str(folder / "config.json")]) in (0, 1)  # sizes alone, of whatever it says


def test_a_manifest_is_sealed(packs, tmp_path):
    folder = Path(shutil.copytree(packs["bf16", "int8"], tmp_path / "p"))
    path, m = folder / "mosaic.json", manifest(folder)
    path.write_text(json.dumps(m))
    refusal(lambda: Checkpoint.open(folder), "mosaic.json: damaged or edited: CRC-32C expected")
    for digits in (None, "", "0000000g", 7, "00000000" * 2):
        path.write_text(json.dumps(m | {"manifest_crc32c": digits}))
        refusal(lambda: Checkpoint.open(folder), "manifest_crc32c: expected 8 hex digits")
    del m["manifest_crc32c"]
    path.write_text(json.dumps(m))
    refusal(lambda: Checkpoint.open(folder), "manifest_crc32c: expected 8 hex digits")


# ---- kills ---------------------------------------------------------------------------------------

KILL = """
import os, signal, sys
from mosaic_c import convert
count, old = int(sys.argv[3]), convert._note
def new(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return old(*args)
convert._note = new
convert.convert(sys.argv[1], sys.argv[2], "int4-g64", progress=False, threads=2, dense="int8")
"""


@pytest.mark.parametrize("count", [1, 4])
def test_a_kill_and_the_same_command_again(tmp_path, count):
    """Of several shards: what the journal has is kept, with the CRCs of its tensors."""
    source = VECTORS / "qwen35_fp8"
    assert len(list(source.glob("*.safetensors"))) > 2
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(source), str(tmp_path / "p"), str(count)], capture_output=True
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    refusal(
        lambda: convert(source, tmp_path / "p", "int4-g64", progress=False, dense="fp8"),
        "is of another conversion",
        code="EEXIST",
    )
    s = convert(source, tmp_path / "p", "int4-g64", progress=False, dense="int8", verify=True)
    assert (s.resumed > 0) == (count > 1)
    convert(source, tmp_path / "q", "int4-g64", progress=False, dense="int8", threads=1)
    for path in (tmp_path / "q").iterdir():
        assert path.read_bytes() == (tmp_path / "p" / path.name).read_bytes(), path.name
