"""`convert`: packs of checkpoints, their values by the engine's own decode, kills, damage and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import VECTORS, open_small
from helpers_checkpoint import refusal

from mosaic_c import MosaicError, UsageError, convert_check, convert_source, quantise, synth
from mosaic_c import convert as conversion
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.cli import main
from mosaic_c.commands.convert import DENSE, EXPERTS
from mosaic_c.convert import FORMATS, convert
from mosaic_c.convert_source import Source
from mosaic_c.pack import sealed

FEW = [1, 2, 3, 4, 5]
PROMPT = [(37 * i + 5) % 500 for i in range(40)]
# Of the logits of "tiny" (random weights, which forgive nothing): relative error at most.
NEAR = {"int4-g64": 0.4, "int4-g32": 0.35, "int4-row": 0.45, "mxfp4": 0.5, "fp8": 0.1, "bf16": 0.02}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    for dtype in ("fp8", "bf16"):
        synth.write(root / dtype, "tiny", dtype=dtype, uniform=True, progress=False)
    return {dtype: root / dtype for dtype in ("fp8", "bf16")}


@pytest.fixture(scope="module")
def packs(sources, tmp_path_factory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("packs")
    out = {}
    for dtype, source in sources.items():
        for name in FORMATS:
            out[dtype, name] = root / f"{dtype}-{name}"
            s = convert(source, out[dtype, name], name, verify=True, progress=False)
            assert (s.format, s.layers, s.experts, s.verified, s.resumed) == (name, 4, 64, 64, 0)
            assert s.bytes == sum(x.stat().st_size for x in out[dtype, name].iterdir())
    assert sorted(x.name for x in root.iterdir()) == sorted(x.name for x in out.values())
    return out


def logits(folder: Path, ids: Sequence[int] = PROMPT, **options: Any) -> np.ndarray:
    with open_small(folder, **options) as model, model.session() as session:
        return session.forward(ids)


def bits(values: np.ndarray) -> bytes:
    return values.tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in folder.iterdir()}


# ---- packs ---------------------------------------------------------------------------------------


def test_the_command_and_the_module_name_the_same_formats():
    assert (EXPERTS, DENSE) == (tuple(FORMATS), tuple(conversion.DENSE))


def test_logits_are_near_the_sources(sources, packs):
    want = {dtype: logits(folder) for dtype, folder in sources.items()}
    for (dtype, name), folder in packs.items():
        got = logits(folder, slots=9, io="pread")
        assert bits(got) == bits(logits(folder, isa="scalar"))
        if (dtype, name) in (("fp8", "fp8"), ("bf16", "bf16")):
            assert bits(got) == bits(want[dtype])
            continue
        error = np.sqrt(np.mean((got - want[dtype]) ** 2) / np.mean(want[dtype] ** 2))
        assert 0 < error < NEAR[name], (dtype, name, error)


@pytest.mark.parametrize("name", ["int4-g64", "mxfp4"])
def test_generates(packs, name, capsys):
    args = [
        "generate",
        "hello",
        "-m",
        str(packs["bf16", name]),
        "-n",
        "4",
        "--temp",
        "0",
        "--ram",
        "400M",
    ]
    assert main(args) == 0 and capsys.readouterr().out


@pytest.mark.parametrize("model", sorted(x.parent.name for x in VECTORS.glob("*/config.json")))
@pytest.mark.parametrize("name", ["int4-g32", "fp8"])
def test_every_family_and_layout(model, name, tmp_path):
    """Fused and one by one, tied, F16 and F32, several shards, partial blocks."""
    s = convert(VECTORS / model, tmp_path / "p", name, verify=True, progress=False, threads=3)
    assert s.verified == s.experts > 0
    made, source = Checkpoint.open(tmp_path / "p"), Checkpoint.open(VECTORS / model)
    assert made.config == source.config and made.generation_config == source.generation_config
    assert np.isfinite(logits(tmp_path / "p", FEW)).all()
    if name == "fp8" and source.plan.weight_block:
        assert bits(logits(tmp_path / "p", FEW)) == bits(logits(VECTORS / model, FEW))


def test_everything_else_stays_as_it_is(sources, packs):
    for (dtype, _), folder in packs.items():
        a, b = Checkpoint.open(sources[dtype]), Checkpoint.open(folder)
        assert set(b.tensors) == {x for x in a.tensors if ".experts." not in x}
        for name, info in b.tensors.items():
            raw = [
                x.files[x.tensors[name].file].read_bytes()[x.tensors[name].offset :][: info.nbytes]
                for x in (a, b)
            ]
            assert raw[0] == raw[1], name
        for name in ("config.json", "tokenizer.json", "README.md"):
            assert (folder / name).read_bytes() == (sources[dtype] / name).read_bytes()


@pytest.mark.parametrize(
    "model", ["qwen35_bf16_fused", "qwen3_bf16", "qwen2_f16_fused", "qwen35_text_f32"]
)
def test_dense_matrices_in_fp8(model, tmp_path):
    """Those of the layers, none of embedding, head, norms, router, small gates; the rest byte for byte."""
    source, dst = VECTORS / model, tmp_path / "p"
    assert convert(source, dst, "fp8", verify=True, progress=False, dense="fp8").verified
    a, b = Checkpoint.open(source), Checkpoint.open(dst)
    turned = {x for x in b.tensors if b.tensors[x].dtype == "F8_E4M3"}
    assert {x.split(".")[-2] for x in turned} <= {
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj",
        "down_proj",
    }  # fmt: skip
    assert sum(x.endswith("q_proj.weight") for x in turned) == len(a.plan.attention_layers)
    assert sum(x.endswith("in_proj_qkv.weight") for x in turned) == len(a.plan.delta_layers)
    assert set(b.tensors) - set(a.tensors) == {f"{x}_scale_inv" for x in turned}
    assert b.config == a.config | {"quantization_config": conversion.QUANTISED}
    assert bits(logits(dst, FEW)) != bits(logits(source, FEW))
    assert convert(source, dst, None, verify=True, progress=False).verified
    # damage of a code is found, by name: the largest difference of two codes
    name = sorted(turned)[0]
    info = b.tensors[name]
    with b.files[info.file].open("r+b") as f:
        f.seek(info.offset + info.nbytes - 1)
        byte = f.read(1)[0]
        f.seek(info.offset + info.nbytes - 1)
        f.write(bytes([byte ^ 0x40]))
    refusal(
        lambda: convert(source, dst, None, verify=True, progress=False),
        name,
        "by more than fp8 rounds",
    )


def test_dense_in_fp8_computes_with_the_rounded_values(tmp_path):
    """Logits are those of a float32 source that holds what the FP8 matrices decode to."""
    source, dst = VECTORS / "qwen35_text_f32", tmp_path / "p"
    convert(source, dst, "fp8", progress=False, dense="fp8")
    rounded = Path(shutil.copytree(source, tmp_path / "rounded"))
    a, b = Checkpoint.open(rounded), Checkpoint.open(dst)
    for name in (x for x in b.tensors if b.tensors[x].dtype == "F8_E4M3"):
        info, scale = b.tensors[name], b.tensors[f"{name}_scale_inv"]
        raw = b.files[info.file].read_bytes()
        codes = np.frombuffer(raw, ml_dtypes.float8_e4m3fn, info.nbytes, info.offset).reshape(
            info.shape
        )
        scales = np.frombuffer(raw[scale.offset :][: scale.nbytes], np.float32).reshape(scale.shape)
        each = quantise.spread(scales, (128, 128), *info.shape)
        with a.files[a.tensors[name].file].open("r+b") as f:
            f.seek(a.tensors[name].offset)
            f.write((codes.astype(np.float32) * each).tobytes())
    convert(rounded, tmp_path / "q", "fp8", progress=False)
    want, got = logits(tmp_path / "q", FEW), logits(dst, FEW)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_dense_of_an_fp8_source_stays(sources, packs, tmp_path):
    convert(sources["fp8"], tmp_path / "p", "mxfp4", progress=False, dense="fp8")
    assert contents(tmp_path / "p") == contents(packs["fp8", "mxfp4"])


def test_a_dense_matrix_of_many_rows(sources, monkeypatch):
    """More than one slab, partial blocks: the bytes of the whole matrix at once."""
    with Source(sources["bf16"]) as source:
        pieces = [(s.file, x) for s in source.shards(FORMATS["fp8"]) for x in s.pieces if x.turned]
        monkeypatch.setattr(convert_source, "_SLAB", 128)
        rows = [x.stored.shape[0] for _, x in pieces]
        assert max(rows) == 256 and any(n % 128 for n in rows)
        for file, x in pieces:
            w = np.concatenate(list(source.slabs(x)))
            want = b"".join(quantise.quantise(w, FORMATS["fp8"]))
            assert b"".join(source.contents(file, x)) == want


def test_the_hash_is_that_of_sha256sum(sources, packs):
    out = subprocess.run(
        "sha256sum config.json *.safetensors | sha256sum", shell=True, cwd=sources["fp8"], check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    m = json.loads((packs["fp8", "mxfp4"] / "mosaic.json").read_text())
    assert m["source"] == {"sha256": out.split()[0], "synthetic": True}


def test_bytes_do_not_depend_on_threads_and_files_may_be_many(sources, packs, tmp_path):
    source, want = sources["bf16"], packs["bf16", "int4-g64"]
    convert(source, tmp_path / "a", "int4-g64", progress=False, threads=5)
    assert contents(tmp_path / "a") == contents(want)
    convert(source, tmp_path / "b", "int4-g64", verify=True, progress=False, file_bytes=300_000)
    assert [x.name for x in sorted((tmp_path / "b").glob("*.bin"))] == [
        "experts-00001.bin",
        "experts-00002.bin",
    ]
    assert bits(logits(tmp_path / "b")) == bits(logits(want))


def test_scales_that_differ_among_experts(sources, tmp_path):
    """FP8 codes stay; scales of two dtypes in one layer become float32, which holds both exactly."""
    with Source(sources["fp8"]) as source:
        assert source.is_fp8(0, 1)
        source.experts[0]["scale_dtype"][3, 1] = 0  # F32
        assert not source.is_fp8(0, 1) and source.is_fp8(0, 0)
        x = conversion.plan(source, FORMATS["fp8"], "", 1 << 30).layers[0]
        assert [f.scale for f in x.formats] == ["BF16", "F32", "BF16"]
        raw, _ = conversion.record(source, x, 0, 2)
        assert not convert_check.difference(source, x, bytes(raw), 0, 2, 1)


# ---- kills ---------------------------------------------------------------------------------------

KILL = """
import os, signal, sys
from mosaic_c import convert
what, count = sys.argv[4], int(sys.argv[5])
old = getattr(convert, what)
def new(*args):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return old(*args)
setattr(convert, what, new)
convert.convert(sys.argv[1], sys.argv[2], sys.argv[3], progress=False, threads=2)
"""


@pytest.mark.parametrize(
    ("what", "count"),
    [("_note", 0), ("_note", 1), ("_note", 3), ("record", 5), ("record", 40), ("_whole", 2), ("_sync", 0),
     ("_sync", 1)],
)  # fmt: skip
def test_a_kill_and_the_same_command_again(sources, packs, tmp_path, what, count):
    dst = tmp_path / "p"
    args = [str(sources["bf16"]), str(dst), "int4-g64", what, str(count)]
    done = subprocess.run([sys.executable, "-c", KILL, *args], capture_output=True)
    assert done.returncode == -9, done.stderr
    if (what, count) == ("_sync", 1):  # killed after the rename
        assert contents(dst) == contents(packs["bf16", "int4-g64"])
        return
    assert not dst.exists() and (tmp_path / "p.partial").is_dir()
    journal = tmp_path / "p.partial" / "journal"
    with journal.open("ab") as f:
        f.write(b'{"layer": 3, "crc')  # a line that the kill cut
    s = convert(sources["bf16"], dst, "int4-g64", progress=False)
    assert (s.resumed > 0) == ((what, count) not in (("_note", 0), ("_note", 1)))
    assert contents(dst) == contents(packs["bf16", "int4-g64"])
    assert [x.name for x in tmp_path.iterdir()] == ["p"]


def test_what_was_begun_is_of_one_source_and_format(sources, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    dst = tmp_path / "p"
    with monkeypatch.context() as m:
        m.setattr(conversion, "_whole", full)
        refusal(
            lambda: convert(sources["bf16"], dst, "mxfp4", progress=False),
            "cannot write",
            "No space",
            code="ENOSPC",
        )
    for source, name in (("fp8", "mxfp4"), ("bf16", "fp8")):
        refusal(
            lambda s=source, n=name: convert(sources[s], dst, n, progress=False),
            "p.partial is of another conversion", "remove it", code="EEXIST",
        )  # fmt: skip
    (tmp_path / "p.partial" / "pack" / "odd").write_text("")
    refusal(
        lambda: convert(sources["bf16"], dst, "mxfp4", progress=False),
        "odd: not a file of this pack",
    )
    (tmp_path / "p.partial" / "pack" / "odd").unlink()
    records, journal = (
        tmp_path / "p.partial" / "pack" / "experts-00001.bin",
        tmp_path / "p.partial" / "journal",
    )
    os.truncate(records, 4096)
    refusal(
        lambda: convert(sources["bf16"], dst, "mxfp4", progress=False), "experts-00001.bin", "remove", "p.partial",
        code="EIO",
    )  # fmt: skip
    text = journal.read_text()
    for line in ('{"layer": 9, "crc32c": ""}', '{"layer": 0, "crc32c": "0"}', "[]", "{}", "x"):
        journal.write_text(f"{text}{line}\n")
        refusal(
            lambda: convert(sources["bf16"], dst, "mxfp4", progress=False),
            "is of another conversion",
        )
    journal.write_text("".join(text.splitlines(keepends=True)[:2]))  # the dense file alone is kept
    assert convert(sources["bf16"], dst, "mxfp4", verify=True, progress=False).resumed > 0


def test_two_at_once(sources, tmp_path):
    import fcntl

    (tmp_path / "p.partial").mkdir()
    with open(tmp_path / "p.partial" / "journal", "wb") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        refusal(
            lambda: convert(sources["fp8"], tmp_path / "p", "fp8", progress=False),
            "another convert is writing it",
        )
    convert(sources["fp8"], tmp_path / "p", "fp8", progress=False)


# ---- damage --------------------------------------------------------------------------------------


def test_a_byte_that_flips_names_its_expert(sources, packs, tmp_path):
    folder = Path(shutil.copytree(packs["bf16", "int4-g64"], tmp_path / "p"))
    path, rng = folder / "experts-00001.bin", np.random.default_rng(3)
    data, size = (
        path.read_bytes(),
        json.loads((folder / "mosaic.json").read_text())["layers"][0]["record_bytes"],
    )
    for at in (0, len(data) - 1, *rng.integers(0, len(data), 12).tolist()):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        layer, expert = divmod(at // size, 16)
        refusal(
            lambda: convert(sources["bf16"], folder, None, verify=True, progress=False),
            str(path), f"layer {layer}, expert {expert}: its record", "expected CRC-32C", code="EFORMAT",
        )  # fmt: skip
        with (
            open_small(folder) as model,
            pytest.raises(MosaicError, match=f"layer {layer}, expert {expert}: its rec"),
        ):
            model.session().forward([(37 * i + 5) % 500 for i in range(200)])
    path.write_bytes(data)
    assert convert(sources["bf16"], folder, None, verify=True, progress=False).verified == 64


def test_values_that_differ_under_a_good_crc(sources, packs, tmp_path):
    """Verify compares values, not only CRCs: an expert of another format's rounding, a tensor that changed."""
    folder = Path(shutil.copytree(packs["bf16", "int4-g64"], tmp_path / "p"))
    path, m = folder / "experts-00001.bin", json.loads((folder / "mosaic.json").read_text())
    x, data = m["layers"][1], bytearray(path.read_bytes())
    at, size = x["offset"] + 7 * x["record_bytes"], x["record_bytes"]
    data[at + 5] ^= 0x40
    path.write_bytes(data)
    crc = conversion.record_crc(1, 7, bytes(data[at : at + size]))
    x["crc32c"] = x["crc32c"][:56] + f"{crc:08x}" + x["crc32c"][64:]
    (folder / "mosaic.json").write_bytes(sealed(m))
    again = lambda: convert(sources["bf16"], folder, None, verify=True, progress=False)  # noqa: E731
    refusal(
        again,
        "layer 1, expert 7: its record: gate has",
        "at row 0, column 11",
        "more than int4-g64 rounds",
    )
    shard = folder / "model.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    refusal(again, "model.safetensors: tensor", "differs from the source's", code="EFORMAT")


