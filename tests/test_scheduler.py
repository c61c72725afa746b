"""Many requests in one batch: the bits of each are those it has alone, whatever the others do."""

import asyncio
import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import open_small

import mosaic_c
from mosaic_c import MosaicError, UsageError, names, scheduler
from mosaic_c.budget import WAITING_BYTES, WAITING_TOKEN_BYTES
from mosaic_c.generation import Piece
from mosaic_c.sampling import Sampling
from mosaic_c.scheduler import Full, Progress, Request, Scheduler, shares
from mosaic_c.states import States

HYBRID, PLAIN = "qwen35_fp8", "qwen3_bf16"
BIG = 1 << 30


def ids_of(seed, n):
    return np.random.default_rng(seed).integers(0, 190, n).tolist()


def ask(seed, n=20, tokens=12, **more):
    settings = Sampling(temperature=0.9, top_p=0.95, presence_penalty=0.5, seed=seed)
    return Request(ids_of(seed, n), settings, tokens, ignore_eos=True, **more)


def pieces(ticket):
    return [(e.token, e.text, e.logprob, e.top) for e in ticket.events() if isinstance(e, Piece)]


def settled(s, **want):
    """Waits until the counters say so: a reader hears of the end before its session is put away."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        stats = s.stats()
        if all(getattr(stats, name) == value for name, value in want.items()):
            return stats
        time.sleep(0.005)
    raise AssertionError(stats)


@pytest.fixture(scope="module", params=[HYBRID, PLAIN])
def model(request):
    with open_small(request.param, ctx=256, sessions=4, slots=4) as model:
        yield model


@pytest.fixture
def run(model):
    with Scheduler(model, States(model, BIG), most=4, queue=20) as s:
        yield s
    s.states.close()


@pytest.fixture
def slow(monkeypatch, model):
    """Holds forward calls until they are let go: slow.gate, and slow.work tells what is being evaluated."""
    out = SimpleNamespace(gate=threading.Event(), begun=threading.Event(), work=[], fail=None)
    out.gate.set()
    forward = type(model).forward

    def held(self, work, *, progress=None):
        out.work.append([(s.position, len(ids)) for s, ids in work])
        out.begun.set()
        assert out.gate.wait(10)
        if out.fail is not None:
            error, out.fail = out.fail, None
            raise error
        return forward(self, work, progress=progress)

    monkeypatch.setattr(type(model), "forward", held)
    return out


def test_one_request_is_what_generate_gives(model, run):
    request = ask(1, 40, keep_at=(30,))
    got = [e for e in run.submit(request).events() if isinstance(e, Piece)]
    want = model.generate(
        request.ids, 12, temperature=0.9, top_k=0, top_p=0.95, presence_penalty=0.5,
        repetition_penalty=1, seed=1, ignore_eos=True,
    )  # fmt: skip
    assert [(p.token, p.logprob) for p in got] == [(p.token, p.logprob) for p in want]


def test_the_same_bits_alone_and_among_others(model, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE", 16)
    requests = [ask(i, n, 6 + 3 * i, top_logprobs=2) for i, n in enumerate((3, 70, 150, 31, 20, 8))]
    requests.append(ask(1, 70, 9, top_logprobs=2, keep_at=(10, 33, 70)))
    alone = []
    for request in requests:
        with Scheduler(model, States(model, 0)) as s:
            alone.append(pieces(s.submit(request)))
    for most, budget in ((4, 0), (4, BIG), (2, BIG), (6, BIG)):
        with Scheduler(model, States(model, budget), most=most) as s:
            gone = [s.submit(ask(50 + i, 60, 60)) for i in range(2)]
            found: list = [None] * len(requests)

            def read(i, s=s, found=found):
                found[i] = pieces(s.submit(requests[i]))

            readers = [threading.Thread(target=read, args=(i,)) for i in range(len(requests))]
            for i, t in enumerate(readers):
                t.start()
                if i in (2, 4):
                    gone.pop().cancel()
            for t in readers:
                t.join()
            assert found == alone
            stats = settled(s, running=0, done=len(requests), cancelled=2, failed=0)
            assert stats.batch_sizes and max(stats.batch_sizes) <= most
            assert max(stats.batch_sizes) > 1
            s.states.clear()


def test_a_state_is_reused_with_the_same_bits(model, run):
    first = ask(3, 60, 10, keep_at=(50,))
    got = pieces(run.submit(first))
    settled(run, done=1)
    again = run.submit(first)
    assert pieces(again) == got and again.reused == (50 if run.states.hybrid else 59)
    settled(run, done=2)
    longer = [*first.ids, *(t for t, *_ in got[:-1]), 5, 6]
    ticket = run.submit(Request(longer, Sampling(), 3))
    have = next(ticket.events())
    assert have == Progress(69, 71) and ticket.reused == 69 and ticket.prompt_tokens == 71
    assert ticket.finish_reason == "cancel"  # the reader went away
    assert (
        settled(run, running=0, cancelled=1).reused_tokens == (50 if run.states.hybrid else 59) + 69
    )


def test_a_prompt_that_many_share_is_evaluated_once(run, slow):
    """Requests of the same beginning wait for the first of them, those of another do not."""
    shared, slow.work = ids_of(5, 150), []
    slow.gate.clear()
    first = run.submit(ask(20, 4, 2))
    assert slow.begun.wait(5)
    tickets = [
        run.submit(
            Request([*shared, i], Sampling(1, seed=i), 3, ignore_eos=True, keep_at=(140, 150))
        )
        for i in range(2)
    ]
    tickets += [run.submit(ask(21, 6, 3))]
    slow.gate.set()
    got = [pieces(t) for t in [*tickets, first]][:3]
    assert [t.reused for t in tickets] == [0, 150, 0]
    assert sum(n for w in slow.work for _, n in w) == 4 + 1 + 151 + 2 + 1 + 2 + 6 + 2
    assert max(map(len, slow.work)) == 3
    run.states.clear()
    alone = [
        pieces(run.submit(Request([*shared, i], Sampling(1, seed=i), 3, ignore_eos=True)))
        for i in range(2)
    ]
    assert got[:2] == alone


def test_progress_comes_before_the_first_piece(run, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE", 16)
    other = run.submit(ask(8, 5, 200))
    ticket = run.submit(ask(9, 50, 2))
    events = list(ticket.events())
    done = [e.done for e in events if isinstance(e, Progress)]
    assert done[0] == 0 and done[-1] == 50 and done == sorted(done)
    assert [isinstance(e, Piece) for e in events[-2:]] == [True, True]
    assert ticket.finish_reason == "length"
    other.cancel()


def test_a_long_prompt_does_not_stop_the_others(run, slow, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE", 16)
    slow.gate.clear()
    a = run.submit(ask(1, 4, 30))
    assert slow.begun.wait(5)
    b, c = run.submit(ask(2, 200, 2)), run.submit(ask(3, 10, 2))
    slow.gate.set()
    pieces(c)
    assert b.finish_reason is None and not b.over  # c came later and is done
    pieces(b), pieces(a)
    prompts = [w for w in slow.work if max(n for _, n in w) > 1]
    assert slow.work[0] == [(0, 4)] and slow.work[1] == [(4, 1), (0, 8), (0, 8)]
    assert all(sum(n for _, n in w if n > 1) <= 16 for w in prompts)
    assert sum(n for w in slow.work for _, n in w) == 4 + 29 + 200 + 1 + 10 + 1


def job(n, position=0, keep_at=()):
    """As much of a job as shares() looks at."""
    pending = range(n)
    out = SimpleNamespace(
        run=SimpleNamespace(pending=pending), session=SimpleNamespace(position=position)
    )
    out.keep_at = keep_at
    out.wanted = lambda: scheduler._Job.wanted(out)
    return out


def test_shares():
    def counts(jobs, chunk=1024):
        return [n for _, n in shares(jobs, chunk)]

    assert counts([job(5000)]) == [1024]  # alone: the whole chunk
    assert counts([job(5000), job(1)]) == [256, 1]
    assert counts([job(5000), job(1), job(20), job(5000)]) == [118, 1, 20, 118]
    assert counts([job(500, 10, (5, 40, 90))]) == [30]  # up to where a state is to be kept
    assert counts([job(500), job(1)], 8) == [7, 1]
    assert counts([job(1) for _ in range(9)], 8) == [1] * 9
    assert counts([job(9), job(9), job(9)], 1) == [
        1
    ]  # a chunk of one token: first come, first served
    assert counts([]) == []


def test_first_come_first_served_and_a_queue_with_an_end(model, slow):
    slow.gate.clear()
    with Scheduler(model, States(model, 0), most=1, queue=2) as s:
        tickets = [s.submit(ask(i, 5, 2)) for i in range(1)]
        assert slow.begun.wait(5)
        tickets += [s.submit(ask(i, 5, 2)) for i in (1, 2)]
        with pytest.raises(Full, match="2 requests are waiting") as info:
            s.submit(ask(3))
        assert 1 <= info.value.retry_after <= 60 and info.value.code == "EBUSY"
        stats = s.stats()
        assert (stats.running, stats.queued) == (1, 2)
        tickets[1].cancel()  # one that waits
        assert list(tickets[1].events()) == [] and tickets[1].finish_reason == "cancel"
        slow.gate.set()
        assert len(pieces(tickets[2])) == len(pieces(tickets[0])) == 2
        assert [len(w) for w in slow.work] == [1] * 4
        settled(s, done=2, cancelled=1, queued=0, running=0)
        with pytest.raises(UsageError):
            Scheduler(model, s.states, most=0)


def test_cancel_ends_a_slice_at_the_next_layer_and_the_others_go_on(model):
    began, layers = threading.Event(), []
    real = type(model.layers[0][0]).forward

    def slowly(self, step, x):
        layers.append(len(x))
        began.set()
        time.sleep(0.1)
        return real(self, step, x)

    with Scheduler(model, States(model, BIG)) as s, pytest.MonkeyPatch.context() as patch:
        want = pieces(s.submit(ask(2, 9, 3)))
        settled(s, done=1)
        s.states.clear()
        patch.setattr(type(model.layers[0][0]), "forward", slowly)
        long, short = s.submit(ask(1, 200)), None
        assert began.wait(5)
        short = s.submit(ask(2, 9, 3))
        at = time.monotonic()
        long.cancel()
        assert not pieces(long) and long.finish_reason == "cancel"
        settled(s, cancelled=1)
        assert time.monotonic() - at < 0.1 * len(model.layers)
        patch.undo()
        assert pieces(short) == want
        assert model.session().forward([1, 2], last=True).shape  # nothing is left cancelled


def test_a_new_request_ends_a_long_slice_of_one_alone(model, slow, monkeypatch):
    monkeypatch.setattr(scheduler, "SLICE", 16)
    slow.gate.clear()
    with Scheduler(model, States(model, 0)) as s:
        a = s.submit(ask(1, 150, 2))
        assert slow.begun.wait(5)
        b = s.submit(ask(2, 10, 2))
        slow.gate.set()
        assert len(pieces(b)) == len(pieces(a)) == 2
        assert slow.work[:2] == [[(0, 150)], [(0, 8), (0, 8)]]  # the first left no trace


def test_a_failed_step_fails_its_requests_and_no_others(run, slow):
    slow.gate.clear()
    a = run.submit(ask(1, 5, 5))
    assert slow.begun.wait(5)
    b = run.submit(ask(2, 5, 5))
    slow.fail = MosaicError("shard 1: a read failed", "EIO")
    slow.gate.set()
    with pytest.raises(MosaicError, match="a read failed") as info:
        pieces(a)
    assert info.value.code == "EIO" and a.finish_reason is None
    assert len(pieces(b)) == 5
    slow.fail = ZeroDivisionError("a bug")
    c = run.submit(ask(3, 5, 5))
    with pytest.raises(ZeroDivisionError):
        pieces(c)
    assert len(pieces(run.submit(ask(4, 5, 5)))) == 5
    stats = settled(run, running=0)
    assert (stats.done, stats.failed) == (2, 2)


def test_one_requests_bad_logits_are_its_own(model, monkeypatch):
    forward = type(model).forward

    def poisoned(self, work, *, progress=None):
        rows = forward(self, work, progress=progress)
        for (session, _), row in zip(work, rows, strict=True):
            if session.tokens[:2] == [7, 7] and session.position > 4:
                row[3] = np.nan
        return rows

    want = list(model.generate(ids_of(1, 9), 8, temperature=0, ignore_eos=True))
    monkeypatch.setattr(type(model), "forward", poisoned)
    with Scheduler(model, States(model, BIG)) as s:
        good = s.submit(Request(ids_of(1, 9), Sampling(), 8, ignore_eos=True))
        bad = s.submit(Request([7, 7, 1, 2], Sampling(), 8, ignore_eos=True))
        with pytest.raises(MosaicError, match="no usable logits"):
            pieces(bad)
        assert [t for t, *_ in pieces(good)] == [p.token for p in want]
        settled(s, running=0)
        assert s.states.stats.kept == 1  # a state that gave such logits is not kept


class Only:
    """A constraint: these tokens in turn."""

    def __init__(self, *allowed, fail=None):
        self.allowed, self.seen, self.fail = list(allowed), [], fail

    def mask(self):
        if len(self.seen) == self.fail:
            raise RuntimeError("grammar")
        out = np.zeros(150, bool)
        out[self.allowed[len(self.seen)]] = True
        return out

    def advance(self, token):
        self.seen.append(token)


def test_a_constraint_is_obeyed_and_its_error_is_its_own(model, run):
    free = run.submit(ask(1, 9, 4))
    rule = Only([5, 9], [6], [7, 8])
    held = run.submit(ask(2, 9, 3, constraint=rule, top_logprobs=1))
    failing = run.submit(ask(3, 9, 3, constraint=Only([5], [6], fail=1)))
    got = pieces(held)
    assert [t in a for (t, *_), a in zip(got, rule.allowed, strict=True)] == [True] * 3
    assert rule.seen == [t for t, *_ in got]
    logits = model.session().forward(ids_of(2, 9), last=True).astype(np.float64)
    p = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert got[0][2] == pytest.approx(p[got[0][0]], abs=1e-5)  # of the model's own distribution
    assert got[0][3][0] == (int(p.argmax()), pytest.approx(p.max(), abs=1e-5))
    with pytest.raises(RuntimeError, match="grammar"):
        pieces(failing)
    assert len(pieces(free)) == 4


class Panic(BaseException):
    """As a library in Rust raises: no Exception."""


def test_a_panic_ends_its_own_request_alone(model, run, slow):
    class Bad(Only):
        def mask(self):
            raise Panic("index out of bounds")

    free = run.submit(ask(1, 9, 4))
    with pytest.raises(MosaicError, match="Panic: index out of bounds"):
        pieces(run.submit(ask(2, 9, 3, constraint=Bad())))
    assert len(pieces(free)) == 4
    slow.fail = Panic("in a step")
    with pytest.raises(MosaicError, match="in a step"):
        pieces(run.submit(ask(3, 5, 5)))
    assert len(pieces(run.submit(ask(4, 5, 5)))) == 5 and run.alive


def test_without_its_thread_it_says_so(model, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    s = Scheduler(model, States(model, 0))
    assert s.alive

    def broken(timeout=None):
        raise Panic("a bug")

    monkeypatch.setattr(s._changed, "wait", broken)
    assert len(pieces(s.submit(ask(1, 5, 2)))) == 2  # it wakes up, and does not sleep again
    s._thread.join(5)
    assert not s.alive
    with pytest.raises(MosaicError, match="its thread has ended: Panic: a bug"):
        s.submit(ask(2))
    s.close()


def test_a_server_without_it_is_not_healthy():
    pytest.importorskip("starlette")
    from mosaic_c.server.app import Service

    for alive, closing, want in ((True, False, 200), (False, False, 503), (False, True, 503)):
        service = SimpleNamespace(scheduler=SimpleNamespace(alive=alive), closing=closing)
        assert asyncio.run(Service.health(service, None)).status_code == want


def test_an_error_that_cannot_be_copied_is_told(run, slow):
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    slow.fail = Odd("this", "that")
    with pytest.raises(MosaicError, match="Odd: this and that"):
        pieces(run.submit(ask(1, 5, 5)))
    assert len(pieces(run.submit(ask(2, 5, 5)))) == 5


def test_places_of_snapshots_cut_no_prompt_where_none_are_taken(model, run, slow):
    pieces(run.submit(ask(1, 60, 2, keep_at=(20, 40))))
    hybrid = bool(model.plan.delta_layers)
    assert slow.work[:-1] == ([[(0, 20)], [(20, 20)], [(40, 20)]] if hybrid else [[(0, 60)]])


def test_the_time_in_the_queue_is_not_the_requests(model, slow):
    slow.gate.clear()
    with Scheduler(model, States(model, 0), most=1) as s:
        tickets = [s.submit(ask(i, 5, 1)) for i in range(2)]
        assert slow.begun.wait(5)
        time.sleep(0.5)
        slow.gate.set()
        for t in tickets:
            pieces(t)
        settled(s, done=2)
        # a second at first, of which a fifth is exchanged each time: for half a second, and for almost nothing
        assert s._seconds < 0.8 * (0.8 + 0.2 * 0.5) + 0.05


def test_a_request_that_finds_no_page_waits_and_gives_the_same_bits():
    with open_small(PLAIN, ctx=128, sessions=1) as model:  # two pages for all
        requests = [ask(i, 50, 40) for i in range(3)]
        alone = []
        for request in requests:
            with Scheduler(model, States(model, 0)) as s:
                alone.append(pieces(s.submit(request)))
        with Scheduler(model, States(model, BIG), most=3) as s:
            tickets = [s.submit(r) for r in requests]
            assert [pieces(t) for t in tickets] == alone
            settled(s, done=3, failed=0, running=0)


def test_what_waits_takes_what_the_plan_says(model, slow):
    slow.gate.clear()
    with Scheduler(model, States(model, 0), most=1, queue=40) as s:
        s.submit(ask(1, 5, 1))
        assert slow.begun.wait(5)
        tracemalloc.start()
        tickets = [s.submit(ask(i, 250, keep_at=(9, 90), stop=())) for i in range(40)]
        took = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert took < 40 * (10240 + 250 * WAITING_TOKEN_BYTES) < 40 * (WAITING_BYTES + 1000)
        for t in tickets:
            t.cancel()
        slow.gate.set()


def test_bad_requests_are_refused_at_once(run):
    for request, message in [
        (Request([]), "empty"),
        (Request([190000]), "token id"),
        (Request(ids_of(0, 257)), "257 tokens"),
        (Request([1], stop=("x",)), "need a tokenizer"),
        (Request([1], keep_at=(2,)), "keep_at"),
        (Request([1], Sampling(top_p=3)), "top_p"),
        (Request([1], top_logprobs=-1), "top_logprobs"),
    ]:
        with pytest.raises(MosaicError, match=message):
            run.submit(request)
    ticket = run.submit(Request([1], max_new_tokens=0))
    assert pieces(ticket) == [] and ticket.finish_reason == "length"


def test_close(model):
    before = threading.active_count()
    s = Scheduler(model, States(model, 0))
    assert threading.active_count() == before + 1
    done, late = s.submit(ask(1, 5, 3)), None
    s.close(drain=10)
    assert len(pieces(done)) == 3 and threading.active_count() == before
    with pytest.raises(MosaicError, match="closed"):
        s.submit(ask(1))
    s.close()
    s = Scheduler(model, States(model, 0), most=1)
    tickets = [s.submit(ask(i, 100, 150)) for i in range(3)]
    s.close()
    for late in tickets:
        with pytest.raises(MosaicError, match="shut down"):
            pieces(late)
    assert threading.active_count() == before
    assert model.session().forward([1], last=True).shape


def test_a_model_that_is_closed_under_it():
    model = open_small(HYBRID)
    with Scheduler(model, States(model, 0)) as s:
        ticket = s.submit(ask(1, 100, 150))
        model.close()
        with pytest.raises(MosaicError, match="closed"):
            pieces(ticket)
        with pytest.raises(MosaicError, match="closed"):
            pieces(s.submit(ask(2)))


# asyncio, and text


def test_streams_of_one_loop(run):
    want = [pieces(run.submit(ask(i, 9 + i, 5))) for i in range(3)]
    run.states.clear()

    async def read(i):
        events = run.submit(ask(i, 9 + i, 5)).stream()
        return [(e.token, e.text, e.logprob, e.top) async for e in events if isinstance(e, Piece)]

    async def leave():
        async for event in run.submit(ask(9, 9, 200)).stream():
            if isinstance(event, Piece):
                raise asyncio.CancelledError

    async def main():
        return await asyncio.gather(*map(read, range(3)), leave(), return_exceptions=True)

    *got, left = asyncio.run(main())
    assert got == want and isinstance(left, asyncio.CancelledError)
    settled(run, cancelled=1, running=0)


def test_a_loop_that_is_gone_does_no_harm(run):
    async def begin():
        stream = run.submit(ask(1, 9, 30)).stream()
        await stream.__anext__()
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    assert len(pieces(run.submit(ask(2, 9, 3)))) == 3
    del stream
    settled(run, running=0)


def test_text_and_stop_strings():
    with mosaic_c.open(names.demo_folder(), ram="512M", ctx=512, threads=1, sessions=3) as model:
        prompt = model.tokenizer.encode("The garden was quiet")
        whole = "".join(p.text for p in model.generate(prompt, 40, temperature=0))
        stop = whole[20:25]
        with Scheduler(model, States(model, BIG)) as s:
            plain = s.submit(Request(prompt, Sampling(), 40))
            cut = s.submit(Request(prompt, Sampling(), 40, stop=(stop,)))
            assert "".join(text for _, text, *_ in pieces(cut)) == whole[: whole.index(stop)]
            assert (cut.finish_reason, cut.stopped_by) == ("stop", stop)
            assert "".join(text for _, text, *_ in pieces(plain)) == whole
