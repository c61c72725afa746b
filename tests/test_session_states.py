"""Any sequence of session operations gives the logits that a fresh session gives for the same tokens."""

import os
import tempfile

import numpy as np
from conftest import open_small
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mosaic_c import MosaicError

CTX = 140  # three pages
MODELS = ("qwen35_text_f32", "qwen3_bf16")
opened = {}


def model_of(name, **options):
    key = name, *options
    if key not in opened:
        opened[key] = open_small(name, ctx=CTX, kv="bf16", **options)
    return opened[key]


class Sessions(RuleBasedStateMachine):
    """Up to three sessions of one model; the pool has pages for one whole context."""

    @initialize(name=st.sampled_from(MODELS))
    def start(self, name):
        self.model, self.oracle = model_of(name, slots=4), model_of(name)
        self.hybrid = bool(self.model.plan.delta_layers)
        self.live = [[self.model.session(), [], {0}]]  # session, tokens, positions kept

    def pick(self, i):
        return self.live[i % len(self.live)]

    def check(self, tokens, got):
        with self.oracle.session() as fresh:
            want = fresh.forward(tokens, last=True)
        assert np.array_equal(want.view(np.int32), got.view(np.int32))

    def path(self, x):
        return os.path.join(tempfile.gettempdir(), f"mosaic-{os.getpid()}-{id(x)}")

    @rule(i=st.integers(0, 2), n=st.integers(1, 70), seed=st.integers(0, 99), look=st.booleans())
    def forward(self, i, n, seed, look):
        x = self.pick(i)
        ids = np.random.default_rng(seed).integers(0, 190, n).tolist()
        before = x[0].position
        try:
            got = x[0].forward(ids, last=True)
        except MosaicError as error:
            assert error.code == "EFULL" and x[0].position == before
            return
        x[1] = x[1] + ids
        assert x[0].tokens == x[1] and x[0].position == len(x[1])
        if look:
            self.check(x[1], got)

    @rule(i=st.integers(0, 2))
    def snapshot(self, i):
        x = self.pick(i)
        x[0].snapshot()
        x[2] = x[2] | {x[0].position}

    @rule(i=st.integers(0, 2), to=st.integers(0, CTX))
    def rewind(self, i, to):
        x = self.pick(i)
        allowed = x[2] | {len(x[1])} if self.hybrid else set(range(len(x[1]) + 1))
        try:
            x[0].rewind(to)
        except MosaicError as error:
            assert error.code == "ERANGE" and to not in allowed and x[0].position == len(x[1])
            return
        assert to in allowed
        x[1] = x[1][:to]
        x[2] = {p for p in x[2] if p <= to}

    @rule(i=st.integers(0, 2), which=st.integers(0, 9))
    def forget(self, i, which):
        x = self.pick(i)
        if kept := x[0].snapshots:
            at = kept[which % len(kept)]
            x[0].forget(at)
            x[2] = x[2] - {at} | {0}

    @rule(i=st.integers(0, 2))
    def rest(self, i):
        self.pick(i)[0].rest()

    @rule(i=st.integers(0, 2))
    def fork(self, i):
        if len(self.live) < 3:
            x = self.pick(i)
            self.live.append([x[0].fork(), list(x[1]), set(x[2])])

    @rule(i=st.integers(0, 2))
    def close(self, i):
        if len(self.live) > 1:
            self.live.pop(i % len(self.live))[0].close()

    @rule(i=st.integers(0, 2))
    def save_and_load(self, i):
        x = self.pick(i)
        path = self.path(x)
        x[0].save(path)
        try:
            loaded = self.model.session(load=path)
        except MosaicError as error:
            assert error.code == "EFULL"  # both at once need more pages than there are
            return
        finally:
            os.unlink(path)
        x[0].close()
        x[0] = loaded
        if self.hybrid:
            x[2] = {0}  # snapshots are not saved
        assert x[0].tokens == x[1]

    @rule(seed=st.integers(0, 99))
    def together(self, seed):
        ids = [[(seed + k) % 190] for k in range(len(self.live))]
        work = [(x[0], t) for x, t in zip(self.live, ids, strict=True)]
        try:
            rows = self.model.forward(work)
        except MosaicError as error:
            assert error.code == "EFULL"
            assert all(x[0].position == len(x[1]) for x in self.live)
            return
        for x, t in zip(self.live, ids, strict=True):
            x[1] = x[1] + t
        self.check(self.live[-1][1], rows[-1])

    def teardown(self):
        for x in getattr(self, "live", []):
            x[0].close()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
