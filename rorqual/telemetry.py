"""OpenTelemetry tracing, Prometheus metrics and logs: the same set-up in every process.

Metric names and units stand in one table here (`METRICS`), span attributes too. Times are in seconds, as the GenAI
semantic conventions have them. Spans are exported from a background thread in batches; with no endpoint configured
the tracer records nothing and costs next to nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from rorqual import __version__
from rorqual.core.config import TelemetryConfig
from rorqual.core.errors import ConfigError
from rorqual.core.limits import STRINGS
from rorqual.core.otel import read_otel
from rorqual.v1 import common_pb2

_log = logging.getLogger("rorqual.telemetry")

_PROPAGATOR = TraceContextTextMapPropagator()

# Span attributes (GenAI semantic conventions where they have a name).
ATTR_REQUEST_ID = "rorqual.request_id"
ATTR_MODEL = "gen_ai.request.model"
ATTR_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTR_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTR_CACHED_TOKENS = "rorqual.usage.cached_tokens"
ATTR_PREFIX_MISS = "rorqual.prefix_cache.miss"  # why not more was cached
ATTR_DIVERGED_AT = "rorqual.prefix_cache.diverged_at"  # the token from which the prompt is not as one seen before
ATTR_FINISH_REASONS = "gen_ai.response.finish_reasons"
ATTR_SEQ_ID = "rorqual.seq_id"
ATTR_PROCESS = "rorqual.process"  # of the resource: whatever OTEL_SERVICE_NAME calls the service
ATTR_QUEUE_TIME_S = "rorqual.queue_time_s"

_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its Prometheus name (with the unit), kind, help and label names."""

    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _LATENCY_BUCKETS_S


METRICS: Mapping[str, MetricSpec] = {
    m.name: m
    for m in (
        # gateway
        MetricSpec("http_requests_total", Counter, "HTTP requests by route and status code", ("route", "code")),
        MetricSpec("http_requests_in_flight", Gauge, "HTTP requests being answered"),
        MetricSpec(
            "gen_ai_server_request_duration_seconds", Histogram, "request duration at the gateway", ("operation",)
        ),
        MetricSpec(
            "gen_ai_server_time_to_first_token_seconds",
            Histogram,
            "time to the first text or token event",
            ("operation",),
        ),
        MetricSpec(
            "gen_ai_server_time_per_output_token_seconds",
            Histogram,
            "time per output token after the first",
            ("operation",),
            _TOKEN_TIME_BUCKETS_S,
        ),
        MetricSpec("client_disconnects_total", Counter, "requests cancelled because the client went away"),
        MetricSpec("slow_client_pauses_total", Counter, "writes that a client's full window held up for over 0.1 s"),
        MetricSpec("slow_clients_total", Counter, "streams ended because the client read too slowly"),
        # tokenizer
        MetricSpec("tokenizer_prompt_tokens_total", Counter, "prompt tokens encoded"),
        MetricSpec("tokenizer_output_tokens_total", Counter, "generated tokens decoded"),
        MetricSpec("tokenizer_render_seconds", Histogram, "template and encoding time of a request"),
        MetricSpec("tokenizer_streams", Gauge, "choices being streamed"),
        MetricSpec("tokenizer_resumes_total", Counter, "streams opened again after a scheduler was lost"),
        # scheduler
        MetricSpec("scheduler_running_sequences", Gauge, "sequences that hold blocks"),
        MetricSpec("scheduler_waiting_sequences", Gauge, "sequences in the queue"),
        MetricSpec("scheduler_kv_blocks", Gauge, "KV blocks by state", ("state",)),
        MetricSpec("scheduler_preemptions_total", Counter, "sequences dropped to be admitted again"),
        MetricSpec(
            "scheduler_prefix_cache_tokens_total", Counter, "prompt tokens by prefix-cache outcome", ("outcome",)
        ),
        MetricSpec("scheduler_queue_time_seconds", Histogram, "arrival to admission"),
        MetricSpec("scheduler_generated_tokens_total", Counter, "tokens generated"),
        MetricSpec("scheduler_executors", Gauge, "executors connected"),
        MetricSpec("scheduler_paused_sequence_steps_total", Counter, "sequence-steps that waited for an Extend"),
        MetricSpec("scheduler_finished_total", Counter, "sequences ended, by reason", ("reason",)),
        # every process that exports spans
        MetricSpec("spans_ended_total", Counter, "sampled spans that ended"),
        MetricSpec("spans_exported_total", Counter, "spans that the collector took; the others wait, or were dropped"),
        # executor
        MetricSpec("executor_step_seconds", Histogram, "step time by kind", ("kind",), _TOKEN_TIME_BUCKETS_S),
        MetricSpec("executor_steps_total", Counter, "steps run", ("kind",)),
        MetricSpec("executor_tokens_total", Counter, "tokens computed, by kind", ("kind",)),
        MetricSpec("executor_decode_sequences", Gauge, "sequences in the decode set"),
        MetricSpec("executor_reconnects_total", Counter, "links opened to a scheduler"),
    )
}


