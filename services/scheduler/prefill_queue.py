"""The admitted histories of one executor whose chunks are not all sent."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class PrefillQueue:
    """Two ways through one set: the oldest first, and the shortest first, in turn.

    Prompts of one length go through whole and in order, so none waits for those behind it. A long one beside
    short ones gets every other chunk: neither starves the other. Both ways keep to the best priority present.
    """

    __slots__ = ("_by_age", "_by_length", "_shortest_next")

    def __init__(self) -> None:
        self._by_age: list[tuple[int, int, int, Sequence]] = []
        self._by_length: list[tuple[int, int, int, int, Sequence]] = []
        self._shortest_next = False

    def add(self, seq: Sequence) -> None:
        heapq.heappush(self._by_age, (*seq.rank, seq.seq_id, seq))
        self.resize(seq)

    def resize(self, seq: Sequence) -> None:
        """After a chunk was cut from `seq`: it has become shorter."""
        if seq.num_unsent > 0:
            heapq.heappush(self._by_length, (seq.priority, seq.num_unsent, seq.arrival, seq.seq_id, seq))

    def next(self) -> tuple[Sequence, bool] | None:
        """Whose chunk is next, and whether the step is to be shared with another's. Entries of the past are skipped."""
        by_age, by_length = self._by_age, self._by_length
        # A dropped sequence has another id (0, or that of a later admission) and nothing unsent under this one.
        while by_age and (by_age[0][3].seq_id != by_age[0][2] or by_age[0][3].num_unsent <= 0):
            heapq.heappop(by_age)
        if not by_age:
            by_length.clear()
            return None
        while by_length[0][4].seq_id != by_length[0][3] or by_length[0][4].num_unsent != by_length[0][1]:
            heapq.heappop(by_length)
        oldest, shortest = by_age[0][3], by_length[0][4]
        if oldest is shortest:
            return oldest, False
        self._shortest_next = not self._shortest_next
        return (shortest if self._shortest_next else oldest), True
