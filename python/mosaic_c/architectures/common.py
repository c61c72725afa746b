"""Tensors that architectures share: embeddings, attention with grouped heads, MLPs, experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mosaic_c.architectures.tensors import EXPERT, KEPT, LINEAR, ROWS, Tensor
from mosaic_c.families.config import (
    MAX_DIM,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    Config,
)

EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# names of gate, up and down
LLAMA, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


@dataclass(frozen=True)
class Sizes:
    """What every config says, under one key or another."""

    hidden: int
    layers: int
    vocab: int
    positions: int | None
    experts: int
    top_k: int
    width: int

    @classmethod
    def read(cls, c: Config, width: str = "moe_intermediate_size") -> Sizes:
        experts = count_experts(c)
        known = c.get("max_position_embeddings") is not None
        return cls(
            hidden=c.size("hidden_size", MAX_DIM),
            layers=c.size("num_hidden_layers", MAX_LAYERS),
            vocab=c.size("vocab_size", MAX_VOCAB),
            positions=c.size("max_position_embeddings", MAX_POSITIONS) if known else None,
            experts=experts,
            top_k=c.size("num_experts_per_tok", experts),
            width=c.size(width, MAX_DIM),
        )


def count_experts(c: Config) -> int:
    """The number of experts of a layer, under whichever of its keys is there."""
    found = [key for key in EXPERT_KEYS if c.get(key) is not None]
    if not found:
        c.need(EXPERT_KEYS[0])
    values = [c.size(key, MAX_EXPERTS) for key in found]
    if len(set(values)) > 1:
        raise c.error(found[1], f"{found[0]} = {values[0]}", values[1])
    return values[0]


def repeat(count: int, *tensors: Tensor) -> list[Tensor]:
    """The tensors of a layer for `count` of these layers; none at all for 0."""
    return [replace(t, count=t.count * count) for t in tensors] if count else []


def linear(name: str, rows: int, cols: int) -> Tensor:
    return Tensor(f"{name}.weight", (rows, cols), LINEAR)


def kept(name: str, *shape: int, dtype: str = "BF16") -> Tensor:
    return Tensor(name, shape, KEPT, dtype)


def outer(c: Config, s: Sizes, *, norm: str = "BF16", prefix: str = "model") -> list[Tensor]:
    """Embedding, final norm and, unless tied to the embedding, the head."""
    shape = (s.vocab, s.hidden)
    tied = c.flag("tie_word_embeddings", False)
    embed = Tensor(f"{prefix}.embed_tokens.weight", shape, KEPT if tied else ROWS, "BF16")
    head = [] if tied else [kept("lm_head.weight", *shape)]
    return [embed, *head, kept(f"{prefix}.norm.weight", s.hidden, dtype=norm)]


def norms(at: str, hidden: int, dtype: str = "BF16") -> list[Tensor]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [kept(f"{at}.{name}.weight", hidden, dtype=dtype) for name in names]


def heads_of(c: Config, hidden: int) -> tuple[int, int, int]:
    """(query heads, key/value heads, values of a head)."""
    heads = c.size("num_attention_heads", MAX_HEADS)
    kv = c.size("num_key_value_heads", MAX_HEADS, default=heads)
    if c.get("head_dim") is None and hidden % heads:
        raise c.error("hidden_size", f"a multiple of {heads} heads (no head_dim)", hidden)
    return heads, kv, c.size("head_dim", MAX_HEAD_DIM, default=max(hidden // heads, 1))


def attention(
    at: str,
    hidden: int,
    heads: tuple[int, int, int],
    *,
    gate: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: tuple[int, int] | None = None,
) -> list[Tensor]:
    """q, k, v, o of grouped heads. gate: q has an output gate too. qk_norm: sizes of both norms."""
    n, kv, d = heads
    rows = {"q_proj": n * d * (2 if gate else 1), "k_proj": kv * d, "v_proj": kv * d}
    out = [linear(f"{at}.{name}", size, hidden) for name, size in rows.items()]
    out.append(linear(f"{at}.o_proj", hidden, n * d))
    if qkv_bias:
        out += [kept(f"{at}.{name}.bias", size) for name, size in rows.items()]
    if o_bias:
        out.append(kept(f"{at}.o_proj.bias", hidden))
    if qk_norm:
        out += [kept(f"{at}.{x}_norm.weight", size) for x, size in zip("qk", qk_norm, strict=True)]
    return out


def mlp(
    at: str, hidden: int, width: int, group: str = LINEAR, names: tuple[str, ...] = LLAMA
) -> list[Tensor]:
    """gate, up (width, hidden) and down (hidden, width); none at all for width 0."""
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return [
        Tensor(f"{at}.{name}.weight", shape, group)
        for name, shape in zip(names, shapes, strict=True)
        if width
    ]


def experts(at: str, s: Sizes, names: tuple[str, ...] = LLAMA) -> list[Tensor]:
    """All routed experts of a layer."""
    return repeat(s.experts, *mlp(f"{at}.experts.{{e}}", s.hidden, s.width, EXPERT, names))
