"""Bodies of requests turned into typed wishes. Whatever is not understood is refused by the name of its field.

Nothing here knows a model: prompts.py makes token ids and a scheduler request of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mosaic_c.jsonfile import show
from mosaic_c.server.body import kind
from mosaic_c.server.fields import Fields
from mosaic_c.server.messages import Tool, read_messages, read_tools
from mosaic_c.server.problem import refuse

MOST_STOPS, LONGEST_STOP = 4, 1000
MOST_TOP = 20
MOST_TOKENS = 2**31 - 1
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Wish:
    """What both endpoints share. sampling: settings that were given, under the names of sampling.resolve."""

    model: str | None
    stream: bool
    include_usage: bool
    sampling: dict[str, float | int]
    stop: tuple[str, ...]
    max_tokens: int | None
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int


@dataclass(frozen=True)
class Format:
    """response_format. schema: None is text, else what the answer must match."""

    schema: dict[str, Any] | None = None
    field: str = "response_format"


@dataclass(frozen=True)
class ChatWish(Wish):
    messages: list[dict[str, Any]]
    tools: list[Tool]
    choice: str  # "none", "auto", "required", or the name of a tool behind "="
    parallel: bool
    format: Format
    thinking: bool | None  # None: as the template does by itself
    effort: str | None
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextWish(Wish):
    prompt: str | list[int]


def read_chat(body: dict[str, Any]) -> ChatWish:
    f = Fields(body)
    shared = _shared(f)
    f.unsupported(_COMMON | _CHAT)
    most = f.whole("max_completion_tokens", 1, MOST_TOKENS)
    if most is not None:
        if shared["max_tokens"] not in (None, most):
            raise refuse("max_tokens", "max_completion_tokens is given too, with another value")
        shared["max_tokens"] = most
    logprobs = f.flag("logprobs") or False
    top = f.whole("top_logprobs", 0, MOST_TOP)
    if top and not logprobs:
        raise refuse("top_logprobs", "expected logprobs: true beside it")
    effort = f.choice("reasoning_effort", EFFORTS)
    thinking, variables = _thinking(f, effort)
    tools = read_tools(f.rows("tools", 128))
    choice = _choice(f, tools)
    parallel = f.flag("parallel_tool_calls")
    wish = ChatWish(
        **shared,
        logprobs=logprobs,
        top_logprobs=top or 0,
        messages=read_messages(f.take("messages")),
        tools=[] if choice == "none" else tools,
        choice=choice,
        parallel=parallel is not False,
        format=_format(f.part("response_format")),
        thinking=thinking,
        effort=effort,
        variables=variables,
    )
    f.end()
    if wish.ignore_eos and (wish.format.schema is not None or wish.tools):
        raise refuse("ignore_eos", "expected neither tools nor a response_format beside it")
    return wish


def read_text(body: dict[str, Any]) -> TextWish:
    f = Fields(body)
    shared = _shared(f)
    f.unsupported(_COMMON | _TEXT)
    top = f.whole("logprobs", 0, 5)
    wish = TextWish(
        **shared, logprobs=top is not None, top_logprobs=top or 0, prompt=_prompt(f.take("prompt"))
    )
    f.end()
    return wish


def _shared(f: Fields) -> dict[str, Any]:
    stream = f.flag("stream") or False
    options = f.part("stream_options")
    usage = False
    if options is not None:
        if not stream:
            raise refuse("stream_options", "expected stream: true beside it")
        usage = options.flag("include_usage") or False
        options.unsupported(
            {"include_obfuscation": (_is(False), "chunks are as long as what they hold")}
        )
        options.end()
    seed = f.whole("seed", -(2**63), 2**64 - 1)  # OpenAI's is signed, and some clients send -1
    sampling = {
        "temperature": f.number("temperature", 0, 100),
        "top_p": f.number("top_p", 0, 1),
        "top_k": f.whole("top_k", -1, 2**31 - 1),
        "min_p": f.number("min_p", 0, 1),
        "repetition_penalty": f.number("repetition_penalty", 0.01, 100),
        "frequency_penalty": f.number("frequency_penalty", -2, 2),
        "presence_penalty": f.number("presence_penalty", -2, 2),
        "seed": None if seed is None else seed % 2**64,
    }
    # OpenAI's labels of who asks: they change no answer there either.
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        f.text(label, 10_000)
    return {
        "model": f.text("model", 1000),
        "stream": stream,
        "include_usage": usage,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "stop": _stop(f.take("stop")),
        "max_tokens": f.whole("max_tokens", 1, MOST_TOKENS),
        "ignore_eos": f.flag("ignore_eos") or False,
    }


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise refuse("stop", "expected a string or an array of strings")
    if len(stops) > MOST_STOPS:
        raise refuse("stop", f"expected at most {MOST_STOPS} strings, got {len(stops)}")
    if not all(0 < len(s) <= LONGEST_STOP for s in stops):
        raise refuse("stop", f"expected strings of 1 to {LONGEST_STOP} characters")
    return tuple(stops)


def _thinking(f: Fields, effort: str | None) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think, from all places where clients say so, and the template's further variables."""
    said: dict[str, bool] = {}
    top = f.flag("enable_thinking")
    if top is not None:
        said["enable_thinking"] = top
    variables: dict[str, Any] = {}
    more = f.part("chat_template_kwargs")
    if more is not None:
        inner = more.flag("enable_thinking")
        if inner is not None:
            said["chat_template_kwargs.enable_thinking"] = inner
        variables = more.rest()
    if effort is not None:
        said["reasoning_effort"] = effort != "none"
    if len(set(said.values())) > 1:
        raise refuse(next(iter(said)), f"{' and '.join(said)} contradict each other")
    return next(iter(said.values()), None), variables


