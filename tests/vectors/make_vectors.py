"""Numeric oracle: what `transformers` computes, in float32, from tiny official-layout checkpoints.

Run by hand (the results are committed; the tests need neither torch nor transformers):
    pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    python tests/vectors/make_vectors.py            # write every variant and rope.npz
    python tests/vectors/make_vectors.py NAME ...   # only these
    python tests/vectors/make_vectors.py --check    # recompute from the files, write nothing

The reference never sees the values that the files were made from: it reads the files back,
dequantises FP8 (code times the scale of its 128x128 block, in float32; transformers' own
dequantiser divides the shape by the scale grid, which is wrong where the last block is partial) and
runs the stock model class in float32 on the CPU with eager attention, eager experts and the pure
torch gated delta rule. A seed is taken only if no decision is close (LIMITS), so an engine within
the tolerance makes the same choices.

expected.npz, for n prompt tokens, V words, L MoE layers and top k:
    prompt (n,) int32           token ids, longer than two pages of 64 tokens
    positions (p,) int32        the prompt positions kept in `logits`; the last one is n-1
    logits (p, V) float32       after prompt[: positions[i] + 1]
    argmax (n,) int32           of every prompt position
    greedy (40,) int32          greedy continuation; end-of-text ids do not stop it and never occur
    step_index (s,) int32       steps kept in `step_logits`
    step_logits (s, V) float32  from which greedy[step_index[i]] was taken: step 0 is the last
                                prompt position, step i follows greedy[i-1]
    routes (L, n, k) uint8      experts chosen for the prompt, ascending; MoE layers in order
    margins (3,) float32        least gap between the k-th and the next router probability; least
                                gap between the two best logits over max |logit|; max |logit|
    seeds (2,) int32            of the weights and of the prompt
"""
from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from tiny_models import N_SPECIAL, VARIANTS, Tensors, Variant, build, fuse, grow, write_folder
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

HERE = Path(__file__).resolve().parent
N_PROMPT, N_GREEDY = 150, 40
POSITIONS = [0, 1, 2, 3, 62, 63, 64, 100, 127, 128, N_PROMPT - 1]
STEPS = [0, 1, 2, 10, 39]
LIMITS = (1e-4, 5e-4)   # router gap; logit gap (two logits may each be off by the tests' 2e-4)


def load(path: Path) -> torch.nn.Module:
    """Folder -> model: index or single file, scales multiplied in, visual and mtp skipped."""
    index = path / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    raw: Tensors = {}
    for file in sorted(files):
        with safe_open(path / file, "pt") as f:
            raw |= {k: f.get_tensor(k) for k in f.keys()}
    state: Tensors = {}
    for name, t in raw.items():
        if re.match(r"model\.visual\.|mtp\.", name) or name.endswith("_scale_inv"):
            continue
        w = t.float()
        if t.dtype == torch.float8_e4m3fn:
            scale = raw[f"{name}_scale_inv"].float().numpy()
            w = w * torch.from_numpy(grow(scale, tuple(w.shape)))
        state[name.replace("model.language_model.", "model.")] = w
    model = build(path)
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(fuse(state), strict=True)
    if {p.dtype for p in model.parameters()} != {torch.float32}:
        raise SystemExit("a parameter is not float32")
    return model


def top_gap(x: torch.Tensor, k: int) -> float:
    best = x.double().topk(k + 1, -1).values
    return float((best[..., k - 1] - best[..., k]).min())


