"""Synthetic checkpoints: layout, values, labels, determinism, failures.

Files are checked by a small reader of their own, then by the package's loader.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from mosaic_c import synth
from mosaic_c import synth_shapes as shapes
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.commands import synth as command
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.families import plan_for
from mosaic_c.synth_values import Dist, encode, fp8_values, to_bf16, to_fp8, zipf_bias

SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
RANK = {"F32": 0, "BF16": 1, "F8_E4M3": 2}
Entry = namedtuple("Entry", "file dtype shape data")


def read(folder: Path) -> dict[str, Entry]:
    """Every tensor of a folder; asserts what the format and the official writer promise."""
    tensors: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        n = int.from_bytes(raw[:8].tobytes(), "little")
        assert n % 8 == 0
        header = json.loads(raw[8 : 8 + n].tobytes())
        metadata = header.pop("__metadata__")
        assert metadata == {"format": "pt", "mosaic_c_synthetic": "true"}
        at = 0
        for name, entry in header.items():
            size = math.prod(entry["shape"]) * SIZES[entry["dtype"]]
            assert entry["data_offsets"] == [at, at + size], name
            data = raw[8 + n + at : 8 + n + at + size]
            assert name not in tensors
            tensors[name] = Entry(path.name, entry["dtype"], tuple(entry["shape"]), data)
            at += size
        assert len(raw) == 8 + n + at
        keys = [(RANK[e["dtype"]], name) for name, e in header.items()]
        assert keys == sorted(keys)
    return tensors


def decode(entry: Entry) -> np.ndarray:
    kind = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return np.array(entry.data).view(kind[entry.dtype]).astype(np.float32).reshape(entry.shape)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """make(shape, **options) -> folder, written once per module."""
    root, known = tmp_path_factory.mktemp("synth"), {}

    def make(shape: str, **options) -> Path:
        key = (shape, *sorted(options.items()))
        if key not in known:
            known[key] = root / str(len(known))
            synth.write(known[key], shape, progress=False, **options)
        return known[key]

    yield make
    shutil.rmtree(root)


CASES = [
    ("tiny", {"dtype": "fp8"}),
    ("tiny", {"dtype": "bf16"}),
    ("tiny", {"dtype": "fp8", "layers": 2, "experts": 5, "uniform": True, "seed": 7}),
    ("v4-mini", {"dtype": "fp8", "layers": 1, "experts": 8}),
    ("v4-mini", {"dtype": "bf16", "layers": 1, "experts": 8}),
]


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_layout_and_values(made, shape, options):
    folder = made(shape, **options)
    tensors = read(folder)
    spec = shapes.SHAPES[shape]
    fp8 = options["dtype"] == "fp8"
    for name, entry in tensors.items():
        values = decode(entry)
        assert np.isfinite(values).all(), name
        if entry.dtype == "F8_E4M3":
            assert not np.isin(entry.data, (0x7F, 0xFF)).any(), name
            assert 90 < values.std() < 102, name
            scale = tensors[f"{name}_scale_inv"]
            assert scale.dtype == "BF16"
            assert scale.shape == tuple(-(-n // 128) for n in entry.shape)
            assert decode(scale).min() > 0
    quantised = {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}
    assert quantised == {name for name, e in tensors.items() if e.dtype == "F8_E4M3"}
    wanted = {
        name
        for name, e in tensors.items()
        if len(e.shape) == 2
        and name.split(".")[-2] not in ("embed_tokens", "lm_head", "gate", "shared_expert_gate")
        and name.split(".")[-2] not in ("in_proj_a", "in_proj_b")
        and not name.endswith("_scale_inv")
    }
    assert quantised == (wanted if fp8 else set())
    n = options.get("experts", spec.experts)
    base = "model." if spec.family == "qwen3_moe" else "model.language_model."
    mlp = f"{base}layers.0.mlp."
    assert tensors[f"{mlp}gate.weight"].shape == (n, spec.hidden)
    if spec.family == "qwen3_5_moe" and not fp8:
        assert tensors[f"{mlp}experts.gate_up_proj"].shape == (n, 2 * spec.width, spec.hidden)
        assert tensors[f"{mlp}experts.down_proj"].shape == (n, spec.hidden, spec.width)
    else:
        assert tensors[f"{mlp}experts.{n - 1}.down_proj.weight"].shape == (spec.hidden, spec.width)
        assert f"{mlp}experts.{n}.down_proj.weight" not in tensors


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_no_two_experts_or_rows_alike(made, shape, options):
    tensors = read(made(shape, **options))
    seen: dict[bytes, str] = {}
    for name, entry in tensors.items():
        if ".mlp.experts." not in name or name.endswith("_scale_inv"):
            continue
        for i, row in enumerate(entry.data.reshape(math.prod(entry.shape[:-1]), -1)):
            key = row.tobytes()
            # fp8 rows of 48 values are long enough not to meet by chance.
            assert key not in seen, (name, i, seen.get(key))
            seen[key] = f"{name} row {i}"


def test_weights_of_one_expert_lie_side_by_side_and_scales_apart(made):
    tensors = read(made("tiny", dtype="fp8"))
    order = [n for n, e in tensors.items() if e.dtype == "F8_E4M3" and ".layers.1.mlp.exp" in n]
    assert len(order) == 48
    for i in range(0, 48, 3):
        owner = {n.rsplit(".", 2)[0] for n in order[i : i + 3]}
        parts = [n.split(".")[-2] for n in order[i : i + 3]]
        assert len(owner) == 1 and parts == ["down_proj", "gate_proj", "up_proj"]
    names = list(tensors)
    last_scale = max(i for i, n in enumerate(names) if n.endswith("_scale_inv"))
    first_weight = min(i for i, n in enumerate(names) if tensors[n].dtype == "F8_E4M3")
    assert last_scale < first_weight
    assert {e.dtype for e in tensors.values()} == {"F32", "BF16", "F8_E4M3"}


def test_scale_of_values(made):
    """Products of normed activations stay near 1: nothing overflows, nothing vanishes."""
    tensors = read(made("v4-mini", dtype="fp8", layers=1, experts=8))
    for part in ("self_attn.q_proj", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"):
        name = f"model.layers.0.{part}.weight"
        weight, scale = decode(tensors[name]), decode(tensors[f"{name}_scale_inv"])
        scale = scale.repeat(128, 0).repeat(128, 1)[: weight.shape[0], : weight.shape[1]]
        assert (weight * scale).std() * math.sqrt(512) == pytest.approx(1, abs=0.1)
    norm = decode(tensors["model.layers.0.input_layernorm.weight"])
    assert norm[0] == 0 and norm[1:].mean() == pytest.approx(1, abs=0.02)
    tensors = read(made("tiny", dtype="fp8"))
    base = "model.language_model.layers."
    zero_centred = decode(tensors[f"{base}3.self_attn.q_norm.weight"])
    plain = decode(tensors[f"{base}0.linear_attn.norm.weight"])
    assert zero_centred.mean() == pytest.approx(0.5, abs=0.1)
    assert plain.mean() == pytest.approx(1.0, abs=0.15)
    assert decode(tensors[f"{base}0.input_layernorm.weight"])[1:].mean() == pytest.approx(
        0, abs=0.1
    )
    decay = np.exp(decode(tensors[f"{base}0.linear_attn.A_log"]))
    assert (decay > 0.4).all() and (decay < 16.1).all()


def usage(made, **options) -> np.ndarray:
    """Share of the vocabulary's tokens that choose each expert in layer 0, most used first."""
    tensors = read(made("v4-mini", dtype="bf16", layers=1, experts=256, **options))
    x = decode(tensors["model.embed_tokens.weight"])[:4000]
    # In place of the mixer's output, which adds half of GROWTH in a model of one layer.
    mixer = np.random.default_rng(0).normal(0, math.sqrt(shapes.GROWTH / 2), x[:, 1:].shape)
    x[:, 1:] += mixer.astype(np.float32)
    norm = decode(tensors["model.layers.0.post_attention_layernorm.weight"])
    x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm
    logits = x @ decode(tensors["model.layers.0.mlp.gate.weight"]).T
    top = np.argpartition(-logits, 6, axis=1)[:, :6]
    return np.sort(np.bincount(top.ravel(), minlength=256))[::-1] / len(x)


