"""OpenTelemetry's own variables are heeded, or it is said that they are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rorqual.core.config import TelemetryConfig
from rorqual.core.otel import read_otel
from rorqual.telemetry import Telemetry

GRPC = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
HTTP = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("configured", "environ", "endpoint", "insecure"),
    [
        ("", {}, "", True),
        ("http://own:1", {}, "http://own:1", True),
        ("https://own:1", {}, "https://own:1", False),
        ("", GRPC, "http://c:4317", True),
        ("http://own:1", GRPC, "http://own:1", True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4317"}, "https://c:4317", False),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317", "OTEL_EXPORTER_OTLP_INSECURE": "TRUE"}, "c:4317", True),
        ("", {**GRPC, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:4317"}, "http://t:4317", True),
        ("", {**HTTP, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"} | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}, "http://c:1", True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "  "}, "", True),
        ("", {**GRPC, "OTEL_TRACES_EXPORTER": "none"}, "", True),
        ("", {**GRPC, "OTEL_SDK_DISABLED": "false"}, "http://c:4317", True),
    ],
)  # fmt: skip
def test_what_is_heeded(configured: str, environ: dict[str, str], endpoint: str, insecure: bool) -> None:
    read = read_otel(configured, environ)
    assert (read.endpoint, read.insecure) == (endpoint, insecure)
    assert read.notes == ()


@pytest.mark.parametrize(
    ("configured", "environ", "endpoint", "words"),
    [
        (
            "",
            HTTP,
            "",
            ["no traces are sent", "OTEL_EXPORTER_OTLP_PROTOCOL is http/protobuf", "grpc", "ENDPOINT", "4317"],
        ),
        ("", {**GRPC, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "", ["OTLP_TRACES_PROTOCOL is http/json"]),
        ("http://own:1", HTTP, "http://own:1", ["--otlp-endpoint http://own:1", "over gRPC", "http/protobuf"]),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318", ["4318", "port for HTTP", "4317"]),
        ("c:4318", {}, "c:4318", ["4318", "port for HTTP", "4317"]),
        ("http://own:1", {"OTEL_SDK_DISABLED": "True"}, "", ["OTEL_SDK_DISABLED", "http://own:1"]),
        ("", {**GRPC, "OTEL_SDK_DISABLED": "true"}, "", ["OTEL_SDK_DISABLED", "http://c:4317"]),
        ("", {"OTEL_TRACES_SAMPLER": "always_on"}, "", ["OTEL_TRACES_SAMPLER (use --trace-sample-ratio)"]),
        ("", {"OTEL_METRICS_EXPORTER": "otlp"}, "", ["OTEL_METRICS_EXPORTER", "--metrics-port"]),
        ("", {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://m:1"}, "", ["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"]),
        ("", {"OTEL_WHATEVER": "1"}, "", ["not heeded here: OTEL_WHATEVER"]),
    ],
)
def test_what_is_not_heeded_is_said(configured: str, environ: dict[str, str], endpoint: str, words: list[str]) -> None:
    read = read_otel(configured, environ)
    assert read.endpoint == endpoint
    (note,) = read.notes
    for word in words:
        assert word in note


def test_what_asks_for_what_is_so_is_no_news() -> None:
    environ = {
        **GRPC,
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PROPAGATORS": "tracecontext,baggage",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "PATH": "/bin",
    }
    assert read_otel("", environ).notes == ()


def test_spans_go_where_the_variables_say_under_the_name_they_give(collector: Any) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_SERVICE_NAME": "whales",
        "OTEL_RESOURCE_ATTRIBUTES": "service.namespace=sea,service.name=lost",
    }
    telemetry = Telemetry("gateway", TelemetryConfig(), environ=environ)
    with telemetry.tracer.start_as_current_span("gateway.test") as span:
        trace_id = f"{span.get_span_context().trace_id:032x}"
    telemetry.shutdown()
    (seen,) = collector.wait_for(trace_id, lambda spans: len(spans) == 1)
    assert (seen.service, seen.name) == ("whales", "gateway.test")


@pytest.mark.parametrize("service", ["gateway", "executor"])
def test_a_process_says_at_the_start_what_it_does_not_heed(service: str, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(service, TelemetryConfig(), environ=HTTP)
    assert not telemetry.enabled
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no traces are sent" in record.getMessage()
    telemetry.shutdown()
