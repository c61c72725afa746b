"""Kept states: what is taken is what a fresh evaluation gives, bounds hold, files that are no good are no error."""

import os
import threading
from collections import deque

import numpy as np
import pytest
from conftest import open_small
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c import MosaicError
from mosaic_c.session import Session, common
from mosaic_c.states import DISK_GAIN, MOST_LEAVING, MOST_SNAPSHOTS, States
from mosaic_c.states_disk import Disk

HYBRID, PLAIN = "qwen35_fp8", "qwen3_bf16"
BIG = 1 << 30


def ids_of(seed, n):
    return np.random.default_rng(seed).integers(0, 190, n).tolist()


def fresh(model, ids):
    with model.session() as s:
        return s.forward(ids, last=True)


def kept(model, states, ids, *places):
    """Evaluates ids, with snapshots at places, and gives the session away."""
    s = model.session()
    for a, b in zip([0, *places], [*places, len(ids)], strict=True):
        if b > a:
            s.forward(ids[a:b], last=True)
            if b != len(ids) or b in places:
                s.snapshot()
    states.keep(s)
    states.flush()


def take(model, states, ids):
    """(n, whether the copy goes on with the bits of a fresh session)."""
    session, n = states.take(ids)
    with session:
        assert session.tokens == ids[:n] and session.position == n < len(ids)
        same = np.array_equal(session.forward(ids[n:], last=True), fresh(model, ids))
    return n, same


@pytest.fixture(scope="module", params=[HYBRID, PLAIN])
def model(request):
    with open_small(request.param, ctx=256, sessions=6) as model:
        yield model


def test_the_longest_prefix_is_taken(model):
    states, hybrid = States(model, BIG), bool(model.plan.delta_layers)
    a = ids_of(1, 100)
    kept(model, states, a, 30, 80)
    other = [*a[:90], 7, 7, 7]
    assert take(model, states, other) == ((80, True) if hybrid else (90, True))
    assert take(model, states, [*a, 5]) == (100, True)
    assert take(model, states, a) == (
        (80, True) if hybrid else (99, True)
    )  # one is left to evaluate
    assert take(model, states, a[:50]) == ((30, True) if hybrid else (49, True))
    assert take(model, states, ids_of(2, 20))[0] == 0
    s = states.stats
    assert (s.kept, s.hits, s.on_disk) == (1, 4, 0)
    states.clear()
    assert states.stats.kept == states.stats.bytes == 0 and take(model, states, a)[0] == 0


def test_a_copy_never_reaches_what_is_kept(model):
    states = States(model, BIG)
    a = ids_of(3, 70)
    kept(model, states, a, 40)
    session, n = states.take([*a, 1])
    session.forward([9, 9, 9], last=True)
    session.close()
    assert take(model, states, [*a, 1]) == (70, True)
    states.close()


def test_what_a_later_state_can_do_as_well_goes(model):
    states = States(model, BIG)
    a = ids_of(4, 120)
    kept(model, states, a[:50], 30)
    session, n = states.take(a)
    assert n == 50
    session.forward(a[n:], last=True)
    states.keep(session)
    assert states.stats.kept == 1
    assert take(model, states, [*a[:50], 8]) == (50, True)  # the end of the first answer, too
    kept(model, states, a[:50])
    assert states.stats.kept == 1  # nothing new
    states.keep(model.session())
    assert states.stats.kept == 1  # nothing at all
    states.close()


def test_the_budget_bounds_what_is_kept_and_the_oldest_go(model):
    states = States(model, BIG)
    kept(model, states, ids_of(0, 60))
    states.byte_budget = 7 * states.stats.bytes // 2
    for seed in range(1, 4):
        kept(model, states, ids_of(seed, 60))
        assert take(model, states, [*ids_of(1, 60), 1])[0] == 60  # used: it stays
        assert states.stats.bytes <= states.byte_budget
    assert states.stats.kept in (
        (2, 3) if model.plan.delta_layers else (3,)
    )  # a take adds a snapshot
    assert take(model, states, [*ids_of(0, 60), 1])[0] == 0
    states.close()


def test_snapshots_of_a_long_conversation_are_thinned(model):
    if not model.plan.delta_layers:
        return
    states, a = States(model, BIG), ids_of(5, 200)
    kept(model, states, a, *range(20, 200, 20))
    (one,) = states._kept.values()
    assert len(one.session.snapshots) == MOST_SNAPSHOTS
    assert take(model, states, [*a[:30], 1]) == (20, True)
    assert take(model, states, [*a[:185], 1]) == (180, True)
    states.close()


