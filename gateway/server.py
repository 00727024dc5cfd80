"""The HTTP server around the application: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rorqual.core.config import GatewayConfig
from rorqual.core.errors import ConfigError
from rorqual.core.garbage import collect_seldom

from .app import Gateway
from .failures import Failure

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 90
"""Above the idle time after which load tools and proxies close a connection themselves."""

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 256
"""Of a request, those behind a chunked body included."""
LEFTOVER_S = 10.0
"""How long the rest of a body may still come after its request has been answered."""
SHUTDOWN_GRACE_S = 30.0
BACKLOG = 2048

# A peer that vanished without a FIN, or that keeps its window shut, is found by the kernel.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_PERIOD_S, _KEEP_ALIVE_PROBES = 30, 10, 3
_USER_TIMEOUT_MS = 120_000
_SEND_BUFFER_BYTES = 128 * 1024  # a slow client's share of the kernel's memory; left alone it grows to megabytes


class JsonErrorProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, whose own refusals are in OpenAI's shape too, and whose heads are bounded.

    Measured against uvicorn's other one, h11, at 256 streams: see docs/benchmarks.md, "The control plane".
    """

    _head_bytes = 0  # of a request whose head has not ended
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _leftover_timer: asyncio.TimerHandle | None = None
    _moves = False  # the bytes read last brought some of a body, or ended something
    _too_long = f"the request's head is longer than {MAX_HEADER_BYTES} bytes"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        gateway = self.config.app
        self._head_timeout_s = gateway.context.config.head_timeout_s if isinstance(gateway, Gateway) else 30.0
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self._forget_leftover()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        """A connection on which no head comes to an end holds a descriptor for nothing."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(
                408, "Request Timeout", "timeout_error", f"the request's head took over {self._head_timeout_s:g} s"
            )
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._moves = False
        if self._in_head:
            self._expect_head()
        super().data_received(data)
        if self._moves:
            self._head_bytes = 0
        elif self.parser is not None:  # all of a head, or of what stands between and behind a body's chunks
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self.send_400_response(self._too_long)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADER_LINES:
            message = f"the request has more than {MAX_HEADER_LINES} header lines"
            self.send_400_response(message)
            raise ValueError(message)  # which ends the parser's work on the connection
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._moves = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._moves = True
        self._forget_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self.send_400_response(self._too_long)
            raise ValueError(self._too_long)  # which ends the parser's work on the connection
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = self._moves = True
        self._forget_leftover()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A body that is still coming after its answer, a byte a second perhaps, must not hold the connection."""
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and self._leftover_timer is None:
            self._leftover_timer = self.loop.call_later(LEFTOVER_S, self.transport.close)

    def _forget_leftover(self) -> None:
        if self._leftover_timer is not None:
            self._leftover_timer.cancel()
            self._leftover_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", "invalid_request_error", msg)

    def _refuse(self, status: int, phrase: str, kind: str, msg: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way: another would be taken for a part of it
            return
        body = Failure(status, msg, kind, code="invalid_http" if status == 400 else "deadline_exceeded").body()
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn's server, whose signals are the caller's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(config: GatewayConfig) -> socket.socket:
    """The listening socket. Raises ConfigError that names the cure where the address cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEP_ALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEP_ALIVE_PERIOD_S),
        ("TCP_KEEPCNT", _KEEP_ALIVE_PROBES),
        ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS),
    ):
        if hasattr(socket, name):  # inherited by accepted connections on Linux
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listener.bind((config.host, config.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        raise ConfigError(_bind_cure(config, error), field="port") from error
    listener.setblocking(False)
    return listener


def _bind_cure(config: GatewayConfig, error: OSError | UnicodeError) -> str:
    where = f"{config.host}:{config.port}"
    code = error.errno if isinstance(error, OSError) else 0
    if code == errno.EADDRINUSE:
        return (
            f"cannot listen on {where}: the port is taken; stop what uses it "
            f"(`ss -ltnp 'sport = :{config.port}'` shows it) or choose another with --port (0 takes a free one)"
        )
    if code == errno.EACCES:
        return f"cannot listen on {where}: this user may not; choose a port above 1023 with --port"
    return f"cannot listen on {where}: the address is not this machine's ({error}); choose another with --host"


def write_port_file(path: str, port: int) -> None:
    """Put `port` in a file that appears whole or not at all."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(f"{port}\n")
    os.replace(temporary, target)


def make_server(gateway: Gateway, *, grace_s: float = SHUTDOWN_GRACE_S) -> HttpServer:
    """A server for `gateway`, to be run on a bound socket."""
    return HttpServer(
        uvicorn.Config(
            gateway,
            http=JsonErrorProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(grace_s) + 5,
        )
    )


async def serve(config: GatewayConfig, gateway: Gateway, *, port_file: str = "") -> None:
    """Serve until SIGTERM or SIGINT; then running streams have SHUTDOWN_GRACE_S to end. A second signal ends now."""
    listener = bind(config)
    port: int = listener.getsockname()[1]
    server = make_server(gateway)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if gateway.draining:
            gateway.end_running()
            server.force_exit = True
            return
        _log.info("ending: running requests have %.0f s", SHUTDOWN_GRACE_S)
        gateway.draining = server.should_exit = True
        loop.call_later(SHUTDOWN_GRACE_S, gateway.end_running)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await gateway.start()
    try:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        collect_seldom()
        host = f"[{config.host}]" if ":" in config.host else config.host
        _log.info("listening on http://%s:%d", host, port)
        if port_file:
            write_port_file(port_file, port)
        await serving
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await gateway.stop()
