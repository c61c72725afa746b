"""What a model is made of, as data: the only module that families import.

A family turns a config.json into a ModelPlan: layers in order, each a mixer (full attention or
gated delta rule) and an MLP (mixture of experts or dense), with the names and shapes of the tensors
they need. Nothing here opens a file; checkpoint.py finds the tensors, model.py hands them to the engine.
Shapes are (rows, cols), row-major, as the checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One tensor by its full name and the shape the file must give it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Norm:
    """RMS norm. plus_one: the stored weight is w of (1 + w); each norm says so explicitly."""

    weight: Weight
    eps: float
    plus_one: bool


@dataclass(frozen=True)
class Attention:
    """Full attention with grouped K/V heads.

    q has head_dim rows per head, or 2 * head_dim (query, then output gate) where gate is set.
    Biases and per-head norms are None where the family has none.
    """

    norm: Norm
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    gate: bool = False
    q_bias: Weight | None = None
    k_bias: Weight | None = None
    v_bias: Weight | None = None
    o_bias: Weight | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule (linear attention): conv over [q | k | v], state (v_heads, dk, dv)."""

    norm: Norm
    qkv: Weight
    z: Weight
    b: Weight
    a: Weight
    conv: Weight
    a_log: Weight
    dt_bias: Weight
    out_norm: Norm
    out: Weight
    k_heads: int
    v_heads: int
    dk: int
    dv: int
    kernel: int


@dataclass(frozen=True)
class Mlp:
    """gate and up (width, hidden), down (hidden, width): down(silu(gate x) * up x)."""

    gate: Weight
    up: Weight
    down: Weight
    width: int


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer, in either layout that checkpoints use.

    per_expert: names of gate, up, down with "{e}" for the expert's index.
    fused: names of gate_up (experts, 2 * width, hidden; gate rows first) and down (experts, hidden,
    width).
    """

    count: int
    width: int
    hidden: int
    per_expert: tuple[str, str, str]
    fused: tuple[str, str]


@dataclass(frozen=True)
class Moe:
    """Mixture of experts after its norm. A dense layer has experts None and only `shared`.

    router (experts, hidden): softmax over all, top_k taken, divided by their sum if renormalise.
    shared_gate (1, hidden): sigmoid weight of the shared expert; None: weight 1.
    """

    norm: Norm
    router: Weight | None
    experts: Experts | None
    top_k: int
    renormalise: bool
    shared: Mlp | None
    shared_gate: Weight | None


@dataclass(frozen=True)
class Layer:
    mixer: Attention | DeltaNet
    moe: Moe


@dataclass(frozen=True)
class ModelPlan:
    """A whole text model. head None: tied to the embedding.

    spare_head: a tied checkpoint may hold this tensor all the same; where it does, it is the head.
    weight_block: edge of the FP8 scale blocks that config.json declares, None: no FP8.
    skip: prefixes of tensors that belong to other parts (vision tower, multi-token prediction); any
    tensor that is neither named by the plan nor skipped is refused: without it the text could be
    wrong (a bias the plan does not know).
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    embed: Weight
    head: Weight | None
    final_norm: Norm
    max_positions: int
    skip: tuple[str, ...] = ()
    spare_head: Weight | None = None
    weight_block: int | None = None

    @property
    def attention_layers(self) -> list[Attention]:
        return [x.mixer for x in self.layers if isinstance(x.mixer, Attention)]

    @property
    def delta_layers(self) -> list[DeltaNet]:
        return [x.mixer for x in self.layers if isinstance(x.mixer, DeltaNet)]

    @property
    def moe_layers(self) -> list[Moe]:
        return [x.moe for x in self.layers if x.moe.experts is not None]

    def matrices(self) -> Iterator[Weight]:
        """What official FP8 releases have in FP8 beside the experts: no embedding, head, router, gate of the shared
        expert, nor what makes the decay and the rate of the delta rule."""
        for layer in self.layers:
            mixer, mlp = layer.mixer, layer.moe.shared
            if isinstance(mixer, Attention):
                yield from (mixer.q, mixer.k, mixer.v, mixer.o)
            else:
                yield from (mixer.qkv, mixer.z, mixer.out)
            if mlp is not None:
                yield from (mlp.gate, mlp.up, mlp.down)

    def weights(self) -> Iterator[Weight]:
        """Every tensor but the routed experts, in file-independent order."""
        yield self.embed
        if self.head is not None:
            yield self.head
        yield self.final_norm.weight
        for layer in self.layers:
            for part in (layer.mixer, layer.moe):
                yield from _weights_of(part)


def _weights_of(part: object) -> Iterator[Weight]:
    for value in vars(part).values():
        if isinstance(value, Weight):
            yield value
        elif isinstance(value, Norm):
            yield value.weight
        elif isinstance(value, Mlp):
            yield from (value.gate, value.up, value.down)
