"""`--backend sim` as a process: whatever happens around it, tokens are the hash of their request alone.

Its next token is a hash of what it reads back through the block table, so a wrong share, a stale label, an early reuse
or a slot that nobody wrote would change one; an order that the contract forbids ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from executor.sim.device import SimConfig, SimExecutor, expected_tokens
from executor.sim.loop import SimLoop
from rorqual.core.config import SchedulerConfig
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.launch import Stack, make_plan
from rorqual.rpc.channel import open_channel
from rorqual.telemetry import Telemetry
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2, generation_pb2_grpc
from services.scheduler.server import SchedulerServer
from tests.support.executor_fakes import FakeScheduler, admit, drop, extend, label, prefill

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 8192
WaitUntil = Callable[..., None]
# Room for few sequences at once, chunks of one block, and drafts that are rejected now and then.
SMALL = {
    "backend": "sim",
    "sim_num_blocks": 26,
    "sim_step_ms": 1,
    "sim_num_drafts": 1,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 6 * 2 + 64,
}


def prompt(number: int) -> list[int]:
    """Of 1 to 400 tokens; of three, two begin with the same 150."""
    shared = [11 * i % VOCAB for i in range(150)] if number % 3 else []
    return [*shared, *((number + 1) * (i + 7) % VOCAB for i in range((1, 63, 64, 65, 129, 250)[number % 6]))]


def alone(token_ids: list[int], max_tokens: int, seed: int, choice_index: int = 0) -> list[int]:
    """What the request yields by itself."""
    sampling = common_pb2.SamplingParams(seed=seed)
    tokens, _ = expected_tokens(
        pack_token_ids(token_ids),
        len(token_ids),
        len(token_ids) + max_tokens,
        sampling,
        choice_index=choice_index,
        vocab_size=VOCAB,
    )
    return tokens


class Executors:
    """Executor processes that dial one scheduler."""

    def __init__(self, address: str, folder: Path) -> None:
        """`folder`: takes a config.json, which is all that is read of a model."""
        (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 2048}))
        self._address = address
        self._model = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, stderr: int | None = None) -> subprocess.Popen[bytes]:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        command = [sys.executable, "-m", "executor", f"--scheduler={self._address}", f"--model={self._model}", *flags]
        self.processes.append(
            subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=stderr)
        )
        return self.processes[-1]


@pytest_asyncio.fixture
async def scheduler(tmp_path: Path) -> AsyncIterator[tuple[SchedulerServer, Any, Executors]]:
    config = SchedulerConfig(listen="127.0.0.1:0")
    server = SchedulerServer(config, Telemetry("scheduler", config.telemetry))
    address = f"127.0.0.1:{await server.start()}"
    executors = Executors(address, tmp_path)
    async with open_channel(address) as channel:
        yield server, generation_pb2_grpc.GenerationServiceStub(channel), executors
    for process in executors.processes:
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGKILL)
    await server.stop(0.2)


async def generate(stub: Any, number: int, max_tokens: int, choice_index: int = 0, num_choices: int = 1) -> list[int]:
    """All tokens of a request, opened again with those it holds for as long as it is lost."""
    token_ids, held = prompt(number), list[int]()
    for attempt in range(1, 100):
        proto = generation_pb2.GenerateRequest(
            request_id=f"r{number}",
            token_ids=pack_token_ids([*token_ids, *held]),
            num_prompt_tokens=len(token_ids),
            max_tokens=max_tokens,
            sampling=common_pb2.SamplingParams(seed=number),
            choice_index=choice_index,
            num_choices=num_choices,
            attempt=attempt,
        )
        if attempt > 1:
            proto.resume.SetInParent()
        try:
            async for response in stub.Generate(proto, timeout=60):
                held += unpack_token_ids(response.delta.token_ids)
            return held
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    raise AssertionError("lost a hundred times")


async def test_chunked_shared_preempted_and_resumed_on_another_executor(
    scheduler: tuple[SchedulerServer, Any, Executors],
) -> None:
    server, stub, executors = scheduler
    first = executors.start()
    async with asyncio.timeout(90):
        calls = [asyncio.create_task(generate(stub, number, 60 + 40 * (number % 7))) for number in range(24)]
        siblings = [asyncio.create_task(generate(stub, 31, 150, choice, 3)) for choice in range(3)]
        while server.engine.core.stats.num_generated_tokens < 900:
            await asyncio.sleep(0.005)
        first.send_signal(signal.SIGKILL)
        executors.start()
        for number, call in enumerate(calls):
            assert await call == alone(prompt(number), 60 + 40 * (number % 7), seed=number), number
        for choice, call in enumerate(siblings):
            assert await call == alone(prompt(31), 150, seed=31, choice_index=choice), choice
    stats, occupancy = server.engine.core.stats, server.engine.core.occupancy()
    assert stats.num_preemptions > 0
    assert stats.num_cached_prompt_tokens > 0
    assert occupancy.num_free_blocks == occupancy.num_total_blocks


async def test_an_order_that_the_contract_forbids_ends_the_process(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    executors = Executors(f"127.0.0.1:{await scheduler.start()}", tmp_path)
    process = executors.start(stderr=subprocess.PIPE)
    hello = await scheduler.hello()
    assert (hello.cache_groups[0].num_blocks, hello.num_draft_tokens, hello.model.vocab_size) == (26, 1, VOCAB)
    tokens = prompt(3)
    scheduler.order(admit(1, tokens, range(6), max_total=300), prefill(1, tokens, 0, 64))
    await scheduler.until(lambda received: received[1].computed == 64)
    scheduler.order(label([0], [b"a" * 32]), admit(2, tokens, range(6, 12), max_total=300), drop(1))
    scheduler.order(admit(3, tokens, [0, *range(12, 17)], num_cached=64, max_total=300))  # as it should be
    scheduler.order(admit(4, tokens, [6, *range(17, 22)], num_cached=64, max_total=300))  # block 6 has no label
    _, stderr = await asyncio.to_thread(process.communicate, timeout=30)
    await scheduler.stop()
    assert process.returncode == 1
    assert b"block 6 is shared but has no label" in stderr


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Gateway, tokenizer, scheduler and the simulated executor."""
    stack = Stack(
        make_plan({"model": ROOT / "models" / "tiny", "port": 0, **SMALL}), log_dir=tmp_path_factory.mktemp("logs")
    )
    stack.start(timeout_s=60)
    yield stack
    stack.stop()


