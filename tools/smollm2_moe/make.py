"""Makes the recipe: which neurons go together, and the routers.

    python tools/smollm2_moe/make.py GGUF --text text.npz --out smollm2-moe.npz --shared 1024 --experts 32 --top-k 12

Runs the dense model over the calibration text, keeps the input of every MLP, and then for each layer: the neurons that
give the most on average are the shared expert; the others are put into balanced clusters of neurons that are active
together; the router of a cluster is the ridge regression of the size of its output on the input.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from reference import Dense

SHARED = 255
RIDGE = 3e-3  # of the mean diagonal
SPREAD = 1e-3  # standard deviation of router logits: weights within a thousandth of 1/E, order kept


@torch.no_grad()
def inputs(model: Dense, ids: torch.Tensor, batch: int = 4) -> list[torch.Tensor]:
    """The input of every MLP, (tokens, hidden) a layer."""
    kept: list[list[torch.Tensor]] = [[] for _ in model.layers]
    plain = type(model).mlp

    def mlp(i: int, x: torch.Tensor) -> torch.Tensor:
        kept[i].append(x.reshape(-1, x.shape[-1]))
        return plain(model, i, x)

    model.mlp = mlp
    try:
        for rows in ids.split(batch):
            model.hidden(rows)
    finally:
        del model.mlp
    return [torch.cat(x) for x in kept]


def clusters(sizes: np.ndarray, count: int, rounds: int = 12) -> np.ndarray:
    """sizes (tokens, neurons) >= 0 -> the cluster of each neuron, all equally large."""
    a = np.sqrt(sizes).T
    a = a - a.mean(1, keepdims=True)
    rng = np.random.default_rng(0)
    a = a @ rng.normal(size=(a.shape[1], 256)).astype(np.float32)  # keeps angles
    a /= np.linalg.norm(a, axis=1, keepdims=True) + 1e-12
    room = len(a) // count
    centre = a[[0]]  # the next one is always far from all others
    for _ in range(count - 1):
        far = np.maximum(1 - (a @ centre.T).max(1), 1e-6) ** 2
        centre = np.vstack([centre, a[rng.choice(len(a), p=far / far.sum())]])
    best, of = -np.inf, np.zeros(len(a), int)
    for _ in range(rounds):
        likeness = a @ centre.T
        now = _balanced(likeness, room)
        total = likeness[np.arange(len(a)), now].sum()
        if total > best:
            best, of = total, now
        centre = np.stack([a[now == e].mean(0) for e in range(count)])
        centre /= np.linalg.norm(centre, axis=1, keepdims=True)
    return of


def _balanced(likeness: np.ndarray, room: int) -> np.ndarray:
    """The cluster of each row: prices that rise where too many want to be, then who loses most goes first."""
    count = likeness.shape[1]
    price = np.zeros(count, np.float32)
    for step in np.geomspace(0.05, 0.002, 200):
        wanted = np.bincount((likeness - price).argmax(1), minlength=count)
        price += step * likeness.std() * (wanted - room) / room
    net = likeness - price
    ranked = np.sort(net, 1)
    left, out = np.full(count, room), np.zeros(len(net), int)
    for j in np.argsort(ranked[:, -2] - ranked[:, -1]):
        out[j] = np.where(left > 0, net[j], -np.inf).argmax()
        left[out[j]] -= 1
    return out


@torch.no_grad()
def layer(
    model: Dense, i: int, x: torch.Tensor, shared: int, experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """(labels, router rows in float32) of a layer, from its inputs."""
    down = model.layers[i]["down"].float()
    h = model.neurons(i, x).float()
    size = h.abs() * down.norm(dim=0)
    order = size.pow(2).mean(0).argsort(descending=True)
    routed = order[shared:]
    of = torch.from_numpy(clusters(size[:4096, routed].numpy(), experts))
    share = size[:, routed].pow(2).mean(0)
    # experts by what they give on average: the first ones are what a fixed choice would take
    rank = torch.stack([share[of == e].sum() for e in range(experts)]).argsort(descending=True)
    new = torch.empty_like(rank).scatter_(0, rank, torch.arange(experts))
    of = new[of]
    labels = np.full(h.shape[1], SHARED, np.uint8)
    labels[routed.numpy()] = of.numpy()
    members = routed[of.argsort(stable=True)].view(experts, -1)
    d = down[:, members].permute(1, 0, 2)  # (experts, hidden, width)
    hs = h[:, members].permute(1, 0, 2)  # (experts, tokens, width)
    target = (
        ((hs @ (d.transpose(1, 2) @ d)) * hs).sum(-1).clamp_min(0).sqrt().T
    )  # (tokens, experts)
    target = target - target.mean(1, keepdim=True)  # a softmax does not see what all experts share
    x = x.float()
    gram = x.T @ x
    gram += torch.eye(len(gram)) * gram.diagonal().mean() * RIDGE
    router = torch.linalg.solve(gram, x.T @ target).T
    router *= SPREAD / (x @ router.T).std()
    return labels, router.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the recipe of smollm2-moe.")
    p = parser.add_argument
    p("gguf")
    p("--text", required=True, help="npz of texts.py")
    p("--out", required=True)
    p("--inputs", help="file that keeps the inputs of the MLPs for the next variant")
    p("--shared", type=int, default=1024)
    p("--experts", type=int, default=32)
    p("--top-k", type=int, default=12)
    args = parser.parse_args()
    model, start = Dense(args.gguf), time.time()
    if args.inputs and Path(args.inputs).exists():
        xs = torch.load(args.inputs)
    else:
        xs = inputs(model, torch.from_numpy(np.load(args.text)["calibration"]).long())
        if args.inputs:
            torch.save(xs, args.inputs)
    print(f"{len(xs[0])} tokens, {time.time() - start:.0f} s", flush=True)
    made = [layer(model, i, x, args.shared, args.experts) for i, x in enumerate(xs)]
    router = np.stack([x[1] for x in made])
    scale = np.abs(router).max(2) / 127
    about = {"model": "SmolLM2-135M-Instruct", "calibrated_on_tokens": len(xs[0])}
    np.savez_compressed(
        args.out,
        about=json.dumps(about), labels=np.stack([x[0] for x in made]), router_scale=scale.astype(np.float32),
        router=np.rint(router / scale[:, :, None]).astype(np.int8), top_k=args.top_k,
    )  # fmt: skip
    size = Path(args.out).stat().st_size
    print(f"{args.out}: {size} bytes, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
