"""The same bits whatever the placement: cache, policy, threads, kernels, I/O, chunking, company.

Every case also proves from the statistics that its setting took effect.
"""

import os

import numpy as np
import pytest
from conftest import MODELS, open_small
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import budget, engine, modes


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def cut(n, edges):
    points = sorted({0, n, *(e % n for e in edges)})
    return list(zip(points[:-1], points[1:], strict=True))


def run(model, prompt, pieces):
    with model.session() as session:
        return np.concatenate([session.forward(prompt[a:b]) for a, b in pieces])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("isa", engine.isas())
def test_kernel_sets(name, isa, expected, reference):
    with open_small(name, isa=isa, threads=2) as model:
        assert same(run(model, expected[name]["prompt"], [(0, 150)]), reference[name])
        assert model.stats().isa == isa


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", modes.MODEL_POLICIES)
def test_smallest_cache_and_token_by_token(name, policy, expected, reference):
    prompt = expected[name]["prompt"][:70]  # past one KV page
    floor = 1 if policy in modes.PER_LAYER else 3
    with open_small(name, policy=policy, slots=floor) as model:
        got = run(model, prompt, [(i, i + 1) for i in range(70)])
        stats = model.stats()
    assert same(got, reference[name][:70])
    assert stats.evictions > 0 and stats.misses > stats.slots
    assert stats.policy == policy
    assert stats.expert_rows == stats.hits + stats.misses  # one token: no expert twice in a layer


def takes_direct_reads(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


IO = [name for name, missing in engine.io_modes().items() if missing is None]


@pytest.mark.parametrize("io", engine.IO_MODES)
def test_io_modes(io, expected, reference):
    if io not in IO:
        pytest.skip(engine.io_modes()[io])
    with open_small("qwen35_fp8", io=io, slots=None if io == "mmap" else 4) as model:
        assert same(
            run(model, expected["qwen35_fp8"]["prompt"], [(0, 150)]), reference["qwen35_fp8"]
        )
        stats = model.stats()
    files = stats.files_direct + stats.files_pread
    direct = io != "pread" and takes_direct_reads(model.files[0])
    assert files == len(model.files) and stats.files_direct == (files if direct else 0)
    assert stats.io_asked == io and bool(stats.io_note) == (io != "pread" and not direct)
    if io == "auto" and direct:
        assert stats.io in ("direct", "uring")
        assert {name for name, _, _ in stats.io_tried} <= {"direct", "uring"}
        assert (stats.io, stats.lanes) in [tried[:2] for tried in stats.io_tried]
        assert all(gbs > 0 for _, _, gbs in stats.io_tried)
    else:
        assert stats.io == (io if direct or io == "mmap" else "pread") and not stats.io_tried
    assert (0 if stats.io == "uring" else 1) <= stats.lanes_ran <= stats.lanes
    assert 0 < stats.busy_s <= stats.prefill_s and 0 < stats.queue_depth <= stats.reads
    assert stats.read_gbs == pytest.approx(stats.bytes_read / stats.busy_s / 1e9)
    assert stats.reads == stats.misses > 0
    assert stats.misses <= 40  # one chunk: each of 4 x 10 experts is read at most once
    assert stats.expert_rows == 4 * 150 * 3


def test_reading_ahead(expected, reference):
    """More than a whole trial of tokens: with guesses and without, wrong ones and right ones."""
    prompt = expected["qwen35_fp8"]["prompt"][:70]
    with open_small("qwen35_fp8", slots=6) as model:
        assert model.memory.ahead == 3
        got = run(model, prompt, [(i, i + 1) for i in range(70)])
        stats = model.stats()
    assert same(got, reference["qwen35_fp8"][:70])
    assert 0 < stats.ahead_used < stats.ahead_reads
    with open_small("qwen35_fp8", slots=40) as model:  # all of them
        assert model.memory.ahead == 0
        run(model, prompt, [(i, i + 1) for i in range(70)])
        assert model.stats().ahead_reads == 0


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    policy=st.sampled_from(modes.MODEL_POLICIES),
    slots=st.integers(3, 14),
    threads=st.integers(1, 4),
    isa=st.sampled_from(engine.isas()),
    io=st.sampled_from(IO),
    edges=st.lists(st.integers(1, 149), max_size=6),
    chunk=st.sampled_from([8, 16, 64]),
)
def test_any_setting(name, policy, slots, threads, isa, io, edges, chunk, expected, reference):
    prompt = expected[name]["prompt"]
    if io == "mmap":
        slots = None  # all of them
    elif policy in modes.PER_LAYER:
        slots = 1 + slots % 4
    else:
        slots = min(slots, 8)  # the smallest model has 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "CHUNKS", (chunk,))
        with open_small(name, policy=policy, slots=slots, threads=threads, isa=isa, io=io) as model:
            got = run(model, prompt, cut(len(prompt), edges))
            stats = model.stats()
    assert same(got, reference[name])
    assert (stats.policy, stats.isa, stats.threads, stats.chunk) == (policy, isa, threads, chunk)
    assert stats.threads_ran <= threads and stats.misses > 0 and stats.io_asked == io


def test_threads_really_run(expected, reference):
    """With enough work every thread takes some."""
    with open_small("qwen3_fp8", threads=4) as model:
        for _ in range(50):
            got = run(model, expected["qwen3_fp8"]["prompt"], [(0, 150)])
            if model.stats().threads_ran == 4:
                break
        assert model.stats().threads_ran == 4
        assert same(got, reference["qwen3_fp8"])


@pytest.mark.parametrize("name", MODELS)
def test_alone_or_in_company(name, expected, reference):
    """Three sequences of unlike length, in one step each, against the same alone."""
    prompt, ref = expected[name]["prompt"], reference[name]
    with open_small(name, slots=4, threads=2, ctx=150, ram="512M") as model:
        sessions = [model.session() for _ in range(3)]
        lengths = [150, 7, 70]
        rows = model.forward(
            [(s, prompt[:n]) for s, n in zip(sessions[:1], lengths[:1], strict=True)]
        )
        assert same(rows[0], ref[149])
        sessions[0].close()
        a, b = sessions[1:]
        rows = model.forward([(a, prompt[:7]), (b, prompt[:40])])
        assert same(rows[0], ref[6]) and same(rows[1], ref[39])
        for i in range(3):
            rows = model.forward([(b, prompt[40 + i : 41 + i]), (a, prompt[7 + i : 8 + i])])
            assert same(rows[0], ref[40 + i]) and same(rows[1], ref[7 + i])


@pytest.mark.parametrize("name", MODELS)
def test_bf16_kv_is_the_same_in_any_chunking(name, expected):
    prompt = expected[name]["prompt"]
    with open_small(name, kv="bf16") as model:
        whole = run(model, prompt, [(0, 150)])
        parts = run(model, prompt, [(0, 1), (1, 63), (63, 65), (65, 150)])
        assert same(whole, parts)
        assert model.stats().kv == "bf16"
    with open_small(name) as model:
        assert not same(run(model, prompt, [(0, 150)]), whole)  # the setting took effect


def test_score_is_the_log_softmax(expected, reference):
    name = "qwen3_bf16"
    prompt, z = expected[name]["prompt"], reference[name].astype(np.float64)
    want = (
        z
        - np.log(np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        - z.max(axis=1, keepdims=True)
    )
    with open_small(name) as model:
        got = model.session().score(prompt)
    assert np.abs(got - want[np.arange(149), prompt[1:]]).max() < 1e-5