def test_a_full_pool_costs_the_oldest_state():
    with open_small(PLAIN, ctx=128) as model:  # two pages for all
        states = States(model, BIG)
        kept(model, states, ids_of(6, 100))
        session, n = states.take(ids_of(7, 100))
        with pytest.raises(MosaicError, match="pool full"):
            session.forward(ids_of(7, 100), last=True)
        assert states.evict() and not states.evict()
        session.forward(ids_of(7, 100), last=True)


def test_no_memory_costs_the_oldest_states():
    with open_small(HYBRID, sessions=3) as model:
        states = States(model, BIG)
        for seed in range(3):
            kept(model, states, ids_of(seed, 10))

        def needs_two():
            if states.stats.kept > 1:
                raise MosaicError("no memory for another session", "EBUDGET")
            return 5

        def never(code):
            raise MosaicError("no", code)

        assert states.with_room(needs_two) == 5
        assert take(model, states, [*ids_of(2, 10), 1]) == (10, True)
        with pytest.raises(MosaicError):
            states.with_room(lambda: never("EIO"))
        assert states.stats.kept == 1
        with pytest.raises(MosaicError):
            states.with_room(lambda: never("EBUDGET"))
        assert states.stats.kept == 0


# On disk


def test_states_are_found_again_after_a_restart(tmp_path):
    for name in (HYBRID, PLAIN):
        a = ids_of(8, 100)
        with open_small(name) as model:
            states = States(model, BIG, tmp_path)
            kept(model, states, a, 50)
            states.close()
            assert states.stats.kept == 0 and states.stats.on_disk == (2 if name == HYBRID else 1)
        with open_small(
            name, threads=2
        ) as model:  # the files of the first model are not this one's
            states = States(model, BIG, tmp_path)
            assert states.stats.on_disk == (2 if name == HYBRID else 1)
            assert take(model, states, [*a, 1]) == (100, True)
            assert take(model, states, [*a[:60], 1])[0] == (50 if name == HYBRID else 60)
            assert take(model, states, a[:20])[0] == 0 and not model.notes
        with open_small(name, kv="bf16") as model:
            assert States(model, BIG, tmp_path).stats.on_disk == 0
        with open_small(name, ctx=64, sessions=2) as model:  # a state that does not fit is none
            assert take(model, States(model, BIG, tmp_path), [*a[:20], 1])[0] == 0
    assert len(os.listdir(tmp_path)) == 3


def test_evicted_states_go_to_disk_which_is_bounded(tmp_path):
    with open_small(PLAIN, sessions=2) as model:
        states = States(model, 0, tmp_path)
        kept(model, states, ids_of(0, 60))
        (file,) = tmp_path.iterdir()
        states = States(model, 0, tmp_path, disk_bytes=3 * file.stat().st_size)
        for seed in range(1, 5):
            kept(model, states, ids_of(seed, 60))
        assert states.stats.kept == 0 and states.stats.on_disk == 3
        assert [take(model, states, [*ids_of(s, 60), 1])[0] for s in range(5)] == [0, 0, 60, 60, 60]
        kept(model, states, ids_of(9, 10))  # too short to be worth a file
        assert states.stats.on_disk == 3


def test_damaged_and_foreign_files_are_no_error(tmp_path):
    a = ids_of(8, 100)
    with open_small(HYBRID) as model:
        states = States(model, 0, tmp_path)
        kept(model, states, a)
        (good,) = tmp_path.iterdir()
        data = good.read_bytes()
        foreign = tmp_path / "notes.txt"
        foreign.write_text("mine")
        (tmp_path / ("0" * 32 + ".state")).write_bytes(data)  # another name than its tokens give
        (tmp_path / ("1" * 32 + ".state")).write_bytes(b"")
        (tmp_path / ("2" * 32 + ".state")).write_bytes(b"x" * 500)
        (tmp_path / ("3" * 32 + ".state")).mkdir()
        half = tmp_path / ("4" * 32 + ".state.abcdef")
        half.write_bytes(b"x")
        os.utime(half, (0, 0))
        states = States(model, 0, tmp_path)
        assert states.stats.on_disk == 1 and len(model.notes) == 3 and foreign.exists()
        assert not half.exists()
        good.write_bytes(
            data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]
        )  # found out when it is read
        assert take(model, states, [*a, 1]) == (0, True)
        assert not good.exists() and "CRC" in model.notes[-1]
        kept(model, states, a)
        good.unlink()  # by another process
        assert take(model, states, [*a, 1]) == (0, True)
        for n in (0, 100, 400, len(data) - 1):
            good.write_bytes(data[:n])
            assert States(model, 0, tmp_path).stats.on_disk <= 1
            assert take(model, States(model, 0, tmp_path), [*a, 1]) == (0, True)


