"""Teaches a recipe to do with fewer neurons: self-distillation of what a recipe can hold.

    python tools/smollm2_moe/distil.py GGUF RECIPE --text text.npz --out smollm2-moe.npz [--minutes 20]

The dense model is the teacher; the loss is the KL divergence of the cut's next-token distribution from its.
What learns: a factor of every channel of every norm. Routers and neurons stay.
"""

from __future__ import annotations

import argparse
import json
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
    p("--rate", type=float, default=3e-3)
    p("--batch", type=int, default=1, help="rows of 512 tokens a step")
    args = parser.parse_args()
    recipe, model = Recipe.load(Path(args.recipe)), Cut(args.gguf)
    factors = torch.ones(2 * len(model.layers) + 1, model.embed.shape[1], requires_grad=True)
    gen = torch.Generator().manual_seed(0)
    rows = torch.from_numpy(np.load(args.text)["training"]).long()
    rows = rows[torch.randperm(len(rows), generator=gen)]
    optimiser = torch.optim.Adam([factors], lr=args.rate, betas=(0.9, 0.98))
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
        with torch.no_grad():
            teacher = model.hidden(ids).flatten(0, 1)
        model.use(recipe)
        model.scale_norms(factors)
        loss = loss_of(model.hidden(ids).flatten(0, 1), teacher, model.embed)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([factors], 1.0)
        optimiser.step()
        seen += ids.numel()
        if step % 5 == 0:
            print(
                f"step {step}, {seen} tokens, {time.time() - start:.0f} s: KL {loss.item():.4f}",
                flush=True,
            )
        if step % 20 == 19:
            save(args, factors, seen)
    save(args, factors, seen)


def save(args: argparse.Namespace, factors: torch.Tensor, seen: int) -> None:
    """The recipe with the factors."""
    data = dict(np.load(args.recipe))
    taught = {"distilled_on_tokens": seen, "rate": args.rate, "rows": args.batch}
    data["about"] = np.array(json.dumps(json.loads(str(data["about"])) | taught))
    data["norms"] = factors.detach().half().numpy()
    np.savez_compressed(args.out, **data)


if __name__ == "__main__":
    main()
