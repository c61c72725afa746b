"""Qwen3.5 and Qwen3.6 MoE: three gated delta layers, then one full-attention layer with an output
gate; every layer has experts and a gated shared expert.

Comes inside a multimodal wrapper (text_config, tensors under model.language_model.) or bare
(model_type qwen3_5_moe_text, tensors under model.). Norms hold w of 1 + w, except the delta rule's
output norm. Vision and multi-token prediction tensors are skipped.
"""

from __future__ import annotations

from mosaic_c.families.common import Dims, attention, matrix, model, moe, norm
from mosaic_c.families.config import (
    MAX_DIM,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    Config,
    Family,
    check_layer_types,
    check_text,
    rope,
    weight_block,
)
from mosaic_c.plan import Attention, DeltaNet, Layer, ModelPlan, Weight

LINEAR, FULL = "linear_attention", "full_attention"
MAX_KERNEL = 16  # as in kv.c


def build(top: Config) -> ModelPlan:
    wrapped = top.get("text_config") is not None or top.get("model_type") == "qwen3_5_moe"
    c, prefix = (top.section("text_config"), "model.language_model") if wrapped else (top, "model")
    if wrapped:
        c.only("model_type", "qwen3_5_moe_text")
    check_text(c)
    c.only("attn_output_gate", True)
    c.only("norm_topk_prob", True)  # the reference always renormalises
    c.only("mlp_only_layers", [])
    c.only("decoder_sparse_step", 1)
    d = Dims.read(c, head_dim_required=True)
    theta, rope_dim = rope(c, d.head_dim, share=0.25)
    bias = c.flag("attention_bias", False)
    shared = c.size("shared_expert_intermediate_size", MAX_DIM)
    kinds = check_layer_types(c, d.layers, (LINEAR, FULL))
    if kinds is None:
        every = c.size("full_attention_interval", MAX_LAYERS, default=4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(d.layers)]
    layers = []
    for i, kind in enumerate(kinds):
        at = f"{prefix}.layers.{i}"
        if kind == FULL:
            mixer: DeltaNet | Attention = attention(
                at, d, theta, rope_dim,
                plus_one=True, gate=True, qk_norm=True, qkv_bias=bias, o_bias=bias,
            )  # fmt: skip
        else:
            mixer = delta(at, c, d)
        layers.append(Layer(mixer, moe(at, d, plus_one=True, renormalise=True, shared=shared)))
    # Wrapped: the wrapper's flag is the one that transformers reads.
    flag = top if top.get("tie_word_embeddings") is not None else c
    return model(
        c, "qwen3_5_moe", prefix, d, layers,
        plus_one=True,
        tied=flag.flag("tie_word_embeddings", False),
        block=weight_block(top, c),
        skip=("model.visual.", "visual.", "mtp."),
    )  # fmt: skip


def delta(at: str, c: Config, d: Dims) -> DeltaNet:
    """The gated delta rule of the layer `at`; rows of qkv are [q | k | v], head-major."""
    k_heads = c.size("linear_num_key_heads", MAX_HEADS)
    v_heads = c.size("linear_num_value_heads", MAX_HEADS)
    if v_heads % k_heads:
        raise c.error("linear_num_value_heads", f"a multiple of {k_heads} key heads", v_heads)
    dk = c.size("linear_key_head_dim", MAX_HEAD_DIM)
    dv = c.size("linear_value_head_dim", MAX_HEAD_DIM)
    kernel = c.size("linear_conv_kernel_dim", MAX_KERNEL)
    mixer, channels, values = f"{at}.linear_attn", 2 * k_heads * dk + v_heads * dv, v_heads * dv
    return DeltaNet(
        norm=norm(f"{at}.input_layernorm", d.hidden, d.eps, True),
        qkv=matrix(f"{mixer}.in_proj_qkv", channels, d.hidden),
        z=matrix(f"{mixer}.in_proj_z", values, d.hidden),
        b=matrix(f"{mixer}.in_proj_b", v_heads, d.hidden),
        a=matrix(f"{mixer}.in_proj_a", v_heads, d.hidden),
        conv=Weight(f"{mixer}.conv1d.weight", (channels, 1, kernel)),
        a_log=Weight(f"{mixer}.A_log", (v_heads,)),
        dt_bias=Weight(f"{mixer}.dt_bias", (v_heads,)),
        out_norm=norm(f"{mixer}.norm", dv, d.eps, False),
        out=matrix(f"{mixer}.out_proj", d.hidden, values),
        k_heads=k_heads,
        v_heads=v_heads,
        dk=dk,
        dv=dv,
        kernel=kernel,
    )


FAMILY = Family(
    "qwen3_5_moe",
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    build,
)
