"""The scheduler core against simulated executors, in any order of events, and with faults planted in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.executor_state import ExecutorState
from services.scheduler.sequence import Sequence
from tests.support.sim_executor import ContractError, SimConfig, SimExecutor
from tests.support.sim_world import World, random_action, random_run


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_any_short_history(rng: random.Random) -> None:
    """Sizes and order are hypothesis' own, so that a failure shrinks to a few actions."""
    world = World(rng, CoreConfig(max_queue_len=20))
    config = SimConfig(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=131, max_model_len=400, vocab_size=97)
    world.connect(SimExecutor(config))
    spare = [SimExecutor(SimConfig(**{**vars(config), "executor_id": "sim-1"}))]
    for _ in range(40):
        random_action(world, spare)
    while spare:
        world.connect(spare.pop())
    world.run_to_end()


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed: int) -> None:
    num_events = 0
    rng = random.Random(seed)
    for _ in range(20):
        num_events += random_run(rng, 400).num_events
    assert num_events > 10_000


# -- planted faults: what the simulated executor is for ------------------------------------------------


def _label_a_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest token counts as computed."""

    def note_tokens(self: ExecutorState, seq: Sequence) -> None:
        if seq.num_computed < seq.prefill_end:
            self.note_computed(seq, seq.prefill_end)
        seq.num_computed = seq.num_tokens
        self._label_complete(seq)
        if seq.num_tokens >= seq.extend_at:
            self.grant(seq)
        seq.next_check = seq.num_tokens + 1

    monkeypatch.setattr(ExecutorState, "note_tokens", note_tokens)


def _label_when_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk counts as computed when it is sent."""
    original = ExecutorState.send_chunks

    def send_chunks(self: ExecutorState) -> None:
        original(self)
        for seq in self.sequences.values():
            self.note_computed(seq, seq.num_sent)

    monkeypatch.setattr(ExecutorState, "send_chunks", send_chunks)


def _admit_before_the_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped sequence goes back to the queue while it still reports."""

    def acknowledged(self: ExecutorState, _last_batch_id: int) -> list[Sequence]:
        done = [seq for _, _, seq in self.draining]
        self.draining.clear()
        return done

    monkeypatch.setattr(ExecutorState, "acknowledged", acknowledged)


def _drop_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out again while the executor still writes them."""
    monkeypatch.setattr(ExecutorState, "drop", ExecutorState.leave)


def _share_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit may take the whole history and leave nothing to compute."""
    monkeypatch.setattr(ExecutorState, "_num_sharable", staticmethod(lambda seq: seq.num_tokens // 64))


def _lose_the_tail_of_a_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a preempted sequence still reports does not enter its history."""
    original = ExecutorState.drain

    def drain(self: ExecutorState, seq: Sequence) -> None:
        original(self, seq)
        seq.history = _Deaf(seq.history)

    monkeypatch.setattr(ExecutorState, "drain", drain)


class _Deaf(bytearray):
    def __iadd__(self, _other: Any) -> _Deaf:  # type: ignore[override,misc]
        return self


def _keep_labels_of_written_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted block can still be found."""
    from services.scheduler.block_pool import BlockPool

    def forget(self: BlockPool, block_id: int) -> None:
        self._hashes[block_id] = None

    monkeypatch.setattr(BlockPool, "_forget", forget)


@pytest.mark.parametrize(
    "plant",
    [
        _label_a_token_early,
        _label_when_sent,
        _admit_before_the_acknowledgement,
        _drop_without_an_order,
        _share_the_last_block,
        _lose_the_tail_of_a_preempted,
        _keep_labels_of_written_blocks,
    ],
)
def test_planted_faults_are_caught(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Without the core's own checks: by tokens and orders alone, as a real executor would meet them."""
    plant(monkeypatch)
    monkeypatch.setattr(SchedulerCore, "check", lambda _self: None)
    for seed in range(60):
        try:
            random_run(random.Random(seed), 300)
        except (AssertionError, ContractError, LookupError, ValueError):
            return
    pytest.fail("the fault went unnoticed")
