"""Fixtures that start things: one whole stack for the session, with an OTLP collector behind it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest

# Models are so small here that two threads of a computation mostly wait for each other, and longer where tests run side
# by side: tests/unit/test_gpu_model.py took ten times the CPU time. (OpenMP reads it when torch is first imported.)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RORQUAL_NUM_THREADS"] = "1"  # and so in the executors that tests start
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # a peer that goes away is no news

# How long an example takes says how busy the machine is, and decides no test.
hypothesis.settings.register_profile("rorqual", deadline=None)
hypothesis.settings.load_profile("rorqual")

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint folder and the settings it is served with."""

    path: Path
    trained: bool  # its answers mean something
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        given = {"model": self.path, **self.settings}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: tuple[str, ...]


class Collector:
    """An OTLP collector: keeps every span it is sent."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        collector = self

        class Servicer(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
            def Export(self, request: Any, context: Any) -> Any:
                collector._add(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _add(self, request: Any) -> None:
        with self._changed:
            for resource in request.resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}.get("service.name", "")
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans.append(
                            CollectedSpan(
                                service=service,
                                name=span.name,
                                trace_id=span.trace_id.hex(),
                                span_id=span.span_id.hex(),
                                parent_id=span.parent_span_id.hex(),
                                attributes={a.key: _value(a.value) for a in span.attributes},
                                links=tuple(link.span_id.hex() for link in span.links),
                            )
                        )
            self._changed.notify_all()

    def wait_for(
        self, trace_id: str, condition: Callable[[list[CollectedSpan]], bool], timeout_s: float = 20.0
    ) -> list[CollectedSpan]:
        """The spans of a trace, as soon as they satisfy `condition`; as they are after `timeout_s`."""

        def of_trace() -> list[CollectedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        with self._changed:
            self._changed.wait_for(lambda: condition(of_trace()), timeout_s)
            return of_trace()

    def close(self) -> None:
        self._server.stop(0).wait()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind or "", None)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The embedded model; where its weights are not there, the same shape with random ones."""
    if any(TINY.glob("*.safetensors")):
        return ServedModel(TINY, trained=True)
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    folder.mkdir()
    for file in TINY.glob("*.json"):
        shutil.copy(file, folder)
    return ServedModel(folder, trained=False, settings={"load_format": "dummy"})


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="session")
def stack(served_model: ServedModel, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The four processes with their defaults, ready: `url`, `text_address`, `scheduler_address`, `pids` (see
    rorqual.launch.Stack). Two runs of one request may differ here: a test that compares them takes `equal_stack`."""
    yield from _run_stack(served_model, tmp_path_factory, otlp_endpoint=collector.endpoint)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def equal_stack(
    request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """`stack` with --deterministic, in each dtype whatever the CPU would choose: equal requests get equal tokens."""
    yield from _run_stack(served_model, tmp_path_factory, deterministic=True, dtype=request.param)


def _run_stack(model: ServedModel, folders: pytest.TempPathFactory, **settings: Any) -> Iterator[Any]:
    from rorqual.launch import Stack, make_plan

    settings = {"model": model.path, **model.settings, "port": 0, "served_model_name": "tiny", **settings}
    stack = Stack(make_plan(settings), log_dir=folders.mktemp("logs"))
    stack.start(timeout_s=120)
    yield stack
    stack.stop()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Return as soon as `condition` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., None]:
    return wait_until
