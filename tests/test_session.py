"""Sessions: fork, rewind, snapshot, save and load give what a fresh run gives; errors leave no trace."""

import os
import shutil
import threading
import time

import numpy as np
import pytest
from conftest import MODELS, VECTORS, open_small

import mosaic_c
from mosaic_c import MosaicError, UsageError, blocks, engine, engine_pure

HYBRID, PLAIN = "qwen35_fp8", "qwen3_bf16"


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize("name", MODELS)
def test_fork_diverges_and_agrees(name, expected, reference):
    prompt, ref = expected[name]["prompt"], reference[name]
    with open_small(name) as model:
        pages = model.session()
        pages.forward(prompt[:70])  # ends inside a page, which the two then share
        fork = pages.fork()
        other = fork.forward([5, 6, 7])
        assert same(pages.forward(prompt[70:]), ref[70:])  # untouched by what the fork wrote
        assert fork.position == 73 and fork.tokens[-3:] == [5, 6, 7]
        pages.close()
        with model.session() as fresh:
            again = fresh.forward(np.concatenate([prompt[:70], [5, 6, 7]]))
        assert same(again[70:], other)


@pytest.mark.parametrize("name", MODELS)
def test_snapshot_and_rewind(name, expected, reference):
    prompt, ref = expected[name]["prompt"], reference[name]
    with open_small(name) as model:
        s = model.session()
        s.forward(prompt[:30])
        s.snapshot()
        s.forward(prompt[30:100])
        s.snapshot()
        s.forward([3] * 20)
        s.rewind(100)
        assert same(s.forward(prompt[100:]), ref[100:])
        s.rewind(30)
        assert s.tokens == prompt[:30].tolist()
        assert same(s.forward(prompt[30:]), ref[30:])
        s.rewind(0)
        assert same(s.forward(prompt), ref)


def test_a_snapshot_given_up(expected, reference):
    prompt = expected[HYBRID]["prompt"]
    with open_small(HYBRID, sessions=2) as model:
        s = model.session()
        for at in (10, 30, 60, 90):
            s.forward(prompt[s.position : at])
            s.snapshot()
        s.snapshot()  # kept already
        assert s.snapshots == [10, 30, 60, 90]
        before = model._free()
        fork = s.fork()
        s.forget(30)
        assert s.snapshots == [10, 60, 90] and fork.snapshots == [10, 30, 60, 90]
        with pytest.raises(MosaicError, match="no snapshot at position 30"):
            s.forget(30)
        with pytest.raises(MosaicError, match="kept: 0, 10, 60, 90"):
            s.rewind(30)
        fork.rewind(30)
        assert fork.snapshots == [10, 30]
        assert same(fork.forward(prompt[30:]), reference[HYBRID][30:])
        fork.close()
        assert model._free() > before  # with the fork the last holder of the snapshot went
        s.rewind(60)
        assert s.snapshots == [10, 60]
        assert same(s.forward(prompt[60:]), reference[HYBRID][60:])


def _state_bytes(model):
    """Of one copy of the recurrent and conv state."""
    desc = blocks.state(model.plan, model.ctx, engine.DTYPES["F32"])
    return (engine_pure.kv_bytes(desc)[1] - 4 * desc["pages"]) // 2


def test_a_session_at_rest_takes_half(expected, reference):
    prompt = expected[HYBRID]["prompt"]
    with open_small(HYBRID, sessions=2) as model:
        s = model.session()
        s.forward(prompt[:40])
        s.snapshot()
        s.forward(prompt[40:70])
        awake = model._free()
        s.rest()
        s.rest()
        assert model._free() == awake + _state_bytes(model)
        fork = s.fork()
        assert same(fork.forward(prompt[70:]), reference[HYBRID][70:])
        s.rewind(40)
        assert same(s.forward(prompt[40:]), reference[HYBRID][40:])


def test_many_sequences_in_one_step(expected, reference):
    """More than the output head takes at once, of different lengths."""
    prompt = expected[PLAIN]["prompt"]
    with open_small(PLAIN, sessions=20, ctx=64) as model:
        work = [(model.session(), prompt[: 1 + n]) for n in range(20)]
        for n, row in enumerate(model.forward(work)):
            assert same(row, reference[PLAIN][n])


