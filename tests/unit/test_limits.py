"""Every number of a request, at the edges of every type: it is refused by name, or all that come after can take it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.orders import read_sampling
from executor.sampler import check_sampling
from gateway.anthropic import request as message_request
from gateway.openai import chat, completions, response_request
from gateway.openai.fields import BodyReader
from rorqual.client.params import SamplingParams
from rorqual.core import limits
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import pack_token_ids
from rorqual.kernels.sampling import pack_record
from rorqual.rpc.limits import check_generate, check_options
from rorqual.v1 import common_pb2, generation_pb2, text_pb2
from services.scheduler.wire import request_from_proto
from services.tokenizer import sampling as tokenizer_sampling

VOCAB = 129_280
INTS = (
    0, 1, -1, 2, 20, 21, 127, 128, 129, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1,
    2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30,
)  # fmt: skip
FLOATS = (
    0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 100.0, -100.0, 0.01, 1e-5, 2.0**-126, 2.0**-127, 1.4e-45, -1.4e-45, 2e-39,
    5e-324, -5e-324, 3.4028234663852886e38, 3.41e38, -3.41e38, 1.7976931348623157e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
EDGES = st.one_of(
    st.sampled_from(INTS),
    st.sampled_from(FLOATS),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.floats(width=32, allow_subnormal=True),
)


def refusal(act: Callable[[], object]) -> InvalidRequestError | None:
    """What `act` is refused with; None where it is not. Any other error is a fault, and goes on."""
    try:
        act()
    except InvalidRequestError as error:
        return error
    return None


def reach_the_device(options: text_pb2.TextOptions) -> None:
    """What TextService, the scheduler, an executor and a device record make of `options`, at their worst.

    Raises InvalidRequestError where one of the two services refuses them; anything else is a fault of ours.
    """
    options = text_pb2.TextOptions.FromString(options.SerializeToString())
    tokenizer_sampling.check_options(options, vocab_size=VOCAB, allow_no_tokens=True)
    sampling = tokenizer_sampling.filled_sampling(options, {}, (0, 1), options.sampling.seed)
    for choice_index in {0, max(1, options.num_choices) - 1}:
        generate = generation_pb2.GenerateRequest(
            request_id=options.request_id,
            token_ids=pack_token_ids([5, 6]),
            num_prompt_tokens=2,
            sampling=sampling,
            choice_index=choice_index,
            num_choices=options.num_choices,
            attempt=options.attempt * 65_536 + 65_535,
            priority=options.priority,
        )
        if options.HasField("max_tokens"):
            generate.max_tokens = options.max_tokens
        if options.HasField("time_left_us"):
            generate.time_left_us = options.time_left_us
        run(generate)


def run(generate: generation_pb2.GenerateRequest) -> None:
    generate = generation_pb2.GenerateRequest.FromString(generate.SerializeToString())
    request = request_from_proto(generate, now_s=1e6)
    assert request.deadline_s is None or math.isfinite(request.deadline_s)
    assert isinstance(request.sampling, common_pb2.SamplingParams)
    spec = read_sampling(common_pb2.SamplingParams.FromString(request.sampling.SerializeToString()))
    check_sampling(spec)  # the executor's own, which ends a sequence
    with np.errstate(all="raise"):
        pack_record(spec, request.choice_index, num_prompt_tokens=request.num_prompt_tokens)
        # What the sampler does with them, on logits larger than any model's.
        logits = np.array([1e4, -1e4, 1e-3, 0.0], np.float32)
        penalty = np.float32(spec.repetition_penalty)
        assert np.isfinite(np.where(logits > 0, logits / penalty, logits * penalty)).all()
        assert not 0 < spec.top_p < limits.FLOAT32_LEAST
    generation_pb2.Started(seed=request.seed, queue_time_us=request.resumed_queue_time_us)
    generation_pb2.Finished(num_cached_tokens=request.resumed_num_cached_tokens)


# -- over HTTP ----------------------------------------------------------------------------------------


def chat_of(body: Any) -> text_pb2.TextOptions:
    return chat.chat_command(body, "r").chat.options


def completion_of(body: Any) -> text_pb2.TextOptions:
    return completions.completion_commands(body, "r")[0].complete.options


def response_of(body: Any) -> text_pb2.TextOptions:
    return chat_of(response_request.chat_body(body, response_request.read_tools(body))[0])


def message_of(body: Any) -> text_pb2.TextOptions:
    return chat_of(message_request.chat_body(body, [])[0])


TURN = [{"role": "user", "content": "hi"}]
DIALECTS: dict[str, tuple[BodyReader[Any], Callable[[Any], text_pb2.TextOptions], dict[str, Any]]] = {
    "chat": (chat.READER, chat_of, {"messages": TURN, "logprobs": True}),
    "completions": (completions.READER, completion_of, {"prompt": "x", "echo": True}),
    "responses": (response_request.READER, response_of, {"input": "x"}),
    "messages": (message_request.READER, message_of, {"messages": TURN, "max_tokens": 5}),
}


def number_fields(reader: BodyReader[Any]) -> Iterator[str]:
    """The body's fields that hold a number, from the schema itself."""
    body = msgspec.inspect.type_info(reader.body_type)
    assert isinstance(body, msgspec.inspect.StructType)
    for field in body.fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if any(isinstance(kind, (msgspec.inspect.IntType, msgspec.inspect.FloatType)) for kind in kinds):
            yield field.encode_name


