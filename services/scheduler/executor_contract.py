"""What an executor may say: its hello, and reports that fit what it was ordered to do.

The scheduler acts on nothing that is not allowed here. An executor that breaks the contract loses its link; its
sequences go on elsewhere.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from rorqual.core.blocks import BLOCK_SIZE, HASH_BYTES
from rorqual.core.errors import InvalidRequestError, PreconditionError
from rorqual.core.token_ids import unpack_token_ids, unpack_uint64
from rorqual.v1 import executor_pb2

from .events import ExecutorSpec, GroupSpec, InventoryBlock, ModelSpec, Reported
from .executor_state import ExecutorState
from .kv_cache import blocks_for, quota_of
from .policy import chunk_room
from .sequence import Sequence as History
from .sequence import State
from .stream_events import FinishReason

PROTOCOL_VERSION = 1

CONTRACT_BROKEN = "CONTRACT_BROKEN"
"""The reason of the error that ends the link of an executor whose report is not allowed."""

MAX_FAULT_CHARS = 4096
"""Of a fault's message; the rest is cut off."""

_MAX_NAME = 1024
_MAX_GROUPS = 16
_MAX_NUM_BLOCKS = 1 << 22  # in a group: 2^28 tokens; its pool takes about 40 bytes a block, and as many ns to make
_MAX_SLOTS = 64
_MAX_MODEL_LEN = 1 << 24
_MAX_VOCAB_SIZE = 1 << 24
_MAX_NUM_SEQS = 1 << 16
_MAX_NUM_BATCHED_TOKENS = 1 << 22  # a chunk of so many has 16 MiB
_MAX_NUM_DRAFT_TOKENS = 64
_MAX_LOGPROBS = 21  # the twenty likeliest, and the chosen one

_ENDS = frozenset((0, FinishReason.STOP, FinishReason.LENGTH))


# -- hello --------------------------------------------------------------------------------------------


