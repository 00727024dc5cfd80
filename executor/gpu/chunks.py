"""A step's prefill chunks as the kernels take them: rows, groups of segments, what attention must gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.kernels.prefill import plan_prefill

from ..order_loop import Chunk, StepLimits
from .model import ChunkRows, PrefillGroup, RecomputedRows
from .rows import LaunchedRows
from .upload import StepUpload


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Rows of a chunk that say how likely the prompt's next tokens were."""

    chunk: Chunk
    start_row: int  # of the step
    num_rows: int


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    rows: ChunkRows
    logit_rows: torch.Tensor  # int32, one for each row of the decode set: the step's row whose logits it chooses from
    prompt_parts: Sequence[PromptPart]

    @staticmethod
    def max_words(limits: StepLimits, max_blocks: int, max_keys: int) -> int:
        """int32 words that a step's chunks may take in an upload, at most."""
        rows = limits.max_num_batched_tokens
        # A row has five words and, in the decode form, a length; a segment a table, two starts and the tiles of its
        # rows, 8 words for each 64 rows and for the rest. A history in slabs has starts and tiles in each of them. Each
        # piece is aligned.
        segments = 2 * limits.max_chunks
        num_slabs = -(-limits.max_model_len // max_keys)
        in_slabs = num_slabs * (rows // 8 + 40 * segments) if num_slabs > 1 else 0
        return 8 * rows + segments * (max_blocks + 32) + in_slabs + 4096


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive rows of one sequence in one form."""

    row: int  # of the chunks' rows
    start: int  # position
    end: int
    table: npt.NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return self.end - self.start


def plan_chunks(
    chunks: Sequence[Chunk],
    launched: LaunchedRows,
    upload: StepUpload,
    limits: StepLimits,
    max_keys: int,
    num_heads: int,
) -> ChunkPlan:
    """Lay out the chunks' rows behind the decode rows, and put what the device needs into `upload`.

    The tensors of the result are views of the upload's device memory: they hold once it was sent. `max_keys`: latents
    that one call of the prefill form may expand. `num_heads`: of attention.
    """
    num_compute = launched.num_compute
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    token_ids = np.empty(num_rows, np.int32)
    positions = np.empty(num_rows, np.int64)
    slots = np.empty(num_rows, np.int64)
    logit_rows = np.arange(launched.num_rows, dtype=np.int32)
    prefill: list[_Segment] = []
    recomputed: list[_Segment] = []
    prompt_parts: list[PromptPart] = []
    row, joined = 0, num_compute
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        stop = row + chunk.num_tokens
        table = sequence.block_table.numpy()
        token_ids[row:stop] = chunk.token_ids
        at = np.arange(start, end)
        positions[row:stop] = at
        slots[row:stop] = table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        edge = min(max(sequence.num_prompt_tokens, start), end) if limits.deterministic else end
        if start < edge:
            prefill.append(_Segment(row, start, edge, table))
        if edge < end:
            recomputed.append(_Segment(row + edge - start, edge, end, table))
        if chunk.joins:
            logit_rows[joined] = num_compute + stop - 1
            joined += 1
        if sequence.num_prompt_logprobs is not None and not chunk.is_again:
            # Row p says how likely the token at p + 1 was; beyond the prompt nobody asks.
            count = max(min(end, sequence.num_prompt_tokens - 1) - start, 0)
            prompt_parts.append(PromptPart(chunk, num_compute + row, count))
        row = stop
    rows = ChunkRows(
        token_ids=_put(upload, token_ids, torch.int32),
        positions=_put(upload, positions, torch.int64),
        slot_mapping=_put(upload, slots, torch.int64),
        prefill=[
            group
            for part in _cut(prefill, max_keys)
            for group in _slabs(part, num_compute, num_heads, max_keys, upload)
        ],
        recomputed=[
            part for segment in recomputed for part in _recomputed(segment, num_compute, limits.max_num_seqs, upload)
        ],
    )
    return ChunkPlan(rows, _put(upload, logit_rows, torch.int32), prompt_parts)


def _cut(segments: Sequence[_Segment], max_keys: int) -> list[list[_Segment]]:
    """Runs of adjacent segments that are attended to in one call, all with a cached prefix, or none, within `max_keys`;
    and segments alone that have more keys."""
    groups: list[list[_Segment]] = []
    num_keys = 0
    for segment in segments:
        last = groups[-1][-1] if groups else None
        fits = (
            last is not None
            and (last.start > 0) == (segment.start > 0)
            and last.row + last.num_rows == segment.row
            and num_keys + segment.end <= max_keys
        )
        if not fits:
            groups.append([])
            num_keys = 0
        groups[-1].append(segment)
        num_keys += segment.end
    return groups


def _slabs(
    segments: Sequence[_Segment], num_compute: int, num_heads: int, max_keys: int, upload: StepUpload
) -> list[PrefillGroup]:
    """The calls that attend to the segments' keys: one, or one for each `max_keys` of a long history's."""
    start = num_compute + segments[0].row
    end = start + sum(s.num_rows for s in segments)
    longest = max(s.end for s in segments)
    tables: torch.Tensor | None = None
    if segments[0].start > 0 or longest > max_keys:
        width = max(-(-s.end // BLOCK_SIZE) for s in segments)
        blocks = np.zeros((len(segments), width), np.int32)
        for i, segment in enumerate(segments):
            num_blocks = -(-segment.end // BLOCK_SIZE)
            blocks[i, :num_blocks] = segment.table[:num_blocks]
        tables = _put(upload, blocks, torch.int32).view(len(segments), width)
    groups: list[PrefillGroup] = []
    for key_begin in range(0, longest, max_keys):
        plan = plan_prefill(
            [s.num_rows for s in segments],
            [s.end for s in segments],
            key_begin=key_begin,
            key_end=key_begin + max_keys if longest > max_keys else None,
            num_heads=num_heads,
        )
        plan = plan.on(_put(upload, plan.words, torch.int32))
        k_starts = None if tables is None else _put(upload, plan.k_starts, torch.int32)
        groups.append(PrefillGroup(start, end, plan, plan.num_keys, tables, k_starts))
    return groups


def _recomputed(segment: _Segment, num_compute: int, max_rows: int, upload: StepUpload) -> list[RecomputedRows]:
    """The segment's rows as sequences of their own, of one query each; at most `max_rows` together."""
    start, end = segment.start, segment.end
    # One table and one column of lengths for all parts: they may be as many as rows.
    table = _put(upload, segment.table[: -(-end // BLOCK_SIZE)], torch.int32)
    kv_lens = _put(upload, np.arange(start + 1, end + 1, dtype=np.int32), torch.int32)
    parts: list[RecomputedRows] = []
    for first in range(0, segment.num_rows, max_rows):
        last = min(first + max_rows, segment.num_rows)
        row = num_compute + segment.row
        tables = table.expand(last - first, table.shape[0])
        parts.append(RecomputedRows(row + first, row + last, kv_lens[first:last], tables))
    return parts


def _put(upload: StepUpload, values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return upload.view(upload.put(values), values.size, dtype)
