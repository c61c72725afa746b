"""What goes wrong while running: reads, memory, other processes, Ctrl-C. The request that meets it fails with
its reason, nothing is left behind, and the model stays usable."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import VECTORS

import mosaic_c
from mosaic_c import MosaicError, engine, opening, synth

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


# ---- what a process holds, before and after ----


def held():
    """Threads and open files of this process; not those that the kernel keeps for a ring for a while ("iou-wrk")."""
    gc.collect()
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    threads = sum(not name.startswith("iou-") for name in names)
    return threads, len(os.listdir("/proc/self/fd"))


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def available(io):
    if engine.io_modes()[io] is not None:
        pytest.skip(engine.io_modes()[io])


@pytest.mark.parametrize("io", engine.IO_MODES)
def test_faults_in_a_row_change_no_counter(io, tmp_path, expected, reference):
    """A shard that is cut fails every call, whose memory is as before; a removed one is still read."""
    available(io)
    shutil.copytree(VECTORS / NAME, folder := tmp_path / "m")
    prompt, ref = expected[NAME]["prompt"], reference[NAME]
    before = held()
    slots = None if io == "mmap" else 3
    with mosaic_c.open(folder, ram="512M", kv="f32", ctx=256, threads=2, io=io, slots=slots) as m:
        session = m.session()
        assert same(session.forward(prompt[:10]), ref[:10])
        shard = max(m.files, key=lambda p: ("layers" in p.name, p.name))
        good, resident = shard.read_bytes(), m.stats().resident
        os.truncate(shard, 20000)
        for _ in range(5):
            with pytest.raises(MosaicError, match=shard.name):
                session.forward(prompt[10:])
            assert m.stats().resident == resident and session.position == 10
        with open(shard, "r+b") as f:
            f.write(good)
        for path in m.files:
            path.unlink()
        assert same(session.forward(prompt[10:]), ref[10:])
        assert m.stats().resident == resident
        session.close()
    assert held() == before
    with pytest.raises(MosaicError) as info:
        mosaic_c.open(folder, ram="512M")
    assert info.value.code in ("EIO", "ENOENT") and str(folder) in str(info.value)


def test_a_fault_of_any_allocation_while_opening(monkeypatch, expected, reference):
    """Budgets from nothing to enough: each refusal says so and leaves nothing; the first that does works."""
    options = {"ram": "512M", "kv": "f32", "ctx": 256, "threads": 2, "io": "direct"}
    checkpoint, located, memory = opening.plan_model(VECTORS / NAME, **options)
    before, refusals, room = held(), 0, 1
    while True:
        plan = checkpoint, located, replace(memory, engine_budget=room)
        monkeypatch.setattr(opening, "plan_model", lambda *args, plan=plan: plan)
        try:
            model = mosaic_c.open(VECTORS / NAME, **options)
            break
        except MosaicError as error:
            assert error.code == "EBUDGET" and f"the budget of {room}" in str(error)
        assert held() == before
        refusals, room = refusals + 1, room + room // 4 + 64
    with model:
        assert same(model.session().forward(expected[NAME]["prompt"]), reference[NAME])
    del model
    assert refusals > 20 and held() == before


# ---- two processes ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "tiny"
    synth.write(folder, "tiny", progress=False)
    return folder


def generate(folder, *args, **options):
    command = [sys.executable, "-m", "mosaic_c", "generate", "-m", str(folder), "--temp", "0"]
    return subprocess.Popen(
        [*command, "--ignore-eos", "--raw", *map(str, args)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), [("direct", "uring"), ("pread", "mmap")])
def test_faults_of_another_process_on_the_same_model(ours, theirs, tiny):
    """Both say what one says alone; one that is killed in the middle changes nothing for the other."""
    available(ours)
    available(theirs)
    options = {"mmap": ()}
    modes = [(io, *options.get(io, ("--slots", 9))) for io in (ours, theirs)]
    run = ("x", "-n", 80, "--ram", "512M", "--io")
    alone, _ = generate(tiny, *run, *modes[0]).communicate(timeout=60)
    assert len(alone) > 100
    pair = [generate(tiny, *run, *mode) for mode in modes]
    for p in pair:
        assert p.communicate(timeout=60)[0] == alone and p.returncode == 0
    victim = generate(tiny, "x", "-n", 3000, "--isa", "scalar", *run[3:], *modes[1])
    other = generate(tiny, *run, *modes[0])
    assert victim.stdout.read(1)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert other.communicate(timeout=60)[0] == alone and other.returncode == 0
    assert generate(tiny, *run, *modes[0]).communicate(timeout=60)[0] == alone


# ---- Ctrl-C at any point ----

# Says when it is in our hands: before, an interrupt meets an interpreter that is not up yet.
STARTED = """
import os, sys
from mosaic_c import cli
from mosaic_c.__main__ import main
parser = cli.parser
cli.parser = lambda: (os.write(1, b"."), parser())[1]
sys.exit(main())
"""


def test_faults_ctrl_c_at_any_point_of_the_command(tiny, tmp_path):
    """While modules load, weights load, in the prompt, between tokens: 130, one line, nothing left."""
    (cwd := tmp_path / "cwd").mkdir()
    files = sorted(tiny.iterdir())
    ids = ",".join(str(i * 37 % 512) for i in range(600))
    command = [
        sys.executable,
        "-c",
        STARTED,
        "generate",
        "--ids",
        ids,
        "-m",
        str(tiny),
        "--isa",
        "scalar",
    ]
    command += ["--temp", "0", "--ignore-eos", "--threads", "1"]
    for k in range(15):
        p = subprocess.Popen(
            command, cwd=cwd, env=os.environ | {"TMPDIR": str(cwd)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert p.stdout.read(1) == b"."
        time.sleep(k * 0.04)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
        # an import that was cut short may make Python end by the signal, which a shell calls 130 too
        assert p.returncode in (130, -signal.SIGINT), (k, err)
        assert err == b"interrupted\n", (k, err)
        assert not out or out.replace(b" ", b"").strip().isdigit()
        assert not list(cwd.iterdir()) and sorted(tiny.iterdir()) == files


def interrupt(*args):
    raise KeyboardInterrupt


@pytest.fixture
def alarm():
    """alarm(seconds): KeyboardInterrupt that much later; 0: not any more."""
    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_faults_ctrl_c_at_any_point_of_open_and_forward(alarm, expected, reference, capfd):
    """Threads and memory are given back; a session is where it was, or where it was going to."""
    prompt, ref = expected[NAME]["prompt"], reference[NAME]
    options = {"ram": "512M", "kv": "f32", "ctx": 256, "threads": 2, "slots": 3, "io": "direct"}

    def stepped(work, after):
        """work() interrupted after a growing part of the time that it takes; after() each time."""
        started = time.perf_counter()
        work()
        whole, hits = time.perf_counter() - started, 0
        for k in range(40):
            try:
                try:
                    alarm(whole * (k + 1) / 40)
                    work()
                finally:
                    alarm(0)
            except KeyboardInterrupt:
                hits += 1
            after()
        assert hits > 10

    def open_close():
        with mosaic_c.open(VECTORS / NAME, **options):
            pass

    threads = held()[0]
    stepped(open_close, lambda: None)
    assert held()[0] == threads
    with mosaic_c.open(VECTORS / NAME, **options) as model:
        session = model.session()
        session.forward(prompt[:30])
        session.snapshot()
        resident = model.stats().resident

        def check():
            assert session.position in (30, len(prompt)) and model.stats().resident == resident
            assert session.tokens == prompt[: session.position].tolist()
            session.rewind(30)
            assert same(session.forward(prompt[30:40]), ref[30:40])
            session.rewind(30)

        def whole():
            session.forward(prompt[30:])
            session.rewind(30)

        stepped(whole, check)
        session.close()
    assert held()[0] == threads
    out, err = capfd.readouterr()
    assert out == "" and err == ""


# ---- a disk that stalls ----

STALL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
/* While a file of that name is there, the next read removes it and takes two seconds more. */
static void stall(void) {
    const char *name = getenv("STALL");
    struct timespec left = {.tv_sec = 2};
    if (!name || unlink(name)) return;
    while (nanosleep(&left, &left)) {} /* as a disk, it hears no signals */
}
typedef ssize_t fn(int, void *, size_t, off_t);
ssize_t pread(int fd, void *p, size_t n, off_t at) {
    stall();
    return ((fn *)dlsym(RTLD_NEXT, "pread"))(fd, p, n, at);
}
ssize_t pread64(int fd, void *p, size_t n, off_t at) {
    stall();
    return ((fn *)dlsym(RTLD_NEXT, "pread64"))(fd, p, n, at);
}
"""

