"""Cache groups of three kinds under one scheduler: all blocks kept, a sliding window, a state with snapshots."""

from __future__ import annotations

import random
from typing import Any

import pytest

from executor.sim.device import SimConfig, SimExecutor
from executor.sim.memory import SimGroup
from rorqual.core.blocks import NO_BLOCK
from rorqual.core.errors import InvalidRequestError, PreconditionError
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.core import CoreConfig
from services.scheduler.events import GroupSpec, InventoryBlock
from services.scheduler.executor_contract import spec_from_hello
from services.scheduler.kv_cache import KvCache, Share
from services.scheduler.orders import Admit, Extend, Label, Order, Prefill
from services.scheduler.wire import fill_batch
from tests.support.sim_world import Client, Link, World

FULL, WINDOW, STATE = 0, 1, 2
VOCAB = 97


def make_sim(*, window: int = 100, num_window: int = 40, num_state: int = 40, num_slots: int = 1, **sim: Any) -> Any:
    groups = (
        SimGroup(name="window", num_blocks=num_window, window=window),
        SimGroup(name="state", num_blocks=num_state, slots_per_sequence=num_slots, prefix_multiple=128),
    )
    defaults = {"num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 264, "max_model_len": 4096}
    return SimExecutor(SimConfig(vocab_size=VOCAB, more_groups=groups, **{**defaults, **sim}))


def make_world(config: CoreConfig | None = None, **sim: Any) -> tuple[World, Link]:
    world = World(random.Random(0), config)
    return world, world.connect(make_sim(**sim))


def ask(world: World, num_prompt: int, *, name: str = "r", max_tokens: int = 5, priority: int = 0) -> Client:
    proto = generation_pb2.GenerateRequest(
        request_id=f"{name}{len(world.clients)}",
        token_ids=pack_token_ids((3 * i + len(name)) % VOCAB for i in range(num_prompt)),
        num_prompt_tokens=num_prompt,
        max_tokens=max_tokens,
        sampling=common_pb2.SamplingParams(seed=1),
        priority=priority,
    )
    return world.open(proto)


def turn(world: World, link: Link) -> list[Order]:
    """Orders out, a step, and its report."""
    taken = world.core.take_batch(link.link_id)
    if taken is not None:
        batch = executor_pb2.OrderBatch()
        fill_batch(batch, *taken)
        link.sim.apply(executor_pb2.OrderBatch.FromString(batch.SerializeToString()))
    world.step(link)
    world.report(link)
    return taken[1] if taken is not None else []


def until_ended(world: World, link: Link, *clients: Client) -> list[Order]:
    sent: list[Order] = []
    for _ in range(2000):
        if all(client.ended for client in clients):
            return sent
        sent += turn(world, link)
    raise AssertionError("the streams do not end")


def of(kind: type, sent: list[Order]) -> list[Any]:
    return [order for order in sent if isinstance(order, kind)]


def shares_of(world: World, link: Link) -> list[Share]:
    executor = world.core.executor(link.link_id)
    assert executor is not None
    (seq,) = executor.sequences.values()
    return seq.shares


def test_all_three_at_once() -> None:
    """A history of 1,000 tokens: every block of one group, four of the window's pool, two of the state's."""
    world, link = make_world(num_window=4, num_state=2, num_blocks=20)
    client = ask(world, 700, max_tokens=300)
    sent = turn(world, link)
    (admit,) = of(Admit, sent)
    assert len(admit.block_tables[FULL]) >= 11
    assert admit.block_tables[WINDOW] == [], "its blocks come with each chunk"
    assert len(admit.block_tables[STATE]) == 1, "the slot; snapshots come with each chunk"
    most = 0
    while not client.ended:
        sent += turn(world, link)
        if not client.ended:
            window, state = shares_of(world, link)
            most = max(most, window.num_held)
            assert state.num_held <= 2
    assert most == 4, "a window of 100 tokens, the block being written, and one ahead"
    tables = [list(table) for table in admit.block_tables]
    for extend in of(Extend, sent):
        for table, new in zip(tables, extend.block_tables, strict=True):
            table.extend(new)
    assert [len(table) for table in tables] == [16, 16, 1 + 8]
    assert len(set(tables[WINDOW])) == 4, "four blocks hold all of it in turn"
    slot, *snapshots = tables[STATE]
    assert set(snapshots) - {NO_BLOCK} == {1 - slot}, "the other block takes a snapshot whenever it is free"
    chunks = [(chunk.start, chunk.end) for chunk in of(Prefill, sent)]
    assert chunks[0] == (0, 256), "the whole pool is free for it"
    assert [end - start for start, end in chunks[1:]] == [128, 128, 128, 60], "then what its window leaves"
    assert len(client.tokens) == 300
    assert link.sim.num_paused_steps < 30


def test_a_hit_is_what_all_groups_can_serve() -> None:
    world, link = make_world()
    until_ended(world, link, ask(world, 700))
    (admit,) = of(Admit, until_ended(world, link, ask(world, 700)))
    assert admit.num_cached_tokens == 640, "the last multiple of 128"
    assert admit.block_tables[WINDOW][:8] == [NO_BLOCK] * 8
    assert NO_BLOCK not in admit.block_tables[WINDOW][8:10], "of the last 100 tokens two blocks are needed"
    assert admit.block_tables[STATE][1:5] == [NO_BLOCK] * 4
    assert admit.block_tables[STATE][5] != NO_BLOCK, "the snapshot that is restored"
    (admit,) = of(Admit, until_ended(world, link, ask(world, 300)))
    assert admit.num_cached_tokens == 256, "any earlier multiple serves as well"


def test_generated_tokens_are_found_again() -> None:
    world, link = make_world()
    first = ask(world, 200, max_tokens=250)
    until_ended(world, link, first)
    proto = generation_pb2.GenerateRequest()
    proto.CopyFrom(first.proto)
    proto.request_id = "next turn"
    proto.token_ids += pack_token_ids(first.tokens)
    proto.num_prompt_tokens = 450
    (admit,) = of(Admit, until_ended(world, link, world.open(proto)))
    assert admit.num_cached_tokens == 384


def test_hits_of_what_is_left() -> None:
    """Blocks and snapshots of a prefix of 640 tokens, and what goes missing."""
    hashes = [bytes([i]) * 32 for i in range(10)]
    specs = [
        GroupSpec("full", 10),
        GroupSpec("window", 10, window=100),
        GroupSpec("state", 6, slots_per_sequence=1, prefix_multiple=128),
    ]

    def matched(*missing: tuple[int, int]) -> int:
        blocks = [InventoryBlock(group, i, hashes[i], 0) for group in (FULL, WINDOW) for i in range(10)]
        blocks += [InventoryBlock(STATE, i, hashes[2 * i + 1], 0) for i in range(5)]
        left = [b for b in blocks if (b.group_idx, hashes.index(b.block_hash)) not in missing]
        return KvCache(specs, left).num_matched(hashes, 10)

    assert matched() == 10
    assert matched((FULL, 9)) == 8
    assert matched((FULL, 0)) == 0
    assert matched((WINDOW, 9)) == 8
    assert matched((WINDOW, 7)) == 10, "outside the window of 100 tokens before 640"
    assert matched((WINDOW, 8)) == 8
    assert matched((STATE, 9)) == 8
    assert matched((STATE, 9), (STATE, 7), (WINDOW, 5)) == 4
    assert matched(*((STATE, i) for i in (1, 3, 5, 7, 9))) == 0


def test_followers_wait_for_a_snapshot() -> None:
    """Prompts that arrive together compute what they share once, up to the last multiple."""
    world, link = make_world()
    clients = [ask(world, 400) for _ in range(3)]
    admits = of(Admit, until_ended(world, link, *clients))
    assert sorted(admit.num_cached_tokens for admit in admits) == [0, 384, 384]


def test_a_state_needs_a_slot_and_a_snapshot_set_aside() -> None:
    world, link = make_world(num_state=4, num_slots=1)
    clients = [ask(world, 50, name="x" * i, max_tokens=200) for i in range(1, 4)]
    turn(world, link)
    assert world.core.occupancy().num_running == 2
    until_ended(world, link, *clients)


def test_a_better_class_displaces_for_a_slot() -> None:
    world, link = make_world(num_state=2)
    low = ask(world, 100, name="low", max_tokens=200, priority=1)
    turn(world, link)
    high = ask(world, 100, name="high", priority=0)
    until_ended(world, link, high)
    assert not low.ended
    assert world.core.stats.num_preemptions == 1
    until_ended(world, link, low)


def test_preemption_for_memory_gives_everything_back() -> None:
    world, link = make_world(num_blocks=12)
    clients = [ask(world, 100, name=name, max_tokens=500) for name in ("a", "bb")]
    until_ended(world, link, *clients)
    assert world.core.stats.num_preemptions > 0
    executor = world.core.executor(link.link_id)
    assert executor is not None
    assert [group.pool.num_free for group in executor.cache.groups] == [12, 40, 40]
    assert [group.charged for group in executor.cache.bounded] == [0, 0]


def test_an_inventory_brings_every_group_back() -> None:
    world, link = make_world()
    until_ended(world, link, ask(world, 700))
    link = world.connect(world.lose(link))
    (admit,) = of(Admit, until_ended(world, link, ask(world, 700)))
    assert admit.num_cached_tokens == 640


def test_a_fault_takes_back_windows_and_snapshots() -> None:
    world, link = make_world()
    first = ask(world, 400, max_tokens=100)
    while len(first.tokens) < 50:
        turn(world, link)
    link.sim.fault(next(iter(link.sim.sequences)), "a NaN")
    world.report(link)
    assert first.ended
    (admit,) = of(Admit, until_ended(world, link, ask(world, 400)))
    assert admit.num_cached_tokens == 0


def test_why_a_prefix_was_missed() -> None:
    """What a group gave up was evicted, whatever the others still have; the rest is told from whole multiples."""
    world, link = make_world(num_state=3)
    until_ended(world, link, ask(world, 700, max_tokens=200))
    until_ended(world, link, ask(world, 400), ask(world, 700), ask(world, 120, name="other"))
    assert world.core.stats.num_prefix_misses == {"never seen": 1, "evicted": 2}
    world, link = make_world()
    first = ask(world, 700)
    until_ended(world, link, first)
    proto = generation_pb2.GenerateRequest()
    proto.CopyFrom(first.proto)
    proto.request_id, proto.token_ids = "branch", proto.token_ids[: 4 * 200] + bytes(4 * 300)
    proto.num_prompt_tokens = 500
    (admit,) = of(Admit, until_ended(world, link, world.open(proto)))
    assert admit.num_cached_tokens == 128
    assert world.core.stats.num_prefix_misses == {"never seen": 1, "diverged": 1}


def test_labels_of_one_report_are_one_order_a_group() -> None:
    world, link = make_world(max_num_batched_tokens=8 + 1024)
    client = ask(world, 700)
    turn(world, link)
    labels = of(Label, turn(world, link))
    assert [(label.group_idx, len(label.block_ids)) for label in labels] == [(FULL, 10), (WINDOW, 10), (STATE, 5)]
    until_ended(world, link, client)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda groups: groups.pop(0), PreconditionError),
        (lambda groups: setattr(groups[1], "slots_per_sequence", 1), PreconditionError),
        (lambda groups: setattr(groups[2], "prefix_multiple", 100), PreconditionError),
        (lambda groups: setattr(groups[2], "prefix_multiple", 1), InvalidRequestError),
        (lambda groups: setattr(groups[2], "block_size", 64), InvalidRequestError),
        (lambda groups: setattr(groups[1], "block_size", 128), InvalidRequestError),
        (lambda groups: setattr(groups[1], "num_blocks", 3), InvalidRequestError),
        (lambda groups: setattr(groups[2], "num_blocks", 1), InvalidRequestError),
    ],
)
def test_groups_that_cannot_be_accounted_for_are_refused(change: Any, error: type[Exception]) -> None:
    hello = make_sim().hello()
    assert [spec.is_bounded for spec in spec_from_hello(hello).groups] == [False, True, True]
    change(hello.cache_groups)
    with pytest.raises(error):
        spec_from_hello(hello)
