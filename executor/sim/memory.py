"""The simulated device's KV: one cache group's blocks, written and read through the tables of its sequences.

A block holds token ids by slot; a block of a state (a slot or a snapshot) holds how many tokens the state has seen and
a checksum of them. Blocks are poisoned when they are handed out, and when a dropped sequence gives them back.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rorqual.core.blocks import BLOCK_SIZE, NO_BLOCK

from ..inventory import InventoryEntry

POISON = b"\xff" * 4


class ContractError(AssertionError):
    """An order that no scheduler may send."""


@dataclass(frozen=True, kw_only=True)
class SimGroup:
    """A cache group as the hello names it. Without window and slots it keeps all blocks."""

    name: str
    num_blocks: int
    window: int = 0
    slots_per_sequence: int = 0
    prefix_multiple: int = 1

    @property
    def entry_tokens(self) -> int:
        """Tokens that an entry of a table stands for."""
        return self.prefix_multiple if self.slots_per_sequence else BLOCK_SIZE

    @property
    def keeps_all(self) -> bool:
        return not self.window and not self.slots_per_sequence

    @property
    def block_bytes(self) -> int:
        return 8 if self.slots_per_sequence else 4 * BLOCK_SIZE


@dataclass(slots=True)
class Table:
    """One sequence's table of one group."""

    seq_id: int
    ids: list[int]
    start: int = 0  # entries before it are not needed any more, slots aside


