"""Teaches a recipe to do with fewer neurons: self-distillation of what a recipe can hold.

    python tools/smollm2_moe/distil.py GGUF RECIPE --text text.npz --out smollm2-moe.npz [--minutes 20]

The dense model is the teacher; the loss is the KL divergence of the cut's next-token distribution from its.
What learns: the weights of all norms and a correction of rank R of every down projection. Routers and neurons stay.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from reference import Cut

from mosaic_c.smollm2_moe import Recipe


def loss_of(student: torch.Tensor, teacher: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of the distributions that two last hidden states (tokens, hidden) give."""
    with torch.no_grad():
        log_t = F.linear(teacher, embed).float().log_softmax(-1)
    log_s = F.linear(student, embed).float().log_softmax(-1)
    return F.kl_div(log_s, log_t, log_target=True, reduction="batchmean")


def main() -> None:
    parser = argparse.ArgumentParser(description="Distils smollm2-moe.")
    p = parser.add_argument
    p("gguf")
    p("recipe")
    p("--text", required=True, help="npz of texts.py")
    p("--out", required=True)
    p("--minutes", type=float, default=20.0)
    p("--rate", type=float, default=2e-3)
    p("--rank", type=int, default=6)
    p("--batch", type=int, default=2)
    args = parser.parse_args()
    recipe, model = Recipe.load(Path(args.recipe)), Cut(args.gguf)
    layers, hidden, ffn = len(model.layers), model.embed.shape[1], recipe.labels.shape[1]
    gen = torch.Generator().manual_seed(0)
    learnt = {
        "left": torch.randn(layers, args.rank, hidden, generator=gen) * 0.02,
        "right": torch.zeros(layers, args.rank, ffn),
        "norms": torch.ones(2 * layers + 1, hidden),
    }
    for x in learnt.values():
        x.requires_grad_()
    rows = torch.from_numpy(np.load(args.text)["training"]).long()
    rows = rows[torch.randperm(len(rows), generator=gen)]
    optimiser = torch.optim.Adam(list(learnt.values()), lr=args.rate, betas=(0.9, 0.98))
    start, seen = time.time(), 0
    for step in range(10**9):
        share = (time.time() - start) / (60 * args.minutes)
        if share >= 1:
            break
        for group in optimiser.param_groups:  # warm up, then a half cosine
            group["lr"] = (
                args.rate * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * share))
            )
        at = step * args.batch % (len(rows) - args.batch + 1)
        ids = rows[at : at + args.batch]
        model.use(None)
        model.correct(None)
        with torch.no_grad():
            teacher = model.hidden(ids).flatten(0, 1)
        model.use(recipe)
        model.correct(learnt)
        loss = loss_of(model.hidden(ids).flatten(0, 1), teacher, model.embed)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(learnt.values()), 1.0)
        optimiser.step()
        seen += ids.numel()
        if step % 5 == 0:
            print(
                f"step {step}, {seen} tokens, {time.time() - start:.0f} s: KL {loss.item():.4f}",
                flush=True,
            )
        if step % 20 == 19:
            save(args.out, args.recipe, learnt)
    save(args.out, args.recipe, learnt)


def save(out: str, recipe: str, learnt: dict[str, torch.Tensor]) -> None:
    """The recipe with what was learnt: the correction as int8 with a scale for each row, norms as factors."""
    data = dict(np.load(recipe))
    for name in ("left", "right"):
        x = learnt[name].detach()
        scale = x.abs().amax(2) / 127 + 1e-12  # (layers, rank)
        data[name] = (x / scale[:, :, None]).round().to(torch.int8).numpy()
        data[f"{name}_scale"] = scale.numpy()
    data["norms"] = learnt["norms"].detach().half().numpy()
    np.savez_compressed(out, **data)


if __name__ == "__main__":
    main()
