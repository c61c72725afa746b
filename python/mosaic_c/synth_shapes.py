"""Shapes of synthetic checkpoints: real config keys, real tensor names, in the real layouts.

Two families, as the official releases write them: qwen3_moe (experts one by one) and qwen3_5_moe
(three gated delta layers to one of full attention; experts fused in BF16, one by one in FP8; text
model inside the multimodal wrapper, without the vision tower and the multi-token head).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mosaic_c.pack import Format
from mosaic_c.synth_values import CODE_STD, FP8_STD, ITEMSIZE, Dist, zipf_bias

LABEL = "mosaic_c_synthetic"
# Expert usage follows rank^-SKEW. Channel 0 of every embedding is CONSTANT, the others have
# deviation 1; norms hide it from the mixers and bring it to 1 for the router, whose first column
# then is a bias per expert.
SKEW = 1.2
CONSTANT = 8.0
# Deviation of the router's logits over tokens, biases apart: sets how unequal top-k weights are.
ROUTER_STD = 1.0
# What all mixers and MoE layers together add to the variance (1) of the embeddings.
GROWTH = 1.0
LOGIT_STD = 2.5
FP8_BLOCK = 128
# Formats of experts in records, by name.
RECORDS = {
    form.name: form
    for form in (
        Format("INT4", "F32", (1, 0)),
        Format("INT4", "F16", (1, 64)),
        Format("F4", "F8_E8M0", (1, 32)),
        Format("F8_E4M3", "BF16", (FP8_BLOCK, FP8_BLOCK)),
    )
}


@dataclass(frozen=True)
class Shape:
    """One architecture. Zero linear heads: every layer is full attention."""

    name: str
    family: str
    layers: int
    hidden: int
    vocab: int
    experts: int
    top_k: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int
    shared_width: int = 0
    rotary: float = 1.0
    k_heads: int = 0
    v_heads: int = 0
    dk: int = 0
    dv: int = 0
    kernel: int = 4
    specials: tuple[int, int, int] = (0, 0, 0)  # ids of endoftext, im_start, im_end
    gate_dtype: str = "F32"  # of A_log and the delta norm: F32 in Qwen3.5, BF16 in Qwen3.6
    shard_by_layer: bool = False  # layers-N.safetensors, as the FP8 release of Qwen3.6

    def is_full(self, layer: int) -> bool:
        return self.family == "qwen3_moe" or layer % 4 == 3


def _small(**fields) -> Shape:
    vocab = fields["vocab"]
    return Shape(specials=(vocab - 3, vocab - 2, vocab - 1), **fields)


# fmt: off
SHAPES = {s.name: s for s in (
    _small(name="tiny", family="qwen3_5_moe", layers=4, hidden=96, vocab=512, experts=16, top_k=4,
           width=48, shared_width=48, heads=4, kv_heads=2, head_dim=32, rotary=0.25,
           rope_theta=1e7, max_positions=4096, k_heads=2, v_heads=4, dk=16, dv=16),
    _small(name="v4-mini", family="qwen3_moe", layers=8, hidden=512, vocab=4096, experts=256,
           top_k=6, width=144, heads=8, kv_heads=2, head_dim=64, rope_theta=1e6,
           max_positions=32768),
    _small(name="q35-mid", family="qwen3_5_moe", layers=16, hidden=1024, vocab=32000, experts=128,
           top_k=8, width=512, shared_width=512, heads=8, kv_heads=2, head_dim=128, rotary=0.25,
           rope_theta=1e7, max_positions=262144, k_heads=8, v_heads=16, dk=128, dv=128),
    Shape(name="qwen3-30b-a3b", family="qwen3_moe", layers=48, hidden=2048, vocab=151936,
          experts=128, top_k=8, width=768, heads=32, kv_heads=4, head_dim=128, rope_theta=1e6,
          max_positions=40960, specials=(151643, 151644, 151645)),
    Shape(name="qwen3.6-35b-a3b", family="qwen3_5_moe", layers=40, hidden=2048, vocab=248320,
          experts=256, top_k=8, width=512, shared_width=512, heads=16, kv_heads=2, head_dim=256,
          rotary=0.25, rope_theta=1e7, max_positions=262144, k_heads=16, v_heads=32, dk=128,
          dv=128, specials=(248044, 248045, 248046), gate_dtype="BF16", shard_by_layer=True),
)}
# fmt: on


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write. layer is None outside the layers; column0 replaces the first column."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dist: Dist
    layer: int | None = None
    column0: np.ndarray | None = None
    recorded: bool = False  # lies in a record of an expert pack

    @property
    def item(self) -> int:
        """Bytes of what a tile counts: an element, or two of 4 bits."""
        return ITEMSIZE[self.dtype]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_scale(self) -> bool:
        return self.name.endswith("_scale_inv")


# ---- config.json and generation_config.json -----------------------------------------------------


def config(shape: Shape, dtype: str) -> dict:
    """config.json with the keys and the nesting of the official releases, and the label."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_positions,
        "moe_intermediate_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }
    label = {LABEL: True, "mosaic_c_shape": shape.name}
    if shape.family == "qwen3_moe":
        result = _config_qwen3(shape, text)
    else:
        result = _config_qwen35(shape, text)
    if dtype == "fp8":
        result["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": _not_converted(shape),
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return label | result


def _config_qwen3(shape: Shape, text: dict) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **text,
        "bos_token_id": shape.specials[0],
        "decoder_sparse_step": 1,
        "eos_token_id": shape.specials[2],
        "intermediate_size": 3 * shape.hidden,
        "max_window_layers": shape.layers,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_sliding_window": False,
    }