class _EndedSpans(SpanProcessor):
    """Counts what is handed to the export queue, which drops silently when a collector is too slow for it."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def on_end(self, span: ReadableSpan) -> None:
        self._counter.inc()


class _CountedExporter(SpanExporter):
    """Counts what `exporter` got through."""

    def __init__(self, exporter: SpanExporter, counter: Counter) -> None:
        self._exporter = exporter
        self._counter = counter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._counter.inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Telemetry:
    """Tracer, metrics and logs of one process. Two of them in one process do not share state."""

    def __init__(
        self,
        service: str,
        config: TelemetryConfig,
        *,
        instance: str = "",
        exporter: SpanExporter | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`service`: "gateway", "tokenizer", "scheduler" or "executor". `exporter`: in place of OTLP, for tests.
        `environ`: OpenTelemetry's own variables; what is set there and not heeded is logged. Raises ConfigError where the
        metrics port cannot be had.
        """
        self.service = service
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()
        otel = read_otel(config.otlp_endpoint, environ)
        for note in otel.notes:
            _log.warning("OpenTelemetry: %s", note)
        attributes = {"service.name": service, "service.namespace": "rorqual", "service.version": __version__}
        if instance:
            attributes["service.instance.id"] = instance
        attributes = {**attributes, **otel.resource, ATTR_PROCESS: service}
        self._provider: TracerProvider | None = None
        if exporter is None and otel.endpoint:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=otel.endpoint, insecure=otel.insecure)
        if exporter is not None:
            self._provider = TracerProvider(
                resource=Resource.create(attributes), sampler=ParentBased(TraceIdRatioBased(config.trace_sample_ratio))
            )
            delay_ms = None if "OTEL_BSP_SCHEDULE_DELAY" in environ else 1000  # None: what the variable says
            counted = _CountedExporter(exporter, self.metric("spans_exported_total"))
            self._provider.add_span_processor(_EndedSpans(self.metric("spans_ended_total")))
            self._provider.add_span_processor(BatchSpanProcessor(counted, schedule_delay_millis=delay_ms))
            self.tracer: trace.Tracer = self._provider.get_tracer("rorqual", __version__)
        else:
            self.tracer = trace.NoOpTracer()
        self.metrics_port = 0
        self._metrics_server: Any = None
        if config.metrics_port >= 0:
            try:
                self._metrics_server, _ = start_http_server(
                    config.metrics_port, config.metrics_host, registry=self.registry
                )
            except OSError as error:
                raise ConfigError(
                    f"metrics cannot be served on {config.metrics_host}:{config.metrics_port} ({error.strerror or error}): "
                    "choose another --metrics-port or --metrics-host",
                    field="metrics_port",
                ) from None
            self.metrics_port = self._metrics_server.server_port
            _log.info("metrics are on http://%s:%d/metrics", config.metrics_host, self.metrics_port)

    @property
    def enabled(self) -> bool:
        """Whether spans are recorded at all."""
        return self._provider is not None

    def metric(self, name: str) -> Any:
        """The Counter, Gauge or Histogram called `name` in METRICS (exported as rorqual_<name>)."""
        with self._lock:
            if name not in self._metrics:
                spec = METRICS[name]
                kwargs: dict[str, Any] = {"buckets": spec.buckets} if spec.kind is Histogram else {}
                self._metrics[name] = spec.kind(
                    f"rorqual_{spec.name}", spec.help, spec.labels, registry=self.registry, **kwargs
                )
            return self._metrics[name]

    def shutdown(self) -> None:
        """Send what is buffered and stop the background threads."""
        if self._provider is not None:
            self._provider.shutdown()
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()


def setup_logging(service: str, config: TelemetryConfig) -> None:
    """One line a record on stderr, with the service's name. Called once, by `main`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())


def context_from_proto(proto: common_pb2.TraceContext) -> Context | None:
    """The parent context a message carries; None where it carries none."""
    return (
        context_from_pairs((("traceparent", proto.traceparent), ("tracestate", proto.tracestate)))
        if proto.traceparent
        else None
    )


def context_from_pairs(pairs: Iterable[tuple[str, str | bytes]] | None) -> Context | None:
    """The parent context in HTTP headers or gRPC metadata (lower-case keys); None where there is none."""
    carrier: dict[str, str] = {}
    for key, value in pairs or ():
        if key in ("traceparent", "tracestate") and value:
            carrier[key] = value.decode("latin-1") if isinstance(value, bytes) else value
    if "traceparent" not in carrier:
        return None
    return _PROPAGATOR.extract(carrier)


def context_to_proto(span: trace.Span) -> common_pb2.TraceContext:
    """`span` as the parent that a message carries; empty for a span that is not recorded."""
    if not span.get_span_context().is_valid:
        return common_pb2.TraceContext()
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    state = carrier.get("tracestate", "")
    if len(state) > STRINGS["tracestate"].most_bytes:  # a client's, which W3C lets everyone drop
        state = ""
    return common_pb2.TraceContext(traceparent=carrier.get("traceparent", ""), tracestate=state)
