"""The memory guard: what is decided on given readings, and what becomes of a model while memory is short."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_limits import Tree

import mosaic_c
from mosaic_c import budget, cli, guard, synth
from mosaic_c.guard import BUDGET, GIB, Guard, Reading, Watch, keep, margin
from mosaic_c.limits import Bound, read_process
from mosaic_c.opening import plan_model

MIB = 1 << 20
UNIT = 3 * MIB


class World:
    """A process whose cache is filled at once, a budget that fits it, and a group shared with others."""

    def __init__(self, full=1000, floor=8, slack=100 * MIB, limit=8 * GIB):
        self.guard = Guard(full, floor, UNIT)
        self.base, self.limit, self.others = 200 * MIB, limit, 0
        self.budget = self.base + full * UNIT + slack
        self.sessions = full  # slots that they leave the cache
        self.now = self.faults = self.swapped = 0
        self.notes = []

    @property
    def slots(self):
        return min(self.guard.allowed, self.sessions)

    @property
    def room(self):
        """Bytes that the group has for the cache."""
        group = Bound("group", self.limit, 0)
        return self.limit - keep(group) - self.base - self.others

    def look(self, seconds=0.1):
        self.now += seconds
        cached = self.slots * UNIT
        used = self.base + cached
        bounds = Bound(BUDGET, self.budget, used), Bound("group", self.limit, used + self.others)
        reading = Reading(self.now, used, self.swapped, self.faults, bounds)
        note = self.guard.decide(reading, cached, self.sessions)
        self.notes += [note] if note else []
        assert self.guard.floor <= self.guard.allowed <= self.guard.full
        return self.slots

    def run(self, seconds, step=0.1):
        return [self.look(step) for _ in range(round(seconds / step))]


def test_nothing_happens_where_there_is_room():
    world = World()
    assert set(world.run(60)) == {1000} and not world.notes and world.guard.shrinks == 0


def test_shrinks_at_once_and_enough_and_says_so_once():
    world = World()
    world.look()
    world.others = 6 * GIB
    slots = world.look()
    assert slots * UNIT <= world.room
    assert (
        len(world.notes) == 1 and "1000" in world.notes[0] and f"to {slots} slots" in world.notes[0]
    )
    assert "wanted of 8 GiB (group)" in world.notes[0]
    # what has come at once is expected to come again: it did not, and the cache takes that back
    after = world.run(120)
    assert after[-1] * UNIT <= world.room - margin(Bound("group", world.limit, 0))
    assert after == sorted(after) and len(world.notes) == 1
    world.others = 0
    assert world.run(1)[-1] < 1000  # slowly
    assert world.run(60)[-1] == 1000
    assert world.guard.shrinks == 1 and len(world.notes) == 1
    world.run(60)
    world.others = 7 * GIB  # another episode
    world.look()
    assert len(world.notes) == 2


def test_a_lowered_limit_is_pressure():
    world = World()
    world.look()
    world.limit = 2 * GIB
    assert world.look() == (world.room - margin(Bound("group", 2 * GIB, 0))) // UNIT
    world.limit = 8 * GIB
    assert world.run(60)[-1] == 1000


def test_never_under_the_floor_and_what_to_do_then():
    world = World()
    world.look()
    world.others = 9 * GIB
    assert world.look() == 8
    assert "8 slots are the floor: close sessions" in world.notes[0]
    world.run(10)
    assert world.slots == 8 and len(world.notes) == 1
    small = World(full=8)
    small.others = 9 * GIB
    small.run(5)
    assert len(small.notes) == 1 and "floor" in small.notes[0] and "shrinks" not in small.notes[0]
    assert small.guard.shrinks == 0


def test_growth_of_the_process_past_its_budget():
    world = World(slack=0)
    assert set(world.run(5)) == {1000}  # exactly full is no pressure
    world.base += 300 * MIB
    slots = world.look()
    assert world.base + slots * UNIT <= world.budget - margin(Bound(BUDGET, world.budget, 0))
    assert set(world.run(60)) == {slots}
    assert BUDGET in world.notes[0]
    world.base -= 300 * MIB
    assert world.run(60)[-1] == 1000


def test_an_empty_cache_is_not_let_into_what_is_not_there():
    """It fills at the speed of the disk: at the first look it is too late to find no room for it."""
    world = World(limit=2 * GIB)
    bounds = (Bound("group", 2 * GIB, world.base),)
    world.notes.append(world.guard.decide(Reading(0.0, world.base, 0, 0, bounds), 0, 1000))
    assert world.slots * UNIT <= world.room
    assert "3.12 GiB wanted of 2 GiB (group)" in world.notes[0]


def test_page_faults_take_an_eighth_at_a_time():
    """Until they end, or a quarter of the memory is free."""
    world = World(limit=7 * GIB // 2)
    world.look()
    seen = []
    for _ in range(35):
        world.faults += 10
        seen.append(world.look())
    assert seen[9] == 1000 and 875 in seen and seen == sorted(seen)[::-1]
    assert 3 * (world.base + seen[-1] * UNIT) < 9 * world.limit // 4 < 3 * (world.base + 875 * UNIT)
    assert "major page faults a second" in world.notes[0] and len(world.notes) == 1
    assert set(world.run(1.5)) == {seen[-1]}
    assert world.run(120)[-1] == 1000


@pytest.mark.parametrize("why", ["burst", "trickle", "plenty"])
def test_page_faults_that_are_none_of_its_business(why):
    """New code, a few, and those of a file that someone reads through a mapping in ample memory."""
    world = World(limit=(64 if why == "plenty" else 4) * GIB)
    world.look()
    for i in range(30):
        world.faults += {"burst": 5000 * (i % 3 == 0), "trickle": 20, "plenty": 5000}[why]
        world.run(1)
    assert world.slots == 1000 and not world.notes
    world.swapped = 1
    for _ in range(5):
        world.faults += 5000
        world.run(1)
    assert world.slots < 1000  # ample or not: pages of this process come back from swap


def test_faults_that_come_back_with_the_cache_are_met_with_patience():
    """Thrashing above 700 slots whatever the bounds say: fewer and fewer attempts."""
    world = World()
    world.swapped = 1
    changes = []
    for _ in range(1800):
        world.faults += 500 * (world.slots > 700)
        before = world.guard.shrinks
        world.run(1)
        changes.append(world.guard.shrinks - before)
    assert sum(changes[:300]) > 2 * sum(changes[-300:])
    assert len(world.notes) == 1


def test_a_jump_long_ago_is_not_expected_again():
    world = World()
    world.look()
    world.others = 4 * GIB
    world.look(100)
    assert world.slots == 1000


def test_fast_growth_of_others_is_met_before_it_arrives():
    world = World()
    world.run(1)
    for _ in range(100):
        world.others += 150 * MIB  # 1.5 GB/s: more than what stays free takes two looks
        world.look()
        if world.slots == world.guard.floor:
            break
        assert world.base + world.slots * UNIT + world.others + 150 * MIB <= world.limit


def test_sessions_and_pressure_compose():
    world = World()
    world.sessions = 500
    world.look()
    world.others = 6 * GIB
    world.run(5)
    assert world.slots < 500
    world.sessions = 1000  # they end: pressure still holds
    assert world.look() * UNIT <= world.room
    world.others, world.sessions = 0, 500
    world.run(90)
    assert world.guard.allowed == 1000 and world.slots == 500


@settings(max_examples=60, deadline=None)
@given(
    full=st.integers(8, 3000),
    others=st.lists(st.integers(0, 10 * GIB), min_size=1, max_size=6),
    limit=st.integers(GIB // 2, 12 * GIB),
    step=st.sampled_from([0.1, 0.3, 3.0]),
)
def test_any_load(full, others, limit, step):
    """Within its bounds; under a load that stays it moves one way only, and fits; without one it is full."""
    world = World(full=full, limit=limit)
    for load in others:
        world.others = load
        first = world.look(step)
        slots = [first, *world.run(60, step)]
        falling = [a > b for a, b in zip(slots[:-1], slots[1:], strict=True)]
        rising = [a < b for a, b in zip(slots[:-1], slots[1:], strict=True)]
        assert not any(falling) and (not any(rising) or slots[0] < full)
        assert slots[-1] == world.guard.floor or slots[-1] * UNIT <= world.room
    world.others, world.limit = 0, 32 * GIB
    world.run(1000, step)
    assert world.slots == full


@given(amplitude=st.floats(0, 0.45), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_noise_within_the_margin_moves_it_once(amplitude, seed):
    rng = np.random.default_rng(seed)
    world = World()
    wide = margin(Bound("group", world.limit, 0))
    for _ in range(1200):
        world.others = 6 * GIB + int(rng.uniform(-amplitude, amplitude) * wide)
        world.look()
    assert world.guard.shrinks <= 2


# ---- reading ----


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    tree.put("proc/self/cgroup", "0::/a\n")
    tree.put("cgroup/a/memory.max", "max\n")
    tree.put("proc/self/stat", "7 (python) S 1 2 3 4 5 6 7 8 0 10 11\n")
    tree.put("proc/self/status", "VmRSS:\t 1048576 kB\nVmSwap:\t 1024 kB\n")
    return tree


def test_watch_reads_all_anew_and_not_too_often(tree):
    now = [100.0]
    watch = Watch(2 * GIB, tree.proc, tree.cgroup, lambda: now[0])
    assert watch.ready()
    reading = watch.read()
    assert (reading.now, reading.used, reading.swapped, reading.faults) == (100, GIB + MIB, MIB, 0)
    assert reading.bounds[0] == Bound(BUDGET, 2 * GIB, GIB + MIB) and len(reading.bounds) == 2
    assert not watch.ready()
    now[0] += 1.0
    assert watch.ready()
    tree.put("cgroup/a/memory.max", f"{GIB}\n")  # a limit where there was none
    assert [b.limit for b in watch.read().bounds] == [2 * GIB, 16 * GIB, GIB]
    tree.put("proc/self/cgroup", "0::/b\n")  # the process is moved
    tree.put("cgroup/b/memory.max", f"{3 * GIB}\n")
    now[0] += 6
    assert [b.limit for b in watch.read().bounds] == [2 * GIB, 16 * GIB, 3 * GIB]
    (tree.proc / "self/status").unlink()
    now[0] += 6
    assert watch.read() is None and not watch.ready()


# ---- a model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """1024 experts of 20 KiB."""
    folder = tmp_path_factory.mktemp("guard") / "tiny"
    synth.write(folder, "tiny", experts=256, uniform=True, progress=False)
    return folder


class Squeezed(Watch):
    """What an open model sees: a recorded group with 300 MiB beside the cache, and a clock that looks move on."""

    def __init__(self, model, tree):
        super().__init__(model.memory.budget, tree.proc, tree.cgroup, self.clock)
        self.model, self.tree, self.now, self.others, self.limit = model, tree, 0.0, 0, 2 * GIB
        tree.put("cgroup/a/memory.stat", "inactive_file 0\n")
        model.watch = self

    def clock(self):
        self.now += 0.01
        return self.now

    def read(self):
        used = 300 * MIB + self.model.engine.stats().held * self.model.memory.slab
        self.tree.put("cgroup/a/memory.max", f"{self.limit}\n")
        self.tree.put("cgroup/a/memory.current", f"{used + self.others}\n")
        self.tree.put("proc/self/status", f"VmRSS:\t {used // 1024} kB\n")
        return super().read()


def open_tiny(folder, **options):
    return mosaic_c.open(folder, **({"ram": "1G", "ctx": 2048, "threads": 1} | options))


def test_pressure_in_mid_generation(folder, tree):
    """The limit falls and rises while text is generated: the same tokens, a smaller cache meanwhile."""
    prompt = [i * 37 % 512 for i in range(200)]
    with open_tiny(folder) as model:
        want = [
            p.token
            for p in model.generate(prompt, max_new_tokens=300, temperature=0, ignore_eos=True)
        ]
        assert not model.notes and model.stats().slots_lost == 0
    said, slots = [], []
    with open_tiny(folder) as model:
        full = model.slots
        squeezed = Squeezed(model, tree)
        model.on_note = said.append
        got = []
        for i, piece in enumerate(
            model.generate(prompt, max_new_tokens=300, temperature=0, ignore_eos=True)
        ):
            got.append(piece.token)
            slots.append(model.slots)
            if i == 30:
                before, filled = read_process()[0], model.engine.stats().held
                squeezed.limit = (
                    310 * MIB
                )  # 9.7 MiB are to stay free: nothing is left for the cache
            elif i == 60:
                lost = before - read_process()[0]
                pressed = model.stats()
                squeezed.limit = 2 * GIB
            if i > 60:
                squeezed.now += 0.2
        stats = model.stats()
    assert got == want
    assert filled > 900 and slots[30] == full and slots[60] == model.memory.hard
    assert lost > (filled - 100) * model.memory.slab * 3 // 4  # the system has it back
    assert slots[62] < full // 2 and slots[-1] == full  # slowly, but all
    assert said == list(model.notes) and len(said) == 1 and "memory.max" in said[0]
    assert pressed.pressure_shrinks >= 1 and pressed.slots_lost == full - pressed.slots
    assert any("for want of memory" in line for line in pressed.lines())
    assert stats.slots_lost == 0 and stats.slots == full and stats.evictions > 0


def test_page_cache_is_no_pressure(folder, tree):
    with open_tiny(folder) as model:
        squeezed = Squeezed(model, tree)
        squeezed.others = GIB
        squeezed.limit = GIB + 330 * MIB
        tree.put("cgroup/a/memory.stat", f"inactive_file {GIB // 2}\nactive_file {GIB // 2}\n")
        list(model.generate(list(range(200)), max_new_tokens=50, ignore_eos=True))
        assert squeezed.now > 2 and model.guard.shrinks == 0 and model.slots == model.memory.slots
        tree.put("cgroup/a/memory.stat", "inactive_file 0\n")
        list(model.generate(list(range(200)), max_new_tokens=50, ignore_eos=True))
        assert model.slots == model.memory.hard


def test_sessions_are_made_and_closed_under_pressure(folder, tree):
    """Slots that sessions took and slots that pressure took are not counted twice, nor given back twice."""
    with open_tiny(folder, ram="1G", ctx=64) as model:
        squeezed, full, ids = Squeezed(model, tree), model.slots, list(range(60))
        want = model.session().forward(ids)
        model.forward([(model.session(), ids)])
        squeezed.limit = 318 * MIB
        for _ in range(40):
            squeezed.now += 0.2
            s = model.session()
            got = s.forward(ids)
            assert np.array_equal(got.view(np.int32), want.view(np.int32))
            s.close()
            assert sum(model.stats().resident.values()) <= model.memory.engine_budget
        few = model.slots
        assert model.memory.hard <= few < full // 2 and model.guard.allowed == few
        squeezed.limit = 2 * GIB
        for _ in range(100):
            squeezed.now += 1
            model.relieve()
        assert model.slots == model.guard.allowed == full


def test_a_look_leaves_sessions_what_they_took(folder, tree, monkeypatch):
    """At a budget without slack the cache gave slots to sessions: no pressure, but nothing to grow into."""
    monkeypatch.setattr(budget, "process_bytes", lambda: 40 * MIB)
    m = plan_model(folder, ram="1G", ctx=64, threads=1)[-1]
    ram = m.floor + 200 * m.slab
    with open_tiny(folder, ctx=64, ram=ram) as model:
        squeezed, full, sessions = Squeezed(model, tree), model.slots, []
        squeezed._budget = GIB
        while model.slots > full - 50:
            sessions.append(model.session())
        few = model.slots
        for _ in range(5):
            squeezed.now += 10
            model.relieve()
        # a slot more where the slack that a new session is given holds one
        assert few <= model.slots <= few + 1 < model.guard.allowed == full
        assert sum(model.stats().resident.values()) <= model.memory.engine_budget
        for s in sessions:
            s.close()
        assert model.slots > few


def test_generate_says_it(folder, monkeypatch, capsys):
    """On stderr, once; the text on stdout is that of a run without pressure."""
    command = [
        "generate",
        "--ids",
        "1,2,3",
        "-m",
        str(folder),
        "-n",
        "40",
        "--temp",
        "0",
        "--ram",
        "1G",
    ]
    assert cli.main(command) == 0
    want = capsys.readouterr()
    assert "note" not in want.err
    monkeypatch.setattr(guard, "read_process", lambda proc: (2 * GIB, 0, 0))
    monkeypatch.setattr(guard, "EVERY", 0.0)
    monkeypatch.setattr(guard, "SHARE", 0.0)
    assert cli.main([*command, "--stats"]) == 0
    got = capsys.readouterr()
    assert got.out == want.out
    notes = [line for line in got.err.splitlines() if line.startswith("note: memory is short")]
    assert len(notes) == 1 and "wanted of 1 GiB (the memory budget)" in notes[0]
    assert "1 shrinks for want of memory" in got.err


def test_a_resize_waits_for_the_layer(folder):
    """A cache in use changes its size between two layers: no call is refused, no bit changes."""
    prompt = list(range(300))
    with open_tiny(folder) as model:
        sessions = [model.session() for _ in range(2)]
        sizes = itertools.cycle((model.memory.hard, model.slots))
        want = sessions[0].forward(prompt)
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(sessions[1].forward, prompt)
            while not got.done():
                model.store.resize(next(sizes))
        assert np.array_equal(got.result(), want)
