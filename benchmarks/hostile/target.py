"""What is attacked, and the ways in which attackers speak to it. Collects what came back that should not have."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc

from benchmarks.soak.client import Broken, post
from rorqual.launch import Stack
from rorqual.v1 import generation_pb2, generation_pb2_grpc, text_pb2_grpc

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


@dataclass
class Target:
    """A running server. Addresses are "host:port"; "" where that door is not known."""

    url: str
    text_address: str = ""
    scheduler_address: str = ""
    stack: Stack | None = None  # where it is ours: its processes may be killed and counted
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def expect(self, what: str, got: object, right: Iterable[object]) -> None:
        """Note an outcome; a fault where it is none of `right`."""
        self.statuses[str(got)] += 1
        if got not in right:
            self.fault(f"{what}: {got}, right is {' or '.join(map(str, right))}")

    def fault(self, what: str) -> None:
        if what[:400] not in self.faults and len(self.faults) < 20:
            self.faults.append(what[:400])

    def take(self) -> tuple[dict[str, int], list[str]]:
        """(statuses, faults) since the last call."""
        taken = dict(self.statuses), self.faults
        self.statuses, self.faults = Counter(), []
        return taken

    # --- HTTP ----------------------------------------------------------------------------------------------------

    async def status(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> int:
        """The HTTP status of a POST; 0 where no whole answer came."""
        return (await self.answer(path, body, timeout_s))[0]

    async def answer(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        try:
            reply = await post(self.url, path, body, timeout_s=timeout_s)
            return reply.status, json.loads(reply.body) if reply.body else {}
        except (Broken, ValueError):
            return 0, {}

    async def flood(
        self, path: str, bodies: Iterable[dict[str, Any]], right: Iterable[int], timeout_s: float = 60.0
    ) -> None:
        """All at once; each status must be one of `right`."""
        statuses = await asyncio.gather(*(self.status(path, body, timeout_s) for body in bodies))
        for status in statuses:
            self.expect(path, status, right)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A bare connection to the HTTP port, reset at the end."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def raw_status(self, data: bytes, timeout_s: float = 10.0) -> int:
        """The status of whatever answers these bytes; 0 where the connection is cut."""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, IndexError, ValueError):
            async with asyncio.timeout(timeout_s), self.connection() as (reader, writer):
                writer.write(data)
                return int((await reader.readline()).split()[1])
        return 0

    def raw_post(self, path: str, body: dict[str, Any], headers: str = "") -> bytes:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        return head.encode() + data

    # --- gRPC ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def text(self) -> AsyncIterator[text_pb2_grpc.TextServiceStub]:
        async with grpc.aio.insecure_channel(self.text_address, options=_OPTIONS) as channel:
            yield text_pb2_grpc.TextServiceStub(channel)

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self.scheduler_address, options=_OPTIONS) as channel:
            yield channel

    async def info(self) -> generation_pb2.GetServerInfoResponse:
        async with self.scheduler() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            info: generation_pb2.GetServerInfoResponse = await stub.GetServerInfo(
                generation_pb2.GetServerInfoRequest(), timeout=10
            )
        return info


async def code_of(work: Callable[[], Awaitable[object]], timeout_s: float = 30.0) -> str:
    """The name of the gRPC status that `work` ends with; "TIMEOUT" where it does not end."""
    try:
        async with asyncio.timeout(timeout_s):
            await work()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    except TimeoutError:
        return "TIMEOUT"
    return "OK"


async def drain(call: Any) -> list[Any]:
    """All messages of a streaming call."""
    return [message async for message in call]
