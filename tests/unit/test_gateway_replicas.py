"""Which replica takes a request. Nothing is dialled: states and loads are set by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from gateway.upstream.link import SessionLink, core_of
from gateway.upstream.replicas import Replica, ReplicaSet, State
from rorqual.core.errors import ModelNotFoundError, UnavailableError
from rorqual.v1 import common_pb2, text_pb2


class ManualClock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_s(self) -> float:
        return self.now_s


class FakeLink:
    heard = True
    silent_s = 0.0
    closed = False

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams


@pytest.fixture
async def replicas() -> AsyncIterator[ReplicaSet]:
    replicas = ReplicaSet(["a:1", "b:2", "c:3", "a:1"], peer_timeout_s=5.0, clock=ManualClock())
    assert [replica.address for replica in replicas.replicas] == ["a:1", "b:2", "c:3"]
    for replica, load in zip(replicas.replicas, (3, 1, 1), strict=True):
        set_state(replica, State.READY, load)
    yield replicas
    await replicas.stop()


def set_state(replica: Replica, state: State, load: int | None = 0, *models: str) -> None:
    replica.state = state
    replica.link = None if load is None else cast(SessionLink, FakeLink(load))
    infos = [common_pb2.ModelInfo(name=name) for name in models or ("m",)]
    replica.models = (text_pb2.ListModelsResponse(models=infos),)


def picked(replicas: ReplicaSet, model: str = "", *, ready_only: bool = True, avoid: tuple[str, ...] = ()) -> str:
    replica = replicas.pick(model, ready_only=ready_only, avoid=frozenset(avoid))
    return replica.address if replica is not None else ""


async def test_the_least_loaded_takes_it_and_equals_take_turns(replicas: ReplicaSet) -> None:
    assert {picked(replicas) for _ in range(6)} == {"b:2", "c:3"}
    assert picked(replicas, avoid=("b:2", "c:3")) == "a:1"
    assert picked(replicas, avoid=("a:1", "b:2", "c:3")) == ""


async def test_a_ready_one_goes_before_an_idle_one_that_is_not(replicas: ReplicaSet) -> None:
    a, b, c = replicas.replicas
    set_state(b, State.NOT_READY)
    set_state(c, State.NOT_READY)
    assert picked(replicas) == "a:1"
    set_state(a, State.UNREACHABLE)
    assert picked(replicas) == ""
    assert picked(replicas, ready_only=False) in ("b:2", "c:3")
    set_state(b, State.READY, None)
    set_state(c, State.READY, None)
    assert picked(replicas, ready_only=False) == ""
    assert not replicas.ready


async def test_a_silent_one_is_left_alone(replicas: ReplicaSet) -> None:
    for replica in replicas.replicas[1:]:
        cast(FakeLink, replica.link).silent_s = 11.0
    assert picked(replicas) == "a:1"
    assert "silent for 11 s" in replicas.causes()["b:2"]


async def test_only_who_serves_the_model_is_asked(replicas: ReplicaSet) -> None:
    set_state(replicas.replicas[0], State.READY, 9, "other")
    assert picked(replicas, "other") == "a:1"
    assert picked(replicas, "m") != "a:1"
    replicas.check_model("other")
    replicas.check_model("")
    with pytest.raises(ModelNotFoundError, match="'none' is not served here; ask for 'other', 'm', or leave"):
        replicas.check_model("none")
    with pytest.raises(ModelNotFoundError):
        await replicas.acquire("none")


async def test_a_new_request_waits_only_while_the_outage_is_young() -> None:
    clock = ManualClock()
    replicas = ReplicaSet(["a:1"], peer_timeout_s=5.0, clock=clock)
    clock.now_s += 5.0
    with pytest.raises(UnavailableError) as caught:
        await replicas.acquire("")
    assert "a:1" in caught.value.message
    with pytest.raises(UnavailableError):
        await replicas.acquire("", until_s=clock.now_s)
    await replicas.stop()


def test_the_core_of_a_cause() -> None:
    wrapped = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: Connection refused"
    assert core_of(wrapped) == "connection refused"
    assert core_of("Socket closed") == "Socket closed"
