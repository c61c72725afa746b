"""Tokens a second with more and more experts in VRAM, of one model in one run; part of check.sh.

    python tests/cuda/tokens.py MODEL [--tokens N] [--runs N] [--vram 0,1G,3.2G,all]

Each run is a process of its own, all experts in RAM or VRAM, sizes in turns; medians. The text must be the same
for all of them. MODEL: a folder, such as one of `synth` (then the routing is synthetic, and said so).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys


def run(model: str, vram: str, tokens: int) -> dict:
    command = [
        sys.executable, "-m", "mosaic_c", "generate", "-m", model, "--ids", "1,2,3,4,5,6,7,8", "-n", str(tokens),
        "--ignore-eos", "--temp", "0", "--json", "--quiet",
    ]  # fmt: skip
    command += [] if vram == "all" else ["--vram", vram]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tokens: --vram {vram}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vram", default="0,1G,3.2G,all", help="all: what the device has free")
    args = parser.parse_args()
    sizes = args.vram.split(",")
    got: dict[str, list[dict]] = {size: [] for size in sizes}
    for _ in range(args.runs):
        for size in sizes:
            got[size].append(run(args.model, size, args.tokens))
    texts = {json.dumps(r["tokens"]) for runs in got.values() for r in runs}
    print(f"{'--vram':>8} {'tok/s':>8} {'of 0':>6} {'on the GPU':>11} {'brought':>8} {'slots':>7}")
    base = statistics.median(r["stats"]["decode_tok_s"] for r in got[sizes[0]])
    for size, runs in got.items():
        s = [r["stats"] for r in runs]
        speed = statistics.median(x["decode_tok_s"] for x in s)
        calls = [x["hits"] + x["misses"] + x["gpu_hits"] for x in s]
        share = statistics.median(x["gpu_hits"] / c for x, c in zip(s, calls, strict=True))
        print(
            f"{size:>8} {speed:8.2f} {speed / base:6.2f} {100 * share:9.1f} % {s[-1]['gpu_promotions']:8d} "
            f"{s[-1]['gpu_slots']:7d}"
        )
    print(
        f"medians of {args.runs}; the text is {'the same' if len(texts) == 1 else 'NOT THE SAME'} for all"
    )
    return len(texts) != 1


if __name__ == "__main__":
    sys.exit(main())
