"""`simulate`: the known right answers of the two synthetic traces, and its command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from mosaic_c import engine_pure, modes
from mosaic_c.commands import simulate
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.predict import OVERLAP
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
        assert result["hit_rate"] == pytest.approx(rate, abs=5e-4), (policy, share)


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


def zipf_lines(rng, tokens, layers=10, experts=64, top_k=4, repeat=0.0):
    """ids (tokens, layers, top_k): independent Zipf draws, or some of them what the token before had."""
    order = np.stack([rng.permutation(experts) for _ in range(layers)])
    scores = rng.gumbel(size=(tokens, layers, experts)) - np.log(1 + np.arange(experts))
    for t in range(1, tokens):
        again = np.argsort(-scores[t - 1])[:, :top_k]
        keep = rng.random(again.shape) < repeat
        np.put_along_axis(
            scores[t], again, np.where(keep, 99, np.take_along_axis(scores[t], again, 1)), 1
        )
    return np.take_along_axis(order[None], np.argsort(-scores)[..., :top_k], 2)


def replay_ids(policy, ids, slots, experts=64):
    tokens, layers, top_k = ids.shape
    lines = tokens * layers
    return engine_pure.policy_replay(
        policy,
        layers,
        experts,
        slots,
        np.tile(np.arange(layers, dtype=np.int32), tokens),
        np.repeat(np.arange(tokens), layers),
        np.arange(lines + 1) * top_k,
        np.ascontiguousarray(ids.reshape(-1), np.int32),
    )[0] / (lines * top_k)


def routings():
    """Routing of several kinds: fixed favourites, repetition, turns, text that comes again."""
    rng = np.random.default_rng(3)
    alike, other = (zipf_lines(rng, 120, repeat=0.5) for _ in range(2))
    turns = np.stack((alike, other), 1).reshape(240, *alike.shape[1:])
    return {
        "draws": zipf_lines(rng, 120),
        "alike": alike,
        "turns": turns,
        "again": np.concatenate([zipf_lines(rng, 40)] * 3),
        "change": np.concatenate([zipf_lines(rng, 80, repeat=0.3) for _ in range(2)]),
        "top-1": alike[..., :1],
    }


@pytest.mark.parametrize("kind", routings())
def test_auto_never_falls_behind(kind):
    """At no size more than half a point below the better of lru and lfu; under one token's demand, too."""
    ids, gain = routings()[kind], []
    demand = ids.shape[1] * ids.shape[2]
    for slots in (demand // 2, demand - 1, *(640 * p // 100 for p in range(2, 101, 7))):
        rates = {p: replay_ids(p, ids, slots) for p in ("lru", "lfu", "auto")}
        gain.append(rates["auto"] - max(rates["lru"], rates["lfu"]))
        assert gain[-1] > -0.005, (slots, rates)
    assert np.mean(gain) > 0.002


def test_auto_foresees_what_comes_again():
    """Text of 40 tokens twice more: once the lag is plain, auto comes half the way to perfect."""
    ids = routings()["again"]
    lfu, auto, best = (replay_ids(p, ids, 64) for p in ("lfu", "auto", "belady"))
    assert auto - lfu > 0.25 * (best - lfu)


@pytest.mark.parametrize("policy", modes.POLICIES)
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
        engine_pure.policy_replay("lru", 1, 4, 2, one, token, start, np.array([4], np.int32))
    with pytest.raises(MosaicError):
        engine_pure.policy_replay("lru", 1, 4, 0, one, token, start, one)


# ---- speed ---------------------------------------------------------------------------------------

SPEED = ("--disk", "1000MiB", "--expert-bytes", "4M", "--compute-ms", 30)


def misses_of_tokens(path, slots):
    """LRU again, independently: misses of each token of a decode trace."""
    trace, held, out = read_trace(path), [], {}
    for i in range(len(trace)):
        for e in trace.ids[trace.start[i] : trace.start[i + 1]]:
            item = (int(trace.layer[i]), int(e))
            miss = item not in held
            out[int(trace.step[i])] = out.get(int(trace.step[i]), 0) + miss
            held = [x for x in held if x != item] + [item]
            del held[: max(0, len(held) - slots)]
    return list(out.values())


@pytest.mark.parametrize(("warm", "overlap"), [(0, None), (0, 0.0), (30, 1.0), (79, 0.25)])
def test_predicts_token_by_token(capsys, warm, overlap):
    each = misses_of_tokens(ZIPF, 204)[warm:]
    share = OVERLAP if overlap is None else overlap
    seconds = sum((1 - share) * 0.03 + max(m * 4 / 1000, share * 0.03) for m in each)
    more = () if overlap is None else ("--overlap", overlap)
    out = run_json(
        capsys, ZIPF, "--policy", "lru", "--slots", 204, *SPEED, "--warm", warm, *more,
        "--measured", 20,
    )  # fmt: skip
    assert out["tok_s"] == pytest.approx(len(each) / seconds)
    assert out["error_percent"] == pytest.approx((len(each) / seconds / 20 - 1) * 100)
    assert (out["misses"], out["tokens"], out["lines"]) == (sum(each), 80 - warm, 8 * (80 - warm))
    assert out["hits"] == 48 * (80 - warm) - sum(each) and out["measured_tok_s"] == 20


def test_a_prediction_from_means_would_be_too_fast(capsys):
    """Reads beside 100 ms of compute: some tokens wait for the one, some for the other."""
    each = misses_of_tokens(ZIPF, 204)
    out = run_json(
        capsys, ZIPF, "--policy", "lru", "--slots", 204, *SPEED[:4], "--compute-ms", 100,
        "--overlap", 1,
    )  # fmt: skip
    assert out["tok_s"] == pytest.approx(1 / np.mean([max(m * 4 / 1000, 0.1) for m in each]))
    assert out["tok_s"] < 0.98 / max(np.mean(each) * 4 / 1000, 0.1)


def test_rates_are_decimal_and_sizes_binary(capsys):
    each = misses_of_tokens(ZIPF, 204)
    for rate in ("1G", "1GB", "1000000000"):
        args = ("--disk", rate, "--expert-bytes", "4M", "--compute-ms", 1, "--overlap", 0)
        out = run_json(capsys, ZIPF, "--policy", "lru", "--slots", 204, *args)
        seconds = sum(0.001 + m * 4 * 2**20 / 1e9 for m in each)
        assert out["tok_s"] == pytest.approx(len(each) / seconds)


def test_room_for_all_computes_only(capsys):
    out = run_json(capsys, ZIPF, "--share", 1, "--warm", 79, *SPEED)
    cold = run_json(capsys, ZIPF, "--share", 1, *SPEED)
    assert cold["tok_s"] < out["tok_s"] <= 1000 / 30 * (1 + 1e-9)
    assert "error_percent" not in out


def test_speed_as_text(capsys):
    out = run(
        capsys, ZIPF, "--policy", "lru", "--slots", 204, *SPEED, "--measured", 20, "--warm", 40
    )
    r = run_json(
        capsys, ZIPF, "--policy", "lru", "--slots", 204, *SPEED, "--measured", 20, "--warm", 40
    )
    assert out.splitlines() == [
        "lru, 204 slots in all, 320 decode lines after 40 tokens:",
        f"hits {r['hits']}, misses {r['misses']}, hit rate {r['hit_rate']:.3f}",
        f"predicted {r['tok_s']:.4g} tok/s over 40 tokens, {r['misses'] / 10:.4g} MiB read a token",
        f"measured 20 tok/s: the prediction is {r['error_percent']:+.1f} % off",
    ]


def test_all_policies(capsys):
    plain = run_json(capsys, ZIPF, "--policy", "all", "--slots", 204)
    assert (plain["slots"], plain["lines"]) == (204, 640)
    for r in plain["policies"]:
        one = run_json(capsys, ZIPF, "--policy", r["policy"], "--slots", 204)
        assert {k: one[k] for k in r} == r
    rows = run(capsys, ZIPF, "--policy", "all", "--share", 0.1).splitlines()
    assert rows[0] == "204 slots in all, 640 decode lines:"
    assert rows[1].split() == ["policy", "hits", "misses", "hit", "rate"]
    assert rows[4].split() == ["lru", "2010", "1830", "0.523"]
    assert [row.split()[0] for row in rows[2:]] == ["auto", "lfu", "lru", "belady"]
    fast = run_json(capsys, ZIPF, "--policy", "all", "--slots", 204, *SPEED)["policies"]
    speeds = [r["tok_s"] for r in fast]
    assert speeds[-1] == max(speeds) and speeds[2] == min(speeds)
    rows = run(
        capsys, ZIPF, "--policy", "all", "--slots", 204, *SPEED, "--measured", 30
    ).splitlines()
    assert rows[1].split()[-2:] == ["tok/s", "off"]
    assert float(rows[2].split()[-2]) == pytest.approx(speeds[0], rel=1e-3)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--disk", "3G"), "--disk: a prediction needs --expert-bytes and --compute-ms"),
        (("--disk", "3G", "--compute-ms", 1), "--disk: a prediction needs --expert-bytes, too"),
        (("--overlap", 0.5), "--overlap: a prediction needs --disk and"),
        (("--measured", 5), "--measured: a prediction needs --disk and"),
        ((*SPEED, "--overlap", 1.5), "--overlap 1.5 is out of range: expected 0 to 1"),
        ((*SPEED, "--overlap", "nan"), "--overlap"),
        ((*SPEED, "--measured", 0), "--measured 0 is out of range: expected 1e-09 to"),
        ((*SPEED[:4], "--compute-ms", "inf"), "--compute-ms inf"),
        ((*SPEED[:4], "--compute-ms", 0), "--compute-ms 0"),
        ((*SPEED[:4], "--compute-ms", "nan"), "--compute-ms nan"),
        ((*SPEED[:4], "--compute-ms", "5e-324"), "--compute-ms 4.94066e-324 is out of range"),
        ((*SPEED, "--measured", "1e-308"), "--measured 1e-308 is out of range"),
        ((*SPEED, "--measured", "1e308"), "--measured 1e.308 is out of range"),
        (("--disk", "0", *SPEED[2:]), "--disk 0: expected more than 0 bytes a second"),
        (("--disk", "fast", *SPEED[2:]), "--disk: 'fast' is no rate"),
        (("--warm", -1), "--warm -1 is out of range"),
        ((*SPEED, "--warm", 80), "--warm 80 is out of range: expected 0 to 79"),
    ],
)
def test_speed_out_of_range(capsys, args, says):
    with pytest.raises(UsageError, match=says) as caught:
        run(capsys, ZIPF, "--slots", 204, *args)
    assert "\n" not in str(caught.value)


