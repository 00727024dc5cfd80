"""Messages and tools of a body as rorqual.v1 messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import text_pb2

from ..policy import Dialect, rules_of
from .fields import check_depth, ignores, invalid, refuse
from .schema import ChatBody, ContentPart, Message, TokenizeBody, ToolSpec

PART_SEPARATOR = "\n"
"""Several text parts of one message are joined by this, for every role."""

MAX_TOOLS = 1024

_CHOICE_MODES = {
    "none": text_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": text_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": text_pb2.TOOL_CHOICE_MODE_REQUIRED,
}

_TOOL_TYPE = rules_of(Dialect.CHAT)["tools[].type"]
_TOOL = re.compile(r"^tools\[(\d+)\]")

_encode = msgspec.json.encode


def leave_out_tools(body: ChatBody | TokenizeBody) -> tuple[list[str], list[str]]:
    """Take the tools that are no functions out of `body`: (where each that is left stands, the names of the others)."""
    kept, places, ignored = [], [], []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        if ignores(_TOOL_TYPE, tool.type):
            ignored.append(place)
        else:
            kept.append(tool)
            places.append(place)
    body.tools = kept
    return places, ignored


def in_place(name: str, places: Sequence[str]) -> str:
    """The field `name` of a chat whose tools come from `places` of the client's body."""
    match = _TOOL.match(name)
    if match is None or int(match[1]) >= len(places):
        return name
    return places[int(match[1])] + name[match.end() :]


def chat_request(body: ChatBody | TokenizeBody) -> text_pb2.ChatRequest:
    """The conversation of `body`, without options. Raises InvalidRequestError naming messages[i].…"""
    if not body.messages:
        raise invalid("messages", "it must not be empty")
    continued = bool(body.continue_final_message or body.messages[-1].prefix)
    request = text_pb2.ChatRequest(
        messages=_messages(body.messages),
        tools=_tools(body.tools or ()),
        tool_choice=_tool_choice(body.tool_choice, body.tools or ()),
        continue_final_message=continued,
        chat_template_kwargs_json=_template_variables(body),
        reasoning_effort=body.reasoning_effort or "",
    )
    if body.add_generation_prompt is not None:
        request.add_generation_prompt = body.add_generation_prompt
    if continued:
        if body.messages[-1].role != "assistant":
            raise invalid("continue_final_message", "the last message must be the assistant's")
        if body.add_generation_prompt:
            raise invalid("continue_final_message", "add_generation_prompt must be false beside it")
        request.add_generation_prompt = False
    return request


def _template_variables(body: ChatBody | TokenizeBody) -> str:
    """As JSON. Raises InvalidRequestError where the two ways to switch thinking contradict each other."""
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        on = body.thinking.type == "enabled"
        if variables.setdefault("thinking", on) is not on:
            raise invalid("thinking", "it contradicts chat_template_kwargs.thinking")
    return _encode(variables).decode() if variables else ""


def _messages(messages: Sequence[Message]) -> list[text_pb2.ChatMessage]:
    out: list[text_pb2.ChatMessage] = []
    tools_called = False  # the latest assistant turn called tools
    for index, message in enumerate(messages):
        here = f"messages[{index}]"
        if message.role == "assistant":
            tools_called = bool(message.tool_calls)
        elif message.role != "tool":
            tools_called = False
        elif not tools_called:
            raise invalid(f"{here}.role", "a tool message must follow an assistant message with tool_calls")
        out.append(_message(message, here))
    return out


def _message(message: Message, here: str) -> text_pb2.ChatMessage:
    proto = text_pb2.ChatMessage(role=message.role)
    content = _content(message.content, f"{here}.content")
    for name, hint in (("function_call", ": use tool_calls"), ("audio", "")):
        if getattr(message, name) is not None:
            raise refuse(f"{here}.{name}", f"{here}.{name} is not supported here{hint}")
    if message.role == "assistant":
        content = content if content is not None else message.refusal
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            proto.reasoning_content = reasoning
        for index, call in enumerate(message.tool_calls or ()):
            if call.type not in (None, "function"):
                raise invalid(f"{here}.tool_calls[{index}].type", f"it must be 'function', got {call.type!r}")
            proto.tool_calls.add(
                id=call.id or "",
                name=call.function.name,
                arguments_json=_arguments(call.function.arguments, f"{here}.tool_calls[{index}].function.arguments"),
            )
        content = content or (None if proto.tool_calls else "")  # null, absent, "" and [] mean the same beside calls
    elif content is None:
        raise invalid(f"{here}.content", f"it is required in a {message.role} message")
    elif message.tool_calls:
        raise invalid(f"{here}.tool_calls", "only an assistant message has tool_calls")
    if content is not None:
        proto.content = content
    if message.role == "tool":
        proto.tool_call_id = message.tool_call_id or ""
    proto.name = message.name or ""
    return proto


def _content(content: str | list[ContentPart] | None, here: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return PART_SEPARATOR.join(_part(part, f"{here}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, here: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise invalid(here, f"a part of type {part.type} must have a string {part.type!r}")
    raise InvalidRequestError(
        f"{here}: this model reads text parts only, got type {part.type!r}", reason="UNSUPPORTED_PART", field=here
    )


def _arguments(arguments: Any, here: str) -> str:
    """A call's arguments as the template inserts them: a string as it is, an object as compact JSON."""
    if arguments is None:
        return ""
    if isinstance(arguments, str):
        return arguments
    if not isinstance(arguments, dict):
        raise invalid(here, f"it must be a string that holds a JSON object, got {type(arguments).__name__}")
    return _encode(arguments).decode()


def _tools(tools: Sequence[ToolSpec]) -> list[text_pb2.Tool]:
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools are taken, got {len(tools)}")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool_choice(choice: Any, tools: Sequence[ToolSpec]) -> text_pb2.ToolChoice | None:
    """OpenAI's tool_choice: a word, or an object that names a function."""
    if choice is None:
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice not in ("none", "auto", "required") and not isinstance(name, str):
        raise invalid(
            "tool_choice",
            'it must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": …}}',
        )
    if choice in ("none", "auto"):
        return text_pb2.ToolChoice(mode=_CHOICE_MODES[choice])
    if not tools:
        raise invalid("tool_choice", "a call can only be demanded where there are tools")
    if not isinstance(name, str):
        return text_pb2.ToolChoice(mode=_CHOICE_MODES[choice])
    if all(tool.function is None or tool.function.name != name for tool in tools):
        raise invalid("tool_choice", f"none of the tools is called {name[:64]!r}")
    return text_pb2.ToolChoice(function_name=name)


def _tool(tool: ToolSpec, here: str) -> text_pb2.Tool:
    if tool.function is None:
        raise invalid(f"{here}.function", "it is required")
    parameters = bytes(tool.function.parameters).decode()
    if parameters == "null":
        parameters = ""
    elif not parameters.startswith("{"):
        raise invalid(f"{here}.function.parameters", "it must be a JSON schema object")
    check_depth(tool.function.parameters, f"{here}.function.parameters")
    proto = text_pb2.Tool(
        name=tool.function.name, description=tool.function.description or "", parameters_json=parameters
    )
    if tool.function.strict is not None:
        proto.strict = tool.function.strict
    return proto
