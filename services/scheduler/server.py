"""The scheduler's process: engine and services on one port, from start to a clean stop."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from rorqual.core.config import SchedulerConfig
from rorqual.core.garbage import give_back_memory
from rorqual.rpc.server import RpcServer
from rorqual.telemetry import Telemetry
from rorqual.v1 import admin_pb2_grpc, executor_pb2_grpc, generation_pb2_grpc

from .admin_service import AdminServicer
from .engine import Engine
from .executor_link import ExecutorLinkServicer
from .generation_service import GenerationServicer

SERVICE_NAMES = ("rorqual.v1.GenerationService", "rorqual.v1.ExecutorLinkService", "rorqual.v1.AdminService")


class SchedulerServer:
    """`start`, then `stop`. Healthy while at least one executor answers."""

    def __init__(self, config: SchedulerConfig, telemetry: Telemetry) -> None:
        self.engine = Engine(config, telemetry)
        self.engine.on_num_answering = self._on_num_answering
        self._rpc = RpcServer(config.listen, self._add_services, SERVICE_NAMES)
        self._health = asyncio.Event()
        self._num_answering = 0
        self._tasks: list[asyncio.Task[None]] = []

    def _add_services(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(self.engine), server)
        executor_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(ExecutorLinkServicer(self.engine), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.engine), server)

    def _on_num_answering(self, num_answering: int) -> None:
        if num_answering != self._num_answering:
            self._num_answering = num_answering
            self._health.set()

    async def start(self) -> int:
        """Serve; returns the port. ConfigError if it is taken."""
        port = await self._rpc.start()
        self._tasks = [
            asyncio.create_task(self.engine.run()),
            asyncio.create_task(self._follow_health()),
            asyncio.create_task(give_back_memory(lambda: self.engine.is_idle)),
        ]
        return port

    async def _follow_health(self) -> None:
        while True:
            await self._health.wait()
            self._health.clear()
            await self._rpc.set_serving(self._num_answering > 0)

    async def stop(self, grace_s: float = 1.0) -> None:
        """End all streams with UNAVAILABLE, so that their owners resume them elsewhere, and leave the port."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)
        self.engine.close()
        await self._rpc.stop(grace_s)
