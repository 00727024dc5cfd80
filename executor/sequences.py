"""Sequences, and the columns of those that decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.v1 import common_pb2

from .constraint import Constraint
from .logprobs import TokenLogprob
from .orders import Admit, Ids
from .sampler import LogitAdjuster, Sampler, SamplingSpec, check_sampling

EndedBefore = Literal["stop", "length"]


@dataclass(slots=True)
class SequenceTrace:
    """What a sequence's span will say; it is made from this off the loop's thread."""

    parent: common_pb2.TraceContext
    start_ns: int
    events: list[tuple[str, int, dict[str, int]]] = field(default_factory=list)
    num_chunks: int = 0
    first_step_id: int = 0
    last_step_id: int = 0


class Sequence:
    """One admitted history: how far it is, where its blocks are, how it ends."""

    __slots__ = (
        "_table",
        "adjuster",
        "admit",
        "constraint",
        "is_live",
        "is_paused",
        "last_token",
        "limit",
        "num_blocks",
        "num_queued",
        "num_tokens",
        "pending",
        "row",
        "stop_token_ids",
        "trace",
    )

    def __init__(self, admit: Admit, vocab_size: int, constraint: Constraint | None = None) -> None:
        """SequenceError for sampling parameters that have no meaning."""
        check_sampling(admit.sampling)
        self.admit = admit
        self.constraint = constraint
        self.num_tokens = admit.num_tokens
        self.num_queued = admit.num_cached_tokens  # positions below it are cached, or in chunks that were ordered
        self.limit = admit.limit
        self.is_live = True
        self.is_paused = False  # at its limit, after its history was computed
        self.row = -1  # of the decode set; -1: not in it
        self.last_token = -1
        self.stop_token_ids = frozenset(admit.sampling.stop_token_ids)
        self.num_blocks = 0
        self._table = torch.zeros(max(8, admit.block_ids.size), dtype=torch.int32)
        self.append_blocks(admit.block_ids)
        adjuster = LogitAdjuster(admit.sampling, vocab_size, constraint)
        self.adjuster = adjuster if adjuster.is_active(self.num_generated) else None
        self.observe(admit.known_token_ids, 0)
        # Of the last row of a chunk that ends inside the prompt, until the next chunk says what follows it: its logits,
        # or the state that they come from.
        self.pending: torch.Tensor | None = None
        self.trace: SequenceTrace | None = None

    @property
    def seq_id(self) -> int:
        return self.admit.seq_id

    @property
    def spec(self) -> SamplingSpec:
        return self.admit.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return self.admit.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.admit.num_prompt_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report for each prompt token; None: no prompt logprobs."""
        return None if self.admit.prompt_logprobs_delivered else self.admit.sampling.prompt_logprobs

    @property
    def block_table(self) -> torch.Tensor:
        """int32 [>= num_blocks]; entries from num_blocks on mean nothing."""
        return self._table

    @property
    def block_ids(self) -> list[int]:
        ids: list[int] = self._table[: self.num_blocks].tolist()
        return ids

    @property
    def has_room(self) -> bool:
        """Whether the next decode step, which writes the last token's position, stays below the limit."""
        return self.num_tokens - 1 < self.limit

    def append_blocks(self, block_ids: Ids) -> None:
        end = self.num_blocks + block_ids.size
        if end > self._table.shape[0]:
            grown = torch.zeros(max(2 * self._table.shape[0], end), dtype=torch.int32)
            grown[: self.num_blocks] = self._table[: self.num_blocks]
            self._table = grown
        self._table[self.num_blocks : end] = torch.from_numpy(block_ids)
        self.num_blocks = end

    def observe(self, token_ids: Ids, start: int) -> None:
        """History tokens from position `start` on became known: what penalties and the grammar look at."""
        if self.adjuster is not None and self.spec.needs_history and token_ids.size:
            self.adjuster.observe(token_ids, min(max(self.num_prompt_tokens - start, 0), token_ids.size))

    @property
    def ended_before(self) -> EndedBefore | None:
        """How the history that was admitted, its last token known, had ended already: nothing may follow it."""
        if self.num_generated > self.spec.min_tokens and self.last_token in self.stop_token_ids:
            return "stop"
        if self.constraint is not None and self.constraint.has_ended:
            return "stop"
        return "length" if self.num_tokens >= self.admit.max_total_tokens else None


class StepBuffers:
    """The rows of a forward pass. Decode rows come first and stay in place from step to step."""

    def __init__(self, max_rows: int) -> None:
        self.token_ids = np.zeros(max_rows, np.int64)
        self.positions = np.zeros(max_rows, np.int64)
        self.slots = np.zeros(max_rows, np.int64)
        self.token_ids_tensor = torch.from_numpy(self.token_ids)
        self.positions_tensor = torch.from_numpy(self.positions)
        self.slots_tensor = torch.from_numpy(self.slots)


