"""What every server of the project has: health, reflection, statuses, an exclusive port, room for long prompts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from rorqual.core.errors import ConfigError, InternalError, PromptTooLongError, QueueFullError
from rorqual.core.token_ids import pack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.rpc.server import RpcServer
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import generation_pb2, generation_pb2_grpc

NAME = "rorqual.v1.GenerationService"


class Held:
    """What a handler holds when it fails: a request of megabytes."""


class Echo(generation_pb2_grpc.GenerationServiceServicer):
    """Sends the prompt back; fails the way its request_id asks."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(delta=generation_pb2.TokenDelta(token_ids=request.token_ids))
        if request.request_id == "too long":
            raise PromptTooLongError("the prompt is too long", field="token_ids", metadata={"max_model_len": "8"})
        if request.request_id == "huge":
            held = Held()
            self.held = weakref.ref(held)
            raise PromptTooLongError("it is too long")
        if request.request_id == "too many":
            raise QueueFullError("full", metadata={"retry_after_s": "7"})

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        raise ValueError("a secret")


async def start(listen: str = "127.0.0.1:0", echo: Echo | None = None) -> RpcServer:
    servicer = echo or Echo()
    server = RpcServer(
        listen, lambda s: generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, s), [NAME]
    )
    await server.start()
    return server


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = await start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


async def test_health_can_be_checked_and_watched(server: RpcServer, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=10)
    seen = aiter(watch)
    assert (await anext(seen)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    assert (await anext(seen)).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    for name in ("", NAME):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_names_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = await call.read()
    call.cancel()
    names = {service.name for service in reply.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


async def test_a_refusal_says_when_to_try_again(channel: grpc.aio.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.Generate(generation_pb2.GenerateRequest(request_id="too many"), timeout=10):
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, QueueFullError)
    assert error.metadata == {"retry_after_s": "7"}
    status = rpc_status.from_call(caught.value)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.seconds == 7


async def test_an_error_arrives_as_the_same_class_with_its_figures(channel: grpc.aio.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    request = generation_pb2.GenerateRequest(request_id="too long", token_ids=b"1234")
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.Generate(request, timeout=10):
            pass
    error = from_rpc_error(caught.value)
    assert type(error) is PromptTooLongError
    assert (error.message, error.field, error.metadata) == (
        "the prompt is too long",
        "token_ids",
        {"max_model_len": "8"},
    )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


async def test_a_refused_request_is_freed_at_once() -> None:
    """It is in no cycle: the collector runs seldom, and 30 MB of a salt waited for it with each refusal."""
    echo = Echo()
    server = await start(echo=echo)
    gc.disable()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for _ in range(2):  # gRPC may hold on to the last call
                call = stub.Generate(generation_pb2.GenerateRequest(request_id="huge"), timeout=10)
                with pytest.raises(grpc.RpcError):
                    async for _ in call:
                        pass
                held = echo.held
            assert held() is None
    finally:
        gc.enable()
        await server.stop(0)


async def test_an_unknown_error_leaks_no_text(channel: grpc.aio.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=10)
    error = from_rpc_error(caught.value)
    assert type(error) is InternalError
    assert "secret" not in error.message


async def test_a_million_token_prompt_passes_both_ways(channel: grpc.aio.Channel) -> None:
    prompt = pack_token_ids(range(1_000_000))
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    async for response in stub.Generate(generation_pb2.GenerateRequest(token_ids=prompt), timeout=60):
        assert response.delta.token_ids == prompt


async def test_a_taken_port_is_named_with_its_cure(server: RpcServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}.*taken.*--listen"):
        await start(f"127.0.0.1:{server.port}")


def test_this_grpc_knows_the_experiments_that_are_switched_off() -> None:
    """One that it does not know any more is logged at its first use, and the setting should go."""
    code = "import rorqual, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert "experiment" not in done.stderr
