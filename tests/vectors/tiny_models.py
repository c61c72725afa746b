"""Tiny random checkpoints in the layouts of the official releases, for make_vectors.py.

A variant is a config.json, key for key as that kind of release writes it, and a way to store the
drawn values. What a loader can get wrong is made visible on purpose: no width is a multiple of 128,
FP8 scales differ by block, norm weights are far from neutral, an expert straddles two shards,
visual and mtp tensors lie about, and theta, eps, the rotary share and the layer pattern are not
always those of the real models, so that a constant in the code shows.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

N_SPECIAL = 8                   # the last ids of every vocabulary are specials; no prompt holds one
BLOCK = 128
DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Save = Callable[[Path, Tensors, np.random.Generator], None]


# ---- configs ------------------------------------------------------------------------------------

def special(v: int) -> dict[str, int]:
    names = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image", "video", "x")
    return {name: v - N_SPECIAL + i for i, name in enumerate(names)}


def qwen35_text(v: int, style: str, interval: int = 4, rotary: float = 0.25, **dims: Any) -> Config:
    """text_config as Qwen3.5 ("3.5") and Qwen3.6 ("3.6") have it; norm_topk_prob is in neither."""
    sp, layers, pairs = special(v), dims["num_hidden_layers"], int(dims["head_dim"] * rotary) // 2
    third = pairs // 3
    text: Config = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": sp["endoftext"], "full_attention_interval": interval,
        "hidden_act": "silu", "initializer_range": 0.02, "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [pairs - 2 * third, third, third],
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": rotary},
        "router_aux_loss_coef": 0.001, "use_cache": True, "vocab_size": v, **dims}
    if style == "3.5":
        return text | {"mlp_only_layers": []}
    return text | {"bos_token_id": sp["endoftext"], "output_router_logits": False,
                   "pad_token_id": None, "partial_rotary_factor": rotary,
                   "tie_word_embeddings": False}


def qwen35_wrapper(text: Config, style: str) -> Config:
    sp, old = special(text["vocab_size"]), style == "3.5"
    vision = {"deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh",
              "hidden_size": 16, "in_channels": 3, "initializer_range": 0.02,
              "intermediate_size": 24, "num_heads": 2,
              "model_type": "qwen3_5_moe" if old else "qwen3_5_moe_vision",
              "num_position_embeddings": 16, "out_hidden_size": text["hidden_size"],
              "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    top: Config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": sp["image"],
        "model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0" if old else "5.7.0.dev0",
        "video_token_id": sp["video"], "vision_config": vision,
        "vision_end_token_id": sp["vision_end"], "vision_start_token_id": sp["vision_start"]}
    return top if old else {"dtype": "bfloat16"} | top


def qwen3(v: int, **dims: Any) -> Config:
    """Qwen3-30B-A3B: top-level rope_theta, rope_scaling null, torch_dtype."""
    sp = special(v)
    return {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": sp["endoftext"], "decoder_sparse_step": 1,
            "eos_token_id": sp["im_end"], "hidden_act": "silu", "initializer_range": 0.02,
            "intermediate_size": 96, "max_position_embeddings": 40960,
            "max_window_layers": dims["num_hidden_layers"], "mlp_only_layers": [],
            "model_type": "qwen3_moe", "norm_topk_prob": True, "output_router_logits": False,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": v, **dims}


def qwen2(v: int, **dims: Any) -> Config:
    """Qwen1.5-MoE: no head_dim, rope_scaling or qkv_bias (true by default); an unused window."""
    sp = special(v)
    return {"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0,
            "bos_token_id": sp["endoftext"], "decoder_sparse_step": 1,
            "eos_token_id": sp["endoftext"], "hidden_act": "silu", "initializer_range": 0.02,
            "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
            "norm_topk_prob": False, "output_router_logits": False, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": 32768,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.39.0.dev0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": v, **dims}


def fp8(keep: list[str]) -> Config:
    return {"quantization_config": {
        "activation_scheme": "dynamic", "modules_to_not_convert": keep, "fmt": "e4m3",
        "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}


# ---- values -------------------------------------------------------------------------------------

GAIN = {"lm_head": 2.5, "mlp.gate": 2.0, "shared_expert_gate": 1.5, "o_proj": 2.0, "out_proj": 1.2,
        "down_proj": 1.6}


def draw(name: str, shape: tuple[int, ...], cfg: Config, rng: np.random.Generator) -> torch.Tensor:
    """One tensor of the text model, by its name. Matrices are heavy-tailed with a gain that differs
    by 128x128 block; norm weights lie around 0 where the model adds 1 to them, else around 1."""
    zero_centred = cfg["model_type"] == "qwen3_5_moe_text"
    tied = cfg.get("tie_word_embeddings", False)
    normal = rng.standard_normal(shape)
    if name.endswith("A_log"):
        out = np.log(rng.uniform(1.0, 16.0, shape))
    elif name.endswith("dt_bias"):                 # inverse softplus of a step of 0.001 to 0.1
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
        out = dt + np.log(-np.expm1(-dt))
    elif name.endswith("linear_attn.norm.weight"):
        out = 1.0 + 0.3 * normal
    elif name.endswith("norm.weight"):
        out = 0.25 * normal + (0.0 if zero_centred else 1.0)
    elif name.endswith(".bias"):
        out = 0.5 * normal
    elif name.endswith("conv1d.weight"):
        out = 0.4 * normal
        out[..., -1] += 0.6
    elif name.endswith("embed_tokens.weight"):
        out = normal * (0.3 if tied else 0.8)
    else:
        gain = next((g for part, g in GAIN.items() if f"{part}.weight" in name), 1.0)
        if cfg["model_type"] == "qwen2_moe" and re.search(r"\.[qk]_proj", name):
            gain = 1.3                             # no q and k norm there
        tail = np.exp(0.5 * rng.standard_normal(shape) - 0.25)
        blocks = np.exp(rng.uniform(-0.7, 0.7, tuple(-(-n // BLOCK) for n in shape)))
        out = normal * tail * gain / np.sqrt(shape[-1]) * grow(blocks, shape)
    if name == ("model.embed_tokens.weight" if tied else "lm_head.weight"):
        out[-N_SPECIAL:] *= 0.2                    # greedy text should not run into the specials
    return torch.from_numpy(np.asarray(out, np.float32))


def grow(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Per-block values to per-element ones."""
    return blocks.repeat(BLOCK, 0)[: shape[0]].repeat(BLOCK, 1)[:, : shape[1]]


