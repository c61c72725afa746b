"""The command line as a user meets it: streams, exit statuses, one-line errors."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import VECTORS, open_small

from mosaic_c import synth
from mosaic_c.trace import read_trace

MODEL = "qwen35_fp8"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    synth.write(folder, "tiny", progress=False)
    return folder


def run(*args, stdin=None, env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "mosaic_c", *map(str, args)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=120,
        env=os.environ | (env or {}),
        cwd=cwd,
    )


def one_line(result, status, *words):
    lines = result.stderr.decode().strip().splitlines()
    assert result.returncode == status, result.stderr.decode()
    assert "Traceback" not in result.stderr.decode()
    assert all(word in lines[-1] for word in words), lines[-1]
    assert result.stdout == b""


def test_streams_text_and_keeps_stdout_clean(tiny):
    r = run("generate", "Once upon a time", "-m", tiny, "-n", 12, "--temp", 0, "--stats")
    assert r.returncode == 0
    assert len(r.stdout.decode().split()) > 0 and r.stdout.endswith(b"\n")
    assert b"tok/s" in r.stderr and b"hits" in r.stderr and b"tok/s" not in r.stdout


def test_prompt_from_argument_pipe_and_dash(tiny):
    by = ["-m", tiny, "-n", 8, "--temp", 0, "--raw"]
    a = run("generate", "a pipe\nof lines", *by).stdout
    assert a and a == run("generate", *by, stdin=b"a pipe\nof lines").stdout
    assert a == run("generate", "-", *by, stdin=b"a pipe\nof lines").stdout


def test_json_equals_the_api(expected):
    prompt = expected[MODEL]["prompt"].tolist()
    ids = ",".join(map(str, prompt))
    r = run(
        "generate",
        "--ids",
        ids,
        "-m",
        VECTORS / MODEL,
        "-n",
        5,
        "--json",
        "--kv",
        "f32",
        "--temp",
        0,
    )
    got = json.loads(r.stdout)
    assert got["tokens"] == expected[MODEL]["greedy"][:5].tolist()
    assert got["prompt_tokens"] == 150 and got["finish_reason"] == "length" and got["seed"] is None
    assert got["stats"]["decode_tokens"] == 4 and got["stats"]["misses"] > 0
    with open_small(MODEL) as model:
        want = [p.logprob for p in model.generate(prompt, max_new_tokens=5, temperature=0)]
    assert got["logprobs"] == want


def test_same_seed_same_text_and_a_fresh_one_is_printed(tiny):
    by = ["generate", "x", "-m", tiny, "-n", 10, "--temp", 1.0]
    first = run(*by)
    seed = first.stderr.decode().split("seed ")[1].split()[0]
    assert run(*by, "--seed", seed).stdout == first.stdout
    assert run(*by, "--seed", int(seed) + 1).stdout != first.stdout


def test_trace_then_simulate(expected, tmp_path):
    """A run token by token and its replay count the same hits and misses."""
    trace = tmp_path / "t.csv"
    r = run(
        "generate", "--ids", "5", "-m", VECTORS / MODEL, "-n", 60, "--temp", 0, "--ignore-eos", "--trace", trace,
        "--slots", 14, "--policy", "lru", "--json",
    )  # fmt: skip
    stats = json.loads(r.stdout)["stats"]
    got = read_trace(trace)
    assert (got.n_layer, got.n_expert) == (4, 10) and len(got) == 4 * 60
    sim = run("simulate", trace, "--policy", "lru", "--slots", 14, "--phase", "all", "--json")
    sim = json.loads(sim.stdout)
    assert (sim["hits"], sim["misses"]) == (stats["hits"], stats["misses"])
    assert stats["evictions"] > 0


def test_interrupt(tiny):
    """Ctrl-C: what was generated stays, the statistics come, status 130."""
    p = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mosaic_c",
            "generate",
            "x",
            "-m",
            str(tiny),
            "--ignore-eos",
            "--stats",
            "--isa",
            "scalar",  # slow enough to be interrupted,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert p.stdout.read(1)
    time.sleep(0.1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and out.endswith(b"\n")
    assert b"tok/s" in err and b"Traceback" not in err and b"interrupted" in err


def test_usage_errors(tiny):
    model = ["-m", tiny]
    one_line(run("generate", "x", "--ids", "1", *model), 2, "not both")
    one_line(run("generate", "--ids", "1,a", *model), 2, "--ids", "'1,a'")
    one_line(run("generate", "--ids", "1,9999", *model), 2, "expected 0..511, got 9999")
    one_line(run("generate", "x", "--temp", -1, *model), 2, "temperature", "-1")
    one_line(run("generate", "x", "--top-p", 2, *model), 2, "top_p", "2")
    one_line(run("generate", "x", "--ctx", 0, *model), 2, "ctx", "got 0")
    one_line(run("generate", "x", "--ctx", 10**9, *model), 2, "ctx", str(10**9))
    one_line(run("generate", "x", "--threads", 0, *model), 2, "threads", "got 0")
    one_line(run("generate", "x", "--slots", 0, *model), 2, "slots", "got 0")
    one_line(run("generate", "x", "--ram", "many", *model), 2, "many")
    one_line(run("generate", "x", "--isa", "sse9", *model), 2, "isa", "scalar", "sse9")
    one_line(run("generate", "x", "--vram", "3G", *model), 2, "vram", "no GPU")
    one_line(run("generate", "", *model), 2, "empty")
    for command in (
        ["generate", "x", "-m", ""], ["generate", "x", "--trace", "", *model], ["plan", ""], ["plan", "-m", ""],
        ["inspect", ""], ["doctor", ""], ["verify", "-m", ""], ["bench", "io", ""], ["synth", ""],
        ["simulate", "", "--slots", 1], ["bench", "sweep", *model, "--routing", ""],
        ["bench", "sweep", *model, "--plot", ""], ["bench", "sweep", *model, "--compare", ""],
    ):  # fmt: skip
        one_line(run(*command), 2, "expected a file or folder, got ''")
    assert run("generate", "x", "--no-such-option").returncode == 2
    assert run("nonsense").returncode == 2


def test_failures(tiny, tmp_path):
    one_line(run("generate", "x", "-m", tmp_path / "none"), 1, "none", "no such folder")
    one_line(run("generate", "x", "-m", tmp_path), 1, "config.json")
    one_line(run("generate", "x", "-m", tiny, "--ram", "30M"), 1, "too small", "at least", "--ram")
    one_line(run("generate", "x", "-m", tiny, "--slots", 65), 2, "slots", "64", "65")
    one_line(run("generate", "-m", tiny, stdin=b"\xff\xfe"), 1, "stdin", "UTF-8")
    one_line(run("generate", "x " * 500, "-m", tiny, "--ctx", 64), 1, "64")
    one_line(run("generate", "x", "-m", VECTORS / MODEL), 1, "tokenizer.json", "--ids")
    trace = ["-m", tiny, "--trace"]  # looked at before the model is: that may take minutes
    one_line(run("generate", "x", *trace, tmp_path / "no" / "t"), 1, "no/t", "no folder")
    one_line(run("generate", "x", *trace, tmp_path), 1, str(tmp_path), "a folder")


def test_the_floor_it_names_works(tiny):
    r = run("generate", "x", "-m", tiny, "--ram", "30M", "--ctx", 512)
    floor = int(r.stderr.decode().split("--ram ")[-1].split("M")[0])
    r = run(
        "generate",
        "x",
        "-m",
        tiny,
        "--ram",
        f"{floor + 1}M",
        "--ctx",
        512,
        "-n",
        3,
        "--json",
        "--temp",
        0,
    )
    assert r.returncode == 0, r.stderr.decode()
    got = json.loads(r.stdout)["stats"]
    assert got["peak_rss"] <= (floor + 1) << 20
    assert run("generate", "x", "-m", tiny, "--ram", f"{floor - 4}M", "--ctx", 512).returncode == 1


def test_plan_prints_every_item(tiny):
    r = run("plan", "-m", tiny, "--ram", "1G", "--json")
    got = json.loads(r.stdout)
    assert got["fits"] and got["total"] == sum(i["bytes"] for i in got["items"]) <= 1 << 30
    names = {i["name"] for i in got["items"]}
    assert {"dense weights", "KV cache", "session state", "scratch", "expert cache"} <= names
    text = run("plan", "-m", tiny, "--ram", "30M").stdout.decode()
    assert "does not fit" in text and "smallest budget" in text


def test_trace_of_chunks_and_of_company_reads_back(expected, tmp_path):
    """A prompt cut into chunks, then two sequences in one step: steps are numbered, phases are the call's."""
    from mosaic_c import budget
    from mosaic_c.trace import TraceWriter

    path = tmp_path / "t.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "CHUNKS", (8,))
        with open_small(MODEL) as model:
            with TraceWriter(path, 4, 10, 3) as model.trace:
                a, b = model.session(), model.session()
                a.forward(expected[MODEL]["prompt"][:9])
                model.forward([(b, [1, 2]), (a, [3])])
                model.forward([(b, [1]), (a, [3])])
    trace = read_trace(path)
    assert len(trace) == 4 * (9 + 3 + 2) and len(trace.select("decode")) == 4 * 2
    assert run("simulate", path, "--slots", 5, "--phase", "all", "--json").returncode == 0


