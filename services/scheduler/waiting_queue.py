"""The queue of histories that wait for an executor."""

from __future__ import annotations

import heapq

from .sequence import Sequence

_MIN_COMPACT = 64


class WaitingQueue:
    """By priority; within one, what has run before goes before what is new; then first come, first served.

    A heap whose removed entries are skipped when they surface, so every operation is O(log n) at most.
    """

    __slots__ = ("_heap", "_num", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, int, Sequence]] = []
        self._num = 0
        self._ticket = 0

    def __len__(self) -> int:
        return self._num

    def push(self, seq: Sequence) -> None:
        self._ticket += 1
        seq.queue_ticket = self._ticket
        heapq.heappush(self._heap, (seq.request.priority, seq.is_new, seq.arrival, self._ticket, seq))
        self._num += 1

    def discard(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands; nothing happens if it is not in."""
        if seq.queue_ticket:
            seq.queue_ticket = 0
            self._num -= 1
            if len(self._heap) > 2 * self._num + _MIN_COMPACT:
                self._heap = [entry for entry in self._heap if entry[4].queue_ticket == entry[3]]
                heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        """The one to run next."""
        heap = self._heap
        while heap and heap[0][4].queue_ticket != heap[0][3]:
            heapq.heappop(heap)
        return heap[0][4] if heap else None
