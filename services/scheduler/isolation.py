"""Requests under which executors died: where they may run until it is known which of them is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rorqual.core.errors import LethalRequestError
from rorqual.core.quarantine import MIN_DEATHS, Quarantine

from .events import Reported
from .executor_state import ExecutorState
from .sequence import Sequence, State

Fits = Callable[[Sequence, ExecutorState], bool]


class Isolation:
    """The quarantine's rules for streams and links: who waits outside the queue, and which executors are kept for whom.

    At most half of the executors, and at least one, are kept for suspects at a time.
    """

    def __init__(self) -> None:
        self._quarantine: Quarantine[int, int] = Quarantine()
        self._suspects: dict[int, Sequence] = {}  # by stream id: in state SUSPECT
        self._held: dict[int, ExecutorState] = {}

    @property
    def is_active(self) -> bool:
        """Whether anybody waits outside the queue, or an executor is kept for anybody."""
        return bool(self._suspects or self._held)

    @property
    def num_suspects(self) -> int:
        return len(self._suspects)

    def next_s(self) -> float | None:
        """When time alone will change something."""
        return self._quarantine.next_s() if self.is_active else None

    # -- what happens ---------------------------------------------------------------------------------

    def on_lost(self, executor: ExecutorState, now_s: float, *, is_its_own_fault: bool) -> set[int]:
        """An executor is gone with its sequences; the streams that are to blame. Its sequences are as they were."""
        self._held.pop(executor.link_id, None)
        if is_its_own_fault or not executor.sequences:
            self._quarantine.gone(executor.link_id, now_s)
            return set()
        reached = {seq.stream_id: seq.reached for seq in executor.sequences.values()}
        return set(self._quarantine.died(executor.link_id, reached, now_s))

    def on_admitted(self, seq: Sequence, executor: ExecutorState) -> None:
        self._suspects.pop(seq.stream_id, None)
        self._quarantine.entered(seq.stream_id, executor.link_id, seq.num_computed)

    def on_report(self, executor: ExecutorState, report: Reported) -> None:
        """Some of its sequences have got further."""
        if not self._quarantine.is_watching:
            return
        for seq_id in (*report.seq_ids, *report.computed_seq_ids):
            if (seq := executor.sequences.get(seq_id)) is not None:
                self._quarantine.progressed(seq.stream_id, seq.position)

    def on_removed(self, seq: Sequence) -> None:
        """The stream has ended."""
        self._suspects.pop(seq.stream_id, None)
        self._quarantine.ended(seq.stream_id)

    def takes(self, seq: Sequence) -> bool:
        """Whether `seq`, which runs nowhere, waits here and not in the queue. If so it has the state SUSPECT now."""
        if not self._quarantine.is_isolated(seq.stream_id):
            return False
        seq.state = State.SUSPECT
        self._suspects[seq.stream_id] = seq
        return True

    def discard(self, seq: Sequence) -> None:
        """`seq` waits elsewhere: it is parked."""
        self._suspects.pop(seq.stream_id, None)

    # -- decisions ------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> list[Sequence]:
        """Those that wait here no longer: their time with an executor of their own is up."""
        self._quarantine.expire(now_s)
        free = [seq for stream_id, seq in self._suspects.items() if not self._quarantine.is_isolated(stream_id)]
        for seq in free:
            del self._suspects[seq.stream_id]
        return free

    def arrange(self, executors: Mapping[int, ExecutorState], now_s: float, fits: Fits) -> list[ExecutorState]:
        """Keep executors for groups of suspects, and open others again; those opened or kept just now are returned.

        Where `wants_a_process` has said so, the executor with the fewest sequences is kept while it empties.
        """
        quarantine, changed = self._quarantine, []
        for link_id, executor in list(self._held.items()):
            if not quarantine.is_held(link_id):
                self._release(executor)
                changed.append(executor)
        if not self._suspects or not quarantine.has_pending:
            return changed
        most_held = max(1, len(executors) // 2)
        for executor in executors.values():
            is_emptied = executor.is_held and not quarantine.has_members(executor.link_id)
            if not executor.is_empty or (not is_emptied and (executor.is_held or len(self._held) >= most_held)):
                continue
            if self._assign(executor, now_s, fits):
                changed.append(executor)
            elif is_emptied:
                self._release(executor)
                changed.append(executor)
        if quarantine.wants_a_process(now_s):
            candidates = [e for e in executors.values() if any(fits(seq, e) for seq in self._waiting())]
            if candidates:
                executor = min(candidates, key=lambda e: e.num_running)
                quarantine.close(executor.link_id, now_s)
                self._hold(executor)
                changed.append(executor)
            else:
                quarantine.postpone(now_s)
        return changed

    def emptying(self) -> Iterable[ExecutorState]:
        """Executors that are kept, though others still run there."""
        return [e for e in self._held.values() if not self._quarantine.has_members(e.link_id) and e.num_running]

    def placeable(self) -> list[tuple[Sequence, ExecutorState]]:
        """Suspects that wait for nothing but room on the executor which is kept for their group, in order of arrival."""
        found = [
            (seq, executor)
            for link_id, executor in self._held.items()
            for seq in self._suspects.values()
            if self._quarantine.admits(seq.stream_id, link_id)
        ]
        return sorted(found, key=lambda pair: pair[0].rank)

    def _waiting(self) -> list[Sequence]:
        return [seq for stream_id, seq in self._suspects.items() if self._quarantine.is_pending(stream_id)]

    def _assign(self, executor: ExecutorState, now_s: float, fits: Fits) -> bool:
        def can_run(stream_id: int) -> bool:
            seq = self._suspects.get(stream_id)
            return seq is not None and fits(seq, executor)

        if not self._quarantine.assign(executor.link_id, now_s, can_run):
            return False
        self._hold(executor)
        return True

    def _hold(self, executor: ExecutorState) -> None:
        executor.is_held = True
        self._held[executor.link_id] = executor

    def _release(self, executor: ExecutorState) -> None:
        executor.is_held = False
        self._held.pop(executor.link_id, None)

    # -- invariants, for tests ------------------------------------------------------------------------

    def check(self, executors: Mapping[int, ExecutorState], streams: Mapping[int, Sequence]) -> None:
        """AssertionError unless nobody runs beside a group, and each suspect is where it should be."""
        self._quarantine.check()
        for executor in executors.values():
            assert executor.is_held == (executor.link_id in self._held)
        for seq in streams.values():
            assert (seq.state is State.SUSPECT) == (seq.stream_id in self._suspects)
            if seq.state in (State.WAITING, State.FOLLOWING):
                assert not self._quarantine.is_isolated(seq.stream_id), "a suspect waits in the queue"
        assert self._suspects.keys() <= streams.keys()


def verdict(num_generated: int) -> LethalRequestError:
    """What a guilty stream ends with."""
    return LethalRequestError(
        f"each of the last {MIN_DEATHS} or more executors that ran this request died, at the same point and in the end with "
        f"no other request in it, after {num_generated} generated tokens: it is not run again. Other requests are not "
        "affected; the executor's log says how it died. Change the request, or report it"
    )
