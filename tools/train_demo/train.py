"""Trains the demo model; goes on from the last checkpoint when there is one.

    python train.py RUN --steps 4000 --decay-from 2800

RUN gets tokenizer.json, state.pt (weights, optimizers, step) and log.jsonl. Each worker is a process of one thread,
which averages gradients with the others: two of them are faster than one with two threads, and a busy core slows them
in proportion. The learning rate rises for 50 steps, stays, and falls in a line to zero from --decay-from on; from
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

WARMUP, BALANCE = 50, 0.01


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
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.dim() > 1 and p is not net.embed], "peak": args.lr},
            {"params": [p for p in net.parameters() if p.dim() == 1 or p is net.embed], "peak": 2 * args.lr},
        ],
        betas=(0.9, 0.98), weight_decay=0.01,
    )  # fmt: skip
    step = 0
    if (run / "state.pt").exists():
        state = torch.load(run / "state.pt")
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])
        for group, peak in zip(adam.param_groups, (args.lr, 2 * args.lr), strict=True):
            group["peak"] = peak  # what is asked for now, not what the state was saved with
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
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scale = rate(step, args.steps, args.decay_from)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * scale
        adam.step()
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
    p(
        "--lr",
        type=float,
        default=0.001,
        help="of matrices; embeddings, norms and the like: twice that",
    )
    p("--save", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    if not (args.run / "tokenizer.json").exists():
        train_tokenizer(str(args.run / "tokenizer.json"), Shape().vocab, ROWS["seed"])
    mp.spawn(work, (args, 20000 + os.getpid() % 20000), WORKERS)


if __name__ == "__main__":
    main()