def _choice(f: Fields, tools: list[Tool]) -> str:
    value = f.take("tool_choice")
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise refuse(
                "tool_choice", f"expected none, auto, required or a function, got {show(value)}"
            )
        if value == "required" and not tools:
            raise refuse("tool_choice", "required, but there are no tools")
        return value
    part = Fields(value, "tool_choice")
    part.choice("type", ("function",))
    function = part.part("function")
    part.end()
    name = None if function is None else function.text("name")
    if function is None or name is None:
        raise refuse("tool_choice.function.name", "expected the name of a tool")
    function.end()
    if name not in [t.name for t in tools]:
        raise refuse("tool_choice.function.name", f"no tool is called {show(name)}")
    return f"={name}"


def _format(f: Fields | None) -> Format:
    if f is None:
        return Format()
    wanted = f.choice("type", ("text", "json_object", "json_schema"))
    if wanted is None:
        raise refuse("response_format.type", "expected text, json_object or json_schema")
    schema: dict[str, Any] | None = None
    where = "response_format"
    if wanted == "json_object":
        schema = {"type": "object"}
    elif wanted == "json_schema":
        part = f.part("json_schema")
        where = "response_format.json_schema.schema"
        if part is None:
            raise refuse("response_format.json_schema", "expected an object with a schema")
        part.text("name", 64)
        part.text("description")
        part.flag("strict")  # answers always match: there is no laxer way
        schema = part.take("schema")
        if not isinstance(schema, dict):
            raise refuse(where, f"expected an object, got {kind(schema)}")
        part.end()
    f.end()
    return Format(schema, where)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    whole = isinstance(value, list) and all(type(i) is int for i in value)
    if whole and value:
        return value
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], (str, list)):
        raise refuse("prompt", f"expected one prompt, got {len(value)}: send a request for each")
    raise refuse("prompt", "expected a text or token ids, at least one of them")


def _is(*fine: Any) -> Callable[[Any], bool]:
    """Only these values ask for nothing. (True is not 1 here, as 1 is no flag.)"""
    return lambda value: any(type(value) is type(f) and value == f for f in fine)


_ONE = (_is(1), "one answer a request; send the request several times")
_COMMON = {
    "n": _ONE,
    "logit_bias": (_is({}), "no biases of single tokens"),
    "service_tier": (_is("auto", "default"), "there is one tier"),
}
_CHAT = {
    "audio": (_is(), "text only"),
    "functions": (_is([]), "use tools"),
    "function_call": (_is("none"), "use tool_choice"),
    "metadata": (_is({}), "nothing is stored"),
    "modalities": (_is(["text"]), "text only"),
    "moderation": (_is(), "there is none"),
    "prediction": (_is(), "no predicted outputs"),
    "prompt_cache_retention": (_is("in_memory"), "states are kept as long as there is room"),
    "store": (_is(False), "nothing is stored"),
    "verbosity": (_is("medium"), "the model has no such setting"),
    "web_search_options": (_is(), "no access to the network"),
}
_TEXT = {
    "best_of": _ONE,
    "echo": (_is(False), "the prompt is not repeated"),
    "suffix": (_is(""), "no text in the middle"),
}
