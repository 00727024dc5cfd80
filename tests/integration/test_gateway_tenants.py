"""Who may ask, from where, and whose cached prefixes a request may share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rorqual.core.api_keys import ApiKey
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway
from tests.support.scripted_tokenizer import ScriptedTokenizer, scripted_tokenizer


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_tenant_shares_prefixes_with_itself_alone(
    tokenizer: ScriptedTokenizer, tmp_path: Path, path: str
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-1 red\nsk-2 red\nsk-3 blue\n", encoding="utf-8")
    async with running_gateway(tokenizer.address, api_key=("own",), api_key_file=str(file)) as http:

        async def salt(key: str, **fields: Any) -> str:
            headers = {"x-api-key": key}
            assert (await http.client.post(path, json={**BODIES[path], **fields}, headers=headers)).status_code == 200
            return tokenizer.requests[-1].options.cache_salt

        red = ApiKey("", "red").cache_salt
        assert await salt("sk-1") == await salt("sk-2") == red
        assert await salt("own") == ApiKey("", "own").cache_salt
        others = {await salt("sk-3"), await salt("sk-3", cache_salt=red), await salt("sk-3", cache_salt="a")}
        assert len(others) == 3
        assert red not in others
        assert await salt("sk-1", cache_salt="a") == await salt("sk-2", cache_salt="a") == f"{red}:a"
        refused = await http.client.post(path, json=BODIES[path], headers={"x-api-key": "red"})
        assert refused.status_code == 401


async def test_without_keys_the_clients_own_salt_is_all(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(tokenizer.address) as http:
        for salt, fields in (("", {}), ("", {"cache_salt": None}), ("mine", {"cache_salt": "mine"})):
            await http.client.post("/v1/chat/completions", json={**CHAT, **fields})
            options = tokenizer.requests[-1].options
            assert (options.cache_salt, options.HasField("cache_salt")) == (salt, salt != "")


@pytest.mark.parametrize("path", BODIES)
async def test_an_empty_salt_is_refused(tokenizer: ScriptedTokenizer, path: str) -> None:
    async with running_gateway(tokenizer.address) as http:
        response = await http.client.post(path, json={**BODIES[path], "cache_salt": ""})
    assert response.status_code == 400
    assert "cache_salt" in response.json()["error"]["message"]
    assert not tokenizer.requests


async def preflight(http: RunningGateway, origin: str, **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return await http.client.options("/v1/chat/completions", headers=asked)


async def test_pages_of_named_origins_may_call(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(tokenizer.address, cors_allow_origins=("https://a.example",), api_key=("k",)) as http:
        allowed = await preflight(
            http, "https://a.example", **{"access-control-request-headers": "authorization,content-type"}
        )
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert allowed.headers["access-control-allow-methods"] == "POST"
        assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
        assert allowed.headers["vary"] == "Origin"
        stranger = await preflight(http, "https://b.example")
        assert stranger.status_code == 405
        assert "access-control-allow-origin" not in stranger.headers
        # The answers themselves, errors too: a page has to be able to read why.
        for headers, status in (({"x-api-key": "k"}, 200), ({}, 401)):
            answer = await http.client.post(
                "/v1/chat/completions", json=CHAT, headers={"origin": "https://a.example", **headers}
            )
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_any_origin_or_none(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(tokenizer.address, cors_allow_origins=("*",)) as http:
        assert (await preflight(http, "https://b.example")).headers["access-control-allow-origin"] == "*"
        answer = await http.client.get("/version")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
    async with running_gateway(tokenizer.address) as http:
        assert (await preflight(http, "https://b.example")).status_code == 405
        assert not any(
            name.startswith("access-control")
            for name in (await http.client.get("/version", headers={"origin": "https://b.example"})).headers
        )


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_may_not_put_itself_before_others(
    tokenizer: ScriptedTokenizer, tmp_path: Path, path: str
) -> None:
    file = tmp_path / "keys"
    file.write_text("plain\nfast best-priority=-10\nslow best-priority=5\n", encoding="utf-8")
    async with running_gateway(tokenizer.address, api_key_file=str(file)) as http:
        for key, asked, given in (
            ("plain", None, 0), ("plain", 0, 0), ("plain", 7, 7), ("plain", 2**31 - 1, 2**31 - 1),
            ("fast", -10, -10), ("fast", None, 0), ("slow", None, 5), ("slow", 0, 5), ("slow", 9, 9),
        ):  # fmt: skip
            answer = await http.client.post(path, json={**BODIES[path], "priority": asked}, headers={"x-api-key": key})
            assert answer.status_code == 200, answer.text
            assert tokenizer.requests[-1].options.priority == given
        before = len(tokenizer.requests)
        for key, asked, best in (("plain", -1, 0), ("plain", -(2**31), 0), ("fast", -11, -10), ("slow", 4, 5)):
            answer = await http.client.post(path, json={**BODIES[path], "priority": asked}, headers={"x-api-key": key})
            assert answer.status_code == 400
            assert f"priority: it may be {best} to 2147483647 here, got {asked}" in answer.json()["error"]["message"]
        assert len(tokenizer.requests) == before


async def test_the_range_of_priorities_is_a_setting(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(tokenizer.address, best_priority=-100) as http:
        for asked, status in ((-100, 200), (-101, 400)):
            answer = await http.client.post("/v1/chat/completions", json={**CHAT, "priority": asked})
            assert answer.status_code == status
