"""Dividing a chat's text into reasoning, content and tool calls, incrementally.

White space next to a think tag belongs to neither side, nor does white space around calls. What has been given after
a text is a function of that text, however it was cut; malformed calls are given as content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .events import CallSyntax, Event, Kind
from .marks import END_THINK, HIDE_SENTINELS, SHOW_SENTINELS, THINK, Marks
from .reasoning import Start

_CONTENT, _REASONING = Kind.CONTENT, Kind.REASONING
_IN_CONTENT, _IN_REASONING = Start.CONTENT, Start.REASONING  # names that are looked up for each token


class Beginnings:
    """Finds how much of the end of a text may begin one of some strings."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._beginnings = frozenset(text[:n] for text in wanted for n in range(1, len(text)))
        self._last_chars = frozenset(text[-1] for text in self._beginnings)
        self._longest = max(map(len, self._beginnings), default=0)

    def at_end_of(self, text: str) -> int:
        """The number of characters at the end of `text` that are a beginning, though not all, of one of them."""
        if not text or text[-1] not in self._last_chars:
            return 0
        return next(n for n in range(min(self._longest, len(text)), -1, -1) if not n or text[-n:] in self._beginnings)


class OutputSyntax:
    """What to look for in the text of one vocabulary and format. Immutable; shared by all choices."""

    def __init__(self, marks: Marks, calls: CallSyntax | None, *, show_marks: bool = False) -> None:
        """`calls`: how calls are written, None where none are read. `show_marks`: stray control tokens are spelled."""
        self.open = marks(THINK)
        self.close = marks(END_THINK)
        self.calls = calls
        self.replace = SHOW_SENTINELS if show_marks else HIDE_SENTINELS
        openings = tuple(calls.openings) if calls else ()
        self.newlines_before = calls.newlines_before if calls else 0
        self.openings = openings
        spelled = "|".join(map(re.escape, openings)) or "(?!)"
        self.opening = re.compile(f"\n{{0,{self.newlines_before}}}(?:{spelled})")
        """A block's beginning, with the newlines that belong to it."""
        self.opening_beginnings = Beginnings(openings)
        ends = [self.close, *(openings if calls and calls.ends_reasoning else ())]
        self.reasoning_end = re.compile("|".join(map(re.escape, ends)))
        self.reasoning_end_beginnings = Beginnings(ends)
        firsts = {opening[0] for opening in openings} | ({"\n"} if self.newlines_before else set())
        self.content_care = re.compile(f"[\ud800-\udfff{re.escape(''.join(firsts))}]")
        """A piece of content without any of these is content, whatever comes after it."""
        self.reasoning_care = re.compile(f"[\ud800-\udfff{re.escape(''.join(end[0] for end in ends))}]|\\s$")
        """Likewise of reasoning, whose last white space may stand before a tag."""


