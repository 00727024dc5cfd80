"""HTTP/1.1 on a raw socket: each request has one answer, in order, and no byte of a body is a request."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from backports import zstd

from gateway import codings
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, say, scripted_tokenizer

WAIT_S = 10.0
LIMIT_BYTES = 64 * 1024
BODY = json.dumps(CHAT).encode()
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADES = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n",
    b"upgrade: TLS/1.2, anything\r\nconnection: keep-alive, upgrade\r\n",
]


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address, max_body_bytes=LIMIT_BYTES) as http:
        yield http


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """A connection, whose answers are read by their own framing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def head(self) -> Answer:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        pairs = [line.split(": ", 1) for line in lines[1:] if line]
        assert len(dict(pairs)) == len(pairs), lines
        return Answer(int(status), dict(pairs), b"")

    async def answer(self, *, bodiless: bool = False) -> Answer:
        answer = await self.head()
        headers = answer.headers
        if bodiless or answer.status in (100, 204):
            return answer
        assert ("content-length" in headers) + ("transfer-encoding" in headers) <= 1
        if "content-length" in headers:
            answer.body = await self.reader.readexactly(int(headers["content-length"]))
        elif "transfer-encoding" in headers:
            while size := int(await self.reader.readline(), 16):
                answer.body += await self.reader.readexactly(size)
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
        else:
            assert headers["connection"] == "close"
            answer.body = await self.reader.read()
        return answer

    async def ended(self) -> bool:
        return await self.reader.read() == b""


@pytest.fixture
async def wire(http: RunningGateway) -> AsyncIterator[Wire]:
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        yield Wire(reader, writer)
        writer.close()


def with_length(body: bytes, more: bytes = b"", post: bytes = POST) -> bytes:
    return post + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def in_chunks(body: bytes, more: bytes = b"", size: int = 20) -> bytes:
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return POST + more + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer
    text: str = json.loads(answer.body)["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("frame", [with_length, in_chunks])
@pytest.mark.parametrize("pieces", ["together", "head first", "byte by byte"])
async def test_an_upgrade_is_ignored_and_the_body_is_read(
    wire: Wire, upgrade: bytes, frame: Callable[[bytes, bytes], bytes], pieces: str
) -> None:
    """Before and after it other requests are answered, each once."""
    request = frame(BODY, upgrade)
    head = request[: request.index(b"\r\n\r\n") + 4]
    await wire.send(LAST.replace(b"Connection: close\r\n", b""))
    assert (await wire.answer()).status == 200
    if pieces == "together":
        await wire.send(request)
    elif pieces == "head first":
        await wire.send(head)
        await asyncio.sleep(0)
        await wire.send(request[len(head) :])
    else:
        for i in range(len(request)):
            await wire.send(request[i : i + 1])
            await asyncio.sleep(0)
    assert text_of(await wire.answer()) == "Hello world"
    await wire.send(LAST)
    answer = await wire.answer()
    assert "version" in json.loads(answer.body)
    assert await wire.ended()


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("frame", [with_length, in_chunks])
async def test_a_body_after_an_upgrade_is_never_a_request(
    wire: Wire, upgrade: bytes, frame: Callable[[bytes, bytes], bytes]
) -> None:
    request = frame(SMUGGLED, upgrade)
    head = request[: request.index(b"\r\n\r\n") + 4]
    await wire.send(head)
    await asyncio.sleep(0.05)  # so that the body is a read of its own, as in the report; either way is right
    await wire.send(request[len(head) :], LAST)
    assert (await wire.answer()).status == 400  # the body is no JSON
    assert (await wire.answer()).status == 200
    assert await wire.ended()


async def test_many_upgrades_in_one_read(wire: Wire) -> None:
    plain = b"GET /version HTTP/1.1\r\nHost: x\r\n" + UPGRADES[0] + b"\r\n"
    await wire.send(plain * 300 + with_length(BODY, UPGRADES[1]) + LAST)
    for _ in range(300):
        assert "version" in json.loads((await wire.answer()).body)
    assert text_of(await wire.answer()) == "Hello world"
    assert (await wire.answer()).status == 200
    assert await wire.ended()


FAULTS = {
    "two lengths that differ": (b"Content-Length: 5\r\nContent-Length: 6\r\n", 400),
    "two lengths that agree": (b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
    "a list of lengths": (b"Content-Length: 5, 5\r\n", 400),
    "a signed length": (b"Content-Length: +5\r\n", 400),
    "a negative length": (b"Content-Length: -5\r\n", 400),
    "a hexadecimal length": (b"Content-Length: 0x5\r\n", 400),
    "an empty length": (b"Content-Length:\r\n", 400),
    "a length beyond 64 bits": (b"Content-Length: 99999999999999999999999\r\n", 400),
    "a length, then chunks": (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    "chunks, then a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
    "an unknown coding": (b"Transfer-Encoding: xchunked\r\n", 501),
    "identity": (b"Transfer-Encoding: identity\r\n", 501),
    "a coding below the chunks": (b"Transfer-Encoding: gzip, chunked\r\n", 501),
    "a coding above the chunks": (b"Transfer-Encoding: chunked, gzip\r\n", 400),
    "chunked twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
    "a vertical tab before chunked": (b"Transfer-Encoding: \x0bchunked\r\n", 400),
    "a space before the colon": (b"Content-Length : 5\r\n", 400),
    "a folded line": (b"X: a\r\n b\r\nContent-Length: 5\r\n", 400),
    "a bare line feed": (b"X: a\nContent-Length: 5\r\n", 400),
    "a bare carriage return": (b"X: a\rContent-Length: 5\r\n", 400),
    "NUL in a value": (b"X: a\0b\r\nContent-Length: 5\r\n", 400),
    "NUL in a name": (b"X\0: a\r\nContent-Length: 5\r\n", 400),
    "no name": (b": a\r\nContent-Length: 5\r\n", 400),
    "no colon": (b"abc\r\nContent-Length: 5\r\n", 400),
    "two hosts": (b"Host: y\r\nContent-Length: 5\r\n", 400),
}


@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]])
@pytest.mark.parametrize("fault", FAULTS)
async def test_doubtful_framing_is_refused_and_the_connection_ends(wire: Wire, fault: str, upgrade: bytes) -> None:
    lines, status = FAULTS[fault]
    await wire.send(POST + lines + upgrade + b"\r\n0\r\n\r\n" + SMUGGLED + LAST)
    answer = await wire.answer()
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert await wire.ended()


