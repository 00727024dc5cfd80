"""What other threads hand to a step loop: batches of orders, and requests to forget them."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Generic, TypeVar

from .inventory import InventoryEntry

Batch = TypeVar("Batch")


class ResetRequest(Future[list[InventoryEntry]]):
    """Resolves to the labelled blocks, once every sequence is dropped."""

    def answer(self, entries: list[InventoryEntry]) -> None:
        if self.set_running_or_notify_cancel():  # a link that has ended waits for no answer
            self.set_result(entries)


class Inbox(Generic[Batch]):
    """Batches in the order in which they came. A reset empties it, when it is asked for and again when it is taken up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._reset: ResetRequest | None = None
        self._is_woken = False
        self.is_stopped = False

    # Called from other threads.

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._changed.notify()

    def reset(self) -> ResetRequest:
        """Forget all batches, and ask the loop to begin anew. Those who ask before it does so share its answer."""
        with self._changed:
            self._batches.clear()
            if self._reset is None:
                self._reset = ResetRequest()
            self._changed.notify()
            return self._reset

    def wake(self) -> None:
        """End the loop's wait, the present or the next one: there is work that did not come this way."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def stop(self) -> None:
        """End the loop's wait, and from now on every other."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify()

    # Called from the loop's thread. (Each step asks for both: where there is nothing, without the lock.)

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._batches)

    def take(self) -> Batch | None:
        """The oldest batch; None where there is none, or a reset has just emptied it."""
        if not self._batches:
            return None
        with self._changed:
            return self._batches.popleft() if self._batches else None

    def take_reset(self) -> ResetRequest | None:
        """Take a reset up: what came since it was asked for is forgotten too. None where nobody asked."""
        if self._reset is None:
            return None
        with self._changed:
            request, self._reset = self._reset, None
            self._batches.clear()
            return request

    def wait(self) -> None:
        """Return once there is a batch, a reset, a wake or a stop."""
        with self._changed:
            while not (self._batches or self._reset or self._is_woken or self.is_stopped):
                self._changed.wait()
            self._is_woken = False
