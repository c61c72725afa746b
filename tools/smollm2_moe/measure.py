"""Perplexity of the dense model and of cuts of it, on text that no calibration saw.

python tools/smollm2_moe/measure.py GGUF RECIPE... --text text.npz [--top-k 4,8,16] [--choice router,first,random]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from reference import Cut, perplexity

from mosaic_c.smollm2_moe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of smollm2-moe.")
    p = parser.add_argument
    p("gguf")
    p("recipes", nargs="*", metavar="RECIPE")
    p("--text", required=True, help="npz of texts.py")
    p("--top-k", help="comma-separated (default: the recipe's)")
    p(
        "--choice",
        default="router",
        help="router, first (always the same experts), random; comma-separated",
    )
    p("--rows", type=int, help="of each text (default: all)")
    args = parser.parse_args()
    data = np.load(args.text)
    names = [n for n in data.files if n not in ("calibration", "training")]
    texts = {n: torch.from_numpy(data[n][: args.rows]).long() for n in names}
    model = Cut(args.gguf)

    def line(name: str) -> None:
        found = [f"{n} {perplexity(model, ids):.2f}" for n, ids in texts.items()]
        print(f"{name:44} {'  '.join(found)}", flush=True)

    line("dense")
    for path in args.recipes:
        recipe = Recipe.load(Path(path))
        for k in map(int, args.top_k.split(",")) if args.top_k else [recipe.top_k]:
            for choice in args.choice.split(","):
                model.use(replace(recipe, top_k=k), choice)
                active = recipe.shared + k * recipe.width
                line(f"{Path(path).stem} top-{k} of {recipe.experts}, {choice}, {active} neurons")


if __name__ == "__main__":
    main()
