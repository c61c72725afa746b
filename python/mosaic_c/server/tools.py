"""Tool calls in what a model says: JSON or XML-like, between <tool_call> and </tool_call>.

No text of a model is an error: what is no call stays text. Works on pieces; the same result however the text is cut.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mosaic_c.server.grammar import Form, says_text
from mosaic_c.server.messages import Tool

_SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_CALL = 1 << 20  # characters; a call that does not end is text again


@dataclass(frozen=True)
class Call:
    """arguments: the text of a JSON object, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


def form_of(template: str | None) -> Form | None:
    """The form in which a chat template shows calls; None: it knows no tools."""
    if template is None or "tools" not in template:
        return None
    if "<function=" in template:
        return Form(xml=True)
    return Form(xml=False) if "<tool_call>" in template else None


class CallParser:
    """Takes an answer's text apart: push() and finish() give text (str) and Calls in order.

    size: characters of the client's that are kept until then.
    """

    def __init__(self, form: Form, tools: list[Tool]) -> None:
        self._form = form
        # Names alone: schemas would stay in memory for as long as the answer takes.
        self._texts = {t.name: _texts(t.parameters) for t in tools} if form.xml else {}
        self.size = sum(len(key) for names in self._texts.values() for key in names)
        # Coder models leave the outer marker out now and then.
        self._starts = [form.start, "<function="] if form.xml else [form.start]
        self._text = ""
        self._inside = False
        self._gap = ""  # white space before what may be a call
        self._after = False  # a call has ended and nothing but white space came since

    def push(self, text: str) -> list[str | Call]:
        self._text += text
        out: list[str | Call] = []
        while self._inside and self._end(out) or not self._inside and self._start(out):
            pass
        return out

    def finish(self) -> list[str | Call]:
        """Ends the answer: an unfinished call counts when all of it is there but the end marker. What was cut within
        its arguments is text: half a file name is another file."""
        text, self._text = self._text, ""
        if not self._inside:
            return [text] if text and not (self._after and text.isspace()) else []
        self._inside = False
        call = self._parse(text, cut=True)
        return [self._gap + text if call is None else call]

    def _start(self, out: list[str | Call]) -> bool:
        """Outside of a call: passes text on up to where one may begin. True: one has begun."""
        places = [at for s in self._starts if (at := self._text.find(s)) >= 0]
        if places:
            before, self._text = self._text[: min(places)], self._text[min(places) :]
            self._say(out, before.rstrip())
            self._gap, self._inside = before[len(before.rstrip()) :], True
            return True
        keep = max(_overlap(self._text, s) for s in self._starts)
        body = self._text[: len(self._text) - keep]
        end = len(body.rstrip())  # white space before a call belongs to it
        self._say(out, self._text[:end])
        self._text = self._text[end:]
        return False

    def _say(self, out: list[str | Call], text: str) -> None:
        if self._after:
            text = text.lstrip()
        if text:
            out.append(text)
            self._after = False

    def _end(self, out: list[str | Call]) -> bool:
        """Inside of a call: looks for its end. True: it was found."""
        stop = self._form.end if self._text.startswith(self._form.start) else "</function>"
        at = self._text.find(stop)
        if at < 0:
            if len(self._text) > LONGEST_CALL:
                out.append(self._gap + self._text)
                self._text, self._inside = "", False
            return False
        whole, self._text = self._text[: at + len(stop)], self._text[at + len(stop) :]
        self._inside = False
        call = self._parse(whole)
        if call is not None:
            out.append(call)
            self._after = True
        else:
            # The marker was only text; a call may begin right behind it.
            out.append(self._gap + whole[:1])
            self._text = whole[1:] + self._text
            self._after = False
        return True

    def _parse(self, whole: str, cut: bool = False) -> Call | None:
        body = whole.removeprefix(self._form.start).removesuffix(self._form.end).strip()
        try:
            return self._xml(body, cut) if body.startswith("<function=") else _json_call(body)
        except (ValueError, RecursionError, TypeError, LookupError):
            return None

    def _xml(self, body: str, cut: bool) -> Call | None:
        """cut: nothing follows, so what a sloppy model leaves out may as well be what did not come any more."""
        head = re.match(r"<function=([^>\n]+)>", body)
        if head is None or cut and not body.endswith("</function>"):
            return None
        name = head[1].strip().strip("\"'")
        texts = self._texts.get(name, frozenset())
        arguments: dict[str, Any] = {}
        at = head.end()
        for part in re.finditer(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|</function>|$)",
                                body[at:], re.S):  # fmt: skip
            if cut and not part[0].endswith("</parameter>"):
                return None
            key = part[1].strip().strip("\"'")
            arguments[key] = _value(part[2], key in texts)
        return _call(name, json.dumps(arguments, ensure_ascii=False)) if name else None


def _texts(parameters: Mapping[str, Any]) -> frozenset[str]:
    """Names of the parameters that are written as bare text."""
    known = parameters.get("properties")
    rows = known.items() if isinstance(known, dict) else ()
    return frozenset(key for key, schema in rows if schema is not None and says_text(schema))


def _call(name: str, arguments: str) -> Call:
    """Half a surrogate pair, which a model may spell as an escape, is no character and cannot be sent."""
    return Call(*(_SURROGATE.sub("\ufffd", text) for text in (name, arguments)))


def _value(text: str, bare: bool) -> Any:
    """A parameter's value: text where the schema says text, else JSON where it is JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    if bare:
        return text
    try:
        value = json.loads(text.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return value


def _json_call(body: str) -> Call | None:
    value = json.loads(body, parse_constant=_no_constant)
    if not isinstance(value, Mapping):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    key = "arguments" if "arguments" in value else "parameters"
    arguments = value.get(key, {})
    if isinstance(arguments, str):  # encoded twice
        return _call(name, arguments) if isinstance(json.loads(arguments), dict) else None
    if not isinstance(arguments, dict):
        return None
    return _call(name, _span(body, key) if key in value else "{}")


def _span(body: str, key: str) -> str:
    """The text of one value of the JSON object in body: a client that sends it back gives the same tokens again."""
    decoder = json.JSONDecoder()
    at = body.index("{") + 1
    found = "{}"
    while True:
        at = _skip(body, at, " \t\r\n,")
        if body[at] == "}":
            return found
        name, at = decoder.raw_decode(body, at)
        at = _skip(body, at, " \t\r\n:")
        _, end = decoder.raw_decode(body, at)
        if name == key:
            found = body[at:end]
        at = end


def _skip(text: str, at: int, chars: str) -> int:
    while text[at] in chars:
        at += 1
    return at


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of text that starts marker."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
