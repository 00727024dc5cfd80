"""What a finished request brought, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, and the likeliest alternatives at its position."""

    token_id: int
    token: str  # its own text; bytes that are no character appear as U+FFFD
    logprob: float | None  # None for a prompt's first token
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, served from the prefix cache
    num_generated_tokens: int = 0  # over all choices
    num_reasoning_tokens: int = 0  # of the generated ones
    queue_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "tool_calls", "aborted" or "error"
    stop_reason: int | str | None = None  # the stop token or the stop string
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Logprob] | None = None  # one for each of token_ids, where asked for


@dataclass(slots=True)
class RequestOutput:
    """One prompt's choices, in order."""

    request_id: str = ""
    prompt: str | None = None  # None where it was given as ids or as messages
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[Logprob] | None = None
    model: str = ""
