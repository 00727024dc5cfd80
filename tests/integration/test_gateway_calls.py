"""Thoughts and calls of real formats through /v1/responses and /v1/messages: tokens in, items and blocks out, and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from gateway.upstream.stream import TextStream
from rorqual.core.config import TokenizerConfig
from rorqual.core.errors import UnavailableError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.rpc.channel import open_channel
from services.tokenizer.app import TokenizerApp
from tests.support.running_gateway import running_gateway
from tests.support.text_service import EOS, Stack, serving, steps, wait_for_health
from tests.support.vocabularies import TINY_FOLDER, tiny
from tests.unit.test_formats_calls import block

FORMATS = ["deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"]
AFTER_RESULTS = {"deepseek-v3.1": "Sunny."}  # it goes on after results without another thought
CITY = {"city": "Paris 😀", "days": 2}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
HI: Any = [{"role": "user", "content": "Weather?"}]


@dataclass
class Chain:
    stack: Stack
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    def says(self, answer: str) -> None:
        self.stack.scheduler.script = lambda request: steps([*tiny().encode(answer), EOS])

    @property
    def prompt(self) -> str:
        """The text of the newest request's prompt."""
        request = self.stack.scheduler.seen.opened[-1]
        ids = unpack_token_ids(request.token_ids)[: request.num_prompt_tokens]
        return b"".join(tiny().raw_text.bytes_of(token_id) for token_id in ids).decode()


@asynccontextmanager
async def chain(format_name: str, answer: str) -> AsyncIterator[Chain]:
    async with (
        serving(lambda request: steps([5, EOS]), model=TINY_FOLDER, chat_format=format_name) as stack,
        running_gateway(f"127.0.0.1:{stack.port}") as http,
        openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as first,
        anthropic.AsyncAnthropic(base_url=http.url, api_key="none", max_retries=0) as second,
    ):
        made = Chain(stack, first, second)
        made.says(answer)
        yield made


@pytest.mark.parametrize("format_name", FORMATS)
async def test_a_response_thinks_calls_and_goes_on(format_name: str) -> None:
    tools: Any = [
        {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA},
        {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
    ]
    asked: Any = {"model": "tiny", "input": HI, "tools": tools, "reasoning": {"effort": "high"}}
    answer = "Hm 😀</think>On it." + block(format_name, [("get_weather", CITY), ("now", {})])
    async with chain(format_name, answer) as made:
        whole = await made.openai.responses.create(**asked)
        async with made.openai.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        for response in (whole, final):
            thought, message, first, second = response.output
            assert thought.type == "reasoning"
            assert thought.content is not None
            assert [part.text for part in thought.content] == ["Hm 😀"]
            assert message.type == "message"
            assert response.output_text == "On it."
            assert first.type == second.type == "function_call"
            assert (first.name, json.loads(first.arguments)) == ("get_weather", CITY)
            assert (second.name, json.loads(second.arguments)) == ("now", {})
            assert first.call_id != second.call_id
            assert response.usage is not None
            assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        for index, item in enumerate(final.output):
            arguments = "".join(
                e.delta
                for e in events
                if e.type == "response.function_call_arguments.delta" and e.output_index == index
            )
            assert arguments == (item.arguments if item.type == "function_call" else "")
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in whole.output
            if item.type == "function_call"
        ]
        made.says(AFTER_RESULTS.get(format_name, "So</think>Sunny."))
        again = await made.openai.responses.create(**{**asked, "input": [*HI, *whole.output, *results]})
        assert again.output_text == "Sunny."
        assert made.prompt.count("sunny") == 2
        assert "Paris 😀" in made.prompt
        assert made.prompt.endswith("<think>") == (format_name not in AFTER_RESULTS)


