"""ExecutorLinkService: orders down and reports up, for executors that dial in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import executor_pb2, executor_pb2_grpc

from .engine import Engine
from .executor_contract import PROTOCOL_VERSION
from .peer import Link
from .rpc_calls import Context, on_done


class ExecutorLinkServicer(executor_pb2_grpc.ExecutorLinkServiceServicer):
    """One call a link: hello and welcome, then both directions on their own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Connect(
        self, request_iterator: AsyncIterator[executor_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[executor_pb2.ConnectResponse]:
        link = self._engine.connect(await self._hello(request_iterator))
        # Also when the call ends while this generator is suspended in a write.
        on_done(context, lambda: self._engine.disconnect(link))
        reader = asyncio.create_task(self._read(request_iterator, link))
        try:
            yield executor_pb2.ConnectResponse(
                welcome=executor_pb2.Welcome(
                    epoch=self._engine.epoch,
                    protocol_version=PROTOCOL_VERSION,
                    peer_timeout_ms=round(self._engine.peer_timeout_s * 1000),
                )
            )
            while (batch := await link.take()) is not None:
                yield executor_pb2.ConnectResponse(orders=batch)
        finally:
            reader.cancel()
            self._engine.disconnect(link)

    async def _hello(self, requests: AsyncIterator[executor_pb2.ConnectRequest]) -> executor_pb2.Hello:
        try:
            async with asyncio.timeout(self._engine.peer_timeout_s):
                first = await anext(aiter(requests), None)
        except (TimeoutError, DecodeError):
            first = None
        if first is None or not first.HasField("hello"):
            raise InvalidRequestError("the first message of Connect is a hello", field="hello")
        return first.hello

    async def _read(self, requests: AsyncIterator[executor_pb2.ConnectRequest], link: Link) -> None:
        try:
            async for request in requests:
                if not request.HasField("report"):
                    raise InvalidRequestError("after its hello an executor sends reports", field="report")
                self._engine.report(link, request.report)
            link.fail(None)
        except asyncio.CancelledError:
            raise
        except DecodeError as error:
            link.fail(InvalidRequestError(f"a message of Connect is none of rorqual.v1's: {error}"))
        except Exception as error:
            link.fail(error)
