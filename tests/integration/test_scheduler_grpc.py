"""The scheduler over real gRPC, with simulated executors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor.sim.device import SimConfig, SimExecutor, expected_tokens
from executor.sim.memory import SimGroup
from rorqual.core.config import SchedulerConfig, TelemetryConfig
from rorqual.core.errors import LethalRequestError, RorqualError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.rpc.status import from_rpc_error
from rorqual.telemetry import Telemetry
from rorqual.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    executor_pb2,
    executor_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)
from services.scheduler.engine import SILENT_S, STUCK_STEP_S
from services.scheduler.server import SchedulerServer
from tests.support.sim_link import SimExecutorLink

VOCAB = 4096


@dataclass
class Stack:
    """A scheduler on a port of its own, and a client's stub."""

    server: SchedulerServer
    address: str
    stub: Any
    channel: grpc.aio.Channel
    links: list[SimExecutorLink] = field(default_factory=list)

    async def executor(self, *, step_time_s: float = 0.0, **settings: Any) -> SimExecutorLink:
        config = SimConfig(vocab_size=VOCAB, executor_id=f"sim-{len(self.links)}", **settings)
        link = SimExecutorLink(self.address, SimExecutor(config), step_time_s=step_time_s, heartbeat_s=0.2)
        self.links.append(link)
        await link.start()
        return link

    async def info(self) -> generation_pb2.GetServerInfoResponse:
        response: generation_pb2.GetServerInfoResponse = await self.stub.GetServerInfo(
            generation_pb2.GetServerInfoRequest()
        )
        return response

    async def until(self, condition: Callable[[generation_pb2.GetServerInfoResponse], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(await self.info()):
                await asyncio.sleep(0.01)

    async def all_blocks_return(self) -> None:
        await self.until(lambda i: i.num_free_blocks == i.num_total_blocks and i.num_running == i.num_waiting == 0)
        assert (await self.info()).num_granted_unwritten_blocks == 0


async def start_stack(**settings: Any) -> Stack:
    config = SchedulerConfig(listen="127.0.0.1:0", **settings)
    server = SchedulerServer(config, Telemetry("scheduler", config.telemetry))
    address = f"127.0.0.1:{await server.start()}"
    channel = open_channel(address)
    return Stack(server, address, generation_pb2_grpc.GenerationServiceStub(channel), channel)


async def stop_stack(stack: Stack) -> None:
    for link in stack.links:
        await link.stop()
        assert link.error is None, link.error
    await stack.channel.close()
    await stack.server.stop(0.2)


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    stack = await start_stack(peer_timeout_s=1.5)
    yield stack
    await stop_stack(stack)


def request(num_prompt: int = 100, *, max_tokens: int | None = 50, seed: int = 1, **fields: Any) -> Any:
    sampling = fields.pop("sampling", None) or common_pb2.SamplingParams(seed=seed)
    prompt = [(7 * i + seed) % VOCAB for i in range(num_prompt)]
    return generation_pb2.GenerateRequest(
        request_id=fields.pop("request_id", ""),
        token_ids=pack_token_ids(prompt),
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        **fields,
    )


def alone(proto: Any) -> list[int]:
    max_total = proto.num_prompt_tokens + proto.max_tokens
    return expected_tokens(
        proto.token_ids,
        proto.num_prompt_tokens,
        max_total,
        proto.sampling,
        choice_index=proto.choice_index,
        vocab_size=VOCAB,
    )[0]


async def collect(call: Any) -> tuple[list[int], Any, Any]:
    """Tokens, the Started and the Finished of a Generate call."""
    tokens: list[int] = []
    started = finished = None
    async for response in call:
        kind = response.WhichOneof("event")
        assert finished is None, "nothing follows Finished"
        if kind == "started":
            assert started is None
            assert not tokens
            started = response.started
        elif kind == "delta":
            tokens += unpack_token_ids(response.delta.token_ids)
        else:
            finished = response.finished
    return tokens, started, finished


async def refusal(call: Any) -> RorqualError:
    with pytest.raises(grpc.RpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


async def test_generate_streams_what_the_request_yields_alone(stack: Stack) -> None:
    await stack.executor()
    protos = [request(num_prompt, seed=num_prompt) for num_prompt in (1, 63, 64, 65, 200, 3000)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(proto)) for proto in protos))
    for proto, (tokens, started, finished) in zip(protos, results, strict=True):
        assert tokens == alone(proto)
        assert started.seed == proto.sampling.seed
        assert finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert finished.num_generated_tokens == 50
    await stack.all_blocks_return()


async def test_stop_token_is_delivered_and_named(stack: Stack) -> None:
    await stack.executor()
    proto = request()
    stop = alone(proto)[20]
    proto.sampling.stop_token_ids.append(stop)
    tokens, _, finished = await collect(stack.stub.Generate(proto))
    assert tokens == alone(proto)
    assert len(tokens) <= 21
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == tokens[-1] == stop


async def test_a_seed_is_drawn_where_none_is_named(stack: Stack) -> None:
    await stack.executor()
    proto = request(sampling=common_pb2.SamplingParams(temperature=1.0))
    tokens, started, _ = await collect(stack.stub.Generate(proto))
    proto.sampling.seed = started.seed
    assert tokens == alone(proto)


async def test_equal_prompt_is_served_from_the_cache(stack: Stack) -> None:
    link = await stack.executor()
    proto = request(300)
    tokens, started, _ = await collect(stack.stub.Generate(proto))
    assert started.num_cached_tokens == 0
    computed = link.executor.num_computed_tokens
    again, started, finished = await collect(stack.stub.Generate(proto))
    assert again == tokens
    assert started.num_cached_tokens == finished.num_cached_tokens == 256
    assert link.executor.num_computed_tokens - computed == 300 - 256
    proto.cache_salt = "another tenant"
    _, started, _ = await collect(stack.stub.Generate(proto))
    assert started.num_cached_tokens == 0
    await stack.all_blocks_return()


@pytest.mark.parametrize("num_draft_tokens", [0, 1])
@pytest.mark.parametrize("room", [32, 64, 68])
async def test_prompts_about_a_blocks_edge_again_and_at_once(room: int, num_draft_tokens: int) -> None:
    """Whatever is cached, the last token is computed, and the answers are those of no cache."""
    stack = await start_stack(peer_timeout_s=30.0)
    seqs = 4
    try:
        link = await stack.executor(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs * (1 + num_draft_tokens) + max(room, 64),
            num_draft_tokens=num_draft_tokens,
        )
        for num_prompt in (1, 63, 64, 65, 127, 128, 129, 192):
            proto = request(num_prompt, max_tokens=20, seed=num_prompt)
            expected = alone(proto)
            for turn in range(3):
                computed = link.executor.num_computed_tokens
                tokens, started, finished = await collect(stack.stub.Generate(proto))
                cached = (num_prompt - 1) // 64 * 64 if turn else 0
                assert tokens == expected
                assert started.num_cached_tokens == finished.num_cached_tokens == cached
                assert link.executor.num_computed_tokens - computed >= num_prompt - cached >= 1
            proto.cache_salt = "at once"
            both = await asyncio.gather(*(collect(stack.stub.Generate(proto)) for _ in range(2)))
            assert [tokens for tokens, _, _ in both] == [expected, expected]
            assert all(started.num_cached_tokens % 64 == 0 for _, started, _ in both)
            await stack.all_blocks_return()
    finally:
        await stop_stack(stack)


async def test_preempted_cancelled_and_late_requests_end_their_spans() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    config = SchedulerConfig(listen="127.0.0.1:0", telemetry=TelemetryConfig())
    telemetry = Telemetry("scheduler", config.telemetry, exporter=exporter)
    server = SchedulerServer(config, telemetry)
    address = f"127.0.0.1:{await server.start()}"
    async with open_channel(address) as channel:
        stack = Stack(server, address, generation_pb2_grpc.GenerationServiceStub(channel), channel)
        await stack.executor(num_blocks=12, step_time_s=0.001)
        protos = [request(200, request_id=f"p{i}", seed=i, max_tokens=400) for i in range(4)]
        results = await asyncio.gather(*(collect(stack.stub.Generate(proto)) for proto in protos))
        assert [tokens for tokens, _, _ in results] == [alone(proto) for proto in protos]
        assert [finished.num_generated_tokens for _, _, finished in results] == [400] * 4
        assert server.engine.core.stats.num_preemptions > 0
        call = stack.stub.Generate(request(request_id="left", max_tokens=500))
        await call.read()
        call.cancel()
        assert (await refusal(stack.stub.Generate(request(max_tokens=500, time_left_us=1000)))).reason
        await stack.all_blocks_return()
        await stop_stack(stack)
    telemetry.shutdown()
    spans = exporter.get_finished_spans()
    whole = {span.attributes["rorqual.request_id"]: span for span in spans if span.name == "scheduler.generate"}
    assert len(whole) == 6
    preempted = [s for s in whole.values() if any(event.name == "preempted" for event in s.events)]
    assert preempted
    for span in preempted:  # it waited once more, and that shows
        phases = sorted((s.start_time, s.name) for s in spans if s.parent and s.parent.span_id == span.context.span_id)
        assert [name for _, name in phases].count("scheduler.queue") >= 2
    for span in spans:
        if span.name != "scheduler.generate":
            (parent,) = (p for p in whole.values() if p.context.span_id == span.parent.span_id)
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
    codes = {name: span.status.status_code.name for name, span in whole.items()}
    assert codes.pop("left") == "ERROR"
    assert sorted(codes.values()) == ["ERROR", *["UNSET"] * 4]
    assert telemetry.registry.get_sample_value("rorqual_scheduler_finished_total", {"reason": "aborted"}) == 1


async def test_choices_share_their_prompt(stack: Stack) -> None:
    link = await stack.executor(step_time_s=0.005)
    protos = [request(300, request_id="r", choice_index=i, num_choices=4) for i in range(4)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(proto)) for proto in protos))
    assert [tokens for tokens, _, _ in results] == [alone(proto) for proto in protos]
    assert link.executor.num_computed_tokens == 300 + 3, (
        "full blocks are shared, and of the last one all but a token is copied"
    )


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_cancel_frees_the_blocks_within_a_step(stack: Stack, how: str) -> None:
    link = await stack.executor(step_time_s=0.01)
    call = stack.stub.Generate(request(500, max_tokens=30_000))
    async for response in call:
        if response.HasField("delta"):
            break
    info = await stack.info()
    assert info.num_running == 1
    assert info.num_free_blocks < info.num_total_blocks
    if how == "cancel":
        call.cancel()
    else:
        await stack.channel.close()
        stack.channel = open_channel(stack.address)
        stack.stub = generation_pb2_grpc.GenerationServiceStub(stack.channel)
    await stack.all_blocks_return()
    at = link.executor.num_steps
    async with asyncio.timeout(5):
        while link.executor.sequences:
            await asyncio.sleep(0.002)
    assert link.executor.num_steps <= at + 1


