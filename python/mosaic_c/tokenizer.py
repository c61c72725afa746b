"""A checkpoint's own tokenizer, read from its folder, and text that arrives one token at a time.

Owns: tokenizer.json (required), tokenizer_config.json and special_tokens_map.json (optional).
Promises: ids equal those of transformers' PreTrainedTokenizerFast over the same folder; with
specials=False no text becomes an added token by spelling it; a Detokenizer never emits part of a
character. Knows nothing of models, sampling or chat templates. The `tokenizers` library is imported
on first use only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import MosaicError, UsageError
from .jsonfile import show, shown_path

REPLACEMENT = "\ufffd"
_NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


class Tokenizer:
    """The tokenizer of one checkpoint folder. Immutable after construction.

    Raises MosaicError: ENOENT without tokenizer.json, EFORMAT for a file that does not parse.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tok = _load(self.folder / "tokenizer.json")
        config = _read_json(self.folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            # Older folders keep the named tokens here; transformers lets the file win in this case
            # only.
            config = {**config, **_read_json(self.folder / "special_tokens_map.json")}
        self.variables = _named_tokens(config)
        self._add_missing(config)
        self.config = config
        self._added = self._tok.get_added_tokens_decoder()

    def _add_missing(self, config: Mapping[str, Any]) -> None:
        """Adds the tokens that only the config names, in transformers' order, so that ids agree."""
        from tokenizers import AddedToken

        present = self._tok.get_added_tokens_decoder().values()
        known = {repr(token) for token in present}
        texts = {token.content for token in present}
        missing: list[AddedToken] = []
        try:
            declared = {
                int(i): AddedToken(**t) for i, t in config.get("added_tokens_decoder", {}).items()
            }
        except (AttributeError, TypeError, ValueError):
            raise MosaicError(
                f"{shown_path(self.folder / 'tokenizer_config.json')}: added_tokens_decoder: expected token ids, "
                f"each with the fields of an AddedToken, got {show(config['added_tokens_decoder'])}",
                "EFORMAT",
            ) from None
        for _, token in sorted(declared.items()):
            if repr(token) not in known:
                missing.append(token)
                texts.add(token.content)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        extra = map(_text, extra if isinstance(extra, list) else [])
        for text in (*self.variables.values(), *extra):
            if text and text not in texts:
                missing.append(AddedToken(text, special=True))
                texts.add(text)
        for token in missing:  # one by one: the order gives the ids
            add = self._tok.add_special_tokens if token.special else self._tok.add_tokens
            add([token])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model may have more rows (padding)."""
        return self._tok.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: those that decode() leaves out with skip_special."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @cached_property
    def control(self) -> dict[str, bool]:
        """Text of each added token that plain text must never become -> is it marked special?

        Turn and tool markers are often not marked special (DeepSeek's role tokens, Qwen's
        tool_call), so every added token counts, save white space and single characters: those are
        ordinary text that forges nothing.
        """
        return {
            t.content: t.special
            for t in self._added.values()
            if len(t.content) > 1 and t.content.strip()
        }

    @cached_property
    def eos_ids(self) -> set[int]:
        """Id of tokenizer_config's eos_token, as a set; empty when it names none."""
        token = self.token_id(self.variables.get("eos_token", ""))
        return set() if token is None else {token}

    @cached_property
    def byte_fallback(self) -> bool:
        """Whether unknown characters are spelled by byte tokens, which the decoder joins."""
        decoder = self._tok.decoder
        return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

    def token_id(self, text: str) -> int | None:
        """Id of the token that is spelled exactly so in the vocabulary, or None."""
        return self._tok.token_to_id(text)

    def token_text(self, token: int) -> str | None:
        """The vocabulary's spelling of an id (unreadable in byte-level vocabularies), or None."""
        try:
            return self._tok.id_to_token(int(token))
        except (OverflowError, TypeError):
            return None

    def normalize(self, text: str) -> str:
        """Text as the tokenizer's normalizer leaves it (NFC and the like)."""
        normalizer = self._tok.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def encode(self, text: str, specials: bool = True, *, bos: bool = True) -> list[int]:
        """Token ids of text.

        specials=True: text of added tokens becomes those tokens, and tokenizer.json's
        post-processor decides whether a bos is put in front; bos=False leaves the post-processor's
        tokens out (text that a chat template made). specials=False: everything is plain text, there
        is no bos, and what spells an added token gives ordinary tokens. Raises MosaicError EILSEQ
        for text that is not valid Unicode.
        """
        check_text(text)
        if specials:
            return self._tok.encode(text, add_special_tokens=bos).ids
        return self._encode_plain(text, at_start=True)

    def encode_masked(self, text: str, unmask: Mapping[int, str]) -> list[int]:
        """Token ids of text in which some characters stand for others: code point -> the character
        it hides.

        Added tokens are recognised in the text as it is given, so never in hidden characters;
        everything between them is then tokenized in one piece, with the hidden characters put back.
        Ids therefore equal those of the unhidden text wherever no added token was hidden.
        """
        check_text(text)
        encoding = self._tok.encode(text, add_special_tokens=False)
        ids: list[int] = []
        run: list[int] = []
        run_start = 0

        def end_run(run_end: int) -> None:
            shown = text[run_start:run_end]
            plain = shown.translate(unmask)
            ids.extend(
                run if plain == shown else self._encode_plain(plain, at_start=run_start == 0)
            )
            run.clear()

        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._spelled(token, text[start:end]):
                end_run(start)
                ids.append(token)
                run_start = end
            else:
                run.append(token)
        end_run(len(text))
        return ids

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each place in text that encode() turns into a control token."""
        encoding = self._tok.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [
            (start, end)
            for token, (start, end) in pairs
            if self._spelled(token, text[start:end]) and self._added[token].content in self.control
        ]

    def _spelled(self, token: int, text: str) -> bool:
        """Is token an added one that text spells? (An unknown-character token is not.)"""
        content = self._added[token].content if token in self._added else None
        return content is not None and (content in text or content in self.normalize(text))

    def _encode_plain(self, text: str, at_start: bool) -> list[int]:
        """The tokenizer's own stages on text, without the one that looks for added tokens.

        at_start: whether text begins the sequence. SentencePiece-style tokenizers put a space
        before the first piece only, so a later piece is run behind a stand-in letter whose tokens
        are dropped.
        """
        from tokenizers import PreTokenizedString

        lead = "" if at_start else "a"
        pieces = PreTokenizedString(lead + text)
        if lead:
            pieces.split(lambda _, whole: [whole[:1], whole[1:]])
        if self._tok.normalizer is not None:
            pieces.normalize(self._tok.normalizer.normalize)
        if self._tok.pre_tokenizer is not None:
            self._tok.pre_tokenizer.pre_tokenize(pieces)
        pieces.tokenize(self._tokens)
        splits = pieces.get_splits("original", "char")
        return [
            t.id for _, (start, _), tokens in splits if start >= len(lead) for t in tokens or ()
        ]

    def _tokens(self, piece: str) -> list[Any]:
        """The model's tokens of one piece, cut further where the vocabulary has a control token."""
        tokens = self._tok.model.tokenize(piece)
        for token in tokens:
            # By text, not by id: an unknown-character token is not what it stands for and may stay.
            if token.value in self.control and (cut := piece.find(token.value) + 1):
                return self._tokens(piece[:cut]) + self._tokens(piece[cut:])
        return tokens

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids. Ids the tokenizer does not know (padding rows of the model) give no text.

        Malformed UTF-8 gives U+FFFD. Raises UsageError for an id that is negative or not an
        integer.
        """
        try:
            return self._tok.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        except (OverflowError, TypeError, ValueError) as e:
            raise UsageError(
                f"token ids: expected integers from 0 to {self.vocab_size - 1}: {e}"
            ) from None


# Encoding takes about 250 bytes of memory a character: a text that cannot fit is found out in pieces.
_PIECE = 1 << 16
_LOST = 8  # tokens that a cut in the text may add


def encode_within(tokenizer: Tokenizer, text: str, room: int) -> list[int]:
    """encode(text), or a MosaicError ECONTEXT, in bounded memory, for a text of more than room tokens."""
    check_fits(tokenizer, text, room)
    return tokenizer.encode(text)


def check_fits(tokenizer: Tokenizer, text: str, room: int) -> None:
    """Refuses a long text that surely has more than room tokens, before it is encoded as a whole."""
    if len(text) <= _PIECE:
        return
    count = 0
    for at in range(0, len(text), _PIECE):
        count += max(len(tokenizer.encode(text[at : at + _PIECE], bos=False)) - _LOST, 0)
        if count > room:
            raise MosaicError(
                f"the prompt has more than {count} tokens in its first {at + _PIECE} characters and the "
                f"context has room for {room}: shorten it or use a larger context (--ctx)",
                "ECONTEXT",
            )


class Detokenizer:
    """Text of a growing sequence of ids, in whole characters, at constant cost a token.

    add() returns the text that became certain; bytes of an unfinished character are held until it
    is complete. finish() ends the sequence: an unfinished character becomes one U+FFFD. All that
    was returned, joined, is then decode(prefix_ids + ids) less the text of prefix_ids.
    (Vocabularies with byte fallback: for well-formed text; how many U+FFFD stand for malformed
    bytes may differ.)

    prefix_ids: what came before, so that the first word keeps its leading space in SentencePiece
    vocabularies.
    """

    # Only the last few tokens are decoded again. Every token that gives text has a byte or more and
    # a character has four at most, so behind 4 tokens a decoder is in step again wherever it
    # started.
    _CONTEXT = 4
    _LIMIT = 12

    def __init__(
        self, tokenizer: Tokenizer, prefix_ids: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self._window: list[int] = []
        for token in reversed(prefix_ids):
            if not self._is_text(token):
                continue
            self._window.insert(0, int(token))
            clean = not self._text().startswith(REPLACEMENT)
            if (clean and len(self._window) >= 2) or len(self._window) == self._LIMIT:
                break
        self._clean = 0  # tokens at the window's front that were complete text at the last cut
        self._sent = self._settled(self._text())  # characters of the window that are already out
        self._pending = False  # do characters wait that tokens given to add() began?

    def add(self, token: int) -> str:
        """Takes the next id; returns the new text: "" within a character and for special tokens."""
        if not self._is_text(token):
            return ""
        self._window.append(int(token))
        text = self._text()
        end = self._settled(text)
        # No character takes this many tokens: these are malformed bytes, and the window must not
        # grow with them.
        stuck = end < len(text) and len(self._window) - self._clean >= self._LIMIT
        if stuck:
            end = len(text) - 1
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        self._pending = self._sent < len(text)
        if stuck:
            del self._window[: -self._CONTEXT]
            self._clean, self._sent = 0, len(self._text()) - 1
        elif not self._pending:
            # The window now begins where the text was last complete, so it decodes as the whole
            # would.
            del self._window[: self._clean]
            self._clean, self._sent = len(self._window), len(self._text())
        return new

    def finish(self) -> str:
        """Ends the text: "" or one U+FFFD for a character that never became complete."""
        held = REPLACEMENT if self._pending else ""
        self._window, self._clean, self._sent, self._pending = [], 0, 0, False
        return held

    def hidden(self, token: int) -> str:
        """Text of a special token that add() leaves out, else "": stop strings must see it."""
        if self.skip_special and token in self.tokenizer.special_ids:
            return self.tokenizer.token_text(token) or ""
        return ""

    def _is_text(self, token: int) -> bool:
        if self.skip_special and token in self.tokenizer.special_ids:
            return False
        return self.tokenizer.token_text(token) is not None

    def _text(self) -> str:
        return self.tokenizer.decode(self._window, self.skip_special)

    def _settled(self, text: str) -> int:
        """How many characters of the window's text later bytes cannot change."""
        if not text.endswith(REPLACEMENT):
            return len(text)
        # A lossy byte-level decoder turns an unfinished character into exactly one U+FFFD; a
        # byte-fallback one turns each byte of the run into one as long as the run is malformed.
        return len(text.rstrip(REPLACEMENT)) if self.tokenizer.byte_fallback else len(text) - 1


def _load(path: Path) -> Any:
    import tokenizers

    if not path.is_file():
        raise MosaicError(
            f"no tokenizer.json in {shown_path(path.parent)}: text needs one (token ids work "
            "without it); copy it from the model's repository",
            "ENOENT",
        )
    try:
        tok = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except (
        BaseException
    ) as e:  # a panic in the library is a BaseException and must not take the process down
        raise MosaicError(
            f"{shown_path(path)}: not a tokenizer the tokenizers library reads: {e}", "EFORMAT"
        ) from None
    # A file may ask for padding or for cutting long text; a prompt must be neither.
    tok.no_truncation()
    tok.no_padding()
    return tok


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file; {} when the file is absent."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise MosaicError(f"{path}: expected a JSON object: {e}", "EFORMAT") from None
    if not isinstance(value, dict):
        raise MosaicError(f"{path}: expected a JSON object, got {type(value).__name__}", "EFORMAT")
    return value


def _text(token: Any) -> str | None:
    """A token as configs write it: a string, or an object with its text under "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The variables a chat template sees: bos_token, eos_token and all else named a token."""
    found = {key: _text(config[key]) for key in _NAMED if key in config}
    for key, value in config.items():
        if key.endswith("_token") and key not in _NAMED and isinstance(value, str):
            found[key] = value
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found.update({key: _text(value) for key, value in extra.items()})
    return {key: value for key, value in found.items() if value is not None}


def check_text(text: str) -> None:
    """Raises MosaicError EILSEQ for text with no UTF-8 form, UsageError for what is not text."""
    if not isinstance(text, str):
        raise UsageError(f"text: expected a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        what = f"a lone surrogate (U+{ord(text[e.start]):04X}) at character {e.start}"
        raise MosaicError(
            f"text is not valid Unicode: {what}; remove it or decode the input as UTF-8", "EILSEQ"
        ) from None
