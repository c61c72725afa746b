"""Reads that fail while running: that request fails by file and offset, and the model stays usable."""

import os
import shutil

import numpy as np
import pytest
from conftest import VECTORS

import mosaic_c
from mosaic_c import MosaicError, engine

NAME = "qwen35_fp8"


@pytest.mark.parametrize("io", engine.IO_MODES)
def test_a_shard_that_shrinks(io, tmp_path, expected, reference):
    if engine.io_modes()[io] is not None:
        pytest.skip(engine.io_modes()[io])
    folder = tmp_path / "m"
    shutil.copytree(VECTORS / NAME, folder)
    prompt = expected[NAME]["prompt"]
    slots = None if io == "mmap" else 3
    options = {"ram": "512M", "kv": "f32", "ctx": 256, "threads": 2}
    with mosaic_c.open(folder, io=io, slots=slots, **options) as model:
        session = model.session()
        first = session.forward(prompt[:10])
        shard = max(model.files, key=lambda p: ("layers" in p.name, p.name))
        good = shard.read_bytes()
        os.truncate(shard, 20000)
        with pytest.raises(MosaicError) as info:
            session.forward(prompt[10:])
        assert info.value.code == "EIO"
        assert (
            shard.name in str(info.value)
            and "wanted" in str(info.value)
            and "got" in str(info.value)
        )
        assert session.position == 10
        with open(shard, "r+b") as f:  # the same file comes back
            f.write(good)
        rest = session.forward(prompt[10:])
    got = np.concatenate([first, rest])
    assert np.array_equal(got.view(np.int32), reference[NAME].view(np.int32))


def test_a_shard_replaced_by_a_shorter_one_is_refused_at_open(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(VECTORS / NAME, folder)
    shard = next(folder.glob("layers-1*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(MosaicError, match=shard.name):
        mosaic_c.open(folder, ram="512M")
