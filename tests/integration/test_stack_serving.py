"""The whole path: HTTP and gRPC in, four processes, text out; what a client sees and what is free afterwards."""

from __future__ import annotations

import io
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest

from rorqual import LLM, SamplingParams
from rorqual.cli.app import run
from rorqual.v1 import generation_pb2, generation_pb2_grpc, text_pb2, text_pb2_grpc

SERVICES = ("gateway", "tokenizer", "scheduler", "executor")
WaitUntil = Callable[..., None]


@pytest.fixture(scope="module")
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scheduler(stack: Any) -> Iterator[Any]:
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def all_free(scheduler: Any) -> bool:
    info = scheduler.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=5)
    return bool(info.num_running == info.num_waiting == 0 and info.num_free_blocks == info.num_total_blocks > 0)


@pytest.mark.parametrize("question", ["What do whales eat?", "写一首关于秋天的五言绝句。"])
def test_the_openai_client_streams(client: openai.OpenAI, question: str, served_model: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        stream=True,
        max_tokens=64,
        seed=0,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.model == "tiny" for chunk in chunks)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes in (["stop"], ["length"])
    usage = next(chunk.usage for chunk in chunks if chunk.usage)
    assert 0 < usage.completion_tokens <= 64
    assert usage.prompt_tokens > 0
    if served_model.trained:
        assert "�" not in text
        chinese = re.findall(r"[一-鿿]", text)
        assert (len(chinese) >= 15) if "绝句" in question else text.isascii()


def test_without_a_stream_the_answer_is_the_same_text(equal_stack: Any) -> None:
    with openai.OpenAI(base_url=f"{equal_stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def ask(**extra: Any) -> Any:
            return client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=24, temperature=0, **extra
            )

        streamed = "".join(c.choices[0].delta.content or "" for c in ask(stream=True) if c.choices)
        answer = ask()
    assert answer.choices[0].message.content == streamed
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=16, n=2, seed=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}, 404, openai.NotFoundError),
        ({"model": "tiny", "messages": []}, 400, openai.BadRequestError),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": -1},
            400,
            openai.BadRequestError,
        ),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "word " * 20_000}]},
            400,
            openai.BadRequestError,
        ),
    ],
)
def test_refusals_have_openai_s_shape(
    client: openai.OpenAI, body: dict[str, Any], status: int, kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**body)
    assert caught.value.status_code == status
    assert caught.value.body is not None
    assert caught.value.message


def test_a_client_that_goes_away_frees_all_blocks(stack: Any, scheduler: Any, wait_until: WaitUntil) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "stream": True,
        "max_tokens": 3000,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            json.loads(next(lines).removeprefix("data: "))
        assert not all_free(scheduler)
    wait_until(lambda: all_free(scheduler), "free == total after the client went away", 10)


def test_a_cancelled_grpc_call_frees_all_blocks(stack: Any, scheduler: Any, wait_until: WaitUntil) -> None:
    with grpc.insecure_channel(stack.text_address) as channel:
        options = text_pb2.TextOptions(request_id=secrets.token_hex(8), max_tokens=3000, ignore_eos=True, num_choices=2)
        call = text_pb2_grpc.TextServiceStub(channel).Complete(
            text_pb2.CompleteRequest(options=options, text="Once upon a time"), timeout=60
        )
        next(call)
        next(call)
        call.cancel()
        wait_until(lambda: all_free(scheduler), "free == total after the call was cancelled", 10)


def test_the_python_api_over_a_running_server(stack: Any, scheduler: Any, wait_until: WaitUntil) -> None:
    prompts = ["Once upon a time", "The old clock", "春天", [5, 6, 7]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(url=f"grpc://{stack.text_address}") as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt for o in together] == ["Once upon a time", "The old clock", "春天", None]
        for output in together:
            choice = output.outputs[0]
            assert len(choice.token_ids) == 12
            assert choice.finish_reason == "length"
            assert output.usage.num_generated_tokens == 12
            assert output.usage.num_prompt_tokens == len(output.prompt_token_ids) > 0
            assert choice.logprobs is not None
            assert [item.token_id for item in choice.logprobs] == choice.token_ids
            assert all(item.logprob is not None and item.logprob <= 0 for item in choice.logprobs)
            assert all(len(item.top) == 2 for item in choice.logprobs)
        assert together[3].prompt_token_ids == [5, 6, 7]
        (answer,) = llm.chat(
            [{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=8, seed=1), use_tqdm=False
        )
        assert answer.outputs[0].token_ids
        assert llm.decode(llm.encode("鲸 whale 🐋")).endswith("鲸 whale 🐋")
    wait_until(lambda: all_free(scheduler), "free == total after all has ended", 10)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_the_command_generates_and_chats_over_a_running_server(
    stack: Any, scheme: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = stack.url if scheme == "http" else f"grpc://{stack.text_address}"
    flags = ["--url", url, "--temperature", "0", "--max-tokens", "12"]
    assert run(["generate", "Once upon a time", *flags]) == 0
    assert capsys.readouterr().out.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/reset\nHello\n/exit\nnever sent\n"))
    assert run(["chat", *flags]) == 0
    first, second = [line for line in capsys.readouterr().out.splitlines() if line]
    assert first == second  # a new conversation begins where the first did
    assert run(["generate", "word " * 20_000, *flags]) != 0
    assert "error:" in capsys.readouterr().err


def test_one_request_is_one_trace_over_all_processes(stack: Any, collector: Any) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    response = httpx.post(
        f"{stack.url}/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        headers={"traceparent": f"00-{trace_id}-{caller}-01"},
        timeout=60,
    )
    assert response.status_code == 200

    def complete(spans: list[Any]) -> bool:
        ids = {span.span_id for span in spans}
        return {s.service for s in spans} == set(SERVICES) and all(
            span.parent_id in ids or span.parent_id == caller for span in spans
        )

    spans = collector.wait_for(trace_id, complete)
    by_id = {span.span_id: span for span in spans}
    assert {span.service for span in spans} == set(SERVICES)
    # One root, the gateway's, below the caller's own span; every other span's parent is in the trace.
    assert [span.service for span in spans if span.parent_id == caller] == ["gateway"]
    assert all(span.parent_id in by_id for span in spans if span.parent_id != caller)
    # A span's parent is of its own process or of the one before it on the way of a request.
    for span in spans:
        if span.parent_id in by_id:
            step = SERVICES.index(span.service) - SERVICES.index(by_id[span.parent_id].service)
            assert step in (0, 1), f"{span.service}/{span.name} under {by_id[span.parent_id].service}"
    crossings = {
        (by_id[s.parent_id].service, s.service)
        for s in spans
        if s.parent_id in by_id and by_id[s.parent_id].service != s.service
    }
    assert crossings == set(itertools.pairwise(SERVICES))