@pytest.mark.parametrize("format_name", FORMATS)
async def test_a_message_thinks_calls_and_goes_on(format_name: str) -> None:
    tools: Any = [
        {"name": "get_weather", "description": "d", "input_schema": SCHEMA},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}},
    ]
    asked: Any = {
        "model": "tiny",
        "max_tokens": 500,
        "messages": HI,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = "Hm 😀</think>On it." + block(format_name, [("get_weather", CITY), ("now", {})])
    async with chain(format_name, answer) as made:
        whole = await made.anthropic.messages.create(**asked)
        async with made.anthropic.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert message.stop_reason == "tool_use"
            thought, text, first, second = message.content
            assert thought.type == "thinking"
            assert (thought.thinking, bool(thought.signature)) == ("Hm 😀", True)
            assert text.type == "text"
            assert text.text == "On it."
            assert first.type == second.type == "tool_use"
            assert (first.name, first.input) == ("get_weather", CITY)
            assert (second.name, second.input) == ("now", {})
        count = await made.anthropic.messages.count_tokens(
            **{key: value for key, value in asked.items() if key != "max_tokens"}
        )
        assert count.input_tokens == whole.usage.input_tokens
        results = [
            {"type": "tool_result", "tool_use_id": item.id, "content": "sunny"}
            for item in whole.content
            if item.type == "tool_use"
        ]
        made.says(AFTER_RESULTS.get(format_name, "So</think>Sunny."))
        turns = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
        again = await made.anthropic.messages.create(**{**asked, "messages": turns})
        assert again.stop_reason == "end_turn"
        assert [b.text for b in again.content if b.type == "text"] == ["Sunny."]
        assert made.prompt.count("sunny") == 2


async def test_switches_that_mean_the_same_give_the_same_prompt() -> None:
    """Thinking on, off and unsaid, in each dialect's spelling; contradicting ones are a 400."""
    async with chain("deepseek-v3.1", "4") as made:

        async def chat(**extra: Any) -> str:
            await made.openai.chat.completions.create(model="tiny", messages=HI, extra_body=extra)
            return made.prompt

        async def response(**fields: Any) -> str:
            await made.openai.responses.create(model="tiny", input=HI, **fields)
            return made.prompt

        async def message(**fields: Any) -> str:
            await made.anthropic.messages.create(model="tiny", max_tokens=9, messages=HI, **fields)
            return made.prompt

        off = {
            await chat(),
            await chat(chat_template_kwargs={"thinking": False}),
            await chat(chat_template_kwargs={"enable_thinking": False}),
            await chat(thinking={"type": "disabled"}),
            await chat(reasoning_effort="none"),
            await response(),
            await response(reasoning={"effort": "none"}),
            await message(),
            await message(thinking={"type": "disabled"}),
        }
        on = {
            await chat(chat_template_kwargs={"thinking": True}),
            await chat(chat_template_kwargs={"enable_thinking": True}),
            await chat(thinking={"type": "enabled"}),
            await chat(reasoning_effort="high"),
            await response(reasoning={"effort": "high"}),
            await message(thinking={"type": "adaptive"}),
            await message(thinking={"type": "enabled", "budget_tokens": 1024}),
        }
        assert len(off) == len(on) == 1
        assert off.pop().endswith("<｜Assistant｜></think>")
        assert on.pop().endswith("<｜Assistant｜><think>")
        for contradiction in (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"thinking": {"type": "disabled"}, "reasoning_effort": "high"},
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
        ):
            with pytest.raises(openai.BadRequestError):
                await chat(**contradiction)


async def test_a_demanded_call() -> None:
    tool: Any = {"name": "get_weather", "input_schema": SCHEMA}
    arguments = json.dumps(CITY, ensure_ascii=False)
    async with chain("deepseek-v3.1", arguments + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>") as made:
        message = await made.anthropic.messages.create(
            model="tiny", max_tokens=500, messages=HI, tools=[tool], tool_choice={"type": "tool", "name": "get_weather"}
        )
        (call,) = message.content
        assert call.type == "tool_use"
        assert (call.name, call.input, message.stop_reason) == ("get_weather", CITY, "tool_use")
        response = await made.openai.responses.create(
            model="tiny",
            input=HI,
            tools=[{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}],
            tool_choice={"type": "function", "name": "get_weather"},
        )
        (item,) = response.output
        assert item.type == "function_call"
        assert json.loads(item.arguments) == CITY


CALLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": HI,
        "tools": CALLS,
        "reasoning_effort": "high",
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
    },
    "completions": {
        "prompt": "x",
        "max_tokens": 500,
        "stream_options": {"include_usage": True},
        "stop": ["never said"],
    },
    "responses": {
        "input": HI,
        "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}],
        "reasoning": {"effort": "high"},
    },
    "messages": {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
}
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "arguments", "text", "delta", "partial_json", "thinking")
DRAWN_KEYS = ("id", "item_id", "call_id", "tool_use_id", "created", "created_at", "completed_at", "sequence_number")


