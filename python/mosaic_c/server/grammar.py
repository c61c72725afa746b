"""Answers that must have a form: which tokens may come next, by llguidance.

Grammars makes a Constraint of a JSON schema or of tools; one per request, called by the scheduler alone. What a schema
asks for and llguidance does not know is refused, save in tools that are not strict: their grammar is then wider than
the schema. References in schemas reach no file and no network: the library has no way to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic_c.errors import MosaicError
from mosaic_c.server.messages import Tool
from mosaic_c.server.problem import refuse

Mask = npt.NDArray[np.bool_]
ANY_OBJECT = {"type": "object"}
# A run of white space is cut: a model may otherwise fill its whole answer with it.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}
# Properties of a whole schema. llguidance keeps some 4 items for each that may come next: with its own limit of 2,000
# an object of 600 optional ones was accepted and then failed in the middle of an answer.
MOST_PROPERTIES = 2000
MOST_TEXT = 64 << 10  # characters of a schema
_MOST_ITEMS = 6 * MOST_PROPERTIES
_LEAD = r"/[ \n]{1,4}/?"


@dataclass(frozen=True)
class Form:
    """How a model's calls look. xml: <function=f> and its parameters, else a JSON object."""

    xml: bool
    start: str = "<tool_call>"
    end: str = "</tool_call>"


