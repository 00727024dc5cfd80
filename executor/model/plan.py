"""What a forward pass needs that does not change from layer to layer, made once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .batch import BLOCK_SIZE, Form, ForwardBatch, Segment, slots_of

GATHER_ROWS = 4096
"""Latent rows that one decode group gathers at a time.

Measured on 2 AVX2 cores (32 MiB of L3), float32, 16 sequences a layer: at context 300 groups of 8 or 16 take 1.7 to
2.0 ms and single sequences 2.7; at 1000 groups of 4 take 6.2 and one of 16 takes 11 to 34; at 2000 groups of 2 take
13 and larger ones 19 to 60. About 9 MB a gather is best everywhere.
"""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows that attend together, each over its own sequence, padded to the longest context."""

    start: int  # rows [start, end) of the step's decode rows, in the plan's order
    end: int
    context: int  # the longest
    slots: torch.Tensor | None  # int64 [rows * context]; past a row's context, its first slot
    first_slot: int  # where slots is None: one row, whose context lies in consecutive slots from here
    mask: torch.Tensor | None  # compute dtype [rows, 1, 1, context], 0 or -inf; None if nothing is padded


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    start_row: int  # within the step's prefill rows
    num_rows: int
    start_position: int
    slots: torch.Tensor  # int64 [end_position], every position up to the last row's


@dataclass(frozen=True, slots=True)
class StepPlan:
    slots: torch.Tensor  # int64 [num_rows], padding rows directed to the cache's padding block
    angles: torch.Tensor  # float32 [num_rows, rope_dim / 2, 2], cos and sin
    decode_rows: torch.Tensor | None  # int64 rows, in the groups' order; None if it is all rows in order
    decode_groups: Sequence[DecodeGroup]
    prefill_rows: torch.Tensor | None  # int64 rows, in the segments' order; None if it is all rows in order
    prefill_segments: Sequence[PrefillSegment]
    has_decode: bool
    has_prefill: bool


def make_plan(
    batch: ForwardBatch, angles: torch.Tensor, *, padding_slot: int, dtype: torch.dtype, one_by_one: bool
) -> StepPlan:
    """`one_by_one`: every decode row is a group of its own, so what it computes depends on its position only."""
    num_rows = batch.num_rows
    slots = torch.where(batch.slot_mapping < 0, padding_slot, batch.slot_mapping)
    decode = [segment for segment in batch.segments if segment.form is Form.DECODE and segment.num_rows]
    prefill = [segment for segment in batch.segments if segment.form is Form.PREFILL and segment.num_rows]
    rows: list[int] = []
    groups: list[DecodeGroup] = []
    if decode:
        rows, groups = _decode_groups(decode, dtype, one_by_one, slots.device)
    prefill_segments: list[PrefillSegment] = []
    prefill_rows: list[torch.Tensor] = []
    start = 0
    for segment in prefill:
        prefill_rows.append(torch.arange(segment.start_row, segment.end_row, device=slots.device))
        prefill_segments.append(
            PrefillSegment(
                start,
                segment.num_rows,
                segment.start_position,
                slots_of(segment.block_table, 0, segment.end_position).to(slots.device),
            )
        )
        start += segment.num_rows
    in_order = all(part.start_row == s.start_row for part, s in zip(prefill_segments, prefill, strict=True))
    all_prefill = start == num_rows and in_order
    return StepPlan(
        slots=slots,
        angles=angles,
        decode_rows=None if rows == list(range(num_rows)) else torch.tensor(rows, device=slots.device),
        decode_groups=groups,
        prefill_rows=None if all_prefill or not prefill else torch.cat(prefill_rows),
        prefill_segments=prefill_segments,
        has_decode=bool(decode),
        has_prefill=bool(prefill),
    )


def _decode_groups(
    segments: Sequence[Segment], dtype: torch.dtype, one_by_one: bool, device: torch.device
) -> tuple[list[int], list[DecodeGroup]]:
    """The decode rows in the order of their groups, and the groups."""
    entries = [
        (segment.start_position + i + 1, segment.start_row + i, segment.block_table)
        for segment in segments
        for i in range(segment.num_rows)
    ]  # (context, row, block table)
    if not one_by_one and sum(entry[0] for entry in entries) > GATHER_ROWS:
        entries.sort(key=lambda entry: entry[0])  # like lengths together: less padding
    groups: list[DecodeGroup] = []
    start = 0
    while start < len(entries):
        end, longest = start + 1, entries[start][0]
        while not one_by_one and end < len(entries):
            longest_then = max(longest, entries[end][0])
            if (end + 1 - start) * longest_then > GATHER_ROWS:
                break
            end, longest = end + 1, longest_then
        groups.append(_group(entries[start:end], start, longest, dtype, device))
        start = end
    return [entry[1] for entry in entries], groups


def _group(
    entries: Sequence[tuple[int, int, torch.Tensor]], start: int, longest: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    num_blocks = -(-longest // BLOCK_SIZE)
    if len(entries) == 1:
        table = entries[0][2][:num_blocks]
        blocks = table.tolist()
        if blocks == list(range(blocks[0], blocks[0] + num_blocks)):
            return DecodeGroup(start, start + 1, longest, None, blocks[0] * BLOCK_SIZE, None)
        return DecodeGroup(start, start + 1, longest, slots_of(table, 0, longest).to(device), 0, None)
    tables = [table[: -(-context // BLOCK_SIZE)] for context, _, table in entries]
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(torch.int64)
    offsets = torch.arange(longest, device=padded.device)
    in_block = torch.arange(BLOCK_SIZE, device=padded.device)
    slots = (padded.unsqueeze(2) * BLOCK_SIZE + in_block).flatten(1)[:, :longest]
    mask = None
    if any(context != longest for context, _, _ in entries):
        contexts = torch.tensor([context for context, _, _ in entries], device=padded.device)
        beyond = offsets >= contexts.unsqueeze(1)
        slots = torch.where(beyond, slots[:, :1], slots)  # a slot with real numbers: 0 * NaN would be NaN
        mask = torch.zeros(beyond.shape, dtype=dtype, device=padded.device).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None, :].to(device)
    return DecodeGroup(start, start + len(entries), longest, slots.flatten().to(device), 0, mask)
