"""The executor's end of the link: dials the scheduler, hands orders to the step loop and reports to the scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from rorqual.core.clock import Clock, SystemClock
from rorqual.core.errors import PreconditionError, RorqualError, UnavailableError
from rorqual.core.token_ids import pack_token_ids, pack_uint64
from rorqual.rpc.channel import open_channel
from rorqual.rpc.status import describe, from_rpc_error
from rorqual.v1 import executor_pb2, executor_pb2_grpc

from .errors import OrderError
from .inventory import InventoryEntry

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
HEARTBEAT_S = 1.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 1.0
# The scheduler's refusals that no second try can change.
_FINAL_REASONS = frozenset({"PROTOCOL_VERSION_MISMATCH", "MODEL_MISMATCH"})


class LinkRefusedError(PreconditionError):
    """The scheduler will not have this executor, and says why."""

    reason = "LINK_REFUSED"


class Outbox(Protocol):
    """What steps brought, until the wire is free."""

    def take(self, *, is_due: bool = False) -> executor_pb2.Report | None: ...


class Loop(Protocol):
    """What the link asks of the step loop; all of it may be called from the link's thread."""

    on_output: Callable[[], None]
    on_order_error: Callable[[OrderError], None]

    @property
    def outbox(self) -> Outbox: ...

    def receive(self, message: executor_pb2.OrderBatch) -> None: ...

    def reset(self) -> Future[list[InventoryEntry]]: ...

    def step_running_us(self) -> int: ...


@dataclass(slots=True)
class _Connection:
    """What one stream knows."""

    call: Any
    heard_s: float
    heartbeat_s: float


