"""Bodies of requests: what is not understood or not supported is a 400 that names the field, never ignored."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")

from helpers_server import THINKING, make_folder, prompter

from mosaic_c.names import demo_folder
from mosaic_c.server import schema
from mosaic_c.server.body import read_json
from mosaic_c.server.problem import Problem

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refused(call, *args):
    with pytest.raises(Problem) as e:
        call(*args)
    assert e.value.status == 400
    body = e.value.body()["error"]
    assert set(body) == {"message", "type", "param", "code"} and "\n" not in body["message"]
    return e.value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b'{"a": "\xc3"}', b'{"a": NaN}', b'{"a": -Infinity}',
        b'{"a": 1e999}', b'{"a": 1, "a": 2}', b'{"x": {"a": 1, "a": 2}}', b'{"a": "\\ud800"}', b'{"\\udc00": 1}',
        b'{"a": "\\uD83D x"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}", b'{"a": [' + b"1," * 300_000 + b"1]}", b'{"a": 1} x', b"{'a': 1}",
        b'{"a": 01}', b"\xef\xbb\xbf{}", b'{"a": "\n"}',
    ],
    ids=lambda d: repr(d[:24]),
)  # fmt: skip
def test_what_is_no_sound_json_is_refused(data):
    assert refused(read_json, data).code == "invalid_json"


def test_sound_json_is_read():
    text = '{"a": "\\ud83d\\ude00", "b": [1, 2.5, null, true], "c": 12345678901234567890}'
    assert read_json(text.encode()) == {
        "a": "\U0001f600",
        "b": [1, 2.5, None, True],
        "c": 12345678901234567890,
    }


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(alphabet='{}[]",:\\u0123dDeE.-+ntf ', max_size=60).map(str.encode)
)
def test_any_bytes_give_an_object_or_a_problem(data):
    try:
        assert isinstance(read_json(data), dict)
    except Problem as problem:
        assert problem.status == 400


CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**30}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"logit_bias": {"50": 1}}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"surprise": 1}, "surprise"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
     "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"enable_thinking": 1}, "enable_thinking"),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking"),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ({"user": 7}, "user"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "field"), CHAT, ids=lambda v: json.dumps(v)[:60])
def test_a_field_that_is_wrong_is_named(more, field):
    problem = refused(schema.read_chat, {"messages": ASK, **more})
    assert problem.param == field
    assert problem.message.startswith(field.split(".")[0].split("[")[0])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"), ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"), ({"prompt": "a", "messages": ASK}, "messages"),
        ({"prompt": "a", "tools": []}, "tools"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)  # fmt: skip
def test_a_field_of_a_completion_that_is_wrong_is_named(body, field):
    assert refused(schema.read_text, body).param == field


def test_null_and_what_asks_for_nothing_is_fine():
    nothing = {
        "n": 1, "logit_bias": {}, "store": False, "modalities": ["text"], "service_tier": "auto", "stop": None,
        "tools": None, "response_format": {"type": "text"}, "user": "me", "metadata": None, "audio": None,
        "functions": [], "stream_options": None, "parallel_tool_calls": True,
    }  # fmt: skip
    wish = schema.read_chat({"messages": ASK, **nothing})
    assert wish.stop == () and wish.max_tokens is None and wish.format.schema is None
    assert wish.sampling == {} and wish.thinking is None


def test_a_message_that_the_client_library_wrote_comes_back_fine():
    said = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None, "reasoning_content": "hm"}  # fmt: skip
    wish = schema.read_chat({"messages": [*ASK, said, {"role": "user", "content": "y"}]})
    assert wish.messages[1] == {"role": "assistant", "content": "x", "reasoning_content": "hm"}


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        schema.read_chat({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"]
        == "ab"
    )


INNER = ["role", "content", "type", "function", "name", "json_schema"]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "model",
                "stream",
                "stop",
                "tools",
                "tool_choice",
                "response_format",
                "n",
                "seed",
                "top_k",
                "messages",
                "max_tokens",
                "stream_options",
                "logprobs",
                "chat_template_kwargs",
                "metadata",
                "reasoning_effort",
                "x",
            ]
        ),  # fmt: skip
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False)
            | st.text(max_size=5),
            lambda v: (
                st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(INNER), v, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_any_body_gives_a_wish_or_a_problem_with_a_field(body):
    for read in (schema.read_chat, schema.read_text):
        try:
            read(body)
        except Problem as problem:
            assert problem.status == 400 and problem.param is not None


# ---- what depends on the model ----


@pytest.fixture(scope="module")
def plain():
    return prompter(demo_folder(), grammars=False)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("m") / "m", THINKING, ("<think>", "</think>"))
    return prompter(folder)


def chat(prompts, **more):
    return prompts.chat(schema.read_chat({"messages": ASK, **more}))


def test_tools_of_a_model_whose_template_has_none_are_refused(plain):
    assert refused(lambda: chat(plain, tools=[TOOL])).param == "tools"
    chat(plain, tools=[TOOL], tool_choice="none")


def test_thinking_is_switched_in_three_ways(thinking):
    on = chat(thinking)
    assert on.reasoning.kind == "reasoning"
    for more in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "enable_thinking": False},
    ):
        off = chat(thinking, **more)
        assert off.reasoning.kind == "content" and off.ids != on.ids
    assert chat(thinking, reasoning_effort="high").ids == on.ids


def test_a_switch_that_the_template_does_not_have_is_refused(plain, thinking, tmp_path):
    assert refused(lambda: chat(plain, enable_thinking=True)).param == "enable_thinking"
    assert refused(lambda: chat(plain, reasoning_effort="low")).param == "reasoning_effort"
    assert chat(plain, enable_thinking=False).ids == chat(plain).ids
    template = "<think>{{ messages[0].content }}</think>"
    always = prompter(make_folder(tmp_path / "m", template), grammars=False)
    assert refused(lambda: chat(always, enable_thinking=False)).param == "enable_thinking"
    assert refused(lambda: chat(always, reasoning_effort="none")).param == "reasoning_effort"
    assert chat(always, enable_thinking=True).ids == chat(always).ids
    more = {"chat_template_kwargs": {"other": 1}}
    assert refused(lambda: chat(thinking, **more)).param == "chat_template_kwargs.other"
    more = {"chat_template_kwargs": {"messages": []}}
    assert refused(lambda: chat(thinking, **more)).param == "chat_template_kwargs.messages"


def test_the_state_is_kept_where_the_last_message_ends(plain):
    ready = chat(plain)
    tail = ready.ids[ready.keep_at[0] :]
    assert plain.tokenizer.decode(tail, skip_special=False) == "<|im_start|>assistant\n"


def test_the_state_is_kept_where_a_shared_beginning_ends(plain, thinking):
    rules = {"role": "system", "content": "Be kind. " * 40}
    keeps = []
    for text in ("one", "quite another", "\u2043"):
        ready = chat(plain, messages=[rules, {"role": "user", "content": text}])
        keeps.append(ready.keep_at[0])
        shown = plain.tokenizer.decode(ready.ids[: ready.keep_at[0]], skip_special=False)
        assert shown.endswith("<|im_end|>\n<|im_start|>user\n") and len(ready.keep_at) == 2
    assert len(set(keeps)) == 1
    short = [{"role": "system", "content": "Be kind."}, *ASK]
    assert len(chat(plain, messages=short).keep_at) == 1
    long = {"type": "function", "function": {"name": "f", "description": "does a thing " * 60}}
    assert len(chat(thinking, tools=[long]).keep_at) == 2


def test_a_template_that_fails_is_a_problem_of_the_request(plain):
    from mosaic_c.server.problem import problem_of

    body = {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}
    with pytest.raises(Exception) as e:
        plain.chat(schema.read_chat(body))
    assert problem_of(e.value).status == 400


def test_a_template_whose_prompt_changes_what_was_before_keeps_nothing(tmp_path):
    template = "{% if add_generation_prompt %}<|im_start|>first{% else %}other{% endif %}{{ messages[0].content }}"
    assert chat(prompter(make_folder(tmp_path / "m", template), grammars=False)).keep_at == ()


def test_a_model_without_a_template_takes_completions_only(tmp_path):
    bare = prompter(make_folder(tmp_path / "m", None), grammars=False)
    assert refused(lambda: chat(bare)).code == "no_chat_template"
    assert bare.text(schema.read_text({"prompt": "Once"})).ids


def test_token_ids_out_of_range_are_refused(plain):
    assert refused(lambda: plain.text(schema.read_text({"prompt": [0, 5000]}))).param == "prompt"
    assert refused(lambda: plain.text(schema.read_text({"prompt": [-1]}))).param == "prompt"


def test_without_grammars_forms_are_refused(plain):
    from mosaic_c.server.problem import problem_of

    with pytest.raises(Exception) as e:
        chat(plain, response_format={"type": "json_object"})
    assert problem_of(e.value).status == 400
