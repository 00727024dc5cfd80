"""What OpenAI's two completions, and the smaller endpoints, answer as a whole. A stream has templates of its own."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ..upstream.inbox import TokenLogprob


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class AnsweredMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TokenColumns(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TokenColumns | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "rorqual"
    max_model_len: int | None


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelObject]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str
