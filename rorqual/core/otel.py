"""What OpenTelemetry's own variables (OTEL_*) ask for, and which of them this project does not heed. Pure."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
INSECURES = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
HTTP_PORT = 4318
"""Where collectors listen for OTLP over HTTP; for OTLP over gRPC it is 4317."""

_OF_THE_EXPORTER = ("HEADERS", "TIMEOUT", "COMPRESSION", "CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_HEEDED = {
    *ENDPOINTS,
    *PROTOCOLS,
    *INSECURES,
    *(f"OTEL_EXPORTER_OTLP_{name}" for name in _OF_THE_EXPORTER),  # the SDK reads these itself
    *(f"OTEL_EXPORTER_OTLP_TRACES_{name}" for name in _OF_THE_EXPORTER),
    "OTEL_SDK_DISABLED",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
}
_HEEDED_PREFIXES = ("OTEL_BSP_", "OTEL_SPAN_")
_MEANINGLESS = {  # values that ask for what is so in any case
    "OTEL_TRACES_EXPORTER": ("otlp", "none"),
    "OTEL_METRICS_EXPORTER": ("none", "prometheus"),
    "OTEL_LOGS_EXPORTER": ("none",),
    "OTEL_PROPAGATORS": ("tracecontext", "tracecontext,baggage"),
}
_INSTEAD = {
    "OTEL_TRACES_SAMPLER": "use --trace-sample-ratio",
    "OTEL_TRACES_SAMPLER_ARG": "use --trace-sample-ratio",
    "OTEL_TRACES_EXPORTER": "traces go to an OTLP collector or nowhere",
    "OTEL_METRICS_EXPORTER": "metrics are for Prometheus to fetch, see --metrics-port",
    "OTEL_LOGS_EXPORTER": "logs go to stderr",
    "OTEL_LOG_LEVEL": "use --log-level",
    "OTEL_PROPAGATORS": "trace context is W3C's alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelSettings:
    """Where traces go, and under which name."""

    endpoint: str  # of an OTLP/gRPC collector; "": no traces are sent
    insecure: bool  # without TLS
    resource: Mapping[str, str]  # attributes that OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME give
    notes: tuple[str, ...]  # what is set and not done, a line each, with the cure


def read_otel(configured: str, environ: Mapping[str, str]) -> OtelSettings:
    """`configured` is the project's own setting, --otlp-endpoint, which wins over OpenTelemetry's variables."""
    given = {name: value.strip() for name, value in environ.items() if name.startswith("OTEL_") and value.strip()}
    notes: list[str] = []
    endpoint = configured or _endpoint(given, notes)
    protocol_name, protocol = _first(given, PROTOCOLS)
    if configured and protocol not in ("", "grpc"):
        notes.append(f"--otlp-endpoint {configured} is spoken to over gRPC, though {protocol_name} is {protocol}")
    if endpoint and _port(endpoint) == HTTP_PORT:
        notes.append(
            f"the OTLP endpoint {endpoint} is spoken to over gRPC, and {HTTP_PORT} is commonly a collector's port for "
            "HTTP: if no trace arrives, name its gRPC port (commonly 4317)"
        )
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true":
        if endpoint:
            notes = [f"OTEL_SDK_DISABLED is true: no traces are sent to {endpoint}"]
        endpoint = ""
    notes += _not_heeded(given)
    insecure = _first(given, INSECURES)[1].lower() == "true"
    return OtelSettings(
        endpoint=endpoint,
        insecure=insecure or not endpoint.startswith("https://"),
        resource=_resource(given),
        notes=tuple(notes),
    )


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, given[name]) for name in names if name in given), ("", ""))


def _endpoint(given: Mapping[str, str], notes: list[str]) -> str:
    """What the variables name, where it can be served."""
    name, endpoint = _first(given, ENDPOINTS)
    if not endpoint or given.get("OTEL_TRACES_EXPORTER") == "none":
        return ""
    protocol_name, protocol = _first(given, PROTOCOLS)
    if protocol in ("", "grpc"):
        return endpoint
    notes.append(
        f"no traces are sent: {protocol_name} is {protocol}, and only grpc is served here; set it to grpc and {name} to "
        "the collector's gRPC port (commonly 4317)"
    )
    return ""


def _port(endpoint: str) -> int | None:
    try:
        return urllib.parse.urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").port
    except ValueError:
        return None


def _resource(given: Mapping[str, str]) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in given.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in pair)
    found = {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}
    if "OTEL_SERVICE_NAME" in given:
        found["service.name"] = given["OTEL_SERVICE_NAME"]
    return found


def _not_heeded(given: Mapping[str, str]) -> list[str]:
    unheeded = [
        name
        for name in sorted(given)
        if name not in _HEEDED
        and not name.startswith(_HEEDED_PREFIXES)
        and given[name].lower().replace(" ", "") not in _MEANINGLESS.get(name, ())
    ]
    if not unheeded:
        return []
    told = (f"{name} ({_INSTEAD[name]})" if name in _INSTEAD else name for name in unheeded)
    return [f"set and not heeded here: {', '.join(told)}"]
