"""Writes the folder of a recipe, as `pull` does, and with --check compares the engine with the dense model.

    python tools/smollm2_moe/build.py GGUF RECIPE FOLDER [--top-k N] [--check]

RECIPE may be `plain`: 32 experts in order of the neurons and routers of 0, of which all run: the dense model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mosaic_c.smollm2_moe import NEED, Recipe, Source, write


def plain(source: Source, experts: int = 32) -> Recipe:
    labels = np.full((source.layers, source.ffn), 255, np.uint8)
    routed = source.ffn // 2
    labels[:, routed:] = np.arange(routed) * experts // routed
    return Recipe(labels, np.zeros((source.layers, experts, source.hidden), np.float32), experts)


def check(gguf: str, folder: Path) -> None:
    """The engine's logits beside those of the dense model in float32."""
    import torch
    from reference import Dense, load_tokenizer

    import mosaic_c

    dense = Dense(gguf, torch.float32)
    text = "The city of Paris lies on the Seine. def add(a, b): return a + b. In 1984 there were 365 days."
    ids = load_tokenizer(dense.source).encode(text).ids
    want = dense.logits(torch.tensor([ids]))[0].numpy()
    with mosaic_c.open(folder, ctx=256, kv="f32") as model:
        got = model.session().forward(ids)
    worst = np.abs(got - want).max() / np.abs(want).max()
    same = (got.argmax(1) == want.argmax(1)).sum()
    print(
        f"{len(ids)} tokens: logits within {worst:.1e} of the largest, {same} of {len(ids)} likeliest tokens equal"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the folder of a recipe of smollm2-moe.")
    parser.add_argument("gguf")
    parser.add_argument("recipe")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    source = Source(Path(args.gguf))
    recipe = plain(source) if args.recipe == "plain" else Recipe.load(Path(args.recipe))
    args.folder.mkdir()
    with tqdm(total=NEED, unit="B", unit_scale=True) as bar:
        write(source, replace(recipe, top_k=args.top_k or recipe.top_k), args.folder, bar)
    if args.check:
        check(args.gguf, args.folder)


if __name__ == "__main__":
    main()
