"""What a chat format is: one module that renders prompts, says how the answer is read, and what its calls are made of."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rorqual.core.errors import InvalidRequestError

from ..control_tokens import ControlTokens, Segment
from ..conversation import Conversation
from .call_grammar import CallableTool, GrammarWriter
from .events import CallSyntax
from .marks import CALL_MARKS, Marks
from .reasoning import Start


class Thinking(Enum):
    """Whether a format's answers begin with reasoning."""

    NEVER = "never"
    ALWAYS = "always"
    SWITCH = "switch"  # as the prompt says


@dataclass(frozen=True, slots=True)
class CallShape:
    """The text of a block of calls, for whatever forces one: `{index}` stands for the call's number in the block.

    begin NAME after_name ARGUMENTS end_call between NAME after_name ARGUMENTS end_call end
    """

    begin: str
    after_name: str
    end_call: str
    between: str
    end: str

    @property
    def opening(self) -> tuple[str, str]:
        """`begin` in two: what no other text holds, up to the end of its first mark, and the rest."""
        begin = self.begin.lstrip("\n")
        end = min(begin.find(mark) + len(mark) for mark in CALL_MARKS if mark in begin)
        return begin[:end], begin[end:]


class PromptWriter:
    """Gathers a prompt as plain text and control tokens. What a caller wrote is plain, whatever it spells."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._plain: list[str] = []
        self._segments: list[Segment] = []

    def text(self, text: str) -> None:
        """Plain text."""
        self._plain.append(text)

    def mark(self, token: str) -> None:
        """A control token; plain text where the vocabulary has none of that spelling."""
        if token in self._control.ids:
            self._close_plain()
            self._segments.append(Segment(token, True))
        else:
            self._plain.append(token)

    def literal(self, text: str) -> None:
        """The format's own text, in which control tokens are recognised."""
        place = 0
        for start, end in self._control.find(text):
            self._plain.append(text[place:start])
            self.mark(text[start:end])
            place = end
        self._plain.append(text[place:])

    def _close_plain(self) -> None:
        if text := "".join(self._plain):
            self._segments.append(Segment(text, False))
        self._plain.clear()

    def segments(self) -> list[Segment]:
        """The prompt so far."""
        self._close_plain()
        return self._segments


class ChatFormat(ABC):
    """Immutable; may render in many threads at once."""

    name: str
    thinking: Thinking
    shape: CallShape | None  # None: the format has no calls

    @abstractmethod
    def calls(self, marks: Marks) -> CallSyntax | None:
        """How calls are read from the model's text."""

    def arguments(self, tool: CallableTool, out: GrammarWriter) -> str:
        """A term for the arguments of a call of `tool`, as they stand between its name and its end.

        UnenforceableError where the tool is strict and the syntax cannot keep to its schema.
        """
        return out.value(tool.schema, strict=tool.strict)

    def start(self, chat: Conversation) -> Start:
        """Where the answer begins, where no think tag at the prompt's end tells."""
        return Start.CONTENT_CONTINUED if self.thinking is Thinking.SWITCH and not chat.thinking else Start.UNDECIDED

    @abstractmethod
    def render(self, chat: Conversation, out: PromptWriter) -> None:
        """Write the prompt. InvalidRequestError (INVALID_MESSAGES) where the format has no place for a message."""


def refuse_message(index: int, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages[{index}]: {message}", reason="INVALID_MESSAGES", field=f"messages[{index}]")


def content_of(message: Mapping[str, Any]) -> str:
    content: str | None = message.get("content")
    return content or ""


def functions_of(tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The inner function objects of `tools`."""
    return [tool["function"] for tool in tools or ()]


def system_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """All system and developer texts, joined by an empty line, as formats want that move them to the front."""
    return "\n\n".join(content_of(m) for m in messages if m["role"] in ("system", "developer"))


def to_json(value: Any) -> str:
    """JSON as the published encoders write it: with blanks after comma and colon, not escaped."""
    return json.dumps(value, ensure_ascii=False)
