"""Random weight values at disk speed, for synthetic checkpoints.

A tile is one block of random values of one distribution in one dtype; a tensor is the tile repeated
from an offset of its own. The tile's length is a prime, so rows and experts of a tensor start at
different places of it (no two alike before 10^6 rows), and writing a tensor costs no arithmetic and
no copy. Tables of quantiles and integer random bits make the bytes depend on the seed alone, not on
the version of numpy or on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# Bytes of what tiles count; two elements of 4 bits are one.
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "INT4": 1, "F4": 1}
_TILE = 1_000_003  # prime, and far from a power of two, so that 2^k rows spread over it
_STRIDE = 618_041  # offset from one tensor's start to the next one's: golden section of the tile
_SMALL = 1 << 16
_LEVELS = 4096  # quantiles per distribution: normal values reach 3.7 sigma
# Standard deviation of FP8 codes: the block quantisation of the real checkpoints puts the largest
# of 128 x 128 values at 448.
FP8_STD = 96.0
# Of other codes likewise: int4 reaches 7 and MXFP4 6 at the end of the normal values.
CODE_STD = {"F8_E4M3": FP8_STD, "INT4": 2.0, "F4": 2.0}
_HALF = 500_009  # how far apart the two elements of a byte are drawn


@dataclass(frozen=True, slots=True)
class Dist:
    """A distribution: normal (mean a, deviation b), uniform or loguniform log U(a, b), const a."""

    kind: str
    a: float
    b: float = 0.0

    def table(self) -> np.ndarray:
        """(_LEVELS,) float64: its quantiles in increasing order."""
        u = [(i + 0.5) / _LEVELS for i in range(_LEVELS)]
        if self.kind == "normal":
            normal = NormalDist()
            return np.array([self.a + self.b * normal.inv_cdf(x) for x in u])
        if self.kind == "uniform":
            return np.array([self.a + (self.b - self.a) * x for x in u])
        if self.kind == "loguniform":
            return np.array([math.log(self.a + (self.b - self.a) * x) for x in u])
        if self.kind == "const":
            return np.full(_LEVELS, self.a)
        raise ValueError(f"unknown distribution {self.kind!r}")


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float -> bfloat16 bits (uint16), to nearest, ties to even; finite values only."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def fp8_values() -> np.ndarray:
    """(127,) float64: E4M3 codes 0x00..0x7e as values, in increasing order."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    return np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10)
    )


