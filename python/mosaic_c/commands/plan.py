"""`plan`: what a model weighs, from its config alone; where every byte of a budget would go, from its
headers; before anything is loaded."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic_c.commands.options import add_model_options, model_options
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.footprint import Column, Footprint, measure
from mosaic_c.jsonfile import load, shown_path
from mosaic_c.limits import format_rate, format_size, parse_rate, parse_size
from mosaic_c.predict import Savings, savings, token_seconds

if TYPE_CHECKING:
    from mosaic_c.budget import MemoryPlan

HITS = (0.0, 0.5, 0.8, 0.9, 1.0)


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "plan",
        help="show what a model weighs and how it would use memory",
        description="With a config.json or its folder: what experts, resident part and state of the model "
        "weigh, and how fast a disk lets it be; no weights are needed. Where the folder has weights of a "
        "family that runs here, and with --model: every memory item under a budget, the smallest budget "
        "that runs, and whether this one does. Reads only configs and headers.",
    )
    p = parser.add_argument
    p(
        "config",
        metavar="CONFIG_OR_DIR",
        nargs="?",
        help="a config.json, a folder with one or a pulled name",
    )
    add_model_options(parser)
    p(
        "--disk",
        metavar="RATE",
        help="bytes a second that the disk gives, such as 3G (3 GB/s): predicts tokens a second",
    )
    p("--hit", metavar="RATES", help="shares of expert calls that a cache serves, for --disk (default: "
      + ",".join(f"{h:g}" for h in HITS) + ")")  # fmt: skip
    p("--memory", metavar="RATE", help="bytes a second that the processor reads from memory, such as 20G, for "
      "--disk (default: reads alone are predicted, a ceiling) and for the time of dense weights")  # fmt: skip
    p("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if (args.config is None) == (args.model is None):
        raise UsageError("expected either a config.json or a folder with one, or --model DIR")
    if args.model is not None:
        _unused(args, ("disk", "hit"), "go with plan CONFIG_OR_DIR, not with --model")
        rate = None if args.memory is None else parse_rate(args.memory, "--memory")
        memory = memory_plan(args.model, args)
        shown = memory_lines(memory, rate)
        print(json.dumps(memory_json(memory, rate)) if args.json else "\n".join(shown))
        return 0
    folder, footprint = read(args.config, args.kv)
    memory = None
    if folder is not None:
        try:
            memory = memory_plan(folder, args)
        except MosaicError as error:
            if error.code != "EUNSUPPORTED":
                raise
            note = f"no memory plan, it does not run here yet: {error}"
            footprint = replace(footprint, notes=(*footprint.notes, note))
    if memory is None:
        _unused(
            args,
            ("threads", "slots", "io", "policy", "source", "vram", "hot_after", "gpu"),
            "need weights of a family that runs here",
        )
    ctx = _ctx(args.ctx, footprint) if memory is None else memory.ctx
    ram = None if memory is not None or args.ram is None else parse_size(args.ram, "--ram")
    rates = _rates(args, footprint)
    if args.json:
        print(json.dumps(report(footprint, ctx, ram, rates, memory)))
        return 0
    lines = table(footprint, ctx, args.kv, ram)
    if rates:
        lines += ["", *prediction(footprint, *rates)]
    if memory is not None:
        lines += ["", *memory_lines(memory, rates and rates[2])]
    else:
        saved = footprint_savings(footprint, footprint.columns[0], ctx, ram)
        if saved is not None:
            lines += ["", *savings_lines(saved, rates and rates[2], footprint.columns[0].name)]
    print("\n".join([*lines, *(f"note: {note}" for note in footprint.notes)]))
    return 0


def read(path: str, kv: str) -> tuple[Path | None, Footprint]:
    """(folder that has weights or None, footprint) of a config.json or a folder with one."""
    from mosaic_c import families, pack
    from mosaic_c.checkpoint import MAX_CONFIG

    config = Path(path)
    folder = config if config.is_dir() else None
    if folder is not None:
        config = folder / "config.json"
    data = load(config, MAX_CONFIG)
    if (
        data.get("quantization_config") is None
        and (config.parent / "hf_quant_config.json").exists()
    ):
        data["quantization_config"] = {"quant_method": "modelopt"}  # said in that file instead
    weights = folder is not None and any(folder.glob("*.safetensors"))
    where, shipped = shown_path(config), None
    if (config.parent / pack.MANIFEST).exists():
        shipped = pack.read(config.parent, families.plan_for(data, where), files=False)
    return folder if weights else None, measure(data, where, kv, shipped)


def _unused(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        given = getattr(args, name)
        if given not in (None, "auto") and (name, given) != ("gpu", 0):
            options = [f"--{x.replace('_', '-')}" for x in names]
            raise UsageError(f"{options[names.index(name)]}: {', '.join(options)} {why}")


def _ctx(given: int | None, f: Footprint) -> int:
    """The context of a sequence: as given, or the default that a model is opened with."""
    from mosaic_c.budget import MAX_DEFAULT_CTX

    most = f.positions or 2**31
    if given is not None and not 1 <= given <= most:
        raise UsageError(f"--ctx {given} is out of range: expected 1 to {most} (the model's limit)")
    return given or min(most, MAX_DEFAULT_CTX)


Rates = tuple[int, tuple[float, ...], int | None]  # disk, hit rates, memory


def _rates(args: argparse.Namespace, f: Footprint) -> Rates | None:
    if args.disk is None:
        _unused(args, ("hit", "memory"), "need --disk RATE")
        return None
    disk, memory = parse_rate(args.disk, "--disk"), None
    if args.memory is not None:
        memory = parse_rate(args.memory, "--memory")
        if f.columns[0].active_bytes is None:
            raise UsageError(
                "--memory: what this model computes beside its experts is not known; leave it out"
            )
    return disk, HITS if args.hit is None else tuple(_hits(args.hit)), memory


def _hits(text: str) -> Iterator[float]:
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise UsageError(f"--hit {part!r}: expected numbers from 0 to 1, such as 0,0.5,0.9")
        yield value


# ---- the sizes -----------------------------------------------------------------------------------


def predict(c: Column, disk: int, hit: float, memory: int | None) -> float | None:
    """Tokens a second; None without a bound: nothing is read and the compute is not counted.

    What a token computes is what it reads from memory, its active resident part and its experts,
    without the KV cache.
    """
    compute = 0.0
    if memory is not None:
        assert c.active_bytes is not None
        compute = (c.active_bytes + c.token_bytes) / memory
    seconds = token_seconds((1 - hit) * c.token_bytes, disk, compute)
    return 1 / seconds if seconds > 0 else None


def cached(f: Footprint, c: Column, ctx: int, ram: int) -> int | None:
    """Experts that fit into ram beside everything else; negative: bytes that are missing."""
    smallest = f.smallest_budget(c, ctx)
    if smallest is None:
        return None
    room = ram - (smallest - c.token_bytes)
    return room if room < 0 else min(room // c.expert_bytes, f.experts)


def report(
    f: Footprint, ctx: int, ram: int | None, rates: Rates | None, memory: MemoryPlan | None
) -> dict[str, Any]:
    """Everything as JSON values; sizes are bytes, null what is not known."""
    columns = {}
    for c in f.columns:
        columns[c.name.replace(" ", "_")] = item = asdict(c)
        item["smallest_useful_budget"] = f.smallest_budget(c, ctx)
        if ram is not None:
            room = cached(f, c, ctx, ram)
            item["cached_experts"] = None if room is None else max(room, 0)
        if rates:
            disk, hits, speed = rates
            item["predicted"] = [
                {"hit": hit, "tokens_per_s": predict(c, disk, hit, speed)} for hit in hits
            ]
        saved = footprint_savings(f, c, ctx, ram)
        item["dense_in_vram"] = saved and savings_json(saved, rates and rates[2])
    return asdict(f) | {
        "columns": columns,
        "ctx": ctx,
        "ram": ram,
        "disk": rates and rates[0],
        "memory": rates and rates[2],
        "memory_plan": memory and memory_json(memory, rates and rates[2]),
    }


def table(f: Footprint, ctx: int, kv: str, ram: int | None) -> list[str]:
    """The footprint as lines: a row a quantity, a column a way to store the model."""
    rows = [("", [c.name for c in f.columns], "")]

    def row(name: str, values: list[int | None], note: str = "") -> None:
        rows.append((name, ["unknown" if v is None else human(v) for v in values], note))

    cs = f.columns
    rows.append(
        (
            "experts are",
            [c.expert for c in cs],
            f"{f.experts_a_layer} in each of {f.moe_layers} layers",
        )
    )
    rows.append(("one expert", [f"{c.expert_bytes:,}" for c in cs], "bytes"))
    row(
        "read a token at worst",
        [c.token_bytes for c in cs],
        f"{f.token_experts:,} experts, {f.top_k} a layer",
    )
    row("all experts", [c.all_experts_bytes for c in cs], f"{f.experts:,}")
    row("resident set", [c.resident_bytes for c in cs], "all but experts")
    row(
        "  of it kept as it is",
        [c.kept_bytes for c in cs],
        "BF16, F32: embedding, head, routers, norms",
    )
    row("disk", [c.disk_bytes for c in cs], "with multi-token prediction, without vision")
    budgets = [f.smallest_budget(c, ctx) for c in cs]
    rows.append(("smallest useful budget", ["unknown" if b is None else format_size(b) for b in budgets],
                 f"resident, state at {ctx} tokens, a token's experts"))  # fmt: skip
    if ram is not None:
        room = [cached(f, c, ctx, ram) for c in cs]
        texts = ["unknown" if n is None else "too small" if n < 0 else f"{n:,}" for n in room]
        rows.append((f"cached in {format_size(ram)}", texts, "experts"))
    widths = [max(len(r[1][i]) for r in rows) for i in range(len(cs))]
    wide = max(len(r[0]) for r in rows)
    lines = [
        f"{f.model_type}: {f.moe_layers} layers with {f.experts_a_layer} experts, {f.top_k} a token",
        "",
    ]
    for name, texts, note in rows:
        shown = "  ".join(f"{t:>{w}}" for t, w in zip(texts, widths, strict=True))
        lines.append(f"{name:<{wide}}  {shown}  {note}".rstrip())
    if f.kv_token_bytes is not None and f.state_bytes is not None:
        lines += ["", f"{'KV cache':<{wide}}  {f.kv_token_bytes:,.10g} bytes a token, {kv}"]
        lines.append(f"{'fixed state':<{wide}}  {f.state_bytes:,} bytes a sequence")
    return lines


def human(size: int) -> str:
    """Bytes in decimal units with four digits, as disks and download pages count them."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            value = size / scale
            return f"{value:.{max(0, 3 - int(math.log10(value)))}f} {unit}"
    return f"{size} B"


