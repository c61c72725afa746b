"""Sampling: settings, filters against a plain rewriting of transformers' rules, and the draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.sampling import Sampler, Sampling, _exp, best, resolve

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def waves(n: int = 100) -> np.ndarray:
    """Logits made of integer arithmetic, the same on every machine."""
    return np.array([(i * 37 % 101) * 0.0625 - 3 for i in range(n)], dtype=np.float32)


# Settings


@pytest.mark.parametrize(
    ("config", "given_", "expected"),
    [
        ({}, {}, {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}),
        (None, {}, {"temperature": 0}),
        (QWEN, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (QWEN, {"temperature": 0}, {"temperature": 0}),
        (QWEN, {"temperature": 0.0}, {"temperature": 0}),
        (QWEN, {"temperature": 1.5, "top_k": 0}, {"temperature": 1.5, "top_k": 0, "top_p": 0.95}),
        ({**QWEN, "do_sample": False}, {}, {"temperature": 0}),
        ({**QWEN, "do_sample": False}, {"temperature": 0.3}, {"temperature": 0.3, "top_k": 20}),
        ({"temperature": 0.7}, {}, {"temperature": 0}),
        ({"do_sample": True}, {}, {"temperature": 1, "top_k": 0, "top_p": 1}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {}, {"temperature": 1}),
        ({"do_sample": True, "temperature": 0.0}, {}, {"temperature": 0}),
        ({"repetition_penalty": 1.1}, {}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1}, {"repetition_penalty": 1}),
        ({}, {"top_k": -1, "temperature": 1}, {"top_k": 0}),
        ({}, {"seed": 7, "min_p": 0.1, "temperature": np.float32(1)}, {"seed": 7, "min_p": 0.1}),
    ],
)
def test_resolve(config, given_, expected):
    sampling = resolve(config, **given_)
    assert {name: getattr(sampling, name) for name in expected} == expected
    assert sampling.greedy == (sampling.temperature == 0)


def test_a_fresh_seed_is_taken_and_told():
    seeds = {resolve({}).seed for _ in range(20)}
    assert len(seeds) > 15
    assert resolve({}, seed=5).seed == 5


def test_settings_without_effect_are_named():
    assert resolve(QWEN, top_p=0.5, seed=1).ignored == ()
    assert resolve({}, top_p=0.5, seed=1, repetition_penalty=2).ignored == ("top_p", "seed")
    config = {"typical_p": 0.9, "num_beams": 1, "no_repeat_ngram_size": 3, "eta_cutoff": 0.0}
    names = ("generation_config.no_repeat_ngram_size", "generation_config.typical_p")
    assert resolve(config).ignored == names


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 10**400),
        ("seed", 10**400),
        ("temperature", 10**400),
        ("repetition_penalty", 10**400),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-60),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"{name}: expected a.* got {value!r}"):
        resolve({}, **{name: value})
    with pytest.raises(UsageError, match=f"{name}: expected"):
        Sampler(Sampling(**{name: value}))
    if name != "seed":
        with pytest.raises(MosaicError, match=f"generation_config: {name}: expected") as caught:
            resolve({name: value, "do_sample": True})
        assert caught.value.code == "EFORMAT"


def test_an_unknown_setting_is_refused():
    with pytest.raises(UsageError, match="unknown sampling setting 'topp'"):
        resolve({}, topp=1)


# Filters


def reference(logits: np.ndarray, history: list[int], s: Sampling) -> dict[int, float]:
    """transformers' processors and warpers, one after the other, written out over lists.

    Penalty and temperature in float32 as there, probabilities with Python's own exp.
    """
    f = np.float32
    scores = [f(x) for x in logits]
    for i in set(history):
        penalty = f(s.repetition_penalty)
        scores[i] = scores[i] * penalty if scores[i] < 0 else scores[i] / penalty
    scores = [x / f(s.temperature) for x in scores]
    if s.top_k:
        floor = sorted(scores, reverse=True)[min(s.top_k, len(scores)) - 1]
        scores = [x if x >= floor else f(-math.inf) for x in scores]

    def softmax() -> list[float]:
        top = max(scores)
        weights = [math.exp(float(x) - float(top)) for x in scores]
        return [w / math.fsum(weights) for w in weights]

    if s.top_p < 1:
        probs = softmax()
        running = 0.0
        order = sorted(range(len(scores)), key=lambda i: (probs[i], -i))
        for i in order[:-1]:
            running += probs[i]
            if running <= 1 - s.top_p:
                scores[i] = f(-math.inf)
    if s.min_p:
        probs = softmax()
        scores = [
            x if q >= s.min_p * max(probs) else f(-math.inf)
            for x, q in zip(scores, probs, strict=True)
        ]
    return {i: q for i, q in enumerate(softmax()) if scores[i] > -math.inf}


@settings(deadline=None, max_examples=200)
@given(
    values=st.lists(st.sampled_from(range(-40, 41)) | st.floats(-30, 30, width=32), min_size=1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.61, 0.3, 0.001]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    data=st.data(),
)
def test_filters_are_those_of_transformers(values, temperature, top_k, top_p, min_p, penalty, data):
    logits = logits_of(*values)
    history = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5))
    s = Sampling(temperature, top_k, top_p, min_p, penalty, seed=1)
    # Sums so near the limit that rounding decides are nobody's to promise.
    expected = reference(logits, history, s)
    for nudge in (-1e-9, 1e-9):
        p = min(1.0, max(0.0, top_p + nudge)) if top_p < 1 else 1.0
        m = min(1.0, max(0.0, min_p + nudge)) if 0 < min_p < 1 else min_p
        near = Sampling(temperature, top_k, p, m, penalty, seed=1)
        assume(reference(logits, history, near).keys() == expected.keys())
    before = logits.copy()
    ids, probs = Sampler(s).candidates(logits, history)
    assert ids.tolist() == sorted(expected)
    np.testing.assert_allclose(probs, [expected[i] for i in ids], rtol=1e-9)
    np.testing.assert_array_equal(logits, before)
    token, _ = Sampler(s)(logits, np.array(history, dtype=np.int64))
    assert token in expected


def test_ties():
    flat = logits_of(1, 1, 1, 1)
    assert Sampler(Sampling())(flat)[0] == 0  # greedy: the first
    assert Sampler(Sampling(1, top_k=2)).candidates(flat)[0].tolist() == [0, 1, 2, 3]
    # p = 0.5 of four equals: two are dropped, the later ones.
    assert Sampler(Sampling(1, top_p=0.5)).candidates(flat)[0].tolist() == [0, 1]
    assert Sampler(Sampling(1, top_p=0)).candidates(flat)[0].tolist() == [0]
    assert Sampler(Sampling(1, min_p=1)).candidates(logits_of(0, 2, 2))[0].tolist() == [1, 2]


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=30),
    frequency=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    presence=st.sampled_from([0.0, 1.5, -1.0]),
    penalty=st.sampled_from([1.0, 1.3]),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_frequency_and_presence_count_what_was_chosen(
    values, frequency, presence, penalty, temperature
):
    logits, before = logits_of(*values), logits_of(*values)
    s = Sampling(
        temperature, repetition_penalty=penalty, frequency_penalty=frequency,
        presence_penalty=presence, seed=3,
    )  # fmt: skip
    sampler, prompt, chosen = Sampler(s), [0, 1, 0], []
    for _ in range(6):
        # the prompt counts for the repetition penalty alone
        plain = Sampler(Sampling(temperature, repetition_penalty=penalty))
        want = plain._scores(logits, [*prompt, *chosen], None).copy()
        for i in set(chosen):
            want[i] -= np.float32(chosen.count(i)) * np.float32(frequency) + np.float32(presence)
        got = sampler._scores(logits, [*prompt, *chosen], None)
        np.testing.assert_array_equal(got, want)
        token, logprob = sampler(logits, [*prompt, *chosen])
        if temperature == 0:
            assert token == int(np.argmax(want))
        assert logprob == dict(best(logits, len(logits)))[token]
        chosen.append(token)
    np.testing.assert_array_equal(logits, before)


def test_what_is_not_allowed_is_never_chosen():
    logits = logits_of(5, 4, 3, 2, 1)
    for n in (5, 4):  # a shorter one: what lies behind may not
        mask = np.zeros(n, bool)
        mask[2:4] = True
        greedy, drawn = Sampler(Sampling()), Sampler(Sampling(5, seed=1))
        token, logprob = greedy(logits, (), mask)
        assert token == 2 and logprob == dict(best(logits, 5))[2]
        assert {drawn(logits, (), mask)[0] for _ in range(50)} == {2, 3}
        assert drawn.candidates(logits, (), mask)[0].tolist() == [2, 3]
    assert logits[0] == 5
    with pytest.raises(MosaicError, match="none of the tokens") as caught:
        Sampler(Sampling())(logits, (), np.zeros(5, bool))
    assert caught.value.code == "EDOM"
    for wrong in (np.ones(6, bool), np.ones(5), np.ones((1, 5), bool)):
        with pytest.raises(UsageError, match="allowed: expected"):
            Sampler(Sampling())(logits, (), wrong)


def test_the_likeliest_tokens():
    logits = logits_of(1, 3, 2, 3, -np.inf)
    norm = math.log(math.exp(1) + 2 * math.exp(3) + math.exp(2))
    top = best(logits, 3)
    assert [i for i, _ in top] == [1, 3, 2]  # of equals the lower id
    assert [p for _, p in top] == pytest.approx([3 - norm, 3 - norm, 2 - norm])
    assert best(logits, 0) == () and len(best(logits, 9)) == 5
    assert Sampler(Sampling())(logits) == top[0]
    with pytest.raises(MosaicError):
        best(logits_of(1, np.nan), 1)


def test_top_p_over_a_large_vocabulary():
    """What is skipped as too small to matter is still counted."""
    n = 200_000
    logits = np.zeros(n, dtype=np.float32)
    logits[7] = math.log(n)  # half of the mass; the rest shares the other half evenly
    for p, count in ((0.4, 1), (0.75, n // 2), (0.9, int(n * 0.8))):
        ids, probs = Sampler(Sampling(1, top_p=p)).candidates(logits)
        assert abs(len(ids) - count) <= 2
        assert ids[-1] == (7 if count == 1 else len(ids) - 1)
        assert math.isclose(probs.sum(), 1)


def test_repetition_penalty_holds_for_greedy_choice_too():
    logits = logits_of(2.0, 1.9, -1.0)
    choose = Sampler(Sampling(repetition_penalty=1.5))
    assert choose(logits)[0] == 0
    assert choose(logits, [0, 0, 2])[0] == 1
    # Negative logits are multiplied: seen tokens become less likely there, too.
    assert Sampler(Sampling(repetition_penalty=3.0))(logits_of(-1.0, -2.0), [0])[0] == 1
    for bad in ([3], [-1]):
        with pytest.raises(UsageError, match="history: expected ids from 0 to 2"):
            choose(logits, bad)


def test_ruled_out_tokens_are_never_drawn():
    logits = logits_of(-math.inf, 0, -math.inf, 0)
    choose = Sampler(Sampling(1.0, seed=3))
    assert {choose(logits)[0] for _ in range(50)} == {1, 3}


# The draw


# From seed 1234: the top 53 bits of PCG64's words, each looked up in the summed probabilities.
GOLDEN = [98, 38, 90, 30, 30, 19, 27, 30, 98, 30, 46, 60]


def test_the_same_seed_gives_the_same_tokens_everywhere():
    """Fixed values: penalty, exp, sums and random bits are all exactly specified."""
    s = Sampling(0.8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=1234)
    choose = Sampler(s)
    assert [choose(waves(), [3, 5])[0] for _ in GOLDEN] == GOLDEN
    other = Sampler(Sampling(0.8, 40, 0.9, 0.02, 1.2, seed=1235))
    assert [other(waves(), [3, 5])[0] for _ in GOLDEN] != GOLDEN
    # The same from its description.
    probs = reference(waves(), [3, 5], s)
    bits = np.random.PCG64(1234)
    for token in GOLDEN:
        u = (int(bits.random_raw()) >> 11) / 2**53
        assert token == next(i for i in probs if u < sum(q for j, q in probs.items() if j <= i))


def test_tokens_come_as_often_as_they_should():
    logits = logits_of(0.0, 1.0, 2.0, -1.0)
    choose = Sampler(Sampling(1.3, seed=99))
    n = 8_000
    counts = np.bincount([choose(logits)[0] for _ in range(n)], minlength=4)
    expected = np.array(list(reference(logits, [], Sampling(1.3)).values())) * n
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi square, 3 degrees: 0.1 %


def test_exp_is_exact_to_rounding():
    x = -np.concatenate([np.linspace(0, 40, 4001), np.linspace(40, 700, 500), [745, 800, 1e9]])
    true = np.array([math.exp(v) for v in x])
    np.testing.assert_allclose(_exp(x)[:-4], true[:-4], rtol=5e-16)
    assert _exp(np.array([0.0, -1e9])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-300])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_tiny_temperature_is_the_greedy_choice(temperature, sign):
    logits = sign * logits_of(10, 50, 50.5, 3)
    token, _ = Sampler(Sampling(temperature, seed=1))(logits)
    assert token == int(np.argmax(logits))


def test_logprob_is_that_of_the_models_own_distribution():
    logits = logits_of(1.0, 2.0, 4.0, -50.0)
    log_total = math.log(sum(math.exp(float(x)) for x in logits))
    for s in (Sampling(), Sampling(0.2, top_k=1), Sampling(5.0, repetition_penalty=9.0, seed=2)):
        token, logprob = Sampler(s)(logits, [2])
        assert math.isclose(logprob, float(logits[token]) - log_total, abs_tol=1e-6)
    # exp(100) is beyond float32.
    big = np.full(250_000, 100.0, dtype=np.float32)
    assert math.isclose(Sampler(Sampling())(big)[1], -math.log(250_000), abs_tol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=2, top_p=0.9, seed=1)])
@pytest.mark.parametrize(
    "logits",
    [logits_of(0, math.nan, 1), logits_of(0, math.inf), logits_of(-math.inf, -math.inf)],
)
def test_unusable_logits_are_an_error_never_a_token(sampling, logits):
    for call in (Sampler(sampling), Sampler(sampling).candidates):
        with pytest.raises(MosaicError, match="no usable logits") as caught:
            call(logits)
        assert caught.value.code == "EDOM"


@pytest.mark.parametrize("logits", [np.zeros(3), np.zeros((1, 3), np.float32), logits_of()])
def test_logits_of_another_shape_are_refused(logits):
    with pytest.raises(UsageError, match=r"expected \(vocab,\) float32"):
        Sampler(Sampling())(logits)