def to_fp8(values: np.ndarray) -> np.ndarray:
    """float -> E4M3 bits (uint8), to nearest, saturating at +-448: never a NaN code."""
    values = np.asarray(values, np.float64)
    known = fp8_values()
    code = np.searchsorted((known[1:] + known[:-1]) / 2, np.abs(values))
    return (code | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def to_int4(values: np.ndarray) -> np.ndarray:
    """float -> 1..15 (uint8), the value to nearest within -7..7 plus 8."""
    return (np.clip(np.rint(values), -7, 7) + 8).astype(np.uint8)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """float -> E2M1 codes 0..15 (uint8), to nearest, saturating at +-6."""
    values = np.asarray(values, np.float64)
    known = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = np.searchsorted((known[1:] + known[:-1]) / 2, np.abs(values))
    return (code | np.where(values < 0, 8, 0)).astype(np.uint8)


def to_e8m0(values: np.ndarray) -> np.ndarray:
    """positive float -> the nearest power of two by exponent, as E8M0 (uint8)."""
    exponent = np.array([round(math.log2(x)) for x in np.ravel(values).tolist()])
    return np.clip(exponent + 127, 0, 254).astype(np.uint8)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the bits of a dtype of ITEMSIZE (float32, float16, uint16 or uint8 arrays); of 4-bit types one
    a byte."""
    if dtype in ("F32", "F16"):
        return np.asarray(values, np.float32 if dtype == "F32" else np.float16)
    kinds = {"BF16": to_bf16, "INT4": to_int4, "F4": to_e2m1, "F8_E8M0": to_e8m0}
    return kinds.get(dtype, to_fp8)(values)


class Tiles:
    """The random values of one checkpoint; tiles (1 to 2 MB each) are made when first asked for."""

    def __init__(self, seed: int) -> None:
        self._bits = []
        for source in (0, 1):
            # Raw bits of PCG64 are the part of numpy's random numbers that is fixed for ever.
            raw = np.random.PCG64([seed, source]).random_raw(_TILE // 4 + 1)
            self._bits.append(raw.view(np.uint16)[:_TILE] % _LEVELS)
        self._second: dict[int, np.ndarray] = {}  # the same bits, turned: high halves of bytes
        self._tables: dict[tuple[Dist, str], np.ndarray] = {}
        self._tiles: dict[tuple[Dist, str], np.ndarray] = {}

    def values(self, dist: Dist, dtype: str, count: int, index: int) -> Iterator[np.ndarray]:
        """The `count` encoded values (bytes of 4-bit types) of tensor number `index`, in parts."""
        start = index * _STRIDE % _TILE
        if count < _SMALL:  # a norm, a scale: not worth a tile
            yield from self._looked_up(dist, dtype, start, count, 0)
            return
        key = (dist, dtype)
        if key not in self._tiles:
            self._tiles[key] = next(self._looked_up(dist, dtype, 0, _TILE, 0))
        yield from _cycle(self._tiles[key], start, count)

    def rows(
        self, dist: Dist, dtype: str, n_col: int, index: int, column0: np.ndarray
    ) -> Iterator[np.ndarray]:
        """The same for len(column0) rows of n_col, the first column replaced by column0.

        Taken from a second, unrelated block of bits: the embedding must not meet its own rows
        again in the weights that it is multiplied with.
        """
        first = encode(column0, dtype)
        step = max(1, _TILE // 4 // n_col)
        for row in range(0, len(first), step):
            n_row = min(step, len(first) - row)
            start = (index * _STRIDE + row * n_col) % _TILE
            parts = list(self._looked_up(dist, dtype, start, n_row * n_col, 1))
            part = np.concatenate(parts).reshape(n_row, n_col)
            part[:, 0] = first[row : row + n_row]
            yield part.reshape(-1)

    def _looked_up(
        self, dist: Dist, dtype: str, start: int, count: int, source: int
    ) -> Iterator[np.ndarray]:
        key = (dist, dtype)
        if key not in self._tables:
            self._tables[key] = encode(dist.table(), dtype)
        table = self._tables[key]
        if dtype not in ("INT4", "F4"):
            for bits in _cycle(self._bits[source], start, count):
                yield table[bits]
            return
        if source not in self._second:
            self._second[source] = np.roll(self._bits[source], _HALF)
        low, high = (_cycle(x, start, count) for x in (self._bits[source], self._second[source]))
        for a, b in zip(low, high, strict=True):
            yield table[a] | table[b] << 4


def _cycle(block: np.ndarray, start: int, count: int) -> Iterator[np.ndarray]:
    """Views of `count` values of the endlessly repeated block, from position start on."""
    while count > 0:
        part = block[start : start + count]
        yield part
        count -= len(part)
        start = 0


def zipf_bias(n_expert: int, top_k: int, exponent: float, rng: np.random.PCG64) -> np.ndarray:
    """(n_expert,) router biases, in deviations of a token's own normal part, for a Zipf usage.

    Drawing top_k different experts with probabilities ~ rank^-exponent is a race of exponential
    clocks: at the time t at which top_k are out on average, rank r is out with probability
    1 - exp(-t r^-exponent). A normal value passes a common threshold with that probability when
    its mean is the matching quantile. Ranks are dealt to experts at random.
    """
    weight = np.arange(1, n_expert + 1, dtype=np.float64) ** -exponent
    low, high = 0.0, 1.0
    while np.sum(1 - np.exp(-high * weight)) < top_k and high < 1e9:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if np.sum(1 - np.exp(-middle * weight)) < top_k:
            low = middle
        else:
            high = middle
    # Without the bounds an expert of probability 1 (all are chosen: top_k = n_expert) is infinite.
    chance = np.clip(1 - np.exp(-high * weight), 1e-4, 1 - 1e-4)
    normal = NormalDist()
    bias = np.array([normal.inv_cdf(float(x)) for x in chance])
    order = np.argsort(rng.random_raw(n_expert), kind="stable")
    return (bias - bias.mean())[order]
