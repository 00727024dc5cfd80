"""The scheduler's own core on virtual time: a trace in, the fate of every request out.

The core is the one that serves (`services/scheduler/core.py`); executors, links and callers are models. Nothing depends
on the real clock but `core_s`, so equal traces and settings give equal results.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.events import Event, ExecutorConnected, Open, Request, Tick
from services.scheduler.stats import CoreStats
from services.scheduler.stream_events import StreamEvent, StreamFailed, StreamFinished, StreamStarted, StreamTokens

from .executor_model import ModelExecutor, StepModel
from .traces import TraceRequest

MAX_SAMPLES = 400


@lru_cache(maxsize=4096)
def text(name: str, num_tokens: int) -> bytes:
    """The first tokens of the text of that name, as little-endian uint32."""
    return hashlib.shake_128(name.encode()).digest(4 * num_tokens)


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of one request. Times are virtual seconds."""

    request: TraceRequest
    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""  # the reason of its failure
    ended: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """How full the scheduler was at one moment."""

    at_s: float
    num_waiting: int
    num_running: int
    kv_usage: float


@dataclass(slots=True)
class Result:
    """Of one simulation."""

    outcomes: list[Outcome] = field(default_factory=list)  # in the order of their ends
    num_skipped: int = 0  # whose `after` failed
    samples: list[Sample] = field(default_factory=list)
    stats: CoreStats = field(default_factory=CoreStats)
    duration_s: float = 0.0
    busy_share: float = 0.0  # of the executors' time
    num_events: int = 0
    core_s: float = 0.0  # real CPU time in the core


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The deployment."""

    num_executors: int = 1
    model: StepModel = field(default_factory=StepModel.load)
    core: CoreConfig = field(default_factory=lambda: CoreConfig(max_queue_len=1_000_000))
    max_model_len: int = 163_840
    link_ms: float = 0.2  # one way


class Simulation:
    """One run. Every request ends exactly once, with exactly its answer's tokens; RuntimeError otherwise."""

    def __init__(self, trace: list[TraceRequest], config: SimulationConfig | None = None) -> None:
        self.config = config or SimulationConfig()
        self._core = SchedulerCore(self.config.core)
        self._link_s = self.config.link_ms * 1e-3
        self._heap: list[tuple[float, int, str, Any]] = []
        self._num_pushed = 0
        self._now_s = 0.0
        self._live: dict[int, Outcome] = {}
        self._received: dict[int, bytearray] = {}
        self._num_streams = 0
        self._num_to_come = len(trace)
        self._later: dict[str, list[TraceRequest]] = defaultdict(list)
        self._sample_every_s = 0.25
        self._result = Result(stats=self._core.stats)
        self._executors = {
            i + 1: ModelExecutor(f"sim-{i}", self.config.model, max_model_len=self.config.max_model_len)
            for i in range(self.config.num_executors)
        }
        for request in trace:
            if request.after:
                self._later[request.after].append(request)
            else:
                self._push(request.at_s, "arrival", request)

    def run(self) -> Result:
        for link_id, executor in self._executors.items():
            self._handle(ExecutorConnected(link_id, executor.spec))
        self._push(0.0, "sample", None)
        heap, result = self._heap, self._result
        while heap and (self._live or self._num_to_come):
            self._now_s, _, kind, what = heapq.heappop(heap)
            if kind == "report":
                self._handle(what)
            elif kind == "step":
                executor = self._executors[what]
                self._push(self._now_s + self._link_s, "report", executor.end_step(what))
                self._step(what)
            elif kind == "batch":
                link_id, batch = what
                executor = self._executors[link_id]
                executor.receive(*batch)
                if not executor.busy:
                    self._step(link_id)
            elif kind == "arrival":
                self._arrive(what)
            elif kind == "tick":
                self._handle(Tick())
            else:
                self._sample()
        if self._live or self._num_to_come:
            raise RuntimeError(f"{len(self._live)} requests never ended, {self._num_to_come} never came")
        result.duration_s = max((outcome.last_s for outcome in result.outcomes), default=0.0)
        busy_s = sum(executor.busy_s for executor in self._executors.values())
        result.busy_share = busy_s / max(1e-9, self._now_s * len(self._executors))
        return result

    def _push(self, at_s: float, kind: str, what: Any) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, kind, what))

    def _arrive(self, request: TraceRequest) -> None:
        self._num_to_come -= 1
        self._num_streams += 1
        deadline_s = None if request.time_limit_s is None else self._now_s + request.time_limit_s
        prompt = b"".join(text(name, num_tokens) for name, num_tokens in request.prompt)
        self._live[self._num_streams] = Outcome(request, self._now_s)
        self._received[self._num_streams] = bytearray()
        if deadline_s is not None:
            self._push(deadline_s, "tick", None)
        core_request = Request(
            request_id=request.id,
            num_prompt_tokens=len(prompt) // 4,
            max_tokens=request.output_tokens,
            sampling=text(request.id, request.output_tokens),
            priority=request.priority,
            cache_salt=request.salt,
            deadline_s=deadline_s,
        )
        self._handle(Open(self._num_streams, core_request, prompt))

    def _handle(self, event: Event) -> None:
        self._result.num_events += 1
        start_s = time.process_time()
        effects = self._core.handle(event, self._now_s)
        batches = [(i, batch) for i in effects.links for batch in iter(partial(self._core.take_batch, i), None)]
        self._result.core_s += time.process_time() - start_s
        for stream_event in effects.events:
            self._take(stream_event)
        for link_id, batch in batches:
            self._push(self._now_s + self._link_s, "batch", (link_id, batch))

    def _step(self, link_id: int) -> None:
        executor = self._executors[link_id]
        step_s = executor.begin_step()
        if step_s is not None:
            self._push(self._now_s + step_s, "step", link_id)
        elif (report := executor.acknowledgement(link_id)) is not None:
            self._push(self._now_s + self._link_s, "report", report)

    def _take(self, event: StreamEvent) -> None:
        outcome = self._live.get(event.stream_id)
        if outcome is None:
            raise RuntimeError(f"{event} of a request that has ended")
        if isinstance(event, StreamTokens):
            if not outcome.num_output_tokens:
                outcome.first_s = self._now_s
            outcome.last_s = self._now_s
            outcome.num_output_tokens += len(event.token_ids) // 4
            self._received[event.stream_id] += event.token_ids
        elif isinstance(event, StreamStarted):
            outcome.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, StreamFinished):
            if self._received[event.stream_id] != text(outcome.request.id, outcome.request.output_tokens):
                raise RuntimeError(f"{outcome.request.id}: the tokens received are not those of its answer")
            self._end(event.stream_id, outcome)
        elif isinstance(event, StreamFailed):
            outcome.error = event.error.reason
            outcome.last_s = self._now_s
            self._end(event.stream_id, outcome)

    def _end(self, stream_id: int, outcome: Outcome) -> None:
        del self._live[stream_id], self._received[stream_id]
        outcome.ended = True
        self._result.outcomes.append(outcome)
        for request in self._later.pop(outcome.request.id, ()):
            if outcome.error:
                self._skip(request)
            else:
                self._push(self._now_s + request.at_s, "arrival", request)

    def _skip(self, request: TraceRequest) -> None:
        """A turn whose previous one failed does not come, nor do those after it."""
        self._result.num_skipped += 1
        self._num_to_come -= 1
        for later in self._later.pop(request.id, ()):
            self._skip(later)

    def _sample(self) -> None:
        occupancy, samples = self._core.occupancy(), self._result.samples
        used = occupancy.num_total_blocks - occupancy.num_free_blocks
        samples.append(
            Sample(
                round(self._now_s, 3),
                occupancy.num_waiting,
                occupancy.num_running,
                round(used / max(1, occupancy.num_total_blocks), 4),
            )
        )
        if len(samples) >= MAX_SAMPLES:
            del samples[1::2]
            self._sample_every_s *= 2
        self._push(self._now_s + self._sample_every_s, "sample", None)


def with_limits(model: StepModel, *, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> StepModel:
    """`model` with these in place of its own where they are not 0."""
    return replace(
        model,
        num_blocks=num_blocks or model.num_blocks,
        max_num_seqs=max_num_seqs or model.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or model.max_num_batched_tokens,
    )
