"""A body of /v1/messages as the chat that it means."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from rorqual.core.errors import InvalidRequestError

from ..openai.fields import BodyReader, ignores, invalid, refuse
from ..openai.schema import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    Role,
    ToolCall,
    ToolSpec,
)
from ..policy import Dialect, rules_of
from .schema import Block, CountTokensBody, MessagesBody, ResultPart, Source, TextPart

READER = BodyReader(MessagesBody, Dialect.MESSAGES)
COUNT_READER = BodyReader(CountTokensBody, Dialect.MESSAGES)

_RULES = rules_of(Dialect.MESSAGES)

BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code writes at the head of its system prompt. It says nothing to a model and changes between sessions, so
that no two of them would share a cached prefix."""

_SEARCH_TOOL = "tool_search_tool"  # begins the types of Anthropic's own tools that load deferred ones


@dataclass(slots=True)
class _Tools:
    """The tools that the model is shown."""

    specs: list[ToolSpec]
    places: list[str]  # where each of them stands in the body


def chat_body(body: CountTokensBody, places: list[str]) -> tuple[ChatBody, list[str]]:
    """The chat, and the names of what it ignores. Raises InvalidRequestError that names the field of `body`.

    `places` gets where each of the chat's tools stands in `body`.

    A conversation that ends with the assistant's turn is continued inside that turn.
    """
    ignored: list[str] = []
    chat = ChatBody(messages=_messages(body, ignored), model=body.model)
    shown = _tools(body, ignored)
    places += shown.places
    chat.tools = shown.specs or None
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
        if ignores(_RULES["thinking.budget_tokens"], body.thinking.budget_tokens):
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


@dataclass(frozen=True, slots=True)
class _Placed:
    """A block and where it stands."""

    block: Block
    here: str
    turn_idx: int


def _messages(body: CountTokensBody, ignored: list[str]) -> list[Message]:
    """Consecutive turns of one role are one. `ignored` gets the names of what is left out."""
    out = _system(body.system, ignored) if body.system else []
    call_ids: frozenset[str] = frozenset()  # of the assistant's turn before
    for role, turns in groupby(enumerate(body.messages), key=lambda turn: turn[1].role):
        group = list(turns)
        if len(group) == 1 and isinstance(group[0][1].content, str):
            out.append(Message(role, group[0][1].content))
        else:
            blocks = [placed for index, turn in group for placed in _blocks(turn.content, index)]
            if role == "assistant":
                out.append(_assistant(blocks, ignored))
            else:
                out.extend(_user(role, blocks, call_ids, ignored))
        call_ids = frozenset(call.id or "" for call in out[-1].tool_calls or ())
    last = out[-1]
    if last.tool_calls:
        raise invalid(f"messages[{len(body.messages) - 1}]", "a tool_use must be followed by its tool_result")
    return out


def _blocks(content: str | Sequence[Block], turn_idx: int) -> Iterator[_Placed]:
    here = f"messages[{turn_idx}].content"
    if isinstance(content, str):
        yield _Placed(Block(type="text", text=content), here, turn_idx)
        return
    for index, block in enumerate(content):
        yield _Placed(block, f"{here}[{index}]", turn_idx)


def _system(system: str | Sequence[TextPart], ignored: list[str]) -> list[Message]:
    """The system prompt, without the line for somebody's billing at its head."""
    texts = _texts(system, "system")
    first = texts if isinstance(texts, str) else texts[0].text or ""
    head = BILLING_LINE.match(first)
    if head is not None and ignores(_RULES["system[]"], "billing"):
        ignored.append("system" if isinstance(texts, str) else "system[0]")
        if isinstance(texts, str):
            texts = first[head.end() :]
        else:
            rest = first[head.end() :]
            texts = [*([ContentPart("text", rest)] if rest else ()), *texts[1:]]
    return [Message("system", texts)] if texts else []


def _assistant(blocks: Sequence[_Placed], ignored: list[str]) -> Message:
    message = Message("assistant")
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for placed in blocks:
        block, where = placed.block, placed.here
        match block.type:
            case "thinking":
                if block.thinking is None:
                    raise invalid(f"{where}.thinking", "it is required in a thinking block")
                thoughts += [block.thinking] if block.thinking else []  # empty: its display was omitted
            case "redacted_thinking":
                pass  # nobody but its maker can read it
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(_readable(block, where))
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


