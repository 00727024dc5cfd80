"""What HTTP itself brings: bodies, limits, keys, paths, health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.server import bind
from rorqual import __version__
from rorqual.core.config import GatewayConfig
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway
from tests.support.scripted_tokenizer import ScriptedTokenizer, scripted_tokenizer

LIMIT_BYTES = 64 * 1024


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address, max_body_bytes=LIMIT_BYTES) as http:
        yield http


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for sign in ("Traceback", "Error(", "/work", "site-packages", ".py"):
        assert sign not in error["message"]
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_no_body_kills_the_process(http: RunningGateway, path: str) -> None:
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xff",
        b'{"messages":"\\ud800"}',
        b'{"messages":NaN}',
        b'{"x":' + b"[" * 20_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages":[{"role":"user","content":{"a":1}}],"prompt":{"a":1},"tokens":"x"}',
        b'{"prompt":["a",1],"messages":[],"tokens":[1e30]}',
    ]
    for body in bodies:
        check_error(await http.client.post(path, content=body), 400)
    assert (await http.client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [None, 7, [], [None], [{}], [{"role": "admin", "content": "x"}]])
async def test_malformed_messages_are_refused_before_a_stream_opens(
    http: RunningGateway, messages: Any, stream: bool
) -> None:
    body = {"model": "scripted", "messages": messages, "stream": stream}
    error = check_error(await http.client.post("/v1/chat/completions", json=body), 400)
    assert error["param"].startswith("messages")


async def test_an_announced_body_over_the_limit_is_refused_unread(http: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
    await writer.drain()
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413 ")
    body = json.loads(await asyncio.wait_for(reader.readuntil(b"}}"), 5))
    assert "1000000000" in body["error"]["message"]
    assert str(LIMIT_BYTES) in body["error"]["message"]
    writer.close()


async def test_a_client_that_sends_too_much_still_reads_the_answer(http: RunningGateway) -> None:
    check_error(await http.client.post("/v1/completions", content=b"x" * (8 * 1024 * 1024)), 413)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * LIMIT_BYTES

    check_error(await http.client.post("/v1/completions", content=endless()), 413)
    assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_body_that_does_not_come_is_a_408(
    tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it trickles in; and the connection is not held by what still comes of it."""
    monkeypatch.setattr("gateway.http1.UNREAD_BODY_S", 0.2)
    async with running_gateway(tokenizer.address, body_timeout_s=0.3) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{"prompt"')

        async def trickle() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 408 ")
        body = json.loads(await asyncio.wait_for(reader.readuntil(b"}}"), 5))
        assert body["error"]["type"] == "timeout_error"
        assert "within 0.3 s" in body["error"]["message"]
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        trickling.cancel()
        writer.close()


async def test_paths_and_methods(http: RunningGateway) -> None:
    assert check_error(await http.client.get("/nothing"), 404)["code"] == "unknown_url"
    response = await http.client.get("/v1/chat/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(await http.client.options("/v1/models"), 405)
    assert (await http.client.head("/health")).status_code == 200
    assert "access-control-allow-origin" not in (await http.client.get("/health")).headers


async def test_what_is_no_http_is_refused_in_the_same_shape(http: RunningGateway) -> None:
    for raw, status in (
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000, b"431"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
        writer.close()


async def test_a_head_without_end_is_refused_however_it_trickles_in(http: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
    for i in range(64):  # 64,538 bytes, which may go on
        writer.write(b"x-%02d: " % i + b"y" * 1000 + b"\r\n")
        await writer.drain()
    writer.write(b"x: " + b"y" * 1000)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"longer than 65536 bytes" in answer
    writer.close()


async def test_a_head_that_does_not_come_is_a_408(tokenizer: ScriptedTokenizer) -> None:
    """Also on a connection that was used before; one that says nothing at all is closed."""
    async with running_gateway(tokenizer.address, head_timeout_s=0.3) as http:
        whole = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
        for before in (b"", whole):
            reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
            writer.write(before)
            if before:
                await asyncio.wait_for(reader.readuntil(b'"ok"}'), 5)
                await asyncio.sleep(0.6)  # idle between two requests is no late head
            writer.write(b"GET /health/live HTT")
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "timeout_error"
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_heads_of_one_connection_are_counted_one_by_one(http: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    for _ in range(3):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000 + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
        while not (await asyncio.wait_for(reader.readline(), 5)).startswith(b"content-length"):
            pass
        await reader.readuntil(b"}")
    writer.close()


async def test_a_body_is_not_counted_with_its_head(http: RunningGateway) -> None:
    """Head and body may come in one read, also on a connection that was used before."""
    body = json.dumps({"prompt": "x" * 63_000}).encode()
    assert len(body) < LIMIT_BYTES
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 4000 + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    for split in (len(head) + len(body), len(head), 100, len(head) + 5):
        writer.write((head + body)[:split])
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the rest is a read of its own
        writer.write((head + body)[split:])
        assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        length = next(line for line in rest.split(b"\r\n") if line.startswith(b"content-length: "))
        await reader.readexactly(int(length.partition(b": ")[2]))
    writer.close()


async def test_a_whole_head_that_is_too_long_is_refused(http: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 66_000 + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"longer than 65536 bytes" in answer
    writer.close()


async def test_unknown_fields_are_ignored_with_a_warning(http: RunningGateway) -> None:
    response = await http.client.post("/v1/chat/completions", json={**CHAT, "foo": 1, "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-rorqual-ignored-fields"] == "foo"
    streamed = await http.client.post("/v1/completions", json={"prompt": "x", "foo": 1, "stream": True})
    assert streamed.headers["x-rorqual-ignored-fields"] == "foo"
    assert "x-rorqual-ignored-fields" not in (await http.client.post("/v1/chat/completions", json=CHAT)).headers


async def test_request_ids(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    own = await http.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    assert tokenizer.requests[0].options.request_id != "mine-1"
    drawn = await http.client.post("/v1/chat/completions", json=CHAT)
    assert drawn.headers["x-request-id"] == tokenizer.requests[1].options.request_id
    odd = await http.client.get("/version", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


async def test_keys(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(tokenizer.address, api_key=("first", "second")) as http:

        async def get(path: str, key: str | None = None) -> httpx.Response:
            return await http.client.get(path, headers={"authorization": key} if key else {})

        missing = await get("/v1/models")
        assert check_error(missing, 401)["code"] == "invalid_api_key"
        assert missing.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer third", "Bearer firs", "Basic first", "first"):
            check_error(await get("/v1/models", wrong), 401)
        for right in ("Bearer first", "bearer second"):
            assert (await get("/v1/models", right)).status_code == 200
        check_error(await http.client.post("/v1/chat/completions", json=CHAT), 401)
        check_error(await http.client.post("/tokenize", json={"prompt": "x"}), 401)
        for public in ("/health", "/health/live", "/version", "/metrics"):
            assert (await get(public)).status_code == 200


async def test_version_and_metrics(http: RunningGateway) -> None:
    assert (await http.client.get("/version")).json() == {"version": __version__}
    for stream in (False, True):
        await http.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    await http.client.get("/wp-admin")
    metrics = await http.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert await http.metric('rorqual_http_requests_total{code="200",route="/v1/chat/completions"}') == 2
    assert await http.metric('rorqual_http_requests_total{code="404",route="other"}') == 1
    assert await http.metric("rorqual_http_requests_in_flight") == 1  # this one
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert await http.metric(f'rorqual_gen_ai_server_{name}_seconds_count{{operation="chat"}}') == 2


async def health_until(http: RunningGateway, status: int) -> dict[str, Any]:
    async with asyncio.timeout(15):
        while (response := await http.client.get("/health")).status_code != status:
            await asyncio.sleep(0.05)
    body: dict[str, Any] = response.json()
    return body


async def test_health_follows_the_whole_chain(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    assert (await health_until(http, 200))["status"] == "ok"
    tokenizer.missing = "the scheduler does not answer (unavailable)"
    await tokenizer.set_serving(False)
    assert (await health_until(http, 503))["cause"] == f"tokenizer {tokenizer.address} answers, but {tokenizer.missing}"
    tokenizer.missing = "the scheduler has no executor that serves a model"
    async with asyncio.timeout(10):
        while tokenizer.missing not in (await health_until(http, 503))["cause"]:
            await asyncio.sleep(0.05)
    assert (await http.client.get("/health/live")).status_code == 200
    await tokenizer.set_serving(True)
    await health_until(http, 200)
    await tokenizer.stop()
    async with asyncio.timeout(10):
        while "is unreachable: connection refused" not in (await health_until(http, 503))["cause"]:
            await asyncio.sleep(0.05)
    await tokenizer.restart()
    await health_until(http, 200)
    assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_gateway_that_is_ending_is_not_ready_and_lives(http: RunningGateway) -> None:
    http.gateway.draining = True
    response = await http.client.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "draining")
    assert (await http.client.get("/health/live")).status_code == 200


async def test_a_peer_that_is_gone_without_a_word_is_found(http: RunningGateway) -> None:
    """Accepted connections are probed while idle, and unread data is given up in time."""
    listener = bind(GatewayConfig(port=0))
    listener.listen()
    accepting = socket.create_connection(listener.getsockname())
    listener.setblocking(True)
    accepted, _ = listener.accept()
    try:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        tcp = {
            name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
        assert tcp["TCP_KEEPIDLE"] + tcp["TCP_KEEPINTVL"] * tcp["TCP_KEEPCNT"] <= 180
        assert tcp["TCP_USER_TIMEOUT"] <= 180_000
    finally:
        for end in (accepting, accepted, listener):
            end.close()


async def test_without_a_tokenizer_the_cause_is_named() -> None:
    async with running_gateway("127.0.0.1:1", wait=False, peer_timeout_s=1.1) as http:
        response = await http.client.post("/v1/chat/completions", json=CHAT)
        error = check_error(response, 503)
        assert "127.0.0.1:1" in error["message"]
        assert "connection refused" in error["message"]
        assert response.headers["retry-after"]
        check_error(await http.client.get("/v1/models"), 503)
        check_error(await http.client.post("/tokenize", json={"prompt": "x"}), 503)


async def test_a_request_waits_for_a_chain_that_is_just_starting(tokenizer: ScriptedTokenizer) -> None:
    await tokenizer.set_serving(False)
    async with running_gateway(tokenizer.address, wait=False) as http:
        asking = asyncio.create_task(http.client.post("/v1/chat/completions", json=CHAT))
        await health_until(http, 503)
        await tokenizer.set_serving(True)
        assert (await asking).status_code == 200


async def test_the_document_and_its_page(http: RunningGateway) -> None:
    answer = await http.client.get("/openapi.json")
    assert answer.json()["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in answer.json()["paths"]
    page = await http.client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "/v1/chat/completions" in page.text
    # The path that stands for all models is no model.
    assert (await http.client.get("/v1/models/{id}")).status_code == 404
