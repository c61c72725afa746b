"""What a model weighs and what a token moves, from its config.json and, of a pack, its manifest alone.

Every figure is a sum over the tensors that architectures/ lists, in three columns of storage: as
shipped, FP8 and 4 bit. Sizes count tensors of the text model: no file headers, no vision tower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mosaic_c.architectures import describe
from mosaic_c.architectures.tensors import (
    BF16,
    EXPERT,
    F32,
    FP8_BARE,
    FP8_ROWS,
    LINEAR,
    MXFP4,
    ROWS,
    Architecture,
    Form,
    Tensor,
    fp8_blocks,
)
from mosaic_c.families.config import Config, shown
from mosaic_c.pack import Pack

KV_BYTES = {"bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Column:
    """The sizes of one way to store a model, in bytes. None: the architecture is unknown.

    expert: of the routed experts, resident: of the other matrices that quantised releases quantise.
    kept: the part of resident_bytes that no format changes. active: resident bytes that a token
    reads. disk: with multi-token prediction.
    """

    name: str
    expert: str
    resident: str
    expert_bytes: int
    token_bytes: int
    all_experts_bytes: int
    resident_bytes: int | None
    kept_bytes: int | None
    active_bytes: int | None
    disk_bytes: int | None


@dataclass(frozen=True)
class Footprint:
    """A model's sizes. kv_token_bytes and state_bytes: of one sequence, for the KV type asked for.

    experts: in all; token_experts: that a token uses. columns: as shipped (absent where the
    quantisation is not understood), fp8 and 4 bit.
    """

    model_type: str
    moe_layers: int
    experts_a_layer: int
    top_k: int
    experts: int
    token_experts: int
    positions: int | None
    kv_token_bytes: float | None
    state_bytes: int | None
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    def smallest_budget(self, column: Column, ctx: int) -> int | None:
        """Memory from which the experts of one token can stay: resident set, a sequence of ctx
        tokens, one token's experts. Fixed state counts twice: a step writes a second copy, so that
        one that fails leaves the first."""
        if column.resident_bytes is None or self.kv_token_bytes is None or self.state_bytes is None:
            return None
        state = math.ceil(self.kv_token_bytes * ctx) + 2 * self.state_bytes
        return column.resident_bytes + state + column.token_bytes


def measure(
    config: Mapping[str, Any],
    where: str = "config.json",
    kv: str = "bf16",
    pack: Pack | None = None,
) -> Footprint:
    """The footprint of the model that a config.json describes; where: its path, for messages; pack: how its
    experts are shipped, of which the config says nothing.

    Raises MosaicError (EFORMAT, EUNSUPPORTED) naming the key that is missing or wrong.
    """
    top = Config(config, where)
    text, a = describe(top)
    notes = list(a.notes)
    columns = []
    shipped, fp8 = storage(top, text, a), (a.fp8 or FP8_BARE,) * 2
    if isinstance(shipped, str):
        notes.append(f"{shipped} is not understood: nothing is said about it as shipped")
    else:
        columns.append(column("as shipped", a, *shipped))
        if pack is not None:
            columns[0] = packed(columns[0], a, pack)
        if shipped[0].bits == 8:
            fp8 = shipped
    if a.fp8 is None and fp8[0] is FP8_BARE:
        notes.append(
            "no FP8 release of this type is known: fp8 is a byte for each value of a matrix, "
            "without scales and the biases of experts"
        )
    elif a.fp8 is None:
        notes.append("the scales of FP8 blocks are taken as F32")
    columns.append(column("fp8", a, *fp8))
    columns.append(column("4 bit", a, MXFP4, MXFP4))
    width = KV_BYTES[kv]
    return Footprint(
        model_type=a.name,
        moe_layers=a.layers,
        experts_a_layer=a.experts,
        top_k=a.top_k,
        experts=a.layers * a.experts,
        token_experts=a.layers * a.top_k,
        positions=a.positions,
        kv_token_bytes=None if a.partial else float(a.kv * width),
        state_bytes=None if a.partial else a.window * width + a.recurrent * 4,
        columns=tuple(columns),
        notes=tuple(notes),
    )


def column(name: str, a: Architecture, expert: Form, resident: Form) -> Column:
    """The sizes with experts and resident matrices in these forms."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(t.count * bytes_of(t, expert, resident) for t in tensors)

    routed = [t for t in a.tensors if t.group == EXPERT]
    others = [t for t in a.tensors if t.group != EXPERT]
    one = sum(bytes_of(t, expert, resident) for t in routed)
    rest = None if a.partial else size(others)
    total = one * a.layers * a.experts
    return Column(
        name=name,
        expert=expert.name,
        resident=resident.name,
        expert_bytes=one,
        token_bytes=one * a.layers * a.top_k,
        all_experts_bytes=total,
        resident_bytes=rest,
        kept_bytes=None if a.partial else size(t for t in others if t.dtype),
        active_bytes=None if a.partial else size(t for t in others if t.group != ROWS),
        disk_bytes=None if rest is None else total + rest + size(a.spare),
    )


