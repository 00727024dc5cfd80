"""The formats of user and assistant turns: V2-Chat, V2.5, V3, R1 and V3.1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.core.errors import InvalidRequestError

from ..conversation import Conversation
from .base import (
    CallShape,
    ChatFormat,
    PromptWriter,
    Thinking,
    content_of,
    functions_of,
    refuse_message,
    system_text,
    to_json,
)
from .block_calls import BlockCalls
from .marks import (
    ASSISTANT,
    BOS,
    CALL,
    CALLS,
    END_CALL,
    END_CALLS,
    END_OUTPUT,
    END_OUTPUTS,
    END_THINK,
    EOS,
    OUTPUT,
    OUTPUTS,
    SEPARATOR,
    THINK,
    USER,
    Marks,
)
from .reasoning import Start


def _block_calls(marks: Marks) -> BlockCalls:
    return BlockCalls(marks(CALLS), marks(END_CALLS), marks(CALL), marks(SEPARATOR), marks(END_CALL))


@dataclass(frozen=True, kw_only=True)
class PlainTurns(ChatFormat):
    """V2-Chat: turns named in plain text; neither reasoning nor tools."""

    name: str
    thinking: Thinking = Thinking.NEVER
    shape: CallShape | None = None

    def calls(self, marks: Marks) -> None:
        return None

    def start(self, chat: Conversation) -> Start:
        return Start.CONTENT  # the blank after the colon is the model's, and belongs to the format

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        if chat.tools:
            raise InvalidRequestError(
                f"tools: the chat format {self.name} has no tools", reason="UNSUPPORTED_TOOLS", field="tools"
            )
        out.mark(BOS)
        last = len(chat.messages) - 1
        for index, message in enumerate(chat.messages):
            role, content = message["role"], content_of(message)
            if role in ("system", "developer"):
                out.text(f"{content}\n\n")
            elif role == "user":
                out.text(f"User: {content}\n\n")
            elif role == "assistant" and not message.get("tool_calls"):
                out.text(f"Assistant: {content}")
                if not (chat.continue_final_message and index == last):
                    out.mark(EOS)
            else:
                raise refuse_message(index, f"the chat format {self.name} has no tools")
        if chat.add_generation_prompt:
            out.text("Assistant:")


_FENCED_SHAPE = CallShape(
    begin=f"{CALLS}{CALL}function{SEPARATOR}",
    after_name="\n```json\n",
    end_call=f"\n```{END_CALL}",
    between=f"\n{CALL}function{SEPARATOR}",
    end=END_CALLS,
)


@dataclass(frozen=True, kw_only=True)
class MarkedTurns(ChatFormat):
    """V2.5, V3 and R1: turns begun by tokens; calls in a code fence; results in a pair of outer tokens.

    System texts stand at the front, joined by an empty line. Tools are described after them as the V2.5 card does.
    Reasoning is never repeated: of an earlier answer that holds it as text, what follows its last closing tag is shown.
    """

    name: str
    thinking: Thinking = Thinking.NEVER
    generation: str = ""  # what follows the assistant's token in the generation prompt
    shape: CallShape | None = _FENCED_SHAPE

    def calls(self, marks: Marks) -> BlockCalls:
        return _block_calls(marks)

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        out.mark(BOS)
        system = system_text(chat.messages)
        out.text(system)
        if chat.tools:
            out.text("\n\n" if system else "")
            self._tools(chat, out)
        in_outputs = False
        last = len(chat.messages) - 1
        for index, message in enumerate(chat.messages):
            role = message["role"]
            if role in ("system", "developer"):
                continue
            if role == "latest_reminder":
                raise refuse_message(index, f"the chat format {self.name} has no role {role!r}")
            if role == "tool":
                if in_outputs:
                    out.text("\n")
                else:
                    out.mark(OUTPUTS)
                out.mark(OUTPUT)
                out.text(content_of(message))
                out.mark(END_OUTPUT)
                in_outputs = True
                continue
            if in_outputs:
                out.mark(END_OUTPUTS)
            if role == "user":
                out.mark(USER)
                out.text(content_of(message))
            else:
                if not in_outputs:
                    out.mark(ASSISTANT)
                continued = chat.continue_final_message and index == last
                self._answer(message, continued, out)
                if not continued:
                    out.mark(EOS)
            in_outputs = False
        if in_outputs:
            out.mark(END_OUTPUTS)
        elif chat.add_generation_prompt:
            out.mark(ASSISTANT)
            out.literal(self.generation)

    def _tools(self, chat: Conversation, out: PromptWriter) -> None:
        out.text("## Tools\n\n### Function\n\nYou have the following functions available:\n\n")
        out.text(
            "\n".join(
                f"- `{function['name']}`:\n```json\n{json.dumps(function, ensure_ascii=False, indent=4)}\n```"
                for function in functions_of(chat.tools)
            )
        )

    def _answer(self, message: Mapping[str, Any], continued: bool, out: PromptWriter) -> None:
        content = content_of(message)
        if self.thinking is Thinking.ALWAYS:
            content = content.split(END_THINK)[-1]
            if continued and message.get("reasoning_content"):
                out.mark(THINK)
                out.text(f"\n{message['reasoning_content']}")
                if content:
                    out.text("\n")
                    out.mark(END_THINK)
                    out.text("\n\n")
        out.text(content)
        calls = message.get("tool_calls") or ()
        if not calls:
            return
        out.mark(CALLS)
        for number, call in enumerate(calls):
            out.text("\n" if number else "")
            out.mark(CALL)
            out.text("function")
            out.mark(SEPARATOR)
            function = call["function"]
            out.text(f"{function['name']}\n```json\n{function['arguments']}\n```")
            out.mark(END_CALL)
        out.mark(END_CALLS)


_V31_TOOLS = f"""
IMPORTANT: ALWAYS adhere to this exact format for tool use:
{CALLS}{CALL}tool_call_name{SEPARATOR}tool_call_arguments{END_CALL}{{{{additional_tool_calls}}}}{END_CALLS}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""


