"""A part that dies again and again: what needs it waits or is told when to come back, and nothing else ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rorqual.launch import Event, Stack, make_plan
from rorqual.launch import stack as stack_module

WaitUntil = Callable[..., None]
ASKED = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "seed": 1}
TURN = [{"role": "user", "content": "hi"}]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def sim(tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.01, 0.02))
    settings = {"backend": "sim", "port": 0, "peer_timeout_s": 1.5}
    stack = Stack(make_plan(settings), log_dir=tmp_path / "logs", on_event=events.append)
    stack.start(timeout_s=120)
    yield stack
    stack.stop()


@pytest.mark.parametrize("lethal", ["tokenizer", "executor"])
@pytest.mark.parametrize("num_tokenizers", [1, 2])
async def test_one_request_that_kills_fails_and_nobody_else(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch, lethal: str, num_tokenizers: int
) -> None:
    """Real processes, killed by a signal in the middle of 64 others' answers, and started again by the launcher."""
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.05,))
    plan = make_plan({"backend": "sim", "port": 0}, num_tokenizers=num_tokenizers)
    specs = [
        dataclasses.replace(spec, module=f"tests.support.lethal_{lethal}") if spec.name.startswith(lethal) else spec
        for spec in plan.processes
    ]
    stack = Stack(dataclasses.replace(plan, processes=tuple(specs)), log_dir=tmp_path / "logs", on_event=events.append)
    await asyncio.to_thread(stack.start, 120)
    try:
        async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:

            async def ask(number: int, **fields: object) -> httpx.Response:
                return await client.post("/v1/completions", json={**ASKED, "prompt": f"whale {number}", **fields})

            calm = [(await ask(number)).json()["choices"][0]["text"] for number in range(3)]
            asking = [asyncio.create_task(ask(number % 3)) for number in range(64)]
            guilty = await ask(0, logit_bias={"42": 1})
            assert guilty.status_code == 500
            assert guilty.json()["error"]["code"] == f"request_kills_{lethal}"
            for number, response in enumerate(await asyncio.gather(*asking)):
                assert response.status_code == 200, response.text
                assert response.json()["choices"][0]["text"] == calm[number % 3]
            assert (await ask(0)).json()["choices"][0]["text"] == calm[0]
    finally:
        await asyncio.to_thread(stack.stop)
    died = [event.name for event in events if event.kind == "died"]
    assert all(name.startswith(lethal) for name in died)
    assert 3 <= len(died) <= 5


def num_deaths(events: list[Event], name: str) -> int:
    return sum(event.kind == "died" and event.name == name for event in list(events))


def test_an_executor_that_never_comes_back_costs_others_only_what_needs_it(
    sim: Stack, events: list[Event], wait_until: WaitUntil
) -> None:
    executor = next(child for child in sim._children if child.spec.name == "executor")
    others = {name: pid for name, pid in sim.pids.items() if name != "executor"}
    well = executor.spec
    with httpx.Client(base_url=sim.url, timeout=60) as client:
        calm = client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as stream:
            lines = stream.iter_lines()
            text = "".join(read_texts(lines, 20))
            executor.spec = dataclasses.replace(well, module="no.such.module")
            os.kill(sim.pids["executor"], signal.SIGKILL)
            wait_until(lambda: num_deaths(events, "executor") >= 8, "it has died eight times")
            wait_until(lambda: client.get("/health").status_code == 503, "the gateway has seen it")
            # A new request waits as long as a lost part may take to come back, and is then told so in its own dialect.
            for path, body, kind in (
                ("chat/completions", {"messages": TURN}, "service_unavailable"),
                ("completions", {"prompt": "x"}, "service_unavailable"),
                ("responses", {"input": "x"}, "service_unavailable"),
                ("messages", {"messages": TURN, "max_tokens": 5}, "overloaded_error"),
            ):
                refused = client.post(f"/v1/{path}", json=body)
                assert (refused.status_code, refused.json()["error"]["type"]) == (503, kind)
                assert int(refused.headers["retry-after"]) >= 1
            assert {name: pid for name, pid in sim.pids.items() if name != "executor"} == others
            executor.spec = well
            text += "".join(read_texts(lines, None))
        assert text == calm
        wait_until(lambda: client.get("/health").status_code == 200, "the gateway has seen that all is well")
        assert client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == calm
    assert sim.error is None


def test_a_log_that_cannot_be_opened_just_now_ends_nobody(
    sim: Stack, events: list[Event], monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    others = {name: pid for name, pid in sim.pids.items() if name != "executor"}
    executor = next(child for child in sim._children if child.spec.name == "executor")
    path = executor.log_path
    executor.log_path = sim.log_dir / "executor.log" / "no-folder"
    os.kill(sim.pids["executor"], signal.SIGKILL)
    wait_until(lambda: num_deaths(events, "executor") >= 3, "it could not be started twice")
    executor.log_path = path
    with httpx.Client(base_url=sim.url, timeout=60) as client:
        wait_until(lambda: client.get("/health").status_code == 200, "all is well again")
    assert {name: pid for name, pid in sim.pids.items() if name != "executor"} == others
    assert sim.error is None


def test_a_process_comes_back_though_the_stacks_folder_was_cleared_away(
    sim: Stack, events: list[Event], wait_until: WaitUntil
) -> None:
    shutil.rmtree(sim._dir)
    pid = sim.pids["executor"]
    os.kill(pid, signal.SIGKILL)
    executor = next(child for child in sim._children if child.spec.name == "executor")
    wait_until(lambda: sim.pids.get("executor", pid) != pid and executor.ready, "it is ready again")
    assert num_deaths(events, "executor") == 1


def read_texts(lines: Iterator[str], count: int | None) -> Iterator[str]:
    """The texts of the next `count` events, or of all to the end."""
    while count is None or count > 0:
        line = next(lines)
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event["choices"][0]["text"]
            count = None if count is None else count - 1