class Grammars:
    """llguidance's view of one tokenizer. text: tokenizer.json; stop_ids: what may end an answer."""

    def __init__(self, text: str, stop_ids: Iterable[int]) -> None:
        import llguidance

        self._library = llguidance
        self._stop_ids = sorted(stop_ids)
        if not self._stop_ids:
            raise MosaicError(
                "the model has no stop token, so nothing could end an answer of a given form",
                "EGRAMMAR",
            )
        try:
            self._tokenizer = llguidance.LLTokenizer(text, eos_token=self._stop_ids)
        except Exception as e:  # whatever a tokenizer's file makes it raise
            raise MosaicError(
                f"the tokenizer is of no kind that grammars support: {e}", "EGRAMMAR"
            ) from None
        self.size: int = self._tokenizer.vocab_size
        # Memory of a grammar is bounded here: some 2 KB a state.
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=20_000,
            max_items_in_row=_MOST_ITEMS,
            max_grammar_size=100_000,
            verbose_errors=False,
        )

    def fit(self, vocab: int) -> None:
        """Tokens from vocab on are none of the model's: masks leave them out."""
        self.size = min(self.size, vocab)

    def schema(self, schema: Mapping[str, Any], field: str, lead: bool = False) -> Matcher:
        """The grammar of a JSON schema; Problem 400 names field. lead: white space may come first."""
        if why := _too_many(schema):
            raise refuse(field, why, "invalid_schema")
        return self._matcher(f"start: {_LEAD if lead else ''} {self._json(schema)}", field)

    def tools(
        self,
        tools: list[Tool],
        form: Form,
        field: str,
        *,
        schema: Mapping[str, Any] | None = None,
        several: bool = True,
        lead: bool = False,
    ) -> Matcher:
        """One call or more; or, with schema, such a text in place of calls."""
        if schema is not None and (why := _too_many(schema)):
            raise refuse("response_format", why, "invalid_schema")
        names, rules = [], []
        for n, tool in enumerate(tools):
            rules += self._tool(n, tool, form)
            names.append(f"call{n}")
        calls = (
            f"{self._mark(form.start)} /\\n?/ ({' | '.join(names)}) /\\n?/ {self._mark(form.end)}"
        )
        start = "calls" if schema is None else f"(calls | {self._json(schema)})"
        more = "(/\\n?/ call)*" if several else ""
        lines = [
            f"start: {_LEAD if lead else ''} {start}",
            f"calls: call {more}",
            f"call: {calls}",
            *rules,
        ]
        return self._matcher("\n".join(lines), field)

    def call(self, tools: list[Tool], form: Form, field: str) -> Matcher:
        """What follows the start marker of a call, up to and with its end marker."""
        names, rules = [], []
        for n, tool in enumerate(tools):
            rules += self._tool(n, tool, form)
            names.append(f"call{n}")
        start = f"start: /\\n?/ ({' | '.join(names)}) /\\n?/ {self._mark(form.end)}"
        return self._matcher("\n".join([start, *rules]), field)

    def only_stop(self) -> Mask:
        mask = np.zeros(self.size, np.bool_)
        mask[[i for i in self._stop_ids if i < self.size]] = True
        return mask

    # ---- grammars as Lark text ----

    def _tool(self, n: int, tool: Tool, form: Form) -> list[str]:
        """Rules, the first named call<n>."""
        strict = bool(tool.given.get("function", {}).get("strict"))
        parameters = (
            tool.parameters
            if tool.parameters.get("type")
            else {"type": "object", **tool.parameters}
        )
        if form.xml:
            return self._xml(n, tool, parameters, strict)
        arguments = self._checked(parameters, strict, tool.where)
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return [f'call{n}: {head} {arguments} "}}"']

    def _xml(self, n: int, tool: Tool, parameters: Mapping[str, Any], strict: bool) -> list[str]:
        """Known parameters in the order of the schema, the required ones always."""
        head = json.dumps(f"<function={tool.name}>\n")
        known = parameters.get("properties")
        required = parameters.get("required")
        required = required if isinstance(required, list) else []
        rest = {k: v for k, v in parameters.items() if k in ("$defs", "definitions")}
        if why := _unwritable(parameters, strict):
            raise refuse(tool.where, why, "invalid_schema")
        if not isinstance(known, dict) or not known:
            any_ = f"/<parameter=[A-Za-z0-9_.-]+>\\n/ value{n}"
            free = parameters.get("additionalProperties") is not False and not strict
            return [
                f'call{n}: {head} {f"({any_})*" if free else ""} "</function>"',
                f'value{n}[suffix="\\n</parameter>\\n"]: /(.|\\n)*/',
            ]
        parts, rules = [], []
        for i, (key, schema) in enumerate(known.items()):
            rule = f"value{n}_{i}"
            one = f"{json.dumps(f'<parameter={key}>' + chr(10), ensure_ascii=False)} {rule}"
            parts.append(one if key in required else f"({one})?")
            if choices := _choices(schema):
                ones = " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)
                rules.append(f'{rule}: ({ones}) "\\n</parameter>\\n"')
            elif says_text(schema):
                rules.append(f'{rule}[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
            else:
                schema = {**schema, **rest} if isinstance(schema, dict) else {}
                rules.append(
                    f'{rule}: {self._checked(schema, strict, tool.where)} "\\n</parameter>\\n"'
                )
        return [f'call{n}: {head} {" ".join(parts)} "</function>"', *rules]

    def _checked(self, schema: Mapping[str, Any], strict: bool, field: str) -> str:
        """A schema's part of a grammar; wider ones where it is not strict and not understood."""
        tries: list[tuple[Mapping[str, Any], dict[str, Any]]] = [(schema, {})]
        if not strict:
            wide = ANY_OBJECT if schema.get("type") == "object" else {}
            tries += [(schema, {"lenient": True}), (wide, {})]
        why = ""
        for wanted, options in tries:
            why = _too_many(wanted)
            if why:
                continue
            part = self._json(wanted, **options)
            why = self._wrong(self._library.LLMatcher.grammar_from_lark(f"start: {part}"))
            if not why:
                return part
        raise refuse(field, why, "invalid_schema")

    def _json(self, schema: Mapping[str, Any], **options: Any) -> str:
        own = {**_JSON, **options}
        return "%json " + json.dumps({**schema, "x-guidance": own})

    def _matcher(self, text: str, field: str) -> Matcher:
        """The text as a Matcher that was tried: limits are met by masks, too, and where an answer has begun it is too
        late to say so."""
        grammar: str = self._library.LLMatcher.grammar_from_lark(text)
        why = self._wrong(grammar)
        if not why:
            matcher = Matcher(
                self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            )
            try:
                self._try(matcher.copy())
                return matcher
            except MosaicError as error:
                why = error.message
        raise refuse(field, why, "invalid_schema")

    def _try(self, matcher: Matcher) -> None:
        """One token on, past white space: behind the { of an object all its properties are there at once."""
        for token in np.flatnonzero(matcher.mask()[: self.size])[:100]:
            if not self._tokenizer.decode_str([int(token)]).isspace():
                matcher.advance(int(token))
                if not matcher.done:
                    matcher.mask()
                return

    def _wrong(self, grammar: str) -> str:
        failed, notes = self._library.LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer, limits=self._limits
        )
        return (
            " ".join(str(notes[0] if notes else "not understood").split())[:300] if failed else ""
        )

    def _mark(self, text: str) -> str:
        """A marker in a grammar: special tokens are matched by id, never by their text."""
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]):
            return f"<[{ids[0]}]>"
        return json.dumps(text)