def packed(c: Column, a: Architecture, pack: Pack) -> Column:
    """The column with the experts of a pack, whose padded records are what is read, and with its matrices where it
    lists them. Layers may differ: one expert is the largest, what a slot of the cache has to hold."""
    if pack.dense and c.resident_bytes is not None and c.kept_bytes is not None:
        more = c.kept_bytes + sum(x.nbytes for x in pack.dense) - c.resident_bytes
        c = replace(
            c, resident=pack.dense_format, resident_bytes=c.resident_bytes + more,
            active_bytes=(c.active_bytes or 0) + more, disk_bytes=(c.disk_bytes or 0) + more,
        )  # fmt: skip
    sizes = [x.record_bytes for x in pack.layers]
    total = sum(x.nbytes for x in pack.layers)
    disk = None if c.disk_bytes is None else c.disk_bytes - c.all_experts_bytes + total
    return replace(
        c, expert=pack.format, expert_bytes=max(sizes, default=0), token_bytes=a.top_k * sum(sizes),
        all_experts_bytes=total, disk_bytes=disk,
    )  # fmt: skip


def bytes_of(t: Tensor, expert: Form, resident: Form) -> int:
    """Bytes of one tensor. FP8_BARE leaves the biases of experts out, as it does scales; a float32
    checkpoint is float32 throughout."""
    if t.dtype == "BF16" and resident is F32:
        return F32.bytes(t.shape)
    if t.dtype:
        return 0 if t.group == EXPERT and expert is FP8_BARE else t.kept_bytes
    assert t.group in (EXPERT, LINEAR)
    return (expert if t.group == EXPERT else resident).bytes(t.shape)


# ---- how a config says that it is stored ---------------------------------------------------------


def storage(top: Config, text: Config, a: Architecture) -> tuple[Form, Form] | str:
    """(form of experts, of resident matrices) as shipped, or what is not understood."""
    holder = next((c for c in (top, text) if c.get("quantization_config") is not None), None)
    if holder is None:
        if any(c.get("compression_config") is not None for c in (top, text)):
            return "compression_config"
        plain = {"float32": F32, "float16": BF16, "bfloat16": BF16, None: BF16}
        dtype = next((c.get(k) for c in (text, top) for k in ("dtype", "torch_dtype")
                      if c.get(k) is not None), None)  # fmt: skip
        if isinstance(dtype, str | None) and dtype in plain:
            return plain[dtype], plain[dtype]
        return f"dtype {shown(dtype)}"
    q = holder.section("quantization_config")
    method = q.get("quant_method")
    if method == "mxfp4":
        return MXFP4, BF16
    if method == "fp8":
        block = q.get("weight_block_size")
        if block is not None and block != [128, 128]:
            return f"weight_block_size {shown(block)}"
        fp8 = a.fp8 if a.fp8 not in (None, FP8_ROWS) else fp8_blocks(4)
        kinds = [c.get("expert_dtype") for c in (top, text, q) if c.get("expert_dtype") is not None]
        odd = [kind for kind in kinds if kind not in ("fp4", "fp8")]
        if odd:
            return f"expert_dtype {shown(odd[0])}"
        return (MXFP4 if "fp4" in kinds else fp8), fp8
    if method == "compressed-tensors":
        return _compressed(q)
    return f"quant_method {shown(method)}"


def _compressed(q: Config) -> tuple[Form, Form] | str:
    """The two schemes of compressed-tensors that published MoE models use: FP8 by row, and int4
    groups for the experts alone (what `ignore` names is BF16)."""
    groups = q.section("config_groups").data
    if len(groups) != 1:
        return f"compressed-tensors with {len(groups)} groups"
    w = q.section("config_groups").section(next(iter(groups))).section("weights")
    kind = (w.get("num_bits"), w.get("type"), w.get("strategy"), w.get("group_size"))
    if kind[:3] == (8, "float", "channel"):
        return FP8_ROWS, FP8_ROWS
    if kind[:3] == (4, "int", "group") and type(kind[3]) is int and 0 < kind[3] <= 1 << 20:
        int4 = Form(f"int4 by {kind[3]}", 4, (1, kind[3]), 2)
        ignore = q.get("ignore")
        listed = [x for x in ignore if isinstance(x, str)] if isinstance(ignore, list) else []
        return int4, BF16 if any("self_attn" in x for x in listed) else int4
    return f"compressed-tensors {shown(kind)}"
