"""The decode loop, against a session that counts what it is asked to do."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.generation import Piece, Run, StopStrings, generate, stop_ids
from mosaic_c.sampling import Sampler, Sampling

VOCAB = 300
EOS, TAIL = 290, 291  # special tokens of the pretended tokenizer; the rest are the 256 bytes


class Script:
    """A session whose likeliest next tokens are given; every call is recorded."""

    def __init__(self, tokens: list[int], room: int = 100, position: int = 0) -> None:
        self.tokens = tokens
        self.room = room
        self.position = position
        self.calls: list[list[int]] = []

    def forward(self, ids: list[int], last: bool = True) -> np.ndarray:
        assert last
        assert 0 < len(ids) <= self.room
        self.calls.append(list(ids))
        self.room -= len(ids)
        self.position += len(ids)
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[self.tokens[len(self.calls) - 1]] = 9.0
        return logits


class Letters:
    """A detokenizer of bytes: text comes out once a character is complete."""

    def __init__(self) -> None:
        self.held = b""

    def add(self, token: int) -> str:
        if token >= 256:
            return ""
        self.held += bytes([token])
        try:
            text, self.held = self.held.decode(), b""
        except UnicodeDecodeError:
            return ""
        return text

    def finish(self) -> str:
        return "\ufffd" if self.held else ""

    def hidden(self, token: int) -> str:
        return {EOS: "<eos>", TAIL: "<tail>"}.get(token, "")


def greedy() -> Sampler:
    return Sampler(Sampling())


def run(text: str | list[int], prompt=(1, 2, 3), room: int = 100, detokenizer=None, **options):
    """Generates text's bytes; returns (pieces, the generation, the session)."""
    tokens = list(text.encode()) if isinstance(text, str) else text
    session = Script(tokens, room)
    options.setdefault("sampler", greedy())
    gen = generate(session, prompt, detokenizer=detokenizer or Letters(), **options)
    return list(gen), gen, session


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


# The loop


def test_each_token_is_yielded_once_and_only_what_is_needed_is_evaluated():
    pieces, gen, session = run("hello world", max_new_tokens=5)
    assert [p.token for p in pieces] == list(b"hello")
    assert [p.text for p in pieces] == list("hello")
    assert session.calls == [[1, 2, 3], [ord("h")], [ord("e")], [ord("l")], [ord("l")]]
    assert (gen.finish_reason, gen.stopped_by, gen.tokens) == ("length", None, list(b"hello"))
    expected = 9 - math.log(math.exp(9) + VOCAB - 1)
    assert all(math.isclose(p.logprob, expected, rel_tol=1e-5) for p in pieces)


def test_a_run_turned_inside_out():
    """The caller evaluates, in parts of any size."""
    run = Run([1, 2, 3], 100, sampler=greedy(), detokenizer=Letters(), max_new_tokens=2)
    assert (run.pending.tolist(), run.finish_reason, run.limit) == ([1, 2, 3], None, 2)
    run.evaluated(2)
    assert run.pending.tolist() == [3]
    logits = np.zeros(VOCAB, np.float32)
    logits[104] = 9
    assert run.accept(logits).text == "h" and run.pending.tolist() == [104]
    last = run.accept(logits)
    assert (last.token, last.top, run.pending.tolist(), run.finish_reason) == (
        104,
        (),
        [],
        "length",
    )
    assert run.accept(logits) is None and run.tokens == [104, 104]
    run = Run([1], 100, sampler=greedy(), max_new_tokens=0)
    assert (run.pending.tolist(), run.finish_reason, run.accept(logits)) == ([], "length", None)


def test_top_logprobs_and_constraints():
    class Rule:
        seen: list[int] = []

        def mask(self):
            return None if len(self.seen) == 1 else np.arange(200) == 100 + len(self.seen)

        def advance(self, token):
            self.seen.append(token)

    rule = Rule()
    pieces, _, _ = run([5, 6, 102, EOS], top_logprobs=2, constraint=rule, max_new_tokens=3)
    assert [p.token for p in pieces] == rule.seen == [100, 6, 102]  # the second was free
    assert [len(p.top) for p in pieces] == [2, 2, 2] and pieces[1].top[0] == (6, pieces[1].logprob)
    assert pieces[0].top[0][0] == 5  # the model's own distribution
    with pytest.raises(UsageError, match="top_logprobs"):
        run("x", top_logprobs=True)
    # a stop token ends the text and is no part of it
    rule.seen = []
    rule.mask = lambda: None
    run([104, EOS], stop_ids=[EOS], constraint=rule)
    assert rule.seen == [104]


def test_a_piece_comes_before_the_next_token_is_evaluated():
    session = Script(list(b"abc"))
    gen = generate(session, [1], sampler=greedy(), detokenizer=Letters(), max_new_tokens=3)
    assert session.calls == []  # nothing happens before it is asked for
    assert next(gen).text == "a"
    assert len(session.calls) == 1
    assert gen.finish_reason is None
    assert next(iter(gen)).text == "b"  # iterating goes on where it was
    assert next(gen).text == "c"
    assert gen.finish_reason == "length"  # known with the last piece already
    with pytest.raises(StopIteration):
        next(gen)
    assert len(session.calls) == 3


