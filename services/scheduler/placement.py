"""Which executor takes a newcomer, found without looking at all of them: by its first block, and by load."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from .executor_state import ExecutorState, Plan
from .sequence import Sequence
from .validation import Capacity

Placed: TypeAlias = tuple[ExecutorState, Plan]

_MIN_SWEEP = 1024


def cheapest_of(executors: Iterable[ExecutorState], seq: Sequence) -> Placed | None:
    """Where the least is to be computed and waited for. Of those without its prefix only the idlest is looked at."""
    best: Placed | None = None
    strangers: list[ExecutorState] = []
    for executor in executors:
        if not executor.fits(seq):
            continue
        if not executor.knows_prefix(seq):
            strangers.append(executor)
        elif (plan := executor.plan(seq)) is not None and (best is None or plan.cost < best[1].cost):
            best = executor, plan
    strangers.sort(key=ExecutorState.load)
    for executor in strangers:
        if (plan := executor.plan(seq)) is not None:
            return (executor, plan) if best is None or plan.cost < best[1].cost else best
    return best


class Placement:
    """The executors of a core, indexed. `refresh` one after it changed; what has become untrue is dropped when met.

    `cheapest` is `cheapest_of` all of them, but costs what the few that matter cost: those that have seen the first
    block of the newcomer, and of the rest the idlest that has room. Full ones leave the heap until they change.
    """

    __slots__ = ("_by_first_block", "_by_load", "_executors", "_num_entries", "_sweep_at", "_tickets", "capacities")

    def __init__(self) -> None:
        self.capacities: Counter[Capacity] = Counter()  # how many executors of each kind
        self._executors: dict[int, ExecutorState] = {}
        self._by_first_block: dict[bytes, dict[int, ExecutorState]] = {}  # identity -> link id -> executor
        self._num_entries = 0
        self._sweep_at = _MIN_SWEEP
        self._by_load: list[tuple[int, int, int, ExecutorState]] = []  # (load, link id, ticket, executor)
        self._tickets = 0

    def add(self, executor: ExecutorState) -> None:
        self._executors[executor.link_id] = executor
        self.capacities[executor.capacity] += 1
        self.refresh(executor)

    def remove(self, executor: ExecutorState) -> None:
        del self._executors[executor.link_id]
        executor.heap_ticket = 0
        self.capacities[executor.capacity] -= 1
        if not self.capacities[executor.capacity]:
            del self.capacities[executor.capacity]

    def refresh(self, executor: ExecutorState) -> None:
        """Take in what happened to `executor`: first blocks that it has now, more room, less load."""
        if executor.new_first_blocks:
            for block_hash in executor.new_first_blocks:
                known = self._by_first_block.setdefault(block_hash, {})
                self._num_entries += executor.link_id not in known
                known[executor.link_id] = executor
            executor.new_first_blocks = []
            if self._num_entries >= self._sweep_at:
                self._sweep()
        if executor.is_full:
            executor.heap_ticket = 0
        else:
            load = executor.load()
            # A load that has grown is seen when the entry comes up.
            if not executor.heap_ticket or load < executor.heap_load:
                self._push(executor, load)

    def cheapest(self, seq: Sequence) -> Placed | None:
        """See the class's docstring."""
        best: Placed | None = None
        knowing = self._knowing(seq)
        for executor in knowing:
            if (
                executor.fits(seq)
                and (plan := executor.plan(seq)) is not None
                and (best is None or plan.cost < best[1].cost)
            ):
                best = executor, plan
        stranger = self._idlest(seq, {executor.link_id for executor in knowing})
        if stranger is not None and (best is None or stranger[1].cost < best[1].cost):
            return stranger
        return best

    def _knowing(self, seq: Sequence) -> list[ExecutorState]:
        """Executors that hold or compute the first block of `seq`, by link id."""
        known = self._by_first_block.get(seq.hashes[0]) if seq.hashes else None
        if not known:
            return []
        found: list[ExecutorState] = []
        for link_id, executor in sorted(known.items()):
            if link_id in self._executors and executor.knows(seq.hashes[0]):
                found.append(executor)
            else:
                del known[link_id]
                self._num_entries -= 1
        if not known:
            del self._by_first_block[seq.hashes[0]]
        return found

    def _idlest(self, seq: Sequence, but: set[int]) -> Placed | None:
        """The plan of the least loaded executor that can take `seq` now, except on the links of `but`."""
        heap, aside = self._by_load, []
        found: Placed | None = None
        while heap and found is None:
            load, link_id, ticket, executor = heap[0]
            if executor.heap_ticket != ticket:
                heapq.heappop(heap)
            elif executor.is_full:
                heapq.heappop(heap)
                executor.heap_ticket = 0
            elif (now := executor.load()) != load:
                heapq.heapreplace(heap, (now, link_id, ticket, executor))
                executor.heap_load = now
            elif link_id in but or not executor.fits(seq) or (plan := executor.plan(seq)) is None:
                aside.append(heapq.heappop(heap))
            else:
                found = executor, plan
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def _push(self, executor: ExecutorState, load: int) -> None:
        self._tickets += 1
        executor.heap_ticket, executor.heap_load = self._tickets, load
        heapq.heappush(self._by_load, (load, executor.link_id, self._tickets, executor))
        if len(self._by_load) > 2 * len(self._executors) + _MIN_SWEEP:
            self._by_load = [entry for entry in self._by_load if entry[3].heap_ticket == entry[2]]
            heapq.heapify(self._by_load)

    def _sweep(self) -> None:
        """Forget first blocks that were evicted, so that the index stays as small as what is cached."""
        self._by_first_block = {
            block_hash: left
            for block_hash, known in self._by_first_block.items()
            if (left := {i: e for i, e in known.items() if i in self._executors and e.knows(block_hash)})
        }
        self._num_entries = sum(map(len, self._by_first_block.values()))
        self._sweep_at = 2 * self._num_entries + _MIN_SWEEP

    def check(self) -> None:
        """AssertionError unless whatever `cheapest_of` all executors could find would be found."""
        entries = {ticket: (load, executor) for load, _, ticket, executor in self._by_load}
        for executor in self._executors.values():
            assert not executor.new_first_blocks
            if not executor.is_full:
                load, owner = entries[executor.heap_ticket]
                assert owner is executor
                assert load == executor.heap_load <= executor.load(), "an executor is less loaded than the heap says"
        assert self._num_entries == sum(map(len, self._by_first_block.values()))
