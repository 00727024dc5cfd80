"""Random requests, whole and damaged, in random pieces: nothing that was not sent as a request is answered."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.http1 import HttpConnection

NUM_CONNECTIONS = 200


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.out = b""
        self.is_closed = self.has_eof = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_eof
        self.out += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_eof = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


Served = tuple[str, bytes]


class Application:
    """Answers each request; reads its body, except under /unread."""

    def __init__(self) -> None:
        self.served: list[Served] = []

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        body = b""
        more = scope["path"] != "/unread"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.served.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass
class Request:
    raw: bytes
    served: Served
    may_be_last: bool  # its body was neither asked for nor read: whether it comes is open


def make_request(draw: random.Random) -> Request:
    body = draw.choice(
        [b"", b"GET /evil HTTP/1.1\r\nHost: x\r\n\r\n", b"0\r\n\r\n", draw.randbytes(draw.randrange(300))]
    )
    upgrade = draw.choice(
        [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Upgrade: x\r\nConnection: y, upgrade\r\n"]
    )
    expect = draw.choice([b"", b"", b"Expect: 100-continue\r\n"])
    path = draw.choice(["/a", "/b", "/unread"])
    if draw.random() < 0.5:
        framed = b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        framed = b"Transfer-Encoding: chunked\r\n\r\n"
        start = 0
        while start < len(body):
            chunk = body[start : start + draw.randrange(1, 50)]
            start += len(chunk)
            framed += b"%x%b\r\n%b\r\n" % (len(chunk), draw.choice([b"", b";a=b"]), chunk)
        framed += b"0\r\n" + draw.choice([b"", b"Trailer: v\r\n"]) + b"\r\n"
    raw = b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + upgrade + expect + framed
    return Request(raw, (path, b"" if path == "/unread" else body), path == "/unread" and bool(expect))


def damaged(draw: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(out))
        kind = draw.randrange(3)
        if kind == 0:
            out[place] = draw.randrange(256)
        elif kind == 1:
            del out[place : place + draw.randrange(1, 4)]
        else:
            out[place:place] = draw.choice([b"\r\n", b"\n", b" ", b"\0", b"Content-Length: 1\r\n", b"0\r\n\r\n"])
    return bytes(out)


async def converse(draw: random.Random, data: bytes) -> tuple[list[Served], int]:
    """What was served, and how many answers were written, for `data` in random pieces."""
    application, pipe = Application(), Pipe()
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, ws="none", interface="asgi3", proxy_headers=False
    )
    connection = HttpConnection(config, ServerState(), {})
    connection.connection_made(pipe)
    start = 0
    while start < len(data) and not pipe.is_closed:
        size = draw.choice([1, 2, 7, 50, 1000])
        connection.data_received(data[start : start + size])
        start += size
        if draw.random() < 0.3:
            await asyncio.sleep(0)
    for _ in range(60):  # more than the requests' tasks need, one after another
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return application.served, pipe.out.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").count(b"HTTP/1.1 ")


@pytest.mark.parametrize("seed", range(4))
async def test_each_whole_request_is_answered_once_in_order(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(NUM_CONNECTIONS):
        requests = [make_request(draw) for _ in range(draw.randrange(1, 6))]
        served, num_answers = await converse(draw, b"".join(request.raw for request in requests))
        assert served == [request.served for request in requests][: len(served)]
        assert num_answers == len(served)
        may_end = next((i + 1 for i, request in enumerate(requests) if request.may_be_last), len(requests))
        assert len(served) >= may_end


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_bytes_have_one_refusal_at_most(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(seed)
    for _ in range(NUM_CONNECTIONS):
        data = b"".join(make_request(draw).raw for _ in range(draw.randrange(1, 6)))
        served, num_answers = await converse(draw, damaged(draw, data))
        assert len(served) <= num_answers <= len(served) + 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
