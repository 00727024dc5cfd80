"""Orders for executors and frames for callers are cut by their bytes."""

from __future__ import annotations

import random

import pytest

from executor.sim.device import SimConfig, SimExecutor
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.core import CoreConfig
from services.scheduler.order_queue import MAX_BATCH_BYTES, OrderQueue, num_bytes
from services.scheduler.orders import Admit, Copy, Drop, Extend, Label, Order, Prefill
from services.scheduler.outbox import MAX_FRAME_BYTES, Outbox
from services.scheduler.stream_events import FinishReason, StreamFinished, StreamTokens
from services.scheduler.validation import MAX_ADMIT_BYTES, check_against_model
from services.scheduler.wire import fill_batch, fill_frame, request_from_proto
from tests.support.sim_world import World, random_run


def some_admit(num_known: int = 0, num_blocks: int = 3) -> Admit:
    return Admit(
        seq_id=1 << 60,
        num_tokens=1 << 31,
        num_prompt_tokens=1 << 31,
        num_cached_tokens=1 << 31,
        block_tables=[[1 << 31] * num_blocks, [1] * num_blocks],
        limit=1 << 31,
        max_total_tokens=1 << 31,
        sampling=None,
        choice_index=127,
        known_token_ids=bytes(4 * num_known),
        prompt_logprobs_delivered=True,
        trace=None,
    )


ORDERS: list[Order] = [
    some_admit(),
    some_admit(100_000, 3000),
    Copy(1 << 30, 1 << 31, 1 << 31, 63),
    Prefill(1 << 60, 1 << 31, 1 << 31, bytes(400_000)),
    Prefill(1, 0, 1, bytes(4)),
    Extend(1 << 60, [[1 << 31] * 5000, [], [1]], 1 << 31),
    Drop(1 << 63),
    Label(1 << 31, [1 << 31] * 70_000, [bytes(32)] * 70_000),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_takes_no_more_bytes_than_it_is_counted_for(order: Order) -> None:
    one, two = executor_pb2.OrderBatch(), executor_pb2.OrderBatch()
    fill_batch(one, 1, [order])
    fill_batch(two, 1, [order, order])
    assert two.ByteSize() - one.ByteSize() <= num_bytes(order)


def test_orders_keep_their_order_and_a_drop_names_its_batch() -> None:
    queue = OrderQueue(300)
    numbers = [queue.append(Drop(i)) for i in range(10)]
    assert numbers == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert queue.append(Copy(0, 1, 2, 3)) == 4
    assert queue.append(some_admit(1000)) == 5
    assert queue.append(Copy(0, 1, 2, 3)) == 5  # with its Admit, whatever that weighs
    taken = [queue.take() for _ in range(6)]
    assert taken[5] is None
    assert [batch[0] for batch in taken[:5] if batch] == [1, 2, 3, 4, 5]
    assert [o.seq_id for batch in taken[:4] if batch for o in batch[1] if isinstance(o, Drop)] == list(range(10))
    assert queue.append(Drop(1)) == 6


def test_labels_join_the_last_one_until_the_batch_is_full() -> None:
    queue = OrderQueue(400)
    for i in range(20):
        queue.label(0, i, bytes(32))
    batches = []
    while (batch := queue.take()) is not None:
        batches.append(batch[1])
    assert [label.block_ids for orders in batches for label in orders] == [  # type: ignore[union-attr]
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]


def test_many_choices_of_a_long_prompt_with_penalties_fit_the_link() -> None:
    """140,000 prompt tokens, 128 choices, a penalty: 69 MiB of admissions, which no message may have."""
    world = World(random.Random(1))
    config = SimConfig(
        num_blocks=4000, max_num_seqs=128, max_num_batched_tokens=140_000, max_model_len=160_000, vocab_size=97
    )
    link = world.connect(SimExecutor(config))
    proto = generation_pb2.GenerateRequest(
        request_id="r",
        token_ids=pack_token_ids([5] * 140_000),
        num_prompt_tokens=140_000,
        max_tokens=1,
        num_choices=128,
    )
    proto.sampling.frequency_penalty = 0.1
    proto.sampling.seed = 1
    clients = []
    for choice_index in range(128):
        each = generation_pb2.GenerateRequest()
        each.CopyFrom(proto)
        each.choice_index = choice_index
        clients.append(world.open(each))
    total = 0
    for _ in range(3000):
        while (taken := world.core.take_batch(link.link_id)) is not None:
            batch = executor_pb2.OrderBatch()
            fill_batch(batch, *taken)
            assert batch.ByteSize() <= MAX_BATCH_BYTES
            total += batch.ByteSize()
            link.down.append(batch)
        if not world.live:
            break
        world.apply(link)
        world.step(link)
        world.report(link)
    assert all(client.finish for client in clients)
    assert total > 64 << 20


def test_a_request_that_no_order_can_carry_fails_alone() -> None:
    world = World(random.Random(1))
    world.connect(SimExecutor(SimConfig(takes_grammars=True, vocab_size=97)))
    proto = generation_pb2.GenerateRequest(request_id="r", token_ids=bytes(4), num_prompt_tokens=1, max_tokens=1)
    proto.sampling.seed = 1
    proto.sampling.grammar.text = "x" * (MAX_ADMIT_BYTES + 1)
    assert world.core.model is not None
    error = check_against_model(request_from_proto(proto, now_s=0.0), 1, world.core.model, ())
    assert isinstance(error, InvalidRequestError)
    assert error.reason == "REQUEST_TOO_LARGE"
    proto.sampling.grammar.text = "x"
    assert check_against_model(request_from_proto(proto, now_s=0.0), 1, world.core.model, ()) is None


async def test_frames_for_callers_are_cut_by_bytes() -> None:
    outbox = Outbox()
    entry = common_pb2.TokenLogprobs(token_id=1, top_token_ids=bytes(80), top_logprobs=[0.5] * 20)
    for stream_id in range(20):
        outbox.push(stream_id, StreamTokens(stream_id, bytes(4), None, [entry] * 20_000))
    outbox.push(99, StreamTokens(99, bytes(MAX_FRAME_BYTES)))
    outbox.push(1, StreamFinished(1, FinishReason.STOP, None, 0, 0, 1))
    seen: list[int] = []
    num_frames = 0
    while len(seen) < 22:
        taken = await outbox.take()
        assert taken is not None
        events = taken[0]
        frame = generation_pb2.GenerationServiceSessionResponse()
        fill_frame(frame, events)
        assert frame.ByteSize() <= MAX_FRAME_BYTES or len(events) == 1
        seen += [stream_id for stream_id, _ in events]
        num_frames += 1
    assert seen == [*range(20), 99, 1]
    assert num_frames < 10


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_batch_bytes", [1, 250, 3000])
def test_any_cut_is_the_same_to_every_stream(monkeypatch: pytest.MonkeyPatch, max_batch_bytes: int, seed: int) -> None:
    original = CoreConfig.__init__

    def init(self: CoreConfig, **kwargs: object) -> None:
        original(self, **{**kwargs, "max_batch_bytes": max_batch_bytes})  # type: ignore[arg-type]

    monkeypatch.setattr(CoreConfig, "__init__", init)
    random_run(random.Random(70_000 + seed), 300)
