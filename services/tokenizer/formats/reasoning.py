"""Splitting a chat's text into reasoning and content at the think tags, incrementally.

Where the vocabulary has the tags as tokens, only those tokens count, and stand in the text as sentinels (lone
surrogates, which no bytes decode to). Otherwise the tags are found by their text.
White space next to a tag belongs to neither part.
"""

from __future__ import annotations

from enum import Enum

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"
OPEN_SENTINEL = "\ud800"
CLOSE_SENTINEL = "\ud801"


class Start(Enum):
    """Where the model's text begins, from the end of the prompt."""

    UNDECIDED = "undecided"  # the model may open the reasoning itself
    REASONING = "reasoning"  # the prompt opened it
    REASONING_CONTINUED = "reasoning continued"  # and already holds some of it
    CONTENT = "content"  # the prompt closed it
    CONTENT_CONTINUED = "content continued"  # and already holds some content


def start_of(
    last_control_id: int | None, open_id: int | None, close_id: int | None, *, text_follows: bool, continued: bool
) -> Start:
    """The start that the prompt's last control token decides; `text_follows` says that more than blanks comes after it.

    Only control tokens are looked at, so a tag that a message spells changes nothing. `continued`: the prompt ends
    inside the assistant's message.
    """
    if last_control_id is not None and last_control_id == open_id:
        return Start.REASONING_CONTINUED if text_follows else Start.REASONING
    if last_control_id is not None and last_control_id == close_id:
        return Start.CONTENT_CONTINUED if text_follows else Start.CONTENT
    return Start.CONTENT_CONTINUED if continued else Start.UNDECIDED


class ReasoningSplitter:
    """Follows one choice. What it has given after a text is a function of that text, however it was cut."""

    __slots__ = ("_buffer", "_close", "_open", "_skip_space", "_state")

    def __init__(self, start: Start, *, tags_are_tokens: bool) -> None:
        self._open = OPEN_SENTINEL if tags_are_tokens else OPEN_TAG
        self._close = CLOSE_SENTINEL if tags_are_tokens else CLOSE_TAG
        self._skip_space = start in (Start.REASONING, Start.CONTENT)
        self._buffer = ""
        if start in (Start.REASONING, Start.REASONING_CONTINUED):
            self._state = Start.REASONING
        elif start is Start.UNDECIDED:
            self._state = Start.UNDECIDED
        else:
            self._state = Start.CONTENT

    @property
    def in_reasoning(self) -> bool:
        return self._state is Start.REASONING

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that `text` adds; either may be empty."""
        if not text:
            return "", ""
        if self._state is Start.CONTENT and not self._buffer and not self._skip_space:
            return "", self._clean(text)
        self._buffer += text
        reasoning = content = ""
        if self._state is Start.UNDECIDED:
            self._decide()
        if self._state is Start.REASONING:
            reasoning = self._take_reasoning()
        if self._state is Start.CONTENT:
            content = self._take_content()
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """The text ended: what was waiting is what it looks like."""
        rest, self._buffer = self._buffer, ""
        if self._state is Start.REASONING:
            return self._clean(rest), ""
        return "", self._clean(rest)

    def _decide(self) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._open):
            self._state = Start.REASONING
            self._buffer = stripped[len(self._open) :]
            self._skip_space = True
        elif stripped and not self._open.startswith(stripped):
            self._state = Start.CONTENT

    def _take_reasoning(self) -> str:
        if self._skip_space:
            self._buffer = self._buffer.lstrip()
            # Opening tags that the prompt has already written.
            while self._buffer.startswith(self._open):
                self._buffer = self._buffer[len(self._open) :].lstrip()
            if self._open.startswith(self._buffer):
                return ""
        before, tag, after = self._buffer.partition(self._close)
        if tag:
            self._state = Start.CONTENT
            self._skip_space = True
            self._buffer = after
            return self._clean(before.rstrip())
        # White space may turn out to stand before the tag, and the end may begin the tag.
        keep = self._partial_close(before)
        shown = before[: len(before) - keep].rstrip()
        self._buffer = before[len(shown) :]
        if shown:
            self._skip_space = False
        return self._clean(shown)

    def _take_content(self) -> str:
        text, self._buffer = self._buffer, ""
        if self._skip_space:
            text = text.lstrip()
            if text:
                self._skip_space = False
        return self._clean(text)

    def _partial_close(self, text: str) -> int:
        for length in range(min(len(self._close) - 1, len(text)), 0, -1):
            if text.endswith(self._close[:length]):
                return length
        return 0

    def _clean(self, text: str) -> str:
        """Tag tokens in places where they mean nothing are dropped: no control token reaches the caller."""
        if OPEN_SENTINEL in text or CLOSE_SENTINEL in text:
            return text.replace(OPEN_SENTINEL, "").replace(CLOSE_SENTINEL, "")
        return text
