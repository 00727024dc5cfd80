"""rorqual.v1 messages to the core's types and back."""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterable

from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.limits import check_generate
from rorqual.rpc.status import to_error_proto
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2

from .events import ModelSpec, Reported, Request
from .executor_contract import MAX_FAULT_CHARS
from .orders import Admit, BlockTables, Copy, Drop, Extend, Label, Order, Prefill
from .stream_events import StreamEvent, StreamFailed, StreamFinished, StreamStarted, StreamTokens

_FINISH_REASONS = frozenset((0, 1, 2, 4, 5))


# -- requests -----------------------------------------------------------------------------------------


def request_from_proto(
    proto: generation_pb2.GenerateRequest, *, now_s: float, trace: object = None, seed: int = 0
) -> Request:
    """A request, checked as far as no model is needed. InvalidRequestError names the field.

    `seed` is taken where the caller named none.
    """
    check_generate(proto)
    num_bytes = len(proto.token_ids)
    if num_bytes == 0:
        raise InvalidRequestError(
            "token_ids is empty: a history has at least one token", reason="EMPTY_PROMPT", field="token_ids"
        )
    if num_bytes % 4:
        raise InvalidRequestError(
            f"token_ids is little-endian uint32, 4 bytes a token; {num_bytes} bytes are no multiple of 4",
            field="token_ids",
        )
    num_tokens = num_bytes // 4
    if not 1 <= proto.num_prompt_tokens <= num_tokens:
        raise InvalidRequestError(
            f"num_prompt_tokens must be 1 to {num_tokens} (the tokens in token_ids), got {proto.num_prompt_tokens}",
            field="num_prompt_tokens",
        )
    num_choices = proto.num_choices or 1
    if proto.choice_index >= num_choices:
        raise InvalidRequestError(
            f"choice_index must be below num_choices ({num_choices}), got {proto.choice_index}", field="choice_index"
        )
    max_tokens = proto.max_tokens if proto.HasField("max_tokens") else None
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(proto.sampling)  # a reference would keep the whole frame alive
    if not sampling.HasField("seed"):
        sampling.seed = seed
    is_resume = proto.HasField("resume") or proto.num_prompt_tokens < num_tokens
    return Request(
        request_id=proto.request_id,
        choice_index=proto.choice_index,
        num_choices=num_choices,
        attempt=proto.attempt,
        num_prompt_tokens=proto.num_prompt_tokens,
        max_tokens=max_tokens,
        seed=sampling.seed,
        sampling=sampling,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        wants_logprobs=sampling.HasField("logprobs"),
        wants_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        needs_known_tokens=bool(
            sampling.presence_penalty
            or sampling.frequency_penalty
            or (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0)
            or sampling.HasField("grammar")
        ),
        has_grammar=sampling.HasField("grammar"),
        largest_ids=_largest_ids(proto),
        priority=proto.priority,
        cache_salt=proto.cache_salt,
        deadline_s=now_s + proto.time_left_us * 1e-6 if proto.HasField("time_left_us") else None,
        is_resume=is_resume,
        resumed_num_cached_tokens=proto.resume.num_cached_tokens,
        resumed_queue_time_us=proto.resume.queue_time_us,
        prompt_logprobs_delivered=proto.resume.prompt_logprobs_delivered,
        trace=trace,
        num_opaque_bytes=sampling.ByteSize() + (trace.ByteSize() if isinstance(trace, common_pb2.TraceContext) else 0),
    )


def _largest_ids(proto: generation_pb2.GenerateRequest) -> tuple[tuple[str, int], ...]:
    largest = [("token_ids", max(unpack_token_ids(proto.token_ids)))]
    if proto.sampling.stop_token_ids:
        largest.append(("sampling.stop_token_ids", max(proto.sampling.stop_token_ids)))
    if proto.sampling.logit_bias:
        largest.append(("sampling.logit_bias", max(proto.sampling.logit_bias)))
    return tuple(largest)


