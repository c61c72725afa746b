"""`doctor`: what this machine, this installation and a folder mean for running models, and what to do."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mosaic_c.doctor import Finding


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "doctor",
        help="check this machine, this installation and a folder",
        description="Looks at the processor, memory and its limits, the installation, and at the disk and the model "
        "of a folder, measures reads there for a second, and says what to do. Changes nothing: where the "
        "folder holds no large file of weights, a temporary one without a name is written first, for a second or "
        "until it has 256 MiB. Exit status 1 when there is an error.",
    )
    parser.add_argument(
        "path", nargs="?", default=".", metavar="PATH", help="a model's folder or any (default: the current one)"
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mosaic_c.doctor import examine, report

    findings = examine(args.path)
    result = report(findings)
    print(json.dumps(result) if args.json else "\n".join(table(findings, result["counts"])))
    return 1 if result["counts"]["error"] else 0


def table(findings: list[Finding], counts: dict[str, Any]) -> list[str]:
    width = max(len(f.topic) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.level:8} {f.topic:{width}}  {f.text}")
        if f.advice:
            lines.append(f"{'':8} {'':{width}}  -> {f.advice}")
    lines.append(", ".join(f"{n} {level}" for level, n in counts.items()))
    return lines