# ---- refusals ------------------------------------------------------------------------------------


def test_places_that_are_refused(sources, packs, tmp_path):
    bf16, pack = sources["bf16"], packs["bf16", "mxfp4"]
    run = lambda src, dst, name="mxfp4", **o: lambda: convert(src, dst, name, progress=False, **o)  # noqa: E731
    os.symlink(bf16, tmp_path / "link")
    refusal(run(bf16, bf16), "is the source itself", code="EINVAL")
    refusal(run(bf16, tmp_path / "link", verify=True), "is the source itself", code="EINVAL")
    refusal(run(tmp_path / "link", bf16 / "p"), "lies in the source", code="EINVAL")
    (tmp_path / "there").mkdir()
    refusal(run(bf16, tmp_path / "there"), "exists already", code="EEXIST")
    refusal(run(pack, tmp_path / "p"), "an expert pack already (mxfp4)", code="EINVAL")
    refusal(run(tmp_path / "gone", tmp_path / "p"), "no such folder", code="ENOENT")
    refusal(
        run(bf16, tmp_path / "p", "int3"), "unknown expert format 'int3': expected one of int4-g64"
    )
    refusal(run(bf16, tmp_path / "p", None), "no expert format: expected one of", code="EINVAL")
    refusal(run(bf16, tmp_path / "p", threads=0), "0 threads", code="EINVAL")
    refusal(
        run(bf16, pack, "fp8", verify=True), "expected experts in fp8, got mxfp4", code="EINVAL"
    )
    refusal(run(sources["fp8"], pack, None, verify=True), "made of another source", code="EFORMAT")
    refusal(run(bf16, sources["fp8"], None, verify=True), "not an expert pack", code="EINVAL")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["link", "there"]


