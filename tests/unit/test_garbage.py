"""Memory is given back once after each time of work."""

from __future__ import annotations

from rorqual.core.garbage import IDLE_S, IdleTrim, give_back_memory


def test_memory_is_given_back_once_when_work_has_been_over_for_a_while() -> None:
    calls: list[float] = []
    now_s = 0.0
    trim = IdleTrim(lambda: calls.append(now_s))
    for now_s in range(5):
        trim.note(is_busy=False, now_s=now_s)
    assert calls == []  # nothing was done
    trim.note(is_busy=True, now_s=5.0)
    for now_s in (6.0, 7.0, 6.0 + IDLE_S, 9.0, 10.0):
        trim.note(is_busy=False, now_s=now_s)
    assert calls == [6.0 + IDLE_S]
    trim.note(is_busy=True, now_s=11.0)
    trim.note(is_busy=False, now_s=12.0)
    trim.note(is_busy=True, now_s=13.0)
    trim.note(is_busy=False, now_s=14.0)
    assert len(calls) == 1
    now_s = 17.0
    trim.note(is_busy=False, now_s=now_s)
    assert len(calls) == 2


def test_it_can_be_done_here() -> None:
    give_back_memory()
