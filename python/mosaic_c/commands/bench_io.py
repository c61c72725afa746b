"""`bench io`: how fast the engine's own reader takes random pieces of a large file from this disk."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mosaic_c.commands.options import numbers
from mosaic_c.limits import format_size, parse_size


def add_parser(which: argparse._SubParsersAction) -> None:
    parser = which.add_parser(
        "io",
        help="speed of the disk, read as experts are",
        description="Reads random pieces of a large file by the engine's own reader, past the page cache, into "
        "huge pages as the expert cache has them. Runs take turns; every figure is a median.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("path", nargs="?", metavar="PATH", default=".", help="a large file, a model's folder (its largest "
        "file of weights), or a folder for a temporary file")  # fmt: skip
    add("--size", metavar="SIZE", default="3M", help="bytes of one read, such as an expert's")
    add("--lanes", metavar="N,N", default="1,2,4,8", help="reader threads to try")
    add("--depth", type=int, metavar="N", default=argparse.SUPPRESS, help="reads handed to the reader at a time "
        "(default: one a lane and one more)")  # fmt: skip
    add("--io", metavar="MODE,MODE", default=argparse.SUPPRESS, help="ways of reading, such as direct,pread "
        "(default: all that the engine has)")  # fmt: skip
    add("--seconds", type=float, metavar="S", default=1.0, help="of one run")
    add("--runs", type=int, metavar="N", default=3, help="runs of each")
    add("--file-size", metavar="SIZE", default="2G", help="of the temporary file")
    add("--json", action="store_true", help="one JSON object on stdout, with every run")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c import bench_io, engine

    size = parse_size(args.size, "--size")
    file_size = parse_size(args.file_size, "--file-size")
    lanes, depth = numbers("--lanes", args.lanes), getattr(args, "depth", None)
    named = getattr(args, "io", None)
    modes = [m for m in engine.IO_MODES if m != "auto"] if named is None else named.split(",")
    bench_io.check_options(modes, lanes, depth, size, args.seconds, args.runs)
    bar = tqdm(disable=None, leave=False, file=sys.stderr)

    def written(done: int, of: int) -> None:
        bar.total, bar.n = of >> 20, done >> 20
        bar.set_description("writing MiB")

    def progress(name: str, i: int, n: int) -> None:
        bar.total, bar.n = n, i
        bar.set_description(name)

    try:
        with bench_io.disk(args.path, file_size, size, written) as file:
            reasons = []
            if named is None:
                modes, reasons = bench_io.usable(file, modes, size)
            rows = bench_io.measure(
                file,
                modes,
                lanes,
                depth,
                size,
                seconds=args.seconds,
                runs=args.runs,
                progress=progress,
            )
    finally:
        bar.close()
    if args.json:
        print(json.dumps({
            "file": file.name, "temporary": file.temporary, "file_bytes": file.size, "size": size,
            "seconds": args.seconds, "rows": rows, "left_out": reasons,
        }))  # fmt: skip
        return 0
    print(f"file     {file.name}, {format_size(file.size)}")
    print(f"reads    {format_size(size)} at random multiples of {format_size(bench_io.BLOCK)}, into huge pages; "
          f"medians of {args.runs} runs of {args.seconds:g} s, in turns")  # fmt: skip
    print(f"{'mode':8} {'page cache':10} {'lanes':>5} {'depth':>5} {'GB/s':>7} {'min':>6} {'max':>6} "
          f"{'reads/s':>8} {'CPU s/GB':>9}")  # fmt: skip
    for row in rows:
        print(line(row, size))
    for note in reasons + notes(rows, file.size):
        print(f"note     {note}")
    return 0


def line(row: dict[str, Any], size: int) -> str:
    cache = "kept" if row["mode"] == "mmap" else "bypassed" if row["direct"] else "dropped"
    return (
        f"{row['mode']:8} {cache:10} {row['lanes']:5} {row['depth']:5} "
        f"{row['gbs']:7.2f} {row['min_gbs']:6.2f} {row['max_gbs']:6.2f} {row['gbs'] * 1e9 / size:8.0f} "
        f"{row['cpu_s_per_gb']:9.3f}"
    )


def notes(rows: list[dict[str, Any]], file_size: int) -> list[str]:
    """What makes these figures say less than they seem to."""
    found = []
    refused = [r["mode"] for r in rows if r["mode"] in ("direct", "uring") and not r["direct"]]
    if refused:
        found.append(
            "direct reads were refused by the file system: pread was measured in their place"
        )
    cached = max(r["cached"] for r in rows)
    if cached > file_size // 100:
        found.append(
            f"{format_size(cached)} of the file could not be dropped from the page cache (a file system in memory, "
            "pages that another process holds; all of a file that you may not write counts as such): these may "
            "be reads of memory"
        )
    if any(r["mode"] == "mmap" for r in rows):
        found.append("mmap reads every place at most once: its pages stay in the page cache")
    most = max(run["bytes"] for row in rows for run in row["runs"])
    if most > file_size:
        found.append(
            f"a run read up to {most / file_size:.1f} times the file: a cache of the disk or of a virtual "
            "machine's host may have answered; a larger file tells"
        )
    return found
