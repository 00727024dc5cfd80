"""OpenAI's request bodies, as far as they are served: types and ranges. Every field may be null."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from rorqual.core import limits
from rorqual.core.limits import HTTP, REQUEST, SAMPLING

MAX_MESSAGES = 16_384
MAX_PROMPTS = 2048

NULL = Raw(b"null")


def within(number: limits.Number) -> Meta:
    """A row of the table of limits as a schema's."""
    return Meta(ge=number.least, le=number.most)


Temperature = Annotated[float, within(HTTP["temperature"])]
TopP = Annotated[float, within(HTTP["top_p"])]
TopK = Annotated[int, within(HTTP["top_k"])]
Seed = Annotated[int, within(HTTP["seed"])]
MaxTokens = Annotated[int, within(HTTP["max_tokens"])]
Priority = Annotated[int, within(REQUEST["priority"])]
Penalty = Annotated[float, within(SAMPLING["presence_penalty"])]
Id = Annotated[int, within(limits.TOKEN_ID)]
ModelName = Annotated[str, Meta(max_length=limits.STRINGS["model"].most_bytes)]
Label = Annotated[str, Meta(max_length=limits.MAX_LABEL_CHARS)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=limits.MAX_SALT_CHARS)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
Bias = Annotated[float, within(SAMPLING["logit_bias"])]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_BYTES)]
StopStrings = Annotated[list[StopString], Meta(max_length=limits.MAX_STOP_STRINGS)]
TopCount = Annotated[int, within(HTTP["top_logprobs"])]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every endpoint that generates has in common."""

    model: ModelName | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None  # 0: the likeliest token alone
    top_k: TopK | None = None  # -1 and 0: off
    min_p: Annotated[float, within(SAMPLING["min_p"])] | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    stop_in_reasoning: bool | None = None
    min_tokens: Annotated[int, within(SAMPLING["min_tokens"])] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, within(SAMPLING["repetition_penalty"])] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.MAX_LOGIT_BIAS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    skip_special_tokens: bool | None = None
    user: Label | None = None
    metadata: Metadata | None = None


class JsonSchemaFormat(msgspec.Struct):
    """`strict` changes nothing: a schema is always kept to."""

    name: str | None = None
    description: str | None = None
    schema: Raw = msgspec.field(default_factory=lambda: NULL)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's: one of the first five."""

    json: Raw = msgspec.field(default_factory=lambda: NULL)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None  # refused
    disable_any_whitespace: bool | None = None  # refused
    disable_additional_properties: bool | None = None  # refused
    whitespace_pattern: str | None = None  # refused


class GenerationFields(SamplingFields, kw_only=True):
    """What chat and text completions have in common."""

    n: Annotated[int, within(HTTP["n"])] | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: TopCount | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = msgspec.field(default_factory=lambda: NULL)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Any = None  # a string that holds JSON, or the object itself


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None  # of an assistant turn, in place of content
    function_call: Any = None  # refused: what tool_calls replaced
    audio: Any = None  # refused
    prefix: bool | None = None  # of a last assistant message: DeepSeek's spelling of continue_final_message


class ThinkingSwitch(msgspec.Struct):
    """DeepSeek's own spelling of chat_template_kwargs.thinking."""

    type: Literal["enabled", "disabled"]


class Function(msgspec.Struct):
    name: FunctionName
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    type: str
    function: Function | None = None


class ChatBody(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[ToolSpec] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: ThinkingSwitch | None = None
    reasoning_effort: str | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None


class CompletionBody(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Id | list[Id]]
    max_tokens: Annotated[int, within(REQUEST["max_tokens"])] | None = None
    logprobs: TopCount | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a `prompt`, or `messages` and how they are rendered."""

    model: ModelName | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: ThinkingSwitch | None = None
    reasoning_effort: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Id]
    model: ModelName | None = None