async def test_what_can_never_be_served_is_refused(stack: Stack) -> None:
    await stack.executor(num_blocks=10, max_model_len=1000)
    too_large = await refusal(stack.stub.Generate(request(500, max_tokens=400)))
    assert too_large.reason == "KV_CACHE_TOO_SMALL"
    assert "15 KV blocks" in too_large.message
    assert "has 10" in too_large.message
    assert too_large.metadata == {"needed_blocks": "15", "total_blocks": "10", "block_size": "64"}
    too_long = await refusal(stack.stub.Generate(request(1000)))
    assert too_long.reason == "PROMPT_TOO_LONG"
    assert "1000" in too_long.message
    unknown = request()
    unknown.token_ids += pack_token_ids([VOCAB])
    unknown.num_prompt_tokens += 1
    assert (await refusal(stack.stub.Generate(unknown))).reason == "TOKEN_OUT_OF_RANGE"
    assert (await refusal(stack.stub.Generate(generation_pb2.GenerateRequest()))).reason == "EMPTY_PROMPT"
    bad = await refusal(stack.stub.Generate(request(sampling=common_pb2.SamplingParams(top_p=1.5))))
    assert (bad.reason, bad.field) == ("INVALID_SAMPLING", "sampling.top_p")
    tokens, _, finished = await collect(stack.stub.Generate(request(500, max_tokens=None)))
    assert len(tokens) == 10 * 64 + 1 - 500, "without max_tokens: what fits in memory"
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    await stack.all_blocks_return()