def to_fp8(w: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = w.shape
    amax = [[w[r:r + BLOCK, c:c + BLOCK].abs().max() for c in range(0, cols, BLOCK)]
            for r in range(0, rows, BLOCK)]
    scale = (torch.tensor(amax) / 448.0).to(scale_dtype)
    full = torch.from_numpy(grow(scale.float().numpy(), (rows, cols)))
    return (w / full).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


# ---- the model class and its names --------------------------------------------------------------

def build(path: Path) -> torch.nn.Module:
    """The stock text model for the folder's config.json, float32, on the plain torch paths."""
    cfg = transformers.AutoConfig.from_pretrained(path)
    cfg = getattr(cfg, "text_config", cfg)
    if hasattr(cfg, "quantization_config"):
        del cfg.quantization_config
    cfg._attn_implementation = cfg._experts_implementation = "eager"
    model = {"qwen3_5_moe_text": transformers.Qwen3_5MoeForCausalLM,
             "qwen3_moe": transformers.Qwen3MoeForCausalLM,
             "qwen2_moe": transformers.Qwen2MoeForCausalLM}[cfg.model_type](cfg).eval()
    took = (model.config._attn_implementation, model.config._experts_implementation)
    if took != ("eager", "eager"):
        raise SystemExit(f"not the eager paths: {took}")
    return model


def split(state: Tensors) -> Tensors:
    """Fused expert parameters of the model class to per-expert names; gate rows come first."""
    out: Tensors = {}
    for name, t in state.items():
        head, _, kind = name.rpartition(".")
        if not head.endswith(".experts"):
            out[name] = t
            continue
        for e in range(t.shape[0]):
            ways = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            parts = zip(ways, t[e].chunk(len(ways)), strict=True)
            out |= {f"{head}.{e}.{part}.weight": w for part, w in parts}
    return out


def fuse(state: Tensors) -> Tensors:
    """The inverse of split; leaves fused tensors as they are."""
    out: Tensors = {}
    experts: dict[str, dict[int, Tensors]] = {}
    for name, t in state.items():
        m = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if m:
            experts.setdefault(m[1], {}).setdefault(int(m[2]), {})[m[3]] = t
        else:
            out[name] = t
    for head, per in experts.items():
        order = [per[e] for e in range(len(per))]
        pairs = [torch.cat((p["gate"], p["up"])) for p in order]
        out[f"{head}.gate_up_proj"] = torch.stack(pairs)
        out[f"{head}.down_proj"] = torch.stack([p["down"] for p in order])
    return out


# ---- writing a folder ---------------------------------------------------------------------------

def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_shards(path: Path, tensors: Tensors, place: Callable[[str], str]) -> None:
    """One file per shard (the writer itself orders by dtype, then name); an index if several."""
    shards: dict[str, Tensors] = {}
    for name in sorted(tensors):
        shards.setdefault(place(name), {})[name] = tensors[name].contiguous()
    for file, part in shards.items():
        save_file(part, path / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        where = {n: f for f, part in shards.items() for n in part}
        write_json(path / "model.safetensors.index.json",
                   {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def official(state: Tensors, *, fused: bool = False, wrapped: bool = False, scale: str = "",
             f32: str = "") -> Tensors:
    """Names and dtypes of a BF16 or (with a scale dtype) FP8 release; f32: what stays float32."""
    keep = r"embed|lm_head|norm|in_proj_[ab]\.|conv1d|A_log|dt_bias|mlp\.gate\.|shared_expert_gate"
    out: Tensors = {}
    for name, t in (fuse(state) if fused else state).items():
        disk = name.replace("model.", "model.language_model.", 1) if wrapped else name
        if scale and not re.search(keep, name):
            out[disk], out[f"{disk}_scale_inv"] = to_fp8(t, DTYPE[scale])
        else:
            out[disk] = t.to(torch.float32 if f32 and re.search(f32, name) else torch.bfloat16)
    return out


def extras(h: int, fp8_experts: bool, rng: np.random.Generator) -> Tensors:
    """A few visual and mtp tensors under real names, which a text engine has to skip."""
    shapes = {"model.visual.patch_embed.proj.weight": (16, 3, 2, 4, 4),
              "model.visual.patch_embed.proj.bias": (16,),
              "model.visual.blocks.0.attn.qkv.weight": (48, 16),
              "model.visual.merger.norm.weight": (16,), "mtp.fc.weight": (8, 16),
              "mtp.norm.weight": (h,), "mtp.layers.0.input_layernorm.weight": (h,)}
    out = {n: torch.from_numpy(rng.standard_normal(s)).bfloat16() for n, s in shapes.items()}
    head = "mtp.layers.0.mlp.experts"
    if fp8_experts:
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"{head}.0.{part}.weight"
            out[name], out[f"{name}_scale_inv"] = to_fp8(torch.ones(8, 8), torch.bfloat16)
    else:
        out[f"{head}.gate_up_proj"] = torch.ones(2, 8, 8).bfloat16()
        out[f"{head}.down_proj"] = torch.ones(2, 8, 4).bfloat16()
    return out


def save_qwen35_bf16(path: Path, state: Tensors, rng: np.random.Generator) -> None:
    """Fused experts; A_log and the DeltaNet norm in float32, as the Qwen3.5 BF16 release."""
    tensors = official(state, fused=True, wrapped=True, f32=r"A_log|linear_attn\.norm")
    write_shards(path, tensors | extras(72, False, rng), lambda _: "model.safetensors")


def save_qwen35_fp8(path: Path, state: Tensors, rng: np.random.Generator) -> None:
    """Per expert, BF16 scales, a file per layer and the rest outside."""
    def place(name: str) -> str:
        layer = re.match(r"model\.language_model\.(layers)\.(\d+)\.", name)
        stem = "-".join(layer.groups()) if layer else "mtp" if name[:4] == "mtp." else "outside"
        return f"{stem}.safetensors"
    tensors = official(state, wrapped=True, scale="BF16")
    write_shards(path, tensors | extras(136, True, rng), place)


def save_qwen3_fp8(path: Path, state: Tensors, rng: np.random.Generator) -> None:
    """F32 scales; two shards cut where half of the bytes are reached: inside a layer's experts."""
    tensors = official(state, scale="F32")
    sizes = {n: tensors[n].numel() * tensors[n].element_size() for n in sorted(tensors)}
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())), strict=True))
    half = sum(sizes.values()) / 2
    write_shards(path, tensors, lambda n: f"model-0000{1 + (ends[n] > half)}-of-00002.safetensors")


