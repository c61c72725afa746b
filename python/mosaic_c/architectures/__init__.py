"""Architectures as tensor lists, for sizing alone. A new one is a function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from mosaic_c.architectures import deepseek, deepseek_v4, grouped, qwen
from mosaic_c.architectures.common import EXPERT_KEYS, count_experts, mlp, repeat
from mosaic_c.architectures.deepseek import sparse_count
from mosaic_c.architectures.tensors import EXPERT, Architecture
from mosaic_c.errors import MosaicError
from mosaic_c.families.config import MAX_DIM, MAX_LAYERS, Config, shown, sparse_layers

BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "qwen3_5_moe": qwen.qwen3_5_moe,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen2_moe": qwen.qwen2_moe,
    "deepseek_v4": deepseek_v4.deepseek_v4,
    "deepseek_v3": deepseek.deepseek_v3,
    "deepseek_v32": deepseek.deepseek_v32,
    "kimi_k2": deepseek.kimi_k2,
    "kimi_k25": deepseek.kimi_k2,
    "glm_moe_dsa": deepseek.glm_moe_dsa,
    "glm4_moe": grouped.glm4_moe,
    "gpt_oss": grouped.gpt_oss,
    "minimax_m2": grouped.minimax_m2,
    "mixtral": grouped.mixtral,
}


def describe(top: Config) -> tuple[Config, Architecture]:
    """(text section, architecture) of a whole config.json.

    A wrapper's own model_type counts before its text_config's, which may be an older name. A type
    that is not known has the columns of experts where the keys that make them are there. Raises
    MosaicError naming the key that is missing or wrong.
    """
    text = top.section("text_config") if top.get("text_config") is not None else top
    types = [t for t in (top.get("model_type"), text.get("model_type")) if t is not None]
    for kind in types:
        if not isinstance(kind, str):
            raise top.error("model_type", "a string", kind)
    names = (name for kind in types for name in (kind, kind.removesuffix("_text")))
    build = next((BUILDERS[name] for name in names if name in BUILDERS), None)
    found = build(text) if build else unknown(text, types[0] if types else None)
    if not found.layers:
        keys = "mlp_only_layers, decoder_sparse_step, first_k_dense_replace, moe_layer_freq"
        raise MosaicError(f"{text.where}: no layer has experts, see {keys}", code="EUNSUPPORTED")
    return text, found


def unknown(c: Config, kind: str | None) -> Architecture:
    """Experts alone, taken as gate, up and down matrices of hidden_size x moe_intermediate_size."""
    if all(c.get(key) is None for key in EXPERT_KEYS):
        raise MosaicError(
            f"{c.where}: model_type {shown(kind)} is not known and none of "
            f"{', '.join(EXPERT_KEYS)} is there: no mixture of experts to size",
            code="EUNSUPPORTED",
        )
    experts, hidden = count_experts(c), c.size("hidden_size", MAX_DIM)
    width = c.size("moe_intermediate_size", MAX_DIM)
    layers = c.size("num_hidden_layers", MAX_LAYERS)
    sparse = min(sum(sparse_layers(c, layers)), sparse_count(c, layers))
    at = "layers.{i}.mlp.experts.{e}"
    return Architecture(
        "unknown",
        tuple(repeat(sparse * experts, *mlp(at, hidden, width, EXPERT))),
        layers=sparse,
        experts=experts,
        top_k=c.size("num_experts_per_tok", experts),
        partial=True,
        notes=(
            f"model_type {shown(kind)} is not known: experts are taken as three matrices of "
            f"{hidden} x {width} in {sparse} of {layers} layers; the resident set, the state of a "
            "sequence and what the disk holds are unknown",
        ),
    )
