"""Small (or sparse) checkpoint folders for tests, written with the standard library alone."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mosaic_c.dtypes import BITS
from mosaic_c.errors import MosaicError
from mosaic_c.plan import ModelPlan

Spec = dict[str, tuple[str, tuple[int, ...]]]  # tensor name -> (dtype, shape)
Config = dict[str, Any]

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

QWEN3: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 7,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 129,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 40,
}

QWEN2: Config = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "eos_token_id": 7,
    "hidden_act": "silu",
    "hidden_size": 72,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 12,
    "num_attention_heads": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 20,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 40,
}

QWEN35_TEXT: Config = {
    "model_type": "qwen3_5_moe_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "eos_token_id": 7,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 40,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 40,
}

QWEN35: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": QWEN35_TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 1},
}

# The shapes of Qwen3.6-35B-A3B; quantised as the official FP8 release.
QWEN36_35B: Config = {
    **QWEN35,
    "quantization_config": FP8,
    "text_config": {
        **QWEN35_TEXT,
        "head_dim": 256,
        "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
}


def changed(config: Config, key: str, value: object) -> Config:
    """A deep copy with one key set ("text_config.head_dim"), or removed where value is ...."""
    out = copy.deepcopy(config)
    section, *path = out, *key.split(".")
    for name in path[:-1]:
        section = section[name]
    if value is ...:
        section.pop(path[-1], None)
    else:
        section[path[-1]] = value
    return out


def quantised_by_default(name: str) -> bool:
    """What the official Qwen FP8 releases quantise."""
    keep = ("embed_tokens", "lm_head", "in_proj_a.", "in_proj_b.", "mlp.gate.", "expert_gate")
    return not any(part in name for part in keep)


def tensors_of(
    plan: ModelPlan,
    dtype: str = "BF16",
    *,
    fused: bool = False,
    fp8: Callable[[str], bool] | None = None,
    scale: str = "BF16",
) -> Spec:
    """The tensors of a checkpoint of this plan. fp8: which matrices are quantised."""
    out: Spec = {}

    def put(name: str, shape: tuple[int, ...]) -> None:
        if fp8 and len(shape) >= 2 and "conv1d" not in name and fp8(name):
            blocks = tuple(-(-n // 128) for n in shape[-2:])
            out[name] = ("F8_E4M3", shape)
            out[name + "_scale_inv"] = (scale, (*shape[:-2], *blocks))
        else:
            out[name] = (dtype, shape)

    for w in plan.weights():
        put(w.name, w.shape)
    for moe in plan.moe_layers:
        e = moe.experts
        assert e is not None
        if fused:
            put(e.fused[0], (e.count, 2 * e.width, e.hidden))
            put(e.fused[1], (e.count, e.hidden, e.width))
            continue
        for i in range(e.count):
            for pattern, down in zip(e.per_expert, (False, False, True), strict=True):
                shape = (e.hidden, e.width) if down else (e.width, e.hidden)
                put(pattern.format(e=i), shape)
    return out


def header_of(tensors: Spec) -> dict[str, Any]:
    """The header's JSON, tensors packed in the official writer's order: element size, then name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(tensors, key=lambda n: (-BITS[tensors[n][0]], n)):
        dtype, shape = tensors[name]
        size = BITS[dtype] // 8
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


def data_bytes(header: Mapping[str, Any]) -> int:
    ends = [e["data_offsets"][1] for name, e in header.items() if name != "__metadata__"]
    return max(ends, default=0)


def write_raw(path: Path, header: bytes, data: int, *, length: int | None = None) -> None:
    """A safetensors file of these header bytes and `data` zero bytes (sparse)."""
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header) if length is None else length) + header)
        f.truncate(8 + len(header) + data)


def write_file(path: Path, tensors: Spec) -> None:
    header = header_of(tensors)
    write_raw(path, json.dumps(header).encode(), data_bytes(header))


def write_checkpoint(
    folder: Path,
    config: Config,
    tensors: Spec,
    place: Callable[[str], str] | None = None,
) -> Path:
    """A folder with config.json and the tensors in model.safetensors, or in the shards that `place`
    names, with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if place is None:
        write_file(folder / "model.safetensors", tensors)
        return folder
    shards: dict[str, Spec] = {}
    for name, spec in tensors.items():
        shards.setdefault(place(name), {})[name] = spec
    for shard, part in shards.items():
        write_file(folder / shard, part)
    write_index(folder, {name: place(name) for name in tensors})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def refusal(call: Callable[[], object], *words: str, code: str | None = None) -> str:
    """The message of the MosaicError that call raises: one printable line with all the words."""
    with pytest.raises(MosaicError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable() and text.isascii(), text
    for word in words:
        assert word in text, (word, text)
    if code is not None:
        assert caught.value.code == code, (caught.value.code, text)
    return text