def test_too_little_disk(sources, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=17 << 20)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: usage)
    refusal(
        lambda: convert(sources["bf16"], tmp_path / "p", "fp8", progress=False),
        "not enough disk space: needs 17.5", "has 17 MiB free", code="ENOSPC",
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_tensors_that_nobody_knows_are_named(sources, tmp_path):
    folder = Path(shutil.copytree(sources["bf16"], tmp_path / "m"))
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + n].replace(b"layers.2.mlp.gate.weight", b"layers.2.mlp.gate.weighs")
    path.write_bytes(raw[:8] + text + raw[8 + n :])
    refusal(
        lambda: convert(folder, tmp_path / "p", "fp8", progress=False),
        "missing 1",
        "layers.2.mlp.gate.weight",
    )
    header = json.loads(raw[8 : 8 + n])
    header["model.language_model.layers.0.mlp.odd.bias"] = {
        "dtype": "F32", "shape": [1], "data_offsets": [len(raw) - 8 - n, len(raw) - 4 - n],
    }  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :] + bytes(4))
    refusal(
        lambda: convert(folder, tmp_path / "p", "fp8", progress=False),
        "layers.0.mlp.odd.bias",
        code="EUNSUPPORTED",
    )
    assert [x.name for x in tmp_path.iterdir()] == ["m"]


