"""The scheduler's rules of thumb, as pure functions of numbers."""

from __future__ import annotations

import math

from rorqual.core.blocks import BLOCK_SIZE

_HIDDEN_US = 20_000
"""How much run-ahead a grant should hide at least: a late report, and a network where no round trip was measured yet."""

_SOONEST_RETRY_S = 1
_LATEST_RETRY_S = 60

_LEAST_AHEAD = BLOCK_SIZE // 2
_MOST_AHEAD = 8 * BLOCK_SIZE
_RUNNING_TOKENS = 16
_FEWEST_COPIED = 8


def cut_chunk(start: int, history_end: int, room: int) -> int:
    """Where a chunk from `start` ends: at most `room` tokens later, at a block edge unless it ends the history.

    A block edge, so that the block is full and can be shared at once; and so that chunk edges stand at fixed
    positions. `start` is a block edge. Raises ValueError if not even one block fits.
    """
    if room < BLOCK_SIZE:
        raise ValueError(f"room must be >= {BLOCK_SIZE}, got {room}")
    end = min(history_end, start + room)
    return end if end == history_end else end - end % BLOCK_SIZE


def chunk_room(max_num_batched_tokens: int, max_num_seqs: int, num_draft_tokens: int) -> int:
    """Tokens of a step that chunks may take: what the largest decode set leaves."""
    return max_num_batched_tokens - max_num_seqs * (1 + num_draft_tokens)


def shared_room(room: int) -> int:
    """The size of a chunk whose step is shared with another sequence's: half, in whole blocks."""
    return max(BLOCK_SIZE, room // 2 // BLOCK_SIZE * BLOCK_SIZE)


def tokens_ahead(step_time_us: float, tokens_per_step: int, round_trip_us: float) -> int:
    """How far a sequence is granted ahead of its newest token, where memory allows.

    Enough to run on for two round trips: one until the executor has what we send on a report, and as much again for
    their jitter. `round_trip_us`: from an order to the report that acknowledges it, without the step between.
    """
    if step_time_us <= 0.0:
        return 2 * BLOCK_SIZE
    hidden_us = max(_HIDDEN_US, 2.0 * round_trip_us)
    hidden = min(_MOST_AHEAD, hidden_us / step_time_us * tokens_per_step)  # bounded first: the quotient may be inf
    return max(_LEAST_AHEAD, min(_MOST_AHEAD, int(hidden) + tokens_per_step))


def most_ahead_blocks(num_blocks: int) -> int:
    """Blocks that may be granted ahead of all newest tokens together, beside one a sequence."""
    return num_blocks // 4


def affordable_ahead(ahead: int, num_free_blocks: int, num_running: int, num_grantable_blocks: int) -> int:
    """`ahead`, or less when memory is short: grants nobody has reached yet never take more than half of what is free.

    Nor, all together, more than `most_ahead_blocks`, of which `num_grantable_blocks` are left.
    """
    share = min(num_free_blocks * BLOCK_SIZE // (2 * max(1, num_running)), num_grantable_blocks * BLOCK_SIZE)
    return max(min(ahead, _LEAST_AHEAD), min(ahead, share))


def is_urgent(num_tokens: int, limit: int, ahead: int) -> bool:
    """Whether a sequence without a further block is about to stand still, so that another must give way."""
    return limit - num_tokens < min(ahead, _LEAST_AHEAD) // 2


def watermark(num_blocks: int, num_running: int) -> int:
    """Free blocks that admission leaves to the running: one for every fourth, and a hundredth of the pool."""
    return (num_running + 3) // 4 + num_blocks // 100


def readmission_headroom(num_blocks: int) -> int:
    """Free blocks wanted beyond the watermark before a preempted history returns beside others.

    Without it the one that displaced it grows a block and displaces it again, a whole prefill for nothing.
    """
    return num_blocks // 8


def is_worth_copying(num_tokens: int) -> bool:
    """Whether so many tokens of a block are copied from a sibling's rather than computed again.

    Measured on an H200 (DeepSeek-V2-Lite's shape), a prompt token costs 4.2 us beside others, so a block up to 270 us; a
    copy through all layers is one launch of some 10 us. Where a sibling would have to wait for the copy it computes: a
    step takes milliseconds.
    """
    return num_tokens >= _FEWEST_COPIED


def retry_after_s(wait_s: float) -> int:
    """When a request that was refused may come again, in whole seconds: the queue is expected to be shorter then."""
    return max(_SOONEST_RETRY_S, min(_LATEST_RETRY_S, math.ceil(wait_s)))


def executor_load(prefill_backlog: int, num_running: int) -> int:
    """How busy an executor is as a newcomer meets it, in tokens: the prefill before its own, and company."""
    return prefill_backlog + _RUNNING_TOKENS * num_running
