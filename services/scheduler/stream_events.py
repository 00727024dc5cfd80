"""What the core tells the callers of its streams, and their telemetry."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from rorqual.core.errors import RorqualError


class FinishReason(IntEnum):
    """Why a history ended; the numbers are those of rorqual.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    ABORTED = 4
    ERROR = 5


# Named tuples: one is made a sequence and report, and they cost a third of a frozen dataclass.
class StreamStarted(NamedTuple):
    """First admission of a history."""

    stream_id: int
    num_cached_tokens: int
    queue_time_us: int
    seed: int


class StreamTokens(NamedTuple):
    """Generated tokens, in order. Empty only where prompt log-probabilities are carried alone."""

    stream_id: int
    token_ids: bytes | bytearray  # little-endian uint32
    logprobs: list[Any] | None = None  # rorqual.v1.TokenLogprobs, passed through
    prompt_logprobs: list[Any] | None = None


class StreamFinished(NamedTuple):
    """The end of a history; last of its stream."""

    stream_id: int
    reason: FinishReason
    stop_token_id: int | None
    num_cached_tokens: int
    queue_time_us: int
    num_generated_tokens: int


class StreamFailed(NamedTuple):
    """The failure of a request; last of its stream."""

    stream_id: int
    error: RorqualError


class StreamAdmitted(NamedTuple):
    """For telemetry only: the history was given to an executor (again, after a preemption or a loss)."""

    stream_id: int
    seq_id: int
    num_cached_tokens: int
    miss: str = ""  # why not more of it was cached; "" where all that could be was
    diverged_at: int | None = None  # the first token that is not as in the latest history that began alike


class StreamPreempted(NamedTuple):
    """For telemetry only: the history lost its blocks and waits to be admitted again."""

    stream_id: int
    why: str


StreamEvent: TypeAlias = StreamStarted | StreamTokens | StreamFinished | StreamFailed | StreamAdmitted | StreamPreempted
