"""From a ChatRequest to what a chat format renders; refuses messages that are no conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import text_pb2

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "adaptive")
_SWITCHES = ("thinking", "enable_thinking")  # two names of one thing
_RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception", "namespace")
MAX_MESSAGES = 65_536
MAX_SCHEMA_DEPTH = 64
"""Of a tool's parameters: written with indentation, a deep schema is many times as long as it was sent."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Plain JSON values, in the shapes that templates are written for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]  # further template variables
    add_generation_prompt: bool
    continue_final_message: bool
    thinking: bool | None = None  # None: the request does not say
    reasoning_effort: str = ""  # one of EFFORTS but "none", "adaptive" leaves it open; empty: not said
    answer_schema: dict[str, Any] | None = None  # which the answer's JSON is held to
    wants_json: bool = False  # the answer is held to be an object, of any schema


def read_conversation(request: text_pb2.ChatRequest) -> Conversation:
    """InvalidRequestError (INVALID_MESSAGES) names the message and field that is wrong."""
    if not request.messages:
        raise _invalid("messages", "messages must hold at least one message")
    if len(request.messages) > MAX_MESSAGES:
        raise _invalid("messages", f"{len(request.messages)} messages; at most {MAX_MESSAGES} are taken")
    messages: list[dict[str, Any]] = []
    calls_open = False
    for index, message in enumerate(request.messages):
        messages.append(_read_message(message, f"messages[{index}]", calls_open))
        calls_open = calls_open or bool(message.tool_calls)
    if request.continue_final_message:
        last = request.messages[-1]
        place = f"messages[{len(messages) - 1}]"
        if last.role != "assistant" or not (last.content or last.reasoning_content) or last.tool_calls:
            raise _invalid(
                place,
                "continue_final_message needs a last message of role assistant that has content and no tool calls",
            )
        if request.HasField("add_generation_prompt") and request.add_generation_prompt:
            raise _invalid(
                "add_generation_prompt",
                "continue_final_message goes on inside the last message, add_generation_prompt begins another: ask for one",
            )
    variables = _read_variables(request)
    thinking, effort = _read_thinking(variables, request.reasoning_effort)
    add_prompt = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
    return Conversation(
        messages=messages,
        tools=_read_tools(request.tools) if may_call(request) else None,
        variables=variables,
        add_generation_prompt=add_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        thinking=thinking,
        reasoning_effort=effort,
        answer_schema=_answer_schema(request.options.constraint),
        wants_json=request.options.constraint.json_object,
    )


def _answer_schema(constraint: text_pb2.Constraint) -> dict[str, Any] | None:
    """None where there is none, or none that can be kept to: whoever compiles it says why."""
    try:
        schema = json.loads(constraint.json_schema) if constraint.json_schema else None
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def may_call(request: text_pb2.ChatRequest) -> bool:
    """Whether the model is shown tools."""
    return bool(request.tools) and request.tool_choice.mode != text_pb2.TOOL_CHOICE_MODE_NONE


def _invalid(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_MESSAGES", field=field)


def _read_message(message: text_pb2.ChatMessage, place: str, calls_open: bool) -> dict[str, Any]:
    role = message.role
    if role not in ROLES:
        raise _invalid(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, got {role!r}")
    if message.tool_calls and role != "assistant":
        raise _invalid(f"{place}.tool_calls", f"{place}: only an assistant message has tool_calls, this is {role!r}")
    if message.HasField("reasoning_content") and role != "assistant":
        raise _invalid(
            f"{place}.reasoning_content", f"{place}: only an assistant message has reasoning_content, this is {role!r}"
        )
    if role == "tool" and not calls_open:
        raise _invalid(place, f"{place} is a tool's result, but no assistant message before it has tool_calls")
    result: dict[str, Any] = {"role": role}
    if message.HasField("content"):
        result["content"] = message.content
    elif not message.tool_calls and not message.HasField("reasoning_content"):
        raise _invalid(f"{place}.content", f"{place}.content is needed in a message of role {role!r}")
    if message.tool_calls and not message.content:
        result["content"] = None  # absent and empty are one thing beside tool calls
    if message.HasField("reasoning_content"):
        result["reasoning_content"] = message.reasoning_content
        result.setdefault("content", "")
    if message.tool_calls:
        result["tool_calls"] = [
            _read_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.name:
        result["name"] = message.name
    return result


def _read_call(call: text_pb2.ToolCall, place: str) -> dict[str, Any]:
    if not call.name:
        raise _invalid(f"{place}.function.name", f"{place} names no function")
    # The arguments stay the string that the model wrote: the family's templates insert it as it is.
    result: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
    if call.id:
        result["id"] = call.id
    return result


def _read_tools(tools: Sequence[text_pb2.Tool]) -> list[dict[str, Any]]:
    result = []
    for index, tool in enumerate(tools):
        place = f"tools[{index}].function"
        if not tool.name:
            raise _invalid(f"{place}.name", f"{place}.name is empty")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = (
            _read_schema(tool.parameters_json, f"{place}.parameters")
            if tool.parameters_json
            else {"type": "object", "properties": {}}
        )
        if tool.HasField("strict"):
            function["strict"] = tool.strict
        result.append({"type": "function", "function": function})
    return result


def _read_schema(source: str, place: str) -> dict[str, Any]:
    schema = _read_json_object(source, place)
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        values = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        level = [value for value in values if isinstance(value, (dict, list))]
    if level:
        raise _invalid(place, f"{place} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return schema


def _read_variables(request: text_pb2.ChatRequest) -> dict[str, Any]:
    source = request.chat_template_kwargs_json
    variables = _read_json_object(source, "chat_template_kwargs") if source else {}
    for name in _RESERVED:
        if name in variables:
            raise _invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {name!r}: the request has it")
    return variables


def _read_thinking(variables: dict[str, Any], effort: str) -> tuple[bool | None, str]:
    """(whether to think, effort), from every switch there is; all names of the switch are set in `variables`.

    INVALID_MESSAGES where two of them contradict each other.
    """
    asked: dict[str, bool] = {}
    for name in _SWITCHES:
        if variables.get(name) is not None:
            if not isinstance(variables[name], bool):
                raise _invalid("chat_template_kwargs", f"chat_template_kwargs.{name} must be true or false")
            asked[f"chat_template_kwargs.{name}"] = variables[name]
    where = "reasoning_effort"
    inner = variables.get("reasoning_effort")
    if isinstance(inner, str) and inner:
        if effort and effort != inner:
            raise _invalid(where, f"reasoning_effort is {effort!r} and chat_template_kwargs.reasoning_effort {inner!r}")
        effort, where = inner, "chat_template_kwargs"
    if effort:
        if effort not in EFFORTS:
            raise _invalid(where, f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort[:64]!r}")
        asked["reasoning_effort"] = effort != "none"
        variables["reasoning_effort"] = effort
        if effort == "adaptive":  # which no template knows
            del variables["reasoning_effort"]
    if not asked:
        return None, ""
    if len(set(asked.values())) > 1:
        on = " and ".join(name for name, value in asked.items() if value)
        off = " and ".join(name for name, value in asked.items() if not value)
        raise _invalid(where, f"{on} switches thinking on and {off} off: send one of them")
    thinking = next(iter(asked.values()))
    variables.update(dict.fromkeys(_SWITCHES, thinking))
    return thinking, "" if effort == "none" else effort


def _read_json_object(source: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _invalid(place, f"{place} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _invalid(place, f"{place} must be a JSON object, got {type(value).__name__}")
    return value
