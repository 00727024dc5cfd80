"""Which request kills the tokenizers that serve it: the quarantine's rules for streams and sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from rorqual.core.clock import Clock
from rorqual.core.errors import LethalRequestError
from rorqual.core.quarantine import MIN_DEATHS, Quarantine

IN_FLIGHT_TOKENS = 8
"""So many tokens may have been on their way from a process that died: it may have got that much further than was heard."""

REQUEST_KILLS_TOKENIZER = "REQUEST_KILLS_TOKENIZER"


class Suspect(Protocol):
    """A stream, as far as it matters here. Compared by identity."""

    def __hash__(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Generated tokens that have come, over all its choices."""
        ...

    @property
    def model(self) -> str: ...

    def move(self) -> None:
        """Leave the session, and open again wherever it is admitted."""
        ...

    def convict(self) -> None:
        """It kills whoever serves it: it must not be opened again."""
        ...


class Session(Protocol):
    """A session with one tokenizer process, as far as it matters here. Compared by identity."""

    def __hash__(self) -> int: ...

    @property
    def num_streams(self) -> int: ...

    @property
    def readers(self) -> Collection[Suspect]:
        """Those of its streams."""
        ...


class Isolation:
    """Streams in a session that is lost have a death to their name; after the second in a row they run in small groups.

    One tokenizer, or up to half of several, is emptied for a group: its streams are moved, to others or, where there is no
    other, to wait. A tokenizer crashes over what is in a request, so each group is through in well under a second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quarantine: Quarantine[Suspect, Session] = Quarantine()

    @property
    def is_active(self) -> bool:
        """Whether any stream has a death to its name."""
        return self._quarantine.is_watching

    @property
    def next_s(self) -> float:
        """When `arrange` has something to do though nothing else happened, on the clock."""
        next_s = self._quarantine.next_s()
        return math.inf if next_s is None else next_s

    def session_ended(self, session: Session, streams: Iterable[Suspect], *, died: bool) -> Collection[Suspect]:
        """`session` is over, with `streams` in it; the guilty among them. `died`: its end was not the process's own wish."""
        now_s = self._clock.monotonic_s()
        if not died:
            self._quarantine.gone(session, now_s)
            return ()
        reached = {stream: stream.num_tokens + IN_FLIGHT_TOKENS for stream in streams}
        return frozenset(self._quarantine.died(session, reached, now_s))

    def opened(self, stream: Suspect, session: Session) -> None:
        self._quarantine.entered(stream, session, stream.num_tokens)

    def progressed(self, stream: Suspect) -> bool:
        """More tokens of `stream` have come; True if that has just cleared it."""
        return self._quarantine.watches(stream) and self._quarantine.progressed(stream, stream.num_tokens)

    def ended(self, stream: Suspect) -> bool:
        """`stream` is over; True if it had a death to its name."""
        watched = self._quarantine.watches(stream)
        self._quarantine.ended(stream)
        return watched

    def admits(self, stream: Suspect | None, session: Session) -> bool:
        """Whether it may be opened in `session` now; None: a call that is no stream."""
        if stream is None:
            return not self._quarantine.is_held(session)
        return self._quarantine.admits(stream, session)

    def is_isolated(self, stream: Suspect | None) -> bool:
        """Whether `stream` may run only where nobody but its group does."""
        return stream is not None and self._quarantine.is_isolated(stream)

    def arrange(self, sessions: Mapping[Session, Callable[[str], bool]]) -> None:
        """Give groups of suspects a tokenizer, and give tokenizers whose time with them is up back to everybody.

        `sessions`: those that can be used now, each with whether its process serves a model. Afterwards `next_s` lies ahead.
        """
        quarantine, now_s = self._quarantine, self._clock.monotonic_s()
        quarantine.expire(now_s)
        num_held = sum(map(quarantine.is_held, sessions))
        most_held = max(1, len(sessions) // 2)
        for session in sorted(sessions, key=lambda session: session.num_streams):  # the emptiest has least to move
            if num_held >= most_held or not quarantine.has_pending:
                break
            serves = sessions[session]
            if quarantine.is_held(session) or not any(serves(stream.model) for stream in quarantine.pending):
                continue
            for stream in list(session.readers):
                stream.move()
            quarantine.assign(session, now_s, lambda stream, serves=serves: serves(stream.model))  # type: ignore[misc]
            num_held += 1
        if quarantine.wants_a_process(now_s):
            quarantine.postpone(now_s)  # there is none for them


def verdict(num_tokens: int) -> LethalRequestError:
    """What a guilty stream ends with."""
    return LethalRequestError(
        f"each of the last {MIN_DEATHS} or more tokenizers that served this request died, at the same point and in the end with "
        f"no other request in it, after {num_tokens} generated tokens: it is not sent again. Other requests are not "
        "affected; the tokenizer's log says how it died. Change the request, or report it",
        reason=REQUEST_KILLS_TOKENIZER,
    )