HTTP_FIELDS = [(dialect, name) for dialect, (reader, _, _) in DIALECTS.items() for name in number_fields(reader)]


def test_the_dialects_numbers_are_found() -> None:
    assert {("chat", "min_tokens"), ("completions", "logprobs"), ("responses", "seed"), ("messages", "top_k")} <= set(
        HTTP_FIELDS
    )


def send(dialect: str, fields: dict[str, Any]) -> None:
    reader, options_of, base = DIALECTS[dialect]
    body, _ = reader.read(json.dumps({**base, **fields}).encode())
    reach_the_device(options_of(body))


def check_over_http(dialect: str, name: str, value: float, asked: Any) -> None:
    error = refusal(lambda: send(dialect, {name: asked}))
    if error is not None and (math.isfinite(value) or error.reason != "INVALID_JSON"):  # JSON has no infinity
        assert error.field.removeprefix("sampling.").split("[")[0] == name, error


@pytest.mark.parametrize(("dialect", "name"), HTTP_FIELDS)
@given(value=EDGES)
@settings(max_examples=60, deadline=None)
def test_a_number_over_http(dialect: str, name: str, value: float) -> None:
    check_over_http(dialect, name, value, value)


@pytest.mark.parametrize(("dialect", "name"), HTTP_FIELDS)
def test_each_edge_over_http(dialect: str, name: str) -> None:
    for value in INTS + FLOATS:
        check_over_http(dialect, name, value, value)


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
@pytest.mark.parametrize("value", INTS + FLOATS)
def test_each_edge_inside_a_list_or_a_map(dialect: str, value: float) -> None:
    check_over_http(dialect, "stop_token_ids", value, [value])
    check_over_http(dialect, "logit_bias", value, {"7": value})
    check_over_http(dialect, "logit_bias", value, {str(value): 1})


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
def test_reported_bodies_are_refused_with_both_bounds(dialect: str) -> None:
    for field, value, bounds in (
        ("min_tokens", 2**31, ("0", "2147483647")),
        ("repetition_penalty", 2e-39, ("0.01", "100")),
        ("top_k", 2**31, ("-1", "2147483647")),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            send(dialect, {field: value})
        assert caught.value.field == field
        assert all(bound in caught.value.message for bound in bounds), caught.value.message


def test_a_nucleus_smaller_than_a_float32_is_the_likeliest_token() -> None:
    reader, options_of, base = DIALECTS["chat"]
    for tiny in (0, 5e-324, 1e-40):
        sampling = options_of(reader.read(json.dumps({**base, "top_p": tiny}).encode())[0]).sampling
        assert (sampling.HasField("top_p"), sampling.top_k) == (False, 1)


# -- over gRPC ----------------------------------------------------------------------------------------

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOAT_KINDS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)