async def test_deadline_ends_running_and_waiting_requests(stack: Stack) -> None:
    await stack.executor(step_time_s=0.01, max_num_seqs=1)
    first = asyncio.create_task(refusal(stack.stub.Generate(request(max_tokens=10_000, time_left_us=500_000))))
    await stack.until(lambda i: i.num_running == 1)
    waiting = await refusal(stack.stub.Generate(request(max_tokens=10_000, time_left_us=100_000, seed=2)))
    running = await first
    assert running.reason == waiting.reason == "DEADLINE_EXCEEDED"
    assert "in the queue" in waiting.message
    assert "tokens generated" in running.message
    await stack.all_blocks_return()


async def test_full_queue_refuses_new_requests_but_no_resume() -> None:
    stack = await start_stack(max_queue_len=1)
    try:
        await stack.executor(step_time_s=0.005, max_num_seqs=1)
        first = asyncio.create_task(collect(stack.stub.Generate(request(max_tokens=100))))
        await stack.until(lambda i: i.num_running == 1)
        second = asyncio.create_task(collect(stack.stub.Generate(request(max_tokens=10, seed=2))))
        await stack.until(lambda i: i.num_waiting == 1)
        assert (await refusal(stack.stub.Generate(request(seed=3)))).reason == "QUEUE_FULL"
        resumed = request(seed=4, max_tokens=20)
        full = alone(resumed)
        resumed.token_ids += pack_token_ids(full[:5])
        assert (await collect(stack.stub.Generate(resumed)))[0] == full[5:]
        assert len((await first)[0]) == 100
        assert len((await second)[0]) == 10
    finally:
        await stop_stack(stack)


