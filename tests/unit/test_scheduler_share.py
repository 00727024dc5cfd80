"""No caller takes all of the queue, and what is remembered of callers is small."""

from __future__ import annotations

import pytest

from rorqual.core.config import SchedulerConfig, TelemetryConfig
from rorqual.core.errors import InternalError, PreconditionError, QueueFullError
from rorqual.telemetry import Telemetry
from rorqual.v1 import generation_pb2
from services.scheduler import engine as engine_module
from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.engine import Engine
from services.scheduler.events import Cancel, Open, Request
from services.scheduler.generation_service import _Session
from services.scheduler.prefix_memory import PrefixMemory
from services.scheduler.queue_share import QueueShare
from services.scheduler.sequence import Sequence
from services.scheduler.stream_events import StreamFailed
from services.scheduler.wire import _delta_head


def open_of(stream_id: int, owner: int) -> Open:
    return Open(stream_id, Request(request_id=f"r{stream_id}", num_prompt_tokens=1), bytes(4), owner)


def test_a_session_that_fills_the_queue_shuts_out_nobody() -> None:
    core = SchedulerCore(CoreConfig(max_queue_len=40))
    effects = core.handle_all([open_of(i, 1) for i in range(50_000)], 0.0)
    assert core.occupancy().num_waiting == 40  # alone it may have all
    assert len(effects.events) == 50_000 - 40
    for owner in (2, 3):
        newcomers = [open_of(100_000 * owner + i, owner) for i in range(50)]
        refused = core.handle_all(newcomers, 0.0).events
        assert len(refused) == 50 - 40 // owner  # an equal share
        assert all(isinstance(e, StreamFailed) and isinstance(e.error, QueueFullError) for e in refused)
    core.check()
    for owner in range(4, 60):
        core.handle_all([open_of(100_000 * owner + i, owner) for i in range(50)], 0.0)
    assert core.occupancy().num_waiting == 80  # twice the bound, whoever comes
    core.handle_all([Cancel(i) for i in range(50_000)], 0.0)
    core.check()


def test_shares_are_given_back() -> None:
    share = QueueShare(10)
    for _ in range(10):
        share.add(1)
    assert share.is_full(1, 10)
    assert not share.is_full(2, 10)
    for _ in range(10):
        share.remove(1)
    assert not share.is_full(1, 0)
    share.check(0)


def make_engine() -> Engine:
    return Engine(SchedulerConfig(), Telemetry("scheduler", TelemetryConfig()))


def frame(*stream_ids: int) -> generation_pb2.GenerationServiceSessionRequest:
    request = generation_pb2.GenerationServiceSessionRequest()
    for stream_id in stream_ids:
        command = request.commands.add(stream_id=stream_id)
        command.open.token_ids = bytes(4)
        command.open.num_prompt_tokens = 1
    return request


async def test_what_a_frame_opened_before_it_failed_ends_with_the_session() -> None:
    engine = make_engine()
    session = _Session(engine, "s")
    with pytest.raises(PreconditionError, match="used twice"):
        session._take(frame(1, 2, 1, 3))
    assert engine.core.occupancy().num_waiting == 2
    session.end()
    assert engine.core.occupancy().num_waiting == 0
    assert not engine._streams


async def test_an_error_in_the_middle_of_a_frame_fails_its_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    session = _Session(engine, "s")
    original = engine_module.request_from_proto
    count = 0

    def second_fails(*args: object, **kwargs: object) -> Request:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("a bug")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "request_from_proto", second_fails)
    session._take(frame(1, 2, 3))
    taken = await session._outbox.take()
    assert taken is not None
    ((local_id, event),) = taken[0]
    assert local_id == 2
    assert isinstance(event, StreamFailed)
    assert isinstance(event.error, InternalError)
    assert "a bug" not in event.error.message
    assert engine.core.occupancy().num_waiting == 2


async def test_an_error_inside_the_core_leaves_no_stream_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    session = _Session(engine, "s")
    original = Sequence.__init__

    def init(self: Sequence, stream_id: int, request: Request, *args: object) -> None:
        if request.request_id == "bad":
            raise ValueError("a bug")
        original(self, stream_id, request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Sequence, "__init__", init)
    session._take(frame(9))
    request = frame(1, 2, 3)
    request.commands[1].open.request_id = "bad"
    request.commands.add(stream_id=9).cancel.SetInParent()
    session._take(request)
    taken = await session._outbox.take()
    assert taken is not None
    kinds = {local_id: type(event).__name__ for local_id, event in taken[0]}
    assert kinds == {2: "StreamFailed", 3: "StreamFailed", 9: "StreamFinished"}  # 3 was not reached
    assert len(engine._streams) == engine.core.occupancy().num_waiting == 1


def test_a_long_salt_is_not_kept() -> None:
    memory = PrefixMemory()
    request = Request(request_id="r", num_prompt_tokens=64, cache_salt="s" * 1_000_000)
    seq = Sequence(1, request, bytes(256), 1, 0.0)
    seq.hashes = [bytes(32)]
    memory.remember(seq)
    assert [len(salt) for salt in memory._salts.values()] == [16]


def test_heads_of_deltas_are_kept_of_few_streams() -> None:
    for stream_id in range(10_000):
        _delta_head(stream_id, 4)
    assert _delta_head.cache_info().currsize <= 4096
