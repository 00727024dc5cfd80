"""Calls in DSML, the markup of DeepSeek V3.2 and V4, read into JSON arguments piece by piece.

    ⏎⏎<｜DSML｜tool_calls>⏎<｜DSML｜invoke name="f">⏎<｜DSML｜parameter name="a" string="true">text</｜DSML｜parameter>⏎
    </｜DSML｜invoke>⏎</｜DSML｜tool_calls>

The value of string="true" is raw text and is given as it comes. Another value is JSON and is given once it is whole;
where it is no JSON it is given as a string, so that the arguments always parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .events import Event, Kind
from .output import Beginnings

MAX_TAG_CHARS = 1024
"""What is longer is no tag."""


@dataclass(frozen=True, slots=True)
class DsmlCalls:
    """`dsml`: the mark as it appears in the text that is parsed."""

    dsml: str
    block: str  # the outer tag's name
    prefix: str = ""  # before the inner tags' names
    ends_reasoning: bool = False
    newlines_before: int = 2
    border: re.Pattern[str] = field(init=False)  # what begins a tag
    tag: re.Pattern[str] = field(init=False)  # the rest of it
    tag_beginnings: tuple[str, ...] = field(init=False)
    border_beginnings: Beginnings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        prefix, value = self.prefix, f"(?:(?!{re.escape(self.dsml)}).)*?"
        object.__setattr__(self, "border", re.compile(f"</?{re.escape(self.dsml)}"))
        object.__setattr__(self, "border_beginnings", Beginnings((f"<{self.dsml}", f"</{self.dsml}")))
        tag = (
            f"(?P<block>{re.escape(self.block)})>"
            f'|(?P<invoke>{prefix}invoke)(?: name="(?P<function>{value})")?>'
            f'|{prefix}parameter(?: name="(?P<key>{value})" string="(?P<string>true|false)")?>'
        )
        object.__setattr__(self, "tag", re.compile(tag, re.DOTALL))
        inner = (f"{prefix}invoke", f"{prefix}parameter")
        beginnings = (f"{self.block}>", *(f"{name}>" for name in inner), *(f'{name} name="' for name in inner))
        object.__setattr__(self, "tag_beginnings", beginnings)

    @property
    def openings(self) -> tuple[str, ...]:
        return (f"<{self.dsml}",)

    def reader(self, replace_sentinels: dict[int, str]) -> DsmlReader:
        return DsmlReader(self, replace_sentinels)

    def may_be_tag(self, text: str) -> bool:
        """Whether `text`, which holds no whole tag, may grow into one."""
        return (
            len(text) <= MAX_TAG_CHARS
            and self.dsml not in text
            and any(
                known.startswith(text) or (known.endswith('"') and text.startswith(known))
                for known in self.tag_beginnings
            )
        )


class DsmlReader:
    """See CallReader."""

    __slots__ = (
        "_border", "_buffer", "_ended", "_events", "_in_block", "_in_call", "_json", "_loose", "_num_keys", "_replace",
        "_string", "_syntax", "num_calls", "num_closed",
    )  # fmt: skip

    def __init__(self, syntax: DsmlCalls, replace_sentinels: dict[int, str]) -> None:
        self._syntax = syntax
        self._replace = replace_sentinels
        self._events: list[Event] = []
        self._buffer = ""
        self._border = ""  # of the tag that is read; empty outside of tags
        self._in_block = False
        self._ended = False
        self._in_call = False
        self._num_keys = 0  # of the call
        self._string = False  # inside the value of a string
        self._json: list[str] | None = None  # of another value, so far
        self._loose = False  # text between tags has begun that is more than white space
        self.num_calls = 0
        self.num_closed = 0

    def begin(self, opening: str) -> None:
        self._border = opening
        self._in_block = self._ended = False

    def push(self, text: str) -> tuple[list[Event], str | None]:
        self._buffer += text
        while not self._ended and (self._read_tag() if self._border else self._read_text()):
            pass
        rest = None
        if self._ended:
            rest, self._buffer = self._buffer, ""
        return self._take_events(), rest

    def flush(self) -> list[Event]:
        # Where a call has begun, what is held back is syntax that was cut off.
        if self._json:
            self._give_arguments("".join(self._json))
        elif not self.num_calls:
            self._give_content(self._border + self._buffer)
        self._buffer = self._border = ""
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read_text(self) -> bool:
        """Up to the next tag. False where the buffer holds none."""
        border = self._syntax.border.search(self._buffer)
        if border is None:
            place = end = len(self._buffer) - self._syntax.border_beginnings.at_end_of(self._buffer)
        else:
            place, end = border.span()
        text, self._buffer = self._buffer[:place], self._buffer[end:]
        if self._string or self._json is not None:
            self._take_value(text)
        else:
            if not self._loose:
                text = text.lstrip()
                self._loose = bool(text)
            self._give_content(text)
        if border is None:
            return False
        self._border = border.group()
        self._loose = False
        self._end_value()
        return True

    def _read_tag(self) -> bool:
        """The rest of a tag. False where the buffer does not hold all of it."""
        tag = self._syntax.tag.match(self._buffer)
        if tag is None and self._syntax.may_be_tag(self._buffer):
            return False
        if tag is not None and tag.end() <= MAX_TAG_CHARS and self._apply(tag):
            self._buffer = self._buffer[tag.end() :]
        else:  # it is none
            self._give_content(self._border)
            self._loose = True
            self._ended = not self._in_block
        self._border = ""
        return True

    def _apply(self, tag: re.Match[str]) -> bool:
        """What the tag says. False where it says nothing in this place."""
        closes = self._border.startswith("</")
        if tag["block"]:
            if closes:
                self._end_call()
                self._ended = True
            elif self._in_block:
                return False
            self._in_block = True
            return True
        if tag["invoke"]:
            if closes:
                self._end_call()
                return self._in_block
            if not tag["function"]:
                return False
            self._end_call()
            self._in_block = self._in_call = True
            self._num_keys = 0
            self._events.append(Event(Kind.CALL, tag["function"].translate(self._replace), self.num_calls))
            self.num_calls += 1
            return True
        if closes or not self._in_call or tag["key"] is None:
            return closes and self._in_block
        self._give_arguments(f"{', ' if self._num_keys else '{'}{_json(tag['key'].translate(self._replace))}: ")
        self._num_keys += 1
        if tag["string"] == "true":
            self._string = True
            self._give_arguments('"')
        else:
            self._json = []
        return True

    def _take_value(self, text: str) -> None:
        text = text.translate(self._replace)
        if self._json is not None:
            self._json.append(text)
        else:
            self._give_arguments(_json(text)[1:-1])

    def _end_value(self) -> None:
        if self._json is not None:
            value, self._json = "".join(self._json), None
            self._give_arguments(value if _is_json(value) else _json(value))
        elif self._string:
            self._string = False
            self._give_arguments('"')

    def _end_call(self) -> None:
        if self._in_call:
            self._in_call = False
            self.num_closed += 1
            self._give_arguments("}" if self._num_keys else "{}")

    def _give_arguments(self, text: str) -> None:
        if text:
            self._events.append(Event(Kind.ARGUMENTS, text, self.num_calls - 1))

    def _give_content(self, text: str) -> None:
        if text := text.translate(self._replace):
            self._events.append(Event(Kind.CONTENT, text))


_json: Callable[[str], str] = json.JSONEncoder(ensure_ascii=False).encode


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True
