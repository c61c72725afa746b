"""`generate`: continues a prompt, streaming to stdout."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mosaic_c.commands.options import add_model_options, add_sampling_options, model_options
from mosaic_c.commands.report import progress_bar, say, say_values, written
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.jsonfile import check_writable
from mosaic_c.names import DEMO, demo_folder

MAX_PROMPT = 8 << 20  # bytes read from stdin; the longest context is some 4 MB of text


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and streams the text to stdout. With a model that has a chat template "
        "the prompt is a user's message, unless --raw.",
    )
    p = parser.add_argument
    p("prompt", nargs="?", metavar="PROMPT", help="the text; - or nothing: read from stdin")
    add_model_options(parser, default=DEMO)
    p("-n", "--max-new-tokens", type=int, metavar="N", help="tokens to generate (default: until a stop token "
      "or the end of the context)")  # fmt: skip
    add_sampling_options(parser)
    p(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    p("--ignore-eos", action="store_true", help="go on past stop tokens")
    p("--raw", action="store_true", help="no chat template: continue the text as it is")
    p("--ids", metavar="I,J,...", help="token ids in place of a text; needs no tokenizer")
    p("--trace", metavar="FILE", help="record every layer's routing, for simulate")
    p("--isa", metavar="NAME", help="kernel set (default: the best of this CPU)")
    p("--stats", action="store_true", help="statistics and what takes memory, on stderr at the end")
    p("--json", action="store_true", help="one JSON object on stdout at the end, nothing streamed")
    p("--verbose", "-v", action="store_true", help="every effective value on stderr")
    p("--quiet", "-q", action="store_true", help="no progress bars, no note of the default model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mosaic_c.opening import open_model
    from mosaic_c.trace import TraceWriter

    ids = _parse_ids(args.ids) if args.ids is not None else None
    if ids is not None and args.prompt is not None:
        raise UsageError("give PROMPT or --ids, not both")
    text = _read_prompt(args.prompt) if ids is None else ""
    if ids is None and not text:
        raise UsageError("the prompt is empty: expected at least one character")
    if args.trace is not None:
        check_writable(args.trace)
    folder = Path(args.model) if args.model is not None else demo_folder()
    if args.model is None and not args.quiet:
        say("no --model: the small one that comes with mosaic_c tells stories")
    tokenizer = None
    if (
        folder / "tokenizer.json"
    ).is_file():  # before the budget is divided, so that it is measured
        from mosaic_c.tokenizer import Tokenizer

        tokenizer = Tokenizer(folder)
    with progress_bar(args, "loading", "layers") as bar:
        model = open_model(
            folder,
            isa=args.isa,
            on_load=bar,
            tokenizer=tokenizer,
            **model_options(args),
        )
    with model:
        for note in (*model.memory.warnings, *model.stats().notes()):
            say(f"note: {note}")
        if ids is None:
            ids = _encode(tokenizer, folder, text, args.raw, model.ctx)
        if args.verbose:
            say_values(model)
        if args.trace is None:
            return _generate(args, model, ids)
        moe = model.plan.moe_layers
        if not moe:
            raise UsageError("--trace: the model has no routed experts")
        top_k = max(m.top_k for m in moe)
        count = max(m.experts.count for m in moe)
        with TraceWriter(args.trace, len(moe), count, top_k) as model.trace:
            return _generate(args, model, ids)


def _generate(args: argparse.Namespace, model: Any, ids: Sequence[int]) -> int:
    started = time.perf_counter()
    pieces: list[Any] = []
    status = 0
    with progress_bar(args, "prompt", "tokens", model, len(ids)) as bar:

        def note(text: str) -> None:
            # streamed text is in the middle of a line
            cut = bool(pieces) and not args.json and sys.stdout.isatty()
            bar.say(f"{chr(10) * cut}note: {text}")

        model.on_note = note
        out = model.generate(
            ids, max_new_tokens=args.max_new_tokens, temperature=args.temp, top_k=args.top_k,
            top_p=args.top_p, min_p=args.min_p, repetition_penalty=args.repetition_penalty, seed=args.seed,
            stop=args.stop, ignore_eos=args.ignore_eos, progress=bar,
        )  # fmt: skip
        for name in out.sampling.ignored:
            say(f"note: {name} has no effect here")
        if args.max_new_tokens is not None and out.limit < args.max_new_tokens:
            say(
                f"note: -n {args.max_new_tokens} is more than the context of {model.ctx} has room for: {out.limit}"
            )
        if not out.sampling.greedy:
            say(f"seed {out.sampling.seed}")
        elif args.verbose:
            say("greedy")
        try:
            for piece in out:
                if not pieces:
                    bar.close()
                pieces.append(piece)
                if not args.json:
                    written(sys.stdout, piece.text)
        except KeyboardInterrupt:
            status = 130
    text = "".join(p.text for p in pieces)
    stats = model.stats()
    if args.json:
        result = {
            "text": text,
            "tokens": [p.token for p in pieces],
            "logprobs": [p.logprob for p in pieces],
            "prompt_tokens": len(ids),
            "finish_reason": "interrupted" if status else out.finish_reason,
            "seed": None if out.sampling.greedy else out.sampling.seed,
            "seconds": time.perf_counter() - started,
            "stats": asdict(stats),
            "memory": model.memory_table().json(),
        }
        print(json.dumps(result))
    elif pieces:
        if model.has_tokenizer:
            print("" if text.endswith("\n") else "\n", end="")
        else:
            print(" ".join(str(p.token) for p in pieces))
    if args.stats:
        for line in (*stats.lines(), "", *model.memory_table().lines()):
            say(line)
    if status:
        say("interrupted")
    return status


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, or pipe it in, or - to type it")
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT + 1)
        if len(data) > MAX_PROMPT:
            raise MosaicError(
                f"stdin: expected a prompt of at most {MAX_PROMPT} bytes, got more", "ECONTEXT"
            )
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MosaicError(f"stdin: byte {error.start} is not UTF-8", "EFORMAT") from None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--ids: expected integers separated by commas, got {text!r}") from None


def _encode(tokenizer: Any, folder: Path, text: str, raw: bool, room: int) -> list[int]:
    if tokenizer is None:
        raise MosaicError(
            f"{folder}: no tokenizer.json, so no text: give token ids with --ids", "ENOENT"
        )
    from mosaic_c.chat import encode_chat
    from mosaic_c.template import chat_template
    from mosaic_c.tokenizer import check_fits

    check_fits(tokenizer, text, room)
    if raw or chat_template(tokenizer.folder, tokenizer.config) is None:
        return tokenizer.encode(text)
    return encode_chat(tokenizer, [{"role": "user", "content": text}])
