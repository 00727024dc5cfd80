"""Clients that leave, before the real four processes: whenever they go, everything of theirs is free again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import psutil
import pytest

from rorqual.v1 import generation_pb2, generation_pb2_grpc

LONG = int(os.environ.get("API_FUZZ_S", "0")) >= 120  # make test-api
NUM_ABORTS = 1000 if LONG else 40
NUM_WARM_UP = 200 if LONG else 10
MAX_GROWTH = 0.05

WaitUntil = Callable[..., None]
BODY: dict[str, Any] = {"prompt": "Tell me a long story.", "max_tokens": 3000, "ignore_eos": True}
CHAT: dict[str, Any] = {**BODY, "messages": [{"role": "user", "content": BODY["prompt"]}]}
del CHAT["prompt"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": BODY,
    "/v1/responses": {"input": BODY["prompt"], "max_output_tokens": 3000, "ignore_eos": True},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 3000},
}


@pytest.fixture(scope="module")
def scheduler(stack: Any) -> Iterator[Any]:
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def http(stack: Any) -> Iterator[httpx.Client]:
    """Leaving a stream of its before the end closes the connection."""
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        yield client


def all_free(scheduler: Any) -> bool:
    info = scheduler.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=5)
    return bool(info.num_running == info.num_waiting == 0 and info.num_free_blocks == info.num_total_blocks > 0)


def leave(http: httpx.Client, path: str, body: dict[str, Any], *, after_events: int | None) -> None:
    """Ask, and close the connection after so many events; None: without a stream, while the answer is waited for."""
    if after_events is None:
        with contextlib.suppress(httpx.ReadTimeout):
            http.post(path, json=body, timeout=httpx.Timeout(10, read=0.1))
        return
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        events = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(after_events):
            next(events)


@pytest.mark.parametrize("after_events", [None, 0, 1, 5])
@pytest.mark.parametrize("path", BODIES)
def test_everything_is_free_again(
    http: httpx.Client, scheduler: Any, wait_until: WaitUntil, path: str, after_events: int | None
) -> None:
    several = {"n": 4} if path in ("/v1/chat/completions", "/v1/completions") else {}
    leave(http, path, {**BODIES[path], **several}, after_events=after_events)
    wait_until(lambda: all_free(scheduler), "free == total after the client went away", 10)


def test_a_client_that_leaves_the_queue(http: httpx.Client, scheduler: Any, wait_until: WaitUntil) -> None:
    """More requests than run at once: some of them have no block yet when all leave."""
    asking = [
        threading.Thread(target=leave, args=(http, "/v1/completions", {**BODY, "n": 32}), kwargs={"after_events": 1})
        for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive()
    wait_until(lambda: all_free(scheduler), "free == total after all went away", 20)


def resident_bytes(stack: Any) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in stack.pids.items()}


@pytest.mark.timeout(900 if LONG else 180)
def test_many_in_a_row(stack: Any, http: httpx.Client, scheduler: Any, wait_until: WaitUntil) -> None:
    for number in range(NUM_WARM_UP):
        leave(http, "/v1/completions", BODY, after_events=number % 3)
    wait_until(lambda: all_free(scheduler), "free == total after the warm-up", 20)
    pids, before = dict(stack.pids), resident_bytes(stack)
    paths = list(BODIES)
    for number in range(NUM_ABORTS):
        path = paths[number % len(paths)]
        leave(http, path, BODIES[path], after_events=number % 3)
    wait_until(lambda: all_free(scheduler), "free == total after all aborts", 20)
    assert stack.pids == pids  # nothing was started again
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200
    if LONG:
        after = resident_bytes(stack)
        growth = {name: after[name] / before[name] - 1 for name in ("gateway", "scheduler", "executor")}
        assert all(share < MAX_GROWTH for share in growth.values()), growth
