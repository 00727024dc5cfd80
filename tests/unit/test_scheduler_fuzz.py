"""The scheduler core against simulated executors, in any order of events, and with faults planted in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.scheduler.fuzz import fuzz
from executor.sim.device import ContractError, SimConfig, SimExecutor
from executor.sim.memory import DRAFT, GroupMemory
from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.executor_state import ExecutorState
from services.scheduler.kv_cache import BoundedGroup, KvCache, Share
from services.scheduler.orders import Copy, Prefill
from services.scheduler.placement import cheapest_of
from services.scheduler.sequence import Sequence
from tests.support.sim_world import World, random_action, random_groups, random_run


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_any_short_history(rng: random.Random) -> None:
    """Sizes and order are hypothesis' own, so that a failure shrinks to a few actions."""
    world = World(rng, CoreConfig(max_queue_len=20))
    config = SimConfig(
        num_blocks=8,
        max_num_seqs=3,
        max_num_batched_tokens=131,
        max_model_len=400,
        vocab_size=97,
        more_groups=random_groups(rng),
    )
    world.connect(SimExecutor(config))
    spare = [SimExecutor(SimConfig(**{**vars(config), "executor_id": "sim-1"}))]
    for _ in range(40):
        random_action(world, spare)
    while spare:
        world.connect(spare.pop())
    world.run_to_end()


@pytest.mark.parametrize("part", range(5))
def test_long_histories(part: int) -> None:
    """10^5 events in all, each run from a seed of its own that the failure names."""
    num_events, num_runs = fuzz(20_000, 10_000 * part)
    assert num_events >= 20_000
    assert num_runs < 10_000, "the parts have seeds in common"


