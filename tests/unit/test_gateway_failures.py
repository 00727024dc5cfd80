"""The one table from errors to HTTP."""

from __future__ import annotations

import json

import pytest

from gateway.failures import (
    INTERNAL_TEXT,
    HttpError,
    bad_key,
    body_too_large,
    failure_of,
    method_not_allowed,
    not_found,
)
from rorqual.core import errors

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.RorqualError)]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequestError("x", field="f"), 400, "invalid_argument"),
        (errors.PromptTooLongError("x"), 400, "context_length_exceeded"),
        (errors.TemplateError("x"), 400, "template_error"),
        (errors.ModelNotFoundError("x"), 404, "model_not_found"),
        (errors.QueueFullError("x"), 429, "rate_limit_exceeded"),
        (errors.CapacityError("x"), 400, "kv_cache_too_small"),
        (errors.DeadlineExceededError("x"), 408, "deadline_exceeded"),
        (errors.SupersededError("x"), 409, "superseded"),
        (errors.PreconditionError("x", reason="NO_CHAT_TEMPLATE"), 400, "no_chat_template"),
        (errors.PreconditionError("x", reason="PROMPT_DIGEST_MISMATCH"), 503, "prompt_digest_mismatch"),
        (errors.UnavailableError("x"), 503, "unavailable"),
        (errors.UnavailableError("x", reason="SCHEDULER_UNAVAILABLE"), 503, "scheduler_unavailable"),
        (errors.InvalidRequestError("x", reason="REQUEST_TOO_LARGE"), 413, "request_too_large"),
    ],
)
def test_status_and_code(error: errors.RorqualError, status: int, code: str) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.code, failure.message) == (status, code, "x")
    assert ("retry-after" in failure.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [({}, "1"), ({"retry_after_s": "7"}, "7"), ({"retry_after_s": "0"}, "1"), ({"retry_after_s": "9999"}, "60"),
     ({"retry_after_s": "soon"}, "1"), ({"retry_after_s": "-3"}, "1")],
)  # fmt: skip
def test_retry_after_is_the_estimate_within_bounds(metadata: dict[str, str], seconds: str) -> None:
    assert failure_of(errors.QueueFullError("x", metadata=metadata)).headers["retry-after"] == seconds
    assert "retry-after" not in failure_of(errors.InvalidRequestError("x", metadata=metadata)).headers
    early = failure_of(errors.DeadlineExceededError("x", reason=errors.DEADLINE_UNREACHABLE, metadata=metadata))
    assert (early.status, early.code, early.headers["retry-after"]) == (429, "deadline_unreachable", seconds)


@pytest.mark.parametrize(
    ("field", "param"),
    [("sampling.logit_bias", "logit_bias"), ("messages[0].content", "messages[0].content"), ("", None)],
)
def test_param_is_the_field_of_the_http_body(field: str, param: str | None) -> None:
    assert failure_of(errors.InvalidRequestError("x", field=field)).param == param


@pytest.mark.parametrize("cls", ALL)
def test_every_error_has_an_answer_in_openais_shape(cls: type[errors.RorqualError]) -> None:
    failure = failure_of(cls("what happened", field="somewhere"))
    assert 400 <= failure.status < 600
    error = json.loads(failure.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(isinstance(error[key], str) for key in ("message", "type", "code"))


@pytest.mark.parametrize("error", [ValueError("/secret/path"), errors.InternalError("/secret"), KeyError("secret")])
def test_nothing_of_an_unknown_error_leaks(error: Exception) -> None:
    failure = failure_of(error)
    assert (failure.status, failure.message) == (500, INTERNAL_TEXT)
    assert b"secret" not in failure.body()
    assert b"Error" not in failure.body()


def test_the_failures_of_http_itself() -> None:
    made: list[tuple[HttpError, int]] = [
        (not_found("/x"), 404),
        (method_not_allowed("PUT", "/x", "GET"), 405),
        (body_too_large(10, 20), 413),
        (body_too_large(10, None), 413),
        (bad_key(True), 401),
        (bad_key(False), 401),
    ]
    assert [failure_of(error).status for error, _ in made] == [status for _, status in made]
    assert made[1][0].failure.headers == {"allow": "GET"}