def scalar_paths(descriptor: Any, skip: frozenset[str], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(path, whether it is a float) of every single number of a message, from its descriptor."""
    for field in descriptor.fields:
        path = prefix + field.name
        if path in skip:
            continue
        if field.is_repeated:
            continue
        if field.message_type is not None:
            yield from scalar_paths(field.message_type, skip, path + ".")
        elif field.cpp_type in _RANGES or field.cpp_type in _FLOAT_KINDS:
            yield path, field.cpp_type in _FLOAT_KINDS


def put(message: Message, path: str, value: float) -> bool:
    """Set the field; False where its type holds no such value, which protobuf refuses by itself."""
    *outer, name = path.split(".")
    for part in outer:
        message = getattr(message, part)
    try:
        setattr(message, name, value)
    except (ValueError, TypeError):
        return False
    return True


NO_NUMBERS = frozenset({"sampling.grammar"})  # its ids are a vocabulary's, or occur nowhere
TEXT_FIELDS = list(scalar_paths(text_pb2.TextOptions.DESCRIPTOR, NO_NUMBERS))
GENERATE_FIELDS = list(scalar_paths(generation_pb2.GenerateRequest.DESCRIPTOR, NO_NUMBERS))


def generate_request() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(request_id="r", token_ids=pack_token_ids([5, 6]), num_prompt_tokens=2)


@pytest.mark.parametrize(("path", "is_float"), TEXT_FIELDS)
def test_each_edge_to_the_text_service(path: str, is_float: bool) -> None:
    for value in FLOATS if is_float else INTS:
        options = text_pb2.TextOptions(request_id="r")
        if not put(options, path, value):
            continue
        error = refusal(lambda: reach_the_device(options))  # noqa: B023  # called at once
        if error is not None:
            assert error.field == path, error
            assert is_float or str(value)[:6] in error.message


@pytest.mark.parametrize(("path", "is_float"), GENERATE_FIELDS)
def test_each_edge_to_the_generation_service(path: str, is_float: bool) -> None:
    for value in FLOATS if is_float else INTS:
        request = generate_request()
        if not put(request, path, value):
            continue
        error = refusal(lambda: run(request))  # noqa: B023  # called at once
        assert error is None or error.field == path, error


@given(seed=st.integers(0, 2**32), values=st.lists(EDGES, min_size=3, max_size=6))
@settings(max_examples=150, deadline=None)
def test_several_edges_at_once(seed: int, values: list[float]) -> None:
    rng = random.Random(seed)
    options, request = text_pb2.TextOptions(request_id="r"), generate_request()
    text_paths, generate_paths = set(), set()
    for value in values:
        path, is_float = rng.choice(TEXT_FIELDS)
        if put(options, path, float(value) if is_float and abs(value) < 1e300 else value):
            text_paths.add(path)
        path, is_float = rng.choice(GENERATE_FIELDS)
        if put(request, path, float(value) if is_float and abs(value) < 1e300 else value):
            generate_paths.add(path)
    for act, paths in ((lambda: reach_the_device(options), text_paths), (lambda: run(request), generate_paths)):
        error = refusal(act)
        assert error is None or error.field in paths | {"sampling.min_tokens", "choice_index"}, error


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"min_tokens": 2**31}}, "sampling.min_tokens"),
        ({"sampling": {"top_k": 2**31}}, "sampling.top_k"),
        ({"sampling": {"repetition_penalty": 2e-39}}, "sampling.repetition_penalty"),
        ({"sampling": {"temperature": 1e30}}, "sampling.temperature"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias"),
        ({"time_left_us": 2**64 - 1}, "time_left_us"),
        ({"num_choices": 129}, "num_choices"),
        ({"request_id": "r" * 257}, "request_id"),
        ({"cache_salt": "s" * 5000}, "cache_salt"),
        ({"trace": {"traceparent": "t" * 257}}, "trace.traceparent"),
        ({"trace": {"tracestate": "t" * 8193}}, "trace.tracestate"),
        ({"resume": {"queue_time_us": 2**64 - 1}}, "resume.queue_time_us"),
    ],
)
def test_both_services_refuse_what_was_reported(fields: dict[str, Any], field: str) -> None:
    options = text_pb2.TextOptions(**fields)
    request = generation_pb2.GenerateRequest(**{**fields, "token_ids": pack_token_ids([1]), "num_prompt_tokens": 1})
    checks: list[Callable[[], None]] = [lambda: check_options(options), lambda: check_generate(request)]
    for check in checks:
        with pytest.raises(InvalidRequestError) as caught:
            check()
        assert caught.value.field == field
        assert {"least", "most"} <= caught.value.metadata.keys()
        assert len(caught.value.message) < 200


def test_the_text_services_attempts_leave_room_for_its_own() -> None:
    check_options(text_pb2.TextOptions(attempt=65_535))
    with pytest.raises(InvalidRequestError) as caught:
        check_options(text_pb2.TextOptions(attempt=65_536))
    assert caught.value.field == "attempt"
    check_generate(generation_pb2.GenerateRequest(attempt=2**32 - 1))


def test_the_longest_salt_of_a_tenant_is_taken() -> None:
    check_options(text_pb2.TextOptions(cache_salt="a" * 32 + ":" + "😀" * limits.MAX_SALT_CHARS))


# -- the client ---------------------------------------------------------------------------------------

CLIENT_FIELDS = [name for name in limits.SAMPLING if name != "logit_bias"] + ["n", "max_tokens"]


@pytest.mark.parametrize("name", CLIENT_FIELDS)
def test_each_edge_in_the_python_client(name: str) -> None:
    for value in INTS + FLOATS:
        fields: dict[str, Any] = {name: value}
        error = refusal(lambda: SamplingParams(**fields))  # noqa: B023  # called at once
        if error is not None:
            assert error.field == name
        else:
            reach_the_device(SamplingParams(**fields).to_options(request_id="r"))


# -- the table ----------------------------------------------------------------------------------------


def test_every_sampling_number_is_in_the_table() -> None:
    names = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names - limits.SAMPLING.keys() == {"stop_token_ids", "grammar"}
    assert limits.SAMPLING.keys() <= names


def test_a_float_is_judged_as_the_float32_that_is_sent() -> None:
    penalty = limits.SAMPLING["repetition_penalty"]
    sent = common_pb2.SamplingParams(repetition_penalty=0.01).repetition_penalty
    assert sent < 0.01
    assert penalty.admits(sent)
    assert not penalty.admits(0.0099)
    assert not penalty.admits(math.nan)
    assert not penalty.admits(True)
    assert not limits.SAMPLING["top_k"].admits(1.0)


def test_a_text_is_measured_in_bytes() -> None:
    text = limits.Text("name", 8, "")
    text.check("12345678")
    text.check("😀😀")
    for value in ("123456789", "😀😀1", "\ud800" * 3):
        with pytest.raises(InvalidRequestError) as caught:
            text.check(value)
        assert value not in caught.value.message
