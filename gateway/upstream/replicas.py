"""The tokenizer replicas: which are there, which are ready, and which takes the next request."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rorqual.core.clock import Clock
from rorqual.core.errors import ModelNotFoundError, UnavailableError
from rorqual.rpc.channel import open_channel
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2, text_pb2_grpc

from .isolation import Isolation, Suspect
from .link import PEER_SILENT, OnEnd, SessionLink, core_of

_log = logging.getLogger(__name__)

TEXT_SERVICE = "rorqual.v1.TextService"
RETRY_PERIOD_S = 0.25
HEALTH_PERIOD_S = 0.5
HEALTH_TIMEOUT_S = 5.0
MODELS_EVERY = 20  # health answers
MAX_NAMES_TOLD = 8
SILENCE_S = 10.0
"""No heartbeat for so long: nothing new is placed there, and readiness is lost."""

CALL_TIMEOUT_S = 10.0


def model_not_found(asked: str, served: Iterable[str]) -> ModelNotFoundError:
    """The refusal of a model that nobody serves, with the names of those that are served."""
    names = list(dict.fromkeys(served))
    told = ", ".join(map(repr, names[:MAX_NAMES_TOLD])) + (", …" if len(names) > MAX_NAMES_TOLD else "")
    return ModelNotFoundError(
        f"the model {asked!r} is not served here; ask for {told}, or leave the model out", field="model"
    )


class State(enum.Enum):
    """What a replica's health said last."""

    UNREACHABLE = "unreachable"
    NOT_READY = "not ready"  # it answers, but its scheduler or executor does not
    READY = "ready"


class Replica:
    """One tokenizer: its channel, its health, its session."""

    def __init__(
        self,
        address: str,
        *,
        peer_timeout_s: float,
        clock: Clock,
        on_change: Callable[[], None],
        on_end: OnEnd = lambda link, readers, died: None,
    ) -> None:
        self.address = address
        self._on_end = on_end
        self.state = State.UNREACHABLE
        self.cause = f"tokenizer {address} has not answered yet"
        self.models: tuple[text_pb2.ListModelsResponse, ...] = ()
        self.link: SessionLink | None = None
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self._on_change = on_change
        self._asked = False
        self._reachable = asyncio.Event()
        self._lost = ""  # why its last session ended
        self._was_silent = False  # its last session died of silence: trust it again when it speaks
        self._channel = open_channel(address)
        self.stub = text_pb2_grpc.TextServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usable(self) -> bool:
        """A session is open and the peer alive: streams can be placed here."""
        link = self.link
        if link is None or link.closed or self.state is State.UNREACHABLE or (self._was_silent and not link.heard):
            return False
        return link.silent_s < SILENCE_S

    @property
    def num_streams(self) -> int:
        return self.link.num_streams if self.link is not None else 0

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch_health()), asyncio.create_task(self._keep_session())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def _set(self, state: State, cause: str) -> None:
        changed = state is not self.state or cause != self.cause or not self._asked
        self._asked = True
        self.state, self.cause = state, cause
        if not changed:
            return
        _log.log(logging.INFO if state is State.READY else logging.WARNING, "%s", cause)
        if state is State.UNREACHABLE:
            self._reachable.clear()
        else:
            self._reachable.set()
        self._on_change()

    async def _watch_health(self) -> None:
        """Ask again and again: a process that hangs does not say so by itself."""
        for turn in itertools.count():
            try:
                await self._ask_health(with_models=turn % MODELS_EVERY == 0)
            except grpc.RpcError as error:
                why = core_of(from_rpc_error(error).message)
                self._set(State.UNREACHABLE, f"tokenizer {self.address} is unreachable: {why}")
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _ask_health(self, *, with_models: bool) -> None:
        question = health_pb2.HealthCheckRequest(service=TEXT_SERVICE)
        answer = await self._health.Check(question, timeout=HEALTH_TIMEOUT_S)
        state = State.READY if answer.status == health_pb2.HealthCheckResponse.SERVING else State.NOT_READY
        if with_models or state is State.NOT_READY or state is not self.state:
            response = await self.stub.ListModels(text_pb2.ListModelsRequest(), timeout=HEALTH_TIMEOUT_S)
            self.models = (response,)
        if state is State.READY:
            self._set(state, f"tokenizer {self.address} is ready")
        else:
            missing = self.models[0].missing or "what is behind it is not ready"
            self._set(state, f"tokenizer {self.address} answers, but {missing}")

    async def _keep_session(self) -> None:
        while True:
            await self._reachable.wait()
            self.link = link = SessionLink(
                self.address,
                self.stub.Session,
                peer_timeout_s=self._peer_timeout_s,
                clock=self._clock,
                on_first_frame=self._on_change,
                on_end=self._on_end,
            )
            self._on_change()
            try:
                cause = await link.run()
            finally:
                self.link = None
                self._on_change()
            self._was_silent = cause.reason == PEER_SILENT
            self._lost = cause.message
            _log.warning("%s", cause.message)
            await asyncio.sleep(RETRY_PERIOD_S)

    def describe(self) -> str:
        """Its state in words."""
        if self.state is not State.READY or self.usable:
            return self.cause
        if self.link is not None and self.link.silent_s >= SILENCE_S:
            return f"tokenizer {self.address} has been silent for {self.link.silent_s:.0f} s"
        return self._lost or f"tokenizer {self.address} has no open session yet"

    def serves(self, model: str) -> bool:
        """Whether clients may ask for `model` here ("": whatever is served)."""
        return not model or any(info.name == model for response in self.models for info in response.models)


