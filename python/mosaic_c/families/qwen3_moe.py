"""Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B, Coder): q/k norms, no shared expert."""

from __future__ import annotations

from mosaic_c.families.common import Dims, attention, dense, model, moe
from mosaic_c.families.config import (
    MAX_DIM,
    Config,
    Family,
    check_layer_types,
    check_text,
    rope,
    sparse_layers,
    weight_block,
)
from mosaic_c.plan import Layer, ModelPlan


def build(c: Config) -> ModelPlan:
    check_text(c)
    c.only("use_qk_norm", True)
    d = Dims.read(c, head_dim_required=False)
    check_layer_types(c, d.layers, ("full_attention",))
    theta, rope_dim = rope(c, d.head_dim, share=None)
    bias = c.flag("attention_bias", False)
    renormalise = c.flag("norm_topk_prob", False)
    layers = []
    for i, sparse in enumerate(sparse_layers(c, d.layers)):
        at = f"model.layers.{i}"
        mixer = attention(
            at, d, theta, rope_dim,
            plus_one=False, gate=False, qk_norm=True, qkv_bias=bias, o_bias=bias,
        )  # fmt: skip
        if sparse:
            block = moe(at, d, plus_one=False, renormalise=renormalise, shared=0)
        else:
            block = dense(at, d, c.size("intermediate_size", MAX_DIM))
        layers.append(Layer(mixer, block))
    return model(
        c, "qwen3_moe", "model", d, layers,
        plus_one=False, tied=c.flag("tie_word_embeddings", False), block=weight_block(c, c),
    )  # fmt: skip


FAMILY = Family("qwen3_moe", ("qwen3_moe",), ("Qwen3MoeForCausalLM",), build)
