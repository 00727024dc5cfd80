"""Text through gateway and tokenizer service, from a scheduler that says scripted tokens: stop strings, split
characters, and what is refused, on every endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.anthropic.schema import CountTokensBody, MessagesBody
from gateway.openai.conversation import MAX_TOOLS
from gateway.openai.response_schema import ResponsesBody
from gateway.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from rorqual.core.config import TokenizerConfig
from rorqual.core.limits import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from rorqual.v1 import generation_pb2
from services.tokenizer.app import TokenizerApp
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_scheduler import Script, ScriptedScheduler
from tests.support.vocabularies import v4, v4_folder

EOS = 1
TEMPLATE = "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}<｜Assistant｜>{% endfor %}"
HI = [{"role": "user", "content": "hi"}]

Steps = Sequence[Sequence[int]]


def pieces(*texts: str, end: Sequence[int] = (EOS,)) -> Steps:
    """A step for each text, then one for `end`."""
    return [v4().encode(text) for text in texts] + ([list(end)] if end else [])


FOX = pieces("The quick br", "own", " fox", " jumps")


class Source:
    """The chain: what the scheduler says is `steps`, or what `choose` makes of a request."""

    def __init__(self, http: RunningGateway, scheduler: ScriptedScheduler) -> None:
        self.http = http.client
        self.gateway = http
        self.scheduler = scheduler
        scheduler.script = self.script
        self.steps: Steps = FOX
        self.choose: Callable[[generation_pb2.GenerateRequest], Steps] = lambda request: self.steps

    def script(self, request: generation_pb2.GenerateRequest) -> Script:
        return Script(self.choose(request))

    async def ask(self, path: str, **fields: Any) -> tuple[str, list[str]]:
        """Text and finish reasons of a whole answer; `path` is "chat/completions" or "completions"."""
        response = await self.http.post(f"/v1/{path}", json=self.body(path, fields))
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice["message"]["content"] if "chat" in path else choice["text"], [choice["finish_reason"]]

    async def stream(self, path: str, **fields: Any) -> tuple[list[str], list[str]]:
        """Deltas and finish reasons of a streamed one."""
        response = await self.http.post(f"/v1/{path}", json=self.body(path, {**fields, "stream": True}))
        assert response.status_code == 200, response.text
        assert response.content.decode("utf-8").endswith("data: [DONE]\n\n")
        deltas, reasons = [], []
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                deltas.append(choice["delta"].get("content", "") if "chat" in path else choice["text"])
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        return deltas, reasons

    @staticmethod
    def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "hi"}
        return {**asked, "max_tokens": 100, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Source]:
    """One for all tests of this file: the published vocabulary takes seconds to load."""
    template = tmp_path_factory.mktemp("template") / "t.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    scheduler = ScriptedScheduler(lambda request: Script(FOX), vocab_size=129_280)
    port = await scheduler.start()
    app = TokenizerApp(
        TokenizerConfig(
            listen="127.0.0.1:0", scheduler=f"127.0.0.1:{port}", model=str(v4_folder()), chat_template=str(template)
        )
    )
    text_port = await app.start()
    try:
        async with running_gateway(f"127.0.0.1:{text_port}", best_priority=-(2**31)) as http:
            yield Source(http, scheduler)
    finally:
        await app.stop(0)
        await scheduler.stop()


@pytest.fixture
def source(chain: Source) -> Source:
    """The chain, saying FOX."""
    chain.steps = FOX
    chain.choose = lambda request: chain.steps
    return chain


pytestmark = pytest.mark.asyncio(loop_scope="module")

PATHS = pytest.mark.parametrize("path", ["chat/completions", "completions"])


# --- stop strings -------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(
    ("steps", "fields", "text", "reason"),
    [
        (FOX, {"stop": ["own fox"]}, "The quick br", "stop"),
        (pieces("The quick br", "own", " foal"), {"stop": ["own fox"]}, "The quick brown foal", "stop"),
        (pieces("The quick br", "own", end=()), {"stop": ["own fox"]}, "The quick brown", "length"),
        (FOX, {"stop": ["jumps high", "own fox"]}, "The quick br", "stop"),
        (FOX, {"stop": ["fox jumps", "own"]}, "The quick br", "stop"),
        (FOX, {"stop": ["own fox", "wn"]}, "The quick bro", "stop"),  # the second is complete first
        (FOX, {"stop": "q"}, "The ", "stop"),
        (pieces("Ein schö", "ner Tag"), {"stop": ["öne"]}, "Ein sch", "stop"),
        (pieces("a😀", "b"), {"stop": ["😀b"]}, "a", "stop"),
        (FOX, {"stop": ["own fox"], "include_stop_str_in_output": True}, "The quick brown fox", "stop"),
    ],
)
async def test_a_stop_string_over_tokens(
    source: Source, path: str, steps: Steps, fields: dict[str, Any], text: str, reason: str
) -> None:
    source.steps = steps
    whole, reasons = await source.ask(path, **fields)
    deltas, streamed = await source.stream(path, **fields)
    assert whole == "".join(deltas) == text
    assert reasons == streamed == [reason]
    if reason == "stop" and "include_stop_str_in_output" not in fields:
        stops = [fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"]
        assert not any(stop in "".join(deltas) for stop in stops)


def withheld(text: str, stop: str) -> int:
    """How much of the end of `text` may yet become `stop`."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


