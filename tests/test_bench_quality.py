"""`bench quality`: its figures against logits of whole calls, its errors by hand, what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import VECTORS, open_small
from helpers_checkpoint import refusal

from mosaic_c import bench_quality, scratch, synth
from mosaic_c.bench_quality import TEXTS, VARIANTS, difference, mean, quality
from mosaic_c.checkpoint import Checkpoint
from mosaic_c.cli import main
from mosaic_c.convert import DENSE, FORMATS, convert
from mosaic_c.errors import MosaicError
from mosaic_c.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"ram": "400M", "threads": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "tiny"
    synth.write(folder, "tiny", dtype="fp8", uniform=True, progress=False)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 3, encoding="utf-8")
    return path


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    return (
        z
        - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
        - z.max(1, keepdims=True)
    )


def test_figures_are_those_of_whole_logits(tiny, text, tmp_path):
    r = quality(tiny, [text], ["int4-g64+int8", "fp8+fp8"], window=50, folder=tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())
    ids = Tokenizer(tiny).encode(text.read_text(), specials=False)
    windows = [ids[i : i + 50] for i in range(0, len(ids), 50)]
    assert r.windows == [(0, len(x) - 1) for x in windows] and len(windows) == 3
    assert (r.texts[0].name, r.texts[0].tokens, r.vocab, r.synthetic) == (
        "fox.txt",
        len(ids),
        512,
        True,
    )
    convert(tiny, tmp_path / "p", "int4-g64", progress=False, dense="int8")
    logits = {}
    for name, folder in (("tiny", tiny), ("p", tmp_path / "p")):
        with open_small(folder, kv="bf16") as model:
            logits[name] = [log_softmax(model.session().forward(x))[:-1] for x in windows]
    first, variant, same = r.runs
    for i, x in enumerate(windows):
        p, q, at = logits["tiny"][i], logits["p"][i], np.arange(len(x) - 1)
        assert math.isclose(first.nll[i], -p[at, x[1:]].sum(), rel_tol=1e-9)
        assert math.isclose(variant.nll[i], -q[at, x[1:]].sum(), rel_tol=1e-9)
        assert math.isclose(variant.kl[i], (np.exp(p) * (p - q)).sum(), rel_tol=1e-6)
        assert variant.top1[i] == (p.argmax(1) == q.argmax(1)).sum()
    # experts that are FP8 already: not a bit differs
    assert (
        same.kl == [0.0] * 3
        and same.nll == first.nll
        and same.top1 == [len(x) - 1 for x in windows]
    )
    files = {x.suffix: x.stat().st_size for x in (tmp_path / "p").iterdir()}
    assert (variant.experts, variant.dense, variant.expert_bytes) == (
        "int4-g64",
        "int8",
        files[".bin"],
    )
    assert 0 < variant.dense_bytes and variant.expert_bytes < first.expert_bytes
    assert variant.bytes <= files[".bin"] + files[".safetensors"] < variant.bytes + 20000


def test_a_variant_that_cannot_be_made_is_left_out(text, tmp_path, capsys):
    folder = tmp_path / "m"
    synth.write(folder, "tiny", dtype="bf16", uniform=True, progress=False)
    e = Checkpoint.open(folder).locate().experts[2][5][2]
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(int(e["offset"]))
        f.write(np.array([0x4B00], "<u2").tobytes())  # 8388608: F16 holds no scale for it
    args = [
        "bench",
        "quality",
        "-m",
        str(folder),
        "--text",
        str(text),
        "--folder",
        str(tmp_path),
        "--ram",
        "400M",
    ]
    assert main([*args, "--variant", "int4-g64", "--variant", "mxfp4", "--tokens", "30"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mxfp4 +as it is", out, re.M) and "note: left out: int4-g64: " in out
    assert "layer 2, expert 5, down: weights up to" in out
    assert [x.name for x in tmp_path.iterdir()] == ["m"]
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(int(e["offset"]))
        f.write(np.array([0x7FC0], "<u2").tobytes())
    assert main(args) == 1
    err = capsys.readouterr().err
    assert f"{folder}: logits of fox.txt are NaN or infinite" in err and "fetch it anew" in err


def test_errors_by_hand():
    # tokens 1 1 | 3 3 | 2 2: means of windows 1, 3, 2, so the error is 1 / sqrt(3)
    m, error = mean([2, 6, 4], [2, 2, 2])
    assert m == 2 and error == pytest.approx(1 / math.sqrt(3))
    assert mean([3.0], [2]) == (1.5, None)
    m, error = difference([12.0, 16.0, 14.0], [10.0, 14.0, 12.0], [2, 2, 2])
    assert (m, error) == (1, 0)  # paired: what varies in both does not count
    assert mean([1, 0, 1, 0], [1, 1, 1, 1])[1] == pytest.approx(math.sqrt(1 / 12))


def test_all_variants_are_known_and_hold_the_rule():
    assert all(a is None or a in FORMATS for a, _ in VARIANTS)
    assert all(b is None or b in DENSE for _, b in VARIANTS)
    assert {("int4-g64", None), ("int4-g64", "int8"), ("int4-g64", "int4-g64")} < set(VARIANTS)


def test_the_command(tiny, text, tmp_path, capsys):
    args = ["bench", "quality", "-m", str(tiny), "--text", str(text), "--window", "40", "--folder", str(tmp_path),
            "--ram", "400M", "--tokens", "100", "--variant", "mxfp4", "--variant", "mxfp4+int8"]  # fmt: skip
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "synthetic weights" in out and "3 windows of at most 40 tokens, 97 predicted" in out
    assert re.search(
        r"^mxfp4 +int8 +0\.\d +0\.\d\d +\d+\.\d{3} \+-[\d.]+ +-?[\d.]+ \+-[\d.]+ ", out, re.M
    )
    assert re.search(r"paired, 1/1000 nat\nmxfp4 +int8 +-?[\d.]+ \+-[\d.]+\n", out)
    assert main([*args, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert [(x["experts"], x["dense"]) for x in got["runs"]][1:] == [
        ("mxfp4", "as it is"),
        ("mxfp4", "int8"),
    ]
    assert len(got["runs"][2]["kl"]) == len(got["windows"]) == 3 and not list(tmp_path.iterdir())


def test_refusals(tiny, text, tmp_path, monkeypatch):
    def run(model=tiny, texts=(text,), **options):
        return lambda: quality(model, texts, **{"folder": tmp_path, **OPTIONS, **options})

    for name in ("int3", "+", "", "int4-g64+int3", "int4-g64+int8+"):
        refusal(run(variants=[name]), "expected EXPERTS, +DENSE or EXPERTS+DENSE", code="EINVAL")
    refusal(run(window=1), "window: expected 2 to 4096 tokens, got 1", code="EINVAL")
    refusal(run(window=5000), "window: expected 2 to 4096", code="EINVAL")
    refusal(run(tokens=1), "tokens of each text: expected 2 or more, got 1", code="EINVAL")
    for data, words in (
        (b"", "expected 2 tokens or more, got 0"),
        (b"ab\xff", "not UTF-8 at byte 2"),
    ):
        (tmp_path / "x.txt").write_bytes(data)
        refusal(run(texts=[tmp_path / "x.txt"]), "x.txt", words)
    (tmp_path / "x.txt").unlink()
    refusal(run(texts=[tmp_path / "gone"]), "no such file", code="ENOENT")
    refusal(run(model=VECTORS / "qwen3_bf16"), "tokenizer.json", code="ENOENT")
    refusal(run(folder=tmp_path / "gone"), "cannot be used", code="EIO")
    convert(tiny, tmp_path / "p", "mxfp4", progress=False)
    refusal(run(model=tmp_path / "p"), "an expert pack already")
    shutil.rmtree(tmp_path / "p")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(scratch.shutil, "disk_usage", lambda _: usage)
    refusal(run(), "not enough disk space: needs", "fewer --tokens", code="ENOSPC")
    assert not list(tmp_path.iterdir())


def test_a_variant_without_finite_logits_is_left_out(tiny, text, tmp_path, monkeypatch):
    real = bench_quality.log_softmax
    calls = 0

    def rows(z: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return real(z) * (np.nan if calls == 3 else 1)  # the first rows of the second model

    monkeypatch.setattr(bench_quality, "log_softmax", rows)
    names = ["int4-g64", "mxfp4"]
    r = quality(tiny, [text], names, tokens=17, folder=tmp_path, **OPTIONS)
    assert [x.experts for x in r.runs] == ["as it is", "mxfp4"]
    assert r.notes == ["int4-g64: logits of fox.txt are NaN or infinite"]
    assert not list(tmp_path.iterdir())


def test_infinite_logits_warn_of_nothing(tmp_path):
    run = bench_quality.Run("", "", 0, 0, 0)
    with (tmp_path / "logits").open("w+b", buffering=0) as file:
        compare = bench_quality._Compare(file.fileno(), 2, run, first=True)
        z = np.array([[np.inf, 1], [0, 0]], np.float32)
        compare.window(SimpleNamespace(session=lambda: nullcontext(SimpleNamespace(
            each=lambda ids, take: take(0, z)))), [0, 1])  # fmt: skip
    assert math.isnan(run.nll[0])


def test_a_disk_that_fills_on_the_way(tiny, text, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench_quality.os, "pwrite", full)
    refusal(
        lambda: quality(tiny, [text], ["mxfp4"], folder=tmp_path, **OPTIONS),
        f"{tmp_path}/mosaic_c-", "No space left on device; choose another --folder", code="EIO",
    )  # fmt: skip
    monkeypatch.undo()

    def small(*_: object, **__: object) -> None:
        raise MosaicError("smaller format with --experts", "ENOSPC")

    monkeypatch.setattr(bench_quality, "convert", small)
    refusal(
        lambda: quality(tiny, [text], ["mxfp4"], folder=tmp_path, **OPTIONS),
        "no room left for mxfp4; choose another --folder", code="ENOSPC",
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_model(tiny, text, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "m"))
    t = json.loads((folder / "tokenizer.json").read_text())
    t["model"]["vocab"] = {k: v + (600 if k == "q" else 0) for k, v in t["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(t))
    refusal(
        lambda: quality(folder, [text], ["mxfp4"], folder=tmp_path, **OPTIONS),
        "m/tokenizer.json: makes token ", "expected 0..511 as config.json has it", code="EFORMAT",
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_leaves_nothing(tmp_path, number):
    code = (
        "import sys, time\nfrom mosaic_c.scratch import scratch\n"
        "with scratch(sys.argv[1], 0, '') as f:\n (f / 'x').write_text('x')\n print('up', flush=True)\n time.sleep(60)"
    )
    p = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert p.stdout is not None and p.stdout.readline() == b"up\n" and list(tmp_path.glob("*/x"))
    os.kill(p.pid, number)
    p.wait()
    until = time.monotonic() + 30
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def test_the_texts_are_described_and_shipped():
    readme = (TEXTS / "README.md").read_text(encoding="utf-8")
    texts = sorted(TEXTS.glob("*.txt"))
    assert len(texts) >= 4
    for path in texts:
        data = path.read_text(encoding="utf-8")
        assert 4000 <= len(data) <= 100_000, path.name
        assert f"| {path.name} |" in readme
    assert '"texts/*"' in (ROOT / "pyproject.toml").read_text()
    assert "python/mosaic_c/texts *" in (ROOT / "MANIFEST.in").read_text()
