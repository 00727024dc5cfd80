"""Sessions: many requests of a gateway on one stream."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from rorqual.core.token_ids import pack_token_ids
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import common_pb2, generation_pb2, text_pb2
from services.tokenizer.run import TextRun
from tests.support.scripted_scheduler import Script
from tests.support.text_service import EOS, Heard, Stack, chat, complete, serving, steps, tiny_text
from tests.support.vocabularies import tiny


class Gateway:
    """A caller's end of a session."""

    def __init__(self, stack: Stack) -> None:
        self.call = stack.stub.Session()
        self.heard: dict[int, Heard] = {}
        self.errors: dict[int, common_pb2.Error] = {}
        self.num_frames = 0
        self.num_heartbeats = 0

    async def send(self, *commands: text_pb2.TextCommand) -> None:
        await self.call.write(text_pb2.TextServiceSessionRequest(commands=commands))

    async def read(self) -> bool:
        """One frame; False at the end."""
        frame = await self.call.read()
        if frame is grpc.aio.EOF:
            return False
        self.num_frames += 1
        self.num_heartbeats += frame.HasField("heartbeat")
        for entry in frame.streams:
            self.heard.setdefault(entry.stream_id, Heard()).add(entry.events)
            if entry.HasField("error"):
                self.errors[entry.stream_id] = entry.error
        return True

    async def read_to_the_end(self) -> None:
        async with asyncio.timeout(20):
            while await self.read():
                pass

    async def read_until(self, ended: Sequence[int]) -> None:
        async with asyncio.timeout(20):
            while not all(n in self.errors or (n in self.heard and "usage" in self.heard[n].kinds) for n in ended):
                assert await self.read()


def open_chat(stream_id: int, content: str = "hello", **options: Any) -> text_pb2.TextCommand:
    return text_pb2.TextCommand(stream_id=stream_id, chat=chat(content, **options))


def cancel(stream_id: int) -> text_pb2.TextCommand:
    return text_pb2.TextCommand(stream_id=stream_id, cancel=text_pb2.CancelText())


async def test_many_requests_on_one_stream() -> None:
    ids = [*tiny().encode("The 𠮷 fox 😀 jumps over it."), EOS]

    def script(request: generation_pb2.GenerateRequest) -> Script:
        return steps(ids, 1 + int(request.request_id) % 3)

    async with serving(script) as stack:
        gateway = Gateway(stack)
        await gateway.send(*(open_chat(n, request_id=str(n)) for n in range(1, 60)))
        await gateway.send(
            text_pb2.TextCommand(stream_id=60, complete=complete(request_id="60", stop=["fox"])),
            open_chat(61, request_id="61", stop=[""]),
            text_pb2.TextCommand(stream_id=62),
        )
        await gateway.read_until(range(1, 63))
        num_sessions = stack.scheduler.seen.num_sessions
    for n in range(1, 60):
        assert gateway.heard[n].content == {0: tiny_text(ids)}
        assert gateway.heard[n].token_ids == {0: ids}
        assert gateway.heard[n].kinds[0] == "accepted"
    assert gateway.heard[60].content == {0: "The 𠮷 "}
    assert (gateway.errors[61].reason, gateway.errors[61].field) == ("INVALID_STOP", "stop[0]")
    assert gateway.errors[61].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert gateway.errors[62].reason == "UNKNOWN_COMMAND"
    assert num_sessions == 1
    assert gateway.num_frames < 59 * len(ids)


async def test_cancel_and_the_end_of_the_stream_reach_the_scheduler() -> None:
    async with serving(lambda request: steps(tiny().encode("abc") * 500)) as stack:
        scheduler = stack.scheduler
        await scheduler.pause(after_steps=2)
        gateway = Gateway(stack)
        await gateway.send(*(open_chat(n, request_id=str(n)) for n in (1, 2, 3)))
        await scheduler.wait_for(lambda: len(scheduler.seen.opened) == 3)
        await gateway.send(cancel(2), cancel(99))
        await scheduler.wait_for(lambda: scheduler.seen.cancelled == ["2"])
        gateway.call.cancel()
        await scheduler.wait_for(lambda: sorted(scheduler.seen.cancelled) == ["1", "2", "3"])
        assert not scheduler.running


async def test_a_cancel_right_behind_its_request() -> None:
    async with serving(lambda request: steps([*tiny().encode("abc"), EOS])) as stack:
        gateway = Gateway(stack)
        await gateway.send(open_chat(1, request_id="1"), cancel(1), open_chat(2, request_id="2"))
        await gateway.read_until([2])
        assert [o.request_id for o in stack.scheduler.seen.opened] == ["2"]
        assert 1 not in gateway.heard


