"""The engine's effects in time."""

from __future__ import annotations

import asyncio

import pytest

from rorqual.core.config import SchedulerConfig, TelemetryConfig
from rorqual.core.errors import InvalidRequestError, UnavailableError
from rorqual.telemetry import Telemetry
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.engine import Engine
from services.scheduler.executor_contract import PROTOCOL_VERSION
from services.scheduler.outbox import Outbox


def hello() -> executor_pb2.Hello:
    return executor_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        executor_id="e",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        group_size=1,
        model=common_pb2.ModelInfo(name="m", max_model_len=512, vocab_size=100, fingerprint=bytes(32)),
        cache_groups=[
            executor_pb2.CacheGroup(name="mla", block_size=64, block_bytes=1, num_blocks=16, prefix_multiple=64)
        ],
    )


async def test_orders_leave_before_the_caller_hears_of_them_and_tokens_before_orders() -> None:
    engine = Engine(SchedulerConfig(), Telemetry("scheduler", TelemetryConfig()))
    link, outbox = engine.connect(hello()), Outbox()
    woken: list[str] = []

    async def take_orders() -> executor_pb2.OrderBatch:
        batch = await link.take()
        woken.append("orders")
        assert batch is not None
        return batch

    async def take_events() -> None:
        await outbox.take()
        woken.append("events")

    async def taken() -> executor_pb2.OrderBatch:
        orders, _ = await asyncio.gather(asyncio.wait_for(orders_task, 5), asyncio.wait_for(events_task, 5))
        return orders

    events_task, orders_task = asyncio.create_task(take_events()), asyncio.create_task(take_orders())
    await asyncio.sleep(0)  # both wait
    request = generation_pb2.GenerateRequest(token_ids=bytes(4 * 64), num_prompt_tokens=64, max_tokens=200)
    opened = engine.prepare_open(request, outbox, 1, None)
    assert opened is not None
    engine.submit([opened])
    batch = await taken()
    assert woken == ["orders", "events"]

    woken.clear()
    events_task, orders_task = asyncio.create_task(take_events()), asyncio.create_task(take_orders())
    await asyncio.sleep(0)
    seq_id = next(order.admit.seq_id for order in batch.orders if order.HasField("admit")).to_bytes(8, "little")
    one = (1).to_bytes(4, "little")
    report = executor_pb2.Report(step_id=1, last_batch_id=batch.batch_id, num_steps=1, finish=b"\0")
    report.computed_seq_ids, report.num_computed_tokens = seq_id, (64).to_bytes(4, "little")
    report.seq_ids, report.num_tokens, report.token_ids = seq_id, one, one
    engine.report(link, report)  # the first token; and the block, complete now, is to be labelled
    await taken()
    assert woken == ["events", "orders"]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_s(self) -> float:
        return self.now_s


async def test_an_executor_that_lies_is_refused_for_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    engine = Engine(SchedulerConfig(), Telemetry("scheduler", TelemetryConfig()), clock)
    outbox = Outbox()
    request = generation_pb2.GenerateRequest(token_ids=bytes(4), num_prompt_tokens=1, max_tokens=200)
    opened = engine.prepare_open(request, outbox, 1, None)
    assert opened is not None
    engine.submit([opened])
    clock.now_s += engine.core._config.gather_until_s
    for wait_s in (1.0, 2.0, 4.0):
        link = engine.connect(hello())
        caplog.clear()
        for lie in (executor_pb2.Report(last_batch_id=77), executor_pb2.Report(last_batch_id=78)):
            if link.closed:
                engine.report(link, lie)  # what was under way when the link ended
            else:
                with pytest.raises(InvalidRequestError, match="batch 77"):
                    engine.report(link, lie)
        assert link.closed
        engine.disconnect(link)
        assert [record.levelname for record in caplog.records] == ["ERROR"]  # once
        clock.now_s += wait_s - 0.01
        with pytest.raises(UnavailableError, match="broke the contract"):
            engine.connect(hello())
        clock.now_s += 0.02
    honest = hello()
    honest.executor_id = "another"
    link = engine.connect(honest)
    batch = await asyncio.wait_for(link.take(), 5)
    assert batch is not None
    assert batch.orders[0].HasField("admit")  # the stream goes on there


async def test_columns_of_unequal_length_are_the_executors_fault_too() -> None:
    engine = Engine(SchedulerConfig(), Telemetry("scheduler", TelemetryConfig()), FakeClock())
    link = engine.connect(hello())
    with pytest.raises(InvalidRequestError, match="differ in length"):
        engine.report(link, executor_pb2.Report(seq_ids=bytes(8)))
    assert link.closed
    assert engine.core.executor(link.link_id) is None