def save_bf16(path: Path, state: Tensors, rng: np.random.Generator) -> None:
    if json.loads((path / "config.json").read_text())["tie_word_embeddings"]:
        state = {n: t for n, t in state.items() if n != "lm_head.weight"}
    write_shards(path, official(state), lambda _: "model.safetensors")


def save_by_transformers(dtype: str, fused: bool) -> Save:
    """save_pretrained, which also rewrites config.json; by default it splits the experts again."""
    def save(path: Path, state: Tensors, rng: np.random.Generator) -> None:
        model = build(path)
        model.load_state_dict(fuse(state), strict=True)
        model.to(DTYPE[dtype]).save_pretrained(path, save_original_format=not fused)
    return save


@dataclass(frozen=True)
class Variant:
    config: Config
    save: Save                   # (folder with config.json, drawn state, rng) -> weight files
    sampling: Config             # what generation_config.json says beyond the ids


def write_folder(path: Path, variant: Variant, seed: int) -> None:
    path.mkdir(parents=True)
    write_json(path / "config.json", variant.config)
    text = variant.config.get("text_config", variant.config)
    shapes = {n: tuple(t.shape) for n, t in split(build(path).state_dict()).items()}
    rng = np.random.default_rng(seed)
    variant.save(path, {n: draw(n, shapes[n], text, rng) for n in sorted(shapes)}, rng)
    sp = special(text["vocab_size"])
    one_eos = text["model_type"] == "qwen2_moe"
    version = json.loads((path / "config.json").read_text())["transformers_version"]
    write_json(path / "generation_config.json", {
        "bos_token_id": sp["endoftext"], **variant.sampling,
        "eos_token_id": text["eos_token_id"] if one_eos else [sp["im_end"], sp["endoftext"]],
        "pad_token_id": sp["endoftext"], "transformers_version": version})


