"""`verify`: equal runs are found equal, every real difference is found and named, nothing is claimed unproven."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import VECTORS, open_small

from mosaic_c import cli, engine, modes, synth, verify
from mosaic_c.errors import MosaicError
from mosaic_c.model import Model
from mosaic_c.verify import Run, Setting

FOLDER = VECTORS / "qwen35_fp8"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "tiny"
    synth.write(folder, "tiny", progress=False)
    return folder


@pytest.fixture
def few(monkeypatch):
    """settings() reduced to the baseline and those whose names begin so."""

    def reduce(*names):
        every = verify.settings
        monkeypatch.setattr(
            verify, "settings", lambda *a: [s for s in every(*a) if s.name.startswith(("baseline", *names))]
        )  # fmt: skip

    return reduce


@pytest.fixture
def tamper(monkeypatch):
    """Models whose logits go through change(model, pick, y)."""

    def install(change):
        real = Model._logits

        def logits(self, x, pick):
            y = real(self, x, pick)
            change(self, pick, y)
            return y

        monkeypatch.setattr(Model, "_logits", logits)

    return install


def flip(y, row, index, bit=0):
    y.view(np.int32)[row, index] ^= 1 << bit


def run(folder=FOLDER, **options):
    report = verify.verify(folder, **({"ram": "2G", "tokens": 4} | options))
    return report, {row.setting: row for row in report.rows}


def test_every_setting_is_run_and_equal():
    report, rows = run(prompt=",".join(map(str, range(20))))
    ways, policies = set(modes.IO_MODES) - {"auto"}, modes.MODEL_POLICIES
    want = {"baseline", "prompt token by token", "all at once"} | {f"io {m}" for m in ways}
    want |= {f"isa {i}" for i in engine.isas()[1:]} | {
        f"policy {p}, fewest slots" for p in policies
    }
    assert want < set(rows) and len(rows) == len(want) + 1  # and one other number of threads
    assert report.good and report.prompt == list(range(20)) and len(report.tokens) == 4
    for name, row in rows.items():
        if name != "baseline" and row.status != "refused":
            assert (row.status, row.tokens_equal, row.logits_equal) == ("equal", True, True), row
            assert row.exercised or name.startswith(("threads", "all", "io")), row
        assert row.reason or 0 < row.peak_rss <= report.budget
    assert rows["io pread"].exercised and rows["policy lru, fewest slots"].exercised


def test_the_tokens_are_those_of_generate():
    report, _ = run(prompt="3,1,4", tokens=6)
    with open_small("qwen35_fp8", kv="bf16") as model:
        pieces = list(model.generate([3, 1, 4], 6, temperature=0, ignore_eos=True))
    assert report.tokens == [p.token for p in pieces]


def test_without_a_tokenizer_the_ids_are_random_and_always_the_same(few):
    few("prompt")
    a, b = run()[0], run()[0]
    assert a.prompt == b.prompt and len(set(a.prompt)) > 12


@pytest.mark.parametrize("at", [0, 2, 5, 7])
def test_one_bit_of_a_logit_is_found(few, tamper, at):
    """Prompt of 4 tokens and 4 generated: positions 0..6. Logits 7 and 9 have another last bit."""
    few("isa scalar", "prompt")

    def change(model, pick, y):
        change.at += len(pick)
        if model.stats().isa != baseline and change.at - len(pick) <= at < change.at:
            flip(y, at - (change.at - len(pick)), 7)
            flip(y, at - (change.at - len(pick)), 9)

    change.at, baseline = 0, best_isa()
    tamper(change)
    report, rows = run(prompt="5,6,7,8")
    row = rows["isa scalar"]
    assert rows["prompt token by token"].status == "equal"
    if at == 7:
        assert report.good and row.status == "equal"
        return
    d = row.difference
    assert not report.good and row.status == "differs" and row.tokens_equal and not row.logits_equal
    assert (d.position, d.index, d.count, d.repeats) == (at, 7, 2, True)
    assert (
        abs(int(np.float32(d.got).view(np.int32)) - int(np.float32(d.baseline).view(np.int32))) == 1
    )
    where = f"prompt position {at}," if at < 3 else f"token {at - 2},"
    assert d.text(4).startswith(where) and "logit 7:" in d.text(4)


def best_isa():
    with open_small("qwen35_fp8") as model:
        return model.stats().isa


def test_other_tokens_are_found(few, tamper):
    few("io pread")

    def change(model, pick, y):
        if model._io == "pread":
            y[-1, 3] = 1e9

    tamper(change)
    _, rows = run()
    assert rows["io pread"].tokens_equal is False and rows["io pread"].difference.got == 1e9


def test_a_model_whose_bits_differ_is_found(few, monkeypatch, tmp_path, capsys):
    """What a setting reads from disk is not what the baseline read: one byte of one weight."""
    few("io")
    other = tmp_path / "other"
    shutil.copytree(FOLDER, other)
    shard = sorted(other.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-100:] = bytes(b ^ 1 for b in data[-100:])
    shard.write_bytes(data)
    real = verify.open_model

    def open_model(folder, io="auto", **options):
        return real(other if io == "pread" else folder, io=io, **options)

    monkeypatch.setattr(verify, "open_model", open_model)
    status = cli.main(["verify", "-m", str(FOLDER), "--ram", "1G", "--tokens", "4"])
    out = capsys.readouterr().out
    assert status == 1 and "DIFFERENT: io pread\n" in out
    assert "DIFFER" in next(x for x in out.splitlines() if x.startswith("io pread"))
    assert "first: " in out and "in the baseline" in out
    assert "DIFFER" not in next(x for x in out.splitlines() if x.startswith("io direct"))


def test_a_baseline_that_does_not_repeat_itself_is_named(few, tamper):
    few("io pread")
    tamper(lambda model, pick, y: flip(y, 0, os.getpid() % 64, 3))
    _, rows = run()
    assert "gives other bits than before" in rows["io pread"].difference.text(24)


def test_any_nan_equals_any_nan_and_is_told(few, tamper):
    few("io pread")

    def change(model, pick, y):
        y.view(np.uint32)[:, 5] = 0x7FC00001 if model._io == "pread" else 0xFFC00000

    tamper(change)
    report, rows = run()
    assert report.good and report.not_finite == 24 + 4 - 1


def test_a_crash_is_one_failed_row(few, tamper, capsys):
    few("threads", "io pread", "prompt")
    tamper(lambda model, *_: os.kill(os.getpid(), signal.SIGKILL) if model._io == "pread" else None)
    report, rows = run()
    assert rows["io pread"].status == "failed" and "-9" in rows["io pread"].reason
    assert [r.status for r in report.rows if r.setting != "io pread"][1:] == ["equal", "equal"]
    assert not report.good


def test_an_error_of_reading_is_a_failure_not_a_refusal(few, tamper):
    few("io pread")

    def change(model, pick, y):
        if model._io == "pread":
            raise MosaicError("shard 3: cannot read", "EIO")

    tamper(change)
    report, rows = run()
    assert rows["io pread"].status == "failed" and rows["io pread"].reason == "shard 3: cannot read"
    assert not report.good


def test_a_refused_mode_is_no_failure(few, monkeypatch):
    few("io")
    monkeypatch.setitem(engine.IO_MODES, "telepathy", 99)
    report, rows = run()
    assert rows["io telepathy"].status == "refused" and "99" in rows["io telepathy"].reason
    assert report.good and rows["io pread"].status == "equal"


def test_a_mode_that_statistics_do_not_count_is_not_exercised(few, monkeypatch):
    few("io")
    monkeypatch.setitem(engine.IO_MODES, "quietly", engine.IO_MODES["pread"])
    _, rows = run()
    assert rows["io quietly"].status == "equal" and not rows["io quietly"].exercised


def test_evidence_is_asked_of_the_statistics():
    with open_small("qwen35_fp8") as model:
        base = replace(model.stats(), threads_ran=2, hits=50, misses=50)
    tiny = replace(base, slots=3, misses=9)

    def proven(setting, stats, base=base):
        return verify._evidence(setting, stats, base)[0]

    cache = Setting("", {"slots": 3})
    assert proven(cache, tiny)
    assert not proven(cache, replace(tiny, misses=3))
    assert not proven(cache, tiny, replace(base, slots=3))  # the baseline's is no larger
    lru = Setting("", {"slots": 3, "policy": "lru"})
    assert proven(lru, replace(tiny, policy="lru")) and not proven(lru, tiny)
    one = Setting("", {"threads": 1})
    assert proven(one, replace(base, threads_ran=1))
    assert not proven(one, base) and not proven(
        one, replace(base, threads_ran=1), replace(base, threads_ran=1)
    )
    scalar = Setting("", {"isa": "scalar"})
    assert proven(scalar, replace(base, isa="scalar"), replace(base, isa="avx2"))
    assert not proven(scalar, replace(base, isa="avx2"), replace(base, isa="avx512"))
    direct = Setting("", {"io": "direct"})
    assert proven(direct, replace(base, io="direct", files_direct=2))
    assert not proven(direct, replace(base, io="direct", files_direct=0, files_pread=2))
    assert not proven(direct, replace(base, io="uring", files_direct=2))
    cut = Setting("", piece=1)
    assert proven(cut, replace(base, hits=60)) and not proven(cut, base)
    both = Setting("", {"slots": 3, "isa": base.isa}, piece=1)
    assert not proven(both, replace(tiny, hits=60))  # one part of it is the baseline's


def test_memory_does_not_grow_with_the_run():
    job = verify.Job(FOLDER, {"ram": "2G", "ctx": 256}, list(range(64)), 20)
    out = verify.run_here(job, Setting("baseline"), lambda *news: None)
    assert isinstance(out, Run) and len(out.digests) == 64 + 19 and out.row is None
    assert {len(d) for d in out.digests} == {16}


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "mosaic_c", "verify", *map(str, args)], capture_output=True, text=True, timeout=120
    )  # fmt: skip


def test_json_and_table(tiny):
    r = command("-m", tiny, "--ram", "512M", "--tokens", 3, "--prompt", "abc", "--json")
    report = json.loads(r.stdout)
    assert r.returncode == 0 and report["good"] and report["rows"][0]["setting"] == "baseline"
    assert len(report["tokens"]) == 3 and report["budget"] == 512 << 20 and not r.stderr.strip()
    r = command("-m", tiny, "--ram", "512M", "--tokens", 3)
    assert r.returncode == 0 and "24 prompt tokens and 3 generated" in r.stdout
    assert "all at once" in r.stdout and "peak RSS" in r.stdout


def test_bad_arguments_are_one_line(tiny):
    for status, word, *args in (
        (2, "--tokens 0", "-m", tiny, "--tokens", 0),
        (2, "token ids", "-m", FOLDER, "--prompt", "a text"),
        (2, "at least one token", "-m", tiny, "--prompt", ""),
        (2, "token id", "-m", FOLDER, "--prompt", "1,2,99999999"),
        (
            2,
            "--tokens 1048576 behind 24 of the prompt: ctx: expected 1..4096",
            "-m",
            tiny,
            "--tokens",
            1 << 20,
        ),
        (1, "too small", "-m", tiny, "--ram", "1M"),
        (1, "no such folder", "-m", tiny / "none"),
        (2, "expected a file or folder", "-m", ""),
    ):
        r = command(*args)
        lines = r.stderr.strip().splitlines()
        assert r.returncode == status and len(lines) == 1 and word in lines[0], (args, r)


def test_ctrl_c_leaves_nothing_behind(tiny):
    p = subprocess.Popen(
        [sys.executable, "-m", "mosaic_c", "verify", "-m", str(tiny), "--ram", "512M", "--tokens", "2000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert p.stdout.readline().startswith("setting")
    children, until = "", time.monotonic() + 60
    while not children and time.monotonic() < until:
        with open(f"/proc/{p.pid}/task/{p.pid}/children", encoding="ascii") as f:
            children = f.read().strip()
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130 and err.strip().endswith("interrupted") and "Traceback" not in err
    assert children and not any(os.path.exists(f"/proc/{child}") for child in children.split())


def test_ctrl_c_at_the_moment_of_a_fork_is_not_lost(tiny):
    """Python drops what a hook of fork raises."""
    code = (
        "import os, signal, sys\n"
        "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "from mosaic_c import cli\n"
        "sys.exit(cli.main(['verify', '--ram', '512M', '-m', sys.argv[1]]))"
    )
    r = subprocess.run(
        [sys.executable, "-c", code, tiny], capture_output=True, text=True, timeout=60
    )
    assert r.returncode == 130 and r.stderr.strip() == "interrupted"
