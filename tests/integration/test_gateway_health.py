"""/health through a real tokenizer service: which part of the chain is missing, and that it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rorqual.core.config import TokenizerConfig
from rorqual.launch import Stack, make_plan
from services.tokenizer.app import TokenizerApp
from tests.conftest import ServedModel, wait_until
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_scheduler import Script, ScriptedScheduler
from tests.support.vocabularies import TINY_FOLDER

BOUND_S = 15.0
"""Within so long /health says what was lost."""


async def health(http: RunningGateway, cause: str) -> dict[str, Any]:
    """/health, once it names `cause` ("": is well)."""
    async with asyncio.timeout(BOUND_S):
        while True:
            response = await http.client.get("/health")
            body: dict[str, Any] = response.json()
            assert (response.status_code == 200) == ("cause" not in body)
            if body.get("cause", "") == "" if not cause else cause in body.get("cause", ""):
                return body
            await asyncio.sleep(0.05)


async def test_the_missing_part_is_named() -> None:
    scheduler = ScriptedScheduler(lambda request: Script([[5]]))
    port = await scheduler.start()
    app = TokenizerApp(
        TokenizerConfig(listen="127.0.0.1:0", scheduler=f"127.0.0.1:{port}", model=str(TINY_FOLDER), peer_timeout_s=5)
    )
    text_port = await app.start()
    try:
        async with running_gateway(f"127.0.0.1:{text_port}", peer_timeout_s=1.5) as http:
            await health(http, "")
            model, scheduler.model = scheduler.model, None
            await health(http, "the scheduler has no executor that serves a model")
            scheduler.model = model
            await health(http, "")
            await scheduler.stop()
            lost = await health(http, "the scheduler does not answer")
            assert lost["status"] == "unavailable"
            refused = await http.client.post("/v1/completions", json={"prompt": "x"}, timeout=20)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert (await http.client.get("/health/live")).status_code == 200  # the gateway itself is well
            await scheduler.start()
            await health(http, "")
            assert (await http.client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    finally:
        await app.stop(0)
        await scheduler.stop()
    # Nobody answers at all.
    async with running_gateway(f"127.0.0.1:{text_port}", wait=False) as http:
        await health(http, f"tokenizer 127.0.0.1:{text_port} is unreachable")


@pytest.fixture(scope="module")
def own_stack(served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four processes to do harm to: each test leaves them well again."""
    settings = {"model": served_model.path, **served_model.settings, "port": 0}
    stack = Stack(make_plan(settings), log_dir=tmp_path_factory.mktemp("logs"))
    stack.start(timeout_s=120)
    yield stack
    stack.stop()


@pytest.fixture
def client(own_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_stack.url, timeout=60) as client:
        yield client


def is_well(client: httpx.Client) -> bool:
    response = client.get("/health")
    assert (response.status_code == 200) == ("cause" not in response.json())
    return response.status_code == 200


def wait_until_named(client: httpx.Client, cause: str) -> None:
    wait_until(lambda: cause in client.get("/health").json().get("cause", ""), f"/health says {cause!r}", BOUND_S)


@pytest.mark.parametrize(
    ("victim", "cause"),
    [("executor", "does not answer"), ("scheduler", "the scheduler"), ("tokenizer", "is unreachable")],
)
def test_a_stopped_part_is_named_and_goes_on(own_stack: Stack, client: httpx.Client, victim: str, cause: str) -> None:
    """A process that hangs holds its connections: only its silence tells. What waited for it is answered."""
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "temperature": 0, "seed": 1}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    os.kill(own_stack.pids[victim], signal.SIGSTOP)
    try:
        wait_until_named(client, cause)
    finally:
        os.kill(own_stack.pids[victim], signal.SIGCONT)
    wait_until(lambda: is_well(client), f"the {victim} is back", BOUND_S)
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == whole


@pytest.mark.parametrize(
    ("victim", "cause"), [("executor", "no executor"), ("scheduler", "the scheduler"), ("tokenizer", "is unreachable")]
)
def test_a_killed_part_is_named_and_comes_back(
    own_stack: Stack, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, victim: str, cause: str
) -> None:
    """In the real four processes; the launcher starts it again."""
    # The tokenizer looks each second: a scheduler that was back in less might have been missed by nobody.
    monkeypatch.setattr("rorqual.launch.stack.BACKOFF_S", (3.0,))
    assert is_well(client)
    os.kill(own_stack.pids[victim], signal.SIGKILL)
    wait_until_named(client, cause)
    wait_until(lambda: is_well(client), f"the {victim} is back", 60)
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
