"""What one forward pass is asked to compute: a flat batch of rows cut into segments of sequences."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK_SIZE = 64  # tokens in one block of the latent cache


class Form(enum.Enum):
    """Which of the two equal formulations of MLA computes a segment.

    PREFILL expands the latents to heads of nope + rope (192) and v (128): less arithmetic for many rows.
    DECODE absorbs the expansion into the query and reads the latents (576, of which 512 are the value)
    as they lie in the cache: less memory traffic for few rows. They agree up to rounding; where equal
    bits are wanted (`deterministic`), a position must always be computed by the same form.
    """

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in the flat batch.

    The rows stand for positions [start_position, start_position + num_rows); the context, positions
    [0, start_position), is in the cache already. Row i of the segment attends to every position up to
    and including its own. One sequence may have several segments in one batch (a prompt's last chunk and
    the generated tokens after it, when a sequence is computed again), in the order of their positions.
    """

    start_row: int
    num_rows: int
    start_position: int
    block_table: torch.Tensor  # on the host, int32 or int64 [>= ceil((start_position + num_rows) / 64)], block ids
    form: Form

    @property
    def end_row(self) -> int:
        return self.start_row + self.num_rows

    @property
    def end_position(self) -> int:
        return self.start_position + self.num_rows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of several sequences, computed together in one pass.

    Rows that no segment covers are padding: their `slot_mapping` is -1 and nothing of them is kept.
    With `deterministic`, a PREFILL segment must start at a position that is a multiple of 64 and end at
    one, or at the end of its prompt.
    """

    token_ids: torch.Tensor  # int64 [num_rows]
    positions: torch.Tensor  # int64 [num_rows]
    slot_mapping: torch.Tensor  # int64 [num_rows]: block_id * 64 + offset, where the row's KV goes; -1 = padding
    segments: Sequence[Segment]
    logit_rows: torch.Tensor  # int64 [num_logits]: rows whose logits are wanted
    return_all_hidden: bool = False  # fill ForwardOutput.all_hidden: what MTP needs after a prefill

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def to(self, device: torch.device) -> ForwardBatch:
        """The same with its rows on `device`; block tables stay on the host, where the plan is made."""
        if self.token_ids.device == device:
            return self
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            logit_rows=self.logit_rows.to(device),
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass leaves.

    `hidden` is the state after the model's last norm, the one the head multiplies and the one that the
    MTP layer takes as its h_t.
    """

    logits: torch.Tensor  # float32 [num_logits, vocab_size], never rounded to a shorter type
    hidden: torch.Tensor  # compute dtype [num_logits, hidden_size]
    all_hidden: torch.Tensor | None = None  # compute dtype [num_rows, hidden_size], if it was asked for


def slots_of(block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Cache slots of positions [start, end): int64 [end - start], block_id * 64 + offset."""
    positions = torch.arange(start, end, device=block_table.device)
    blocks = block_table[torch.div(positions, BLOCK_SIZE, rounding_mode="floor")].to(torch.int64)
    return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


def build_batch(
    segments: Sequence[tuple[Sequence[int] | torch.Tensor, int, torch.Tensor, Form]],
    logit_rows: Sequence[int] | None = None,
    *,
    return_all_hidden: bool = False,
) -> ForwardBatch:
    """A batch from (token_ids, start_position, block_table, form) of each segment, rows in that order.

    `logit_rows` defaults to the last row of every segment. Plain and slow: for tests, tools and warm-up;
    the step loop advances its own buffers.
    """
    tokens: list[torch.Tensor] = []
    positions: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    parts: list[Segment] = []
    row = 0
    for token_ids, start, block_table, form in segments:
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        end = start + ids.shape[0]
        tokens.append(ids)
        positions.append(torch.arange(start, end))
        slots.append(slots_of(block_table, start, end))
        parts.append(Segment(row, ids.shape[0], start, block_table, form))
        row += ids.shape[0]
    empty = torch.empty(0, dtype=torch.int64)
    rows = [part.end_row - 1 for part in parts] if logit_rows is None else list(logit_rows)
    return ForwardBatch(
        token_ids=torch.cat(tokens) if tokens else empty,
        positions=torch.cat(positions) if positions else empty,
        slot_mapping=torch.cat(slots) if slots else empty,
        segments=tuple(parts),
        logit_rows=torch.tensor(rows, dtype=torch.int64),
        return_all_hidden=return_all_hidden,
    )
