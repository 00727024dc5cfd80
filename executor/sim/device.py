"""An executor without a model: its KV is an array of token ids, its next token a hash of what it reads.

`SimExecutor` is the device: it applies order batches, runs steps and makes reports, with no clock and no I/O. Keys
and values are token ids by slot, written and read through the block table; blocks that are given back are poisoned;
and the next token is a hash of the whole history *as read back*. So a wrong share, a stale label, an early reuse or
a slot that nobody wrote changes a token, and `expected_tokens` (the same hash over the true history) shows it.
What the contract forbids outright raises ContractError. Further cache groups (`more_groups`: windows, states) hold the
same history in their own ways, and a token differs where one of them disagrees with the first.

The scheduler's fuzz drives it in process and in any order; `--backend sim` runs it as a process on the real link.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.token_ids import pack_token_ids, pack_uint64, unpack_token_ids
from rorqual.v1 import common_pb2, executor_pb2

from ..inventory import InventoryEntry
from .memory import ContractError, GroupMemory, SimGroup, Table

_STOP, _LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
_NOTHING: frozenset[int] = frozenset()


def next_token(history: bytes, seed: int, choice_index: int, vocab_size: int, forbidden: frozenset[int]) -> int:
    """The token after `history` (little-endian uint32): a hash of all of it, and of nothing else of the request."""
    digest = hashlib.blake2b(
        history, digest_size=8, salt=seed.to_bytes(8, "little"), person=bytes([choice_index & 255])
    )
    token = int.from_bytes(digest.digest(), "little") % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


def expected_tokens(
    token_ids: bytes,
    num_prompt_tokens: int,
    max_total_tokens: int,
    sampling: common_pb2.SamplingParams,
    *,
    choice_index: int = 0,
    vocab_size: int = 8192,
) -> tuple[list[int], int]:
    """What a request yields when it runs alone and undisturbed: the tokens after `token_ids`, and the FinishReason."""
    history, generated = bytearray(token_ids), []
    stop = frozenset(sampling.stop_token_ids)
    while len(history) // 4 < max_total_tokens:
        num_generated = len(history) // 4 - num_prompt_tokens
        forbidden = stop if num_generated < sampling.min_tokens else frozenset[int]()
        token = next_token(bytes(history), sampling.seed, choice_index, vocab_size, forbidden)
        history += token.to_bytes(4, "little")
        generated.append(token)
        if token in stop:
            return generated, _STOP
    return generated, _LENGTH


@dataclass(kw_only=True)
class SimConfig:
    """What the simulated executor says of itself, and how it behaves."""

    executor_id: str = "sim-0"
    num_blocks: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_draft_tokens: int = 0
    max_model_len: int = 65536
    vocab_size: int = 8192
    fingerprint: bytes = b"sim".ljust(32, b"\0")
    deterministic: bool = False
    takes_grammars: bool = False
    model_name: str = "sim"
    step_us: float = 1000.0  # how long a step takes, and
    chunk_token_us: float = 0.0  # what each token of a chunk adds
    read_back: bool = True  # False: the next token ignores the history, for load tests with long ones
    more_groups: tuple[SimGroup, ...] = ()  # cache groups beside the first, which keeps all blocks


class _Sequence:
    """An admitted history. What each step asks of the order is read once: a field of a message costs a microsecond."""

    __slots__ = (
        "admit",
        "choice_index",
        "decoding",
        "last_token",
        "limit",
        "max_total_tokens",
        "min_total_tokens",
        "num_computed",
        "num_tokens",
        "seed",
        "stop",
        "tables",
        "wants_logprobs",
    )

    def __init__(self, admit: executor_pb2.Admit, tables: list[Table]) -> None:
        sampling = admit.sampling
        self.admit = admit
        self.tables = tables  # one a cache group
        self.limit = admit.limit
        self.num_tokens = admit.num_tokens
        self.num_computed = admit.num_cached_tokens
        self.last_token = 0
        self.decoding = False
        self.seed, self.choice_index = sampling.seed, admit.choice_index
        self.stop = frozenset(sampling.stop_token_ids)
        self.min_total_tokens = admit.num_prompt_tokens + sampling.min_tokens
        self.max_total_tokens = admit.max_total_tokens
        self.wants_logprobs = sampling.HasField("logprobs")


@dataclass
class SimStep:
    """What one step brought."""

    step_id: int
    last_batch_id: int
    duration_us: float = 0.0
    num_chunk_tokens: int = 0
    num_rows: int = 0  # that decoded
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    paused: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[common_pb2.TokenLogprobs]] = field(default_factory=dict)
    wants_logprobs: set[int] = field(default_factory=set)
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)  # reason, message


class SimExecutor:
    """One device: apply(batch), step(), report(); reset() when the link is lost."""

    def __init__(self, config: SimConfig | None = None) -> None:
        self.config = config or SimConfig()
        self.room = self.config.max_num_batched_tokens - self.config.max_num_seqs * (1 + self.config.num_draft_tokens)
        first = SimGroup(name="mla", num_blocks=self.config.num_blocks)
        self.memory = [GroupMemory(group) for group in (first, *self.config.more_groups)]
        self.sequences: dict[int, _Sequence] = {}
        self._chunks: deque[executor_pb2.Prefill] = deque()
        self._unreported: deque[SimStep] = deque()
        self._used_seq_ids: set[int] = set()
        self._last_batch_id = 0
        self._acknowledged = 0
        self._step_id = 0
        self.num_paused_steps = 0
        self.num_steps = 0
        self.num_computed_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the smallest group that keeps all."""
        return min(memory.group.num_blocks for memory in self.memory if memory.group.keeps_all)

    # -- the link -------------------------------------------------------------------------------------

    def hello(self) -> executor_pb2.Hello:
        """What the executor says first. Its labelled blocks are offered, least recently used ones too."""
        c = self.config
        groups = [memory.group for memory in self.memory]
        return executor_pb2.Hello(
            protocol_version=1,
            executor_id=c.executor_id,
            device=executor_pb2.DeviceInfo(kind="cpu", name="simulated"),
            cache_groups=[
                executor_pb2.CacheGroup(
                    name=group.name,
                    block_size=group.entry_tokens,
                    block_bytes=group.block_bytes,
                    num_blocks=group.num_blocks,
                    window=group.window,
                    prefix_multiple=group.prefix_multiple,
                    slots_per_sequence=group.slots_per_sequence,
                )
                for group in groups
            ],
            model=common_pb2.ModelInfo(
                name=c.model_name,
                max_model_len=c.max_model_len,
                vocab_size=c.vocab_size,
                fingerprint=c.fingerprint,
                deterministic=c.deterministic,
                takes_grammars=c.takes_grammars,
            ),
            max_num_seqs=c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            num_draft_tokens=c.num_draft_tokens,
            group_size=1,
            memory=executor_pb2.MemoryLedger(kv_cache_bytes=sum(g.num_blocks * g.block_bytes for g in groups)),
            inventory=[_cached_blocks(i, list(memory.inventory())) for i, memory in enumerate(self.memory)],
        )

    def inventory(self) -> list[InventoryEntry]:
        """The labelled blocks of the first group."""
        return list(self.memory[0].inventory())

    def reset(self, *, keep_cache: bool = True) -> None:
        """The link ended: every sequence is dropped. A restarted process keeps nothing (`keep_cache=False`)."""
        for seq_id in list(self.sequences):
            self._retire(seq_id)
        self._chunks.clear()
        self._unreported.clear()
        self._used_seq_ids.clear()
        self._last_batch_id = self._acknowledged = 0
        if not keep_cache:
            for memory in self.memory:
                memory.forget_all()

    def apply(self, batch: executor_pb2.OrderBatch) -> None:
        """Apply a batch whole, at a step boundary."""
        if batch.batch_id == 0:
            if batch.orders:
                raise ContractError("a batch without a number has orders")
            return
        if batch.batch_id != self._last_batch_id + 1:
            raise ContractError(f"batch {batch.batch_id} came after {self._last_batch_id}")
        for order in batch.orders:
            kind = order.WhichOneof("order")
            if kind == "admit":
                self._admit(order.admit)
            elif kind == "prefill":
                self._queue_chunk(order.prefill)
            elif kind == "extend":
                self._extend(order.extend)
            elif kind == "drop":
                if order.drop.seq_id in self.sequences:
                    self._retire(order.drop.seq_id, poison=True)
            elif kind == "label":
                self._label(order.label.blocks)
            elif kind == "copy":
                copy = order.copy
                self.memory[copy.group_idx].copy(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
            else:
                raise ContractError(f"unknown order {kind}")
        self._last_batch_id = batch.batch_id

    def _admit(self, admit: executor_pb2.Admit) -> None:
        if admit.seq_id in self._used_seq_ids:
            raise ContractError(f"sequence id {admit.seq_id} is used twice")
        self._used_seq_ids.add(admit.seq_id)
        if len(self.sequences) >= self.config.max_num_seqs:
            raise ContractError("more sequences than max_num_seqs")
        if not admit.num_cached_tokens < admit.num_tokens < admit.max_total_tokens:
            raise ContractError(
                f"cached {admit.num_cached_tokens} < {admit.num_tokens} < {admit.max_total_tokens} is false"
            )
        if admit.max_total_tokens > self.config.max_model_len:
            raise ContractError(f"a sequence of up to {admit.max_total_tokens} tokens")
        if admit.sampling.HasField("grammar") and not self.config.takes_grammars:
            raise ContractError("a sequence with a grammar")
        if not admit.sampling.HasField("seed"):
            raise ContractError("a sequence without a seed")
        ids = self._by_group(admit.block_tables)
        num_copied = admit.num_cached_tokens % BLOCK_SIZE  # by the orders that follow
        if num_copied and (self.config.deterministic or admit.num_cached_tokens != admit.num_tokens - 1):
            raise ContractError(f"{admit.num_cached_tokens} tokens are cached, which is no block's edge")
        num_shared = admit.num_cached_tokens - num_copied
        tables = [m.admit(admit.seq_id, ids[i], num_shared) for i, m in enumerate(self.memory)]
        if self.memory[0].num_covered(tables[0]) < admit.num_tokens:
            raise ContractError("the table does not hold the history")
        self._check_limit(tables, admit.limit)
        self.sequences[admit.seq_id] = _Sequence(admit, tables)

    def _by_group(self, block_tables: Iterable[executor_pb2.BlockTable]) -> dict[int, list[int]]:
        ids: dict[int, list[int]] = {i: [] for i in range(len(self.memory))}
        for table in block_tables:
            ids[table.group_idx].extend(unpack_token_ids(table.block_ids))
        return ids

    def _check_limit(self, tables: list[Table], limit: int) -> None:
        """A sequence that decodes up to `limit` has a block for every position, and an entry for every snapshot."""
        for memory, table in zip(self.memory, tables, strict=True):
            span = memory.group.entry_tokens
            if memory.num_covered(table) < (limit // span * span if memory.group.slots_per_sequence else limit):
                raise ContractError(f"{memory.group.name}: limit {limit} passes the table")

    def _queue_chunk(self, chunk: executor_pb2.Prefill) -> None:
        if chunk.seq_id not in self._used_seq_ids:
            raise ContractError(f"a chunk of sequence {chunk.seq_id}, which was never admitted")
        if len(chunk.token_ids) != 4 * (chunk.end - chunk.start):
            raise ContractError("a chunk's tokens differ from its length")
        if chunk.end - chunk.start > self.room or chunk.end <= chunk.start:
            raise ContractError(f"a chunk of {chunk.end - chunk.start} tokens; {self.room} always fit")
        seq = self.sequences.get(chunk.seq_id)
        if seq is not None:
            starts_at_edge = chunk.start % BLOCK_SIZE == 0 or chunk.start == seq.admit.num_cached_tokens
            if not starts_at_edge or (chunk.end % BLOCK_SIZE and chunk.end != seq.admit.num_tokens):
                raise ContractError(f"chunk [{chunk.start}, {chunk.end}) has an edge inside a block")
            if chunk.end > seq.admit.num_tokens:
                raise ContractError("a chunk beyond the history")
            self._chunks.append(chunk)

    def _extend(self, extend: executor_pb2.Extend) -> None:
        if extend.seq_id not in self._used_seq_ids:
            raise ContractError(f"an extension of sequence {extend.seq_id}, which was never admitted")
        seq = self.sequences.get(extend.seq_id)
        if seq is None:
            return
        for group_idx, ids in self._by_group(extend.block_tables).items():
            self.memory[group_idx].extend(seq.tables[group_idx], ids)
        if extend.limit < seq.limit:
            raise ContractError(f"limit {extend.limit} after {seq.limit}")
        self._check_limit(seq.tables, extend.limit)
        seq.limit = extend.limit

    def _label(self, blocks: executor_pb2.CachedBlocks) -> None:
        ids = list(unpack_token_ids(blocks.block_ids))
        if len(blocks.hashes) != 32 * len(ids):
            raise ContractError("one hash a block")
        self.memory[blocks.group_idx].label(ids, [blocks.hashes[32 * i : 32 * (i + 1)] for i in range(len(ids))])

    def _retire(self, seq_id: int, *, poison: bool = False) -> None:
        """A sequence is gone."""
        seq = self.sequences.pop(seq_id)
        if self._chunks:
            self._chunks = deque(chunk for chunk in self._chunks if chunk.seq_id != seq_id)
        for memory, table in zip(self.memory, seq.tables, strict=True):
            memory.retire(table, poison=poison)

    # -- steps ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._chunks) or any(
            seq.decoding and seq.num_tokens <= seq.limit for seq in self.sequences.values()
        )

    @property
    def num_paused(self) -> int:
        """Sequences that stand at their limit."""
        return sum(seq.decoding and seq.num_tokens > seq.limit for seq in self.sequences.values())

    @property
    def last_batch_id(self) -> int:
        """The last batch applied."""
        return self._last_batch_id

    @property
    def has_report(self) -> bool:
        return bool(self._unreported) or self._last_batch_id > self._acknowledged

    def step(self) -> SimStep:
        """One step: every decoding sequence one token (and what its drafts bring), then chunks that fit."""
        self._step_id += 1
        self.num_steps += 1
        step = SimStep(self._step_id, self._last_batch_id)
        decoding = [(seq_id, seq) for seq_id, seq in self.sequences.items() if seq.decoding]
        per_sequence = 1 + self.config.num_draft_tokens
        budget = self.config.max_num_batched_tokens - per_sequence * len(decoding)
        for seq_id, seq in decoding:
            if seq.num_tokens > seq.limit:
                step.paused.append(seq_id)
                self.num_paused_steps += 1
                continue
            step.num_rows += 1
            num_accepted = (seq.last_token + seq.num_tokens) % per_sequence
            for _ in range(1 + num_accepted):
                if seq_id not in self.sequences or seq.num_tokens > seq.limit:
                    break
                self._write(seq, seq.num_tokens - 1, seq.last_token.to_bytes(4, "little"))
                self._sample(seq_id, seq, step)
            if seq_id in self.sequences:
                for position in range(seq.num_tokens, min(seq.limit, seq.num_tokens + per_sequence - 1 - num_accepted)):
                    for memory, table in zip(self.memory, seq.tables, strict=True):
                        memory.scribble(table, position)
        while self._chunks and self._chunks[0].end - self._chunks[0].start <= budget:
            chunk = self._chunks.popleft()
            budget -= chunk.end - chunk.start
            step.num_chunk_tokens += chunk.end - chunk.start
            self._run_chunk(chunk, step)
        step.duration_us = self.config.step_us + self.config.chunk_token_us * step.num_chunk_tokens
        self._unreported.append(step)
        return step

    def _run_chunk(self, chunk: executor_pb2.Prefill, step: SimStep) -> None:
        seq = self.sequences[chunk.seq_id]
        if chunk.start != seq.num_computed:
            raise ContractError(f"chunk [{chunk.start}, {chunk.end}) but {seq.num_computed} tokens are computed")
        self._write(seq, chunk.start, chunk.token_ids)
        seq.num_computed = chunk.end
        self.num_computed_tokens += chunk.end - chunk.start
        step.computed[chunk.seq_id] = chunk.end
        admit = seq.admit
        if admit.sampling.HasField("prompt_logprobs") and not admit.prompt_logprobs_delivered:
            ids = unpack_token_ids(chunk.token_ids)
            step.prompt_logprobs.setdefault(chunk.seq_id, []).extend(
                _logprobs(ids[p - chunk.start], p)
                for p in range(max(1, chunk.start), min(chunk.end, admit.num_prompt_tokens))
            )
        if chunk.end == admit.num_tokens:
            seq.decoding = True
            self._sample(chunk.seq_id, seq, step)

    def _write(self, seq: _Sequence, position: int, data: bytes) -> None:
        """Token ids into the blocks of every group, from `position` on."""
        end = position + len(data) // 4
        if end > seq.limit and seq.decoding:
            raise ContractError("a write outside the granted blocks")
        for memory, table in zip(self.memory, seq.tables, strict=True):
            memory.write(table, position, data)
            memory.move_on(table, end)

    def _sample(self, seq_id: int, seq: _Sequence, step: SimStep) -> None:
        forbidden = seq.stop if seq.num_tokens < seq.min_total_tokens else _NOTHING
        if self.config.read_back:
            history = self.memory[0].read(seq.tables[0], seq.num_tokens)
            for memory, table in zip(self.memory[1:], seq.tables[1:], strict=True):
                if not memory.agrees(table, history):
                    history = b"!"  # what is read is not one history
                    break
        else:
            history = seq.num_tokens.to_bytes(4, "little")
        token = next_token(history, seq.seed, seq.choice_index, self.config.vocab_size, forbidden)
        seq.last_token = token
        seq.num_tokens += 1
        step.tokens.setdefault(seq_id, []).append(token)
        if seq.wants_logprobs:
            step.wants_logprobs.add(seq_id)
        if token in seq.stop:
            step.finish[seq_id] = _STOP
        elif seq.num_tokens >= seq.max_total_tokens:
            step.finish[seq_id] = _LENGTH
        if seq_id in step.finish:
            self._retire(seq_id)

    def fault(self, seq_id: int, message: str, reason: str = "") -> None:
        """End a sequence by a fault (a numerical one unless `reason` says): its blocks' labels are forgotten."""
        seq = self.sequences[seq_id]
        for memory, table in zip(self.memory, seq.tables, strict=True):
            memory.distrust(table)
        self._retire(seq_id)
        self._step_id += 1
        self._unreported.append(SimStep(self._step_id, self._last_batch_id, faults={seq_id: (reason, message)}))

    # -- reports --------------------------------------------------------------------------------------

    def report(self, max_steps: int | None = None) -> executor_pb2.Report | None:
        """What the oldest unreported steps brought, as one report; an acknowledgement; or None: nothing is new."""
        num_steps = len(self._unreported) if max_steps is None else min(max_steps, len(self._unreported))
        steps = [self.take_step() for _ in range(num_steps)]
        if not steps:
            if self._last_batch_id <= self._acknowledged:
                return None
            self._acknowledged = self._last_batch_id
            return executor_pb2.Report(step_id=self._step_id, last_batch_id=self._last_batch_id)
        return make_report(steps)

    def take_step(self) -> SimStep:
        """The oldest unreported step: whoever takes it reports it."""
        step = self._unreported.popleft()
        self._acknowledged = max(self._acknowledged, step.last_batch_id)
        return step


def make_report(steps: Sequence[SimStep]) -> executor_pb2.Report:
    """What these steps brought, in one report; at least one step."""
    tokens: dict[int, list[int]] = {}
    finish: dict[int, int] = {}
    computed: dict[int, int] = {}
    paused: list[int] = []
    prompt_logprobs: dict[int, list[common_pb2.TokenLogprobs]] = {}
    wants: set[int] = set()
    faults: dict[int, tuple[str, str]] = {}
    for step in steps:
        for seq_id, new in step.tokens.items():
            tokens.setdefault(seq_id, []).extend(new)
        finish.update(step.finish)
        computed.update(step.computed)
        paused += step.paused
        wants |= step.wants_logprobs
        faults.update(step.faults)
        for seq_id, entries in step.prompt_logprobs.items():
            prompt_logprobs.setdefault(seq_id, []).extend(entries)
    return executor_pb2.Report(
        step_id=steps[-1].step_id,
        last_batch_id=steps[-1].last_batch_id,
        seq_ids=pack_uint64(tokens),
        num_tokens=pack_token_ids(len(new) for new in tokens.values()),
        token_ids=pack_token_ids(token for new in tokens.values() for token in new),
        finish=bytes(finish.get(seq_id, 0) for seq_id in tokens) if finish else b"",
        computed_seq_ids=pack_uint64(computed),
        num_computed_tokens=pack_token_ids(computed.values()),
        paused_seq_ids=pack_uint64(paused),
        logprobs=[
            executor_pb2.SequenceLogprobs(
                seq_id=seq_id,
                logprobs=[_logprobs(t, i) for i, t in enumerate(tokens[seq_id])] if seq_id in wants else [],
                prompt_logprobs=prompt_logprobs.get(seq_id, []),
            )
            for seq_id in sorted(wants | prompt_logprobs.keys())
        ],
        faults=[
            executor_pb2.SequenceFault(seq_id=i, message=text, reason=reason) for i, (reason, text) in faults.items()
        ],
        num_steps=len(steps),
        step_time_us=round(sum(step.duration_us for step in steps)),
    )


def _cached_blocks(group_idx: int, entries: list[InventoryEntry]) -> executor_pb2.CachedBlocks:
    return executor_pb2.CachedBlocks(
        group_idx=group_idx,
        block_ids=pack_token_ids(entry.block_id for entry in entries),
        hashes=b"".join(entry.hash for entry in entries),
        last_used_us=pack_uint64(entry.last_used_us for entry in entries),
    )


def _logprobs(token_id: int, salt: int) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(token_id=token_id, logprob=-1.0 - (token_id + salt) % 7, rank=1)