def test_output_that_cannot_be_written(tiny):
    with open("/dev/full", "wb") as full:
        r = subprocess.run(
            [
                sys.executable,
                "-m",
                "mosaic_c",
                "generate",
                "x",
                "-m",
                str(tiny),
                "-n",
                "3",
                "--temp",
                "0",
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert r.returncode == 1 and b"Traceback" not in r.stderr and b"No space left" in r.stderr
    r = run("generate", "x", "-m", tiny, "-n", 9, "--temp", 0, env={"PYTHONIOENCODING": "ascii"})
    assert r.returncode == 0


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2> >(exec true)"])
def test_notes_that_cannot_be_written_end_nothing(tiny, tmp_path, redirect):
    r = subprocess.run(
        ["bash", "-c", f'exec "$0" -m mosaic_c generate x -m "$1" -n 9 --seed 1 --stats {redirect}',
         sys.executable, tiny], capture_output=True, timeout=60,
    )  # fmt: skip
    assert (
        r.returncode == 0
        and r.stdout == run("generate", "x", "-m", tiny, "-n", 9, "--seed", 1).stdout
    )
    r = subprocess.run(
        ["bash", "-c", f'exec "$0" -m mosaic_c synth "$1" {redirect}', sys.executable, tmp_path / "m"],
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert r.returncode == 0 and (tmp_path / "m" / "config.json").is_file()


def test_closed_streams(tiny):
    for redirect in (">&-", "<&-", "2>&-"):
        r = subprocess.run(
            [
                "bash",
                "-c",
                f'"$0" -m mosaic_c generate --temp 0 -n 3 -m "$1" --ids 1 {redirect}',
                sys.executable,
                tiny,
            ],
            capture_output=True,
            timeout=60,
        )
        assert r.returncode == 0 and b"Traceback" not in r.stderr
    r = subprocess.run(
        ["bash", "-c", '"$0" -m mosaic_c generate -m "$1" <&-', sys.executable, tiny],
        capture_output=True,
        timeout=60,
    )
    assert r.returncode == 2 and b"no prompt" in r.stderr


def test_a_prompt_far_too_long_is_refused_in_bounded_memory(tiny):
    # VmHWM: ru_maxrss would also count the test runner that this process was forked from
    code = "import sys; from mosaic_c.cli import main; from mosaic_c.stats import _rss; s = main(sys.argv[1:]); "
    code += "print(_rss()[1], file=sys.stderr); sys.exit(s)"
    args = ["generate", "-m", str(tiny), "--ram", "120M", "-n", "3", "-q"]
    r = subprocess.run(
        [sys.executable, "-c", code, *args],
        input=b"hello world " * 250_000,
        capture_output=True,
        timeout=60,
    )
    lines = r.stderr.decode().splitlines()
    assert r.returncode == 1 and "context has room for" in lines[-2]
    assert int(lines[-1]) < 120 << 20
    r = subprocess.run(
        [sys.executable, "-c", code, *args], input=b"x" * (9 << 20), capture_output=True, timeout=60
    )
    assert r.returncode == 1 and b"at most 8388608 bytes" in r.stderr


def test_a_budget_above_what_the_system_has_is_said(tiny):
    r = run("generate", "x", "-m", tiny, "--ram", "900T", "-n", 2, "--temp", 0)
    assert r.returncode == 0 and b"note: the budget of 900 TiB is more than the" in r.stderr


def test_works_inside_and_outside_the_source_tree(tmp_path):
    for cwd in (tmp_path, VECTORS.parents[1]):
        r = run("--version", cwd=cwd)
        assert r.returncode == 0 and r.stdout.startswith(b"mosaic_c ")


def test_broken_pipe_is_quiet(tiny):
    p = subprocess.Popen(
        [sys.executable, "-m", "mosaic_c", "generate", "x", "-m", str(tiny), "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    p.stdout.read(1)
    p.stdout.close()
    _, err = p.communicate(timeout=60)
    assert p.returncode == 1 and b"Traceback" not in err and b"Exception" not in err


def test_more_tokens_than_room_is_said(tiny):
    r = run(
        "generate", "x", "-m", tiny, "--ctx", 32, "-n", 100, "--temp", 0, "--ignore-eos", "--json"
    )
    assert b"-n 100 is more than the context of 32" in r.stderr
    assert len(json.loads(r.stdout)["tokens"]) == 31


def test_two_models_in_one_process(expected, reference):
    with open_small(MODEL) as a, open_small("qwen2_bf16_tied", threads=2) as b:
        for name, model in ((MODEL, a), ("qwen2_bf16_tied", b), (MODEL, a)):
            with model.session() as s:
                got = s.forward(expected[name]["prompt"])
            assert np.array_equal(got.view(np.int32), reference[name].view(np.int32))
