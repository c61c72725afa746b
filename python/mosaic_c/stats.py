"""What a run did and what it took: a plain dataclass, for people and for --json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mosaic_c.engine import MEM_KINDS, ffi, io_name, text
from mosaic_c.guard import Guard
from mosaic_c.limits import format_size

# Fields of mc_stats that Stats has by the same names
GPU = (
    "gpu_hits", "gpu_rows", "gpu_promotions", "gpu_evictions", "gpu_bytes_up", "gpu_bytes_io", "gpu_wait_s",
    "gpu_slots", "gpu_held", "gpu_slot_bytes", "gpu_vram", "gpu_host",
)  # fmt: skip


@dataclass
class Counters:
    """Tokens and seconds of forward calls. decode: one token for every session of the call."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def add(self, decode: bool, tokens: int, seconds: float) -> None:
        if decode:
            self.decode_tokens += tokens
            self.decode_s += seconds
        else:
            self.prefill_tokens += tokens
            self.prefill_s += seconds


@dataclass(frozen=True)
class Stats:
    """hits, misses: distinct experts per layer and step that were in RAM or read; gpu_hits: those in VRAM; hit_rate: of
    both in all. bytes_read, reads: expert reads. read_s: inside reads,
    summed over reads. busy_s: wall time with a read under way; read_gbs: GB/s reached in it. wait_s: compute standing
    still for them. ahead_reads, ahead_used: experts read because the next layer's router named them beforehand, and
    those it then needed; ahead_on: whether that goes on. resident, peak: bytes of each tier of the engine. rss,
    peak_rss: of the process. pressure_shrinks: times that the expert cache gave way because memory was short;
    slots_lost: slots it lacks for that now. io: the mode in use, lanes: reads under way at once in it, lanes_ran:
    threads that read (a ring of uring needs none), queue_depth: most reads waiting or under way; io_asked: the mode
    asked for; io_tried: (mode, lanes, GB/s) of what auto measured at open. files_direct, files_pread: how the shards
    are really read; io_note: why not directly.

    Of the GPU tier: gpu, the device, "" without one; gpu_rows: token-expert pairs computed there; gpu_promotions,
    gpu_evictions: experts copied to VRAM, and those that left; gpu_bytes_up, gpu_bytes_io: over the bus, of promotions
    and of activations; gpu_wait_s: compute standing still for it; gpu_slots, gpu_held, gpu_slot_bytes: experts it may
    hold and holds; gpu_vram, gpu_host: bytes it takes in VRAM and of pinned memory; gpu_note: why it was given up."""

    hits: int
    misses: int
    hit_rate: float
    evictions: int
    ahead_reads: int
    ahead_used: int
    ahead_on: bool
    expert_rows: int
    reads: int
    bytes_read: int
    read_s: float
    busy_s: float
    read_gbs: float
    wait_s: float
    moe_s: float
    resident: dict[str, int]
    peak: dict[str, int]
    rss: int
    peak_rss: int
    major_faults: int
    budget: int
    slots: int
    slab_bytes: int
    pressure_shrinks: int
    slots_lost: int
    prefill_tokens: int
    prefill_s: float
    prefill_tok_s: float
    decode_tokens: int
    decode_s: float
    decode_tok_s: float
    ctx: int
    chunk: int
    kv: str
    isa: str
    policy: str
    io: str
    io_asked: str
    io_tried: list[tuple[str, int, float]]
    io_note: str
    queue_depth: int
    files_direct: int
    files_pread: int
    threads: int
    threads_ran: int
    lanes: int
    lanes_ran: int
    gpu: str
    gpu_hits: int
    gpu_rows: int
    gpu_promotions: int
    gpu_evictions: int
    gpu_bytes_up: int
    gpu_bytes_io: int
    gpu_wait_s: float
    gpu_slots: int
    gpu_held: int
    gpu_slot_bytes: int
    gpu_vram: int
    gpu_host: int
    gpu_note: str

    def lines(self) -> list[str]:
        """The same for people."""
        files = self.files_direct + self.files_pread
        shrinks = f", {self.pressure_shrinks} shrinks for want of memory, {self.slots_lost} slots lost now"
        gpu = f" and {self.gpu_hits} on the GPU" if self.gpu else ""
        return [
            f"prefill  {self.prefill_tokens} tokens, {self.prefill_s:.2f} s, {self.prefill_tok_s:.2f} tok/s",
            f"decode   {self.decode_tokens} tokens, {self.decode_s:.2f} s, {self.decode_tok_s:.2f} tok/s",
            f"experts  {self.hits} hits{gpu}, {self.misses} misses ({100 * self.hit_rate:.1f} % hits), "
            f"{self.evictions} evictions, {self.slots} slots of {format_size(self.slab_bytes)}, policy {self.policy}",
            f"reads    {self.reads} reads, {format_size(self.bytes_read)} in {self.busy_s:.2f} s ({self.read_gbs:.2f} "
            f"GB/s), compute waited {self.wait_s:.2f} s; {self.io}, {self.lanes} at once, queue up to "
            f"{self.queue_depth}; {self.files_direct} of {files} files direct",
            f"ahead    {self.ahead_reads} experts read ahead of their layer, {self.ahead_used} of them used; "
            f"now {'on' if self.ahead_on else 'off'}",
            *self._gpu_lines(),
            "memory   "
            + ", ".join(f"{k} {format_size(v)}" for k, v in self.resident.items())
            + f"; RSS {format_size(self.rss)}, peak {format_size(self.peak_rss)} of {format_size(self.budget)}, "
            f"{self.major_faults} major faults" + (shrinks if self.pressure_shrinks else ""),
            f"modes    {self.isa}, {self.threads_ran} of {self.threads} threads, KV {self.kv}, context {self.ctx}, "
            f"chunks of {self.chunk}",
        ]

    def _gpu_lines(self) -> list[str]:
        if not self.gpu:
            return []
        return [
            f"gpu      {self.gpu}: {self.gpu_hits} hits, {self.gpu_promotions} experts brought, {self.gpu_evictions} "
            f"evicted, {self.gpu_held} of {self.gpu_slots} slots of {format_size(self.gpu_slot_bytes)}; over the bus "
            f"{format_size(self.gpu_bytes_up)} of experts, {format_size(self.gpu_bytes_io)} of activations; compute "
            f"waited {self.gpu_wait_s:.2f} s"
        ]

    def notes(self) -> list[str]:
        """What a user should hear of how the files are read, and of a GPU tier that is no longer."""
        notes = [f"io {self.io_asked}: {self.io_note}"] if self.io_note else []
        return [*notes, self.gpu_note] if self.gpu_note else notes