def test_router_is_skewed_like_zipf(made):
    """Rank r is chosen with probability 1 - exp(-t r^-1.2), what drawing 6 of Zipf(1.2) gives."""
    measured = usage(made)
    weight = np.arange(1, 257) ** -1.2
    t = min(np.arange(0.01, 20, 0.01), key=lambda t: abs(np.sum(1 - np.exp(-t * weight)) - 6))
    wanted = 1 - np.exp(-t * weight)
    for rank in (1, 2, 4, 8, 16, 32, 64, 128):
        assert measured[rank - 1] == pytest.approx(wanted[rank - 1], rel=0.15), rank
    assert np.count_nonzero(measured) > 240


def test_uniform_router_is_not_skewed(made):
    measured = usage(made, uniform=True)
    assert measured.max() < 3 * 6 / 256 and measured.min() > 6 / 256 / 3


def test_zipf_bias_ranks_differ_by_layer_and_suit_all_experts_chosen():
    one, two = (zipf_bias(64, 4, 1.2, np.random.PCG64([0, 2, i])) for i in range(2))
    assert sorted(one) == sorted(two) and (one != two).any()
    assert np.isfinite(zipf_bias(4, 4, 1.2, np.random.PCG64(0))).all()


def test_deterministic_for_a_seed(made, tmp_path):
    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    first = made("tiny", dtype="fp8")
    for seed in (0, 1):
        synth.write(tmp_path / str(seed), "tiny", dtype="fp8", seed=seed, progress=False)
    assert weights(first) == weights(tmp_path / "0") != weights(tmp_path / "1")
    for name in ("config.json", "tokenizer.json", "README.md", "generation_config.json"):
        assert (first / name).read_bytes() == (tmp_path / "0" / name).read_bytes()
    config = json.loads((tmp_path / "1" / "config.json").read_text())
    assert config["mosaic_c_seed"] == 1


