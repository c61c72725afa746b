"""Logits and greedy text against transformers in float32; see tests/vectors/README.md."""

import numpy as np
import pytest
from conftest import MODELS, VECTORS, open_small

from mosaic_c import engine, engine_pure

TOLERANCE = 2e-4  # of max |logit|: summation order; an error in a formula is far above it


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_greedy_decode(name, expected):
    want = expected[name]
    bound = TOLERANCE * np.abs(want["logits"]).max()
    with open_small(name) as model, model.session() as session:
        logits = session.forward(want["prompt"])
        assert np.abs(logits[want["positions"]] - want["logits"]).max() <= bound
        assert (logits.argmax(axis=1) == want["argmax"]).all()
        row, tokens, steps = logits[-1], [], []
        for _ in want["greedy"]:
            steps.append(row)
            tokens.append(int(row.argmax()))
            row = session.forward(tokens[-1:], last=True)
        assert tokens == want["greedy"].tolist()
        got = np.array(steps)[want["step_index"]]
        assert np.abs(got - want["step_logits"]).max() <= bound
        assert session.position == len(want["prompt"]) + len(tokens) > 2 * engine.PAGE_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_greedy_tokens(name, expected):
    with open_small(name) as model:
        pieces = list(
            model.generate(expected[name]["prompt"].tolist(), max_new_tokens=40, temperature=0)
        )
        assert [p.token for p in pieces] == expected[name]["greedy"].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_order_of_the_prompt_matters(name, expected):
    """A rotation that is missing or applied to the wrong dims would leave the last logits alike."""
    prompt = expected[name]["prompt"][:40]
    swapped = np.concatenate([prompt[20:39], prompt[:20], prompt[39:]])
    with open_small(name) as model:
        a = model.session().forward(prompt, last=True)
        b = model.session().forward(swapped, last=True)
    assert np.abs(a - b).max() > 1e-2 * np.abs(a).max()


def test_rope_equals_torch_up_to_the_last_position():
    """inv_freq within one ulp (torch's pow differs in the last bit for two of them); cos and sin as torch
    gives them for the same angle, within an ulp of 1."""
    z = np.load(VECTORS / "rope.npz")
    assert 262143 in z["positions"]
    for i, (theta, dim) in enumerate(zip(z["theta"], z["dim"], strict=True)):
        want = z[f"inv_freq_{i}"]
        for j, pos in enumerate(z["positions"]):
            freq, cos, sin = engine_pure.rope_table(float(theta), int(dim), int(pos))
            assert (np.abs(freq.view(np.int32) - want.view(np.int32)) <= 1).all()
            same = freq == want
            assert same.mean() > 0.9
            assert np.abs(cos - z[f"cos_{i}"][j])[same].max() <= 1.2e-7
            assert np.abs(sin - z[f"sin_{i}"][j])[same].max() <= 1.2e-7