async def test_resume_equals_the_uninterrupted_run(stack: Stack) -> None:
    await stack.executor()
    proto = request(130, max_tokens=90)
    full = alone(proto)
    for num_held in (0, 1, 61, 62, 89, 90):
        resumed = request(130, max_tokens=90, attempt=1)
        resumed.token_ids += pack_token_ids(full[:num_held])
        resumed.resume.num_cached_tokens = 17
        resumed.resume.queue_time_us = 4711
        tokens, _, finished = await collect(stack.stub.Generate(resumed))
        assert tokens == full[num_held:]
        assert finished.num_generated_tokens == 90
        assert (finished.num_cached_tokens, finished.queue_time_us) == (17, 4711)
    stopped = request(130, max_tokens=90)
    stopped.sampling.stop_token_ids.append(full[4])
    stopped.token_ids += pack_token_ids(full[:5])
    tokens, _, finished = await collect(stack.stub.Generate(stopped))
    assert tokens == []
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert finished.stop_token_id == full[4]


async def test_higher_attempt_takes_over_and_a_lower_is_refused(stack: Stack) -> None:
    await stack.executor(step_time_s=0.005)
    old = stack.stub.Generate(request(request_id="r", attempt=1, max_tokens=10_000))
    old_end = asyncio.create_task(refusal(old))
    await stack.until(lambda i: i.num_running == 1)
    assert (await refusal(stack.stub.Generate(request(request_id="r", attempt=0)))).reason == "SUPERSEDED"
    assert (await refusal(stack.stub.Generate(request(request_id="r", attempt=1)))).reason == "DUPLICATE_REQUEST_ID"
    new = request(request_id="r", attempt=2)
    assert (await collect(stack.stub.Generate(new)))[0] == alone(new)
    assert (await old_end).reason == "SUPERSEDED"
    await stack.all_blocks_return()


@pytest.mark.parametrize("keep_cache", [True, False])
async def test_a_lost_executor_changes_no_token(stack: Stack, keep_cache: bool) -> None:
    link = await stack.executor(step_time_s=0.002)
    protos = [request(200, seed=i, max_tokens=200) for i in range(5)]
    calls = [asyncio.create_task(collect(stack.stub.Generate(proto))) for proto in protos]
    for _ in range(3):
        await stack.until(lambda i: i.num_running == 5)
        await asyncio.sleep(0.05)
        await link.break_link(keep_cache=keep_cache)
    for proto, (tokens, _, finished) in zip(protos, await asyncio.gather(*calls), strict=True):
        assert tokens == alone(proto)
        assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    await stack.all_blocks_return()


async def test_a_silent_executor_is_dead_and_another_takes_its_sequences(stack: Stack) -> None:
    first = await stack.executor(step_time_s=0.002)
    proto = request(200, max_tokens=3000)
    call = stack.stub.Generate(proto)
    tokens: list[int] = []
    async for response in call:
        tokens += unpack_token_ids(response.delta.token_ids)
        if tokens and not first.mute:
            first.mute = True
            first.stepping.clear()
            await stack.executor()
    assert tokens == alone(proto)


