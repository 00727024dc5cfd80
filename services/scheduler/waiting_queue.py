"""The queue of histories that wait for an executor."""

from __future__ import annotations

import heapq

from .drain_rate import Work
from .sequence import Sequence

_MIN_COMPACT = 64
_MOST_DOUBLINGS = 32  # more than lie between any two classes


def num_periods(waited_s: float, ageing_s: float) -> int:
    """Whole periods; one that lacks no more than rounding counts, or who is due now would be due now again for ever."""
    return int(waited_s / ageing_s + 1e-6)


def classes_gained(waited_s: float, ageing_s: float) -> int:
    """By how many classes waiting has improved a history: 0, and from each `ageing_s` on 1, 2, 4, 8 …"""
    periods = num_periods(waited_s, ageing_s)
    return 1 << min(periods - 1, _MOST_DOUBLINGS) if periods > 0 else 0


class WaitingQueue:
    """By priority; within one, what has run before goes before what is new; then first come, first served.

    Who waits while a better class is there, in the queue or running, gets nearer to it (`classes_gained`): among those it
    comes in by its arrival, which is before whatever came later. So nobody waits for ever, however far the class is: any
    two are less than 2^32 apart, and 33 periods bridge that. What was gained is kept.

    A heap whose removed entries are skipped when they surface, so every operation is O(log n) at most.
    """

    __slots__ = ("_ageing_s", "_due", "_heap", "_num", "_ticket", "_work")

    def __init__(self, ageing_s: float = 0.0) -> None:
        """`ageing_s`: the period; 0: a class never changes."""
        self._ageing_s = ageing_s
        self._heap: list[tuple[int, bool, int, int, Sequence]] = []
        self._due: list[tuple[float, int, Sequence]] = []  # when who gets better next, and its number in the queue
        self._num = 0
        self._ticket = 0
        self._work: dict[int, Work] = {}  # by priority

    def __len__(self) -> int:
        return self._num

    def push(self, seq: Sequence, now_s: float = 0.0) -> None:
        """Take `seq` in; its wait begins `now_s`."""
        seq.queued_s = now_s
        seq.queued_work = (1, seq.num_tokens, max(seq.max_total, seq.num_tokens))
        self._put(seq)
        if self._ageing_s:
            heapq.heappush(self._due, (now_s + self._ageing_s, seq.queue_ticket, seq))
        self._num += 1

    def _put(self, seq: Sequence) -> None:
        self._ticket += 1
        seq.queue_ticket = self._ticket
        heapq.heappush(self._heap, (seq.priority, seq.is_new, seq.arrival, self._ticket, seq))
        self._add(seq, 1)

    def discard(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands; nothing happens if it is not in."""
        if seq.queue_ticket:
            seq.queue_ticket = 0
            self._num -= 1
            self._add(seq, -1)
            self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 2 * self._num + _MIN_COMPACT:
            self._heap = [entry for entry in self._heap if entry[4].queue_ticket == entry[3]]
            heapq.heapify(self._heap)
        if len(self._due) > 2 * self._num + _MIN_COMPACT:
            self._due = [entry for entry in self._due if entry[2].queue_ticket == entry[1]]
            heapq.heapify(self._due)

    def _add(self, seq: Sequence, sign: int) -> None:
        priority, work = seq.priority, seq.queued_work
        a, b, c = self._work.get(priority, (0, 0, 0))
        self._work[priority] = total = (a + sign * work[0], b + sign * work[1], c + sign * work[2])
        if not total[0]:
            del self._work[priority]

    def ahead(self, priority: int) -> Work:
        """What stands before a newcomer of that class."""
        before = [work for other, work in self._work.items() if other <= priority]
        return sum(w[0] for w in before), sum(w[1] for w in before), sum(w[2] for w in before)

    def peek(self, now_s: float = 0.0, best_running: int | None = None) -> Sequence | None:
        """The one to run next. `best_running`: the best class that runs."""
        if self._due and self._due[0][0] <= now_s:
            self._age(now_s, best_running)
        heap = self._heap
        while heap and heap[0][4].queue_ticket != heap[0][3]:
            heapq.heappop(heap)
        return heap[0][4] if heap else None

    def _age(self, now_s: float, best_running: int | None) -> None:
        """Improve those whose time has come, but to no better class than is there."""
        due = self._due
        if self._num == 0:
            due.clear()
            return
        best = min(self._work)
        if best_running is not None:
            best = min(best, best_running)
        again: list[tuple[float, int, Sequence]] = []
        while due and due[0][0] <= now_s:
            _, ticket, seq = heapq.heappop(due)
            if seq.queue_ticket != ticket:
                continue
            waited_s = now_s - seq.queued_s
            gained = max(seq.request.priority - classes_gained(waited_s, self._ageing_s), best)
            if gained < seq.priority:
                self._add(seq, -1)
                seq.priority = gained
                seq.tried_at = -1
                self._put(seq)
            next_period = num_periods(waited_s, self._ageing_s) + 1
            again.append((seq.queued_s + next_period * self._ageing_s, seq.queue_ticket, seq))
        for entry in again:
            heapq.heappush(due, entry)
        self._compact()
