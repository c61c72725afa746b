"""Log-probabilities as the protocol shows them: the text and the bytes of single tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mosaic_c.server.body import dumps
from mosaic_c.tokenizer import REPLACEMENT

if TYPE_CHECKING:
    from mosaic_c.generation import Piece
    from mosaic_c.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI writes for a probability of nothing: JSON has no infinity
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for: whole characters, or a part of one."""
    text = tokenizer.decode([token], skip_special=False)
    if REPLACEMENT not in text:
        return text.encode("utf-8")
    spelled = tokenizer.token_text(token) or ""
    fallback = _BYTE.fullmatch(spelled)
    if fallback:
        return bytes([int(fallback[1], 16)])
    alphabet = _alphabet()
    if all(c in alphabet for c in spelled):
        return bytes(alphabet[c] for c in spelled)
    return text.encode("utf-8")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: printable ones are themselves, the others get
    characters from U+0100 on, in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    out = {chr(b): b for b in own}
    rest = [b for b in range(256) if chr(b) not in out]
    return out | {chr(0x100 + n): b for n, b in enumerate(rest)}


def token_name(raw: bytes) -> str:
    """A token as text; a part of a character is spelled as its bytes, since text cannot hold it."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = token_bytes(tokenizer, token)
    return {"token": token_name(raw), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def chat_entry(tokenizer: Tokenizer, piece: Piece) -> dict[str, Any]:
    """An entry of logprobs.content."""
    top = [entry(tokenizer, token, logprob) for token, logprob in piece.top]
    return {**entry(tokenizer, piece.token, piece.logprob), "top_logprobs": top}


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def text_entry(tokenizer: Tokenizer, piece: Piece, offset: int) -> str:
    """A token's part of each of the parallel arrays of /v1/completions, one a line. (JSON has no line ends within.)"""
    top: dict[str, float] = {}
    for token, logprob in piece.top:  # two tokens may have one name: the likelier one stays
        top.setdefault(token_name(token_bytes(tokenizer, token)), max(logprob, LOWEST))
    name = token_name(token_bytes(tokenizer, piece.token))
    return "\n".join(map(dumps, (name, max(piece.logprob, LOWEST), top, offset)))


def text_lists(entries: list[str]) -> str:
    """These arrays, as JSON."""
    columns = zip(*(e.split("\n") for e in entries), strict=True) if entries else [()] * 4
    lists = (f'"{key}":[{",".join(c)}]' for key, c in zip(_LISTS, columns, strict=True))
    return f"{{{','.join(lists)}}}"
