"""deepseek_v4: one K=V head, compressed attention, four residual streams, 4-bit experts."""

from __future__ import annotations

from fractions import Fraction

from mosaic_c.architectures.common import MIXTRAL, Sizes, experts, kept, linear, mlp, repeat
from mosaic_c.architectures.tensors import ROWS, Architecture, Tensor, fp8_blocks
from mosaic_c.families.config import MAX_DIM, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Config

SLIDING, CSA, HCA = 0, 4, 128  # compress_ratios: tokens to an entry; CSA windows overlap


def ratios(c: Config, layers: int) -> list[int]:
    """The compression of each layer; entries past the last layer belong to prediction layers."""
    values = c.need("compress_ratios")
    if not isinstance(values, list) or len(values) < layers:
        got = f"{len(values)} entries" if isinstance(values, list) else values
        raise c.error("compress_ratios", f"a list of at least {layers} entries", got)
    for i, value in enumerate(values[:layers]):
        if type(value) is not int or value not in (SLIDING, CSA, HCA):
            raise c.error(f"compress_ratios[{i}]", f"{SLIDING}, {CSA} or {HCA}", value)
    return values[:layers]


def compressor(at: str, ratio: int, dim: int, hidden: int) -> list[Tensor]:
    """Pools `ratio` tokens to an entry of dim values; CSA has a second half for the overlap."""
    rows = dim * (2 if ratio == CSA else 1)
    return [
        kept(f"{at}.wkv.weight", rows, hidden),
        kept(f"{at}.wgate.weight", rows, hidden),
        kept(f"{at}.ape", ratio, rows, dtype="F32"),
        kept(f"{at}.norm.weight", dim),
    ]


def pending(ratio: int, dim: int) -> int:
    """F32 values of tokens not yet pooled, keys and gates; CSA keeps a half of its last window."""
    return 2 * dim * (2 * (ratio - 1) + ratio) if ratio == CSA else 2 * dim * (ratio - 1)


def deepseek_v4(c: Config) -> Architecture:
    s = Sizes.read(c)
    kinds = ratios(c, s.layers)
    csa, hca = kinds.count(CSA), kinds.count(HCA)
    heads, dim = c.size("num_attention_heads", MAX_HEADS), c.size("head_dim", MAX_HEAD_DIM)
    c.only("num_key_value_heads", 1)
    rank, streams = c.size("q_lora_rank", MAX_DIM), c.size("hc_mult", 64)
    groups, o_rank = c.size("o_groups", MAX_HEADS), c.size("o_lora_rank", MAX_DIM)
    if heads * dim % groups:
        raise c.error("o_groups", f"a divisor of {heads} heads of {dim}", groups)
    hashed = c.size("num_hash_layers", s.layers, default=0, least=0)
    shared = s.width * c.size("n_shared_experts", 1024, default=0, least=0)
    window = c.size("sliding_window", 1 << 31)
    i_heads, i_dim = c.size("index_n_heads", MAX_HEADS), c.size("index_head_dim", MAX_HEAD_DIM)

    def mix(at: str, rows: int, scales: int) -> list[Tensor]:
        shape = (rows, streams * s.hidden)
        return [
            kept(f"{at}_fn", *shape, dtype="F32"),
            kept(f"{at}_base", rows, dtype="F32"),
            kept(f"{at}_scale", scales, dtype="F32"),
        ]

    def layer(at: str) -> list[Tensor]:
        attn = f"{at}.attn"
        return [
            *[t for x in ("hc_attn", "hc_ffn") for t in mix(f"{at}.{x}", (2 + streams) * streams, 3)],
            kept(f"{at}.attn_norm.weight", s.hidden),
            kept(f"{at}.ffn_norm.weight", s.hidden),
            linear(f"{attn}.wq_a", rank, s.hidden),
            linear(f"{attn}.wq_b", heads * dim, rank),
            linear(f"{attn}.wkv", dim, s.hidden),
            linear(f"{attn}.wo_a", groups * o_rank, heads * dim // groups),
            linear(f"{attn}.wo_b", s.hidden, groups * o_rank),
            kept(f"{attn}.q_norm.weight", rank),
            kept(f"{attn}.kv_norm.weight", dim),
            kept(f"{attn}.attn_sink", heads, dtype="F32"),
            kept(f"{at}.ffn.gate.weight", s.experts, s.hidden),
            *mlp(f"{at}.ffn.shared_experts", s.hidden, shared, names=MIXTRAL),
            *experts(f"{at}.ffn", s, MIXTRAL),
        ]  # fmt: skip

    at = "layers.{i}"
    indexer = [
        linear(f"{at}.attn.indexer.wq_b", i_heads * i_dim, rank),
        kept(f"{at}.attn.indexer.weights_proj.weight", i_heads, s.hidden),
        *compressor(f"{at}.attn.indexer.compressor", CSA, i_dim, s.hidden),
    ]
    bias = kept(f"{at}.ffn.gate.bias", s.experts, dtype="F32")
    table = Tensor(f"{at}.ffn.gate.tid2eid", (s.vocab, s.top_k), ROWS, "I64")
    vocab = (s.vocab, s.hidden)
    mtp = c.size("num_nextn_predict_layers", MAX_LAYERS, default=0, least=0)
    notes: tuple[str, ...] = ()
    if any(key.startswith("dspark_") for key in c.data):
        mtp, notes = 0, ("the DSpark drafter (mtp.*) is not counted in what the disk holds",)
    spare = [
        *layer("mtp.{i}"),
        kept("mtp.{i}.ffn.gate.bias", s.experts, dtype="F32"),
        linear("mtp.{i}.e_proj", s.hidden, s.hidden),
        linear("mtp.{i}.h_proj", s.hidden, s.hidden),
        *[kept(f"mtp.{{i}}.{x}.weight", s.hidden) for x in ("enorm", "hnorm", "norm")],
        *mix("mtp.{i}.hc_head", streams, 1),
    ]
    return Architecture(
        "deepseek_v4",
        (
            Tensor("embed.weight", vocab, ROWS, "BF16"),
            kept("head.weight", *vocab),
            kept("norm.weight", s.hidden),
            *mix("hc_head", streams, 1),
            *repeat(s.layers, *layer(at)),
            *repeat(hashed, table),
            *repeat(s.layers - hashed, bias),
            *repeat(csa, *compressor(f"{at}.attn.compressor", CSA, dim, s.hidden), *indexer),
            *repeat(hca, *compressor(f"{at}.attn.compressor", HCA, dim, s.hidden)),
        ),
        layers=s.layers,
        experts=s.experts,
        top_k=s.top_k,
        positions=s.positions,
        kv=csa * Fraction(dim + i_dim, CSA) + hca * Fraction(dim, HCA),
        window=s.layers * window * dim,
        recurrent=csa * (pending(CSA, dim) + pending(CSA, i_dim)) + hca * pending(HCA, dim),
        spare=tuple(repeat(mtp, *spare)),
        fp8=fp8_blocks(1),
        notes=notes,
    )