async def test_a_stream_id_used_twice_ends_the_session() -> None:
    async with serving(lambda request: steps(tiny().encode("abc") * 500)) as stack:
        await stack.scheduler.pause()
        gateway = Gateway(stack)
        await gateway.send(open_chat(1), open_chat(1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.read_to_the_end()
        error = from_rpc_error(caught.value)
        assert (caught.value.code(), error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STREAM_ID_REUSED")
        await stack.scheduler.wait_for(lambda: not stack.scheduler.running)


async def test_a_half_closed_session_serves_what_it_has() -> None:
    async with serving(lambda request: steps([*tiny().encode("abc"), EOS])) as stack:
        gateway = Gateway(stack)
        await gateway.send(open_chat(1))
        await gateway.call.done_writing()
        await gateway.read_to_the_end()
        assert gateway.heard[1].content == {0: "abc"}


async def test_heartbeats_come_while_nothing_happens() -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        gateway = Gateway(stack)
        async with asyncio.timeout(5):
            while gateway.num_heartbeats < 2:
                await gateway.read()


async def test_a_gateway_that_does_not_read_stalls_nobody() -> None:
    """Its frames join in the outbox; the other's requests run to their end meanwhile, and nothing is lost."""
    ids = tiny().encode("The quick brown fox jumps over the lazy dog. ") * 100
    async with serving(
        lambda request: steps([*ids, EOS], 5),
    ) as stack:
        stack.scheduler.model.max_model_len = 100_000  # type: ignore[union-attr]
        slow, quick = Gateway(stack), Gateway(stack)
        await slow.send(*(open_chat(n) for n in range(1, 9)))
        await quick.send(*(open_chat(n) for n in range(1, 3)))
        await quick.read_until([1, 2])
        await stack.scheduler.wait_for(lambda: not stack.scheduler.running)
        await slow.read_until(range(1, 9))
    for n in range(1, 9):
        assert slow.heard[n].token_ids == {0: [*ids, EOS]}
        assert slow.heard[n].content == {0: tiny_text(ids)}


async def test_a_resume_through_a_session_of_another_replica() -> None:
    ids = [*tiny().encode("<think>a 𠮷 b</think> The own fox"), EOS]
    async with serving(lambda request: steps(ids)) as first, serving(lambda request: steps(ids)) as second:
        await first.scheduler.pause(after_steps=6)
        gateway = Gateway(first)
        await gateway.send(open_chat(1, request_id="r", stop=["fox jumps"]))
        while 1 not in gateway.heard or len(gateway.heard[1].token_ids.get(0, ())) < 6:
            await gateway.read()
        gateway.call.cancel()
        heard = gateway.heard[1]
        options: dict[str, Any] = {"request_id": "r", "stop": ["fox jumps"], "attempt": 1}
        command = open_chat(7, **options)
        resume = command.chat.options.resume
        resume.num_prompt_tokens = heard.accepted.num_prompt_tokens
        resume.prompt_digest = heard.accepted.prompt_digest
        resume.seed = heard.accepted.seed
        resume.template_time_unix_s = heard.accepted.template_time_unix_s
        resume.choices.add(choice_index=0, token_ids=pack_token_ids(heard.token_ids[0]))
        other = Gateway(second)
        other.heard[7] = heard
        await other.send(command)
        await other.read_until([7])
    assert heard.token_ids == {0: ids}
    assert heard.reasoning == {0: "a 𠮷 b"}
    assert heard.content == {0: "The own fox"}


async def test_a_request_that_has_ended_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered, cancelled or lost with its session: in no cycle, so its memory is free at once."""
    runs: list[weakref.ref[TextRun]] = []
    start = TextRun.start

    def noting(run: TextRun) -> None:
        runs.append(weakref.ref(run))
        start(run)

    monkeypatch.setattr(TextRun, "start", noting)
    gc.collect()
    gc.disable()
    try:
        async with serving(lambda request: steps(tiny().encode("abc") * 200)) as stack:
            gateway = Gateway(stack)
            await gateway.send(*(open_chat(n, max_tokens=2) for n in range(1, 5)))
            await gateway.read_until(range(1, 5))
            await stack.scheduler.pause()
            await gateway.send(*(open_chat(n) for n in range(5, 13)))
            await stack.scheduler.wait_for(lambda: len(stack.scheduler.running) == 8)
            cancel = text_pb2.TextCommand(stream_id=5)
            cancel.cancel.SetInParent()
            await gateway.send(cancel)
            await stack.scheduler.wait_for(lambda: len(stack.scheduler.running) == 7)
            gateway.call.cancel()
            await stack.scheduler.wait_for(lambda: not stack.scheduler.running)
            assert len(runs) == 12
            async with asyncio.timeout(10):
                while any(run() is not None for run in runs):
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()
