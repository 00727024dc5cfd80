"""The errors that cross a boundary.

RorqualError
├── InvalidRequestError       the caller's fault: says which field, and what would be right
│   ├── PromptTooLongError
│   └── TemplateError
├── ModelNotFoundError        the named model is not served here
├── QueueFullError            retry later
├── CapacityError             the request can never fit this deployment's memory
├── DeadlineExceededError     its time ran out, or would run out in the queue
├── SupersededError           a higher attempt of the same request took over
├── PreconditionError         the peer's state does not allow it (digest, protocol, fingerprint)
├── UnavailableError          a part that is needed is not there now
├── CancelledRequestError     the caller went away
├── ConfigError               an impossible flag, variable or file
├── CheckpointError           a model folder that cannot be served
├── NumericalFaultError       the model computed inf or NaN for this sequence
├── LethalRequestError        the request ended each process that ran it; it is not run again
└── InternalError             a bug of ours; its text stays in the log

Each carries a machine-readable `reason`, metadata (the figures behind it) and, where there is one, the
offending field. `rorqual.rpc.status` maps each class to a gRPC status.
"""

from __future__ import annotations

from collections.abc import Mapping

RETRY_AFTER_S = "retry_after_s"
"""In metadata: when the caller may try again, in whole seconds, where that could be estimated."""

DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
"""The reason of a DeadlineExceededError that came early: those that wait before it need longer than it has."""


class RorqualError(Exception):
    """Base of all. `str(error)` names the fault and the cure."""

    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.field = field
        self.metadata: dict[str, str] = dict(metadata or {})


class InvalidRequestError(RorqualError):
    reason = "INVALID_ARGUMENT"


class PromptTooLongError(InvalidRequestError):
    reason = "PROMPT_TOO_LONG"


class TemplateError(InvalidRequestError):
    reason = "TEMPLATE_ERROR"


class ModelNotFoundError(RorqualError):
    reason = "MODEL_NOT_FOUND"


class QueueFullError(RorqualError):
    reason = "QUEUE_FULL"


class CapacityError(RorqualError):
    reason = "KV_CACHE_TOO_SMALL"


class DeadlineExceededError(RorqualError):
    reason = "DEADLINE_EXCEEDED"


class SupersededError(RorqualError):
    reason = "SUPERSEDED"


class PreconditionError(RorqualError):
    reason = "FAILED_PRECONDITION"


class UnavailableError(RorqualError):
    reason = "UNAVAILABLE"


class CancelledRequestError(RorqualError):
    reason = "CANCELLED"


class ConfigError(RorqualError):
    reason = "INVALID_CONFIG"


class CheckpointError(RorqualError):
    reason = "INVALID_CHECKPOINT"


class NumericalFaultError(RorqualError):
    reason = "NUMERICAL_FAULT"


class LethalRequestError(RorqualError):
    reason = "REQUEST_KILLS_EXECUTOR"


class InternalError(RorqualError):
    reason = "INTERNAL"