def test_label(made):
    folder = made("tiny", dtype="fp8")
    config = json.loads((folder / "config.json").read_text())
    assert config["mosaic_c_synthetic"] is True and config["mosaic_c_shape"] == "tiny"
    readme = (folder / "README.md").read_text()
    assert "Synthetic" in readme and "noise" in readme and "--shape tiny" in readme


def test_single_file_has_no_index_and_several_have_one(made, tmp_path):
    one = made("tiny", dtype="fp8")
    assert [x.name for x in one.glob("*safetensors*")] == ["model.safetensors"]
    folder = tmp_path / "m"
    summary = synth.write(folder, "tiny", dtype="fp8", progress=False, shard_bytes=200_000)
    tensors = read(folder)
    n = summary.files
    names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    assert n > 5 and sorted({e.file for e in tensors.values()}) == names
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: e.file for name, e in tensors.items()}
    total = sum(len(e.data) for e in tensors.values())
    assert index["metadata"]["total_size"] == total
    for name in names:
        data = sum(len(e.data) for e in tensors.values() if e.file == name)
        assert data <= 200_000
    # Sharding moves tensors, it does not change them.
    for name, entry in read(one).items():
        assert np.array_equal(entry.data, tensors[name].data), name
    experts = [n for n in tensors if ".mlp.experts." in n and n.endswith("_proj.weight")]
    owners = {n.rsplit(".", 2)[0] for n in experts}
    files = [{tensors[f"{o}.{p}_proj.weight"].file for p in ("gate", "up", "down")} for o in owners]
    assert any(len(x) > 1 for x in files)  # an expert in two files is a case worth having
    assert Checkpoint.open(folder).locate()


