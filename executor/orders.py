"""Order batches as the step loop takes them: read from the wire, checked for what can be checked without state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rorqual.core.blocks import HASH_BYTES
from rorqual.v1 import common_pb2, executor_pb2

from .constraint import GrammarSpec
from .errors import OrderError
from .sampler import SamplingSpec

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Admit:
    seq_id: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: Ids
    limit: int
    max_total_tokens: int
    sampling: SamplingSpec
    choice_index: int
    known_token_ids: Ids
    prompt_logprobs_delivered: bool
    trace: common_pb2.TraceContext | None


@dataclass(frozen=True, slots=True)
class Prefill:
    seq_id: int
    start: int
    end: int
    token_ids: Ids


@dataclass(frozen=True, slots=True)
class Extend:
    seq_id: int
    block_ids: Ids
    limit: int


@dataclass(frozen=True, slots=True)
class Drop:
    seq_id: int


@dataclass(frozen=True, slots=True)
class Label:
    block_ids: Ids
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    src_block_id: int
    dst_block_id: int
    num_tokens: int


Order = Admit | Prefill | Extend | Drop | Label | Copy


@dataclass(frozen=True, slots=True)
class OrderBatch:
    batch_id: int
    orders: tuple[Order, ...]


def read_batch(proto: executor_pb2.OrderBatch) -> OrderBatch:
    """Raises OrderError for an order of an unknown kind, or one whose fields contradict each other."""
    return OrderBatch(proto.batch_id, tuple(_read_order(order) for order in proto.orders))


def _read_order(proto: executor_pb2.Order) -> Order:
    match proto.WhichOneof("order"):
        case "prefill":
            prefill = proto.prefill
            token_ids = _uint32s(prefill.token_ids)
            if not prefill.start < prefill.end or token_ids.size != prefill.end - prefill.start:
                raise OrderError(
                    f"a chunk of sequence {prefill.seq_id} covers [{prefill.start}, {prefill.end}) "
                    f"and carries {token_ids.size} tokens"
                )
            return Prefill(prefill.seq_id, prefill.start, prefill.end, token_ids)
        case "extend":
            extend = proto.extend
            return Extend(extend.seq_id, _block_ids(extend.block_tables), extend.limit)
        case "admit":
            return _read_admit(proto.admit)
        case "drop":
            return Drop(proto.drop.seq_id)
        case "label":
            blocks = proto.label.blocks
            _only_group(blocks.group_idx)
            block_ids = _uint32s(blocks.block_ids)
            if len(blocks.hashes) != HASH_BYTES * block_ids.size:
                raise OrderError(f"{block_ids.size} blocks are labelled with {len(blocks.hashes)} bytes of hashes")
            hashes = tuple(blocks.hashes[i : i + HASH_BYTES] for i in range(0, len(blocks.hashes), HASH_BYTES))
            return Label(block_ids, hashes)
        case "copy":
            copy = proto.copy
            _only_group(copy.group_idx)
            return Copy(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
        case _:
            raise OrderError("an order of a kind that this executor does not know; run one version on both sides")


def _read_admit(admit: executor_pb2.Admit) -> Admit:
    known = _uint32s(admit.known_token_ids)
    if not admit.num_cached_tokens < admit.num_tokens:
        raise OrderError(
            f"sequence {admit.seq_id} has {admit.num_tokens} tokens, {admit.num_cached_tokens} of them cached: "
            "at least one must be left to compute"
        )
    if not 1 <= admit.num_prompt_tokens <= admit.num_tokens:
        raise OrderError(
            f"sequence {admit.seq_id} has {admit.num_tokens} tokens, {admit.num_prompt_tokens} of them the prompt's"
        )
    if known.size not in (0, admit.num_cached_tokens):
        raise OrderError(
            f"sequence {admit.seq_id} has {admit.num_cached_tokens} cached tokens and names {known.size} of them"
        )
    sampling = read_sampling(admit.sampling)
    if sampling.needs_history and known.size < admit.num_cached_tokens:
        raise OrderError(f"sequence {admit.seq_id} has penalties or a grammar: its cached tokens must be named")
    return Admit(
        seq_id=admit.seq_id,
        num_tokens=admit.num_tokens,
        num_prompt_tokens=admit.num_prompt_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=_block_ids(admit.block_tables),
        limit=admit.limit,
        max_total_tokens=admit.max_total_tokens,
        sampling=sampling,
        choice_index=admit.choice_index,
        known_token_ids=known,
        prompt_logprobs_delivered=admit.prompt_logprobs_delivered,
        trace=admit.trace if admit.trace.traceparent else None,
    )


def read_sampling(proto: common_pb2.SamplingParams) -> SamplingSpec:
    """The parameters with defaults where the message has none."""
    return SamplingSpec(
        temperature=proto.temperature if proto.HasField("temperature") else 1.0,
        top_p=proto.top_p if proto.HasField("top_p") else 1.0,
        top_k=proto.top_k,
        min_p=proto.min_p,
        seed=proto.seed,
        presence_penalty=proto.presence_penalty,
        frequency_penalty=proto.frequency_penalty,
        repetition_penalty=proto.repetition_penalty if proto.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(proto.logit_bias),
        stop_token_ids=tuple(proto.stop_token_ids),
        min_tokens=proto.min_tokens,
        logprobs=proto.logprobs if proto.HasField("logprobs") else None,
        prompt_logprobs=proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None,
        grammar=_read_grammar(proto.grammar) if proto.HasField("grammar") else None,
    )


def _read_grammar(proto: common_pb2.Grammar) -> GrammarSpec:
    return GrammarSpec(
        proto.text,
        proto.after_token_id if proto.HasField("after_token_id") else None,
        proto.opening_token_id if proto.HasField("opening_token_id") else None,
    )


def _block_ids(tables: Sequence[executor_pb2.BlockTable]) -> Ids:
    """The one cache group's table; empty where there is none."""
    for table in tables:
        _only_group(table.group_idx)
    return np.concatenate([_uint32s(table.block_ids) for table in tables]) if tables else np.zeros(0, np.int64)


def _only_group(group_idx: int) -> None:
    if group_idx != 0:
        raise OrderError(f"cache group {group_idx} does not exist: this model has one, number 0")


def _uint32s(data: bytes) -> Ids:
    if len(data) % 4:
        raise OrderError(f"a column of uint32 has {len(data)} bytes")
    return np.frombuffer(data, "<u4").astype(np.int64)
