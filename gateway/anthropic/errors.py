"""Anthropic's error body."""

from __future__ import annotations

import msgspec

from ..failures import ErrorShape, Failure, PromptLength

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",  # nothing else of Anthropic's means "try again later"
}


class ErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    type: str = "error"
    error: ErrorDetail
    request_id: str


def _body(failure: Failure, request_id: str) -> bytes:
    kind = _TYPES.get(failure.status, "invalid_request_error")
    return msgspec.json.encode(MessagesErrorBody(error=ErrorDetail(kind, failure.message), request_id=request_id))


def _events(failure: Failure, request_id: str) -> bytes:
    return b"event: error\ndata: " + _body(failure, request_id) + b"\n\n"


def _too_long(length: PromptLength) -> str:
    """Anthropic's words, by which its clients compact a conversation instead of giving up."""
    most = length.limit if length.num_tokens > length.limit else length.num_tokens - 1  # the answer takes a token
    return f"prompt is too long: {length.num_tokens} tokens > {most} maximum{length.note}"


def _field_name(name: str) -> str:
    """The name of a chat's field as Anthropic's body spells it."""
    if name.startswith("tools["):
        return name.replace("].function.parameters", "].input_schema", 1).replace("].function", "]", 1)
    for ours in ("response_format.json_schema.schema", "constraint.json_schema"):
        if name.startswith(ours):
            return "output_config.format.schema" + name[len(ours) :]
    return {
        "constraint": "output_config.format",
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
    }.get(name, name)


ANTHROPIC_ERRORS = ErrorShape(
    body_type=MessagesErrorBody,
    body=_body,
    events=_events,
    id_header="request-id",
    rename=_field_name,
    too_long=_too_long,
)
