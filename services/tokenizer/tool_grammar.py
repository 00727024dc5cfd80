"""The grammar of an answer that may, or must, call tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rorqual.grammar import GrammarEngine, GrammarError, json_grammar
from rorqual.v1 import text_pb2

from .constraint import OnFault, fault_of, refuse, refuse_schema
from .control_tokens import ControlTokens
from .conversation import may_call
from .formats.base import ChatFormat
from .formats.call_grammar import CallableTool, CallRules, UnenforceableError, call_grammar, opening_token
from .prompt import Prompt

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


def must_call(request: text_pb2.ChatRequest) -> bool:
    """Whether the answer has to be a call."""
    choice = request.tool_choice
    return may_call(request) and bool(choice.function_name or choice.mode == text_pb2.TOOL_CHOICE_MODE_REQUIRED)


def is_strict(request: text_pb2.ChatRequest) -> bool:
    """Whether a call that the answer may hold has to keep to its tool's schema."""
    return may_call(request) and any(tool.strict for tool in request.tools)


def makes_one_call(request: text_pb2.ChatRequest) -> bool:
    """Whether the answer ends with its first call."""
    return bool(request.tool_choice.function_name) or (
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    )


def compile_calls(
    request: text_pb2.ChatRequest,
    chat_format: ChatFormat,
    control: ControlTokens,
    prompt: Prompt,
    engine: GrammarEngine,
    *,
    beside: str | None,
    any_object: bool = False,
    on_fault: OnFault | None = None,
) -> tuple[str, int | None]:
    """(the grammar's text, known to compile; the token after which it holds, None where it always does). INVALID_TOOLS, or CONSTRAINT_TOO_COMPLEX, names the place in a strict tool's
    schema that is at fault.

    `beside`: the grammar of an answer that may come in place of calls. `any_object`: what tools that are not strict take,
    whatever their schemas say. May take long, or end the process: `grammar_worker` calls it. `on_fault` is told of a fault
    in a schema before its place is searched for.
    """
    name = request.tool_choice.function_name
    forced = must_call(request)
    given = [(index, tool) for index, tool in enumerate(request.tools) if not name or tool.name == name][
        : 1 if name else None
    ]
    tools = [CallableTool(tool.name, _schema_of(tool), tool.strict) for _, tool in given]
    rules = CallRules(
        tools=tools,
        single=makes_one_call(request),
        has_begun=bool(prompt.forced_ids),
        has_name=bool(prompt.forced_ids) and len(tools) == 1,
        beside=None if forced else beside,
        after_text=not forced and beside is None,
    )
    fault = GrammarError("")
    for trial in _trials(tools, engine, any_object=any_object):
        try:
            text = call_grammar(chat_format, replace(rules, tools=trial), control)
            engine.compile(text)
            return text, opening_token(chat_format, control) if rules.after_text else None
        except UnenforceableError as error:
            index = next(index for index, tool in given if tool.name == error.tool_name)
            refuse(f"tools[{index}].function.parameters{error.path}", str(error), reason="INVALID_TOOLS")
        except GrammarError as error:
            fault = error
    for (index, _), tool in zip(given, tools, strict=True):
        place = f"tools[{index}].function.parameters"
        if tool.strict and (alone := fault_of(tool.schema, engine)) is not None:
            refuse_schema(tool.schema, engine, place, alone, reason="INVALID_TOOLS", on_fault=on_fault)
    refuse("tools", fault, reason="INVALID_TOOLS")


def _trials(tools: list[CallableTool], engine: GrammarEngine, *, any_object: bool) -> Iterator[list[CallableTool]]:
    """The tools as they are; then of those that are not strict what can be enforced, and at last only that they take an
    object: they worked, or did not, before anybody looked at their schemas."""
    least = [tool if tool.strict else replace(tool, schema=_ANY_OBJECT) for tool in tools]
    if any_object:
        yield least
        return
    yield tools
    if all(tool.strict for tool in tools):
        return
    yield [free if _fails(tool, engine) else tool for tool, free in zip(tools, least, strict=True)]
    yield least


def _fails(tool: CallableTool, engine: GrammarEngine) -> bool:
    try:
        engine.compile(json_grammar(tool.schema, lenient=not tool.strict))
    except GrammarError:
        return True
    return False


def _schema_of(tool: text_pb2.Tool) -> dict[str, Any]:
    """A tool's arguments are an object, whether its schema says so or not."""
    schema: dict[str, Any] = json.loads(tool.parameters_json) if tool.parameters_json else _NO_PARAMETERS
    if schema.get("properties") == {} and "patternProperties" not in schema:
        schema = {"additionalProperties": False, **schema}
    return schema if "type" in schema else {"type": "object", **schema}
