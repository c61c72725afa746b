"""Do several clients in one batch get what the disk and arithmetic allow?

    python tests/serving.py MODEL --ram 1200M [--ram ...] [--clients 4] [--tokens 200] [--rounds 3] [--io auto]

Per round, in turns, each in a process of its own: all experts cached (--resident, default: what the system allows)
with one client and with all of them, then each --ram likewise. Clients are requests of a Scheduler with random
prompts; only steps in which every one of them decodes are counted. Prints, as medians over the rounds:

once        experts that steps missed, of what a replay of the recorded routing says for the union of the clients'
            experts, from the first step on, prompts included: 1 means that each was read exactly once
simulate    total tok/s against what `simulate` predicts from those misses, the rate of `bench io` for experts of this
            size, and the time of a step with all experts cached (bar: at least 0.90 of it)
batch       total tok/s against one client's: of the resident runs (bar: at least 1.8), and of the others
alone       time per token of one client against plain `generate` in the same process (bar: 3 % more)

Each run drops the model's files from the page cache first. Tokens of synthetic weights have the router's skew and no
locality of text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import mosaic_c
from mosaic_c import engine_pure
from mosaic_c.commands.simulate import predict
from mosaic_c.limits import format_size
from mosaic_c.predict import OVERLAP
from mosaic_c.sampling import Sampling
from mosaic_c.scheduler import Request, Scheduler
from mosaic_c.states import States

PROMPT = 48
WARM = 1024  # tokens evaluated beforehand: they call most experts


class Routes:
    """Stands where a TraceWriter does: the experts of every evaluated token."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int, list[int]]] = []  # token, layer, experts

    def add(self, phase: str, token: int, layer: int, experts: list[int]) -> None:
        self.lines.append((token, layer, experts))


