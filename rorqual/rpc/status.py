"""The one table between errors and gRPC statuses, both ways."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from rorqual.core import errors
from rorqual.v1 import common_pb2

DOMAIN = "rorqual"

_CODES: dict[type[errors.RorqualError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLongError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TemplateError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.SupersededError: grpc.StatusCode.ABORTED,
    errors.PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.CancelledRequestError: grpc.StatusCode.CANCELLED,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NumericalFaultError: grpc.StatusCode.INTERNAL,
    errors.LethalRequestError: grpc.StatusCode.INTERNAL,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}

# From a peer: by reason first (two classes may share a code), then by code.
_BY_REASON: dict[str, type[errors.RorqualError]] = {cls.reason: cls for cls in _CODES}
_BY_CODE: dict[int, type[errors.RorqualError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: errors.InvalidRequestError,
    grpc.StatusCode.NOT_FOUND.value[0]: errors.ModelNotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: errors.QueueFullError,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: errors.DeadlineExceededError,
    grpc.StatusCode.ABORTED.value[0]: errors.SupersededError,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: errors.PreconditionError,
    grpc.StatusCode.UNAVAILABLE.value[0]: errors.UnavailableError,
    grpc.StatusCode.CANCELLED.value[0]: errors.CancelledRequestError,
}

INTERNAL_TEXT = "internal error; the log of the process that failed has it under this request's trace id"


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status of an error; INTERNAL for whatever is not in the table."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def to_error_proto(error: BaseException) -> common_pb2.Error:
    """An error as an event of a stream. Text of an unknown error is not leaked."""
    if not isinstance(error, errors.RorqualError) or isinstance(error, errors.InternalError):
        return common_pb2.Error(code=code_pb2.INTERNAL, reason="INTERNAL", message=INTERNAL_TEXT)
    return common_pb2.Error(
        code=code_of(error).value[0],
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        field=error.field,
    )


def from_error_proto(proto: common_pb2.Error) -> errors.RorqualError:
    """The error that a stream's event stands for."""
    cls = _BY_REASON.get(proto.reason) or _BY_CODE.get(proto.code, errors.InternalError)
    return cls(proto.message, reason=proto.reason or None, field=proto.field, metadata=dict(proto.metadata))


def to_status(error: BaseException) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo and, where a field is at fault, BadRequest; RetryInfo where it is known when."""
    proto = to_error_proto(error)
    details: list[any_pb2.Any] = []
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=proto.reason, domain=DOMAIN, metadata=dict(proto.metadata)))
    details.append(info)
    if proto.field:
        bad = any_pb2.Any()
        violation = error_details_pb2.BadRequest.FieldViolation(field=proto.field, description=proto.message)
        bad.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        details.append(bad)
    if (seconds := proto.metadata.get(errors.RETRY_AFTER_S, "")).isdecimal():
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=int(seconds))))
        details.append(retry)
    return status_pb2.Status(code=proto.code, message=proto.message, details=details)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with the status of `error`."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, trailing_metadata=tuple(status.trailing_metadata))
    raise AssertionError("abort returns never")


def from_rpc_error(error: grpc.RpcError) -> errors.RorqualError:
    """The error behind a failed call, with the details that its server attached."""
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    reason, metadata, field = "", {}, ""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None
    for detail in status.details if status is not None else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    cls = _BY_REASON.get(reason) or _BY_CODE.get(code.value[0], errors.InternalError)
    return cls(message, reason=reason or None, field=field, metadata=metadata)


def describe(error: errors.RorqualError) -> str:
    """One line for a log: reason, message and figures."""
    figures = f" {json.dumps(error.metadata, sort_keys=True)}" if error.metadata else ""
    return f"{error.reason}: {error.message}{figures}"
