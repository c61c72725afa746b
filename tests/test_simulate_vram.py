"""`simulate --vram-slots`: counts by hand and by a slow replay, the bars, and what it refuses."""

from __future__ import annotations

import argparse
import json
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from mosaic_c import engine_pure
from mosaic_c.commands import simulate, simulate_vram
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.trace import TraceWriter, read_trace

TRACES = Path(__file__).parent / "data" / "traces"
ZIPF, UNIFORM = TRACES / "zipf-v4-shape.csv", TRACES / "uniform-v4-shape.csv"


def run(capsys, *args: object) -> str:
    parser = argparse.ArgumentParser(prog="mosaic_c")
    simulate.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["simulate", *map(str, args)])
    assert parsed.run(parsed) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def sizes(capsys, *args: object) -> list[dict]:
    return json.loads(run(capsys, *args, "--json"))["sizes"]


@pytest.fixture
def small(tmp_path):
    """One layer of 4 experts, one a token: 0 0 0 0 1 2 1 1."""
    path = tmp_path / "small.csv"
    with TraceWriter(path, 1, 4, 1) as writer:
        for step, expert in enumerate((0, 0, 0, 0, 1, 2, 1, 1)):
            writer.add("decode", step, 0, [expert])
    return path


def test_by_hand(capsys, small):
    """0 has the slot from its second call on and serves two; 1 never has three calls more than 0."""
    (size,) = sizes(capsys, small, "--vram-slots", 1)
    assert (size["slots"], size["share"], size["calls"]) == (1, 0.25, 8)
    rules = {r["rule"]: (r["loads"], r["gpu_share"] * 8, r["cut"]) for r in size["rules"]}
    assert rules == {
        "nothing": (0, 0, 1), "on miss": (4, 4, 0), "always": (4, 8, 0),
        "hot after 3": (1, 2, 0.75),
    }  # fmt: skip
    hot = size["rules"][-1]
    assert (hot["points"], hot["cut_holds"], hot["share_holds"]) == (-25, True, False)
    assert hot["loads_per_token"] == 1 / 8
    assert size["most_share"] == 3 / 8  # one load: expert 0 after its first call


def test_other_thresholds(capsys, small):
    def hot(*args):
        row = sizes(capsys, small, *args)[0]["rules"][-1]
        return row["rule"], row["loads"], round(row["gpu_share"] * 8)

    assert hot("--vram-slots", 1, "--hot-after", 1) == ("hot after 1", 1, 3)
    assert hot("--vram-slots", 2, "--hot-after", 1) == (
        "hot after 1",
        2,
        5,
    )  # 2 has 1 call as 1 has
    assert hot("--vram-slots", 4) == ("hot after 3", 2, 3)  # 1 after its second call: one more
    assert hot("--vram-slots", 1, "--hot-after", 16) == ("hot after 16", 0, 0)


def test_counting_after_a_warm_up(capsys, small):
    (size,) = sizes(capsys, small, "--vram-slots", 1, "--warm", 2)
    on_miss, hot = size["rules"][1], size["rules"][-1]
    assert (size["calls"], on_miss["loads"], hot["loads"], hot["gpu_share"]) == (6, 3, 0, 2 / 6)
    assert size["most_share"] == 0.5  # no load, but 1 may have been there: 3 of 6


def test_nothing_to_cut(capsys, tmp_path):
    path = tmp_path / "same.csv"
    with TraceWriter(path, 1, 4, 1) as writer:
        for step in range(4):
            writer.add("decode", step, 0, [3])
    (size,) = sizes(capsys, path, "--vram-slots", 1, "--warm", 2)
    hot = size["rules"][-1]
    assert (hot["cut"], hot["cut_holds"], hot["gpu_share"]) == (None, True, 1)
    (size,) = sizes(
        capsys, path, "--vram-slots", 1, "--warm", 1
    )  # loaded where `on miss` no longer loads
    assert size["rules"][-1]["loads"] == 1 and not size["rules"][-1]["cut_holds"]
    last = run(capsys, path, "--vram-slots", 1, "--warm", 2).splitlines()[-1]
    assert last.split() == ["hot", "after", "3", "0", "0.00", "-", "100.0", "%", "+0.0", "yes"]


