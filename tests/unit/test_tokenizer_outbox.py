"""Outboxes: what gathers while the wire is busy goes out as fewer, larger messages, and loses nothing."""

from __future__ import annotations

from rorqual.core.errors import QueueFullError
from rorqual.v1 import text_pb2
from services.tokenizer.outbox import CallOutbox, SessionOutbox, add_text
from services.tokenizer.session import UsedIds


def test_events_of_one_choice_join() -> None:
    events = text_pb2.ChatResponse().events
    add_text(events, 0, b"aaaa", None, "")
    add_text(events, 0, b"bbbb", "reasoning", "x")
    add_text(events, 0, b"cccc", None, "")
    add_text(events, 0, b"dddd", "reasoning", "y")
    add_text(events, 0, b"eeee", "content", "z")
    add_text(events, 1, b"ffff", "content", "other")
    add_text(events, 0, b"gggg", "content", "!")
    assert [(e.choice_index, e.token_ids, e.WhichOneof("event"), e.reasoning or e.content) for e in events] == [
        (0, b"aaaabbbbccccdddd", "reasoning", "xy"),
        (0, b"eeee", "content", "z"),
        (1, b"ffff", "content", "other"),
        (0, b"gggg", "content", "!"),
    ]


def test_events_with_logprobs_stay_apart_and_long_ones_too() -> None:
    events = text_pb2.ChatResponse().events
    add_text(events, 0, b"aaaa", "content", "a").logprobs.add()
    add_text(events, 0, b"bbbb", "content", "b").logprobs.add()
    assert len(events) == 2
    for _ in range(3000):
        add_text(events, 1, b"cccc", "content", "c")
    assert len(events) == 5
    assert sum(len(e.token_ids) for e in events) == 8 + 12_000


def test_a_finished_choice_is_never_lengthened() -> None:
    events = text_pb2.ChatResponse().events
    events.add(choice_index=0).finished.reason = 1
    add_text(events, 0, b"", "content", "x")
    assert [e.WhichOneof("event") for e in events] == ["finished", "content"]


async def test_a_call_ends_with_what_it_failed_with_after_what_came_before() -> None:
    outbox = CallOutbox(text_pb2.ChatResponse)
    add_text(outbox.events(), 0, b"aaaa", "content", "a")
    outbox.fail(QueueFullError("full"))
    seen = []
    try:
        async for response in outbox.responses():
            seen.append(response.events[0].content)
    except QueueFullError:
        seen.append("full")
    assert seen == ["a", "full"]


async def test_a_session_frame_holds_all_streams_and_what_gathers_meanwhile_joins() -> None:
    outbox = SessionOutbox()
    ended: list[int] = []
    first, second = outbox.sink(1, ended.append), outbox.sink(2, ended.append)
    frames = outbox.frames()
    for n in range(3):
        add_text(first.events(), 0, b"aaaa", "content", str(n))
        add_text(second.events(), 0, b"bbbb", "content", str(n))
        first.wake()
    frame = await anext(frames)
    assert [(s.stream_id, [e.content for e in s.events]) for s in frame.streams] == [(1, ["012"]), (2, ["012"])]
    second.fail(QueueFullError("full"))
    first.end()
    outbox.close()
    last = await anext(frames)
    assert [(s.stream_id, s.error.reason) for s in last.streams] == [(2, "QUEUE_FULL")]
    assert ended == [2, 1]
    assert [frame async for frame in frames] == []


async def test_what_is_too_long_for_a_message_is_cut_between_events() -> None:
    """One stream's events too: the log-probabilities of a long prompt."""
    outbox, call = SessionOutbox(), CallOutbox(text_pb2.CompleteResponse)
    first, second = outbox.sink(1, lambda _: None), outbox.sink(2, lambda _: None)
    long = "x" * (7 << 20)
    first.events().add().content = "before"
    for n in range(5):
        for sink in (second, call):
            event = sink.events().add(choice_index=n)  # type: ignore[call-arg]
            event.content = long
    second.fail(QueueFullError("full"))
    call.end()
    outbox.heartbeat()
    outbox.close()
    frames = [frame async for frame in outbox.frames()]
    assert len(frames) == 3
    assert max(frame.ByteSize() for frame in frames) <= 16 << 20
    heard = [(s.stream_id, e.choice_index) for frame in frames for s in frame.streams for e in s.events]
    assert heard == [(1, 0), *((2, n) for n in range(5))]
    errors = [[s.error.reason for s in frame.streams if s.HasField("error")] for frame in frames]
    assert errors == [[], [], ["QUEUE_FULL"]]
    assert [frame.HasField("heartbeat") for frame in frames] == [True, False, False]
    responses = [response async for response in call.responses()]
    assert [[e.choice_index for e in response.events] for response in responses] == [[0, 1], [2, 3], [4]]


def test_used_ids_stay_small_when_they_count_up() -> None:
    used = UsedIds()
    assert all(used.add(n) for n in range(10, 1000))
    assert not used._beyond
    assert not used.add(10)
    assert not used.add(999)
    assert used.add(5)
    assert not used.add(5)
    assert used.add(1001)
    assert used.add(1000)
    assert not used.add(1001)
    assert used._next == 1002
