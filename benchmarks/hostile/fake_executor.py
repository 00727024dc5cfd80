"""A second executor beside the real one that says what no executor may say."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from rorqual.v1 import admin_pb2, admin_pb2_grpc, common_pb2, executor_pb2, executor_pb2_grpc

HEARTBEAT_S = 0.5


@dataclass
class Seen:
    """A sequence that was admitted to the fake, and how far it got."""

    seq_id: int
    num_tokens: int
    reported: int = 0


Lie = Callable[[executor_pb2.Report, list[Seen]], None]
"""Fills a report about sequences whose prompts are computed."""


async def hello_like(channel: grpc.aio.Channel) -> executor_pb2.Hello:
    """What the real executor said of itself, under another id and without blocks to offer."""
    reply = await admin_pb2_grpc.AdminServiceStub(channel).ListExecutors(admin_pb2.ListExecutorsRequest(), timeout=10)
    real = reply.executors[0]
    return executor_pb2.Hello(
        protocol_version=1,
        executor_id=f"fake-{uuid.uuid4().hex}",
        device=real.device,
        cache_groups=real.cache_groups,
        model=real.model,
        max_num_seqs=real.max_num_seqs,
        max_num_batched_tokens=real.max_num_batched_tokens,
        group_size=1,
        memory=real.memory,
    )


class FakeExecutor:
    """One link. `welcomed` is set when the scheduler has taken the hello; `status` is the link's end, "" while it lives."""

    def __init__(self, channel: grpc.aio.Channel, hello: executor_pb2.Hello, lie: Lie | None) -> None:
        self.welcomed = asyncio.Event()
        self.lied = asyncio.Event()
        self.status = ""
        self._lie = lie
        self._call = executor_pb2_grpc.ExecutorLinkServiceStub(channel).Connect()
        self._hello = hello
        self._last_batch_id = self._step_id = 0
        self._computed: dict[int, int] = {}
        self._seqs: dict[int, Seen] = {}
        self._writing = asyncio.Lock()  # a call takes one message at a time

    async def _write(self, request: executor_pb2.ConnectRequest) -> None:
        async with self._writing:
            await self._call.write(request)

    async def run(self) -> None:
        """Speak until the link ends."""
        beats = asyncio.create_task(self._beat())
        try:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has its status then
                await self._write(executor_pb2.ConnectRequest(hello=self._hello))
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    if response.HasField("welcome"):
                        self.welcomed.set()
                    elif response.orders.batch_id:
                        await self._obey(response.orders)
            self.status = await self._ending()
        finally:
            beats.cancel()
            self._call.cancel()

    async def _ending(self) -> str:
        """The link's status. ENDED where a write met the end before the status was read: gRPC then keeps its own in its place."""
        if "Internal error from Core" in (await self._call.details() or ""):
            return "ENDED"
        return str((await self._call.code()).name)

    async def _obey(self, batch: executor_pb2.OrderBatch) -> None:
        self._last_batch_id = batch.batch_id
        for order in batch.orders:
            if order.HasField("admit"):
                self._seqs[order.admit.seq_id] = Seen(order.admit.seq_id, order.admit.num_tokens)
            elif order.HasField("prefill"):
                self._computed[order.prefill.seq_id] = order.prefill.end
            elif order.HasField("drop"):
                self._seqs.pop(order.drop.seq_id, None)
        self._step_id += 1
        report = executor_pb2.Report(step_id=self._step_id, last_batch_id=self._last_batch_id, num_steps=1)
        done, self._computed = self._computed, {}
        report.computed_seq_ids = struct.pack(f"<{len(done)}Q", *done)
        report.num_computed_tokens = struct.pack(f"<{len(done)}I", *done.values())
        ready = [seen for i, seen in self._seqs.items() if done.get(i, 0) >= seen.num_tokens and not seen.reported]
        if ready and self._lie is not None:
            self._lie(report, ready)
            for seen in ready:
                seen.reported = 1
            self.lied.set()
        await self._write(executor_pb2.ConnectRequest(report=report))

    async def _beat(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                report = executor_pb2.Report(step_id=self._step_id, last_batch_id=self._last_batch_id)
                report.heartbeat.SetInParent()
                await self._write(executor_pb2.ConnectRequest(report=report))


# --- lies --------------------------------------------------------------------------------------------------------------


def _columns(report: executor_pb2.Report, seqs: list[Seen], tokens: list[int], finish: int = 0) -> None:
    """`tokens` for each of `seqs`."""
    report.seq_ids = struct.pack(f"<{len(seqs)}Q", *(seen.seq_id for seen in seqs))
    report.num_tokens = struct.pack(f"<{len(seqs)}I", *([len(tokens)] * len(seqs)))
    report.token_ids = struct.pack(f"<{len(tokens)}I", *tokens) * len(seqs)
    report.finish = bytes([finish]) * len(seqs)


def stops_at_once(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [], common_pb2.FINISH_REASON_STOP)


def ends_by_length_early(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [5], common_pb2.FINISH_REASON_LENGTH)


def brings_more_than_granted(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [5] * 1000)


def brings_no_token_of_the_vocabulary(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [2**32 - 1] * 4)


def brings_torn_logprobs(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [5])
    for seen in seqs:
        entry = common_pb2.TokenLogprobs(token_id=5, logprob=-1.0, rank=1, top_token_ids=b"abc", top_logprobs=[-1.0])
        report.logprobs.append(executor_pb2.SequenceLogprobs(seq_id=seen.seq_id, logprobs=[entry]))


def faults_at_length(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    for seen in seqs:
        report.faults.append(executor_pb2.SequenceFault(seq_id=seen.seq_id, message="f" * (9_000_000 // len(seqs))))


def tears_its_columns(report: executor_pb2.Report, seqs: list[Seen]) -> None:
    _columns(report, seqs, [5])
    report.num_tokens = report.num_tokens[:-1]


LIES: dict[str, Lie] = {
    "stop-at-once": stops_at_once,
    "length-early": ends_by_length_early,
    "beyond-grant": brings_more_than_granted,
    "beyond-vocabulary": brings_no_token_of_the_vocabulary,
    "torn-logprobs": brings_torn_logprobs,
    "long-fault": faults_at_length,
    "torn-columns": tears_its_columns,
}
