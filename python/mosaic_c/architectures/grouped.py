"""Grouped-head attention without linear layers: glm4_moe, minimax_m2, mixtral, gpt_oss."""

from __future__ import annotations

from fractions import Fraction

from mosaic_c.architectures.common import (
    MIXTRAL,
    Sizes,
    attention,
    experts,
    heads_of,
    kept,
    mlp,
    norms,
    outer,
    repeat,
)
from mosaic_c.architectures.deepseek import draft, moe, sparse_count
from mosaic_c.architectures.tensors import EXPERT, FP8_ROWS, Architecture, Tensor, fp8_blocks
from mosaic_c.families.config import MAX_DIM, MAX_LAYERS, Config, check_layer_types

AT = "model.layers.{i}"
SLIDING, FULL = "sliding_attention", "full_attention"


def glm4_moe(c: Config) -> Architecture:
    s = Sizes.read(c)
    heads = heads_of(c, s.hidden)
    qk_norm = (heads[2], heads[2]) if c.flag("use_qk_norm", False) else None
    bias = c.flag("attention_bias", False)
    layer = norms(AT, s.hidden) + attention(
        f"{AT}.self_attn", s.hidden, heads, qkv_bias=bias, qk_norm=qk_norm
    )
    sparse = sparse_count(c, s.layers)
    wide = c.size("intermediate_size", MAX_DIM) if s.layers - sparse else 0
    block = moe(f"{AT}.mlp", s, s.width * c.size("n_shared_experts", 1024, default=0, least=0))
    mtp = c.size("num_nextn_predict_layers", MAX_LAYERS, default=0, least=0)
    return Architecture(
        "glm4_moe",
        tuple(
            outer(c, s)
            + repeat(s.layers, *layer)
            + repeat(sparse, *block)
            + repeat(s.layers - sparse, *mlp(f"{AT}.mlp", s.hidden, wide))
        ),
        layers=sparse,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(s.layers * 2 * heads[1] * heads[2]),
        spare=tuple(repeat(mtp, *layer, *block, *draft(AT, s, "BF16", True))),
        fp8=FP8_ROWS,
    )


def minimax_m2(c: Config) -> Architecture:
    """Its experts are as wide as intermediate_size, q and k are normed over all heads at once."""
    s = Sizes.read(c, width="intermediate_size")
    heads = heads_of(c, s.hidden)
    whole = (heads[0] * heads[2], heads[1] * heads[2]) if c.flag("use_qk_norm", True) else None
    return Architecture(
        "minimax_m2",
        tuple(
            outer(c, s)
            + repeat(
                s.layers,
                *norms(AT, s.hidden),
                *attention(f"{AT}.self_attn", s.hidden, heads, qk_norm=whole),
                kept(f"{AT}.block_sparse_moe.gate.weight", s.experts, s.hidden, dtype="F32"),
                kept(f"{AT}.block_sparse_moe.e_score_correction_bias", s.experts, dtype="F32"),
                *experts(f"{AT}.block_sparse_moe", s, MIXTRAL),
            )
        ),
        layers=s.layers,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(s.layers * 2 * heads[1] * heads[2]),
        fp8=fp8_blocks(4),
    )


def mixtral(c: Config) -> Architecture:
    s = Sizes.read(c, width="intermediate_size")
    heads = heads_of(c, s.hidden)
    kv = 2 * heads[1] * heads[2]
    window = c.size("sliding_window", 1 << 31, default=0)
    return Architecture(
        "mixtral",
        tuple(
            outer(c, s)
            + repeat(
                s.layers,
                *norms(AT, s.hidden),
                *attention(f"{AT}.self_attn", s.hidden, heads),
                kept(f"{AT}.block_sparse_moe.gate.weight", s.experts, s.hidden),
                *experts(f"{AT}.block_sparse_moe", s, MIXTRAL),
            )
        ),
        layers=s.layers,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(0 if window else s.layers * kv),
        window=s.layers * kv * window,
    )


def gpt_oss(c: Config) -> Architecture:
    """Biases everywhere, an attention sink a head, every other layer sees a window only.

    gate_up is one tensor of interleaved rows; experts carry BF16 biases in every format.
    """
    s = Sizes.read(c, width="intermediate_size")
    heads = heads_of(c, s.hidden)
    kinds = check_layer_types(c, s.layers, (SLIDING, FULL))
    full = kinds.count(FULL) if kinds else s.layers // 2
    window = c.size("sliding_window", 1 << 31)
    kv = 2 * heads[1] * heads[2]
    e = f"{AT}.mlp.experts"
    bias = c.flag("attention_bias", True)
    return Architecture(
        "gpt_oss",
        tuple(
            outer(c, s)
            + repeat(
                s.layers,
                *norms(AT, s.hidden),
                *attention(f"{AT}.self_attn", s.hidden, heads, qkv_bias=bias, o_bias=bias),
                kept(f"{AT}.self_attn.sinks", heads[0]),
                kept(f"{AT}.mlp.router.weight", s.experts, s.hidden),
                kept(f"{AT}.mlp.router.bias", s.experts),
                *repeat(
                    s.experts,
                    Tensor(f"{e}.gate_up_proj", (2 * s.width, s.hidden), EXPERT),
                    Tensor(f"{e}.down_proj", (s.hidden, s.width), EXPERT),
                    Tensor(f"{e}.gate_up_proj_bias", (2 * s.width,), EXPERT, "BF16"),
                    Tensor(f"{e}.down_proj_bias", (s.hidden,), EXPERT, "BF16"),
                ),
            )
        ),
        layers=s.layers,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(full * kv),
        window=(s.layers - full) * kv * window,
    )
