"""Tool calls and forms of answers: parsed however the text is cut, and made certain by a grammar."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")

from helpers_server import (
    JSON_CALL,
    STOP,
    THINKING,
    XML_CALL,
    Scripted,
    make_folder,
    prompter,
    running,
)

from mosaic_c.server import schema
from mosaic_c.server.grammar import Form
from mosaic_c.server.messages import read_tools
from mosaic_c.server.problem import Problem
from mosaic_c.server.tools import CallParser, form_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "kind": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = read_tools([WEATHER, NOW])
JSON, XML = Form(xml=False), Form(xml=True)
ONE = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern", "days": 2}}\n</tool_call>'
XML_ONE = (
    "<tool_call>\n<function=weather>\n<parameter=place>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


def parse(form, text, cuts=()):
    calls = CallParser(form, TOOLS)
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    out = [part for a, b in zip(edges, edges[1:], strict=False) for part in calls.push(text[a:b])]
    out += calls.finish()
    joined = []
    for part in out:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return [p if isinstance(p, str) else (p.name, p.arguments) for p in joined]


W = ("weather", '{"place": "Bern", "days": 2}')
N = ("now", "{}")
NOW_JSON = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CASES = [
    (JSON, ONE, [W]),
    (JSON, f"Let me see.\n\n{ONE}", ["Let me see.", W]),
    (JSON, f"{ONE}\n{NOW_JSON}", [W, N]),
    (JSON, f"{ONE}\n\nand so on", [W, "and so on"]),
    (JSON, f"a {NOW_JSON} b {ONE} ", ["a", N, "b", W]),
    (JSON, ONE.removesuffix("\n</tool_call>"), [W]),
    (JSON, ONE[:40], [ONE[:40]]),
    (JSON, "no <tool_call> here", ["no <tool_call> here"]),
    (JSON, " <tool_call>x</tool_call> ", [" <tool_call>x</tool_call> "]),
    (JSON, '<tool_call>{"name": 7}</tool_call>', ['<tool_call>{"name": 7}</tool_call>']),
    (JSON, '<tool_call>[1]</tool_call>', ['<tool_call>[1]</tool_call>']),
    (JSON, f"<tool_call>oh {NOW_JSON}", ["<tool_call>oh", N]),
    (JSON, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (JSON, '<tool_call>{"name": "f", "parameters": {"a":1}}</tool_call>', [("f", '{"a":1}')]),
    (JSON, '<tool_call>{"arguments": {"a" :  [1]}, "name": "f"}</tool_call>', [("f", '{"a" :  [1]}')]),
    (JSON, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
     ['<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>']),
    (JSON, "ends with <tool_ca", ["ends with <tool_ca"]),
    (JSON, "1 < 2 <t <tool\n", ["1 < 2 <t <tool\n"]),
    (JSON, "<tool_call>" + "[" * 5000 + "</tool_call>", ["<tool_call>" + "[" * 5000 + "</tool_call>"]),
    (XML, XML_ONE, [W]),
    (XML, f"text\n{XML_ONE}\n{XML_ONE}", ["text", W, W]),
    (XML, XML_ONE.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), [W]),
    (XML, XML_ONE.removesuffix("\n</tool_call>"), [W]),
    (XML, XML_ONE.removesuffix("</function>\n</tool_call>"), [XML_ONE.removesuffix("</function>\n</tool_call>")]),
    (XML, XML_ONE[: XML_ONE.index("\n</parameter>")], [XML_ONE[: XML_ONE.index("\n</parameter>")]]),
    (XML, XML_ONE[: XML_ONE.index("2")], [XML_ONE[: XML_ONE.index("2")]]),
    (XML, XML_ONE[: XML_ONE.index("Bern") + 2], [XML_ONE[: XML_ONE.index("Bern") + 2]]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=place>\n</function>\nB",
     ["<tool_call>\n<function=weather>\n<parameter=place>\n</function>\nB"]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=place>\nB</function>",
     ["<tool_call>\n<function=weather>\n<parameter=place>\nB</function>"]),
    (XML, '<tool_call>\n<function=now>\n<parameter=x>\n"\\ud800"\n</parameter>\n</function>\n</tool_call>',
     [("now", '{"x": "\ufffd"}')]),
    (JSON, '<tool_call>{"name": "f\\udfff", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
     [("f\ufffd", '{"a": "\ufffd"}')]),
    (XML, ONE, [W]),
    (XML, "<tool_call>\n<function=now>\n</function>\n</tool_call>", [N]),
    (XML, "<tool_call><function=></tool_call>", ["<tool_call><function=></tool_call>"]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=place>\n\n a\nb \n</parameter>\n</function>\n</tool_call>",
     [("weather", '{"place": "\\n a\\nb "}')]),
    (XML, "<tool_call>\n<function=weather>\n<parameter=place>\n12\n</parameter>\n<parameter=kind>\n[\"a\"]\n"
     "</parameter>\n</function>\n</tool_call>", [("weather", '{"place": "12", "kind": ["a"]}')]),
    (XML, "<tool_call>\n<function=other>\n<parameter=x>\nTrue\n</parameter>\n<parameter=y>\nso {\n</parameter>\n"
     "</function>\n</tool_call>", [("other", '{"x": true, "y": "so {"}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "want"), CASES, ids=lambda v: str(v)[:40])
def test_calls_are_found(form, text, want):
    assert parse(form, text) == want
    assert parse(form, text, range(len(text))) == want


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=6))
def test_cuts_do_not_matter(case, cuts):
    form, text, want = case
    assert parse(form, text, cuts) == want


SCRAPS = ["<tool_call>", "</tool_call>", "<function=", "f>", "</function>", "<parameter=", "a>", "</parameter>",
          '{"name": "f"', ', "arguments": {}}', "}", "\n", " ", "x", "\\", '"', "<"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([JSON, XML]),
    st.lists(
        st.sampled_from(SCRAPS),
        max_size=20,
    ).map("".join),
    st.lists(st.integers(0, 200), max_size=4),
)
def test_no_output_is_an_error(form, text, cuts):
    got = parse(form, text, cuts)
    assert got == parse(form, text)
    for part in got:
        if not isinstance(part, str):
            assert isinstance(json.loads(part[1]), dict)
    if not any(isinstance(p, tuple) for p in got):
        assert "".join(got) == text


def test_the_form_is_that_of_the_template():
    assert form_of(None) is None and form_of("{{ messages }}") is None
    assert (
        form_of("{{ tools }} <tool_call>") == JSON
        and form_of("{{ tools }}<tool_call><function=") == XML
    )
    assert form_of("{{ tools }} in no known form") is None


# ---- grammars ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tmp, extra = (
        tmp_path_factory.mktemp("models"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    )
    return {
        "json": make_folder(tmp / "json", THINKING.replace("CALL", JSON_CALL), extra),
        "xml": make_folder(tmp / "xml", THINKING.replace("CALL", XML_CALL), extra),
        "spelled": make_folder(
            tmp / "spelled", THINKING.replace("CALL", JSON_CALL).replace("think>", "thought>")
        ),
    }


@pytest.fixture(scope="module")
def prompts(folders):
    return {name: prompter(folder) for name, folder in folders.items()}


def allowed(prompts, text, end=True, **more):
    """Whether the constraint of a request lets the model say text and stop (end: else go on)."""
    wish = schema.read_chat({"messages": [{"role": "user", "content": "hi"}], **more})
    constraint = prompts.chat(wish).constraint
    for token in [*prompts.tokenizer.encode(text, bos=False), *[STOP] * end]:
        mask = constraint.mask()
        if mask is not None and not (token < len(mask) and mask[token]):
            return False
        if token != STOP:
            constraint.advance(token)
    return True


HM = "hm, {what} now\n</think>\n\n"
FREE = [
    ("json", HM + "Fine.", True),
    ("json", HM + ONE, True),
    ("json", "no end of thinking " + ONE, True),
    ("json", HM + ONE.replace("2", '"2"'), False),
    ("json", HM + ONE.replace("weather", "whether"), False),
    ("json", HM + ONE + "\n" + NOW_JSON + " that is it", True),
    ("json", HM + ONE[:-5], False),
    ("xml", HM + XML_ONE, True),
    ("xml", HM + XML_ONE.replace("Bern", "a\n<b>\n</parameter x"), True),
    ("xml", HM + XML_ONE.replace("<parameter=days>\n2", "<parameter=days>\ntwo"), False),
    ("xml", HM + XML_ONE.replace("<parameter=days>\n2\n</parameter>\n", ""), True),
    ("xml", HM + XML_ONE.replace("<parameter=place>\nBern\n</parameter>\n", ""), False),
    ("xml", HM + "<tool_call>\n<function=now>\n</function>\n</tool_call>", True),
]


@pytest.mark.parametrize(("model", "text", "fine"), FREE, ids=lambda v: str(v)[:50])
def test_calls_have_the_form_of_their_tool(prompts, model, text, fine):
    assert allowed(prompts[model], text, tools=[WEATHER, NOW]) == fine


@pytest.mark.parametrize("model", ["json", "xml"])
def test_a_call_may_be_forced(prompts, model):
    one = ONE if model == "json" else XML_ONE
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        how = {"tools": [WEATHER, NOW], "tool_choice": choice}
        assert allowed(prompts[model], HM + one, **how)
        assert not allowed(prompts[model], HM + "Fine.", **how)
        assert allowed(prompts[model], HM + one + "\n" + one, **how) == (choice == "required")
        assert allowed(prompts[model], one, enable_thinking=False, **how)
    how["parallel_tool_calls"] = False
    assert not allowed(prompts[model], HM + one + "\n" + one, **{**how, "tool_choice": "required"})
    assert not allowed(prompts[model], HM + one + "\n" + one, **{**how, "tool_choice": "auto"})


def test_a_schema_and_tools_leave_a_choice(prompts):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    how = {"tools": [WEATHER], "response_format": form}
    assert allowed(prompts["json"], HM + "true", **how) and allowed(
        prompts["json"], HM + ONE, **how
    )
    assert not allowed(prompts["json"], HM + "Fine.", **how)
    assert allowed(prompts["json"], "true", enable_thinking=False, response_format=form)


def test_thinking_that_ends_by_no_token_cannot_come_before_a_form(prompts):
    with pytest.raises(Problem, match="switch thinking off"):
        allowed(prompts["spelled"], "x", response_format={"type": "json_object"})
    assert allowed(
        prompts["spelled"],
        '{"a": 1}',
        response_format={"type": "json_object"},
        enable_thinking=False,
    )


@pytest.mark.parametrize(
    "bad",
    [{"type": "foo"}, {"not": {}}, {"type": "string", "pattern": "("}, {"$ref": "http://example.com/a.json"},
     {"$ref": "file:///etc/passwd"}, {"type": "string", "format": "moon"}, {"$ref": "#/$defs/none"}, {"type": 7},
     {"allOf": 3}, {"enum": []}, {"type": "integer", "minimum": 5, "maximum": 1}],
    ids=json.dumps,
)  # fmt: skip
def test_a_schema_that_is_not_understood_is_refused(prompts, bad):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}}
    with pytest.raises(Problem) as e:
        allowed(prompts["json"], "x", response_format=form)
    assert (e.value.status, e.value.param) == (400, "response_format.json_schema.schema")
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": bad}, "required": ["a"]}}}  # fmt: skip
    with pytest.raises(Problem) as e:
        allowed(prompts["json"], "x", tools=[strict])
    assert e.value.param == "tools[0].function.parameters"


def test_a_tool_that_is_not_strict_gets_a_wider_grammar(prompts):
    loose = {"type": "function", "function": {"name": "f", "parameters": {
        "$schema": "x", "type": "object", "properties": {"a": {"type": "string", "format": "moon"}}}}}  # fmt: skip
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    assert allowed(prompts["json"], call, tools=[loose], enable_thinking=False)


def xml_call(value):
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def one_parameter(**schema):
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}}}  # fmt: skip


@pytest.mark.parametrize("schema", [{"enum": ["Bern", "Basel"]}, {"const": "Bern"}], ids=json.dumps)
def test_a_text_of_xml_is_one_of_those_listed(prompts, schema):
    how = {"tools": [one_parameter(**schema)], "enable_thinking": False}
    assert allowed(prompts["xml"], xml_call("Bern"), **how)
    assert not allowed(prompts["xml"], xml_call("Rome"), **how)
    assert not allowed(prompts["xml"], xml_call("Bernina"), **how)


@pytest.mark.parametrize("change", [
    {"properties": {"a": {"type": "string", "pattern": "a+"}}},
    {"properties": {"a": {"type": "string", "maxLength": 3}}},
    {"properties": {"a>b": {"type": "string"}}}, {"properties": {"": {"type": "string"}}},
    {"required": ["a", "b"]}, {"anyOf": [{"required": ["a"]}]},
], ids=json.dumps)  # fmt: skip
def test_what_an_xml_call_cannot_hold_to_is_refused(prompts, change):
    tool = one_parameter()
    tool["function"]["parameters"] |= change
    with pytest.raises(Problem) as e:
        allowed(prompts["xml"], "x", tools=[tool])
    assert (e.value.status, e.value.param) == (400, "tools[0].function.parameters")


def test_arguments_of_earlier_calls_are_bounded_as_bodies_are(prompts):
    def ask(text):
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": text}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "a", "content": "fine"}]  # fmt: skip
        prompts["xml"].chat(schema.read_chat({"messages": messages, "tools": [WEATHER]}))

    ask('{"place": "Bern"}')
    for bad in (
        '{"place": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": "\\ud800"}',
        "{" + '"a":[],' * 200_001 + '"b":1}',
    ):
        with pytest.raises(Problem) as e:
            ask(bad)
        assert e.value.status == 400


DEEP = {"type": "boolean"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}
WIDE = {"type": "string", "pattern": "(a|b|c|d)*" * 50 + "(x{1,1000}y{1,1000}){1,1000}"}
MANY = {f"property_{i}": {"type": "string"} for i in range(600)}
MORE = {f"property_{i}": {"type": "string"} for i in range(2001)}


@pytest.mark.parametrize(
    ("wild", "text"),
    [(DEEP, "[" * 40 + "true" + "]" * 40), (WIDE, '"abx' + "y" * 40),
     ({"type": "array", "items": {"enum": list(range(3000))}, "minItems": 10**9}, "[2999, 17, "),
     ({"type": "object", "properties": MANY, "additionalProperties": False}, '{"property_7": "a"}'),
     ({"type": "object", "properties": MORE}, None), ({"const": "x" * 70_000}, None)],
    ids=["deep", "wide", "long", "many", "more", "text"],
)  # fmt: skip
def test_deep_and_large_schemas_are_bounded(prompts, wild, text):
    """Either it works, or it is refused before an answer has begun."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": wild}}
    how = {"response_format": form, "enable_thinking": False}
    if text is not None:
        assert allowed(prompts["json"], text, end=text[-1] in "]}", **how)
        assert not allowed(prompts["json"], text[1:], **how)
        return
    with pytest.raises(Problem) as e:
        allowed(prompts["json"], "x", **how)
    assert (e.value.status, e.value.param) == (400, "response_format.json_schema.schema")


