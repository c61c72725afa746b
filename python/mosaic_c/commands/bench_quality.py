"""`bench quality`: what formats of experts and dense matrices cost a model's text."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from mosaic_c.jsonfile import shown_path

if TYPE_CHECKING:
    from mosaic_c.bench_quality import Report, Run


def add_parser(which: argparse._SubParsersAction) -> None:
    parser = which.add_parser(
        "quality",
        help="what smaller formats cost a model's text",
        description="Makes packs of a model in a temporary folder, one after the other, and compares their predictions "
        "with those of the model as it is, token by token over the same windows of text: perplexity, KL divergence "
        "over the whole vocabulary, and how often the first choice is the same. Method: docs/quality.md.",
    )
    add = parser.add_argument
    add(
        "--model",
        "-m",
        metavar="MODEL",
        required=True,
        help="folder of a Hugging Face checkpoint or a model's name; not a pack",
    )
    add("--text", metavar="FILE", action="append", default=[], help="a UTF-8 text in place of the shipped slices; may "
        "be repeated")  # fmt: skip
    add("--variant", metavar="EXPERTS+DENSE", action="append", help="formats as convert has them: int4-g64 (dense "
        "unchanged), +int8 (experts unchanged), int4-g64+int8; may be repeated "
        "(default: those of docs/quality.md that change the model)")  # fmt: skip
    add("--window", type=int, metavar="N", help="tokens that are evaluated together, each predicted from "
        "those before it in its window (default: 512, or the model's limit)")  # fmt: skip
    add("--tokens", type=int, metavar="N", help="tokens of each text (default: all)")
    add("--folder", metavar="DIR", help="where packs and logits lie meanwhile (default: the system's for temporary "
        "files)")  # fmt: skip
    add("--ram", metavar="SIZE", help="bound of an open model, as for generate")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads (default: the cores this process may use)",
    )
    add(
        "--json",
        action="store_true",
        help="one JSON object on stdout, with the sums of every window",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    # The engine is an extension module: --help and bad arguments must not need it.
    from mosaic_c.bench_quality import quality

    bar = tqdm(disable=None, leave=False, unit="window", file=sys.stderr)

    def progress(what: str, done: int, total: int) -> None:
        bar.total, bar.n = total, done
        bar.set_description(what)

    def row(report: Report) -> None:
        if not args.json:
            bar.clear()
            if len(report.runs) == 1:
                print(heading(report))
            print(line(report, report.runs[-1]), flush=True)

    try:
        report = quality(
            args.model, args.text, args.variant, args.window, args.tokens, args.folder, progress, row, ram=args.ram,
            threads=args.threads,
        )  # fmt: skip
    finally:
        bar.close()
    if args.json:
        print(json.dumps(asdict(report)))
    else:
        print("\n".join(tables(report)))
    return 0


def heading(r: Report) -> str:
    scored = sum(x.scored for x in r.texts)
    texts = ", ".join(f"{shown_path(x.name)} {x.tokens}" for x in r.texts)
    lines = [
        f"{shown_path(r.model)}{' (synthetic weights: what follows says nothing about text)' if r.synthetic else ''}",
        f"{len(r.windows)} windows of at most {r.window} tokens, {scored} predicted; tokens: {texts}",
        f"{'experts':10} {'dense':10} {'experts MB':>10} {'dense MB':>9} {'perplexity':>18} "
        f"{'change %':>15} {'KL, 1/1000 nat':>17} {'same first %':>14}",
    ]
    return "\n".join(lines)


def line(r: Report, x: Run) -> str:
    from mosaic_c.bench_quality import difference, mean

    counts = [n for _, n in r.windows]
    first = r.runs[0]
    nll, off = mean(x.nll, counts)
    ppl = pm(math.exp(nll), None if off is None else math.exp(nll) * off, 3)
    text = (
        f"{x.experts:10} {x.dense:10} {x.expert_bytes / 1e6:10.1f} {x.dense_bytes / 1e6:9.2f} "
        f"{ppl:>18}"
    )
    if x is first:
        return text
    change, error = difference(x.nll, first.nll, counts)
    # the error of exp(d) is exp(d) times that of d
    more = math.exp(change)
    change_text = pm(100 * (more - 1), None if error is None else 100 * more * error, 2)
    kl = pm(*(None if v is None else 1000 * v for v in mean(x.kl, counts)), 2)
    same = pm(*(None if v is None else 100 * v for v in mean(x.top1, counts)), 1)
    return f"{text} {change_text:>15} {kl:>17} {same:>14}"


def pm(value: float | None, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" +-{error:.{digits}f}")


def tables(r: Report) -> list[str]:
    """Behind the rows: KL by text, and the rule."""
    from mosaic_c.bench_quality import difference

    lines = []
    if len(r.texts) > 1 and len(r.runs) > 1:
        lines += ["", "KL by text, 1/1000 nat"]
        shown_names = [shown_path(x.name) for x in r.texts]
        widths = [max(len(x), 8) for x in shown_names]
        names = "".join(f" {x:>{w}}" for x, w in zip(shown_names, widths, strict=True))
        lines.append(f"{'experts':10} {'dense':10}{names}")
        for x in r.runs[1:]:
            values = []
            for i, text in enumerate(r.texts):
                kl = sum(v for v, (t, _) in zip(x.kl, r.windows, strict=True) if t == i)
                values.append(1000 * kl / text.scored)
            shown = "".join(f" {v:{w}.2f}" for v, w in zip(values, widths, strict=True))
            lines.append(f"{x.experts:10} {x.dense:10}{shown}")
    runs = {(x.experts, x.dense): x for x in r.runs}
    counts = [n for _, n in r.windows]
    pairs = []
    for experts in dict.fromkeys(x.experts for x in r.runs):
        mine = [x for x in r.runs if x.experts == experts and x.dense != "as it is"]
        base = runs.get((experts, "as it is"))
        pairs += [(x, base) for x in mine if base is not None and base is not r.runs[0]]
    if pairs:
        lines += ["", "KL that the dense matrices add to that of the experts, paired, 1/1000 nat"]
        for x, base in pairs:
            d, error = difference(x.kl, base.kl, counts)
            text = pm(1000 * d, None if error is None else 1000 * error, 2)
            lines.append(f"{x.experts:10} {x.dense:10} {text:>17}")
    return lines + [f"note: left out: {x}" for x in r.notes]