def test_a_weight_that_is_nan_names_its_place(sources, tmp_path):
    folder = Path(shutil.copytree(sources["bf16"], tmp_path / "m"))
    e = Checkpoint.open(folder).locate().experts[2][5][2]
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(int(e["offset"]))
        f.write(b"\xc0\x7f")
    name = "model.language_model.layers.0.mlp.shared_expert.up_proj.weight"
    dense = Checkpoint.open(folder).tensors[name]
    text = refusal(lambda: convert(folder, tmp_path / "p", "mxfp4", progress=False), code="EFORMAT")
    assert "layer 2, expert 5, down: a weight is NaN or infinite; mxfp4 cannot hold it" in text
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(dense.offset + 2)
        f.write(b"\x80\xff")
    refusal(
        lambda: convert(folder, tmp_path / "q", "fp8", progress=False, dense="fp8"),
        name,
        "NaN or infinite",
    )


def test_the_command(sources, tmp_path, capsys):
    args = ["convert", str(sources["fp8"]), str(tmp_path / "p"), "--experts", "int4-row", "--quiet"]
    assert main([*args, "--verify"]) == 0
    out, err = capsys.readouterr()
    assert "4 layers x 16 experts in int4-row" in out and "verified: 64 experts" in out and not err
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("mosaic_c convert: ")
    assert main([*args[:3], "--verify", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["written"] is False and got["verified"] == 64 and got["format"] == "int4-row"
    with pytest.raises(SystemExit) as caught:
        main([*args[:3], "--experts", "int3"])
    assert caught.value.code == 2
    assert isinstance(UsageError("x"), MosaicError)


def test_ctrl_c_says_how_to_go_on(sources, packs, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    args = ["convert", str(sources["bf16"]), str(tmp_path / "p"), "--experts", "mxfp4", "--quiet"]
    with monkeypatch.context() as m:
        m.setattr(conversion._Job, "_finish", interrupted)
        assert main(args) == 130
    err = capsys.readouterr().err
    assert "p.partial keeps what is done" in err and err.endswith("interrupted\n")
    assert main(args) == 0 and "by an earlier run" in capsys.readouterr().out
    assert contents(tmp_path / "p") == contents(packs["bf16", "mxfp4"])
