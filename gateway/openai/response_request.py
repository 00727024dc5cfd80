"""A body of /v1/responses as the chat that it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rorqual.core.errors import InvalidRequestError

from .fields import BodyReader, invalid, refuse
from .response_schema import INCLUDABLE, InputItem, InputPart, ResponsesBody, ResponseTool, TextConfig
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

READER = BodyReader(
    ResponsesBody,
    refused={
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "max_tokens": (),
        "messages": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "reasoning_effort": (),
    },
    silent=("prompt_cache_retention", "prompt_cache_options"),
)

_FORMAT_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("constraint.json_schema", "text.format.schema"),
    ("constraint", "text.format"),
)

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_body(body: ResponsesBody) -> tuple[ChatBody, list[str]]:
    """The chat, and the names of what it ignores. Raises InvalidRequestError that names the field of `body`."""
    ignored = []
    if body.store:
        raise refuse("store", "store is not supported here: nothing is kept, send the whole conversation in input")
    if body.truncation == "auto":
        raise refuse("truncation", "truncation 'auto' is not supported here: an input that is too long is refused")
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise invalid("include", f"its entries are among {', '.join(INCLUDABLE)}, got {name[:64]!r}")
    text, reasoning = body.text, body.reasoning
    response_format = None
    if text is not None and text.format is not None and text.format.type != "text":
        if text.format.type not in ("json_object", "json_schema"):
            raise refuse("text.format", f"text.format of type {text.format.type[:64]!r} is not supported here")
        response_format = ResponseFormat(text.format.type, JsonSchemaFormat(schema=text.format.schema))
    if text is not None and text.verbosity not in (None, "medium"):
        raise refuse("text.verbosity", "text.verbosity other than 'medium' is not supported here")
    if reasoning is not None:
        ignored = [f"reasoning.{name}" for name in ("summary", "generate_summary") if getattr(reasoning, name)]
    common: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    chat = ChatBody(
        **common,
        messages=_messages(body),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        response_format=response_format,
        tool_choice=_tool_choice(body.tool_choice),
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


def _messages(body: ResponsesBody) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        _Items(messages).add_all(body.input)
    if not body.input:
        raise invalid("input", "it must not be empty")
    return messages


class _Items:
    """Items in order: what an assistant thought, said and called in a row becomes one message."""

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages
        self._turn: Message | None = None  # the assistant's, while it may grow
        self._call_ids: set[str] = set()

    def add_all(self, items: Sequence[InputItem]) -> None:
        for index, item in enumerate(items):
            here = f"input[{index}]"
            match item.type:
                case None | "message":
                    self._message(item, here)
                case "function_call":
                    self._call(item, here)
                case "function_call_output":
                    self._output(item, here)
                case "reasoning":
                    self._reasoning(item, here)
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
        turn = self._turn
        if item.role == "assistant" and turn is not None and turn.content is None and not turn.tool_calls:
            turn.content = content
            return
        message = Message(role=item.role, content=content)
        self._messages.append(message)
        self._turn = message if item.role == "assistant" else None

    def _assistant(self) -> Message:
        if self._turn is None:
            self._turn = Message(role="assistant")
            self._messages.append(self._turn)
        return self._turn

    def _reasoning(self, item: InputItem, here: str) -> None:
        if item.content is not None:
            parts = _content(item.content, f"{here}.content")
        else:
            parts = _content(item.summary or [], f"{here}.summary")
        text = parts if isinstance(parts, str) else "\n".join(part.text or "" for part in parts)
        turn = self._turn
        if turn is not None and (turn.content is not None or turn.tool_calls):
            self._turn = None  # it had spoken: this thought begins the next turn
        turn = self._assistant()
        turn.reasoning_content = f"{turn.reasoning_content}\n{text}" if turn.reasoning_content else text

    def _call(self, item: InputItem, here: str) -> None:
        if not item.call_id:
            raise invalid(f"{here}.call_id", "it is required in a function_call")
        if not item.name:
            raise invalid(f"{here}.name", "it is required in a function_call")
        turn = self._assistant()
        call = ToolCall(FunctionCall(item.name, item.arguments or ""), id=item.call_id, type="function")
        turn.tool_calls = [*(turn.tool_calls or ()), call]
        self._call_ids.add(item.call_id)

    def _output(self, item: InputItem, here: str) -> None:
        if item.call_id not in self._call_ids:
            raise invalid(f"{here}.call_id", "no function_call with it comes before")
        if item.output is None:
            raise invalid(f"{here}.output", "it is required in a function_call_output")
        content = _content(item.output, f"{here}.output")
        self._messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        self._turn = None


def _content(content: str | list[InputPart], here: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{here}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, here: str) -> ContentPart:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXT_PARTS, "refusal", "reasoning_text", "summary_text"):
        raise InvalidRequestError(
            f"{here}: this model reads text parts only, got type {part.type[:64]!r}",
            reason="UNSUPPORTED_PART",
            field=here,
        )
    if text is None:
        raise invalid(here, f"a part of type {part.type} must have a text")
    return ContentPart("text", text)


def _tool(tool: ResponseTool, here: str) -> ToolSpec:
    if tool.type != "function":
        raise refuse(f"{here}.type", f"{here}.type: only tools of type 'function' are served, got {tool.type[:64]!r}")
    if tool.name is None:
        raise invalid(f"{here}.name", "it is required")
    return ToolSpec("function", Function(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: Any) -> Any:
    """OpenAI's chat form of it."""
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise refuse(
                "tool_choice", "tool_choice: of the objects only {'type': 'function', 'name': …} is supported here"
            )
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
