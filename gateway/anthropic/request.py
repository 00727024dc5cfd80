"""A body of /v1/messages as the chat that it means."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from rorqual.core.errors import InvalidRequestError

from ..openai.fields import BodyReader, invalid, refuse
from ..openai.schema import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    ToolCall,
    ToolSpec,
)
from .schema import Block, CountTokensBody, MessagesBody, MessageTool, MessageTurn, TextPart

_REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "n": (1,),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}

READER = BodyReader(MessagesBody, refused=_REFUSED, silent=(), inherit=False)
COUNT_READER = BodyReader(CountTokensBody, refused=_REFUSED, silent=(), inherit=False)


def chat_body(body: CountTokensBody) -> tuple[ChatBody, list[str]]:
    """The chat, and the names of what it ignores. Raises InvalidRequestError that names the field of `body`.

    A conversation that ends with the assistant's turn is continued inside that turn.
    """
    ignored: list[str] = []
    chat = ChatBody(messages=_messages(body), model=body.model)
    chat.tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None
    if body.tool_choice is not None:
        choice = body.tool_choice
        forced = {"type": "function", "function": {"name": choice.name}}
        chat.tool_choice = {"auto": "auto", "none": "none", "any": "required", "tool": forced}[choice.type]
        if choice.type == "tool" and not choice.name:
            raise invalid("tool_choice.name", "it is required with type 'tool'")
        if choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
    if body.thinking is not None:
        if body.thinking.type == "adaptive":  # as much as the model sees fit: none where it has no reasoning
            chat.reasoning_effort = "adaptive"
        else:
            chat.chat_template_kwargs = {"thinking": body.thinking.type == "enabled"}
        if body.thinking.budget_tokens is not None:
            ignored.append("thinking.budget_tokens")
    if body.output_config is not None:
        asked = body.output_config.format
        if asked is not None:
            if asked.type != "json_schema":
                raise refuse(
                    "output_config.format", f"output_config.format of type {asked.type[:64]!r} is not supported"
                )
            chat.response_format = ResponseFormat(asked.type, JsonSchemaFormat(schema=asked.schema))
        if body.thinking is not None and body.thinking.type == "disabled":
            ignored += ["output_config.effort"] if body.output_config.effort else []  # it is the thinking's alone
        elif body.output_config.effort:
            chat.reasoning_effort = body.output_config.effort
    if chat.messages[-1].role == "assistant":
        chat.continue_final_message = True
    if isinstance(body, MessagesBody):
        for name in ("stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority", "stop_in_reasoning"):
            setattr(chat, name, getattr(body, name))
        chat.stop = body.stop_sequences
        chat.max_tokens = body.max_tokens
    return chat, ignored


def _messages(body: CountTokensBody) -> list[Message]:
    out: list[Message] = []
    if body.system:
        out.append(Message("system", _texts(body.system, "system")))
    call_ids: frozenset[str] = frozenset()  # of the assistant's turn before
    for index, turn in enumerate(body.messages):
        here = f"messages[{index}].content"
        if isinstance(turn.content, str):
            out.append(Message(turn.role, turn.content))
        elif turn.role == "assistant":
            out.append(_assistant(turn.content, here))
        else:
            out.extend(_user(turn, turn.content, here, call_ids))
        call_ids = frozenset(call.id or "" for call in out[-1].tool_calls or ())
    last = out[-1]
    if last.tool_calls:
        raise invalid(f"messages[{len(body.messages) - 1}]", "a tool_use must be followed by its tool_result")
    return out


def _assistant(blocks: Sequence[Block], here: str) -> Message:
    message = Message("assistant")
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        where = f"{here}[{index}]"
        match block.type:
            case "text":
                texts.append(_text(block.text, where))
            case "thinking":
                if block.thinking is None:
                    raise invalid(f"{where}.thinking", "it is required in a thinking block")
                thoughts.append(block.thinking)
            case "redacted_thinking":
                pass  # nobody but its maker can read it
            case "tool_use":
                calls.append(_call(block, where))
            case other:
                raise _unsupported(other, where)
    message.content = texts
    message.reasoning_content = "\n".join(thoughts) if thoughts else None
    message.tool_calls = calls or None
    return message


def _call(block: Block, here: str) -> ToolCall:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise invalid(f"{here}.{name}", "it is required in a tool_use block")
    arguments = msgspec.json.format(bytes(block.input), indent=-1).decode()  # compact, as an object of a chat's call
    if not arguments.startswith("{"):
        raise invalid(f"{here}.input", "it must be a JSON object")
    return ToolCall(FunctionCall(block.name or "", arguments), id=block.id, type="function")


def _user(turn: MessageTurn, blocks: Sequence[Block], here: str, call_ids: Container[str]) -> list[Message]:
    """The results of tools, one message each, then the texts as one. `call_ids`: of the calls that wait for a result."""
    out: list[Message] = []
    texts: list[ContentPart] = []
    for index, block in enumerate(blocks):
        where = f"{here}[{index}]"
        if block.type == "text":
            texts.append(_text(block.text, where))
        elif block.type == "tool_result" and turn.role == "user":
            if texts:
                raise invalid(where, "a tool_result comes before the texts of its turn")
            if block.tool_use_id not in call_ids:
                raise invalid(f"{where}.tool_use_id", "no tool_use of the turn before has it")
            result = _texts(block.content or "", f"{where}.content")
            out.append(Message("tool", result, tool_call_id=block.tool_use_id))
        else:
            raise _unsupported(block.type, where)
    if texts or not out:
        out.append(Message(turn.role, texts))
    return out


def _texts(content: str | Sequence[TextPart], here: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    out: list[ContentPart] = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(part.type, f"{here}[{index}]")
        out.append(_text(part.text, f"{here}[{index}]"))
    return out


def _text(text: str | None, here: str) -> ContentPart:
    if text is None:
        raise invalid(f"{here}.text", "it is required in a text block")
    return ContentPart("text", text)


def _unsupported(kind: str, here: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{here}: a block of type {kind[:64]!r} is not supported here", reason="UNSUPPORTED_PART", field=here
    )


def _tool(tool: MessageTool, here: str) -> ToolSpec:
    if tool.type not in (None, "custom"):
        raise refuse(f"{here}.type", f"{here}.type: only tools of type 'custom' are served, got {tool.type[:64]!r}")
    return ToolSpec("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))
