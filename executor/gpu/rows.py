"""The decode set of a GPU: which sequence has which row and slot, and what the device must be told about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.kernels import step_state as words

from ..sequences import Sequence

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """The rows of a step as they were when it was launched."""

    sequences: list[Sequence]
    seq_ids: npt.NDArray[np.uint64]
    slots: Int32s
    num_compute: int  # the first of them had a token to compute; the others' last chunk was in this step
    number: int  # of the launch

    @property
    def num_rows(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """What the rows of a step chose; rows that did not run, or whose sequence has gone since, are not in it."""

    rows: Int64s  # into LaunchedRows
    token_ids: Int64s
    sound: Bools
    stopped: Bools
    halted: Bools  # may not run on: unsound, stopped, at its budget or its limit
    spent: Bools  # at its budget


class DecodeRows:
    """Sequences below their limit, in rows [0, num_rows); a sequence keeps its slot from its joining to its leaving.

    What the device reads, a list of slots, the state of each slot and its block table, is one tensor of int32 words
    with a mirror on the host. Joins, leaves and extensions change the mirror; `changes` gives the words that differ, for one
    small upload before the next step. The newest token and position of a row are the device's own once it has joined.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.max_rows = max_num_seqs
        self.max_blocks = max_blocks
        self.on_join: Callable[[int, Sequence], None] = lambda slot, sequence: None
        self.on_leave: Callable[[int, Sequence], None] = lambda slot, sequence: None
        self.sequences: list[Sequence] = []
        self._free = list(range(max_num_seqs))[::-1]
        num_state, num_tables = max_num_seqs * words.STATE_WORDS, max_num_seqs * max_blocks
        # 16-byte alignment of each part is the list's only demand.
        self._state_at = -(-max_num_seqs // 4) * 4
        self._tables_at = self._state_at + num_state
        self._mirror = np.zeros(self._tables_at + num_tables, np.int32)
        self._mirror[:max_num_seqs] = -1
        self._dirty: list[tuple[int, int]] = []
        self.words = torch.from_numpy(self._mirror.copy()).to(device)
        self.slots = self.words[:max_num_seqs]
        self.state = self.words[self._state_at : self._tables_at].view(max_num_seqs, words.STATE_WORDS)
        self.block_tables = self.words[self._tables_at :].view(max_num_seqs, max_blocks)
        self._slots = self._mirror[:max_num_seqs]
        self._state = self._mirror[self._state_at : self._tables_at].reshape(max_num_seqs, words.STATE_WORDS)
        self._tables = self._mirror[self._tables_at :].reshape(max_num_seqs, max_blocks)
        # By slot, as far as the host knows.
        self._seq_ids = np.zeros(max_num_seqs, np.uint64)
        self._occupied = np.zeros(max_num_seqs, np.bool_)
        self._joined = np.zeros(max_num_seqs, np.int64)  # number of the first launch with its present sequence
        self._positions = np.zeros(max_num_seqs, np.int64)
        self._tokens = np.zeros(max_num_seqs, np.int64)
        self._limits = np.zeros(max_num_seqs, np.int64)
        self._max_totals = np.zeros(max_num_seqs, np.int64)
        self._stop_ids = np.full((max_num_seqs, words.NUM_STOPS), -1, np.int64)
        self._ahead = np.zeros(max_num_seqs, np.int64)  # steps with this slot that were launched and not yet taken
        self._num_launches = 0

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def is_full(self) -> bool:
        return len(self.sequences) >= self.max_rows

    def slot_of(self, sequence: Sequence) -> int:
        """The slot of a sequence that is in the set."""
        return int(self._slots[sequence.row])

    def position_of(self, sequence: Sequence) -> int:
        """Position of the newest token of a sequence in the set, as far as the host knows."""
        return int(self._positions[self._slots[sequence.row]])

    def add(self, sequence: Sequence) -> None:
        """`sequence` takes the next row and a slot. Its newest token is the one to be computed next, or the last
        token of a chunk of the step that is about to be launched."""
        row, slot = len(self.sequences), self._free.pop()
        self.sequences.append(sequence)
        sequence.row = row
        self._slots[row] = slot
        self._touch(row, row + 1)
        stops = sequence.spec.stop_token_ids
        if len(stops) > self._stop_ids.shape[1]:
            wider = np.full((self.max_rows, len(stops)), -1, np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stops)] = stops
        self._seq_ids[slot] = sequence.seq_id
        self._occupied[slot] = True
        self._joined[slot] = self._num_launches + 1
        self._ahead[slot] = 0
        self._positions[slot] = sequence.num_tokens - 1
        self._tokens[slot] = sequence.last_token
        self._max_totals[slot] = sequence.admit.max_total_tokens
        state = self._state[slot]
        state[words.TOKEN] = sequence.last_token
        state[words.POSITION] = sequence.num_tokens - 1
        state[words.MAX_TOTAL] = sequence.admit.max_total_tokens
        state[words.ACTIVE] = 1
        # (More stop tokens than the device tests: it runs on until the host has seen the one it met, within granted
        # blocks, and what it makes there is discarded.)
        state[words.FIRST_STOP :] = self._stop_ids[slot, : words.NUM_STOPS]
        at = self._state_at + slot * words.STATE_WORDS
        self._touch(at, at + words.STATE_WORDS)
        self._write_limit(slot, sequence)
        self._write_table(slot, sequence, 0)
        self.on_join(slot, sequence)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` leaves; the last row takes its row."""
        row, last = sequence.row, len(self.sequences) - 1
        slot = int(self._slots[row])
        sequence.num_tokens = int(self._positions[slot]) + 1
        sequence.last_token = int(self._tokens[slot])
        sequence.row = -1
        self.on_leave(slot, sequence)
        self._occupied[slot] = False
        self._free.append(slot)
        moved = self.sequences.pop()
        if row != last:
            self.sequences[row] = moved
            moved.row = row
            self._slots[row] = self._slots[last]
            self._touch(row, row + 1)
        self._slots[last] = -1
        self._touch(last, last + 1)

    def extended(self, sequence: Sequence) -> None:
        """`sequence`, in the set, has more blocks and a higher limit."""
        slot = int(self._slots[sequence.row])
        self._write_limit(slot, sequence)
        at = self._state_at + slot * words.STATE_WORDS
        self._touch(at + words.LIMIT, at + words.LIMIT + 1)
        # A limit rarely rises by more than a few blocks; those before are as they were.
        self._write_table(slot, sequence, int(self._positions[slot]) // BLOCK_SIZE)

    @property
    def may_run(self) -> bool:
        """Whether any row would run in a step that is launched now: all may be about to end, or to meet their limits,
        by steps that the host has not seen yet."""
        slots = self._slots[: len(self.sequences)]
        positions = self._positions[slots] + self._ahead[slots]
        return bool(((positions < self._limits[slots]) & (positions + 1 < self._max_totals[slots])).any())

    def launched(self, num_compute: int) -> LaunchedRows:
        """The rows as they are now, for a step that is launched."""
        n = len(self.sequences)
        slots = self._slots[:n].copy()
        self._ahead[slots] += 1
        self._num_launches += 1
        return LaunchedRows(self.sequences.copy(), self._seq_ids[slots], slots, num_compute, self._num_launches)

    def changes(self, out: Int32s) -> int:
        """Write {index, new value} of every changed word to `out`, int32 [>= max_changes, 2]; returns how many."""
        if not self._dirty:
            return 0
        at = np.unique(np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in self._dirty]))
        self._dirty.clear()
        out[: at.size, 0] = at
        out[: at.size, 1] = self._mirror[at]
        return int(at.size)

    @property
    def num_pending_changes(self) -> int:
        """At most so many words will `changes` write."""
        return sum(end - start for start, end in self._dirty)

    @property
    def max_changes(self) -> int:
        return 2 * int(self._mirror.size)

    def take(self, launched: LaunchedRows, results: Int32s) -> ChosenTokens:
        """The rows got what `results` says (a token, NOT_RUN or UNSOUND a row); the host's columns move on."""
        slots = launched.slots
        # A slot may have been left since, and taken again: by another sequence, or by the same one after a pause.
        here = self._occupied[slots] & (self._joined[slots] <= launched.number)
        self._ahead[slots[here]] -= 1
        rows = np.flatnonzero((results != words.NOT_RUN) & here)
        slots, token_ids = slots[rows], results[rows].astype(np.int64)
        sound = token_ids >= 0
        positions = self._positions[slots] + 1
        self._positions[slots] = positions
        self._tokens[slots] = token_ids
        stopped = sound & (self._stop_ids[slots] == token_ids[:, None]).any(axis=1)
        spent = positions + 1 >= self._max_totals[slots]
        halted = ~sound | stopped | spent | (positions >= self._limits[slots])
        return ChosenTokens(rows, token_ids, sound, stopped, halted, spent)

    def _write_limit(self, slot: int, sequence: Sequence) -> None:
        self._limits[slot] = sequence.limit
        self._state[slot, words.LIMIT] = sequence.limit

    def _write_table(self, slot: int, sequence: Sequence, first: int) -> None:
        num_blocks = min(sequence.num_blocks, self.max_blocks)  # no history reaches further
        self._tables[slot, first:num_blocks] = sequence.block_table[first:num_blocks].numpy()
        at = self._tables_at + slot * self.max_blocks
        self._touch(at + first, at + num_blocks)

    def _touch(self, start: int, end: int) -> None:
        if start < end:
            self._dirty.append((start, end))
