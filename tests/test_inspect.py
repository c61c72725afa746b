"""`inspect`: the report adds up, reads like a table, and refuses like everything else."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_checkpoint import (
    FP8,
    QWEN3,
    QWEN35,
    QWEN36_35B,
    Spec,
    changed,
    quantised_by_default,
    refusal,
    tensors_of,
    write_checkpoint,
)

from mosaic_c.commands import inspect
from mosaic_c.errors import UsageError
from mosaic_c.families import plan_for

VECTORS = sorted(p.parent for p in (Path(__file__).parent / "vectors").glob("*/config.json"))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    return parser.parse_args(["inspect", *words])


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    args = parse(*words)
    assert args.run(args) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def report(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    return json.loads(run(capsys, "--json", str(folder)))


@pytest.mark.parametrize("folder", VECTORS, ids=lambda p: p.name)
def test_parts_add_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    r = report(capsys, folder)
    parts = sum(p["bytes"] for p in r["parts"].values())
    skipped = sum(s["bytes"] for s in r["skipped"].values())
    assert parts + skipped == r["tensor_bytes"] and parts == sum(r["dtypes"].values())
    shards = [x for x in folder.iterdir() if x.suffix == ".safetensors"]
    assert r["files"] == len(shards)
    assert r["file_bytes"] == sum(x.stat().st_size for x in shards) > r["tensor_bytes"]
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    assert r["hidden"] == text["hidden_size"] and r["vocab"] == text["vocab_size"]
    assert r["layers"]["total"] == text["num_hidden_layers"]
    assert r["moe"]["top_k"] == text["num_experts_per_tok"]
    assert text["eos_token_id"] in r["stop_ids"]
    table = run(capsys, "--model", str(folder))
    for word in (str(folder), r["family"], "routed experts", "embedding", "total"):
        assert word in table
    assert all(line == line.rstrip() for line in table.splitlines())


def test_qwen36_35b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tensors_of(plan_for(QWEN36_35B), fp8=quantised_by_default)
    tensors["mtp.fc.weight"] = ("BF16", (2048, 4096))
    try:
        folder = write_checkpoint(tmp_path, QWEN36_35B, tensors)
    except OSError:
        pytest.skip("no sparse files here")
    r = report(capsys, folder)
    assert r["layers"] == {
        "total": 40, "attention": 10, "linear_attention": 30, "moe": 40, "dense": 0,
    }  # fmt: skip
    assert r["moe"]["experts_in_all"] == 10240
    assert r["moe"]["largest_expert_bytes"] == r["moe"]["smallest_expert_bytes"] == 3_145_728
    assert r["parts"]["routed_experts"]["bytes"] == 10240 * 3_145_728
    assert r["parts"]["expert_scales"] == {"tensors": 30720, "bytes": 3_932_160, "dtypes": ["BF16"]}
    assert r["skipped"] == {"mtp.": {"tensors": 1, "bytes": 16_777_216}}
    assert r["tensor_bytes"] == 35_707_978_496 + 16_777_216
    assert r["quantisation"] == "fp8 128x128"
    table = run(capsys, str(folder))
    for line in (
        "40 (10 attention, 30 linear attention, 40 with experts)",
        "16 heads, 2 key/value, of 256; rope 64 dims, theta 1e+07, output gate",
        "16 key heads of 128, 32 value heads of 128, conv 4",
        "256 a layer, top-8, width 512, shared expert of width 512; 10240 in all, 3.15 MB each",
        "32.21 GB", "mtp.* (not used)", "62304 tensors in the files",
    ):  # fmt: skip
        assert line in table, line


def test_tokenizer_and_stop_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, QWEN3, tensors_of(plan_for(QWEN3)))
    r = report(capsys, folder)
    assert (r["tokenizer"], r["chat_template"], r["stop_ids"]) == (False, False, [7])
    table = run(capsys, str(folder))
    assert "none (token ids only)" in table
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7]}')
    (folder / "tokenizer.json").write_text("{}")
    config: dict[str, Any] = {
        "eos_token": "<end>",
        "model_max_length": 10**30,
        "added_tokens_decoder": {"5": {"content": "<end>"}, "6": {"content": "<pad>"}},
    }
    write = (folder / "tokenizer_config.json").write_text
    write(json.dumps(config))
    r = report(capsys, folder)
    assert (r["tokenizer"], r["chat_template"], r["stop_ids"]) == (True, False, [3, 5, 7])
    write(json.dumps({**config, "eos_token": {"content": "<pad>"}, "chat_template": "x"}))
    r = report(capsys, folder)
    assert (r["chat_template"], r["stop_ids"]) == (True, [3, 6, 7])
    for added in ([], {"x": {"content": "<end>"}, "9" * 99: {"content": "<end>"}, "4": 1}, 7):
        write(json.dumps({**config, "added_tokens_decoder": added}))
        assert report(capsys, folder)["stop_ids"] == [3, 7]
    write("{}")
    (folder / "chat_template.jinja").write_text("x")
    assert report(capsys, folder)["chat_template"]


def test_biases_dense_layers_and_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(changed(QWEN3, "mlp_only_layers", [1]), "attention_bias", True)
    config = changed(config, "tie_word_embeddings", True)
    tensors: Spec = tensors_of(plan_for(config))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,))
    table = run(capsys, str(write_checkpoint(tmp_path, config, tensors)))
    for word in ("1 with experts, 1 dense", "biases", "head tied", "dense MLPs", "1 tensors that"):
        assert word in table
    assert "output head" not in table and "expert of width" not in table


def test_experts_of_two_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**QWEN3, "quantization_config": FP8}
    tensors = tensors_of(plan_for(config), fp8=lambda name: "experts.1." in name)
    r = report(capsys, write_checkpoint(tmp_path, config, tensors))
    assert r["moe"]["smallest_expert_bytes"] * 2 == r["moe"]["largest_expert_bytes"]
    assert r["parts"]["routed_experts"]["dtypes"] == ["BF16", "F8_E4M3"]
    assert "kB to " in run(capsys, str(tmp_path))


def test_arguments_and_errors(tmp_path: Path) -> None:
    for words in ((), ("a", "--model", "b")):
        args = parse(*words)
        with pytest.raises(UsageError, match="expected one checkpoint folder"):
            args.run(args)
    args = parse(str(tmp_path / "nowhere"))
    refusal(lambda: args.run(args), "nowhere", "no such folder")
    folder = write_checkpoint(tmp_path / "f", QWEN35, tensors_of(plan_for(QWEN35)))
    (folder / "tokenizer_config.json").write_text("[]")
    args = parse(str(folder))
    refusal(lambda: args.run(args), "tokenizer_config.json", "must be a JSON object")


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (3_145_728, "3.15 MB"), (10**9, "1.00 GB"),
     (37_454_789_472, "37.45 GB")],
)  # fmt: skip
def test_sizes_are_decimal(size: int, text: str) -> None:
    assert inspect.human(size) == text
