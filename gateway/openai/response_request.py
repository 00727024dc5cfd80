"""A body of /v1/responses as the chat that it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rorqual.core.errors import InvalidRequestError

from ..policy import Dialect, rules_of
from .fields import BodyReader, ignores, invalid, refuse
from .response_schema import INCLUDABLE, GroupedTool, InputItem, InputPart, ResponsesBody, TextConfig
from .schema import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    SamplingFields,
    ToolCall,
    ToolSpec,
)

LOGPROBS = "message.output_text.logprobs"

READER = BodyReader(ResponsesBody, Dialect.RESPONSES)

_RULES = rules_of(Dialect.RESPONSES)

_FORMAT_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("constraint.json_schema", "text.format.schema"),
    ("constraint", "text.format"),
)

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

_RECORDS = (
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "web_search_call",
)
"""Items that say what another server did. No model here can read them, and they stay in a conversation once begun."""

_INPUT = {"input": {"type": "string"}}
_TEXT_PARAMETERS = msgspec.Raw(
    msgspec.json.encode({"type": "object", "properties": _INPUT, "required": ["input"], "additionalProperties": False})
)
"""Of a custom tool: its one argument is a text."""


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """What a function that the model sees is to the client."""

    name: str
    namespace: str | None
    takes_text: bool  # a custom tool, whose calls have an `input` in place of `arguments`


@dataclass(slots=True)
class Tools:
    """The tools of a request."""

    specs: list[ToolSpec] = field(default_factory=list)  # as a chat has them, by the names that the model sees
    places: list[str] = field(default_factory=list)  # where each of `specs` stands in the body
    by_name: dict[str, ToolOrigin] = field(default_factory=dict)  # by the name that the model sees
    served: list[dict[str, Any]] = field(default_factory=list)  # as they were sent; the answer repeats them
    ignored: list[str] = field(default_factory=list)


def shown_name(name: str, namespace: str | None) -> str:
    """What the model calls a function of a group."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(body: ResponsesBody) -> Tools:
    """Functions, and what is one in another dress. Raises InvalidRequestError that names the place in `body`."""
    tools = Tools()
    for index, tool in enumerate(body.tools or ()):
        here = f"tools[{index}]"
        if ignores(_RULES["tools[].type"], tool.type):
            tools.ignored.append(here)
            continue
        if tool.type != "namespace":
            tools.served.append(_add_tool(tools, tool, None, here))
            continue
        if not tool.name:
            raise invalid(f"{here}.name", "it is required")
        members: list[dict[str, Any]] = []
        introduction = tool.description or ""  # of the group: it stands before that of its first function
        for number, member in enumerate(tool.tools or ()):
            place = f"{here}.tools[{number}]"
            if member.type == "namespace" or ignores(_RULES["tools[].type"], member.type):
                tools.ignored.append(place)
            else:
                members.append(_add_tool(tools, member, tool.name, place, introduction))
                introduction = ""
        group = {"type": tool.type, "name": tool.name, "description": tool.description or "", "tools": members}
        tools.served.append(group)
    return tools


def _add_tool(
    tools: Tools, tool: GroupedTool, namespace: str | None, here: str, introduction: str = ""
) -> dict[str, Any]:
    """Returns the tool as the answer repeats it."""
    if tool.name is None:
        raise invalid(f"{here}.name", "it is required")
    name = shown_name(tool.name, namespace)
    if namespace is not None and name in tools.by_name:
        raise invalid(f"{here}.name", f"two tools are called {name[:64]!r}")
    takes_text = tool.type == "custom"
    texts = [introduction, tool.description or ""]
    if takes_text and isinstance(tool.format, dict) and ignores(_RULES["tools[].format"], tool.format.get("type")):
        tools.ignored.append(f"{here}.format")  # the model is told it, and nothing makes it keep to it
        if isinstance(definition := tool.format.get("definition"), str):
            texts.append(f"The input is written in this grammar:\n{definition}")
    parameters = _TEXT_PARAMETERS if takes_text else tool.parameters
    description = "\n\n".join(text for text in texts if text) or tool.description
    tools.specs.append(ToolSpec("function", Function(name, description, parameters, tool.strict)))
    tools.places.append(here)
    tools.by_name[name] = ToolOrigin(tool.name, namespace, takes_text)
    sent: dict[str, Any] = {"type": tool.type, "name": tool.name, "description": tool.description}
    if takes_text:
        return sent | ({"format": tool.format} if isinstance(tool.format, dict) else {})
    return sent | {"parameters": tool.parameters, "strict": tool.strict}


