"""Shared by the tests: the small models of tests/vectors, and opening one with little memory."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

import mosaic_c

VECTORS = Path(__file__).parent / "vectors"
MODELS = sorted(p.parent.name for p in VECTORS.glob("*/expected.npz"))


def open_small(name, **options):
    """One of the small models; f32 KV and one page more than its prompt needs, unless told."""
    options = {"ram": "512M", "kv": "f32", "ctx": 256, "threads": 1} | options
    return mosaic_c.open(VECTORS / name, **options)


@pytest.fixture(autouse=True, scope="module")
def little_memory():
    """What a file's tests have freed goes back: budgets count all of this process."""
    yield
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session")
def expected():
    """name -> arrays of expected.npz (see tests/vectors/README.md)."""
    return {name: dict(np.load(VECTORS / name / "expected.npz")) for name in MODELS}


@pytest.fixture(scope="session")
def reference(expected):
    """name -> logits (n, vocab) of the prompt by the scalar kernels, one thread, every expert cached,
    one call. All other settings must give these bits."""
    out = {}
    for name in MODELS:
        with open_small(name, isa="scalar") as model, model.session() as session:
            out[name] = session.forward(expected[name]["prompt"])
    return out
