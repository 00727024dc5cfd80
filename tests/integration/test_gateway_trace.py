"""The span of a request: its parent in the client, its child in the tokenizer, its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from rorqual.core.config import TelemetryConfig
from rorqual.v1 import common_pb2
from tests.support.running_gateway import CHAT, running_gateway
from tests.support.scripted_tokenizer import Script, say, scripted_tokenizer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def described(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def spans_of(headers: dict[str, str], **fields: Any) -> tuple[list[ReadableSpan], list[common_pb2.TraceContext]]:
    exporter = InMemorySpanExporter()
    async with scripted_tokenizer() as tokenizer:
        async with running_gateway(tokenizer.address, exporter=exporter) as http:
            await http.client.post("/v1/chat/completions", json={**CHAT, **fields}, headers=headers)
        return list(exporter.get_finished_spans()), [request.options.trace for request in tokenizer.requests]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_trace_goes_on_through_the_gateway(stream: bool) -> None:
    (span,), (sent,) = await spans_of(
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x", "x-request-id": "mine"}, stream=stream
    )
    assert (span.name, span.kind) == ("gateway.chat", SpanKind.SERVER)
    trace_id, span_id = described(span)
    assert trace_id == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert sent.traceparent == f"00-{TRACE}-{span_id}-01"
    assert sent.tracestate == "vendor=x"
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "scripted"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["rorqual.client_request_id"] == "mine"
    assert attributes["rorqual.request_id"]
    assert [event.name for event in span.events] == ["first token"]
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
async def test_without_a_valid_one_there_is_one_new_trace(headers: dict[str, str]) -> None:
    (span,), (sent,) = await spans_of(headers)
    trace_id, span_id = described(span)
    assert span.parent is None
    assert sent.traceparent.startswith(f"00-{trace_id}-{span_id}-")
    assert int(sent.traceparent[-2:], 16) & 1


async def test_not_sampled_means_no_span_and_the_same_trace_further_down() -> None:
    spans, (sent,) = await spans_of({"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans == []
    assert sent.traceparent.startswith(f"00-{TRACE}-")
    assert sent.traceparent.endswith("-00")


async def test_without_a_collector_the_trace_still_passes_through() -> None:
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address) as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await http.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        await http.client.post("/v1/chat/completions", json=CHAT)
        assert [r.options.trace.traceparent for r in tokenizer.requests] == [f"00-{TRACE}-{PARENT}-01", ""]


async def test_failed_and_abandoned_requests_end_their_spans() -> None:
    exporter = InMemorySpanExporter()
    never = asyncio.Event()
    telemetry = TelemetryConfig(trace_sample_ratio=1.0)
    async with scripted_tokenizer() as tokenizer:
        tokenizer.script = lambda request: Script(say("secret text").steps, gate=lambda i: never)
        async with running_gateway(tokenizer.address, exporter=exporter, telemetry=telemetry) as http:
            await http.client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})
            asking = asyncio.create_task(http.client.post("/v1/chat/completions", json=CHAT))
            async with asyncio.timeout(5):
                await tokenizer.request_seen.wait()
                asking.cancel()
                await tokenizer.cancel_seen.wait()
    refused, left = exporter.get_finished_spans()
    assert refused.status.status_code is left.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "INVALID_VALUE"
    assert (left.attributes or {})["error.type"] == "CANCELLED"
    assert all("secret" not in str(span.to_json()) for span in (refused, left))