def test_files_by_layer(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny", replace(shapes.SHAPES["tiny"], shard_by_layer=True))
    folder = tmp_path / "m"
    assert synth.write(folder, "tiny", dtype="fp8", progress=False).files == 5
    for name, entry in read(folder).items():
        parts = name.split(".layers.")
        layer = parts[1].split(".")[0] if len(parts) == 2 else None
        assert entry.file == (f"layers-{layer}.safetensors" if layer else "outside.safetensors")
    assert (folder / "model.safetensors.index.json").exists()
    assert Checkpoint.open(folder).locate()


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_the_loader_takes_it(made, shape, options):
    folder = made(shape, **options)
    assert Checkpoint.open(folder).locate()
    spec = shapes.SHAPES[shape]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [spec.specials[2], spec.specials[0]]


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("shape", list(shapes.SHAPES))
def test_every_shape_is_what_its_family_expects(shape, dtype):
    spec = shapes.SHAPES[shape]
    config = shapes.config(spec, dtype)
    plan = plan_for(json.loads(json.dumps(config)))
    tensors = {t.name: t for t in shapes.tensors(spec, dtype)}
    for weight in plan.weights():
        assert tensors[weight.name].shape == weight.shape
    for moe in plan.moe_layers:
        assert (moe.experts.count, moe.top_k) == (spec.experts, spec.top_k)
        per_expert = [p.format(e=spec.experts - 1) for p in moe.experts.per_expert]
        fused = list(moe.experts.fused)
        assert all(n in tensors for n in per_expert) or all(n in tensors for n in fused)
    assert len(plan.delta_layers) == sum(not spec.is_full(i) for i in range(spec.layers))
    assert plan.max_positions == spec.max_positions
    if dtype == "fp8":
        listed = config["quantization_config"]["modules_to_not_convert"]
        assert not {f"{x}.weight_scale_inv" for x in listed} & set(tensors)
        assert {f"{x}.weight" for x in listed} <= set(tensors)


@pytest.mark.parametrize(
    ("shape", "dtype", "parameters", "tensors", "size", "files"),
    [
        # The FP8 releases, to the name and to the byte (text part without vision and mtp).
        ("qwen3.6-35b-a3b", "fp8", 34_660_610_688, 62_303, 35_707_978_496, 41),
        ("qwen3.6-35b-a3b", "bf16", 34_660_610_688, 693, 69_321_221_376, 21),
        ("qwen3-30b-a3b", "fp8", 30_532_122_624, 37_491, 31_170_895_872, 8),
        ("q35-mid", "fp8", 3_430_010_752, 12_635, 3_498_700_672, 1),
        ("v4-mini", "bf16", 463_480_320, 6_219, 926_960_640, 1),
        ("tiny", "fp8", 1_172_584, 473, 1_282_812, 1),
    ],
)
def test_sizes_of_the_shapes(shape, dtype, parameters, tensors, size, files):
    spec = shapes.SHAPES[shape]
    listed = list(shapes.tensors(spec, dtype))
    assert sum(t.count for t in listed if not t.is_scale) == parameters
    assert len(listed) == tensors
    assert sum(t.count * SIZES[t.dtype] for t in listed) == size
    shards = synth._shards(spec, dtype, listed, synth.SHARD_BYTES)
    assert len(shards) == files
    assert sum(len(members) for _, members in shards) == tensors


def test_configs_are_in_the_style_of_the_releases():
    old = shapes.config(shapes.SHAPES["qwen3-30b-a3b"], "fp8")
    assert (old["rope_theta"], old["norm_topk_prob"], old["eos_token_id"]) == (1e6, True, 151645)
    assert "rope_parameters" not in old
    # What the release lists: lm_head, and gate and two norms of 48 layers.
    assert len(old["quantization_config"]["modules_to_not_convert"]) == 145
    new = shapes.config(shapes.SHAPES["qwen3.6-35b-a3b"], "bf16")
    assert "quantization_config" not in new and "rope_theta" not in new["text_config"]
    text = new["text_config"]
    assert text["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert text["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 10
    for spec in shapes.SHAPES.values():
        text = shapes.config(spec, "fp8").get("text_config")
        if text:
            sections = text["rope_parameters"]["mrope_section"]
            assert sum(sections) == spec.head_dim * spec.rotary / 2 and min(sections) > 0


def test_tokenizer(made):
    folder = made("tiny", dtype="fp8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    for text in ("Hello, world", "Zwölf Äpfel\n\t 😀", "", "  a  ", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert ids == [tokenizer.token_to_id(t) for t in tokenizer.encode(text).tokens]
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [511]
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(512)]
    assert all(texts) and len(set(texts[256:])) == 256
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [511, 509]
    assert [tokenizer.id_to_token(i) for i in (509, 510, 511)] == list(synth._SPECIALS)


def test_tokenizer_with_specials_inside_the_vocabulary(tmp_path):
    spec = replace(shapes.SHAPES["tiny"], vocab=9000, specials=(8000, 8001, 8002))
    synth._write_tokenizer(tmp_path / "t.json", spec)
    tokenizer = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert tokenizer.get_vocab_size() == 9000
    assert tokenizer.encode("<|endoftext|>a<|im_end|>").ids[::2] == [8000, 8002]
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(9000))


def test_byte_characters_are_the_usual_ones():
    chars = synth._byte_chars()
    assert len(set(chars)) == 256
    assert (chars[32], chars[10], chars[65], chars[0], chars[173]) == ("Ġ", "Ċ", "A", "Ā", "Ń")


# ---- encodings ----------------------------------------------------------------------------------


def test_fp8_rounds_like_ml_dtypes():
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(fp8_values(), codes)
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0, 96, 20000), rng.normal(0, 0.02, 2000), codes, -codes])
    got = to_fp8(values).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    keep = np.abs(values) < 448
    np.testing.assert_array_equal(got[keep], expected[keep])
    assert not np.isin(to_fp8(np.array([1e9, -1e9, 448.0, 460.0])), (0x7F, 0xFF)).any()


