"""Work in a thread whose caller may go: what takes long asks from time to time whether anybody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_gone: ContextVar[threading.Event | None] = ContextVar("gone", default=None)


class AbandonedError(Exception):
    """Nobody waits for this any more."""


@contextmanager
def abandoned_by(gone: threading.Event) -> Iterator[None]:
    """Inside, in this thread, `check_wanted` raises once `gone` is set."""
    token = _gone.set(gone)
    try:
        yield
    finally:
        _gone.reset(token)


def check_wanted() -> None:
    """AbandonedError where the caller has gone."""
    gone = _gone.get()
    if gone is not None and gone.is_set():
        raise AbandonedError