def slow_replay(path: Path, slots: int, after: int, window: int) -> tuple[int, int]:
    """(served, loads) by whole lines and lists."""
    trace = read_trace(path)
    past = [deque(maxlen=window) for _ in range(trace.n_layer)]
    held: list[tuple[int, int]] = []  # least recently used first
    served = loads = 0

    def calls(layer: int, expert: int) -> int:
        return sum(expert in line for line in past[layer])

    for i in range(len(trace)):
        layer = int(trace.layer[i])
        line = [int(e) for e in trace.ids[trace.start[i] : trace.start[i + 1]]]
        past[layer].append(line)
        for item in [(layer, e) for e in line]:
            if item in held:
                served += 1
                held.remove(item)
                held.append(item)
        for item in [(layer, e) for e in line]:
            if item in held:
                continue
            if len(held) < slots:
                wanted = calls(*item) >= max(after - 1, 1)
            else:
                wanted = calls(*item) >= calls(*held[0]) + after
            if wanted:
                held = [*held[len(held) == slots :], item]
                loads += 1
    return served, loads


@pytest.mark.parametrize("path", [ZIPF, UNIFORM], ids=lambda p: p.stem)
def test_synthetic_traces(capsys, path):
    for after in (1, 3):
        results = sizes(capsys, path, "--vram-slots", "7,0.05,0.1,0.5,1.0", "--hot-after", after)
        assert [r["slots"] for r in results] == [7, 102, 204, 1024, 2048]
        for result in results:
            hot, on_miss = result["rules"][-1], result["rules"][1]
            served, loads = slow_replay(path, result["slots"], after, 16)
            assert (round(hot["gpu_share"] * 3840), hot["loads"]) == (served, loads)
            lru = json.loads(
                run(capsys, path, "--policy", "lru", "--slots", result["slots"], "--json")
            )
            assert on_miss["loads"] == lru["misses"]
            assert on_miss["gpu_share"] == pytest.approx(lru["hit_rate"])
            assert hot["cut"] == pytest.approx(1 - loads / lru["misses"])


def test_known_counts(capsys):
    """(loads, served) of the default rule at 2, 5, 10, 25 and 50 % of all experts."""
    known = {
        ZIPF: [(71, 1406), (191, 1900), (240, 2190), (336, 2301), (336, 2301)],
        UNIFORM: [(150, 63), (205, 157), (285, 298), (541, 572), (696, 625)],
    }
    for path, want in known.items():
        results = sizes(capsys, path, "--vram-slots", "0.02,0.05,0.1,0.25,0.5")
        rows = [r["rules"][-1] for r in results]
        assert [(r["loads"], round(r["gpu_share"] * 3840)) for r in rows] == want


def test_counts_of_lines():
    layer, start = np.array([0, 1, 0, 0], np.int32), np.array([0, 2, 3, 5, 6])
    ids = np.array([2, 1, 2, 1, 2, 1], np.int32)
    served, loads = np.full(4, -1, np.int32), np.full(4, -1, np.int32)
    counts = engine_pure.hot_replay(2, 4, 8, 3, 16, layer, start, ids, served, loads)
    assert counts == {"calls": 6, "served": 1, "loads": 2, "evictions": 0}
    assert (served.tolist(), loads.tolist()) == ([0, 0, 0, 1], [0, 0, 2, 0])
    assert engine_pure.hot_replay(2, 4, 8, 3, 16, layer, start, ids) == counts
    for room in ((served[:3], None), (None, loads[:3])):
        with pytest.raises(ValueError, match="4 lines, room for the counts of 3"):
            engine_pure.hot_replay(2, 4, 8, 3, 16, layer, start, ids, *room)
    with pytest.raises(MosaicError, match="expected a window of 1 to 32, got 33"):
        engine_pure.hot_replay(2, 4, 8, 3, 33, layer, start, ids)
    with pytest.raises(MosaicError, match="line 1: layer 1 of 1"):
        engine_pure.hot_replay(1, 4, 8, 3, 16, layer, start, ids)


def test_text(capsys, small):
    assert run(capsys, small, "--vram-slots", "1", "--expert-bytes", "8M").splitlines() == [
        "4 experts, 8 decode lines",
        "",
        "1 slots, 25 % of all experts:",
        "promote           loads   PCIe/token       cut    on GPU  points  both bars",
        "nothing               0          0 B   100.0 %     0.0 %   -50.0  no: share",
        "on miss               4        4 MiB     0.0 %    50.0 %    +0.0  -",
        "always                4        4 MiB     0.0 %   100.0 %   +50.0  no: cut",
        "hot after 3           1        1 MiB    75.0 %    25.0 %   -25.0  no: share",
        "with a cut of more than 70 % nothing serves more than 37.5 % by loading what was called, "
        "even knowing the future; 45.0 % are needed: both bars cannot hold",
    ]
    out = run(capsys, small, "--vram-slots", "1,0.5", "--warm", 2).splitlines()
    assert out[0] == "4 experts, 6 decode lines after 2 tokens"
    assert out[3].split()[:3] == ["promote", "loads", "loads/token"]
    assert out[8].endswith(
        "more than 50.0 % by loading what was called, even knowing the future; 45.0 % are needed"
    )
    assert out[10] == "2 slots, 50 % of all experts:"


