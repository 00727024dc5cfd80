"""Any process may be killed: it is started again, and what a client reads has neither gap nor repeat."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rorqual import LLM, SamplingParams

WaitUntil = Callable[..., None]
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def llm(served_model: Any) -> Iterator[LLM]:
    with LLM(model=str(served_model.path), deterministic=True, **served_model.settings) as llm:
        yield llm


@pytest.mark.parametrize("victim", ["tokenizer", "scheduler", "executor"])
def test_a_killed_process_is_never_noticed(llm: LLM, victim: str, wait_until: WaitUntil) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = f"The {victim} and the whale"
    (calm,) = llm.generate(prompt, params, use_tqdm=False)

    before = llm.pids[victim]
    text = []
    for num_pieces, piece in enumerate(llm.stream_generate(prompt, params)):
        text.append(piece)
        if num_pieces == 5:
            os.kill(before, signal.SIGKILL)
    assert len(text) > 5
    assert "".join(text) == calm.outputs[0].text
    wait_until(lambda: llm.pids.get(victim, before) != before, f"the {victim} is back")
