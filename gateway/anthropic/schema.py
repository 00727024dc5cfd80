"""The bodies of /v1/messages, as far as they are served, and the objects that it answers with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from rorqual.core.limits import HTTP, Number

from ..openai.schema import (
    MAX_MESSAGES,
    CacheSalt,
    FunctionName,
    MaxTokens,
    ModelName,
    Priority,
    Seed,
    StopStrings,
    TopK,
    TopP,
    within,
)

_TEMPERATURE = Number("temperature", "float", 0, 1, "Anthropic's range")


class CacheControl(msgspec.Struct):
    """Taken and not needed: prefixes are cached by themselves."""

    type: str
    ttl: str | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """Text of a system prompt, a document or a search result."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class Source(msgspec.Struct, kw_only=True):
    """Of a document or an image. Text is read: `data` of type text, or `content`."""

    type: str
    media_type: Any = None
    data: Any = None
    content: str | list[TextPart] | None = None
    url: Any = None
    file_id: Any = None


class ResultPart(msgspec.Struct, kw_only=True):
    """A block of a tool's result: text, document, search_result, tool_reference; or an image, which is not read."""

    type: str
    text: str | None = None
    tool_name: str | None = None
    source: str | Source | None = None
    title: str | None = None
    context: str | None = None
    content: str | list[TextPart] | None = None
    cache_control: CacheControl | None = None


class Block(msgspec.Struct, kw_only=True):
    """A block of a message: text, document, search_result, thinking, redacted_thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    source: str | Source | None = None
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class MessageTurn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(msgspec.Struct, kw_only=True):
    """A function that the model may call. Tools that a server runs are left out."""

    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    strict: bool | None = None
    defer_loading: bool | None = None  # it is not shown to the model until a tool_reference names it
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`budget_tokens` is taken and ignored: max_tokens bounds thought and answer together.

    `display`: whether the thought is shown (all of it: nothing here is summarized), or its blocks are empty.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, within(HTTP["budget_tokens"])] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))


class OutputConfig(msgspec.Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens, and what it shares with /v1/messages."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: ModelName | None = None
    system: str | list[TextPart] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: StopStrings | None = None
    stop_in_reasoning: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, within(_TEMPERATURE)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None


# What is answered.


class TextBlock(msgspec.Struct, tag="text"):
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those that no cache served, as Anthropic counts them."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokens = msgspec.field(default_factory=ThinkingTokens)


class MessageObject(msgspec.Struct, kw_only=True):
    """A message, whole or at the beginning of a stream."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class ListedModel(msgspec.Struct, kw_only=True):
    type: str = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int | None


class ModelPage(msgspec.Struct, kw_only=True):
    """All models on one page."""

    data: list[ListedModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None
