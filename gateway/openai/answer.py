"""What the answers of all text endpoints have in common: pieces in, chunks or one whole body out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2

from ..upstream.inbox import Piece, TokenLogprob
from .answer_schema import AnsweredCall, CalledFunction, PromptLogprobs
from .chunks import ChunkTemplate
from .logprobs import prompt_logprobs
from .usage import finish_reason, stop_reason


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What the client asked of the answer's shape."""

    response_id: str
    model: str  # as asked for; the name served takes its place once it is known
    fingerprint: Callable[[str], str | None]  # of a model
    choices_per_prompt: int
    num_prompts: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_top_logprobs: int | None = None  # None: no log-probabilities
    num_prompt_logprobs: int | None = None  # None: none of the prompt's
    echo: bool = False
    stop_token_ids: frozenset[int] = frozenset()  # that the client named
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return self.choices_per_prompt * self.num_prompts

    def template(self, object_name: str, model: str) -> ChunkTemplate:
        """The chunks of a stream that `model` turned out to serve."""
        return ChunkTemplate(
            response_id=self.response_id,
            object_name=object_name,
            created=self.created,
            model=model,
            fingerprint=self.fingerprint(model),
            num_choices=self.num_choices,
            usage_key=self.include_usage,
        )


class Answer(Protocol):
    """One response of one dialect."""

    progress: Progress

    def chunks(self, piece: Piece) -> bytes:
        """Stream events for `piece`; may be empty. Raises the error of a choice that failed."""
        ...

    def last_chunks(self) -> bytes:
        """What ends a stream that went well."""
        ...

    def whole(self, pieces: list[Piece]) -> bytes:
        """The body of an answer that is not streamed. Raises as `chunks`."""
        ...


class Progress:
    """What is known of a request so far, for usage, chunks and telemetry."""

    def __init__(self, options: AnswerOptions) -> None:
        self._per_prompt = options.choices_per_prompt
        self.model = options.model
        self.accepted: dict[int, text_pb2.Accepted] = {}  # by prompt
        self.usages: list[text_pb2.Usage] = []
        self.finish_reasons: list[str] = []
        self.num_generated = 0

    def see(self, piece: Piece) -> None:
        for ids in piece.id_parts:
            self.num_generated += len(ids) // 4
        detail = piece.detail
        if detail is None:
            return
        if isinstance(detail, text_pb2.Accepted):
            self.accepted[piece.choice_index // self._per_prompt] = detail
            self.model = detail.model or self.model
        elif isinstance(detail, text_pb2.Usage):
            self.usages.append(detail)
        elif isinstance(detail, text_pb2.ChoiceFinished):
            self.finish_reasons.append(finish_reason(detail))

    def prompt_token_ids(self, choice_index: int) -> bytes:
        """uint32 little-endian; empty where they were not asked for."""
        accepted = self.accepted.get(choice_index // self._per_prompt)
        return accepted.prompt_token_ids if accepted is not None else b""

    def usage_so_far(self) -> dict[str, Any]:
        """Usage for a chunk in the middle of a stream."""
        prompt = sum(accepted.num_prompt_tokens for accepted in self.accepted.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": prompt + self.num_generated,
        }


@dataclass(slots=True)
class WholeChoice:
    """A choice of an answer that is not streamed."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: dict[int, AnsweredCall] = field(default_factory=dict)  # by tool_call_idx
    echo: text_pb2.PromptEcho | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    id_parts: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    finished: text_pb2.ChoiceFinished | None = None

    def add(self, piece: Piece) -> None:
        detail = piece.detail
        if piece.kind == "content":
            self.content += piece.parts
        elif piece.kind == "reasoning":
            self.reasoning += piece.parts
        elif isinstance(detail, text_pb2.ToolCallDelta):
            call = self.tool_calls.get(detail.tool_call_idx)
            if call is None:
                call = AnsweredCall(id=detail.id, function=CalledFunction(detail.name, ""))
                self.tool_calls[detail.tool_call_idx] = call
            call.function.arguments += detail.arguments_json_delta
        elif isinstance(detail, text_pb2.PromptEcho):
            self.echo = detail
        elif isinstance(detail, text_pb2.ChoiceFinished):
            self.finish_reason = finish_reason(detail)
            self.finished = detail
        self.logprobs += piece.logprobs
        self.id_parts += piece.id_parts

    def stop_reason(self, options: AnswerOptions) -> int | str | UnsetType:
        """The client's own stop, where one ended it."""
        reason = stop_reason(self.finished, options.stop_token_ids)
        return UNSET if reason is None else reason

    def token_ids(self, options: AnswerOptions) -> list[int] | UnsetType:
        """What was generated, where that was asked for."""
        return unpack_token_ids(b"".join(self.id_parts)).tolist() if options.return_token_ids else UNSET

    def prompt_logprobs(self, options: AnswerOptions) -> PromptLogprobs | UnsetType:
        """The prompt's, where they were asked for."""
        if options.num_prompt_logprobs is None or self.echo is None:
            return UNSET
        return prompt_logprobs(self.echo, options.num_prompt_logprobs)


def gather(pieces: list[Piece], num_choices: int, progress: Progress) -> list[WholeChoice]:
    """The choices that `pieces` add up to."""
    choices = [WholeChoice() for _ in range(num_choices)]
    for piece in pieces:
        progress.see(piece)
        if piece.kind not in ("accepted", "usage"):
            choices[piece.choice_index].add(piece)
    return choices
