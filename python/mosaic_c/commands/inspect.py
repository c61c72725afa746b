"""`inspect`: what a checkpoint is and where its bytes are, from configs and headers alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mosaic_c import generation, origin
from mosaic_c.bind import CODE_NAMES, Located, Span, matrix_bytes, scale_bytes
from mosaic_c.checkpoint import MAX_CONFIG, Checkpoint
from mosaic_c.commands.options import add_source_option
from mosaic_c.errors import UsageError
from mosaic_c.jsonfile import load, shown_path
from mosaic_c.pack import Pack
from mosaic_c.plan import Attention, DeltaNet, Mlp, ModelPlan, Norm, Weight


def add_parser(sub: argparse._SubParsersAction) -> None:
    parser = sub.add_parser(
        "inspect",
        help="show what a checkpoint is and where its bytes are",
        description="Shows what a Hugging Face checkpoint folder holds. Reads configs and headers "
        "only, and refuses what would not run, with the reason.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default=argparse.SUPPRESS,
        help="checkpoint folder, or a pulled name",
    )
    parser.add_argument(
        "--model", metavar="PATH", default=argparse.SUPPRESS, help="the same, by name"
    )
    add_source_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = [
        x for x in (getattr(args, "path", None), getattr(args, "model", None)) if x is not None
    ]
    if len(given) != 1:
        raise UsageError(f"expected one checkpoint folder, got {len(given)}")
    checkpoint = Checkpoint.open(given[0])
    if args.source is not None:
        origin.check(checkpoint, args.source)
    report = describe(checkpoint, checkpoint.locate())
    print(json.dumps(report, indent=2) if args.json else "\n".join(table(report)))
    return 0


# ---- the report ----------------------------------------------------------------------------------

LABELS = {
    "embedding": "embedding",
    "lm_head": "output head",
    "attention": "attention",
    "linear_attention": "linear attention",
    "shared_experts": "shared experts",
    "dense_mlps": "dense MLPs",
    "routers": "routers",
    "norms": "norms",
    "scales": "scales of the above",
    "routed_experts": "routed experts",
    "expert_scales": "their scales",
}


@dataclass
class Part:
    """Tensors that do one job, an expert's matrices counted one by one in either layout.

    bytes: without FP8 scales, which are parts of their own.
    """

    tensors: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype -> bytes

    def add(self, tensors: int, dtype: str, size: int) -> None:
        self.tensors += tensors
        self.bytes += size
        self.dtypes[dtype] = self.dtypes.get(dtype, 0) + size


def describe(checkpoint: Checkpoint, located: Located) -> dict[str, Any]:
    """Everything that `inspect` shows, as JSON values.

    Sizes are bytes; parts and skipped tensors add up to tensor_bytes (ignored ones apart).
    """
    plan, block = located.plan, located.plan.weight_block
    parts = _parts(located)
    dtypes: dict[str, int] = {}
    for part in parts.values():
        for dtype, size in part.dtypes.items():
            dtypes[dtype] = dtypes.get(dtype, 0) + size
    recorded = _recorded(parts) if checkpoint.pack else (0, 0)
    skipped = {k: {"tensors": n, "bytes": size} for k, (n, size) in located.skipped.items()}
    return {
        "path": str(checkpoint.folder),
        "family": plan.family,
        "hidden": plan.hidden,
        "vocab": plan.vocab,
        "max_positions": plan.max_positions,
        "tied_embeddings": plan.head is None,
        "layers": _layers(plan),
        "attention": _attention(plan),
        "linear_attention": _delta(plan),
        "moe": _moe(located),
        "quantisation": f"fp8 {block}x{block}" if block else None,
        "records": _records(checkpoint.pack),
        "dtypes": dtypes,
        "parts": {k: {"tensors": p.tensors, "bytes": p.bytes, "dtypes": list(p.dtypes)}
                  for k, p in parts.items()},
        "skipped": skipped,
        "ignored": located.ignored,
        "tensors": len(checkpoint.tensors) + recorded[0],
        "tensor_bytes": int(checkpoint.tensors.nbytes.sum()) + recorded[1],
        "files": len(checkpoint.files),
        "file_bytes": sum(checkpoint.sizes),
        "tokenizer": (checkpoint.folder / "tokenizer.json").is_file(),
        "chat_template": _has_template(checkpoint.folder),
        "stop_ids": stop_ids(checkpoint),
    }  # fmt: skip


def _parts(located: Located) -> dict[str, Part]:
    parts = {name: Part() for name in LABELS}

    def add(name: str, weights: Iterable[Weight | None]) -> None:
        for weight in weights:
            if weight is None:
                continue
            span: Span = located.span(weight)
            parts[name].add(1, span.dtype, span.nbytes)
            if span.scale_dtype is not None:
                parts["scales"].add(1, span.scale_dtype, span.scale_nbytes)

    plan = located.plan
    add("embedding", [plan.embed])
    add("lm_head", [plan.head])
    add("norms", [plan.final_norm.weight])
    for layer in plan.layers:
        mixer, moe = layer.mixer, layer.moe
        kind = "attention" if isinstance(mixer, Attention) else "linear_attention"
        for block in (mixer, moe):
            values = list(vars(block).values())
            add("norms", [x.weight for x in values if isinstance(x, Norm)])
            weights = [x for x in values if isinstance(x, Weight)]
            add(kind if block is mixer else "routers", weights)
            for mlp in (x for x in values if isinstance(x, Mlp)):
                name = "shared_experts" if moe.experts else "dense_mlps"
                add(name, [mlp.gate, mlp.up, mlp.down])
    for experts in located.experts:
        _add_experts(parts, experts)
    return {k: p for k, p in parts.items() if p.tensors}


def _add_experts(parts: dict[str, Part], e: np.ndarray) -> None:
    """e: (count, 3) of TENSOR_DTYPE."""
    for code, dtype in enumerate(CODE_NAMES):
        mine = e["dtype"] == code
        if mine.any():
            size = int(matrix_bytes(e)[mine].sum())
            parts["routed_experts"].add(int(mine.sum()), dtype, size)
        mine = (e["scale_file"] >= 0) & (e["scale_dtype"] == code)
        if mine.any():
            size = int(scale_bytes(e)[mine].sum())
            parts["expert_scales"].add(int(mine.sum()), dtype, size)


def _recorded(parts: dict[str, Part]) -> tuple[int, int]:
    """(matrices and scale tensors, their bytes) that lie in records and no header counts."""
    mine = [parts[k] for k in ("routed_experts", "expert_scales") if k in parts]
    return sum(p.tensors for p in mine), sum(p.bytes for p in mine)


def _records(pack: Pack | None) -> dict[str, Any] | None:
    """How a pack stores its experts."""
    if pack is None:
        return None
    return {
        "format": pack.format,
        "dense": pack.dense_format or None,
        "record_bytes": sorted({x.record_bytes for x in pack.layers}),
        "files": len(pack.files),
        "bytes": sum(pack.sizes),
        "checksum": "crc32c",
        "source": pack.source,
    }


def _layers(plan: ModelPlan) -> dict[str, int]:
    return {
        "total": len(plan.layers),
        "attention": len(plan.attention_layers),
        "linear_attention": len(plan.delta_layers),
        "moe": len(plan.moe_layers),
        "dense": len(plan.layers) - len(plan.moe_layers),
    }


def _attention(plan: ModelPlan) -> dict[str, Any] | None:
    a: Attention | None = next(iter(plan.attention_layers), None)
    return a and {
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "rope_dim": a.rope_dim,
        "rope_theta": a.rope_theta,
        "output_gate": a.gate,
        "biases": any((a.q_bias, a.k_bias, a.v_bias, a.o_bias)),
    }


def _delta(plan: ModelPlan) -> dict[str, Any] | None:
    d: DeltaNet | None = next(iter(plan.delta_layers), None)
    return d and {
        "k_heads": d.k_heads,
        "v_heads": d.v_heads,
        "key_dim": d.dk,
        "value_dim": d.dv,
        "conv_kernel": d.kernel,
    }


def _moe(located: Located) -> dict[str, Any] | None:
    moe = next(iter(located.plan.moe_layers), None)
    if moe is None or moe.experts is None:
        return None
    size = np.zeros(0, np.int64)
    for e in located.experts:
        size = np.append(size, matrix_bytes(e).sum(axis=1))
    return {
        "experts": moe.experts.count,
        "top_k": moe.top_k,
        "expert_width": moe.experts.width,
        "shared_width": moe.shared.width if moe.shared else 0,
        "renormalise": moe.renormalise,
        "experts_in_all": len(size),
        "largest_expert_bytes": int(size.max()),
        "smallest_expert_bytes": int(size.min()),
    }


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and load(config, MAX_CONFIG).get("chat_template") is not None


def stop_ids(checkpoint: Checkpoint) -> list[int]:
    """The ids that end a text, the tokenizer's eos_token found without loading the tokenizer."""
    ids = generation.stop_ids(checkpoint.generation_config, checkpoint.config)
    path = checkpoint.folder / "tokenizer_config.json"
    if path.is_file():
        config = load(path, MAX_CONFIG)
        eos, added = config.get("eos_token"), config.get("added_tokens_decoder")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(text, str) and isinstance(added, dict):
            for key, token in added.items():
                same = isinstance(token, dict) and token.get("content") == text
                if same and key.isdecimal() and len(key) < 11:
                    ids.add(int(key))
    return sorted(ids)


