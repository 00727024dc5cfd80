"""One POST over a connection of its own, read whole or cut half-way: what a load needs of HTTP/1.1, on asyncio alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_MAX_LINE_BYTES = 64 * 1024 * 1024


class Broken(RuntimeError):
    """The connection brought no whole answer: what was missing."""


@dataclass(slots=True)
class Reply:
    """What came back. `arrivals_s`: perf_counter's time of each event of a stream."""

    status: int = 0
    body: bytes = b""  # of an answer that is no stream
    events: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    is_stream: bool = False
    has_done: bool = False  # `data: [DONE]` came
    cut: bool = False  # by us, before its end


@dataclass(frozen=True, slots=True)
class Cut:
    """Where we leave: after so many events of a stream, or so many seconds."""

    num_events: int
    after_s: float


async def post(
    url: str,
    path: str,
    body: dict[str, Any],
    *,
    cut: Cut | None = None,
    timeout_s: float = 120.0,
    reply: Reply | None = None,
) -> Reply:
    """Send and read to the end, or to the cut. Raises Broken: refused, reset, ended early, or not whole in `timeout_s`.

    `reply`: one to fill, for whoever wants to see events as they come.
    """
    parts = urlsplit(url)
    reply = reply or Reply()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_MAX_LINE_BYTES)
            try:
                data = json.dumps(body, ensure_ascii=False).encode()
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + data)
                limit_s = cut.after_s if cut and not body.get("stream") else None
                async with asyncio.timeout(limit_s) as leaving:
                    await writer.drain()
                    await _read(reader, reply, cut)
            except TimeoutError:
                if not leaving.expired():
                    raise
                reply.cut = True
            finally:
                # (A cut is a reset, as of a client that crashed; waiting for its other end would keep the slot.)
                writer.transport.abort() if reply.cut else writer.close()
    except TimeoutError:
        raise Broken(f"no whole answer within {timeout_s:g} s ({len(reply.events)} events came)") from None
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise Broken(f"{error!r} after status {reply.status} and {len(reply.events)} events") from None
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply, cut: Cut | None) -> None:
    status = await reader.readline()
    if not status:
        raise Broken("the connection was closed without a byte")
    reply.status = int(status.split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    reply.is_stream = headers.get("content-type", "").startswith("text/event-stream")
    if "content-length" in headers:
        reply.body = await reader.readexactly(int(headers["content-length"]))
        return
    rest = b""
    while size := int(await reader.readline() or _closed(reply), 16):
        piece = await reader.readexactly(size + 2)
        if not reply.is_stream:
            reply.body += piece[:-2]
            continue
        *events, rest = (rest + piece[:-2]).split(b"\n\n")
        for event in events:
            _take(event, reply)
        if cut and len(reply.events) >= cut.num_events:
            reply.cut = True
            return
    if rest.strip():
        raise Broken(f"the stream ended inside an event: {rest[-200:]!r}")
    await reader.readline()


def _closed(reply: Reply) -> bytes:
    raise Broken(f"the connection was closed before the answer's end, after {len(reply.events)} events")


def _take(event: bytes, reply: Reply) -> None:
    for line in event.splitlines():
        if line == b"data: [DONE]":
            reply.has_done = True
        elif line.startswith(b"data: "):
            reply.events.append(json.loads(line[6:]))
            reply.arrivals_s.append(time.perf_counter())


async def wait_healthy(url: str, timeout_s: float) -> bool:
    """Whether /health says ready within `timeout_s`."""
    parts, deadline_s = urlsplit(url), time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.write(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
                writer.transport.abort()
                if b" 200 " in status:
                    return True
        await asyncio.sleep(0.05)
    return False
