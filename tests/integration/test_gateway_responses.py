"""/v1/responses: the real openai client, the order of the events, items in and out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rorqual.v1 import common_pb2, text_pb2
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_tokenizer import (
    EOS,
    Script,
    ScriptedTokenizer,
    event,
    finish,
    logprob,
    say,
    scripted_tokenizer,
)

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address) as http:
        yield http


@pytest.fixture
async def client(http: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=http.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def named_events(body: str) -> list[dict[str, Any]]:
    """The decoded data of each event, whose name is its type."""
    events = []
    for block in filter(None, body.split("\n\n")):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def thinking_then_calls(request: Any) -> Script:
    """Thought, text, and two calls of which the second comes whole."""
    delta = text_pb2.ToolCallDelta
    return Script(
        [
            [event(0, [9], reasoning="hm")],
            [event(0, [8], content="Let me look.")],
            [event(0, [2], tool_call=delta(tool_call_idx=0, id="call_1", name="f", arguments_json_delta=""))],
            [event(0, [3], tool_call=delta(tool_call_idx=0, arguments_json_delta='{"a":'))],
            [
                event(0, [4], tool_call=delta(tool_call_idx=0, arguments_json_delta="1}")),
                event(0, tool_call=delta(tool_call_idx=1, id="call_2", name="g", arguments_json_delta="{}")),
            ],
            [finish(0, [EOS], common_pb2.FINISH_REASON_TOOL_CALLS)],
        ],
        num_reasoning_tokens=1,
        num_cached_tokens=2,
    )


async def test_a_text(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    answer = await client.responses.create(
        model="scripted", input="hi", instructions="be brief", max_output_tokens=9, temperature=0, metadata={"a": "b"}
    )
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "scripted")
    assert answer.output_text == "Hello world"
    (message,) = answer.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert answer.usage is not None
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 3, 6)
    assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("be brief", 9, {"a": "b"})
    assert answer.completed_at is not None
    request = tokenizer.requests[0]
    assert isinstance(request, text_pb2.ChatRequest)
    assert [(m.role, m.content) for m in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert request.options.max_tokens == 9
    assert request.options.sampling.temperature == 0


async def test_events_come_in_openais_order(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = thinking_then_calls
    body = {"model": "scripted", "input": "hi", "tools": [TOOL], "stream": True}
    response = await http.client.post("/v1/responses", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    names = [e["type"].removeprefix("response.") for e in events]
    # Deltas may be merged where they come together.
    joined = [name for n, name in enumerate(names) if not (name.endswith(".delta") and names[n - 1] == name)]
    item = ["output_item.added", "output_item.done"]
    text_like = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = [item[0], "function_call_arguments.delta", "function_call_arguments.done", item[1]]
    reasoning = [name.format("reasoning_text") for name in text_like]
    text = [name.format("output_text") for name in text_like]
    assert joined == [
        "created", "in_progress", item[0], *reasoning, item[1], item[0], *text, item[1], *call, *call, "completed",
    ]  # fmt: skip
    final = events[-1]["response"]
    assert [(i["type"], i["status"]) for i in final["output"]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    for output_index, whole in enumerate(final["output"]):
        of_item = [e for e in events if e.get("output_index") == output_index]
        ids = {e.get("item_id") or e["item"]["id"] for e in of_item}
        assert ids == {whole["id"]}
        deltas = "".join(e["delta"] for e in of_item if e["type"].endswith(".delta"))
        assert deltas == (whole["arguments"] if "arguments" in whole else whole["content"][0]["text"])
        assert of_item[-1]["item"] == whole
    del body["stream"]
    plain = (await http.client.post("/v1/responses", json=body)).json()

    def shape(items: list[Any]) -> list[Any]:
        return [{k: v for k, v in i.items() if k != "id"} for i in items]

    assert shape(plain["output"]) == shape(final["output"])
    assert plain["usage"] == final["usage"]


async def test_a_conversation_goes_on_with_the_items_it_was_given(
    client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = thinking_then_calls
    async with client.responses.stream(model="scripted", input="hi", tools=[TOOL]) as stream:
        async for _ in stream:
            pass
        first = await stream.get_final_response()
    items: list[Any] = [{"role": "user", "content": "hi"}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "43"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "so?"}]},
    ]
    await client.responses.create(model="scripted", input=items, tools=[TOOL])
    request = tokenizer.requests[-1]
    assert isinstance(request, text_pb2.ChatRequest)
    user, assistant, one, two, last = request.messages
    assert (user.content, last.content) == ("hi", "so?")
    assert (assistant.role, assistant.reasoning_content, assistant.content) == ("assistant", "hm", "Let me look.")
    assert [(c.id, c.name, c.arguments_json) for c in assistant.tool_calls] == [
        ("call_1", "f", '{"a":1}'),
        ("call_2", "g", "{}"),
    ]
    assert [(m.role, m.tool_call_id, m.content) for m in (one, two)] == [
        ("tool", "call_1", "42"),
        ("tool", "call_2", "43"),
    ]


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ("none", text_pb2.TOOL_CHOICE_MODE_NONE, ""),
        ("required", text_pb2.TOOL_CHOICE_MODE_REQUIRED, ""),
        ({"type": "function", "name": "f"}, 0, "f"),
    ],
)
async def test_the_choice_of_tools(
    client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer, choice: Any, mode: int, name: str
) -> None:
    answer = await client.responses.create(
        model="scripted",
        input="hi",
        tools=[{**TOOL, "description": "d", "strict": True}],
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning={"effort": "high"},
    )
    request = tokenizer.requests[-1]
    assert isinstance(request, text_pb2.ChatRequest)
    assert (request.tool_choice.mode, request.tool_choice.function_name) == (mode, name)
    assert request.HasField("parallel_tool_calls")
    assert not request.parallel_tool_calls
    assert request.reasoning_effort == "high"
    (sent,) = request.tools
    assert (sent.name, sent.description, json.loads(sent.parameters_json)) == ("f", "d", {"type": "object"})
    # The answer repeats what was asked.
    assert [t.model_dump(exclude_none=True) for t in answer.tools] == [{**TOOL, "description": "d", "strict": True}]
    assert not answer.parallel_tool_calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_text_is_incomplete(http: RunningGateway, tokenizer: ScriptedTokenizer, stream: bool) -> None:
    tokenizer.script = lambda request: say("a", "b", length=True)
    response = await http.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, "stream": stream})
    final = named_events(response.text)[-1] if stream else response.json()
    if stream:
        assert final["type"] == "response.incomplete"
        final = final["response"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["output"][0]["status"] == "incomplete"
    assert final["output"][0]["content"][0]["text"] == "ab"


async def test_an_answer_without_a_word_is_an_empty_message(
    client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = lambda request: say()
    answer = await client.responses.create(model="scripted", input="hi")
    assert answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]


async def test_logprobs(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = lambda request: Script(
        [
            [event(0, [1], logprobs=[logprob("\ufffd", -0.5)])],
            [event(0, [2], content="He", logprobs=[logprob("He", -0.25, 2, [("He", -0.25)])])],
            [finish(0, [EOS])],
        ]
    )
    body: dict[str, Any] = {"input": "hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    whole = (await http.client.post("/v1/responses", json=body)).json()
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert [e["token"] for e in entries] == ["\ufffd", "He"]
    assert entries[1]["top_logprobs"] == [{"token": "He", "logprob": -0.25, "bytes": [72, 101]}]
    assert tokenizer.requests[0].options.sampling.logprobs == 1
    events = named_events((await http.client.post("/v1/responses", json={**body, "stream": True})).text)
    streamed = [e for ev in events if ev["type"] == "response.output_text.delta" for e in ev["logprobs"]]
    assert streamed == entries
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries


async def test_an_error_in_the_middle_is_an_event_then_the_failed_response(
    client: openai.AsyncOpenAI, http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    error = common_pb2.Error(code=13, reason="INTERNAL", message="secret")
    tokenizer.script = lambda request: Script([[event(0, [1], content="a")]], error=error)
    response = await http.client.post("/v1/responses", json={"input": "hi", "stream": True})
    events = named_events(response.text)
    assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"
    assert "secret" not in response.text
    stream = await client.responses.create(model="scripted", input="hi", stream=True)
    assert [e.type async for e in stream][-1] == "response.failed"


def field_error(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": []}]},
         "tools[1].parameters"),
        ({"tools": [{"type": "namespace", "name": "g", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "g", "tools": [
            {"type": "function", "name": "f", "parameters": []}]}]}, "tools[0].tools[0].parameters"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"metadata": {"k": 5}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)  # fmt: skip
async def test_a_bad_value_is_named_as_it_was_written(http: RunningGateway, fields: Any, param: str) -> None:
    error = field_error(await http.client.post("/v1/responses", json={"input": "hi", **fields}))
    assert error["param"].startswith(param)
    assert param in error["message"]


async def test_a_prompt_that_is_too_long_is_the_inputs_fault(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    error = common_pb2.Error(code=3, reason="PROMPT_TOO_LONG", message="too long", field="messages")
    tokenizer.script = lambda request: Script([], refuse=error)
    answer = field_error(await http.client.post("/v1/responses", json={"input": "hi"}))
    assert (answer["param"], answer["code"]) == ("input", "context_length_exceeded")


async def test_what_changes_nothing_is_taken_and_what_is_unknown_is_named(http: RunningGateway) -> None:
    body = {
        "input": "hi",
        "store": False,
        "background": False,
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "brand_new": 1,
    }
    response = await http.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-rorqual-ignored-fields"] == "brand_new, reasoning.summary"
    assert response.json()["prompt_cache_key"] == "k"


async def test_nothing_is_stored(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="scripted", input="hi")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