class ReplicaSet:
    """All replicas of one gateway."""

    def __init__(self, addresses: Iterable[str], *, peer_timeout_s: float, clock: Clock) -> None:
        self._clock = clock
        self.peer_timeout_s = peer_timeout_s
        self._changed = asyncio.Event()
        self.isolation = Isolation(clock)
        self.replicas = [
            Replica(
                address,
                peer_timeout_s=peer_timeout_s,
                clock=clock,
                on_change=self._on_change,
                on_end=self._on_session_end,
            )
            for address in dict.fromkeys(addresses)
        ]
        self._turn = 0
        self._was_ready = False
        self._outage_began_s = clock.monotonic_s()

    def start(self) -> None:
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    def _on_session_end(self, link: SessionLink, readers: Iterable[Suspect], died: bool) -> None:
        for stream in self.isolation.session_ended(link, readers, died=died):
            stream.convict()

    def on_stream_change(self) -> None:
        """A stream with a death to its name was cleared, or is over: others may have waited for that."""
        self._on_change()

    def _arrange(self) -> None:
        if self.isolation.is_active:
            usable = (replica for replica in self.replicas if replica.usable)
            self.isolation.arrange({r.link: r.serves for r in usable if r.link is not None})

    def _on_change(self) -> None:
        if self._was_ready and not self.ready:
            self._outage_began_s = self._clock.monotonic_s()
        self._was_ready = self.ready
        self._arrange()
        self._changed.set()  # wakes all that wait now
        self._changed.clear()

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken now, by the whole chain."""
        return any(r.usable and r.state is State.READY for r in self.replicas)

    def causes(self) -> dict[str, str]:
        """What each replica's state is, in words, by address."""
        return {replica.address: replica.describe() for replica in self.replicas}

    def models(self) -> list[tuple[text_pb2.ListModelsResponse, str]]:
        """What can be asked for: each replica's answer, with its address."""
        return [(response, replica.address) for replica in self.replicas for response in replica.models]

    def fingerprint(self, model: str) -> str | None:
        """OpenAI's system_fingerprint of `model` ("": whatever is served); None while it is unknown."""
        for response, _ in self.models():
            for info in response.models:
                if info.fingerprint and model in ("", info.name):
                    return "fp_" + info.fingerprint.hex()[:12]
        return None

    def pick(
        self, model: str, *, ready_only: bool, avoid: frozenset[str] = frozenset(), stream: Suspect | None = None
    ) -> Replica | None:
        """The least loaded replica for `model` that `stream` may enter; ready ones before others. Equal loads take turns."""
        candidates = [
            r
            for r in self.replicas
            if r.usable
            and r.address not in avoid
            and r.serves(model)
            and r.link is not None
            and self.isolation.admits(stream, r.link)
        ]
        if best := [r for r in candidates if r.state is State.READY]:
            candidates = best
        elif ready_only:
            return None
        if not candidates:
            return None
        self._turn += 1
        shift = self._turn % len(candidates)
        return min(candidates[shift:] + candidates[:shift], key=lambda r: r.num_streams)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError where all that answer know the name as nobody's."""
        known = [replica for replica in self.replicas if any(r.models for r in replica.models)]
        if model and known and not any(replica.serves(model) for replica in known):
            raise model_not_found(model, (info.name for response, _ in self.models() for info in response.models))

    def _is_kept(self, model: str, stream: Suspect | None) -> bool:
        """Whether a replica for `model` could be used, but is kept from `stream`."""
        return any(
            r.usable and r.serves(model) and r.link is not None and not self.isolation.admits(stream, r.link)
            for r in self.replicas
        )

    async def acquire(
        self, model: str, *, until_s: float | None = None, stream: Suspect | None = None, wait_s: float | None = None
    ) -> Replica:
        """A replica for `stream` (None: for a call).

        Without `until_s`, for a new request: a ready one, and where there is none it waits as long as the outage is
        younger than peer_timeout_s. With it, for a resume: one that is usable, by that time on the clock, where none is lost
        for longer than `wait_s`. One that is there but kept for others is no outage: a new request waits for
        it for peer_timeout_s, a resume to the end of its time. Raises UnavailableError with the cause, ModelNotFoundError.
        """
        began_s = lost_since_s = self._clock.monotonic_s()
        while True:
            self.check_model(model)
            now_s = self._clock.monotonic_s()
            if self.isolation.next_s <= now_s:
                self._on_change()
            replica = self.pick(model, ready_only=until_s is None, stream=stream)
            if replica is not None:
                return replica
            is_kept = self.isolation.is_active and self._is_kept(model, stream)
            if until_s is None:
                limit_s = began_s + self.peer_timeout_s if is_kept else self._outage_began_s + self.peer_timeout_s
            else:
                lost_since_s = now_s if is_kept else lost_since_s
                limit_s = until_s if wait_s is None else min(until_s, lost_since_s + wait_s)
            if now_s >= limit_s:
                raise UnavailableError(
                    "the tokenizers are looking for a request that kills them; try again later"
                    if is_kept
                    else "; ".join(self.causes().values())
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.001, min(limit_s, self.isolation.next_s) - now_s))