def chat_body(body: ResponsesBody, tools: Tools) -> tuple[ChatBody, list[str]]:
    """The chat, and the names of what it ignores. Raises InvalidRequestError that names the field of `body`."""
    ignored = list(tools.ignored)
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise invalid("include", f"its entries are among {', '.join(INCLUDABLE)}, got {name[:64]!r}")
    text, reasoning = body.text, body.reasoning
    response_format = None
    if text is not None and text.format is not None and text.format.type != "text":
        if text.format.type not in ("json_object", "json_schema"):
            raise refuse("text.format", f"text.format of type {text.format.type[:64]!r} is not supported here")
        response_format = ResponseFormat(text.format.type, JsonSchemaFormat(schema=text.format.schema))
    if text is not None and ignores(_RULES["text.verbosity"], text.verbosity):
        ignored.append("text.verbosity")
    for name in ("summary", "generate_summary") if reasoning is not None else ():
        if ignores(_RULES[f"reasoning.{name}"], getattr(reasoning, name)):
            ignored.append(f"reasoning.{name}")
    common: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    chat = ChatBody(
        **common,
        messages=_messages(body, ignored),
        tools=tools.specs or None,
        response_format=response_format,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=reasoning.effort if reasoning is not None else None,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs(body) or None,
        top_logprobs=body.top_logprobs or None,
    )
    return chat, ignored


def wants_logprobs(body: ResponsesBody) -> bool:
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def answered_format(text: TextConfig | None) -> dict[str, Any]:
    """What the answer says of its text's format, as it was asked for."""
    asked = text.format if text is not None else None
    if asked is None or asked.type != "json_schema":
        return {"type": asked.type if asked is not None else "text"}
    return {
        "type": asked.type,
        "name": asked.name or "",
        "description": asked.description,
        "schema": asked.schema,
        "strict": asked.strict is not False,
    }


def field_name(name: str) -> str:
    """The name of a chat's field as a body of /v1/responses spells it."""
    if name.startswith("messages"):
        return "input"
    if name in ("max_tokens", "max_completion_tokens"):
        return "max_output_tokens"
    if name == "reasoning_effort":
        return "reasoning.effort"
    for ours, theirs in _FORMAT_NAMES:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name.replace("].function", "]", 1) if name.startswith("tools[") else name


def _messages(body: ResponsesBody, ignored: list[str]) -> list[Message]:
    """`ignored` gets the names of what is left out."""
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += _Items(ignored).messages(body.input)
    if not body.input or not messages:
        raise invalid("input", "it must not be empty")
    return messages


@dataclass(slots=True)
class _Turn:
    """A message and, of an assistant's, what the tools that it called gave."""

    message: Message
    outputs: list[Message] = field(default_factory=list)


