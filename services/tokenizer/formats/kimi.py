"""The formats of Kimi K2, which is DeepSeek V3's architecture with turns of its own: Instruct and Thinking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..conversation import Conversation
from .base import CallShape, ChatFormat, PromptWriter, Thinking, content_of, refuse_message
from .block_calls import BlockCalls
from .marks import (
    END_THINK,
    KIMI_ARGUMENTS,
    KIMI_ASSISTANT,
    KIMI_CALL,
    KIMI_CALLS,
    KIMI_END,
    KIMI_END_CALL,
    KIMI_END_CALLS,
    KIMI_MIDDLE,
    KIMI_SYSTEM,
    KIMI_USER,
    THINK,
    Marks,
)

_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."


_SHAPE = CallShape(
    begin=f"{KIMI_CALLS}{KIMI_CALL}functions.",
    after_name=f":{{index}}{KIMI_ARGUMENTS}",
    end_call=KIMI_END_CALL,
    between=f"{KIMI_CALL}functions.",
    end=KIMI_END_CALLS,
)


@dataclass(frozen=True, kw_only=True)
class KimiK2(ChatFormat):
    """Each turn is headed by its kind and a name. A call's id, functions.NAME:INDEX, is written by the model.

    The Thinking model's answers hold their reasoning; those up to the last answer without calls hold it empty.
    """

    name: str
    thinking: Thinking
    shape: CallShape | None = _SHAPE
    compact_tools: bool  # no blanks in the tools' JSON

    def calls(self, marks: Marks) -> BlockCalls:
        return BlockCalls(
            marks(KIMI_CALLS),
            marks(KIMI_END_CALLS),
            marks(KIMI_CALL),
            marks(KIMI_ARGUMENTS),
            marks(KIMI_END_CALL),
            has_ids=True,
            ends_reasoning=True,
        )

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        if chat.tools:
            self._head(KIMI_SYSTEM, "tool_declare", out)
            separators = (",", ":") if self.compact_tools else (", ", ": ")
            out.text(json.dumps(chat.tools, ensure_ascii=False, separators=separators))
            out.mark(KIMI_END)
        if chat.messages[0]["role"] not in ("system", "developer"):
            self._head(KIMI_SYSTEM, "system", out)
            out.text(_DEFAULT_SYSTEM)
            out.mark(KIMI_END)
        last = len(chat.messages) - 1
        answers = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        if chat.continue_final_message:
            answers = answers[:-1]
        last_answer = max(answers, default=-1)
        num_calls = 0  # without an id of the caller's
        for index, message in enumerate(chat.messages):
            role = "system" if message["role"] == "developer" else message["role"]
            if role == "latest_reminder":
                raise refuse_message(index, f"the chat format {self.name} has no role {role!r}")
            kind = {"user": KIMI_USER, "assistant": KIMI_ASSISTANT}.get(role, KIMI_SYSTEM)
            self._head(kind, message.get("name") or role, out)
            if role == "tool":
                out.text(f"## Return of {message.get('tool_call_id', '')}\n")
            continued = chat.continue_final_message and index == last
            if role == "assistant" and self.thinking is Thinking.ALWAYS:
                out.mark(THINK)
                out.text((message.get("reasoning_content") or "") if index > last_answer else "")
                if content_of(message) or not continued:
                    out.mark(END_THINK)
            out.text(content_of(message))
            num_calls = self._write_calls(message, num_calls, out)
            if not continued:
                out.mark(KIMI_END)
        if chat.add_generation_prompt:
            self._head(KIMI_ASSISTANT, "assistant", out)

    def _head(self, kind: str, name: str, out: PromptWriter) -> None:
        out.mark(kind)
        out.text(name)
        out.mark(KIMI_MIDDLE)

    def _write_calls(self, message: Mapping[str, Any], num_calls: int, out: PromptWriter) -> int:
        calls = message.get("tool_calls") or ()
        if calls:
            out.mark(KIMI_CALLS)
        for call in calls:
            out.mark(KIMI_CALL)
            function = call["function"]
            if call.get("id"):
                out.text(call["id"])
            else:
                out.text(f"functions.{function['name']}:{num_calls}")
                num_calls += 1
            out.mark(KIMI_ARGUMENTS)
            out.text(function["arguments"])
            out.mark(KIMI_END_CALL)
        if calls:
            out.mark(KIMI_END_CALLS)
        return num_calls
