"""Messages and tools of a chat request: checked, and brought into the form that chat templates read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mosaic_c.jsonfile import show
from mosaic_c.server.body import kind, read_json, within
from mosaic_c.server.fields import Fields
from mosaic_c.server.problem import Problem, refuse
from mosaic_c.template import REASONING

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 10_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. given: as the client wrote it, for the template."""

    name: str
    parameters: dict[str, Any]
    given: dict[str, Any]
    where: str


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Checked messages. content is one string; arguments of calls stay the text that the client sent."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", f"expected an array of at least one message, got {_got(value)}")
    if len(value) > MOST_MESSAGES:
        raise refuse("messages", f"expected at most {MOST_MESSAGES}, got {len(value)}")
    return [_message(Fields(m, f"messages[{i}]")) for i, m in enumerate(value)]


def _message(f: Fields) -> dict[str, Any]:
    role = f.choice("role", ROLES)
    if role is None:
        raise refuse(f.name("role"), f"expected one of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": role}
    calls = f.rows("tool_calls", 1000) if role == "assistant" else None
    content = _content(f.take("content"), f.name("content"), role)
    if content is None and role != "assistant":
        raise refuse(f.name("content"), "expected a string")
    out["content"] = content or ""
    name = f.text("name", 1000)
    if name is not None:
        out["name"] = name
    if role == "assistant":
        for key in REASONING:
            text = f.text(key)
            if text is not None:
                out["reasoning_content"] = text
        if calls:
            out["tool_calls"] = [
                _call(Fields(c, f"{f.name('tool_calls')}[{i}]")) for i, c in enumerate(calls)
            ]
        f.unsupported(
            {
                "annotations": (lambda v: v == [], "messages are text"),
                "audio": (lambda v: False, "messages are text"),
                "function_call": (lambda v: False, "use tool_calls"),
                "refusal": (lambda v: v == "", "messages are text"),
            }
        )
    elif role == "tool":
        out["tool_call_id"] = f.text("tool_call_id", 1000)
        if out["tool_call_id"] is None:
            raise refuse(f.name("tool_call_id"), "expected the id of the call that this answers")
    f.end()
    return out


def _content(value: Any, where: str, role: str) -> str | None:
    """The text of a message: a string, or text parts, which are joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(where, f"expected a string or an array of text parts, got {kind(value)}")
    texts = []
    for i, item in enumerate(value):
        part = Fields(item, f"{where}[{i}]")
        what = part.text("type")
        if what != "text":
            raise refuse(
                part.name("type"),
                f"only text is supported, got {show(what)}: this server reads no images, audio or files",
                "unsupported_content",
            )
        text = part.text("text")
        if text is None:
            raise refuse(part.name("text"), "expected a string")
        part.end()
        texts.append(text)
    return "".join(texts)


def _call(f: Fields) -> dict[str, Any]:
    f.choice("type", ("function",))
    identity = f.text("id", 1000)
    f.whole("index", 0, 1000)  # of a streamed call that was put together by the client
    function = f.part("function")
    f.end()
    name = None if function is None else function.text("name", 1000)
    if function is None or name is None:
        raise refuse(f.name("function.name"), "expected a string")
    text = function.text("arguments")
    function.end()
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": "{}" if text is None else text},
    }


def with_arguments(messages: list[dict[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as the template wants them: the text, or an object."""
    if as_text:
        return messages
    given = [c["function"]["arguments"] for m in messages for c in m.get("tool_calls") or []]
    if not within(given):
        raise refuse("messages", "the arguments of its tool calls have too many values")
    out = []
    for i, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": _object(
                            call["function"]["arguments"],
                            f"messages[{i}].tool_calls[{j}].function.arguments",
                        ),
                    },
                }
                for j, call in enumerate(message["tool_calls"])
            ]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _object(text: str, where: str) -> dict[str, Any]:
    try:  # as strict as with a body
        return read_json(text.encode("utf-8", "surrogatepass"))
    except Problem as problem:
        wanted = "expected the text of a JSON object, as the model's template needs one"
        raise refuse(where, f"{wanted}: {problem}") from None


def read_tools(rows: list[Any] | None) -> list[Tool]:
    tools: list[Tool] = []
    for i, row in enumerate(rows or []):
        f = Fields(row, f"tools[{i}]")
        if f.text("type") != "function":
            raise refuse(f.name("type"), "expected function: other tools are not supported")
        function = f.part("function")
        if function is None:
            raise refuse(f.name("function"), "expected an object")
        f.end()
        name = function.text("name")
        if name is None or not _NAME.fullmatch(name):
            raise refuse(
                function.name("name"),
                "expected 1 to 128 letters, digits, points, dashes or underscores",
            )
        if name in [t.name for t in tools]:
            raise refuse(function.name("name"), f"{show(name)} is there twice")
        function.text("description")
        function.flag("strict")  # without it grammar.py may take a wider grammar than the schema
        parameters = function.take("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise refuse(function.name("parameters"), f"expected a schema, got {kind(parameters)}")
        function.end()
        tools.append(Tool(name, parameters, row, function.name("parameters")))
    return tools


def _got(value: Any) -> str:
    return "an empty one" if value == [] else kind(value)
