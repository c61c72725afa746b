"""`simulate`: the known right answers of the two synthetic traces, and its command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from mosaic_c import engine
from mosaic_c.commands import simulate
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


def run_json(capsys, *args: object) -> dict:
    return json.loads(run(capsys, *args, "--json"))


@pytest.mark.parametrize(
    ("path", "slots", "hits", "misses"),
    [
        (ZIPF, 2, 81, 3759),
        (ZIPF, 4, 278, 3562),
        (ZIPF, 8, 954, 2886),
        (ZIPF, 16, 1626, 2214),
        (ZIPF, 32, 2223, 1617),
        (ZIPF, 64, 2686, 1154),
        (UNIFORM, 8, 84, 3756),
    ],
)
def test_layer_lru_counts(capsys, path, slots, hits, misses):
    result = run_json(capsys, path, "--policy", "layer-lru", "--slots", slots)
    assert result == {
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses),
        "policy": "layer-lru",
        "slots": slots,
        "lines": 640,
    }


RATES = {
    (ZIPF, "lru"): (0.362, 0.523, 0.616, 0.699, 0.745),
    (ZIPF, "lfu"): (0.499, 0.600, 0.647, 0.707, 0.746),
    (ZIPF, "belady"): (0.610, 0.702, 0.734, 0.749, 0.749),
    (UNIFORM, "lru"): (0.053, 0.094, 0.132, 0.221, 0.345),
    (UNIFORM, "lfu"): (0.043, 0.091, 0.142, 0.227, 0.346),
    (UNIFORM, "belady"): (0.256, 0.343, 0.405, 0.477, 0.545),
}


@pytest.mark.parametrize("case", RATES, ids=lambda c: f"{c[0].stem}-{c[1]}")
def test_global_hit_rates(capsys, case):
    path, policy = case
    for share, slots, rate in zip(
        (0.05, 0.10, 0.15, 0.25, 0.40), (102, 204, 307, 512, 819), RATES[case], strict=True
    ):
        result = run_json(capsys, path, "--policy", policy, "--share", share)
        assert result["slots"] == slots
        assert result["hits"] + result["misses"] == 3840
        assert result["hit_rate"] == pytest.approx(rate, abs=0.005), (policy, share)


def test_lru_is_exact(capsys):
    """LRU leaves no choice: the published digits, and an independent replay, to the last hit."""
    trace = read_trace(ZIPF)
    for slots, rate in ((102, 0.362), (204, 0.523), (307, 0.616), (512, 0.699), (819, 0.745)):
        held: list[int] = []
        hits = 0
        for i in range(len(trace)):
            for e in trace.ids[trace.start[i] : trace.start[i + 1]]:
                item = int(trace.layer[i]) * trace.n_expert + int(e)
                if item in held:
                    hits += 1
                    held.remove(item)
                held.append(item)
                del held[: max(0, len(held) - slots)]
        result = run_json(capsys, ZIPF, "--policy", "lru", "--slots", slots)
        assert result["hits"] == hits
        # The table cuts or rounds at three digits.
        assert abs(result["hit_rate"] - rate) < 0.0006


def test_auto_is_as_good_as_any_fixed_policy(capsys):
    for share in (0.05, 0.25):
        auto = run_json(capsys, ZIPF, "--share", share)
        assert auto["policy"] == "auto"
        for policy in ("lru", "lfu"):
            assert (
                auto["hits"] >= run_json(capsys, ZIPF, "--policy", policy, "--share", share)["hits"]
            )


@pytest.mark.parametrize("policy", ["auto", "lfu", "lru", "layer-lru", "belady"])
def test_room_for_all_misses_each_expert_once(capsys, policy):
    trace = read_trace(UNIFORM)
    layers = np.repeat(trace.layer, 6).astype(np.int64)
    distinct = len(np.unique(layers * 256 + trace.ids))
    assert run_json(capsys, UNIFORM, "--policy", policy, "--share", 1)["misses"] == distinct


def test_share_for_layer_lru_is_per_layer(capsys):
    result = run_json(capsys, ZIPF, "--policy", "layer-lru", "--share", 0.0625)
    assert (result["slots"], result["hits"]) == (16, 1626)


def test_tiny_share_still_has_a_slot(capsys):
    assert run_json(capsys, ZIPF, "--policy", "lru", "--share", 1e-9)["slots"] == 1


def test_text(capsys):
    out = run(capsys, ZIPF, "--policy", "layer-lru", "--slots", 8)
    assert out == (
        "layer-lru, 8 slots per layer, 640 decode lines:\nhits 954, misses 2886, hit rate 0.248\n"
    )


def test_phases(capsys, tmp_path):
    path = tmp_path / "t.csv"
    with TraceWriter(path, 1, 4, 1) as writer:
        for step in range(5):
            writer.add("prefill", step, 0, [0])
        for step in range(3):
            writer.add("decode", step, 0, [1])
    for phase, lines, hits in (("prefill", 5, 4), ("decode", 3, 2), ("all", 8, 6)):
        result = run_json(capsys, path, "--policy", "lru", "--slots", 2, "--phase", phase)
        assert (result["lines"], result["hits"]) == (lines, hits)
    assert run_json(capsys, path, "--policy", "lru", "--slots", 2)["lines"] == 3
    only = tmp_path / "p.csv"
    with TraceWriter(only, 1, 4, 1) as writer:
        writer.add("prefill", 0, 0, [0])
    with pytest.raises(MosaicError, match="none of 1 lines is decode; try --phase all"):
        run(capsys, only, "--slots", 2)


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "nan", "inf"])
def test_share_out_of_range(capsys, share):
    with pytest.raises(UsageError, match="--share"):
        run(capsys, ZIPF, f"--share={share}")


@pytest.mark.parametrize("slots", [0, -1])
def test_slots_out_of_range(capsys, slots):
    with pytest.raises(UsageError, match="--slots"):
        run(capsys, ZIPF, f"--slots={slots}")


@pytest.mark.parametrize(
    "args", [[], ["--slots", "2", "--share", "0.1"], ["--policy", "best", "--slots", "2"]]
)
def test_argparse_refuses(capsys, args):
    with pytest.raises(SystemExit) as caught:
        run(capsys, ZIPF, *args)
    assert caught.value.code == 2


def test_more_slots_than_experts_and_long_traces(capsys):
    result = run_json(capsys, ZIPF, "--policy", "lfu", "--slots", 10**6)
    assert result["misses"] == run_json(capsys, ZIPF, "--policy", "lfu", "--share", 1)["misses"]


def test_engine_refuses_what_the_reader_would_have():
    one = np.zeros(1, np.int32)
    token, start = np.zeros(1, np.int64), np.array([0, 1], np.int64)
    with pytest.raises(MosaicError):
        engine.policy_replay("lru", 1, 4, 2, one, token, start, np.array([4], np.int32))
    with pytest.raises(MosaicError):
        engine.policy_replay("lru", 1, 4, 0, one, token, start, one)
