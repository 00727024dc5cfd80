"""Servers with the project's settings: health, reflection, errors as statuses, an exclusive port."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health as health_service
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rorqual.core.errors import ConfigError, InternalError, InvalidRequestError, RorqualError

from .options import SERVER_OPTIONS
from .status import abort_with

_log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the RorqualError its handler raised; logs anything else once."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        deserializer = _reads(handler.request_deserializer)

        def checked(request: Any) -> Any:
            return _each_read(request) if handler.request_streaming else _read(request)

        async def fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
            if isinstance(error, grpc.aio.AbortError):
                raise error
            if not isinstance(error, RorqualError) or isinstance(error, InternalError):
                _log.exception("%s failed", method)
            # What it was raised from has the request in its frames, which may be megabytes: they are not to wait for the
            # collector of cycles.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            await abort_with(context, error)

        if handler.response_streaming:
            inner_stream = handler.unary_stream or handler.stream_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )

            async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for response in inner_stream(checked(request), context):
                        yield response
                except Exception as error:
                    await fail(context, error)

            async def writing(request: Any, context: Any) -> None:
                try:
                    await inner_stream(checked(request), context)
                except Exception as error:
                    await fail(context, error)

            # grpc.aio takes both forms, and tells them apart the same way; health's Watch writes by itself.
            wrapped = streaming if inspect.isasyncgenfunction(inner_stream) else writing
            return make(wrapped, deserializer, handler.response_serializer)

        inner_unary = handler.unary_unary or handler.stream_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                return await inner_unary(checked(request), context)
            except Exception as error:
                await fail(context, error)

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, deserializer, handler.response_serializer)


class _Torn:
    """In place of a message that could not be read: left to gRPC, it would end the call with INTERNAL."""


def _reads(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:
            return _Torn()

    return read


def _read(request: Any) -> Any:
    """INVALID_ARGUMENT (MALFORMED_MESSAGE) for bytes that are no message of the type."""
    if isinstance(request, _Torn):
        raise InvalidRequestError(
            "the message cannot be read: its bytes are not those of the method's type", reason="MALFORMED_MESSAGE"
        )
    return request


async def _each_read(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _read(request)


class RpcServer:
    """One gRPC server of a process.

    `add_services` registers the servicers on the grpc server it is given; `service_names` are their full names
    ("rorqual.v1.TextService"), for health and reflection. Health starts as NOT_SERVING.
    """

    def __init__(
        self,
        listen: str,
        add_services: Callable[[grpc.aio.Server], None],
        service_names: Iterable[str],
        *,
        interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._listen = listen
        self._names = tuple(service_names)
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=[*interceptors, ErrorInterceptor()])
        self._health = health_service.aio.HealthServicer()
        add_services(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME],
            self._server,
        )
        self.port = 0
        self.serving = False

    async def start(self) -> int:
        """Bind and start; returns the port (the listen address may ask for port 0). ConfigError if it is taken."""
        host, _, port = self._listen.rpartition(":")
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._listen}: the port is taken or the address is not this machine's; "
                f"stop what uses it (`ss -ltnp 'sport = :{port}'` shows it) or choose another with --listen {host}:PORT",
                field="listen",
            ) from error
        await self.set_serving(False)
        await self._server.start()
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """Tell health checkers whether this process can do its work now ("" stands for the whole process)."""
        self.serving = serving
        value = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, value)

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new calls, give running ones `grace_s`, then end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
