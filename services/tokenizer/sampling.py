"""Sampling parameters: defaults of the checkpoint filled in, and what is impossible refused by name. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import common_pb2, text_pb2

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024


def check_options(options: text_pb2.TextOptions, *, vocab_size: int, allow_no_tokens: bool) -> None:
    """INVALID_SAMPLING or INVALID_STOP with the field named; TOKEN_OUT_OF_RANGE for ids beyond the vocabulary."""
    if options.num_choices > MAX_CHOICES:
        raise _invalid("num_choices", f"n must be 1 to {MAX_CHOICES}, got {options.num_choices}")
    if options.HasField("max_tokens") and options.max_tokens == 0 and not allow_no_tokens:
        raise _invalid("max_tokens", "max_tokens must be at least 1, got 0")
    if len(options.stop) > MAX_STOP_STRINGS:
        raise _invalid(
            "stop", f"at most {MAX_STOP_STRINGS} stop strings are taken, got {len(options.stop)}", "INVALID_STOP"
        )
    for index, text in enumerate(options.stop):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise _invalid(
                f"stop[{index}]", f"stop[{index}] must have 1 to {MAX_STOP_BYTES} bytes, got {size}", "INVALID_STOP"
            )
    if options.HasField("cache_salt") and not options.cache_salt:
        # Who sends one wants a cache apart; without one it would be shared with all who send none.
        raise _invalid("cache_salt", "cache_salt must not be empty: leave it out to share cached prefixes")
    _check_sampling(options.sampling, vocab_size)
    if options.HasField("max_tokens") and options.sampling.min_tokens > options.max_tokens:
        raise _invalid(
            "sampling.min_tokens",
            f"min_tokens {options.sampling.min_tokens} is more than max_tokens {options.max_tokens}",
        )


def _check_sampling(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    infinity = math.inf
    if sampling.HasField("grammar"):
        raise _invalid("sampling.grammar", "sampling.grammar is made of the options' constraint: set that")
    _check(sampling, "temperature", 0.0, infinity, "0 or more")
    _check(sampling, "top_p", 0.0, 1.0, "above 0 and at most 1", open_low=True)
    _check(sampling, "min_p", 0.0, 1.0, "0 to 1")
    _check(sampling, "presence_penalty", -2.0, 2.0, "-2 to 2")
    _check(sampling, "frequency_penalty", -2.0, 2.0, "-2 to 2")
    _check(sampling, "repetition_penalty", 0.0, infinity, "above 0", open_low=True)
    for name in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(name) and getattr(sampling, name) > MAX_LOGPROBS:
            raise _invalid(f"sampling.{name}", f"{name} must be 0 to {MAX_LOGPROBS}, got {getattr(sampling, name)}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise _invalid(
            "sampling.logit_bias", f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(sampling.logit_bias)}"
        )
    for token_id, bias in sampling.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise _invalid("sampling.logit_bias", f"logit_bias of token {token_id} must be -100 to 100, got {bias}")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise _invalid(
            "sampling.stop_token_ids",
            f"at most {MAX_STOP_TOKENS} stop_token_ids are taken, got {len(sampling.stop_token_ids)}",
            "INVALID_STOP",
        )
    check_token_ids("sampling.logit_bias", list(sampling.logit_bias), vocab_size)
    check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """TOKEN_OUT_OF_RANGE where an id is not below `vocab_size`."""
    if token_ids and (highest := max(token_ids)) >= vocab_size:
        raise InvalidRequestError(
            f"{field.removeprefix('sampling.')} holds token {highest}; the vocabulary has ids below {vocab_size}",
            reason="TOKEN_OUT_OF_RANGE",
            field=field,
            metadata={"token_id": str(highest), "vocab_size": str(vocab_size)},
        )


def _check(
    sampling: common_pb2.SamplingParams, name: str, low: float, high: float, rule: str, *, open_low: bool = False
) -> None:
    if not sampling.HasField(name):
        return
    value = getattr(sampling, name)
    if not (math.isfinite(value) and low <= value <= high and not (open_low and value == low)):
        raise _invalid(f"sampling.{name}", f"{name} must be {rule}, got {value:g}")


def _invalid(field: str, message: str, reason: str = "INVALID_SAMPLING") -> InvalidRequestError:
    return InvalidRequestError(message, reason=reason, field=field)


def filled_sampling(
    options: text_pb2.TextOptions, defaults: Mapping[str, float], eos_ids: Sequence[int], seed: int
) -> common_pb2.SamplingParams:
    """What the scheduler is sent: nothing is left to guess but the defaults that the contract states."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(options.sampling)
    for name, value in defaults.items():
        if not sampling.HasField(name):
            setattr(sampling, name, int(value) if name == "top_k" else value)
    sampling.seed = seed
    stop_ids = set(sampling.stop_token_ids)
    if not options.ignore_eos:
        stop_ids.update(eos_ids)
    del sampling.stop_token_ids[:]
    sampling.stop_token_ids.extend(sorted(stop_ids))
    return sampling
