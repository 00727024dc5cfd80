"""Policies, queues and what waits for a wire: the small pure parts of the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.sim.device import SimExecutor
from rorqual.core.errors import InvalidRequestError, PreconditionError, UnavailableError
from rorqual.core.token_ids import pack_token_ids, pack_uint64
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler import policy
from services.scheduler.drain_rate import DrainRate
from services.scheduler.events import Request
from services.scheduler.executor_contract import spec_from_hello
from services.scheduler.generation_service import UsedIds
from services.scheduler.outbox import Outbox
from services.scheduler.prefill_queue import PrefillQueue
from services.scheduler.sequence import Sequence
from services.scheduler.stream_events import FinishReason, StreamFinished, StreamTokens
from services.scheduler.waiting_queue import WaitingQueue, classes_gained
from services.scheduler.wire import reported_from_proto, request_from_proto


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(1, 5000), st.integers(64, 3000))
def test_chunks(start_block: int, num_tokens: int, room: int) -> None:
    start = 64 * start_block
    history_end = start + num_tokens
    end = policy.cut_chunk(start, history_end, room)
    assert start < end <= min(history_end, start + room)
    assert end % 64 == 0 or end == history_end


def test_a_chunk_needs_room_for_a_block() -> None:
    with pytest.raises(ValueError, match=">= 64"):
        policy.cut_chunk(0, 100, 63)


@settings(deadline=None)
@example(5e-324, 1, 0.0, 100, 1, 10)  # a step time so small that the number of steps it fits is inf
@given(
    st.floats(0, 1e6),
    st.integers(1, 8),
    st.floats(0, 1e9),
    st.integers(0, 10_000),
    st.integers(0, 5000),
    st.integers(-100, 10_000),
)
def test_look_ahead_never_vanishes_and_follows_memory(
    step_us: float, per_step: int, round_trip_us: float, num_free: int, num_running: int, num_grantable: int
) -> None:
    ahead = policy.tokens_ahead(step_us, per_step, round_trip_us)
    assert 32 <= ahead <= 512
    affordable = policy.affordable_ahead(ahead, num_free, num_running, num_grantable)
    assert 32 <= affordable <= ahead
    if affordable > 32:
        assert affordable * num_running <= num_free * 64
        assert affordable <= num_grantable * 64


def test_look_ahead_hides_two_round_trips() -> None:
    assert policy.tokens_ahead(1000.0, 1, 0.0) == policy.tokens_ahead(1000.0, 1, 10_000.0) == 32
    assert policy.tokens_ahead(1000.0, 1, 50_000.0) == 101
    assert policy.tokens_ahead(1000.0, 2, 50_000.0) == 202
    assert policy.tokens_ahead(1000.0, 1, 5_000_000.0) == 512


def sequence(arrival: int, *, priority: int = 0, num_tokens: int = 10, is_resume: bool = False) -> Sequence:
    request = Request(request_id=f"r{arrival}", num_prompt_tokens=num_tokens, priority=priority, is_resume=is_resume)
    return Sequence(arrival, request, bytes(4 * num_tokens), arrival, 0.0)


def test_the_queue_goes_by_priority_then_resumes_then_arrival() -> None:
    queue = WaitingQueue()
    late, early, resumed, urgent, gone = (
        sequence(3), sequence(1), sequence(9, is_resume=True), sequence(8, priority=-1), sequence(0),
    )  # fmt: skip
    for seq in (late, early, resumed, urgent, gone):
        queue.push(seq)
    queue.discard(gone)
    queue.discard(gone)
    order = []
    while (seq := queue.peek()) is not None:
        order.append(seq)
        queue.discard(seq)
    assert order == [urgent, resumed, early, late]
    assert len(queue) == 0


def test_who_waits_gets_a_better_class_but_none_better_than_is_there() -> None:
    assert [classes_gained(waited_s, 30.0) for waited_s in (0, 29.9, 30, 60, 90, 120, 150)] == [0, 0, 1, 2, 4, 8, 16]
    assert classes_gained(1e9, 30.0) >= 2**32
    queue = WaitingQueue(30.0)
    old, newer, best = sequence(1, priority=10), sequence(2, priority=7), sequence(3, priority=5)
    queue.push(old, 0.0)
    queue.push(newer, 0.0)
    assert queue.peek(30.0) is newer
    assert (old.priority, newer.priority) == (9, 7)  # the best class there gains nothing
    queue.push(best, 80.0)
    assert queue.peek(80.0) is newer  # 7 - 2, and it came earlier
    assert (old.priority, newer.priority, best.priority) == (8, 5, 5)
    assert queue.peek(90.0) is newer  # 7 - 4, but nobody is better than 5
    assert (old.priority, newer.priority, best.priority) == (6, 5, 5)
    assert queue.peek(119.0) is newer
    assert queue.peek(120.0) is old
    queue.discard(old)
    assert old.priority == 5
    queue.push(old, 130.0)  # displaced: it keeps what it has
    assert queue.peek(131.0) is old
    assert [queue.ahead(4), queue.ahead(5)[0]] == [(0, 0, 0), 3]


@pytest.mark.parametrize("ageing_s", [0.02, 0.1, 0.3, 30.0])
def test_ageing_goes_on_whatever_is_rounded(ageing_s: float) -> None:
    """Asked at just the times that it names itself, where a quotient may come out below a whole number."""
    queue = WaitingQueue(ageing_s)
    waiting, best = sequence(1, priority=100), sequence(2, priority=0)
    queue.push(best, 0.001)
    queue.push(waiting, 0.001)
    for period in range(1, 200):
        due_s = max(entry[0] for entry in queue._due)
        assert due_s == pytest.approx(0.001 + period * ageing_s)
        queue.peek(due_s)
    assert waiting.priority == 0


def test_a_class_that_runs_counts_as_there() -> None:
    queue = WaitingQueue(30.0)
    waiting = sequence(1, priority=3)
    queue.push(waiting, 0.0)
    assert queue.peek(200.0, None) is waiting
    assert waiting.priority == 3
    assert queue.peek(250.0, 1) is waiting
    assert waiting.priority == 1


def test_a_queue_of_the_cancelled_takes_no_room() -> None:
    queue = WaitingQueue()
    for i in range(10_000):
        seq = sequence(i)
        queue.push(seq)
        queue.discard(seq)
    assert len(queue._heap) < 200
    ageing = WaitingQueue(1.0)
    for i in range(10_000):
        ageing.push(seq := sequence(i), 0.0)
        ageing.discard(seq)
    assert len(ageing._due) < 200


def test_the_queue_knows_what_stands_before_a_class() -> None:
    queue = WaitingQueue()
    assert queue.ahead(5) == (0, 0, 0)
    sequences = [sequence(i, priority=i % 3, num_tokens=10 + i) for i in range(9)]
    for seq in sequences:
        seq.max_total = 100
        queue.push(seq)
    assert queue.ahead(-1) == (0, 0, 0)
    assert queue.ahead(0) == (3, 39, 300)
    for seq in sequences[3:]:
        seq.num_tokens += 1000  # it is what was pushed that leaves
        queue.discard(seq)
    assert queue.ahead(2) == (3, 33, 300)


def drained(num_departures: int, every_s: float, work: tuple[int, int, int] = (1, 100, 200)) -> DrainRate:
    """A queue that one has left every `every_s`, from 0 on."""
    drain = DrainRate()
    for i in range(num_departures):
        drain.note(work, i * every_s)
    return drain


def test_a_wait_is_estimated_from_what_left_the_queue() -> None:
    least = drained(101, 0.1).least_wait_s((260, 26_000, 52_000), 10.0)
    assert least == pytest.approx(20.0), "26 s at the rate that was seen; 3 of 10 could be luck"
    assert drained(101, 0.1).wait_s(260, 10.0) == pytest.approx(26.0)
    assert drained(101, 0.1).wait_s(260, 20.0) == pytest.approx(52.0), "and nothing since"
    assert drained(101, 0.1).least_wait_s((260, 26_000, 52_000), 20.0) == least, "a standstill may be over at once"


def test_of_several_measures_the_shortest_wait_counts() -> None:
    short_ones_wait = drained(101, 0.1, (1, 1000, 5000)).least_wait_s((260, 2600, 5200), 10.0)
    assert short_ones_wait is not None
    assert short_ones_wait < 0.1, "what left was far longer than what waits"
    long_ones_wait = drained(101, 0.1, (1, 10, 20)).least_wait_s((26, 26_000, 260_000), 10.0)
    assert long_ones_wait == pytest.approx(2.0)


def test_an_uncertain_wait_is_none() -> None:
    assert drained(16, 1.0).least_wait_s((100, 1, 1), 16.0) is None, "too few"
    assert drained(17, 1.0).least_wait_s((100, 1, 1), 90.0) is None, "too long ago"
    assert drained(17, 0.0).least_wait_s((100, 100, 100), 0.0) == 0.0, "all at once: no rate"
    assert DrainRate().wait_s(5, 1.0) is drained(1, 1.0).wait_s(5, 3.0) is None
    drain = drained(50, 1.0)
    drain.clear()
    assert drain.wait_s(5, 50.0) is drain.least_wait_s((5, 5, 5), 50.0) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 999), st.integers(1, 999)), max_size=400),
    st.tuples(st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 9999)),
)
def test_the_least_wait_is_never_longer_than_the_likely_one(
    departures: list[tuple[float, int, int]], ahead: tuple[int, int, int]
) -> None:
    drain, now_s = DrainRate(), 0.0
    for after_s, num_tokens, max_total in departures:
        now_s += after_s
        drain.note((1, num_tokens, max_total), now_s)
    assert len(drain._departures) <= 256
    least, likely = drain.least_wait_s(ahead, now_s), drain.wait_s(ahead[0], now_s)
    if least is not None:
        assert likely is not None
        assert 0.0 <= least <= likely + 1e-9


@settings(deadline=None)
@given(st.floats(0, 1e9))
def test_a_retry_is_asked_for_within_bounds(wait_s: float) -> None:
    assert 1 <= policy.retry_after_s(wait_s) <= 60
    assert policy.retry_after_s(wait_s) >= min(wait_s, 60)


def prefilling(arrival: int, num_tokens: int, **kwargs: Any) -> Sequence:
    seq = sequence(arrival, num_tokens=num_tokens, **kwargs)
    seq.seq_id = arrival + 1
    seq.prefill_end = num_tokens
    return seq


def cut(queue: PrefillQueue, size: int) -> int:
    """Send the next chunk; returns whose it was."""
    picked = queue.next()
    assert picked is not None
    seq, _ = picked
    seq.num_sent = min(seq.prefill_end, seq.num_sent + size)
    queue.resize(seq)
    return seq.arrival


def test_prompts_of_one_length_go_whole_and_in_order() -> None:
    queue = PrefillQueue()
    for i in range(3):
        queue.add(prefilling(i, 128))
    assert [cut(queue, 64) for _ in range(6)] == [0, 0, 1, 1, 2, 2]
    assert queue.next() is None


def test_long_and_short_prompts_take_turns() -> None:
    queue = PrefillQueue()
    queue.add(prefilling(0, 64 * 10))
    for i in range(1, 9):
        queue.add(prefilling(i, 64))
    order = [cut(queue, 64) for _ in range(18)]
    assert order.count(0) == 10
    assert sum(1 for arrival in order[:8] if arrival == 0) == 4, "the long one gets every other chunk"
    assert [arrival for arrival in order if arrival] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_dropped_prompt_is_skipped() -> None:
    queue = PrefillQueue()
    first, second = prefilling(0, 640), prefilling(1, 64)
    queue.add(first)
    queue.add(second)
    first.seq_id = 0
    assert cut(queue, 64) == 1
    assert queue.next() is None


# -- outbox -------------------------------------------------------------------------------------------


async def test_deltas_merge_while_the_wire_is_busy() -> None:
    outbox = Outbox()
    for i in range(3):
        outbox.push(1, StreamTokens(10, bytes([i, 0, 0, 0])))
        outbox.push(2, StreamTokens(11, bytes([9, 0, 0, 0]), ["a"]))
    outbox.push(1, StreamFinished(10, FinishReason.LENGTH, None, 0, 0, 3))
    taken = await outbox.take()
    assert taken is not None
    events, beat = taken
    assert [(stream_id, type(event)) for stream_id, event in events] == [
        (1, StreamTokens), (2, StreamTokens), (1, StreamFinished),
    ]  # fmt: skip
    first, second = events[0][1], events[1][1]
    assert isinstance(first, StreamTokens)
    assert isinstance(second, StreamTokens)
    assert bytes(first.token_ids) == pack_token_ids([0, 1, 2])
    assert second.logprobs == ["a", "a", "a"]
    assert not beat


async def test_an_outbox_beats_closes_and_fails() -> None:
    outbox = Outbox()
    outbox.beat()
    assert await outbox.take() == ([], True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.take(), 0.01)
    outbox.push(1, StreamTokens(1, b"abcd"))
    outbox.close()
    taken = await outbox.take()
    assert taken is not None
    assert len(taken[0]) == 1
    assert await outbox.take() is None
    outbox.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await outbox.take()


async def test_a_frame_is_bounded() -> None:
    outbox = Outbox()
    for i in range(10_000):
        outbox.push(i, StreamTokens(i, b"abcd"))
    outbox.close()
    sizes = []
    while (taken := await outbox.take()) is not None:
        sizes.append(len(taken[0]))
    assert sum(sizes) == 10_000
    assert max(sizes) <= 4096


@settings(deadline=None)
@given(st.lists(st.integers(0, 30)))
def test_used_ids(ids: list[int]) -> None:
    used, seen = UsedIds(), set()
    for new_id in ids:
        assert used.add(new_id) == (new_id not in seen)
        seen.add(new_id)


# -- the wire -----------------------------------------------------------------------------------------


def proto(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        **{"token_ids": pack_token_ids([1, 2, 3]), "num_prompt_tokens": 3, "request_id": "r", **fields}
    )


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"token_ids": b""}, "EMPTY_PROMPT", "token_ids"),
        ({"token_ids": b"abcde"}, "INVALID_ARGUMENT", "token_ids"),
        ({"num_prompt_tokens": 0}, "INVALID_ARGUMENT", "num_prompt_tokens"),
        ({"num_prompt_tokens": 4}, "INVALID_ARGUMENT", "num_prompt_tokens"),
        ({"choice_index": 1}, "INVALID_ARGUMENT", "choice_index"),
        ({"max_tokens": 1, "sampling": {"min_tokens": 2}}, "INVALID_SAMPLING", "sampling.min_tokens"),
        *(
            ({"sampling": {name: value}}, "INVALID_SAMPLING", f"sampling.{name}")
            for name, value in [
                ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
                ("top_p", 1.1), ("min_p", 1.5), ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
                ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("logprobs", 21),
                ("prompt_logprobs", 21), ("logit_bias", {5: 101.0}),
            ]
        ),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field(fields: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_from_proto(proto(**fields), now_s=0.0)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_request_from_the_wire() -> None:
    request = request_from_proto(
        proto(
            token_ids=pack_token_ids([1, 2, 3, 4]),
            sampling={"stop_token_ids": [7, 9], "logit_bias": {11: 1.0}, "repetition_penalty": 1.5},
            time_left_us=2_000_000,
        ),
        now_s=10.0,
        seed=42,
    )
    assert request.is_resume, "it holds a generated token"
    assert request.seed == 42
    assert isinstance(request.sampling, common_pb2.SamplingParams)
    assert request.sampling.seed == 42
    assert request.deadline_s == 12.0
    assert request.needs_known_tokens
    assert dict(request.largest_ids) == {"token_ids": 4, "sampling.stop_token_ids": 9, "sampling.logit_bias": 11}


def test_finish_reasons_are_the_contracts() -> None:
    for reason in FinishReason:
        assert common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason.value


@pytest.mark.parametrize(
    "columns",
    [
        {"seq_ids": pack_uint64([1])},
        {"seq_ids": b"abc"},
        {"seq_ids": pack_uint64([1]), "num_tokens": pack_token_ids([1])},
        {"seq_ids": pack_uint64([1]), "num_tokens": pack_token_ids([0]), "finish": b"\0\0"},
        {"seq_ids": pack_uint64([1]), "num_tokens": pack_token_ids([0]), "finish": b"\x09"},
        {"computed_seq_ids": pack_uint64([1])},
    ],
)
def test_a_report_whose_columns_do_not_fit_is_refused(columns: dict[str, bytes]) -> None:
    with pytest.raises(InvalidRequestError):
        reported_from_proto(1, executor_pb2.Report(**columns))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h: setattr(h, "protocol_version", 2), PreconditionError),
        (lambda h: setattr(h.cache_groups[0], "window", 128), PreconditionError),
        (lambda h: setattr(h.cache_groups[0], "block_size", 16), InvalidRequestError),
        (lambda h: setattr(h, "max_num_batched_tokens", 100), InvalidRequestError),
        (lambda h: setattr(h, "rank", 1), InvalidRequestError),
        (lambda h: setattr(h, "executor_id", ""), InvalidRequestError),
        (lambda h: setattr(h.model, "fingerprint", b"short"), InvalidRequestError),
        (lambda h: setattr(h.inventory[0], "hashes", b"x"), InvalidRequestError),
    ],
)
def test_an_executor_that_cannot_be_driven_is_refused(change: Any, error: type[Exception]) -> None:
    hello = SimExecutor().hello()
    spec_from_hello(hello)
    change(hello)
    with pytest.raises(error):
        spec_from_hello(hello)