def complete(stack: Stack, number: int, max_tokens: int, num_choices: int = 1) -> list[list[int]]:
    body = {
        "prompt": prompt(number),
        "max_tokens": max_tokens,
        "seed": number,
        "n": num_choices,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[list[int]] = [[] for _ in range(num_choices)]
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
    return tokens


def test_four_processes_over_http_with_the_executor_killed(stack: Stack, wait_until: WaitUntil) -> None:
    before = stack.pids["executor"]
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(complete, stack, number, 150, 1 + number % 3) for number in range(12)]
        wait_until(lambda: sum(call.done() for call in calls) >= 2, "two of twelve are done")
        os.kill(before, signal.SIGKILL)
        for number, call in enumerate(calls):
            expected = [alone(prompt(number), 150, number, choice) for choice in range(1 + number % 3)]
            assert call.result(timeout=60) == expected, number
    assert stack.pids["executor"] != before


# -- the loop, on a clock of its own ----------------------------------------------------------------------------------


class Virtual:
    """Time that passes by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def batch(batch_id: int, *orders: executor_pb2.Order) -> executor_pb2.OrderBatch:
    return executor_pb2.OrderBatch(batch_id=batch_id, orders=orders)


def opened(seq_id: int, block_ids: list[int], limit: int, num_tokens: int = 3) -> tuple[executor_pb2.Order, ...]:
    """A prompt of `num_tokens` tokens and its chunk."""
    tokens = range(num_tokens)
    return admit(seq_id, tokens, block_ids, limit=limit, max_total=500, seed=1), prefill(seq_id, tokens)


def test_steps_take_their_time_and_are_launched_one_ahead() -> None:
    clock = Virtual()
    device = SimExecutor(SimConfig(step_us=10_000, chunk_token_us=1000, max_num_seqs=8, max_num_batched_tokens=200))
    loop = SimLoop(device, monotonic_s=clock.monotonic_s, sleep=clock.sleep)
    made: list[tuple[int, float]] = []
    loop.on_made = lambda step: made.append((step.step_id, round(clock.now_s, 6)))
    loop.receive(batch(1, *opened(1, [0], limit=64)))
    assert loop.run_once()
    assert device.num_steps == 1
    assert made == [], "it was launched, and its time is not over"
    assert loop.outbox.take() is None
    assert loop.run_once()
    assert device.num_steps == 2, "the next was launched before the first was seen"
    assert made == [(1, 0.013)], "10 ms, and 1 ms for each of the chunk's 3 tokens"
    report = loop.outbox.take()
    assert report is not None
    assert (report.step_id, report.last_batch_id, report.num_steps, report.step_time_us) == (1, 1, 1, 13_000)
    assert list(unpack_token_ids(report.token_ids)) == alone([0, 1, 2], 1, 1)

    # What arrives now applies to step 3: the second, launched before, still brings its token under the first batch.
    loop.receive(batch(2, drop(1)))
    assert loop.run_once()
    assert device.num_steps == 2
    report = loop.outbox.take()
    assert report is not None
    assert (report.step_id, report.last_batch_id) == (2, 1)
    assert made[-1] == (2, 0.023)
    assert not loop.run_once()
    acknowledged = loop.outbox.take()
    assert acknowledged is not None
    assert acknowledged.last_batch_id == 2
    assert not acknowledged.seq_ids
    assert loop.outbox.take() is None


def test_a_device_that_stands_still_counts_the_steps_it_missed() -> None:
    clock = Virtual()
    device = SimExecutor(SimConfig(step_us=10_000, max_num_seqs=8, max_num_batched_tokens=200))
    loop = SimLoop(device, monotonic_s=clock.monotonic_s, sleep=clock.sleep)
    loop.receive(batch(1, *opened(1, [0], limit=5), *opened(2, [1], limit=5)))
    while loop.run_once():
        pass
    assert device.num_paused_steps == 0
    clock.sleep(0.035)
    loop.receive(batch(2, extend(1, [], 64), extend(2, [], 64)))
    assert loop.run_once()
    assert device.num_paused_steps == 2 * 3


def test_a_lost_link_drops_what_runs_and_keeps_labels() -> None:
    clock = Virtual()
    device = SimExecutor(SimConfig(max_num_seqs=8, max_num_batched_tokens=200))
    loop = SimLoop(device, monotonic_s=clock.monotonic_s, sleep=clock.sleep)
    loop.receive(batch(1, *opened(1, [0, 1], limit=128, num_tokens=70)))
    for _ in range(4):
        loop.run_once()
    loop.receive(batch(2, label([0], [b"h" * 32])))
    loop.run_once()
    inventory = loop.reset()
    loop.run_once()
    assert [(entry.block_id, entry.hash) for entry in inventory.result(0)] == [(0, b"h" * 32)]
    assert not device.sequences
    assert loop.outbox.take() is None
    loop.receive(batch(1, *opened(1, [2], limit=64)))
    assert loop.run_once(), "a new link begins again: with batch 1, and any sequence id"
