"""Trains the demo model; goes on from the last checkpoint when there is one.

    python train.py RUN --steps 4000 --decay-from 2800

RUN gets tokenizer.json, state.pt (weights, optimizers, step) and log.jsonl. Each worker is a process of one thread,
which averages gradients with the others: two of them are faster than one with two threads, and a busy core slows them
in proportion. The learning rate rises for 100 steps, stays, and falls in a line to zero from --decay-from on; from
there on the forward pass sees weights as FP8, so that the model learns to live with it. The steps may be changed when
a run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from corpus import ROWS, WORKERS, Packer, train_tokenizer
from net import Net, Round, Shape
from tokenizers import Tokenizer
from torch import Tensor, nn

WARMUP, BALANCE = 100, 0.01


class Muon:
    """Muon (Jordan et al. 2024): momentum, made orthogonal by five Newton-Schulz steps; stacks of matrices too."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05
    ):
        self.params, self.lr, self.momentum, self.decay = params, lr, momentum, decay
        self.state = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        lr = self.lr * scale
        for p, m in zip(self.params, self.state, strict=True):
            m.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(p.grad.lerp(m, self.momentum))
            p.mul_(1 - lr * self.decay).add_(
                update, alpha=-lr * max(1, p.shape[-2] / p.shape[-1]) ** 0.5
            )


def orthogonal(g: Tensor) -> Tensor:
    x = g.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x if wide else x.mT).to(g.dtype)


def rate(step: int, steps: int, decay_from: int) -> float:
    fall = (steps - step) / max(steps - decay_from, 1)
    return min(1.0, (step + 1) / WARMUP, max(fall, 0.0))


def loss_of(net: Net, ids: Tensor, weight: Tensor) -> Tensor:
    logits = net.head(net(ids[:, :-1], torch.bfloat16)).flatten(0, 1)
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    weight = weight[:, 1:].flatten()
    return (losses * weight).sum() / weight.sum()


def work(worker: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=worker, world_size=WORKERS)
    run: Path = args.run
    packer = Packer(Tokenizer.from_file(str(run / "tokenizer.json")), **ROWS)
    torch.manual_seed(ROWS["seed"])
    net = Net(Shape())
    matrices, others = [], []
    for name, p in net.named_parameters():
        muon = p.dim() >= 2 and not any(
            part in name
            for part in ("embed", "conv1d", "shared_expert_gate", "in_proj_a", "in_proj_b")
        )
        (matrices if muon else others).append(p)
    muon = Muon(matrices, args.lr)
    adam = torch.optim.AdamW(others, args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    step = 0
    if (run / "state.pt").exists():
        state = torch.load(run / "state.pt")
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])
        muon.state = state["muon"]
        step = state["step"]
    started, seen = time.time(), 0
    while step < args.steps:
        Round.on = step >= args.decay_from
        ids, weight = packer.batch(step, worker)
        loss = loss_of(net, torch.from_numpy(ids), torch.from_numpy(weight))
        (loss + BALANCE * net.balance()).backward()
        grads = torch.cat([p.grad.flatten() for p in net.parameters()] + [loss.detach().reshape(1)])
        dist.all_reduce(grads)
        grads /= WORKERS
        at = 0
        for p in net.parameters():
            p.grad.copy_(grads[at : at + p.numel()].view_as(p))
            at += p.numel()
        norm = nn.utils.clip_grad_norm_(others, 1.0)
        scale = rate(step, args.steps, args.decay_from)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * scale
        adam.step()
        muon.step(scale)
        net.zero_grad()
        step += 1
        seen += WORKERS * ROWS["rows"] * ROWS["length"]
        if worker == 0 and (step % 20 == 0 or step == args.steps):
            line = {
                "step": step, "loss": round(float(grads[-1]), 4), "balance": round(float(net.balance().detach()), 3),
                "norm": round(float(norm), 3), "rate": round(scale, 4), "tok_s": round(seen / (time.time() - started)),
            }  # fmt: skip
            print(line, flush=True)
            with (run / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if worker == 0 and (step % args.save == 0 or step == args.steps):
            state = {
                "net": net.state_dict(),
                "adam": adam.state_dict(),
                "muon": muon.state,
                "step": step,
            }
            torch.save(state, run / "state.pt.new")
            os.replace(run / "state.pt.new", run / "state.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p = parser.add_argument
    p("run", type=Path)
    p("--steps", type=int, default=4000)
    p("--decay-from", type=int, default=2800)
    p("--lr", type=float, default=0.02, help="of matrices, by Muon")
    p("--adam-lr", type=float, default=0.003, help="of embeddings, norms and the like")
    p("--save", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    if not (args.run / "tokenizer.json").exists():
        train_tokenizer(str(args.run / "tokenizer.json"), Shape().vocab, ROWS["seed"])
    mp.spawn(work, (args, 20000 + os.getpid() % 20000), WORKERS)


if __name__ == "__main__":
    main()
