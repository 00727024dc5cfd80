"""A simulated executor's end of the link as tests want it: it can be cut, muted and held still.

`SimExecutorLink` speaks for one `executor.sim.device.SimExecutor` over gRPC, on the test's own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import grpc

from executor.sim.device import ContractError, SimExecutor
from rorqual.rpc.channel import open_channel
from rorqual.v1 import executor_pb2, executor_pb2_grpc


class SimExecutorLink:
    """Runs a SimExecutor against a scheduler over gRPC, and dials again when the link is lost."""

    def __init__(
        self, address: str, executor: SimExecutor | None = None, *, step_time_s: float = 0.0, heartbeat_s: float = 1.0
    ) -> None:
        self.executor = executor or SimExecutor()
        self.step_time_s = step_time_s
        self.error: BaseException | None = None  # a broken contract, or the status that refused the link
        self.connected = asyncio.Event()
        self.stepping = asyncio.Event()  # cleared: no step is launched
        self.stepping.set()
        self.mute = False  # a hung process: nothing is sent, not even heartbeats
        self._heartbeat_s = heartbeat_s
        self._address = address
        self._task: asyncio.Task[None] | None = None
        self._call: grpc.aio.StreamStreamCall[executor_pb2.ConnectRequest, executor_pb2.ConnectResponse] | None = None

    async def start(self) -> None:
        """Dial, and return when the scheduler has welcomed this executor."""
        self._task = asyncio.create_task(self._run())
        waiting = asyncio.create_task(self.connected.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        """Leave for good."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def break_link(self, *, keep_cache: bool = True) -> None:
        """Lose the link as a crash would, and dial again."""
        self.connected.clear()
        await self.stop()
        self.executor.reset(keep_cache=keep_cache)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with open_channel(self._address) as channel:
            stub = executor_pb2_grpc.ExecutorLinkServiceStub(channel)
            while self.error is None:
                try:
                    await self._one_link(stub)
                except grpc.aio.AioRpcError as error:
                    if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                        self.error = error
                except ContractError as error:
                    self.error = error
                except asyncio.InvalidStateError:
                    pass  # the stream ended while a report was written
                self.connected.clear()
                self.executor.reset()
                await asyncio.sleep(0.02)

    async def _one_link(self, stub: executor_pb2_grpc.ExecutorLinkServiceStub) -> None:
        call = stub.Connect()
        wake = asyncio.Event()
        batches: deque[executor_pb2.OrderBatch] = deque()

        async def read() -> None:
            while (response := await call.read()) is not grpc.aio.EOF:
                if response.HasField("orders"):
                    batches.append(response.orders)
                    wake.set()

        tasks: list[asyncio.Task[None]] = []
        try:
            await call.write(executor_pb2.ConnectRequest(hello=self.executor.hello()))
            response = await call.read()
            if response is grpc.aio.EOF or not response.HasField("welcome"):
                await call.wait_for_connection()
                raise await _status_of(call)
            self.connected.set()
            tasks = [
                asyncio.create_task(read()),
                asyncio.create_task(self._work(batches, wake)),
                asyncio.create_task(self._send(call, wake)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _work(self, batches: deque[executor_pb2.OrderBatch], wake: asyncio.Event) -> None:
        """The step loop: batches at step boundaries, then a step."""
        self._to_send = asyncio.Event()
        while True:
            await self.stepping.wait()
            while batches:
                self.executor.apply(batches.popleft())
            if self.executor.has_work:
                self.executor.step()
                self._to_send.set()
                await asyncio.sleep(self.step_time_s)
            else:
                if self.executor.has_report:
                    self._to_send.set()
                wake.clear()
                if not batches:
                    await wake.wait()

    async def _send(
        self,
        call: grpc.aio.StreamStreamCall[executor_pb2.ConnectRequest, executor_pb2.ConnectResponse],
        wake: asyncio.Event,
    ) -> None:
        """Reports when the wire is free, heartbeats when there are none."""
        await asyncio.sleep(0)
        while True:
            timed_out = False
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._to_send.wait()
            except TimeoutError:
                timed_out = True
            self._to_send.clear()
            if self.mute:
                continue
            report = self.executor.report()
            if report is None and timed_out:
                report = executor_pb2.Report(last_batch_id=self.executor._last_batch_id)
                report.heartbeat.SetInParent()
            if report is not None:
                await call.write(executor_pb2.ConnectRequest(report=report))


async def _status_of(
    call: grpc.aio.StreamStreamCall[executor_pb2.ConnectRequest, executor_pb2.ConnectResponse],
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