_BARE_SHAPE = CallShape(begin=f"{CALLS}{CALL}", after_name=SEPARATOR, end_call=END_CALL, between=CALL, end=END_CALLS)


@dataclass(frozen=True, kw_only=True)
class SwitchedTurns(ChatFormat):
    """V3.1: a think tag after each of the assistant's tokens; bare calls; results without outer tokens.

    Every earlier answer is written as one without thinking. After results the model goes on with no token between.
    """

    name: str
    thinking: Thinking = Thinking.SWITCH
    shape: CallShape | None = _BARE_SHAPE

    def calls(self, marks: Marks) -> BlockCalls:
        return _block_calls(marks)

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        out.mark(BOS)
        out.text(system_text(chat.messages))
        if chat.tools:
            out.text("\n\n## Tools\nYou have access to the following tools:\n")
            for function in functions_of(chat.tools):
                out.text(f"\n### {function['name']}\nDescription: {function.get('description', '')}\n")
                out.text(f"\nParameters: {to_json(function['parameters'])}\n")
            out.literal(_V31_TOOLS)
        after = ""  # the role that the turns so far end with
        last = len(chat.messages) - 1
        for index, message in enumerate(chat.messages):
            role, content = message["role"], content_of(message)
            if role in ("system", "developer"):
                continue
            if role == "latest_reminder":
                raise refuse_message(index, f"the chat format {self.name} has no role {role!r}")
            if role == "user":
                out.mark(USER)
                out.text(content)
            elif role == "tool":
                out.mark(OUTPUT)
                out.text(content)
                out.mark(END_OUTPUT)
            else:
                continued = chat.continue_final_message and index == last
                if after == "user":
                    out.mark(ASSISTANT)
                    out.mark(THINK if continued and chat.thinking else END_THINK)
                self._answer(message, after, continued and bool(chat.thinking), out)
                if not continued:
                    out.mark(EOS)
            after = role
        if chat.add_generation_prompt and after == "user":
            out.mark(ASSISTANT)
            out.mark(THINK if chat.thinking else END_THINK)

    def _answer(self, message: Mapping[str, Any], after: str, thinks: bool, out: PromptWriter) -> None:
        content = content_of(message)
        calls = message.get("tool_calls") or ()
        if thinks and message.get("reasoning_content"):
            out.text(message["reasoning_content"])
            if content:
                out.mark(END_THINK)
        if not calls and after != "tool":
            content = content.split(END_THINK, 1)[-1]
        out.text(content)
        if calls:
            out.mark(CALLS)
            for call in calls:
                out.mark(CALL)
                out.text(call["function"]["name"])
                out.mark(SEPARATOR)
                out.text(call["function"]["arguments"])
                out.mark(END_CALL)
            out.mark(END_CALLS)
