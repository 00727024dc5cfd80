"""The one table from errors to HTTP answers in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rorqual.core import errors

INTERNAL_TEXT = "internal error; the server's log has it under this request's id"
_RETRY_AFTER_S = 1  # where the one that refused gave no estimate
_MOST_RETRY_AFTER_S = 60


class ErrorObject(msgspec.Struct):
    """What went wrong, and the field that was at fault, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error body."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class PromptLength:
    """The figures of a prompt that does not fit."""

    num_tokens: int
    limit: int  # of the prompt and at least one generated token
    num_chars: int | None = None  # where the prompt was not encoded: `num_tokens` is then the least that they can be

    @property
    def note(self) -> str:
        """What a dialect's sentence does not say, to be put behind it."""
        if self.num_chars is None:
            return ""
        return f" (It was not encoded: {self.num_tokens} is the least that its {self.num_chars} characters can be.)"


@dataclass(frozen=True, slots=True)
class Failure:
    """One HTTP error answer."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt_length: PromptLength | None = None  # of a prompt that is too long, where the figures are known

    def body(self) -> bytes:
        """{"error": {…}} as JSON."""
        return msgspec.json.encode(ErrorBody(ErrorObject(self.message, self.type, self.param, self.code)))


def _same(name: str) -> str:
    return name


def _openai_too_long(length: PromptLength) -> str:
    more = ", and the answer takes at least 1" if length.num_tokens <= length.limit else ""
    return (
        f"This model's maximum context length is {length.limit} tokens. However, your messages resulted in "
        f"{length.num_tokens} tokens{more}. Please reduce the length of the messages.{length.note}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How one dialect writes a failure. The request id is the second argument of both writers."""

    body_type: type[msgspec.Struct]
    body: Callable[[Failure, str], bytes]  # a whole answer
    events: Callable[[Failure, str], bytes]  # what ends a stream that had begun
    id_header: str = ""  # a further header for the request's id, on every answer
    rename: Callable[[str], str] = _same  # from a field of OpenAI's chat body to this dialect's
    too_long: Callable[[PromptLength], str] = _openai_too_long
    """The words by which this dialect's clients know that they have to shorten the conversation."""

    def spell(self, failure: Failure) -> Failure:
        """`failure` with its field named as the client wrote it, and in the words that its clients look for."""
        if failure.prompt_length is not None:
            failure = replace(failure, message=self.too_long(failure.prompt_length))
        param = failure.param
        if param is None or (name := self.rename(param)) == param:
            return failure
        message = failure.message
        if message.startswith(param):
            message = name + message[len(param) :]
        return replace(failure, param=name, message=message)


OPENAI_ERRORS = ErrorShape(
    body_type=ErrorBody,
    body=lambda failure, request_id: failure.body(),
    events=lambda failure, request_id: b"data: " + failure.body() + b"\n\n",
)


class HttpError(Exception):
    """A failure that HTTP itself brings, before any part of the engine is asked."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    retry: bool = False
    is_final: bool = False  # OpenAI's and Anthropic's clients must not try again, whatever they do with its status


_INVALID = _Row(400, "invalid_request_error")

_TABLE: dict[type[errors.RorqualError], _Row] = {
    errors.InvalidRequestError: _INVALID,
    errors.ModelNotFoundError: _Row(404, "invalid_request_error"),
    errors.QueueFullError: _Row(429, "rate_limit_error", retry=True),
    errors.CapacityError: _INVALID,  # it can never fit: trying again is no cure
    errors.DeadlineExceededError: _Row(408, "timeout_error"),
    errors.SupersededError: _Row(409, "conflict_error"),
    errors.PreconditionError: _Row(503, "service_unavailable", retry=True),
    errors.UnavailableError: _Row(503, "service_unavailable", retry=True),
    errors.CancelledRequestError: _Row(499, "request_cancelled"),
    errors.LethalRequestError: _Row(500, "server_error", is_final=True),  # its text says what the caller can do
}

# Where the reason says more than the class.
_BY_REASON: dict[str, _Row] = {
    "NO_CHAT_TEMPLATE": _INVALID,
    "REQUEST_TOO_LARGE": _Row(413, "invalid_request_error"),
    "SLOW_CLIENT": _Row(408, "timeout_error"),
    errors.DEADLINE_UNREACHABLE: _Row(429, "rate_limit_error", retry=True),  # nothing ran: the queue is too long
}

_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "QUEUE_FULL": "rate_limit_exceeded"}


def failure_of(error: BaseException) -> Failure:
    """The answer to `error`. Text of an unknown error is not leaked: it becomes a plain 500."""
    if isinstance(error, HttpError):
        return error.failure
    if isinstance(error, errors.RorqualError):
        row = _BY_REASON.get(error.reason) or next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), None)
        if row is not None:
            return Failure(
                row.status,
                error.message,
                row.type,
                error.field.removeprefix("sampling.") or None,  # OpenAI's bodies have those fields at their top
                _CODES.get(error.reason) or error.reason.lower(),
                _headers(row, error),
                _prompt_length(error) if error.reason == errors.PromptTooLongError.reason else None,
            )
    return Failure(500, INTERNAL_TEXT, "server_error", code="internal_error")


def _headers(row: _Row, error: errors.RorqualError) -> dict[str, str]:
    if row.is_final:
        return {"x-should-retry": "false"}
    return {"retry-after": str(_retry_after_s(error))} if row.retry else {}


def _prompt_length(error: errors.RorqualError) -> PromptLength | None:
    """The figures behind a PROMPT_TOO_LONG; None where whoever made it gave none."""
    figures = {name: int(text) for name, text in error.metadata.items() if text.isdecimal()}
    tokens, limit = figures.get("num_prompt_tokens", figures.get("min_prompt_tokens")), figures.get("max_model_len")
    if tokens is None or limit is None:
        return None
    return PromptLength(tokens, limit, None if "num_prompt_tokens" in figures else figures.get("num_chars"))


def _retry_after_s(error: errors.RorqualError) -> int:
    """The scheduler's estimate of when its queue is shorter, within bounds."""
    estimate = error.metadata.get(errors.RETRY_AFTER_S, "")
    return max(1, min(_MOST_RETRY_AFTER_S, int(estimate))) if estimate.isdecimal() else _RETRY_AFTER_S


def not_found(path: str) -> HttpError:
    return HttpError(Failure(404, f"no such endpoint: {path}", "invalid_request_error", code="unknown_url"))


def method_not_allowed(method: str, path: str, allowed: str) -> HttpError:
    message = f"{method} is not allowed on {path}: use {allowed}"
    return HttpError(
        Failure(405, message, "invalid_request_error", code="method_not_allowed", headers={"allow": allowed})
    )


def body_too_large(limit_bytes: int, size_bytes: int | None) -> HttpError:
    """`size_bytes`: what the client announced, where it did."""
    size = f"is {size_bytes} bytes" if size_bytes is not None else "is longer"
    message = f"the request body {size}; at most {limit_bytes} bytes are taken"
    return HttpError(
        Failure(413, message, "invalid_request_error", code="request_too_large", headers={"connection": "close"})
    )


def bad_key(given: bool) -> HttpError:
    """`given`: a key was sent, but none of ours."""
    message = (
        "this API key is not valid here"
        if given
        else "no API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    return HttpError(
        Failure(401, message, "authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    )
