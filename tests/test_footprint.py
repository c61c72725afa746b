"""What a config.json alone says about size: real configs against published sizes, the plans of the
engine and the bytes of small checkpoints; hostile configs."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from conftest import VECTORS
from helpers_checkpoint import FP8, changed
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import families
from mosaic_c.architectures import BUILDERS, describe
from mosaic_c.architectures.tensors import EXPERT, Form
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.errors import MosaicError
from mosaic_c.families.config import Config
from mosaic_c.footprint import measure


def real(name: str, **changes: object) -> dict:
    """A config.json of tests/vectors/configs, with top-level keys changed or (...) removed."""
    config = json.loads((VECTORS / "configs" / f"{name}_config.json").read_text())
    for key, value in changes.items():
        config = changed(config, key, value)
    return config


QWEN = real("Qwen--Qwen3.5-35B-A3B", quantization_config=FP8)  # the shapes of Qwen3.6
V3 = real("deepseek-ai--DeepSeek-V3")
FLASH = real("deepseek-ai--DeepSeek-V4-Flash")
GLM5 = real("zai-org--GLM-5")
OSS20 = real("openai--gpt-oss-20b")
K2 = V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "vocab_size": 163840,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|down)_proj.*",
    ],
}
ROWS = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    },
}
MODELS = {
    "Qwen3.6-35B-A3B": QWEN,
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "quantization_config": FP8, "num_hidden_layers": 48,
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "vocab_size": 151936, "tie_word_embeddings": False,
        "max_position_embeddings": 262144, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "Qwen3-30B-A3B": real("Qwen--Qwen3-30B-A3B-FP8"),
    "DeepSeek-V4-Flash": FLASH,
    "DeepSeek-V4-Pro": FLASH | {
        "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "q_lora_rank": 1536, "o_groups": 16, "n_routed_experts": 384,
        "moe_intermediate_size": 3072, "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
    },
    "DeepSeek-V3": V3,
    "DeepSeek-V3.2": V3 | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128},
    "Kimi-K2": K2,
    "GLM-5": GLM5,
    "GLM-5.2": GLM5 | {
        "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)]
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "quantization_config": ROWS, "num_hidden_layers": 46,
        "hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "intermediate_size": 10944, "vocab_size": 151552,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 131072,
    },
    "gpt-oss-20b": OSS20,
    "gpt-oss-120b": OSS20 | {
        "num_hidden_layers": 36, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "MiniMax-M2": real("MiniMaxAI--MiniMax-M2.5"),
}  # fmt: skip
UNQUANTISED = {name: c for name, c in MODELS.items() if name in ("GLM-5", "GLM-5.2")}
BF16_QWEN = changed(QWEN, "quantization_config", ...)

# bytes of an expert in FP8 and in MXFP4, experts, experts a token; GB of a token's and of all experts in
# both, of the resident set in FP8 (gpt-oss: as shipped, BF16) and in MXFP4, and of what stays BF16 or F32
TABLE = """
Qwen3.6-35B-A3B    3146112  1671168  10240 320 1.007 0.535  32.22  17.11 3.492  2.833 2.087
Qwen3-Next-80B-A3B 3146496  1671168  24576 480 1.510 0.802  77.33  41.07 3.044  2.253 1.358
Qwen3-30B-A3B      4719168  2506752   6144 384 1.812 0.963  28.99  15.40 2.176  1.752 1.270
DeepSeek-V4-Flash  25167360 13369344 11008 258 6.493 3.449  277.0  147.17 8.846 6.100 2.988
DeepSeek-V4-Pro    66064320 35094528 23424 366 24.18 12.84  1547.5 822.05 28.694 18.05 5.992
DeepSeek-V3        44050944 23396352 14848 464 20.44 10.86  654.1  347.4 19.08  11.97 3.922
DeepSeek-V3.2      44050944 23396352 14848 464 20.44 10.86  654.1  347.4 19.96  12.47 3.980
Kimi-K2            44050944 23396352 23040 480 21.14 11.23  1014.9 539.1 14.24  9.92  5.030
GLM-5              37757952 20054016 19200 600 22.65 12.03  725.0  385.0 21.18  13.16 4.075
GLM-5.2            37757952 20054016 19200 600 22.65 12.03  725.0  385.0 20.63  12.86 4.053
GLM-4.5-Air        17329152 9191424   5760 360 6.238 3.309  99.82  52.94 8.466  5.682 2.532
gpt-oss-20b        24883200 13236480   768  96 2.389 1.271  19.1   10.17 3.596  -     -
gpt-oss-120b       24883200 13236480  4608 144 3.583 1.906  114.7  60.99 4.255  -     -
MiniMax-M2         14159232 7520256  15872 496 7.023 3.730  224.7  119.36 5.386 4.106 2.655
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines(), ids=lambda r: r.split()[0])
def test_published_sizes(row):
    name, *want = row.split()
    f = measure(MODELS[name])
    shipped, fp8, four = f.columns
    assert [c.name for c in f.columns] == ["as shipped", "fp8", "4 bit"]
    assert list(map(int, want[:4])) == [
        fp8.expert_bytes, four.expert_bytes, f.experts, f.token_experts
    ]  # fmt: skip
    resident = shipped if name.startswith("gpt-oss") else fp8
    sizes = (fp8.token_bytes, four.token_bytes, fp8.all_experts_bytes, four.all_experts_bytes,
             resident.resident_bytes, four.resident_bytes, four.kept_bytes)  # fmt: skip
    for text, size in zip(want[4:], sizes, strict=True):
        digits = len(text.partition(".")[2])
        assert text in ("-", f"{size / 1e9:.{digits}f}")
    if name not in UNQUANTISED:
        assert resident.resident_bytes == shipped.resident_bytes


