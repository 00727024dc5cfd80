"""Sampling parameters: defaults of the checkpoint filled in, and what is impossible refused by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rorqual.core.errors import InvalidRequestError
from rorqual.core.limits import MAX_STOP_BYTES, MAX_STOP_STRINGS
from rorqual.rpc.limits import check_options as check_limits
from rorqual.v1 import common_pb2, text_pb2


def check_options(options: text_pb2.TextOptions, *, vocab_size: int, allow_no_tokens: bool) -> None:
    """INVALID_SAMPLING or INVALID_STOP with the field named; TOKEN_OUT_OF_RANGE for ids beyond the vocabulary."""
    check_limits(options)
    if options.sampling.HasField("grammar"):
        raise _invalid("sampling.grammar", "sampling.grammar is made of the options' constraint: set that")
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
    check_token_ids("sampling.logit_bias", list(options.sampling.logit_bias), vocab_size)
    check_token_ids("sampling.stop_token_ids", options.sampling.stop_token_ids, vocab_size)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """TOKEN_OUT_OF_RANGE where an id is not below `vocab_size`."""
    if token_ids and (highest := max(token_ids)) >= vocab_size:
        raise InvalidRequestError(
            f"{field.removeprefix('sampling.')} holds token {highest}; the vocabulary has ids below {vocab_size}",
            reason="TOKEN_OUT_OF_RANGE",
            field=field,
            metadata={"token_id": str(highest), "vocab_size": str(vocab_size)},
        )


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
