"""Metrics and spans of steps and sequences, made off the step loop's thread."""

from __future__ import annotations

from collections import deque

from opentelemetry import trace

from rorqual.telemetry import (
    ATTR_CACHED_TOKENS,
    ATTR_FINISH_REASONS,
    ATTR_INPUT_TOKENS,
    ATTR_MODEL,
    ATTR_OUTPUT_TOKENS,
    ATTR_SEQ_ID,
    Telemetry,
    context_from_proto,
)

from .reports import EndedSequence, StepStats

SPAN_NAME = "executor.sequence"


class StepObserver:
    """Turns what the loop noted into metrics and spans, whenever a report leaves."""

    def __init__(self, telemetry: Telemetry, model_name: str) -> None:
        self._tracer = telemetry.tracer
        self._model_name = model_name
        seconds, steps = telemetry.metric("executor_step_seconds"), telemetry.metric("executor_steps_total")
        tokens = telemetry.metric("executor_tokens_total")
        kinds = ("decode", "prefill", "mixed")
        self._seconds = {kind: seconds.labels(kind=kind) for kind in kinds}
        self._steps = {kind: steps.labels(kind=kind) for kind in kinds}
        self._prefill_tokens, self._decode_tokens = tokens.labels(kind="prefill"), tokens.labels(kind="decode")
        self._decode_sequences = telemetry.metric("executor_decode_sequences")
        self._reconnects = telemetry.metric("executor_reconnects_total")

    def connected(self) -> None:
        self._reconnects.inc()

    def observe(self, stats: deque[StepStats], ended: deque[EndedSequence]) -> None:
        """Take all that is there. The loop may append meanwhile."""
        last: StepStats | None = None
        for _ in range(len(stats)):
            last = stats.popleft()
            has_prefill, has_decode = last.num_prefill_tokens > 0, last.num_decode_tokens > 0
            kind = "mixed" if has_prefill and has_decode else "prefill" if has_prefill else "decode"
            self._seconds[kind].observe(last.duration_s)
            self._steps[kind].inc()
            self._prefill_tokens.inc(last.num_prefill_tokens)
            self._decode_tokens.inc(last.num_decode_tokens)
        if last is not None:
            self._decode_sequences.set(last.num_decode_sequences)
        for _ in range(len(ended)):
            self._record_span(ended.popleft())

    def _record_span(self, sequence: EndedSequence) -> None:
        noted = sequence.trace
        span = self._tracer.start_span(
            SPAN_NAME,
            context=context_from_proto(noted.parent),
            kind=trace.SpanKind.INTERNAL,
            start_time=noted.start_ns,
            attributes={
                ATTR_SEQ_ID: sequence.seq_id,
                ATTR_MODEL: self._model_name,
                ATTR_INPUT_TOKENS: sequence.num_prompt_tokens,
                ATTR_CACHED_TOKENS: sequence.num_cached_tokens,
                ATTR_OUTPUT_TOKENS: sequence.num_generated_tokens,
                ATTR_FINISH_REASONS: (sequence.finish,),
                "rorqual.num_prefill_chunks": noted.num_chunks,
                "rorqual.first_step_id": noted.first_step_id,
                "rorqual.last_step_id": noted.last_step_id,
            },
        )
        for name, time_ns, attributes in noted.events:
            span.add_event(name, {f"rorqual.{key}": value for key, value in attributes.items()}, timestamp=time_ns)
        if sequence.finish == "error":
            span.set_status(trace.StatusCode.ERROR)
        span.end(sequence.end_ns)