def prediction(f: Footprint, disk: int, hits: tuple[float, ...], memory: int | None) -> list[str]:
    rate = f"{format_rate(disk)} from disk"
    if memory is None:
        head = (
            f"tokens a second at {rate}: reads alone, a ceiling (--memory RATE counts compute too)"
        )
    else:
        head = f"tokens a second at {rate} and {format_rate(memory)} from memory"
    lines = [head, f"{'hit rate':<10}" + "".join(f"{c.name:>12}" for c in f.columns)]
    for hit in hits:
        values = [predict(c, disk, hit, memory) for c in f.columns]
        texts = ["no reads" if v is None else f"{v:.2f}" for v in values]
        lines.append(f"{hit:<10g}" + "".join(f"{t:>12}" for t in texts))
    return lines


# ---- what stays on the CPU -----------------------------------------------------------------------


def memory_savings(memory: MemoryPlan) -> Savings:
    size = {item.name: item.bytes for item in memory.items}
    held = memory.slots * memory.unit // memory.slab if memory.slab else 0
    return savings(
        size["dense weights"], size["KV cache"] + size["session state"], size["dense weights"],
        memory.token_experts * memory.slab, memory.slab, memory.experts - held,
    )  # fmt: skip


def footprint_savings(f: Footprint, c: Column, ctx: int, ram: int | None) -> Savings | None:
    """Of a column; None where the architecture is not known. The embedding is read by row and stays."""
    if c.active_bytes is None or f.kv_token_bytes is None or f.state_bytes is None:
        return None
    held = max((ram is not None and cached(f, c, ctx, ram)) or 0, 0)
    state = math.ceil(f.kv_token_bytes * ctx) + 2 * f.state_bytes
    return savings(
        c.active_bytes, state, c.active_bytes, c.token_bytes, c.expert_bytes, f.experts - held
    )