@torch.no_grad()
def run(model: torch.nn.Module, prompt: np.ndarray, quick: bool) -> dict[str, np.ndarray] | None:
    """Prefill, then greedy decode with the cache; with `quick`, None if a decision is too close."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []      # router probabilities, chosen experts
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [m.register_forward_hook(lambda _m, _x, y: seen.append((y[0].softmax(-1), y[2])))
             for m in routers]
    top_k = model.config.num_experts_per_tok

    def margins(lg: torch.Tensor) -> tuple[float, float]:
        return min(top_gap(p, top_k) for p, _ in seen), top_gap(lg, 1) / float(lg.abs().max())

    try:
        out = model(input_ids=torch.from_numpy(prompt).long()[None], use_cache=True)
        logits, cache = out.logits[0], out.cache
        routes = torch.stack([idx.sort(-1).values for _, idx in seen]).to(torch.uint8).numpy()
        if quick and any(m < limit for m, limit in zip(margins(logits), LIMITS, strict=True)):
            return None
        greedy, steps = [], [logits[-1]]
        while True:
            greedy.append(int(steps[-1].argmax()))
            if len(greedy) == N_GREEDY:
                break
            out = model(input_ids=torch.tensor([greedy[-1:]]), cache=cache, use_cache=True)
            steps.append(out.logits[0, -1])
        every = torch.cat((logits, torch.stack(steps[1:])))
        router, word = margins(every)
        dull = len(set(greedy)) < 12 or max(greedy) >= model.config.vocab_size - N_SPECIAL
        if quick and (router < LIMITS[0] or word < LIMITS[1] or dull):
            return None
        text = [*prompt.tolist(), *greedy[:-1]]
        whole = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    finally:
        for h in hooks:
            h.remove()
    peak = float(every.abs().max())
    print(f"  router gap {router:.1e}, logit gap {word:.1e} of max |logit| {peak:.1f}, "
          f"{len(set(greedy))} different words in {N_GREEDY}, "
          f"cached and whole differ by {float((whole - every).abs().max()) / peak:.1e}")
    return {"prompt": prompt.astype(np.int32), "positions": np.array(POSITIONS, np.int32),
            "logits": logits[POSITIONS].numpy(),
            "argmax": logits.argmax(-1).numpy().astype(np.int32),
            "greedy": np.array(greedy, np.int32), "step_index": np.array(STEPS, np.int32),
            "step_logits": torch.stack(steps)[STEPS].numpy(), "routes": routes,
            "margins": np.array([router, word, peak], np.float32)}


def make(name: str, variant: Variant) -> None:
    print(name, flush=True)
    top = variant.config.get("text_config", variant.config)["vocab_size"] - N_SPECIAL
    for seed in range(100):
        with tempfile.TemporaryDirectory() as tmp:
            path = Path(tmp) / name
            write_folder(path, variant, seed)
            model = load(path)
            for draw in range(60):
                prompt = np.random.default_rng([seed, draw]).integers(0, top, N_PROMPT)
                expected = run(model, prompt, quick=True)
                if not expected:
                    continue
                np.savez(path / "expected.npz", **expected, seeds=np.array([seed, draw], np.int32))
                shutil.rmtree(HERE / name, ignore_errors=True)
                shutil.copytree(path, HERE / name, copy_function=shutil.copyfile)
                size = sum(f.stat().st_size for f in (HERE / name).iterdir())
                print(f"  seeds {seed} {draw}, {size} bytes", flush=True)
                return
    raise SystemExit(f"{name}: no seed keeps its distance")


def check(name: str) -> bool:
    print(name)
    with np.load(HERE / name / "expected.npz") as f:
        want = dict(f)
    got = run(load(HERE / name), want["prompt"], quick=False)
    same = all(np.array_equal(got[k], want[k]) for k in ("argmax", "greedy", "routes"))
    far = max(float(np.abs(got[k] - want[k]).max()) for k in ("logits", "step_logits"))
    far /= float(want["margins"][2])
    print(f"  choices {'equal' if same else 'DIFFER'}, logits differ by {far:.1e} of max |logit|")
    return same and far < 2e-5


def make_rope() -> None:
    """rope.npz: positions (p,) int64; theta (4,) float64; dim (4,) int32; for pair i inv_freq_i
    (dim/2,), cos_i and sin_i (p, dim/2) float32, as transformers' rotary module computes them."""
    pairs = [(1e7, 64), (1e6, 128), (1e4, 64), (5e6, 128)]
    some = np.random.default_rng(7).integers(3, 262144, 14).tolist()
    fixed = [0, 1, 2, 63, 64, 1000, 4095, 32767, 131071, 262143]
    positions = np.array(sorted({*fixed, *some}), np.int64)
    out = {"positions": positions, "theta": np.array([t for t, _ in pairs]),
           "dim": np.array([d for _, d in pairs], np.int32)}
    for i, (theta, dim) in enumerate(pairs):
        rope = Qwen3MoeRotaryEmbedding(transformers.Qwen3MoeConfig(
            head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": theta}))
        cos, sin = rope(torch.zeros(1), torch.from_numpy(positions)[None])
        inv = rope.inv_freq.numpy()
        got = {"inv_freq": inv, "cos": cos[0, :, : dim // 2].numpy(),
               "sin": sin[0, :, : dim // 2].numpy()}
        out |= {f"{k}_{i}": v for k, v in got.items()}
        angle = (positions[:, None].astype(np.float32) * inv).astype(np.float64)
        power = np.power(theta, np.float32(np.arange(0, dim, 2) / dim).astype(np.float64))
        far = np.abs(inv - np.float32(1) / power.astype(np.float32)) / np.spacing(inv)
        ulp = max(float((np.abs(got[k] - f(angle)) / np.spacing(np.abs(got[k]))).max())
                  for k, f in (("cos", np.cos), ("sin", np.sin)))
        print(f"rope {theta:g} {dim}: inv_freq is not 1.0f/(float)pow at {np.nonzero(far)[0]} "
              f"(max {far.max():.0f} ulp); cos, sin of the float32 angle within {ulp:.2f} ulp")
    np.savez(HERE / "rope.npz", **out)


def main(args: list[str]) -> int:
    if any(importlib.util.find_spec(m) for m in ("fla", "causal_conv1d", "kernels")):
        raise SystemExit("an accelerated kernel package is installed; use a clean environment")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = [a for a in args if not a.startswith("-")] or list(VARIANTS)
    if "--check" in args:
        return 0 if all([check(n) for n in names]) else 1
    for name in names:
        make(name, VARIANTS[name])
    if len(names) == len(VARIANTS):
        make_rope()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