class GroupMemory:
    """One group's blocks, and who uses them."""

    def __init__(self, group: SimGroup) -> None:
        self.group = group
        self._entry_tokens, self._keeps_all = group.entry_tokens, group.keeps_all
        self.blocks = [self._poisoned() for _ in range(group.num_blocks)]
        self.labels: dict[int, bytes] = {}
        self._users: Counter[int] = Counter()  # block id -> live sequences that need it
        self._writers: dict[int, int] = {}  # block id -> sequence that it was handed to last
        self._distrusted: set[int] = set()  # a fault took their labels; an order on its way may still share them
        self._last_used: dict[int, int] = {}
        self._time = 0

    def _poisoned(self) -> bytearray:
        return bytearray(POISON * (self.group.block_bytes // 4))

    # -- tables ---------------------------------------------------------------------------------------

    def admit(self, seq_id: int, ids: list[int], num_cached: int) -> Table:
        """Take up a cached prefix of `num_cached` tokens, and be handed the other blocks."""
        group = self.group
        if num_cached % max(group.prefix_multiple, BLOCK_SIZE):
            raise ContractError(f"{group.name}: no prefix of {num_cached} tokens may be taken up")
        num_slots, num_entries = group.slots_per_sequence, num_cached // group.entry_tokens
        if len(ids) < num_slots + num_entries:
            raise ContractError(f"{group.name}: the table does not hold the cached prefix")
        needed = self._first_needed(num_cached)
        if num_slots and num_cached:
            needed = num_entries - 1  # the snapshot
        shared = ids[num_slots + needed : num_slots + num_entries]
        for block_id in shared:
            if block_id not in self.labels and block_id not in self._distrusted:
                raise ContractError(f"{group.name}: block {block_id} is shared but has no label")
        self._time += 1
        for block_id in reversed(shared):
            self._users[block_id] += 1
            self._touch(block_id)
        for block_id in ids[:num_slots]:
            self._hand_out(seq_id, block_id)
        if num_slots:
            self.blocks[ids[0]][:] = self.blocks[shared[0]] if shared else bytes(8)
        table = Table(seq_id, ids[: num_slots + num_entries], needed)
        self.extend(table, ids[num_slots + num_entries :])
        self.move_on(table, num_cached)
        return table

    def extend(self, table: Table, ids: Iterable[int]) -> None:
        for block_id in ids:
            if block_id != NO_BLOCK:
                self._hand_out(table.seq_id, block_id)
            elif not self.group.slots_per_sequence:
                raise ContractError(f"{self.group.name}: only a snapshot may be left out")
            table.ids.append(block_id)

    def num_covered(self, table: Table) -> int:
        """Positions that the table has entries for."""
        return (len(table.ids) - self.group.slots_per_sequence) * self.group.entry_tokens

    def move_on(self, table: Table, num_computed: int) -> None:
        """Positions below `num_computed` are written: what the next does not need has one user less."""
        first = self._first_needed(num_computed)
        if first > table.start:
            num_slots = self.group.slots_per_sequence
            for block_id in table.ids[num_slots + table.start : num_slots + first]:
                self._users[block_id] -= 1
            table.start = first

    def retire(self, table: Table, *, poison: bool) -> None:
        """The sequence is gone. One that ended by itself may still have its blocks labelled; a dropped one may not."""
        num_slots = self.group.slots_per_sequence
        for block_id in reversed(table.ids[:num_slots] + table.ids[num_slots + table.start :]):
            self._users[block_id] -= 1
            # (Distrusted ones stay as they are: an order on its way may share them still.)
            if (
                poison
                and block_id != NO_BLOCK
                and self._users[block_id] <= 0
                and block_id not in self.labels
                and block_id not in self._distrusted
            ):
                self.blocks[block_id][:] = self._poisoned()

    def distrust(self, table: Table) -> None:
        """A fault: the labels of the blocks that the sequence wrote are forgotten."""
        for block_id in table.ids:
            if self._writers.get(block_id) == table.seq_id and self.labels.pop(block_id, None) is not None:
                self._distrusted.add(block_id)

    def _first_needed(self, num_computed: int) -> int:
        """The first entry that a sequence needs with that many positions written."""
        return 0 if self._keeps_all else max(0, num_computed - self.group.window) // self._entry_tokens

    def _hand_out(self, seq_id: int, block_id: int) -> None:
        if not 0 <= block_id < self.group.num_blocks:
            raise ContractError(f"{self.group.name}: no block {block_id}")
        if self._users[block_id]:
            raise ContractError(
                f"{self.group.name}: block {block_id} is handed out for writing while a sequence uses it"
            )
        self._users[block_id] = 1
        self._writers[block_id] = seq_id
        self._distrusted.discard(block_id)
        self.labels.pop(block_id, None)
        self.blocks[block_id][:] = self._poisoned()

    # -- content --------------------------------------------------------------------------------------

    def write(self, table: Table, position: int, data: bytes) -> None:
        """Token ids from `position` on: into the slots of their blocks, or into the state and its snapshots."""
        num_slots, entry_tokens = self.group.slots_per_sequence, self._entry_tokens
        if not num_slots and len(data) <= 4 * (entry_tokens - position % entry_tokens):  # a decode step's token
            self._put(table.ids[position // entry_tokens], 4 * (position % entry_tokens), data)
            return
        for at in range(position // entry_tokens, -(-(position + len(data) // 4) // entry_tokens)):
            start = max(position, at * entry_tokens)
            part = data[4 * (start - position) : 4 * ((at + 1) * entry_tokens - position)]
            if num_slots:
                self._advance(table, part)
                if (start + len(part) // 4) % entry_tokens == 0:
                    self._put(table.ids[num_slots + at], 0, bytes(self.blocks[table.ids[0]]))
            else:
                self._put(table.ids[at], 4 * (start % entry_tokens), part)

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        """The first slots of a block into one that a single sequence was handed."""
        if not self.group.keeps_all or num_tokens >= BLOCK_SIZE:
            raise ContractError(f"{self.group.name}: {num_tokens} tokens may not be copied")
        if self._users[dst] != 1 or dst in self.labels:
            raise ContractError(f"{self.group.name}: a copy into block {dst}, which is shared or nobody's")
        part = bytes(self.blocks[src][: 4 * num_tokens])
        if any(part[at : at + 4] == POISON for at in range(0, len(part), 4)):
            raise ContractError(f"{self.group.name}: a copy of block {src}, not all of which was written")
        self._put(dst, 0, part)

    def scribble(self, table: Table, position: int) -> None:
        """A rejected draft was computed at `position`: nobody may read what it left there, or in the other slots."""
        if not self.group.slots_per_sequence:
            self._put(table.ids[position // BLOCK_SIZE], 4 * (position % BLOCK_SIZE), DRAFT)
        for block_id in table.ids[1 : self.group.slots_per_sequence]:
            self.blocks[block_id][:4] = DRAFT

    def read(self, table: Table, num_tokens: int) -> bytes:
        """The tokens of positions [0, num_tokens) as they lie in the blocks."""
        ids = table.ids[: -(-num_tokens // BLOCK_SIZE)]
        return b"".join([self.blocks[block_id] for block_id in ids])[: 4 * num_tokens]

    def agrees(self, table: Table, history: bytes) -> bool:
        """Whether what the next token needs of this group is what `history` left there."""
        if self.group.slots_per_sequence:
            return bytes(self.blocks[table.ids[0]]) == _state(len(history) // 4, zlib.crc32(history))
        num_tokens = len(history) // 4
        start = max(0, num_tokens - self.group.window) if self.group.window else 0
        first = start // BLOCK_SIZE
        ids = table.ids[first : -(-num_tokens // BLOCK_SIZE)]
        content = b"".join([bytes(self.blocks[b]) if b != NO_BLOCK else POISON for b in ids])
        return content[4 * (start - first * BLOCK_SIZE) : 4 * (num_tokens - first * BLOCK_SIZE)] == history[4 * start :]

    def _advance(self, table: Table, data: bytes) -> None:
        state = self.blocks[table.ids[0]]
        num_tokens = int.from_bytes(state[:4], "little") + len(data) // 4
        state[:] = _state(num_tokens & 0xFFFF_FFFF, zlib.crc32(data, int.from_bytes(state[4:], "little")))

    def _put(self, block_id: int, at: int, data: bytes) -> None:
        if block_id == NO_BLOCK and self.group.slots_per_sequence:
            return  # no snapshot is wanted
        if block_id == NO_BLOCK or block_id in self.labels:
            raise ContractError(f"{self.group.name}: a write into block {block_id}, which is labelled or nowhere")
        self.blocks[block_id][at : at + len(data)] = data

    # -- labels ---------------------------------------------------------------------------------------

    def label(self, ids: list[int], hashes: list[bytes]) -> None:
        self._time += 1
        for block_id, block_hash in zip(reversed(ids), reversed(hashes), strict=True):
            content = self.blocks[block_id]
            if any(content[at : at + 4] == POISON for at in range(0, len(content), 4)):
                raise ContractError(f"{self.group.name}: block {block_id} is labelled but not all of it was written")
            self.labels[block_id] = block_hash
            self._touch(block_id)

    def inventory(self) -> Iterator[InventoryEntry]:
        """The labelled blocks."""
        for block_id, block_hash in self.labels.items():
            yield InventoryEntry(block_id, block_hash, self._last_used.get(block_id, 0))

    def forget_all(self) -> None:
        """The process starts again."""
        self.labels.clear()
        for block in self.blocks:
            block[:] = self._poisoned()

    def _touch(self, block_id: int) -> None:
        """Later in one order means nearer the root, so that a parent is more recently used than its child."""
        self._time += 1
        self._last_used[block_id] = self._time


DRAFT = b"\xdd\xdd\0\0"


def _state(num_tokens: int, checksum: int) -> bytes:
    return num_tokens.to_bytes(4, "little") + checksum.to_bytes(4, "little")
