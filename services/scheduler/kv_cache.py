"""The KV memory of one executor: its cache groups, and what a sequence holds in each.

A table of a group has an entry for every 64 tokens of the history, or for every multiple at which a state is
snapshot. There are three kinds of group:

- one that keeps *all* blocks: an admitted history has all its own, and grows as long as memory lasts;
- a sliding *window*: the blocks of the last `window` tokens; earlier ones are given back as the history goes on;
- a *state*: slots that a running sequence writes at every token, then snapshots of them, each held only until it is
  complete. Where memory is short an entry is NO_BLOCK: no snapshot is taken there.

Of the last two (`BoundedGroup`) a running sequence needs only so much, whatever its length. That much is set aside for
it when it is admitted, so it never stands still for want of it and nobody is preempted for it; what is left over
serves longer chunks, run-ahead and more snapshots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rorqual.core.blocks import BLOCK_SIZE, NO_BLOCK

from .block_pool import BlockPool
from .events import GroupSpec, InventoryBlock
from .orders import BlockTables


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold positions [0, num_tokens)."""
    return -(-num_tokens // BLOCK_SIZE)


class CacheGroup:
    """A group that keeps all blocks."""

    __slots__ = ("num_slots", "pool", "span")

    def __init__(self, spec: GroupSpec) -> None:
        self.pool = BlockPool(spec.num_blocks)
        self.num_slots = spec.slots_per_sequence  # they come first in a table
        self.span = spec.prefix_multiple // BLOCK_SIZE if self.num_slots else 1  # history blocks an entry stands for

    def labelled_as(self, table: list[int], block_idx: int) -> int:
        """The block of `table` whose identity is that of the history's block `block_idx`; NO_BLOCK where there is none."""
        if self.span > 1 and (block_idx + 1) % self.span:
            return NO_BLOCK
        return table[self.num_slots + block_idx // self.span]


class BoundedGroup(CacheGroup):
    """A group of which a running sequence needs a bounded part: a window, or a state (whose window is 0 tokens).

    `charged` is the sum over running sequences of what each holds, or of its quota where that is more; it never exceeds
    the pool. Shared blocks count for each of their users, so that much is free whoever leaves first.
    """

    __slots__ = ("_spec", "charged", "group_idx", "window")

    def __init__(self, group_idx: int, spec: GroupSpec) -> None:
        super().__init__(spec)
        self.group_idx = group_idx
        self.window = spec.window
        self.charged = 0
        self._spec = spec

    def num_short(self, max_blocks: int) -> int:
        """Blocks that are lacking to set aside what one more sequence needs; none if not above 0."""
        return self.charged + quota_of(self._spec, max_blocks) - self.pool.num_blocks

    def longest_hit(self, hashes: Sequence[bytes], num_blocks: int, unit: int) -> int:
        """The longest prefix of at most `num_blocks` blocks, a multiple of `unit`, that can be taken up here."""
        find, span = self.pool.find, self.span
        end = at = num_blocks - num_blocks % unit
        while at > self._first_needed(end):
            at -= 1
            if (at + 1) % span == 0 and find(hashes[at]) is None:
                end = at = at - at % unit
        return end

    def admit(self, hashes: Sequence[bytes], max_blocks: int) -> Share:
        """What a sequence starts with: its slots, and of the prefix `hashes` what it still needs."""
        num_cached = len(hashes)
        shared = self.pool.share(
            [hashes[i] for i in range(self._first_needed(num_cached), num_cached) if (i + 1) % self.span == 0]
        )
        start = num_cached // self.span - len(shared)
        table = self.pool.allocate(self.num_slots) + [NO_BLOCK] * start + shared
        share = Share(self, table, start, self.num_slots + len(shared), quota_of(self._spec, max_blocks))
        self.charged += share.charge
        return share

    def _first_needed(self, num_blocks: int) -> int:
        """The first history block that a prefix of `num_blocks` blocks needs here: a state, the one it ends with."""
        return max(0, min(num_blocks - 1, (num_blocks * BLOCK_SIZE - self.window) // BLOCK_SIZE))


@dataclass(slots=True)
class Share:
    """What a running sequence holds of a bounded group: its slots, and the entries of `table` from `start` on."""

    group: BoundedGroup
    table: list[int]  # the sequence's
    start: int  # entry, not counting the slots; those before it were given back, or never held
    num_held: int
    quota: int

    @property
    def charge(self) -> int:
        return max(self.quota, self.num_held)

    @property
    def num_entries(self) -> int:
        return len(self.table) - self.group.num_slots

    @property
    def room(self) -> int:
        """Blocks that it could be given now."""
        return self.charge - self.num_held + self.group.pool.num_blocks - self.group.charged

    @property
    def held(self) -> list[int]:
        num_slots = self.group.num_slots
        return self.table[:num_slots] + [b for b in self.table[num_slots + self.start :] if b != NO_BLOCK]

    def cover(self, num_blocks: int) -> list[int]:
        """Append entries up to the history's block `num_blocks`, as far as there is room; returns them.

        A state has all its entries, but where room is short only the last ones have a block: they serve longer hits.
        """
        group = self.group
        num_new = num_blocks // group.span - self.num_entries
        if num_new <= 0:
            return []
        num_given = min(num_new, self.room)
        new = group.pool.allocate(num_given)
        if group.num_slots:
            new = [NO_BLOCK] * (num_new - num_given) + new
        self.table += new
        self._hold(num_given)
        return new

    def give_back(self, num_computed: int) -> None:
        """Release what is not needed once positions below `num_computed` are in the cache."""
        group = self.group
        first = min(max(0, num_computed - group.window) // (BLOCK_SIZE * group.span), self.num_entries)
        if first > self.start:
            num_slots = group.num_slots
            passed = [b for b in self.table[num_slots + self.start : num_slots + first] if b != NO_BLOCK]
            group.pool.release(passed)
            self.start = first
            self._hold(-len(passed))

    def next_release(self, num_computed: int) -> int:
        """When `give_back` has the next block to release, as positions computed."""
        step = BLOCK_SIZE * self.group.span
        return num_computed + step - (num_computed - self.group.window) % step

    def release(self) -> None:
        """All of it."""
        self.group.pool.release(self.held)
        self.group.charged -= self.charge

    def _hold(self, change: int) -> None:
        before = self.charge
        self.num_held += change
        self.group.charged += self.charge - before


def quota_of(spec: GroupSpec, max_blocks: int) -> int:
    """Blocks of a bounded group that let a history of at most `max_blocks` blocks go on without a pause.

    Its slots and a snapshot; or its window, the block being written, and one more ahead.
    """
    return spec.slots_per_sequence + 1 if spec.slots_per_sequence else min(blocks_for(spec.window) + 2, max_blocks)


class KvCache:
    """The groups of one executor. A count of blocks is a count in every group that keeps all."""

    __slots__ = ("_full", "bounded", "groups", "lead", "num_blocks", "unit")

    def __init__(self, specs: Sequence[GroupSpec], inventory: Sequence[InventoryBlock] = ()) -> None:
        """ValueError unless a group keeps all blocks."""
        self.groups = tuple(
            BoundedGroup(i, spec) if spec.is_bounded else CacheGroup(spec) for i, spec in enumerate(specs)
        )
        self.bounded = tuple(group for group in self.groups if isinstance(group, BoundedGroup))
        self._full = tuple((i, group.pool) for i, group in enumerate(self.groups) if group not in self.bounded)
        if not self._full:
            raise ValueError("no cache group keeps all blocks")
        self.lead = self._full[0][0]  # every group that keeps all grows by the same blocks: one speaks for them
        self.num_blocks = min(pool.num_blocks for _, pool in self._full)
        self.unit = math.lcm(BLOCK_SIZE, *(spec.prefix_multiple or 1 for spec in specs)) // BLOCK_SIZE
        ordered = sorted(inventory, key=lambda block: block.last_used_us)
        for group_idx, group in enumerate(self.groups):
            group.pool.adopt((block.block_id, block.block_hash) for block in ordered if block.group_idx == group_idx)

    # -- what there is --------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, in the fullest group that keeps all."""
        full = self._full
        return full[0][1].num_free if len(full) == 1 else min(pool.num_free for _, pool in full)

    def holds(self, block_hash: bytes) -> bool:
        """Whether every group that keeps all has the block with that identity."""
        return all(pool.find(block_hash) is not None for _, pool in self._full)

    def num_matched(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """The longest prefix, in blocks, that every group can serve: at most `max_blocks`, a multiple of `unit`."""
        for _, pool in self._full:
            max_blocks = pool.num_matched(hashes, max_blocks)
        matched = max_blocks - max_blocks % self.unit
        before = -1
        while self.bounded and matched != before:  # what one group cannot serve, the others need not
            before = matched
            for group in self.bounded:
                matched = group.longest_hit(hashes, matched, self.unit)
        return matched

    def num_idle(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` (all matched) are on a free list, and leave it when they are shared."""
        most = 0
        for _, pool in self._full:
            ids = (pool.find(hashes[i]) for i in range(num_blocks))
            most = max(most, sum(1 for block_id in ids if block_id is not None and not pool.is_held(block_id)))
        return most

    def was_evicted(self, block_hash: bytes) -> bool:
        """Whether a prefix that ends with that block, and was not matched, was here lately: a group gave it up."""
        # Where all is kept it may still be there: then it is a window that has gone, or there was no room for a snapshot.
        return self.holds(block_hash) or any(group.pool.was_evicted(block_hash) for group in self.groups)

    # -- what a sequence holds ------------------------------------------------------------------------

    def admit(self, hashes: Sequence[bytes], max_blocks: int) -> tuple[BlockTables, list[Share]]:
        """The tables of a newcomer that takes up the prefix `hashes`; `num_short` of every bounded group is 0."""
        shares = [group.admit(hashes, max_blocks) for group in self.bounded]
        tables: BlockTables = [[] for _ in self.groups]
        for i, pool in self._full:
            tables[i] = pool.share(hashes)
        for share in shares:
            tables[share.group.group_idx] = share.table
        return tables, shares

    def grow(self, tables: BlockTables, shares: Sequence[Share], num_new: int, num_blocks: int) -> BlockTables:
        """`num_new` more blocks where all are kept; elsewhere entries up to block `num_blocks`. Returns what is new."""
        new: BlockTables = [[] for _ in self.groups]
        for i, pool in self._full:
            new[i] = pool.allocate(num_new)
            tables[i] += new[i]
        for share in shares:
            new[share.group.group_idx] = share.cover(num_blocks)
        return new

    def release(self, tables: BlockTables, shares: Sequence[Share]) -> None:
        """A sequence leaves."""
        for i, pool in self._full:
            pool.release(tables[i])
        for share in shares:
            share.release()

    def num_exclusive(self, tables: BlockTables) -> int:
        """Blocks that would become free, where all are kept, if this user released them."""
        return min(sum(1 for block_id in tables[i] if pool.num_refs(block_id) == 1) for i, pool in self._full)

    def check(self, holders: Iterable[tuple[BlockTables, Sequence[Share]]]) -> None:
        """AssertionError unless all blocks of all groups add up to what `holders` hold."""
        holders = list(holders)
        for group_idx, group in enumerate(self.groups):
            users: Counter[int] = Counter()
            if isinstance(group, BoundedGroup):
                shares = [share for _, of_one in holders for share in of_one if share.group is group]
                for share in shares:
                    assert share.num_held == len(share.held), "a share holds more or less than it says"
                    users.update(share.held)
                assert group.charged == sum(share.charge for share in shares) <= group.pool.num_blocks
            else:
                for tables, _ in holders:
                    users.update(tables[group_idx])
            group.pool.check(users)


def reach(shares: Sequence[Share], most: int) -> int:
    """The history's block up to which all windows among `shares` could be covered now, at most `most`."""
    return min([most, *(share.num_entries + share.room for share in shares if not share.group.num_slots)])


def num_covered(shares: Sequence[Share], most: int) -> int:
    """The history's block up to which all of `shares` have the entries of their tables, at most `most`."""
    for share in shares:
        most = min(most, (share.num_entries + 1) * share.group.span - 1)
    return most
