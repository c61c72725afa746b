"""How experts are read, as a user meets it: refusals in one line, notes, mapped experts in a budget."""

import json
import platform
import re
import subprocess
import sys

import pytest
from conftest import VECTORS

import mosaic_c
from mosaic_c import MosaicError, UsageError, budget, engine, synth
from mosaic_c.opening import plan_model

MODEL = VECTORS / "qwen35_fp8"
OPENAT = {"x86_64": 257, "aarch64": 56}.get(platform.machine())
URING_SETUP, O_DIRECT = 425, {"x86_64": 0o40000, "aarch64": 0o200000}.get(platform.machine())

# A filter of system calls, as containers set one, and then the program: call NUMBER fails with ERROR
# where its third argument has the bits MASK (0: always).
FILTERED = """
import struct, sys
from cffi import FFI
number, mask, error = map(int, sys.argv[1:4])
test = (0x45, 0, 1, mask) if mask else (0x05, 0, 0, 0)
code = [(0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 32), test, (0x06, 0, 0, 0x50000 | error),
        (0x06, 0, 0, 0x7fff0000)]
ffi = FFI()
ffi.cdef("int prctl(int, ...); struct prog { unsigned short n; const void *code; };")
c = ffi.dlopen(None)
raw = ffi.from_buffer(b"".join(struct.pack("HBBI", *x) for x in code))
prog = ffi.new("struct prog *", (len(code), raw))
zero = ffi.cast("long", 0)
if c.prctl(38, ffi.cast("long", 1), zero, zero, zero) or c.prctl(22, ffi.cast("long", 2), prog):
    sys.exit(77)
from mosaic_c.cli import main
sys.exit(main(sys.argv[4:]))
"""


def filtered(number, mask, error, *args):
    command = [sys.executable, "-c", FILTERED, str(number), str(mask), str(error), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode == 77:
        pytest.skip("no filters of system calls here")
    return result


def generate(*args):
    return ("generate", "--ids", "5,77,3", "-m", MODEL, "-n", "3", "--ram", "512M", *args)


@pytest.mark.parametrize("error, words", [(1, "Operation not permitted"), (38, "no io_uring")])
def test_a_system_without_io_uring(error, words):
    r = filtered(URING_SETUP, 0, error, *generate("--io", "uring"))
    lines = r.stderr.strip().splitlines()
    assert r.returncode == 2 and len(lines) == 1 and r.stdout == "", r.stderr
    assert "uring" in lines[0] and words in lines[0] and "use auto" in lines[0]
    r = filtered(URING_SETUP, 0, error, *generate("--json"))
    assert r.returncode == 0, r.stderr
    stats = json.loads(r.stdout.splitlines()[-1])["stats"]
    assert stats["io"] in ("direct", "pread")
    assert all(io == "direct" for io, _, _ in stats["io_tried"])


@pytest.mark.skipif(OPENAT is None, reason="another kind of processor")
@pytest.mark.parametrize("io", ["auto", "direct", "uring", "mmap", "pread"])
def test_a_file_system_without_direct_reads(io):
    if engine.io_modes()[io] is not None:
        pytest.skip(engine.io_modes()[io])
    r = filtered(OPENAT, O_DIRECT, 22, *generate("--io", io, "--json"))
    assert r.returncode == 0, r.stderr
    notes = [line for line in r.stderr.splitlines() if "direct reads refused" in line]
    assert len(notes) == (0 if io == "pread" else 1)
    if notes:
        assert notes[0].startswith(f"note: io {io}: ") and "Invalid argument" in notes[0]
        assert ".safetensors" in notes[0]
    stats = json.loads(r.stdout.splitlines()[-1])["stats"]
    assert stats["io"] == ("mmap" if io == "mmap" else "pread") and stats["lanes"] == 4
    assert stats["files_direct"] == 0 and not stats["io_tried"]


def test_what_this_system_can_do():
    modes = engine.io_modes()
    assert list(modes) == ["auto", "pread", "direct", "uring", "mmap"]
    assert all(modes[name] is None for name in modes if name != "uring")
    with pytest.raises(UsageError, match="io: expected one of auto, .*mmap, got 'fast'"):
        plan_model(MODEL, io="fast")


def test_mapped_experts_all_fit_or_are_refused(tmp_path, monkeypatch):
    """The budget that the message names works; two MiB less do not."""
    monkeypatch.setattr(budget, "process_bytes", lambda: 80 * budget.MB)  # the same at every look
    folder = tmp_path / "tiny"
    synth.write(folder, "tiny", experts=256, progress=False)
    options = {"ctx": 64, "threads": 1, "io": "mmap"}
    plan = plan_model(folder, ram="4G", **options)[-1]
    other = plan_model(folder, ram="4G", **options | {"io": "direct"})[-1]
    assert plan.slots == plan.hard == plan.experts and plan.mapped and not other.mapped
    more = (
        plan.experts - other.hard - engine.io_most("direct", plan.slab)
    ) * plan.slab  # no slabs in transit
    assert abs(plan.floor - other.floor - more) <= 3 * budget.MB and more > 10 * budget.MB
    words = r"needs at least .* --ram (\d+)M or more, or another --io: mmap"
    with pytest.raises(MosaicError, match=words) as info:
        mosaic_c.open(folder, ram=plan.floor - 2 * budget.MB, **options)
    assert info.value.code == "EBUDGET"
    ram = re.search(words, str(info.value))[1] + "M"
    with mosaic_c.open(folder, ram=ram, **options) as model:
        model.session().forward(list(range(20)))
        stats = model.stats()
    assert stats.io == "mmap" and stats.slots == plan.experts
    assert stats.resident["cache"] == plan.experts * plan.slab
    with pytest.raises(
        UsageError, match=f"slots: --io mmap holds all {plan.experts} experts, got 39"
    ):
        mosaic_c.open(folder, ram="1G", slots=39, **options)
    with pytest.raises(UsageError, match="slots: --io mmap holds all 256 experts, got 9"):
        mosaic_c.open(folder, ram="1G", slots=9, policy="layer-lru", **options)


def test_mapped_experts_do_not_make_room_for_sessions():
    """Sessions take their memory from the cache, but not from one that cannot shrink."""
    m = plan_model(MODEL, ram="1G", ctx=64, threads=1, io="mmap")[-1]
    with mosaic_c.open(MODEL, ram=m.floor, ctx=64, threads=1, io="mmap") as model:
        with pytest.raises(MosaicError, match="floor of 40 slots"):
            sessions = [model.session() for _ in range(100000)]
            assert sessions
        assert model.stats().slots == 40