# name: tensors in all (FP8 scales are tensors), bytes; text: what multi-token prediction has is left out
EXACT = {
    "DeepSeek-V4-Flash": (69187, 159_609_485_896),
    "DeepSeek-V4-Pro": (None, 864_704_792_696),
    "gpt-oss-20b": (None, 13_761_264_768),
    "gpt-oss-120b": (None, 65_248_815_744),
    "Qwen3.6-35B-A3B": (64196 - 333, 35_707_978_496 + 853_668_480),  # 333: the vision tower
    "Qwen3-Next-80B-A3B": (151479, "82.0"),
    "Qwen3-30B-A3B": (37491, "31.17"),
    "DeepSeek-V3": (91991, "688.6"),
    "Kimi-K2": (139644 - 61, "1029.2"),  # 61: inv_freq, which nobody reads
    "GLM-5": (59870, "1507.7"),
    "MiniMax-M2": (96103, "230.1"),
}


@pytest.mark.parametrize("name", EXACT)
def test_whole_checkpoints(name):
    tensors, size = EXACT[name]
    config = MODELS[name]
    disk = measure(config).columns[0].disk_bytes
    if isinstance(size, str):
        assert f"{disk / 1e9:.{len(size.partition('.')[2])}f}" == size
    else:
        assert disk == size
    _, a = describe(Config(config, name))
    scales = "quantization_config" in config
    if tensors is not None:
        assert (
            sum(t.count * (1 + (scales and not t.dtype)) for t in (*a.tensors, *a.spare)) == tensors
        )


def test_unquantised_and_int4_as_shipped():
    assert f"{measure(BF16_QWEN).columns[0].disk_bytes / 1e9 + 0.893142496:.1f}" == "71.9"
    shipped = measure(K2 | {"quantization_config": INT4}).columns[0]
    assert shipped.expert_bytes == 24_772_608
    assert f"{shipped.token_bytes / 1e9:.2f} {shipped.all_experts_bytes / 1e9:.1f}" == "11.89 570.8"
    assert shipped.resident == "BF16"
    wrapped = {"model_type": "kimi_k25", "text_config": K2 | {"quantization_config": INT4}}
    assert measure(wrapped).columns[0] == shipped
    mixtral = measure(real("mistralai--Mixtral-8x7B-v0.1")).columns[0]
    assert f"{mixtral.disk_bytes / 2e9:.1f}" == "46.7"  # B parameters


def test_what_a_quantised_config_does_not_say_is_said():
    f = measure(real("nvidia--Qwen3.5-122B-A10B-NVFP4"))
    assert [c.name for c in f.columns] == ["fp8", "4 bit"]
    assert "modelopt" in f.notes[0] and "as shipped" in f.notes[0]
    odd = measure(changed(QWEN, "quantization_config.weight_block_size", [64, 64]))
    assert len(odd.columns) == 2 and "[64, 64]" in odd.notes[0]
    for value in ("fp5", "", 4, ["fp4"], {}, False):
        odd = measure(FLASH | {"expert_dtype": value})
        assert len(odd.columns) == 2 and "expert_dtype" in odd.notes[0]


def test_fp8_is_what_the_config_says_where_it_is_fp8():
    mixtral = real("mistralai--Mixtral-8x7B-v0.1", quantization_config=FP8)
    shipped, fp8, _ = measure(mixtral).columns
    assert fp8.expert_bytes == shipped.expert_bytes == 3 * (4096 * 14336 + 32 * 112 * 4)
    assert "taken as F32" in measure(mixtral).notes[0]
    air = measure(MODELS["GLM-4.5-Air"] | {"quantization_config": FP8}).columns
    assert air[1].expert_bytes == air[0].expert_bytes == 3 * (1408 * 4096 + 11 * 32 * 4)


