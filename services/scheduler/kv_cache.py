"""The KV memory of one executor: its cache groups as one, counted in blocks of positions.

All groups known today keep a block for every position, so block i of a history is one block in each group and
a length fits when every group can hold it. A group of another kind (a sliding window, a state a sequence) is a
class beside BlockPool; what the rest of the scheduler asks for is in the methods here.
"""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.core.blocks import BLOCK_SIZE

from .block_pool import BlockPool
from .events import GroupSpec, InventoryBlock
from .orders import BlockTables


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold positions [0, num_tokens)."""
    return -(-num_tokens // BLOCK_SIZE)


class KvCache:
    """One pool a cache group. A count of blocks is a count in every group."""

    __slots__ = ("num_blocks", "pools")

    def __init__(self, groups: Sequence[GroupSpec], inventory: Sequence[InventoryBlock] = ()) -> None:
        self.pools = tuple(BlockPool(group.num_blocks) for group in groups)
        self.num_blocks = min(pool.num_blocks for pool in self.pools)
        ordered = sorted(inventory, key=lambda block: block.last_used_us)
        for group_idx, pool in enumerate(self.pools):
            pool.adopt((block.block_id, block.block_hash) for block in ordered if block.group_idx == group_idx)

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, in the fullest group."""
        pools = self.pools
        return pools[0].num_free if len(pools) == 1 else min(pool.num_free for pool in pools)

    def num_matched(self, hashes: Sequence[bytes], max_blocks: int) -> int:
        """Leading blocks that every group holds."""
        for pool in self.pools:
            max_blocks = pool.num_matched(hashes, max_blocks)
        return max_blocks

    def num_idle(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """How many of the first `num_blocks` (all matched) are on a free list, and leave it when they are shared."""
        most = 0
        for pool in self.pools:
            ids = (pool.find(hashes[i]) for i in range(num_blocks))
            most = max(most, sum(1 for block_id in ids if block_id is not None and not pool.is_held(block_id)))
        return most

    def was_evicted(self, block_hash: bytes) -> bool:
        """Whether a group gave up the block with that identity lately."""
        return any(pool.was_evicted(block_hash) for pool in self.pools)

    def share(self, hashes: Sequence[bytes]) -> BlockTables:
        return [pool.share(hashes) for pool in self.pools]

    def allocate(self, num_blocks: int) -> BlockTables:
        return [pool.allocate(num_blocks) for pool in self.pools]

    def release(self, tables: BlockTables) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table)

    def num_exclusive(self, tables: BlockTables) -> int:
        """Blocks that would become free if this user released them."""
        return min(
            sum(1 for block_id in table if pool.num_refs(block_id) == 1)
            for pool, table in zip(self.pools, tables, strict=True)
        )
