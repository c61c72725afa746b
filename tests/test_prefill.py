"""Long prompts: the size of a chunk, the progress bar, and Ctrl-C."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest

import mosaic_c
from mosaic_c import budget, synth
from mosaic_c.opening import plan_model

CHUNKS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8)
IDS = [i * 37 % 512 for i in range(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefill") / "tiny"
    synth.write(folder, "tiny", experts=256, uniform=True, progress=False)
    config = folder / "config.json"
    text, n = re.subn(r'("max_position_embeddings": )\d+', r"\g<1>65536", config.read_text())
    assert n == 1
    config.write_text(text)
    return folder


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """The test runner itself may be larger than the budgets tried here."""
    monkeypatch.setattr(budget, "process_bytes", lambda: 40 * budget.MB)


def scratch(m):
    return sum(i.bytes for i in m.items if i.name in ("scratch", "activations"))


def test_a_long_prompt_is_one_chunk_where_memory_allows(folder):
    """Same bits in any chunks; each expert is read once a chunk though the cache holds a hundredth."""
    out = {}
    for chunk in (64, 512, 1024, 4096):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budget, "CHUNKS", tuple(c for c in CHUNKS if c <= chunk))
            with mosaic_c.open(folder, ram="1G", ctx=1600, threads=2, slots=10) as model:
                out[chunk] = model.session().forward(IDS)
                stats = model.stats()
        assert stats.chunk == min(chunk, 1600)
        assert stats.reads <= 1024 * -(-1500 // stats.chunk)
        assert stats.reads > (900 if chunk > 64 else 500) * (1500 // stats.chunk)
        assert np.array_equal(out[chunk].view(np.int32), out[64].view(np.int32))


@pytest.mark.parametrize("ctx", [1, 5, 8, 100, 3000, 8192])
def test_a_chunk_is_no_longer_than_the_context(folder, ctx):
    m = plan_model(folder, ram="8G", ctx=ctx, threads=2)[-1]
    assert m.chunk == min(4096, ctx) and m.fits
    with mosaic_c.open(folder, ram="1G", ctx=min(ctx, 100), threads=1) as model:
        model.session().forward(IDS[: min(ctx, 100)])


def test_a_chunk_takes_an_eighth_of_what_is_free(folder):
    """From the floor on: every budget holds, and all sizes come up."""
    m = plan_model(folder, ram="50M", ctx=8192, threads=2, slots=10)[-1]
    seen = []
    for mib in (*range(0, 100, 5), *range(100, 2000, 100)):
        m = plan_model(folder, ram=m.floor + mib * budget.MB, ctx=8192, threads=2, slots=10)[-1]
        assert m.fits and m.total <= m.budget
        small = sum(i.bytes for i in m.items) - scratch(m)
        assert m.chunk == 8 or 8 * scratch(m) <= 1.01 * (m.budget - small) + 16 * budget.MB
        seen.append(m.chunk)
    assert seen == sorted(seen) and set(CHUNKS[:6]) <= set(seen)


def test_no_expert_makes_way_for_a_chunk_that_saves_no_reads(tmp_path):
    """Where all experts fit beside chunks of 512, they stay; where not, a larger chunk comes first."""
    folder = tmp_path / "tiny"
    synth.write(folder, "tiny", experts=512, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "CHUNKS", CHUNKS[3:])
        m = plan_model(folder, ram="1G", ctx=2048, threads=2)[-1]
    need = sum(i.bytes for i in m.items if i.name != "embedding")
    assert m.chunk == 512 and m.slots == 2048
    seen = set()
    for mib in range(-5, 50):
        m = plan_model(folder, ram=need + mib * budget.MB, ctx=2048, threads=2)[-1]
        assert (m.slots == 2048) == (mib >= 0)
        seen.add(m.chunk)
    assert {512, 1024, 2048} <= seen


# ---- progress ----


def generate(folder, *args, tokens=900, terminal=True, **options):
    """(status, stderr) of a `generate` of one token whose stderr is a terminal or a pipe."""
    ids = ",".join(map(str, (IDS * 3)[:tokens]))
    command = [sys.executable, "-m", "mosaic_c", "generate", "--ids", ids, "-m", str(folder)]
    command += ["-n", "1", "--temp", "0", "--json", *args]
    if not terminal:
        r = subprocess.run(command, capture_output=True, timeout=120)
        return r.returncode, r.stderr.decode()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as p:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 4096):
                parts.append(part)
        except OSError:  # the other side is closed
            pass
    os.close(ours)
    return p.returncode, b"".join(parts).decode()


SLOW = ["--isa", "scalar", "--threads", "1"]
BAR = r"prompt: +\d+%.*\| \d+/\d+ tokens \[\d\d:\d\d<\d\d:\d\d"


def test_progress_of_a_slow_prompt_on_a_terminal(folder):
    status, text = generate(folder, *SLOW, tokens=3000)  # several seconds
    assert status == 0
    assert re.search(BAR, text), text[-500:]  # with the time that is left
    assert text.endswith("\r") and text[:-1].rpartition("\r")[2].strip() == ""  # cleared


@pytest.mark.parametrize(
    ("args", "terminal", "shown"),
    [(["--quiet"], True, False), ([], False, False), (["--verbose"], False, True)],
)
def test_where_progress_is_shown(folder, args, terminal, shown):
    status, text = generate(folder, *SLOW, *args, tokens=3000, terminal=terminal)
    assert status == 0 and bool(re.search(BAR, text)) == shown


def test_no_progress_of_a_quick_prompt(folder):
    status, text = generate(folder, tokens=50)
    assert status == 0 and "prompt" not in text and "loading" not in text


# ---- Ctrl-C ----


def test_ctrl_c_in_a_prefill_comes_within_a_layer(folder):
    """A real signal in the middle of one long chunk: the session is where it was, and works."""
    with mosaic_c.open(folder, ram="1G", ctx=8192, threads=1, isa="scalar") as model:
        s, layers = model.session(), []
        s.forward(IDS[:10])
        prompt = (IDS * 3)[:2000]
        assert model.memory.chunk == 4096
        started = time.monotonic()

        def progress(done, total):
            layers.append(time.monotonic())
            if len(layers) == 1:  # in the middle of the next layer
                signal.setitimer(signal.ITIMER_REAL, (layers[0] - started) / 2)

        def interrupt(*args):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                s.forward(prompt, last=True, progress=progress)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        ended = time.monotonic()
        assert len(layers) <= 2 and len(model.layers) == 4
        assert ended - layers[0] < 2 * (layers[0] - started) + 0.5
        assert s.position == 10 and s.tokens == IDS[:10]
        fresh = model.session()
        fresh.forward(IDS[:10])
        want, got = fresh.forward(IDS[10:30]), s.forward(IDS[10:30])
        assert np.array_equal(got.view(np.int32), want.view(np.int32))


def test_ctrl_c_in_a_prefill_of_the_command(folder):
    ids = ",".join(map(str, (IDS * 3)[:3000]))
    p = subprocess.Popen(
        [sys.executable, "-m", "mosaic_c", "generate", "--ids", ids, "-m", str(folder), *SLOW, "--verbose"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    seen = b""
    while b"prompt:" not in seen:  # under way for a second
        part = os.read(p.stderr.fileno(), 4096)
        assert part, seen
        seen += part
    started = time.monotonic()
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130 and out == b"" and b"Traceback" not in err and b"interrupted" in err
    assert time.monotonic() - started < 10
