"""With --deterministic the tokens are a function of prompt, parameters and seed: whatever runs beside them, however the
prompt was cut into chunks, with and without a cache hit, and after a resume. Over the real processes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from rorqual import LLM, SamplingParams
from rorqual.client.outputs import RequestOutput
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.launch import Stack, make_plan
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc

Ask = Callable[..., Any]

NUM_TOKENS = 40
PROMPT = [20 + 7 * i % 3000 for i in range(3 * 64 + 17)]  # three whole blocks and a part of one
ALWAYS: dict[str, Any] = {"repetition_penalty": 1.1, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **ALWAYS),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=11, **ALWAYS),
}
HOW = pytest.mark.parametrize("how", PARAMS)


@pytest.fixture(scope="module")
def llm(served_model: Any) -> Iterator[LLM]:
    with LLM(model=str(served_model.path), deterministic=True, **served_model.settings) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(served_model: Any) -> dict[str, RequestOutput]:
    """Each answer by itself, uncached: the prompt in one chunk, nothing beside it."""
    with LLM(
        model=str(served_model.path), deterministic=True, enable_prefix_caching=False, **served_model.settings
    ) as llm:
        return {how: llm.generate(PROMPT, params, use_tqdm=False)[0] for how, params in PARAMS.items()}


@pytest.fixture(scope="module")
def ask(served_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with serving(served_model, tmp_path_factory.mktemp("cached")) as ask:
        yield ask


@pytest.fixture(scope="module")
def ask_uncached(served_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Where nothing is ever cached and nothing runs beside."""
    with serving(served_model, tmp_path_factory.mktemp("uncached"), enable_prefix_caching=False) as ask:
        yield ask


@contextmanager
def serving(served_model: Any, logs: Path, **settings: Any) -> Iterator[Ask]:
    """POST /v1/completions of a deterministic server."""
    settings = {"model": served_model.path, **served_model.settings, "deterministic": True, "port": 0, **settings}
    stack = Stack(make_plan(settings), log_dir=logs)
    stack.start(timeout_s=120)

    def ask(**fields: Any) -> Any:
        response = httpx.post(f"{stack.url}/v1/completions", json=fields, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    try:
        yield ask
    finally:
        stack.stop()


def assert_equal(output: RequestOutput, expected: RequestOutput) -> None:
    ours, theirs = output.outputs[0], expected.outputs[0]
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    assert [p.logprob for p in ours.logprobs] == [p.logprob for p in theirs.logprobs]


def test_the_two_ways_differ(alone: dict[str, RequestOutput]) -> None:
    assert alone["greedy"].outputs[0].token_ids != alone["seeded"].outputs[0].token_ids
    assert len(alone["seeded"].outputs[0].token_ids) == NUM_TOKENS


@HOW
def test_among_fifteen_others(llm: LLM, alone: dict[str, RequestOutput], how: str) -> None:
    others = [[30 + i, *PROMPT[i : 40 + 13 * i]] for i in range(15)]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=20 + 5 * i, ignore_eos=True) for i in range(15)]
    outputs = llm.generate([*others[:7], PROMPT, *others[7:]], [*params[:7], PARAMS[how], *params[7:]], use_tqdm=False)
    assert_equal(outputs[7], alone[how])


@HOW
def test_cached(llm: LLM, alone: dict[str, RequestOutput], how: str) -> None:
    llm.generate(PROMPT, PARAMS[how], use_tqdm=False)
    (again,) = llm.generate(PROMPT, PARAMS[how], use_tqdm=False)
    assert again.usage.num_cached_tokens == 3 * 64
    assert_equal(again, alone[how])


def test_in_small_chunks(served_model: Any, alone: dict[str, RequestOutput]) -> None:
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 66}  # room for one chunk of 64 beside two decodes
    with LLM(model=str(served_model.path), deterministic=True, **small, **served_model.settings) as llm:
        for how, params in PARAMS.items():
            assert_equal(llm.generate(PROMPT, params, use_tqdm=False)[0], alone[how])


