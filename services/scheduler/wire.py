"""rorqual.v1 messages to the core's types and back."""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Iterable

from rorqual.core.blocks import BLOCK_SIZE, HASH_BYTES
from rorqual.core.errors import InvalidRequestError, PreconditionError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids, unpack_uint64
from rorqual.rpc.status import to_error_proto
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2

from .events import ExecutorSpec, GroupSpec, InventoryBlock, ModelSpec, Reported, Request
from .kv_cache import blocks_for, quota_of
from .orders import Admit, BlockTables, Copy, Drop, Extend, Label, Order, Prefill
from .policy import chunk_room
from .stream_events import StreamEvent, StreamFailed, StreamFinished, StreamStarted, StreamTokens

PROTOCOL_VERSION = 1

_FINISH_REASONS = frozenset((0, 1, 2, 4, 5))


# -- requests -----------------------------------------------------------------------------------------


def request_from_proto(
    proto: generation_pb2.GenerateRequest, *, now_s: float, trace: object = None, seed: int = 0
) -> Request:
    """A request, checked as far as no model is needed. InvalidRequestError names the field.

    `seed` is taken where the caller named none.
    """
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
    check_sampling(proto.sampling, max_tokens)
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
    )


def _largest_ids(proto: generation_pb2.GenerateRequest) -> tuple[tuple[str, int], ...]:
    largest = [("token_ids", max(unpack_token_ids(proto.token_ids)))]
    if proto.sampling.stop_token_ids:
        largest.append(("sampling.stop_token_ids", max(proto.sampling.stop_token_ids)))
    if proto.sampling.logit_bias:
        largest.append(("sampling.logit_bias", max(proto.sampling.logit_bias)))
    return tuple(largest)


