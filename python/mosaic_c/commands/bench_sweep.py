"""`bench sweep`: hits, bytes read, memory and speed of a model for a range of cache sizes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from mosaic_c.commands.options import add_source_option, check_source, numbers
from mosaic_c.jsonfile import shown_path
from mosaic_c.modes import IO_MODES, MODEL_POLICIES


def add_parser(which: argparse._SubParsersAction) -> None:
    parser = which.add_parser(
        "sweep",
        help="a model with caches of different sizes",
        description="Decodes the same tokens with expert caches of different sizes, each in a fresh process with "
        "the model's files out of the page cache, from the first token on: the cache is empty at the start.",
    )
    add = parser.add_argument
    add(
        "--model",
        "-m",
        metavar="DIR",
        required=True,
        help="folder of a Hugging Face checkpoint, or a pulled name",
    )
    add("--slots", metavar="N,N", help="experts in the cache per layer (default: 2,4,8,16,32,64, as far as the "
        "model has experts)")  # fmt: skip
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens to decode (default: 80, or all of the trace)",
    )
    add("--policy", choices=MODEL_POLICIES, default="layer-lru",
        help="which experts stay in memory; all but layer-lru share the slots of all layers "
        "(default: %(default)s)")  # fmt: skip
    add("--routing", metavar="TRACE", action="append", default=[], help="take expert ids from the decode lines of "
        "a trace in place of the router's; twice: compare two traces")  # fmt: skip
    add(
        "--compare",
        metavar="DIR",
        help="a second model beside the first, such as one of synth --uniform",
    )
    add_source_option(parser)
    add(
        "--ram", metavar="SIZE", help="bound of each run's whole process (default: as for generate)"
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads (default: the cores this process may use, at most 256)",
    )
    add(
        "--io",
        choices=IO_MODES,
        default="auto",
        help="how experts are read (default: %(default)s)",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw hit rate, speed and memory; needs the extra `plot` (matplotlib)",
    )
    add(
        "--json",
        action="store_true",
        help="one JSON object on stdout, with the seconds of every token",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from mosaic_c import plot, sweep

    check_source(args.model, args.source)
    many = sweep.series(args.model, args.compare, args.routing)
    shapes = [sweep.look(one) for one in many]
    slots, tokens = sweep.choose(
        shapes, None if args.slots is None else numbers("--slots", args.slots), args.tokens
    )
    if args.plot is not None:
        plot.check(args.plot)
    bar = tqdm(disable=None, leave=False, unit="run", file=sys.stderr)
    printed = False

    def progress(name: str, i: int, n: int) -> None:
        bar.total, bar.n = n, i
        bar.set_description(name)

    def show(rows: list[dict[str, Any]]) -> None:
        nonlocal printed
        if not args.json:
            bar.clear()
            if not printed:
                print(heading(many, shapes, rows, tokens))
            printed = True
            print(line(rows), flush=True)

    try:
        table = sweep.sweep(
            many, slots, progress, show, tokens=tokens, policy=args.policy, ram=args.ram, threads=args.threads,
            io=args.io,
        )  # fmt: skip
    finally:
        bar.close()
    if args.json:
        result = [
            vars(one) | vars(shape) | {"rows": [rows[i] for rows in table]}
            for i, (one, shape) in enumerate(zip(many, shapes, strict=True))
        ]
        print(json.dumps({"tokens": tokens, "series": result}), flush=True)
    if args.plot is not None:  # last: should it fail, the figures are out
        title = f"{tokens} tokens from an empty cache, {table[0][0]['policy']}"
        title += ", synthetic weights" if any(s.synthetic for s in shapes) else ""
        plot.sweep([one.name for one in many], table, title, args.plot)
    return 0


def heading(many: list[Any], shapes: list[Any], rows: list[dict[str, Any]], tokens: int) -> str:
    lines = [
        f"{shown_path(one.name)}: {shown_path(one.model)}"
        f"{' (synthetic weights)' if shape.synthetic else ''}, {shape.layers} layers x "
        f"{shape.experts} experts, top-{shape.top_k}, routing {shown_path(one.routing or 'of its own')}"
        for one, shape in zip(many, shapes, strict=True)
    ]
    r = rows[0]
    lines.append(
        f"{tokens} tokens one by one from an empty cache, policy {r['policy']}, io {r['io']} "
        f"({r['files_direct']} of {r['files_direct'] + r['files_pread']} files direct), {r['threads']} threads"
    )
    lines += [
        f"RSS before any expert is touched: {row['rss_before'] / 1e6:.1f} MB ({shown_path(one.name)})"
        + (
            "; io auto has tried reads into a few slots, other modes do not"
            if row["io_tried"]
            else ""
        )
        for one, row in zip(many, rows, strict=True)
    ]
    if len(many) > 1:
        lines.append(" " * 5 + "".join(f" | {shown_path(one.name)[:48]:^48}" for one in many))
    columns = f"{'cache MB':>8} {'hits':>7} {'hit %':>6} {'MB/token':>8} {'RSS MB':>7} {'tok/s':>7}"
    lines.append("slots" + f" | {columns}" * len(many))
    return "\n".join(lines)


def line(rows: list[dict[str, Any]]) -> str:
    return f"{rows[0]['slots']:5}" + "".join(
        f" | {r['cache_bytes'] / 1e6:8.1f} {r['hits']:7} {100 * r['hit_rate']:6.1f} {r['mb_per_token']:8.2f} "
        f"{r['rss'] / 1e6:7.1f} {r['tok_s']:7.1f}"
        for r in rows
    )
