"""A prompt that is too long: each dialect says it in the words by which its clients know that they have to shorten it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from rorqual.v1 import common_pb2
from tests.integration.test_gateway_responses import named_events
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, event, scripted_tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
}
OPENAI = (
    "This model's maximum context length is 4096 tokens. However, your messages resulted in 6005 tokens. "
    "Please reduce the length of the messages."
)
ANTHROPIC = "prompt is too long: 6005 tokens > 4096 maximum"

# What the source of the clients looks for, in the whole text of an error or in its message.
CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
LANGCHAIN_ANTHROPIC = re.compile("prompt is too long")
LITELLM_ANTHROPIC = re.compile("prompt is too long|prompt: length")
LITELLM_OPENAI = re.compile("this model's maximum context length is")  # of the text in lower case
LANGCHAIN_OPENAI = re.compile("context_length_exceeded")
AGENTS_OPENAI = re.compile(r"maximum context length is (\d+) tokens", re.IGNORECASE)


def too_long(**metadata: str) -> common_pb2.Error:
    return common_pb2.Error(
        code=3, reason="PROMPT_TOO_LONG", message="words of ours", field="messages", metadata=metadata
    )


FIGURES = too_long(num_prompt_tokens="6005", max_model_len="4096")


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer(lambda request: Script([], refuse=FIGURES)) as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address) as http:
        yield http


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_the_words_that_clients_know(http: RunningGateway, path: str, stream: bool) -> None:
    response = await http.client.post(path, json={**BODIES[path], "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert error["message"] == ANTHROPIC
        match = CLAUDE_CODE.search(response.text)
        assert match is not None
        assert match.groups() == ("6005", "4096")
        assert LANGCHAIN_ANTHROPIC.search(error["message"])
        assert LITELLM_ANTHROPIC.search(response.text)
    else:
        assert (error["message"], error["code"]) == (OPENAI, "context_length_exceeded")
        assert LITELLM_OPENAI.search(response.text.lower())
        assert LANGCHAIN_OPENAI.search(response.text)
        assert AGENTS_OPENAI.search(error["message"])


async def test_a_prompt_that_fills_the_length_leaves_no_token_for_the_answer(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    """The figures stay true: a client computes from them how much it has to drop."""
    error = too_long(num_prompt_tokens="4096", max_model_len="4096")
    tokenizer.script = lambda request: Script([], refuse=error)
    ours = (await http.client.post("/v1/messages", json=BODIES["/v1/messages"])).json()["error"]["message"]
    assert ours == "prompt is too long: 4096 tokens > 4095 maximum"
    theirs = (await http.client.post("/v1/chat/completions", json={"messages": HI})).json()["error"]["message"]
    assert theirs == (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in 4096 tokens, and the "
        "answer takes at least 1. Please reduce the length of the messages."
    )


async def test_a_prompt_too_long_to_be_encoded_says_that_its_figure_is_the_least(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    error = too_long(num_chars="5000000", min_prompt_tokens="5100", max_model_len="4096")
    tokenizer.script = lambda request: Script([], refuse=error)
    note = " (It was not encoded: 5100 is the least that its 5000000 characters can be.)"
    ours = (await http.client.post("/v1/messages", json=BODIES["/v1/messages"])).json()["error"]["message"]
    assert ours == "prompt is too long: 5100 tokens > 4096 maximum" + note
    theirs = (await http.client.post("/v1/chat/completions", json={"messages": HI})).json()["error"]["message"]
    assert theirs == OPENAI.replace("6005", "5100") + note


async def test_without_figures_the_message_is_what_the_part_that_refused_said(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = lambda request: Script([], refuse=too_long())
    answer = await http.client.post("/v1/messages", json=BODIES["/v1/messages"])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "words of ours")


async def test_a_responses_stream_that_had_begun_names_it_by_its_code(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = lambda request: Script([[event(0, [1], content="a")]], error=FIGURES)
    events = named_events((await http.client.post("/v1/responses", json={"input": "hi", "stream": True})).text)
    assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": OPENAI}


async def test_the_clients_own_errors(http: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=http.url + "/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="scripted", messages=HI)
        assert (caught.value.code, OPENAI in str(caught.value)) == ("context_length_exceeded", True)
    async with anthropic.AsyncAnthropic(base_url=http.url, api_key="k", max_retries=0) as other:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await other.messages.create(model="scripted", messages=HI, max_tokens=8)
        assert CLAUDE_CODE.search(str(refused.value))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "deepseek", "anthropic"])
async def test_litellm_knows_it(http: RunningGateway, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = http.url if provider == "anthropic" else http.url + "/v1"
    with pytest.raises(litellm.ContextWindowExceededError):
        await litellm.acompletion(
            model=f"{provider}/scripted", messages=HI, api_base=base, api_key="k", max_tokens=8, num_retries=0
        )


async def test_langchain_knows_it(http: RunningGateway) -> None:
    langchain = pytest.importorskip("langchain_anthropic")
    model = langchain.ChatAnthropic(model="scripted", base_url=http.url, api_key="k", max_retries=0)
    with pytest.raises(Exception, match="prompt is too long") as caught:
        await model.ainvoke("hi")
    assert "ContextOverflow" in type(caught.value).__name__
