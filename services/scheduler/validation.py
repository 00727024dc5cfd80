"""Whether a request can be served at all, judged against a model and the executors there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import CapacityError, InvalidRequestError, PromptTooLongError, RorqualError

from .events import ModelSpec, Request
from .kv_cache import blocks_for
from .sequence import Sequence as History

MAX_ADMIT_BYTES = 48 << 20
"""Of what an executor is told of a request at its admission: an order is one message, of at most 64 MiB."""

UNSUPPORTED_CONSTRAINT = "UNSUPPORTED_CONSTRAINT"


class Capacity(NamedTuple):
    """What an executor can hold of one history. Executors that are alike have one and the same."""

    max_model_len: int
    num_blocks: int
    takes_grammars: bool

    def takes(self, request: Request) -> bool:
        """Whether it does what the request asks for, whatever its length."""
        return self.takes_grammars or not request.has_grammar

    def holds(self, max_total: int, max_blocks: int) -> bool:
        return max_total <= self.max_model_len and max_blocks <= self.num_blocks

    @property
    def longest(self) -> int:
        """The last token of a history needs no slot, so `num_blocks` hold one token more than they have slots."""
        return min(self.max_model_len, self.num_blocks * BLOCK_SIZE + 1)


def check_against_model(
    request: Request, num_tokens: int, model: ModelSpec, capacities: Sequence[Capacity]
) -> RorqualError | None:
    """The error of a request that `model` cannot serve: too long, or naming a token it does not have.

    `capacities`: of the executors that take it; where they differ, the one for the longest histories counts.
    """
    num_prompt = request.num_prompt_tokens
    longest = max((capacity.max_model_len for capacity in capacities), default=model.max_model_len)
    if num_prompt >= longest or num_tokens > longest:
        return PromptTooLongError(
            f"the prompt has {num_prompt} tokens, which leaves nothing to generate within max_model_len "
            f"({longest}): shorten it by {max(num_prompt, num_tokens - 1) - longest + 1} or more",
            field="token_ids",
            metadata={"num_prompt_tokens": str(num_prompt), "max_model_len": str(longest)},
        )
    for field, largest in request.largest_ids:
        if largest >= model.vocab_size:
            return InvalidRequestError(
                f"{field} holds token id {largest}, but the model's ids are below {model.vocab_size}",
                reason="TOKEN_OUT_OF_RANGE",
                field=field,
                metadata={"token_id": str(largest), "vocab_size": str(model.vocab_size)},
            )
    num_bytes = request.num_opaque_bytes + (4 * num_tokens if request.needs_known_tokens else 0)
    if num_bytes > MAX_ADMIT_BYTES:
        return InvalidRequestError(
            f"the request has {num_bytes} bytes of sampling parameters and known tokens, and an executor takes "
            f"{MAX_ADMIT_BYTES}: make its grammar, or its history, shorter",
            reason="REQUEST_TOO_LARGE",
            field="sampling",
            metadata={"num_bytes": str(num_bytes), "max_bytes": str(MAX_ADMIT_BYTES)},
        )
    if request.has_grammar and not model.takes_grammars:
        return InvalidRequestError(
            "sampling.grammar: the executors that serve this model take no grammars",
            reason=UNSUPPORTED_CONSTRAINT,
            field="sampling.grammar",
        )
    return None


def total_tokens_bound(request: Request, model: ModelSpec, capacities: Sequence[Capacity]) -> int:
    """How long the history may become. Without max_tokens: what fits in the model's length and in memory."""
    max_model_len = max((capacity.max_model_len for capacity in capacities), default=model.max_model_len)
    if request.max_tokens is not None:
        return min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    longest = max((capacity.longest for capacity in capacities), default=max_model_len)
    return min(max_model_len, max(longest, request.num_prompt_tokens + 1))


def capacity_error(request: Request, max_total: int, capacities: Sequence[Capacity]) -> CapacityError:
    """The refusal of a request that no executor could ever hold, with the figures."""
    needed = blocks_for(max_total - 1)
    generated = max_total - request.num_prompt_tokens
    num_blocks = max(capacity.num_blocks for capacity in capacities)
    what = f"{request.num_prompt_tokens} prompt tokens and up to {generated} generated ones need {needed} KV blocks of "
    if needed > num_blocks:
        message = f"{what}{BLOCK_SIZE} tokens, but the largest executor has {num_blocks}"
    else:
        there = ", ".join(
            f"{capacity.num_blocks} blocks with max_model_len {capacity.max_model_len}" for capacity in capacities
        )
        message = f"{what}{BLOCK_SIZE} tokens and a max_model_len of {max_total} on one executor; there are: {there}"
    return CapacityError(
        f"{message}: shorten the prompt, lower max_tokens, or give the executor more memory (--kv-cache-bytes, "
        "--gpu-memory-utilization)",
        field="max_tokens" if blocks_for(request.num_prompt_tokens) < num_blocks else "token_ids",
        metadata={"needed_blocks": str(needed), "total_blocks": str(num_blocks), "block_size": str(BLOCK_SIZE)},
    )


def judge(seq: History, model: ModelSpec, capacities: Sequence[Capacity]) -> RorqualError | None:
    """The error of a request that these executors cannot serve; else how long it may become is set."""
    request = seq.request
    capacities = [capacity for capacity in capacities if capacity.takes(request)]
    error = check_against_model(request, seq.num_tokens, model, capacities)
    if error is not None:
        return error
    seq.scores_prompt_only = (
        request.max_tokens == 0 and request.wants_prompt_logprobs and not request.prompt_logprobs_delivered
    )
    # The executor makes one token of a prompt that is only scored, which nobody sees.
    max_total = total_tokens_bound(request, model, capacities) + seq.scores_prompt_only
    if seq.started or request.is_resume:
        # What has begun and whose end is ours to choose goes as far as it fits; what was promised stays.
        longest = max((capacity.longest for capacity in capacities), default=max_total)
        if longest > seq.num_tokens and (seq.is_open_ended or not seq.started):
            max_total = min(max_total, longest)
        elif seq.started:
            max_total = seq.max_total
    max_blocks = blocks_for(max_total - 1)
    if capacities and not any(capacity.holds(max_total, max_blocks) for capacity in capacities):
        return capacity_error(request, max_total, capacities)
    if seq.validated_for is not None and seq.validated_for.fingerprint != model.fingerprint:
        seq.hashes = []
    seq.max_total, seq.max_blocks = max_total, max_blocks
    return None
