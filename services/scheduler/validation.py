"""Whether a request can be served at all, judged against a model and the memory there is."""

from __future__ import annotations

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import CapacityError, InvalidRequestError, PromptTooLongError, RorqualError

from .events import ModelSpec, Request
from .kv_cache import blocks_for


def check_against_model(request: Request, num_tokens: int, model: ModelSpec) -> RorqualError | None:
    """The error of a request that `model` cannot serve: too long, or naming a token it does not have."""
    num_prompt = request.num_prompt_tokens
    if num_prompt >= model.max_model_len or num_tokens > model.max_model_len:
        return PromptTooLongError(
            f"the prompt has {num_prompt} tokens, which leaves nothing to generate within max_model_len "
            f"({model.max_model_len}): shorten it by {max(num_prompt, num_tokens - 1) - model.max_model_len + 1} or more",
            field="token_ids",
            metadata={"num_prompt_tokens": str(num_prompt), "max_model_len": str(model.max_model_len)},
        )
    for field, largest in request.largest_ids:
        if largest >= model.vocab_size:
            return InvalidRequestError(
                f"{field} holds token id {largest}, but the model's ids are below {model.vocab_size}",
                reason="TOKEN_OUT_OF_RANGE",
                field=field,
                metadata={"token_id": str(largest), "vocab_size": str(model.vocab_size)},
            )
    if request.has_grammar and not model.takes_grammars:
        return InvalidRequestError(
            "sampling.grammar: the executors that serve this model take no grammars",
            reason="UNSUPPORTED_CONSTRAINT",
            field="sampling.grammar",
        )
    return None


def total_tokens_bound(request: Request, model: ModelSpec, num_blocks: int) -> int:
    """How long the history may become. Without max_tokens: what fits in the model's length and in memory.

    The last token of a history needs no slot, so `num_blocks` hold one token more than they have slots.
    """
    if request.max_tokens is not None:
        return min(request.num_prompt_tokens + request.max_tokens, model.max_model_len)
    return min(model.max_model_len, max(num_blocks * BLOCK_SIZE + 1, request.num_prompt_tokens + 1))


def capacity_error(request: Request, max_total: int, num_blocks: int) -> CapacityError:
    """The refusal of a request that no executor could ever hold, with the figures."""
    needed = blocks_for(max_total - 1)
    generated = max_total - request.num_prompt_tokens
    return CapacityError(
        f"{request.num_prompt_tokens} prompt tokens and up to {generated} generated ones need {needed} KV blocks of "
        f"{BLOCK_SIZE} tokens, but the largest executor has {num_blocks}: shorten the prompt, lower max_tokens, or give "
        "the executor more memory (--kv-cache-bytes, --gpu-memory-utilization)",
        field="max_tokens" if blocks_for(request.num_prompt_tokens) < num_blocks else "token_ids",
        metadata={"needed_blocks": str(needed), "total_blocks": str(num_blocks), "block_size": str(BLOCK_SIZE)},
    )
