"""The dense model and its cut in torch: what the recipe is made with and measured by."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mosaic_c.smollm2_moe import Recipe, Source, tokenizer


class Dense:
    """The llama model of a GGUF file. dtype: of weights and activations; weights are those of the built folder,
    rounded to bfloat16, in either."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.source = s = Source(Path(path))
        self.dtype, self.heads, self.kv = dtype, s.heads, s.kv_heads
        self.eps, self.dim = s["llama.attention.layer_norm_rms_epsilon"], s.head_dim
        self.theta = s["llama.rope.freq_base"]
        self.embed = self._get("token_embd")
        self.layers = [self._layer(f"blk.{i}") for i in range(s.layers)]
        norms = [f"blk.{i}.{x}" for i in range(s.layers) for x in ("attn_norm", "ffn_norm")]
        self.norms = [self._get(x) for x in [*norms, "output_norm"]]  # in the order of their use

    def _cast(self, w: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(w)).to(torch.bfloat16).to(self.dtype)

    def _get(self, name: str) -> torch.Tensor:
        return self._cast(self.source.tensor(name))

    def _layer(self, at: str) -> dict[str, torch.Tensor]:
        names = {
            "v": "attn_v",
            "o": "attn_output",
            "gate": "ffn_gate",
            "up": "ffn_up",
            "down": "ffn_down",
        }
        out = {short: self._get(f"{at}.{name}") for short, name in names.items()}
        out["q"] = self._cast(self.source.rotated(f"{at}.attn_q", self.heads))
        out["k"] = self._cast(self.source.rotated(f"{at}.attn_k", self.kv))
        return out

    def rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight

    def attention(self, i: int, x: torch.Tensor, turn: tuple) -> torch.Tensor:
        b, t, _ = x.shape
        w, h = self.layers[i], self.rms(x, self.norms[2 * i])

        def heads(name: str, n: int) -> torch.Tensor:
            return F.linear(h, w[name]).view(b, t, n, self.dim).transpose(1, 2)

        def turned(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * turn[0] + torch.cat([-second, first], -1) * turn[1]

        q, k, v = turned(heads("q", self.heads)), turned(heads("k", self.kv)), heads("v", self.kv)
        n = self.heads // self.kv
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(b, t, -1), w["o"])

    def mlp(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.neurons(i, x), self.layers[i]["down"])

    def neurons(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """What the neurons of a layer give: (..., ffn)."""
        w = self.layers[i]
        return F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"])

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (b, t) -> (b, t, hidden), after the last norm."""
        rate = 1.0 / self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angle = torch.outer(torch.arange(ids.shape[1]).float(), rate).repeat(1, 2)
        turn = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = F.embedding(ids, self.embed)
        for i in range(len(self.layers)):
            x = x + self.attention(i, x, turn)
            x = x + self.mlp(i, self.rms(x, self.norms[2 * i + 1]))
        return self.rms(x, self.norms[-1])

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(ids), self.embed).float()


class Cut(Dense):
    """The dense model with only the neurons of the shared expert and of top_k routed ones, as the engine computes
    it: experts by router logit, every weight 1. use(None) is the dense model."""

    recipe: Recipe | None = None

    def use(self, recipe: Recipe | None, choice: str = "router") -> None:
        """choice: router; first: always the same top_k experts, those of the lowest number; random."""
        self.recipe, self.choice = recipe, choice
        if not hasattr(self, "plain"):
            self.plain = self.norms
        norms = None if recipe is None or recipe.norms is None else torch.from_numpy(recipe.norms)
        self.scale_norms(norms)
        if recipe is not None:
            labels = np.where(recipe.labels == 255, recipe.experts, recipe.labels)
            self.of = torch.from_numpy(labels.astype(np.int64))
            self.router = torch.from_numpy(recipe.router)

    def scale_norms(self, factors: torch.Tensor | None) -> None:
        """factors (2 layers + 1, hidden), as in Recipe; None: the dense model's norms."""
        self.norms = self.plain
        if factors is not None:
            self.norms = [a * b for a, b in zip(self.plain, factors.to(self.dtype), strict=True)]

    def mlp(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            return super().mlp(i, x)
        score = F.linear(x.float(), self.router[i])
        if self.choice == "first":
            score = -torch.arange(score.shape[-1]).expand_as(score).float()
        elif self.choice == "random":
            score = torch.rand_like(score)
        chosen = score.topk(self.recipe.top_k, -1).indices
        on = torch.zeros(*x.shape[:-1], self.recipe.experts + 1)
        on.scatter_(-1, chosen, 1.0)[..., -1] = 1.0
        return F.linear(
            self.neurons(i, x) * on[..., self.of[i]].to(x.dtype), self.layers[i]["down"]
        )


@torch.no_grad()
def perplexity(model: Dense, ids: torch.Tensor, batch: int = 4) -> float:
    """Of rows of ids (n, t), their first token not counted."""
    total = 0.0
    for rows in ids.split(batch):
        hidden = model.hidden(rows)
        for h, row in zip(hidden, rows, strict=True):
            logits = F.linear(h[:-1], model.embed).float()
            total += F.cross_entropy(logits, row[1:], reduction="sum").item()
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))


def load_tokenizer(source: Source):
    import json

    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(tokenizer(source)))
