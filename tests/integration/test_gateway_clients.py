"""The current clients of OpenAI and Anthropic before the real four processes: every endpoint, streamed and not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

BLOCK = 64
HI: Any = [{"role": "user", "content": "What do whales eat?"}]
BOS = "<｜begin▁of▁sentence｜>"


@pytest.fixture(scope="module")
def openai_client(equal_stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{equal_stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(equal_stack: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=equal_stack.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(equal_stack: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=equal_stack.url, timeout=60) as client:
        yield client


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


# --- every endpoint, whole and streamed ---------------------------------------------------------------------------


def test_chat_completions(openai_client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return openai_client.chat.completions.create(
            model="tiny", messages=HI, max_completion_tokens=16, temperature=0, **more
        )

    whole = ask()
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions(openai_client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return openai_client.completions.create(model="tiny", prompt="Once", max_tokens=12, temperature=0, **more)

    whole = ask()
    assert "".join(c.choices[0].text for c in ask(stream=True)) == whole.choices[0].text
    assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"


def test_responses(openai_client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "What do whales eat?", "max_output_tokens": 400, "temperature": 0}
    asked["extra_body"] = {"stop": ["."]}  # so that it comes to an end of its own
    whole = openai_client.responses.create(**asked)
    with openai_client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [getattr(e, "sequence_number", None) for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text
    assert final.output_text == whole.output_text != ""
    assert final.status == whole.status == "completed"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    items: Any = [*whole.output, {"role": "user", "content": "And then?"}]
    again = openai_client.responses.create(**{**asked, "input": [*HI, *items]})
    assert again.usage is not None
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_messages(anthropic_client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 16, "messages": HI, "system": "You answer briefly."}
    whole = anthropic_client.messages.create(**asked, extra_body={"temperature": 0})
    with anthropic_client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text"
    assert text == block.text != ""
    assert final.stop_reason == whole.stop_reason
    assert final.stop_reason in ("end_turn", "max_tokens")
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=HI, system="You answer briefly.")
    read = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + read
    assert final.usage.output_tokens == whole.usage.output_tokens <= 16


def test_two_sessions_share_their_prefix_whatever_stands_in_their_line_for_billing(
    anthropic_client: anthropic.Anthropic,
) -> None:
    long = " ".join(f"Rule {number}: be brief." for number in range(150))

    def ask(session: str) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={session};"
        system: Any = [{"type": "text", "text": line}, {"type": "text", "text": long}]
        counted = anthropic_client.messages.count_tokens(model="tiny", messages=HI, system=system).input_tokens
        usage = anthropic_client.messages.create(model="tiny", max_tokens=1, messages=HI, system=system).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return usage

    first, second = ask("36ee5"), ask("0b8")
    assert second.cache_read_input_tokens > 0.9 * (first.input_tokens + (first.cache_read_input_tokens or 0))


def test_an_assistants_turn_is_continued(anthropic_client: anthropic.Anthropic, http: httpx.Client) -> None:
    turns: Any = [*HI, {"role": "assistant", "content": "Whales eat"}]
    count = anthropic_client.messages.count_tokens(model="tiny", messages=turns).input_tokens
    chat = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    assert count == http.post("/tokenize", json=chat).json()["count"]


def test_models(openai_client: openai.OpenAI) -> None:
    (model,) = openai_client.models.list()
    assert openai_client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("nobody")


def test_tokens_there_and_back(http: httpx.Client) -> None:
    text = "Whales eat krill. 鲸鱼吃磷虾。😀"
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_what_needs_no_key(http: httpx.Client) -> None:
    for path in ("/health", "/health/live", "/version", "/metrics", "/openapi.json", "/docs"):
        assert http.get(path).status_code == 200, path


def test_refusals_of_both_dialects(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    long = "word " * 6000
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.responses.create(model="tiny", input=long)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "input")
    assert isinstance(too_long.value.body, dict)
    assert re.fullmatch(
        r"This model's maximum context length is 4096 tokens\. However, your messages resulted in 60\d\d tokens\. "
        r"Please reduce the length of the messages\.",
        too_long.value.body["message"],
    )
    with pytest.raises(anthropic.BadRequestError) as also:
        anthropic_client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": long}])
    assert isinstance(also.value.body, dict)
    assert also.value.body["error"]["type"] == "invalid_request_error"
    assert re.fullmatch(r"prompt is too long: 60\d\d tokens > 4096 maximum", also.value.body["error"]["message"])
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.create(model="nobody", input="x")
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.count_tokens(model="nobody", messages=HI)


# --- how a stream ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_usage", [True, False])
def test_the_shape_of_a_streams_end(http: httpx.Client, with_usage: bool) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": HI, "n": 2, "max_tokens": 8, "seed": 5}
    whole = http.post("/v1/chat/completions", json=body).json()
    body |= {"stream": True, **({"stream_options": {"include_usage": True}} if with_usage else {})}
    text = http.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    chunks = [strict_json(block.removeprefix("data: ")) for block in text.split("\n\n")[:-2]]
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1
    seen: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            seen.setdefault(choice["index"], []).append(choice)
    assert sorted(seen) == [0, 1]
    for choices in seen.values():
        assert choices[0]["delta"]["role"] == "assistant"
        assert [c["finish_reason"] is not None for c in choices] == [False] * (len(choices) - 1) + [True]
        assert not choices[-1]["delta"]
    empty = [chunk for chunk in chunks if not chunk["choices"]]
    if not with_usage:
        assert empty == []
        assert all("usage" not in chunk for chunk in chunks)
        return
    assert empty == [chunks[-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == whole["usage"][key]
    assert whole["usage"]["completion_tokens"] == sum(
        len(c["token_ids"])
        for c in http.post("/v1/chat/completions", json={**body, "stream": False, "stream_options": None,
                                                        "return_token_ids": True}).json()["choices"]
    )  # fmt: skip


# --- log-probabilities and the prefix cache -----------------------------------------------------------------------


def test_scoring_a_prompt(http: httpx.Client) -> None:
    prompt = "Once upon a time there was a whale. 鲸鱼"
    body = {"model": "tiny", "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    response = http.post("/v1/completions", json=body)
    answer = strict_json(response.text)
    (choice,) = answer["choices"]
    assert choice["text"] == prompt
    columns = choice["logprobs"]
    assert len({len(column) for column in columns.values()}) == 1
    assert columns["token_logprobs"][0] is None
    assert all(value <= 0 for value in columns["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    assert len(columns["tokens"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_there_is_an_entry_for_each_token(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "The old clock", "echo": True, "max_tokens": 2, "logprobs": 5, "temperature": 1, "top_k": 1}
    body |= {"stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    text = http.post("/v1/completions", json=body).text
    answers = [strict_json(b.removeprefix("data: ")) for b in text.split("\n\n") if b.startswith("data: {")]
    answers = answers or [strict_json(text)]
    entries = [p for a in answers for c in a["choices"] for p in (c["logprobs"] or {}).get("token_logprobs", ())]
    usage = answers[-1]["usage"]
    assert len(entries) == usage["completion_tokens"] + usage["prompt_tokens"]


def test_a_chat_without_alternatives(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 0}
    answer = strict_json(http.post("/v1/chat/completions", json=body).text)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []


@pytest.mark.parametrize("num_tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + BLOCK // 2])
def test_a_prefix_hit_changes_no_log_probability(http: httpx.Client, num_tokens: int) -> None:
    prompt = [100 + (7 * position + num_tokens) % 3000 for position in range(num_tokens)]

    def ask(**fields: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": f"hit-{num_tokens}", **fields}
        return strict_json(http.post("/v1/completions", json=body).text)

    scored = [ask(echo=True, logprobs=1) for _ in range(2)]
    first, second = (answer["choices"][0]["logprobs"]["token_logprobs"] for answer in scored)
    assert len(first) == num_tokens + 1
    assert first[0] is None
    assert first[1:] == pytest.approx(second[1:], abs=1e-4)
    plain = ask()
    cached = plain["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (num_tokens - 1) // BLOCK * BLOCK  # blocks that a scored request computed are shared too
    assert scored[0]["choices"][0]["text"].endswith(plain["choices"][0]["text"])


# --- conversations ------------------------------------------------------------------------------------------------


def tokens_of(http: httpx.Client, messages: Any, **fields: Any) -> list[int]:
    response = http.post("/tokenize", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_one_part_list_is_the_plain_string(http: httpx.Client, role: str) -> None:
    part = {"type": "text", "text": "tell me"}
    plain, listed, two = (
        tokens_of(http, [*HI, {"role": role, "content": content}])
        for content in ("tell me", [part], [part, {"type": "text", "text": "more"}])
    )
    assert plain == listed
    assert two == tokens_of(http, [*HI, {"role": role, "content": "tell me\nmore"}])


def test_no_content_beside_calls_has_many_spellings(http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    seen = set()
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        turns = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
        turns.append({"role": "tool", "tool_call_id": "c", "content": "42"})
        seen.add(tuple(tokens_of(http, turns)))
    (ids,) = seen
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '{"a": 1}' in text
    assert "[{'" not in text
    assert "None" not in text


def test_tokenize_and_chat_see_the_same_ids(http: httpx.Client) -> None:
    ids = tokens_of(http, HI)
    chat = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == ids
    assert chat["usage"]["prompt_tokens"] == len(ids)
    (bos,) = http.post("/tokenize", json={"prompt": BOS, "add_special_tokens": False}).json()["tokens"]
    assert ids[0] == bos
    assert ids.count(bos) == 1


@pytest.mark.parametrize("prompt", ["Once upon a time", BOS + "Once upon a time"])
def test_a_prompt_begins_once(http: httpx.Client, prompt: str) -> None:
    (bos,) = http.post("/tokenize", json={"prompt": BOS, "add_special_tokens": False}).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert answer["usage"]["prompt_tokens"] == len(ids)


# --- what is too large --------------------------------------------------------------------------------------------


def test_what_is_too_large_is_refused_and_others_go_on(http: httpx.Client) -> None:
    for prompt in ("word " * 1_000_000, [5] * 1_500_000):
        response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert response.status_code == 400, response.text[:200]
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]  # the limit
    limit = 32 * 1024 * 1024
    over = http.post("/v1/completions", content=b'{"prompt":"' + b"x" * limit + b'"}')
    assert over.status_code == 413
    assert str(limit) in over.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
