"""Batches and resets between threads: order, what a reset forgets, and what ends a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from executor.inbox import Inbox
from executor.inventory import InventoryEntry

ENTRY = InventoryEntry(3, b"h" * 32, 7)


def test_batches_are_taken_in_the_order_in_which_they_came() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.take() is None
    for batch in range(3):
        inbox.put(batch)
    assert len(inbox) == 3
    assert [inbox.take() for _ in range(4)] == [0, 1, 2, None]
    assert not inbox


def test_a_reset_forgets_what_came_before_it_is_taken_up() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    asked = inbox.reset()
    assert inbox.take() is None
    inbox.put(2)
    request = inbox.take_reset()
    assert request is asked
    assert inbox.take() is None
    assert inbox.take_reset() is None
    inbox.put(3)
    assert not asked.done()
    asked.answer([ENTRY])
    assert asked.result(0) == [ENTRY]
    assert inbox.take() == 3, "the answer itself forgets nothing"


def test_resets_share_an_answer_until_one_is_taken_up() -> None:
    inbox: Inbox[int] = Inbox()
    first = inbox.reset()
    assert inbox.reset() is first
    assert inbox.take_reset() is first
    second = inbox.reset()
    assert second is not first, "it was asked for after the first was begun, and needs a new one"
    first.answer([])
    assert not second.done()


def test_an_answer_that_nobody_waits_for_is_no_fault() -> None:
    inbox: Inbox[int] = Inbox()
    request = inbox.reset()
    assert request.cancel()
    request.answer([ENTRY])
    assert request.cancelled()


@pytest.mark.parametrize(
    "end", [lambda inbox: inbox.put(1), Inbox.reset, Inbox.wake, Inbox.stop], ids=["batch", "reset", "wake", "stop"]
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "meanwhile"])
def test_a_wait_ends_by_anything_that_comes(end: Callable[[Inbox[int]], object], before: bool) -> None:
    inbox: Inbox[int] = Inbox()
    if before:
        end(inbox)
    waiting = threading.Thread(target=inbox.wait, daemon=True)
    waiting.start()
    if not before:
        waiting.join(0.05)
        assert waiting.is_alive(), "there is nothing to do yet"
        end(inbox)
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_a_wake_ends_one_wait_and_a_stop_all() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.wake()
    inbox.wait()
    waiting = threading.Thread(target=inbox.wait, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "it was woken once"
    inbox.stop()
    waiting.join(10.0)
    assert not waiting.is_alive()
    inbox.wait()
    assert inbox.is_stopped


def test_no_batch_of_a_busy_sender_is_lost_or_changes_places() -> None:
    """The loop's way to use it, against a thread that sends as fast as it can."""
    inbox: Inbox[int] = Inbox()
    num_batches = 5000

    def send() -> None:
        for batch in range(num_batches):
            inbox.put(batch)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    taken: list[int] = []
    while len(taken) < num_batches:
        inbox.wait()
        while (batch := inbox.take()) is not None:
            taken.append(batch)
    sender.join(10.0)
    assert taken == list(range(num_batches))
