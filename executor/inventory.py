"""Which blocks hold complete, identified content: what a scheduler that starts again can take up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InventoryEntry:
    block_id: int
    hash: bytes
    last_used_us: int


class BlockInventory:
    """Labels of blocks. Outlives links: only a block handed out for writing loses its label."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}
        self._last_used_us: dict[int, int] = {}
        self._distrusted: set[int] = set()  # written by a sequence that faulted, and not handed out since

    def __len__(self) -> int:
        return len(self._hashes)

    def label(self, block_ids: Sequence[int], hashes: Sequence[bytes], now_us: int) -> None:
        """Give complete blocks their identity; not those whose content is not to be trusted."""
        labels = {
            block_id: block_hash
            for block_id, block_hash in zip(block_ids, hashes, strict=True)
            if block_id not in self._distrusted
        }
        self._hashes.update(labels)
        self._touch(list(labels), now_us)

    def use(self, block_ids: Sequence[int], now_us: int) -> None:
        """Blocks of one history, in order, were of use: the labelled ones move to the young end.

        Earlier blocks of a history count as used later, so that a prefix outlives what continues it.
        """
        self._touch([block_id for block_id in block_ids if block_id in self._hashes], now_us)

    def _touch(self, block_ids: Sequence[int], now_us: int) -> None:
        for idx, block_id in enumerate(block_ids):
            self._last_used_us[block_id] = max(now_us - idx, 0)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks are handed out, and will be written."""
        for block_id in block_ids:
            self._distrusted.discard(block_id)
            self._unlabel(block_id)

    def distrust(self, block_ids: Iterable[int]) -> None:
        """What these blocks hold is wrong: no label, also none that was on its way, before they are handed out again."""
        for block_id in block_ids:
            self._distrusted.add(block_id)
            self._unlabel(block_id)

    def _unlabel(self, block_id: int) -> None:
        if self._hashes.pop(block_id, None) is not None:
            del self._last_used_us[block_id]

    def entries(self) -> list[InventoryEntry]:
        """Everything labelled, least recently used first."""
        order = sorted(self._hashes, key=lambda block_id: (self._last_used_us[block_id], block_id))
        return [InventoryEntry(i, self._hashes[i], self._last_used_us[i]) for i in order]
