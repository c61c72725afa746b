"""What takes memory, in RAM and in VRAM side by side, so that both columns add up to what there is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mosaic_c import engine
from mosaic_c.budget import MemoryPlan
from mosaic_c.errors import MosaicError
from mosaic_c.limits import format_size
from mosaic_c.stats import Stats


@dataclass(frozen=True)
class Row:
    """Bytes; vram None: there is no tier, or its device no longer answers."""

    name: str
    vram: int | None
    ram: int
    note: str = ""


@dataclass(frozen=True)
class Table:
    """total: of VRAM what the device has, of RAM the budget; each is the sum of its column."""

    rows: tuple[Row, ...]
    total: Row

    def json(self) -> dict[str, Any]:
        return {"rows": [asdict(row) for row in self.rows], "total": asdict(self.total)}

    def lines(self) -> list[str]:
        shown = [("memory", "VRAM", "RAM", "")]
        for r in (*self.rows, self.total):
            vram = "-" if r.vram is None else format_size(r.vram)
            shown.append((r.name, vram, format_size(r.ram), r.note))
        wide = max(len(row[0]) for row in shown)
        return [f"{n:{wide}} {v:>12} {r:>12}  {note}".rstrip() for n, v, r, note in shown]


def measure(stats: Stats, memory: MemoryPlan) -> Table:
    """The table of an open model. The device is asked again only where there is a tier."""
    device = None
    if memory.tier is not None and stats.gpu_vram:
        try:
            device = engine.gpu_probe(memory.tier.device)
        except MosaicError:  # lost since; the note of the tier says so
            device = None
    return table(stats, memory, device)


def table(stats: Stats, memory: MemoryPlan, device: dict[str, Any] | None) -> Table:
    """Pure. device: of engine.gpu_probe, None without a tier.

    RAM: what the engine holds counts whole, touched or not, since the budget is divided that way. All else of this
    process is Python and other: what is resident beyond the engine's, and at least what Python had at open.
    """
    kinds = stats.resident
    held = sum(kinds.values())
    python = next(item.bytes for item in memory.items if item.name == "Python and libraries")
    other = max(stats.rss - held, python) + kinds["meta"]
    used = held - kinds["meta"] + other
    slots = work = others = free = None
    note = f"RAM: {stats.slots} slots"
    if device is not None:
        slots = stats.gpu_slots * stats.gpu_slot_bytes
        work = stats.gpu_vram - slots
        others = max(device["total"] - device["free"] - stats.gpu_vram, 0)
        free = device["total"] - stats.gpu_vram - others
        note = f"VRAM: {stats.gpu_held} of {stats.gpu_slots} slots held; {note}"
    none = None if device is None else 0
    rows = (
        Row("expert cache", slots, kinds["cache"], note),
        Row("dense weights", none, kinds["weights"]),
        Row("KV and state", none, kinds["state"]),
        Row("scratch", work, kinds["scratch"], "" if device is None else "VRAM: work space"),
        Row("Python and other", others, other, "" if device is None else "VRAM: others"),
        Row("free", free, memory.budget - used, "RAM: of the budget"),
    )
    total = None if device is None else device["total"]
    return Table(rows, Row("total", total, memory.budget))
