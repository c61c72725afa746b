"""Latent attention (MLA): deepseek_v3 (V3, V3.1, R1), kimi_k2 and kimi_k25; with the sparse indexer
deepseek_v32 and glm_moe_dsa (GLM-5, 5.1, 5.2)."""

from __future__ import annotations

from fractions import Fraction

from mosaic_c.architectures.common import (
    Sizes,
    experts,
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
)


def deepseek_v3(c: Config) -> Architecture:
    return mla(c, "deepseek_v3")


def kimi_k2(c: Config) -> Architecture:
    return mla(c, "kimi_k2")


def deepseek_v32(c: Config) -> Architecture:
    return mla(c, "deepseek_v32", indexer=True, norm="F32")


def glm_moe_dsa(c: Config) -> Architecture:
    return mla(c, "glm_moe_dsa", indexer=True, own_vocab=False)


def moe(at: str, s: Sizes, shared: int) -> list[Tensor]:
    """Router with its correction bias, experts, and shared experts of this width in all."""
    return [
        kept(f"{at}.gate.weight", s.experts, s.hidden),
        kept(f"{at}.gate.e_score_correction_bias", s.experts, dtype="F32"),
        *experts(at, s),
        *mlp(f"{at}.shared_experts", s.hidden, shared),
    ]


def sparse_count(c: Config, layers: int) -> int:
    """How many layers have experts: after the first dense ones, every moe_layer_freq-th."""
    first = c.size("first_k_dense_replace", MAX_LAYERS, default=0, least=0)
    every = c.size("moe_layer_freq", MAX_LAYERS, default=1)
    return sum(i >= first and i % every == 0 for i in range(layers))


def mla(
    c: Config, name: str, *, indexer: bool = False, norm: str = "BF16", own_vocab: bool = True
) -> Architecture:
    """norm: dtype of the norms. own_vocab: a prediction layer has an embedding and head of its own."""
    s = Sizes.read(c)
    heads = c.size("num_attention_heads", MAX_HEADS)
    nope, rope = c.size("qk_nope_head_dim", MAX_HEAD_DIM), c.size("qk_rope_head_dim", MAX_HEAD_DIM)
    v = c.size("v_head_dim", MAX_HEAD_DIM)
    latent = c.size("kv_lora_rank", MAX_DIM)
    rank = c.size("q_lora_rank", MAX_DIM, default=0)

    def attention(at: str) -> list[Tensor]:
        q = [linear(f"{at}.q_proj", heads * (nope + rope), s.hidden)]
        if rank:
            q = [
                linear(f"{at}.q_a_proj", rank, s.hidden),
                kept(f"{at}.q_a_layernorm.weight", rank, dtype=norm),
                linear(f"{at}.q_b_proj", heads * (nope + rope), rank),
            ]
        return q + [
            linear(f"{at}.kv_a_proj_with_mqa", latent + rope, s.hidden),
            kept(f"{at}.kv_a_layernorm.weight", latent, dtype=norm),
            linear(f"{at}.kv_b_proj", heads * (nope + v), latent),
            linear(f"{at}.o_proj", s.hidden, heads * v),
        ]

    index: list[Tensor] = []
    indexed, index_dim = 0, 0
    if indexer:
        n, index_dim = c.size("index_n_heads", MAX_HEADS), c.size("index_head_dim", MAX_HEAD_DIM)
        at = "model.layers.{i}.self_attn.indexer"
        index = [
            linear(f"{at}.wq_b", n * index_dim, c.size("q_lora_rank", MAX_DIM)),
            linear(f"{at}.wk", index_dim, s.hidden),
            kept(f"{at}.k_norm.weight", index_dim, dtype=norm),
            kept(f"{at}.k_norm.bias", index_dim, dtype=norm),
            kept(f"{at}.weights_proj.weight", n, s.hidden),
        ]
        indexed = full_indexers(c, s.layers)
    sparse = sparse_count(c, s.layers)
    dense = s.layers - sparse
    wide = c.size("intermediate_size", MAX_DIM) if dense else 0
    shared = s.width * c.size("n_shared_experts", 1024, default=0, least=0)
    at = "model.layers.{i}"
    layer = [*norms(at, s.hidden, norm), *attention(f"{at}.self_attn")]
    mtp = c.size("num_nextn_predict_layers", MAX_LAYERS, default=0, least=0)
    spare = [*layer, *index, *moe(f"{at}.mlp", s, shared), *draft(at, s, norm, own_vocab)]
    return Architecture(
        name,
        tuple(
            outer(c, s, norm=norm)
            + repeat(s.layers, *layer)
            + repeat(indexed, *index)
            + repeat(sparse, *moe(f"{at}.mlp", s, shared))
            + repeat(dense, *mlp(f"{at}.mlp", s.hidden, wide))
        ),
        layers=sparse,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=Fraction(s.layers * (latent + rope) + indexed * index_dim),
        spare=tuple(repeat(mtp, *spare)),
        fp8=fp8_blocks(4),
    )


def draft(at: str, s: Sizes, norm: str, own_vocab: bool) -> list[Tensor]:
    """What a multi-token prediction layer has beside the tensors of a layer."""
    vocab = ("embed_tokens", "shared_head.head") if own_vocab else ()
    return [
        kept(f"{at}.eh_proj.weight", s.hidden, 2 * s.hidden),
        *[kept(f"{at}.{x}.weight", s.hidden, dtype=norm)
          for x in ("enorm", "hnorm", "shared_head.norm")],
        *[kept(f"{at}.{x}.weight", s.vocab, s.hidden) for x in vocab],
    ]  # fmt: skip


def full_indexers(c: Config, layers: int) -> int:
    """Layers with an indexer of their own; GLM-5.2 lists those that reuse the one before."""
    types = c.get("indexer_types")
    if types is None:
        return layers
    section = Config({"layer_types": types}, f"{c.where}: indexer_types as")
    return (check_layer_types(section, layers, ("full", "shared")) or []).count("full")
