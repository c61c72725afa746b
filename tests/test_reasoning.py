"""Reasoning parted from the answer: whatever the cuts, whatever the marks are, and whatever a model says."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talking import TEMPLATE, write_tokenizer

from mosaic_c.reasoning import CONTENT, REASONING, Mark, Markers, Reasoning, ends_inside
from mosaic_c.tokenizer import Detokenizer, Tokenizer

THINK, END, CALL = 1, 2, 3  # ids of marks; 0 is any other token


@dataclass
class Piece:
    text: str
    token: int = 0


ORDINARY = Markers(Mark("<think>"), Mark("</think>"), (Mark("<tool_call>"),))
VISIBLE = Markers(Mark("<think>", THINK), Mark("</think>", END), (Mark("<tool_call>", CALL),))
HIDDEN = Markers(
    Mark("<think>", THINK, True), Mark("</think>", END, True), (Mark("<tool_call>", CALL, True),)
)
IDS = {"<think>": THINK, "</think>": END, "<tool_call>": CALL}
KINDS = {"ordinary": ORDINARY, "visible": VISIBLE, "hidden": HIDDEN}


def pieces(parts, kind):
    """Marks among parts as this kind of vocabulary gives them."""
    for part in parts:
        if part in IDS and kind == "hidden":
            yield Piece("", IDS[part])
        else:
            yield Piece(part, IDS.get(part, 0) if kind == "visible" else 0)


def split(pieces, markers, inside=False):
    r = Reasoning(markers, inside)
    out = [p for piece in pieces for p in r.push(piece)] + r.finish()
    assert all(text for _, text in out)
    said = {kind: "".join(t for k, t in out if k == kind) for kind in (REASONING, CONTENT)}
    return said[REASONING].strip(), said[CONTENT], r


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("parts", "inside", "want"),
    [
        (["<think>", "\nhm\n", "</think>", "\n\nYes."], False, ("hm", "Yes.")),
        (["hm\n", "</think>", "\n\nYes. \n"], True, ("hm", "Yes. \n")),
        (["\n ", "<think>", "hm", "</think>", "Yes"], False, ("hm", "Yes")),
        ([" Yes."], False, ("", " Yes.")),
        (["never ends\n"], True, ("never ends", "")),
        (["<think>", "never ends"], False, ("never ends", "")),
        (["<think>", "\n\n", "</think>", "\n\n", "Yes"], False, ("", "Yes")),
        (["<think>", "a", "</think>", "<think>", "b", "</think>", "c"], False, ("ab", "c")),
        ([], True, ("", "")),
    ],
    ids=str,
)  # fmt: skip
def test_examples(kind, parts, inside, want):
    assert split(pieces(parts, kind), KINDS[kind], inside)[:2] == want


def test_whether_thinking_ended():
    assert not split(pieces(["hm"], "visible"), VISIBLE, True)[2].closed
    assert split(pieces(["hm", "</think>"], "visible"), VISIBLE, True)[2].closed
    assert split(pieces(["hm"], "visible"), VISIBLE)[2].closed


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_call_ends_thinking(kind):
    parts = ["<think>", "let me look\n", "<tool_call>", '\n{"name": "f"}', "</tool_call>"]
    call = "" if kind == "hidden" else "<tool_call>"
    want = call + '\n{"name": "f"}</tool_call>' if call else '{"name": "f"}</tool_call>'
    assert split(pieces(parts, kind), KINDS[kind])[:2] == ("let me look", want)


def test_a_model_that_writes_about_marks():
    """Where marks are tokens, only those tokens count; after the answer began, nothing reopens thinking."""
    spelled = [Piece("I see "), Piece("</th"), Piece("ink> here"), Piece("</think>", END)]
    assert split(spelled, VISIBLE, True)[:2] == ("I see </think> here", "")
    assert split([Piece("Write <think> first.")], ORDINARY)[1] == "Write <think> first."
    assert (
        split([Piece("Write "), Piece("<think>", THINK), Piece(" x")], VISIBLE)[1]
        == "Write <think> x"
    )
    assert split([Piece("a </think> b")], ORDINARY)[1] == "a </think> b"


def test_text_behind_its_token():
    """Stop strings hold text back: the text of a mark may come with a later token."""
    late = [Piece("hm"), Piece("", END), Piece("</think>Yes")]
    assert split(late, VISIBLE, True)[:2] == ("hm", "Yes")


def test_a_model_without_marks_says_only_content():
    assert split([Piece("<think>a</think> b")], Markers())[1] == "<think>a</think> b"


TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "<", "</", "think>", " ", "\n", "a", "b <", "é", "<tool"]
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.booleans(), st.lists(st.integers(1, 40), max_size=12))
def test_cuts_change_nothing(parts, inside, cuts):
    text = "".join(parts)
    whole = split([Piece(text)], ORDINARY, inside)
    at = [0, *sorted({c for c in cuts if c < len(text)}), len(text)]
    cut = [Piece(text[a:b]) for a, b in zip(at, at[1:], strict=False)]
    assert split(cut, ORDINARY, inside)[:2] == whole[:2]
    assert split([Piece(c) for c in text], ORDINARY, inside)[:2] == whole[:2]


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.booleans(), st.sampled_from(sorted(KINDS)))
def test_nothing_is_lost_but_marks_and_space(parts, inside, kind):
    given = list(pieces(parts, kind))
    r = Reasoning(KINDS[kind], inside)
    out = "".join(t for p in given for _, t in r.push(p)) + "".join(t for _, t in r.finish())
    text = "".join(p.text for p in given)
    left = iter(text)
    assert all(c in left for c in out)  # in the same order
    assert [c for c in out if c in "bé"] == [c for c in text if c in "bé"]  # in no mark


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.text(max_size=6)), max_size=20), st.booleans())
def test_any_output_is_taken(given, inside):
    for markers in (*KINDS.values(), Markers()):
        split([Piece(text, token) for token, text in given], markers, inside)


# ---- of a checkpoint ----


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    made = {}
    for kind in ("visible", "hidden"):
        made[kind] = write_tokenizer(tmp_path_factory.mktemp(kind), special=kind == "hidden")
    return made


@pytest.mark.parametrize("kind", ["visible", "hidden"])
def test_marks_of_a_checkpoint(tokenizers, kind):
    tok = tokenizers[kind]
    markers = Markers.of(tok)
    assert markers == Markers.of(tok, TEMPLATE)
    assert markers.start == Mark("<think>", tok.token_id("<think>"), kind == "hidden")
    assert [m.text for m in markers.calls] == ["<tool_call>"]
    ids = tok.encode("<think>so\n</think>\n\nfine<|im_end|>")
    detok = Detokenizer(tok)
    said = split([Piece(detok.add(i), i) for i in ids], markers)
    assert said[:2] == ("so", "fine")


def test_marks_that_only_a_template_or_a_vocabulary_has(tokenizers, tmp_path):
    tok = tokenizers["visible"]
    assert Markers.of(tok, "{{ '[THINK]' }}{{ '[/THINK]' }}").start == Mark("[THINK]")
    assert Markers.of(tok, "no marks here").end.text == "</think>"


@pytest.mark.parametrize("kind", ["visible", "hidden"])
def test_whether_the_prompt_leaves_thinking_open(tokenizers, kind):
    tok = tokenizers[kind]
    markers = Markers.of(tok)
    for prompt, inside in (
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
    ):
        assert ends_inside(tok, markers, tok.encode(prompt)) == inside
        ordinary = Markers(Mark("<think>"), Mark("</think>"))
        assert ends_inside(tok, ordinary, tok.encode(prompt)) == inside
    assert not ends_inside(tok, Markers(), tok.encode("<think>"))
    # a question that spells the mark opens nothing
    plain = tok.encode("what is <think>?", specials=False)
    assert not ends_inside(tok, markers, plain)
