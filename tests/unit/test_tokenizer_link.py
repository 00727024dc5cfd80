"""Frames to the scheduler: cut by the bytes of all that is in them, and what cannot be written fails alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc

from rorqual.core.clock import SystemClock
from rorqual.core.errors import RorqualError
from rorqual.v1 import common_pb2, generation_pb2
from services.tokenizer.link import SchedulerLink


class Listening:
    """A history whose request has a grammar of `num_bytes`; None: it cannot be written."""

    def __init__(self, num_bytes: int | None) -> None:
        self.num_bytes = num_bytes
        self.error: RorqualError | None = None

    def generate_request(self) -> generation_pb2.GenerateRequest:
        if self.num_bytes is None:
            return generation_pb2.GenerateRequest(attempt=1 << 40)
        grammar = common_pb2.Grammar(text="x" * self.num_bytes)
        return generation_pb2.GenerateRequest(token_ids=b"aaaa", sampling=common_pb2.SamplingParams(grammar=grammar))

    def on_started(self, started: generation_pb2.Started) -> None: ...

    def on_delta(self, delta: generation_pb2.TokenDelta) -> None: ...

    def on_finished(self, finished: generation_pb2.Finished) -> None: ...

    def on_error(self, error: RorqualError) -> None:
        self.error = error


class Wire:
    """What the link writes to."""

    def __init__(self) -> None:
        self.frames: list[generation_pb2.GenerationServiceSessionRequest] = []

    async def write(self, frame: generation_pb2.GenerationServiceSessionRequest) -> None:
        copy = generation_pb2.GenerationServiceSessionRequest()
        copy.CopyFrom(frame)
        self.frames.append(copy)


async def written(*listeners: Listening) -> list[generation_pb2.GenerationServiceSessionRequest]:
    """The frames in which `listeners` are opened, all at once; the last one is also finished."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = SchedulerLink(channel, peer_timeout_s=10, clock=SystemClock())
        link._connected = True
        for listener in listeners:
            link.open(listener)
        end = Listening(1)
        link.finish(link.open(end), 3)
        wire = Wire()
        writing = asyncio.create_task(link._write(cast(Any, wire)))
        async with asyncio.timeout(20):
            while (
                not wire.frames
                or not wire.frames[-1].commands
                or wire.frames[-1].commands[-1].WhichOneof("command") != "finish"
            ):
                await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    return wire.frames


def opened(frames: list[generation_pb2.GenerationServiceSessionRequest]) -> list[list[int]]:
    return [[c.stream_id for c in frame.commands if c.WhichOneof("command") == "open"] for frame in frames]


async def test_grammars_count_as_ids_do() -> None:
    """384 sequences with a grammar of 255 kB each were one frame of 96 MiB, over the limit of a message."""
    frames = await written(*(Listening(255_000) for _ in range(384)))
    assert max(frame.ByteSize() for frame in frames) <= 17 << 20
    assert [n for frame in opened(frames) for n in frame] == list(range(1, 385))


async def test_what_cannot_be_written_fails_alone() -> None:
    good, torn, long, last = Listening(9), Listening(None), Listening(65 << 20), Listening(9)
    frames = await written(good, torn, long, last)
    assert opened(frames) == [[1, 4]]
    assert (good.error, last.error) == (None, None)
    assert torn.error is not None
    assert torn.error.reason == "INTERNAL"
    assert long.error is not None
    assert long.error.reason == "REQUEST_TOO_LARGE"