async def test_health_turns_long_before_a_silent_executor_is_given_up() -> None:
    stack = await start_stack(peer_timeout_s=60.0)
    health = health_pb2_grpc.HealthStub(stack.channel)

    async def until(status: Any) -> None:
        async with asyncio.timeout(SILENT_S + 5):
            while (await health.Check(health_pb2.HealthCheckRequest())).status != status:
                await asyncio.sleep(0.05)

    try:
        link = await stack.executor(step_time_s=0.001)
        await until(health_pb2.HealthCheckResponse.SERVING)
        proto = request(max_tokens=2000)
        call = asyncio.create_task(collect(stack.stub.Generate(proto)))
        await stack.until(lambda i: i.num_running == 1)
        link.mute = True
        await until(health_pb2.HealthCheckResponse.NOT_SERVING)
        info = await stack.info()
        assert info.num_executors == info.num_running == 1  # nothing is taken from it yet
        assert not info.HasField("model")
        link.mute = False
        await until(health_pb2.HealthCheckResponse.SERVING)
        assert (await stack.info()).model.name == "sim"
        assert (await call)[0] == alone(proto)
        # A step that does not end is told by its heartbeats; a long one that is still young is none.
        (peer,) = stack.server.engine._links.values()
        for step_s, answering in ((STUCK_STEP_S - 1, 1), (STUCK_STEP_S + 1, 0), (0.0, 1)):
            report = executor_pb2.Report(heartbeat=common_pb2.Heartbeat(step_running_us=round(step_s * 1e6)))
            stack.server.engine.report(peer, report)
            assert stack.server.engine.num_answering() == answering
    finally:
        await stop_stack(stack)


async def test_memory_too_small_for_all_at_once(stack: Stack) -> None:
    await stack.executor(num_blocks=12)
    protos = [request(200, seed=i, max_tokens=400) for i in range(6)]
    results = await asyncio.gather(*(collect(stack.stub.Generate(proto)) for proto in protos))
    assert [tokens for tokens, _, _ in results] == [alone(proto) for proto in protos]
    assert stack.server.engine.core.stats.num_preemptions > 0
    await stack.all_blocks_return()


async def test_a_restarted_scheduler_waits_for_inventories_before_it_places(stack: Stack) -> None:
    link = await stack.executor(num_blocks=200)
    proto = request(1000, max_tokens=20)
    assert (await collect(stack.stub.Generate(proto)))[0] == alone(proto)
    await stack.server.stop(0.1)
    config = SchedulerConfig(listen=stack.address, restart_wait_s=0.7)
    stack.server = SchedulerServer(config, Telemetry("scheduler", config.telemetry))
    start_s = asyncio.get_running_loop().time()
    await stack.server.start()
    resumed = request(1000, max_tokens=20, attempt=1)
    resumed.token_ids += pack_token_ids(alone(proto)[:7])
    resumed.resume.SetInParent()
    new = request(1000, max_tokens=20, seed=3)
    tokens, fresh = await asyncio.gather(
        collect(stack.stub.Generate(resumed, wait_for_ready=True)),
        collect(stack.stub.Generate(new, wait_for_ready=True)),
    )
    assert tokens[0] == alone(proto)[7:]
    assert fresh[0] == alone(new)
    assert fresh[1].queue_time_us > 0
    assert asyncio.get_running_loop().time() - start_s >= 0.7
    assert link.executor.num_computed_tokens < 2300, "the resume found its 15 blocks again"
    assert (await collect(stack.stub.Generate(request(1000, max_tokens=20, seed=4))))[1].queue_time_us < 500_000


async def test_requests_wait_for_the_first_executor_and_health_says_so(stack: Stack) -> None:
    health = health_pb2_grpc.HealthStub(stack.channel)
    check = health_pb2.HealthCheckRequest(service="rorqual.v1.GenerationService")
    assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert not (await stack.info()).HasField("model")
    proto = request()
    call = asyncio.create_task(collect(stack.stub.Generate(proto)))
    await stack.until(lambda i: i.num_waiting == 1)
    link = await stack.executor()
    assert (await call)[0] == alone(proto)
    assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
    assert (await stack.info()).model.name == "sim"
    await link.stop()
    await stack.until(lambda i: i.num_executors == 0)
    async with asyncio.timeout(5):
        while (await health.Check(check)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)


