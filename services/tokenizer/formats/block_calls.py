"""Calls in blocks of their own tokens: DeepSeek V2.5 to V3.1, and Kimi K2.

    <calls><call>function<sep>NAME⏎```json⏎{…}⏎```<end_call>⏎<call>…<end_call><end_calls>    fenced (V2.5, V3, R1)
    <calls><call>NAME<sep>{…}<end_call><call>…<end_call><end_calls>                          bare (V3.1)
    <calls><call>functions.NAME:0<sep>{…}<end_call><end_calls>                               with the call's id (Kimi)

Models write the fenced form and the bare one for each other, so both are read; the word before the separator tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from .events import Event, Kind
from .output import Beginnings

MAX_HEAD_CHARS = 1024
"""What is longer before a call's arguments begin is no call."""

_FENCED_KIND = "function"
_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)
_FENCE = re.compile(rf"\s{{0,{MAX_HEAD_CHARS}}}```[A-Za-z]{{0,16}}[ \t]{{0,16}}\n?")
_PLAIN_ARGUMENTS = re.compile(r"[^\ud800-\udfff]*[^\ud800-\udfff\s`]")  # no sentinel, and no end of them
_MAX_TAIL_CHARS = 16  # white space and a closing fence


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """Marks as they appear in the text that is parsed."""

    begin: str
    end: str
    call: str
    separator: str
    end_call: str
    has_ids: bool = False  # what stands before the separator is the call's id
    ends_reasoning: bool = False
    newlines_before: int = 0
    mark: re.Pattern[str] = field(init=False, compare=False)
    mark_beginnings: Beginnings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        marks = self.begin, self.end, self.call, self.separator, self.end_call
        object.__setattr__(self, "mark", re.compile("|".join(map(re.escape, marks))))
        object.__setattr__(self, "mark_beginnings", Beginnings(marks))

    @property
    def openings(self) -> tuple[str, ...]:
        return self.begin, self.call

    def reader(self, replace_sentinels: dict[int, str]) -> BlockReader:
        return BlockReader(self, replace_sentinels)


class _State(Enum):
    BETWEEN = "between calls"
    HEAD = "before the separator"
    NAME = "after it, where a name and a fence follow"
    FENCE = "where a fence may follow"
    ARGUMENTS = "inside the arguments"


