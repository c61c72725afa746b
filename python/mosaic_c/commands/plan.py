"""`plan`: where every byte of a budget would go, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from mosaic_c.commands.options import add_model_options, model_options
from mosaic_c.limits import format_size


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "plan",
        help="show how a model would use memory",
        description="Prints every memory item of a model under a budget, the smallest budget that runs, and "
        "whether this one does. Reads only headers.",
    )
    add_model_options(parser, required=True)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mosaic_c.opening import plan_model

    tokenizer = None
    if (Path(args.model) / "tokenizer.json").is_file():  # so that it is measured, as in generate
        from mosaic_c.tokenizer import Tokenizer

        tokenizer = Tokenizer(args.model)
    memory = plan_model(args.model, **model_options(args), text=tokenizer is not None)[-1]
    if args.json:
        print(json.dumps(asdict(memory) | {"total": memory.total}))
        return 0
    for item in memory.items:
        print(f"{item.name:24} {format_size(item.bytes):>12}  {item.note}".rstrip())
    print(f"{'total':24} {format_size(memory.total):>12}")
    print(f"{'budget':24} {format_size(memory.budget):>12}  {memory.reason}")
    print(f"{'smallest budget':24} {format_size(memory.floor):>12}")
    print(
        f"{'useful from':24} {format_size(memory.useful):>12}  all experts of one token stay cached"
    )
    print("fits" if memory.fits else f"does not fit: give --ram {memory.floor >> 20}M or more")
    for warning in memory.warnings:
        print(f"note: {warning}")
    return 0