@HOW
@pytest.mark.parametrize("num_held", [1, 29, NUM_TOKENS - 1])
def test_resumed(llm: LLM, alone: dict[str, RequestOutput], how: str, num_held: int) -> None:
    """A history that holds generated tokens is continued as if it had never been interrupted."""
    expected, params = alone[how].outputs[0].token_ids, PARAMS[how]
    sampling = common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed or 0,
    )
    salt = f"{how} {num_held}"  # nothing of it is cached: generated tokens are computed again
    request = generation_pb2.GenerateRequest(
        request_id=f"resumed-{how}-{num_held}",
        token_ids=pack_token_ids([*PROMPT, *expected[:num_held]]),
        num_prompt_tokens=len(PROMPT),
        max_tokens=NUM_TOKENS,
        sampling=sampling,
        attempt=1,
        cache_salt=salt,
        resume=generation_pb2.GenerateResume(),
    )
    got: list[int] = []
    with grpc.insecure_channel(llm._stack.scheduler_address) as channel:  # type: ignore[union-attr]
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60):
            got += unpack_token_ids(response.delta.token_ids)
    assert got == expected[num_held:]


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128, 129, 160])
def test_a_prompts_log_probabilities_cached_and_not(ask: Ask, ask_uncached: Ask, num_tokens: int) -> None:
    """Bit for bit: with a hit, after a prompt that shares a part, and after one that asked for none."""
    prompt = [5000 + 3 * i % 2000 for i in range(num_tokens)]
    scoring: dict[str, Any] = {"prompt": prompt, "max_tokens": 3, "logprobs": 3, "echo": True, "temperature": 0}
    expected = ask_uncached(**scoring)["choices"][0]["logprobs"]
    assert len(expected["token_logprobs"]) == num_tokens + 3
    assert ask(**scoring)["choices"][0]["logprobs"] == expected
    plain = ask(**{**scoring, "echo": False})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 64 * 64
    assert plain["choices"][0]["logprobs"]["token_logprobs"] == expected["token_logprobs"][num_tokens:]
    ask(prompt=[*prompt[:64], *range(100, 150)], max_tokens=1)
    again = ask(**scoring)["choices"][0]
    assert again["logprobs"] == expected
    listed = ask(prompt=prompt, max_tokens=1, prompt_logprobs=3, temperature=0)["choices"][0]["prompt_logprobs"]
    told = [entry[str(token_id)]["logprob"] for token_id, entry in zip(prompt[1:], listed[1:], strict=True)]
    assert told == expected["token_logprobs"][1:num_tokens]


def test_choices_with_a_seed_whatever_else_runs(ask: Ask, ask_uncached: Ask) -> None:
    """Tokens and log-probabilities of n choices: alone and uncached, cached, and among others that come and go."""
    body: dict[str, Any] = {
        "prompt": PROMPT, "n": 3, "seed": 21, "temperature": 1.0, "top_p": 0.95, "max_tokens": 24, "logprobs": 2,
        "ignore_eos": True, "return_token_ids": True, "frequency_penalty": 0.3,
    }  # fmt: skip

    def told(answer: Any) -> list[Any]:
        return [(choice["token_ids"], choice["logprobs"], choice["text"]) for choice in answer["choices"]]

    expected = told(ask_uncached(**body))
    assert len({tuple(token_ids) for token_ids, _, _ in expected}) == 3
    assert told(ask(**body)) == expected
    with ThreadPoolExecutor(8) as pool:
        others = [
            pool.submit(ask, prompt=[40 + i, *PROMPT[: 20 * i]], max_tokens=5 + 9 * i, temperature=0.8, ignore_eos=True)
            for i in range(7)
        ]
        assert told(ask(**body)) == expected
        assert told(ask(**body)) == expected
        for other in others:
            other.result()
