"""`simulate --vram-slots`: a trace through the rules by which experts could come into VRAM, side by side.

    nothing        every call on the CPU, nothing crosses PCIe
    on miss        a missing expert is loaded for later calls, the CPU computes this one; global LRU
    always         the same loads, and the call waits for its own: the GPU computes everything
    hot after N    what the engine does (hot.c): experts that are called again and again, nothing else; as if
                   each copy were there at the next line (it takes longer, and two are under way at most)

A rule is worth having where it moves far less than `on miss` and the GPU serves about as many calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mosaic_c.errors import UsageError
from mosaic_c.limits import format_size
from mosaic_c.modes import HOT_WINDOW as WINDOW
from mosaic_c.trace import Trace

# The two bars: more than this cut of the loads, at most this below in share.
CUT, POINTS = 0.7, 0.05


def parse_sizes(text: str, experts: int) -> list[int]:
    """ "0.1,512": shares of all experts, rounded down, at least 1 slot; whole numbers from 1 on are slots."""
    return [_size(part, text, experts) for part in text.split(",")]


def _size(part: str, text: str, experts: int) -> int:
    if re.fullmatch(r"[0-9]{1,10}", part.strip()):
        slots = int(part)
    else:
        try:
            share = float(part)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            share = 0
        slots = max(1, math.floor(round(share * experts, 6))) if share else 0  # as --share rounds
    if not 1 <= slots < 2**31:
        raise UsageError(
            f"--vram-slots {text}: expected shares of all experts (more than 0, at most 1) or whole numbers of "
            f"slots (1 to {2**31 - 1}), such as 0.1,512; got {part.strip()!r}"
        )
    return slots


def most_served(lines: Trace, counted: np.ndarray, slots: int, loads: int) -> float:
    """No rule that loads what was called, so many times, serves a larger share of the counted calls, even
    if it knows the future.

    As if a loaded expert stayed for ever: one that is loaded after its first call serves all others, and one
    that was there when counting began (none is at the start of a trace) serves them all.
    """
    calls = np.repeat(counted, np.diff(lines.start))
    items = (
        np.repeat(lines.layer, np.diff(lines.start)).astype(np.int64) * lines.n_expert + lines.ids
    )
    each = np.sort(np.unique(items[calls], return_counts=True)[1])[::-1]
    there = 0 if counted[0] else slots
    return float(each[:there].sum() + (each[there:][:loads] - 1).sum()) / float(each.sum())


def study(
    lines: Trace,
    counted: np.ndarray,
    tokens: int,
    slots: int,
    after: int,
    on_miss: Callable[[int], np.ndarray],
) -> dict[str, Any]:
    """One size: its rows and bars. counted (n_line,) bool, of so many tokens; on_miss: slots -> misses (n_line,)."""
    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c import engine_pure

    served, loads = np.empty(len(lines), np.int32), np.empty(len(lines), np.int32)
    engine_pure.hot_replay(
        lines.n_layer, lines.n_expert, slots, after, WINDOW, lines.layer, lines.start, lines.ids, served, loads
    )  # fmt: skip
    calls = int(np.diff(lines.start)[counted].sum())
    misses = int(on_miss(slots)[counted].sum())

    def row(rule: str, moved: int, on_gpu: int) -> dict[str, Any]:
        share, beside = on_gpu / calls, (calls - misses) / calls
        cut = 1 - moved / misses if misses else None  # nothing to cut: then nothing may be moved
        return {
            "rule": rule, "loads": moved, "loads_per_token": moved / tokens, "cut": cut,
            "gpu_share": share, "points": (share - beside) * 100,
            "cut_holds": moved == 0 if cut is None else cut > CUT,
            # in whole calls: a share that is exactly 5 points less holds, whatever the rounding
            "share_holds": on_gpu >= calls - misses - POINTS * calls,
        }  # fmt: skip

    rows = [
        row("nothing", 0, 0),
        row("on miss", misses, calls - misses),
        row("always", misses, calls),
        row(f"hot after {after}", int(loads[counted].sum()), int(served[counted].sum())),
    ]
    few = max(math.ceil(misses * (1 - CUT) - 1e-9) - 1, 0)  # the most loads that are cut enough
    experts = lines.n_layer * lines.n_expert
    out = {"slots": slots, "share": slots / experts, "calls": calls, "rules": rows}
    return out | {"most_share": most_served(lines, counted, slots, few)}


def bars(row: dict[str, Any]) -> str:
    if row["rule"] == "on miss":
        return "-"  # what the others are compared with
    missed = [
        word for word, key in (("cut", "cut_holds"), ("share", "share_holds")) if not row[key]
    ]
    return "no: " + " and ".join(missed) if missed else "yes"


def table(result: dict[str, Any], expert: int | None) -> list[str]:
    """Lines of text for one size. expert: bytes of one, for bytes over PCIe instead of loads."""
    head = (
        "promote",
        "loads",
        "PCIe/token" if expert else "loads/token",
        "cut",
        "on GPU",
        "points",
        "both bars",
    )
    rows = [head]
    for r in result["rules"]:
        each = r["loads_per_token"]
        moved = format_size(round(each * expert)) if expert else f"{each:.2f}"
        cut = "-" if r["cut"] is None else f"{r['cut'] * 100:.1f} %"
        share, points = f"{r['gpu_share'] * 100:.1f} %", f"{r['points']:+.1f}"
        rows.append((r["rule"], str(r["loads"]), moved, cut, share, points, bars(r)))
    out = [f"{result['slots']} slots, {result['share'] * 100:.3g} % of all experts:"]
    out += [f"{r[0]:<14}{r[1]:>9}{r[2]:>13}{r[3]:>10}{r[4]:>10}{r[5]:>8}  {r[6]}" for r in rows]
    mine, beside = result["rules"][-1], result["rules"][1]
    if bars(mine) != "yes":
        at_most, needed = result["most_share"], beside["gpu_share"] - POINTS
        out.append(
            f"with a cut of more than {CUT * 100:.0f} % nothing serves more than {at_most * 100:.1f} % by "
            f"loading what was called, even knowing the future; {needed * 100:.1f} % are needed"
            + (": both bars cannot hold" if at_most < needed else "")
        )
    return out