def test_a_stop_token_ends_the_text_and_is_not_evaluated():
    pieces, gen, session = run([104, 105, EOS, 33], stop_ids={EOS, 7})
    assert [(p.token, p.text) for p in pieces] == [(104, "h"), (105, "i"), (EOS, "")]
    assert (gen.finish_reason, gen.stopped_by) == ("stop", EOS)
    assert session.calls == [[1, 2, 3], [104], [105]]
    # One that is ordinary text is not shown either.
    pieces, gen, _ = run("hi!", stop_ids=[ord("!")])
    assert text_of(pieces) == "hi"
    # On the last allowed token it is still a stop.
    _, gen, _ = run([104, EOS], stop_ids={EOS}, max_new_tokens=2)
    assert gen.finish_reason == "stop"


def test_ignore_eos_goes_on():
    pieces, gen, _ = run(
        [104, EOS, 105], stop_ids={EOS}, ignore_eos=True, max_new_tokens=3, stop="xyz"
    )
    assert [p.token for p in pieces] == [104, EOS, 105]
    assert text_of(pieces) == "hi"
    assert gen.finish_reason == "length"


def test_room_is_the_default_and_the_bound():
    pieces, gen, session = run("x" * 50, room=10)
    assert (len(pieces), gen.finish_reason, gen.limit) == (7, "length", 7)
    assert session.room == 1  # the last token could still be evaluated
    pieces, gen, _ = run("x" * 50, room=10, max_new_tokens=40)
    assert (len(pieces), gen.limit) == (7, 7)
    # A prompt that fills the context still gives the token behind it.
    pieces, _, session = run("x", room=3)
    assert (len(pieces), session.calls) == (1, [[1, 2, 3]])


def test_no_tokens_wanted_no_token_evaluated():
    pieces, gen, session = run("x", max_new_tokens=0)
    assert (pieces, gen.finish_reason, session.calls) == ([], "length", [])


def test_ids_alone_need_no_tokenizer():
    session = Script([5, 6])
    gen = generate(session, np.array([1, 2]), sampler=greedy(), max_new_tokens=2)
    assert [(p.token, p.text) for p in gen] == [(5, ""), (6, "")]
    assert session.calls == [[1, 2], [5]]
    with pytest.raises(UsageError, match="stop strings need a tokenizer"):
        generate(Script([]), [1], sampler=greedy(), stop=["x"])


def test_the_sampler_sees_all_ids_so_far():
    seen = []

    def choose(logits, history):
        seen.append(history.tolist())
        return int(np.argmax(logits)), 0.0

    tokens = [5, 6, 7] * 800  # long enough for the buffer to grow
    session = Script(tokens, room=5000)
    list(generate(session, [1, 2], sampler=choose, history=[8, 9], max_new_tokens=len(tokens)))
    assert seen[:3] == [[8, 9, 1, 2], [8, 9, 1, 2, 5], [8, 9, 1, 2, 5, 6]]
    assert seen[-1] == [8, 9, 1, 2, *tokens[:-1]]


