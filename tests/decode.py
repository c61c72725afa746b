"""How near do whole runs come to memory? Decode of a model whose experts are all cached, idle and busy.

    python tests/decode.py MODEL [--ram 8G] [--threads N] [--runs 5]

idle: tok/s of the whole command `generate`, of what this machine's plain read bandwidth (measured in
    the same run) allows for the bytes that one token reads: every dense weight and the experts of the
    router's choice, from the files' sizes; state and KV are not counted.
busy: another process keeps one core fully busy. tok/s against idle runs in turns, and the slowest token
    over the median one.

Medians of `--runs`. The prompt is long enough for the prefill to touch every expert; a run whose decode
still read some says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import mosaic_c
from mosaic_c import engine_bench
from mosaic_c.bench import read_threads
from mosaic_c.bind import matrix_bytes, scale_bytes
from mosaic_c.checkpoint import Checkpoint

TOKENS = 128


def active_bytes(path: str) -> int:
    """Weights and scales that one decoded token reads."""
    located = Checkpoint.open(path).locate()
    plan = located.plan
    rows_only = {plan.embed.name} if plan.head is not None else set()
    total = sum(s.nbytes + s.scale_nbytes for n, s in located.spans.items() if n not in rows_only)
    for layer, e in zip(plan.moe_layers, located.experts, strict=True):
        total += layer.top_k * int((matrix_bytes(e) + scale_bytes(e)).sum(axis=1).max())
    return total


def command(args: argparse.Namespace, ids: list[int]) -> dict:
    """One whole `generate`; its statistics."""
    out = subprocess.run(
        [sys.executable, "-m", "mosaic_c", "generate", "--model", args.model, "--ram", args.ram,
         "--threads", str(args.threads), "--ids", ",".join(map(str, ids)), "-n", str(TOKENS),
         "--temp", "0", "--ignore-eos", "--json", "--quiet"],
        check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(out.stdout)["stats"]


def read_gbs(threads: int) -> float:
    bench = engine_bench.Bench(threads, None)
    try:
        return bench.limits()["read_gbs"]
    finally:
        bench.close()


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process spins on the last core of this one's mask."""
    core = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()


def token_times(model: mosaic_c.Model, n: int) -> list[float]:
    session = model.session()
    rng = np.random.default_rng(1)
    session.forward(rng.integers(0, model.vocab, 40).tolist(), last=True)
    times = []
    for token in rng.integers(0, model.vocab, n).tolist():
        start = time.perf_counter()
        session.forward([token], last=True)
        times.append(time.perf_counter() - start)
    session.close()
    return times


def warm(model: mosaic_c.Model) -> None:
    rng = np.random.default_rng(0)
    misses = -1
    while misses != model.stats().misses:
        misses = model.stats().misses
        session = model.session()
        session.forward(rng.integers(0, model.vocab, 512).tolist(), last=True)
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ram", default="8G")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.threads = read_threads(args.threads)
    active = active_bytes(args.model)
    print(f"{active / 1e6:.1f} MB of weights a token, {args.threads} threads")

    ids = np.random.default_rng(2).integers(0, 30000, 1500).tolist()
    shares, speeds = [], []
    for _ in range(args.runs):
        before = read_gbs(args.threads)
        stats = command(args, ids)
        read = max(before, read_gbs(args.threads))
        speeds.append(stats["decode_tok_s"])
        shares.append(stats["decode_tok_s"] * active / (read * 1e9))
        print(f"  generate {speeds[-1]:6.1f} tok/s, read {read:5.1f} GB/s: {shares[-1]:.3f} of it, "
              f"{stats['wait_s']:.2f} s of waiting in all")  # fmt: skip
    print(f"idle: {statistics.median(speeds):.1f} tok/s, {statistics.median(shares):.2f} of read "
          f"bandwidth over {active / 1e6:.1f} MB")  # fmt: skip

    ratios, worst = [], []
    with mosaic_c.open(args.model, ram=args.ram, threads=args.threads) as model:
        warm(model)
        for _ in range(args.runs):
            idle = token_times(model, TOKENS)
            with busy_core():
                loaded = token_times(model, TOKENS)
            ratios.append(sum(idle) / sum(loaded))
            worst.append(max(loaded) / statistics.median(loaded))
            print(f"  busy {TOKENS / sum(loaded):6.1f} tok/s of {TOKENS / sum(idle):6.1f}: "
                  f"{ratios[-1]:.2f}; slowest token {worst[-1]:.1f} x the median")  # fmt: skip
    print(f"busy: {statistics.median(ratios):.2f} of idle, slowest token "
          f"{statistics.median(worst):.1f} x the median ({max(worst):.1f} at worst)")  # fmt: skip


if __name__ == "__main__":
    main()