def test_state_of_a_sequence():
    kv = {name: measure(c).kv_token_bytes for name, c in MODELS.items()}
    assert kv["Qwen3.6-35B-A3B"] == 2 * 512 * 2 * 10
    assert kv["DeepSeek-V3"] == kv["Kimi-K2"] == 576 * 2 * 61
    assert kv["DeepSeek-V4-Flash"] == 3440 * 2
    assert kv["DeepSeek-V3.2"] == (576 + 128) * 2 * 61
    assert kv["GLM-5.2"] == (576 * 78 + 128 * 21) * 2
    assert kv["gpt-oss-20b"] == 12 * 2 * 8 * 64 * 2  # full layers alone grow
    assert measure(QWEN, kv="f32").kv_token_bytes == 2 * kv["Qwen3.6-35B-A3B"]
    assert measure(QWEN).state_bytes == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert measure(OSS20).state_bytes == 12 * 128 * 2 * 8 * 64 * 2
    # V4: the rings of all layers, and F32 of what is not pooled yet: 3 tokens and the last window's
    # half in CSA (the indexer's the same), 127 tokens in HCA, a key and a gate each
    csa = 3 * 2 * 1024 + 4 * 2 * 512 + 3 * 2 * 256 + 4 * 2 * 128
    assert measure(FLASH).state_bytes == 43 * 128 * 512 * 2 + 4 * (21 * csa + 20 * 127 * 2 * 512)


def test_smallest_budget_is_the_sum_of_its_parts():
    f = measure(QWEN)
    for c in f.columns:
        want = c.resident_bytes + 1000 * 20480 + 2 * f.state_bytes + 320 * c.expert_bytes
        assert f.smallest_budget(c, 1000) == want


def test_active_bytes_are_what_a_token_reads():
    """All but the tables of which a token takes a row: embedding, expert ids of hash layers."""
    for c in measure(FLASH).columns:
        rows = 129280 * 4096 * 2 + 3 * 129280 * 6 * 8
        assert c.active_bytes == c.resident_bytes - rows
    tied = measure(
        BF16_QWEN | {"text_config": BF16_QWEN["text_config"] | {"tie_word_embeddings": True}}
    )
    assert tied.columns[0].active_bytes == tied.columns[0].resident_bytes


# ---- the same tensors as the engine's ------------------------------------------------------------


def pattern(name: str) -> str:
    return re.sub(r"experts\.\d+\.", "experts.{e}.", re.sub(r"layers\.\d+\.", "layers.{i}.", name))


PLANNED = [
    BF16_QWEN,
    real("Qwen--Qwen3-30B-A3B"),
    real("Qwen--Qwen3.5-397B-A17B"),
    *[json.loads((p / "config.json").read_text()) for p in sorted(VECTORS.glob("qwen*"))],
]


@pytest.mark.parametrize("config", PLANNED, ids=lambda c: str(c["model_type"]))
def test_names_and_shapes_are_those_of_the_plan(config):
    plan = families.plan_for(config)
    _, a = describe(Config(config, "config.json"))
    want = Counter((pattern(w.name), w.shape) for w in plan.weights())
    got = Counter({(t.name, t.shape): t.count for t in a.tensors if t.group != EXPERT})
    if plan.skip == () or plan.embed.name.startswith("model.embed"):  # a text model alone
        got = Counter({(k[0].replace(".language_model", ""), k[1]): n for k, n in got.items()})
    assert got == want
    routed = {t.name: (t.shape, t.count) for t in a.tensors if t.group == EXPERT}
    e = plan.moe_layers[0].experts
    shapes = ((e.width, e.hidden), (e.width, e.hidden), (e.hidden, e.width))
    named = [pattern(name).replace(".language_model", "") for name in e.per_expert]
    got_names = [name.replace(".language_model", "") for name in routed]
    assert got_names == named
    assert list(routed.values()) == [(shape, e.count * len(plan.moe_layers)) for shape in shapes]
    assert (a.experts, a.top_k, a.layers) == (
        e.count,
        plan.moe_layers[0].top_k,
        len(plan.moe_layers),
    )


@pytest.mark.parametrize("name", ["qwen2_bf16_tied", "qwen2_f16_fused", "qwen3_bf16", "qwen35_fp8",
                                  "qwen35_text_f32"])  # fmt: skip
def test_bytes_are_those_of_the_files(name):
    checkpoint = Checkpoint.open(VECTORS / name)
    skipped = sum(size for _, size in checkpoint.locate().skipped.values())
    c = measure(checkpoint.config).columns[0]
    text = int(checkpoint.tensors.nbytes.sum()) - skipped
    assert c.all_experts_bytes + c.resident_bytes == text