def savings_json(s: Savings, rate: int | None) -> dict[str, Any]:
    return asdict(s) | {"share": s.share, "token_s": None if rate is None else s.seconds(rate)}


def savings_lines(s: Savings, rate: int | None, column: str = "") -> list[str]:
    """column: which way to store the model the figures are of."""
    lines = [
        f"{column and f'{column}: '}attention, dense linears and KV stay on the CPU, with a GPU too: in VRAM they "
        f"would free {format_size(s.ram)} of RAM (dense {format_size(s.dense)}, KV and state {format_size(s.state)}), "
        f"room for {s.experts:,} more experts"
    ]
    text = f"dense weights are {100 * s.share:.0f} % of the bytes that a token computes with"
    if rate is not None:
        text += f": at {format_rate(rate)} from memory {1e3 * s.seconds(rate):.3g} ms of it, the most to be saved"
    return [*lines, text]


# ---- the memory of a checkpoint ------------------------------------------------------------------


def memory_plan(path: str | Path, args: argparse.Namespace) -> MemoryPlan:
    from mosaic_c.opening import plan_model

    tokenizer = None
    if (Path(path) / "tokenizer.json").is_file():  # so that it is measured, as in generate
        from mosaic_c.tokenizer import Tokenizer

        tokenizer = Tokenizer(path)
    return plan_model(path, **model_options(args), text=tokenizer is not None)[-1]


def memory_json(memory: MemoryPlan, rate: int | None = None) -> dict[str, Any]:
    saved = savings_json(memory_savings(memory), rate)
    return asdict(memory) | {"total": memory.total, "dense_in_vram": saved}


def memory_lines(memory: MemoryPlan, rate: int | None = None) -> list[str]:
    from mosaic_c import vram  # with the extension, which sizes of a config do not need

    lines = [
        f"{item.name:24} {format_size(item.bytes):>12}  {item.note}".rstrip()
        for item in memory.items
    ]
    lines += [
        f"{'total':24} {format_size(memory.total):>12}",
        f"{'budget':24} {format_size(memory.budget):>12}  {memory.reason}",
        f"{'smallest budget':24} {format_size(memory.floor):>12}",
        f"{'useful from':24} {format_size(memory.useful):>12}  all experts of one token stay cached",
        *([] if memory.tier is None else vram.lines(memory.tier)),
        *savings_lines(memory_savings(memory), rate),
        "fits" if memory.fits else f"does not fit: give --ram {memory.floor >> 20}M or more",
    ]
    return lines + [f"note: {warning}" for warning in memory.warnings]