class BlockReader:
    """See CallReader. Reads runs of text, cut anywhere, and the marks between them."""

    __slots__ = (
        "_buffer", "_events", "_given", "_held", "_loose", "_replace", "_state", "_syntax",
        "num_calls", "num_closed",
    )  # fmt: skip

    def __init__(self, syntax: BlockCalls, replace_sentinels: dict[int, str]) -> None:
        self._syntax = syntax
        self._replace = replace_sentinels
        self._events: list[Event] = []
        self._state = _State.BETWEEN
        self._buffer = ""  # may begin a mark
        self._given = ""  # of a head, what is given back where it proves to be none
        self._held = ""  # of the present state, not decided yet
        self._loose = False  # text between calls has begun that is more than white space
        self.num_calls = 0
        self.num_closed = 0

    def begin(self, opening: str) -> None:
        self._enter(_State.HEAD if opening == self._syntax.call else _State.BETWEEN)
        self._given = opening

    def push(self, text: str) -> tuple[list[Event], str | None]:
        syntax = self._syntax
        buffer = self._buffer + text
        place = 0
        for mark in syntax.mark.finditer(buffer):
            if place < mark.start():
                self._take(buffer[place : mark.start()])
            place = mark.end()
            self._take_mark(mark.group())
            if mark.group() == syntax.end:
                self._buffer = ""
                return self._take_events(), buffer[place:]
        end = len(buffer) - syntax.mark_beginnings.at_end_of(buffer)
        self._buffer = buffer[end:]
        if place < end:
            self._take(buffer[place:end])
        return self._take_events(), None

    def flush(self) -> list[Event]:
        if self._state in (_State.HEAD, _State.NAME) and not self.num_calls:
            self._held += self._buffer
            self._give_back()
        elif self._state is _State.ARGUMENTS:
            self._take(self._buffer)
        self._buffer = ""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _enter(self, state: _State) -> None:
        self._state = state
        self._held = ""
        self._loose = False

    def _take_mark(self, mark: str) -> None:
        syntax = self._syntax
        if self._state is _State.HEAD and mark == syntax.separator:
            self._end_head()
            return
        if self._state is _State.ARGUMENTS and mark in (syntax.separator, syntax.begin):
            return  # out of place
        if self._state is _State.NAME and self._held.strip():
            self._begin_call(self._held.strip())
        if self._state is _State.FENCE:
            self._end_fence()
        if self._state is _State.ARGUMENTS:
            self.num_closed += 1
        elif self._state in (_State.HEAD, _State.NAME):
            self._give_back()
        self._enter(_State.HEAD if mark == syntax.call else _State.BETWEEN)
        self._given = mark

    def _take(self, text: str) -> None:
        state = self._state
        if state is _State.ARGUMENTS:
            self._take_arguments(text)
            return
        if state is _State.BETWEEN:
            self._give_loose(text)
            return
        self._held += text
        if state is _State.NAME:
            self._find_name()
        if self._state is _State.FENCE:
            self._find_fence()
        elif self._state is not _State.ARGUMENTS and len(self._held) > MAX_HEAD_CHARS:
            self._give_back()

    def _end_head(self) -> None:
        """The separator was read: what stood before it is the word `function`, a name, or an id."""
        word = self._held.strip()
        if self._syntax.has_ids:
            match = _ID.fullmatch(word)
            self._begin_call(match.group(1) if match else "", word)
        elif word == _FENCED_KIND:
            self._given += self._held + self._syntax.separator
            self._enter(_State.NAME)
        else:
            self._begin_call(word)

    def _find_name(self) -> None:
        text = self._held.lstrip()
        line, newline, rest = text.partition("\n")
        num_blanks = len(self._held) - len(text)
        if num_blanks <= MAX_HEAD_CHARS and text.startswith("{"):  # the bare form, of a tool that is called so
            self._begin_call(_FENCED_KIND)
            self._held = text
        elif newline and num_blanks + len(line) <= MAX_HEAD_CHARS:
            self._begin_call(line.strip())
            self._held = rest

    def _begin_call(self, name: str, call_id: str = "") -> None:
        if not name:
            self._give_back()
            return
        self._events.append(Event(Kind.CALL, name.translate(self._replace), self.num_calls, call_id))
        self.num_calls += 1
        self._enter(_State.FENCE)

    def _find_fence(self) -> None:
        """Whether the arguments stand in a code fence; decided by the first characters after it."""
        text = self._held.lstrip()
        num_blanks = len(self._held) - len(text)
        if num_blanks <= MAX_HEAD_CHARS and (not text or (len(text) < 3 and "```".startswith(text))):
            return
        fence = _FENCE.match(self._held)
        if fence is None or fence.end() < len(self._held):
            self._end_fence()

    def _end_fence(self) -> None:
        fence = _FENCE.match(self._held)
        num_blanks = len(self._held) - len(self._held.lstrip())
        text = self._held[fence.end() if fence else min(num_blanks, MAX_HEAD_CHARS) :]
        self._enter(_State.ARGUMENTS)
        self._take_arguments(text)

    def _take_arguments(self, text: str) -> None:
        """Gives all but what may be the end of them: white space and a closing fence, which no JSON ends with."""
        if not self._held and _PLAIN_ARGUMENTS.fullmatch(text):  # the common case
            self._events.append(Event(Kind.ARGUMENTS, text, self.num_calls - 1))
            return
        text = self._held + text
        body = text.rstrip()
        for _ in range(3):
            body = body.removesuffix("`")
        body = body.rstrip()
        cut = max(len(body), len(text) - _MAX_TAIL_CHARS)
        self._held = text[cut:]
        if shown := text[:cut].translate(self._replace):
            self._events.append(Event(Kind.ARGUMENTS, shown, self.num_calls - 1))

    def _give_loose(self, text: str) -> None:
        if not self._loose:
            text = text.lstrip()
            self._loose = bool(text)
        if text := text.translate(self._replace):
            self._events.append(Event(Kind.CONTENT, text))

    def _give_back(self) -> None:
        """A head that is none is content."""
        text = self._given + self._held
        self._enter(_State.BETWEEN)
        self._loose = True
        if text := text.translate(self._replace):
            self._events.append(Event(Kind.CONTENT, text))
