"""The bodies of /v1/responses, as far as they are served, and the objects that it answers with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ..upstream.inbox import TokenLogprob
from .schema import (
    MAX_MESSAGES,
    NULL,
    FunctionName,
    Label,
    MaxTokens,
    Metadata,
    SamplingFields,
    TopCount,
)

INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""All but the first ask for parts of items that are never made here, which is no fault."""


class InputPart(msgspec.Struct):
    """A part of an item's content: input_text, output_text, reasoning_text, summary_text or refusal.

    Of a tool's output also an image or a file, which no model here can read: the other fields are theirs.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message (`type` may be left out), function_call, custom_tool_call, the output of either, or reasoning."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of a call: the group that its function belongs to
    arguments: str | None = None
    input: str | None = None  # of a custom_tool_call
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class GroupedTool(msgspec.Struct, kw_only=True):
    """A function that the model may call (`function`), or one whose argument is a text (`custom`)."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    strict: bool | None = None
    format: dict[str, Any] | None = None  # of a custom tool's text


class ResponseTool(GroupedTool, kw_only=True):
    """A tool, or a group of them (`namespace`). Tools that a server runs are left out."""

    tools: list[GroupedTool] | None = None  # of a group


class TextFormat(msgspec.Struct):
    """`strict` changes nothing: a schema is always kept to."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: Raw = msgspec.field(default_factory=lambda: NULL)
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: TopCount | None = None
    include: list[str] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None


# What is answered.


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, tag="message", kw_only=True):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag="reasoning", kw_only=True):
    """What the model thought, as it is: nothing is encrypted, and no summary is made."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, tag="function_call", kw_only=True):
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CustomToolCallItem(msgspec.Struct, tag="custom_tool_call", kw_only=True):
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Metadata = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