class SchedulerLink:
    """Keeps one stream to the scheduler open for as long as `run` is awaited."""

    def __init__(
        self,
        address: str,
        hello: executor_pb2.Hello,
        loop: Loop,
        *,
        peer_timeout_s: float,
        on_connected: Callable[[], None] = lambda: None,
        on_report: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """`hello`: all but the inventory. `on_report` is called after each report was sent."""
        self._address = address
        self._hello = hello
        self._loop = loop
        self._peer_timeout_s = peer_timeout_s
        self._on_connected = on_connected
        self._on_report = on_report
        self._clock = clock or SystemClock()
        self._highest_epoch = 0
        self._output = asyncio.Event()
        self._order_error: OrderError | None = None
        self.num_connects = 0

    async def run(self) -> None:
        """Connect, serve, and connect again when the link is lost. Raises LinkRefusedError."""
        event_loop = asyncio.get_running_loop()
        self._loop.on_output = lambda: _signal(event_loop, self._output)
        self._loop.on_order_error = lambda error: _call(event_loop, self._orders_failed, error)
        backoff_s = _FIRST_BACKOFF_S
        while True:
            connects = self.num_connects
            try:
                await self._connect_once()
            except RorqualError as error:
                if error.reason in _FINAL_REASONS:
                    raise LinkRefusedError(
                        f"the scheduler at {self._address} refuses this executor: {error.message}",
                        reason=error.reason,
                        metadata=error.metadata,
                    ) from error
                _log.warning("link to %s lost: %s", self._address, describe(error))
            if self.num_connects > connects:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _orders_failed(self, error: OrderError) -> None:
        self._order_error = error
        self._output.set()

    async def _connect_once(self) -> None:
        """One stream, from hello to its end. Raises the RorqualError that ended it."""
        # Nothing runs before hello: the loop has dropped every sequence and finished its step.
        inventory = await asyncio.wrap_future(self._loop.reset())
        self._order_error = None
        async with open_channel(self._address) as channel:
            await self._reachable(channel)
            call = executor_pb2_grpc.ExecutorLinkServiceStub(channel).Connect()
            try:
                await self._serve(call, inventory)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            except asyncio.InvalidStateError as error:
                raise UnavailableError("the stream ended") from error
            finally:
                call.cancel()

    async def _reachable(self, channel: grpc.aio.Channel) -> None:
        """Wait until the scheduler can be reached; say so now and then."""
        while True:
            try:
                async with asyncio.timeout(10.0):
                    await channel.channel_ready()
                return
            except TimeoutError:
                _log.info("waiting for a scheduler at %s", self._address)

    async def _serve(self, call: Any, inventory: Sequence[InventoryEntry]) -> None:
        hello = executor_pb2.Hello()
        hello.CopyFrom(self._hello)
        hello.inventory.append(_cached_blocks(inventory))
        try:
            async with asyncio.timeout(self._peer_timeout_s):
                await call.write(executor_pb2.ConnectRequest(hello=hello))
                first = await call.read()
        except TimeoutError:
            raise UnavailableError(f"no welcome within {self._peer_timeout_s:g} s") from None
        if first is grpc.aio.EOF:
            raise await _ending(call)
        if first.WhichOneof("message") != "welcome":
            raise OrderError("the scheduler's first message is no welcome")
        welcome = first.welcome
        self._check_welcome(welcome)
        self.num_connects += 1
        _log.info(
            "connected to the scheduler at %s (epoch %d), offering %d cached blocks",
            self._address,
            welcome.epoch,
            len(inventory),
        )
        self._on_connected()
        now_s = self._clock.monotonic_s()
        connection = _Connection(call, heard_s=now_s, heartbeat_s=now_s)
        heartbeat_every_s = min(HEARTBEAT_S, welcome.peer_timeout_ms / 3000 or HEARTBEAT_S)
        await _until_one_ends(self._receive(connection), self._send(connection, heartbeat_every_s))

    def _check_welcome(self, welcome: executor_pb2.Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise PreconditionError(
                f"the scheduler speaks version {welcome.protocol_version} of the protocol, "
                f"this executor version {PROTOCOL_VERSION}; run one version on both sides",
                reason="PROTOCOL_VERSION_MISMATCH",
            )
        if welcome.epoch < self._highest_epoch:
            raise UnavailableError(
                f"the scheduler's epoch {welcome.epoch} is older than one obeyed before, {self._highest_epoch}: "
                "it was replaced"
            )
        self._highest_epoch = welcome.epoch

    async def _receive(self, connection: _Connection) -> None:
        """Orders, as they come."""
        call, clock = connection.call, self._clock
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise await _ending(call)
            connection.heard_s = clock.monotonic_s()
            if message.WhichOneof("message") != "orders":
                raise OrderError("a message of a kind that this executor does not know")
            if message.orders.batch_id:
                self._loop.receive(message.orders)

    async def _send(self, connection: _Connection, heartbeat_every_s: float) -> None:
        """Reports whenever there is something and the wire is free; a heartbeat each second; an eye on silence."""
        clock, outbox = self._clock, self._loop.outbox
        while True:
            now_s = clock.monotonic_s()
            silence_s = now_s - connection.heard_s
            if silence_s > self._peer_timeout_s:
                raise UnavailableError(f"the scheduler has been silent for {silence_s:.1f} s")
            if self._order_error is not None:
                raise self._order_error
            self._output.clear()
            is_due = now_s - connection.heartbeat_s >= heartbeat_every_s
            report = outbox.take(is_due=is_due)
            if report is not None:
                if is_due:
                    connection.heartbeat_s = now_s
                    report.heartbeat.step_running_us = self._loop.step_running_us()
                async with asyncio.timeout(self._peer_timeout_s):
                    await connection.call.write(executor_pb2.ConnectRequest(report=report))
                self._on_report()
                continue
            wait_s = max(connection.heartbeat_s + heartbeat_every_s - now_s, 0.001)
            timer = asyncio.get_running_loop().call_later(wait_s, self._output.set)
            try:
                await self._output.wait()
            finally:
                timer.cancel()


async def _until_one_ends(*parts: Awaitable[None]) -> None:
    """Run all, and raise what ends the first."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        error = task.exception()
        if isinstance(error, TimeoutError):
            raise UnavailableError("the scheduler does not read") from error
        if error is not None:
            raise error


async def _ending(call: Any) -> RorqualError:
    """Why the scheduler's side of the stream ended."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return UnavailableError("the scheduler ended the stream")
    try:
        await call
    except grpc.RpcError as error:
        return from_rpc_error(error)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
    return UnavailableError(f"the stream ended with {code.name}")


def _cached_blocks(entries: Sequence[InventoryEntry]) -> executor_pb2.CachedBlocks:
    return executor_pb2.CachedBlocks(
        group_idx=0,
        block_ids=pack_token_ids(entry.block_id for entry in entries),
        hashes=b"".join(entry.hash for entry in entries),
        last_used_us=pack_uint64(entry.last_used_us for entry in entries),
    )


def _signal(event_loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set `event` from another thread; waking the event loop's thread is spared where it is awake for this anyway."""
    if not event.is_set():
        _call(event_loop, event.set)


def _call(event_loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    try:
        event_loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not event_loop.is_closed():  # closing: nobody is left to tell
            raise