def test_rewind_without_snapshot(expected, reference):
    with open_small(HYBRID) as model:
        s = model.session()
        s.forward([1, 2, 3])
        s.snapshot()
        s.forward([4, 5])
        with pytest.raises(MosaicError, match=r"no snapshot at position 4; kept: 0, 3, 5"):
            s.rewind(4)
        assert s.position == 5
        for n in (-1, 6):
            with pytest.raises(MosaicError, match=r"expected 0\.\.5"):
                s.rewind(n)
    prompt = expected[PLAIN]["prompt"]
    with open_small(PLAIN) as model:  # attention alone: any position
        s = model.session()
        s.forward(prompt[:90])
        s.rewind(66)
        assert same(s.forward(prompt[66:]), reference[PLAIN][66:])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_save_and_load(name, kv, expected, tmp_path):
    prompt = expected[name]["prompt"]
    with open_small(name, kv=kv) as model:
        s = model.session()
        s.forward(prompt[:100])
        s.save(tmp_path / "s")
        want = s.forward(prompt[100:])
    with open_small(name, kv=kv, slots=3, threads=2) as model:
        s = model.session(load=tmp_path / "s")
        assert s.position == 100 and s.tokens == prompt[:100].tolist()
        assert same(s.forward(prompt[100:]), want)
    assert os.listdir(tmp_path) == ["s"]  # nothing is left beside it


def test_bad_session_files(expected, tmp_path):
    path = tmp_path / "s"
    prompt = expected[HYBRID]["prompt"]
    with open_small(HYBRID) as model:
        s = model.session()
        s.forward(prompt[:70])
        s.save(path)
        good = path.read_bytes()
        damaged = {
            "CRC": good[:-100] + bytes([good[-100] ^ 1]) + good[-99:],
            "expected .* bytes": good[:-1],
            "expected .* bytes, the file": good + b"x",
            "not a session file": b"x" + good[1:],
            "wanted 168": good[:50],
            "wanted 168 bytes at 0": b"",
            "version": good[:8] + b"\2" + good[9:],
            "another model": good[:16] + b"\0" * 32 + good[48:],
        }
        for message, data in damaged.items():
            path.write_bytes(data)
            with pytest.raises(MosaicError, match=message):
                model.session(load=path)
        with pytest.raises(MosaicError, match="cannot open"):
            model.session(load=tmp_path / "none")
        with pytest.raises(MosaicError, match="cannot create"):
            s.save(tmp_path / "no" / "s")
        path.write_bytes(good)
        assert model.session(load=path).position == 70
        s._tokens[3] = 10**8  # a caller may write anything
        s.save(path)
        with pytest.raises(MosaicError, match="expected 70 token ids below"):
            model.session(load=path)
        s._tokens = [1, 2]
        s.save(path)
        with pytest.raises(MosaicError, match="expected 70 token ids"):
            model.session(load=path)
        with pytest.raises(MosaicError, match="NUL"):
            s.save(str(path) + "\0x")
        path.write_bytes(good)
    with open_small(PLAIN) as model, pytest.raises(MosaicError, match="another model"):
        model.session(load=path)
    with open_small(HYBRID, kv="bf16") as model, pytest.raises(MosaicError, match="KV dtype f32"):
        model.session(load=path)
    with open_small(HYBRID, ctx=64) as model, pytest.raises(MosaicError, match="70 tokens.*64"):
        model.session(load=path)


def test_context_full_and_bad_ids_leave_the_session_alone(expected, reference):
    prompt = expected[HYBRID]["prompt"]
    with open_small(HYBRID, ctx=150) as model:
        s = model.session()
        s.forward(prompt[:100])
        for ids, message in [
            (prompt[:51], "context full: 100 tokens held, 51 more wanted, the context is 150"),
            ([1, model.vocab], f"expected 0..{model.vocab - 1}, got {model.vocab}"),
            ([-1], "got -1"),
            ([], "at least one token"),
            ([1.5], "integers"),
        ]:
            with pytest.raises(MosaicError, match=message):
                s.forward(ids)
            assert s.position == 100
        assert same(s.forward(prompt[100:]), reference[HYBRID][100:])
        assert s.room == 0


@pytest.mark.parametrize("where", [0, 1, 5])
def test_interrupt_leaves_the_session_alone(where, expected, reference):
    """Ctrl-C in the middle of a layer, in the first chunk or a later one."""
    prompt = expected[HYBRID]["prompt"]
    from mosaic_c import budget

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "CHUNKS", (32,))
        with open_small(HYBRID) as model:
            s = model.session()
            s.forward(prompt[:40])
            calls = 0

            def progress(done, total):
                nonlocal calls
                calls += 1
                if calls > where:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                s.forward(prompt[40:], progress=progress)
            assert s.position == 40 and len(s.tokens) == 40
            assert same(s.forward(prompt[40:]), reference[HYBRID][40:])


