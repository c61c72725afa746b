"""Is the engine several times faster than a plain streaming program with the same cache and the same routing?

    python tests/sweep.py MODEL TRACE [--slots 2,4,8,16,32,64] [--rounds 3] [--records FILE]

Each side decodes the tokens of TRACE from an empty cache, a fixed number of experts of each layer, least recently used
out, a fresh process for every size; the two take turns, and the file of each is dropped from the page cache first.

plain: tests/c/plain_stream.c (`make -C tests/c plain-stream`): experts only, int4 by row, one thread; --records: its
    file of experts (made where it does not exist; default: a temporary one).
ours: MODEL with expert ids of TRACE in place of its routers. It does more for a token: attention, norms, routers
    and the output head over the whole vocabulary. Its bytes per expert depend on MODEL: `synth --shape v4-mini`.

Printed for every size: hits of both (they must be equal), tok/s of the median token (medians over rounds), their ratio
(median of the rounds' ratios; the bar is 4), MB read a token, and resident memory with what it consists of (the
bar is the cache and 60 MB).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mosaic_c import sweep
from mosaic_c.commands.options import numbers

C = Path(__file__).parent / "c"
PROGRAM = C / "build" / "plain" / "plain_stream"
BAR, SPARE = 4.0, 60e6
LINE = re.compile(
    r"slots (\d+), cache ([\d.]+) MB, hits (\d+), misses (\d+), ([\d.]+) MB/token, RSS ([\d.]+) MB, "
    r"([\d.]+) tok/s \(median\), ([\d.]+) \(mean\)"
)


def plain(trace: str, records: str, slots: int) -> dict[str, float]:
    """One run of the plain program; it drops its file from the page cache itself."""
    out = subprocess.run(
        [PROGRAM, trace, records, str(slots)], check=True, capture_output=True, text=True
    ).stdout
    match = LINE.match(out)
    if match is None:
        raise SystemExit(f"plain_stream: {out!r}")
    names = ("slots", "cache", "hits", "misses", "mb_per_token", "rss", "tok_s", "mean_tok_s")
    return dict(zip(names, map(float, match.groups()), strict=True))


def ratio(ours: list[dict], theirs: list[dict], key: str) -> float:
    return statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))


def middle(runs: list[dict], key: str) -> float:
    return statistics.median(r[key] for r in runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("trace")
    parser.add_argument("--slots", default="2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--io", default="auto")
    args = parser.parse_args()
    subprocess.run(["make", "-s", "-C", C, "plain-stream"], check=True)
    (one,) = sweep.series(args.model, None, [args.trace])
    slots, tokens = sweep.choose([sweep.look(one)], numbers("--slots", args.slots), None)
    good = True
    with tempfile.TemporaryDirectory(dir=Path(args.model).resolve().parent) as folder:
        records = args.records or os.path.join(folder, "records")
        if not os.path.exists(records):
            subprocess.run([PROGRAM, args.trace, records, "--make"], check=True)
        print(f"{tokens} tokens; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for n in slots:
            ours, theirs = [], []
            for _ in range(args.rounds):
                theirs.append(plain(args.trace, records, n))
                ours.append(
                    sweep.fresh_point(
                        model=args.model,
                        routing=args.trace,
                        slots=n,
                        tokens=tokens,
                        io=args.io,
                        threads=args.threads,
                    )  # fmt: skip
                )
            a, b, fast = ours[-1], theirs[-1], ratio(ours, theirs, "tok_s")
            rss = middle(ours, "rss")
            same = {r["hits"] for r in ours} == {r["hits"] for r in theirs}
            good &= same and fast >= BAR and rss <= a["cache_bytes"] + SPARE
            print(
                f"{n:3} slots: hits {a['hits']} and {b['hits']:.0f}{'' if same else ' DIFFER'}; tok/s "
                f"{middle(ours, 'tok_s'):.1f} and {middle(theirs, 'tok_s'):.1f}, ratio {fast:.2f} (of the means "
                f"{ratio(ours, theirs, 'mean_tok_s'):.2f}); MB/token {a['mb_per_token']:.2f} and "
                f"{b['mb_per_token']:.2f}; RSS {rss / 1e6:.1f} MB ({(rss - a['cache_bytes']) / 1e6:.1f} over the "
                f"cache of {a['cache_bytes'] / 1e6:.1f}) and {middle(theirs, 'rss'):.1f}",
                flush=True,
            )
    parts = {
        "Python and numpy": a["rss_python"],
        "dense weights": a["resident"]["weights"],
        "state, scratch, tables": sum(a["resident"][k] for k in ("state", "scratch", "meta")),
    }
    print("ours over the cache: " + ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in parts.items()))
    sys.exit(not good)


if __name__ == "__main__":
    main()