class OutputParser:
    """Follows one choice."""

    __slots__ = ("_blank", "_buffer", "_in_calls", "_leading", "_skip_space", "_state", "_syntax", "reader")

    def __init__(self, syntax: OutputSyntax, start: Start) -> None:
        self._syntax = syntax
        self.reader = syntax.calls.reader(syntax.replace) if syntax.calls else None
        self._buffer = ""  # not decided yet
        self._blank: list[str] = []  # white space before it, which may belong to a tag
        self._in_calls = False
        self._skip_space = start in (Start.REASONING, Start.CONTENT)
        self._leading = self.reader is not None  # no content but white space so far: it is dropped where calls follow
        if start in (Start.REASONING, Start.REASONING_CONTINUED):
            self._state = Start.REASONING
        elif start is Start.UNDECIDED:
            self._state = Start.UNDECIDED
        else:
            self._state = Start.CONTENT
            self._leading = self._leading and start is Start.CONTENT

    @property
    def in_reasoning(self) -> bool:
        return self._state is _IN_REASONING

    @property
    def num_calls(self) -> int:
        return self.reader.num_calls if self.reader else 0

    @property
    def num_closed_calls(self) -> int:
        return self.reader.num_closed if self.reader else 0

    def push(self, text: str) -> list[Event]:
        """What `text` adds, in order; may be nothing yet."""
        if not (self._in_calls or self._buffer or self._skip_space or self._blank):  # the common case
            if self._state is _IN_CONTENT:
                if not self._leading and self._syntax.content_care.search(text) is None:
                    return [Event(_CONTENT, text)] if text else []
            elif self._state is _IN_REASONING and self._syntax.reasoning_care.search(text) is None:
                return [Event(_REASONING, text)] if text else []
        events: list[Event] = []
        rest: str | None = text
        while rest is not None:
            rest = self._push_calls(rest, events) if self._in_calls else self._push_text(rest, events)
        return events

    def flush(self) -> list[Event]:
        """The text ended: what was waiting is what it looks like."""
        if self._in_calls and self.reader:
            return self.reader.flush()
        rest = "".join(self._blank) + self._buffer
        self._buffer = ""
        self._blank.clear()
        kind = _REASONING if self._state is Start.REASONING else _CONTENT
        rest = rest.translate(self._syntax.replace)
        return [Event(kind, rest)] if rest else []

    def _push_text(self, text: str, events: list[Event]) -> str | None:
        """Takes `text` in. What follows the beginning of a block of calls; None where none begins."""
        if not self._buffer and text.isspace() and (self._state is not Start.CONTENT or self._skip_space):
            if not self._skip_space:
                self._blank.append(text)
            return None
        self._buffer += text
        if self._state is Start.UNDECIDED:
            self._decide()
        if self._state is Start.REASONING:
            self._take_reasoning(events)
        if self._state is Start.CONTENT and self._buffer:
            return self._take_content(events)
        return None

    def _push_calls(self, text: str, events: list[Event]) -> str | None:
        """Takes `text` in. What follows the block of calls; None while it lasts."""
        assert self.reader is not None
        more, rest = self.reader.push(text)
        if more:
            if self._blank and more[0].kind is _CONTENT:
                events.append(Event(_CONTENT, "".join(self._blank)))
            self._blank.clear()
            self._leading = False
            events += more
        if rest is not None:
            self._in_calls = False
            self._skip_space = self.reader.num_calls > 0
        return rest

    def _decide(self) -> None:
        stripped = self._buffer.lstrip()
        tag = self._syntax.open
        if stripped.startswith(tag):
            self._state = Start.REASONING
            self._blank.clear()
            self._buffer = stripped[len(tag) :]
            self._skip_space = True
        elif stripped and not tag.startswith(stripped):
            self._state = Start.CONTENT
            self._buffer = "".join(self._blank) + self._buffer
            self._blank.clear()

    def _take_reasoning(self, events: list[Event]) -> None:
        syntax = self._syntax
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            # Opening tags that the prompt has already written.
            while self._buffer.startswith(syntax.open):
                self._buffer = self._buffer[len(syntax.open) :].lstrip()
            if syntax.open.startswith(self._buffer):
                return
        end = syntax.reasoning_end.search(self._buffer)
        if end is None:
            # The buffer's end may begin a tag, and white space may turn out to stand before one.
            keep = syntax.reasoning_end_beginnings.at_end_of(self._buffer)
            body, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        else:
            body, self._buffer = self._buffer[: end.start()], self._buffer[end.start() :]
        shown = body.rstrip()
        if shown:
            self._skip_space = False
            text = ("".join(self._blank) + shown).translate(syntax.replace)
            self._blank.clear()
            if text:
                events.append(Event(_REASONING, text))
        if end is None:
            if shown != body:
                self._blank.append(body[len(shown) :])
            return
        self._blank.clear()
        self._state = Start.CONTENT
        self._skip_space = True
        if end.group() == syntax.close:  # what else ends it begins a block of calls
            self._buffer = self._buffer[len(syntax.close) :]

    def _take_content(self, events: list[Event]) -> str | None:
        syntax = self._syntax
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return None
        opening = syntax.opening.search(self._buffer) if syntax.calls else None
        if opening is None:
            keep = self._may_open(self._buffer) if syntax.calls else 0
            shown, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        else:
            shown, self._buffer = self._buffer[: opening.start()], self._buffer[opening.end() :]
        if shown and not (self._leading and shown.isspace()):
            self._leading = self._skip_space = False
            text = ("".join(self._blank) + shown).translate(syntax.replace)
            self._blank.clear()
            if text:
                events.append(Event(_CONTENT, text))
        elif shown:
            self._blank.append(shown)
        if opening is None or self.reader is None:
            return None
        self._skip_space = False
        self._in_calls = True
        self.reader.begin(opening.group())
        rest, self._buffer = self._buffer, ""
        return rest

    def _may_open(self, text: str) -> int:
        """How much of the end of `text` may turn out to begin a block."""
        end = len(text) - self._syntax.opening_beginnings.at_end_of(text)
        for _ in range(self._syntax.newlines_before):
            if end and text[end - 1] == "\n":
                end -= 1
        return len(text) - end
