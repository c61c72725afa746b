"""Tokens a second with more and more experts in VRAM, of one model in one run; part of check.sh.

    python tests/cuda/tokens.py MODEL [--tokens N] [--warm N] [--runs N] [--vram 0,1G,3.2G,all]

Each run is a process of its own: greedy decode, of which the last N tokens count, after enough to fill both caches.
Sizes in turns, medians. The text must be the same for all. MODEL: a folder, such as one of `synth`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def one(folder: str, vram: str, warm: int, tokens: int) -> dict:
    """Counters and speed of the last tokens of a run, and its text."""
    import mosaic_c

    with mosaic_c.open(folder, vram=None if vram == "all" else vram) as model:
        session, logits, text = model.session(), None, []
        for count in (warm, tokens):
            before, started = model.stats(), time.perf_counter()
            for _ in range(count):
                text.append(1 if logits is None else int(logits.argmax()))
                logits = session.forward([text[-1]], last=True)
            seconds, after = time.perf_counter() - started, model.stats()
        names = ("hits", "misses", "gpu_hits", "gpu_promotions")
        found = {name: getattr(after, name) - getattr(before, name) for name in names}
        label = "synthetic" if any("synthetic" in key for key in model.config) else ""
        return found | {
            "tok_s": tokens / seconds, "slots": after.gpu_slots, "text": text, "note": after.gpu_note, "label": label,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warm", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vram", default="0,1G,3.2G,all", help="all: what the device has free")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(one(args.model, args.one, args.warm, args.tokens)))
        return 0
    sizes = args.vram.split(",")
    got: dict[str, list[dict]] = {size: [] for size in sizes}
    for _ in range(args.runs):
        for size in sizes:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", size]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"tokens: vram {size}: {done.stderr.strip().splitlines()[-1]}")
            got[size].append(json.loads(done.stdout))
    runs = [r for each in got.values() for r in each]
    same = len({json.dumps(r["text"]) for r in runs}) == 1
    for note in {r["note"] for r in runs} - {""}:
        print(f"note: {note}")
    middle = {size: statistics.median(r["tok_s"] for r in each) for size, each in got.items()}
    print(
        f"{'vram':>8} {'tok/s':>8} {'of 0':>6} {'on the GPU':>11} {'read':>7} {'brought':>8} {'slots':>7}"
    )
    for size, each in got.items():
        last = each[-1]
        calls = max(last["hits"] + last["misses"] + last["gpu_hits"], 1)
        print(
            f"{size:>8} {middle[size]:8.2f} {middle[size] / middle[sizes[0]]:6.2f} "
            f"{100 * last['gpu_hits'] / calls:9.1f} % {100 * last['misses'] / calls:5.1f} % "
            f"{last['gpu_promotions']:8d} {last['slots']:7d}"
        )
    label = f"{runs[0]['label']}; " if runs[0]["label"] else ""
    print(
        f"{label}medians of {args.runs}, {args.tokens} tokens after {args.warm}; the text is "
        f"{'the same' if same else 'NOT THE SAME'} for all"
    )
    return not same


if __name__ == "__main__":
    sys.exit(main())