async def test_an_executor_that_does_not_fit_is_refused(stack: Stack) -> None:
    await stack.executor()
    for change, reason in (
        ({"fingerprint": b"other".ljust(32, b"\0")}, "MODEL_MISMATCH"),
        ({"deterministic": True}, "MODEL_MISMATCH"),
    ):
        other = SimExecutorLink(stack.address, SimExecutor(SimConfig(vocab_size=VOCAB, executor_id="x", **change)))
        with pytest.raises(grpc.RpcError) as caught:
            await other.start()
        assert from_rpc_error(caught.value).reason == reason
    stub = executor_pb2_grpc.ExecutorLinkServiceStub(stack.channel)
    hello = SimExecutor().hello()
    hello.protocol_version = 2
    for first, reason in (
        (executor_pb2.ConnectRequest(hello=hello), "PROTOCOL_VERSION_MISMATCH"),
        (executor_pb2.ConnectRequest(report=executor_pb2.Report()), "INVALID_ARGUMENT"),
    ):
        call = stub.Connect()
        await call.write(first)
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == reason


# -- sessions -----------------------------------------------------------------------------------------


class Session:
    """A tokenizer replica's end of a session."""

    def __init__(self, stack: Stack) -> None:
        self.call = stack.stub.Session()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Any] = {}
        self.num_frames = 0
        self.num_heartbeats = 0

    async def send(self, *commands: generation_pb2.GenerationCommand) -> None:
        await self.call.write(generation_pb2.GenerationServiceSessionRequest(commands=commands))

    async def open(self, protos: dict[int, Any]) -> None:
        await self.send(*(generation_pb2.GenerationCommand(stream_id=i, open=proto) for i, proto in protos.items()))

    async def read(self) -> bool:
        frame = await self.call.read()
        if frame is grpc.aio.EOF:
            return False
        self.num_frames += 1
        self.num_heartbeats += frame.HasField("heartbeat")
        for event in frame.events:
            kind = event.WhichOneof("event")
            assert event.stream_id not in self.ends, "nothing follows the end of a stream"
            if kind == "delta":
                self.tokens.setdefault(event.stream_id, []).extend(unpack_token_ids(event.delta.token_ids))
            elif kind in ("finished", "error"):
                self.ends[event.stream_id] = getattr(event, kind)
        return True

    async def read_all(self) -> None:
        while await self.read():
            pass

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert await self.read()


async def test_session_carries_many_requests(stack: Stack) -> None:
    await stack.executor(step_time_s=0.005)
    session = Session(stack)
    protos = {i: request(50 + i, seed=i, max_tokens=40) for i in range(1, 31)}
    await session.open(protos)
    await session.read_until(lambda: len(session.ends) == 30)
    assert session.tokens == {i: alone(proto) for i, proto in protos.items()}
    assert session.num_frames < 150, "a frame a step, not a message a token"
    session.call.cancel()
    await stack.all_blocks_return()


async def test_session_commands(stack: Stack) -> None:
    await stack.executor(step_time_s=0.005, num_blocks=400)
    session = Session(stack)
    await session.open(
        {
            1: request(seed=1, max_tokens=10_000),
            2: request(seed=2, max_tokens=10_000),
            3: request(seed=3, max_tokens=100_000),
            4: request(seed=4, max_tokens=20, sampling=common_pb2.SamplingParams(temperature=-1)),
        }
    )
    await session.read_until(lambda: len(session.tokens.get(1, ())) > 5 and len(session.tokens.get(2, ())) > 5)
    assert session.ends[3].reason == "KV_CACHE_TOO_SMALL"
    assert session.ends[4].field == "sampling.temperature"
    await session.send(
        generation_pb2.GenerationCommand(stream_id=1, cancel=generation_pb2.CancelGeneration()),
        generation_pb2.GenerationCommand(stream_id=2, finish=generation_pb2.FinishGeneration(num_tokens=4)),
        generation_pb2.GenerationCommand(stream_id=99, cancel=generation_pb2.CancelGeneration()),
    )
    await session.read_until(lambda: len(session.ends) == 4)
    assert session.ends[1].reason == common_pb2.FINISH_REASON_ABORTED
    assert session.ends[2].reason == common_pb2.FINISH_REASON_STOP
    assert session.ends[2].num_generated_tokens == 4, "what ran over is not counted"
    await stack.all_blocks_return()
    await session.open({5: request(seed=5)})
    await session.call.done_writing()
    await session.read_all()
    assert session.tokens[5] == alone(request(seed=5)), "a half-closed session ends after its streams"


