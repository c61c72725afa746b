"""Options that every command which opens a model shares."""

from __future__ import annotations

import argparse
from typing import Any

from mosaic_c.errors import UsageError
from mosaic_c.modes import HOT_AFTER, HOT_WINDOW, IO_MODES, MODEL_POLICIES


def add_model_options(
    parser: argparse.ArgumentParser, required: bool = False, default: str = ""
) -> None:
    """--model and everything that says how it runs, with defaults in the help; default: what stands for no --model."""
    p = parser.add_argument
    p("--model", "-m", metavar="MODEL", required=required, help="folder of a Hugging Face checkpoint, or the "
      "name of a model: demo, smollm2-moe, ORG/NAME" + (f" (default: {default})" if default else ""))  # fmt: skip
    p("--ram", metavar="SIZE", help="bound of the whole process, such as 6G (default: what the system has "
      "available or the control group allows, less a quarter)")  # fmt: skip
    p("--ctx", type=int, metavar="N", help="tokens of context (default: the model's limit, at most 32768, "
      "or what fits)")  # fmt: skip
    p(
        "--threads",
        type=int,
        metavar="N",
        help="compute threads (default: the cores this process may use, at most 256)",
    )
    p("--io", choices=IO_MODES, default="auto", help="how experts are read: "
      "direct past the page cache, by io_uring, by pread, or mapped where all fit (default: %(default)s, the "
      "faster of direct and uring by a short measurement; pread where the file system refuses)")  # fmt: skip
    p("--policy", choices=MODEL_POLICIES, default="auto",
      help="which experts stay in memory (default: %(default)s)")  # fmt: skip
    p("--slots", type=int, metavar="N", help="experts in the cache, per layer for layer-lru (default: as many "
      "as the budget holds)")  # fmt: skip
    p(
        "--kv",
        choices=("bf16", "f32"),
        default="bf16",
        help="type of the KV cache (default: %(default)s)",
    )
    add_gpu_options(parser)
    p("--hot-after", type=int, metavar="N", help=f"calls in the last {HOT_WINDOW} tokens that an expert needs "
      f"beyond those of the one it replaces on the GPU, one less where one is free (default: {HOT_AFTER})")  # fmt: skip
    add_source_option(parser)


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    p = parser.add_argument
    p("--vram", metavar="SIZE", help="memory of the GPU for experts that are called often, such as 3.2G; 0: none "
      "(default: what is free there less a margin, none without a GPU)")  # fmt: skip
    p(
        "--gpu",
        type=int,
        default=0,
        metavar="INDEX",
        help="number of the GPU (default: %(default)s)",
    )


def add_source_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="HASH|DIR", help="refuse an expert pack that was made of anything else: "
      "the hash that `inspect` shows, 12 digits or more; another pack of the same source; or the source itself, all of "
      "which is read")  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How the next token is chosen; without them as generation_config.json says."""
    p = parser.add_argument
    sampled = " (default: generation_config.json)"
    p("--temp", type=float, metavar="T", help="temperature, 0 is greedy" + sampled)
    p("--top-k", type=int, metavar="K", help="keep the K likeliest tokens" + sampled)
    p("--top-p", type=float, metavar="P", help="keep the likeliest tokens of mass P" + sampled)
    p(
        "--min-p",
        type=float,
        metavar="P",
        help="keep tokens of at least P times the likeliest" + sampled,
    )
    p(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="divide the odds of seen tokens" + sampled,
    )
    p("--seed", type=int, metavar="S", help="same seed, same text (default: a fresh one, printed)")


def check_source(model: str, source: str | None) -> None:
    """For commands that open the model elsewhere."""
    if source is not None:
        from mosaic_c import origin
        from mosaic_c.checkpoint import Checkpoint

        origin.check(Checkpoint.open(model), source)


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of plan_model and open_model."""
    names = (
        "ram",
        "ctx",
        "threads",
        "io",
        "policy",
        "slots",
        "kv",
        "source",
        "vram",
        "hot_after",
        "gpu",
    )
    return {name: getattr(args, name) for name in names}


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers of an option such as "1,2,4"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{name}: expected whole numbers such as 1,2,4, got {text!r}") from None
