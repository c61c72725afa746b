"""`bench sweep`: exact hit counts for forced routing, honest memory, errors before the first run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory import cached_bytes

import mosaic_c
from mosaic_c import budget, engine_pure, plot, sweep, synth, synth_shapes
from mosaic_c.cli import main
from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.routing import Routing
from mosaic_c.trace import TraceWriter, read_trace

TRACES = Path(__file__).parent / "data" / "traces"
ZIPF, UNIFORM = TRACES / "zipf-v4-shape.csv", TRACES / "uniform-v4-shape.csv"
HITS = {2: 81, 4: 278, 8: 954, 16: 1626, 32: 2223, 64: 2686}
CALLS = 80 * 8 * 6
RAM = "512M"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Experts as the traces have them, all of tiny width."""
    shape = replace(
        synth_shapes.SHAPES["v4-mini"],
        name="v4-narrow", hidden=64, width=16, vocab=512, heads=2, kv_heads=1, head_dim=32,
        specials=(509, 510, 511),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("sweep") / "narrow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synth_shapes.SHAPES, shape.name, shape)
        synth.write(path, shape.name, progress=False)
    return path


@pytest.mark.parametrize("slots", HITS)
def test_known_hit_counts(narrow, slots):
    r = sweep.point(str(narrow), slots, 80, routing=str(ZIPF), ram=RAM, threads=1)
    assert (r["hits"], r["misses"]) == (HITS[slots], CALLS - HITS[slots])
    assert r["bytes_read"] > 0 and r["policy"] == "layer-lru" and len(r["times"]) == 80
    assert r["tok_s"] == pytest.approx(1 / np.median(r["times"]))


def test_a_part_of_the_trace_and_another_policy(narrow):
    lines = read_trace(ZIPF)
    keep = lines.token < 33
    want = engine_pure.policy_replay(
        "lru", 8, 256, 16, lines.layer[keep], lines.token[keep],
        np.arange(keep.sum() + 1, dtype=np.int64) * 6, lines.ids[: keep.sum() * 6],
    )  # fmt: skip
    r = sweep.point(str(narrow), 2, 33, "lru", str(ZIPF), ram=RAM, threads=1)  # 16 in all
    assert (r["hits"], r["misses"]) == want


def test_both_columns_from_fresh_processes(capsys, narrow, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    args = ["bench", "sweep", "-m", str(narrow), "--ram", RAM, "--threads", "1", "--slots", "8,256"]
    args += [
        "--routing",
        str(ZIPF),
        "--routing",
        str(UNIFORM),
        "--plot",
        str(picture),
        "--io",
        "direct",
    ]
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    zipf, uniform = result["series"]
    assert (zipf["name"], uniform["name"]) == (ZIPF.stem, UNIFORM.stem) and zipf["synthetic"]
    trace = read_trace(ZIPF)
    distinct = len(np.unique(np.repeat(trace.layer, 6) * 256 + trace.ids))
    assert [r["hits"] for r in zipf["rows"]] == [954, CALLS - distinct]
    assert [r["hits"] for r in uniform["rows"]][0] == 84 and result["tokens"] == 80
    small, large = zipf["rows"]
    # the arena is there and untouched; then exactly the experts that were called became resident
    assert abs(large["rss_before"] - small["rss_before"]) < 3 << 20
    grown = (large["rss"] - large["rss_before"]) - (small["rss"] - small["rss_before"])
    slab = large["cache_bytes"] / 256 / 8
    assert 0.5 * slab * (large["misses"] - 64) < grown < 2 * slab * large["misses"] + (4 << 20)
    assert small["rss_python"] < small["rss_before"] <= small["peak_rss"]
    for r in zipf["rows"]:
        assert r["io_tried"] == []  # as auto does, into the arena
        assert r["mb_per_token"] == pytest.approx(r["bytes_read"] / 80e6)
        assert r["bytes_read"] >= 0.9 * r["misses"] * 3 * 16 * 64
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_text_of_two_models_by_their_own_routers(capsys, narrow):
    args = ["bench", "sweep", "-m", str(narrow), "--compare", str(narrow), "--ram", RAM]
    assert main([*args, "--slots", "2,64", "--tokens", "8", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "narrow (A): " in lines[0] and "(synthetic weights)" in lines[0] and "8 tokens" in lines[2]
    )
    assert [line.startswith("RSS before any expert is touched: ") for line in lines[3:5]] == [
        True
    ] * 2
    for line in lines[-2:]:
        slots, a, b = line.split("|")
        assert a.split()[:3] == b.split()[:3]  # cache, hits, hit rate: the same model twice
    first, second = (float(line.split("|")[1].split()[2]) for line in lines[-2:])
    assert first < second


# ---- forced routing in the model ----


def test_forced_ids_follow_the_position(monkeypatch, narrow, tmp_path):
    monkeypatch.setattr(budget, "CHUNKS", (4,))  # seven tokens are two chunks
    ids = [5, 6, 7, 8, 9, 10, 11]
    with mosaic_c.open(narrow, ram=RAM, threads=1, ctx=80) as model:
        with model.session() as s:
            own = s.forward(ids)
        routing = model.routing = Routing(ZIPF, model.plan)
        with TraceWriter(tmp_path / "t.csv", 8, 256, 6) as model.trace:
            with model.session() as s:
                whole = s.forward(ids)
        model.trace = None
        a, b = model.session(), model.session()
        one_by_one = [a.forward([i], last=True) for i in ids[:5]]
        b.forward(ids[:2])
        both = model.forward([(a, ids[5:]), (b, ids[2:4])])
        a.rewind(3)
        again = a.forward(ids[3:4], last=True)
    got = read_trace(tmp_path / "t.csv")
    assert np.array_equal(got.ids.reshape(7, 8, 6), routing.ids[:7])
    assert not np.array_equal(own, whole)
    for row, want in ((one_by_one[4], 4), (both[0], 6), (both[1], 3), (again, 3)):
        assert np.array_equal(row, whole[want])


@pytest.mark.parametrize(
    "give",
    [
        lambda n: np.zeros(
            (1, 6), np.int32
        ),  # shorter than the positions: the engine knows no length
        lambda n: np.zeros((n, 5), np.int32),
        lambda n: np.zeros(6 * n, np.int32),
        lambda n: np.zeros((n, 6), np.int64),
        lambda n: [[0, 1, 2, 3, 4, 5]] * n,
        lambda n: None,
    ],
)
def test_forced_ids_of_another_shape_are_refused(narrow, give):
    with mosaic_c.open(narrow, ram=RAM, threads=1, ctx=80) as model:
        model.routing = lambda layer, positions: give(len(positions))
        s = model.session()
        with pytest.raises(UsageError, match=r"array int32 \(3, 6\) for layer 0, got"):
            s.forward([1, 2, 3])
        assert s.position == 0
        order = np.arange(6, dtype=np.int32)[::-1]  # any order, and any strides
        model.routing = lambda layer, positions: np.broadcast_to(order, (len(positions), 6))
        assert np.isfinite(s.forward([1, 2, 3])).all()


def test_a_trace_ends(narrow):
    with mosaic_c.open(narrow, ram=RAM, threads=1, ctx=128) as model:
        model.routing = Routing(ZIPF, model.plan)
        s = model.session()
        s.forward(list(range(80)))
        with pytest.raises(UsageError, match="80 tokens; there is none for position 80"):
            s.forward([1])
        assert s.position == 80
        model.routing = None
        s.forward([1])


@pytest.mark.parametrize(
    ("shape", "lines", "message"),
    [
        ((7, 256, 6), None, "7 layers x 256 experts, top-6; the model has 8 layers x 256"),
        ((8, 255, 6), None, "8 layers x 255 experts"),
        ((8, 256, 5), None, "top-5"),
        ((8, 256, 6), [(0, layer) for layer in range(8)] + [(1, 0)], "token 1 has lines for 1 of 8"),
        ((8, 256, 6), [], "no decode lines"),
    ],
)  # fmt: skip
def test_traces_that_do_not_fit(capsys, narrow, tmp_path, shape, lines, message):
    path = tmp_path / "t.csv"
    lines = [(0, layer) for layer in range(shape[0])] if lines is None else lines
    with TraceWriter(path, *shape) as writer:
        writer.add("prefill", 0, 0, range(shape[2]))
        for step, layer in lines:
            writer.add("decode", step, layer, range(shape[2]))
    fails(capsys, ["-m", str(narrow), "--routing", str(path)], "t.csv", message)


# ---- errors ----


def fails(capsys, args, *words):
    status = main(["bench", "sweep", *args])
    out, err = capsys.readouterr()
    assert status in (1, 2) and out == "" and len(err.strip().splitlines()) == 1, err
    assert all(word in err for word in words), err


def test_errors_come_before_the_first_run(monkeypatch, capsys, narrow, tmp_path):
    monkeypatch.setattr(sweep, "fresh_point", None)
    model = ["-m", str(narrow)]
    zipf = ["--routing", str(ZIPF)]
    fails(capsys, [*model, *zipf, "--tokens", "81"], "--tokens 81", "the 80 tokens of the trace")
    fails(capsys, [*model, "--tokens", "0"], "--tokens 0", "the 32768 positions of the model")
    fails(capsys, [*model, "--slots", "2,257"], "--slots 257", "256 experts")
    fails(capsys, [*model, "--slots", "0"], "--slots 0")
    fails(capsys, [*model, "--slots", "2,"], "--slots", "whole numbers")
    fails(capsys, [*model, *zipf, *zipf, *zipf], "at most two traces")
    fails(capsys, [*model, "--plot", "x.doc"], "x.doc", ".png")
    fails(capsys, [*model, "--plot", str(tmp_path / "no" / "x.png")], "no folder")
    (tmp_path / "x.png").mkdir()
    fails(capsys, [*model, "--plot", str(tmp_path / "x.png")], "a folder")
    fails(capsys, ["-m", str(tmp_path / "none")], "none")
    fails(capsys, [*model, "--compare", str(tmp_path)], str(tmp_path))


def test_figures_are_out_before_the_picture_fails(capsys, monkeypatch, narrow, tmp_path):
    pytest.importorskip("matplotlib")

    def fail(*args):
        raise MosaicError("no picture", "EIO")

    monkeypatch.setattr(plot, "sweep", fail)
    args = [
        "bench",
        "sweep",
        "-m",
        str(narrow),
        "--slots",
        "8",
        "--tokens",
        "1",
        "--ram",
        RAM,
        "--json",
    ]
    assert main([*args, "--plot", str(tmp_path / "x.png")]) == 1
    out, err = capsys.readouterr()
    assert "no picture" in err and json.loads(out)["tokens"] == 1


def test_without_matplotlib_the_extra_is_named(monkeypatch, capsys, narrow, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fails(capsys, ["-m", str(narrow), "--plot", str(tmp_path / "x.png")], "mosaic_c[plot]")


def test_errors_of_a_run_are_one_line(capsys, narrow):
    model = ["-m", str(narrow), "--slots", "2"]
    fails(capsys, [*model, "--ram", "20M"], "20 MiB", "too small")
    for option in ("--io", "--policy"):  # before a child runs
        with pytest.raises(SystemExit) as end:
            main(["bench", "sweep", *model, option, "tape"])
        assert end.value.code == 2 and "tape" in capsys.readouterr().err
    with pytest.raises(MosaicError, match="2 slots failed: TypeError"):
        sweep.fresh_point(model=str(narrow), slots=2, tokens=1, nonsense=1)


def test_a_run_that_is_killed(monkeypatch, tmp_path, narrow):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -9 $$\n")
    script.chmod(0o700)
    monkeypatch.setattr(sweep.sys, "executable", str(script))
    with pytest.raises(MosaicError, match="4 slots was ended by signal 9: out of memory"):
        sweep.fresh_point(model=str(narrow), slots=4, tokens=1)


def test_an_interrupt_ends_the_run(monkeypatch, capsys, narrow):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.subprocess, "run", stop)
    assert main(["bench", "sweep", "-m", str(narrow)]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_default_sizes_end_where_the_model_does():
    shape = sweep.Shape(8, 40, 6, True, 100, None)
    assert sweep.choose([shape], None, None) == ([2, 4, 8, 16, 32], sweep.TOKENS)
    assert sweep.choose([replace(shape, positions=70)], None, None)[1] == 70
    few = replace(shape, experts=9, trace_tokens=7)
    assert sweep.choose([shape, few], None, None) == ([2, 4, 8], 7)


def test_names_of_series():
    def names(*args):
        return [(s.name, s.model, s.routing) for s in sweep.series(*args)]

    assert names("/m/a", None, []) == [("a", "/m/a", None)]
    assert names("/m/a", None, ["/t/x.csv"]) == [("a", "/m/a", "/t/x.csv")]
    assert names("/m/a", None, ["x.csv", "y.csv"]) == [
        ("x", "/m/a", "x.csv"),
        ("y", "/m/a", "y.csv"),
    ]
    assert names("/m/a", "/m/b", []) == [("a", "/m/a", None), ("b", "/m/b", None)]
    assert names("/m/a", "/m/b", ["x.csv"]) == [("a", "/m/a", "x.csv"), ("b", "/m/b", "x.csv")]
    assert names("/m/a", None, ["/t/x.csv"] * 2)[1] == ("x (B)", "/m/a", "/t/x.csv")
    assert names("/m/a", "/n/a", ["x.csv", "y.csv"]) == [
        ("a (A)", "/m/a", "x.csv"), ("a (B)", "/n/a", "y.csv"),
    ]  # fmt: skip


def test_pages_are_dropped(narrow):
    paths = [str(p) for p in narrow.glob("*.safetensors")]
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        while os.read(fd, 1 << 20):
            pass
        os.close(fd)
    if not cached_bytes(paths):
        pytest.skip("this file system keeps nothing in the page cache")
    sweep.drop_pages(narrow)
    assert cached_bytes(paths) == 0


def test_a_picture_that_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"slots": 2, "hit_rate": 0.5, "tok_s": 1.0, "rss": 2e6, "rss_before": 1e6}
    with pytest.raises(MosaicError, match="cannot write"):
        plot.sweep(["a"], [[row]], "t", tmp_path / "no" / "x.png")
    old = tmp_path / "x.png"
    old.write_bytes(b"old")
    with pytest.MonkeyPatch.context() as patch:

        def full(path, data):
            with open(path, "wb") as file:
                file.write(data[:10])
            raise OSError(28, "No space left on device")

        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(MosaicError, match="No space left"):
            plot.sweep(["a"], [[row]], "t", old)
    assert list(tmp_path.iterdir()) == [old] and old.read_bytes() == b"old"
    for name in ("x.png", "x.PDF", "x.svg"):
        plot.sweep(["a"], [[row]], "t", tmp_path / name)
    assert old.read_bytes()[:4] == b"\x89PNG" and (tmp_path / "x.PDF").read_bytes()[:4] == b"%PDF"


# ---- the plain program it is compared with (tests/c/plain_stream.c) ----


@pytest.fixture(scope="module")
def plain_stream():
    folder = Path(__file__).parent / "c"
    subprocess.run(["make", "-s", "-C", folder, "plain-stream"], check=True)
    return folder / "build" / "plain" / "plain_stream"


def run_plain(program, *args):
    return subprocess.run(
        [program, *map(str, args)], check=True, capture_output=True, text=True
    ).stdout


def test_the_plain_program_hits_as_often(plain_stream, tmp_path):
    size = ["--hidden", 16, "--width", 4]
    run_plain(plain_stream, ZIPF, tmp_path / "r", *size, "--make")
    out = run_plain(plain_stream, ZIPF, tmp_path / "r", *size)
    assert [[int(line.split()[i].strip(",")) for i in (1, 6, 8)] for line in out.splitlines()] == [
        [slots, hits, CALLS - hits] for slots, hits in HITS.items()
    ]


def splitmix(seed):
    """Values in [-1, 1) of tests/c/rng.h."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield (((z ^ z >> 31) >> 40) - 2**23) / 2**23


def test_the_plain_program_computes_experts(plain_stream, tmp_path):
    """Its checksum against numpy, on records that lie apart."""
    hidden, width, layers, experts, stride = 8, 6, 2, 4, 300
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (layers, experts, stride), np.uint8)
    codes = 3 * hidden * width // 2
    scales = rng.uniform(0.05, 0.1, (layers, experts, 2 * width + hidden)).astype(np.float32)
    records[:, :, codes : codes + scales.shape[-1] * 4] = scales.view(np.uint8)
    (tmp_path / "r").write_bytes(records.tobytes())
    calls = [[[0, 3], [1, 2]], [[3, 1], [2, 0]], [[0, 1], [2, 3]]]
    with TraceWriter(tmp_path / "t", layers, experts, 2) as writer:
        for token, lines in enumerate(calls):
            for layer, ids in enumerate(lines):
                writer.add("decode", token, layer, ids)

    def weights(layer, expert):
        raw = records[layer, expert, :codes]
        w = np.stack([raw & 15, raw >> 4], axis=1).reshape(-1).astype(float) - 8
        s, n = scales[layer, expert].astype(float), hidden * width
        gate, up = (w[i * n : (i + 1) * n].reshape(width, hidden) for i in (0, 1))
        down = w[2 * n :].reshape(hidden, width)
        return gate * s[:width, None], up * s[width : 2 * width, None], down * s[2 * width :, None]

    values, total = splitmix(2), 0.0
    for token, lines in enumerate(calls):
        x = np.array([next(values) for _ in range(hidden)])
        for layer, ids in enumerate(lines):
            y = 0
            for gate, up, down in (weights(layer, e) for e in ids):
                g = gate @ x
                y = y + down @ (g / (1 + np.exp(-g)) * (up @ x)) / 2
            x = x + y
        total += x[token]
    size = ["--hidden", hidden, "--width", width, "--record", stride]
    out = run_plain(plain_stream, tmp_path / "t", tmp_path / "r", *size, 2)
    assert float(out.split()[-1]) == pytest.approx(total, rel=1e-4)
    assert "hits 4, misses 8, " in out  # layer 0: 3 and 1 again, layer 1: 2 twice
