"""Control tokens in text: finding them, and keeping the caller's apart from the template's.

An added token that a caller merely spells ("<｜end▁of▁sentence｜>" in a message) must stay plain text: it must not
close a turn. So before rendering, each spelling inside the caller's strings is wrapped in two marker characters
that occur nowhere in them; after rendering, what is wrapped is plain text and what is not came from the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # never assigned, so hardly ever in a text
_PRIVATE_USE = tuple(chr(code) for code in range(0xE000, 0xE100))


def _trie_pattern(texts: Iterable[str]) -> str:
    """A pattern of all `texts`, the longest first, that reads their common beginnings once.

    A caller may send megabytes of "<": no step of the search may be Python's, or as many as there are tokens.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}  # a text ends here

    def pattern(node: dict[str, Any]) -> str:
        branches = "|".join(re.escape(char) + pattern(rest) for char, rest in node.items() if char)
        if not branches:
            return ""
        return f"(?:{branches})?" if "" in node else f"(?:{branches})"

    return pattern(root)


class ControlTokens:
    """The added tokens of a vocabulary, to be found in a text: leftmost, then longest, as the tokenizer does."""

    def __init__(self, ids_by_text: Mapping[str, int]) -> None:
        self.ids = dict(ids_by_text)
        firsts = "".join({text[0] for text in self.ids})
        self._begins = re.compile(f"[{re.escape(firsts)}]") if firsts else re.compile("(?!)")
        self._token = re.compile(_trie_pattern(self.ids) or "(?!)")
        self._prefixes = {text[:n] for text in self.ids for n in range(1, len(text))}
        self._suffixes = {text[n:] for text in self.ids for n in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """[start, end) of each control token in `text`, in order, not overlapping."""
        return (match.span() for match in self._token.finditer(text))

    def ends_inside(self, text: str) -> bool:
        """Whether `text` ends with the beginning of a control token, which other text could complete."""
        tail = text[-self._longest :]
        return any(tail[match.start() :] in self._prefixes for match in self._begins.finditer(tail))

    def begins_inside(self, text: str) -> bool:
        """Whether `text` begins with the end of a control token."""
        head = text[: self._longest]
        return any(head[:n] in self._suffixes for n in range(1, len(head) + 1))


@dataclass(frozen=True, slots=True)
class Markers:
    """Characters that occur in no caller's string of one request."""

    start: str
    end: str
    here: str  # the end of a message that is to be continued

    @property
    def all(self) -> str:
        return self.start + self.end + self.here


def choose_markers(strings: Iterable[str]) -> Markers:
    """Three characters that none of `strings` holds, itself or as a JSON escape."""
    joined = "".join(strings)
    lowered = joined.lower() if "\\u" in joined else ""
    free = (
        char for char in (*_NONCHARACTERS, *_PRIVATE_USE) if char not in joined and f"\\u{ord(char):04x}" not in lowered
    )
    try:
        return Markers(next(free), next(free), next(free))
    except StopIteration:
        raise ValueError(
            "the text holds every noncharacter and every private-use character that could mark it"
        ) from None


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def mark(value: Any, control: ControlTokens, markers: Markers) -> Any:
    """`value` with the control tokens that its strings spell wrapped in markers, keys included."""
    if isinstance(value, str):
        return _mark_text(value, control, markers)
    if isinstance(value, Mapping):
        return {mark(key, control, markers): mark(item, control, markers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(item, control, markers) for item in value]
    return value


def _mark_text(text: str, control: ControlTokens, markers: Markers) -> str:
    parts: list[str] = []
    position = 0
    for start, end in control.find(text):
        parts += (text[position:start], markers.start, text[start:end], markers.end)
        position = end
    parts.append(text[position:])
    # Text beside this string must not complete a token with its end or its beginning.
    if control.ends_inside(parts[-1]):
        parts.append(markers.end)
    if control.begins_inside(parts[0]):
        parts.insert(0, markers.start)
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of plain text, or one control token."""

    text: str
    is_control: bool


def cut_control(text: str, control: ControlTokens) -> list[Segment]:
    """`text` as plain runs and the control tokens that it spells."""
    segments: list[Segment] = []
    position = 0
    for start, end in control.find(text):
        if position < start:
            segments.append(Segment(text[position:start], False))
        segments.append(Segment(text[start:end], True))
        position = end
    if position < len(text):
        segments.append(Segment(text[position:], False))
    return segments


def split_marked(rendered: str, control: ControlTokens, markers: Markers) -> list[Segment]:
    """`rendered` as plain runs and the template's own control tokens, without markers.

    Wrapped tokens are plain. A lone marker (a template may cut a string anywhere) only keeps its two sides from
    forming a token.
    """
    if "\\u" in rendered:
        # JSON filters that escape what is not ASCII also escape the markers.
        for marker in markers.all:
            rendered = rendered.replace(f"\\u{ord(marker):04x}", marker)
    pieces = re.split(f"([{markers.all}])", rendered)  # text, marker, text, marker, …, text
    segments: list[Segment] = []
    plain: list[str] = []

    def close_plain() -> None:
        if text := "".join(plain):
            segments.append(Segment(text, False))
        plain.clear()

    for index in range(0, len(pieces), 2):
        piece = pieces[index]
        before = pieces[index - 1] if index else ""
        after = pieces[index + 1] if index + 1 < len(pieces) else ""
        if before == markers.start and after == markers.end and piece in control.ids:
            plain.append(piece)
            continue
        position = 0
        for start, end in control.find(piece):
            plain.append(piece[position:start])
            close_plain()
            segments.append(Segment(piece[start:end], True))
            position = end
        plain.append(piece[position:])
    close_plain()
    return segments
