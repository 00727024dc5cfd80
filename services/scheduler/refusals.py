"""What a stream ends with that is refused or that an executor gave up: the errors, with their figures."""

from __future__ import annotations

from rorqual.core.errors import (
    DEADLINE_UNREACHABLE,
    RETRY_AFTER_S,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NumericalFaultError,
    QueueFullError,
    RorqualError,
    SupersededError,
)

from . import policy
from .drain_rate import DrainRate, Work
from .events import Request


def too_many_wait(num_waiting: int, max_queue_len: int, drain: DrainRate, now_s: float) -> RorqualError:
    """The queue is full."""
    metadata = {"max_queue_len": str(max_queue_len)}
    if (likely_s := drain.wait_s(num_waiting, now_s)) is not None:
        metadata[RETRY_AFTER_S] = str(policy.retry_after_s(likely_s))
    return QueueFullError(f"{num_waiting} requests are waiting already; try again later", metadata=metadata)


def too_late(request: Request, ahead: Work, drain: DrainRate, now_s: float) -> RorqualError | None:
    """The refusal of a new request that has less time than those need that wait before it; None where it may be in time."""
    if request.deadline_s is None:
        return None
    left_s = request.deadline_s - now_s
    wait_s = drain.least_wait_s(ahead, now_s)
    if wait_s is None or wait_s <= left_s or left_s <= 0.0:
        return None
    return DeadlineExceededError(
        f"its deadline is in {left_s:.3f} s, but {ahead[0]} requests wait before it, for which at least {wait_s:.1f} s "
        "are needed at the present rate: try again later, or allow more time",
        reason=DEADLINE_UNREACHABLE,
        metadata={
            "time_left_ms": str(round(1e3 * left_s)),
            "estimated_wait_ms": str(round(1e3 * wait_s)),
            "num_waiting_before": str(ahead[0]),
            RETRY_AFTER_S: str(policy.retry_after_s(wait_s - left_s)),
        },
    )


def not_newer(request_id: str, live: int, attempt: int) -> RorqualError:
    """The refusal of an attempt where a higher one, or the same, is live."""
    if attempt < live:
        return SupersededError(f"attempt {live} of this request is live; attempt {attempt} is older")
    return InvalidRequestError(
        f"request {request_id!r} is live already: draw an id for each request, or resume with a higher attempt",
        reason="DUPLICATE_REQUEST_ID",
        field="request_id",
    )


def fault_error(reason: str, message: str) -> RorqualError:
    """What a stream fails with where an executor ended its sequence (executor_pb2.SequenceFault)."""
    if reason == "CONSTRAINT_TOO_COMPLEX":
        return InvalidRequestError(message, reason=reason)
    if reason in ("", NumericalFaultError.reason):
        return NumericalFaultError(message)
    return InternalError(message)