class _Items:
    """Items in order: what an assistant thought, said and called in a row becomes one message.

    An output belongs to its call, wherever it stands: it comes after the call's message, before what stood between.
    """

    def __init__(self, ignored: list[str]) -> None:
        self._ignored = ignored
        self._turns: list[_Turn] = []
        self._open: _Turn | None = None  # the assistant's, while it may grow
        self._calls: dict[str, _Turn] = {}  # by call_id, the latest where ids come again

    def messages(self, items: Sequence[InputItem]) -> list[Message]:
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")
        return [message for turn in self._turns for message in (turn.message, *turn.outputs)]

    def _add(self, item: InputItem, here: str) -> None:
        match item.type:
            case None | "message":
                self._message(item, here)
            case "function_call" | "custom_tool_call":
                self._call(item, here)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, here)
            case "reasoning":
                self._reasoning(item, here)
            case record if record in _RECORDS:
                self._ignored.append(here)
            case other:
                raise InvalidRequestError(
                    f"{here}: an item of type {other[:64]!r} is not supported here",
                    reason="UNSUPPORTED_ITEM",
                    field=here,
                )

    def _message(self, item: InputItem, here: str) -> None:
        if item.role is None:
            raise invalid(f"{here}.role", "it is required in a message")
        if item.content is None:
            raise invalid(f"{here}.content", "it is required in a message")
        content = _content(item.content, f"{here}.content")
        turn = self._open.message if self._open is not None else None
        if item.role == "assistant" and turn is not None and turn.content is None and not turn.tool_calls:
            turn.content = content
            return
        self._begin(Message(role=item.role, content=content))

    def _begin(self, message: Message) -> _Turn:
        turn = _Turn(message)
        self._turns.append(turn)
        self._open = turn if message.role == "assistant" else None
        return turn

    def _assistant(self) -> _Turn:
        return self._open or self._begin(Message(role="assistant"))

    def _reasoning(self, item: InputItem, here: str) -> None:
        if item.content is not None:
            parts = _content(item.content, f"{here}.content")
        else:
            parts = _content(item.summary or [], f"{here}.summary")
        text = parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)
        turn = self._open
        if turn is not None and (turn.message.content is not None or turn.message.tool_calls):
            self._open = None  # it had spoken: this thought begins the next turn
        message = self._assistant().message
        message.reasoning_content = f"{message.reasoning_content}\n{text}" if message.reasoning_content else text

    def _call(self, item: InputItem, here: str) -> None:
        for name in ("call_id", "name"):
            if not getattr(item, name):
                raise invalid(f"{here}.{name}", f"it is required in a {item.type}")
        turn = self._assistant()
        arguments = item.arguments or ""
        if item.type == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        function = FunctionCall(shown_name(item.name or "", item.namespace), arguments)
        turn.message.tool_calls = [
            *(turn.message.tool_calls or ()),
            ToolCall(function, id=item.call_id, type="function"),
        ]
        self._calls[item.call_id or ""] = turn

    def _output(self, item: InputItem, here: str) -> None:
        turn = self._calls.get(item.call_id or "")
        if turn is None:
            raise invalid(f"{here}.call_id", "no call with it comes before")
        if item.output is None:
            raise invalid(f"{here}.output", f"it is required in a {item.type}")
        content = _content(item.output, f"{here}.output", self._ignored)
        turn.outputs.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        if self._open is turn:
            self._open = None


def _content(content: str | list[InputPart], here: str, unread: list[str] | None = None) -> str | list[ContentPart]:
    """`unread`: given for a tool's output, it gets the places of parts that no model here can read."""
    if isinstance(content, str):
        return content
    return [_part(part, f"{here}[{index}]", unread) for index, part in enumerate(content)]


def _part(part: InputPart, here: str, unread: list[str] | None) -> ContentPart:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXT_PARTS, "refusal"):
        if unread is not None and ignores(_RULES["input[].output[]"], "unreadable", here):
            unread.append(here)
            return ContentPart("text", f"[{part.type.removeprefix('input_')[:64]}: this model reads text only]")
        raise InvalidRequestError(
            f"{here}: this model reads text parts only, got type {part.type[:64]!r}",
            reason="UNSUPPORTED_PART",
            field=here,
        )
    if text is None:
        raise invalid(here, f"a part of type {part.type} must have a text")
    return ContentPart("text", text)


def _tool_choice(choice: Any, tools: Tools) -> Any:
    """OpenAI's chat form of it. What is demanded must be served."""
    if not isinstance(choice, dict):
        return choice
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    if kind not in ("function", "custom"):
        raise refuse(
            "tool_choice", "tool_choice: of the objects only {'type': 'function', 'name': …} is supported here"
        )
    for shown, origin in tools.by_name.items():
        if (origin.name, origin.namespace, origin.takes_text) == (name, namespace, kind == "custom"):
            name = shown
            break
    return {"type": "function", "function": {"name": name}}