@pytest.mark.parametrize(
    ("first_line", "status"),
    [
        (b"GET /version HTTP/1.1", 400),  # no Host
        (b"GET /version HTTP/2.0", 505),
        (b"GET /version HTTP/1.2", 400),
        (b"GET /version", 505),  # HTTP/0.9
        (b"PRI * HTTP/2.0\r\n\r\nSM", 505),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x", 501),
        (b"get /version HTTP/1.1\r\nHost: x", 400),
        (b"GET /a b HTTP/1.1\r\nHost: x", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x", 400),
        (b"GET http:// HTTP/1.1\r\nHost: x", 400),
    ],
)
async def test_first_lines_that_are_refused(wire: Wire, first_line: bytes, status: int) -> None:
    await wire.send(first_line + b"\r\n\r\n" + SMUGGLED)
    assert (await wire.answer()).status == status
    assert await wire.ended()


async def test_targets(wire: Wire) -> None:
    head = b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for target, status in {
        b"/version": 200,
        b"/version?a=b": 200,
        b"/%76ersion": 200,
        b"http://elsewhere:1/version": 200,
        b"http://elsewhere/version?a=b": 200,
        b"http://elsewhere": 404,
        b"//version": 404,
        b"*": 404,
    }.items():
        await wire.send(b"GET " + target + head)
        assert (await wire.answer()).status == status, target
    await wire.send(b"OPTIONS *" + head + b"HEAD /version" + head + b"HEAD /nothing" + head + LAST)
    answer = await wire.answer()
    assert (answer.status, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
    assert "content-length" not in answer.headers
    answer = await wire.answer(bodiless=True)
    assert answer.status == 200
    assert int(answer.headers["content-length"]) > 0
    assert (await wire.answer(bodiless=True)).status == 404
    assert (await wire.answer()).status == 200
    assert await wire.ended()


CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b'%x;name=value;q="a;b"\r\n%b\r\n0;last\r\n\r\n' % (len(BODY), BODY),
        b"000%X\r\n%b\r\n000\r\n\r\n" % (len(BODY), BODY),
        b"%x\r\n%b\r\n0\r\nX: y\r\nX-Request-Id: trailer\r\nHost: z\r\n\r\n" % (len(BODY), BODY),
    ],
)
async def test_chunk_extensions_and_trailers_say_nothing(wire: Wire, body: bytes) -> None:
    await wire.send(CHUNKS + body + LAST)
    answer = await wire.answer()
    assert text_of(answer) == "Hello world"
    assert answer.headers["x-request-id"] != "trailer"
    assert (await wire.answer()).status == 200
    assert await wire.ended()