async def test_no_more_is_withheld_than_may_become_the_stop_string(source: Source) -> None:
    """The scheduler stops after each step: all that cannot belong to a stop string has to come."""
    texts = ("The quick br", "own", " fo", "al")
    source.steps = pieces(*texts)
    scheduler = source.scheduler
    await scheduler.pause(1)
    body = source.body("chat/completions", {"stop": ["own fox"], "stream": True})
    text = heard = ""
    num_tokens = 0
    try:
        async with source.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            for step, said in zip(source.steps, texts, strict=False):
                num_tokens += len(step)
                await scheduler.wait_for(lambda due=num_tokens: all(r.sent >= due for r in scheduler.running.values()))
                text += said
                due = text[: len(text) - withheld(text, "own fox")]
                async with asyncio.timeout(10):
                    while heard != due:
                        line = await anext(lines)
                        if line.startswith("data: {"):
                            heard += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                        assert due.startswith(heard)
                await scheduler.pause(1)
            await scheduler.go_on()
            rest = [line async for line in lines]
    finally:
        await scheduler.go_on()
    assert heard == "The quick brown foal"
    assert "data: [DONE]" in rest


# --- characters over several tokens -------------------------------------------------------------------------------

SPLIT = [28927, 225, 175, 257, 109, 118, 415, 14868]  # 😀 in two, 𠮷 in four, ぱ乐 in two that meet inside ぱ
SPLIT_TEXT = "😀𠮷ぱ乐"


@PATHS
async def test_a_character_over_tokens_is_sent_when_it_is_whole(source: Source, path: str) -> None:
    source.steps = [[token_id] for token_id in (*SPLIT, EOS)]
    whole, _ = await source.ask(path)
    deltas, _ = await source.stream(path)
    assert whole == "".join(deltas) == SPLIT_TEXT
    for delta in deltas:
        assert not re.search("[\ufffd\ud800-\udfff]", delta)


@PATHS
@pytest.mark.parametrize("max_tokens", range(1, len(SPLIT) + 1))
async def test_a_cut_inside_a_character_is_the_same_streamed_and_whole(
    source: Source, path: str, max_tokens: int
) -> None:
    source.steps = [[token_id] for token_id in SPLIT]
    whole, reasons = await source.ask(path, max_tokens=max_tokens)
    deltas, _ = await source.stream(path, max_tokens=max_tokens)
    assert whole == "".join(deltas)
    assert reasons == ["length"]


async def test_bytes_of_log_probabilities_join_to_the_text(source: Source) -> None:
    source.steps = [[token_id] for token_id in (*SPLIT, EOS)]
    body = source.body("chat/completions", {"logprobs": True})
    answer = (await source.http.post("/v1/chat/completions", json=body)).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == len(SPLIT) + 1
    assert b"".join(bytes(e["bytes"]) for e in entries[:-1]).decode() == SPLIT_TEXT


async def test_interleaved_requests_keep_their_bytes_apart(source: Source) -> None:
    """Which of the texts is said depends on the prompt's length; all take one step at a time."""
    said = {1: (SPLIT, SPLIT_TEXT), 2: (SPLIT[2:] + SPLIT[:2], "𠮷ぱ乐😀"), 3: (SPLIT[:2], "😀")}
    source.choose = lambda request: [[token_id] for token_id in (*said[request.num_prompt_tokens][0], EOS)]
    lengths = (1, 2, 3, 2, 1)
    answers = await asyncio.gather(*(source.stream("completions", prompt=[5] * length) for length in lengths))
    assert ["".join(deltas) for deltas, _ in answers] == [said[length][1] for length in lengths]


