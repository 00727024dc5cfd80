"""A request that kills its executors ends with an error of its own; all others get their whole answer."""

from __future__ import annotations

import random

import pytest

from executor.sim.device import SimConfig, SimExecutor
from rorqual.core.errors import LethalRequestError
from rorqual.core.quarantine import PATIENCE_S
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import generation_pb2
from services.scheduler.core import CoreConfig
from services.scheduler.events import ExecutorLost
from services.scheduler.isolation import Isolation
from services.scheduler.stream_events import FinishReason
from tests.support.sim_world import IN_PREFILL, KILLER_SEED, Client, World, kills_after, random_action, random_config


def make_world(num_executors: int = 1, **config: int) -> World:
    world = World(random.Random(5))
    fields = {"max_num_seqs": 64, "num_blocks": 600, "max_num_batched_tokens": 64 + 256} | config
    for i in range(num_executors):
        world.connect(SimExecutor(SimConfig(executor_id=f"sim-{i}", vocab_size=97, max_model_len=700, **fields)))
    return world


def open_one(world: World, *, seed: int = 0, prompt: int = 20, max_tokens: int = 60) -> Client:
    proto = generation_pb2.GenerateRequest(
        request_id=f"r{len(world.clients)}",
        token_ids=pack_token_ids([len(world.clients) % 97, *([1] * (prompt - 1))]),
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
    )
    proto.sampling.seed = seed
    return world.open(proto)


@pytest.mark.parametrize("num_executors", [1, 2, 4])
@pytest.mark.parametrize("after", [0, 1, 5, 40, IN_PREFILL])
def test_a_killer_among_many_fails_alone(num_executors: int, after: int) -> None:
    world = make_world(num_executors)
    clients = [open_one(world, seed=i % 4) for i in range(30)]
    killer = open_one(world, seed=KILLER_SEED + after, prompt=600)
    clients += [open_one(world, seed=i % 4) for i in range(33)]
    world.run_to_end()
    assert isinstance(killer.error, LethalRequestError)
    assert "executor's log" in killer.error.message
    assert [client.finish for client in clients] == [FinishReason.LENGTH] * 63
    assert 3 <= world.num_deaths <= 8
    assert not world.core._isolation.is_active


def test_a_killer_alone_is_not_run_for_ever() -> None:
    world = make_world()
    killer = open_one(world, seed=KILLER_SEED)
    world.run_to_end()
    assert isinstance(killer.error, LethalRequestError)
    assert world.num_deaths == 3


def test_several_killers_among_many() -> None:
    world = make_world(2)
    clients = [open_one(world, seed=KILLER_SEED + 5 if i % 13 == 4 else 1) for i in range(40)]
    world.run_to_end()
    for client in clients:
        assert isinstance(client.error, LethalRequestError) == (kills_after(client.proto) is not None)
    assert world.num_deaths <= 6 * 3


def test_newcomers_wait_while_suspects_have_the_only_executor_and_use_the_others() -> None:
    world = make_world(2)
    for _ in range(2):
        open_one(world, seed=KILLER_SEED + 1)
    while not world.core._isolation.is_active:
        for link in list(world.links.values()):
            world.send(link)
            world.apply(link)
            world.step(link)
            if link.link_id in world.links:
                world.report(link)
        while world.dead:
            world.connect(world.dead.pop())
    held = [e for e in world.core._executors.values() if e.is_held]
    assert len(held) == 1  # half of them
    newcomers = [open_one(world) for _ in range(4)]
    assert world.core.occupancy().num_running == 2 + 4
    assert not any(seq.request.seed == 0 for seq in held[0].sequences.values())
    world.run_to_end()
    assert all(client.finish for client in newcomers)


def test_a_link_that_ends_by_the_executors_own_fault_blames_nobody() -> None:
    world = make_world()
    client = open_one(world)
    for _ in range(10):
        (link,) = world.links.values()
        world.send(link)
        world.apply(link)
        del world.links[link.link_id]
        link.sim.reset()
        world.handle(ExecutorLost(link.link_id, is_its_own_fault=True))
        assert not client.ended
        world.connect(link.sim)
    world.run_to_end()


def test_an_executor_that_says_hello_again_blames_nobody() -> None:
    """Its link broke before the scheduler noticed, but the process lives: no request ended it."""
    world = make_world()
    client = open_one(world)
    for _ in range(10):
        (link,) = world.links.values()
        world.send(link)
        world.apply(link)
        del world.links[link.link_id]
        link.sim.reset()
        world.connect(link.sim)
        assert not client.ended
    world.run_to_end()
    assert client.finish is FinishReason.LENGTH


def test_suspects_whose_executor_stays_away_get_another_one_emptied() -> None:
    world = make_world(2)
    suspect = open_one(world)
    busy = open_one(world, max_tokens=600)
    for _ in range(2):  # the suspect's executor dies twice; the second time both are on one
        (link_id,) = {s.executor.link_id for s in world.core._streams.values() if s.stream_id == suspect.stream_id}
        if world.core._streams[busy.stream_id].executor.link_id == link_id and len(world.links) > 1:
            pytest.fail("both began on one executor")
        sim = world.lose(world.links[link_id], keep_cache=False)
        if len(world.links) == 0:
            world.connect(sim)
    assert world.core._isolation.num_suspects or world.core._isolation.is_active
    world.pass_time(PATIENCE_S)
    world.run_to_end()
    assert suspect.finish is busy.finish is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(12))
def test_killers_in_any_order_of_events_blame_nobody_else(seed: int) -> None:
    """As the fuzz, without links that break by themselves: then only killers may fail with this error."""
    rng = random.Random(9_000 + seed)
    world = World(rng, CoreConfig(max_queue_len=1000))
    world.killer_share = 0.15
    first = random_config(rng)
    for i in range(rng.choice((1, 2, 3))):
        world.connect(SimExecutor(SimConfig(**{**vars(first), "executor_id": f"sim-{i}"})))
    world.links_break = False
    spare: list[SimExecutor] = []
    for _ in range(800):
        random_action(world, spare)
    while spare:
        world.connect(spare.pop())
    world.run_to_end()
    lethal = [client for client in world.clients.values() if isinstance(client.error, LethalRequestError)]
    assert world.num_deaths > 0
    if world.num_other_losses == 0:  # a killer that was cancelled kills until its Drop arrives
        assert all(kills_after(client.proto) is not None for client in lethal)


def test_without_isolation_a_killer_would_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Isolation, "on_lost", lambda *_args, **_kwargs: set())
    world = make_world()
    open_one(world, seed=KILLER_SEED)
    with pytest.raises(AssertionError, match="streams do not end"):
        world.run_to_end(max_rounds=200)
    assert world.num_deaths > 50
