"""`verify`: proves on a model that cache, threads, I/O, kernels, policy and chunking never change a bit."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from mosaic_c.commands.options import add_gpu_options, add_source_option, check_source
from mosaic_c.limits import format_size

if TYPE_CHECKING:
    from mosaic_c.verify import Report, Row, Setting


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "verify",
        help="prove that settings never change a result",
        description="Runs a model with the smallest and the largest cache, other threads, every way of reading, "
        "every kernel set of this CPU, every policy, a small cache on the GPU where this build has one "
        "(--vram: of this size) and another cut of the prompt, and compares all tokens "
        "and all logits with the default's, bit for bit (any NaN equals any NaN). Exit status 1 when "
        "anything differs. The scalar kernels are slow: a large model takes minutes.",
    )
    p = parser.add_argument
    p(
        "--model",
        "-m",
        metavar="DIR",
        required=True,
        help="folder of a Hugging Face checkpoint, or a pulled name",
    )
    p("--ram", metavar="SIZE", help="bound of the whole process, such as 6G (default: what the system has "
      "available or the control group allows, less a quarter)")  # fmt: skip
    p(
        "--tokens",
        type=int,
        default=16,
        metavar="N",
        help="tokens to generate, greedy (default: %(default)s)",
    )
    p("--prompt", metavar="TEXT", help="a text, or token ids as 1,2,3 (default: a short text; random ids where "
      "the folder has no tokenizer)")  # fmt: skip
    add_gpu_options(parser)
    add_source_option(parser)
    p("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c.verify import verify

    check_source(args.model, args.source)
    tqdm.monitor_interval = 0  # no thread of its own: runs are forked
    bar = tqdm(disable=None, leave=False, unit="run", file=sys.stderr)
    width = prompt = 0

    def show(text: str) -> None:
        if not args.json:
            bar.clear()
            print(text, flush=True)

    def started(settings: list[Setting], tokens: int) -> None:
        nonlocal width, prompt
        bar.total, prompt = len(settings), tokens
        width = max(len(s.name) for s in settings)
        show(f"{'setting':{width}}  tokens   logits   took effect")

    def progress(i: int, name: str, what: str, done: int, of: int) -> None:
        bar.n = i
        bar.set_description(f"{name}: {done}/{of} {what}")

    try:
        report = verify(
            args.model, args.ram, args.tokens, args.prompt, started, progress,
            lambda row: show(line(row, width, prompt)), args.vram, args.gpu,
        )  # fmt: skip
    finally:
        bar.close()
    if args.json:
        print(json.dumps(asdict(report) | {"good": report.good}))
    else:
        print("\n".join(verdict(report)))
    return 0 if report.good else 1


def line(row: Row, width: int, prompt: int) -> str:
    """A row of the table, and under it the first difference."""
    if row.reason:
        return f"{row.setting:{width}}  {row.status}: {row.reason}"
    words = {True: "equal", False: "DIFFER", None: "-"}
    proven = row.exercised or row.status == "baseline"
    shown = row.evidence if proven else f"not exercised: {row.evidence}"
    text = (
        f"{row.setting:{width}}  {words[row.tokens_equal]:7}  {words[row.logits_equal]:7}  {shown}"
    )
    if row.difference is not None:
        text += f"\n{'':{width}}  first: {row.difference.text(prompt)}"
    return text


def verdict(report: Report) -> list[str]:
    rows = report.rows[1:]

    def names(status: str) -> str:
        return ", ".join(row.setting for row in rows if row.status == status)

    equal = [row for row in rows if row.status == "equal"]
    proven = sum(row.exercised for row in equal)
    lines = [
        f"{len(report.prompt)} prompt tokens and {len(report.tokens)} generated: {proven} of {len(rows)} settings "
        f"took effect and gave the baseline's bits"
    ]
    idle = ", ".join(row.setting for row in equal if not row.exercised)
    found = (("not exercised", idle), ("refused", names("refused")), ("failed", names("failed")))
    lines += [f"{what}: {which}" for what, which in found if which]
    peak = max(row.peak_rss for row in report.rows)
    size = f"peak RSS {format_size(peak)} of a budget of {format_size(report.budget)}"
    lines.append(size if peak <= report.budget else f"{size}: MORE than the budget")
    if report.not_finite:
        lines.append(f"note: {report.not_finite} logits of the baseline are NaN or infinite")
    if names("differs"):
        lines.append(f"DIFFERENT: {names('differs')}")
    return lines