# -- events of streams --------------------------------------------------------------------------------


def fill_started(out: generation_pb2.Started, event: StreamStarted) -> None:
    out.num_cached_tokens = event.num_cached_tokens
    out.queue_time_us = event.queue_time_us
    out.seed = event.seed


def fill_delta(out: generation_pb2.TokenDelta, event: StreamTokens) -> None:
    out.token_ids = bytes(event.token_ids)  # merged deltas are a bytearray
    if event.logprobs:
        out.logprobs.extend(event.logprobs)
    if event.prompt_logprobs:
        out.prompt_logprobs.extend(event.prompt_logprobs)


def fill_finished(out: generation_pb2.Finished, event: StreamFinished) -> None:
    out.reason = event.reason.value  # type: ignore[assignment]  # the same numbers, a test says
    if event.stop_token_id is not None:
        out.stop_token_id = event.stop_token_id
    out.num_cached_tokens = event.num_cached_tokens
    out.queue_time_us = event.queue_time_us
    out.num_generated_tokens = event.num_generated_tokens


def response_from_event(event: StreamEvent) -> generation_pb2.GenerateResponse | None:
    """An event as a message of `Generate`; None for one that is for telemetry alone. A failure is raised."""
    response = generation_pb2.GenerateResponse()
    if isinstance(event, StreamTokens):
        fill_delta(response.delta, event)
    elif isinstance(event, StreamStarted):
        fill_started(response.started, event)
    elif isinstance(event, StreamFinished):
        fill_finished(response.finished, event)
    elif isinstance(event, StreamFailed):
        raise event.error
    else:
        return None
    return response


@functools.lru_cache(maxsize=1 << 12)  # of about 300 bytes: the streams that run, not all there ever were
def _delta_head(stream_id: int, num_bytes: int) -> bytes:
    """A frame's bytes of one delta with that many bytes of token ids, up to these: they come last."""
    event = generation_pb2.GenerationEvent(stream_id=stream_id)
    event.delta.token_ids = bytes(num_bytes)
    return generation_pb2.GenerationServiceSessionResponse(events=[event]).SerializeToString()[:-num_bytes]


def fill_frame(
    frame: generation_pb2.GenerationServiceSessionResponse, events: Iterable[tuple[int, StreamEvent]]
) -> None:
    """Append events to a session's frame, each under the session's own stream id.

    There is one a sequence and step. To set an entry's fields takes 1.2 us, to put its bytes together and have all of
    them parsed at once 0.4; what is not tokens alone comes once in a request, and is filled in.
    """
    parts: list[bytes | bytearray] = []
    for stream_id, event in events:
        if isinstance(event, StreamTokens):
            _, token_ids, logprobs, prompt_logprobs = event
            if token_ids and logprobs is None and prompt_logprobs is None:
                parts += (_delta_head(stream_id, len(token_ids)), token_ids)
                continue
        single = generation_pb2.GenerationServiceSessionResponse()
        _fill_event(single.events.add(stream_id=stream_id), event)
        parts.append(single.SerializeToString())
    frame.MergeFromString(b"".join(parts))


def _fill_event(out: generation_pb2.GenerationEvent, event: StreamEvent) -> None:
    if isinstance(event, StreamTokens):
        fill_delta(out.delta, event)
    elif isinstance(event, StreamStarted):
        fill_started(out.started, event)
    elif isinstance(event, StreamFinished):
        fill_finished(out.finished, event)
    elif isinstance(event, StreamFailed):
        out.error.CopyFrom(to_error_proto(event.error))


# -- the executor link --------------------------------------------------------------------------------