def test_the_edges_of_the_bars():
    lines = read_trace(ZIPF)
    every = np.ones(len(lines), bool)
    for misses in (0, 1):  # of each line
        rows = simulate_vram.study(
            lines, every, 80, 1, 16, lambda _, m=misses: np.full(len(lines), m, np.int32)
        )["rules"][:3]
        assert [r["loads"] for r in rows] == [0, 640 * misses, 640 * misses]
        assert [r["cut"] for r in rows] == ([1, 0, 0] if misses else [None] * 3)
        assert [r["cut_holds"] for r in rows] == [True, not misses, not misses]
        assert [r["share_holds"] for r in rows] == [False, True, True]
    # exactly 5 points below is within 5 points
    first = simulate_vram.study(
        lines, every, 80, 1, 16,
        lambda _: np.array([5] * 192 + [6] * 448, np.int32),  # 192 of 3840 calls are 5 points
    )["rules"]  # fmt: skip
    assert first[0]["points"] == pytest.approx(-5) and first[0]["share_holds"]
    row = {"rule": "x", "cut_holds": False, "share_holds": False}
    assert simulate_vram.bars(row) == "no: cut and share"
    assert simulate_vram.bars(row | {"cut_holds": True, "share_holds": True}) == "yes"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--vram-slots", "0"), "--vram-slots 0: expected shares of all experts .* got '0'"),
        (("--vram-slots", "0.1,"), "got ''"),
        (("--vram-slots", ""), "got ''"),
        (("--vram-slots", "0.1,1.5"), "got '1.5'"),
        (("--vram-slots=-1",), "got '-1'"),
        (("--vram-slots", "nan"), "got 'nan'"),
        (("--vram-slots", "inf"), "got 'inf'"),
        (("--vram-slots", "3G"), "got '3G'"),
        (("--vram-slots", 2**31), "got '2147483648'"),
        (("--vram-slots", "9" * 5000), "got '999"),
        (
            ("--vram-slots", "1", "--hot-after", 0),
            "--hot-after 0 is out of range: expected 1 to 16",
        ),
        (
            ("--vram-slots", "1", "--hot-after", 17),
            "--hot-after 17 is out of range: expected 1 to 16",
        ),
        (("--slots", "1", "--hot-after", 2), "--hot-after 2: expected --vram-slots, too"),
        (("--vram-slots", "1", "--warm", 80), "--warm 80 is out of range: expected 0 to 79"),
        (("--vram-slots", "1", "--warm", -1), "--warm -1 is out of range"),
        (
            ("--vram-slots", "1", "--policy", "lru"),
            "--policy lru: --vram-slots has rules of its own",
        ),
        (("--vram-slots", "1", "--disk", "3G"), "--disk: --vram-slots predicts no speed"),
        (("--vram-slots", "1", "--compute-ms", 1), "--compute-ms: --vram-slots predicts no speed"),
        (
            ("--vram-slots", "1", "--expert-bytes", "0"),
            "--expert-bytes 0: expected at least 1 byte",
        ),
    ],
)
def test_bad_input(capsys, args, says):
    with pytest.raises(UsageError, match=says) as caught:
        run(capsys, ZIPF, *args)
    assert "\n" not in str(caught.value)


def test_one_way_to_give_a_size(capsys):
    for args in ((ZIPF,), (ZIPF, "--vram-slots", 1, "--slots", 1)):
        with pytest.raises(SystemExit) as caught:
            run(capsys, *args)
        assert caught.value.code == 2


def test_lines_without_tokens(capsys, tmp_path):
    path = tmp_path / "t.csv"
    with TraceWriter(path, 2, 4, 1) as writer:
        for layer in range(2):
            for step in range(3):
                writer.add("prefill", step, layer, [step])
    with pytest.raises(MosaicError, match="do not follow one another"):
        run(capsys, path, "--vram-slots", 2, "--phase", "all")
    with pytest.raises(MosaicError, match="none of 6 lines is decode"):
        run(capsys, path, "--vram-slots", 2)
