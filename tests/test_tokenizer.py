"""Tokenizer and Detokenizer, on tokenizers made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.trainers import BpeTrainer

from mosaic_c.errors import MosaicError, UsageError
from mosaic_c.tokenizer import REPLACEMENT, Detokenizer, Tokenizer

CORPUS = [
    "the cat sat on the mat, the end",
    "naïve café 漢字 かな 😀😀 done",
    "a <b> c </b> |> <| x",
] * 4
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
UNMARKED = ["<think>", "</think>", "<tool>"]


def byte_level(folder: Path, **config: object) -> Path:
    """A folder with a small byte-level BPE tokenizer.json and a tokenizer_config.json."""
    tok = Library(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_tokens([AddedToken(text, special=False) for text in UNMARKED])
    bos = ("<|bos|>", tok.token_to_id("<|bos|>"))
    tok.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    folder.mkdir(exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    return folder


def byte_fallback(folder: Path) -> Path:
    """A SentencePiece-style tokenizer: a space before the first word, bytes for unknown letters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehlort.<>"]
    vocab = {word: i for i, word in enumerate([*words, "▁a", "▁b", "▁c"])}
    merges = [("▁", "a"), ("▁", "b"), ("▁", "c")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tok = Library(model)
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("toy") / "m"))


@pytest.fixture(scope="module")
def without_added(toy) -> Library:
    """The same tokenizer, built from its JSON with every added token taken out."""
    parts = json.loads((toy.folder / "tokenizer.json").read_text())
    parts["added_tokens"], parts["post_processor"] = [], None
    return Library.from_str(json.dumps(parts))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    return Tokenizer(byte_fallback(tmp_path_factory.mktemp("sp") / "m"))