async def test_session_refuses_a_stream_id_used_twice(stack: Stack) -> None:
    await stack.executor()
    session = Session(stack)
    await session.open({1: request(max_tokens=2)})
    await session.read_until(lambda: 1 in session.ends)
    await session.open({1: request(max_tokens=2)})
    with pytest.raises(grpc.RpcError) as caught:
        await session.read_all()
    assert from_rpc_error(caught.value).reason == "STREAM_ID_REUSED"


async def test_a_lost_session_frees_all_its_blocks(stack: Stack) -> None:
    await stack.executor(step_time_s=0.005, max_num_seqs=8)
    session = Session(stack)
    await session.open({i: request(seed=i, max_tokens=10_000) for i in range(1, 21)})
    await stack.until(lambda i: i.num_running > 0)
    session.call.cancel()
    await stack.all_blocks_return()


async def test_a_slow_session_gets_larger_frames_and_stalls_nobody(stack: Stack) -> None:
    await stack.executor(num_blocks=4000, max_num_seqs=64)
    slow, quick = Session(stack), Session(stack)
    slow_protos = {i: request(seed=i, max_tokens=600) for i in range(1, 33)}
    await slow.open(slow_protos)  # and does not read
    quick_proto = request(seed=77, max_tokens=300)
    await quick.open({1: quick_proto})
    await quick.read_until(lambda: 1 in quick.ends)
    assert quick.tokens[1] == alone(quick_proto)
    await stack.all_blocks_return()
    await slow.read_until(lambda: len(slow.ends) == 32)
    assert slow.tokens == {i: alone(proto) for i, proto in slow_protos.items()}
    slow.call.cancel()
    quick.call.cancel()


async def test_heartbeats_go_both_ways(stack: Stack) -> None:
    await stack.executor()
    session = Session(stack)
    await session.call.write(generation_pb2.GenerationServiceSessionRequest(heartbeat=common_pb2.Heartbeat()))
    with pytest.raises(grpc.RpcError) as caught:  # it began to beat, and fell silent
        await session.read_all()
    assert from_rpc_error(caught.value).reason == "UNAVAILABLE"
    assert session.num_heartbeats >= 1


async def test_stop_ends_streams_so_that_they_can_be_resumed(stack: Stack) -> None:
    await stack.executor(step_time_s=0.005)
    call = asyncio.create_task(refusal(stack.stub.Generate(request(max_tokens=10_000))))
    await stack.until(lambda i: i.num_running == 1)
    async with asyncio.timeout(3):
        await stack.server.stop(0.2)
    assert (await call).reason == "UNAVAILABLE"


async def test_one_trace_a_request() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    config = SchedulerConfig(listen="127.0.0.1:0", telemetry=TelemetryConfig())
    telemetry = Telemetry("scheduler", config.telemetry, exporter=exporter)
    server = SchedulerServer(config, telemetry)
    address = f"127.0.0.1:{await server.start()}"
    async with open_channel(address) as channel:
        stack = Stack(server, address, generation_pb2_grpc.GenerationServiceStub(channel), channel)
        link = await stack.executor()
        traces: list[str] = []
        admit = link.executor._admit
        link.executor._admit = lambda order: (traces.append(order.trace.traceparent), admit(order))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await collect(stack.stub.Generate(request(trace=common_pb2.TraceContext(traceparent=parent))))
        await collect(stack.stub.Generate(request(), metadata=(("traceparent", parent),)))
        await stop_stack(stack)
    telemetry.shutdown()
    spans = exporter.get_finished_spans()
    whole = [span for span in spans if span.name == "scheduler.generate"]
    assert len(whole) == 2
    for span in whole:
        assert f"{span.context.trace_id:032x}" == "ab" * 16
        assert f"{span.parent.span_id:016x}" == "cd" * 8
        assert f"00-{'ab' * 16}-{span.context.span_id:016x}-01" in traces
        children = [child.name for child in spans if child.parent.span_id == span.context.span_id]
        assert children == ["scheduler.queue", "scheduler.prefill", "scheduler.decode"]
        assert span.attributes["gen_ai.usage.output_tokens"] == 50
    metrics = {m.name: m for m in telemetry.registry.collect()}
    tokens = metrics["rorqual_scheduler_generated_tokens"].samples[0]
    assert tokens.value == 100


