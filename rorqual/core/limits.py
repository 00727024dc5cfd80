"""The one table of what a request may carry: the range of every number, the length of every short string.

Each entrance reads it: the gateway's schemas, TextService and GenerationService (`rorqual.rpc.limits`), the Python client.
What is inside these bounds can be written into every message, record and log on the way to a device; a number outside
them is the caller's fault, and is refused by name before anything else sees it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .errors import InvalidRequestError

INT32_MOST = 2**31 - 1
UINT32_MOST = 2**32 - 1
UINT64_MOST = 2**64 - 1
EXACT_MOST = 2**53 - 1
"""A double holds each integer up to it."""

FLOAT32_LEAST = 2.0**-126
"""The smallest positive float32 that is no denormal: devices may read those as 0."""

Kind = Literal["int", "float"]  # float: a float32 in the messages


@dataclass(frozen=True, slots=True)
class Number:
    """A field's range, both ends included."""

    name: str
    kind: Kind
    least: float
    most: float
    why: str  # these ends

    @property
    def rule(self) -> str:
        """Its range in words."""
        least, most = (f"{end:.6g}" if self.kind == "float" else str(end) for end in (self.least, self.most))
        return f"{least} to {most}"

    def admits(self, value: object) -> bool:
        """Whether `value` is a number of this kind in the range. Floats are judged as the float32 that is sent."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.kind == "int":
            return isinstance(value, int) and self.least <= value <= self.most
        try:
            sent = _float32(value)
        except OverflowError:  # an int of hundreds of digits
            return False
        return _float32(self.least) <= sent <= self.most  # NaN is in no range

    def check(self, value: object, *, field: str = "", reason: str | None = None, what: str = "") -> None:
        """InvalidRequestError where `value` is not admitted. `field`: in place of the name; `what`: in the message."""
        if not self.admits(value):
            raise InvalidRequestError(
                f"{what or self.name} must be {self.rule}, got {_shown(value)}",
                reason=reason,
                field=field or self.name,
                metadata={"least": str(self.least), "most": str(self.most)},
            )


@dataclass(frozen=True, slots=True)
class Text:
    """How long a short string may be, as UTF-8."""

    name: str
    most_bytes: int
    why: str

    def check(self, value: str, *, field: str = "") -> None:
        """InvalidRequestError where `value` is longer. It is not quoted: it may be megabytes."""
        # A character has one byte or more, four at most: hardly any string has to be encoded to be judged.
        num_bytes = len(value)
        if num_bytes * 4 > self.most_bytes >= num_bytes:
            num_bytes = len(value.encode("utf-8", "surrogatepass"))
        if num_bytes > self.most_bytes:
            raise InvalidRequestError(
                f"{self.name} has 0 to {self.most_bytes} bytes, got {num_bytes} or more",
                field=field or self.name,
                metadata={"least": "0", "most": str(self.most_bytes)},
            )


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) and abs(value) <= UINT64_MOST else repr(value)[:40]


# -- how many -------------------------------------------------------------------------------------------

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_EOS_IDS = 256
"""Of a model, which the tokenizer puts beside a client's stop tokens."""

# -- numbers --------------------------------------------------------------------------------------------


def _table(*rows: Number) -> dict[str, Number]:
    return {row.name: row for row in rows}


SAMPLING = _table(
    Number(
        "temperature", "float", 0, 100, "0 is greedy, as is all below 1e-5; at 100 all tokens are about equally likely"
    ),
    Number(
        "top_p", "float", FLOAT32_LEAST, 1, "a share of the probability, above 0; a denormal number may be read as 0"
    ),
    Number("top_k", "int", 0, INT32_MOST, "0 is off; an int32 of the device's record"),
    Number("min_p", "float", 0, 1, "a share of the likeliest token's probability; 0 is off"),
    Number("seed", "int", 0, UINT64_MOST, "all 64 bits enter the random numbers"),
    Number("presence_penalty", "float", -2, 2, "OpenAI's range"),
    Number("frequency_penalty", "float", -2, 2, "OpenAI's range"),
    Number(
        "repetition_penalty",
        "float",
        0.01,
        100,
        "logits are divided or multiplied by it, and must stay finite float32s",
    ),
    Number("logit_bias", "float", -100, 100, "OpenAI's range"),
    Number("min_tokens", "int", 0, INT32_MOST, "an int32 of the device's record"),
    Number("logprobs", "int", 0, MAX_LOGPROBS, "what the sampler's kernel keeps"),
    Number("prompt_logprobs", "int", 0, MAX_LOGPROBS, "what the sampler's kernel keeps"),
)
"""Fields of SamplingParams, by their names there."""

