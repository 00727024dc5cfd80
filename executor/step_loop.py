"""A step on torch: every row and chunk in one forward pass, tokens chosen on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rorqual.core.blocks import BLOCK_SIZE

from .faults import contained, ends_the_loop
from .logprobs import checked, token_logprobs
from .model.batch import Form, ForwardBatch, Segment
from .order_loop import LENGTH, STOP, Chunk, KvCache, OrderLoop, StepLimits
from .orders import Ids
from .reports import StepOutput, StepStats
from .sampler import Adjustment, Sampler
from .sequences import DecodeSet, LogprobItem, StepBuffers
from .sequences import Sequence as Seq


class ForwardResult(Protocol):
    @property
    def logits(self) -> torch.Tensor: ...


class Model(Protocol):
    """What the loop asks of a model."""

    def forward(self, batch: ForwardBatch, kv_cache: Any) -> ForwardResult: ...


class StepLoop(OrderLoop):
    """Steps one after the other: a step's tokens are known before the next begins."""

    takes_grammars = True

    def __init__(
        self,
        model: Model,
        kv_cache: KvCache,
        limits: StepLimits,
        *,
        num_threads: int = 0,
        traced: bool = False,
        monotonic_s: Callable[[], float] = time.perf_counter,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._model = model
        self._buffers = StepBuffers(limits.max_num_batched_tokens)
        self._sampler = Sampler(limits.vocab_size, limits.max_num_seqs)
        self._decode = DecodeSet(
            self._buffers, self._sampler, limits.max_num_seqs, -(-limits.max_model_len // BLOCK_SIZE)
        )
        super().__init__(
            kv_cache,
            self._decode,
            limits,
            num_threads=num_threads,
            traced=traced,
            monotonic_s=monotonic_s,
            time_ns=time_ns,
        )

    def _step(self, chunks: Sequence[Chunk]) -> None:
        started_s = self._step_started_s = self._monotonic_s()
        decode = self._decode
        num_decode_rows = decode.num_rows
        batch, prompt_parts = self._build_batch(chunks)
        self._prepare_masks(chunks)
        logits = self._model.forward(batch, self._kv_cache).logits
        self._step_id += 1
        output = StepOutput(self._step_id, 0.0, _NO_SEQ_IDS, _NO_TOKENS)
        if chunks:
            logits = self._finish_chunks(chunks, logits, prompt_parts, output)
        if decode.num_rows:
            self._choose(logits, output)
        now_s = self._monotonic_s()
        output.duration_s = now_s - started_s
        self._step_started_s = 0.0
        self.outbox.add_step(output)
        self.stats.append(
            StepStats(output.duration_s, batch.num_rows - num_decode_rows, num_decode_rows, decode.num_rows)
        )
        self.on_output()

    def _prepare_masks(self, chunks: Sequence[Chunk]) -> None:
        """What grammars allow next is computed while the model runs: their sequences' tokens are all known."""
        joining = [chunk.sequence for chunk in chunks if chunk.joins and chunk.sequence.constraint is not None]
        sequences = [*self._decode.adjusted.values(), *joining]
        constraints = [sequence.constraint for sequence in sequences if sequence.constraint is not None]
        if constraints:
            self._constraints.prepare(constraints)

    def _build_batch(self, chunks: Sequence[Chunk]) -> tuple[ForwardBatch, list[tuple[Chunk, int]]]:
        """Decode rows as they stand, then the chunks' rows.

        Logits are asked for in the order: decode rows, last rows of chunks that end a history (these sequences take
        the decode rows that follow, in this order), rows of prompt log-probabilities. The second value says of which
        chunks the latter are, and how many of each.
        """
        decode, buffers = self._decode, self._buffers
        n = decode.num_rows
        segments: list[Segment] = []
        if n:
            decode.write_slots()
            table_rows, form = decode.table_rows, Form.DECODE
            segments = [
                Segment(row, 1, position, table_rows[row], form)
                for row, position in enumerate(buffers.positions[:n].tolist())
            ]
        if not chunks:
            return (
                ForwardBatch(
                    token_ids=buffers.token_ids_tensor[:n],
                    positions=buffers.positions_tensor[:n],
                    slot_mapping=buffers.slots_tensor[:n],
                    segments=segments,
                    logit_rows=decode.row_numbers[:n],
                ),
                [],
            )
        logit_rows = list(range(n))
        prompt_rows: list[int] = []
        prompt_parts: list[tuple[Chunk, int]] = []
        row = n
        for chunk in chunks:
            sequence, start, end = chunk.sequence, chunk.start, chunk.end
            stop = row + chunk.num_tokens
            positions = np.arange(start, end)
            table = sequence.block_table
            buffers.token_ids[row:stop] = chunk.token_ids
            buffers.positions[row:stop] = positions
            blocks = table.numpy()[positions // BLOCK_SIZE].astype(np.int64)
            buffers.slots[row:stop] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            edge = min(max(sequence.num_prompt_tokens, start), end) if self._limits.deterministic else end
            if start < edge:
                segments.append(Segment(row, edge - start, start, table, Form.PREFILL))
            if edge < end:
                segments.append(Segment(row + edge - start, end - edge, edge, table, Form.DECODE))
            if chunk.joins:
                logit_rows.append(stop - 1)
            if sequence.num_prompt_logprobs is not None and not chunk.is_again:
                # Row p says how likely the token at p + 1 was; beyond the prompt nobody asks.
                count = max(min(end, sequence.num_prompt_tokens - 1) - start, 0)
                prompt_rows += range(row, row + count)
                prompt_parts.append((chunk, count))
            row = stop
        return (
            ForwardBatch(
                token_ids=buffers.token_ids_tensor[:row],
                positions=buffers.positions_tensor[:row],
                slot_mapping=buffers.slots_tensor[:row],
                segments=segments,
                logit_rows=torch.tensor(logit_rows + prompt_rows, dtype=torch.int64),
            ),
            prompt_parts,
        )

    def _finish_chunks(
        self,
        chunks: Sequence[Chunk],
        logits: torch.Tensor,
        prompt_parts: Sequence[tuple[Chunk, int]],
        output: StepOutput,
    ) -> torch.Tensor:
        """What the chunks' rows brought; sequences whose history ended join the decode set. Returns the logits of its
        rows."""
        row = self._decode.num_rows
        first = logits.shape[0] - sum(count for _, count in prompt_parts)
        kept = np.ones(first, np.bool_)
        for chunk, count in prompt_parts:
            part, first = logits[first : first + count], first + count
            with self._alone(chunk.sequence):
                item = _prompt_logprobs(chunk, part)
                if item.prompt:
                    output.logprobs.append(item)
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.is_live:  # its log-probabilities, or a chunk before this one, ended it
                kept[row : row + chunk.joins] = False
                row += chunk.joins
                continue
            self._note_computed(chunk, output)
            if chunk.joins:
                kept[row] = self._join(sequence)
                row += 1
                if sequence.trace is not None:  # its first token is chosen next, in this step
                    sequence.trace.events.append(("first_token", self._time_ns(), {"step_id": self._step_id}))
            elif chunk.is_last:
                self._finish(sequence, STOP if chunk.ended_before == "stop" else LENGTH, output)
        return logits[: kept.size] if kept.all() else logits[: kept.size][torch.from_numpy(kept)]

    def _choose(self, logits: torch.Tensor, output: StepOutput) -> None:
        """The next token of every row, and what follows from it: faults, ends, pauses."""
        decode = self._decode
        n = decode.num_rows
        new_positions = self._buffers.positions[:n] + 1
        adjustments = [
            Adjustment(s.row, s.adjuster, int(new_positions[s.row]) - s.num_prompt_tokens)
            for s in decode.adjusted.values()
            if s.adjuster is not None
        ]
        errors: dict[int, Exception] = {}  # what went wrong with rows
        tokens, sound = self._sampler.sample(logits[:n], new_positions, adjustments, errors)
        if decode.with_logprobs:
            self._token_logprobs(logits, tokens, sound, errors, output)
            sound[list(errors)] = False
        ended: list[int] = []
        for item in adjustments:
            if sound[item.row]:
                with contained(errors, item.row):
                    if self._follow(item, int(tokens[item.row])):
                        ended.append(item.row)
        sound[list(errors)] = False
        halted, stopped = decode.advance(tokens)
        halted[ended] = stopped[ended] = True
        output.seq_ids, output.token_ids = decode.seq_ids[:n].copy(), tokens
        if not sound.all():
            output.seq_ids, output.token_ids = output.seq_ids[sound], tokens[sound]
            halted |= ~sound
        # From the last row on: a row that leaves is filled from behind, with a row that was looked at before.
        for row in np.flatnonzero(halted)[::-1].tolist():
            sequence = decode.sequences[row]
            if row in errors:
                self._fault(sequence, errors[row])
            elif not sound[row]:
                self._unsound(sequence, int(self._buffers.positions[row]) - 1)
            elif stopped[row]:
                self._finish(sequence, STOP, output)
            elif decode.out_of_budget(row):
                self._finish(sequence, LENGTH, output)
            else:
                decode.remove(sequence)
                sequence.is_paused = True
                output.paused.append(sequence.seq_id)

    def _follow(self, item: Adjustment, token_id: int) -> bool:
        """What a sequence's penalties and grammar make of its new token. Whether its grammar lets nothing follow."""
        adjuster = item.adjuster
        adjuster.observe([token_id])
        if not adjuster.is_active(item.num_generated + 1):
            del self._decode.adjusted[self._decode.sequences[item.row].seq_id]
        return adjuster.constraint is not None and adjuster.constraint.has_ended

    def _token_logprobs(
        self,
        logits: torch.Tensor,
        tokens: Ids,
        sound: npt.NDArray[np.bool_],
        errors: dict[int, Exception],
        output: StepOutput,
    ) -> None:
        """Log-probabilities of the rows that want them; what goes wrong with a row goes to `errors`."""
        wanted = [s for s in self._decode.with_logprobs.values() if sound[s.row]]
        try:
            output.logprobs += self._logprob_items(wanted, logits, tokens)
        except Exception as error:
            if ends_the_loop(error):
                raise
            for sequence in wanted:  # whose is it?
                with contained(errors, sequence.row):
                    output.logprobs += self._logprob_items([sequence], logits, tokens)

    def _logprob_items(self, wanted: Sequence[Seq], logits: torch.Tensor, tokens: Ids) -> list[LogprobItem]:
        if not wanted:
            return []
        rows = np.array([s.row for s in wanted])
        num_top = [s.spec.logprobs or 0 for s in wanted]
        entries = token_logprobs(logits[torch.from_numpy(rows)].cpu().numpy(), tokens[rows], max(num_top))
        return [
            LogprobItem(sequence.seq_id, generated=(entry.with_top(count),))
            for sequence, entry, count in zip(wanted, entries, num_top, strict=True)
        ]


def _prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> LogprobItem:
    """Log-probabilities of prompt tokens that this chunk made known; keeps the row whose token is yet to come.

    `logits`: of the chunk's first rows, as far as what they predict is the prompt's.
    """
    sequence, count = chunk.sequence, logits.shape[0]
    rows, targets = logits, chunk.token_ids[1 : count + 1]
    if sequence.pending is not None:
        rows, targets = torch.cat((sequence.pending, logits)), chunk.token_ids[: count + 1]
        sequence.pending = None
    if rows.shape[0] > targets.size:
        sequence.pending = rows[-1:].clone()
    entries = token_logprobs(rows[: targets.size].cpu().numpy(), targets, sequence.num_prompt_logprobs or 0)
    return LogprobItem(sequence.seq_id, prompt=checked(entries))


_NO_SEQ_IDS = np.zeros(0, np.uint64)
_NO_TOKENS = np.zeros(0, np.int64)
