"""A model that answers from what the cache holds, orders made short, and a scheduler's end of the link."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import torch

from executor.inventory import InventoryEntry
from executor.model.batch import BLOCK_SIZE, Form, ForwardBatch
from executor.order_loop import OrderLoop, StepLimits
from executor.orders import OrderBatch, read_batch
from executor.step_loop import StepLoop
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids, unpack_uint64
from rorqual.rpc.server import RpcServer
from rorqual.v1 import common_pb2, executor_pb2, executor_pb2_grpc

VOCAB = 97
_WEIGHTS = np.random.default_rng(0).integers(1, 2**31, 10_000)


class FakeCache:
    """One "layer" of one value a token: the token itself. NaN where nothing was written."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.storage = torch.full((1, num_blocks * BLOCK_SIZE, 1), torch.nan, dtype=torch.float64)


class FakeModel:
    """Logits are a function of the whole history, read back through the block table: a token in a wrong slot,
    a missing one or another's makes them others, or NaN."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.batches: list[ForwardBatch] = []
        self.poison: set[int] = set()  # histories that end with one of these tokens get NaN

    def forward(self, batch: ForwardBatch, kv_cache: FakeCache) -> Any:
        self.batches.append(batch)
        covered = sorted(row for s in batch.segments for row in range(s.start_row, s.end_row))
        assert covered == list(range(batch.num_rows))
        column = kv_cache.storage[0, :, 0]
        column[batch.slot_mapping] = batch.token_ids.to(torch.float64)
        rows: dict[int, torch.Tensor] = {}
        for segment in batch.segments:
            for i in range(segment.num_rows):
                position = segment.start_position + i
                assert int(batch.positions[segment.start_row + i]) == position
                p = torch.arange(position + 1)
                slots = segment.block_table[p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE
                assert int(slots[-1]) == int(batch.slot_mapping[segment.start_row + i])
                rows[segment.start_row + i] = self.logits_of(column[slots])
        wanted = [rows[r] for r in batch.logit_rows.tolist()]
        return SimpleNamespace(logits=torch.stack(wanted) if wanted else torch.zeros(0, self.vocab_size))

    def logits_of(self, history: torch.Tensor) -> torch.Tensor:
        """float32 [vocab] of a history of tokens."""
        tokens = history.numpy()
        if np.isnan(tokens).any() or tokens[-1] in self.poison:
            return torch.full((self.vocab_size,), torch.nan)
        state = int(((tokens.astype(np.int64) + 7) * _WEIGHTS[: tokens.size]).sum()) % (2**31 - 1)
        x = (np.arange(1, self.vocab_size + 1, dtype=np.int64) * state) % 1009
        return torch.from_numpy((x / 252.25).astype(np.float32))

    def continuation(self, history: Sequence[int], num_tokens: int) -> list[int]:
        """What greedy decoding makes of `history`."""
        tokens = list(history)
        for _ in range(num_tokens):
            tokens.append(int(self.logits_of(torch.tensor(tokens, dtype=torch.float64)).argmax()))
        return tokens[len(history) :]


def admit(
    seq_id: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    num_prompt: int | None = None,
    num_cached: int = 0,
    limit: int | None = None,
    max_total: int = 10_000,
    choice_index: int = 0,
    known: Sequence[int] = (),
    prompt_logprobs_delivered: bool = False,
    traceparent: str = "",
    **sampling: Any,
) -> executor_pb2.Order:
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("seed", 0)
    return executor_pb2.Order(
        admit=executor_pb2.Admit(
            seq_id=seq_id,
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
            num_cached_tokens=num_cached,
            block_tables=[executor_pb2.BlockTable(block_ids=pack_token_ids(blocks))],
            limit=len(blocks) * BLOCK_SIZE if limit is None else limit,
            max_total_tokens=max_total,
            sampling=common_pb2.SamplingParams(**sampling),
            choice_index=choice_index,
            known_token_ids=pack_token_ids(known),
            prompt_logprobs_delivered=prompt_logprobs_delivered,
            trace=common_pb2.TraceContext(traceparent=traceparent),
        )
    )


def prefill(seq_id: int, tokens: Sequence[int], start: int = 0, end: int | None = None) -> executor_pb2.Order:
    end = len(tokens) if end is None else end
    return executor_pb2.Order(
        prefill=executor_pb2.Prefill(seq_id=seq_id, start=start, end=end, token_ids=pack_token_ids(tokens[start:end]))
    )


def extend(seq_id: int, blocks: Sequence[int], limit: int) -> executor_pb2.Order:
    tables = [executor_pb2.BlockTable(block_ids=pack_token_ids(blocks))] if blocks else []
    return executor_pb2.Order(extend=executor_pb2.Extend(seq_id=seq_id, block_tables=tables, limit=limit))


def drop(seq_id: int) -> executor_pb2.Order:
    return executor_pb2.Order(drop=executor_pb2.Drop(seq_id=seq_id))


def label(blocks: Sequence[int], hashes: Sequence[bytes]) -> executor_pb2.Order:
    cached = executor_pb2.CachedBlocks(block_ids=pack_token_ids(blocks), hashes=b"".join(hashes))
    return executor_pb2.Order(label=executor_pb2.Label(blocks=cached))


def copy(src: int, dst: int, num_tokens: int) -> executor_pb2.Order:
    return executor_pb2.Order(copy=executor_pb2.Copy(src_block_id=src, dst_block_id=dst, num_tokens=num_tokens))


@dataclass
class Tokens:
    """What reports said of one sequence, all of them together."""

    token_ids: list[int] = field(default_factory=list)
    finish: int = 0
    computed: int = 0
    pauses: int = 0
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    fault: str = ""
    reason: str = ""


class Received:
    """Adds reports up."""

    def __init__(self) -> None:
        self.sequences: dict[int, Tokens] = {}
        self.last_batch_id = 0
        self.step_id = 0
        self.num_reports = 0

    def __getitem__(self, seq_id: int) -> Tokens:
        return self.sequences.setdefault(seq_id, Tokens())

    def add(self, report: executor_pb2.Report) -> None:
        self.num_reports += 1
        assert report.step_id >= self.step_id
        assert report.last_batch_id >= self.last_batch_id
        self.step_id, self.last_batch_id = report.step_id, report.last_batch_id
        ids, counts = unpack_uint64(report.seq_ids), unpack_token_ids(report.num_tokens)
        tokens = unpack_token_ids(report.token_ids)
        assert len(ids) == len(counts) == len(report.finish) == len(set(ids))
        assert sum(counts) == len(tokens)
        at = 0
        for seq_id, count, finish in zip(ids, counts, report.finish, strict=True):
            entry = self[seq_id]
            assert not entry.finish
            assert not entry.fault
            entry.token_ids += tokens[at : at + count]
            entry.finish = finish
            at += count
        computed = unpack_token_ids(report.num_computed_tokens)
        for seq_id, position in zip(unpack_uint64(report.computed_seq_ids), computed, strict=True):
            assert position > self[seq_id].computed
            self[seq_id].computed = position
        for seq_id in unpack_uint64(report.paused_seq_ids):
            self[seq_id].pauses += 1
        for item in report.logprobs:
            self[item.seq_id].logprobs += item.logprobs
            self[item.seq_id].prompt_logprobs += item.prompt_logprobs
        for fault in report.faults:
            assert not self[fault.seq_id].fault
            self[fault.seq_id].fault, self[fault.seq_id].reason = fault.message, fault.reason


class Driven:
    """A step loop without its thread: the test says when a step runs."""

    def __init__(
        self, model: Any = None, *, num_blocks: int = 64, cache: Any = None, traced: bool = False, **limits: Any
    ) -> None:
        self.model = model if model is not None else FakeModel()
        self.cache = cache if cache is not None else FakeCache(num_blocks)
        values: dict[str, Any] = {
            "vocab_size": getattr(self.model, "vocab_size", VOCAB),
            "max_model_len": 10_000,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 264,
            **limits,
        }
        self.loop = self.make_loop(StepLimits(**values), traced)
        self.errors: list[Exception] = []
        self.loop.on_order_error = self.errors.append
        self.received = Received()
        self.batch_ids = itertools.count(1)

    def make_loop(self, limits: StepLimits, traced: bool) -> OrderLoop:
        return StepLoop(self.model, self.cache, limits, traced=traced)

    def order(self, *orders: executor_pb2.Order) -> None:
        """One batch, to be applied at the next boundary."""
        self.loop.submit(self.read(orders))

    def read(self, orders: Iterable[executor_pb2.Order]) -> OrderBatch:
        return read_batch(executor_pb2.OrderBatch(batch_id=next(self.batch_ids), orders=list(orders)))

    def step(self, count: int = 1) -> int:
        """Up to `count` steps; returns how many ran."""
        return sum(self.loop.run_once() for _ in range(count))

    def run(self, most: int = 100_000) -> int:
        """Until nothing is left to do; returns how many steps that took."""
        steps = 0
        while self.loop.run_once():
            steps += 1
            assert steps < most
        return steps

    def report(self) -> Received:
        report = self.loop.outbox.take()
        if report is not None:
            self.received.add(report)
        return self.received

    def reset(self) -> list[InventoryEntry]:
        future = self.loop.reset()
        self.loop.run_once()
        self.batch_ids = itertools.count(1)
        self.received = Received()
        return future.result(timeout=0)


class FakeScheduler(executor_pb2_grpc.ExecutorLinkServiceServicer):
    """Records hellos and reports; sends what the test says. One executor at a time."""

    def __init__(self, *, epoch: int = 1, peer_timeout_ms: int = 30_000, protocol_version: int = 1) -> None:
        self.epoch = epoch
        self.peer_timeout_ms = peer_timeout_ms
        self.protocol_version = protocol_version
        self.refuse: Exception | None = None
        self.num_refused = 0
        self.hellos: asyncio.Queue[executor_pb2.Hello] = asyncio.Queue()
        self.reports: asyncio.Queue[executor_pb2.Report] = asyncio.Queue()
        self.received = Received()
        self.num_heartbeats = 0
        self._outgoing: asyncio.Queue[executor_pb2.ConnectResponse | None] = asyncio.Queue()
        self._batch_ids = itertools.count(1)
        self._server: RpcServer | None = None

    async def start(self, port: int = 0) -> int:
        self._server = RpcServer(
            f"127.0.0.1:{port}",
            lambda server: executor_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(self, server),
            ["rorqual.v1.ExecutorLinkService"],
        )
        return await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0.0)

    async def Connect(
        self, request_iterator: AsyncIterator[executor_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[executor_pb2.ConnectResponse]:
        if self.refuse is not None:
            self.num_refused += 1
            raise self.refuse
        first = await anext(request_iterator)
        self._outgoing = asyncio.Queue()
        self._batch_ids = itertools.count(1)
        self.received = Received()
        self.hellos.put_nowait(first.hello)
        yield executor_pb2.ConnectResponse(
            welcome=executor_pb2.Welcome(
                epoch=self.epoch, protocol_version=self.protocol_version, peer_timeout_ms=self.peer_timeout_ms
            )
        )
        reader = asyncio.ensure_future(self._read(request_iterator))
        try:
            while (message := await self._outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[executor_pb2.ConnectRequest]) -> None:
        try:
            async for request in requests:
                assert request.WhichOneof("message") == "report"
                self.num_heartbeats += request.report.HasField("heartbeat")
                self.reports.put_nowait(request.report)
        except (grpc.RpcError, asyncio.CancelledError):
            pass

    def order(self, *orders: executor_pb2.Order) -> int:
        batch_id = next(self._batch_ids)
        batch = executor_pb2.OrderBatch(batch_id=batch_id, orders=list(orders))
        self._outgoing.put_nowait(executor_pb2.ConnectResponse(orders=batch))
        return batch_id

    def end_stream(self) -> None:
        self._outgoing.put_nowait(None)

    async def hello(self) -> executor_pb2.Hello:
        return await asyncio.wait_for(self.hellos.get(), 20.0)

    async def until(self, condition: Any) -> Received:
        """Take reports until `condition(received)` holds."""
        while not condition(self.received):
            self.received.add(await asyncio.wait_for(self.reports.get(), 20.0))
        return self.received


__all__ = [
    "VOCAB",
    "Driven",
    "FakeCache",
    "FakeModel",
    "FakeScheduler",
    "Form",
    "Received",
    "admit",
    "copy",
    "drop",
    "extend",
    "label",
    "prefill",
]