def _config_qwen35(shape: Shape, text: dict) -> dict:
    half = int(shape.head_dim * shape.rotary) // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    if half % 3 == 2:
        section = [half // 3 + 1, half // 3 + 1, half // 3]
    text = text | {
        "attn_output_gate": True,
        "bos_token_id": shape.specials[0],
        "dtype": "bfloat16",
        "eos_token_id": shape.specials[0],
        "full_attention_interval": 4,
        "layer_types": [
            "full_attention" if shape.is_full(i) else "linear_attention"
            for i in range(shape.layers)
        ],
        "linear_conv_kernel_dim": shape.kernel,
        "linear_key_head_dim": shape.dk,
        "linear_num_key_heads": shape.k_heads,
        "linear_num_value_heads": shape.v_heads,
        "linear_value_head_dim": shape.dv,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 0,  # 1 in the releases; its tensors are not written here
        "mtp_use_dedicated_embeddings": False,
        "pad_token_id": None,
        "partial_rotary_factor": shape.rotary,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": section,
            "partial_rotary_factor": shape.rotary,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": shape.shared_width,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.7.0",
    }


def generation_config(shape: Shape) -> dict:
    """Sampling defaults of the real releases; stop ids as they list them."""
    qwen3 = shape.family == "qwen3_moe"
    return {
        "bos_token_id": shape.specials[0],
        "do_sample": True,
        "eos_token_id": [shape.specials[2], shape.specials[0]],
        "pad_token_id": shape.specials[0],
        "temperature": 0.6 if qwen3 else 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def _not_converted(shape: Shape) -> list[str]:
    base = _prefix(shape)
    linear = ("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
    names = ["lm_head"] if shape.family == "qwen3_moe" else ["lm_head", f"{base}embed_tokens"]
    for i in range(shape.layers):
        parts = ["input_layernorm", "mlp.gate", "post_attention_layernorm"]
        if shape.family != "qwen3_moe":
            parts = ["mlp.gate", "mlp.shared_expert_gate"]
            parts += [] if shape.is_full(i) else linear
        names += [f"{base}layers.{i}.{x}" for x in sorted(parts)]
    return names


def _prefix(shape: Shape) -> str:
    return "model." if shape.family == "qwen3_moe" else "model.language_model."


# ---- tensors ------------------------------------------------------------------------------------


def tensors(
    shape: Shape, dtype: str, uniform: bool = False, seed: int = 0, records: str | None = None
) -> Iterator[Tensor]:
    """Every tensor in module order. dtype "bf16" or "fp8"; uniform: no skew in the routers; records:
    the experts are matrices of that format, each followed by its scales, to lie in records."""
    base, hidden, vocab = _prefix(shape), shape.hidden, shape.vocab
    plus_one = shape.family != "qwen3_moe"
    skew = np.full(vocab, 0.0 if uniform else CONSTANT)
    name = f"{base}embed_tokens.weight"
    yield Tensor(name, "BF16", (vocab, hidden), Dist("normal", 0, 1), None, skew)
    for i in range(shape.layers):
        for t in _layer(shape, dtype == "fp8", i, plus_one, uniform, seed, records):
            yield replace(t, name=f"{base}layers.{i}.{t.name}", layer=i)
    yield _norm(f"{base}norm.weight", hidden, plus_one, None if uniform else 0.0)
    std = LOGIT_STD / math.sqrt(hidden)
    yield Tensor("lm_head.weight", "BF16", (vocab, hidden), Dist("normal", 0, std))


def _norm(
    name: str, n: int, plus_one: bool, first: float | None = None, mean: float = 1.0
) -> Tensor:
    """An RMS norm around `mean`, stored as w or as w of (1 + w); first: factor of channel 0."""
    shift = 1.0 if plus_one else 0.0
    column0 = None if first is None else np.array([first - shift])
    return Tensor(name, "BF16", (n,), Dist("normal", mean - shift, 0.1), None, column0)


def _weight(name: str, shape: tuple[int, int], std: float, fp8: bool) -> Iterator[Tensor]:
    if not fp8:
        yield Tensor(name, "BF16", shape, Dist("normal", 0, std))
        return
    yield Tensor(name, "F8_E4M3", shape, Dist("normal", 0, FP8_STD))
    blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    scale = Dist("uniform", 0.8 * std / FP8_STD, 1.25 * std / FP8_STD)
    yield Tensor(f"{name}_scale_inv", "BF16", blocks, scale)


def _in_record(name: str, shape: tuple[int, int], std: float, form: Format) -> Iterator[Tensor]:
    code = CODE_STD[form.dtype]
    scale = Dist("uniform", 0.8 * std / code, 1.25 * std / code)
    assert form.scale is not None
    yield Tensor(name, form.dtype, shape, Dist("normal", 0, code), recorded=True)
    yield Tensor(f"{name}_scale_inv", form.scale, (form.scales(*shape),), scale, recorded=True)


def _layer(
    shape: Shape, fp8: bool, i: int, plus_one: bool, uniform: bool, seed: int, records: str | None
) -> Iterator[Tensor]:
    hidden = shape.hidden
    gain = math.sqrt(GROWTH / (2 * shape.layers))  # deviation that one mixer or MoE layer adds
    if shape.is_full(i):
        yield from _attention(shape, fp8, gain, plus_one)
    else:
        yield from _delta(shape, fp8, gain)
    # Before the router of layer i the stream has variance v without channel 0.
    v = 1 + GROWTH * (2 * i + 1) / (2 * shape.layers)
    rms = math.sqrt(v + (0 if uniform else CONSTANT**2 / hidden))
    bias, first = None, None
    if not uniform:
        first = rms / CONSTANT
        bias = ROUTER_STD * zipf_bias(
            shape.experts, shape.top_k, SKEW, np.random.PCG64([seed, 2, i])
        )
    router = Dist("normal", 0, ROUTER_STD * rms / math.sqrt(v * hidden))
    yield Tensor("mlp.gate.weight", "BF16", (shape.experts, hidden), router, None, bias)
    yield from _experts(shape, fp8, gain, records)
    if shape.shared_width:
        std, down = 1 / math.sqrt(hidden), gain / (0.6 * math.sqrt(shape.shared_width))
        name = "mlp.shared_expert."
        yield from _weight(f"{name}gate_proj.weight", (shape.shared_width, hidden), std, fp8)
        yield from _weight(f"{name}up_proj.weight", (shape.shared_width, hidden), std, fp8)
        yield from _weight(f"{name}down_proj.weight", (hidden, shape.shared_width), down, fp8)
        yield Tensor("mlp.shared_expert_gate.weight", "BF16", (1, hidden), Dist("normal", 0, std))
    yield _norm("input_layernorm.weight", hidden, plus_one, None if uniform else 0.0)
    yield _norm("post_attention_layernorm.weight", hidden, plus_one, first)


def _attention(shape: Shape, fp8: bool, gain: float, plus_one: bool) -> Iterator[Tensor]:
    gate = shape.family != "qwen3_moe"  # q_proj holds query and output gate of each head
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    std, hidden = 1 / math.sqrt(shape.hidden), shape.hidden
    yield from _weight("self_attn.q_proj.weight", (inner * (2 if gate else 1), hidden), std, fp8)
    yield from _weight("self_attn.k_proj.weight", (kv, hidden), std, fp8)
    yield from _weight("self_attn.v_proj.weight", (kv, hidden), std, fp8)
    # Averaging over positions halves the values, and so does a sigmoid gate.
    out = gain / math.sqrt(inner) * (4 if gate else 2)
    yield from _weight("self_attn.o_proj.weight", (hidden, inner), out, fp8)
    # 1.5 for each of q and k: attention picks some positions instead of averaging over all.
    yield _norm("self_attn.q_norm.weight", shape.head_dim, plus_one, mean=1.5)
    yield _norm("self_attn.k_norm.weight", shape.head_dim, plus_one, mean=1.5)


def _delta(shape: Shape, fp8: bool, gain: float) -> Iterator[Tensor]:
    hidden, heads, inner = shape.hidden, shape.v_heads, shape.v_heads * shape.dv
    conv, std = 2 * shape.k_heads * shape.dk + inner, 1 / math.sqrt(hidden)
    tap = Dist("normal", 0, 1 / math.sqrt(shape.kernel))
    # A and dt as the reference initialises them: states that forget within 2 to 1000 tokens.
    yield Tensor("linear_attn.dt_bias", "BF16", (heads,), Dist("normal", -3, 1))
    decay = Dist("loguniform", 0.5, 16)
    yield Tensor("linear_attn.A_log", shape.gate_dtype, (heads,), decay)
    yield Tensor("linear_attn.conv1d.weight", "BF16", (conv, 1, shape.kernel), tap)
    # Not zero-centred, unlike every other norm of the family.
    yield replace(_norm("linear_attn.norm.weight", shape.dv, False), dtype=shape.gate_dtype)
    yield from _weight(
        "linear_attn.out_proj.weight", (hidden, inner), gain / (0.6 * math.sqrt(inner)), fp8
    )
    yield from _weight("linear_attn.in_proj_qkv.weight", (conv, hidden), std, fp8)
    yield from _weight("linear_attn.in_proj_z.weight", (inner, hidden), std, fp8)
    yield from _weight("linear_attn.in_proj_b.weight", (heads, hidden), std, False)
    yield from _weight("linear_attn.in_proj_a.weight", (heads, hidden), std, False)


def _experts(shape: Shape, fp8: bool, gain: float, records: str | None) -> Iterator[Tensor]:
    n, hidden, width = shape.experts, shape.hidden, shape.width
    # silu(gate) * up has deviation 0.6; unequal top-k weights leave 0.6 of one expert's.
    std, down = 1 / math.sqrt(hidden), gain / (0.36 * math.sqrt(width))
    if records is None and shape.family != "qwen3_moe" and not fp8:
        name, dims = "mlp.experts.gate_up_proj", (n, 2 * width, hidden)
        yield Tensor(name, "BF16", dims, Dist("normal", 0, std))
        yield Tensor("mlp.experts.down_proj", "BF16", (n, hidden, width), Dist("normal", 0, down))
        return
    for e in range(n):
        for part, dims, deviation in (
            ("gate", (width, hidden), std),
            ("up", (width, hidden), std),
            ("down", (hidden, width), down),
        ):
            name = f"mlp.experts.{e}.{part}_proj.weight"
            if records is None:
                yield from _weight(name, dims, deviation, fp8)
            else:
                yield from _in_record(name, dims, deviation, RECORDS[records])
