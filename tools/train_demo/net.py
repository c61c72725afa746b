"""The demo model in torch, for training: `qwen3_5_moe` as transformers' Qwen3_5MoeForCausalLM computes it.

Three gated delta layers, then one of full attention with an output gate; every layer has routed experts and a
gated shared expert. Parameters keep the names and shapes of the checkpoint, but for an expert's matrices, which are
stacked (experts, rows, columns) here and apart there. The delta rule runs in chunks (Gated Delta Networks, Yang et al.
2024, section 3.3). Weights that an FP8 checkpoint stores in FP8 can be rounded in the forward pass, so that
training ends with the weights that will be served (straight-through gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    full_every: int = 4
    experts: int = 32
    top_k: int = 4
    width: int = 32  # of a routed expert
    shared: int = 32  # of the shared expert
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    k_heads: int = 3
    v_heads: int = 6
    state: int = 32  # key and value dimension of a delta head
    kernel: int = 4
    rope_theta: float = 10000.0
    rope_share: float = 0.25
    eps: float = 1e-6
    positions: int = 2048

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0

    def config(self) -> dict:
        """config.json of the checkpoint."""
        kinds = [
            "full_attention" if self.is_full(i) else "linear_attention" for i in range(self.layers)
        ]
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": kinds,
            "full_attention_interval": self.full_every,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width,
            "shared_expert_intermediate_size": self.shared,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attn_output_gate": True,
            "attention_bias": False,
            "linear_num_key_heads": self.k_heads,
            "linear_num_value_heads": self.v_heads,
            "linear_key_head_dim": self.state,
            "linear_value_head_dim": self.state,
            "linear_conv_kernel_dim": self.kernel,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rope_share,
            },
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }


def fp8_parts(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes as float8_e4m3fn, scales in bf16) of matrices (..., rows, columns), a scale per block of 128x128."""
    *lead, rows, cols = w.shape
    pad = F.pad(w.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = pad.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # (..., R, 128, C, 128)
    scale = (blocks.abs().amax((-3, -1)) / FP8_MAX).clamp(min=1e-12)
    # A scale rounded down would push the largest weight past the largest code.
    scale = (scale * (1 + 2.0**-7)).bfloat16()
    codes = (blocks / scale.float()[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    codes = codes.flatten(-4, -3).flatten(-2)[..., :rows, :cols]
    return codes.to(torch.float8_e4m3fn), scale


def fp8_value(codes: Tensor, scale: Tensor) -> Tensor:
    rows, cols = codes.shape[-2:]
    full = scale.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.float() * full[..., :rows, :cols]


class Round:
    """Whether forward passes see weights as the checkpoint will hold them."""

    on = False

    @classmethod
    def fp8(cls, w: Tensor) -> Tensor:
        if not cls.on:
            return w
        with torch.no_grad():
            delta = fp8_value(*fp8_parts(w)) - w
        return w + delta


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, Round.fp8(w).to(x.dtype))


def weight(*shape: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)


def norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMS norm by 1 + w in float32; keeps the type of x."""
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps) * (1 + w)).to(x.dtype)


class Delta(nn.Module):
    """The gated delta rule."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s, keys, values = s, s.k_heads * s.state, s.v_heads * s.state
        self.in_proj_qkv = weight(2 * keys + values, s.hidden)
        self.in_proj_z = weight(values, s.hidden)
        self.in_proj_b = weight(s.v_heads, s.hidden)
        self.in_proj_a = weight(s.v_heads, s.hidden)
        self.conv1d = weight(2 * keys + values, 1, s.kernel)
        self.A_log = nn.Parameter(torch.linspace(0.5, 8, s.v_heads).log())
        # Steps between 0.001 and 0.1, as in Mamba 2: some heads forget within a sentence, some keep a story.
        step = torch.logspace(-3, -1, s.v_heads)
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.norm = nn.Parameter(torch.ones(s.state))
        self.out_proj = weight(s.hidden, values, gain=(2 * s.layers) ** -0.5)

    def forward(self, h: Tensor) -> Tensor:
        s, time = self.s, h.shape[1]
        u = linear(h, self.in_proj_qkv).transpose(1, 2)
        u = F.conv1d(u, self.conv1d.to(u.dtype), padding=s.kernel - 1, groups=u.shape[1])[
            ..., :time
        ]
        u = F.silu(u).transpose(1, 2).float()
        keys = s.k_heads * s.state
        q, k, v = u.split([keys, keys, s.v_heads * s.state], -1)
        q, k = (x.unflatten(-1, (s.k_heads, s.state)) for x in (q, k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        share = s.v_heads // s.k_heads
        q, k = (x.repeat_interleave(share, 2).transpose(1, 2) for x in (q * s.state**-0.5, k))
        v = v.unflatten(-1, (s.v_heads, s.state)).transpose(1, 2)
        beta = F.linear(h.float(), self.in_proj_b).sigmoid().transpose(1, 2)
        g = F.linear(h.float(), self.in_proj_a) + self.dt_bias
        g = (-self.A_log.exp() * F.softplus(g)).transpose(1, 2)
        o = delta_rule(q, k, v, beta, g)  # (batch, heads, time, state)
        o = F.rms_norm(o, o.shape[-1:], self.norm, s.eps).transpose(1, 2)
        z = linear(h, self.in_proj_z).float().unflatten(-1, (s.v_heads, s.state))
        return linear((o * F.silu(z)).flatten(2).to(h.dtype), self.out_proj)


class UnitLowerInverse(torch.autograd.Function):
    """inverse(1 + L) of strictly lower triangular L (..., n, n), n a power of two, by halves:
    inverse [A 0; C B] = [A' 0; -B'CA' B']. (linalg.solve_triangular takes ten times as long on a CPU.)"""

    @staticmethod
    def forward(ctx, low: Tensor) -> Tensor:
        n = low.shape[-1]
        x = torch.eye(n).expand(low.shape).clone()
        size = 1
        while size < n:
            for at in range(0, n, 2 * size):
                a, b = slice(at, at + size), slice(at + size, at + 2 * size)
                x[..., b, a] = -x[..., b, b] @ low[..., b, a] @ x[..., a, a]
            size *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, chunk: int = 32) -> Tensor:
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q for each position, chunk by chunk, in float32.

    q, k: (batch, heads, time, dk); v: (..., dv); beta, g: (batch, heads, time). Returns (..., time, dv).
    """
    time = q.shape[2]
    pad = -time % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, g = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (beta, g))
    g = g.cumsum(-1)
    low = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~low, -torch.inf).exp()
    mix = (k @ k.mT) * decay * beta[..., None]
    inverse = UnitLowerInverse.apply(mix.tril(-1))
    new = inverse @ (v * beta[..., None])
    seen = inverse @ (k * (beta * g.exp())[..., None])
    inside = (q @ k.mT) * decay
    q_in = q * g.exp()[..., None]
    last = g[..., -1]
    k_out = k * (last[..., None] - g).exp()[..., None]
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        fresh = new[:, :, i] - seen[:, :, i] @ state
        out.append(q_in[:, :, i] @ state + inside[:, :, i] @ fresh)
        state = state * last[:, :, i, None, None].exp() + k_out[:, :, i].mT @ fresh
    return torch.cat(out, 2)[:, :, :time]


class Attention(nn.Module):
    """Full attention with norms on q and k, partial rope and an output gate."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = weight(2 * s.heads * s.head_dim, s.hidden)
        self.k_proj = weight(s.kv_heads * s.head_dim, s.hidden)
        self.v_proj = weight(s.kv_heads * s.head_dim, s.hidden)
        self.o_proj = weight(s.hidden, s.heads * s.head_dim, gain=(2 * s.layers) ** -0.5)
        self.q_norm = nn.Parameter(torch.zeros(s.head_dim))
        self.k_norm = nn.Parameter(torch.zeros(s.head_dim))

    def rope(self, x: Tensor) -> Tensor:
        size = int(self.s.head_dim * self.s.rope_share)
        freq = self.s.rope_theta ** -(torch.arange(0, size, 2) / size)
        angle = torch.arange(x.shape[-2])[:, None] * freq
        cos, sin = angle.cos(), angle.sin()
        a, b, rest = x.float().split([size // 2, size // 2, x.shape[-1] - size], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)

    def forward(self, h: Tensor) -> Tensor:
        s = self.s
        q = linear(h, self.q_proj).unflatten(-1, (s.heads, 2 * s.head_dim))
        q, gate = q.chunk(2, -1)
        k = linear(h, self.k_proj).unflatten(-1, (s.kv_heads, s.head_dim))
        v = linear(h, self.v_proj).unflatten(-1, (s.kv_heads, s.head_dim)).transpose(1, 2)
        q = self.rope(norm(q, self.q_norm, s.eps).transpose(1, 2))
        k = self.rope(norm(k, self.k_norm, s.eps).transpose(1, 2))
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return linear((y * gate.sigmoid()).flatten(2), self.o_proj)


class Moe(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.gate = weight(s.experts, s.hidden)
        out = (2 * s.layers) ** -0.5
        self.gate_proj = weight(s.experts, s.width, s.hidden)
        self.up_proj = weight(s.experts, s.width, s.hidden)
        self.down_proj = weight(s.experts, s.hidden, s.width, gain=out)
        self.shared_gate_proj = weight(s.shared, s.hidden)
        self.shared_up_proj = weight(s.shared, s.hidden)
        self.shared_down_proj = weight(s.hidden, s.shared, gain=out)
        self.shared_expert_gate = weight(1, s.hidden)
        self.load = torch.zeros(s.experts)  # share of calls of each expert in the last forward
        self.balance = torch.zeros(
            ()
        )  # Switch Transformer's auxiliary loss of the last forward, 1 when even

    def forward(self, h: Tensor) -> Tensor:
        s, x = self.s, h.flatten(0, 1)
        p = F.linear(x.float(), self.gate).softmax(-1)
        top, index = p.topk(s.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        # Calls in order of expert, padded to the busiest, so that one batched product serves all.
        order = index.flatten().argsort(stable=True)
        count = index.flatten().bincount(minlength=s.experts)
        self.load = count.detach() / count.sum()
        self.balance = (self.load * p.mean(0)).sum() * s.experts
        expert = index.flatten()[order]
        place = torch.arange(order.numel()) - (count.cumsum(0) - count)[expert]
        room = -(-int(count.max()) // 128) * 128  # few sizes, or freed memory fits no later tensor
        slot = expert * room + place
        token = order // s.top_k
        calls = x.new_zeros(s.experts * room, s.hidden).index_copy(
            0, slot, x.index_select(0, token)
        )
        calls = calls.unflatten(0, (s.experts, -1))
        gate = torch.bmm(calls, Round.fp8(self.gate_proj).to(x.dtype).mT)
        up = torch.bmm(calls, Round.fp8(self.up_proj).to(x.dtype).mT)
        out = torch.bmm(F.silu(gate) * up, Round.fp8(self.down_proj).to(x.dtype).mT).flatten(0, 1)
        out = out.index_select(0, slot) * top.flatten()[order, None].to(x.dtype)
        y = torch.zeros_like(x).index_add(0, token, out)
        shared = F.silu(linear(x, self.shared_gate_proj)) * linear(x, self.shared_up_proj)
        y = y + linear(shared, self.shared_down_proj) * F.linear(
            x.float(), self.shared_expert_gate
        ).sigmoid().to(x.dtype)
        return y.unflatten(0, h.shape[:2])


class Layer(nn.Module):
    def __init__(self, s: Shape, full: bool):
        super().__init__()
        self.eps = s.eps
        self.input_layernorm = nn.Parameter(torch.zeros(s.hidden))
        self.mixer = Attention(s) if full else Delta(s)
        self.post_attention_layernorm = nn.Parameter(torch.zeros(s.hidden))
        self.mlp = Moe(s)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x + self.mixer(norm(x, self.input_layernorm, self.eps).to(dtype))
        return x + self.mlp(norm(x, self.post_attention_layernorm, self.eps).to(dtype))


class Net(nn.Module):
    """forward(ids (batch, time)) -> the normed last hidden states (batch, time, hidden); head() gives logits."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        # Large beside what layers add, so that later layers still see which token it is; the last norm makes up for it.
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(s, s.is_full(i)) for i in range(s.layers))
        self.norm = nn.Parameter(torch.full((s.hidden,), -0.875))

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        x = F.embedding(ids, self.embed)
        for layer in self.layers:
            x = layer(x, dtype)
        return norm(x, self.norm, self.s.eps).to(dtype)

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embed.to(h.dtype)).float()

    def balance(self) -> Tensor:
        return torch.stack([layer.mlp.balance for layer in self.layers]).mean()
