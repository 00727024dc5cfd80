"""The core in time: it gets the clock's readings, and its effects reach whoever waits for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.context import Context

from rorqual.core.clock import Clock, SystemClock
from rorqual.core.config import SchedulerConfig
from rorqual.core.errors import InternalError, InvalidRequestError, RorqualError, UnavailableError
from rorqual.rpc.light_sleep import LightSleep
from rorqual.rpc.status import describe
from rorqual.telemetry import Telemetry
from rorqual.v1 import executor_pb2, generation_pb2

from .core import CoreConfig, Effects, SchedulerCore
from .events import Cancel, Event, ExecutorConnected, ExecutorLost, FinishEarly, Open, Tick
from .executor_contract import spec_from_hello
from .executor_state import ExecutorState
from .expelled import Expelled
from .metrics import CoreMetrics
from .outbox import Outbox
from .peer import Link, Peer
from .stream_events import StreamEvent, StreamFailed, StreamFinished, StreamStarted, StreamTokens
from .tracing import RequestTrace
from .wire import reported_from_proto, request_from_proto

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_S = 5.0
"""An executor that was not heard for so long does not count for health, long before it is given up."""
STUCK_STEP_S = 60.0
"""Nor does one whose present step runs for so long. It is not given up: a slow device may yet end it."""


@dataclass(slots=True)
class _Stream:
    outbox: Outbox
    local_id: int  # its name in the caller's session
    trace: RequestTrace | None


class Engine:
    """Single-threaded: every method runs on the event loop, and none waits."""

    def __init__(self, config: SchedulerConfig, telemetry: Telemetry, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._telemetry = telemetry
        self._metrics = CoreMetrics(telemetry)
        self._peer_timeout_s = config.peer_timeout_s
        self.epoch = int(self._clock.time_s() * 1e9)
        self.core = SchedulerCore(
            CoreConfig(
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
                max_queue_len=config.max_queue_len,
                priority_ageing_s=config.priority_ageing_s,
                gather_until_s=self.now_s() + config.restart_wait_s,
            )
        )
        self.on_num_answering: Callable[[int], None] = lambda _num: None
        self._streams: dict[int, _Stream] = {}
        self._links: dict[int, Link] = {}
        self._expelled = Expelled()
        self._peers: set[Peer] = set()  # links, and sessions
        self._num_ids = 0
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._sleep = LightSleep()

    @property
    def peer_timeout_s(self) -> float:
        return self._peer_timeout_s

    @property
    def is_idle(self) -> bool:
        """Whether there is no stream."""
        return not self._streams

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    # -- callers --------------------------------------------------------------------------------------

    def prepare_open(
        self,
        proto: generation_pb2.GenerateRequest,
        outbox: Outbox,
        local_id: int,
        parent: Context | None,
        owner: int = 0,
    ) -> Open | None:
        """The event that opens a stream; None where the request is no valid one, which its outbox is told.

        `owner`: the session's; 0 for calls outside of sessions.
        """
        self._num_ids += 1
        stream_id = self._num_ids
        trace = RequestTrace(self._telemetry.tracer, parent) if self._telemetry.enabled else None
        stream = _Stream(outbox, local_id, trace)
        try:
            if not proto.request_id:
                proto.request_id = uuid.uuid4().hex
            request = request_from_proto(
                proto,
                now_s=self.now_s(),
                trace=trace.proto if trace is not None else None,
                seed=secrets.randbits(63),
            )
        except Exception as error:
            self._deliver(stream, StreamFailed(stream_id, _failure(error)))
            return None
        if trace is not None:
            trace.opened(request, self.core.model.name if self.core.model is not None else "")
        self._streams[stream_id] = stream
        return Open(stream_id, request, proto.token_ids, owner)

    def submit(self, events: Sequence[Event]) -> None:
        """Events of one caller that came together."""
        if events:
            self._sleep.stir(len(self._streams))
            try:
                effects = self.core.handle_all(events, self.now_s())
            except Exception as error:
                effects = self._without_what_fails(events, error)
            self._wake(effects.links)  # first, so that orders are on their way before callers are told that they are
            self._dispatch(effects)
            self._arm_deadline()

    def _without_what_fails(self, events: Sequence[Event], error: Exception) -> Effects:
        """One of `events` has raised: streams that were not opened fail, what others were told holds."""
        failure = _failure(error)
        for event in events:
            if isinstance(event, Open) and not self.core.is_open(event.stream_id):
                stream = self._streams.pop(event.stream_id, None)
                if stream is not None:
                    self._deliver(stream, StreamFailed(event.stream_id, failure))
        return self.core.handle_all([e for e in events if isinstance(e, (Cancel, FinishEarly))], self.now_s())

    def new_owner(self) -> int:
        """For a session's opens."""
        self._num_ids += 1
        return self._num_ids

    def cancel(self, stream_ids: Sequence[int]) -> None:
        """The caller is gone, or no longer wants these. Unknown or ended ones do nothing."""
        self.submit([Cancel(stream_id) for stream_id in stream_ids if stream_id in self._streams])

    # -- executors ------------------------------------------------------------------------------------

    def connect(self, hello: executor_pb2.Hello) -> Link:
        """Take an executor in. PreconditionError or InvalidRequestError where that cannot be."""
        if self._closing:
            raise UnavailableError("the scheduler is shutting down")
        spec = spec_from_hello(hello)
        if (wait_s := self._expelled.wait_s(spec.executor_id, self.now_s())) > 0.0:
            raise UnavailableError(
                f"this executor broke the contract; it may connect again in {wait_s:.0f} s (the scheduler's log says how)"
            )
        self._num_ids += 1
        link_id = self._num_ids
        for other in self._links.values():
            if other.name == spec.executor_id:
                other.fail(UnavailableError("the same executor has opened another link"))
        link = Link(link_id, hello, self.now_s(), self.core)
        self._links[link_id] = link
        self.register(link)
        try:
            effects = self.core.handle(ExecutorConnected(link_id, spec), self.now_s())
        except RorqualError:
            del self._links[link_id]
            self.unregister(link)
            self._dispatch(self.core.handle(Tick(), self.now_s()))
            raise
        self._dispatch(effects)
        self._arm_deadline()
        model, groups = spec.model, spec.groups
        _log.info(
            "executor %s connected: model %s, %s KV blocks, %d of them cached, max_num_seqs %d",
            spec.executor_id,
            model.name,
            " + ".join(str(group.num_blocks) for group in groups),
            len(spec.inventory),
            spec.max_num_seqs,
        )
        self.on_num_answering(self.num_answering())
        return link

    def executors(self) -> list[tuple[executor_pb2.Hello, ExecutorState]]:
        """Those connected, in the order in which they came: what each said of itself, and how it stands."""
        states = [(link.hello, self.core.executor(link_id)) for link_id, link in self._links.items()]
        return [(hello, state) for hello, state in states if state is not None]

    def num_answering(self) -> int:
        """How many of them would take a request up now, as far as their heartbeats tell."""
        now_s = self.now_s()
        return sum(
            now_s - link.last_heard_s <= SILENT_S and link.step_running_s <= STUCK_STEP_S
            for link in self._links.values()
        )

    def report(self, link: Link, proto: executor_pb2.Report) -> None:
        """What an executor did. InvalidRequestError for a report that breaks the contract: the link has ended then."""
        now_s = self.now_s()
        link.last_heard_s = now_s
        if proto.HasField("heartbeat"):
            link.step_running_s = proto.heartbeat.step_running_us / 1e6
        if proto.num_steps:
            self._sleep.stir(len(self._streams))
        if link.link_id in self._links:
            try:
                effects = self.core.handle(reported_from_proto(link.link_id, proto), now_s)
            except InvalidRequestError as error:
                self._expel(link, error)
                raise
            self._dispatch(effects)
            if self.core.is_isolating:
                self._arm_deadline()

    def _expel(self, link: Link, error: InvalidRequestError) -> None:
        """The link's executor broke the contract: its streams go on elsewhere, and it stays away for a while."""
        self.unregister(link)
        del self._links[link.link_id]
        wait_s = self._expelled.add(link.name, self.now_s())
        _log.error("executor %s: %s; its link is ended, and refused for %.0f s", link.name, _text(error), wait_s)
        link.fail(error)
        self._dispatch(self.core.handle(ExecutorLost(link.link_id, is_its_own_fault=True), self.now_s()))
        self._arm_deadline()
        self.on_num_answering(self.num_answering())

    def disconnect(self, link: Link) -> None:
        """The link ended, whoever ended it."""
        self.unregister(link)
        if self._links.pop(link.link_id, None) is None:
            return
        self._dispatch(self.core.handle(ExecutorLost(link.link_id), self.now_s()))
        self._arm_deadline()
        _log.info("executor %s is gone%s", link.name, f": {_text(link.error)}" if link.error is not None else "")
        self.on_num_answering(self.num_answering())

    # -- time -----------------------------------------------------------------------------------------

    def register(self, peer: Peer) -> None:
        """`peer` gets heartbeats, and ends when it falls silent."""
        self._peers.add(peer)

    def unregister(self, peer: Peer) -> None:
        self._peers.discard(peer)

    async def run(self) -> None:
        """Heartbeats, peers that fell silent, and metrics, each second."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now_s = self.now_s()
            for peer in list(self._peers):
                peer.beat()
                self._check_silence(peer, now_s)
            self.on_num_answering(self.num_answering())
            self.update_metrics()

    def _check_silence(self, peer: Peer, now_s: float) -> None:
        silent_s = now_s - peer.last_heard_s
        if peer.must_beat and silent_s > self._peer_timeout_s and not peer.closed:
            error = UnavailableError(
                f"nothing was heard for {silent_s:.1f} s (--peer-timeout-s {self._peer_timeout_s:g})"
            )
            _log.warning("%s: %s", peer.name, error.message)
            peer.fail(error)
            if isinstance(peer, Link):
                self.disconnect(peer)  # its wire may be stuck: the core does not wait for that

    def update_metrics(self) -> None:
        self._metrics.update(self.core.stats, self.core.occupancy())

    def _arm_deadline(self) -> None:
        deadline_s = self.core.next_deadline_s()
        if deadline_s is None:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, deadline_s - self.now_s())
        if self._deadline_timer is not None:
            if self._deadline_timer.when() <= when:
                return
            self._deadline_timer.cancel()
        self._deadline_timer = loop.call_at(when, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        self._dispatch(self.core.handle(Tick(), self.now_s()))
        self._arm_deadline()

    def close(self) -> None:
        """End every stream so that its owner takes it elsewhere; nothing new is taken in."""
        self._closing = True
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        error = UnavailableError("the scheduler is shutting down")
        for peer in list(self._peers):
            peer.fail(error)
        for stream_id, stream in self._streams.items():
            stream.outbox.fail(error)
            if stream.trace is not None:
                stream.trace.follow(StreamFailed(stream_id, error))
        self.update_metrics()

    # -- effects --------------------------------------------------------------------------------------

    def _dispatch(self, effects: Effects) -> None:
        streams, get = self._streams, self._streams.get
        for event in effects.events:
            stream = get(event.stream_id)
            if stream is None:
                continue
            if isinstance(event, StreamTokens) and stream.trace is None:
                stream.outbox.push(stream.local_id, event)
                continue
            if isinstance(event, (StreamFinished, StreamFailed)):
                del streams[event.stream_id]
            self._deliver(stream, event)
        self._wake(effects.links)

    def _wake(self, link_ids: Iterable[int]) -> None:
        for link_id in link_ids:
            link = self._links.get(link_id)
            if link is not None:
                link.wake()

    @staticmethod
    def _deliver(stream: _Stream, event: StreamEvent) -> None:
        if stream.trace is not None:
            stream.trace.follow(event)
        if isinstance(event, (StreamTokens, StreamStarted, StreamFinished, StreamFailed)):
            stream.outbox.push(stream.local_id, event)


def _failure(error: Exception) -> RorqualError:
    """What a stream is told; the text of a bug of ours stays in the log."""
    if isinstance(error, RorqualError):
        return error
    _log.error("a request failed inside the scheduler", exc_info=error)
    return InternalError("the scheduler failed; its log says how")


def _text(error: BaseException) -> str:
    return describe(error) if isinstance(error, RorqualError) else repr(error)
