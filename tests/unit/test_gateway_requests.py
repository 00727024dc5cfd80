"""Bodies as rorqual.v1 messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai import chat, completions
from gateway.openai.conversation import PART_SEPARATOR
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2


def chat_request(**fields: Any) -> text_pb2.ChatRequest:
    body, _ = chat.READER.read(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())
    return chat.chat_command(body, "req").chat


def complete_requests(**fields: Any) -> list[text_pb2.CompleteRequest]:
    body, _ = completions.READER.read(json.dumps(fields).encode())
    return [command.complete for command in completions.completion_commands(body, "req")]


def test_what_is_left_out_stays_unset() -> None:
    request = chat_request()
    options = request.options
    assert options.request_id == "req"
    assert options.num_choices == 1
    assert not options.HasField("max_tokens")
    assert not options.HasField("skip_special_tokens")
    assert not request.HasField("add_generation_prompt")
    assert options.sampling.ListFields() == []


def test_every_field_arrives() -> None:
    options = chat_request(
        model="m", max_completion_tokens=7, temperature=0, top_p=0.5, top_k=40, min_p=0.25, seed=-1, n=3, stop="END",
        stop_token_ids=[5, 6], include_stop_str_in_output=True, stop_in_reasoning=True, min_tokens=2, ignore_eos=True, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"7": -100, "8": 2.5}, logprobs=True, top_logprobs=4,
        cache_salt="salt", priority=-3, return_token_ids=True, skip_special_tokens=False,
    ).options  # fmt: skip
    sampling = options.sampling
    assert options.model == "m"
    assert options.max_tokens == 7
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 40, 0.25)
    assert sampling.seed == 2**64 - 1
    assert options.num_choices == 3
    assert list(options.stop) == ["END"]
    assert list(sampling.stop_token_ids) == [5, 6]
    assert (options.include_stop_str_in_output, options.ignore_eos, sampling.min_tokens) == (True, True, 2)
    assert options.stop_in_reasoning
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert dict(sampling.logit_bias) == {7: -100, 8: 2.5}
    assert sampling.logprobs == 4
    assert (options.cache_salt, options.priority, options.return_prompt_token_ids) == ("salt", -3, True)
    assert options.HasField("skip_special_tokens")
    assert not options.skip_special_tokens


def test_logprobs_alone_ask_for_the_chosen_token() -> None:
    sampling = chat_request(logprobs=True, top_logprobs=0).options.sampling
    assert sampling.HasField("logprobs")
    assert sampling.logprobs == 0
    assert not chat_request(logprobs=False).options.sampling.HasField("logprobs")


@pytest.mark.parametrize("off", [-1, 0])
def test_top_k_has_two_ways_to_be_off(off: int) -> None:
    sampling = chat_request(top_k=off).options.sampling
    assert sampling.HasField("top_k")
    assert sampling.top_k == 0


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_one_part_list_is_the_plain_string_for_every_role(role: str) -> None:
    plain = chat_request(messages=[{"role": role, "content": "text"}])
    parts = chat_request(messages=[{"role": role, "content": [{"type": "text", "text": "text"}]}])
    assert plain == parts


def test_text_parts_are_joined_by_one_rule() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user", "assistant"):
        (message,) = chat_request(messages=[{"role": role, "content": parts}]).messages
        assert message.content == f"a{PART_SEPARATOR}b"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_no_content_beside_tool_calls_has_many_spellings(content: dict[str, Any]) -> None:
    request = chat_request(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [CALL], **content},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "43"}]},
        ]
    )
    assistant, first, second = request.messages[1:]
    assert not assistant.HasField("content")
    (call,) = assistant.tool_calls
    assert (call.id, call.name, call.arguments_json) == ("c1", "f", '{"a": 1}')
    assert (first.tool_call_id, first.content, second.content) == ("c1", "42", "43")


def test_reasoning_of_an_earlier_turn_has_two_names() -> None:
    for name in ("reasoning_content", "reasoning"):
        (message,) = chat_request(messages=[{"role": "assistant", "content": "4", name: "2+2"}]).messages
        assert message.reasoning_content == "2+2"


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "x": "ü"}, "strict": True},
}


def test_tools_reach_the_template_with_their_schema_as_written() -> None:
    (tool,) = chat_request(tools=[TOOL]).tools
    assert (tool.name, tool.description, tool.strict) == ("f", "d", True)
    assert json.loads(tool.parameters_json) == {"type": "object", "x": "ü"}
    (bare,) = chat_request(tools=[{"type": "function", "function": {"name": "g"}}]).tools
    assert bare.parameters_json == ""


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ("none", text_pb2.TOOL_CHOICE_MODE_NONE),
        ("auto", text_pb2.TOOL_CHOICE_MODE_AUTO),
        ("required", text_pb2.TOOL_CHOICE_MODE_REQUIRED),
    ],
)
def test_tool_choice_in_a_word(choice: str, mode: int) -> None:
    request = chat_request(tools=[TOOL], tool_choice=choice)
    assert request.tool_choice.mode == mode
    assert [tool.name for tool in request.tools] == ["f"]


def test_tool_choice_by_name_and_calls_one_at_a_time() -> None:
    request = chat_request(tools=[TOOL], tool_choice=NAMED, parallel_tool_calls=False)
    assert request.tool_choice.function_name == "f"
    assert request.HasField("parallel_tool_calls")
    assert not request.parallel_tool_calls
    plain = chat_request(tools=[TOOL])
    assert not plain.HasField("tool_choice")
    assert not plain.HasField("parallel_tool_calls")


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", None),
        ("required", []),
        (NAMED, None),
        ({"type": "function", "function": {"name": "g"}}, [TOOL]),
        ({"type": "function", "function": {}}, [TOOL]),
        ({"type": "function"}, [TOOL]),
        ({"type": "custom", "custom": {"name": "f"}}, [TOOL]),
        ("any", [TOOL]),
        (7, [TOOL]),
        (["f"], [TOOL]),
    ],
)
def test_a_tool_choice_that_cannot_be(choice: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(tools=tools, tool_choice=choice)
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ({"city": "Paris", "days": 2}, '{"city":"Paris","days":2}'),
        ({"ü": [1.0, None]}, '{"ü":[1.0,null]}'),
        ({}, "{}"),
        ("not json", "not json"),
        ("", ""),
        (None, ""),
    ],
)
def test_arguments_of_an_earlier_call_as_text_or_as_an_object(arguments: Any, expected: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = chat_request(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert message.tool_calls[0].arguments_json == expected


@pytest.mark.parametrize("arguments", [42, [1], True])
def test_arguments_that_are_neither_are_refused_by_name(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}])
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


def test_a_nucleus_of_nothing_is_the_likeliest_token() -> None:
    sampling = chat_request(top_p=0, top_k=40).options.sampling
    assert sampling.top_k == 1
    assert not sampling.HasField("top_p")


def test_a_refusal_stands_for_content() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "refusal": "No."}]
    assert chat_request(messages=messages).messages[1].content == "No."


def test_how_the_template_ends() -> None:
    assert not chat_request(add_generation_prompt=False).add_generation_prompt
    request = chat_request(messages=[{"role": "assistant", "content": "Once"}], continue_final_message=True)
    assert request.continue_final_message
    assert request.HasField("add_generation_prompt")
    assert not request.add_generation_prompt


def test_template_variables() -> None:
    request = chat_request(chat_template_kwargs={"thinking": True}, reasoning_effort="high")
    assert json.loads(request.chat_template_kwargs_json) == {"thinking": True}
    assert request.reasoning_effort == "high"
    assert chat_request().chat_template_kwargs_json == chat_request().reasoning_effort == ""


@pytest.mark.parametrize(("kind", "on"), [("enabled", True), ("disabled", False)])
def test_thinking_in_deepseeks_spelling(kind: str, on: bool) -> None:
    request = chat_request(thinking={"type": kind}, chat_template_kwargs={"other": 1})
    assert json.loads(request.chat_template_kwargs_json) == {"other": 1, "thinking": on}
    twice = chat_request(thinking={"type": kind}, chat_template_kwargs={"thinking": on})
    assert json.loads(twice.chat_template_kwargs_json) == {"thinking": on}


def test_a_prefix_in_deepseeks_spelling() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once", "prefix": True}]
    assert chat_request(messages=messages) == chat_request(
        messages=[messages[0], {"role": "assistant", "content": "Once"}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    with pytest.raises(InvalidRequestError):
        chat_request(messages=[{"role": "user", "content": "hi", "prefix": True}])


def test_prompts_in_all_forms() -> None:
    (text,) = complete_requests(prompt="a")
    assert text.text == "a"
    assert text.options.max_tokens == 16
    assert text.options.request_id == "req"
    (ids,) = complete_requests(prompt=[1, 2, 3])
    assert list(unpack_token_ids(ids.token_ids)) == [1, 2, 3]
    first, second = complete_requests(prompt=["a", "b"])
    assert (first.text, second.text) == ("a", "b")
    assert (first.options.request_id, second.options.request_id) == ("req-0", "req-1")
    lists = complete_requests(prompt=[[1], [2, 3]], n=2)
    assert [list(unpack_token_ids(r.token_ids)) for r in lists] == [[1], [2, 3]]
    assert [r.options.num_choices for r in lists] == [2, 2]
    (empty,) = complete_requests(prompt="")
    assert empty.WhichOneof("prompt") == "text"


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [[1], 2], None, 5, {"a": 1}, [[-1]], [2**32], [1.5]])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        complete_requests(prompt=prompt)
    assert caught.value.field.startswith("prompt")


def test_scoring_a_prompt() -> None:
    (request,) = complete_requests(prompt="a", echo=True, max_tokens=0, logprobs=1)
    assert request.echo
    assert request.options.HasField("max_tokens")
    assert request.options.max_tokens == 0
    assert (request.options.sampling.logprobs, request.options.sampling.prompt_logprobs) == (1, 1)
    with pytest.raises(InvalidRequestError):
        complete_requests(prompt="a", max_tokens=0)
    (plain,) = complete_requests(prompt="a", logprobs=1)
    assert not plain.options.sampling.HasField("prompt_logprobs")


def test_the_prompts_own_log_probabilities() -> None:
    sampling = chat_request(prompt_logprobs=0).options.sampling
    assert sampling.HasField("prompt_logprobs")
    assert not sampling.HasField("logprobs")
    (both,) = complete_requests(prompt="a", echo=True, logprobs=1, prompt_logprobs=5)
    assert (both.options.sampling.logprobs, both.options.sampling.prompt_logprobs) == (1, 5)
    (alone,) = complete_requests(prompt="a", prompt_logprobs=2)
    assert not alone.echo
    assert alone.options.sampling.prompt_logprobs == 2
