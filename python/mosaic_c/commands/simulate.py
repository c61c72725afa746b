"""`simulate`: replays a routing trace through the cache policies, without a model."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np

from mosaic_c.commands import simulate_vram
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import format_size, parse_rate, parse_size
from mosaic_c.modes import HOT_AFTER, PER_LAYER, POLICIES
from mosaic_c.predict import OVERLAP, token_seconds
from mosaic_c.trace import Trace, read_trace

ALL = tuple(p for p in POLICIES if p not in PER_LAYER)  # those that share all slots


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "simulate",
        help="replay a routing trace through an expert cache",
        description="Replays a routing trace (generate --trace FILE) through the expert cache, "
        "empty at the start, and counts hits and misses; with --disk, --expert-bytes and "
        "--compute-ms it predicts tokens a second, token by token. No model is needed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", help="trace file")
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, "all"),
        default="auto",
        help="who is evicted; belady knows the future and is the upper bound; all: a table of "
        + ", ".join(ALL),
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
    size.add_argument(
        "--vram-slots",
        metavar="SIZES",
        default=argparse.SUPPRESS,
        help="compares rules by which experts come into VRAM, for shares of all experts or whole "
        "numbers of slots, such as 0.05,0.1,512: loads over PCIe and calls that the GPU serves",
    )
    parser.add_argument(
        "--hot-after",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"with --vram-slots: calls in {simulate_vram.WINDOW} tokens that earn a slot there "
        f"(default: {HOT_AFTER})",
    )
    parser.add_argument(
        "--phase",
        choices=("decode", "prefill", "all"),
        default="decode",
        help="lines to replay (prefill really reads each expert once per chunk, not per token)",
    )
    parser.add_argument(
        "--warm", type=int, metavar="N", default=0, help="tokens replayed before counting begins"
    )
    speed = parser.add_argument_group("speed", "the first three together predict tokens a second")
    p, unset = speed.add_argument, argparse.SUPPRESS
    p(
        "--disk",
        metavar="RATE",
        default=unset,
        help="bytes a second that it reads, such as 3G (3 GB/s)",
    )
    p("--expert-bytes", metavar="SIZE", default=unset, help="bytes read for an expert, such as 3M")
    p("--compute-ms", type=float, metavar="F", default=unset,
      help="milliseconds of a token when all experts are in memory")  # fmt: skip
    p("--overlap", type=float, metavar="F", default=unset,
      help=f"share of the compute that can run while reads run (default: {OVERLAP})")  # fmt: skip
    p("--measured", type=float, metavar="TOK_S", default=unset,
      help="tokens a second that a run gave: prints how far off the prediction is")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def slots_of(trace: Trace, policy: str, share: float) -> int:
    """A share of all experts as slots (per layer for layer-lru), rounded down, at least 1."""
    if not (math.isfinite(share) and 0 < share <= 1):
        raise UsageError(f"--share {share:g} is out of range: expected more than 0, at most 1")
    experts = trace.n_expert * (1 if policy in PER_LAYER else trace.n_layer)
    # 0.15 * 2048 is 307.2 in any arithmetic, but 0.29 * 100 is 28.999...: rounding first keeps
    # decimal shares exact.
    return max(1, math.floor(round(share * experts, 6)))


# ---- speed ---------------------------------------------------------------------------------------


def _speed(args: argparse.Namespace) -> dict[str, float] | None:
    """disk (bytes/s), expert (bytes), compute (s), overlap, perhaps measured (tok/s); None: not asked."""
    needed = ("disk", "expert_bytes", "compute_ms")
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in args]
    if missing:
        given = [n for n in (*needed, "overlap", "measured") if n in args]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')}: a prediction needs {' and '.join(missing)}, too"
            )
        return None
    out = {"disk": parse_rate(args.disk, "--disk"), "expert": _expert(args.expert_bytes)}
    out["compute"] = _positive("--compute-ms", args.compute_ms) / 1e3
    out["overlap"] = getattr(args, "overlap", OVERLAP)
    if not 0 <= out["overlap"] <= 1:
        raise UsageError(f"--overlap {args.overlap:g} is out of range: expected 0 to 1")
    if "measured" in args:
        out["measured"] = _positive("--measured", args.measured)
    return out


def _expert(text: str) -> int:
    size = parse_size(text, "--expert-bytes")
    if size < 1:
        raise UsageError(f"--expert-bytes {text}: expected at least 1 byte, such as 3M")
    return size


def _positive(option: str, value: float) -> float:
    # Wider than any machine, and far from where a quotient of two of them is 0 or no number of JSON.
    if not 1e-9 <= value <= 1e12:
        raise UsageError(f"{option} {value:g} is out of range: expected 1e-09 to 1e+12")
    return value


def predict(misses: np.ndarray, speed: dict[str, float]) -> dict[str, float]:
    """tok_s over tokens with these misses (n_token,) each, and how far from the measured speed that is.

    Token by token: the mean of many maxima is more than the maximum of the means.
    """
    seconds = sum(
        token_seconds(m * speed["expert"], speed["disk"], speed["compute"], speed["overlap"])
        for m in misses.tolist()
    )
    out = {"tok_s": len(misses) / seconds}
    if "measured" in speed:
        out["measured_tok_s"] = speed["measured"]
        out["error_percent"] = (out["tok_s"] / speed["measured"] - 1) * 100
    return out


# ---- the replay ----------------------------------------------------------------------------------


def tokens_of(lines: Trace, path: str) -> np.ndarray:
    """Which token each line belongs to, from 0 (n_line,)."""
    token = np.concatenate(([0], np.cumsum(np.diff(lines.token) != 0)))
    steps = sum(len(np.unique(lines.step[lines.phase == p])) for p in np.unique(lines.phase))
    if token[-1] + 1 != steps:
        raise MosaicError(
            f"{path}: the {steps} tokens of these lines do not follow one another, so neither --warm nor "
            "a speed makes sense; try --phase decode"
        )
    return token


def replay(lines: Trace, policy: str, slots: int) -> np.ndarray:
    """Misses of each line (n_line,)."""
    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c import engine_pure

    misses = np.empty(len(lines), np.int32)
    engine_pure.policy_replay(
        policy,
        lines.n_layer,
        lines.n_expert,
        slots,
        lines.layer,
        lines.token,
        lines.start,
        lines.ids,
        misses,
    )
    return misses


def _lines(args: argparse.Namespace) -> Trace:
    trace = read_trace(args.trace)
    lines = trace.select(args.phase)
    if not len(lines):
        raise MosaicError(
            f"{args.trace}: none of {len(trace)} lines is {args.phase}; try --phase all"
        )
    return lines


def _warm(warm: int, n_token: int) -> None:
    if not 0 <= warm < n_token:
        raise UsageError(f"--warm {warm} is out of range: expected 0 to {n_token - 1}")


def run_vram(args: argparse.Namespace) -> int:
    for name in ("disk", "compute_ms", "overlap", "measured"):
        if name in args:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option}: --vram-slots predicts no speed, expected --expert-bytes at most"
            )
    if args.policy != "auto":
        raise UsageError(
            f"--policy {args.policy}: --vram-slots has rules of its own, expected no policy"
        )
    after = getattr(args, "hot_after", HOT_AFTER)
    if not 1 <= after <= simulate_vram.WINDOW:
        raise UsageError(
            f"--hot-after {after} is out of range: expected 1 to {simulate_vram.WINDOW}"
        )
    expert = _expert(args.expert_bytes) if "expert_bytes" in args else None
    lines = _lines(args)
    sizes = simulate_vram.parse_sizes(args.vram_slots, lines.n_layer * lines.n_expert)
    token = tokens_of(lines, args.trace)
    n_token = int(token[-1]) + 1
    _warm(args.warm, n_token)
    counted, tokens = token >= args.warm, n_token - args.warm
    results = [
        simulate_vram.study(lines, counted, tokens, n, after, lambda n: replay(lines, "lru", n))
        for n in sizes
    ]
    if args.json:
        common = {"lines": int(counted.sum()), "tokens": tokens, "hot_after": after}
        common["window"] = simulate_vram.WINDOW
        if expert is not None:
            common["expert_bytes"] = expert
        print(json.dumps({"sizes": results} | common))
        return 0
    warm = f" after {args.warm} tokens" if args.warm else ""
    print(
        f"{lines.n_layer * lines.n_expert} experts, {int(counted.sum())} {args.phase} lines{warm}"
    )
    for result in results:
        print("\n".join(["", *simulate_vram.table(result, expert)]))
    return 0


def run(args: argparse.Namespace) -> int:
    if "vram_slots" in args:
        return run_vram(args)
    if "hot_after" in args:
        raise UsageError(f"--hot-after {args.hot_after}: expected --vram-slots, too")
    speed = _speed(args)
    lines = _lines(args)
    share = getattr(args, "share", None)
    slots = args.slots if share is None else slots_of(lines, args.policy, share)
    if not 1 <= slots < 2**31:
        raise UsageError(f"--slots {slots} is out of range: expected 1 to {2**31 - 1}")
    token = None if speed is None and args.warm == 0 else tokens_of(lines, args.trace)
    n_token = 1 if token is None else int(token[-1]) + 1
    _warm(args.warm, n_token)
    counted = np.ones(len(lines), bool) if token is None else token >= args.warm
    touched = int(np.diff(lines.start)[counted].sum())

    def result(policy: str) -> dict[str, Any]:
        missed = replay(lines, policy, slots)
        misses = int(missed[counted].sum())
        out: dict[str, Any] = {"hits": touched - misses, "misses": misses}
        out |= {"hit_rate": out["hits"] / touched, "policy": policy}
        if speed is not None:
            each = np.bincount(token, weights=missed, minlength=n_token)[args.warm :]
            out |= predict(each, speed)
        return out

    common: dict[str, Any] = {"slots": slots, "lines": int(counted.sum())}
    if token is not None:
        common["tokens"] = n_token - args.warm
    results = [result(policy) for policy in (ALL if args.policy == "all" else (args.policy,))]
    if args.json:
        body = {"policies": results} if args.policy == "all" else results[0]
        print(json.dumps(body | common))
        return 0
    where = "per layer" if args.policy in PER_LAYER else "in all"
    after = f" after {args.warm} tokens" if args.warm else ""
    head = f"{slots} slots {where}, {common['lines']} {args.phase} lines{after}:"
    if args.policy == "all":
        print("\n".join([head, *table(results)]))
        return 0
    r = results[0]
    print(f"{r['policy']}, {head}")
    print(f"hits {r['hits']}, misses {r['misses']}, hit rate {r['hit_rate']:.3f}")
    if speed is not None:
        read = format_size(round(r["misses"] * speed["expert"] / common["tokens"]))
        print(
            f"predicted {r['tok_s']:.4g} tok/s over {common['tokens']} tokens, {read} read a token"
        )
    if "error_percent" in r:
        print(
            f"measured {r['measured_tok_s']:.4g} tok/s: the prediction is {r['error_percent']:+.1f} % off"
        )
    return 0


def table(results: list[dict[str, Any]]) -> list[str]:
    """A line a policy, with a head."""
    columns = [
        ("hits", "hits", "d"), ("misses", "misses", "d"), ("hit rate", "hit_rate", ".3f"),
        ("tok/s", "tok_s", ".4g"), ("off", "error_percent", "+.1f"),
    ]  # fmt: skip
    columns = [c for c in columns if c[1] in results[0]]
    rows = [["policy", *(name for name, _, _ in columns)]]
    rows += [[r["policy"], *(format(r[key], kind) for _, key, kind in columns)] for r in results]
    return ["".join([f"{row[0]:8}", *(f"{cell:>10}" for cell in row[1:])]) for row in rows]
