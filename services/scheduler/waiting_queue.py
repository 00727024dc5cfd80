"""The queue of histories that wait for an executor."""

from __future__ import annotations

import heapq

from .drain_rate import Work
from .sequence import Sequence

_MIN_COMPACT = 64


class WaitingQueue:
    """By priority; within one, what has run before goes before what is new; then first come, first served.

    A heap whose removed entries are skipped when they surface, so every operation is O(log n) at most.
    """

    __slots__ = ("_heap", "_num", "_ticket", "_work")

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, int, Sequence]] = []
        self._num = 0
        self._ticket = 0
        self._work: dict[int, Work] = {}  # by priority

    def __len__(self) -> int:
        return self._num

    def push(self, seq: Sequence) -> None:
        self._ticket += 1
        seq.queue_ticket = self._ticket
        heapq.heappush(self._heap, (seq.request.priority, seq.is_new, seq.arrival, self._ticket, seq))
        self._num += 1
        seq.queued_work = (1, seq.num_tokens, max(seq.max_total, seq.num_tokens))
        self._add(seq, 1)

    def discard(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands; nothing happens if it is not in."""
        if seq.queue_ticket:
            seq.queue_ticket = 0
            self._num -= 1
            self._add(seq, -1)
            if len(self._heap) > 2 * self._num + _MIN_COMPACT:
                self._heap = [entry for entry in self._heap if entry[4].queue_ticket == entry[3]]
                heapq.heapify(self._heap)

    def _add(self, seq: Sequence, sign: int) -> None:
        priority, work = seq.request.priority, seq.queued_work
        a, b, c = self._work.get(priority, (0, 0, 0))
        self._work[priority] = total = (a + sign * work[0], b + sign * work[1], c + sign * work[2])
        if not total[0]:
            del self._work[priority]

    def ahead(self, priority: int) -> Work:
        """What stands before a newcomer of that class."""
        before = [work for other, work in self._work.items() if other <= priority]
        return sum(w[0] for w in before), sum(w[1] for w in before), sum(w[2] for w in before)

    def peek(self) -> Sequence | None:
        """The one to run next."""
        heap = self._heap
        while heap and heap[0][4].queue_ticket != heap[0][3]:
            heapq.heappop(heap)
        return heap[0][4] if heap else None