TOKEN_ID = Number(
    "token_id", "int", 0, UINT32_MOST, "a uint32 on the wire; ids from the vocabulary's size on are refused later"
)

REQUEST = _table(
    Number("max_tokens", "int", 0, UINT32_MOST, "a uint32 on the wire; what is beyond the model's length is cut to it"),
    Number("num_choices", "int", 0, MAX_CHOICES, "each is a sequence of its own; 0 is read as 1"),
    Number("choice_index", "int", 0, MAX_CHOICES - 1, "below num_choices"),
    Number("num_prompt_tokens", "int", 0, INT32_MOST, "an int32 of the device's record"),
    Number("num_cached_tokens", "int", 0, INT32_MOST, "of the prompt"),
    Number("priority", "int", -(2**31), INT32_MOST, "an int32 on the wire"),
    Number("attempt", "int", 0, 2**16 - 1, "the tokenizer counts 65,536 attempts of its own for each, in a uint32"),
    Number("time_left_us", "int", 0, 10**16, "317 years: more than gRPC's own deadlines can say; a clock adds to it"),
    Number("queue_time_us", "int", 0, EXACT_MOST, "a double holds it exactly; 285 years"),
    Number("template_time_unix_s", "int", 0, 253_402_300_799, "the years 1970 to 9999, which calendars can write"),
)
"""Fields of TextOptions and GenerateRequest, and of what they carry on a resume."""

HTTP = _table(
    Number("temperature", "float", 0, 2, "OpenAI's range"),
    Number("top_p", "float", 0, 1, "0 leaves the likeliest token alone, as OpenAI takes it"),
    Number("top_k", "int", -1, INT32_MOST, "vLLM's: -1 is off, as 0 is"),
    Number("seed", "int", -(2**63), 2**63 - 1, "OpenAI's: signed; a negative one is its two's complement"),
    Number("n", "int", 1, MAX_CHOICES, "each is a sequence of its own"),
    Number("top_logprobs", "int", 0, MAX_LOGPROBS, "what the sampler's kernel keeps"),
    Number("max_tokens", "int", 1, UINT32_MOST, "as in a message; a text completion with echo takes 0 too"),
    Number("budget_tokens", "int", 1, UINT32_MOST, "it changes nothing"),
)
"""Where a field of the HTTP APIs takes another range, or has another name, than that of the messages."""

# -- strings --------------------------------------------------------------------------------------------

MAX_SALT_CHARS = 1024
"""Of a cache_salt over HTTP; a character has up to 4 bytes."""

MAX_NAME_CHARS = 256
"""Of a function's name."""

MAX_LABEL_CHARS = 1024
"""Of what a client calls itself or its request: user, safety_identifier, prompt_cache_key."""

STRINGS = {
    row.name: row
    for row in (
        Text("request_id", 256, "it is a key of tables, and stands in logs and spans"),
        Text("model", 1024, "it is compared with what is served, and quoted"),
        Text("cache_salt", 4 * MAX_SALT_CHARS + 64, "a gateway puts its tenant's digest before a client's"),
        Text("traceparent", 256, "W3C's has 55 characters"),
        Text("tracestate", 8192, "W3C asks for 512; it travels with every request and order"),
    )
}


def check_strings(values: Iterable[tuple[str, str]], *, prefix: str = "") -> None:
    """InvalidRequestError for a value of (name in STRINGS, value) that is too long. `prefix`: of the field's name."""
    for name, value in values:
        if value:
            STRINGS[name].check(value, field=prefix + name)