async def test_list_executors_tells_where_memory_went_and_what_is_free(stack: Stack) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(stack.channel)
    assert (await admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors == []
    first = await stack.executor(num_blocks=12)
    await stack.executor(num_blocks=20, step_time_s=0.02)
    stream = stack.stub.Generate(request(num_prompt=1000, max_tokens=200))  # room only where 20 blocks are
    await stream.read()
    await stream.read()
    one, two = (await admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
    assert (one.executor_id, one.device.name) == ("sim-0", "simulated")
    assert (one.num_total_blocks, one.num_free_blocks, one.num_running) == (12, 12, 0)
    assert one.cache_groups[0].num_blocks == 12
    assert one.memory.kv_cache_bytes == 12 * one.cache_groups[0].block_bytes > 0
    assert one.model.vocab_size == VOCAB
    assert (two.executor_id, two.num_total_blocks, two.num_running) == ("sim-1", 20, 1)
    assert two.num_free_blocks <= 20 - 16
    stream.cancel()
    await stack.all_blocks_return()
    await first.stop()
    await stack.until(lambda i: i.num_executors == 1)
    (left,) = (await admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
    assert left.executor_id == "sim-1"


async def test_three_kinds_of_cache_groups_on_one_link(stack: Stack) -> None:
    groups = (
        SimGroup(name="window", num_blocks=90, window=130),
        SimGroup(name="state", num_blocks=40, slots_per_sequence=2, prefix_multiple=128),
    )
    await stack.executor(num_blocks=100, max_num_seqs=8, max_num_batched_tokens=400, more_groups=groups)
    requests = [request(num_prompt=n, max_tokens=150, seed=n % 3) for n in (700, 300, 520, 710, 90, 300)]
    answers = await asyncio.gather(*(collect(stack.stub.Generate(one)) for one in requests))
    assert [tokens for tokens, _, _ in answers] == [alone(one) for one in requests]
    again = request(num_prompt=710, seed=710 % 3)
    tokens, _, finished = await collect(stack.stub.Generate(again))
    assert tokens == alone(again)
    assert finished.num_cached_tokens in {128 * n for n in range(1, 6)}
    await stack.all_blocks_return()
    admin = admin_pb2_grpc.AdminServiceStub(stack.channel)
    (info,) = (await admin.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
    assert [group.name for group in info.cache_groups] == ["mla", "window", "state"]
    assert list(info.group_free_blocks) == [100, 90, 40]


@pytest.mark.parametrize("method", ["GenerationService/Session", "ExecutorLinkService/Connect"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_bytes_that_are_no_message_are_the_callers_fault(stack: Stack, method: str, num_before: int) -> None:
    await stack.executor()
    call = stack.channel.stream_stream(f"/rorqual.v1.{method}")()  # bytes as they are
    before = generation_pb2.GenerationServiceSessionRequest()
    before.commands.add(stream_id=1).open.CopyFrom(
        generation_pb2.GenerateRequest(token_ids=pack_token_ids([1] * 10), num_prompt_tokens=10, max_tokens=4000)
    )
    for _ in range(num_before):
        await call.write(before.SerializeToString() if "Session" in method else b"")
        if "Session" in method:
            assert await call.read() is not grpc.aio.EOF
    await call.write(b"\xff\xff\xff")
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass  # gRPC keeps the status back until every message before it is read
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await stack.until(lambda info: info.num_running == 0)


async def test_a_request_that_kills_each_executor_fails_alone(stack: Stack) -> None:
    link = await stack.executor(step_time_s=0.02, max_num_seqs=32)
    num_deaths = 0

    async def die_under_it() -> None:
        nonlocal num_deaths
        while True:
            await asyncio.sleep(0.001)  # a step takes twenty times as long, on this very loop
            if any(seq.seed == 666 for seq in link.executor.sequences.values()):
                num_deaths += 1
                await link.break_link(keep_cache=False)

    killing = asyncio.create_task(die_under_it())
    protos = [request(seed=i, max_tokens=30) for i in range(12)]
    calls = [asyncio.create_task(collect(stack.stub.Generate(proto))) for proto in protos]
    async with asyncio.timeout(60):
        error = await refusal(stack.stub.Generate(request(seed=666, max_tokens=30)))
        assert isinstance(error, LethalRequestError)
        assert "it is not run again" in error.message
        for proto, call in zip(protos, calls, strict=True):
            assert (await call)[0] == alone(proto)
    killing.cancel()
    assert 3 <= num_deaths <= 8
    await stack.all_blocks_return()