def test_bf16_rounds_like_ml_dtypes():
    values = np.random.default_rng(1).normal(0, 1, 20000).astype(np.float32)
    np.testing.assert_array_equal(
        to_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    )


def test_distributions():
    table = Dist("normal", 2, 3).table()
    assert table.mean() == pytest.approx(2, abs=0.01) and table.std() == pytest.approx(3, rel=0.01)
    assert Dist("uniform", 1, 2).table().min() > 1
    assert np.exp(Dist("loguniform", 0.5, 16).table()).max() < 16
    assert (encode(Dist("const", 1.5).table(), "BF16") == 0x3FC0).all()
    with pytest.raises(ValueError, match="'other'"):
        Dist("other", 0).table()


# ---- failures -----------------------------------------------------------------------------------


def test_existing_folder_is_left_alone(tmp_path):
    for kind in ("folder", "file", "link"):
        dst = tmp_path / kind
        if kind == "folder":
            dst.mkdir()
        elif kind == "file":
            dst.write_text("x")
        else:
            dst.symlink_to(tmp_path / "nowhere")
        with pytest.raises(UsageError, match="exists already"):
            synth.write(dst, "tiny", progress=False)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "folder", "link"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "huge"}, "unknown shape 'huge': expected one of tiny, v4-mini"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"layers": 0}, "0 layers are out of range"),
        ({"layers": -1}, "-1 layers"),
        ({"layers": 10**6}, "1000000 layers"),
        ({"experts": 3}, "3 experts per layer are out of range: tiny uses 4 per token"),
        ({"experts": 0}, "0 experts"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_bad_arguments(tmp_path, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        synth.write(tmp_path / "m", **{"shape": "tiny", "progress": False, **options})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_disk_too_small(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 << 30))
    with pytest.raises(MosaicError) as caught:
        synth.write(tmp_path / "m", "qwen3.6-35b-a3b", progress=False)
    message = str(caught.value)
    assert "needs 33.27 GiB" in message and "3 GiB free" in message and str(tmp_path) in message
    assert "--layers" in message and caught.value.code == "ENOSPC"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["writev", "posix_fallocate", "fdatasync"])
