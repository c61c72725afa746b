"""From a checked wish to a request of the scheduler: token ids, settings, grammar.

A Prompter is made once a model. Its methods are slow (templates, tokenizer, grammars): they run in threads, several at
once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mosaic_c import sampling
from mosaic_c.chat import encode_chat
from mosaic_c.errors import MosaicError
from mosaic_c.generation import Constraint, stop_ids
from mosaic_c.reasoning import Markers, Reasoning, ends_inside
from mosaic_c.server import tools as calls
from mosaic_c.server.body import dumps
from mosaic_c.server.grammar import Answer, Form, FreeCalls, Grammars
from mosaic_c.server.messages import with_arguments
from mosaic_c.server.problem import Problem, refuse
from mosaic_c.server.schema import ChatWish, TextWish, Wish
from mosaic_c.template import chat_template, variables_of
from mosaic_c.tokenizer import Tokenizer, check_fits

LEAST_SHARED = 64  # tokens of a system prompt whose state is worth keeping
MOST_HEADS = 64
MOST_VARIABLES = 64 << 10  # characters of all, as JSON
# Given to every template by encode_chat itself; so are the tokenizer's own variables.
_TAKEN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "enable_thinking",
    "reasoning_effort",
    # where a tokenizer has none of these, a template that names them gets nothing
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)


@dataclass(frozen=True)
class Prepared:
    """All that a request needs. reasoning and parser: new ones for its answer; None where the endpoint has none."""

    ids: list[int]
    keep_at: tuple[int, ...]
    sampling: sampling.Sampling
    constraint: Constraint | None
    reasoning: Reasoning | None
    parser: calls.CallParser | None


class Prompter:
    """Prompts of one model. room: tokens of its context; grammars: None, or a function that gives them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        room: int,
        vocab: int,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        grammars: Callable[[], Grammars],
    ) -> None:
        self.tokenizer, self.room, self.vocab = tokenizer, room, vocab
        self.stop_ids = frozenset(stop_ids(generation_config, config, tokenizer))
        self._generation_config = generation_config
        self._grammars = grammars
        self._lock = threading.Lock()  # of what two requests may change at once
        self._shared: dict[bytes, int] = {}  # hash of what conversations begin with -> its tokens
        self._templates = {
            has: chat_template(tokenizer.folder, tokenizer.config, tools=has)
            for has in (False, True)
        }
        plain = self._templates[False]
        known = [variables_of(t) for t in self._templates.values() if t is not None]
        self.names = frozenset().union(*known)
        self.markers = Markers.of(tokenizer, plain) if plain is not None else Markers()
        # Vocabularies have the markers of a whole family; the template knows whether this model uses them.
        end = self.markers.end
        self._thinks = plain is not None and end is not None and end.text in plain
        self.form: Form | None = calls.form_of(self._templates[True])

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the checkpoint's own settings that nothing here knows."""
        return sampling.resolve(self._generation_config).ignored

    # ---- chat ----

    def chat(self, wish: ChatWish) -> Prepared:
        if self._templates[False] is None:
            raise Problem(
                400, "this model has no chat template: use /v1/completions", code="no_chat_template"
            )
        if wish.tools and self.form is None:
            raise refuse("tools", "this model's chat template knows none", "unsupported_parameter")
        variables = self._variables(wish)
        ids, keep, shared = self._encode(wish, variables)
        # What opens thinking stands in the generation prompt; where that is not known apart, anywhere.
        tail = ids[keep:] if keep else ids
        inside = ends_inside(self.tokenizer, self.markers, tail)
        return Prepared(
            ids=ids,
            keep_at=tuple(p for p in (shared, keep) if p),
            sampling=self._sampling(wish),
            constraint=self._constraint(wish, inside, tail),
            reasoning=Reasoning(self.markers, inside),
            parser=calls.CallParser(self.form, wish.tools) if wish.tools and self.form else None,
        )

    def _encode(self, wish: ChatWish, variables: Mapping[str, Any]) -> tuple[list[int], int, int]:
        """(ids, where the last message ends, where what other conversations share ends); 0: there is no such place."""
        template = self._templates[bool(wish.tools)] or ""
        messages = with_arguments(wish.messages, "arguments is string" in template)
        if "developer" not in template:
            messages = [
                {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
            ]

        def encode(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
            return encode_chat(
                self.tokenizer,
                messages,
                tools=[t.given for t in wish.tools] or None,
                add_generation_prompt=prompt,
                variables=variables,
                most_tokens=self.room,
            )

        ids = encode(messages, True)
        self.check_room(len(ids), "messages")
        try:
            before = encode(messages, False)
        except MosaicError:  # a template may insist on the prompt
            before = []
        keep = len(before) if len(before) < len(ids) and ids[: len(before)] == before else 0
        shared = self._shared_end(wish, messages, ids, encode, variables)
        return ids, keep, shared if shared < keep else 0

    def _shared_end(
        self,
        wish: ChatWish,
        messages: list[dict[str, Any]],
        ids: list[int],
        encode: Callable[[list[dict[str, Any]], bool], list[int]],
        variables: Mapping[str, Any],
    ) -> int:
        """Tokens that stay when somebody else says something else behind the same tools and system prompt."""
        first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        if not wish.tools and not any(m["content"] for m in messages[:first]):
            return 0
        head = dumps([messages[:first], [t.given for t in wish.tools], variables])
        key = hashlib.sha256(head.encode("utf-8")).digest()
        with self._lock:
            known = self._shared.get(key)
        if known is None:
            try:
                other = encode([*messages[:first], {"role": "user", "content": "\u2042"}], True)
            except MosaicError:
                other = []
            pairs = enumerate(zip(ids, other, strict=False))
            n = next((i for i, (a, b) in pairs if a != b), 0)
            known = n if n >= LEAST_SHARED else 0
            with self._lock:
                self._shared[key] = known
                if len(self._shared) > MOST_HEADS:
                    del self._shared[next(iter(self._shared))]
        return known

    def _variables(self, wish: ChatWish) -> dict[str, Any]:
        """What the template is told. A wish that it would not hear is refused."""
        for name in wish.variables:
            where = f"chat_template_kwargs.{name}"
            if name in _TAKEN or name in self.tokenizer.variables:
                raise refuse(where, "not to be set here")
            if name not in self.names:
                raise refuse(
                    where,
                    "this model's chat template has no such variable",
                    "unsupported_parameter",
                )
        size = len(dumps(wish.variables))
        if size > MOST_VARIABLES:
            raise refuse(
                "chat_template_kwargs", f"expected at most {MOST_VARIABLES} characters, got {size}"
            )
        variables = dict(wish.variables)
        if "reasoning_effort" in self.names and wish.effort not in (None, "none"):
            variables["reasoning_effort"] = wish.effort
        switch = next((n for n in ("enable_thinking", "thinking") if n in self.names), None)
        if wish.effort == "none" and switch is None and "reasoning_effort" in self.names:
            raise refuse("reasoning_effort", "this model always thinks", "unsupported_parameter")
        if wish.thinking is None:
            return variables
        if switch is not None:
            variables[switch] = wish.thinking
        elif wish.thinking != self._thinks and "reasoning_effort" not in variables:
            field = "enable_thinking" if wish.effort is None else "reasoning_effort"
            what = "always thinks" if self._thinks else "does not think"
            raise refuse(field, f"this model {what}", "unsupported_parameter")
        return variables

    def _constraint(self, wish: ChatWish, inside: bool, tail: list[int]) -> Constraint | None:
        schema = wish.format.schema
        forced = wish.choice == "required" or wish.choice.startswith("=")
        if schema is None and not wish.tools:
            return None
        grammars = self._grammars()
        if schema is None and not forced:
            return self._free(grammars, wish)
        start, end = self.markers.start, self.markers.end
        opens = None if start is None else start.token
        closes = None if end is None else end.token
        if (
            closes in tail and not inside
        ):  # thinking was switched off: the prompt holds an empty block
            opens = None
        lead = inside or opens is not None
        if wish.tools and (forced or schema is not None) and self.form is not None:
            tools = [t for t in wish.tools if wish.choice in (f"={t.name}", "auto", "required")]
            grammar = grammars.tools(
                tools,
                self.form,
                "tools",
                schema=None if forced else schema,
                several=wish.parallel and not wish.choice.startswith("="),
                lead=lead,
            )
        else:
            grammar = grammars.schema(schema or {}, wish.format.field, lead)
        if inside and closes is None:
            raise Problem(
                400,
                "response_format and forced tools need a model whose end of thinking is one token; "
                "switch thinking off",
                code="unsupported_parameter",
            )
        return Answer(grammars, grammar, inside=inside, opens=opens, closes=closes)

    def _free(self, grammars: Grammars, wish: ChatWish) -> Constraint | None:
        """Calls as the model likes, each in the form of its tool. Only a marker of one token tells where one begins;
        for other models the answer is free and what is a call is found out afterwards."""
        assert self.form is not None
        start = self.tokenizer.token_id(self.form.start)
        if start is None:
            return None
        grammar = grammars.call(wish.tools, self.form, "tools")
        return FreeCalls(grammars, grammar, start, several=wish.parallel)

    # ---- text ----

    def text(self, wish: TextWish) -> Prepared:
        if isinstance(wish.prompt, str):
            check_fits(self.tokenizer, wish.prompt, self.room)
            ids = self.tokenizer.encode(wish.prompt)
        else:
            ids = wish.prompt
            low, high = min(ids), max(ids)
            if low < 0 or high >= self.vocab:
                got = low if low < 0 else high
                raise refuse("prompt", f"expected token ids from 0 to {self.vocab - 1}, got {got}")
        if not ids:
            raise refuse("prompt", "expected at least one token")
        self.check_room(len(ids), "prompt")
        return Prepared(ids, (), self._sampling(wish), None, None, None)

    # ---- both ----

    def check_room(self, count: int, field: str) -> None:
        if count > self.room:
            raise Problem(
                400,
                f"{field}: the prompt has {count} tokens and the context has room for {self.room}: shorten it, or "
                "start the server with a larger --ctx",
                param=field,
                code="context_length_exceeded",
            )

    def _sampling(self, wish: Wish) -> sampling.Sampling:
        return sampling.resolve(self._generation_config, **wish.sampling)
