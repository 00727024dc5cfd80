"""What the soak takes for wrong, and how it reads memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.soak.answers import Wrong, fault_against, read
from benchmarks.soak.client import Reply
from benchmarks.soak.memory import Sample, longest_life, slope_per_min
from benchmarks.soak.mix import CHAT, COMPLETIONS, KINDS, MESSAGES, RESPONSES, SCHEMAS, Case, draw


def chunk(index: int = 0, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}], "usage": None}


def usage(num_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}}


def stream(*events: dict[str, Any], done: bool = True) -> Reply:
    return Reply(status=200, is_stream=True, events=list(events), has_done=done)


WHOLE = (chunk(text="a"), chunk(text="b"), chunk(finish="length"), usage(2))


def test_a_whole_stream_is_read_and_found_right() -> None:
    answer = read(COMPLETIONS, stream(*WHOLE))
    Case("", COMPLETIONS, {"max_tokens": 2}).verify(answer)
    assert (answer.text, answer.num_output_tokens) == ("ab|", 2)


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (stream(*WHOLE, done=False), "without \\[DONE\\]"),
        (stream(*WHOLE[:3]), "no usage"),
        (stream(WHOLE[0], usage(2)), "finish reason ''"),
        (stream(*WHOLE[:3], chunk(text="c"), usage(3)), "goes on after"),
        (stream(WHOLE[0], {"error": {"message": "gone"}}), "an error after status 200"),
        (Reply(status=503, body=b"busy"), "status 503: busy"),
    ],
)
def test_a_stream_that_is_not_whole_is_wrong(reply: Reply, what: str) -> None:
    with pytest.raises(Wrong, match=what):
        read(COMPLETIONS, reply)


@pytest.mark.parametrize(("asked", "what"), [(1, "2 tokens where 1"), (3, "finished by length after 2 tokens of 3")])
def test_counts_that_do_not_fit_the_request_are_wrong(asked: int, what: str) -> None:
    with pytest.raises(Wrong, match=what):
        Case("", COMPLETIONS, {"max_tokens": asked}).verify(read(COMPLETIONS, stream(*WHOLE)))


def test_a_missing_choice_is_wrong() -> None:
    with pytest.raises(Wrong, match="1 choices of 2"):
        Case("", COMPLETIONS, {"max_tokens": 2}, num_choices=2).verify(read(COMPLETIONS, stream(*WHOLE)))


def test_deltas_of_a_response_must_make_its_text() -> None:
    output = [{"type": "message", "content": [{"text": "ab"}]}]
    last = {"status": "completed", "output": output, "usage": {"input_tokens": 1, "output_tokens": 2}}
    events: list[dict[str, Any]] = [
        {"type": "response.output_text.delta", "delta": "a", "sequence_number": 0},
        {"type": "response.completed", "response": last, "sequence_number": 1},
    ]
    with pytest.raises(Wrong, match="deltas make 'a'"):
        read(RESPONSES, stream(*events))
    events[0]["delta"] = "ab"
    assert read(RESPONSES, stream(*events)).text == "ab|"


def test_messages_that_stop_short_are_wrong() -> None:
    with pytest.raises(Wrong, match="ended with content_block_stop"):
        read(MESSAGES, stream({"type": "message_start"}, {"type": "content_block_stop"}))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"name": "x", "n": 3}, ""),
        ({"name": "x"}, "missing"),
        ({"name": "x", "n": 3, "m": 1}, "not allowed"),
        ({"name": "x" * 13, "n": 3}, "13 characters"),
        ({"name": "x", "n": 1000}, "out of range"),
        ({"name": "x", "n": "3"}, "no integer"),
        ({"name": "x", "n": True}, "no integer"),
    ],
)
def test_a_value_is_held_against_its_schema(value: Any, fault: str) -> None:
    found = fault_against(SCHEMAS[0], value)
    assert found == fault if not fault else fault in found


def test_every_kind_is_drawn_and_is_json() -> None:
    import random

    rng = random.Random(1)
    for kind in KINDS:
        for _ in range(20):
            case = draw(rng, (kind,))
            assert case.kind == kind
            assert json.dumps(case.body)
            assert case.max_tokens > 0
            assert case.path != CHAT or case.body["messages"]


def test_the_slope_is_that_of_the_longest_life_without_its_first_third() -> None:
    short = [Sample(float(t), 1, 50.0) for t in range(5)]
    warm = [Sample(100.0 + t, 2, 10.0 * t) for t in range(10)]  # grows fast as it starts
    steady = [Sample(110.0 + t, 2, 100.0 + t / 60) for t in range(20)]
    life = longest_life(short + warm + steady)
    assert life == warm + steady
    assert slope_per_min(life) == pytest.approx(1.0)


def test_few_samples_have_no_slope() -> None:
    assert slope_per_min([Sample(float(t), 1, 1.0) for t in range(4)]) is None