STALLED = """
import os, signal, sys, time
import numpy as np
import mosaic_c
folder, prompt = sys.argv[1], np.load(sys.argv[1] + "/expected.npz")["prompt"]
with mosaic_c.open(folder, ram="512M", kv="f32", ctx=256, slots=3, io=sys.argv[2]) as model:
    want, session = model.session().forward(prompt), model.session()
    resident = model.stats().resident
    open(os.environ["STALL"], "w").close()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    started = time.monotonic()
    try:
        session.forward(prompt)
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        took = time.monotonic() - started
    assert not os.path.exists(os.environ["STALL"]) and 1.5 < took < 6, took
    assert session.position == 0 and model.stats().resident == resident
    got = session.forward(prompt)
    assert np.array_equal(got.view(np.int32), want.view(np.int32))
"""


@pytest.mark.parametrize("io", ["direct"])
def test_faults_ctrl_c_while_the_disk_stalls(io, tmp_path):
    """Ctrl-C waits for the read that is under way, and not for the rest; the next call is right."""
    library = tmp_path / "stall.so"
    (tmp_path / "stall.c").write_text(STALL)
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "stall.c", "-ldl"], check=True
    )
    env = os.environ | {"LD_PRELOAD": str(library), "STALL": str(tmp_path / "stall")}
    p = subprocess.run(
        [sys.executable, "-c", STALLED, VECTORS / NAME, io],
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert p.returncode == 0, p.stderr.decode()
