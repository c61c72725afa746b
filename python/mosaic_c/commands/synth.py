"""`synth`: writes a checkpoint of random weights in the layout of an official release."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from mosaic_c.jsonfile import shown_path
from mosaic_c.limits import format_size
from mosaic_c.synth_shapes import RECORDS, SHAPES


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "synth",
        help="write a synthetic checkpoint (random weights, real layout)",
        description="Writes random weights in the file layout of a real model, for tests and "
        "measurements. Labelled synthetic; its text is noise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dst", metavar="DST", help="folder to create; must not exist")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny", help="architecture")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers instead of the shape's own number"
    )
    parser.add_argument(
        "--experts-per-layer", type=int, metavar="N", help="experts instead of the shape's own"
    )
    parser.add_argument(
        "--dtype",
        choices=("fp8", "bf16"),
        default="fp8",
        help="fp8: E4M3 with 128x128 block scales, where the official FP8 releases have it",
    )
    parser.add_argument(
        "--experts",
        choices=tuple(RECORDS),
        default=argparse.SUPPRESS,
        help="an expert pack (docs/format.md) with experts of this format; else the layout of the release",
    )
    parser.add_argument(
        "--uniform",
        action="store_true",
        help="routers without preference, instead of a Zipf-like one",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same bytes")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mosaic_c import synth

    summary = synth.write(
        args.dst,
        args.shape,
        layers=args.layers,
        experts=args.experts_per_layer,
        dtype=args.dtype,
        uniform=args.uniform,
        seed=args.seed,
        progress=not args.quiet,
        records=getattr(args, "experts", None),
    )
    if args.json:
        print(json.dumps(asdict(summary) | {"synthetic": True}))
    else:
        form = summary.dtype + (f", experts {summary.records}" if summary.records else "")
        print(
            f"{shown_path(summary.path)}: synthetic {summary.shape} ({form}), {summary.layers} layers "
            f"x {summary.experts} experts, {summary.parameters / 1e9:.3f} B parameters, "
            f"{format_size(summary.bytes)} in {summary.files} weight file(s), "
            f"{summary.seconds:.1f} s"
        )
    return 0