def spec_from_hello(hello: executor_pb2.Hello) -> ExecutorSpec:
    """PreconditionError or InvalidRequestError for an executor that this scheduler cannot drive."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise PreconditionError(
            f"this scheduler speaks protocol version {PROTOCOL_VERSION} of the executor link, the executor "
            f"{hello.protocol_version}: run both from the same release",
            reason="PROTOCOL_VERSION_MISMATCH",
        )
    _require_hello(0 < len(hello.executor_id) <= _MAX_NAME, "executor_id", f"must have 1 to {_MAX_NAME} characters")
    for name, text in (
        ("model.name", hello.model.name),
        ("device.kind", hello.device.kind),
        ("device.name", hello.device.name),
    ):
        _require_hello(len(text) <= _MAX_NAME, name, f"must have at most {_MAX_NAME} characters, has {len(text)}")
    _require_hello(hello.rank == 0, "rank", f"must be 0, only rank 0 of a group connects; got {hello.rank}")
    _require_hello(len(hello.model.fingerprint) == HASH_BYTES, "model.fingerprint", f"must be {HASH_BYTES} bytes")
    for name, value, least, most in (
        ("model.max_model_len", hello.model.max_model_len, 2, _MAX_MODEL_LEN),
        ("model.vocab_size", hello.model.vocab_size, 1, _MAX_VOCAB_SIZE),
        ("max_num_seqs", hello.max_num_seqs, 1, _MAX_NUM_SEQS),
        ("max_num_batched_tokens", hello.max_num_batched_tokens, 1, _MAX_NUM_BATCHED_TOKENS),
        ("num_draft_tokens", hello.num_draft_tokens, 0, _MAX_NUM_DRAFT_TOKENS),
    ):
        _require_hello(least <= value <= most, name, f"must be {least} to {most}, got {value}")
    groups = _groups(hello)
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
        inventory=tuple(_inventory(hello.inventory, groups)),
    )


def _require_hello(ok: bool, field: str, rule: str) -> None:
    if not ok:
        raise InvalidRequestError(f"hello.{field} {rule}", field=f"hello.{field}")


def _groups(hello: executor_pb2.Hello) -> tuple[GroupSpec, ...]:
    num_groups, num_bytes = len(hello.cache_groups), 0
    _require_hello(1 <= num_groups <= _MAX_GROUPS, "cache_groups", f"must be 1 to {_MAX_GROUPS}, got {num_groups}")
    specs: list[GroupSpec] = []
    for group in hello.cache_groups:
        # Before anything is made of these numbers: pools have an entry a block.
        for name, value, most in (
            ("name", len(group.name), _MAX_NAME),
            ("num_blocks", group.num_blocks, _MAX_NUM_BLOCKS),
            ("window", group.window, _MAX_MODEL_LEN),
            ("prefix_multiple", group.prefix_multiple, _MAX_MODEL_LEN),
            ("slots_per_sequence", group.slots_per_sequence, _MAX_SLOTS),
        ):
            _require_hello(value <= most, f"cache_groups.{name}", f"must be at most {most}, got {value}")
        num_bytes += group.num_blocks * group.block_bytes
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
    memory_bytes = hello.device.memory_bytes
    _require_hello(
        not memory_bytes or num_bytes <= memory_bytes,
        "cache_groups",
        f"must fit the device: their blocks have {num_bytes} bytes, device.memory_bytes is {memory_bytes}",
    )
    if all(spec.is_bounded for spec in specs):
        raise PreconditionError(
            "no cache group keeps all blocks of a history: this scheduler needs one to find prefixes by",
            reason="CACHE_GROUP_UNSUPPORTED",
        )
    return tuple(specs)


def _inventory(inventory: Iterable[executor_pb2.CachedBlocks], groups: Sequence[GroupSpec]) -> Iterable[InventoryBlock]:
    for cached in inventory:
        _require_hello(cached.group_idx < len(groups), "inventory.group_idx", f"must be below {len(groups)}")
        num_blocks = groups[cached.group_idx].num_blocks
        _require_hello(
            len(cached.block_ids) % 4 == len(cached.last_used_us) % 8 == 0, "inventory", "must have whole entries"
        )
        ids = unpack_token_ids(cached.block_ids)
        _require_hello(
            len(ids) <= num_blocks and (not ids or max(ids) < num_blocks),
            "inventory.block_ids",
            f"must be below num_blocks ({num_blocks})",
        )
        last_used = unpack_uint64(cached.last_used_us) if cached.last_used_us else array("Q", bytes(8 * len(ids)))
        _require_hello(
            len(cached.hashes) == HASH_BYTES * len(ids) and len(last_used) == len(ids),
            "inventory",
            "must have one hash, and one last use, a block",
        )
        for i, (block_id, used) in enumerate(zip(ids, last_used, strict=True)):
            yield InventoryBlock(cached.group_idx, block_id, cached.hashes[HASH_BYTES * i : HASH_BYTES * (i + 1)], used)


# -- reports ------------------------------------------------------------------------------------------


def violation(executor: ExecutorState, report: Reported) -> str | None:
    """How `report` breaks the contract, in words; None where it does not. Nothing of it was acted upon yet.

    Sequences that are not known were cancelled while the report was under way: what is said of them is not looked at.
    """
    if report.last_batch_id > executor.num_batches:
        return f"batch {report.last_batch_id} is acknowledged, but only {executor.num_batches} were sent"
    if report.token_ids:
        vocab_size = executor.model.vocab_size
        largest = max(unpack_token_ids(report.token_ids))
        if largest >= vocab_size:
            return f"token id {largest} is reported, but the model's ids are below {vocab_size}"
    if len(report.seq_ids) > 1 and len(set(report.seq_ids)) < len(report.seq_ids):
        return "a sequence has two entries"
    get, logprobs = executor.sequences.get, report.logprobs
    faulted = {seq_id for seq_id, _, _ in report.faults}  # their tokens are dropped, and the last one may be missing
    for seq_id, num_new in zip(report.seq_ids, report.num_tokens, strict=True):
        if num_new and seq_id not in faulted and (seq := get(seq_id)) is not None:
            # The token at a position is chosen when the one before it is in the cache.
            num_tokens = seq.num_tokens + num_new
            if num_tokens > seq.limit + 1 or num_tokens > seq.granted_total:
                return (
                    f"sequence {seq_id} is said to have {num_tokens} tokens; it may write {seq.limit} positions, and end at "
                    f"{seq.granted_total}"
                )
            if seq.request.wants_logprobs or seq_id in logprobs:
                num_entries = len(logprobs[seq_id][0]) if seq_id in logprobs else 0
                if num_entries != (num_new if seq.request.wants_logprobs else 0):
                    return f"sequence {seq_id} has {num_entries} log-probabilities for {num_new} tokens"
            if seq.num_unsent > 0 and seq.state is State.RUNNING:
                return f"sequence {seq_id} is said to have generated, but only {seq.num_sent} tokens of its history were sent"
    for seq_id, num_computed in zip(report.computed_seq_ids, report.num_computed_tokens, strict=True):
        if (seq := get(seq_id)) is not None and num_computed > seq.num_sent:
            return f"{num_computed} tokens of sequence {seq_id} are said to be computed; {seq.num_sent} were sent"
    return (_bad_ends(executor, report) if report.finish else None) or _bad_logprobs(executor, report)


def _bad_ends(executor: ExecutorState, report: Reported) -> str | None:
    """Ends without a cause, as far as that can be known: only an executor knows where a grammar ends."""
    offset = 0
    for seq_id, num_new, finish in zip(report.seq_ids, report.num_tokens, report.finish, strict=True):
        start, offset = offset, offset + 4 * num_new
        if not finish or (seq := executor.sequences.get(seq_id)) is None:
            continue
        if finish not in _ENDS:
            return f"sequence {seq_id} is said to have ended with reason {finish}, which is none of an executor's"
        num_tokens = seq.num_tokens + num_new
        if finish == FinishReason.LENGTH and num_tokens < seq.granted_total:
            return (
                f"sequence {seq_id} is said to have reached its length with {num_tokens} tokens of {seq.granted_total}"
            )
        if finish == FinishReason.STOP and not seq.request.has_grammar:
            last = int.from_bytes(report.token_ids[start:offset][-4:], "little") if num_new else seq.last_token()
            num_generated = num_tokens - seq.request.num_prompt_tokens
            if last not in seq.request.stop_token_ids or num_generated <= seq.request.min_tokens:
                return f"sequence {seq_id} is said to have stopped at token {last}, which is no stop token of its request there"
    return None


def _bad_logprobs(executor: ExecutorState, report: Reported) -> str | None:
    for seq_id, (of_tokens, of_prompt) in report.logprobs.items():
        if (seq := executor.sequences.get(seq_id)) is None:
            continue
        if len(seq.prompt_logprobs) + len(of_prompt) > _num_prompt_logprobs(seq):
            return f"sequence {seq_id} has more log-probabilities than its prompt has tokens"
        for entry in (*of_tokens, *of_prompt):
            num_top = len(entry.top_logprobs)
            if num_top > _MAX_LOGPROBS or len(entry.top_token_ids) != 4 * num_top:
                return f"sequence {seq_id} has log-probabilities of {num_top} tokens with {len(entry.top_token_ids)} bytes of ids"
            if max((entry.token_id, *unpack_token_ids(entry.top_token_ids))) >= executor.model.vocab_size:
                return f"sequence {seq_id} has log-probabilities of tokens that are not in the vocabulary"
            if math.isnan(sum(entry.top_logprobs, entry.logprob)):
                return f"sequence {seq_id} has log-probabilities that are no numbers"
    return None


def _num_prompt_logprobs(seq: History) -> int:
    return seq.request.num_prompt_tokens - 1 if seq.needs_all_logits else 0
