"""A gateway that serves HTTP in this process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from opentelemetry.sdk.trace.export import SpanExporter

from gateway.app import Gateway
from gateway.server import bind, make_server
from rorqual.core.config import GatewayConfig
from rorqual.telemetry import Telemetry


@dataclass(frozen=True)
class RunningGateway:
    """Where it is, and a client for it."""

    gateway: Gateway
    client: httpx.AsyncClient
    port: int
    telemetry: Telemetry

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def metric(self, line_start: str) -> float:
        """The value of the first line of /metrics that starts so."""
        text = (await self.client.get("/metrics")).text
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


@contextlib.asynccontextmanager
async def running_gateway(
    *tokenizers: str, wait: bool = True, exporter: SpanExporter | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway before `tokenizers`; with `wait`, once one of them is ready."""
    config = GatewayConfig(port=0, tokenizers=tokenizers, **settings)
    telemetry = Telemetry("gateway", config.telemetry, exporter=exporter)
    gateway = Gateway(config, telemetry)
    listener = bind(config)
    port = listener.getsockname()[1]
    server = make_server(gateway, grace_s=1.0)
    await gateway.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        if wait:
            await gateway.replicas.acquire("")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            yield RunningGateway(gateway, client, port, telemetry)
    finally:
        gateway.end_running()
        server.should_exit = True
        await serving
        await gateway.stop()
        telemetry.shutdown()


def sse_events(body: str) -> list[Any]:
    """The decoded data of each event; the string "[DONE]" for that. Comments are skipped."""
    events: list[Any] = []
    for block in body.split("\n\n"):
        if block and not block.startswith(":"):
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else msgspec.json.decode(data.encode()))
    return events


CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
