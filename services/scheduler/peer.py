"""Whoever is at the other end of a long stream: how to end it, and when it was heard last."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from rorqual.v1 import executor_pb2

from .core import SchedulerCore
from .wire import fill_batch


class Peer(ABC):
    """The engine gives each a heartbeat a second, and ends those that fall silent."""

    def __init__(self, name: str, now_s: float, *, must_beat: bool) -> None:
        self.name = name
        self.last_heard_s = now_s
        self.must_beat = must_beat  # whether silence means death
        self.closed = False

    @abstractmethod
    def beat(self) -> None:
        """A heartbeat is due: it goes out with what else does, or alone."""

    @abstractmethod
    def fail(self, error: BaseException | None) -> None:
        """End the stream: with a status, or in order."""


class Link(Peer):
    """One executor's connection. Batches are built when its wire is free."""

    def __init__(self, link_id: int, hello: executor_pb2.Hello, now_s: float, core: SchedulerCore) -> None:
        """`hello`: as the executor said it; its inventory is not kept."""
        super().__init__(hello.executor_id, now_s, must_beat=True)
        self.link_id = link_id
        self.hello = executor_pb2.Hello()
        self.hello.CopyFrom(hello)
        self.hello.ClearField("inventory")
        self.error: BaseException | None = None
        self.step_running_s = 0.0  # by its last heartbeat
        self._core = core
        self._ready = asyncio.Event()
        self._heartbeat_due = False

    def wake(self) -> None:
        """The core has orders for this link."""
        self._ready.set()

    def beat(self) -> None:
        self._heartbeat_due = True
        self._ready.set()

    def fail(self, error: BaseException | None) -> None:
        self.error, self.closed = error, True
        self._ready.set()

    async def take(self) -> executor_pb2.OrderBatch | None:
        """The next batch, or a heartbeat alone, as soon as there is one; None when the link is to end."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self.closed:
                if self.error is not None:
                    raise self.error
                return None
            taken = self._core.take_batch(self.link_id)
            if self._core.has_orders(self.link_id):
                self._ready.set()  # more than one batch takes: the rest follows at once
            if taken is None and not self._heartbeat_due:
                continue
            batch = executor_pb2.OrderBatch()
            if taken is not None:
                fill_batch(batch, *taken)
            if self._heartbeat_due:
                self._heartbeat_due = False
                batch.heartbeat.SetInParent()  # no step runs now: the loop that builds batches is the one that decides
            return batch
