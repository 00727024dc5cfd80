"""The orders that wait for one executor's wire, cut into batches by their bytes."""

from __future__ import annotations

from collections import deque

from .orders import Admit, BlockTables, Copy, Extend, Label, Order, Prefill

MAX_BATCH_BYTES = 16 << 20
"""Of an encoded batch, unless a single order is larger: a quarter of what one message may have."""

_FIELDS_BYTES = 96
"""At least what an order's numbers, tags and lengths take."""
_LABEL_BYTES = 36


def num_bytes(order: Order) -> int:
    """Bytes of an order on the wire, at most."""
    if isinstance(order, Extend):
        return _FIELDS_BYTES + _tables_bytes(order.block_tables)
    if isinstance(order, Prefill):
        return _FIELDS_BYTES + len(order.token_ids)
    if isinstance(order, Admit):
        return _FIELDS_BYTES + _tables_bytes(order.block_tables) + len(order.known_token_ids) + order.num_opaque_bytes
    return _FIELDS_BYTES + (_LABEL_BYTES * len(order.block_ids) if isinstance(order, Label) else 0)


def _tables_bytes(tables: BlockTables) -> int:
    return sum([4 * len(table) + 24 for table in tables])


class OrderQueue:
    """Orders in order. Each goes into the last batch that waits, or into a new one where that would get too large.

    An executor applies a batch whole; successive batches may lie steps apart. So only what needs no more than to come
    after what was ordered before may be in another batch: chunks and extensions after their Admit, a Drop after all.
    """

    __slots__ = ("_batches", "_most_bytes", "_num_bytes", "num_taken")

    def __init__(self, most_bytes: int = MAX_BATCH_BYTES) -> None:
        self._most_bytes = most_bytes
        self._batches: deque[list[Order]] = deque()
        self._num_bytes = 0  # of the last one
        self.num_taken = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def append(self, order: Order) -> int:
        """The number of the batch that `order` is in."""
        size = num_bytes(order)
        # A copy is part of the Admit before it.
        if not self._batches or (self._num_bytes + size > self._most_bytes and not isinstance(order, Copy)):
            self._batches.append([])
            self._num_bytes = 0
        self._batches[-1].append(order)
        self._num_bytes += size
        return self.num_taken + len(self._batches)

    def label(self, group_idx: int, block_id: int, block_hash: bytes) -> None:
        """A Label, or one block more in the one that the last batch ends with."""
        if self._batches and self._num_bytes + _LABEL_BYTES <= self._most_bytes:
            for last in reversed(self._batches[-1]):
                if not isinstance(last, Label):
                    break
                if last.group_idx == group_idx:
                    last.block_ids.append(block_id)
                    last.hashes.append(block_hash)
                    self._num_bytes += _LABEL_BYTES
                    return
        self.append(Label(group_idx, [block_id], [block_hash]))

    def take(self) -> tuple[int, list[Order]] | None:
        """The next batch and its number: 1, 2, 3 …; None where no order waits."""
        if not self._batches:
            return None
        self.num_taken += 1
        return self.num_taken, self._batches.popleft()
