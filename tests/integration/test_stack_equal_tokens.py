"""With --deterministic the tokens are a function of prompt, parameters and seed: whatever runs beside them, however the
prompt was cut into chunks, with and without a cache hit, and after a resume. Over the real processes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from rorqual import LLM, SamplingParams
from rorqual.client.outputs import RequestOutput
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc

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
