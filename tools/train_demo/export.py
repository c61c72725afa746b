"""Writes the trained model as a checkpoint in the official FP8 layout.

    python export.py RUN FOLDER

Matrices of mixers and experts as F8_E4M3 with a BF16 scale per 128x128 block (`weight_scale_inv`), embeddings, router,
norms and the rest in BF16; tensors of each dtype side by side, in order of name, as Hugging Face's writer does.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

import torch
from corpus import IM_END, SPECIAL
from net import Net, Shape, fp8_parts
from torch import Tensor

# ChatML, as the training documents have it.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant only') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FP8 = (
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}


def tensors(net: Net) -> dict[str, Tensor]:
    """The checkpoint's tensors by their official names."""
    out: dict[str, Tensor] = {}

    def put(name: str, w: Tensor) -> None:
        if name.removesuffix(".weight").rsplit(".", 1)[-1] in FP8:
            out[name], out[f"{name}_scale_inv"] = fp8_parts(w)
        else:
            out[name] = w.bfloat16()

    put("model.embed_tokens.weight", net.embed.data)
    put("model.norm.weight", net.norm.data)
    for i, layer in enumerate(net.layers):
        at = f"model.layers.{i}"
        put(f"{at}.input_layernorm.weight", layer.input_layernorm.data)
        put(f"{at}.post_attention_layernorm.weight", layer.post_attention_layernorm.data)
        mixer = "self_attn" if net.s.is_full(i) else "linear_attn"
        for name, p in layer.mixer.named_parameters():
            put(
                f"{at}.{mixer}.{name}" + ("" if name in ("A_log", "dt_bias") else ".weight"), p.data
            )
        for name, p in layer.mlp.named_parameters():
            if p.dim() == 3:
                for e, w in enumerate(p.data):
                    put(f"{at}.mlp.experts.{e}.{name}.weight", w)
            elif name in ("gate", "shared_expert_gate"):
                put(f"{at}.mlp.{name}.weight", p.data)
            else:
                put(f"{at}.mlp.shared_expert.{name.removeprefix('shared_')}.weight", p.data)
    return out


def save(path: Path, named: dict[str, Tensor]) -> None:
    """A safetensors file, bytes side by side by dtype, then name."""
    order = sorted(named, key=lambda name: (DTYPES[named[name].dtype], name))
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        size = named[name].nbytes
        header[name] = {
            "dtype": DTYPES[named[name].dtype],
            "shape": list(named[name].shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            f.write(named[name].contiguous().view(torch.uint8).numpy().tobytes())


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    run, folder = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    net = Net(Shape())
    net.load_state_dict(torch.load(run / "state.pt")["net"])
    save(folder / "model.safetensors", tensors(net))
    end = Shape().vocab - len(SPECIAL) + SPECIAL.index(IM_END)
    write_json(
        folder / "config.json",
        Shape().config()
        | {
            "eos_token_id": end,
            "quantization_config": {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
            },
        },
    )  # fmt: skip
    ends = [end, Shape().vocab - len(SPECIAL)]
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": Shape().positions, "bos_token": None,
            "eos_token": IM_END, "pad_token": SPECIAL[0], "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )  # fmt: skip
    shutil.copy(run / "tokenizer.json", folder)


if __name__ == "__main__":
    main()
