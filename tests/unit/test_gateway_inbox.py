"""The inbox: merged for a slow reader, bounded, and honest about failure."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.upstream.inbox import MIN_LOGPROB, Inbox, finite
from rorqual.core.clock import SystemClock
from rorqual.core.errors import QueueFullError, UnavailableError
from rorqual.v1 import text_pb2
from tests.support.scripted_tokenizer import event, finish, logprob


def put(inbox: Inbox, *events: text_pb2.TextEvent) -> None:
    for e in events:
        inbox.put(e.choice_index, e, e.WhichOneof("event"))


async def test_neighbouring_texts_of_a_choice_are_merged_until_taken() -> None:
    inbox = Inbox(SystemClock())
    put(
        inbox,
        event(0, [1], content="a"),
        event(1, [2], content="x"),
        event(0, [3], content="b", logprobs=[logprob("b", -1.0)]),
        event(0, [4]),
        event(1, [5], reasoning="y"),
    )
    pieces = await inbox.take()
    assert [(p.choice_index, p.kind, p.text, len(p.token_ids) // 4) for p in pieces] == [
        (0, "content", "ab", 3),
        (1, "content", "x", 1),
        (1, "reasoning", "y", 1),
    ]
    assert [entry.token for entry in pieces[0].logprobs] == ["b"]
    put(inbox, event(0, [6], content="c"))
    assert [p.text for p in await inbox.take()] == ["c"]


async def test_tokens_without_text_join_the_text_that_follows() -> None:
    inbox = Inbox(SystemClock())
    put(inbox, event(0, [1]), event(0, [2], content="é"))
    (piece,) = await inbox.take()
    assert (piece.kind, piece.text, len(piece.token_ids)) == ("content", "é", 8)


async def test_nothing_is_merged_over_an_end() -> None:
    inbox = Inbox(SystemClock())
    put(inbox, event(0, [1], content="a"), finish(0, [2]))
    assert [p.kind for p in await inbox.take()] == ["content", "finished"]


def delta(idx: int, arguments: str = "", **named: str) -> text_pb2.ToolCallDelta:
    return text_pb2.ToolCallDelta(tool_call_idx=idx, arguments_json_delta=arguments, **named)


async def test_arguments_of_a_call_are_merged_apart_from_what_names_it() -> None:
    inbox = Inbox(SystemClock())
    put(
        inbox,
        event(0, [1], content="a"),
        event(0, [2], tool_call=delta(0, id="c", name="f")),
        event(0, [3], tool_call=delta(0, '{"x"')),
        event(1, [4], tool_call=delta(0, "other")),
        event(0, [5], logprobs=[logprob(":", -1.0)]),
        event(0, [6], tool_call=delta(0, ": 1}")),
        event(0, [7], tool_call=delta(1, id="d", name="g")),
        event(0, [8], content="b"),
    )
    pieces = await inbox.take()
    assert [(p.choice_index, p.kind, len(p.token_ids) // 4) for p in pieces] == [
        (0, "content", 1),
        (0, "tool_call", 1),
        (0, "tool_call", 3),
        (1, "tool_call", 1),
        (0, "tool_call", 1),
        (0, "content", 1),
    ]
    assert [p.detail for p in pieces if p.kind == "tool_call"] == [
        delta(0, id="c", name="f"),
        delta(0, '{"x": 1}'),
        delta(0, "other"),
        delta(1, id="d", name="g"),
    ]
    assert [entry.token for entry in pieces[2].logprobs] == [":"]


async def test_a_slow_client_of_a_long_call_is_given_up_like_any() -> None:
    inbox = Inbox(SystemClock(), max_backlog_bytes=1000)
    for number in range(60):
        put(inbox, event(0, [number], tool_call=delta(0, "x" * 20)))
    assert isinstance(inbox.error, QueueFullError)


async def test_take_waits_and_ends() -> None:
    inbox = Inbox(SystemClock())
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    put(inbox, event(0, [1], content="a"))
    assert [p.text for p in await waiting] == ["a"]
    inbox.end_stream()
    assert await inbox.take() == []


async def test_whole_hands_out_nothing_before_the_end_of_all_streams() -> None:
    inbox = Inbox(SystemClock(), num_streams=2, whole=True)
    waiting = asyncio.create_task(inbox.take())
    put(inbox, event(0, [1], content="a"))
    inbox.end_stream()
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.end_stream()
    assert [p.text for p in await waiting] == ["a"]


async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    inbox = Inbox(SystemClock())
    put(inbox, event(0, [1], content="a"))
    inbox.fail(UnavailableError("gone"))
    put(inbox, event(0, [2], content="never"))
    assert [p.text for p in await inbox.take()] == ["a"]
    with pytest.raises(UnavailableError):
        await inbox.take()


async def test_a_whole_answer_fails_whole() -> None:
    inbox = Inbox(SystemClock(), whole=True)
    put(inbox, event(0, [1], content="a"))
    inbox.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await inbox.take()


async def test_a_failure_after_the_end_is_none() -> None:
    inbox = Inbox(SystemClock())
    inbox.end_stream()
    inbox.fail(UnavailableError("gone"))
    assert await inbox.take() == []


async def test_the_backlog_of_a_client_that_does_not_read_is_bounded() -> None:
    inbox = Inbox(SystemClock(), max_backlog_bytes=1000)
    for _ in range(90):
        put(inbox, event(0, [1], content="123456"))
    assert not inbox.done
    for _ in range(90):
        put(inbox, event(0, [1], content="123456"))
    assert isinstance(inbox.error, QueueFullError)
    assert inbox.error.reason == "SLOW_CLIENT"
    assert len((await inbox.take())[0].text) <= 1000


def test_a_logarithm_of_zero_is_a_number_json_has() -> None:
    assert [finite(x) for x in (-0.5, -math.inf, math.inf, math.nan)] == [-0.5, MIN_LOGPROB, MIN_LOGPROB, MIN_LOGPROB]


async def test_the_times_of_first_and_last_token_are_kept() -> None:
    class Ticking:
        now = 0.0

        def monotonic_s(self) -> float:
            self.now += 1.0
            return self.now

        def time_s(self) -> float:
            return self.now

    inbox = Inbox(Ticking())
    put(inbox, text_pb2.TextEvent(accepted=text_pb2.Accepted()))
    before = inbox.first_token_s
    put(inbox, event(0, [1], content="a"), event(0, [2, 3], content="b"), finish(0))
    assert (before, inbox.first_token_s, inbox.last_token_s, inbox.num_tokens) == (None, 1.0, 2.0, 3)
