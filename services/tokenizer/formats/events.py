"""What a model's text turns out to be, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Kind(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a tool call begins; `text` is the function's name
    ARGUMENTS = "arguments"  # a piece of its arguments


class Event(NamedTuple):
    kind: Kind
    text: str
    call_idx: int = 0  # of a call: counts up from 0
    call_id: str = ""  # of a call that begins, where the format lets the model write it


class CallReader(Protocol):
    """Reads the calls of one choice. What it has given after a text is a function of that text, however it was cut."""

    num_calls: int  # begun
    num_closed: int  # ended by the model

    def begin(self, opening: str) -> None:
        """A match of the syntax's `opening` was read: a block of calls begins, or what looks like one."""
        ...

    def push(self, text: str) -> tuple[list[Event], str | None]:
        """(events, None) while the block lasts; (events, what follows it) once it has ended or proved to be none."""
        ...

    def flush(self) -> list[Event]:
        """The text ended inside the block. Nothing is invented to close what is open."""
        ...


class CallSyntax(Protocol):
    """How one family of formats writes calls, over the text of one vocabulary."""

    @property
    def openings(self) -> Sequence[str]:
        """Texts that begin a block of calls."""
        ...

    @property
    def newlines_before(self) -> int:
        """Newlines before an opening that belong to it, at most."""
        ...

    @property
    def ends_reasoning(self) -> bool:
        """Whether a block also ends a reasoning that was not closed."""
        ...

    def reader(self, replace_sentinels: dict[int, str]) -> CallReader: ...