def reported_from_proto(link_id: int, report: executor_pb2.Report) -> Reported:
    """InvalidRequestError where the columns do not fit together."""
    seq_ids, num_tokens = _column("Q", report.seq_ids), _column("I", report.num_tokens)
    computed_ids, num_computed = _column("Q", report.computed_seq_ids), _column("I", report.num_computed_tokens)
    finish = report.finish
    if (
        len(seq_ids) != len(num_tokens)
        or (finish and len(finish) != len(seq_ids))
        or 4 * sum(num_tokens) != len(report.token_ids)
        or len(computed_ids) != len(num_computed)
    ):
        raise InvalidRequestError(f"the columns of the report of step {report.step_id} differ in length")
    if finish and not _FINISH_REASONS.issuperset(finish):
        raise InvalidRequestError(f"the report of step {report.step_id} has an unknown finish reason")
    return Reported(
        link_id=link_id,
        last_batch_id=report.last_batch_id,
        seq_ids=seq_ids,
        num_tokens=num_tokens,
        token_ids=report.token_ids,
        finish=finish,
        computed_seq_ids=computed_ids,
        num_computed_tokens=num_computed,
        paused_seq_ids=_column("Q", report.paused_seq_ids),
        logprobs={lp.seq_id: (list(lp.logprobs), list(lp.prompt_logprobs)) for lp in report.logprobs},
        faults=[(fault.seq_id, fault.reason, fault.message[:MAX_FAULT_CHARS]) for fault in report.faults],
        num_steps=report.num_steps,
        step_time_us=report.step_time_us,
    )


def _column(typecode: str, data: bytes) -> array[int]:
    column = array(typecode)
    try:
        column.frombytes(data)
    except ValueError as error:
        raise InvalidRequestError("a column's length is no multiple of its entries'") from error
    if sys.byteorder == "big":
        column.byteswap()
    return column


def fill_batch(out: executor_pb2.OrderBatch, batch_id: int, orders: Iterable[Order]) -> None:
    """Orders as one batch."""
    out.batch_id = batch_id
    add = out.orders.add
    for order in orders:
        if isinstance(order, Extend):
            extend = add().extend
            extend.seq_id, extend.limit = order.seq_id, order.limit
            _fill_tables(extend.block_tables, order.block_tables)
        elif isinstance(order, Label):
            blocks = add().label.blocks
            blocks.group_idx = order.group_idx
            blocks.block_ids = pack_token_ids(order.block_ids)
            blocks.hashes = b"".join(order.hashes)
        elif isinstance(order, Prefill):
            prefill = add().prefill
            prefill.seq_id, prefill.start, prefill.end = order.seq_id, order.start, order.end
            prefill.token_ids = order.token_ids
        elif isinstance(order, Copy):
            copy = add().copy
            copy.group_idx, copy.num_tokens = order.group_idx, order.num_tokens
            copy.src_block_id, copy.dst_block_id = order.src_block_id, order.dst_block_id
        elif isinstance(order, Drop):
            add().drop.seq_id = order.seq_id
        else:
            _fill_admit(add().admit, order)


def _fill_admit(out: executor_pb2.Admit, order: Admit) -> None:
    out.seq_id = order.seq_id
    out.num_tokens = order.num_tokens
    out.num_prompt_tokens = order.num_prompt_tokens
    out.num_cached_tokens = order.num_cached_tokens
    _fill_tables(out.block_tables, order.block_tables)
    out.limit = order.limit
    out.max_total_tokens = order.max_total_tokens
    if isinstance(order.sampling, common_pb2.SamplingParams):
        out.sampling.CopyFrom(order.sampling)
    out.choice_index = order.choice_index
    out.known_token_ids = order.known_token_ids
    out.prompt_logprobs_delivered = order.prompt_logprobs_delivered
    if isinstance(order.trace, common_pb2.TraceContext):
        out.trace.CopyFrom(order.trace)


def _fill_tables(out: object, tables: BlockTables) -> None:
    for group_idx, table in enumerate(tables):
        if not table:
            continue
        entry = out.add()  # type: ignore[attr-defined]
        entry.group_idx = group_idx
        entry.block_ids = pack_token_ids(table)


def model_to_proto(model: ModelSpec) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        fingerprint=model.fingerprint,
        deterministic=model.deterministic,
        takes_grammars=model.takes_grammars,
    )
