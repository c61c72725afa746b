"""The memory plan: its sums, its floors, and that what it says is what the engine takes."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import VECTORS, open_small

import mosaic_c
from mosaic_c import MosaicError, UsageError, blocks, budget, engine_pure, guard, opening, synth
from mosaic_c.limits import read_limits
from mosaic_c.opening import plan_model
from mosaic_c.plan import Attention

HYBRID = "qwen35_fp8"


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """The test runner itself may be larger than the budgets tried here."""
    monkeypatch.setattr(budget, "process_bytes", lambda: 40 * budget.MB)
    monkeypatch.setattr(guard, "read_process", lambda proc: (40 * budget.MB, 0, 0))


def plan(name=HYBRID, **options):
    return plan_model(VECTORS / name, **({"ram": "1G", "threads": 2} | options))[-1]


def test_items_add_up_and_stay_under_the_budget():
    for ram in ("100M", "200M", "1G", "20G"):
        for policy in ("auto", "layer-lru"):
            m = plan(ram=ram, policy=policy, ctx=256)
            assert m.fits and m.total <= m.budget
            assert m.floor <= m.useful <= m.budget or m.warnings
            assert m.slots <= (10 if policy == "layer-lru" else 40)


def test_more_cores_than_threads_are_told(monkeypatch):
    many = replace(read_limits(), affinity=300, cpu_quota=None)
    monkeypatch.setattr(opening, "read_limits", lambda: many)
    m = plan(ram="8G", threads=None)
    assert m.threads == 256 and any("for 300 cores" in w for w in m.warnings)
    assert not any("cores" in w for w in plan(ram="8G").warnings)
    with open_small(HYBRID, ram="8G", threads=None) as model:
        assert model.stats().threads == 256


def test_more_memory_never_means_fewer_slots_or_less_context():
    plans = [plan(ram=f"{n}M") for n in (80, 90, 120, 200, 500)]
    for a, b in zip(plans[:-1], plans[1:], strict=True):
        assert a.ctx <= b.ctx and a.chunk <= b.chunk and a.floor == pytest.approx(b.floor, rel=0.1)


def test_two_floors():
    m = plan(ram="4G", ctx=256)
    slab = m.slab
    hard = plan(ram=m.floor + budget.MB, ctx=256)
    assert hard.fits and hard.slots >= 3
    assert not plan(ram=m.floor - 4 * budget.MB, ctx=256).fits
    starved = plan(ram="4G", ctx=256, slots=3)
    assert starved.fits and "12" in starved.warnings[0]  # 4 layers x top-3
    assert not plan(ram="4G", ctx=256, slots=12).warnings
    assert slab % 4096 == 0


@pytest.mark.parametrize("name", ["qwen35_fp8", "qwen3_bf16", "qwen2_f16_fused"])
@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "layer-lru"}, {"slots": 5}, {"ctx": 200}, {"io": "pread"}, {"io": "mmap"}],
)
def test_every_budget_from_the_floor_on_fits(name, options):
    floor = plan(name, ram="20M", **options).floor
    for extra in range(40):
        m = plan(name, ram=floor + extra * budget.MB, **options)
        assert m.fits and m.total <= m.budget and m.floor == floor


def test_the_embedding_stays_where_nothing_better_could():
    """Read by row while experts are missing from the cache; the same bits either way."""
    assert plan(ram="1G").embedding and not plan(ram="1G", slots=39).embedding
    for ram in range(50, 100, 2):
        m = plan(ram=f"{ram}M", ctx=256)
        assert not m.fits or m.total <= m.budget and (m.slots == 40 or not m.embedding)
    logits = []
    for slots in (None, 39):
        with mosaic_c.open(VECTORS / HYBRID, ram="1G", threads=2, ctx=256, slots=slots) as m:
            assert m.memory.embedding == (slots is None) == m.embed.resident
            logits.append(m.session().forward([5, 77, 3]))
    assert (logits[0].view(np.uint32) == logits[1].view(np.uint32)).all()


def test_given_slots_are_taken_exactly_or_refused():
    assert plan(slots=7).slots == 7
    with pytest.raises(UsageError, match="slots"):
        plan(slots=0)
    with pytest.raises(UsageError, match="slots: a token needs 3 experts .* got 2"):
        open_small(HYBRID, slots=2)


def test_context_default_and_limits():
    assert plan(ram="8G").ctx == min(32768, plan_model(VECTORS / HYBRID)[1].plan.max_positions)
    with pytest.raises(UsageError, match="ctx"):
        plan(ctx=10**7)


@pytest.mark.parametrize("io", ["auto", "direct", "pread", "mmap"])
def test_engine_takes_what_the_plan_says(io, expected):
    """Each tier of the engine against its items, and the hard limit above all of them."""
    for name in ("qwen35_fp8", "qwen2_bf16_tied", "qwen3_bf16"):
        with open_small(name, threads=2, io=io) as model:
            model.session().forward(expected[name]["prompt"])
            stats, items = model.stats(), {i.name: i.bytes for i in model.memory.items}
        assert stats.peak["weights"] <= items["dense weights"] + items["expert scales"]
        assert stats.resident["weights"] >= 0.4 * (items["dense weights"] + items["expert scales"])
        assert stats.peak["state"] <= items["KV cache"] + items["session state"]
        assert stats.resident["scratch"] == items["scratch"]
        assert stats.peak["meta"] <= items["expert tables"] + 64 * 1024
        assert stats.peak["cache"] <= items["expert cache"] + items["reads in flight"] + (2 << 20)
        if io == "mmap":
            assert (
                stats.resident["cache"] == items["expert cache"]
                and stats.slots == model.memory.hard
            )
        assert sum(stats.resident.values()) <= model.memory.engine_budget


def test_sessions_that_were_planned_take_nothing_from_the_cache(expected):
    one, four = plan(ctx=256), plan(ctx=256, sessions=4)
    a, b = ({i.name: i.bytes for i in m.items} for m in (one, four))
    for name in ("KV cache", "session state"):
        assert b[name] == 4 * a[name]
    queue = plan(ctx=256, sessions=4, waiting=10)
    (item,) = (i.bytes for i in queue.items if i.name == "requests that wait")
    assert item > 10 * 256 * 4 and queue.engine_budget == four.engine_budget - item
    assert b["Python, later"] > a["Python, later"] and four.sessions == 4
    for name in (HYBRID, "qwen3_bf16"):
        m = plan(name, ctx=256, sessions=4)
        with open_small(name, ram=m.floor + 2 * m.slab, threads=2, sessions=4) as model:
            items, slots = {i.name: i.bytes for i in model.memory.items}, model.slots
            ids = np.tile(expected[name]["prompt"], 4)[:256]
            work = [(model.session(), ids) for _ in range(4)]
            rows = model.forward(work)
            assert all(np.array_equal(rows[0].view(np.int32), r.view(np.int32)) for r in rows[1:])
            stats = model.stats()
            assert stats.peak["state"] <= items["KV cache"] + items["session state"]
            assert model.slots == slots
            with pytest.raises(MosaicError, match="pool full"):
                with model.session() as fifth:
                    fifth.forward([1])
    for wrong in (0, 1.5, True, 10**6):
        with pytest.raises(UsageError, match="sessions"):
            plan(sessions=wrong)


def test_a_second_session_takes_its_memory_from_the_cache(tmp_path):
    """At a budget without slack sessions shrink the cache, until it is at its floor and the next is refused."""
    folder = tmp_path / "tiny"
    synth.write(folder, "tiny", experts=256, progress=False)
    m = plan_model(folder, ram="1G", ctx=64, threads=2)[-1]
    ram = m.floor + 200 * m.slab
    with mosaic_c.open(folder, ram=ram, ctx=64, threads=2) as model:
        before, sessions = model.stats(), []
        assert before.slots >= 190
        ids = list(range(50))
        want = model.session().forward(ids)
        with pytest.raises(MosaicError, match="floor") as info:
            for _ in range(100000):
                sessions.append(model.session())
                assert sum(model.stats().resident.values()) <= model.memory.engine_budget
        assert info.value.code == "EBUDGET" and len(sessions) > 20
        after = model.stats()
        assert after.slots < 10 and after.resident["state"] > before.resident["state"] + (1 << 20)
        got = sessions[0].forward(ids)
        assert np.array_equal(got.view(np.int32), want.view(np.int32))
        for s in sessions:
            s.close()
        assert model.stats().slots > before.slots - 5  # and the cache grows back


@pytest.mark.parametrize("ram", ["100M", "160M"])
def test_peak_of_a_process_stays_under_the_budget(ram, tmp_path):
    """VmHWM, with generation on, in a process of its own; shards must leave no page behind."""
    code = f"""
