"""How near do runs that read experts all the time come to the disk and to arithmetic?

    python tests/streaming.py MODEL --ram 1200M --ram 2000M [--rounds 3] [--tokens 200] [--io auto]

Per round, in turns: the disk, by `bench io` with the size of this model's experts and the lanes in use; the
model with all its experts cached (--resident, default: what the system allows); then each budget. Prints,
as medians over the rounds:

read rate   bytes read per second with a read under way, of the rate of `bench io`
token time  of max(bytes a token read / rate of `bench io`, token time of the resident model)
simulate    tok/s that it predicts from the run's own routing trace, against the measured
plan        the same from the run's hit rate; its memory rate is what the resident model reached
cpu         CPU seconds per GB read beyond what the resident model takes for as many tokens

Each run is a process of its own and drops the model's files from the page cache first. Tokens are random:
their routing has the router's skew and no locality of text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mosaic_c.limits import format_size

CHILD = """
import json, os, sys, time, resource, mosaic_c
import numpy as np
from mosaic_c.trace import TraceWriter
model, ram, tokens, io, out = sys.argv[1], sys.argv[2] or None, int(sys.argv[3]), sys.argv[4], sys.argv[5]
with mosaic_c.open(model, ram=ram, ctx=tokens * 2 + 1100, io=io) as m:
    for f in m.files:
        fd = os.open(f, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    rng = np.random.default_rng(7)
    s = m.session()
    s.forward(rng.integers(0, m.vocab, 512).tolist(), last=True)
    warm = tokens // 2
    cpu = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    moe = m.plan.moe_layers
    with TraceWriter(out, len(moe), moe[0].experts.count, moe[0].top_k) as m.trace:
        for i, t in enumerate(rng.integers(0, m.vocab, warm + tokens).tolist()):
            if i == warm:
                a, c, t0 = m.stats(), cpu(), time.perf_counter()
            s.forward([t], last=True)
        b, c, wall = m.stats(), cpu() - c, time.perf_counter() - t0
        m.trace = None
    names = ("hits", "misses", "reads", "bytes_read", "busy_s", "wait_s", "ahead_reads", "ahead_used")
    print(json.dumps({n: getattr(b, n) - getattr(a, n) for n in names} | {
        "warm": warm, "tokens": tokens, "wall": wall, "cpu": c, "slots": b.slots, "lanes": b.lanes,
        "depth": b.queue_depth, "mode": b.io, "slab": b.slab_bytes, "peak_rss": b.peak_rss, "budget": b.budget,
        "faults": b.major_faults - a.major_faults, "ahead_on": b.ahead_on}))
"""


def child(args: argparse.Namespace, ram: str, trace: Path) -> dict:
    argv = [sys.executable, "-c", CHILD, args.model, ram, str(args.tokens), args.io, str(trace)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


def cli(*argv: str) -> dict:
    out = subprocess.run(
        [sys.executable, "-m", "mosaic_c", *argv, "--json"], check=True, stdout=subprocess.PIPE
    )
    return json.loads(out.stdout)


def disk(args: argparse.Namespace, run: dict) -> float:
    """Bytes per second of the best of `bench io` with the run's size, mode and lanes."""
    result = cli("bench", "io", args.model, "--size", str(run["slab"]), "--lanes", str(run["lanes"]),
                 "--io", run["mode"], "--seconds", "1")  # fmt: skip
    return max(row["gbs"] for row in result["rows"]) * 1e9


def predictions(
    args: argparse.Namespace, run: dict, rate: float, compute: float, trace: Path
) -> dict:
    common = ("--disk", str(int(rate)))
    per_read = run["bytes_read"] / max(run["reads"], 1)
    sim = cli("simulate", str(trace), "--slots", str(run["slots"]), *common, "--expert-bytes",
              str(int(per_read)), "--compute-ms", f"{compute * 1e3:.4f}", "--warm", str(run["warm"]))  # fmt: skip
    column = cli("plan", args.model)["columns"]["as_shipped"]
    memory = (column["active_bytes"] + column["token_bytes"]) / compute
    hit = 1 - run["bytes_read"] / run["tokens"] / column["token_bytes"]
    plan = cli("plan", args.model, *common, "--memory", str(int(memory)), "--hit", f"{hit:.6f}")
    (predicted,) = plan["columns"]["as_shipped"]["predicted"]
    return {"simulate": sim["tok_s"], "plan": predicted["tokens_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--ram", action="append", required=True)
    parser.add_argument("--resident", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    found: dict[str, list[dict]] = {ram: [] for ram in args.ram}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        for _ in range(args.rounds):
            resident = child(args, args.resident, trace)
            compute = resident["wall"] / resident["tokens"]
            if resident["misses"]:
                print(f"  the resident model missed {resident['misses']} experts", flush=True)
            for ram in args.ram:
                run = child(args, ram, trace)
                rate = disk(args, run)
                token = run["wall"] / run["tokens"]
                read = run["bytes_read"] / run["tokens"] / rate
                row = predictions(args, run, rate, compute, trace)
                row["tok_s"], row["resident"] = 1 / token, 1 / compute
                row["hit"] = run["hits"] / (run["hits"] + run["misses"])
                row["gbs"] = run["bytes_read"] / run["busy_s"] / 1e9
                row["of_io"] = run["bytes_read"] / run["busy_s"] / rate
                row["of_bound"] = token / max(read, compute)
                row["sim_error"] = row["simulate"] * token - 1
                row["plan_error"] = row["plan"] * token - 1
                row["cpu_gb"] = (run["cpu"] - resident["cpu"]) / (run["bytes_read"] / 1e9)
                found[ram].append(row)
                print(f"  {ram}: {1 / token:.1f} tok/s (resident {1 / compute:.1f}), hits {row['hit']:.3f}, "
                      f"{run['bytes_read'] / run['tokens'] / 1e6:.1f} MB a token, {row['gbs']:.2f} GB/s of "
                      f"{rate / 1e9:.2f} ({run['mode']}, {run['lanes']} lanes, depth {run['depth']}), waited "
                      f"{run['wait_s'] / run['wall']:.2f} of the time, ahead {run['ahead_used']} of "
                      f"{run['ahead_reads']}, peak {format_size(run['peak_rss'])}", flush=True)  # fmt: skip
    for ram, rows in found.items():
        mid = {k: statistics.median(row[k] for row in rows) for k in rows[0]}
        print(f"{ram}: {mid['tok_s']:.1f} tok/s, hit rate {mid['hit']:.3f}; read rate {mid['of_io']:.2f} of bench "
              f"io; token time {mid['of_bound']:.2f} of the bound; simulate {mid['simulate']:.1f} tok/s "
              f"({100 * mid['sim_error']:+.0f} %), plan {mid['plan']:.1f} ({100 * mid['plan_error']:+.0f} %); "
              f"{mid['cpu_gb']:.3f} CPU s per GB")  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
