"""From logits to a token.

Owns: the sampling settings and their checks, and the draw. Promises: transformers' order and
meaning (repetition penalty, temperature, top-k, top-p, min-p, then the draw), with OpenAI's
penalties and what is allowed behind the first; the same seed gives the same tokens on every
machine. How that holds: penalties, temperature and the top-k cut are float32 as in transformers;
probabilities are float64, from an exp() made of exactly rounded operations (numpy's own differs
between CPUs); sums run in token order; random numbers are the top 53 bits of numpy's PCG64, whose
stream numpy guarantees. Knows nothing of models, text or files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import MosaicError, UsageError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
History = Sequence[int] | Ids


@dataclass(frozen=True)
class Sampling:
    """Settings with every default filled in. Off means: no effect.

    temperature: 0 is greedy, else logits are divided by it. top_k: 0 is off. top_p: 1 is off, in
    [0, 1]. min_p: 0 is off, in [0, 1], relative to the likeliest token. repetition_penalty: 1 is
    off, > 0; it applies to greedy choice too. frequency_penalty, presence_penalty: 0 is off, in
    [-2, 2]; they lower the logit of a token that was chosen before, by the first each time and by
    the second once. seed: 0 <= seed < 2**64. ignored: names of settings that were given and have no
    effect.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that the seed does not matter."""
        return self.temperature == 0.0


_NUMBERS = (int, float, np.integer, np.floating)

# name -> (whether a value is fine, what is expected)
_RANGES = {
    "temperature": (lambda v: v >= 0, "a number >= 0 (0 is greedy)"),
    "top_k": (lambda v: v >= -1 and v == int(v), "an integer >= 1 (0 or -1 is off)"),
    "top_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1 (1 is off)"),
    "min_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1 (0 is off)"),
    "repetition_penalty": (lambda v: np.float32(v) > 0, "a number > 0 (1 is off)"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "a number from -2 to 2 (0 is off)"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "a number from -2 to 2 (0 is off)"),
    "seed": (lambda v: 0 <= v < 2**64 and v == int(v), "an integer from 0 to 2**64 - 1"),
}

# generation_config keys that would change the choice and are not implemented -> the value that
# changes nothing.
_UNSUPPORTED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "dola_layers": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
}


def resolve(generation_config: Mapping[str, Any] | None = None, **overrides: Any) -> Sampling:
    """Settings from a checkpoint's generation_config and the caller's own (temperature, top_k,
    top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed; None means: as the
    checkpoint says).

    Greedy unless the checkpoint says do_sample; an explicit temperature decides: 0 greedy, > 0
    sampling. A setting that neither names is off. Without a seed a fresh one is taken from the
    system, and is in the result. Raises UsageError for an override out of range, MosaicError
    EFORMAT for a value in generation_config.
    """
    config = generation_config or {}
    unknown = sorted(set(overrides) - set(_RANGES))
    if unknown:
        raise UsageError(
            f"unknown sampling setting '{unknown[0]}': expected one of {', '.join(_RANGES)}"
        )
    given = {name: _checked(name, v, None) for name, v in overrides.items() if v is not None}
    stored = {
        name: _checked(name, config[name], "generation_config")
        for name in _RANGES
        if name != "seed" and config.get(name) is not None
    }
    chosen = {**stored, **given}
    if "temperature" not in given:
        chosen["temperature"] = stored.get("temperature", 1.0) if config.get("do_sample") else 0.0
    ignored = [
        f"generation_config.{k}"
        for k, off in _UNSUPPORTED.items()
        if config.get(k) not in (None, off)
    ]
    if chosen["temperature"] == 0:
        ignored += [name for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    return Sampling(
        temperature=float(chosen["temperature"]),
        top_k=max(0, int(chosen.get("top_k", 0))),
        top_p=float(chosen.get("top_p", 1.0)),
        min_p=float(chosen.get("min_p", 0.0)),
        repetition_penalty=float(chosen.get("repetition_penalty", 1.0)),
        frequency_penalty=float(chosen.get("frequency_penalty", 0.0)),
        presence_penalty=float(chosen.get("presence_penalty", 0.0)),
        seed=int(chosen["seed"]) if "seed" in chosen else int.from_bytes(os.urandom(4), "little"),
        ignored=tuple(ignored),
    )


def _checked(name: str, value: Any, source: str | None) -> Any:
    fine, expected = _RANGES[name]
    number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    # The comparison comes first: it is exact for integers that no float can hold, and false for NaN.
    if number and abs(value) < 1e30 and fine(value):
        return value
    if source is not None:
        raise MosaicError(f"{source}: {name}: expected {expected}, got {value!r}", "EFORMAT")
    raise UsageError(f"{name}: expected {expected}, got {value!r}")


class Sampler:
    """Chooses tokens. One per sequence: it holds the random state, one step of it a drawn token,
    and how often each token was chosen."""

    def __init__(self, sampling: Sampling) -> None:
        for name in _RANGES:
            _checked(name, getattr(sampling, name), None)
        self.sampling = sampling
        self._bits = np.random.PCG64(sampling.seed)
        self._chosen: dict[int, int] = {}

    def __call__(
        self, logits: Floats, history: History = (), allowed: Mask | None = None
    ) -> tuple[int, float]:
        """The next token and its log-probability.

        logits (vocab,) float32, left unchanged; -inf rules a token out. history: ids so far, prompt
        included, for the repetition penalty. allowed: (n,) which tokens may be chosen, n at most
        vocab (what lies behind may not); None: any. The log-probability (natural, float64 to about
        1e-6) is that of the model's own distribution: softmax of the logits as given, before
        penalties, allowed, temperature and filters. Raises MosaicError EDOM when a logit is NaN or
        +inf or all are -inf, or nothing is allowed: a token is never made up.
        """
        top, log_total = _norm(logits)
        scores = self._scores(logits, history, allowed)
        if self.sampling.greedy:
            token = int(np.argmax(scores))
        else:
            ids, weights = self._filtered(scores)
            sums = np.cumsum(weights)
            # 53 random bits: u in [0, 1). Rounding may push u * total to the total itself, hence
            # the last heavy one.
            u = (int(self._bits.random_raw()) >> 11) * 2.0**-53
            place = min(
                int(np.searchsorted(sums, u * sums[-1], side="right")),
                int(np.flatnonzero(weights)[-1]),
            )
            token = int(ids[place])
        self._chosen[token] = self._chosen.get(token, 0) + 1
        return token, float(logits[token]) - top - log_total

    def candidates(
        self, logits: Floats, history: History = (), allowed: Mask | None = None
    ) -> tuple[Ids, Doubles]:
        """(ids ascending, probabilities) that a draw would choose from. Greedy: one id, 1.0."""
        _top(logits)
        scores = self._scores(logits, history, allowed)
        if self.sampling.greedy:
            return np.array([np.argmax(scores)], dtype=np.int64), np.ones(1)
        ids, weights = self._filtered(scores)
        return ids, weights / np.cumsum(weights)[-1]

    def _scores(self, logits: Floats, history: History, allowed: Mask | None) -> Floats:
        """The logits less penalties; -inf for what is not allowed. A copy where they differ."""
        s = self.sampling
        scores = self._repeated(logits, history)
        if self._chosen and (s.frequency_penalty or s.presence_penalty):
            scores = logits.copy() if scores is logits else scores
            ids = np.fromiter(self._chosen, np.int64, len(self._chosen))
            counts = np.fromiter(self._chosen.values(), np.float32, len(ids))
            scores[ids] -= counts * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty)
        if allowed is not None:
            scores = logits.copy() if scores is logits else scores
            if allowed.ndim != 1 or allowed.dtype != np.bool_ or len(allowed) > len(logits):
                raise UsageError(
                    f"allowed: expected at most {len(logits)} booleans, got {allowed.dtype} "
                    f"{allowed.shape}"
                )
            scores[: len(allowed)][~allowed] = -np.inf
            scores[len(allowed) :] = -np.inf
            if scores.max() == -np.inf:
                raise MosaicError("none of the tokens that are allowed is possible", "EDOM")
        return scores

    def _repeated(self, logits: Floats, history: History) -> Floats:
        penalty = np.float32(self.sampling.repetition_penalty)
        if penalty == 1 or len(history) == 0:
            return logits
        ids = np.asarray(history, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= len(logits):
            raise UsageError(
                f"history: expected ids from 0 to {len(logits) - 1}, got {ids.min()} to {ids.max()}"
            )
        scores: Floats = logits.copy()
        seen = scores[ids]
        with np.errstate(over="ignore"):
            scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    def _filtered(self, scores: Floats) -> tuple[Ids, Doubles]:
        """(ids ascending, weights) that temperature, top-k, top-p and min-p leave; largest 1."""
        s = self.sampling
        temperature = np.float32(s.temperature)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            scaled = scores / temperature
        top = scaled.max()
        if not np.isfinite(top):
            # A temperature so small that float32 overflows: its limit is the greedy choice.
            return np.array([np.argmax(scores)], dtype=np.int64), np.ones(1)
        if 0 < s.top_k < len(scaled):
            # All that tie with the k-th stay, as in transformers.
            floor = np.partition(scaled, len(scaled) - s.top_k)[len(scaled) - s.top_k]
            ids = np.flatnonzero(scaled >= floor)
        else:
            ids = np.arange(len(scaled))
        ids = ids[scaled[ids] > -np.inf]
        weights = _exp(scaled[ids].astype(np.float64) - np.float64(top))
        if s.top_p < 1:
            kept = _top_p(weights, s.top_p)
            ids, weights = ids[kept], weights[kept]
        if s.min_p > 0:
            kept = weights >= s.min_p * weights.max()
            ids, weights = ids[kept], weights[kept]
        return ids, weights


def best(logits: Floats, n: int) -> tuple[tuple[int, float], ...]:
    """The n likeliest tokens with their log-probabilities, best first, the lower id of equals."""
    top, log_total = _norm(logits)
    n = min(n, len(logits))
    floor = np.partition(logits, len(logits) - n)[len(logits) - n] if n else np.inf
    ids = np.flatnonzero(logits >= floor)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:n]
    return tuple((int(i), float(logits[i]) - top - log_total) for i in ids)


def _norm(logits: Floats) -> tuple[float, float]:
    """The largest logit, and the log of the sum of exponentials, both of which a log-probability is less."""
    top = _top(logits)
    total = np.exp(logits - top).sum(dtype=np.float64)
    return float(top), math.log(total)


def _top(logits: Floats) -> np.float32:
    """The largest logit; refuses what is no distribution."""
    if logits.ndim != 1 or len(logits) == 0 or logits.dtype != np.float32:
        raise UsageError(f"logits: expected (vocab,) float32, got {logits.shape} {logits.dtype}")
    top: np.float32 = logits.max()  # NaN if any is
    if not np.isfinite(top):
        what = f"{int(np.isnan(logits).sum())} of {len(logits)} are NaN, the largest is {top}"
        raise MosaicError(
            f"the model gave no usable logits: expected finite numbers, got: {what}", "EDOM"
        )
    return top


def _top_p(weights: Doubles, p: float) -> npt.NDArray[np.bool_]:
    """Which weights stay: the least likely go while their sum is at most 1 - p, never the first.

    weights (n,) -> mask (n,). Among equals the later one goes first.
    """
    total = np.cumsum(weights)[-1]
    budget = (1.0 - p) * total
    # All weights below this, together, are within half the budget: they need no sorting.
    small = weights <= 0.5 * budget / len(weights)
    rest = np.flatnonzero(~small)
    order = rest[np.lexsort((-rest, weights[rest]))]
    sums = np.cumsum(weights[order]) + (np.cumsum(weights[small])[-1] if small.any() else 0.0)
    keep = sums > budget
    keep[-1:] = True
    mask = np.zeros(len(weights), dtype=np.bool_)
    mask[order[keep]] = True
    return mask


# The low 32 bits of the high part are zero, so that k * _LN2_HIGH is exact for |k| < 2**20.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_EXP_TERMS = [1.0 / math.factorial(n) for n in range(13, -1, -1)]


def _exp(x: Doubles) -> Doubles:
    """e**x for x <= 0, to about 2e-16 relative; 0 below -745.

    x = k ln 2 + r; a Taylor sum in r, times 2**k.
    """
    x = np.maximum(x, -750.0)
    k = np.rint(x * (1.0 / math.log(2.0)))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    y = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        y *= r
        y += term
    return np.ldexp(y, k.astype(np.int32))