import mosaic_c
with mosaic_c.open({str(VECTORS / HYBRID)!r}, ram={ram!r}, threads=2) as m:
    list(m.generate(list(range(100)), max_new_tokens=30, ignore_eos=True))
    s = m.stats()
    print(s.peak_rss, s.budget)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, limit = map(int, out.stdout.split())
    assert peak <= limit


def test_a_refused_shape_says_what_is_wrong():
    """Each by its own reason, in the engine's words."""
    plan = plan_model(VECTORS / HYBRID, ram="1G", threads=2)[0].plan
    moe = blocks.moe(plan.layers[0].moe, 0, plan.hidden, 8, blocks.nowhere)
    attention = next(x.mixer for x in plan.layers if isinstance(x.mixer, Attention))
    delta = next(x.mixer for x in plan.layers if not isinstance(x.mixer, Attention))
    attn = blocks.attention(attention, 0, plan.hidden, 64, 8, blocks.nowhere)
    delta = blocks.delta(delta, 0, plan.hidden, 8, blocks.nowhere)
    state = dict(n_attn=1, n_kv_head=1, head_dim=8, ctx=64)
    for reason, size in (
        (
            r"threads: expected 1\.\.256, got 257",
            lambda: engine_pure.scratch_bytes("attn", attn, 257),
        ),
        ("attention: ctx", lambda: engine_pure.scratch_bytes("attn", attn | {"ctx": 0}, 1)),
        (
            "delta rule: conv kernel",
            lambda: engine_pure.scratch_bytes("delta", delta | {"conv_kernel": 17}, 1),
        ),
        ("moe: top-k", lambda: engine_pure.scratch_bytes("moe", moe | {"top_k": 1000}, 1)),
        ("moe: expert width", lambda: engine_pure.scratch_bytes("moe", moe | {"width": 0}, 1)),
        ("state: head_dim", lambda: engine_pure.kv_bytes(state | {"head_dim": 0})),
        ("rows of 0", lambda: engine_pure.thread_bytes("INT4", 0)),
    ):
        with pytest.raises(MosaicError, match=reason) as info:
            size()
        assert info.value.code == "EINVAL"
