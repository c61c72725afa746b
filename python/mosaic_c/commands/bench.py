"""`bench`: measures this machine. `bench kernels` times the engine's kernels beside its limits; `io`, `sweep`
and `quality` are in modules of their own."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mosaic_c.commands import bench_io, bench_quality, bench_sweep
from mosaic_c.limits import format_size


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "bench",
        help="measure this machine",
        description="Measures this machine.",
    )
    which = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    kernels = which.add_parser(
        "kernels",
        help="speed of the compute kernels",
        description="Times every kernel, medians of 9, beside plain reads of memory and the peak of fused "
        "multiply-adds measured in the same run, and tests int4 against a known answer. A minute "
        "or two.",
    )
    add = kernels.add_argument
    add(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads (default: the cores this process may use)",
    )
    add("--isa", metavar="NAME", help="kernel set, such as avx2 (default: the best of this CPU)")
    add(
        "--only",
        metavar="WORD",
        default="",
        help="only cases whose name holds WORD, such as 'gemm F8'",
    )
    add(
        "--json",
        action="store_true",
        help="one JSON object on stdout, with the seconds of every run",
    )
    kernels.set_defaults(run=run)
    bench_io.add_parser(which)
    bench_sweep.add_parser(which)
    bench_quality.add_parser(which)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c import bench

    bar = tqdm(disable=None, leave=False, unit="case", file=sys.stderr)
    machine = bench.machine()

    def start(limits: dict[str, Any]) -> None:
        if not args.json:
            bar.clear()
            print(heading(machine, limits), flush=True)

    def progress(name: str, i: int, n: int) -> None:
        bar.total, bar.n = n, i
        bar.set_description(name)

    def row(row: dict[str, Any]) -> None:
        if not args.json:
            bar.clear()
            print(line(row), flush=True)

    try:
        result = bench.kernels(args.threads, args.isa, args.only, start, progress, row)
    finally:
        bar.close()
    int4 = bench.self_test(result["limits"]["isa"])
    if args.json:
        print(json.dumps({"machine": machine} | result | {"int4": int4}))
    else:
        print(verdict(int4))
    return 0


def heading(machine: dict[str, Any], limits: dict[str, Any]) -> str:
    caches = [
        f"L{level} {format_size(size)}"
        for level in (2, 3)
        if (size := machine[f"l{level}_bytes"]) is not None
    ]
    fma = f"{limits['fma_gflops']:.0f} GFLOP/s" if limits["fma_gflops"] else "not known"
    lines = [
        f"cpu      {machine['cpu'] or 'no vector extension known'}; {machine['cores']} cores"
        + "".join(f"; {cache}" for cache in caches),
        f"kernels  {limits['isa']}, {limits['threads']} threads",
        f"limits   read {limits['read_gbs']:.1f} GB/s ({limits['reads'][0]['name']}, the best of "
        f"{len(limits['reads'])} ways), multiply-add {fma}",
    ]
    if 4 * (machine["l3_bytes"] or 0) > limits["read_bytes"]:
        lines.append(
            f"note     reads of {format_size(limits['read_bytes'])} are not far larger than the last cache: "
            "figures of memory are too high"
        )
    lines.append(
        f"{'case':46} {'median us':>11} {'min us':>11} {'GB/s':>7} {'GFLOP/s':>8} "
        f"{'of read':>7} {'of fma':>6}  limit"
    )
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    def share(key: str, width: int) -> str:
        return f"{row[key]:{width}.2f}" if row[key] else " " * width

    gflops = f"{row['gflops']:8.1f}" if row["flops"] else " " * 8
    text = (
        f"{row['name']:46} {row['median_s'] * 1e6:11.2f} {row['min_s'] * 1e6:11.2f} {row['gbs']:7.2f} "
        f"{gflops} {share('of_read', 7)} {share('of_fma', 6)}  {row['limit'] or ''}"
    )
    if row["ratio"]:
        text += f"  ours takes {row['ratio']:.2f} of its time"
    return text.rstrip()


def verdict(int4: dict[str, dict[str, float]]) -> str:
    lines = ["int4     32x128, symmetric, absmax/7 by row, decoded by the engine:"]
    lines += [
        f"         {name:8} relative RMS {100 * e['relative_rms']:5.2f} %, cosine {e['cosine']:.4f}"
        for name, e in int4.items()
    ]
    e = next(iter(int4.values()))
    lines.append(
        f"         {e['values_per_byte']:.2f} values a byte, {e['values_per_byte_with_scales']:.2f} with their "
        "scales. The error of weights says nothing about text, and a cosine near 1 hides it."
    )
    return "\n".join(lines)
