"""The cache in VRAM as Python plans, opens and reports it; the device is a fake (fake_gpu.py)."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import VECTORS, open_small
from fake_gpu import GIB, MIB, WHY, FakeGpu

import mosaic_c
from mosaic_c import MosaicError, UsageError, budget, cli, engine, guard, memory_table, verify, vram
from mosaic_c.opening import plan_model
from mosaic_c.verify import Setting

NAME = "qwen35_fp8"
FOLDER = VECTORS / NAME
EXPERTS, TOP_K = 40, 3


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """The test runner itself may be larger than the budgets tried here."""
    monkeypatch.setattr(budget, "process_bytes", lambda: 40 * MIB)
    monkeypatch.setattr(guard, "read_process", lambda proc: (40 * MIB, 0, 0))


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(engine, "gpu", lambda: WHY)


def plan(**options):
    return plan_model(FOLDER, **({"ram": "1G", "threads": 2, "ctx": 256} | options))[-1]


def refused(**options) -> str:
    with pytest.raises(UsageError) as info:
        plan(**options)
    return str(info.value)


# ---- what is asked for ----


def test_arguments_are_checked_before_any_file_is_opened():
    for options, words in (
        ({"vram": "many"}, "vram: 'many' is no size"),
        ({"vram": -1}, "vram: expected a size such as 3.2G"),
        ({"vram": True}, "vram"), ({"vram": 1.5}, "vram"),
        ({"hot_after": 0}, "hot_after: expected a whole number from 1 to 16"),
        ({"hot_after": 17}, "got 17"), ({"hot_after": "3"}, "got '3'"), ({"hot_after": True}, "hot_after"),
        ({"gpu": -1}, "gpu: expected the number of a device"), ({"gpu": "0"}, "got '0'"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            mosaic_c.open("/none", **options)
    assert vram.wish("3.2G", None, 1) == vram.Wish(int(3.2 * GIB), 3, 1)
    assert vram.wish("0", 16, 0) == vram.Wish(0, 16, 0) and vram.wish(None, 1, 0).size is None


def test_none_takes_what_is_free_less_a_margin_and_no_more_than_all_experts(gpu):
    t = plan().tier
    assert (t.slots, t.bytes) == (EXPERTS, 10 * MIB + EXPERTS * 3 * MIB)
    assert (t.after, t.window, t.device, t.name) == (3, 16, 0, "Test GPU")
    gpu.info["free"] = 600 * MIB
    t = plan().tier
    assert t.slots == (88 - 10) // 3 and t.bytes <= 88 * MIB
    gpu.slot, gpu.info["free"] = GIB, 7 * GIB
    assert plan().tier.slots == (7 * GIB * 9 // 10 - 10 * MIB) // GIB
    assert vram.margin(4 * GIB) == 512 * MIB and vram.margin(20 * GIB) == 2 * GIB


def test_a_size_is_taken_exactly(gpu):
    t = plan(vram="100M", hot_after=1).tier
    assert (t.slots, t.bytes, t.after) == (30, 100 * MIB, 1)
    assert plan(vram=20 * MIB).tier.slots == 3
    # up to what is free, margin or not
    assert plan(vram=7 * GIB).tier.slots == EXPERTS


@pytest.mark.parametrize("size", [0, "0", "0G"])
def test_0_touches_nothing_of_cuda(monkeypatch, size):
    def touched(*args):
        raise AssertionError("asked for a GPU")

    monkeypatch.setattr(engine, "gpu", touched)
    monkeypatch.setattr(engine, "gpu_probe", touched)
    m = plan(vram=size)
    assert m.tier is None and m.no_tier == "vram 0"
    with open_small(NAME, vram=size) as model:
        assert model.stats().gpu == "" and not model.notes


def test_without_a_gpu_none_is_silent_and_a_size_is_refused(no_gpu):
    m = plan()
    assert m.tier is None and m.no_tier == WHY and not m.warnings
    text = refused(vram="3.2G")
    assert WHY in text and "3.2 GiB" in text and "leave it out" in text


def test_a_device_that_does_not_answer(gpu):
    gpu.probe_error = MosaicError("GPU 0: no driver", "ESYS")
    assert plan().no_tier == "GPU 0: no driver"
    assert "GPU 0: no driver" in refused(vram="1G")
    gpu.probe_error = None
    assert refused(gpu=1).startswith("gpu: GPU 1: there are 1")


def test_more_than_is_free_and_less_than_works(gpu):
    text = refused(vram="7.5G")
    assert "7.5 GiB is more than is free" in text and "7 GiB of 8 GiB" in text
    assert "margin of 716.8 MiB" in text
    text = refused(vram="18M")
    assert "18 MiB is too small" in text and "3 experts" in text and "--vram 19M" in text
    assert plan(vram="19M").tier.slots == TOP_K
    gpu.info["free"] = 515 * MIB
    assert plan().tier is None and "3 MiB to spare" in plan().no_tier
    gpu.info["free"] = 15 * MIB
    assert "leave it out" in refused(vram="12M")


def test_experts_that_the_gpu_does_not_multiply(gpu):
    gpu.slot = 0
    assert "FP8 in 128x128 blocks, MXFP4 and int4" in plan().no_tier
    assert "MXFP4" in refused(vram="1G") and "probe" not in gpu.events


# ---- the plan of RAM ----


def test_the_plan_has_pinned_memory_and_two_slabs_more(gpu):
    gpu.slot = 64 << 10
    with_, without = plan(slots=20), plan(slots=20, vram=0)
    items = {i.name: i.bytes for i in with_.items}
    assert items["copies to VRAM"] == 2 * with_.slab
    assert items["GPU tier"] == gpu.host + with_.tier.tables
    assert with_.total - without.total == items["copies to VRAM"] + items["GPU tier"]
    assert with_.engine_budget == without.engine_budget and with_.total <= with_.budget
    assert with_.floor > without.floor
    for ram in range(60, 120, 3):
        m = plan(ram=f"{ram}M")
        assert not m.fits or m.total <= m.budget


def test_the_device_is_looked_at_before_python_is_measured(gpu, monkeypatch):
    def measured():
        gpu.events.append("measured")
        return 40 * MIB

    monkeypatch.setattr(budget, "process_bytes", measured)
    plan()
    assert gpu.events == ["probe", "measured"]


def test_a_budget_without_room_for_it_runs_without_it(gpu):
    floor = plan(vram=0).floor
    m = plan(ram=floor)
    assert m.fits and m.tier is None and "no room" in m.no_tier
    assert not plan(ram=floor, vram="1G").fits
    with pytest.raises(MosaicError, match="too small") as info:
        open_small(NAME, ram=floor, vram="1G")
    assert info.value.code == "EBUDGET"


# ---- opening and running ----


def test_the_store_gets_the_tier_before_it_is_opened(gpu):
    with open_small(NAME, vram="50M", hot_after=2) as model:
        assert gpu.tiers == [(0, 2, 16, 49 * MIB)] and gpu.events[-2:] == ["tier", "open"]
        assert not model.notes and model.memory.tier.slots == 13


@pytest.mark.parametrize("code", ["ENOMEM", "ESYS"])
def test_a_device_that_is_gone_at_open_is_a_note_and_the_cpu_computes(
    gpu, reference, expected, code
):
    gpu.tier_error = MosaicError("GPU 0: out of memory", code)
    with open_small(NAME) as model:
        (note,) = model.notes
        assert "no GPU tier" in note and "GPU 0: out of memory" in note
        assert model.stats().notes()[-1] == note == model.stats().gpu_note
        got = model.session().forward(expected[NAME]["prompt"])
        assert np.array_equal(got.view(np.int32), reference[NAME].view(np.int32))
        assert len(model.notes) == 1


def test_another_failure_of_the_tier_is_an_error(gpu):
    gpu.tier_error = MosaicError("impossible", "EINVAL")
    with pytest.raises(MosaicError, match="impossible"):
        open_small(NAME)


def test_a_tier_given_up_while_running_is_told_once(gpu):
    heard = []
    with open_small(NAME) as model:
        model.on_note = heard.append
        session = model.session()
        session.forward([1, 2, 3])
        assert not heard
        gpu.counters["gpu_note"] = b"the GPU tier was given up: lost"
        session.forward([4])
        session.forward([5])
        assert heard == ["the GPU tier was given up: lost"] == list(model.notes)
        assert model.stats().notes()[-1:] == heard
    gpu.counters = {}
    with open_small(NAME) as model:  # also when the call itself fails
        model.on_note = heard.append
        session = model.session()
        gpu.counters["gpu_note"] = b"lost again"
        model.engine.cancel()
        with pytest.raises(MosaicError):
            session.forward([1])
        assert heard[1:] == ["lost again"]


# ---- what is told ----

COUNTERS = {
    "hits": 60, "misses": 20, "gpu_hits": 120, "gpu_rows": 130, "gpu_promotions": 9, "gpu_evictions": 4,
    "gpu_bytes_up": 27 * MIB, "gpu_bytes_io": 3 * MIB, "gpu_wait_s": 0.25, "gpu_slots": 13, "gpu_held": 5,
    "gpu_slot_bytes": 3 * MIB, "gpu_vram": 49 * MIB, "gpu_host": 5 * MIB,
}  # fmt: skip


def test_statistics(gpu):
    with open_small(NAME) as model:
        assert not any(line.startswith("gpu") for line in model.stats().lines())
        gpu.counters = dict(COUNTERS)
        s = model.stats()
        assert s.hit_rate == 180 / 200 and s.gpu == "Test GPU"
        assert {k: getattr(s, k) for k in COUNTERS} == COUNTERS
        (line,) = (x for x in s.lines() if x.startswith("gpu"))
        for words in ("Test GPU: 120 hits", "9 experts brought", "4 evicted", "5 of 13 slots of 3 MiB",
                      "27 MiB of experts", "3 MiB of activations", "waited 0.25 s"):  # fmt: skip
            assert words in line
        assert any("60 hits and 120 on the GPU, 20 misses (90.0 % hits)" in x for x in s.lines())


def test_memory_adds_up_in_both_columns(gpu):
    with open_small(NAME) as model:
        model.session().forward([1, 2, 3])
        alone = model.memory_table()
        assert alone.total.ram == model.memory.budget == sum(r.ram for r in alone.rows)
        assert {r.vram for r in (*alone.rows, alone.total)} == {None}
        assert all(" - " in line for line in alone.lines()[1:])
        gpu.counters, gpu.info["free"] = dict(COUNTERS), 6 * GIB
        both = model.memory_table()
        row = {r.name: r for r in both.rows}
        assert both.total.vram == 8 * GIB == sum(r.vram for r in both.rows)
        assert both.total.ram == model.memory.budget == sum(r.ram for r in both.rows)
        assert row["expert cache"].vram == 13 * 3 * MIB and row["scratch"].vram == 10 * MIB
        assert row["free"].vram == 6 * GIB
        assert row["Python and other"].vram == 2 * GIB - 49 * MIB
        assert "5 of 13 slots held" in row["expert cache"].note
        assert both.json()["total"]["vram"] == 8 * GIB
        gpu.info["free"] = 8 * GIB  # a driver that does not count what it gave us
        odd = model.memory_table()
        assert (
            sum(r.vram for r in odd.rows) == odd.total.vram and min(r.vram for r in odd.rows) >= 0
        )
        gpu.probe_error = MosaicError("lost", "ESYS")
        assert model.memory_table().total.vram is None


def test_the_table_is_pure():
    with open_small(NAME, vram=0) as model:
        stats, memory = model.stats(), model.memory
    for rss in (0, 40 * MIB, 400 * MIB):
        table = memory_table.table(replace(stats, rss=rss), memory, None)
        assert sum(r.ram for r in table.rows) == memory.budget
        assert all(r.ram >= 0 for r in table.rows[:-1])


def test_generate_tells_in_text_and_json(gpu, capsys):
    args = [
        "generate",
        "--ids",
        "1,2,3",
        "-n",
        "2",
        "-m",
        str(FOLDER),
        "--ram",
        "512M",
        "--ctx",
        "64",
    ]
    assert cli.main([*args, "--stats", "-v", "--vram", "50M", "--hot-after", "2"]) == 0
    err = capsys.readouterr().err
    assert (
        "VRAM of GPU 0, Test GPU, 8 GiB:" in err
        and "13 of 40 experts, those called most in 16 tokens (--hot-after 2)" in err
    )
    assert gpu.tiers == [(0, 2, 16, 49 * MIB)]
    assert "memory" in err and "VRAM" in err and "Python and other" in err
    gpu.counters = dict(COUNTERS)
    assert cli.main([*args, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["stats"]["gpu_hits"] == 120
    rows, total = got["memory"]["rows"], got["memory"]["total"]
    assert [r["name"] for r in rows] == [
        "expert cache", "dense weights", "KV and state", "scratch", "Python and other", "free",
    ]  # fmt: skip
    assert sum(r["vram"] for r in rows) == total["vram"] == 8 * GIB
    assert cli.main([*args, "--gpu", "3"]) == 2
    err = capsys.readouterr().err
    assert "gpu: GPU 3" in err and len(err.splitlines()) == 1


def test_verbose_says_why_there_is_none(no_gpu, capsys):
    args = ["generate", "--ids", "1", "-n", "1", "-m", str(FOLDER), "--ram", "1G", "--ctx", "64"]
    assert cli.main(args) == 0 and WHY not in capsys.readouterr().err
    assert cli.main([*args, "-v"]) == 0 and f"no GPU: {WHY}" in capsys.readouterr().err


# ---- verify, plan, sweep ----


def test_verify_has_a_run_with_a_small_tier_and_all_others_without(gpu, monkeypatch):
    asked = []
    real = verify.open_model

    def open_model(folder, **options):
        asked.append(options)
        return real(folder, **options)

    monkeypatch.setattr(verify, "open_model", open_model)
    job, todo = verify._prepare(FOLDER, "512M", 2, "1,2,3", vram.wish(None, 1, 0))
    assert "probe" not in gpu.events  # a fork could not use the device
    (setting,) = (s for s in todo if "vram" in s.options)
    assert setting.name == "gpu, few slots"
    assert setting.options == {"vram": 19 * MIB, "hot_after": 1, "gpu": 0}
    for s in (todo[0], setting):
        verify.run_here(job, s, lambda *news: None)
    assert [o["vram"] for o in asked] == [0, 19 * MIB] and len(gpu.tiers) == 1


def test_verify_proves_by_hits_on_the_gpu(gpu):
    setting = Setting("gpu, few slots", {"vram": MIB, "hot_after": 1, "gpu": 0})
    with open_small(NAME) as model:
        base = model.stats()
        assert verify._evidence(setting, base, base)[0] is False
        gpu.counters = dict(COUNTERS)
        ok, text = verify._evidence(setting, model.stats(), base)
        assert ok and "120 experts computed on the GPU" in text and "of 13 slots" in text
        gpu.counters["gpu_note"] = b"lost"
        ok, text = verify._evidence(setting, model.stats(), base)
        assert not ok and text.endswith(": lost")


def test_verify_without_a_gpu_has_no_such_run(no_gpu):
    def settings(size):
        return verify._prepare(FOLDER, "512M", 2, "1", vram.wish(size, 1, 0))[1]

    assert not any("gpu" in s.name for s in settings(None) + settings(0))
    with pytest.raises(UsageError, match="built without nvcc"):
        settings("1G")


def test_plan_shows_vram_and_what_stays_on_the_cpu(gpu, capsys):
    args = ["plan", "-m", str(FOLDER), "--ram", "1G", "--ctx", "256"]
    assert cli.main([*args, "--vram", "50M", "--memory", "20G"]) == 0
    out = capsys.readouterr().out
    assert "VRAM of GPU 0, Test GPU" in out and "expert slots" in out and "work space" in out
    assert "stay on the CPU" in out and "at 20 GB/s from memory" in out and "ms of it" in out
    assert cli.main([*args, "--memory", "20G", "--json", "--slots", "10"]) == 0
    got = json.loads(capsys.readouterr().out)
    items = {i["name"]: i["bytes"] for i in got["items"]}
    saved = got["dense_in_vram"]
    assert got["tier"]["slots"] == EXPERTS and got["no_tier"] == ""
    assert saved["dense"] == items["dense weights"]
    assert saved["ram"] == saved["dense"] + items["KV cache"] + items["session state"]
    assert saved["experts"] == min(saved["ram"] // got["slab"], EXPERTS - 10)
    assert saved["token_s"] == saved["dense"] / 20e9
    assert saved["share"] == saved["dense"] / (saved["dense"] + got["token_experts"] * got["slab"])
    assert got["token_experts"] == TOP_K * 4


def test_plan_of_a_config_says_it_too(capsys, no_gpu):
    config = VECTORS / "configs" / "Qwen--Qwen3.5-35B-A3B_config.json"
    assert cli.main(["plan", str(config), "--disk", "3G", "--memory", "20G", "--json"]) == 0
    c = json.loads(capsys.readouterr().out)["columns"]["as_shipped"]
    saved = c["dense_in_vram"]
    assert saved["dense"] == saved["read"] == c["active_bytes"]
    assert saved["bytes"] == c["active_bytes"] + c["token_bytes"]
    assert saved["token_s"] == c["active_bytes"] / 20e9
    assert cli.main(["plan", str(config)]) == 0
    assert "as shipped: attention, dense linears and KV stay on the CPU" in capsys.readouterr().out
    for option in (["--vram", "1G"], ["--hot-after", "2"], ["--gpu", "1"]):
        assert cli.main(["plan", str(config), *option]) == 2
        assert option[0] in capsys.readouterr().err


def test_a_sweep_never_uses_a_gpu(gpu):
    from mosaic_c import sweep

    row = sweep.point(str(FOLDER), slots=4, tokens=3, ram="1G", threads=1)
    assert row["hits"] + row["misses"] and not gpu.events.count("probe") and not gpu.tiers
