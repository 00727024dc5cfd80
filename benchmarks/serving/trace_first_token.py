"""Where the time to the first token goes: the spans of requests sent one by one, on one time axis.

    python benchmarks/serving/trace_first_token.py [--device cuda] [--model DIR] [--input-len 512] [--requests 12]

Serves as bench_gpu.py does, with traces sent to a collector of its own, and prints for every span and event the median
time since the client sent the request, in ms. The clocks are one machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

import grpc  # noqa: E402
import uvloop  # noqa: E402
from bench_gpu import GPU_SETTINGS, SHAPE, Server, prompts, serve  # noqa: E402
from load_client import Answer, completion_job, run_jobs  # noqa: E402
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc  # noqa: E402


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps (trace id, name, time in ns) of every span's start and end and every event."""

    def __init__(self) -> None:
        self.points: list[tuple[bytes, str, int]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    points = [(f"{span.name} begins", span.start_time_unix_nano)]
                    points += [(f"{span.name}: {event.name}", event.time_unix_nano) for event in span.events]
                    points += [(f"{span.name} ends", span.end_time_unix_nano)]
                    self.points += [(span.trace_id, name, at_ns) for name, at_ns in points]
        return trace_service_pb2.ExportTraceServiceResponse()


async def one_by_one(server: Server, args: argparse.Namespace) -> tuple[list[int], list[Answer]]:
    """When each request was sent (time_ns), and its answer."""
    sent_ns: list[int] = []
    answers: list[Answer] = []
    for text in prompts(server, args.requests, args.input_len, random.Random()):
        sent_ns.append(time.time_ns())
        job = completion_job(text, args.input_len, args.output_len)
        await run_jobs(server.url, iter([job]), 1, keep=answers.append)
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.5)  # spans leave in batches, each second
    return sent_ns, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHAPE)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--requests", type=int, default=12)
    args = parser.parse_args()
    collector = Collector()
    settings: dict[str, Any] = dict(GPU_SETTINGS) if args.device == "cuda" else {"device": "cpu"}
    settings |= {"max_model_len": 4096, "otlp_endpoint": collector.endpoint}
    with tempfile.TemporaryDirectory() as logs, serve(args.model, settings, Path(logs) / "logs", 60.0) as server:
        sent_ns, answers = uvloop.run(one_by_one(server, args))
    first_ns = {}
    for trace_id, _, at_ns in collector.points:
        first_ns[trace_id] = min(at_ns, first_ns.get(trace_id, at_ns))
    after_ms: dict[str, list[float]] = {}
    for trace_id, name, at_ns in collector.points:
        index = sum(sent <= first_ns[trace_id] for sent in sent_ns) - 1
        if index >= 2:  # the first two warm up
            after_ms.setdefault(name, []).append((at_ns - sent_ns[index]) / 1e6)
    rows = sorted((statistics.median(times), name) for name, times in after_ms.items())
    for median_ms, name in rows:
        print(f"{median_ms:9.2f} ms  {name}")
    ttft_ms = statistics.median(1000 * answer.ttft_s for answer in answers[2:])
    print(f"{ttft_ms:9.2f} ms  the client has the first token (connection made anew for each request)")


if __name__ == "__main__":
    main()
