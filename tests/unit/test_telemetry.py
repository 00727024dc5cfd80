"""Spans leave in the background: a collector that hangs or fails costs no request any time, and what is lost is counted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from rorqual.core.config import TelemetryConfig
from rorqual.core.errors import ConfigError
from rorqual.core.limits import STRINGS
from rorqual.telemetry import Telemetry, context_from_pairs, context_to_proto


class Collector(SpanExporter):
    """Takes nothing before `answers` is set, and then fails where it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.answers = threading.Event()
        self.num_spans = 0
        self._fails = fails

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.answers.wait(30)
        self.num_spans += len(spans)
        return SpanExportResult.FAILURE if self._fails else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.answers.set()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def value(telemetry: Telemetry, name: str) -> float:
    return float(telemetry.registry.get_sample_value(f"rorqual_{name}") or 0)


def test_a_collector_that_hangs_delays_nothing_and_its_losses_are_counted() -> None:
    collector = Collector()
    telemetry = Telemetry("gateway", TelemetryConfig(), exporter=collector)
    num_spans = 5000  # more than wait, and all of them end while the collector says nothing
    for _ in range(num_spans):
        telemetry.tracer.start_span("step").end()
    assert not collector.answers.is_set()
    assert value(telemetry, "spans_ended_total") == num_spans
    assert value(telemetry, "spans_exported_total") == 0
    collector.answers.set()
    telemetry.shutdown()
    exported = value(telemetry, "spans_exported_total")
    assert exported == collector.num_spans
    assert 0 < exported < num_spans  # the queue is bounded


def test_what_a_collector_refuses_is_not_counted_as_exported() -> None:
    collector = Collector(fails=True)
    collector.answers.set()
    telemetry = Telemetry("gateway", TelemetryConfig(), exporter=collector)
    telemetry.tracer.start_span("step").end()
    telemetry.shutdown()
    assert collector.num_spans == 1
    assert value(telemetry, "spans_ended_total") == 1
    assert value(telemetry, "spans_exported_total") == 0


def test_a_trace_state_beyond_the_table_is_dropped_not_passed_on() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    telemetry = Telemetry("gateway", TelemetryConfig())
    for num_entries, size in ((8, 20), (31, 256)):
        state = ",".join(f"vendor{n}={'x' * size}" for n in range(num_entries))
        context = context_from_pairs((("traceparent", parent), ("tracestate", state)))
        sent = context_to_proto(telemetry.tracer.start_span("step", context=context))
        assert sent.traceparent[3:35] == parent[3:35]
        assert len(state) == len(sent.tracestate) or len(state) > STRINGS["tracestate"].most_bytes > len(
            sent.tracestate
        )
    assert not sent.tracestate


def test_a_metrics_port_that_is_taken_is_told_with_its_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics cannot be served on 127\.0\.0\.1:{port} .*--metrics-port"):
            Telemetry("gateway", TelemetryConfig(metrics_port=port))


def test_the_metrics_port_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    telemetry = Telemetry("gateway", TelemetryConfig(metrics_port=0))
    telemetry.shutdown()
    assert f"metrics are on http://127.0.0.1:{telemetry.metrics_port}/metrics" in caplog.text