def test_partial_blocks_have_scales():
    assert Form("", 8, (128, 128), 4).bytes((576, 7168)) == 576 * 7168 + 5 * 56 * 4
    assert Form("", 4, (1, 32), 1).bytes((3, 33)) == 3 * (17 + 2)
    assert Form("", 8, (1, 1 << 62), 4).bytes((3, 33)) == 3 * (33 + 4)


# ---- configs nobody vouches for ------------------------------------------------------------------


def refused(config, *words):
    with pytest.raises(MosaicError) as caught:
        measure(config, "/m/config.json")
    text = str(caught.value)
    assert text.startswith("/m/config.json") and "\n" not in text and len(text) < 400
    assert all(word in text for word in words), text


NEEDED = {
    "Qwen3-30B-A3B": ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok",
                      "moe_intermediate_size", "vocab_size", "num_attention_heads"),
    "Qwen3-Next-80B-A3B": ("linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"),
    "DeepSeek-V3": ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "intermediate_size"),
    "DeepSeek-V3.2": ("index_n_heads", "index_head_dim", "q_lora_rank"),
    "DeepSeek-V4-Flash": ("compress_ratios", "hc_mult", "o_groups", "o_lora_rank", "sliding_window"),
    "gpt-oss-20b": ("intermediate_size", "sliding_window"),
}  # fmt: skip


@pytest.mark.parametrize("name,key", [(n, k) for n, keys in NEEDED.items() for k in keys])
def test_a_key_that_is_missing_or_absurd_is_named(name, key):
    refused({k: v for k, v in MODELS[name].items() if k != key}, f'"{key}"', "missing")
    for value in (-1, 10**40, 1.5, "x", True, [[]], {}):
        refused(MODELS[name] | {key: value}, f'"{key}')


@pytest.mark.parametrize("name", MODELS)
def test_what_is_empty_is_not_absent(name):
    config = MODELS[name]
    section = "text_config." if "text_config" in config else ""
    measure(changed(config, f"{section}max_position_embeddings", None))
    for value in ("", 0, False, [], {}):
        refused(
            changed(config, f"{section}max_position_embeddings", value), "max_position_embeddings"
        )


def test_lists_and_sections_are_checked():
    refused(FLASH | {"compress_ratios": [4] * 42}, "compress_ratios", "42 entries")
    refused(FLASH | {"compress_ratios": [5] * 43}, "compress_ratios[0]")
    refused(FLASH | {"num_key_value_heads": 2}, "num_key_value_heads")
    refused(FLASH | {"o_groups": 7}, "o_groups", "divisor")
    refused(OSS20 | {"layer_types": ["full_attention"]}, "layer_types", "1 entries")
    refused(MODELS["GLM-5.2"] | {"indexer_types": ["all"] * 78}, "indexer_types", '"all"')
    refused(QWEN | {"text_config": [1]}, "text_config", "an object")
    refused(V3 | {"model_type": ["deepseek_v3"]}, "model_type", "a string")
    refused(V3 | {"quantization_config": "fp8"}, "quantization_config", "an object")
    refused(V3 | {"first_k_dense_replace": 61}, "no layer has experts")
    refused(V3 | {"num_experts": 8}, "n_routed_experts", "num_experts = 8")


def test_a_type_that_is_not_known_has_its_experts_sized():
    odd = {"model_type": "new_moe", "hidden_size": 1024, "num_hidden_layers": 10, "n_routed_experts": 64,
           "num_experts_per_tok": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 2}  # fmt: skip
    f = measure(odd)
    shipped, fp8, four = f.columns
    assert (shipped.expert_bytes, fp8.expert_bytes) == (3 * 1024 * 256 * 2, 3 * 1024 * 256)
    assert four.expert_bytes == 3 * 1024 * 256 * 17 // 32
    assert (f.experts, f.token_experts) == (8 * 64, 8 * 4)
    assert fp8.resident_bytes is None is f.kv_token_bytes and f.smallest_budget(fp8, 1) is None
    assert '"new_moe"' in f.notes[0] and "unknown" in f.notes[0]
    refused({k: v for k, v in odd.items() if k != "moe_intermediate_size"}, "moe_intermediate_size")
    refused({"model_type": "llama", "hidden_size": 4096}, '"llama"', "num_experts")
    refused({}, "null", "num_experts")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_config_makes_it_stumble(data):
    config = dict(data.draw(st.sampled_from([*MODELS.values(), QWEN["text_config"]])))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3, unique=True)):
        config[key] = data.draw(JSON | st.integers(0, 5) | st.sampled_from(sorted(BUILDERS)))
    try:
        f = measure(config)
    except MosaicError as error:
        assert "\n" not in str(error)
    else:
        assert f.experts > 0 and all(c.expert_bytes > 0 for c in f.columns)