@pytest.mark.parametrize(
    "body",
    [
        b"-2\r\n{}\r\n0\r\n\r\n",
        b"0x2\r\n{}\r\n0\r\n\r\n",
        b"2 \r\n{}\r\n0\r\n\r\n",
        b"2\n{}\r\n0\r\n\r\n",
        b"2;\n{}\r\n0\r\n\r\n",
        b"2\r\n{}XX0\r\n\r\n",
        b"1\r\n{}\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\nContent-Length: 3\r\n\r\n",
        b"2\r\n{}\r\n0\r\nno colon\r\n\r\n",
    ],
)
@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]])
async def test_broken_chunks_are_one_refusal(wire: Wire, body: bytes, upgrade: bytes) -> None:
    await wire.send(CHUNKS[:-2] + upgrade + b"\r\n" + body + SMUGGLED + LAST)
    assert (await wire.answer()).status == 400
    assert await wire.ended()


@pytest.mark.parametrize("tail", [b"2;" + b"x" * 1000, b"2\r\n{}\r\n0\r\nX: " + b"y" * 1000])
async def test_extensions_and_trailers_have_a_bound(wire: Wire, tail: bytes) -> None:
    await wire.send(CHUNKS + tail)
    answering = asyncio.create_task(wire.answer())
    while not answering.done():
        await wire.send(b"z" * 1000)
        await asyncio.sleep(0)
    assert (await answering).status == 431


async def test_header_lines_have_a_bound(wire: Wire) -> None:
    lines = b"".join(b"X-%d: y\r\n" % i for i in range(100))
    await wire.send(b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
    assert (await wire.answer()).status == 200
    await wire.send(b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines * 2 + b"\r\n" + LAST)
    answer = await wire.answer()
    assert answer.status == 431
    assert "128 header lines" in json.loads(answer.body)["error"]["message"]
    assert await wire.ended()


async def test_pipelined_requests_are_answered_in_order(wire: Wire, tokenizer: ScriptedTokenizer) -> None:
    """A stream, a quick answer, an error and a fault, which waits for its turn too."""
    gate = asyncio.Event()
    tokenizer.script = lambda request: Script(say("a", "b").steps, gate=lambda step: gate)
    streamed = json.dumps({**CHAT, "stream": True}).encode()
    quick = LAST.replace(b"Connection: close\r\n", b"")
    await wire.send(with_length(streamed) + quick + with_length(b"{") + quick + b"NONSENSE\r\n\r\n")
    head = await wire.head()
    assert head.headers["transfer-encoding"] == "chunked"
    gate.set()
    assert b"[DONE]" in await wire.reader.readuntil(b"\r\n0\r\n\r\n")
    assert [(await wire.answer()).status for _ in range(4)] == [200, 400, 200, 400]
    assert await wire.ended()


@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0]])
async def test_a_fault_in_a_queued_body_waits_for_its_turn(
    wire: Wire, tokenizer: ScriptedTokenizer, upgrade: bytes
) -> None:
    gate = asyncio.Event()
    tokenizer.script = lambda request: Script(say("a").steps, gate=lambda step: gate)
    await wire.send(with_length(BODY) + CHUNKS[:-2] + upgrade + b"\r\nbroken\r\n" + LAST)
    await tokenizer.request_seen.wait()
    gate.set()
    assert text_of(await wire.answer()) == "a"
    assert (await wire.answer()).status == 400
    assert await wire.ended()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_with_requests_in_line_is_cancelled(
    wire: Wire, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    never = asyncio.Event()
    tokenizer.script = lambda request: Script(say("a").steps, gate=lambda step: never)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    await wire.send(with_length(body) * 3)
    await tokenizer.request_seen.wait()
    wire.writer.close()
    await tokenizer.cancel_seen.wait()
    assert len(tokenizer.requests) == 1


async def test_an_unread_body_is_no_request(wire: Wire) -> None:
    """The answer comes before the body, which is read away."""
    await wire.send(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED))
    assert (await wire.answer()).status == 404
    await wire.send(SMUGGLED + LAST)
    assert (await wire.answer()).status == 200
    assert await wire.ended()