def test_the_farthest_speeds_are_numbers(capsys, tmp_path):
    path = tmp_path / "t.csv"
    with TraceWriter(path, 1, 4, 1) as writer:
        for step in range(3):
            writer.add("decode", step, 0, [1])
    for warm, disk, size in ((1, "7E", "1"), (0, "1", "7E")):  # all hits, and the slowest reads
        for compute in ("1e-9", "1e12"):
            for measured in ("1e-9", "1e12"):
                args = ("--disk", disk, "--expert-bytes", size, "--compute-ms", compute)
                out = run_json(
                    capsys, path, "--slots", 2, "--warm", warm, *args, "--measured", measured
                )
                assert 0 < out["tok_s"] < np.inf and np.isfinite(out["error_percent"])


def test_layer_by_layer_has_no_tokens(capsys, tmp_path):
    path = tmp_path / "t.csv"
    with TraceWriter(path, 2, 4, 1) as writer:
        for layer in range(2):
            for step in range(3):
                writer.add("prefill", step, layer, [step])
    assert run_json(capsys, path, "--slots", 2, "--phase", "all")["lines"] == 6
    for args in (SPEED, ("--warm", 1)):
        with pytest.raises(MosaicError, match="the 3 tokens of these lines do not follow"):
            run(capsys, path, "--slots", 2, "--phase", "all", *args)


def test_misses_of_lines():
    layer, token = np.array([0, 1, 0, 1], np.int32), np.array([0, 0, 1, 1])
    start, ids = np.arange(5), np.array([2, 2, 2, 3], np.int32)
    misses = np.full(4, -1, np.int32)
    assert engine_pure.policy_replay("lru", 2, 4, 8, layer, token, start, ids, misses) == (1, 3)
    assert misses.tolist() == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="4 lines"):
        engine_pure.policy_replay("lru", 2, 4, 8, layer, token, start, ids, misses[:3])