def test_a_file_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    a = ids_of(8, 100)
    with open_small(HYBRID) as model:
        kept(model, States(model, 0, tmp_path), a)
        (good,) = tmp_path.iterdir()
        session = type(model).session

        def failing(self, load=None):
            if load is None:
                return session(self)
            raise MosaicError("no", code)

        for code in ("ENOMEM", "EIO", "ECLOSED", "EBUDGET"):
            states = States(model, BIG, tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(type(model), "session", failing)
                for _ in range(2):
                    assert take(model, states, [*a, 1]) == (0, True)
            assert good.exists() and states.stats.on_disk == (0 if code == "EIO" else 1)
            assert take(model, states, [*a, 1]) == ((0 if code == "EIO" else 100), True)
        assert len(model.notes) == 1 and "cannot be read" in model.notes[0]


def test_a_session_in_use_comes_before_a_file_that_gives_less(tmp_path):
    a = ids_of(8, 200)
    with open_small(PLAIN, sessions=4) as model:
        kept(model, States(model, 0, tmp_path), a[:60])
        states = States(model, BIG, tmp_path)
        with model.session() as running:
            running.forward(a[: 60 + DISK_GAIN // 2], last=True)
            for others, n in (([], 60), ([running], 60 + DISK_GAIN // 2)):
                session, got = states.take(a, others)
                session.close()
                assert got == n


def test_what_may_be_left_out_costs_one_state_at_most():
    with open_small(HYBRID, sessions=4) as model:
        states = States(model, BIG)
        for seed in range(3):
            kept(model, states, ids_of(seed, 10))

        def never():
            raise MosaicError("no", "EBUDGET")

        with pytest.raises(MosaicError):
            states.with_room(never, 1)
        assert states.stats.kept == 2
        states.clear()


def held_writes(monkeypatch):
    """Writing waits for the first event; the second tells that it has begun."""
    let, begun, save = threading.Event(), threading.Event(), Disk.save

    def slow(self, session):
        begun.set()
        assert let.wait(10)
        return save(self, session)

    monkeypatch.setattr(Disk, "save", slow)
    return let, begun


def give(model, states, seed):
    """As kept, without waiting for the disk."""
    s = model.session()
    s.forward(ids_of(seed, 60), last=True)
    states.keep(s)


def test_nobody_waits_for_a_state_to_be_written(tmp_path, monkeypatch):
    let, begun = held_writes(monkeypatch)
    with open_small(PLAIN, sessions=MOST_LEAVING + 4) as model:
        states = States(model, 0, tmp_path)
        give(model, states, 0)
        assert begun.wait(5)
        for seed in range(1, MOST_LEAVING + 2):
            give(model, states, seed)  # two more than may wait
            assert take(model, states, ids_of(50, 9)) == (0, True)
            assert states.stats.on_disk == 0
        assert model.notes == deque(["states leave memory faster than they are written: some are lost"])  # fmt: skip
        waiting = threading.Thread(target=states.evict)  # whoever needs the memory does wait
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        let.set()
        waiting.join(5)
        states.close()
        assert states.stats.on_disk == MOST_LEAVING


def test_close_within_a_time(tmp_path, monkeypatch):
    let, begun = held_writes(monkeypatch)
    with open_small(PLAIN, sessions=4) as model:
        states = States(model, BIG, tmp_path)
        for seed in range(3):
            give(model, states, seed)
        closing = threading.Thread(target=states.close, args=(0.1,))
        closing.start()
        closing.join(0.5)
        assert closing.is_alive()  # what has begun is written whole
        let.set()
        closing.join(5)
        assert states.stats.on_disk == 1


def test_counters_are_told_while_a_state_is_moved(tmp_path):
    with open_small(PLAIN) as model:
        states = States(model, BIG)
        kept(model, states, ids_of(0, 60))
        before = states.stats
        with states._lock:
            found = []
            reader = threading.Thread(target=lambda: found.append(states.stats))
            reader.start()
            reader.join(5)
        assert found == [before] and before.kept == 1
        states.close()


def test_a_full_disk_is_told_once(tmp_path, monkeypatch):
    with open_small(PLAIN) as model:
        states = States(model, 0, tmp_path)

        def full(self, path):
            raise MosaicError("no space left", "EIO")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "save", full)
            for seed in range(3):
                kept(model, states, ids_of(seed, 60))
        assert [n for n in model.notes if "no space" in n] == [model.notes[0]] == list(model.notes)
        kept(model, states, ids_of(4, 60))
        assert states.stats.on_disk == 1


def test_a_folder_that_cannot_be_used_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    with open_small(PLAIN) as model:
        states = States(model, 0, tmp_path / "file" / "x")
        kept(model, states, ids_of(1, 60))
        assert states.stats.on_disk == 0 and "no states are kept" in model.notes[0]


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
@settings(max_examples=50)
def test_common(a, b):
    n = common(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