def _user(role: Role, blocks: Sequence[_Placed], call_ids: Container[str], ignored: list[str]) -> list[Message]:
    """The results of tools, one message each, then the texts as one. `call_ids`: of the calls that wait for a result."""
    results: list[Message] = []
    texts: list[ContentPart] = []
    turn_of_text = -1  # the latest that has one
    for placed in blocks:
        block, where = placed.block, placed.here
        if block.type != "tool_result" or role != "user":
            texts.append(_readable(block, where))
            turn_of_text = placed.turn_idx
            continue
        if turn_of_text == placed.turn_idx:
            raise invalid(where, "a tool_result comes before the texts of its turn")
        if block.tool_use_id not in call_ids:
            raise invalid(f"{where}.tool_use_id", "no tool_use of the turn before has it")
        result = _result(block.content or "", f"{where}.content", ignored)
        results.append(Message("tool", result, tool_call_id=block.tool_use_id))
    return [*results, *([Message(role, texts)] if texts or not results else ())]


def _result(content: str | Sequence[ResultPart], here: str, ignored: list[str]) -> str | list[ContentPart]:
    """What a tool gave. What no model here can read is a line that says so: it would stay in the conversation, and end
    it for good."""
    if isinstance(content, str):
        return content
    out: list[ContentPart] = []
    for index, part in enumerate(content):
        where = f"{here}[{index}]"
        readable = part.type in ("text", "search_result") or (part.type == "document" and _is_text(part.source))
        if part.type == "tool_reference":
            if not part.tool_name:
                raise invalid(f"{where}.tool_name", "it is required in a tool_reference block")
            out.append(ContentPart("text", part.tool_name))
        elif not readable and ignores(_RULES["messages[].content[].content[]"], "unreadable", where):
            ignored.append(where)
            out.append(ContentPart("text", f"[{part.type[:64]}: this model reads text only]"))
        else:
            out.append(_readable(part, where))
    return out


def _is_text(source: str | Source | None) -> bool:
    """Whether a document is text throughout."""
    if not isinstance(source, Source) or source.type not in ("text", "content"):
        return False
    parts = source.content if source.type == "content" and isinstance(source.content, list) else ()
    return all(part.type == "text" for part in parts)


def _readable(block: Block | ResultPart, here: str) -> ContentPart:
    """A block of text: plain, a document's with its title and context, or a search result's with its title and source."""
    if block.type == "text":
        return _text(block.text, here)
    source = block.source
    if block.type == "document" and isinstance(source, Source) and _is_text(source):
        body = source.data if source.type == "text" else source.content
        if not isinstance(body, str | list):
            raise invalid(f"{here}.source", "it must hold the text: data with type 'text', content with type 'content'")
        heads = [block.title, block.context]
        inside = f"{here}.source.content"
    elif block.type == "search_result":
        body = block.content if block.content is not None else ""
        heads = [block.title, source if isinstance(source, str) else None]
        inside = f"{here}.content"
    else:
        raise InvalidRequestError(
            f"{here}: a block of type {block.type[:64]!r} is not supported here", reason="UNSUPPORTED_PART", field=here
        )
    texts = _texts(body, inside)
    parts = [texts] if isinstance(texts, str) else [part.text or "" for part in texts]
    return ContentPart("text", "\n".join([*(head for head in heads if head), *parts]))


def _texts(content: str | Sequence[TextPart | ResultPart], here: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    out: list[ContentPart] = []
    for index, part in enumerate(content):
        where = f"{here}[{index}]"
        if part.type != "text":
            raise InvalidRequestError(
                f"{where}: a block of type {part.type[:64]!r} is not supported here",
                reason="UNSUPPORTED_PART",
                field=where,
            )
        out.append(_text(part.text, where))
    return out


def _text(text: str | None, here: str) -> ContentPart:
    if text is None:
        raise invalid(f"{here}.text", "it is required in a text block")
    return ContentPart("text", text)


def _tools(body: CountTokensBody, ignored: list[str]) -> _Tools:
    """Those of the model's own kind, without those that are to be loaded later and that nobody has asked for yet.

    Where one of Anthropic's servers would look for them, which is not here, all are shown.
    """
    given = body.tools or ()
    choice = body.tool_choice
    shown = _Tools([], [])
    later = not any((tool.type or "").startswith(_SEARCH_TOOL) for tool in given)
    loaded = _referenced(body) if later else frozenset()
    for index, tool in enumerate(given):
        here = f"tools[{index}]"
        demanded = choice is not None and choice.name == tool.name
        if ignores(_RULES["tools[].type"], tool.type):
            if demanded:
                raise refuse(
                    f"{here}.type", f"{here}.type: a tool of type {(tool.type or '')[:64]!r} cannot be called here"
                )
            ignored.append(here)
        elif not (tool.defer_loading and later) or tool.name in loaded or demanded:
            function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
            shown.specs.append(ToolSpec("function", function))
            shown.places.append(here)
    return shown


def _referenced(body: CountTokensBody) -> frozenset[str]:
    """The tools that a tool's result has loaded."""
    return frozenset(
        part.tool_name or ""
        for turn in body.messages
        if not isinstance(turn.content, str)
        for block in turn.content
        if block.type == "tool_result" and isinstance(block.content, list)
        for part in block.content
        if part.type == "tool_reference"
    )