def collect(
    c: Any, counters: Counters, memory: Any, io: str, guard: Guard, gpu_note: str = ""
) -> Stats:
    """Stats from an mc_stats, the model's counters, memory plan and memory guard. gpu_note: why a tier that was
    planned is not there, as the model knows it."""
    n = counters
    rss, peak = _rss()
    found = c.hits + c.gpu_hits
    touched = found + c.misses
    note = text(c.gpu_note) or gpu_note
    was = memory.tier is not None and (c.gpu_slots or c.gpu_promotions or c.gpu_hits)
    return Stats(
        hits=c.hits,
        misses=c.misses,
        hit_rate=found / touched if touched else 0.0,
        evictions=c.evictions,
        ahead_reads=c.ahead_reads,
        ahead_used=c.ahead_used,
        ahead_on=bool(c.ahead_on),
        expert_rows=c.expert_rows,
        reads=c.reads,
        bytes_read=c.bytes_read,
        read_s=c.read_s,
        busy_s=c.busy_s,
        read_gbs=c.bytes_read / c.busy_s / 1e9 if c.busy_s else 0.0,
        wait_s=c.wait_s,
        moe_s=c.moe_s,
        resident=dict(zip(MEM_KINDS, c.mem_now, strict=True)),
        peak=dict(zip(MEM_KINDS, c.mem_peak, strict=True)),
        rss=rss,
        peak_rss=peak,
        major_faults=_major_faults(),
        budget=memory.budget,
        slots=c.slots,
        slab_bytes=c.slab_bytes,
        pressure_shrinks=guard.shrinks,
        slots_lost=(guard.full - guard.allowed) * guard.unit // max(memory.slab, 1),
        prefill_tokens=n.prefill_tokens,
        prefill_s=n.prefill_s,
        prefill_tok_s=n.prefill_tokens / n.prefill_s if n.prefill_s else 0.0,
        decode_tokens=n.decode_tokens,
        decode_s=n.decode_s,
        decode_tok_s=n.decode_tokens / n.decode_s if n.decode_s else 0.0,
        ctx=memory.ctx,
        chunk=memory.chunk,
        kv=memory.kv,
        isa=ffi.string(c.isa).decode(),
        policy=ffi.string(c.policy).decode() if c.policy != ffi.NULL else "none",
        io=io_name(c.io),
        io_asked=io,
        io_tried=[
            (io_name(c.tried_io[i]), c.tried_lanes[i], c.tried_gbs[i]) for i in range(c.tried)
        ],
        io_note=text(c.io_note),
        queue_depth=c.depth,
        files_direct=c.files_direct,
        files_pread=c.files_pread,
        threads=c.threads,
        threads_ran=c.threads_ran,
        lanes=c.lanes,
        lanes_ran=c.lanes_ran,
        gpu=memory.tier.name if was else "",
        **{name: getattr(c, name) for name in GPU},
        gpu_note=note,
    )


def _rss() -> tuple[int, int]:
    values = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii", errors="replace") as f:
        for line in f:
            name, _, rest = line.partition(":")
            if name in values:
                values[name] = int(rest.split()[0]) * 1024
    return values["VmRSS"], values["VmHWM"]


def _major_faults() -> int:
    with open("/proc/self/stat", encoding="ascii", errors="replace") as f:
        return int(f.read().rpartition(")")[2].split()[9])