def test_failure_leaves_nothing_behind(tmp_path, monkeypatch, failure, where):
    def fail(*args):
        raise failure

    monkeypatch.setattr(os, where, fail)
    kind = MosaicError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(kind) as caught:
        synth.write(tmp_path / "m", "tiny", progress=False)
    if kind is MosaicError:
        assert "No space left" in str(caught.value) and str(tmp_path / "m") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_file_system_that_cannot_reserve_space(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert synth.write(tmp_path / "m", "tiny", progress=False).files == 1
    read(tmp_path / "m")


def test_parent_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MosaicError, match="cannot write the checkpoint: .*file"):
        synth.write(tmp_path / "file" / "m", "tiny", progress=False)


def test_short_writes_are_continued(tmp_path, made, monkeypatch):
    real = os.writev

    def short(fd, parts):
        return real(fd, [memoryview(parts[0])[: max(1, len(parts[0]) // 2)]])

    monkeypatch.setattr(os, "writev", short)
    synth.write(tmp_path / "m", "tiny", dtype="fp8", progress=False)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == (
        made("tiny", dtype="fp8") / "model.safetensors"
    ).read_bytes()


def test_memory_stays_bounded(tmp_path):
    """A model of 230 MB, in a process of its own: a few tiles and write buffers, nothing more."""
    code = (
        "import numpy, re, sys\n"
        "def peak():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
        "before = peak()\n"
        "from mosaic_c import synth\n"
        "s = synth.write(sys.argv[1], 'v4-mini', layers=2, dtype='bf16', progress=False)\n"
        "print(s.bytes >> 20, (peak() - before) >> 10)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    written, grown = map(int, out.split())
    assert written > 200 and grown < 64, out
    shutil.rmtree(tmp_path / "m")


# ---- command ------------------------------------------------------------------------------------


def run(*args: object) -> int:
    parser = argparse.ArgumentParser(prog="mosaic_c")
    command.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["synth", *map(str, args)])
    return parsed.run(parsed)


def test_command(tmp_path, capsys):
    assert run(tmp_path / "a", "--layers", 1, "--experts-per-layer", 6, "--dtype", "bf16") == 0
    captured = capsys.readouterr()
    assert "synthetic tiny (bf16), 1 layers x 6 experts" in captured.out
    assert "100%" in captured.err  # the bar goes to stderr
    assert run(tmp_path / "b", "--uniform", "--seed", 3, "--quiet", "--json") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == "" and result["synthetic"] is True
    assert (result["shape"], result["dtype"], result["experts"]) == ("tiny", "fp8", 16)
    files = list((tmp_path / "b").iterdir())
    assert result["bytes"] == sum(x.stat().st_size for x in files)
    assert json.loads((tmp_path / "b/config.json").read_text())["mosaic_c_uniform"] is True


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    assert "(default: tiny)" in text and "(default: fp8)" in text and "qwen3.6-35b-a3b" in text


def test_what_a_killed_run_left_is_removed(tmp_path):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    stale, alive = tmp_path / f"m.partial-{pid}", tmp_path / f"m.partial-{os.getppid()}"
    for folder in (stale, alive):
        folder.mkdir()
        (folder / "x").write_bytes(b"x")
    synth.write(tmp_path / "m", "tiny", progress=False)
    assert not stale.exists() and alive.exists()
