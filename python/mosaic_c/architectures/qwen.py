"""Qwen: qwen3_5_moe (Qwen3.5, 3.6) and qwen3_next with gated delta layers, qwen3_moe, qwen2_moe."""

from __future__ import annotations

from fractions import Fraction

from mosaic_c.architectures.common import (
    Sizes,
    attention,
    experts,
    heads_of,
    kept,
    linear,
    mlp,
    norms,
    outer,
    repeat,
)
from mosaic_c.architectures.tensors import Architecture, Tensor, fp8_blocks
from mosaic_c.families.config import (
    MAX_DIM,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    Config,
    check_layer_types,
    sparse_layers,
)

MAX_KERNEL = 1024
LINEAR_LAYER, FULL = "linear_attention", "full_attention"


def moe(at: str, s: Sizes, shared: int) -> list[Tensor]:
    """Router, experts and the gated shared expert of a layer; shared: its width, 0 for none."""
    gate = [kept(f"{at}.shared_expert_gate.weight", 1, s.hidden)] if shared else []
    return [
        kept(f"{at}.gate.weight", s.experts, s.hidden),
        *experts(at, s),
        *mlp(f"{at}.shared_expert", s.hidden, shared),
        *gate,
    ]


def plain(c: Config, name: str, *, qkv_bias: bool, o_bias: bool, qk_norm: bool, shared: int):
    """Full attention in every layer; layers without experts have a dense MLP."""
    s = Sizes.read(c)
    heads = heads_of(c, s.hidden)
    sparse = sum(sparse_layers(c, s.layers))
    dense = s.layers - sparse
    at = "model.layers.{i}"
    layer = norms(at, s.hidden) + attention(
        f"{at}.self_attn", s.hidden, heads, qkv_bias=qkv_bias, o_bias=o_bias,
        qk_norm=(heads[2], heads[2]) if qk_norm else None,
    )  # fmt: skip
    wide = c.size("intermediate_size", MAX_DIM) if dense else 0
    return Architecture(
        name,
        tuple(
            outer(c, s)
            + repeat(s.layers, *layer)
            + repeat(sparse, *moe(f"{at}.mlp", s, shared))
            + repeat(dense, *mlp(f"{at}.mlp", s.hidden, wide))
        ),
        layers=sparse,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(s.layers * 2 * heads[1] * heads[2]),
        fp8=fp8_blocks(2),
    )


def qwen3_moe(c: Config) -> Architecture:
    bias = c.flag("attention_bias", False)
    return plain(c, "qwen3_moe", qkv_bias=bias, o_bias=bias, qk_norm=True, shared=0)


def qwen2_moe(c: Config) -> Architecture:
    shared = c.size("shared_expert_intermediate_size", MAX_DIM)
    bias = c.flag("qkv_bias", True)
    return plain(c, "qwen2_moe", qkv_bias=bias, o_bias=False, qk_norm=False, shared=shared)


def qwen3_next(c: Config) -> Architecture:
    return hybrid(c, "qwen3_next", "model", fused=True, scale=4)


def qwen3_5_moe(c: Config) -> Architecture:
    """Names as in the official releases, which wrap it with a vision tower."""
    return hybrid(c, "qwen3_5_moe", "model.language_model", fused=False, scale=2)


def hybrid(c: Config, name: str, prefix: str, *, fused: bool, scale: int) -> Architecture:
    """Gated delta layers and full attention with an output gate. fused: qkvz and ba in one tensor
    each. scale: bytes of a scale of the FP8 release."""
    s = Sizes.read(c)
    heads = heads_of(c, s.hidden)
    kinds = check_layer_types(c, s.layers, (LINEAR_LAYER, FULL))
    if kinds is None:
        every = c.size("full_attention_interval", MAX_LAYERS, default=4)
        kinds = [LINEAR_LAYER if (i + 1) % every else FULL for i in range(s.layers)]
    delta = kinds.count(LINEAR_LAYER)
    bias = c.flag("attention_bias", False)
    at = f"{prefix}.layers.{{i}}"

    def full(at: str) -> list[Tensor]:
        qk_norm = (heads[2], heads[2])
        return attention(f"{at}.self_attn", s.hidden, heads, gate=True, qkv_bias=bias, o_bias=bias,
                         qk_norm=qk_norm)  # fmt: skip

    k, v = c.size("linear_num_key_heads", MAX_HEADS), c.size("linear_num_value_heads", MAX_HEADS)
    dk = c.size("linear_key_head_dim", MAX_HEAD_DIM)
    dv = c.size("linear_value_head_dim", MAX_HEAD_DIM)
    kernel = c.size("linear_conv_kernel_dim", MAX_KERNEL)
    channels, values, mixer = 2 * k * dk + v * dv, v * dv, f"{at}.linear_attn"
    if fused:
        inputs = [linear(f"{mixer}.in_proj_qkvz", channels + values, s.hidden)]
        inputs.append(kept(f"{mixer}.in_proj_ba.weight", 2 * v, s.hidden))
    else:
        inputs = [linear(f"{mixer}.in_proj_qkv", channels, s.hidden)]
        inputs.append(linear(f"{mixer}.in_proj_z", values, s.hidden))
        inputs += [kept(f"{mixer}.in_proj_{x}.weight", v, s.hidden) for x in "ab"]
    linear_layer = [
        *inputs,
        kept(f"{mixer}.conv1d.weight", channels, 1, kernel),
        kept(f"{mixer}.A_log", v),  # this and the norm are F32 in some releases: 320 bytes a layer
        kept(f"{mixer}.dt_bias", v),
        kept(f"{mixer}.norm.weight", dv),
        linear(f"{mixer}.out_proj", s.hidden, values),
    ]
    sparse = sum(sparse_layers(c, s.layers))
    dense = s.layers - sparse
    wide = c.size("intermediate_size", MAX_DIM) if dense else 0
    shared = c.size("shared_expert_intermediate_size", MAX_DIM, default=0, least=0)
    # qwen3_next ships these tensors without a key
    mtp = c.size("mtp_num_hidden_layers", MAX_LAYERS, default=1 if fused else 0, least=0)
    block = norms("mtp.layers.{i}", s.hidden) + full("mtp.layers.{i}")
    spare = repeat(mtp, *block, *moe("mtp.layers.{i}.mlp", s, shared)) + repeat(
        min(mtp, 1),
        kept("mtp.fc.weight", s.hidden, 2 * s.hidden),
        *[kept(f"mtp.{x}.weight", s.hidden)
          for x in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")],
    )  # fmt: skip
    return Architecture(
        name,
        tuple(
            outer(c, s, prefix=prefix)
            + repeat(s.layers, *norms(at, s.hidden))
            + repeat(delta, *linear_layer)
            + repeat(s.layers - delta, *full(at))
            + repeat(sparse, *moe(f"{at}.mlp", s, shared))
            + repeat(dense, *mlp(f"{at}.mlp", s.hidden, wide))
        ),
        layers=sparse,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction((s.layers - delta) * 2 * heads[1] * heads[2]),
        recurrent=delta * (v * dk * dv + (kernel - 1) * channels),
        spare=tuple(spare),
        fp8=fp8_blocks(scale),
    )
