"""The blocks of one cache group of one executor: who uses them, and what the unused ones still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, labels, and a free list in least-recently-used order.

    A block is *blank* (free, no label), *cached* (free, labelled, evictable) or *held* (in use by one or more
    sequences). Sequences release their blocks last to first and use a child only together with its parents, so
    among cached blocks a child always stands before its parent: leaves are evicted first.
    """

    __slots__ = ("_blank", "_by_hash", "_cached", "_evicted", "_hashes", "_refs", "num_blocks", "num_evicted")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # the latest, at most as many as there are blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the block given back last is warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: blank or evictable."""
        return len(self._blank) + len(self._cached)

    def find(self, block_hash: bytes) -> int | None:
        """The block with that identity, held or cached."""
        return self._by_hash.get(block_hash)

    def is_held(self, block_id: int) -> bool:
        return self._refs[block_id] > 0

    def num_refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def num_matched(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """How many leading `hashes`, at most `max_blocks`, are the identities of blocks here."""
        by_hash = self._by_hash
        for i in range(max_blocks):
            if hashes[i] not in by_hash:
                return i
        return max_blocks

    def share(self, hashes: Iterable[bytes]) -> list[int]:
        """One more user for each of these blocks. KeyError where one is absent."""
        ids = [self._by_hash[h] for h in hashes]
        for block_id in ids:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            self._refs[block_id] += 1
        return ids

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out blocks for writing, blank ones first, then the least recently used; labels are lost."""
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free} free")
        ids: list[int] = []
        for _ in range(num_blocks):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._evict(block_id)
            self._refs[block_id] = 1
            ids.append(block_id)
        return ids

    def release(self, block_ids: Sequence[int]) -> None:
        """One user less for each, last block first."""
        refs = self._refs
        for block_id in reversed(block_ids):
            if refs[block_id] < 1:
                raise ValueError(f"block {block_id} is released but not held")
            refs[block_id] -= 1
            if refs[block_id] == 0:
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def label(self, block_id: int, block_hash: bytes) -> bool:
        """Give a held, complete block its identity. False where another held block has it already.

        A cached block with the same content yields its label to the held one, which is used later.
        """
        owner = self._by_hash.get(block_hash)
        if owner == block_id:
            return True
        if owner is not None:
            if self._refs[owner] > 0:
                return False
            del self._cached[owner]
            self._forget(owner)
            self._blank.append(owner)
        self._forget(block_id)
        self._hashes[block_id] = block_hash
        self._by_hash[block_hash] = block_id
        return True

    def unlabel(self, block_id: int) -> None:
        """Take a block's identity back: its content is not to be trusted."""
        if self._hashes[block_id] is not None:
            self._forget(block_id)
            if self._refs[block_id] == 0:
                del self._cached[block_id]
                self._blank.append(block_id)

    def adopt(self, blocks: Iterable[tuple[int, bytes]]) -> int:
        """Take in blocks that an executor already holds, least recently used first; returns how many.

        Only for a pool that has handed out nothing. Of two copies the one used later is kept; unknown ids are not.
        """
        taken: OrderedDict[int, None] = OrderedDict()
        for block_id, block_hash in blocks:
            if 0 <= block_id < self.num_blocks and block_id not in taken:
                copy = self._by_hash.get(block_hash)
                if copy is not None:
                    self._forget(copy)
                    del taken[copy]
                self._hashes[block_id] = block_hash
                self._by_hash[block_hash] = block_id
                taken[block_id] = None
        self._cached = taken
        self._blank = [b for b in range(self.num_blocks - 1, -1, -1) if b not in taken]
        return len(taken)

    def was_evicted(self, block_hash: bytes) -> bool:
        """Whether a block with that identity was given up lately."""
        return block_hash in self._evicted

    def _evict(self, block_id: int) -> None:
        if (block_hash := self._hashes[block_id]) is not None:
            self._evicted[block_hash] = None
            if len(self._evicted) > self.num_blocks:
                self._evicted.popitem(last=False)
        self._forget(block_id)
        self.num_evicted += 1

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            self._hashes[block_id] = None
            del self._by_hash[block_hash]

    def check(self, users: dict[int, int]) -> None:
        """AssertionError unless reference counts equal `users` (block id -> tables it is in) and all blocks add up."""
        blank, cached = set(self._blank), set(self._cached)
        held = {b for b in range(self.num_blocks) if self._refs[b]}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert blank.isdisjoint(cached), "a block is blank and cached"
        assert held.isdisjoint(blank | cached), "a held block is on a free list"
        assert len(blank) + len(cached) + len(held) == self.num_blocks, "free + held != all"
        assert held == users.keys(), f"held {sorted(held ^ users.keys())} differ from the tables"
        for block_id, count in users.items():
            assert self._refs[block_id] == count, f"block {block_id}: {self._refs[block_id]} references, {count} users"
        assert all(self._hashes[b] is None for b in blank), "a blank block has a label"
        assert all(self._hashes[b] is not None for b in cached), "a cached block has no label"
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._by_hash, "labels differ from index"
