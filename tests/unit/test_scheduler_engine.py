"""The engine's effects in time."""

from __future__ import annotations

import asyncio

from rorqual.core.config import SchedulerConfig, TelemetryConfig
from rorqual.telemetry import Telemetry
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.engine import Engine
from services.scheduler.outbox import Outbox
from services.scheduler.wire import PROTOCOL_VERSION


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
