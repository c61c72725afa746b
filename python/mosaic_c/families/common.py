"""The blocks that families share, as plan data: attention, experts, dense MLP, norms."""

from __future__ import annotations

from dataclasses import dataclass

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
from mosaic_c.plan import Attention, Experts, Layer, Mlp, ModelPlan, Moe, Norm, Weight


@dataclass(frozen=True)
class Dims:
    """Sizes every family reads under the same keys."""

    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    positions: int
    experts: int
    top_k: int
    width: int

    @classmethod
    def read(cls, c: Config, *, head_dim_required: bool) -> Dims:
        hidden = c.size("hidden_size", MAX_DIM)
        heads = c.size("num_attention_heads", MAX_HEADS)
        kv_heads = c.size("num_key_value_heads", MAX_HEADS)
        if heads % kv_heads:
            raise c.error("num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
        if head_dim_required or c.get("head_dim") is not None:
            head_dim = c.size("head_dim", MAX_HEAD_DIM)
        elif hidden % heads:
            raise c.error("hidden_size", f"a multiple of {heads} heads (no head_dim)", hidden)
        else:
            head_dim = hidden // heads
        experts = _experts(c)
        return cls(
            hidden=hidden,
            vocab=c.size("vocab_size", MAX_VOCAB),
            layers=c.size("num_hidden_layers", MAX_LAYERS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=c.real("rms_norm_eps", 1e-30, 1.0),
            positions=c.size("max_position_embeddings", MAX_POSITIONS),
            experts=experts,
            top_k=c.size("num_experts_per_tok", experts),
            width=c.size("moe_intermediate_size", MAX_DIM),
        )


def _experts(c: Config) -> int:
    """num_experts, which transformers 5 writes as num_local_experts for some families."""
    if c.get("num_local_experts") is None:
        return c.size("num_experts", MAX_EXPERTS)
    local = c.size("num_local_experts", MAX_EXPERTS)
    if c.size("num_experts", MAX_EXPERTS, default=local) != local:
        raise c.error("num_local_experts", f"num_experts = {c.get('num_experts')}", local)
    return local


def norm(name: str, size: int, eps: float, plus_one: bool) -> Norm:
    return Norm(Weight(f"{name}.weight", (size,)), eps, plus_one)


def matrix(name: str, rows: int, cols: int) -> Weight:
    return Weight(f"{name}.weight", (rows, cols))


def mlp(at: str, hidden: int, width: int) -> Mlp:
    """gate_proj, up_proj and down_proj under a prefix."""
    return Mlp(
        gate=matrix(f"{at}.gate_proj", width, hidden),
        up=matrix(f"{at}.up_proj", width, hidden),
        down=matrix(f"{at}.down_proj", hidden, width),
        width=width,
    )


def attention(
    at: str,
    d: Dims,
    theta: float,
    rope_dim: int,
    *,
    plus_one: bool,
    gate: bool,
    qk_norm: bool,
    qkv_bias: bool,
    o_bias: bool,
) -> Attention:
    """Full attention of the layer `at`, with its input norm."""
    mixer = f"{at}.self_attn"
    q_rows, kv_rows = d.heads * d.head_dim * (2 if gate else 1), d.kv_heads * d.head_dim

    def bias(name: str, rows: int, present: bool) -> Weight | None:
        return Weight(f"{mixer}.{name}.bias", (rows,)) if present else None

    def head_norm(name: str) -> Norm | None:
        return norm(f"{mixer}.{name}", d.head_dim, d.eps, plus_one) if qk_norm else None

    return Attention(
        norm=norm(f"{at}.input_layernorm", d.hidden, d.eps, plus_one),
        q=matrix(f"{mixer}.q_proj", q_rows, d.hidden),
        k=matrix(f"{mixer}.k_proj", kv_rows, d.hidden),
        v=matrix(f"{mixer}.v_proj", kv_rows, d.hidden),
        o=matrix(f"{mixer}.o_proj", d.hidden, d.heads * d.head_dim),
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        rope_dim=rope_dim,
        rope_theta=theta,
        gate=gate,
        q_bias=bias("q_proj", q_rows, qkv_bias),
        k_bias=bias("k_proj", kv_rows, qkv_bias),
        v_bias=bias("v_proj", kv_rows, qkv_bias),
        o_bias=bias("o_proj", d.hidden, o_bias),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
    )


def moe(at: str, d: Dims, *, plus_one: bool, renormalise: bool, shared: int) -> Moe:
    """The mixture of experts of the layer `at`; shared: width of the gated shared expert or 0."""
    block = f"{at}.mlp"
    return Moe(
        norm=norm(f"{at}.post_attention_layernorm", d.hidden, d.eps, plus_one),
        router=matrix(f"{block}.gate", d.experts, d.hidden),
        experts=Experts(
            count=d.experts,
            width=d.width,
            hidden=d.hidden,
            per_expert=(
                f"{block}.experts.{{e}}.gate_proj.weight",
                f"{block}.experts.{{e}}.up_proj.weight",
                f"{block}.experts.{{e}}.down_proj.weight",
            ),
            fused=(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"),
        ),
        top_k=d.top_k,
        renormalise=renormalise,
        shared=mlp(f"{block}.shared_expert", d.hidden, shared) if shared else None,
        shared_gate=matrix(f"{block}.shared_expert_gate", 1, d.hidden) if shared else None,
    )


def dense(at: str, d: Dims, width: int) -> Moe:
    """A layer with one plain MLP instead of experts."""
    return Moe(
        norm=norm(f"{at}.post_attention_layernorm", d.hidden, d.eps, False),
        router=None,
        experts=None,
        top_k=0,
        renormalise=False,
        shared=mlp(f"{at}.mlp", d.hidden, width),
        shared_gate=None,
    )


def _check_alike(c: Config, layers: list[Layer]) -> None:
    """The state of a sequence has one shape for all attention layers and one for all delta layers, and the cache
    one number of experts for all layers (blocks.state, engine.Store)."""
    first: dict[str, tuple[str, int]] = {}
    for i, layer in enumerate(layers):
        m, e = layer.mixer, layer.moe.experts
        if isinstance(m, Attention):
            kind, shape = "attention", f"{m.kv_heads} KV heads of {m.head_dim}"
        else:
            kind = "linear attention"
            shape = f"{m.k_heads} and {m.v_heads} heads of {m.dk} and {m.dv}, kernel {m.kernel}"
        for what, value in ((kind, shape), ("experts", f"{e.count} of them" if e else "")):
            before, at = first.setdefault(what, (value, i)) if value else ("", 0)
            if value and value != before:
                raise c.refuse(f"layer {i}", f"{what} as in layer {at}, {before}", value)


def model(
    c: Config,
    family: str,
    prefix: str,
    d: Dims,
    layers: list[Layer],
    *,
    plus_one: bool,
    tied: bool,
    block: int | None,
    skip: tuple[str, ...] = (),
) -> ModelPlan:
    """The whole plan around its layers; prefix: of the text model's tensors, lm_head has none. EUNSUPPORTED where
    layers of a kind differ in what has one shape for all."""
    _check_alike(c, layers)
    head = matrix("lm_head", d.vocab, d.hidden)
    return ModelPlan(
        family=family,
        hidden=d.hidden,
        vocab=d.vocab,
        layers=tuple(layers),
        embed=matrix(f"{prefix}.embed_tokens", d.vocab, d.hidden),
        head=None if tied else head,
        spare_head=head if tied else None,
        final_norm=norm(f"{prefix}.norm", d.hidden, d.eps, plus_one),
        max_positions=d.positions,
        skip=skip,
        weight_block=block,
    )