def joined(body: str) -> list[Any]:
    """The events without what is drawn for each request; neighbours that differ in their text alone are one."""
    out: list[tuple[Any, dict[str, Any]]] = []
    for line in body.splitlines():
        if line.startswith("data: {"):
            texts: dict[str, Any] = {}
            frame = _without_text(json.loads(line.removeprefix("data: ")), "", texts)
            if out and out[-1][0] == frame and out[-1][1].keys() == texts.keys():
                for place, text in texts.items():
                    out[-1][1][place] += text
            else:
                out.append((frame, texts))
    return out


def _without_text(value: Any, here: str, texts: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_without_text(item, f"{here}[{index}]", texts) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    frame = {}
    for key, item in value.items():
        if key in DRAWN_KEYS:
            continue
        is_text = key in TEXT_KEYS and isinstance(item, str)
        if is_text or (key in ("token_ids", "content") and isinstance(item, list) and "choices" in here):
            texts[f"{here}.{key}"] = item
            frame[key] = None
        else:
            frame[key] = _without_text(item, f"{here}.{key}", texts)
    return frame


@asynccontextmanager
async def serve_beside(stack: Stack, format_name: str) -> AsyncIterator[int]:
    """Another replica before the same scheduler; its port."""
    app = TokenizerApp(
        TokenizerConfig(
            listen="127.0.0.1:0",
            scheduler=f"127.0.0.1:{stack.scheduler_port}",
            model=str(TINY_FOLDER),
            chat_format=format_name,
        )
    )
    port = await app.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await wait_for_health(channel, serving=True)
        yield port
    finally:
        await app.stop(0)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_cut_at_every_token_joins_without_a_seam(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut goes on at another replica; the client's events are those of no cut, whatever its dialect."""
    streams: list[TextStream] = []
    start = TextStream.start

    async def begin(self: TextStream) -> None:
        streams.append(self)
        await start(self)

    monkeypatch.setattr(TextStream, "start", begin)
    ids = [*tiny().encode("Hm 😀</think>On it." + block("deepseek-v3.1", [("get_weather", CITY)])), EOS]
    async with (
        serving(lambda request: steps(ids), model=TINY_FOLDER, chat_format="deepseek-v3.1") as stack,
        serve_beside(stack, "deepseek-v3.1") as port,
        running_gateway(f"127.0.0.1:{stack.port}", f"127.0.0.1:{port}") as http,
    ):
        async with asyncio.timeout(20):
            while not all(replica.usable for replica in http.gateway.replicas.replicas):
                await asyncio.sleep(0.01)

        async def ask() -> list[Any]:
            body = {"seed": 3, **DIALECTS[dialect], "stream": True}
            response = await http.client.post(f"/v1/{dialect}", json=body)
            assert response.status_code == 200, response.text
            return joined(response.text)

        whole = await ask()
        assert len(whole) >= 3
        for k in range(len(ids)):
            await stack.scheduler.pause(after_steps=k)
            asking = asyncio.create_task(ask())
            async with asyncio.timeout(20):
                while len(streams) != k + 2 or streams[-1].ledger.num_tokens < k or not stack.scheduler.running:
                    await asyncio.sleep(0.001)
            (stream,) = streams[-1:]
            link = stream._link
            assert link is not None
            link.cancel(stream._stream_id)
            stream.on_lost(UnavailableError("cut"), died=False)
            await stack.scheduler.go_on()
            assert await asking == whole, k
            assert stream.attempt == 1
    assert len({request.attempt for request in stack.scheduler.seen.opened}) == 2