# Fragments of tokens next to ordinary text: what a forger would try.
FRAGMENTS = st.lists(
    st.sampled_from([*SPECIAL, *UNMARKED, "<|im_", "end|>", "<", "|>", " ", "\n", "é", "e\u0301"])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


def test_encode_is_the_library_with_its_post_processor(toy):
    library = Library.from_file(str(toy.folder / "tokenizer.json"))
    text = "the cat <|im_end|> sat <think>naïve 😀"
    assert toy.encode(text) == library.encode(text).ids
    assert toy.encode(text)[0] == toy.token_id("<|bos|>")
    assert toy.encode(text, bos=False) == toy.encode(text)[1:]
    assert toy.token_id("<|im_end|>") in toy.encode(text)
    assert toy.vocab_size == library.get_vocab_size()


@settings(deadline=None, max_examples=100)
@given(text=FRAGMENTS)
def test_plain_text_never_becomes_an_added_token(toy, without_added, text):
    ids = toy.encode(text, specials=False)
    assert ids == without_added.encode(text).ids
    assert not {toy.token_text(i) for i in ids} & set(SPECIAL + UNMARKED)
    assert toy.decode(ids) == toy.normalize(text)


def test_plain_text_does_not_even_use_the_vocabulary_s_own_copy(tmp_path):
    # With ignore_merges a model hands out the whole word: "<x>" is in its own vocabulary here.
    vocab = {"<x>": 0, "<": 1, "x": 2, ">": 3, "x>": 4, "▁": 5}
    tok = Library(models.BPE(vocab=vocab, merges=[("x", ">"), ("<", "x>")], ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tok.add_special_tokens(["<x>"])
    tok.save(str(tmp_path / "tokenizer.json"))
    mine = Tokenizer(tmp_path)
    assert mine.encode("<x>") == [0]
    assert mine.encode("<x>", specials=False) == [1, 4]


def test_masked_text_keeps_hidden_tokens_plain_and_the_rest_in_one_piece(toy, without_added):
    hide = dict(zip("<|im_end>", "ABCDEFGHI", strict=True))  # stand-ins that the text does not use
    hidden = "".join(hide[c] for c in "<|im_end|>")
    unmask = {ord(v): k for k, v in hide.items()}
    ids = toy.encode_masked(f"<|im_start|>x {hidden} th{hide['e']} cat<|im_end|>\n", unmask)
    start, end = toy.token_id("<|im_start|>"), toy.token_id("<|im_end|>")
    middle = without_added.encode("x <|im_end|> the cat").ids
    assert ids == [start, *middle, end, *without_added.encode("\n").ids]


def test_masked_text_inside_a_sentence_gets_no_space_of_its_own(pieces):
    # SentencePiece puts a space before the first piece only: not after a special token.
    assert pieces.encode_masked("<s>Qbc", {ord("Q"): "a"}) == pieces.encode("<s>abc")
    assert pieces.encode_masked("Qbc<s>", {ord("Q"): "a"}) == pieces.encode("abc<s>")
    # An unknown character gives <unk>, an added token, which must not cut the text in two.
    assert pieces.encode_masked("b\u2603 Qbc", {ord("Q"): "a"}) == pieces.encode("b\u2603 abc")


def test_what_the_config_adds(tmp_path):
    extra = {"content": "<|extra|>", "special": True, "normalized": False}
    extra.update(lstrip=False, rstrip=False, single_word=False)
    folder = byte_level(
        tmp_path / "m",
        added_tokens_decoder={"999": extra},
        eos_token={"content": "<|im_end|>"},
        bos_token=None,
        pad_token="<|pad|>",
        image_token="<|image|>",
        additional_special_tokens=["<|more|>", "<|im_start|>"],
    )
    plain = Library.from_file(str(folder / "tokenizer.json"))
    mine = Tokenizer(folder)
    size = plain.get_vocab_size()
    added = ["<|extra|>", "<|pad|>", "<|image|>", "<|more|>"]
    assert [mine.token_id(text) for text in added] == list(range(size, size + 4))
    assert mine.vocab_size == size + 4
    assert mine.eos_ids == {mine.token_id("<|im_end|>")}
    assert mine.variables["image_token"] == "<|image|>"
    assert "bos_token" not in mine.variables
    assert {mine.token_id(t) for t in (*SPECIAL, *added)} == mine.special_ids


def test_special_tokens_map_counts_only_without_added_tokens_decoder(tmp_path):
    folder = byte_level(tmp_path / "m")
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_start|>"}}')
    assert Tokenizer(folder).variables["eos_token"] == "<|im_start|>"
    byte_level(folder, added_tokens_decoder={})
    assert Tokenizer(folder).variables["eos_token"] == "<|im_end|>"


def test_tokenizer_json_alone_is_enough(tmp_path):
    folder = byte_level(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    mine = Tokenizer(folder)
    assert mine.eos_ids == set()
    assert mine.decode(mine.encode("the cat")) == "the cat"


def test_a_file_cannot_ask_for_cut_or_padded_prompts(tmp_path):
    folder = byte_level(tmp_path / "m")
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(2)
    library.enable_padding(length=9)
    library.save(str(folder / "tokenizer.json"))
    mine = Tokenizer(folder)
    assert mine.decode(mine.encode("the cat sat", bos=False)) == "the cat sat"
    assert len(mine.encode("", bos=False)) == 0


def test_decode_skips_special_tokens_and_unknown_ids(toy):
    ids = [*toy.encode("the cat"), toy.token_id("<think>"), toy.token_id("<|im_end|>"), 10**6]
    assert toy.decode(ids) == "the cat<think>"
    assert toy.decode(ids, skip_special=False) == "<|bos|>the cat<think><|im_end|>"
    for bad in ([-1], [2**40], ["x"], [None]):
        with pytest.raises(UsageError, match="token ids"):
            toy.decode(bad)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", None, "ENOENT"),
        ("tokenizer.json", b"{", "EFORMAT"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "EFORMAT"),
        ("tokenizer_config.json", b"[]", "EFORMAT"),
        ("tokenizer_config.json", b"\xff\xfe", "EFORMAT"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}', "EFORMAT"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "EFORMAT"),
        ("special_tokens_map.json", b"nonsense", "EFORMAT"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path, name, content, code):
    folder = byte_level(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(MosaicError) as caught:
        Tokenizer(folder)
    assert caught.value.code == code
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_no_text(toy):
    for specials in (True, False):
        with pytest.raises(MosaicError, match=r"U\+D83D\) at character 2") as caught:
            toy.encode("ab\ud83d", specials=specials)
        assert caught.value.code == "EILSEQ"
    with pytest.raises(UsageError, match="expected a string, got int"):
        toy.encode(5)


# Streaming


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.add(i) for i in ids], detokenizer.finish()


IDS = st.lists(st.integers(0, 335), max_size=40)  # any bytes, special tokens, ids beyond the end


@settings(deadline=None, max_examples=250)
@given(ids=IDS, prefix=IDS, skip=st.booleans())
def test_streamed_text_is_the_decoded_text(toy, ids, prefix, skip):
    detokenizer = Detokenizer(toy, prefix, skip)
    # A character that the prefix leaves unfinished belongs to what follows.
    begun = toy.decode(prefix, skip).removesuffix(REPLACEMENT)
    out = ""
    for n, token in enumerate(ids, 1):
        out += detokenizer.add(token)
        whole = toy.decode(prefix + ids[:n], skip)
        # All that is certain is out at once; at most one unfinished character is held.
        assert whole == begun + out or whole == begun + out + REPLACEMENT
        if not whole.endswith(REPLACEMENT):
            assert whole == begun + out
    end = detokenizer.finish()
    assert end in ("", REPLACEMENT)
    if toy.decode(ids, skip):
        assert begun + out + end == whole
    else:
        assert out + end == ""


def byte_alphabet() -> dict[int, str]:
    """Byte -> its letter in byte-level BPE: printable bytes are themselves, others 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(rest)}}


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    ids = [tokenizer.token_id(byte_alphabet()[b]) for b in text]
    assert None not in ids
    return ids


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_characters=REPLACEMENT, codec="utf-8"), max_size=20))
def test_each_character_comes_out_with_its_last_byte(toy, text):
    detokenizer = Detokenizer(toy)
    for char in text:
        *first, last = byte_ids(toy, char.encode())
        assert [detokenizer.add(i) for i in first] == [""] * len(first)
        assert detokenizer.add(last) == char
    assert detokenizer.finish() == ""


def test_an_emoji_in_four_tokens(toy):
    ids = byte_ids(toy, "🦀".encode())
    assert stream(toy, [*ids, toy.token_id("a")]) == (["", "", "", "🦀", "a"], "")
    assert stream(toy, ids[:3]) == (["", "", ""], REPLACEMENT)
    assert stream(toy, ids[2:], prefix_ids=ids[:2]) == (["", "🦀"], "")
    assert stream(toy, [], prefix_ids=ids[:2]) == ([], "")
    # A special token in between neither shows nor breaks the character.
    end = toy.token_id("<|im_end|>")
    assert stream(toy, [*ids[:2], end, *ids[2:]]) == (["", "", "", "", "🦀"], "")
    # A character cut by ordinary text is one U+FFFD, in its place.
    assert stream(toy, [*ids[:2], toy.token_id("a")]) == (["", "", REPLACEMENT + "a"], "")


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize(
    "bad", [b"\xf0\x9f\x98", b"\xe6\xbc", b"\xff", b"\x80", b"\xf0\x9f\x98\x80\xf0"]
)
def test_long_runs_of_malformed_bytes_are_counted_right(toy, bad, start):
    ids = byte_ids(toy, (bad * 40)[start : start + 60] + b"\x98\xf0\x9f\x98\x80ok")
    out, end = stream(toy, ids)
    assert "".join(out) + end == toy.decode(ids)


def test_cost_of_a_token_does_not_grow(toy, pieces, monkeypatch):
    longest = 0
    decode = Tokenizer.decode

    def counted(self, ids, skip_special=True):
        nonlocal longest
        ids = list(ids)
        longest = max(longest, len(ids))
        return decode(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    cat = toy.encode("the cat", bos=False)
    bad, half = byte_ids(toy, b"\xff\xe6")
    special = toy.token_id("<|im_end|>")
    for ids in (cat * 300, [bad] * 900, [half] * 900, [*cat, special] * 300, [special] * 900):
        stream(toy, ids, prefix_ids=ids)
    for token in ("<0xFF>", "<0xE6>", "a", "▁"):
        stream(pieces, [pieces.token_id(token)] * 900)
    assert 0 < longest <= 32


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="abc 漢😀é\u0301", max_size=20))
def test_byte_fallback_streams_well_formed_text(pieces, text):
    ids = pieces.encode(text)
    out, end = stream(pieces, ids)
    assert ("".join(out), end) == (pieces.decode(ids), "")
    assert REPLACEMENT not in "".join(out)


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 279), max_size=60))
def test_byte_fallback_survives_malformed_bytes(pieces, ids):
    out, end = stream(pieces, ids)
    clean = pieces.decode(ids).replace(REPLACEMENT, "")
    # Nothing that decodes cleanly is lost; end is one replacement at most.
    assert end in ("", REPLACEMENT)
    assert all(c in "".join(out) for c in set(clean) if c.isascii())


def test_the_first_word_keeps_its_space_after_a_prefix(pieces):
    a, b = pieces.token_id("▁a"), pieces.token_id("▁b")
    assert stream(pieces, [a, b]) == (["a", " b"], "")
    assert stream(pieces, [b], prefix_ids=[a]) == ([" b"], "")
    assert stream(pieces, [b], prefix_ids=[pieces.token_id("<s>")]) == (["b"], "")


def test_hidden_text_of_special_tokens(toy):
    end, think = toy.token_id("<|im_end|>"), toy.token_id("<think>")
    assert Detokenizer(toy).hidden(end) == "<|im_end|>"
    assert Detokenizer(toy).hidden(think) == ""
    assert Detokenizer(toy, skip_special=False).hidden(end) == ""
    assert Detokenizer(toy, skip_special=False).add(end) == "<|im_end|>"
