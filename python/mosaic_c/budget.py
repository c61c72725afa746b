"""Where every byte goes: the memory plan of a model under a budget, before anything is loaded.

The engine allocates nothing outside this plan: its own limit is the budget less what Python holds.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import numpy as np

from mosaic_c import blocks, engine, engine_pure
from mosaic_c.bind import CODE_NAMES, Located
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import format_size
from mosaic_c.modes import PER_LAYER
from mosaic_c.plan import Attention, ModelPlan
from mosaic_c.vram import Offer, Tier

MB = 1 << 20
MAX_DEFAULT_CTX = 32768
MIN_DEFAULT_CTX = 512
# Tokens of a prompt evaluated at once: each expert is read at most once a chunk. At most the context.
CHUNKS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8)
BUSY = 512  # from here on a larger chunk saves reads, but no time of computing
# Later growth of the interpreter and numpy (imports on first use, allocator slack).
PROCESS_GROWTH = 12 * MB
# Encoding a prompt takes about 250 bytes a character, and a token is four characters or so.
CTX_BYTES = 1024
# Of each further session: the tokens of a full context as Python holds them, and a row of logits.
SESSION_CTX_BYTES = 96
SESSION_VOCAB_BYTES = 8
# A request in a queue: its tokens in 32 bits, and what stands around them (5 KB measured; a server adds its own).
WAITING_TOKEN_BYTES = 4
WAITING_BYTES = 32 << 10
STACK = 96 << 10  # touched part of a thread's stack
TENSOR_SLACK = 12 << 10  # alignment around a resident tensor
LOAD_PIECE = 4 * MB  # of a dense tensor in flight in one lane
EXPERT_META = 192  # bytes of tables an expert costs in the store and the policy,
LAYER_META = 2304  # and a layer: the policy remembers 128 of its lines


@dataclass(frozen=True)
class Item:
    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """slots: experts the cache holds (per layer for layer-lru). fits False: budget < floor."""

    budget: int
    reason: str
    items: tuple[Item, ...]
    ctx: int
    chunk: int
    kv: str
    policy: str
    threads: int
    lanes: int
    ahead: int  # slabs for experts that are read before their layer asks
    slots: int
    hard: int  # the fewest slots that run
    unit: int  # bytes of a slot: a slab, or one of every layer
    slab: int
    experts: int
    token_experts: int  # that one token calls
    engine_budget: int
    floor: int  # smallest budget that runs, at this context
    useful: int  # budget from which one token's experts all stay cached
    fits: bool
    embedding: bool  # the embedding stays in memory
    mapped: bool  # experts stay in mapped files, all of them
    warnings: tuple[str, ...] = field(default=())
    sessions: int = 1  # whose contexts the KV pool holds, and whose state is counted
    tier: Tier | None = None  # experts in VRAM
    no_tier: str = ""  # why there is none

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)


def largest_chunk(plan: ModelPlan, ctx: int | None) -> int:
    """The most tokens that a chunk of this model may have, whatever the budget."""
    return min(CHUNKS[0], ctx or plan.max_positions)


def process_bytes() -> int:
    """Resident bytes of this process now."""
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _embedding_needed(located: Located) -> bool:
    """Whether the embedding has to be in memory: where it is the output head too, or is quantised."""
    return located.plan.head is None or located.span(located.plan.embed).scale_file is not None


def dense_bytes(located: Located) -> int:
    """Memory of everything but routed experts, their scales and an embedding that is read by row."""
    plan, total = located.plan, 0
    for weight in plan.weights():
        span = located.span(weight)
        if weight == plan.embed and not _embedding_needed(located):
            total += 0 if located.row_crc is None else located.row_crc.nbytes + TENSOR_SLACK
            continue
        if span.rows == 1 or len(weight.shape) == 3:  # vectors and the convolution become float32
            total += span.rows * span.cols * 4 + TENSOR_SLACK
        else:
            total += span.nbytes + span.scale_nbytes + TENSOR_SLACK
    return total


def scratch_bytes(plan: ModelPlan, ctx: int, chunk: int, threads: int) -> int:
    need = 256 * (plan.hidden * 4 + 64)
    for layer in plan.layers:
        if isinstance(layer.mixer, Attention):
            desc = blocks.attention(layer.mixer, 0, plan.hidden, ctx, chunk, blocks.nowhere)
            need = max(need, engine_pure.scratch_bytes("attn", desc, threads))
        else:
            desc = blocks.delta(layer.mixer, 0, plan.hidden, chunk, blocks.nowhere)
            need = max(need, engine_pure.scratch_bytes("delta", desc, threads))
        desc = blocks.moe(layer.moe, 0, plan.hidden, chunk, blocks.nowhere)
        need = max(need, engine_pure.scratch_bytes("moe", desc, threads))
    return need


def _thread_bytes(located: Located) -> int:
    """What each compute thread needs to multiply by integer weights."""
    spans = {(s.dtype, s.cols) for s in located.spans.values()}
    for e in located.experts:
        # one number each: numpy forgets an interrupt that comes while it compares rows
        pairs = np.unique(e["cols"].astype(np.int64) << 8 | e["dtype"])
        spans |= {(CODE_NAMES[pair & 255], pair >> 8) for pair in pairs.tolist()}
    return max((engine_pure.thread_bytes(dtype, cols) for dtype, cols in spans), default=0)


def plan_memory(
    located: Located,
    *,
    budget: int,
    reason: str,
    threads: int,
    lanes: int,
    ctx: int | None = None,
    kv: str = "bf16",
    policy: str = "auto",
    slots: int | None = None,
    later: int = 0,
    mapped: bool = False,
    sessions: int = 1,
    waiting: int = 0,
    gpu: Offer | str = "",
) -> MemoryPlan:
    """The plan for a located model; never raises for a budget that is too small (fits is False).

    later: bytes that Python is known to take later (a tokenizer). lanes: reads under way at once, each with
    memory of its own. mapped: experts are mapped files (--io mmap), which only works with all of them in memory.
    sessions: sequences that shall run at once. waiting: requests that may wait for that. gpu: what vram.look found.
    """
    plan = located.plan
    if ctx is not None and not 1 <= ctx <= plan.max_positions:
        raise UsageError(f"ctx: expected 1..{plan.max_positions} (the model's limit), got {ctx}")
    if slots is not None and slots < 1:
        raise UsageError(f"slots: expected 1 or more, got {slots}")
    moe = plan.moe_layers
    top_k = max((m.top_k for m in moe), default=0)
    experts = sum(m.experts.count for m in moe if m.experts)
    slab = max((engine_pure.expert_slab(a)[0] for a in located.experts), default=0)
    scales = sum(engine_pure.expert_slab(a)[1] for a in located.experts)
    acts = _thread_bytes(located)
    per_layer = policy in PER_LAYER
    unit = slab * (len(moe) if per_layer else 1)  # what one slot costs
    most = max((m.experts.count for m in moe if m.experts), default=0) if per_layer else experts
    if slots is not None and slots > most:
        raise UsageError(f"slots: the model has {most} experts to hold, got {slots}")
    hard = 1 if per_layer else top_k
    useful = top_k if per_layer else top_k * len(moe)
    if mapped:
        if slots is not None and slots < most:
            raise UsageError(
                f"slots: --io mmap holds all {most} experts, got {slots}; leave it out"
            )
        hard = useful = most
    if slots is not None and slots < hard:
        raise UsageError(f"slots: a token needs {hard} experts of a layer at once, got {slots}")
    python = process_bytes()
    later += PROCESS_GROWTH + plan.vocab * (64 + (sessions - 1) * SESSION_VOCAB_BYTES)
    ctx_bytes = CTX_BYTES + (sessions - 1) * SESSION_CTX_BYTES
    each = f"{sessions} x " if sessions > 1 else ""

    def queued(ctx: int) -> list[Item]:
        need = waiting * (WAITING_BYTES + ctx * WAITING_TOKEN_BYTES)
        return [Item("requests that wait", need, f"{waiting} x {ctx} tokens")] if waiting else []

    def items_for(ctx: int, chunk: int) -> list[Item]:
        pool, state = kv_bytes(located, kv, ctx, sessions)
        items = [
            Item("Python and libraries", python, "measured"),
            Item("Python, later", later + ctx * ctx_bytes, "tokenizer, imports, sampling, prompt"),
            *queued(ctx),
            Item("dense weights", dense_bytes(located), "resident"),
            Item("expert scales", scales, "resident" if scales else "read with their experts"),
            Item("expert tables", experts * EXPERT_META + len(moe) * LAYER_META),
            Item("KV cache", pool, f"{each}{ctx} tokens, {kv}"),
            Item(
                "session state",
                sessions * state,
                f"{each}recurrent and conv, two copies" if plan.delta_layers else "",
            ),
            Item("scratch", scratch_bytes(plan, ctx, chunk, threads), f"chunks of {chunk} tokens"),
            Item("quantised activations", threads * acts, "a copy a thread" if acts else ""),
            Item("activations", chunk * plan.hidden * 4 + chunk * 4 * (top_k * len(moe) + 2)),
            Item("threads", (threads + lanes) * STACK, f"{threads} compute, {lanes} readers"),
            Item(
                "reads in flight",
                min(lanes, 4) * LOAD_PIECE
                if mapped
                else lanes * slab + min(lanes, 4) * max(slab, LOAD_PIECE),
                "page cache" if mapped else "transit slabs, page cache",
            ),
        ]
        if isinstance(gpu, Offer):
            tier = gpu.tier(chunk)
            items.append(Item("GPU tier", tier.host + tier.tables, "pinned memory, tables"))
            if not mapped:
                items.append(Item("copies to VRAM", engine.TIER_SLABS * slab, "slabs on their way"))
        return items

    def fixed(ctx: int, chunk: int) -> int:
        return sum(item.bytes for item in items_for(ctx, chunk))

    reserve = max(hard, slots or 0) * unit  # slots that must fit beside everything else
    smallest_chunk = min(CHUNKS[-1], ctx or CHUNKS[-1])
    chosen = ctx or _default_ctx(located, kv, budget - python, sessions)
    while ctx is None and chosen > MIN_DEFAULT_CTX:
        if fixed(chosen, smallest_chunk) + reserve <= budget:
            break
        chosen = max(chosen // 2, MIN_DEFAULT_CTX)
    small = fixed(chosen, smallest_chunk)
    free = budget - small - reserve
    sizes = dict.fromkeys(min(c, chosen) for c in CHUNKS)
    sizes = [c for c in sizes if 8 * (fixed(chosen, c) - small) <= free] or [smallest_chunk]
    usual = next((c for c in sizes if c <= BUSY), sizes[-1])
    # where every expert can stay, there are no reads to save
    whole = slots is None and fixed(chosen, usual) + most * unit <= budget
    chunk = next(
        c for c in sizes if not whole or c <= usual or fixed(chosen, c) + most * unit <= budget
    )
    items = items_for(chosen, chunk)
    # reading ahead is no use where all experts stay, and comes second to one token's experts
    free = budget - sum(item.bytes for item in items)
    first = top_k * len(moe) * slab if slots is None else slots * unit
    all_stay = free >= experts * slab if slots is None else slots == most
    ahead = 0 if mapped or all_stay or first + top_k * slab > free else top_k
    if ahead:
        items.append(Item("reads ahead", ahead * slab, f"{ahead} slabs"))
    room = (budget - sum(item.bytes for item in items)) // unit if unit else 0
    got = min(most, room) if slots is None else slots
    smallest = fixed(ctx or min(plan.max_positions, MIN_DEFAULT_CTX), smallest_chunk)
    floor = smallest + reserve
    wanted = smallest + useful * unit
    fits = got >= hard and got <= max(room, 0) if unit else room >= 0 and budget >= floor
    warnings = []
    if fits and got < useful:
        warnings.append(
            f"the cache holds {got} experts, one token uses {useful}: most will be read again for each token; "
            f"from {format_size(wanted)} on they can stay"
        )
    note = f"{max(got, 0)} of {most} slots" + (", mapped files" if mapped else "")
    items.append(Item("expert cache", max(got, 0) * unit, note))
    # a read for each token costs a few percent: with nothing better to do with the memory, none
    embedding, rows = _embedding_needed(located), located.span(plan.embed).nbytes + TENSOR_SLACK
    if not embedding and got >= most and sum(item.bytes for item in items) + rows <= budget:
        embedding = True
        items.append(Item("embedding", rows, "resident, as all experts are"))
    return MemoryPlan(
        budget=budget,
        reason=reason,
        items=tuple(items),
        ctx=chosen,
        chunk=chunk,
        kv=kv,
        policy=policy,
        threads=threads,
        lanes=lanes,
        ahead=ahead,
        slots=got,
        hard=hard,
        unit=unit,
        slab=slab,
        experts=experts,
        token_experts=top_k * len(moe),
        engine_budget=budget
        - python
        - later
        - chosen * ctx_bytes
        - sum(item.bytes for item in queued(chosen)),
        floor=_round_up(floor),
        useful=_round_up(wanted),
        fits=fits,
        embedding=embedding,
        mapped=mapped,
        warnings=tuple(warnings),
        sessions=sessions,
        tier=gpu.tier(chunk) if isinstance(gpu, Offer) else None,
        no_tier=gpu if isinstance(gpu, str) else "",
    )


def require_fit(memory: MemoryPlan) -> None:
    """Refuses a budget under the hard floor, naming the smallest one that works."""
    if not memory.fits:
        other = (
            ", or another --io: mmap holds all experts"
            if memory.mapped
            else ", or a smaller context"
        )
        raise MosaicError(
            f"memory budget {format_size(memory.budget)} ({memory.reason}) is too small: this model at a context "
            f"of {memory.ctx} needs at least {format_size(memory.floor)}; give --ram {memory.floor // MB}M or more"
            + other,
            "EBUDGET",
        )


def kv_bytes(located: Located, kv: str, ctx: int, sessions: int) -> tuple[int, int]:
    """(page pool of so many contexts, one session's state) in bytes."""
    return engine_pure.kv_bytes(
        blocks.state(located.plan, ctx, engine.DTYPES[kv.upper()], sessions)
    )


def _default_ctx(located: Located, kv: str, available: int, sessions: int) -> int:
    """min(model limit, 32768, what fits): KV pages may take a quarter of what dense weights leave."""
    plan, free = located.plan, available - dense_bytes(located)
    ctx = min(plan.max_positions, MAX_DEFAULT_CTX)
    while ctx > MIN_DEFAULT_CTX:
        pool, _ = kv_bytes(located, kv, ctx, sessions)
        if pool * 4 <= free:
            break
        ctx = max(ctx // 2, MIN_DEFAULT_CTX)
    return ctx


def _round_up(n: int) -> int:
    """Whole MiB, and one more: the next process may be a little larger than this one."""
    return (math.ceil(n / MB) + 1) * MB
