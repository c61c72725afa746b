"""`convert`: an official checkpoint into an expert pack."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from mosaic_c.jsonfile import shown_path
from mosaic_c.limits import format_size

EXPERTS = ("int4-g64", "int4-g32", "int4-row", "mxfp4", "fp8", "bf16")
DENSE = ("fp8", "int8", "bf16", "int4-g64")


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "convert",
        help="make an expert pack of a checkpoint",
        description="Writes the routed experts of a BF16, F16, F32 or FP8 checkpoint as the records of an expert pack "
        "(docs/format.md); all other tensors stay byte for byte as they are, unless --dense asks. Memory is that of a "
        "few experts. A run that was interrupted is continued by the same command; DST appears when it is complete.",
    )
    p = parser.add_argument
    p("src", metavar="SRC", help="folder of a Hugging Face checkpoint, or a pulled name")
    p("dst", metavar="DST", help="folder to create; must not exist (but see --verify)")
    p("--experts", choices=EXPERTS, help="format of the experts; groups of 32 or 64 round less than whole rows, fp8 "
      "keeps the bits of an FP8 source, bf16 those of a BF16 one")  # fmt: skip
    p("--dense", choices=DENSE, help="also turn the dense matrices of the layers into this, those that official FP8 "
      "releases have in FP8; int4-g64 is there to measure what it costs (default: all stay as they are)")  # fmt: skip
    p("--verify", action="store_true", help="read all back: CRCs, and every value within the format's rounding of the "
      "source's; of a DST that exists already: that alone")  # fmt: skip
    p("--threads", type=int, metavar="N", help="threads (default: as many as there are cores)")
    p("--quiet", action="store_true", help="no progress bar")
    p("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c.convert import convert

    try:
        s = convert(
            args.src, args.dst, args.experts, verify=args.verify, progress=not args.quiet, threads=args.threads,
            dense=args.dense,
        )  # fmt: skip
    except KeyboardInterrupt:
        partial = f"{os.path.abspath(args.dst)}.partial"
        if os.path.isdir(partial):
            print(
                f"{shown_path(partial)} keeps what is done: the same command goes on from there",
                file=sys.stderr,
            )
        raise
    if args.json:
        print(json.dumps(asdict(s)))
        return 0
    resumed = f", {format_size(s.resumed)} of them by an earlier run" if s.resumed else ""
    written = f"{format_size(s.bytes)}{resumed}, {s.seconds:.1f} s" if s.written else "as it was"
    print(
        f"{shown_path(s.path)}: {s.layers} layers x {s.experts // s.layers} experts in {s.format}, "
        f"dense matrices in {s.dense}, {written}"
    )
    if s.verified:
        print(
            f"verified: {s.verified} experts and all other tensors, CRCs, and values within the rounding of {s.format} "
            f"and {s.dense}"
        )
    return 0
