"""Does `bench io` reach what fio reaches? Both read one file at random places, in turns, past the page cache.

    python tests/disk.py FILE [--size 3M] [--lanes 1,2,4,8] [--io direct] [--runs 5] [--seconds 2]

fio runs as `psync`, a job (thread) for every lane, and as `libaio` with an I/O depth of as many, both with
--direct=1, at the same multiples of 4 KiB, into huge pages: its buffers start at multiples of 2 MiB, and glibc asks
for huge pages (GLIBC_TUNABLES). `plain` is psync without these two, as people mostly run it: two to three times slower.
The exact command lines are printed. Ratios are medians over rounds; the bar is 0.95 of the tuned ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

from mosaic_c import bench_io
from mosaic_c.commands.options import numbers
from mosaic_c.limits import parse_size

KINDS = ("psync", "libaio", "plain")
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BAR = 0.95


def command(kind: str, path: str, size: int, lanes: int, seconds: int) -> list[str]:
    """fio at random places, `lanes` reads in flight."""
    if kind == "libaio":
        many = ["--ioengine=libaio", "--numjobs=1", f"--iodepth={lanes}"]
    else:
        many = ["--ioengine=psync", f"--numjobs={lanes}", "--thread"]
    return [
        "fio", "--name=x", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1", f"--bs={size}",
        "--blockalign=4k", "--norandommap", "--randrepeat=0", *many, "--time_based", f"--runtime={seconds}",
        "--group_reporting", "--output-format=json", *([] if kind == "plain" else ["--iomem_align=2m"]),
    ]  # fmt: skip


def fio(kind: str, *args: object) -> float:
    """GB/s."""
    env = os.environ | ({} if kind == "plain" else HUGE)
    out = subprocess.run(command(kind, *args), check=True, stdout=subprocess.PIPE, env=env).stdout
    read = json.loads(out)["jobs"][0]["read"]
    return read["io_bytes"] / read["runtime"] * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--size", default="3M")
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--io", default="direct")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    args = parser.parse_args()
    size, lanes = parse_size(args.size), numbers("--lanes", args.lanes)
    worst = float("inf")
    with bench_io.disk(args.file, 0, size) as file:
        for kind in KINDS:
            env = "" if kind == "plain" else "".join(f"{k}={v} " for k, v in HUGE.items())
            print(env + shlex.join(command(kind, file.path, size, lanes[-1], args.seconds)))
        print(
            f"python -m mosaic_c bench io {shlex.quote(args.file)} --io {args.io} --size {args.size}"
        )
        for n in lanes:
            ours, theirs = [], {kind: [] for kind in KINDS}
            for _ in range(args.runs):
                (row,) = bench_io.measure(
                    file, [args.io], [n], None, size, seconds=args.seconds, runs=1
                )
                ours.append(row["gbs"])
                for kind, got in theirs.items():
                    got.append(fio(kind, file.path, size, n, args.seconds))
            print(f"{n} lanes: ours {statistics.median(ours):.2f} GB/s", end="")
            for kind, got in theirs.items():
                ratio = statistics.median(a / b for a, b in zip(ours, got, strict=True))
                worst = worst if kind == "plain" else min(worst, ratio)
                print(f"; fio {kind} {statistics.median(got):.2f}, ratio {ratio:.3f}", end="")
            print(flush=True)
    print(f"worst ratio {worst:.3f}, bar {BAR}")
    sys.exit(worst < BAR)


if __name__ == "__main__":
    main()
