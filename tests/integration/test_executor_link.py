"""The link over real gRPC: a scheduler's end on port 0, a step loop in its thread, a model that is a function."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

from executor.link import LinkRefusedError, SchedulerLink
from executor.model.batch import ForwardBatch
from executor.order_loop import StepLimits
from executor.reports import Outbox, StepOutput
from executor.step_loop import StepLoop
from rorqual.core.errors import PreconditionError
from rorqual.v1 import common_pb2, executor_pb2
from tests.support.executor_fakes import (
    VOCAB,
    FakeCache,
    FakeModel,
    FakeScheduler,
    admit,
    drop,
    extend,
    label,
    prefill,
)

LENGTH = common_pb2.FINISH_REASON_LENGTH
HELLO = executor_pb2.Hello(protocol_version=1, executor_id="e1", group_size=1)
TOKENS = [(7 * i) % VOCAB for i in range(70)]


class HeldModel(FakeModel):
    """A model whose step the test lets go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.entered = threading.Event()
        self.go.set()

    def forward(self, batch: ForwardBatch, kv_cache: FakeCache) -> Any:
        self.entered.set()
        assert self.go.wait(20.0)
        return super().forward(batch, kv_cache)


class EverySecond:
    """A clock that is a second on at each look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        self._now_s += 1.0
        return self._now_s


@asynccontextmanager
async def connected(
    scheduler: FakeScheduler, *, peer_timeout_s: float = 20.0
) -> AsyncIterator[tuple[SchedulerLink, StepLoop, HeldModel, asyncio.Task[None]]]:
    """A loop and a link that dials `scheduler`."""
    model = HeldModel()
    limits = StepLimits(vocab_size=VOCAB, max_model_len=1000, max_num_seqs=8, max_num_batched_tokens=264)
    loop = StepLoop(model, FakeCache(64), limits)
    port = await scheduler.start()
    loop.start(lambda: None).result(20.0)
    link = SchedulerLink(f"127.0.0.1:{port}", HELLO, loop, peer_timeout_s=peer_timeout_s)
    task = asyncio.create_task(link.run())
    try:
        yield link, loop, model, task
    finally:
        model.go.set()
        task.cancel()
        with suppress(asyncio.CancelledError, LinkRefusedError):
            await task
        await scheduler.stop()
        loop.stop()


async def test_orders_go_down_and_tokens_come_up() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as (_, _, model, _):
        hello = await scheduler.hello()
        assert hello.executor_id == "e1"
        assert [len(group.block_ids) for group in hello.inventory] == [0]
        scheduler.order(admit(1, TOKENS, [0, 1], max_total=300), prefill(1, TOKENS, 0, 64), prefill(1, TOKENS, 64))
        received = await scheduler.until(lambda r: r[1].pauses)
        assert received[1].computed == 70
        assert len(received[1].token_ids) == 59  # 128 positions are granted, and the last token needs none yet
        scheduler.order(extend(1, [5], 192))
        await scheduler.until(lambda r: r[1].pauses == 2)
        batch_id = scheduler.order(drop(1), admit(2, TOKENS[:9], [5], max_total=30), prefill(2, TOKENS[:9]))
        received = await scheduler.until(lambda r: r[2].finish)
        assert received.last_batch_id == batch_id
        assert received[1].token_ids == model.continuation(TOKENS, 123)
        assert received[2].token_ids == model.continuation(TOKENS[:9], 21)
        assert received[2].finish == LENGTH


async def test_a_lost_link_drops_sequences_and_keeps_labelled_blocks() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as (link, loop, model, _):
        await scheduler.hello()
        scheduler.order(admit(1, TOKENS, [0, 1], max_total=900), prefill(1, TOKENS), label([0], [b"h" * 32]))
        await scheduler.until(lambda r: r[1].pauses)
        scheduler.end_stream()
        hello = await scheduler.hello()
        (inventory,) = hello.inventory
        assert inventory.block_ids == (0).to_bytes(4, "little")
        assert inventory.hashes == b"h" * 32
        assert len(inventory.last_used_us) == 8
        assert not loop._sequences
        # The history again, on top of the block that was kept: the same id is free, it is a new link.
        scheduler.order(admit(1, TOKENS, [0, 9], num_cached=64, max_total=90), prefill(1, TOKENS, 64))
        received = await scheduler.until(lambda r: r[1].finish)
        assert received[1].token_ids == model.continuation(TOKENS, 20)
        assert link.num_connects == 2


async def test_a_restarted_scheduler_is_found_again() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as (_, _, _, _):
        await scheduler.hello()
        assert scheduler._server is not None
        port = scheduler._server.port
        await scheduler.stop()
        again = FakeScheduler(epoch=2)
        await again.start(port)
        try:
            await again.hello()
            again.order(admit(1, TOKENS, [0, 1], max_total=75), prefill(1, TOKENS))
            received = await again.until(lambda r: r[1].finish)
            assert len(received[1].token_ids) == 5
        finally:
            await again.stop()


async def test_silence_is_death() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler, peer_timeout_s=0.4) as (_, loop, _, _):
        await scheduler.hello()
        scheduler.order(admit(1, TOKENS, [0, 1], max_total=900), prefill(1, TOKENS))
        await scheduler.hello()  # this scheduler sends no heartbeats: the executor gave it up and dialled again
        assert not loop._sequences


async def test_a_scheduler_of_an_older_epoch_is_not_obeyed() -> None:
    scheduler = FakeScheduler(epoch=5)
    async with connected(scheduler) as (link, _, _, _):
        await scheduler.hello()
        scheduler.epoch = 4
        scheduler.end_stream()
        await scheduler.hello()
        await scheduler.hello()
        assert link.num_connects == 1
        scheduler.epoch = 6
        await scheduler.hello()
        scheduler.order(drop(1))
        await scheduler.until(lambda r: r.last_batch_id)
        assert link.num_connects == 2


@pytest.mark.parametrize(
    "order",
    [executor_pb2.Order(), extend(1, [0], 10_000), admit(1, TOKENS, [70])],
    ids=["unknown", "ended", "impossible"],
)
async def test_an_order_that_cannot_be_obeyed_ends_the_link(order: executor_pb2.Order) -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as (link, _, _, _):
        await scheduler.hello()
        scheduler.order(order)
        if order.WhichOneof("order") == "extend":  # of a sequence that ended: does nothing
            await scheduler.until(lambda r: r.last_batch_id)
            assert link.num_connects == 1
        else:
            await scheduler.hello()


@pytest.mark.parametrize("reason", ["PROTOCOL_VERSION_MISMATCH", "MODEL_MISMATCH"])
async def test_a_refusal_that_no_retry_can_change_ends_the_process(reason: str) -> None:
    scheduler = FakeScheduler()
    scheduler.refuse = PreconditionError("another model is served here", reason=reason)
    async with connected(scheduler) as (_, _, _, task):
        with pytest.raises(LinkRefusedError, match="another model is served here") as caught:
            await asyncio.wait_for(asyncio.shield(task), 20.0)
        assert caught.value.reason == reason


async def test_a_scheduler_of_another_protocol_version_is_refused() -> None:
    scheduler = FakeScheduler(protocol_version=2)
    async with connected(scheduler) as (_, _, _, task):
        with pytest.raises(LinkRefusedError, match="version 2"):
            await asyncio.wait_for(asyncio.shield(task), 20.0)


async def test_any_other_refusal_is_tried_again() -> None:
    scheduler = FakeScheduler()
    scheduler.refuse = PreconditionError("not now", reason="EXECUTOR_BUSY")
    async with connected(scheduler) as (_, _, _, task):
        while scheduler.num_refused < 3:
            await asyncio.sleep(0.01)
        assert not task.done()
        scheduler.refuse = None
        await scheduler.hello()


async def test_a_heartbeat_acknowledges_no_batch_before_the_tokens_of_earlier_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, num_taken = Outbox.take, 0

    def raced(self: Outbox, **kwargs: Any) -> executor_pb2.Report | None:
        """A step and a batch come right behind the second look for something to say."""
        nonlocal num_taken
        report = take(self, **kwargs)
        num_taken += 1
        if num_taken == 2:
            self.add_step(StepOutput(1, 0.0, np.array([7], np.uint64), np.array([5], np.int64)))
            self.applied(1, ())
        return report

    monkeypatch.setattr(Outbox, "take", raced)
    scheduler = FakeScheduler()
    async with connected(scheduler, peer_timeout_s=1e6) as (link, *_):
        link._clock = EverySecond()  # type: ignore[assignment]  # a heartbeat is due each time
        received = await scheduler.until(lambda received: received.last_batch_id)
        assert received[7].token_ids == [5]


async def test_a_heartbeat_says_how_long_a_hanging_step_has_run() -> None:
    scheduler = FakeScheduler(peer_timeout_ms=300)  # so: a heartbeat each 0.1 s
    async with connected(scheduler) as (_, _, model, _):
        await scheduler.hello()
        report = await asyncio.wait_for(scheduler.reports.get(), 20.0)
        assert report.HasField("heartbeat")
        assert report.heartbeat.step_running_us == 0
        model.go.clear()
        scheduler.order(admit(1, TOKENS, [0, 1], max_total=75), prefill(1, TOKENS))
        running: list[int] = []
        acknowledged = 0
        while len(running) < 2:
            report = await asyncio.wait_for(scheduler.reports.get(), 20.0)
            acknowledged = max(acknowledged, report.last_batch_id)
            if report.heartbeat.step_running_us:
                running.append(report.heartbeat.step_running_us)
        assert running[1] - running[0] > 50_000
        assert acknowledged == 1  # a long step does not hold back the acknowledgement of what came before it
        model.go.set()
        assert (await scheduler.until(lambda r: r[1].finish))[1].finish == LENGTH


async def test_a_step_that_hangs_while_the_link_is_lost_ends_before_the_next_hello() -> None:
    scheduler = FakeScheduler()
    async with connected(scheduler) as (_, loop, model, _):
        await scheduler.hello()
        model.entered.clear()
        model.go.clear()
        scheduler.order(admit(1, TOKENS, [0, 1], max_total=75), prefill(1, TOKENS))
        await asyncio.to_thread(model.entered.wait, 20.0)
        scheduler.end_stream()
        while loop._inbox._reset is None:
            await asyncio.sleep(0.01)
        assert scheduler.hellos.empty()  # the device is not drained
        model.go.set()
        await scheduler.hello()
        assert scheduler.received.step_id == 0
