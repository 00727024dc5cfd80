"""SamplingParams: how a request's tokens are chosen and where they end, in vLLM's names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import common_pb2, text_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What is None takes the model's own default (its generation_config), or is off. Raises InvalidRequestError.

    temperature: >= 0; 0 is greedy.             top_p: (0, 1].          top_k: >= 0; 0 (or -1) is off.
    min_p: [0, 1].                              seed: equal seeds draw equal random numbers.
    n: choices for each prompt, 1 to 128.       max_tokens: generated ones; None: what fits in the model's length.
    stop: strings the text ends before.         stop_token_ids: ids generation ends after.
    stop_in_reasoning: of a chat's answer search the reasoning for `stop`, too, not the content alone.
    min_tokens: no stop token before so many.   ignore_eos: go on after the end-of-sequence token.
    presence_penalty, frequency_penalty: [-2, 2].   repetition_penalty: > 0; 1 is off.
    logit_bias: token id to [-100, 100].        logprobs, prompt_logprobs: alternatives a token, 0 to 20.
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
        _in_range("temperature", self.temperature, 0, math.inf)
        _in_range("top_p", self.top_p, 0, 1, low_open=True)
        _in_range("top_k", self.top_k, 0, 2**32 - 1)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("seed", self.seed, 0, 2**64 - 1)
        _in_range("n", self.n, 1, MAX_CHOICES)
        _in_range("max_tokens", self.max_tokens, 1, 2**32 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**32 - 1)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0, math.inf, low_open=True)
        _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", field="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", field="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
                raise InvalidRequestError(
                    f"a stop string has 1 to {MAX_STOP_BYTES} bytes of UTF-8, got {text!r}", field="stop"
                )
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, 2**32 - 1)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, 0, 2**32 - 1)
            _in_range("logit_bias", bias, -100, 100)

    def to_proto(self) -> common_pb2.SamplingParams:
        """The part that the sampler sees; what is None stays unset."""
        proto = common_pb2.SamplingParams(
            stop_token_ids=self.stop_token_ids,
            logit_bias=dict(self.logit_bias),
        )
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logprobs",
            "prompt_logprobs",
        ):
            value = getattr(self, name)
            if value is not None:
                setattr(proto, name, value)
        if self.min_tokens:
            proto.min_tokens = self.min_tokens
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


def _in_range(name: str, value: float | None, low: float, high: float, *, low_open: bool = False) -> None:
    if value is None:
        return
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if low_open else low <= value) or value > high:
        left = "above" if low_open else "at least"
        upper = "" if high == math.inf else f" and at most {high}"
        raise InvalidRequestError(f"{name} must be {left} {low}{upper}, got {value!r}", field=name)