def test_a_prompt_longer_than_the_room_says_both_numbers():
    session = Script([1], room=2)
    with pytest.raises(MosaicError, match=r"has 3 tokens .* room for 2: .*--ctx") as caught:
        generate(session, [1, 2, 3], sampler=greedy())
    assert caught.value.code == "ECONTEXT"
    assert session.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "prompt is empty"),
        ({"ids": [1, -2]}, "ids: expected token ids >= 0"),
        ({"ids": [1.5]}, "ids: expected token ids"),
        ({"ids": ["a"]}, "ids: expected token ids"),
        ({"ids": [[1], [2]]}, "ids: expected token ids"),
        ({"ids": [[1], [2, 3]]}, "ids: expected token ids"),
        ({"ids": None}, "ids: expected token ids"),
        ({"ids": [2**70]}, "ids: expected token ids"),
        ({"ids": [True]}, "ids: expected token ids"),
        ({"history": [-1]}, "history: expected token ids"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ({"stop": [""]}, "stop: expected strings that are not empty"),
        ({"stop": ["a", 3]}, "stop: expected strings"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(options, message):
    session = Script([1])
    ids = options.pop("ids", [1])
    with pytest.raises(UsageError, match=message):
        generate(session, ids, sampler=greedy(), detokenizer=Letters(), **options)
    assert session.calls == []


def test_an_error_passes_through_and_leaves_no_reason():
    def broken(logits, history):
        raise MosaicError("no usable logits", "EDOM")

    gen = generate(Script([1]), [1], sampler=broken)
    with pytest.raises(MosaicError, match="no usable logits"):
        next(gen)
    assert gen.finish_reason is None
    gen = generate(Script([1, 2]), [1], sampler=greedy())
    next(gen)
    gen.close()
    assert list(gen) == []
    assert (gen.finish_reason, gen.tokens) == (None, [1])


# Text


def test_a_character_cut_by_the_limit_becomes_one_replacement():
    crab = list("a🦀b".encode())
    pieces, _, _ = run(crab, max_new_tokens=6)
    assert [p.text for p in pieces] == ["a", "", "", "", "🦀", "b"]
    pieces, gen, _ = run(crab, max_new_tokens=3)
    assert [p.text for p in pieces] == ["a", "", "\ufffd"]
    assert gen.finish_reason == "length"
    pieces, _, _ = run([*crab[:3], EOS], stop_ids={EOS})
    assert [p.text for p in pieces] == ["a", "", "", "\ufffd"]


def test_a_stop_string_never_shows():
    pieces, gen, session = run("one two END three", stop=["END"])
    assert text_of(pieces) == "one two "
    assert (gen.finish_reason, gen.stopped_by) == ("stop", "END")
    assert len(session.calls) == len("one two END")  # the prompt, then all but the last letter
    # Text that only began like one comes out as soon as that is clear.
    pieces, _, _ = run("aENxENDb", stop=["END"])
    assert [p.text for p in pieces] == ["a", "", "", "ENx", "", "", ""]
    # and at the end of the run.
    pieces, gen, _ = run("aEN", stop=["END"], max_new_tokens=3)
    assert ([p.text for p in pieces], gen.finish_reason) == (["a", "", "EN"], "length")
    pieces, _, _ = run([*b"aEN", EOS], stop=["END"], stop_ids={EOS})
    assert [p.text for p in pieces] == ["a", "", "", "EN"]


def test_a_stop_string_may_name_a_special_token():
    pieces, gen, _ = run([*b"hi", TAIL, *b"more"], stop=["<tail>"])
    assert (text_of(pieces), gen.stopped_by) == ("hi", "<tail>")
    pieces, gen, _ = run([*b"hi!", TAIL, *b"\nx"], stop=["!<tail>\n"])
    assert (text_of(pieces), gen.stopped_by) == ("hi", "!<tail>\n")
    pieces, _, _ = run([*b"hi!", TAIL, *b"-x"], stop=["!<tail>\n"], max_new_tokens=6)
    assert text_of(pieces) == "hi!-x"  # hidden text stays hidden when it was no match


def test_one_string_is_one_stop():
    assert run("hello", stop="lo")[1].stopped_by == "lo"


def test_the_unfinished_character_at_the_end_can_still_complete_a_stop():
    pieces, gen, _ = run([*b"a", 0xF0], stop=["a\ufffd"], max_new_tokens=2)
    assert (text_of(pieces), gen.stopped_by) == ("", "a\ufffd")


STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(parts=st.lists(st.text(alphabet="ab<", max_size=5), max_size=12), stops=STOPS)
def test_stop_strings_do_not_depend_on_how_text_is_cut(parts, stops):
    text = "".join(parts)
    # What is right, letter by letter: the first place where the text so far ends in a stop string.
    ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))]
    expected, matched = text, None
    if ends:
        so_far = text[: ends[0]]
        matched = max((s for s in stops if so_far.endswith(s)), key=len)
        expected = so_far.removesuffix(matched)
    watch = StopStrings(stops)
    out = ""
    for part in parts:
        out += watch.push(part)
        assert expected.startswith(out)
    out += watch.flush()
    assert (out, watch.matched) == (expected, matched)


@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet="ab<", max_size=12), stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    watch = StopStrings(stops)
    out = watch.push(text)
    if watch.matched is None:
        held = text[len(out) :]
        assert text.startswith(out)
        assert not held or any(stop.startswith(held) for stop in stops)
        longest = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
        assert len(held) == longest


def test_without_stops_nothing_is_held():
    watch = StopStrings()
    assert (watch.push("abc"), watch.push("x", shown=False), watch.flush()) == ("abc", "", "")


# Stop ids


@pytest.mark.parametrize(
    ("generation_config", "config", "eos", "expected"),
    [
        (None, None, None, set()),
        ({"eos_token_id": 5}, None, None, {5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {8}, {5, 6, 7, 8}),
        ({}, {"text_config": {"eos_token_id": [9]}, "eos_token_id": None}, {8}, {8, 9}),
        ({"eos_token_id": -1}, {"eos_token_id": 0}, None, {0}),
        ({"eos_token_id": None}, {"text_config": None}, set(), set()),
    ],
)
def test_stop_ids_are_the_union(generation_config, config, eos, expected):
    tokenizer = None if eos is None else SimpleNamespace(eos_ids=eos)
    found = stop_ids(generation_config, config, tokenizer)
    assert found == expected
    found.add(1)  # the tokenizer's own set must not be handed out
    assert eos is None or 1 not in eos


@pytest.mark.parametrize("bad", ["5", [5, "6"], 1.5, True, [[1]]])
def test_a_bad_eos_is_named(bad):
    for where, arguments in (
        ("generation_config", ({"eos_token_id": bad}, None)),
        ("config", (None, {"eos_token_id": bad})),
        ("config.text_config", (None, {"text_config": {"eos_token_id": bad}})),
    ):
        with pytest.raises(MosaicError, match=f"{where}: eos_token_id: expected") as caught:
            stop_ids(*arguments)
        assert caught.value.code == "EFORMAT"
