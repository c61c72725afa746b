"""Every weight of a plan found in its file, and a named refusal for what does not fit."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_checkpoint import (
    FP8,
    QWEN2,
    QWEN3,
    QWEN35,
    QWEN36_35B,
    Config,
    Spec,
    changed,
    header_of,
    quantised_by_default,
    refusal,
    tensors_of,
    write_checkpoint,
)

from mosaic_c.bind import Located, Span
from mosaic_c.checkpoint import DTYPE_CODES, TENSOR_DTYPE, Checkpoint
from mosaic_c.dtypes import BITS
from mosaic_c.families import plan_for
from mosaic_c.plan import Weight

VECTORS = sorted(p.parent for p in (Path(__file__).parent / "vectors").glob("*/config.json"))
QWEN3_FP8: Config = {**QWEN3, "quantization_config": FP8}
FIRST = "model.layers.0."


def located(tmp_path: Path, config: Config, tensors: Spec) -> Located:
    return Checkpoint.open(write_checkpoint(tmp_path / "m", config, tensors)).locate()


def refused(
    tmp_path: Path, config: Config, tensors: Spec, *words: str, code: str = "EFORMAT"
) -> str:
    where = str(tmp_path / "m")
    return refusal(lambda: located(tmp_path, config, tensors), where, *words, code=code)


def bf16(config: Config = QWEN3, **kinds: bool) -> Spec:
    return tensors_of(plan_for(config), **kinds)


def fp8(config: Config = QWEN3_FP8, scale: str = "BF16", fused: bool = False) -> Spec:
    return tensors_of(plan_for(config), fp8=quantised_by_default, scale=scale, fused=fused)


def fill(path: Path, seed: int = 1) -> dict[str, np.ndarray]:
    """Random bytes for the data of a file; each tensor as uint8 (*shape, element size)."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, len(raw) - 8 - n, np.uint8)
    path.write_bytes(raw[: 8 + n] + data.tobytes())
    out = {}
    for name, entry in json.loads(raw[8 : 8 + n]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = data[begin:end].reshape(*entry["shape"], -1)
    return out


def read(path: Path, offset: int, rows: int, cols: int, size: int) -> np.ndarray:
    with path.open("rb") as f:
        f.seek(offset)
        return np.frombuffer(f.read(rows * cols * size), np.uint8).reshape(rows, cols, size)


SIZE = {code: BITS[x] // 8 for x, code in DTYPE_CODES.items() if BITS[x] >= 8}


def check_expert(path: Path, record: np.void, weight: np.ndarray, scale: np.ndarray | None) -> None:
    """The bytes that a record points to are those of the tensor and of its scale."""
    rows, cols, size = weight.shape
    assert (record["rows"], record["cols"], SIZE[int(record["dtype"])]) == (rows, cols, size)
    assert (read(path, int(record["offset"]), rows, cols, size) == weight).all()
    assert (record["scale_file"] == -1) == (scale is None)
    if scale is not None:
        rows, cols, size = scale.shape
        assert SIZE[int(record["scale_dtype"])] == size
        assert (read(path, int(record["scale_offset"]), rows, cols, size) == scale).all()


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", VECTORS, ids=lambda p: p.name)
def test_tiny_models_in_real_layouts(folder: Path) -> None:
    c = Checkpoint.open(folder)
    where = c.locate()
    used = sum(1 + (s.scale_file is not None) for s in where.spans.values())
    for moe, e in zip(where.plan.moe_layers, where.experts, strict=True):
        assert moe.experts and e.shape == (moe.experts.count, 3) and e.flags.c_contiguous
        assert memoryview(e).nbytes == moe.experts.count * 3 * TENSOR_DTYPE.itemsize
        if moe.experts.fused[0] in c.tensors:
            used += 2 + 2 * (moe.experts.fused[0] + "_scale_inv" in c.tensors)
        else:
            used += e.size + int((e["scale_file"] >= 0).sum())
    assert used + sum(n for n, _ in where.skipped.values()) == len(c.tensors)
    assert list(where.spans) == [w.name for w in where.plan.weights()]
    for name, span in where.spans.items():
        info = c.tensors[name]
        assert (span.file, span.dtype, span.offset) == (info.file, info.dtype, info.offset)
        assert span.nbytes == info.nbytes
        if span.scale_file is not None:
            scale = c.tensors[name + "_scale_inv"]
            assert (span.scale_file, span.scale_dtype) == (scale.file, scale.dtype)
            assert (span.scale_offset, span.scale_nbytes) == (scale.offset, scale.nbytes)


def test_vectors_and_convolutions(tmp_path: Path) -> None:
    where = located(tmp_path, QWEN35, bf16(QWEN35))
    d = where.plan.delta_layers[0]
    conv, a_log = where.span(d.conv), where.span(d.a_log)
    assert (conv.rows, conv.cols) == (64, 4) and (a_log.rows, a_log.cols) == (1, 4)
    assert (where.span(d.qkv).rows, where.span(d.qkv).cols) == (64, 40)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_plain_types(tmp_path: Path, dtype: str) -> None:
    where = located(tmp_path, QWEN3, tensors_of(plan_for(QWEN3), dtype))
    assert {s.dtype for s in where.spans.values()} == {dtype}
    assert set(np.unique(where.experts[0]["dtype"])) == {DTYPE_CODES[dtype]}
    for field, absent in (("scale_file", -1), ("scale_dtype", 0), ("scale_offset", 0)):
        assert (where.experts[0][field] == absent).all()


@pytest.mark.parametrize("scale", ["BF16", "F32"])
def test_per_expert_fp8(tmp_path: Path, scale: str) -> None:
    where = located(tmp_path, QWEN3_FP8, fp8(scale=scale))
    data = fill(where.files[0])
    for layer, e in enumerate(where.experts):
        for i in range(12):
            for part, name in enumerate(("gate", "up", "down")):
                full = f"model.layers.{layer}.mlp.experts.{i}.{name}_proj.weight"
                check_expert(where.files[0], e[i, part], data[full], data[full + "_scale_inv"])
    q = where.span(where.plan.attention_layers[0].q)
    assert (q.dtype, q.scale_dtype, q.scale_nbytes) == (
        "F8_E4M3",
        scale,
        2 * (2 + 2 * (scale == "F32")),
    )
    assert where.span(where.plan.embed).scale_file is None


@pytest.mark.parametrize("kind", ["BF16", "F32", "fp8 with BF16 scales", "fp8 with F32 scales"])
def test_fused_experts(tmp_path: Path, kind: str) -> None:
    """Rows of gate_up are gate, then up; hidden 129 has a partial block."""
    config = changed(QWEN3_FP8, "moe_intermediate_size", 256)
    if kind.startswith("fp8"):
        tensors = fp8(config, scale=kind.split()[2], fused=True)
    else:
        tensors = tensors_of(plan_for(config), kind, fused=True)
    where = located(tmp_path, config, tensors)
    data, path = fill(where.files[0]), where.files[0]
    for layer, e in enumerate(where.experts):
        at = f"model.layers.{layer}.mlp.experts."
        gate_up, down = data[at + "gate_up_proj"], data[at + "down_proj"]
        s, t = data.get(at + "gate_up_proj_scale_inv"), data.get(at + "down_proj_scale_inv")
        for i in range(12):
            check_expert(path, e[i, 0], gate_up[i, :256], None if s is None else s[i, :2])
            check_expert(path, e[i, 1], gate_up[i, 256:], None if s is None else s[i, 2:])
            check_expert(path, e[i, 2], down[i], None if t is None else t[i])


def test_some_tensors_quantised(tmp_path: Path) -> None:
    """Quantised is what has a scale, whatever modules_to_not_convert says."""
    config = changed(QWEN3_FP8, "quantization_config.modules_to_not_convert", ["nonsense"])
    some = re.compile(r"experts\.[02]\.(up|down)|layers\.1\.self_attn")
    tensors = tensors_of(plan_for(config), fp8=lambda name: bool(some.search(name)))
    where = located(tmp_path, config, tensors)
    kinds = where.experts[0]["dtype"]
    assert kinds[0].tolist() == [1, 3, 3] and kinds[1].tolist() == [1, 1, 1]
    assert ((kinds == 3) == (where.experts[0]["scale_file"] == 0)).all()
    assert where.span(where.plan.attention_layers[1].o).dtype == "F8_E4M3"
    assert where.span(where.plan.attention_layers[0].o).dtype == "BF16"


def test_layouts_may_differ_between_layers(tmp_path: Path) -> None:
    one, fused = bf16(), bf16(fused=True)
    mixed = {n: s for n, s in one.items() if "layers.1.mlp.experts" not in n}
    mixed |= {n: s for n, s in fused.items() if "layers.1.mlp.experts" in n}
    where = located(tmp_path, QWEN3, mixed)
    assert [e.shape for e in where.experts] == [(12, 3), (12, 3)]


def test_skipped_and_ignored(tmp_path: Path) -> None:
    extra: Spec = {
        "model.visual.blocks.0.attn.qkv.weight": ("BF16", (4, 4)),
        "mtp.layers.0.mlp.experts.999.gate_proj.weight": ("F8_E4M3", (8, 8)),
        "mtp.layers.0.mlp.experts.999.gate_proj.weight_scale_inv": ("BF16", (1, 1)),
        "mtp.fc.weight": ("F64", (3,)),
        "model.language_model.layers.3.self_attn.rotary_emb.inv_freq": ("F32", (4,)),
    }
    where = located(tmp_path, QWEN35, {**bf16(QWEN35), **extra})
    assert where.skipped == {"model.visual.": (1, 32), "mtp.": (3, 90)}
    assert where.ignored == ["model.language_model.layers.3.self_attn.rotary_emb.inv_freq"]


def test_tied_head(tmp_path: Path) -> None:
    config = changed(QWEN2, "tie_word_embeddings", True)
    tensors = bf16(config)
    where = located(tmp_path, config, tensors)
    assert where.plan.head is None and "lm_head.weight" not in where.spans
    stored = located(tmp_path / "2", config, {**tensors, "lm_head.weight": ("BF16", (40, 72))})
    assert stored.plan.head == Weight("lm_head.weight", (40, 72))
    assert stored.span(stored.plan.head).cols == 72
    refused(tmp_path, QWEN2, tensors, "missing 1 of the tensors", '"lm_head.weight"')


def test_span_sizes() -> None:
    span = Span(0, "F8_E4M3", 10, 129, 200, 1, "F32", 5)
    assert (span.nbytes, span.scale_nbytes) == (129 * 200, 16)
    assert (Span(0, "F32", 0, 1, 3).nbytes, Span(0, "F32", 0, 1, 3).scale_nbytes) == (12, 0)


# ---- what is refused -----------------------------------------------------------------------------


def test_missing_tensors(tmp_path: Path) -> None:
    tensors = bf16()
    del tensors["model.norm.weight"], tensors[FIRST + "self_attn.q_norm.weight"]
    text = "missing 2 of the tensors that its config.json asks for"
    refused(tmp_path, QWEN3, tensors, text, '"model.norm.weight"', "q_norm.weight")


def test_missing_experts(tmp_path: Path) -> None:
    tensors = {n: s for n, s in bf16().items() if not re.search(r"1\.mlp\.experts\.[3-9]\.", n)}
    at = '"model.layers.1.mlp.experts.'
    refused(
        tmp_path, QWEN3, tensors, "missing 21 of the", at + "3.gate", at + "7.gate", "21 in all"
    )
    fused = bf16(fused=True)
    del fused[FIRST + "mlp.experts.gate_up_proj"]
    refused(tmp_path, QWEN3, fused, "missing 1 of the", '"model.layers.0.mlp.experts.gate_up_proj"')
    none = {n: s for n, s in bf16().items() if ".experts." not in n}
    refused(tmp_path, QWEN3, none, "missing 72 of the")


def test_names_with_another_prefix(tmp_path: Path) -> None:
    tensors = {n.replace("language_model.", ""): s for n, s in bf16(QWEN35).items()}
    refused(
        tmp_path, QWEN35, tensors, '"model.language_model.embed_tokens.weight"', "found",
        '"model.embed_tokens.weight"',
    )  # fmt: skip


def test_experts_in_both_layouts(tmp_path: Path) -> None:
    tensors = {**bf16(fused=True), FIRST + "mlp.experts.3.up_proj.weight": ("BF16", (24, 129))}
    refused(tmp_path, QWEN3, tensors, "both fused", "gate_up_proj", "experts.{e}.up_proj")


def test_experts_and_layers_beyond_the_config(tmp_path: Path) -> None:
    bigger = bf16(changed(QWEN3, "num_experts", 13))
    same = {n: s if ".gate.weight" not in n else ("BF16", (12, 129)) for n, s in bigger.items()}
    refused(
        tmp_path, QWEN3, same, "6 tensors beyond the config", "num_experts = 12",
        '"model.layers.0.mlp.experts.12.gate_proj.weight"',
    )  # fmt: skip
    deeper = bf16(changed(QWEN3, "num_hidden_layers", 3))
    refused(
        tmp_path, QWEN3, deeper, "beyond the config", "num_hidden_layers = 2",
        '"model.layers.2.input_layernorm.weight"',
    )  # fmt: skip
    odd: Spec = {**bf16(), "model.layers." + "9" * 5000 + ".x": ("BF16", (1,))}
    refused(tmp_path, QWEN3, odd, "beyond the config")


def test_unknown_tensors(tmp_path: Path) -> None:
    for name in ("self_attn.q_proj.bias", "mlp.gate.e_score_correction_bias", "self_attn.sinks",
                 "mlp.experts.0.up_proj.bias", "mlp.experts.gate_up_proj_bias"):  # fmt: skip
        tensors = {**bf16(), FIRST + name: ("BF16", (8,))}
        refused(tmp_path, QWEN3, tensors, "1 tensors that this family does not know",
                f'"{FIRST}{name}"', code="EUNSUPPORTED")  # fmt: skip
    more = {f"extra.{i}": ("BF16", (1,)) for i in range(9)}
    refused(tmp_path, QWEN3, {**bf16(), **more}, "9 tensors", '"extra.4"', "9 in all",
            code="EUNSUPPORTED")  # fmt: skip
    scale: Spec = {**fp8(), FIRST + "self_attn.q_proj.input_scale": ("F32", (1,))}
    refused(tmp_path, QWEN3_FP8, scale, "input_scale", code="EUNSUPPORTED")


@pytest.mark.parametrize(
    "name, shape",
    [
        ("model.norm.weight", (137,)),
        ("model.norm.weight", (1, 129)),
        (FIRST + "self_attn.q_proj.weight", (129, 64)),
        (FIRST + "mlp.gate.weight", (13, 129)),
        (FIRST + "mlp.experts.5.down_proj.weight", (24, 129)),
        ("lm_head.weight", (41, 129)),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = bf16()
    expected = list(tensors[name][1])
    tensors[name] = ("BF16", shape)
    refused(tmp_path, QWEN3, tensors, "model.safetensors", f'"{name}"',
            f"expected shape {expected}", f"got {list(shape)}")  # fmt: skip


def test_wrong_shape_of_fused_experts(tmp_path: Path) -> None:
    tensors = bf16(fused=True)
    name = FIRST + "mlp.experts.gate_up_proj"
    tensors[name] = ("BF16", (12, 129, 48))  # transposed, as some older families store it
    refused(tmp_path, QWEN3, tensors, f'"{name}"', "[12, 48, 129]", "got [12, 129, 48]")


@pytest.mark.parametrize("dtype", ["F64", "I8", "U8", "F8_E5M2", "F8_E8M0", "BOOL", "I64"])
@pytest.mark.parametrize("name", ["model.norm.weight", FIRST + "mlp.experts.7.up_proj.weight"])
def test_types_the_engine_lacks(tmp_path: Path, dtype: str, name: str) -> None:
    tensors = bf16()
    tensors[name] = (dtype, tensors[name][1])
    refused(tmp_path, QWEN3, tensors, f'"{name}"', "F32, BF16, F16, F8_E4M3", f"got {dtype}",
            code="EUNSUPPORTED")  # fmt: skip


EXPERT = FIRST + "mlp.experts.2.down_proj.weight"
DENSE = FIRST + "self_attn.k_proj.weight"


@pytest.mark.parametrize("name", [EXPERT, DENSE])
def test_scales(tmp_path: Path, name: str) -> None:
    scale = name + "_scale_inv"
    good = fp8()
    located(tmp_path, QWEN3_FP8, good)
    shape = good[scale][1]

    without = {n: s for n, s in good.items() if n != scale}
    refused(tmp_path, QWEN3_FP8, without, f'"{name}"', f'needs its scale "{scale}"', "no such")
    rows: Spec = {**without, name + "_scale": ("F32", (shape[0], 1))}
    refused(tmp_path, QWEN3_FP8, rows, f'"{name}"', f'got "{name}_scale"')
    plain: Spec = {**good, name: ("BF16", good[name][1])}
    refused(tmp_path, QWEN3_FP8, plain, f'"{name}"', scale, "expected dtype F8_E4M3", "got BF16")
    located(tmp_path, QWEN3_FP8, {**good, scale: ("F8_E8M0", shape)})
    for dtype in ("F16", "F64", "F8_E4M3"):
        other: Spec = {**good, scale: (dtype, shape)}
        refused(tmp_path, QWEN3_FP8, other, f'"{scale}"', "F32, BF16, F8_E8M0", f"got {dtype}",
                code="EUNSUPPORTED")  # fmt: skip
    for wrong in ((1, 1), (4, 4), (shape[0], 129), (1,), ()):
        if wrong == shape:
            continue
        other = {**good, scale: ("BF16", wrong)}
        refused(tmp_path, QWEN3_FP8, other, f'"{scale}"', f"expected shape {list(shape)}",
                "128x128", f"got {list(wrong)}")  # fmt: skip
    refused(tmp_path, QWEN3, good, "F8_E4M3, but config.json has no quantization_config")


def test_fp8_where_there_are_no_blocks(tmp_path: Path) -> None:
    tensors: Spec = {**fp8(), "model.norm.weight": ("F8_E4M3", (129,))}
    tensors["model.norm.weight_scale_inv"] = ("BF16", (1, 2))
    refused(tmp_path, QWEN3_FP8, tensors, '"model.norm.weight"', "not a matrix", "F8_E4M3",
            code="EUNSUPPORTED")  # fmt: skip


def test_fused_fp8_whose_halves_share_a_block(tmp_path: Path) -> None:
    refused(tmp_path, QWEN3_FP8, fp8(fused=True), "gate_up_proj", "multiple of 128", "got 24",
            code="EUNSUPPORTED")  # fmt: skip


# ---- size ----------------------------------------------------------------------------------------


def test_qwen36_35b_opens_in_about_a_second(tmp_path: Path) -> None:
    """The names and shapes of the real FP8 release, 62,303 tensors in 41 sparse files of 36 GB."""

    def place(name: str) -> str:
        layer = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
        return f"layers-{layer[1]}.safetensors" if layer else "outside.safetensors"

    tensors = fp8(QWEN36_35B)
    try:
        folder = write_checkpoint(tmp_path / "m", QWEN36_35B, tensors, place)
    except OSError:
        pytest.skip("no sparse files here")
    start = time.process_time()
    c = Checkpoint.open(folder)
    where = c.locate()
    seconds = time.process_time() - start
    assert len(c.tensors) == 62303 and len(c.files) == 41
    assert sum(len(e) for e in where.experts) == 10240 and where.experts[0].dtype == TENSOR_DTYPE
    assert sum(s.nbytes + s.scale_nbytes for s in where.spans.values()) == 3_491_791_616
    assert seconds < 4, seconds


def test_absurd_config_is_refused_quickly(tmp_path: Path) -> None:
    config = changed(changed(QWEN3, "num_experts", 4096), "num_hidden_layers", 1024)
    tensors: Spec = {**bf16(), FIRST + "mlp.gate.weight": ("BF16", (4096, 129))}
    tensors["model.layers.1.mlp.gate.weight"] = ("BF16", (4096, 129))
    start = time.process_time()
    refused(tmp_path, config, tensors, "or more of the tensors", "in all")
    assert time.process_time() - start < 4


def test_helper_writes_what_the_library_writes() -> None:
    """Element size descending, then name: the order of official files."""
    order = list(header_of({"b": ("BF16", (1,)), "a": ("F8_E4M3", (1,)), "c": ("BF16", (1,))}))
    assert order == ["__metadata__", "b", "c", "a"]