def test_the_index_places_where_a_look_at_all_executors_would(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checked = 0
    original = SchedulerCore._cheapest_plan

    def cheapest_plan(self: SchedulerCore, seq: Sequence) -> Any:
        nonlocal num_checked
        found = original(self, seq)
        # A full one may still serve a better class than those that wait there: the core tries that next.
        everyone = [
            e for e in self._executors.values() if self._was_refused(seq) or not e.is_full or e.knows_prefix(seq)
        ]
        assert found == cheapest_of(everyone, seq)
        num_checked += found is not None
        return found

    monkeypatch.setattr(SchedulerCore, "_cheapest_plan", cheapest_plan)
    monkeypatch.setattr(SchedulerCore, "check", lambda _self: None)  # test_long_histories does, of these runs too
    for seed in range(16):
        random_run(random.Random(seed), 400)
    assert num_checked > 500


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


def _forget_a_chunk_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose blocks a follower wants is never sent."""
    original = ExecutorState.send_chunks

    def send_chunks(self: ExecutorState) -> None:
        original(self)
        followed = {s.seq_id for h, s in self._computing.items() if h in self._by_hash_followers}
        for orders in self._orders._batches:
            orders[:] = [o for o in orders if not (isinstance(o, Prefill) and o.seq_id in followed)]

    monkeypatch.setattr(ExecutorState, "send_chunks", send_chunks)


def _lose_the_write_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor says that the first chunk of a prompt is computed, and never wrote it."""
    original = SimExecutor._run_chunk

    def run_chunk(self: SimExecutor, chunk: Any, step: Any) -> None:
        blocks = self.memory[0].blocks
        before = {b: bytes(blocks[b]) for b in self.sequences[chunk.seq_id].tables[0].ids}
        original(self, chunk, step)
        if chunk.start == 0 and chunk.seq_id in self.sequences:
            for block_id, content in before.items():
                blocks[block_id][:] = content

    monkeypatch.setattr(SimExecutor, "_run_chunk", run_chunk)


def _count_drafts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rejected drafts wrote is labelled as if it were the history."""
    original = ExecutorState.note_tokens

    def note_tokens(self: ExecutorState, seq: Sequence) -> None:
        original(self, seq)
        seq.num_computed += self.spec.num_draft_tokens
        self._label_complete(seq)

    monkeypatch.setattr(ExecutorState, "note_tokens", note_tokens)


def _keep_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor does not overwrite what a rejected draft wrote."""
    original = GroupMemory._put

    def put(self: GroupMemory, block_id: int, at: int, data: bytes) -> None:
        if self.blocks[block_id][at : at + 4] != DRAFT:
            original(self, block_id, at, data)

    monkeypatch.setattr(GroupMemory, "_put", put)


def _keep_labels_of_written_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evicted block can still be found."""
    from services.scheduler.block_pool import BlockPool

    def forget(self: BlockPool, block_id: int) -> None:
        self._hashes[block_id] = None

    monkeypatch.setattr(BlockPool, "_forget", forget)


def _end_where_the_executor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that has outgrown its executor is over."""
    monkeypatch.setattr(SchedulerCore, "_runs_on_elsewhere", lambda _self, _seq: False)


def _copy_a_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sibling's block one token of the prompt is left out."""
    original = ExecutorState.admit

    def admit(self: ExecutorState, *args: Any) -> None:
        original(self, *args)
        orders = self._orders._batches[-1]
        orders[:] = [replace(o, num_tokens=o.num_tokens - 1) if isinstance(o, Copy) else o for o in orders]

    monkeypatch.setattr(ExecutorState, "admit", admit)


def _copy_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling's block is copied as soon as its chunk is sent."""
    original = ExecutorState._copy_source

    def copy_source(self: ExecutorState, seq: Sequence, num_matched: int) -> Sequence | None:
        sibling = self._siblings.get(seq.request.request_id)
        if sibling is None:
            return None
        before, sibling.num_computed = sibling.num_computed, max(sibling.num_computed, sibling.num_sent)
        try:
            return original(self, seq, num_matched)
        finally:
            sibling.num_computed = before

    monkeypatch.setattr(ExecutorState, "_copy_source", copy_source)


def _copy_from_one_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling that has ended still counts as a source."""
    original = ExecutorState.leave

    def leave(self: ExecutorState, seq: Sequence) -> None:
        request_id = seq.request.request_id
        is_first = self._siblings.get(request_id) is seq
        original(self, seq)
        if is_first:
            self._siblings[request_id] = seq

    monkeypatch.setattr(ExecutorState, "leave", leave)


def _place_without_asking_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history goes to an executor that is too small for it, or takes no grammars."""
    monkeypatch.setattr(ExecutorState, "fits", lambda _self, _seq: True)


def _give_back_too_early(monkeypatch: pytest.MonkeyPatch, window: bool) -> None:
    """A block leaves a window, or a snapshot its sequence, a block before its time."""
    original = Share.give_back

    def give_back(self: Share, num_computed: int) -> None:
        is_window = self.group.window > 0
        original(self, num_computed + 64 * self.group.span if is_window == window else num_computed)

    monkeypatch.setattr(Share, "give_back", give_back)


def _shrink_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    _give_back_too_early(monkeypatch, window=True)


def _give_snapshots_back_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    _give_back_too_early(monkeypatch, window=False)


def _release_slots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a state are free again as soon as they are handed out."""
    original = BoundedGroup.admit

    def admit(self: BoundedGroup, hashes: list[bytes], max_blocks: int) -> Share:
        share = original(self, hashes, max_blocks)
        self.pool.release(share.table[: self.num_slots])
        return share

    monkeypatch.setattr(BoundedGroup, "admit", admit)


def _take_up_between_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit ends at any block, as if the state were kept for each."""
    original = KvCache.__init__

    def init(self: KvCache, *args: Any) -> None:
        original(self, *args)
        self.unit = 1

    monkeypatch.setattr(KvCache, "__init__", init)


def _look_at_a_windows_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit needs only the last block of a window."""
    monkeypatch.setattr(BoundedGroup, "_first_needed", lambda _self, num_blocks: max(0, num_blocks - 1))


def _label_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot gets the identity of the one before it."""
    original = BoundedGroup.labelled_as

    def labelled_as(self: BoundedGroup, table: list[int], block_idx: int) -> int:
        if not self.num_slots or (block_idx + 1) % self.span:
            return original(self, table, block_idx)
        at = self.num_slots + block_idx // self.span
        return table[min(at + 1, len(table) - 1)]

    monkeypatch.setattr(BoundedGroup, "labelled_as", labelled_as)


def _leave_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor does not restore the snapshot of the prefix that is taken up."""
    original = GroupMemory.admit

    def admit(self: GroupMemory, seq_id: int, ids: list[int], num_cached: int) -> Any:
        table = original(self, seq_id, ids, num_cached)
        if self.group.slots_per_sequence:
            self.blocks[ids[0]][:] = bytes(8)
        return table

    monkeypatch.setattr(GroupMemory, "admit", admit)


def _write_snapshots_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor takes a chunk's snapshots when all of it is computed."""
    original = GroupMemory.write

    def write(self: GroupMemory, table: Any, position: int, data: bytes) -> None:
        original(self, table, position, data)
        end, every, num_slots = position + len(data) // 4, self.group.entry_tokens, self.group.slots_per_sequence
        for at in range(position // every, end // every if num_slots else 0):
            self._put(table.ids[num_slots + at], 0, bytes(self.blocks[table.ids[0]]))

    monkeypatch.setattr(GroupMemory, "write", write)


def _keep_rejected_drafts_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GroupMemory.scribble

    def scribble(self: GroupMemory, table: Any, position: int) -> None:
        original(self, table, position)
        if self.group.slots_per_sequence:
            self._advance(table, DRAFT)

    monkeypatch.setattr(GroupMemory, "scribble", scribble)


@pytest.mark.parametrize(
    "plant",
    [
        _label_a_token_early,
        _label_when_sent,
        _admit_before_the_acknowledgement,
        _drop_without_an_order,
        _share_the_last_block,
        _lose_the_tail_of_a_preempted,
        _forget_a_chunk_that_others_wait_for,
        _lose_the_write_of_a_chunk,
        _count_drafts_as_computed,
        _keep_rejected_drafts,
        _keep_labels_of_written_blocks,
        _shrink_windows,
        _give_snapshots_back_unwritten,
        _release_slots_at_once,
        _take_up_between_snapshots,
        _look_at_a_windows_end_only,
        _label_the_next_snapshot,
        _leave_the_state_as_it_was,
        _write_snapshots_late,
        _keep_rejected_drafts_in_the_state,
        _place_without_asking_whether_it_fits,
        _end_where_the_executor_does,
        _copy_a_token_less,
        _copy_before_it_is_computed,
        _copy_from_one_that_has_left,
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
