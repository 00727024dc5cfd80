"""A load on the scheduler alone: one `GenerationService.Session` with many histories, as a tokenizer replica holds it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rorqual.core.token_ids import pack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc


class SessionLoad:
    """Opens histories and counts the tokens that come; nothing else is done with them."""

    def __init__(self, call: Any, stub: Any, vocab_size: int) -> None:
        self._call = call
        self._stub = stub
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._num_opened = 0
        self._waiting: set[int] = set()  # opened, and without a token yet
        self._all_started = asyncio.Event()
        self.num_tokens = 0
        self.num_finished = 0

    async def open(self, num_streams: int, prompt_len: int, max_tokens: int) -> None:
        """`num_streams` more histories, in frames of 64."""
        first, self._num_opened = self._num_opened + 1, self._num_opened + num_streams
        ids = range(first, self._num_opened + 1)
        self._waiting.update(ids)
        self._all_started.clear()
        for at in range(0, num_streams, 64):
            frame = generation_pb2.GenerationServiceSessionRequest()
            for stream_id in ids[at : at + 64]:
                request = frame.commands.add(stream_id=stream_id).open
                request.token_ids = pack_token_ids(self._rng.choices(range(self._vocab_size), k=prompt_len))
                request.num_prompt_tokens, request.max_tokens = prompt_len, max_tokens
                request.sampling.CopyFrom(common_pb2.SamplingParams(seed=stream_id))
            await self._call.write(frame)

    async def read(self) -> None:
        """Until the session ends. RuntimeError where a history failed."""
        async for frame in self._call:
            for event in frame.events:
                kind = event.WhichOneof("event")
                if kind == "delta":
                    self.num_tokens += len(event.delta.token_ids) // 4
                    if self._waiting:
                        self._waiting.discard(event.stream_id)
                        if not self._waiting:
                            self._all_started.set()
                elif kind == "finished":
                    self.num_finished += 1
                elif kind == "error":
                    raise RuntimeError(f"history {event.stream_id} failed: {event.error}")

    async def all_started(self) -> None:
        """Every history has had a token."""
        await self._all_started.wait()

    async def info(self) -> generation_pb2.GetServerInfoResponse:
        response: generation_pb2.GetServerInfoResponse = await self._stub.GetServerInfo(
            generation_pb2.GetServerInfoRequest()
        )
        return response

    async def until(self, condition: Callable[[generation_pb2.GetServerInfoResponse], bool]) -> None:
        while not condition(await self.info()):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def session(address: str, vocab_size: int) -> AsyncIterator[SessionLoad]:
    """A session that is being read, closed at the end: what it opened is cancelled."""
    async with open_channel(address) as channel:
        async with asyncio.timeout(30):
            await channel.channel_ready()
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Session()
        load = SessionLoad(call, stub, vocab_size)
        reading = asyncio.create_task(load.read())
        try:
            yield load
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            call.cancel()


async def window(load: SessionLoad, seconds: float) -> tuple[float, float, int]:
    """(start, end, tokens received) of so many seconds; perf_counter's time."""
    start_s, before = time.perf_counter(), load.num_tokens
    await asyncio.sleep(seconds)
    return start_s, time.perf_counter(), load.num_tokens - before