class DecodeSet:
    """Sequences below their limit, in rows [0, num_rows): a column for each thing a step needs.

    A step touches columns, not sequences. A row that leaves is filled by the last one, so rows stay dense and a
    join or a leave costs the same whatever the size.
    """

    def __init__(self, buffers: StepBuffers, sampler: Sampler, max_num_seqs: int, max_blocks: int) -> None:
        self.sequences: list[Sequence] = []
        self._buffers = buffers
        self._sampler = sampler
        self.max_rows = max_num_seqs
        self.seq_ids = np.zeros(max_num_seqs, np.uint64)
        self._limits = np.zeros(max_num_seqs, np.int64)
        self._max_totals = np.zeros(max_num_seqs, np.int64)
        self._stop_ids = np.full((max_num_seqs, 4), -1, np.int64)
        self._each = np.arange(max_num_seqs)
        self.row_numbers = torch.arange(max_num_seqs)
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.table_rows: list[torch.Tensor] = list(torch.from_numpy(self._tables).unbind(0))
        # Rows whose logits are adjusted, or whose log-probabilities are wanted: few, mostly none.
        self.adjusted: dict[int, Sequence] = {}
        self.with_logprobs: dict[int, Sequence] = {}

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def is_full(self) -> bool:
        return len(self.sequences) >= self.max_rows

    def add(self, sequence: Sequence) -> None:
        """`sequence` takes the next row; its last token is the next to be computed."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        sequence.row = row
        self._buffers.token_ids[row] = sequence.last_token
        self._buffers.positions[row] = sequence.num_tokens - 1
        self.seq_ids[row] = sequence.seq_id
        self._limits[row] = sequence.limit
        self._max_totals[row] = sequence.admit.max_total_tokens
        stops = sequence.spec.stop_token_ids
        if len(stops) > self._stop_ids.shape[1]:
            wider = np.full((self.max_rows, len(stops)), -1, np.int64)
            wider[:, : self._stop_ids.shape[1]] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(stops)] = stops
        self._write_table(sequence)
        self._sampler.set_row(row, sequence.spec, sequence.admit.choice_index)
        if sequence.adjuster is not None:
            self.adjusted[sequence.seq_id] = sequence
        if sequence.spec.logprobs is not None:
            self.with_logprobs[sequence.seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """`sequence` leaves; the last row takes its place."""
        row, last = sequence.row, len(self.sequences) - 1
        sequence.num_tokens = int(self._buffers.positions[row]) + 1
        sequence.last_token = int(self._buffers.token_ids[row])
        sequence.row = -1
        self.adjusted.pop(sequence.seq_id, None)
        self.with_logprobs.pop(sequence.seq_id, None)
        moved = self.sequences.pop()
        if row == last:
            return
        self.sequences[row] = moved
        moved.row = row
        for column in (
            self._buffers.token_ids,
            self._buffers.positions,
            self.seq_ids,
            self._limits,
            self._max_totals,
            self._stop_ids,
        ):
            column[row] = column[last]
        self._tables[row, : moved.num_blocks] = self._tables[last, : moved.num_blocks]
        self._sampler.move_row(last, row)

    def extended(self, sequence: Sequence) -> None:
        """`sequence`, in the set, has more blocks and a higher limit."""
        self._limits[sequence.row] = sequence.limit
        self._write_table(sequence)

    def _write_table(self, sequence: Sequence) -> None:
        num_blocks = sequence.num_blocks
        if num_blocks > self._tables.shape[1]:
            wider = np.zeros((self.max_rows, max(num_blocks, 2 * self._tables.shape[1])), np.int32)
            wider[:, : self._tables.shape[1]] = self._tables
            self._tables = wider
            self.table_rows = list(torch.from_numpy(wider).unbind(0))
        self._tables[sequence.row, :num_blocks] = sequence.block_table[:num_blocks].numpy()

    def write_slots(self) -> None:
        """Where each row's KV goes this step."""
        n = len(self.sequences)
        positions = self._buffers.positions[:n]
        blocks = self._tables[self._each[:n], positions // BLOCK_SIZE]
        self._buffers.slots[:n] = blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE

    def advance(self, token_ids: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Every row got its next token. Returns which may not run on (a stop token, budget or limit), and which
        of these met a stop token: both [num_rows]."""
        n = len(self.sequences)
        positions = self._buffers.positions[:n]
        self._buffers.token_ids[:n] = token_ids
        positions += 1
        stopped = (self._stop_ids[:n] == token_ids[:, None]).any(axis=1)
        halted = stopped | (positions >= self._limits[:n]) | (positions + 1 >= self._max_totals[:n])
        return halted, stopped

    def out_of_budget(self, row: int) -> bool:
        """Whether the history of `row` is as long as it may become."""
        return bool(self._buffers.positions[row] + 1 >= self._max_totals[row])


@dataclass(frozen=True, slots=True)
class LogprobItem:
    """Log-probabilities of one sequence from one step."""

    seq_id: int
    generated: tuple[TokenLogprob, ...] = ()
    prompt: tuple[TokenLogprob, ...] = ()
