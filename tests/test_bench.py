"""`bench kernels`: fields that agree with each other, int4 against theory, one-line errors."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from mosaic_c import bench, engine, engine_bench
from mosaic_c.cli import main
from mosaic_c.errors import MosaicError
from mosaic_c.limits import Limits


@pytest.fixture(scope="module")
def result():
    """One small case in a process of its own, as a script would read it."""
    r = subprocess.run(
        [
            sys.executable,
            "-m",
            "mosaic_c",
            "bench",
            "kernels",
            "--only",
            "rope 32",
            "--threads",
            "2",
            "--json",
        ],
        capture_output=True,
        timeout=120,
    )
    assert r.returncode == 0, r.stderr.decode()
    return json.loads(r.stdout)


def test_the_machine_and_its_limits(result):
    assert result["machine"]["cpu"] == engine.cpu() and result["machine"]["cores"] >= 1
    limits = result["limits"]
    speeds = [r["gbs"] for r in limits["reads"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == limits["read_gbs"] > 0
    assert len({r["name"] for r in limits["reads"]}) == len(speeds) >= 12
    assert limits["isa"] == engine.isas()[0] and limits["threads"] == 2


def test_a_row_agrees_with_itself(result):
    (row,) = result["cases"]
    assert row["name"] == "rope 32" and len(row["s"]) == 9 and row["bytes"] == 24 * 32
    assert row["median_s"] == sorted(row["s"])[4] and row["min_s"] == min(row["s"]) > 0
    assert row["gbs"] == pytest.approx(row["bytes"] / row["median_s"] * 1e-9)
    assert row["limit"] is None and row["of_read"] == row["of_fma"] == row["ratio"] == 0


def consistent(row, limits):
    assert row["gflops"] == pytest.approx(row["flops"] / row["median_s"] * 1e-9)
    fma = limits["fma_gflops"]
    if fma and not row["ratio"]:
        assert row["of_fma"] == pytest.approx(row["gflops"] / fma)
    if row["read_gbs"]:
        assert row["of_read"] == pytest.approx(row["gbs"] / row["read_gbs"])
    if row["limit"]:
        assert row[f"of_{row['limit']}"] == max(row["of_read"], row["of_fma"]) > 0


@pytest.mark.skipif("avx2" not in engine.isas(), reason="the others are AVX2 kernels")
def test_the_yardsticks_compute_the_same_and_take_turns():
    r = bench.kernels(threads=1, isa="avx2", only="yardstick")
    ours, plain, fastest = r["cases"]  # a wrong product would be an error
    assert ours["ratio"] == 1 and plain["flops"] == fastest["flops"] == 2 * 512 * 2048
    for row in r["cases"]:
        consistent(row, r["limits"])
        rounds = [a / b for a, b in zip(ours["s"], row["s"], strict=True)]
        assert row["ratio"] == pytest.approx(sorted(rounds)[4])


def test_experts_run_by_the_engine_and_from_memory():
    r = bench.kernels(threads=1, only="1x8x1x2048x512")
    (row,) = r["cases"]
    weights = 8 * 3 * 2048 * 512
    assert row["flops"] == 2 * weights and weights < row["bytes"] < 1.01 * weights
    assert row["times"] * row["bytes"] > 64 << 20 or r["limits"]["isa"] == "scalar"
    consistent(row, r["limits"])


@pytest.mark.parametrize("isa", engine.isas())
def test_int4_of_random_data(isa):
    got = bench.self_test(isa)
    for name, low, high in (("normal", 11, 12.5), ("uniform", 6.9, 7.2), ("sine", 5.4, 5.7)):
        e = got[name]
        assert low < 100 * e["relative_rms"] < high
        # an error that is not correlated with the data
        assert e["cosine"] == pytest.approx(1 - e["relative_rms"] ** 2 / 2, abs=5e-4)
        assert e["product"] < 1e-6  # decode and product with the identity give the same weights
        assert e["values_per_byte"] == 2 and math.isclose(
            e["values_per_byte_with_scales"], 128 / 68
        )


def test_int4_of_its_own_values_is_exact():
    w = np.tile(np.arange(-7, 8, dtype=np.float32), (4, 2))
    assert bench.int4_error(w)["relative_rms"] < 1e-7


def one_line(capsys, status, *words):
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1, err
    assert all(word in err for word in words), err
    return status


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--isa", "foo"], ["foo", *engine.isas()]),
        (["--only", "no such case"], ["no such case"]),
        (["--threads", "0"], ["1 to 256"]),
        (["--threads", "257"], ["1 to 256"]),
    ],
)
def test_usage_errors(capsys, args, words):
    assert one_line(capsys, main(["bench", "kernels", *args]), *words) == 2


def test_a_machine_too_small(monkeypatch, capsys):
    limits = Limits(100 << 20, 1 << 30, None, None, None, None, 1)
    monkeypatch.setattr(bench, "read_limits", lambda: limits)
    assert one_line(capsys, main(["bench", "kernels"]), "1 GiB", "100 MiB") == 1


def test_memory_that_runs_out_is_an_error(monkeypatch):
    resource = pytest.importorskip("resource")
    code = (
        "import resource, sys; from mosaic_c.cli import main;"
        "resource.setrlimit(resource.RLIMIT_AS, (750 << 20, resource.RLIM_INFINITY));"
        "sys.exit(main(['bench', 'kernels', '--threads', '1', '--only', 'gemm F32', '--json']))"
    )
    del resource
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert r.returncode == 1 and r.stdout == b""
    assert b"not enough memory" in r.stderr and b"Traceback" not in r.stderr


def test_an_interrupt_ends_it(monkeypatch, capsys):
    def stop(self, i):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_bench.Bench, "run", stop)
    assert main(["bench", "kernels", "--only", "rope 32"]) == 130


def test_a_closed_benchmark_says_so():
    b = engine_bench.Bench(1, None)
    b.close()
    with pytest.raises(MosaicError, match="closed"):
        b.run(0)
