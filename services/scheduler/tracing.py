"""One request's spans: the whole of it, and inside it queue, prefill and decode."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from rorqual import telemetry as t
from rorqual.v1 import common_pb2

from .events import Request
from .stream_events import (
    FinishReason,
    StreamAdmitted,
    StreamEvent,
    StreamFailed,
    StreamFinished,
    StreamPreempted,
    StreamStarted,
    StreamTokens,
)


class RequestTrace:
    """Follows a stream's events. Phases change a few times a request; a delta costs one comparison."""

    __slots__ = ("_context", "_in_decode", "_phase", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, parent: Context | None) -> None:
        self._tracer = tracer
        self._span: Span = tracer.start_span("scheduler.generate", context=parent, kind=SpanKind.SERVER)
        self._context = trace.set_span_in_context(self._span)
        self._phase: Span | None = None
        self._in_decode = False

    @property
    def proto(self) -> common_pb2.TraceContext:
        """What orders carry, so that the executor's spans hang below this one."""
        return t.context_to_proto(self._span)

    def opened(self, request: Request, model: str) -> None:
        """The request was understood, and waits."""
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    t.ATTR_REQUEST_ID: request.request_id,
                    t.ATTR_MODEL: model,
                    t.ATTR_INPUT_TOKENS: request.num_prompt_tokens,
                }
            )
            self._enter("scheduler.queue")

    def follow(self, event: StreamEvent) -> None:
        if isinstance(event, StreamTokens):
            if not self._in_decode:
                self._in_decode = True
                self._enter("scheduler.decode")
        elif isinstance(event, StreamAdmitted):
            self._in_decode = False
            self._enter("scheduler.prefill")
            self._span.set_attribute(t.ATTR_SEQ_ID, event.seq_id)
            what: dict[str, int | str] = {
                t.ATTR_SEQ_ID: event.seq_id,
                t.ATTR_CACHED_TOKENS: event.num_cached_tokens,
            }
            if event.miss:
                what[t.ATTR_PREFIX_MISS] = event.miss
            if event.diverged_at is not None:
                what[t.ATTR_DIVERGED_AT] = event.diverged_at
            self._span.add_event("admitted", what)
        elif isinstance(event, StreamStarted):
            self._span.set_attribute(t.ATTR_CACHED_TOKENS, event.num_cached_tokens)
            self._span.set_attribute(t.ATTR_QUEUE_TIME_S, event.queue_time_us * 1e-6)
        elif isinstance(event, StreamPreempted):
            self._span.add_event("preempted", {"reason": event.why})
            self._enter("scheduler.queue")
        elif isinstance(event, StreamFinished):
            self._span.set_attribute(t.ATTR_OUTPUT_TOKENS, event.num_generated_tokens)
            self._span.set_attribute(t.ATTR_FINISH_REASONS, [event.reason.name.lower()])
            if event.reason in (FinishReason.ABORTED, FinishReason.ERROR):
                self._span.set_status(Status(StatusCode.ERROR, event.reason.name))
            self._end()
        elif isinstance(event, StreamFailed):
            self._span.set_status(Status(StatusCode.ERROR, event.error.reason))
            self._end()

    def _enter(self, phase: str) -> None:
        if self._phase is not None:
            self._phase.end()
        self._phase = self._tracer.start_span(phase, context=self._context) if self._span.is_recording() else None

    def _end(self) -> None:
        if self._phase is not None:
            self._phase.end()
        self._span.end()
