"""The table of `rorqual.core.limits` held against messages: called where TextService and GenerationService take requests."""

from __future__ import annotations

from rorqual.core import limits
from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import common_pb2, generation_pb2, text_pb2

INVALID_SAMPLING = "INVALID_SAMPLING"

_SAMPLING = tuple((name, number) for name, number in limits.SAMPLING.items() if name != "logit_bias")


def check_sampling(sampling: common_pb2.SamplingParams, *, max_stop_token_ids: int = limits.MAX_STOP_TOKEN_IDS) -> None:
    """InvalidRequestError (INVALID_SAMPLING) for a number outside its range, or too many of them. It names the field."""
    for name, number in _SAMPLING:
        if sampling.HasField(name):
            number.check(getattr(sampling, name), field=f"sampling.{name}", reason=INVALID_SAMPLING)
    if sampling.logit_bias:
        _check_count("logit_bias", len(sampling.logit_bias), limits.MAX_LOGIT_BIAS)
        number = limits.SAMPLING["logit_bias"]
        for token_id, bias in sampling.logit_bias.items():
            what = f"logit_bias of token {token_id}"
            number.check(bias, field="sampling.logit_bias", reason=INVALID_SAMPLING, what=what)
    _check_count("stop_token_ids", len(sampling.stop_token_ids), max_stop_token_ids, reason="INVALID_STOP")


def _check_count(name: str, count: int, most: int, *, reason: str = INVALID_SAMPLING) -> None:
    if count > most:
        raise InvalidRequestError(
            f"{name} takes 0 to {most} entries, got {count}",
            reason=reason,
            field=f"sampling.{name}",
            metadata={"least": "0", "most": str(most)},
        )


def check_options(options: text_pb2.TextOptions) -> None:
    """InvalidRequestError for a number or string of a TextService request outside its bounds, sampling among them."""
    _check_numbers(options, ("max_tokens", "num_choices", "priority", "attempt", "time_left_us"))
    _check_strings(options, ("request_id", "model", "cache_salt"))
    if options.HasField("cache_salt") and not options.cache_salt:
        # Who sends one wants a cache apart; without one it would be shared with all who send none.
        raise InvalidRequestError(
            "cache_salt must not be empty: leave it out to share cached prefixes",
            reason=INVALID_SAMPLING,
            field="cache_salt",
        )
    _check_trace(options.trace)
    check_sampling(options.sampling)
    _check_min_tokens(options)
    if options.HasField("resume"):
        names = ("num_prompt_tokens", "template_time_unix_s", "num_cached_tokens", "queue_time_us")
        _check_numbers(options.resume, names, prefix="resume.")


def check_generate(request: generation_pb2.GenerateRequest) -> None:
    """InvalidRequestError for a number or string of a GenerationService request outside its bounds, sampling among them."""
    # Its attempt may be any uint32: a tokenizer's are 65,536 for each of its own caller's.
    names = ("num_prompt_tokens", "max_tokens", "choice_index", "num_choices", "priority", "time_left_us")
    _check_numbers(request, names)
    _check_strings(request, ("request_id", "cache_salt"))
    _check_trace(request.trace)
    check_sampling(request.sampling, max_stop_token_ids=limits.MAX_STOP_TOKEN_IDS + limits.MAX_EOS_IDS)
    _check_min_tokens(request)
    if request.HasField("resume"):
        _check_numbers(request.resume, ("num_cached_tokens", "queue_time_us"), prefix="resume.")


def _check_min_tokens(request: text_pb2.TextOptions | generation_pb2.GenerateRequest) -> None:
    least = request.sampling.min_tokens
    if request.HasField("max_tokens") and least > request.max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens ({request.max_tokens}), got {least}",
            reason=INVALID_SAMPLING,
            field="sampling.min_tokens",
        )


def _check_numbers(message: object, names: tuple[str, ...], *, prefix: str = "") -> None:
    for name in names:
        value = getattr(message, name)
        if value:  # 0, and so what is left out, is in every range of REQUEST
            reason = INVALID_SAMPLING if name in ("max_tokens", "num_choices") else None
            limits.REQUEST[name].check(value, field=prefix + name, reason=reason)


def _check_strings(message: object, names: tuple[str, ...]) -> None:
    limits.check_strings((name, getattr(message, name)) for name in names)


def _check_trace(trace: common_pb2.TraceContext) -> None:
    if trace.traceparent or trace.tracestate:
        names = ("traceparent", "tracestate")
        limits.check_strings(((name, getattr(trace, name)) for name in names), prefix="trace.")
