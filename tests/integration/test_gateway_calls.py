"""Thoughts and calls of real formats through /v1/responses and /v1/messages: tokens in, items and blocks out, and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from rorqual.core.token_ids import unpack_token_ids
from tests.support.running_gateway import running_gateway
from tests.support.text_service import EOS, Stack, serving, steps
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
