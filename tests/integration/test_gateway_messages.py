"""/v1/messages: the real anthropic client, the order of the events, blocks in and out, errors in Anthropic's body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from rorqual.v1 import common_pb2, text_pb2
from tests.integration.test_gateway_responses import named_events, thinking_then_calls
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, event, finish, say, scripted_tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "scripted", "max_tokens": 64, "messages": HI}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address) as http:
        yield http


@pytest.fixture
async def client(http: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=http.url, api_key="any", max_retries=0) as client:
        yield client


def chat_of(tokenizer: ScriptedTokenizer) -> text_pb2.ChatRequest:
    request = tokenizer.requests[-1]
    assert isinstance(request, text_pb2.ChatRequest)
    return request


async def test_a_text(http: RunningGateway, client: anthropic.AsyncAnthropic, tokenizer: ScriptedTokenizer) -> None:
    answer = await client.messages.create(
        model="scripted", max_tokens=9, messages=HI, system=[{"type": "text", "text": "be brief"}], stop_sequences=["X"]
    )
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message",
        "assistant",
        "scripted",
        "end_turn",
    )
    assert answer.stop_sequence is None
    assert [(b.type, b.text) for b in answer.content if b.type == "text"] == [("text", "Hello world")]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 3)
    request = chat_of(tokenizer)
    assert [(m.role, m.content) for m in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.options.max_tokens, list(request.options.stop)) == (9, ["X"])
    sampled = {**BODY, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}}
    response = await http.client.post("/v1/messages", json=sampled)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert "x-rorqual-ignored-fields" not in response.headers
    sampling = chat_of(tokenizer).options.sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 5)


async def test_events_come_in_anthropics_order(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = thinking_then_calls
    body = {**BODY, "tools": [TOOL]}
    response = await http.client.post("/v1/messages", json={**body, "stream": True})
    events = named_events(response.text)
    names = [e["type"] if e["type"] != "content_block_delta" else e["delta"]["type"] for e in events]
    joined = [name for n, name in enumerate(names) if not (name.endswith("_delta") and names[n - 1] == name)]
    start, stop = "content_block_start", "content_block_stop"
    assert joined == [
        "message_start",
        start, "thinking_delta", "signature_delta", stop,
        start, "text_delta", stop,
        start, "input_json_delta", stop,
        start, "input_json_delta", stop,
        "message_delta",
        "message_stop",
    ]  # fmt: skip
    blocks = [e for e in events if e["type"].startswith("content_block")]
    assert [e["index"] for e in blocks] == sorted(e["index"] for e in blocks)
    assert events[0]["message"]["usage"]["input_tokens"] == 1
    assert events[0]["message"]["content"] == []
    assert [e["content_block"] for e in blocks if e["type"] == start] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "", "citations": None},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {}},
        {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    ]
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    usage = {
        "input_tokens": 1,
        "output_tokens": 6,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 1},
    }
    assert end["usage"] == usage
    whole = (await http.client.post("/v1/messages", json=body)).json()
    assert whole["usage"] == usage
    assert [b.get("thinking") or b.get("text") or b["input"] for b in whole["content"]] == [
        "hm",
        "Let me look.",
        {"a": 1},
        {},
    ]
    assert whole["stop_reason"] == "tool_use"


async def test_a_conversation_goes_on_with_the_blocks_it_was_given(
    client: anthropic.AsyncAnthropic, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = thinking_then_calls
    async with client.messages.stream(model="scripted", max_tokens=64, messages=HI, tools=[TOOL]) as stream:
        first = await stream.get_final_message()
    whole = await client.messages.create(model="scripted", max_tokens=64, messages=HI, tools=[TOOL])
    assert first.content[0] == whole.content[0]
    turns: Any = [
        *HI,
        {"role": "assistant", "content": whole.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "42"},
                {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "43"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    await client.messages.create(model="scripted", max_tokens=64, messages=turns, tools=[TOOL])
    user, assistant, one, two, last = chat_of(tokenizer).messages
    assert (user.content, last.role, last.content) == ("hi", "user", "so?")
    assert (assistant.reasoning_content, assistant.content) == ("hm", "Let me look.")
    assert [(c.id, c.name, json.loads(c.arguments_json)) for c in assistant.tool_calls] == [
        ("call_1", "f", {"a": 1}),
        ("call_2", "g", {}),
    ]
    assert [(m.role, m.tool_call_id, m.content) for m in (one, two)] == [
        ("tool", "call_1", "42"),
        ("tool", "call_2", "43"),
    ]


async def test_an_assistants_last_turn_is_continued(
    client: anthropic.AsyncAnthropic, tokenizer: ScriptedTokenizer
) -> None:
    turns: Any = [*HI, {"role": "assistant", "content": "Once upon"}]
    await client.messages.create(model="scripted", max_tokens=9, messages=turns)
    request = chat_of(tokenizer)
    assert request.continue_final_message
    assert request.HasField("add_generation_prompt")
    assert not request.add_generation_prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "max_tokens", "reason", "sequence"),
    [
        (say("a", "b", length=True), 2, "max_tokens", None),
        (say("a", "b", length=True), 9, "model_context_window_exceeded", None),
        (Script([[event(0, [1], content="a")], [finish(0, [2], stop_string="X")]]), 9, "stop_sequence", "X"),
    ],
)
async def test_why_it_stopped(
    http: RunningGateway,
    tokenizer: ScriptedTokenizer,
    script: Script,
    max_tokens: int,
    reason: str,
    sequence: str | None,
    stream: bool,
) -> None:
    tokenizer.script = lambda request: script
    response = await http.client.post("/v1/messages", json={**BODY, "max_tokens": max_tokens, "stream": stream})
    end = named_events(response.text)[-2]["delta"] if stream else response.json()
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("thinking", "switch"),
    [({"type": "enabled", "budget_tokens": 1024}, True), ({"type": "disabled"}, False), ({"type": "adaptive"}, None)],
)
async def test_the_thinking_switch(
    http: RunningGateway, tokenizer: ScriptedTokenizer, thinking: Any, switch: bool | None
) -> None:
    body = {**BODY, "thinking": thinking, "output_config": {"effort": "high"}}
    response = await http.client.post("/v1/messages", json=body)
    request = chat_of(tokenizer)
    # Adaptive asks for nothing: a model that has no reasoning answers without.
    assert json.loads(request.chat_template_kwargs_json or "{}") == ({} if switch is None else {"thinking": switch})
    assert request.reasoning_effort == ("" if switch is False else "high")
    ignored = {"enabled": "thinking.budget_tokens", "disabled": "output_config.effort", "adaptive": None}
    assert response.headers.get("x-rorqual-ignored-fields") == ignored[thinking["type"]]
    await http.client.post("/v1/messages", json={**BODY, "thinking": thinking})
    assert chat_of(tokenizer).reasoning_effort == ("adaptive" if switch is None else "")


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [
        ({"type": "auto"}, text_pb2.TOOL_CHOICE_MODE_AUTO, ""),
        ({"type": "none"}, text_pb2.TOOL_CHOICE_MODE_NONE, ""),
        ({"type": "any"}, text_pb2.TOOL_CHOICE_MODE_REQUIRED, ""),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, 0, "f"),
    ],
)
async def test_the_choice_of_tools(
    client: anthropic.AsyncAnthropic, tokenizer: ScriptedTokenizer, choice: Any, mode: int, name: str
) -> None:
    tool: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "strict": True}
    await client.messages.create(model="scripted", max_tokens=9, messages=HI, tools=[tool], tool_choice=choice)
    request = chat_of(tokenizer)
    assert (request.tool_choice.mode, request.tool_choice.function_name) == (mode, name)
    assert request.HasField("parallel_tool_calls") == ("disable_parallel_tool_use" in choice)
    assert not request.parallel_tool_calls
    (sent,) = request.tools
    assert (sent.name, sent.description, json.loads(sent.parameters_json)) == ("f", "d", {"type": "object"})
    assert sent.strict


async def test_the_models_in_anthropics_form(client: anthropic.AsyncAnthropic) -> None:
    (model,) = (await client.models.list()).data
    assert (model.type, model.id, model.display_name) == ("model", "scripted", "scripted")
    assert model.created_at.isoformat() == "2023-11-14T22:13:20+00:00"
    assert model.max_input_tokens == 4096
    assert await client.models.retrieve("scripted") == model
    with pytest.raises(anthropic.NotFoundError):
        await client.models.retrieve("nobody")


async def test_count_tokens(client: anthropic.AsyncAnthropic, http: RunningGateway) -> None:
    count = await client.messages.count_tokens(model="scripted", messages=HI, system="abc")
    assert count.input_tokens == 5  # a token a character, in this tokenizer
    response = await http.client.post("/v1/messages/count_tokens", json={"messages": []})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[1].content[0].input",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[1]",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
          "tool_choice": {"type": "tool", "name": "web_search"}}, "tools[1].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}, {"name": "f", "input_schema": 5}]},
         "tools[1].input_schema"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ],
)  # fmt: skip
async def test_a_bad_value_is_named_as_it_was_written(http: RunningGateway, fields: Any, named: str) -> None:
    response = await http.client.post("/v1/messages", json={**BODY, **fields})
    assert response.status_code == 400, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


async def test_errors_have_anthropics_body_and_classes(
    client: anthropic.AsyncAnthropic, http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def ask(**fields: Any) -> None:
        await client.messages.create(**{**BODY, **fields})

    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(model="nobody")
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["error"]["type"] == "not_found_error"

    def refuse(code: int, reason: str) -> None:
        error = common_pb2.Error(code=code, reason=reason, message="why")
        tokenizer.script = lambda request: Script([], refuse=error)

    refuse(8, "QUEUE_FULL")
    with pytest.raises(anthropic.RateLimitError) as full:
        await ask()
    assert full.value.response.headers["retry-after"] == "1"
    refuse(14, "SCHEDULER_UNAVAILABLE")
    with pytest.raises(anthropic.InternalServerError) as gone:
        await ask()
    assert (gone.value.status_code, "why" in gone.value.message) == (503, True)
    refuse(13, "INTERNAL")
    with pytest.raises(anthropic.InternalServerError) as internal:
        await ask()
    assert "why" not in internal.value.message
    for method, path, kind in (
        ("GET", "/v1/messages", "invalid_request_error"),
        ("POST", "/v1/messages", "request_too_large"),
    ):
        content = b"x" * (33 * 1024 * 1024) if kind == "request_too_large" else None
        response = await http.client.request(method, path, content=content)
        assert response.json()["error"]["type"] == kind
    async with running_gateway(tokenizer.address, api_key=("k",)) as closed:
        response = await closed.client.post("/v1/messages", json=BODY)
        assert response.headers["request-id"] == response.json()["request_id"]
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        async with anthropic.AsyncAnthropic(base_url=closed.url, api_key="k", max_retries=0) as keyed:
            tokenizer.script = lambda request: say("a")
            assert (await keyed.messages.create(**BODY)).stop_reason == "end_turn"


async def test_an_error_in_the_middle_is_an_error_event(
    client: anthropic.AsyncAnthropic, http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    error = common_pb2.Error(code=13, reason="INTERNAL", message="secret")
    tokenizer.script = lambda request: Script([[event(0, [1], content="a")]], error=error)
    response = await http.client.post("/v1/messages", json={**BODY, "stream": True})
    last = named_events(response.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in response.text

    async def read() -> None:
        async with client.messages.stream(model="scripted", max_tokens=9, messages=HI) as stream:
            async for _ in stream:
                pass

    with pytest.raises(anthropic.APIStatusError):
        await read()
