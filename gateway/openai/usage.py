"""OpenAI's usage object."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rorqual.core.errors import InternalError, UnavailableError
from rorqual.rpc.status import from_error_proto
from rorqual.v1 import common_pb2, text_pb2

from .answer_schema import CompletionTokensDetails, PromptTokensDetails, Usage

_FINISH_REASONS: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def finish_reason(finished: text_pb2.ChoiceFinished) -> str:
    """OpenAI's word for why a choice ended. Raises the error behind a choice that failed."""
    if finished.reason in _FINISH_REASONS:
        return _FINISH_REASONS[finished.reason]
    if finished.HasField("error"):
        raise from_error_proto(finished.error)
    if finished.reason == common_pb2.FINISH_REASON_ABORTED:
        raise UnavailableError("the request was aborted by the engine", reason="ABORTED")
    raise InternalError(f"a choice ended with reason {finished.reason} and no error")


def stop_reason(finished: text_pb2.ChoiceFinished | None, asked_token_ids: Container[int]) -> int | str | None:
    """The client's own stop string or stop token that ended a choice; None where the model ended it."""
    which = finished.WhichOneof("stop") if finished is not None else None
    if finished is None or which is None:
        return None
    if which == "stop_token_id":
        return finished.stop_token_id if finished.stop_token_id in asked_token_ids else None
    return finished.stop_string


def usage_object(usages: Iterable[text_pb2.Usage]) -> Usage:
    """The sum over the prompts of one HTTP request; a prompt counts once, whatever n."""
    prompt = cached = generated = reasoning = 0
    for usage in usages:
        prompt += usage.num_prompt_tokens
        cached += usage.num_cached_tokens
        generated += usage.num_generated_tokens
        reasoning += usage.num_reasoning_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(reasoning),
    )
