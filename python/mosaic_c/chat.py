"""A conversation rendered by the checkpoint's own chat template, and its token ids.

Promises: the template sees what transformers' apply_chat_template would show it, and the ids are
the same, with one exception: where a message, tool or variable spells a control token, that text is
encoded as plain text. Only the template itself can open or close a turn. How: before rendering,
characters of such text are replaced one for one by characters that occur nowhere else, so the
template can still strip, split, slice, join and print it; after rendering they are put back as
plain text. Knows nothing of models, or of how a template is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .errors import MosaicError, UsageError
from .jsonfile import shown_path
from .template import REASONING, chat_template, compared_strings, plain, prepare, render
from .tokenizer import Tokenizer, check_fits, check_text


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    most_tokens: int | None = None,
    **more: Any,
) -> list[int]:
    """Token ids of a conversation, rendered by the checkpoint's template (or `template`, a name or
    Jinja source).

    variables and further keywords (enable_thinking=False, ...) go to the template; they are as
    little trusted as the messages. most_tokens: a text that surely has more is refused (ECONTEXT)
    before it is encoded, which takes memory. Raises as render() does, and MosaicError ENOENT when
    the checkpoint has no template.
    """
    if template is not None and "{" in template:
        source = template
    else:
        found = chat_template(tokenizer.folder, tokenizer.config, template, tools=tools is not None)
        if found is None:
            raise MosaicError(
                f"no chat template in {shown_path(tokenizer.folder)}: send plain text instead (--raw)",
                "ENOENT",
            )
        source = found
    given = {
        "messages": prepare(messages),
        "tools": plain(tools),
        "documents": plain(documents),
        "variables": plain({**(variables or {}), **more}),
    }
    mask = _Mask(tokenizer, source, given)
    searched = _searched(source, tokenizer)
    text = render(
        source,
        [
            mask.value(m, searched if m.get("role") == "assistant" else None)
            for m in given["messages"]
        ],
        tools=mask.value(given["tools"]),
        documents=mask.value(given["documents"]),
        add_generation_prompt=add_generation_prompt,
        variables={**tokenizer.variables, **mask.value(given["variables"])},
    )
    if most_tokens is not None:
        check_fits(tokenizer, text, most_tokens)
    if not mask.hidden:
        return tokenizer.encode(text, bos=False)
    return tokenizer.encode_masked(
        text, {ord(stand_in): char for char, stand_in in mask.hidden.items()}
    )


class _Mask:
    """Replaces the characters of control-token text by stand-ins.

    hidden: character -> its stand-in; the stand-ins occur in no message, tool, template or token.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, given: Any) -> None:
        self.tokenizer = tokenizer
        self.hidden: dict[str, str] = {}
        self._anywhere, self._heads, self._longest = _patterns(tuple(tokenizer.control))
        used: set[str] = set()
        for text in _strings([given, template, list(tokenizer.control)]):
            check_text(text)
            used.update(_STAND_INS.findall(text))
        self._free = (c for c in map(chr, range(0x20000, 0x2A6D7)) if c not in used)

    def value(self, value: Any, spare: re.Pattern[str] | None = None) -> Any:
        """A copy of JSON-like data with its strings masked.

        spare: tokens to leave visible in what the message says, because the template looks for
        them there. Words that templates look up or compare (keys, roles, types) stay as they are.
        """
        if isinstance(value, str):
            return self._string(value, spare)
        if isinstance(value, dict):
            masked = {}
            for key, item in value.items():
                if not (key in ("role", "type") and _is_word(item)):
                    item = self.value(item, spare if key in _SPOKEN else None)
                masked[key if _is_word(key) else self.value(key)] = item
            return masked
        if isinstance(value, list):
            return [self.value(v, spare) for v in value]
        return value

    def _string(self, text: str, spare: re.Pattern[str] | None) -> str:
        if spare is None:
            return self._piece(text)
        # A template may cut a spared token out, which joins what stood around it: each part counts
        # as a whole string.
        parts = spare.split(text)
        return "".join(part if i % 2 else self._piece(part) for i, part in enumerate(parts))

    def _piece(self, text: str) -> str:
        text = self._anywhere.sub(lambda m: self._hide(m[0]), text)
        if self._anywhere.search(self.tokenizer.normalize(text)):
            # Spelled in characters that the normalizer folds into a control token: ask the
            # tokenizer where.
            for start, end in reversed(self.tokenizer.control_spans(text)):
                text = text[:start] + self._hide(text[start:end]) + text[end:]
        # A template may join two strings, the first of which ends in the first part of a token.
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest), end):
            if text[start:end] in self._heads:
                return text[:start] + self._hide(text[start:end]) + text[end:]
        return text

    def _hide(self, text: str) -> str:
        # White space must stay for strip(), quotes and backslashes for tojson; hiding the rest
        # breaks the token.
        chars = set(text) - _KEPT or set(text)
        for char in chars - self.hidden.keys() - set(self.hidden.values()):
            free = next(self._free, None)
            if free is None:
                raise UsageError(
                    "messages use every character of CJK extension B: expected ordinary text"
                )
            self.hidden[char] = free
        return "".join(self.hidden.get(char, char) if char in chars else char for char in text)


# CJK extension B: rare letters without case, that repr() and every normalizer leave as they are.
_STAND_INS = re.compile("[\U00020000-\U0002a6d6]")
_SPOKEN = ("content", "text", *REASONING)
_KEPT = frozenset("\"'\\ \t\n\r")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


@lru_cache(maxsize=8)
def _patterns(control: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """(any control token, the first parts of tokens, length of the longest).

    First parts that are plain words are left out: ordinary text ends in those, and joining must not
    hide words.
    """
    heads = frozenset(
        token[:n] for token in control for n in range(1, len(token)) if not token[:n].isalnum()
    )
    return _any_of(control), heads, max(map(len, heads), default=0)


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of tokens, the longest first, in one group; nothing when there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, ordered)) or "(?!)") + ")")


def _searched(template: str, tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The unmarked added tokens that a template looks for in messages, such as </think> (and so
    <think>).

    In the model's own turns these are structure that the template takes apart, as transformers lets
    it.
    """
    looked_for = compared_strings(template)
    spare = [
        t
        for t, special in tokenizer.control.items()
        if not special
        and any(t in s or f"{t[0]}/{t[1:]}" in s for s in looked_for)
        # Sparing part of a longer token would leave all of that one visible.
        and not any(t in longer for longer in tokenizer.control if longer != t)
    ]
    return _any_of(spare) if spare else None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
