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

from rorqual.core.config import GatewayConfig
from rorqual.core.errors import ConfigError
from rorqual.core.garbage import collect_seldom

from .app import Gateway
from .http1 import HttpConnection

_log = logging.getLogger(__name__)

KEEP_ALIVE_S = 90
"""Above the idle time after which load tools and proxies close a connection themselves."""

SHUTDOWN_GRACE_S = 30.0
BACKLOG = 2048

# A peer that vanished without a FIN, or that keeps its window shut, is found by the kernel.
_KEEP_ALIVE_IDLE_S, _KEEP_ALIVE_PERIOD_S, _KEEP_ALIVE_PROBES = 30, 10, 3
_USER_TIMEOUT_MS = 120_000
_SEND_BUFFER_BYTES = 128 * 1024  # a slow client's share of the kernel's memory; left alone it grows to megabytes


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
            http=HttpConnection,
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
