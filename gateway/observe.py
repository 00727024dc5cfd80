"""The span and the metrics of one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from rorqual.core.clock import Clock
from rorqual.telemetry import (
    ATTR_CACHED_TOKENS,
    ATTR_FINISH_REASONS,
    ATTR_INPUT_TOKENS,
    ATTR_MODEL,
    ATTR_OUTPUT_TOKENS,
    ATTR_REQUEST_ID,
    Telemetry,
    context_from_pairs,
)
from rorqual.v1 import text_pb2

from .upstream.inbox import Inbox

OPERATIONS = ("chat", "text_completion", "tokenize", "detokenize")


class Meters:
    """The gateway's metrics, looked up once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.requests = telemetry.metric("http_requests_total")
        self.in_flight = telemetry.metric("http_requests_in_flight")
        self.slow_clients = telemetry.metric("slow_clients_total")
        self.slow_client_pauses = telemetry.metric("slow_client_pauses_total")
        self.disconnects = telemetry.metric("client_disconnects_total")
        self.duration = telemetry.metric("gen_ai_server_request_duration_seconds")
        self.first_token = telemetry.metric("gen_ai_server_time_to_first_token_seconds")
        self.token_time = telemetry.metric("gen_ai_server_time_per_output_token_seconds")


class OperationSpan(AbstractContextManager["OperationSpan"]):
    """The server span of one operation, `gateway.<operation>`, and its durations."""

    def __init__(
        self,
        telemetry: Telemetry,
        meters: Meters,
        clock: Clock,
        *,
        operation: str,
        headers: Mapping[str, str],
        attributes: Mapping[str, Any],
    ) -> None:
        """`headers`: the request's, with a traceparent perhaps."""
        self._meters = meters
        self._clock = clock
        self._operation = operation
        self.began_s = clock.monotonic_s()
        self.span: trace.Span = telemetry.tracer.start_span(
            f"gateway.{operation}",
            context=context_from_pairs(headers.items()),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "rorqual", **attributes},
        )

    def __enter__(self) -> OperationSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._meters.duration.labels(self._operation).observe(self._clock.monotonic_s() - self.began_s)
        if error is not None:
            # The class alone: messages may quote what a client wrote.
            self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            self.span.set_attribute("error.type", getattr(error, "reason", type(error).__name__))
        self.span.end()

    def describe(self, request_id: str, client_request_id: str, model: str) -> None:
        """Who asks for what."""
        span = self.span
        if span.is_recording():
            span.set_attribute(ATTR_REQUEST_ID, request_id)
            span.set_attribute(ATTR_MODEL, model)
            if client_request_id:
                span.set_attribute("rorqual.client_request_id", client_request_id)

    def tokens(self, inbox: Inbox) -> None:
        """Times of the first and of the later tokens."""
        if inbox.first_token_s is None:
            return
        self._meters.first_token.labels(self._operation).observe(inbox.first_token_s - self.began_s)
        self.span.add_event("first token", {"rorqual.time_to_first_token_s": inbox.first_token_s - self.began_s})
        if inbox.num_tokens > 1:
            spent_s = inbox.last_token_s - inbox.first_token_s
            self._meters.token_time.labels(self._operation).observe(spent_s / (inbox.num_tokens - 1))

    def usage(self, usages: Iterable[text_pb2.Usage], finish_reasons: list[str]) -> None:
        """What it came to."""
        span = self.span
        if span.is_recording():
            usages = list(usages)
            span.set_attribute(ATTR_INPUT_TOKENS, sum(usage.num_prompt_tokens for usage in usages))
            span.set_attribute(ATTR_OUTPUT_TOKENS, sum(usage.num_generated_tokens for usage in usages))
            span.set_attribute(ATTR_CACHED_TOKENS, sum(usage.num_cached_tokens for usage in usages))
            span.set_attribute(ATTR_FINISH_REASONS, finish_reasons)
