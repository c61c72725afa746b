"""`simulate`: replays a routing trace through the cache policies, without a model."""

from __future__ import annotations

import argparse
import json
import math

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.trace import Trace, read_trace

POLICIES = ("auto", "lfu", "lru", "layer-lru", "belady")


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "simulate",
        help="replay a routing trace through an expert cache",
        description="Replays a routing trace (generate --trace FILE) through the expert cache, "
        "empty at the start, and counts hits and misses. No model is needed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", help="trace file")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="who is evicted; belady knows the future and is the upper bound",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--slots",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="experts the cache holds: in all, or per layer for layer-lru",
    )
    size.add_argument(
        "--share",
        type=float,
        metavar="F",
        default=argparse.SUPPRESS,
        help="the same as a share of all experts, such as 0.25",
    )
    parser.add_argument(
        "--phase",
        choices=("decode", "prefill", "all"),
        default="decode",
        help="lines to replay (prefill really reads each expert once per chunk, not per token)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def slots_of(trace: Trace, policy: str, share: float) -> int:
    """A share of all experts as slots (per layer for layer-lru), rounded down, at least 1."""
    if not (math.isfinite(share) and 0 < share <= 1):
        raise UsageError(f"--share {share:g} is out of range: expected more than 0, at most 1")
    experts = trace.n_expert * (1 if policy == "layer-lru" else trace.n_layer)
    # 0.15 * 2048 is 307.2 in any arithmetic, but 0.29 * 100 is 28.999...: rounding first keeps
    # decimal shares exact.
    return max(1, math.floor(round(share * experts, 6)))


def run(args: argparse.Namespace) -> int:
    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c import engine

    trace = read_trace(args.trace)
    lines = trace.select(args.phase)
    if not len(lines):
        raise MosaicError(
            f"{args.trace}: none of {len(trace)} lines is {args.phase}; try --phase all"
        )
    share = getattr(args, "share", None)
    slots = args.slots if share is None else slots_of(lines, args.policy, share)
    if not 1 <= slots < 2**31:
        raise UsageError(f"--slots {slots} is out of range: expected 1 to {2**31 - 1}")
    hits, misses = engine.policy_replay(
        args.policy,
        lines.n_layer,
        lines.n_expert,
        slots,
        lines.layer,
        lines.token,
        lines.start,
        lines.ids,
    )
    rate = hits / (hits + misses)
    if args.json:
        result = {"hits": hits, "misses": misses, "hit_rate": rate}
        print(json.dumps(result | {"policy": args.policy, "slots": slots, "lines": len(lines)}))
    else:
        where = "per layer" if args.policy == "layer-lru" else "in all"
        print(f"{args.policy}, {slots} slots {where}, {len(lines)} {args.phase} lines:")
        print(f"hits {hits}, misses {misses}, hit rate {rate:.3f}")
    return 0
