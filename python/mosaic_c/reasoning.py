"""Splits what a model says into its reasoning and its answer, by the markers of its chat template.

Owns: which markers a checkpoint uses, and the state between two pieces. Promises: the same split however the text is
cut into pieces; no output of a model is an error; nothing of the text is lost but markers and the white space beside
them. Where a marker is a token of its own only that token counts: text that merely spells it (a model that writes
about tags) stays text. Special tokens give no text, so they are seen by id. Knows nothing of models or terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mosaic_c.tokenizer import Tokenizer

REASONING, CONTENT = "reasoning", "content"
Part = tuple[str, str]  # (REASONING or CONTENT, text)

# Pairs that open and close a block of thinking.
PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
# What starts a tool call: a model that calls a tool has ended its thinking, closed or not.
CALLS = (
    "<tool_call>",
    "<tool_calls>",
    "<|tool_call|>",
    "<|tool_calls_section_begin|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
)


class Spoken(Protocol):
    """What is split: generation.Piece, or anything with its token and the text that became certain."""

    @property
    def token(self) -> int: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Mark:
    """A marker. token: its id where the vocabulary has it as one token; hidden: that token gives no text."""

    text: str
    token: int | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Markers:
    """The markers of one checkpoint; start and end are None for a model that does not think."""

    start: Mark | None = None
    end: Mark | None = None
    calls: tuple[Mark, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: str | None = None) -> Markers:
        """Those that the template spells, else those that the vocabulary has as tokens. template: Jinja source;
        None: the checkpoint's own."""
        if template is None:
            from mosaic_c.template import chat_template

            template = chat_template(tokenizer.folder, tokenizer.config) or ""
        control = tokenizer.control

        def mark(text: str) -> Mark:
            return (
                Mark(text, tokenizer.token_id(text), control[text])
                if text in control
                else Mark(text)
            )

        pair = next((p for p in PAIRS if p[1] in template), None) or next(
            (p for p in PAIRS if p[0] in control and p[1] in control), None
        )
        if pair is None:
            return cls()
        calls = tuple(mark(text) for text in CALLS if text in template or text in control)
        return cls(mark(pair[0]), mark(pair[1]), calls)


def ends_inside(tokenizer: Tokenizer, markers: Markers, ids: Sequence[int]) -> bool:
    """Whether ids, the generation prompt, leave a block of thinking open."""
    start, end = markers.start, markers.end
    if start is None or end is None:
        return False
    if start.token is not None and end.token is not None:
        last = next((i for i in reversed(ids) if i in (start.token, end.token)), None)
        return last == start.token
    text = tokenizer.decode(ids, skip_special=False)
    return text.rfind(start.text) > text.rfind(end.text)


class Reasoning:
    """Splits one answer: push() each piece, finish() at the end.

    markers: of the checkpoint; inside: whether the prompt ends in an open block of thinking (ends_inside), as it does
    where the template writes the start marker itself. closed: whether thinking has ended, or never began; False at
    the end of an answer tells that all of it was thinking.
    """

    def __init__(self, markers: Markers, inside: bool = False) -> None:
        self._marks = markers
        self._kind = REASONING if inside else CONTENT
        self._blank = True  # nothing but white space since the last marker or the beginning
        self._opened = inside
        self._text = ""
        self._due: dict[Mark, int] = {}  # tokens of visible markers whose text is still to come
        known = (markers.start, markers.end, *markers.calls)
        self._by_id = {m.token: m for m in known if m is not None and m.token is not None}

    @property
    def kind(self) -> str:
        return self._kind

    @property
    def closed(self) -> bool:
        return self._kind == CONTENT

    def push(self, piece: Spoken) -> list[Part]:
        """The parts that are certain now, in order; none is empty."""
        mark = self._by_id.get(piece.token)
        self._text += piece.text
        if mark is not None and not mark.hidden:
            self._due[mark] = self._due.get(mark, 0) + 1
        out = self._scan()
        if mark is not None and mark.hidden and mark in self._expected():
            out += self._flush(marker=True)
            self._switch(mark)
        return out

    def finish(self) -> list[Part]:
        """Ends the answer: what was held back."""
        return self._flush(marker=False)

    # ---- the text that waits ----

    def _expected(self) -> tuple[Mark, ...]:
        """Markers that mean something here. Thinking begins only where nothing was said yet."""
        marks = self._marks
        if marks.start is None or marks.end is None:
            return ()
        if self._kind == REASONING:
            return (marks.end, *marks.calls)
        return (marks.start,) if self._blank else ()

    def _scan(self) -> list[Part]:
        out: list[Part] = []
        while True:
            spelled = [m for m in self._expected() if not m.hidden]
            found = [(at, -len(m.text), m) for m in spelled if (at := self._find(m)) >= 0]
            if not found:
                break
            at, _, mark = min(found, key=lambda f: f[:2])
            if self._kind == CONTENT and self._text[:at].strip():
                self._say(out, self._text[:at])  # an answer has begun: what follows is of it
                self._text = self._text[at:]
                continue
            rest, self._text = self._text[at:], self._text[:at]
            out += self._flush(marker=True)
            if mark.token is not None:
                self._due[mark] -= 1
            self._text = rest if mark in self._marks.calls else rest[len(mark.text) :]
            self._switch(mark)
        keep = self._held(spelled)
        if keep < len(self._text):
            text, self._text = (
                self._text[: len(self._text) - keep],
                self._text[len(self._text) - keep :],
            )
            self._say(out, text)
        return out

    def _find(self, mark: Mark) -> int:
        if mark.token is not None and not self._due.get(mark):
            return -1
        return self._text.find(mark.text)

    def _held(self, spelled: list[Mark]) -> int:
        """How many characters at the end may yet be the start of a marker, or white space before one."""
        text = self._text
        longest = 0
        for mark in spelled:
            most = min(len(mark.text) - 1, len(text))
            n = next((n for n in range(most, 0, -1) if text.endswith(mark.text[:n])), 0)
            longest = max(longest, n)
        if self._expected():
            body = text[: len(text) - longest]
            longest += len(body) - len(body.rstrip())
        return longest

    def _say(self, out: list[Part], text: str) -> None:
        if self._blank and self._opened:
            text = text.lstrip()  # white space behind a marker belongs to it
        if not text:
            return
        if text.strip():
            self._blank = False
        out.append((self._kind, text))

    def _flush(self, marker: bool) -> list[Part]:
        """All that waits; marker: one follows, so the white space at the end belongs to it."""
        text, self._text = self._text, ""
        out: list[Part] = []
        self._say(out, text.rstrip() if marker else text)
        return out

    def _switch(self, mark: Mark) -> None:
        self._kind = REASONING if mark == self._marks.start else CONTENT
        self._blank = self._opened = True