def replay(m: Any, routes: Routes, steps: list[list[int]], slots: int) -> np.ndarray:
    """Misses of each step (steps,) when it touches the union of its tokens' experts once, layer by layer."""
    step_of = np.repeat(np.arange(len(steps)), [sum(s) for s in steps])
    union: dict[tuple[int, int], dict[int, None]] = {}
    for token, layer, experts in routes.lines:
        union.setdefault((int(step_of[token]), layer), {}).update(dict.fromkeys(experts))
    keys = sorted(union)
    ids = [list(union[key]) for key in keys]
    start = np.concatenate([[0], np.cumsum([len(x) for x in ids])]).astype(np.int64)
    step = np.array([k for k, _ in keys], np.int64)
    misses = np.empty(len(keys), np.int32)
    moe = m.plan.moe_layers
    engine_pure.policy_replay(
        m.memory.policy, len(moe), moe[0].experts.count, slots,
        np.array([n for _, n in keys], np.int32), step, start,
        np.concatenate(ids).astype(np.int32), misses,
    )  # fmt: skip
    return np.bincount(step, weights=misses, minlength=len(steps))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run in this process; see main for the arguments."""
    n, tokens, warm = args.clients, args.tokens, args.tokens // 2
    ctx = max(PROMPT + warm + tokens + 2 * n + 64, WARM)
    with mosaic_c.open(args.model, ram=args.ram or None, ctx=ctx, io=args.io, sessions=n) as m:
        for f in m.files:
            fd = os.open(f, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, m.vocab, PROMPT).tolist() for _ in range(n)]
        steps: list[list[int]] = []
        ends: list[float] = []
        stats: list[Any] = []
        forward = m.forward

        def counted(work: Any, **more: Any) -> Any:
            steps.append([len(ids) for _, ids in work])
            try:
                return forward(work, **more)
            finally:
                c = m.engine.stats()
                stats.append((c.misses, c.reads, c.bytes_read, c.ahead_reads, c.ahead_used))
                ends.append(time.perf_counter())

        m.forward = counted
        m.trace = routes = Routes() if args.trace else None
        out: dict[str, Any] = {"slots": m.stats().slots}
        with m.session() as before:
            for _ in range(0, WARM, m.memory.chunk):
                piece = min(m.memory.chunk, WARM - before.position)
                before.forward(rng.integers(0, m.vocab, piece).tolist(), last=True)
        with Scheduler(m, States(m, 0), most=n) as s:
            tickets = [
                s.submit(
                    Request(
                        p, Sampling(0.7, 20, 0.95, seed=i), warm + tokens + 2 * n, ignore_eos=True
                    )
                )
                for i, p in enumerate(prompts)
            ]
            for t in tickets:
                for _ in t.events():
                    pass
        m.trace = None
        whole = [i for i, s in enumerate(steps) if s == [1] * n]
        first, last = whole[warm], whole[warm + tokens]
        assert last - first == tokens
        out |= {
            "step_s": (ends[last] - ends[first]) / tokens,
            "tok_s": n * tokens / (ends[last] - ends[first]),
            "misses": stats[last][0] - stats[first][0],
            "bytes": stats[last][2] - stats[first][2],
            "reads": stats[last][1] - stats[first][1],
            "wasted": (stats[last][3] - stats[last][4]) - (stats[first][3] - stats[first][4]),
            "lanes": m.stats().lanes,
            "mode": m.stats().io,
            "slab": m.stats().slab_bytes,
        }
        if routes is not None:
            each = replay(m, routes, steps, out["slots"])
            out["replayed"] = int(each.sum())
            out["missed"] = stats[-1][0]
            out["step_misses"] = each[first + 1 : last + 1].tolist()
            out["exact"] = bool(
                (np.diff([0, *(s[0] for s in stats)]).astype(np.int64) == each).all()
            )
        if args.alone:
            del m.forward
            out["alone"] = alone(m, prompts[0], tokens)
        return out


def alone(m: Any, prompt: list[int], tokens: int) -> float:
    """Time of a token by a scheduler, of that by generate: the median of 5 pairs in turns."""

    def by_generate() -> float:
        ends = []
        for _ in m.generate(prompt, tokens, temperature=0, ignore_eos=True):
            ends.append(time.perf_counter())
        return ends[-1] - ends[0]

    with Scheduler(m, States(m, 0)) as s:

        def by_scheduler() -> float:
            ends = []
            request = Request(prompt, Sampling(), tokens, ignore_eos=True)
            for _ in s.submit(request).events():
                ends.append(time.perf_counter())
            return ends[-1] - ends[2]  # two events of the prompt come first

        by_generate(), by_scheduler()
        return statistics.median(by_scheduler() / by_generate() for _ in range(5))


def child(args: argparse.Namespace, ram: str, clients: int, *flags: str) -> dict[str, Any]:
    argv = [sys.executable, __file__, args.model, "--ram", ram, "--clients", str(clients), "--tokens",
            str(args.tokens), "--io", args.io, "--child", *flags]  # fmt: skip
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


def disk(args: argparse.Namespace, result: dict[str, Any]) -> float:
    argv = [sys.executable, "-m", "mosaic_c", "bench", "io", args.model, "--size", str(result["slab"]), "--lanes",
            str(result["lanes"]), "--io", result["mode"], "--seconds", "1", "--json"]  # fmt: skip
    out = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    return max(row["gbs"] for row in out["rows"]) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ram", action="append", default=[])
    parser.add_argument("--resident", default="")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--io", default="auto")
    for flag in ("--child", "--trace", "--alone"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        (args.ram,) = args.ram
        print(json.dumps(run(args)))
        return
    resident, rows = [], {ram: [] for ram in args.ram}
    for _ in range(args.rounds):
        one, all_ = (
            child(args, args.resident, 1, "--alone"),
            child(args, args.resident, args.clients),
        )
        if one["misses"] + all_["misses"]:
            print("  the resident runs missed experts", flush=True)
        resident.append(
            {"batch": all_["tok_s"] / one["tok_s"], "alone": one["alone"]}
            | {"one": one["tok_s"], "all": all_["tok_s"]}
        )
        print(
            f"  resident: {one['tok_s']:.1f} tok/s alone, {all_['tok_s']:.1f} of {args.clients}, "
            f"scheduler {100 * (one['alone'] - 1):+.1f} %",
            flush=True,
        )
        for ram in args.ram:
            single = child(args, ram, 1)
            # the trace is written in the same process: its own run shows what reads cost without it
            traced = child(args, ram, args.clients, "--trace")
            timed = child(args, ram, args.clients)
            per = timed["bytes"] / max(timed["misses"], 1)
            speed = {
                "disk": disk(args, timed),
                "expert": per,
                "compute": all_["step_s"],
                "overlap": OVERLAP,
            }
            steps = predict(np.array(traced["step_misses"]), speed)["tok_s"]
            row = {
                "once": traced["missed"] / traced["replayed"],
                "exact": traced["exact"],
                "simulate": timed["tok_s"] / (steps * args.clients),
                "batch": timed["tok_s"] / single["tok_s"],
                "one": single["tok_s"],
                "all": timed["tok_s"],
            }
            rows[ram].append(row)
            print(
                f"  {ram}: {row['one']:.1f} tok/s alone, {row['all']:.1f} of {args.clients} "
                f"({row['simulate']:.2f} of the prediction); missed {traced['missed']} of {traced['replayed']} "
                f"replayed, {'every step the same' if row['exact'] else 'steps differ'}; "
                f"{format_size(round(timed['bytes'] / args.tokens))} a step in {timed['mode']}, "
                f"{timed['wasted']} reads ahead unused",
                flush=True,
            )
    mid = {k: statistics.median(r[k] for r in resident) for k in resident[0]}
    print(
        f"resident: {mid['one']:.1f} and {mid['all']:.1f} tok/s, batch {mid['batch']:.2f}; "
        f"scheduler alone {100 * (mid['alone'] - 1):+.1f} %"
    )
    for ram, found in rows.items():
        mid = {k: statistics.median(r[k] for r in found) for k in found[0]}
        print(
            f"{ram}: {mid['one']:.1f} and {mid['all']:.1f} tok/s, batch {mid['batch']:.2f}; once {mid['once']:.4f} "
            f"({sum(r['exact'] for r in found)} of {len(found)} runs step by step); simulate {mid['simulate']:.2f}"
        )


if __name__ == "__main__":
    main()
