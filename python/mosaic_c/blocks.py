"""C descriptions of a plan's blocks: the one place where names of plan.py meet fields of mosaic_c.h.

`find` turns a Weight (or None) into an mc_tensor as a dict; planning passes one that knows no file, and
then only the sizes matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mosaic_c.engine import PAGE_TOKENS
from mosaic_c.plan import Attention, DeltaNet, ModelPlan, Moe, Norm, Weight

Find = Callable[[Weight | None], dict[str, int]]
Desc = dict[str, Any]


def nowhere(weight: Weight | None) -> dict[str, int]:
    """The tensor of a plan that is not bound to files."""
    return {"file": -1, "scale_file": -1}


def norm(n: Norm | None, find: Find) -> Desc:
    if n is None:
        return {"weight": find(None)}
    return {"weight": find(n.weight), "plus_one": int(n.plus_one), "eps": n.eps}


def attention(a: Attention, layer: int, hidden: int, ctx: int, chunk: int, find: Find) -> Desc:
    return {
        "layer": layer,
        "hidden": hidden,
        "n_head": a.heads,
        "n_kv_head": a.kv_heads,
        "head_dim": a.head_dim,
        "rope_dim": a.rope_dim,
        "rope_theta": a.rope_theta,
        "gate": int(a.gate),
        "ctx": ctx,
        "max_tok": chunk,
        "norm": norm(a.norm, find),
        "q_norm": norm(a.q_norm, find),
        "k_norm": norm(a.k_norm, find),
        "q": find(a.q),
        "k": find(a.k),
        "v": find(a.v),
        "o": find(a.o),
        "q_bias": find(a.q_bias),
        "k_bias": find(a.k_bias),
        "v_bias": find(a.v_bias),
        "o_bias": find(a.o_bias),
    }


def delta(d: DeltaNet, layer: int, hidden: int, chunk: int, find: Find) -> Desc:
    return {
        "layer": layer,
        "hidden": hidden,
        "n_k_head": d.k_heads,
        "n_v_head": d.v_heads,
        "dk": d.dk,
        "dv": d.dv,
        "conv_kernel": d.kernel,
        "max_tok": chunk,
        "norm": norm(d.norm, find),
        "qkv": find(d.qkv),
        "z": find(d.z),
        "b": find(d.b),
        "a": find(d.a),
        "conv": find(d.conv),
        "a_log": find(d.a_log),
        "dt_bias": find(d.dt_bias),
        "out_norm": norm(d.out_norm, find),
        "out": find(d.out),
    }


def moe(m: Moe, layer: int, hidden: int, chunk: int, find: Find) -> Desc:
    none = find(None)
    shared = m.shared
    return {
        "layer": layer,
        "hidden": hidden,
        "n_expert": m.experts.count if m.experts else 0,
        "top_k": m.top_k if m.experts else 0,
        "width": m.experts.width if m.experts else 0,
        "shared_width": shared.width if shared else 0,
        "renormalise": int(m.renormalise),
        "max_tok": chunk,
        "norm": norm(m.norm, find),
        "router": find(m.router) if m.experts else none,
        "shared": {
            "gate": find(shared.gate) if shared else none,
            "up": find(shared.up) if shared else none,
            "down": find(shared.down) if shared else none,
        },
        "shared_gate": find(m.shared_gate),
    }


def state(plan: ModelPlan, ctx: int, dtype: int, sessions: int = 1) -> Desc:
    """mc_kv_desc: what one sequence carries, and a page pool for so many. All layers of a kind have one shape."""
    pages = sessions * -(-ctx // PAGE_TOKENS)
    desc: Desc = {"ctx": ctx, "dtype": dtype, "pages": pages}
    attn, lin = plan.attention_layers, plan.delta_layers
    if attn:
        a = attn[0]
        desc |= {"n_attn": len(attn), "n_kv_head": a.kv_heads, "head_dim": a.head_dim}
    if lin:
        d = lin[0]
        desc |= {
            "n_delta": len(lin),
            "conv_dim": 2 * d.k_heads * d.dk + d.v_heads * d.dv,
            "conv_kernel": d.kernel,
            "n_v_head": d.v_heads,
            "dk": d.dk,
            "dv": d.dv,
        }
    return desc
