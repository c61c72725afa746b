"""The cache of hot experts in VRAM: whether there is one, how much it takes, and how it is opened.

The device is looked at before memory is divided, so that what its driver takes in this process is measured with
Python's own. With vram 0 nothing of CUDA is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mosaic_c import engine, engine_pure
from mosaic_c.bind import Located
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import format_size, parse_size
from mosaic_c.modes import HOT_AFTER
from mosaic_c.modes import HOT_WINDOW as WINDOW

MIB = 1 << 20
# Stays free on the device: the larger of the two, the second a part of what is free.
MARGIN, SHARE = 512 * MIB, 10
MAX_DEVICE = 63
FORMATS = "FP8 in 128x128 blocks, MXFP4 and int4 in groups of 64"
# Tables of a tier in this process: an expert, a slot and a layer, and a row of a call
EXPERT, SLOT, LAYER, FIXED = 64, 32, 256, 64 << 10
STACK = 96 << 10  # touched part of its thread's


@dataclass(frozen=True)
class Wish:
    """What the caller asks for. size: bytes of VRAM, None: what is free."""

    size: int | None
    after: int
    device: int


@dataclass(frozen=True)
class Tier:
    """A planned tier. bytes = work + slots * slot, of VRAM; host: pinned memory of this process, tables: what else
    it takes there. total, free: of the device before. experts: that may be in a slot."""

    device: int
    name: str
    total: int
    free: int
    after: int
    window: int
    slots: int
    slot: int
    work: int
    bytes: int
    host: int
    tables: int
    experts: int


@dataclass(frozen=True)
class Offer:
    """A device and what it may hold of a model; tier(chunk) once the plan knows how large chunks are. room: the most
    bytes of VRAM."""

    wish: Wish
    info: dict[str, Any]
    room: int
    slot: int
    experts: int
    layers: int
    hidden: int
    width: int
    top_k: int

    def work(self, chunk: int) -> tuple[int, int]:
        return engine_pure.tier_work(self.hidden, self.width, self.top_k, chunk, self.slot)

    def least(self, chunk: int) -> int:
        """VRAM for one layer's top-k experts; fewer slots could never hold what a token calls."""
        return self.work(chunk)[0] + self.top_k * self.slot

    def tier(self, chunk: int) -> Tier:
        work, host = self.work(chunk)
        slots = max(min((self.room - work) // self.slot, self.experts), 0)
        return Tier(
            device=self.wish.device,
            name=self.info["name"],
            total=self.info["total"],
            free=self.info["free"],
            after=self.wish.after,
            window=WINDOW,
            slots=slots,
            slot=self.slot,
            work=work,
            bytes=work + slots * self.slot,
            host=host,
            tables=self.experts * EXPERT + slots * SLOT + self.layers * LAYER + FIXED + STACK,
            experts=self.experts,
        )


def wish(vram: str | int | None, hot_after: int | None, gpu: int) -> Wish:
    """The arguments of open_model, checked."""
    size = parse_size(vram, "vram") if isinstance(vram, str) else vram
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        raise UsageError(f"vram: expected a size such as 3.2G, bytes or 0 for none, got {vram!r}")
    after = HOT_AFTER if hot_after is None else hot_after
    if isinstance(after, bool) or not isinstance(after, int) or not 1 <= after <= WINDOW:
        raise UsageError(
            f"hot_after: expected a whole number from 1 to {WINDOW} (calls in the last {WINDOW} tokens), got "
            f"{hot_after!r}"
        )
    if isinstance(gpu, bool) or not isinstance(gpu, int) or not 0 <= gpu <= MAX_DEVICE:
        raise UsageError(f"gpu: expected the number of a device, 0 to {MAX_DEVICE}, got {gpu!r}")
    return Wish(size, after, gpu)


def margin(free: int) -> int:
    """What stays free of a device unless a size is given: others use it too."""
    return max(MARGIN, free // SHARE)


def sizes(located: Located, asked: Wish, info: dict[str, Any], room: int) -> Offer | None:
    """What a model would put on a device; None: its experts are of no format that the GPU multiplies. Pure."""
    moe = located.plan.moe_layers
    slots = [engine_pure.tier_slot(experts) for experts in located.experts]
    fit = [(m, slot) for m, slot in zip(moe, slots, strict=True) if slot and m.experts]
    if not fit:
        return None
    return Offer(
        wish=asked,
        info=info,
        room=room,
        slot=max(slot for _, slot in fit),
        experts=sum(m.experts.count for m, _ in fit if m.experts),
        layers=len(moe),
        hidden=located.plan.hidden,
        width=max(m.experts.width for m in moe if m.experts),
        top_k=max(m.top_k for m in moe),
    )


def look(located: Located, asked: Wish, chunk: int) -> Offer | str:
    """What the tier may take, or why there is none. chunk: the most tokens of a chunk, for the work space.

    UsageError where a size was asked for that there cannot be; it names the way out.
    """
    if asked.size == 0:
        return "vram 0"
    found = _look(located, asked, chunk)
    if isinstance(found, str) and asked.size is not None:
        raise refusal(asked, found)
    return found


def refusal(asked: Wish, why: str) -> UsageError:
    assert asked.size is not None
    return UsageError(
        f"vram: {why}: expected 0 or none, got {format_size(asked.size)}; leave it out to run on the CPU"
    )


def possible(located: Located, asked: Wish) -> Offer | str:
    """As `look`, without looking at a device: whether this build and the model have what it takes."""
    if (why := engine.gpu()) is not None:
        return why
    if not located.plan.moe_layers:
        return "the model has no routed experts"
    return sizes(located, asked, {}, 0) or (
        f"experts are of a format that the GPU does not multiply: it takes {FORMATS}"
    )


def _look(located: Located, asked: Wish, chunk: int) -> Offer | str:
    offer = possible(located, asked)
    if isinstance(offer, str):
        return offer
    try:
        info = engine.gpu_probe(asked.device)
    except MosaicError as error:
        if error.code == "ERANGE":
            raise UsageError(f"gpu: {error}") from None
        return str(error)
    free, what = info["free"], f"GPU {asked.device} ({info['name']})"
    spare = margin(free)
    if asked.size is not None and asked.size > free:
        raise UsageError(
            f"vram: {format_size(asked.size)} is more than is free on {what}: {format_size(free)} of "
            f"{format_size(info['total'])}; leave it out to take that less a margin of {format_size(spare)}"
        )
    room = max(free - spare, 0) if asked.size is None else asked.size
    offer = replace(offer, info=info, room=room)
    least = offer.least(chunk)
    if offer.room >= least:
        return offer
    need = f"one layer's {offer.top_k} experts and the work space take {format_size(least)}"
    if asked.size is None:
        return f"{what} has {format_size(offer.room)} to spare: {need}"
    way = f"give --vram {-(-least // MIB)}M or more" if least <= free else "leave it out"
    raise UsageError(f"vram: {format_size(asked.size)} is too small: {need}; {way}")


def start(store: Any, tier: Tier) -> str:
    """Opens the tier of a store. What to tell where the memory or the device has gone meanwhile, then everything
    runs on the CPU; "" where all is well."""
    try:
        store.tier(tier.device, tier.after, tier.window, tier.bytes)
    except MosaicError as error:
        if error.code not in ("ENOMEM", "ESYS"):
            raise
        return f"no GPU tier, all experts run on the CPU: {error}"
    return ""


def lines(tier: Tier) -> list[str]:
    """The items of VRAM, as the memory plan prints its own."""
    rest = tier.free - tier.bytes
    rows = [
        ("expert slots", tier.slots * tier.slot, f"{tier.slots} of {tier.experts} experts, those called most in "
         f"{tier.window} tokens (--hot-after {tier.after})"),
        ("work space", tier.work, ""),
        ("left free", rest, f"of {format_size(tier.free)} now"),
    ]  # fmt: skip
    return [
        f"VRAM of GPU {tier.device}, {tier.name}, {format_size(tier.total)}:",
        *(f"{name:24} {format_size(size):>12}  {note}".rstrip() for name, size, note in rows),
    ]
