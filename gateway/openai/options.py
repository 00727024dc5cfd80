"""Sampling, limits and delivery of a body as rorqual.v1 messages."""

from __future__ import annotations

from rorqual.core.limits import FLOAT32_LEAST, MAX_STOP_BYTES
from rorqual.v1 import common_pb2, text_pb2

from .constraint import constraint_of
from .fields import invalid, refuse
from .schema import GenerationFields


def sampling_params(body: GenerationFields) -> common_pb2.SamplingParams:
    """Fields that the body leaves out stay unset: the model's generation_config decides them."""
    # What is left where the nucleus shrinks to nothing, or to less than a float32 holds.
    only_likeliest = body.top_p is not None and body.top_p < FLOAT32_LEAST
    params = common_pb2.SamplingParams(
        temperature=body.temperature,
        top_p=None if only_likeliest else body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids or (),
        logit_bias=_logit_bias(body.logit_bias or {}),
    )
    if body.top_k is not None:
        params.top_k = max(0, body.top_k)
    if only_likeliest:
        params.top_k = 1
    if body.seed is not None:
        params.seed = body.seed % 2**64  # a negative seed is its two's complement
    return params


def text_options(body: GenerationFields, request_id: str, max_tokens: int | None) -> text_pb2.TextOptions:
    """What chat and completions have in common. Raises InvalidRequestError."""
    num_choices = body.n or 1
    if body.best_of not in (None, num_choices):
        raise refuse("best_of", "best_of other than n is not supported here")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is only allowed with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "it is not allowed with stream: true")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise refuse("stream_options.include_obfuscation", "stream_options.include_obfuscation is not supported here")
    if body.min_tokens is not None and max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"{body.min_tokens} is above max_tokens, which is {max_tokens}")
    options = text_pb2.TextOptions(
        request_id=request_id,
        model=body.model or "",
        sampling=sampling_params(body),
        max_tokens=max_tokens,
        stop=_stops(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        stop_in_reasoning=bool(body.stop_in_reasoning),
        num_choices=num_choices,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or None,
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens,
        return_prompt_token_ids=bool(body.return_token_ids),
    )
    constraint = constraint_of(body)
    if constraint is not None:
        options.constraint.CopyFrom(constraint[1])
    if body.prompt_logprobs is not None:
        options.sampling.prompt_logprobs = body.prompt_logprobs
    return options


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    for text in stops:  # the schema has counted characters
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid("stop", f"a stop string has 1 to {MAX_STOP_BYTES} bytes, got {len(text.encode())}")
    return stops


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    out: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32):
            raise invalid("logit_bias", f"its keys are token ids in decimal, got {key[:32]!r}")
        out[int(key)] = value
    return out
