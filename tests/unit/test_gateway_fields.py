"""Bodies: whatever comes, a 400 that names the place, or a typed body."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.anthropic import request as message_request
from gateway.openai import chat, completions, response_request
from gateway.openai.fields import MAX_SEARCHED_BYTES, ignored_header
from gateway.openai.schema import ChatBody, CompletionBody
from gateway.policy import RULES, Act, Dialect
from rorqual.core.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "hi"}]


def chat_error(body: Any) -> InvalidRequestError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        parsed, _ = chat.READER.read(raw)
        chat.chat_command(parsed, "r")
    except InvalidRequestError as error:
        return error
    pytest.fail("the body was taken")


def with_field(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **fields}


def nested(depth: int) -> dict[str, Any]:
    """A schema of `depth` levels, with brackets in its strings, which are none."""
    schema: dict[str, Any] = {"description": '[{"' * 100}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": 7}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [42]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "admin", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        (with_field(temperature=-0.1), "temperature"),
        (with_field(temperature="hot"), "temperature"),
        (with_field(temperature=2.5), "temperature"),
        (with_field(top_p=-0.1), "top_p"),
        (with_field(min_p=1.5), "min_p"),
        (with_field(top_k=-2), "top_k"),
        (with_field(n=0), "n"),
        (with_field(n=129), "n"),
        (with_field(n=True), "n"),
        (with_field(max_tokens=0), "max_tokens"),
        (with_field(max_tokens=-1), "max_tokens"),
        (with_field(max_tokens=2**32), "max_tokens"),
        (with_field(max_tokens=1, max_completion_tokens=2), "max_tokens"),
        (with_field(min_tokens=5, max_tokens=4), "min_tokens"),
        (with_field(seed=2**63), "seed"),
        (with_field(seed=1.5), "seed"),
        (with_field(presence_penalty=3), "presence_penalty"),
        (with_field(frequency_penalty=-3), "frequency_penalty"),
        (with_field(repetition_penalty=0), "repetition_penalty"),
        (with_field(logit_bias={"x": 1}), "logit_bias"),
        (with_field(logit_bias={"-1": 1}), "logit_bias"),
        (with_field(logit_bias={"1": 101}), "logit_bias"),
        (with_field(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
        (with_field(stop=""), "stop"),
        (with_field(stop=["a"] * 17), "stop"),
        (with_field(stop=["x" * 1025]), "stop[0]"),
        (with_field(stop=["é" * 513]), "stop"),
        (with_field(stop=[1]), "stop[0]"),
        (with_field(stop_token_ids=[-1]), "stop_token_ids[0]"),
        (with_field(top_logprobs=2), "top_logprobs"),
        (with_field(logprobs=True, top_logprobs=21), "top_logprobs"),
        (with_field(logprobs=3), "logprobs"),
        (with_field(stream_options={"include_usage": True}), "stream_options"),
        (with_field(stream="yes"), "stream"),
        (with_field(tools=[{"type": "function", "name": "f", "parameters": {}}]), "tools[0].function"),
        (with_field(tool_choice={"type": "none"}), "tool_choice"),
        (with_field(max_tokens=4.5), "max_tokens"),
        (with_field(stop_token_ids=[1, 2.5]), "stop_token_ids[1]"),
        (with_field(max_tokens=1e300), "max_tokens"),
        (with_field(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
         "tools[0].function.parameters"),
        (with_field(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
        (with_field(continue_final_message=True), "continue_final_message"),
        (with_field(chat_template_kwargs=[]), "chat_template_kwargs"),
        (with_field(thinking={"type": "maybe"}), "thinking.type"),
        (with_field(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False}), "thinking"),
        (with_field(priority=2**31), "priority"),
        (with_field(prompt_logprobs=21), "prompt_logprobs"),
        (with_field(prompt_logprobs=1, stream=True), "prompt_logprobs"),
        (with_field(metadata={"a": 1}), "metadata"),
        ({"messages": [*MESSAGES, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
         "messages[1].function_call"),
        ({"messages": [*MESSAGES, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1].audio"),
        (b'{"messages":[{"role":"user","content":"x","y":1e999}]}', "messages"),
        (with_field(messages=MESSAGES * 16_385), "messages"),
        (with_field(tools=[{"type": "function", "function": {"name": "f"}}] * 1025), "tools"),
        (with_field(stream=True, stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation"),
        (with_field(tools=[{"type": "function", "function": {"name": "f", "parameters": nested(65)}}]),
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(body: Any, field: str) -> None:
    error = chat_error(body)
    assert error.field == field
    assert error.message.startswith(field)
    assert "`" not in error.message
    assert "Error" not in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_whitespace_pattern", " "),
        ("regex", "a+"),
        ("ebnf", "root ::= x"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("best_of", 3),
        ("use_beam_search", True),
        ("chat_template", "{{ x }}"),
        ("request_id", "mine"),
        ("extra_key", "k"),
        ("no_stop_trim", True),
        ("logits_processors", ["x"]),
        ("web_search_options", {}),
        ("echo", True),
    ],
)
def test_a_known_field_that_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    error = chat_error(with_field(**{name: value}))
    assert error.field == name
    assert name in error.message
    assert error.reason == "UNSUPPORTED_FIELD"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("tool_choice", "auto"),
        ("tool_choice", "none"),
        ("parallel_tool_calls", True),
        ("guided_json", None),
        ("modalities", ["text"]),
        ("best_of", 1),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("service_tier", "auto"),
        ("store", False),
        ("length_penalty", 1.0),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": nested(64)}}]),
        ("stream_options", None),
    ],
)
def test_its_harmless_values_pass_without_a_word(name: str, value: Any) -> None:
    body, unknown = chat.READER.read(json.dumps(with_field(**{name: value})).encode())
    assert unknown == []
    chat.chat_command(body, "r")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_decoding_backend", "outlines"),
        ("prediction", {"type": "content", "content": "x"}),
        ("service_tier", "priority"),
        ("store", True),
        ("verbosity", "low"),
        ("mm_processor_kwargs", {"fps": 1}),
    ],
)
def test_a_hint_is_taken_and_named(name: str, value: Any) -> None:
    body, ignored = chat.READER.read(json.dumps(with_field(**{name: value})).encode())
    assert ignored == [name]
    assert ignored_header(ignored) == {"x-rorqual-ignored-fields": name}
    chat.chat_command(body, "r")


def test_whole_numbers_may_be_written_with_a_point() -> None:
    """To JSON Schema 4.0 is an integer, and clients in languages of one kind of number write it so."""
    raw = (
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":4.0,"top_k":40.0,"seed":1.0,"n":2e0,"temperature":1.0,'
        b'"stop_token_ids":[5.0,6],"min_tokens":3.0,"metadata":{"a":"4.0"},'
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","maxProperties":4.0}}}]}'
    )
    body, ignored = chat.READER.read(raw)
    assert ignored == []
    assert (body.max_tokens, body.top_k, body.seed, body.n, body.min_tokens) == (4, 40, 1, 2, 3)
    assert (body.stop_token_ids, body.temperature) == ([5, 6], 1.0)
    options = chat.chat_command(body, "r").chat.options
    assert (options.max_tokens, options.sampling.top_k, options.num_choices) == (4, 40, 2)
    assert body.tools is not None
    assert body.tools[0].function is not None
    assert b'"maxProperties":4.0' in bytes(body.tools[0].function.parameters)  # a schema is left as it is
    completion, _ = completions.READER.read(b'{"prompt":[1.0,2],"max_tokens":3.0}')
    assert (completion.prompt, completion.max_tokens) == ([1, 2], 3)
    thinking = b'{"max_tokens":9.0,"messages":[{"role":"user","content":"x"}],"thinking":{"type":"enabled","budget_tokens":8.0}}'
    message, _ = message_request.READER.read(thinking)
    assert message.thinking is not None
    assert (message.max_tokens, message.thinking.budget_tokens) == (9, 8)


def test_every_row_of_the_policy_has_one_meaning() -> None:
    """A name has one row a dialect, and what the schema serves has none."""
    for dialect in Dialect:
        names = [rule.name for rule in RULES if dialect in rule.dialects]
        assert len(names) == len(set(names)), dialect
    for rule in RULES:
        assert rule.cure == "" or rule.act is Act.REFUSED
        assert not rule.asks(None)
    for reader in (chat.READER, completions.READER, response_request.READER, message_request.READER):
        assert not reader.rules.keys() & set(reader.body_type.__struct_encode_fields__)


def test_every_field_may_be_null() -> None:
    names = [name for name in ChatBody.__struct_fields__ if name != "messages"]
    body, _ = chat.READER.read(json.dumps(with_field(**dict.fromkeys(names))).encode())
    assert chat.chat_command(body, "r").chat.options.num_choices == 1


def test_unknown_fields_are_named_in_a_header_that_is_always_clean() -> None:
    raw = json.dumps(with_field(foo=1, **{"bar\r\nX: y": 2, "ü" * 100: 3})).encode()
    _, unknown = chat.READER.read(raw)
    header = ignored_header(unknown)["x-rorqual-ignored-fields"]
    assert header.startswith("foo, bar%0D%0AX%3A%20y, ")
    assert header.isascii()
    assert header.isprintable()
    assert ignored_header([]) == {}
    assert ignored_header(["a", ""])["x-rorqual-ignored-fields"] == 'a, ""'  # a value cannot end with a blank
    assert ignored_header([str(i) for i in range(40)])["x-rorqual-ignored-fields"].endswith("and 24 more")


def test_unknown_fields_inside_others_are_named_once() -> None:
    part = {"type": "text", "text": "a", "mine": {"a": 1}}
    function = {"name": "f", "parameters": {"type": "object", "anything": 1}, "version": 2}
    body = with_field(
        messages=[
            {"role": "user", "content": [part, part], "weight": 1, "absent": None},
            {"role": "user", "content": "x"},
        ],
        tools=[{"type": "function", "function": function}],
        stream=True,
        stream_options={"include_usage": True, "every": 3},
        response_format={"type": "text", "also": 1},
        chat_template_kwargs={"anything": {"x": 1}},
        logit_bias={"5": 1},
        outer=1,
    )
    _, unknown = chat.READER.read(json.dumps(body).encode())
    assert sorted(unknown) == [
        "messages[].content[].mine", "messages[].weight", "outer", "response_format.also", "stream_options.every",
        "tools[].function.version",
    ]  # fmt: skip
    assert "messages[].weight" in ignored_header(unknown)["x-rorqual-ignored-fields"]
    _, unknown = response_request.READER.read(
        json.dumps({"input": [{"role": "user", "content": "a", "mood": 1}], "text": {"tone": 1}}).encode()
    )
    assert sorted(unknown) == ["input[].mood", "text.tone"]
    large = {"input": [{"role": "user", "content": "a" * MAX_SEARCHED_BYTES, "mood": 1}], "outer": 1}
    assert response_request.READER.read(json.dumps(large).encode())[1] == ["outer"]
    block = {"type": "text", "text": "a", "citations": [1]}
    _, unknown = message_request.READER.read(
        json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}).encode()
    )
    assert unknown == ["messages[].content[].citations"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"7",
        b"[]",
        b'"x"',
        b"not json",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00 x"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 400 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":' + b'{"a":' * 9000 + b"1" + b"}" * 9001,
        b'{"messages":[{"role":"user","content":"x"}],"response_format":' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"\xff":1,"messages":[{"role":"user","content":"x"}]}',
        b'{"\\ud800":1,"messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_what_is_no_proper_body_is_a_400(raw: bytes) -> None:
    error = chat_error(raw)
    assert error.message
    assert "Traceback" not in error.message


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(raw: bytes) -> None:
    for reader in (chat.READER, completions.READER):
        with contextlib.suppress(InvalidRequestError):
            reader.read(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(ChatBody.__struct_fields__ + CompletionBody.__struct_fields__)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, json_values, max_size=6))
def test_wrong_types_anywhere_never_raise_anything_else(body: dict[str, Any]) -> None:
    raw = json.dumps({"messages": MESSAGES, "prompt": "x", **body}).encode("utf-8", "surrogatepass")
    with contextlib.suppress(InvalidRequestError):
        parsed, _ = chat.READER.read(raw)
        chat.chat_command(parsed, "r").SerializeToString()
    with contextlib.suppress(InvalidRequestError):
        completion, _ = completions.READER.read(raw)
        for command in completions.completion_commands(completion, "r"):
            command.SerializeToString()


def test_reading_a_body_leaves_nothing_for_the_collector_of_cycles() -> None:
    """It runs seldom here: what waits for it is memory that grows with each request."""
    body = json.dumps(with_field(stream_options={"include_usage": True, "stranger": "x" * 1000}, odd=1)).encode()
    chat.READER.read(body)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            assert chat.READER.read(body)[1] == ["odd", "stream_options.stranger"]
            with contextlib.suppress(InvalidRequestError):
                chat.READER.read(b'{"messages": 5}')
        assert gc.collect() == 0
    finally:
        gc.enable()