# --- what is refused, on every endpoint ---------------------------------------------------------------------------

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def check_refusal(response: httpx.Response, path: str, status: int) -> dict[str, Any]:
    """The error in the dialect of `path`, and nothing of the server's inside in it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    error: dict[str, Any] = body["error"]
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["param"], str | None)
        assert isinstance(error["code"], str | None)
    assert isinstance(error["message"], str)
    assert not re.search(r"Traceback|Error\(|\.py|site-packages|msgspec|0x[0-9a-f]{6}", error["message"])
    return error


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b'"x"',
    b"not json",
    b"\xff\xfe{}",
    b'{"model":"\\ud800"}',
    b'{"model":"\xed\xa0\x80"}',
    b'{"temperature":NaN}',
    b'{"temperature":1e999}',
    b'{"x":' + b"[" * 100_000,
    b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    b'{"seed":' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_is_no_body_is_a_400(source: Source, path: str) -> None:
    for raw in MALFORMED:
        async with asyncio.timeout(2):
            check_refusal(await source.http.post(path, content=raw), path, 400)
    assert (await source.http.post(path, json=ENDPOINTS[path])).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_unknown_model_is_a_404_and_an_unknown_field_a_warning(source: Source, path: str) -> None:
    for stream in (False, True) if path in STREAMS else (None,):
        body = {**ENDPOINTS[path], **({} if stream is None else {"stream": stream})}
        check_refusal(await source.http.post(path, json={**body, "model": "nobody"}), path, 404)
        response = await source.http.post(path, json={**body, "brand_new": {"a": 1}})
        assert response.status_code == 200
        assert response.headers["x-rorqual-ignored-fields"] == "brand_new"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "messages",
    [
        ...,
        None,
        7,
        [],
        [None],
        [42],
        [{}],
        [{"role": "admin", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    ],
)
async def test_malformed_messages_are_a_400(source: Source, path: str, messages: Any, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "stream": stream}
    if messages is not ...:
        body["messages"] = messages
    async with asyncio.timeout(2):
        error = check_refusal(await source.http.post(path, json=body), path, 400)
    assert "messages" in error["message"]
    if isinstance(messages, list) and messages and isinstance(messages[0], dict) and "image" in str(messages):
        assert "messages[0].content[0]" in error["message"]


BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
VALUES = (
    "true", "-1", "1.5", "1e999", "NaN", "1" + "0" * 400, '""', '"\\ud800"', "[null]", '{"1":1e999}', '{"type":"x"}',
)  # fmt: skip


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_value_of_any_field_brings_anything_but_an_answer_or_a_400_that_names_it(
    source: Source, path: str
) -> None:
    gate = asyncio.Semaphore(16)

    async def send(name: str, value: str) -> None:
        others = {key: given for key, given in {"max_tokens": 1, **ENDPOINTS[path]}.items() if key != name}
        if "max_tokens" not in BODIES[path].__struct_fields__:
            others.pop("max_tokens", None)
        raw = ",".join([f"{json.dumps(name)}:{value}", *(f'"{key}":{json.dumps(v)}' for key, v in others.items())])
        async with gate:
            response = await source.http.post(path, content=f"{{{raw}}}")
        if response.status_code == 200:
            return
        error = check_refusal(response, path, 404 if name == "model" and response.status_code == 404 else 400)
        told = error.get("param") or error["message"]
        of_json = "not valid JSON" in error["message"] or "INVALID_JSON" in str(error.get("code")).upper()
        assert of_json or name in told, (name, value, error)

    async with asyncio.timeout(120):
        names = BODIES[path].__struct_encode_fields__
        await asyncio.gather(*(send(name, value) for name in names for value in VALUES))


async def test_the_most_that_a_schema_takes_every_part_takes(source: Source) -> None:
    """No limit further down is lower than what the API promises."""
    call = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for path, fields in (
        ("chat/completions", {"stop": [f"{number:04d}" + "é" * 510 for number in range(MAX_STOP_STRINGS)]}),
        ("chat/completions", {"stop_token_ids": list(range(1000, 1000 + MAX_STOP_TOKEN_IDS))}),
        ("chat/completions", {"logit_bias": {str(number): 100 for number in range(1000, 1000 + MAX_LOGIT_BIAS)}}),
        ("chat/completions", {"n": MAX_CHOICES}),
        ("chat/completions", {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}),
        ("completions", {"logprobs": 20, "echo": True}),
        ("completions", {"prompt": ["hi"] * 17, "n": 128}),
        ("chat/completions", {"temperature": 2, "top_p": 0, "min_p": 1, "top_k": 2**31 - 1, "repetition_penalty": 100}),
        ("chat/completions", {"presence_penalty": -2, "frequency_penalty": -2, "seed": -(2**63), "priority": -(2**31)}),
        ("chat/completions", {"cache_salt": "😀" * 1024, "max_tokens": 2**32 - 1}),
        ("chat/completions", {"tools": [call] * MAX_TOOLS, "tool_choice": "none"}),
        ("chat/completions", {"guided_choice": [f"{number}" for number in range(1024)]}),
    ):
        response = await source.http.post(f"/v1/{path}", json=source.body(path, fields))
        if "tools" in fields:  # the template here writes none of them
            assert response.status_code == 200 or "template" in response.text, response.text
        else:
            assert response.status_code == 200, (fields, response.text)


DEEP = '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        '{"type":"notatype"}',
        '{"type":"string","pattern":"("}',
        '{"$ref":"#/nowhere"}',
        '{"$ref":"#"}',
        '{"type":"string","format":"no-such-format"}',
        DEEP,
        "[]",
    ],
)
async def test_a_schema_is_never_answered_with_free_text(source: Source, schema: str, stream: bool) -> None:
    form = f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    body = f'{{"messages":{json.dumps(HI)},"stream":{json.dumps(stream)},"response_format":{form}}}'
    response = await source.http.post("/v1/chat/completions", content=body)
    error = check_refusal(response, "/v1/chat/completions", 400)
    if schema != DEEP:  # which may also be too deep for any body
        assert error["param"].startswith("response_format")
        assert "response_format" in error["message"]