def check_sampling(sampling: common_pb2.SamplingParams, max_tokens: int | None) -> None:
    """InvalidRequestError (INVALID_SAMPLING) for a value outside its range."""

    def require(ok: bool, name: str, rule: str, value: object) -> None:
        if not ok:
            raise InvalidRequestError(
                f"sampling.{name} must be {rule}, got {value}", reason="INVALID_SAMPLING", field=f"sampling.{name}"
            )

    s = sampling
    require(math.isfinite(s.temperature) and s.temperature >= 0.0, "temperature", "0 or more", s.temperature)
    require(not s.HasField("top_p") or 0.0 < s.top_p <= 1.0, "top_p", "above 0 and at most 1", s.top_p)
    require(0.0 <= s.min_p <= 1.0, "min_p", "between 0 and 1", s.min_p)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(s, name)
        require(-2.0 <= value <= 2.0, name, "between -2 and 2", value)
    require(
        not s.HasField("repetition_penalty") or (math.isfinite(s.repetition_penalty) and s.repetition_penalty > 0.0),
        "repetition_penalty",
        "above 0",
        s.repetition_penalty,
    )
    for token_id, bias in s.logit_bias.items():
        require(-100.0 <= bias <= 100.0, "logit_bias", "between -100 and 100", f"{bias} for token {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        require(getattr(s, name) <= 20, name, "0 to 20", getattr(s, name))
    if max_tokens is not None:
        require(s.min_tokens <= max_tokens, "min_tokens", f"at most max_tokens ({max_tokens})", s.min_tokens)


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


@functools.lru_cache(maxsize=1 << 15)
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


def spec_from_hello(hello: executor_pb2.Hello) -> ExecutorSpec:
    """PreconditionError or InvalidRequestError for an executor that this scheduler cannot drive."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PreconditionError(
            f"this scheduler speaks protocol version {PROTOCOL_VERSION} of the executor link, the executor "
            f"{hello.protocol_version}: run both from the same release",
            reason="PROTOCOL_VERSION_MISMATCH",
        )
    _require_hello(bool(hello.executor_id), "executor_id", "must be set")
    _require_hello(hello.rank == 0, "rank", f"must be 0, only rank 0 of a group connects; got {hello.rank}")
    _require_hello(len(hello.model.fingerprint) == HASH_BYTES, "model.fingerprint", f"must be {HASH_BYTES} bytes")
    _require_hello(hello.model.max_model_len >= 2, "model.max_model_len", "must be at least 2")
    _require_hello(hello.model.vocab_size >= 1, "model.vocab_size", "must be at least 1")
    groups = _groups(hello)
    _require_hello(hello.max_num_seqs >= 1, "max_num_seqs", "must be at least 1")
    room = chunk_room(hello.max_num_batched_tokens, hello.max_num_seqs, hello.num_draft_tokens)
    _require_hello(
        room >= BLOCK_SIZE,
        "max_num_batched_tokens",
        f"must leave {BLOCK_SIZE} tokens for a chunk beside max_num_seqs x (1 + drafts) decodes, leaves {room}",
    )
    return ExecutorSpec(
        executor_id=hello.executor_id,
        model=ModelSpec(
            name=hello.model.name,
            max_model_len=hello.model.max_model_len,
            vocab_size=hello.model.vocab_size,
            fingerprint=hello.model.fingerprint,
            deterministic=hello.model.deterministic,
            takes_grammars=hello.model.takes_grammars,
        ),
        groups=groups,
        max_num_seqs=hello.max_num_seqs,
        max_num_batched_tokens=hello.max_num_batched_tokens,
        num_draft_tokens=hello.num_draft_tokens,
        inventory=tuple(_inventory(hello.inventory)),
    )


def _require_hello(ok: bool, field: str, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"hello.{field} {rule}", field=f"hello.{field}")


def _groups(hello: executor_pb2.Hello) -> tuple[GroupSpec, ...]:
    _require_hello(len(hello.cache_groups) >= 1, "cache_groups", "must name at least one group")
    specs: list[GroupSpec] = []
    for group in hello.cache_groups:
        multiple = group.prefix_multiple or 1
        spec = GroupSpec(
            group.name, group.num_blocks, group.block_bytes, group.window, group.slots_per_sequence, multiple
        )
        if (group.window and group.slots_per_sequence) or (multiple % BLOCK_SIZE and multiple != 1):
            raise PreconditionError(
                f"cache group {group.name!r} has window {group.window}, {group.slots_per_sequence} slots a sequence and "
                f"prefix multiple {multiple}: this scheduler accounts for a window or slots, and for multiples of "
                f"{BLOCK_SIZE}",
                reason="CACHE_GROUP_UNSUPPORTED",
            )
        if group.slots_per_sequence:
            rule = f"of a group with slots is its prefix_multiple, which is a multiple of {BLOCK_SIZE}"
            _require_hello(group.block_size == multiple > 1, "cache_groups.block_size", rule)
        else:
            _require_hello(group.block_size == BLOCK_SIZE, "cache_groups.block_size", f"must be {BLOCK_SIZE}")
        least = quota_of(spec, blocks_for(hello.model.max_model_len)) if spec.is_bounded else 1
        _require_hello(group.num_blocks >= least, "cache_groups.num_blocks", f"must be at least {least}")
        specs.append(spec)
    if all(spec.is_bounded for spec in specs):
        raise PreconditionError(
            "no cache group keeps all blocks of a history: this scheduler needs one to find prefixes by",
            reason="CACHE_GROUP_UNSUPPORTED",
        )
    return tuple(specs)


def _inventory(groups: Iterable[executor_pb2.CachedBlocks]) -> Iterable[InventoryBlock]:
    for cached in groups:
        ids = unpack_token_ids(cached.block_ids)
        last_used = unpack_uint64(cached.last_used_us) if cached.last_used_us else array("Q", bytes(8 * len(ids)))
        _require_hello(
            len(cached.hashes) == HASH_BYTES * len(ids) and len(last_used) == len(ids),
            "inventory",
            "must have one hash, and one last use, a block",
        )
        for i, (block_id, used) in enumerate(zip(ids, last_used, strict=True)):
            yield InventoryBlock(cached.group_idx, block_id, cached.hashes[HASH_BYTES * i : HASH_BYTES * (i + 1)], used)


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
        faults=[(fault.seq_id, fault.reason, fault.message) for fault in report.faults],
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