def test_no_grammar_is_compiled_once_the_answer_has_begun(prompts, monkeypatch):
    wish = schema.read_chat({"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]})
    constraint = prompts["json"].chat(wish).constraint
    monkeypatch.setattr("llguidance.LLMatcher", None)
    monkeypatch.setattr("mosaic_c.server.grammar.Grammars._matcher", None)
    for token in prompts["json"].tokenizer.encode(HM + ONE + ONE, bos=False):
        mask = constraint.mask()
        assert mask is None or mask[token]
        constraint.advance(token)


# ---- through HTTP ----


def talk(prompts, text, stream=False, **more):
    scheduler = Scripted(prompts.tokenizer, text)
    with running(scheduler, prompts) as server, server.client() as client:
        ask = [{"role": "user", "content": "hi"}]
        r = client.chat.completions.create(model="demo", messages=ask, stream=stream, **more)
        chunks = list(r) if stream else r
    assert scheduler.allowed
    return chunks


def test_reasoning_text_and_calls_each_have_their_field(prompts):
    r = talk(prompts["json"], f"hm\n</think>\n\nSee:\n{ONE}\n{NOW_JSON}", tools=[WEATHER, NOW])
    message = r.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "See:")
    assert [c.function.name for c in message.tool_calls] == ["weather", "now"]
    assert message.tool_calls[0].function.arguments == W[1]
    assert len({c.id for c in message.tool_calls}) == 2
    assert r.choices[0].finish_reason == "tool_calls"
    assert 0 < r.usage.completion_tokens_details.reasoning_tokens < 6


@pytest.mark.parametrize("inside", [False, True])
def test_a_stream_has_the_same(prompts, inside):
    text = f"hm{'' if inside else chr(10) + '</think>' + chr(10)}\n{XML_ONE}"
    chunks = talk(prompts["xml"], text, stream=True, tools=[WEATHER, NOW])
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    assert "".join(d.content or "" for d in deltas) == ""
    calls = [c for d in deltas for c in d.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, *W)]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_thinking_without_end_is_all_reasoning(prompts):
    r = talk(prompts["json"], "on and on", max_tokens=2)
    assert r.choices[0].message.content == "" and r.choices[0].message.reasoning_content
    assert r.choices[0].finish_reason == "length"


def test_markers_that_are_only_spelled_are_text(prompts):
    r = talk(prompts["json"], "</think>a <tool_call> is made so", tools=[NOW], tool_choice="none")
    assert r.choices[0].message.content == "a <tool_call> is made so"


def test_a_conversation_with_calls_goes_on(prompts):
    for name, arguments in (("json", W[1]), ("xml", W[1])):
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        ready = prompts[name].chat(schema.read_chat({"messages": messages, "tools": [WEATHER]}))
        text = prompts[name].tokenizer.decode(ready.ids, skip_special=False)
        assert 'weather {"place": "Bern", "days": 2}</tool_call>' in text
        messages[1]["tool_calls"] = [{**call, "function": {"name": "weather", "arguments": "{"}}]
        with pytest.raises(Problem) as e:
            prompts[name].chat(schema.read_chat({"messages": messages}))
        assert e.value.param == "messages[1].tool_calls[0].function.arguments"
