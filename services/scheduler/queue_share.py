"""How much of the queue's bound one caller may take while others want in."""

from __future__ import annotations

from collections import Counter


class QueueShare:
    """Open streams by owner (a session, or all calls outside of sessions).

    One owner alone may fill the queue. When it is full, another one still gets in while it has fewer streams than an equal
    share of the bound, so that a session with 50,000 requests shuts out nobody; together at most as many again may wait.
    """

    __slots__ = ("_max_queue_len", "_num_by_owner")

    def __init__(self, max_queue_len: int) -> None:
        self._max_queue_len = max_queue_len
        self._num_by_owner: Counter[int] = Counter()

    def add(self, owner: int) -> None:
        self._num_by_owner[owner] += 1

    def remove(self, owner: int) -> None:
        self._num_by_owner[owner] -= 1
        if not self._num_by_owner[owner]:
            del self._num_by_owner[owner]

    def is_full(self, owner: int, num_waiting: int) -> bool:
        """Whether a newcomer of `owner` is one too many, with `num_waiting` streams waiting."""
        if num_waiting < self._max_queue_len:
            return False
        num_owners = len(self._num_by_owner | Counter({owner: 1}))
        share = self._max_queue_len // num_owners
        return num_owners == 1 or num_waiting >= 2 * self._max_queue_len or self._num_by_owner[owner] >= share

    def check(self, num_streams: int) -> None:
        """AssertionError unless every open stream is counted."""
        assert self._num_by_owner.total() == num_streams
        assert all(num > 0 for num in self._num_by_owner.values())