def _too_many(schema: Mapping[str, Any]) -> str:
    """What is wrong with the size of a schema, "": nothing. A grammar takes hundreds of times the memory of its text,
    and as many as wait in the queue are there at once."""
    count, text, waiting = 0, 0, [schema]
    while waiting:
        item: Any = waiting.pop()
        text += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            text += sum(map(len, item))
            inner = item.get("properties")
            count += len(inner) if isinstance(inner, Mapping) else 0
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    if count > MOST_PROPERTIES:
        return f"expected at most {MOST_PROPERTIES} properties, got {count}"
    if text > MOST_TEXT:
        return f"expected at most {MOST_TEXT} characters of names and values, got {text}"
    return ""


def _choices(schema: Any) -> list[str]:
    """The texts that a parameter may be, where its schema lists them; []: it does not."""
    given = schema if isinstance(schema, dict) else {}
    found = [given["const"]] if "const" in given else given.get("enum")
    ok = isinstance(found, list) and all(isinstance(c, str) and c for c in found)
    return found if ok and says_text(schema) else []


def _unwritable(parameters: Mapping[str, Any], strict: bool) -> str:
    """What an XML-like call could not hold to, "": nothing."""
    known = parameters.get("properties")
    known = known if isinstance(known, dict) else {}
    for key, schema in known.items():
        if not key or any(c in ">\n\r\u2028\u2029" for c in key) or key != key.strip():
            return f"properties: {key!r} cannot be a parameter of this model's calls"
        given = schema if isinstance(schema, dict) else {}
        bound = [k for k in ("pattern", "format", "maxLength", "minLength") if k in given]
        if strict and bound and says_text(schema) and not _choices(schema):
            return f"properties: {key}: {bound[0]} is not supported with this model's calls; leave out strict"
    required = parameters.get("required")
    missing = [k for k in required if k not in known] if isinstance(required, list) else []
    other = [k for k in ("anyOf", "oneOf", "allOf", "not", "patternProperties") if k in parameters]
    if strict and (missing or other):
        return (
            f"{(missing or other)[0]!r} is not supported with this model's calls; leave out strict"
        )
    return ""


def says_text(schema: Any) -> bool:
    """Whether a parameter of this schema is written as bare text, not as JSON, between XML-like tags."""
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    if kind is not None:
        return bool(kind == "string")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(v, str) for v in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return any(says_text(s) for s in schema[key])
    return not any(key in schema for key in ("$ref", "properties", "items", "allOf"))


class Matcher:
    """One text on its way through a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> Matcher:
        """Another at the same place; what the grammar was compiled to is shared."""
        return Matcher(self._matcher.deep_copy())

    @property
    def done(self) -> bool:
        """Whether nothing more can come."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())[:300]
            raise MosaicError(f"the grammar of the answer failed: {why}", "EGRAMMAR")


class Answer:
    """A Constraint: a grammar for the answer, once thinking is over.

    opens, closes: tokens around thinking, None for a model without; inside: whether the prompt has opened it. Where it
    is not open yet, the first token may open it.
    """

    def __init__(
        self,
        grammars: Grammars,
        matcher: Matcher,
        *,
        inside: bool = False,
        opens: int | None = None,
        closes: int | None = None,
    ) -> None:
        self._matcher = matcher
        self._size = grammars.size
        self._inside = inside and closes is not None
        self._opens = None if self._inside or closes is None else opens
        self._closes = closes

    def mask(self) -> Mask | None:
        if self._inside:
            return None
        mask = self._matcher.mask()[: self._size]
        if self._opens is not None and self._opens < self._size:
            mask[self._opens] = True
        return mask

    def advance(self, token: int) -> None:
        if self._inside:
            self._inside = token != self._closes
        elif token == self._opens:
            self._inside, self._opens = True, None
        else:
            self._opens = None
            self._matcher.advance(token)


class FreeCalls:
    """A Constraint: free text in which each tool call, from its start token on, has the form of a tool.

    call: what follows the start token; each call gets a copy, so that the scheduler's thread compiles nothing.
    """

    def __init__(
        self, grammars: Grammars, call: Matcher, start: int, *, several: bool = True
    ) -> None:
        self._grammars, self._call, self._start, self._several = grammars, call, start, several
        self._matcher: Matcher | None = None
        self._over = False

    def mask(self) -> Mask | None:
        if self._matcher is not None:
            return self._matcher.mask()[: self._grammars.size]
        return self._grammars.only_stop() if self._over else None

    def advance(self, token: int) -> None:
        if self._matcher is None:
            if token == self._start:
                self._matcher = self._call.copy()
            return
        self._matcher.advance(token)
        if self._matcher.done:
            self._matcher, self._over = None, not self._several
