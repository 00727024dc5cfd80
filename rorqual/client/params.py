"""SamplingParams: how a request's tokens are chosen and where they end, in vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rorqual.core import limits
from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import common_pb2, text_pb2

_SAMPLING = tuple(name for name in limits.SAMPLING if name != "logit_bias")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What is None takes the model's own default (its generation_config), or is off. Raises InvalidRequestError.

    temperature: 0 to 100; 0 is greedy.         top_p: (0, 1].          top_k: >= 0; 0 (or -1) is off.
    min_p: [0, 1].                              seed: equal seeds draw equal random numbers.
    n: choices for each prompt, 1 to 128.       max_tokens: generated ones; None: what fits in the model's length.
    stop: strings the text ends before.         stop_token_ids: ids generation ends after.
    stop_in_reasoning: of a chat's answer search the reasoning for `stop`, too, not the content alone.
    min_tokens: no stop token before so many.   ignore_eos: go on after the end-of-sequence token.
    presence_penalty, frequency_penalty: [-2, 2].   repetition_penalty: 0.01 to 100; 1 is off.
    logit_bias: token id to [-100, 100].        logprobs, prompt_logprobs: alternatives a token, 0 to 20.
    `rorqual.core.limits` has all ranges and why they are what they are.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    stop_in_reasoning: bool = False
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in _SAMPLING:
            value = getattr(self, name)
            if value is not None:
                limits.SAMPLING[name].check(value)
        limits.HTTP["n"].check(self.n)
        if self.max_tokens is not None:
            limits.HTTP["max_tokens"].check(self.max_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens"
            )
        if len(self.stop) > limits.MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {limits.MAX_STOP_STRINGS} strings, got {len(self.stop)}", field="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text.encode()) <= limits.MAX_STOP_BYTES:
                raise InvalidRequestError(
                    f"a stop string has 1 to {limits.MAX_STOP_BYTES} bytes of UTF-8, got {text!r}", field="stop"
                )
        _check_count("stop_token_ids", len(self.stop_token_ids), limits.MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            limits.TOKEN_ID.check(token_id, field="stop_token_ids", what="an id in stop_token_ids")
        _check_count("logit_bias", len(self.logit_bias), limits.MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias.items():
            limits.TOKEN_ID.check(token_id, field="logit_bias", what="an id in logit_bias")
            limits.SAMPLING["logit_bias"].check(bias)

    def to_proto(self) -> common_pb2.SamplingParams:
        """The part that the sampler sees; what is None stays unset."""
        proto = common_pb2.SamplingParams(
            stop_token_ids=self.stop_token_ids,
            logit_bias=dict(self.logit_bias),
        )
        for name in _SAMPLING:
            value = getattr(self, name)
            if value is not None and (value or name != "min_tokens"):
                setattr(proto, name, value)
        return proto

    def to_options(self, *, request_id: str, model: str = "") -> text_pb2.TextOptions:
        """The options of a TextService request."""
        options = text_pb2.TextOptions(
            request_id=request_id,
            model=model,
            sampling=self.to_proto(),
            stop=self.stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_in_reasoning=self.stop_in_reasoning,
            num_choices=self.n,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )
        if self.max_tokens is not None:
            options.max_tokens = self.max_tokens
        return options


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"{name} takes 0 to {most} entries, got {count}", field=name)
