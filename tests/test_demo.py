"""The model in the box: it is there, it is what its card says, and it says the same whatever the setting.

tests/vectors/demo.json holds prompts with the greedy text that the shipped weights give, and held-out questions
(tools/train_demo/vectors.py writes it): an exact promise, since no setting may change a bit.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mosaic_c
from mosaic_c.names import demo_folder

VECTORS = json.loads((Path(__file__).parent / "vectors" / "demo.json").read_text(encoding="utf-8"))
TEXTS = VECTORS["texts"]
RAM = "1G"


def say(model, prompt, limit=400):
    pieces = model.generate(prompt, max_new_tokens=limit, temperature=0.0)
    return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def model():
    with mosaic_c.open(demo_folder(), ram=RAM) as model:
        yield model


def test_it_fits_in_the_repository_and_is_an_official_layout(model):
    files = [p for p in demo_folder().rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 12_000_000
    config = json.loads((demo_folder() / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe_text"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    moe = model.plan.moe_layers
    assert len(moe) == 8 and {(m.experts.count, m.top_k, m.shared is not None) for m in moe} == {
        (32, 4, True)
    }


@pytest.mark.parametrize("at", range(len(TEXTS)))
def test_greedy_text(model, at):
    assert say(model, TEXTS[at]["prompt"]) == TEXTS[at]["text"]


@pytest.mark.parametrize(
    "how",
    [
        {"slots": 8}, {"slots": 40, "policy": "lru"}, {"slots": 5, "policy": "layer-lru"},
        {"slots": 64, "policy": "lfu"},
        {"threads": 1}, {"threads": 3}, {"isa": "scalar"}, {"io": "pread", "slots": 16}, {"io": "direct", "slots": 16},
        {"io": "mmap"}, {"ctx": 512},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_text_for_every_setting(how):
    with mosaic_c.open(demo_folder(), ram=RAM, **how) as model:
        assert say(model, TEXTS[0]["prompt"]) == TEXTS[0]["text"]
        stats = model.stats()
        assert stats.evictions > 0 or "slots" not in how
        assert stats.io == how.get("io", stats.io) and stats.isa == how.get("isa", stats.isa)
        assert model.memory.threads == how.get("threads", model.memory.threads)
        assert model.ctx == how.get("ctx", model.ctx)


def test_held_out_questions(model):
    """The exact answers to questions about pairs of words that training never saw together; four in five are right."""
    assert [say(model, q["prompt"], 24) for q in VECTORS["questions"]] == [
        q["text"] for q in VECTORS["questions"]
    ]
    assert sum(q["right"] for q in VECTORS["questions"]) >= 0.8 * len(VECTORS["questions"])


def test_generate_without_a_model_tells_a_story(tmp_path):
    """The first command of README, far from the repository and with nothing but the package."""
    command = [sys.executable, "-m", "mosaic_c", "generate", "Once upon a time", "-n", "60", "-q"]
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    r = subprocess.run(command, capture_output=True, cwd=tmp_path, env=env, timeout=60, text=True)
    assert r.returncode == 0, r.stderr
    assert r.stdout.strip() == VECTORS["first command"].strip()
    assert not any(tmp_path.iterdir())
