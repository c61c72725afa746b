"""A whole model with experts in VRAM, on whatever GPU there is: a real one or an emulated one (a build with
MOSAIC_CUDA=emulated). tests/cuda/check.sh runs this file with such a build; elsewhere it is skipped."""

from __future__ import annotations

import numpy as np
import pytest

import mosaic_c
from mosaic_c import engine, engine_pure
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.cli import main
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.limits import format_size
from mosaic_c.names import demo_folder


def missing() -> str:
    if (why := engine.gpu()) is not None:
        return why
    try:
        engine.gpu_probe(0)
    except MosaicError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no GPU here: {missing()}")

TEXT = "Once upon a time there was a small fox. "


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for each format that the GPU multiplies."""
    root = tmp_path_factory.mktemp("models")
    made = {"fp8": demo_folder()}
    for name in ("int4-g64", "mxfp4"):
        made[name] = root / name
        assert main(["synth", str(made[name]), "--experts", name, "--quiet"]) == 0
    return made


def ids_of(model, n):
    return [int(i) for i in np.random.default_rng(5).integers(1, model.vocab, n)]


def least(model):
    """VRAM of two layers' experts of one token, of a model that is open without a tier."""
    moe = model.plan.moe_layers
    slot = max(engine_pure.tier_slot(e) for e in Checkpoint.open(model.folder).locate().experts)
    width = max(m.experts.width for m in moe)
    work, _ = engine_pure.tier_work(
        model.plan.hidden, width, moe[0].top_k, model.memory.chunk, slot
    )
    return work + 2 * moe[0].top_k * slot


def run(folder, **options):
    """Logits of a prompt, of single tokens after it, and of two sequences together; the statistics."""
    with mosaic_c.open(folder, ram="2G", ctx=256, **options) as model:
        ids = ids_of(model, 90)
        s = model.session()
        rows = [s.forward(ids[:70])]
        rows += [s.forward([i]) for i in ids[70:]]
        fork = s.fork()
        for a, b in ((3, 4), (5, 6), (7, 8)):
            rows += model.forward([(s, [a]), (fork, [b])])
        return np.concatenate([np.atleast_2d(r) for r in rows]), model.stats()


@pytest.mark.parametrize("name", ["fp8", "int4-g64", "mxfp4"])
@pytest.mark.parametrize("few", [True, False])
def test_the_bits_are_those_of_the_cpu(models, name, few):
    want, cpu = run(models[name], vram=0)
    assert cpu.gpu_slots == cpu.gpu_hits == cpu.gpu_vram == 0 and not cpu.gpu
    with mosaic_c.open(models[name], ram="2G", ctx=256, vram=0) as model:
        size = least(model) if few else "256M"
    got, gpu = run(models[name], vram=size, hot_after=1)
    assert gpu.gpu_hits > 0 and gpu.gpu_promotions > 0 and not gpu.gpu_note
    assert gpu.gpu_rows >= gpu.gpu_hits
    if few:
        assert gpu.gpu_evictions > 0
    assert np.array_equal(want.view(np.int32), got.view(np.int32))


def test_a_cache_in_ram_that_is_too_small_for_anything(models):
    want, _ = run(models["fp8"], vram=0)
    got, gpu = run(models["fp8"], vram="64M", hot_after=1, slots=4, threads=3, policy="lru")
    assert gpu.gpu_hits > 0 and gpu.evictions > 0
    assert np.array_equal(want.view(np.int32), got.view(np.int32))


def test_an_expert_in_vram_is_not_read_again(models):
    """With all that a text calls in VRAM, and the smallest cache in RAM, the text reads nothing."""
    options = {"ram": "2G", "ctx": 256, "vram": "64M", "hot_after": 1, "slots": 4}
    with mosaic_c.open(models["mxfp4"], **options) as model:
        s = model.session()
        ids = ids_of(model, 3)
        for _ in range(500):  # until all of its experts are there
            before = model.stats()
            s.rewind(0)
            s.forward(ids)
            after = model.stats()
            if after.misses == before.misses and after.hits == before.hits:
                break
        assert after.gpu_hits > before.gpu_hits and after.gpu_rows > before.gpu_rows
        assert after.hits == before.hits and after.reads - after.ahead_reads == (
            before.reads - before.ahead_reads
        )


def test_generate_shows_both_memories(models, capsys):
    args = [
        "generate",
        TEXT,
        "-n",
        "12",
        "--temp",
        "0",
        "--vram",
        "8M",
        "--hot-after",
        "1",
        "--stats",
    ]
    assert main([*args, "--quiet"]) == 0
    with_gpu = capsys.readouterr()
    assert main([*args[:6], "--vram", "0", "--stats", "--quiet"]) == 0
    without = capsys.readouterr()
    assert with_gpu.out == without.out
    assert "over the bus" in with_gpu.err and "over the bus" not in without.err
    (total,) = [line for line in with_gpu.err.splitlines() if line.startswith("total ")]
    info = engine.gpu_probe(0)
    assert format_size(info["total"]) in total


def test_verify_has_a_row_of_the_gpu(models, capsys):
    assert main(["verify", "-m", "demo", "--vram", "8M"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu")]
    assert row.split("equal")[0].startswith("gpu, few slots") and "computed on the GPU" in row


def test_what_cannot_be_is_one_line(models):
    with pytest.raises(UsageError, match="more than is free"):
        mosaic_c.open(models["fp8"], vram="900G")
    with pytest.raises(UsageError, match="too small"):
        mosaic_c.open(models["fp8"], vram=1000)
    with pytest.raises(UsageError, match=r"gpu: .*63|gpu: .*device"):
        mosaic_c.open(models["fp8"], vram="1M", gpu=63)