SAMPLE35 = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
SAMPLE3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
LINEAR = ["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]
KEEP35 = ["lm_head", "model.visual", "mtp.fc", "model.language_model.embed_tokens"] + [
    f"model.language_model.layers.{i}.{m}" for i in range(4)
    for m in ["mlp.gate", "mlp.shared_expert_gate"] + LINEAR * (i < 3)]
KEEP3 = ["lm_head"] + [f"model.layers.{i}.{m}" for i in range(2)
                       for m in ("input_layernorm", "mlp.gate", "post_attention_layernorm")]
VARIANTS: dict[str, Variant] = {
    "qwen35_bf16_fused": Variant(qwen35_wrapper(qwen35_text(
        240, "3.6", hidden_size=72, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=12, linear_value_head_dim=16, num_experts=12, num_experts_per_tok=3,
        moe_intermediate_size=10, shared_expert_intermediate_size=24), "3.6"),
        save_qwen35_bf16, SAMPLE35),
    "qwen35_fp8": Variant(qwen35_wrapper(qwen35_text(
        200, "3.5", hidden_size=136, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=48, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=24, linear_value_head_dim=16, num_experts=10, num_experts_per_tok=3,
        moe_intermediate_size=12, shared_expert_intermediate_size=20), "3.5") | fp8(KEEP35),
        save_qwen35_fp8, SAMPLE35),
    "qwen35_text_f32": Variant(qwen35_text(
        200, "3.6", interval=2, rotary=0.5, rms_norm_eps=1e-3, hidden_size=40,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8,
        shared_expert_intermediate_size=16),
        save_by_transformers("F32", fused=False), {}),
    "qwen3_fp8": Variant(qwen3(
        200, hidden_size=132, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=132)
        | fp8(KEEP3), save_qwen3_fp8, SAMPLE3),
    "qwen3_bf16": Variant(qwen3(
        300, hidden_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=12,
        norm_topk_prob=False, rope_theta=5000000.0),
        save_bf16, SAMPLE3),
    "qwen2_bf16_tied": Variant(qwen2(
        300, hidden_size=72, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=100, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=10,
        shared_expert_intermediate_size=40, mlp_only_layers=[1], rope_theta=10000.0,
        tie_word_embeddings=True),
        save_bf16, {"max_new_tokens": 2048}),
    "qwen2_f16_fused": Variant(qwen2(
        300, hidden_size=40, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=72, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, decoder_sparse_step=2, norm_topk_prob=True,
        rms_norm_eps=1e-2),
        save_by_transformers("F16", fused=True), {}),
}
