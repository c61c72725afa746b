"""The budget holds, page cache included: v4-mini (497 MB) in 160 MB. See memory.py for larger models."""

import warnings

import memory
import pytest

from mosaic_c import synth

RAM = 160 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "v4-mini"
    synth.write(folder, "v4-mini", progress=False)
    yield folder
    for path in folder.glob("*.safetensors"):
        path.unlink()


def test_anywhere(model):
    c = memory.run(model, RAM, 60, None)
    assert c["evictions"] > 0
    assert c["peak_rss"] + c["cached"] <= RAM
    assert c["cached"] <= 1 << 20  # headers, rows of the embedding and experts leave nothing behind


def test_in_a_group_four_times_as_large(model):
    a = memory.run(model, RAM, 60, 4 * RAM)
    if a is None:
        warnings.warn("not run: no memory control group can be made here", stacklevel=1)
        return
    assert a["evictions"] > 0
    assert a["group_peak"] <= RAM


def test_in_a_group_of_exactly_the_budget(model):
    b = memory.run(model, RAM, 60, RAM)
    if b is None:
        warnings.warn("not run: no memory control group can be made here", stacklevel=1)
        return
    assert b["faults"] <= 10  # of 40 tokens: none of the weights was pushed out
