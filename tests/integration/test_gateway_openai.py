"""The real openai client against the gateway: shapes of answers and streams."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rorqual.v1 import common_pb2, text_pb2
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway, sse_events
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

MESSAGES: Any = [{"role": "user", "content": "hi"}]


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


async def test_a_chat(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    answer = await client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0.5)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.system_fingerprint) == (
        "chat.completion",
        "scripted",
        "fp_000102030405",
    )
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    (request,) = tokenizer.requests
    assert isinstance(request, text_pb2.ChatRequest)
    assert request.messages[0].content == "hi"
    assert request.options.sampling.temperature == 0.5
    assert 0 < request.options.time_left_us <= 3600e6


async def test_a_streamed_chat(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = lambda request: say("He", "llo", " 😀", "\n", reasoning=["hm", "m"])
    stream = await client.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({(c.id, c.created, c.model, c.object, c.system_fingerprint) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas: list[Any] = [c.choices[0].delta for c in chunks[:-1]]
    assert "".join(d.content or "" for d in deltas) == "Hello 😀\n"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hmm"
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "hmm"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 7
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("include_usage", [False, True])
async def test_how_streams_end(http: RunningGateway, tokenizer: ScriptedTokenizer, include_usage: bool) -> None:
    tokenizer.script = lambda request: say("a", "b", n=2)
    body: dict[str, Any] = {**CHAT, "stream": True, "n": 2, "max_tokens": 8}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    response = await http.client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = sse_events(response.text)
    assert done == "[DONE]"
    finished: set[int] = set()
    first: set[int] = set()
    for chunk in chunks:
        assert {"id", "object", "created", "model"} <= set(chunk)
        assert include_usage or chunk["choices"]
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in finished, "nothing comes after an end"
            assert (choice["delta"].get("role") == "assistant") == (index not in first)
            first.add(index)
            if choice["finish_reason"] is not None:
                finished.add(index)
    assert finished == {0, 1}
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    whole = (await http.client.post("/v1/chat/completions", json={**CHAT, "n": 2})).json()
    assert [chunk["usage"] for chunk in with_usage] == ([whole["usage"]] if include_usage else [])
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["prompt_tokens"] == 3
    if include_usage:
        assert chunks[-1]["choices"] == []
        assert all("usage" in chunk for chunk in chunks)


async def test_continuous_usage(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    tokenizer.script = lambda request: Script(say("a", "b").steps, gate=lambda i: gates[i])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    body = {**CHAT, "stream": True, "stream_options": options}
    async with http.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:])["usage"]
                counts.append((usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]))
                if len(counts) <= 3:
                    gates[len(counts) - 1].set()
    assert counts == [(3, 0, 3), (3, 1, 4), (3, 2, 5), (3, 3, 6), (3, 3, 6)]


async def test_tool_calls(client: openai.AsyncOpenAI, http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    def script(request: Any) -> Script:
        delta = text_pb2.ToolCallDelta
        return Script(
            [
                [event(0, [1], content="Let me look.")],
                [event(0, [2], tool_call=delta(tool_call_idx=0, id="call_1", name="f", arguments_json_delta=""))],
                [event(0, [3], tool_call=delta(tool_call_idx=0, arguments_json_delta='{"a":'))],
                [
                    event(0, [4], tool_call=delta(tool_call_idx=0, arguments_json_delta="1}")),
                    event(0, tool_call=delta(tool_call_idx=1, id="call_2", name="g", arguments_json_delta="{}")),
                ],
                [finish(0, [EOS], common_pb2.FINISH_REASON_TOOL_CALLS)],
            ]
        )

    tokenizer.script = script
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer = await client.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    calls: list[Any] = list(message.tool_calls or [])
    assert [(c.id, c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("call_1", "function", "f", '{"a":1}'),
        ("call_2", "function", "g", "{}"),
    ]
    stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools, stream=True)
    ids: dict[int, list[str]] = {}
    arguments: dict[int, str] = {}
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                ids.setdefault(call.index, []).append(f"{call.id} {call.type} {call.function.name}")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert ids == {0: ["call_1 function f"], 1: ["call_2 function g"]}
    assert arguments == {0: '{"a":1}', 1: "{}"}
    request = tokenizer.requests[0]
    assert isinstance(request, text_pb2.ChatRequest)
    assert request.tools[0].name == "f"


def scored(request: Any) -> Script:
    top = [("He", -0.25), ("Ho", -math.inf)]
    return Script(
        [
            [event(0, [1], logprobs=[logprob("\ufffd", -0.5)])],
            [event(0, [2], content="He", logprobs=[logprob("He", -0.25, 2, top)])],
            [
                text_pb2.TextEvent(
                    token_ids=b"\1\0\0\0",
                    logprobs=[logprob("<eos>", math.nan)],
                    finished=text_pb2.ChoiceFinished(reason=common_pb2.FINISH_REASON_STOP),
                )
            ],
        ]
    )


async def test_logprobs_of_a_chat(
    client: openai.AsyncOpenAI, http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = scored
    response = await http.client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    body = json.loads(response.text, parse_constant=refuse)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 3
    assert content[1] == {
        "token": "He",
        "logprob": -0.25,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.25, "bytes": [72, 101]},
            {"token": "Ho", "logprob": -9999.0, "bytes": [72, 111]},
        ],
    }
    assert content[2]["logprob"] == -9999.0
    assert content[0]["top_logprobs"] == []
    stream = await client.chat.completions.create(
        model="scripted", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    streamed: list[Any] = []
    async for chunk in stream:
        if (logprobs := chunk.choices[0].logprobs) is not None:
            streamed += [entry.model_dump() for entry in logprobs.content or []]
    assert streamed == content
    assert tokenizer.requests[0].options.sampling.logprobs == 2


async def test_completions(client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer) -> None:
    def script(request: Any) -> Script:
        return say(request.text + "1", request.text + "2", n=request.options.num_choices)

    tokenizer.script = script
    answer = await client.completions.create(model="scripted", prompt=["a", "b"], n=2, max_tokens=4)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "a1a2", "stop"),
        (1, "a1a2", "stop"),
        (2, "b1b2", "stop"),
        (3, "b1b2", "stop"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    stream = await client.completions.create(
        model="scripted", prompt=["a", "b"], n=2, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    finishes: list[int] = []
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in finishes
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                finishes.append(choice.index)
    assert texts == {0: "a1a2", 1: "a1a2", 2: "b1b2", 3: "b1b2"}
    assert sorted(finishes) == [0, 1, 2, 3]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage


def echoing(request: Any) -> Script:
    echo = text_pb2.PromptEcho(
        text="ab",
        token_ids=b"\1\0\0\0\2\0\0\0",
        logprobs=[logprob("a", None), logprob("b", -1.5, 2, [("c", -0.5)])],
    )
    steps = [[event(0, echo=echo)]]
    if request.options.max_tokens:
        steps.append([event(0, [3], content="c", logprobs=[logprob("c", -0.5, 3, [("c", -0.5), ("d", -2.0)])])])
    steps.append([finish(0, reason=common_pb2.FINISH_REASON_LENGTH)])
    return Script(steps, num_prompt_tokens=2)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_and_logprobs_of_a_completion(
    http: RunningGateway, tokenizer: ScriptedTokenizer, max_tokens: int
) -> None:
    tokenizer.script = echoing
    body = {"model": "scripted", "prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    answer = (await http.client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc"[: 2 + max_tokens]
    assert answer["usage"]["completion_tokens"] == max_tokens
    expected: dict[str, list[Any]] = {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.5, -0.5],
        "top_logprobs": [None, {"c": -0.5, "b": -1.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert choice["logprobs"] == {key: column[: 2 + max_tokens] for key, column in expected.items()}
    streamed = sse_events((await http.client.post("/v1/completions", json={**body, "stream": True})).text)
    joined: dict[str, list[Any]] = {}
    for chunk in streamed[:-1]:
        for key, column in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(key, []).extend(column)
    assert joined == choice["logprobs"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == choice["text"]


async def test_prompt_logprobs(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    def script(request: Any) -> Script:
        top = [("c", -0.5), ("d", -0.75)]
        entries = [logprob("a", None), logprob("b", -math.inf, 2, top)]
        for number, entry in enumerate(entries[1].top):
            entry.token_id = 3 + number
        return Script([[event(0, echo=text_pb2.PromptEcho(logprobs=entries))], *say("x").steps])

    tokenizer.script = script
    expected = [
        None,
        {
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "2": {"logprob": -9999.0, "rank": None, "decoded_token": "b"},
        },
    ]
    chat = (await http.client.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 1})).json()
    assert chat["prompt_logprobs"] == expected
    assert chat["choices"][0]["logprobs"] is None
    body = {"model": "scripted", "prompt": "ab", "prompt_logprobs": 1, "logprobs": 0}
    (choice,) = (await http.client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["prompt_logprobs"] == expected
    assert choice["text"] == "x"
    assert choice["logprobs"]["tokens"] == []  # the script gives the generated ones none


async def test_token_ids_on_request(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    body = {**CHAT, "return_token_ids": True}
    whole = (await http.client.post("/v1/chat/completions", json=body)).json()
    assert whole["prompt_token_ids"] == [0, 1, 2]
    assert whole["choices"][0]["token_ids"] == [100, 101, EOS]
    chunks = sse_events((await http.client.post("/v1/chat/completions", json={**body, "stream": True})).text)[:-1]
    assert chunks[0]["prompt_token_ids"] == [0, 1, 2]
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == [100, 101, EOS]
    text = {"model": "scripted", "prompt": "x", "return_token_ids": True}
    (choice,) = (await http.client.post("/v1/completions", json=text)).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([0, 1, 2], [100, 101, EOS])


async def test_stop_reason_names_the_clients_own_stop(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    async def choice(**fields: Any) -> dict[str, Any]:
        body = (await http.client.post("/v1/chat/completions", json={**CHAT, **fields})).json()
        result: dict[str, Any] = body["choices"][0]
        return result

    assert "stop_reason" not in await choice()
    assert (await choice(stop_token_ids=[EOS]))["stop_reason"] == EOS
    tokenizer.script = lambda request: Script(
        [[event(0, [1], content="The quick br")], [finish(0, [2], stop_string="own fox")]]
    )
    assert (await choice(stop=["own fox"]))["stop_reason"] == "own fox"
    assert tokenizer.requests[-1].options.stop == ["own fox"]


async def test_cached_tokens_reach_the_usage(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = lambda request: Script(say("a").steps, num_prompt_tokens=70, num_cached_tokens=64)
    usage = (await http.client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_models(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("scripted", "model", "rorqual")
    assert (await client.models.retrieve("scripted")).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("no/such")
    assert caught.value.code == "model_not_found"
    assert "'no/such' is not served here; ask for 'scripted'" in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert "'gpt' is not served here; ask for 'scripted'" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_answer_are_plain_answers(
    client: openai.AsyncOpenAI, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    async def ask(**fields: Any) -> None:
        await client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "stream": stream, **fields})

    with pytest.raises(openai.NotFoundError):
        await ask(model="other")
    with pytest.raises(openai.BadRequestError) as bad:
        await ask(temperature=-1)
    assert bad.value.param == "temperature"

    def refuse(code: int, reason: str, **more: Any) -> None:
        error = common_pb2.Error(code=code, reason=reason, message="why", **more)
        tokenizer.script = lambda request: Script([], refuse=error)

    refuse(3, "PROMPT_TOO_LONG", field="messages")
    with pytest.raises(openai.BadRequestError) as long:
        await ask()
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    refuse(8, "QUEUE_FULL")
    with pytest.raises(openai.RateLimitError) as full:
        await ask()
    assert full.value.response.headers["retry-after"] == "1"
    for code, reason in ((8, "QUEUE_FULL"), (4, "DEADLINE_UNREACHABLE")):
        refuse(code, reason, metadata={"retry_after_s": "12"})
        with pytest.raises(openai.RateLimitError) as busy:
            await ask()
        assert busy.value.response.headers["retry-after"] == "12"
    refuse(14, "SCHEDULER_UNAVAILABLE")
    with pytest.raises(openai.InternalServerError) as gone:
        await ask()
    assert gone.value.status_code == 503
    assert "why" in gone.value.message
    refuse(13, "INTERNAL", field="/secret")
    with pytest.raises(openai.InternalServerError) as internal:
        await ask()
    assert internal.value.status_code == 500
    assert "why" not in internal.value.message


@pytest.mark.parametrize(
    "end",
    [
        Script([[event(0, [1], content="a")]], error=common_pb2.Error(code=13, reason="INTERNAL", message="secret")),
        Script(
            [
                [event(0, [1], content="a")],
                [
                    finish(
                        0,
                        reason=common_pb2.FINISH_REASON_ERROR,
                        error=common_pb2.Error(code=13, reason="NUMERICAL_FAULT", message="secret"),
                    )
                ],
            ]
        ),
    ],
)
@pytest.mark.parametrize("together", [False, True])
async def test_an_error_in_the_middle_is_an_event_then_the_end(
    client: openai.AsyncOpenAI, http: RunningGateway, tokenizer: ScriptedTokenizer, end: Script, together: bool
) -> None:
    end.together = together
    tokenizer.script = lambda request: end
    response = await http.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *chunks, last = sse_events(response.text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in stream]
    whole = await http.client.post("/v1/chat/completions", json=CHAT)
    assert whole.status_code == 500


async def test_what_came_before_a_fault_of_ours_is_sent_and_then_the_error(
    http: RunningGateway, tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("gateway.openai.chat.stop_reason", fail)
    tokenizer.script = lambda request: Script(say("a").steps, together=True)
    response = await http.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *chunks, last = sse_events(response.text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a"
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_many_requests_share_one_session(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    def script(request: Any) -> Script:
        return say(*request.messages[0].content)

    tokenizer.script = script
    texts = [f"text number {i}" for i in range(50)]

    async def ask(text: str) -> str:
        body = {**CHAT, "messages": [{"role": "user", "content": text}], "stream": True}
        chunks = sse_events((await http.client.post("/v1/chat/completions", json=body)).text)[:-1]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    assert await asyncio.gather(*map(ask, texts)) == texts
    assert tokenizer.num_sessions == 1
    ids = [request.options.request_id for request in tokenizer.requests]
    assert len(set(ids)) == 50


async def test_tokenize_and_back(http: RunningGateway) -> None:
    body = {"model": "scripted", "prompt": "aé", "return_token_strs": True}
    answer = (await http.client.post("/tokenize", json=body)).json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 233], "token_strs": ["a", "é"]}
    chat = (await http.client.post("/tokenize", json=CHAT)).json()
    assert chat["tokens"] == [104, 105]
    assert (await http.client.post("/detokenize", json={"tokens": [97, 233]})).json() == {"prompt": "aé"}
    assert (await http.client.post("/tokenize", json={})).status_code == 400
    assert (await http.client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
