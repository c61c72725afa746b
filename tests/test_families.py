"""config.json to plan: values of real configs, and a named refusal for each thing that would change
the arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_checkpoint import (
    FP8,
    QWEN2,
    QWEN3,
    QWEN35,
    QWEN35_TEXT,
    QWEN36_35B,
    Config,
    changed,
    refusal,
    tensors_of,
)

from mosaic_c import families
from mosaic_c.dtypes import BITS
from mosaic_c.families import common, plan_for
from mosaic_c.plan import Attention, DeltaNet, ModelPlan, Weight

CONFIGS = Path(__file__).parent / "vectors" / "configs"
BARE: Config = {**QWEN35_TEXT, "architectures": ["Qwen3_5MoeForCausalLM"]}
EACH = pytest.mark.parametrize("config", [QWEN3, QWEN2, BARE], ids=lambda c: c["model_type"])


def refused(config: Config, *words: str, code: str = "EFORMAT") -> str:
    where = "/models/x/config.json"
    return refusal(lambda: plan_for(config, where), where, *words, code=code)


def bad(config: Config, key: str, value: object, *words: str) -> None:
    """A malformed value; the message names key and value."""
    got = json.dumps(value) if value is not ... else "missing"
    refused(changed(config, key, value), f'"{key.split(".")[-1]}"', got[:100], *words)


def unsupported(config: Config, key: str, value: object, *words: str) -> None:
    """A value that means something the engine does not do: key, value and what it does do."""
    refused(
        changed(config, key, value), f'"{key.split(".")[-1]}"', json.dumps(value)[:100],
        "expected", "supported", *words, code="EUNSUPPORTED",
    )  # fmt: skip


def attention(plan: ModelPlan, i: int = 0) -> Attention:
    return plan.attention_layers[i]


# ---- plans ---------------------------------------------------------------------------------------


def test_order_of_families_is_stable() -> None:
    assert families.names() == ["qwen3_5_moe", "qwen3_moe", "qwen2_moe"]


def test_qwen3() -> None:
    p = plan_for(QWEN3)
    assert (p.family, p.hidden, p.vocab, p.max_positions) == ("qwen3_moe", 129, 40, 4096)
    assert (p.skip, p.weight_block, p.spare_head) == ((), None, None)
    assert p.embed == Weight("model.embed_tokens.weight", (40, 129))
    assert p.head == Weight("lm_head.weight", (40, 129))
    assert p.final_norm.weight == Weight("model.norm.weight", (129,))
    a, m = attention(p, 1), p.layers[1].moe
    assert (a.heads, a.kv_heads, a.head_dim, a.rope_dim, a.rope_theta) == (4, 2, 16, 16, 1e6)
    assert a.q == Weight("model.layers.1.self_attn.q_proj.weight", (64, 129))
    assert a.k == Weight("model.layers.1.self_attn.k_proj.weight", (32, 129))
    assert a.o == Weight("model.layers.1.self_attn.o_proj.weight", (129, 64))
    assert a.q_norm and a.q_norm.weight == Weight("model.layers.1.self_attn.q_norm.weight", (16,))
    assert not (a.gate or a.q_bias or a.o_bias)
    assert (m.top_k, m.renormalise, m.shared, m.shared_gate) == (3, True, None, None)
    assert m.router == Weight("model.layers.1.mlp.gate.weight", (12, 129))
    assert m.experts and (m.experts.count, m.experts.width, m.experts.hidden) == (12, 24, 129)
    assert m.experts.per_expert[2] == "model.layers.1.mlp.experts.{e}.down_proj.weight"
    assert m.experts.fused[0] == "model.layers.1.mlp.experts.gate_up_proj"
    norms = [p.final_norm, a.norm, a.q_norm, a.k_norm, m.norm]
    assert all(n and not n.plus_one and n.eps == 1e-6 for n in norms)
    assert attention(plan_for(changed(QWEN3, "attention_bias", ...))).q_bias is None
    assert not plan_for(changed(QWEN3, "norm_topk_prob", ...)).layers[0].moe.renormalise


def test_qwen2() -> None:
    p = plan_for(QWEN2)
    a, m = attention(p), p.layers[0].moe
    assert (a.head_dim, a.rope_dim) == (24, 24)  # hidden / heads
    assert a.q_bias == Weight("model.layers.0.self_attn.q_proj.bias", (72,))
    assert a.v_bias and a.k_bias and not a.o_bias and not a.q_norm and not a.k_norm
    assert not m.renormalise  # the class default
    assert m.shared and m.shared.down == Weight(
        "model.layers.0.mlp.shared_expert.down_proj.weight", (72, 20)
    )
    assert m.shared_gate == Weight("model.layers.0.mlp.shared_expert_gate.weight", (1, 72))
    assert attention(plan_for(changed(QWEN2, "qkv_bias", False))).q_bias is None
    dense = plan_for(changed(QWEN2, "mlp_only_layers", [1])).layers[1].moe
    assert not any(n.plus_one for n in (p.final_norm, a.norm, m.norm, dense.norm)) and not a.gate


def test_qwen35_wrapped_and_bare() -> None:
    p, bare = plan_for(QWEN35), plan_for(BARE)
    assert [type(x.mixer) for x in p.layers] == [DeltaNet] * 3 + [Attention]
    assert p.embed.name == "model.language_model.embed_tokens.weight"
    assert p.head == bare.head == Weight("lm_head.weight", (40, 40))
    assert bare.embed.name == "model.embed_tokens.weight"
    assert p.skip == ("model.visual.", "visual.", "mtp.")
    renamed = [w.name.replace("language_model.", "") for w in p.weights()]
    assert renamed == [w.name for w in bare.weights()]
    a, d = attention(p), p.delta_layers[2]
    at = "model.language_model.layers.2.linear_attn"
    assert a.gate and a.q.shape == (128, 40) and a.rope_dim == 8 and a.rope_theta == 1e7
    assert d.qkv == Weight(f"{at}.in_proj_qkv.weight", (64, 40))
    assert d.conv == Weight(f"{at}.conv1d.weight", (64, 1, 4))
    assert d.z.shape == (32, 40) and d.b.shape == d.a.shape == (4, 40)
    assert d.a_log == Weight(f"{at}.A_log", (4,)) and d.dt_bias == Weight(f"{at}.dt_bias", (4,))
    assert d.out == Weight(f"{at}.out_proj.weight", (40, 32))
    assert not d.out_norm.plus_one and d.out_norm.weight == Weight(f"{at}.norm.weight", (8,))
    assert a.q_norm and a.k_norm
    norms = [p.final_norm, a.norm, a.q_norm, a.k_norm, d.norm, p.layers[0].moe.norm]
    assert all(n.plus_one for n in norms)
    assert all(x.moe.renormalise and x.moe.shared and x.moe.shared_gate for x in p.layers)


def test_layer_kinds_from_the_interval() -> None:
    def kinds(config: Config) -> str:
        return "".join("FL"[isinstance(x.mixer, DeltaNet)] for x in plan_for(config).layers)

    config = changed(BARE, "layer_types", ...)
    assert kinds(config) == "LLLF"
    assert kinds(changed(config, "full_attention_interval", 2)) == "LFLF"
    assert kinds(changed(config, "full_attention_interval", ...)) == "LLLF"
    assert kinds(changed(BARE, "layer_types", ["full_attention"] * 4)) == "FFFF"


def test_biases_where_the_plan_carries_them() -> None:
    for config in (QWEN3, BARE):
        assert attention(plan_for(changed(config, "attention_bias", ...))).o_bias is None
        a = attention(plan_for(changed(config, "attention_bias", True)))
        assert a.q_bias and a.k_bias and a.v_bias and a.o_bias
        assert a.q_bias.shape == a.q.shape[:1] and a.o_bias.shape == a.o.shape[:1]


@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=lambda c: c["model_type"])
def test_dense_layers(config: Config) -> None:
    def dense(**keys: object) -> list[int]:
        layers = plan_for({**config, "num_hidden_layers": 4, **keys}).layers
        return [i for i, x in enumerate(layers) if x.moe.experts is None]

    assert dense() == dense(mlp_only_layers=None) == dense(decoder_sparse_step=1) == []
    assert dense(mlp_only_layers=[1, 3, 9]) == [1, 3]
    assert dense(decoder_sparse_step=2) == [0, 2]
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == [0, 1, 2]
    m = plan_for({**config, "mlp_only_layers": [0]}).layers[0].moe
    assert (m.router, m.shared_gate, m.top_k) == (None, None, 0)
    assert m.shared and m.shared.width == 96
    assert m.shared.up == Weight("model.layers.0.mlp.up_proj.weight", (96, config["hidden_size"]))
    bad({**config, "mlp_only_layers": [0]}, "intermediate_size", ...)
    for value in (3, [True], [-1], ["0"], [1.0], 0, False, "", {}):
        bad(config, "mlp_only_layers", value)
    for value in (0, -1, 1.0, True):
        bad(config, "decoder_sparse_step", value)


@EACH
def test_tied_embeddings(config: Config) -> None:
    p = plan_for(changed(config, "tie_word_embeddings", True))
    assert p.head is None and p.spare_head and p.spare_head.name == "lm_head.weight"
    assert plan_for(changed(config, "tie_word_embeddings", ...)).head  # the class default
    bad(config, "tie_word_embeddings", 1, "true or false")


def test_the_wrapper_decides_about_tying() -> None:
    text = changed(QWEN35, "text_config.tie_word_embeddings", True)
    assert plan_for(text).head
    assert plan_for(changed(text, "tie_word_embeddings", ...)).head is None
    assert plan_for(changed(QWEN35, "tie_word_embeddings", True)).head is None


# ---- rope ----------------------------------------------------------------------------------------


@EACH
def test_rope_in_both_styles(config: Config) -> None:
    base = config
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        base = changed(base, key, ...)
    for style in (
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 500000}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_theta": 5e5, "factor": 1.0}},
    ):
        assert attention(plan_for({**base, **style})).rope_theta == 5e5
    for style in ({}, {"rope_scaling": {"type": "default"}}, {"rope_parameters": {}}):
        refused({**base, **style}, '"rope_theta" is missing', "rope_parameters")
    refused({**base, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, '"rope_theta"')
    for value in ("1e6", True, 0, -1.0, [1e6]):
        bad(base, "rope_theta", value)
    refused({**base, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            '"full_attention"', code="EUNSUPPORTED")  # fmt: skip


@EACH
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "su", 7])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rope_types_are_refused_by_name(config: Config, kind: str, key: str, name: str) -> None:
    rope = {name: kind, "factor": 4.0, "original_max_position_embeddings": 32768}
    unsupported(changed(config, key, rope), f"{key}.{name}", kind, key, '"default"')


@EACH
def test_rope_factor(config: Config) -> None:
    unsupported(changed(config, "rope_scaling", {}), "rope_scaling.factor", 4.0)
    bad(config, "rope_scaling", [1], "an object")


def test_partial_rotary_factor() -> None:
    text = changed(BARE, "rope_parameters.partial_rotary_factor", ...)
    assert attention(plan_for(text)).rope_dim == 8  # the class default is a quarter
    assert attention(plan_for(changed(text, "partial_rotary_factor", 0.5))).rope_dim == 16
    refused(changed(BARE, "partial_rotary_factor", 0.5), '"partial_rotary_factor"', "0.25")
    for value in (0, -0.5, 1.5, "0.5", True, 0.1):
        bad(text, "rope_parameters.partial_rotary_factor", value)
    refused(changed(QWEN3, "head_dim", 15), '"partial_rotary_factor"', "head_dim 15", "got 1.0")
    unsupported(QWEN3, "partial_rotary_factor", 0.5)  # its reference rotates whole heads
    assert attention(plan_for(changed(QWEN3, "partial_rotary_factor", 1.0))).rope_dim == 16


# ---- refusals ------------------------------------------------------------------------------------


@EACH
def test_every_size_is_required_and_checked(config: Config) -> None:
    keys = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "num_experts", "num_experts_per_tok",
            "moe_intermediate_size"]  # fmt: skip
    if config is not QWEN3:
        keys.append("shared_expert_intermediate_size")
    if config is BARE:
        keys += ["head_dim", *(k for k in config if k.startswith("linear_"))]
    for key in keys:
        refused(changed(config, key, ...), f'required key "{key}" is missing')
        refused(changed(config, key, None), f'required key "{key}" is null')
        for value in (0, -1, 2.0, True, "2", [2], {}, 2**31, 10**30):
            bad(config, key, value, "an integer from 1 to")
    refused(changed(config, "rms_norm_eps", ...), '"rms_norm_eps" is missing')
    for value in (0, -1e-6, 2.0, True, "1e-6", None):
        if value is not None:
            bad(config, "rms_norm_eps", value, "a number from")


@EACH
def test_sizes_that_do_not_fit_together(config: Config) -> None:
    refused(changed(config, "num_key_value_heads", 7), '"num_key_value_heads"', "a divisor of")
    refused(changed(config, "num_experts_per_tok", 99), '"num_experts_per_tok"', "got 99")
    if config is BARE:
        refused(changed(config, "linear_num_value_heads", 3), "a multiple of 2 key heads")
    else:
        no_dim = changed(config, "head_dim", ...)
        refused({**no_dim, "hidden_size": 73}, '"hidden_size"', "a multiple of", "got 73")


def test_expert_count_under_either_name() -> None:
    other = changed(changed(QWEN3, "num_experts", ...), "num_local_experts", 12)
    assert plan_for(other) == plan_for(QWEN3)
    refused(changed(other, "num_experts", 13), '"num_local_experts"', "13", "got 12")
    bad(other, "num_local_experts", True)


@EACH
def test_arithmetic_that_is_not_implemented(config: Config) -> None:
    for act in ("gelu", "gelu_pytorch_tanh", "relu", 3):
        unsupported(config, "hidden_act", act, '"silu"')
    unsupported(config, "use_sliding_window", True, "false")
    unsupported(config, "swiglu_limit", 10.0)
    n = config["num_hidden_layers"]
    kinds = ["full_attention"] * n
    plan_for(changed(config, "layer_types", kinds))
    sliding = [*kinds[:-1], "sliding_attention"]
    refused(changed(config, "layer_types", sliding), f'"layer_types[{n - 1}]"',
            '"sliding_attention"', '"full_attention"', code="EUNSUPPORTED")  # fmt: skip
    refused(changed(config, "layer_types", kinds[1:]), '"layer_types"', f"{n} entries")
    bad(config, "layer_types", "full_attention")
    refused(changed(config, "layer_types", [7] * n), '"layer_types[0]"', code="EUNSUPPORTED")
    if config is not BARE:
        linear = ["linear_attention"] * n
        refused(changed(config, "layer_types", linear), "linear", code="EUNSUPPORTED")


def test_arithmetic_of_one_family() -> None:
    unsupported(QWEN3, "use_qk_norm", False)
    unsupported(QWEN2, "attention_bias", True)
    bad(QWEN2, "qkv_bias", 1)
    bad(QWEN3, "norm_topk_prob", "yes")
    bad(QWEN3, "attention_bias", 0)
    unsupported(BARE, "attn_output_gate", False)
    unsupported(BARE, "norm_topk_prob", False)
    unsupported(BARE, "mlp_only_layers", [1])
    unsupported(BARE, "decoder_sparse_step", 2)


@EACH
@pytest.mark.parametrize(
    "method", ["gptq", "awq", "compressed-tensors", "nvfp4", "modelopt", "bitsandbytes", "mxfp4", 8]
)
def test_quantisation_methods(config: Config, method: str) -> None:
    quant = changed(config, "quantization_config", {**FP8, "quant_method": method})
    unsupported(quant, "quantization_config.quant_method", method, '"fp8"', "quantization_config")


@EACH
def test_quantisation_details(config: Config) -> None:
    c = changed(config, "quantization_config", FP8)
    assert plan_for(config).weight_block is None and plan_for(c).weight_block == 128
    for key in ("fmt", "activation_scheme", "weight_block_size"):  # the reference's defaults
        assert plan_for(changed(c, f"quantization_config.{key}", ...)).weight_block == 128
    unsupported(c, "quantization_config.fmt", "e5m2", '"e4m3"')
    unsupported(c, "quantization_config.activation_scheme", "static", '"dynamic"')
    unsupported(c, "quantization_config.expert_dtype", "fp4")
    for block in ([64, 64], [128], [1, 128], [128.0, 128], 128, None, []):
        unsupported(c, "quantization_config.weight_block_size", block, "[128, 128]")
    refused(changed(c, "quantization_config.quant_method", ...), '"quant_method" is missing')
    bad(config, "quantization_config", "fp8", "an object")
    refused(changed(config, "compression_config", {"x": 1}), '"compression_config"',
            code="EUNSUPPORTED")  # fmt: skip


def test_quantisation_of_the_wrapper_or_the_text() -> None:
    inside = changed(QWEN35, "text_config.quantization_config", FP8)
    assert plan_for(inside).weight_block == 128
    assert plan_for(changed(inside, "quantization_config", FP8)).weight_block == 128
    other = {**FP8, "quant_method": "awq"}
    refused(changed(inside, "quantization_config", other), '"quantization_config"', "differ")


# ---- which family --------------------------------------------------------------------------------


def test_family_by_type_and_architecture() -> None:
    for key in ("architectures", "model_type"):
        for value in (..., None):
            assert plan_for(changed(QWEN3, key, value)).family == "qwen3_moe"
    assert plan_for(changed(QWEN35, "model_type", ...)).family == "qwen3_5_moe"
    assert plan_for(changed(QWEN35, "architectures", [])).family == "qwen3_5_moe"
    known = ["qwen3_5_moe", "qwen3_moe", "qwen2_moe", "Qwen3MoeForCausalLM"]
    for key, value in (
        ("model_type", "qwen3_next"), ("model_type", 7), ("model_type", ["qwen3_moe"]),
        ("architectures", ["Qwen3MoeForSequenceClassification"]), ("architectures", [7]),
        ("architectures", ["MyModel"]), ("model_type", "qwen2_moe"),
    ):  # fmt: skip
        refused(changed(QWEN3, key, value), json.dumps(value), *known, code="EUNSUPPORTED")
    refused({}, "null", *known, code="EUNSUPPORTED")
    bad(QWEN3, "architectures", "Qwen3MoeForCausalLM", "a list")


def test_wrapper_needs_its_text() -> None:
    refused(changed(QWEN35, "text_config", ...), '"text_config" is missing')
    bad(QWEN35, "text_config", [1], "an object")
    unsupported(QWEN35, "text_config.model_type", "qwen3_5_text")
    refused(changed(QWEN35, "text_config.hidden_size", ...), "text_config", '"hidden_size"')


def test_layers_that_differ_are_refused() -> None:
    """What a sequence carries has one shape for all layers of a kind; no family here can say otherwise."""
    plan = plan_for(QWEN35)
    c, d = (
        families.Config(QWEN35, "x.json"),
        common.Dims.read(families.Config(QWEN35_TEXT, "x.json"), head_dim_required=True),
    )

    def made(i: int, **change: object) -> ModelPlan:
        layers = list(plan.layers)
        layers[i] = replace(layers[i], **change)
        return common.model(c, "x", "model", d, layers, plus_one=True, tied=False, block=None)

    assert made(0).layers == plan.layers
    mixer, moe = plan.layers[0].mixer, plan.layers[2].moe
    assert isinstance(mixer, DeltaNet) and moe.experts
    for i, change, words in (
        (
            1,
            {"mixer": replace(mixer, dv=7)},
            ("layer 1", "linear attention as in layer 0", "and 7"),
        ),
        (2, {"moe": replace(moe, experts=replace(moe.experts, count=9))}, ("layer 2", "9 of them")),
    ):
        refusal(lambda i=i, change=change: made(i, **change), "x.json", *words, code="EUNSUPPORTED")
    a = attention(plan)
    layers = [
        replace(x, mixer=replace(a, kv_heads=n))
        for n, x in zip((2, 2, 1, 2), plan.layers, strict=True)
    ]
    refusal(
        lambda: common.model(c, "x", "model", d, layers, plus_one=True, tied=False, block=None),
        "x.json", "layer 2", "attention as in layer 0", "1 KV heads", code="EUNSUPPORTED",
    )  # fmt: skip


# ---- real checkpoints ----------------------------------------------------------------------------


def test_names_and_bytes_of_qwen36_35b_fp8() -> None:
    """61,440 expert, 660 linear-layer, 200 full-layer and 3 top tensors, 35,707,978,496 bytes: the
    published release without its vision and prediction parts."""
    plan = plan_for(QWEN36_35B)
    keep = ("embed_tokens", "lm_head", "in_proj_a.", "in_proj_b.", "mlp.gate.", "expert_gate")
    tensors = tensors_of(plan, fp8=lambda name: not any(x in name for x in keep))
    full = [n for n in tensors if any(f".layers.{i}." in n for i in range(3, 40, 4))]
    full = [n for n in full if ".experts." not in n]
    linear = [n for n in tensors if ".layers." in n and ".experts." not in n and n not in set(full)]
    assert sum(".experts." in n for n in tensors) == 61440
    assert (len(linear), len(full), len(tensors)) == (660, 200, 62303)
    size = 0
    for dtype, shape in tensors.values():
        n = BITS[dtype] // 8
        for d in shape:
            n *= d
        size += n
    assert size == 35_707_978_496


def real_configs() -> list[Path]:
    return sorted(CONFIGS.glob("*.json"))


@pytest.mark.parametrize("path", real_configs(), ids=lambda p: p.stem)
def test_real_configs(path: Path) -> None:
    """Every config of a family opens as that family; a quantisation of another kind is refused."""
    config = json.loads(path.read_text())
    model_type = config.get("model_type")
    method = (config.get("quantization_config") or {}).get("quant_method", "fp8")
    if model_type not in families.names() + ["qwen3_5_moe_text"]:
        refused(config, json.dumps(model_type), code="EUNSUPPORTED")
    elif method != "fp8":
        refused(config, '"quant_method"', json.dumps(method), code="EUNSUPPORTED")
    else:
        text = config.get("text_config", config)
        plan = plan_for(config)
        assert plan.hidden == text["hidden_size"] and len(plan.layers) == text["num_hidden_layers"]
        assert plan.layers[0].moe.top_k == text["num_experts_per_tok"]
        theta = text.get("rope_theta") or text["rope_parameters"]["rope_theta"]
        assert attention(plan).rope_theta == theta
        assert (plan.weight_block == 128) == ("quantization_config" in config)