async def test_a_broken_rest_of_an_unread_body_has_no_second_answer(wire: Wire) -> None:
    await wire.send(b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert (await wire.answer()).status == 404
    await wire.send(b"broken\r\n" + LAST)
    assert await wire.ended()


async def test_an_unread_body_that_does_not_come_ends_the_connection(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http1.UNREAD_BODY_S", 0.05)
    await wire.send(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
    assert (await wire.answer()).status == 404
    assert await wire.ended()


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0(wire: Wire, keep_alive: bytes, stream: bool) -> None:
    """No chunks, and the connection's end is the body's (RFC 9112, 6.1)."""
    body = json.dumps({**CHAT, "stream": stream}).encode()
    post = b"POST /v1/chat/completions HTTP/1.0\r\n"
    await wire.send(with_length(body, keep_alive, post) + SMUGGLED)
    answer = await wire.answer()
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers
    if stream:
        assert answer.body.startswith(b"data: {")
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        assert text_of(answer) == "Hello world"
    assert await wire.ended()


async def test_http_1_0_has_no_chunks_either_way(wire: Wire) -> None:
    await wire.send(in_chunks(BODY).replace(b"HTTP/1.1", b"HTTP/1.0") + SMUGGLED)
    assert (await wire.answer()).status == 400
    assert await wire.ended()


EXPECT = b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("frame", [with_length, in_chunks])
async def test_expect_continue(wire: Wire, frame: Callable[[bytes, bytes], bytes]) -> None:
    request = frame(BODY, EXPECT)
    split = request.index(b"\r\n\r\n") + 4
    await wire.send(request[:split])
    assert (await wire.answer()).status == 100
    await wire.send(request[split:] + LAST)
    assert text_of(await wire.answer()) == "Hello world"
    assert (await wire.answer()).status == 200
    assert await wire.ended()


@pytest.mark.parametrize(
    ("request_line", "length", "status"), [(b"POST /nothing", 10, 404), (b"POST /v1/completions", LIMIT_BYTES + 1, 413)]
)
async def test_a_body_that_was_not_asked_for_ends_the_connection(
    wire: Wire, request_line: bytes, length: int, status: int
) -> None:
    """The client may send it or not: what comes next is neither body nor request for sure."""
    await wire.send(request_line + b" HTTP/1.1\r\nHost: x\r\n" + EXPECT + b"Content-Length: %d\r\n\r\n" % length)
    answer = await wire.head()
    assert answer.status == status
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_before_the_body_is_not_taken_back(wire: Wire, version: bytes) -> None:
    """A socket that is closed while bytes arrive drops what it has sent: the body is read away first."""
    await wire.send(
        b"POST /nothing HTTP/" + version + b"\r\nHost: x\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n"
    )
    await wire.send(*[b"x" * 100_000] * 40)
    assert (await wire.answer()).status == 404
    assert await wire.ended()


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:]),
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "Zstd": lambda body: zstd.compress(body[:10]) + zstd.compress(body[10:]),
    "identity": bytes,
}


@pytest.mark.parametrize("coding", CODINGS)
async def test_compressed_bodies_are_decoded(http: RunningGateway, coding: str) -> None:
    for body in (BODY, BODY.replace(b'"hi"', b'"%b"' % (b"x" * (LIMIT_BYTES - 200)))):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        response = await http.client.post("/v1/chat/completions", content=CODINGS[coding](body), headers=headers)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress", "gzip;q=1"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_other_codings_are_a_415_that_names_those_taken(http: RunningGateway, coding: str, path: str) -> None:
    response = await http.client.post(path, content=BODY, headers={"content-encoding": coding})
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert coding in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_broken_codings_are_a_400(http: RunningGateway, coding: str) -> None:
    whole = CODINGS[coding](BODY)
    for body in (BODY, whole[:-1], whole[: len(whole) // 2], whole + b"tail", b""):
        response = await http.client.post("/v1/chat/completions", content=body, headers={"content-encoding": coding})
        assert response.status_code == 400, body
        if body:
            assert coding in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_bomb_is_a_413(http: RunningGateway, coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never unpacked beyond the limit and one piece."""
    pieces: list[int] = []
    unpack = codings._CODINGS[coding]

    def counted(data: bytes) -> Any:
        for piece in unpack(data):
            pieces.append(len(piece))
            yield piece

    monkeypatch.setitem(codings._CODINGS, coding, counted)
    bomb = CODINGS[coding](b" " * (32 * 1024 * 1024))
    assert len(bomb) < LIMIT_BYTES
    response = await http.client.post("/v1/chat/completions", content=bomb, headers={"content-encoding": coding})
    assert response.status_code == 413, response.text
    assert str(LIMIT_BYTES) in response.json()["error"]["message"]
    assert sum(pieces) <= LIMIT_BYTES + codings._PIECE_BYTES


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_byte_order_mark_before_the_body_is_ignored(http: RunningGateway, path: str) -> None:
    body = json.dumps({**CHAT, "max_tokens": 8}).encode()
    response = await http.client.post(path, content=b"\xef\xbb\xbf" + body)
    assert response.status_code == 200, response.text
    response = await http.client.post(
        path, content=gzip.compress(b"\xef\xbb\xbf" + body), headers={"content-encoding": "gzip"}
    )
    assert response.status_code == 200, response.text
    assert (await http.client.post(path, content=b"\xef\xbb\xbf\xef\xbb\xbf" + body)).status_code == 400