# ---- as text -------------------------------------------------------------------------------------


def human(size: int) -> str:
    """Bytes in decimal units, as disks and download pages count them."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def table(r: dict[str, Any]) -> list[str]:
    """The report as lines."""
    lines = [shown_path(r["path"]), "", *_pairs(_facts(r)), ""]
    rows = [("part", "count", "size", "dtype")]
    for name, p in r["parts"].items():
        rows.append((LABELS[name], f"{p['tensors']}", human(p["bytes"]), ", ".join(p["dtypes"])))
    for prefix, s in r["skipped"].items():
        rows.append((f"{prefix}* (not used)", f"{s['tensors']}", human(s["bytes"]), ""))
    rows.append(("total", "", human(r["tensor_bytes"]), f"{r['tensors']} tensors in the files"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, tensors, size, dtype in rows:
        line = f"{name:<{widths[0]}}  {tensors:>{widths[1]}}  {size:>{widths[2]}}  {dtype}"
        lines.append(line.rstrip())
    return lines


def _facts(r: dict[str, Any]) -> list[tuple[str, str]]:
    n, a, d, m = r["layers"], r["attention"], r["linear_attention"], r["moe"]
    kinds = [f"{n['attention']} attention"] if n["attention"] else []
    kinds += [f"{n['linear_attention']} linear attention"] if n["linear_attention"] else []
    kinds += [f"{n['moe']} with experts"] + ([f"{n['dense']} dense"] if n["dense"] else [])
    facts = [
        ("family", r["family"]),
        ("layers", f"{n['total']} ({', '.join(kinds)})"),
        ("hidden", f"{r['hidden']}"),
        ("vocabulary", f"{r['vocab']}" + (", head tied" if r["tied_embeddings"] else "")),
        ("context", f"{r['max_positions']} tokens"),
    ]
    if a:
        extra = (", output gate" if a["output_gate"] else "") + (", biases" if a["biases"] else "")
        facts.append(
            ("attention", f"{a['heads']} heads, {a['kv_heads']} key/value, of {a['head_dim']}; "
             f"rope {a['rope_dim']} dims, theta {a['rope_theta']:g}{extra}")
        )  # fmt: skip
    if d:
        facts.append(
            ("linear attention", f"{d['k_heads']} key heads of {d['key_dim']}, {d['v_heads']} "
             f"value heads of {d['value_dim']}, conv {d['conv_kernel']}")
        )  # fmt: skip
    if m:
        low, high = m["smallest_expert_bytes"], m["largest_expert_bytes"]
        size = human(high) if low == high else f"{human(low)} to {human(high)}"
        shared = f", shared expert of width {m['shared_width']}" if m["shared_width"] else ""
        facts.append(
            ("experts", f"{m['experts']} a layer, top-{m['top_k']}, width {m['expert_width']}"
             f"{shared}; {m['experts_in_all']} in all, {size} each")
        )  # fmt: skip
    if r["records"]:
        x = r["records"]
        sizes = " or ".join(f"{n}" for n in x["record_bytes"])
        facts.append(
            ("expert records", f"{x['format']}, {sizes} bytes each with scales, CRC-32C, "
             f"{x['files']} file(s)" + (", synthetic" if x["source"].get("synthetic") else ""))
        )  # fmt: skip
        if x["dense"]:
            facts.append(("dense matrices", f"{x['dense']}, CRC-32C"))
        if "sha256" in x["source"]:
            facts.append(("made of", f"sha256 {x['source']['sha256']}"))
    facts += [
        ("quantisation", r["quantisation"] or "none"),
        ("files", f"{r['files']}, {human(r['file_bytes'])}"),
        ("tokenizer", "yes" if r["tokenizer"] else "none (token ids only)"),
        ("chat template", "yes" if r["chat_template"] else "none"),
        ("stop ids", ", ".join(map(str, r["stop_ids"])) or "none"),
    ]
    if r["ignored"]:
        facts.append(("ignored", f"{len(r['ignored'])} tensors that are computed instead"))
    return facts


def _pairs(facts: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {text}" for name, text in facts]