def test_cancel_from_another_thread(expected):
    prompt = np.tile(expected[HYBRID]["prompt"], 4)
    with open_small(HYBRID, ctx=4096) as model:
        s = model.session()
        model.engine.cancel()
        with pytest.raises(MosaicError, match="cancelled") as info:
            s.forward(prompt)
        assert info.value.code == "ECANCEL" and s.position == 0
        model.engine.cancel(False)
        s.forward(prompt[:10])
        assert s.position == 10


def test_one_session_twice_at_once_is_busy():
    with open_small(HYBRID) as model:
        s = model.session()
        with pytest.raises(MosaicError, match="in use") as info:
            model.forward([(s, [1]), (s, [2])])
        assert info.value.code == "EBUSY" and s.position == 0
        s.forward([1])


def test_sessions_in_threads(expected, reference):
    prompt, ref = expected[HYBRID]["prompt"], reference[HYBRID]
    with open_small(HYBRID, slots=5, ram="600M", ctx=150) as model:
        sessions = [model.session() for _ in range(2)]
        got = [None, None]

        def work(i):
            got[i] = sessions[i].forward(prompt[: 60 + i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert same(got[0], ref[:60]) and same(got[1], ref[:61])


def test_use_after_fork_is_an_error():
    with open_small(PLAIN) as model:
        s = model.session()
        s.forward([1, 2])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                s.forward([3])
            except MosaicError as error:
                code = 0 if error.code == "EFORK" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        s.forward([3])


def test_closed_and_foreign_handles():
    with open_small(PLAIN) as model, open_small(HYBRID) as other:
        s = model.session()
        with pytest.raises(UsageError, match="another model"):
            other.forward([(s, [1])])
        s.close()
        s.close()
        with pytest.raises(MosaicError, match="closed"):
            s.forward([1])
        t = model.session()
    with pytest.raises(MosaicError, match="closed"):
        t.forward([1])
    t.close()  # in any order
    model.close()


def test_interrupt_around_the_commit(expected, monkeypatch):
    """Position and tokens agree, on whichever side of the commit Ctrl-C falls."""
    with open_small(HYBRID) as model:
        s = model.session()
        s.forward([1, 2])
        step = model._steps[0]
        commit = step.commit
        for before in (True, False):

            def interrupted(before=before):
                assert len(s.tokens) == 2  # whoever looks in between changes nothing
                if not before:
                    commit()
                raise KeyboardInterrupt

            monkeypatch.setattr(step, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.forward([3, 4, 5])
            assert len(s.tokens) == s.position == (2 if before else 5)


def test_close_during_a_forward_of_another_thread(expected):
    prompt = np.tile(expected[HYBRID]["prompt"], 20)
    for delay in (0.0, 0.005, 0.02, 0.05):
        model = open_small(HYBRID, ctx=4096)
        s, seen = model.session(), []

        def work(s=s, seen=seen):
            try:
                seen.append(s.forward(prompt))
            except MosaicError as error:
                seen.append(error.code)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(delay)
        model.close()
        thread.join()
        assert isinstance(seen[0], np.ndarray) or seen[0] in ("ECLOSED", "ECANCEL")


@pytest.mark.parametrize("call", ["forward", "rewind", "fork", "save", "position"])
def test_close_a_session_while_another_thread_uses_it(call, tmp_path):
    calls = {
        "forward": lambda s: s.forward([1, 2, 3]),
        "rewind": lambda s: s.rewind(0),
        "fork": lambda s: s.fork().close(),
        "save": lambda s: s.save(tmp_path / "x"),
        "position": lambda s: s.position,
    }
    with open_small(PLAIN) as model:
        for _ in range(60):
            s, odd = model.session(), []

            def work(s=s, odd=odd):
                try:
                    while True:
                        calls[call](s)
                except MosaicError as error:
                    if error.code not in ("ECLOSED", "EFULL"):  # a late close finds it full
                        odd.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            time.sleep(0.001)
            s.close()
            thread.join()
            assert not odd
        assert model.stats().resident["state"] < 2 << 20  # all gone


def test_saving_respects_what_is_there(tmp_path):
    with open_small(PLAIN) as model:
        s = model.session()
        s.forward([1, 2])
        target, link = tmp_path / "target", tmp_path / "link"
        target.write_bytes(b"old")
        target.chmod(0o640)
        link.symlink_to(target)
        s.save(link)
        assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
        assert model.session(load=link).position == 2
        os.mkfifo(tmp_path / "fifo")
        for bad in (tmp_path / "fifo", tmp_path, "/dev/null"):
            with pytest.raises(MosaicError, match="neither"):
                s.save(bad)
        assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "target"]


def test_many_threads_save_to_one_name(tmp_path):
    with open_small(PLAIN) as a, open_small(PLAIN) as b:
        sessions, failed = [a.session(), b.session()], []
        for s in sessions:
            s.forward([1, 2, 3])

        def work(s):
            try:
                for _ in range(30):
                    s.save(tmp_path / "x")
            except MosaicError as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not failed and os.listdir(tmp_path) == ["x"]
        assert a.session(load=tmp_path / "x").position == 3


def test_state_of_other_weights_is_not_saved_or_loaded(tmp_path):
    """A shard replaced on disk while the model is open: its state must not pass for the new one's."""
    folder = tmp_path / "m"
    shutil.copytree(VECTORS / PLAIN, folder)
    with mosaic_c.open(folder, ram="512M", ctx=256) as model:
        s = model.session()
        s.forward([1, 2])
        shard = next(folder.glob("*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.unlink()
        shard.write_bytes(data)
        with pytest.raises(MosaicError, match="changed since") as info:
            s.save(tmp_path / "x")
        assert info.value.code == "ESTALE"
        shard.unlink()
        with pytest.raises(MosaicError, match="changed since"):
            s.save(tmp_path / "x")


def test_wrong_types_get_a_usage_error():
    with open_small(PLAIN) as model:
        s = model.session()
        for bad in ([[1, 2], [3]], 5, "abc", None, [True, 0.5], {"a": 1}):
            with pytest.raises(UsageError):
                s.forward(bad)
        with pytest.raises(UsageError):
            model.forward([(5, [1])])
        with pytest.raises(UsageError):
            s.rewind(10**30)
        with pytest.raises(UsageError):
            s.rewind("1")
        with pytest.raises(UsageError):
            model.generate([1], session=5)
        for bad in (None, 5, [s], [(s,)], [(s, [1], 2)]):
            with pytest.raises(UsageError, match="a list of .session, token ids."):
                model.forward(bad)
        assert len(model.forward((s, [i]) for i in [1])) == 1  # any iterable of pairs
        for huge in (2**70, -(2**70), 10**5000):
            with pytest.raises(UsageError, match="token id: expected 0"):
                s.forward([1, huge])
        for bad in (3, ["a"]):
            with pytest.raises(UsageError, match="path: expected"):
                s.save(bad)
            with pytest.raises(UsageError, match="path: expected"):
                model.session(load=bad)
        with pytest.raises(UsageError, match="stop: expected strings"):
            model.generate([1], stop=3)
        assert len(s.forward(t for t in [1, 2])) == 2  # any iterable of ids
    for bad in (None, 3, [], object()):
        with pytest.raises(UsageError, match="path: expected"):
            mosaic_c.open(bad)
    mosaic_c.open(os.fsencode(VECTORS / PLAIN)).close()
    for options in (
        {"ctx": 1.5},
        {"threads": "2"},
        {"slots": True},
        {"ram": 10**30},
        {"io": 3},
        {"kv": "f8"},
    ):
        with pytest.raises(UsageError, match=next(iter(options))):
            mosaic_c.open(VECTORS / PLAIN, **options)


def test_score_of_nothing_and_of_one(expected):
    with open_small(PLAIN) as model:
        s = model.session()
        with pytest.raises(UsageError, match="at least one token"):
            s.score([])
        assert s.score([5]).shape == (0,) and s.position == 1


def test_pool_exhausted_by_a_second_session(expected):
    """The pool has pages for one context; a second long session is refused and the first goes on."""
    prompt = expected[PLAIN]["prompt"]
    with open_small(PLAIN, ctx=150) as model:
        a, b = model.session(), model.session()
        a.forward(prompt[:100])
        with pytest.raises(MosaicError, match="KV pool full.*close a session, or open") as info:
            b.forward(prompt[:100])
        assert info.value.code == "EFULL" and b.position == 0
        a.forward(prompt[100:])
        a.close()
        b.forward(prompt)
