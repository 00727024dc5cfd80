"""An executor without a model: its KV is an array of token ids, its next token a hash of what it reads.

`SimExecutor` is the device: it applies order batches, runs steps and makes reports, with no clock and no I/O. Keys
and values are token ids by slot, written and read through the block table; blocks that are given back are poisoned;
and the next token is a hash of the whole history *as read back*. So a wrong share, a stale label, an early reuse or
a slot that nobody wrote changes a token, and `expected_tokens` (the same hash over the true history) shows it.
What the contract forbids outright raises ContractError.

The scheduler's fuzz drives it in process and in any order; `--backend sim` runs it as a process on the real link.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual.core.token_ids import pack_token_ids, pack_uint64, unpack_token_ids
from rorqual.v1 import common_pb2, executor_pb2

from ..inventory import InventoryEntry

BLOCK_SIZE = 64
BLOCK_BYTES = 4 * BLOCK_SIZE
POISON = b"\xff" * 4
_STOP, _LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class ContractError(AssertionError):
    """An order that no scheduler may send."""


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


@dataclass
class _Sequence:
    admit: executor_pb2.Admit
    table: list[int]
    limit: int
    num_tokens: int
    num_computed: int
    stop: frozenset[int]
    last_token: int = 0
    decoding: bool = False


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
    faults: dict[int, str] = field(default_factory=dict)


class SimExecutor:
    """One device: apply(batch), step(), report(); reset() when the link is lost."""

    def __init__(self, config: SimConfig | None = None) -> None:
        self.config = config or SimConfig()
        self.room = self.config.max_num_batched_tokens - self.config.max_num_seqs * (1 + self.config.num_draft_tokens)
        self._kv = [bytearray(POISON * BLOCK_SIZE) for _ in range(self.config.num_blocks)]
        self.labels: dict[int, bytes] = {}
        self.sequences: dict[int, _Sequence] = {}
        self._users: Counter[int] = Counter()  # block id -> tables of live sequences it is in
        self._chunks: deque[executor_pb2.Prefill] = deque()
        self._unreported: deque[SimStep] = deque()
        self._distrusted: set[int] = set()  # a fault took their labels; an order on its way may still share them
        self._last_used: dict[int, int] = {}
        self._time = 0
        self._used_seq_ids: set[int] = set()
        self._last_batch_id = 0
        self._acknowledged = 0
        self._step_id = 0
        self.num_paused_steps = 0
        self.num_steps = 0
        self.num_computed_tokens = 0

    # -- the link -------------------------------------------------------------------------------------

    def hello(self) -> executor_pb2.Hello:
        """What the executor says first. Its labelled blocks are offered, least recently used ones too."""
        c = self.config
        inventory = self.inventory()
        return executor_pb2.Hello(
            protocol_version=1,
            executor_id=c.executor_id,
            device=executor_pb2.DeviceInfo(kind="cpu", name="simulated"),
            cache_groups=[
                executor_pb2.CacheGroup(
                    name="mla",
                    block_size=BLOCK_SIZE,
                    block_bytes=BLOCK_BYTES,
                    num_blocks=c.num_blocks,
                    prefix_multiple=1,
                )
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
            memory=executor_pb2.MemoryLedger(kv_cache_bytes=c.num_blocks * BLOCK_BYTES),
            inventory=[
                executor_pb2.CachedBlocks(
                    group_idx=0,
                    block_ids=pack_token_ids(entry.block_id for entry in inventory),
                    hashes=b"".join(entry.hash for entry in inventory),
                    last_used_us=pack_uint64(entry.last_used_us for entry in inventory),
                )
            ],
        )

    def inventory(self) -> list[InventoryEntry]:
        """The labelled blocks."""
        return [InventoryEntry(i, block_hash, self._last_used.get(i, 0)) for i, block_hash in self.labels.items()]

    def reset(self, *, keep_cache: bool = True) -> None:
        """The link ended: every sequence is dropped. A restarted process keeps nothing (`keep_cache=False`)."""
        for seq_id in list(self.sequences):
            self._retire(seq_id)
        self._chunks.clear()
        self._unreported.clear()
        self._used_seq_ids.clear()
        self._last_batch_id = self._acknowledged = 0
        if not keep_cache:
            self.labels.clear()
            for block in self._kv:
                block[:] = POISON * BLOCK_SIZE

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
            else:
                raise ContractError(f"unknown order {kind}")
        self._last_batch_id = batch.batch_id

    def _admit(self, admit: executor_pb2.Admit) -> None:
        if admit.seq_id in self._used_seq_ids:
            raise ContractError(f"sequence id {admit.seq_id} is used twice")
        self._used_seq_ids.add(admit.seq_id)
        if len(self.sequences) >= self.config.max_num_seqs:
            raise ContractError("more sequences than max_num_seqs")
        if len(admit.block_tables) != 1 or admit.num_cached_tokens % BLOCK_SIZE:
            raise ContractError("one cache group, cached in whole blocks")
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
        table = list(unpack_token_ids(admit.block_tables[0].block_ids))
        num_cached = admit.num_cached_tokens // BLOCK_SIZE
        for block_id in table[:num_cached]:
            if block_id not in self.labels and block_id not in self._distrusted:
                raise ContractError(f"block {block_id} is shared but has no label")
        if len(table) * BLOCK_SIZE < admit.num_tokens or admit.limit > len(table) * BLOCK_SIZE:
            raise ContractError("the table does not hold the history, or the limit passes it")
        self._time += 1
        for block_id in reversed(table[:num_cached]):
            self._users[block_id] += 1
            self._touch(block_id)
        for block_id in table[num_cached:]:
            self._hand_out(block_id)
        self.sequences[admit.seq_id] = _Sequence(
            admit,
            table,
            admit.limit,
            admit.num_tokens,
            admit.num_cached_tokens,
            frozenset(admit.sampling.stop_token_ids),
        )

    def _hand_out(self, block_id: int) -> None:
        if not 0 <= block_id < self.config.num_blocks:
            raise ContractError(f"no block {block_id}")
        if self._users[block_id]:
            raise ContractError(f"block {block_id} is handed out for writing while a sequence uses it")
        self._users[block_id] = 1
        self._distrusted.discard(block_id)
        self.labels.pop(block_id, None)
        self._kv[block_id][:] = POISON * BLOCK_SIZE

    def _queue_chunk(self, chunk: executor_pb2.Prefill) -> None:
        if chunk.seq_id not in self._used_seq_ids:
            raise ContractError(f"a chunk of sequence {chunk.seq_id}, which was never admitted")
        if len(chunk.token_ids) != 4 * (chunk.end - chunk.start):
            raise ContractError("a chunk's tokens differ from its length")
        if chunk.end - chunk.start > self.room or chunk.end <= chunk.start:
            raise ContractError(f"a chunk of {chunk.end - chunk.start} tokens; {self.room} always fit")
        seq = self.sequences.get(chunk.seq_id)
        if seq is not None:
            if chunk.start % BLOCK_SIZE or (chunk.end % BLOCK_SIZE and chunk.end != seq.admit.num_tokens):
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
        for block_id in unpack_token_ids(extend.block_tables[0].block_ids):
            self._hand_out(block_id)
            seq.table.append(block_id)
        if not seq.limit <= extend.limit <= len(seq.table) * BLOCK_SIZE:
            raise ContractError(f"limit {extend.limit} of a table of {len(seq.table)} blocks, after {seq.limit}")
        seq.limit = extend.limit

    def _label(self, blocks: executor_pb2.CachedBlocks) -> None:
        ids = unpack_token_ids(blocks.block_ids)
        if len(blocks.hashes) != 32 * len(ids):
            raise ContractError("one hash a block")
        self._time += 1
        for i in reversed(range(len(ids))):
            block_id = ids[i]
            content = self._kv[block_id]
            if any(content[at : at + 4] == POISON for at in range(0, BLOCK_BYTES, 4)):
                raise ContractError(f"block {block_id} is labelled but not all of it was written")
            self.labels[block_id] = blocks.hashes[32 * i : 32 * (i + 1)]
            self._touch(block_id)

    def _touch(self, block_id: int) -> None:
        """Later in one order means nearer the root, so that a parent is more recently used than its child."""
        self._time += 1
        self._last_used[block_id] = self._time

    def _retire(self, seq_id: int, *, poison: bool = False) -> None:
        """A sequence is gone. One that ended by itself may still have its blocks labelled; a dropped one may not."""
        seq = self.sequences.pop(seq_id)
        if self._chunks:
            self._chunks = deque(chunk for chunk in self._chunks if chunk.seq_id != seq_id)
        for block_id in reversed(seq.table):
            self._users[block_id] -= 1
            # (Distrusted ones stay as they are: an order on its way may share them still.)
            if (
                poison
                and not self._users[block_id]
                and block_id not in self.labels
                and block_id not in self._distrusted
            ):
                self._kv[block_id][:] = POISON * BLOCK_SIZE

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
                    self._write(seq, position, b"\xdd\xdd\0\0")  # a rejected draft: nobody may read it
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
        for at in range(chunk.start, chunk.end, BLOCK_SIZE):
            end = min(at + BLOCK_SIZE, chunk.end)
            self._write(seq, at, chunk.token_ids[4 * (at - chunk.start) : 4 * (end - chunk.start)])
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
        """Token ids into one block's slots, from `position` on."""
        if position + len(data) // 4 > seq.limit and seq.decoding:
            raise ContractError("a write outside the granted blocks")
        block_id = seq.table[position // BLOCK_SIZE]
        if block_id in self.labels:
            raise ContractError(f"a write into block {block_id}, which is labelled")
        at = 4 * (position % BLOCK_SIZE)
        self._kv[block_id][at : at + len(data)] = data

    def _sample(self, seq_id: int, seq: _Sequence, step: SimStep) -> None:
        sampling = seq.admit.sampling
        num_generated = seq.num_tokens - seq.admit.num_prompt_tokens
        forbidden = seq.stop if num_generated < sampling.min_tokens else frozenset[int]()
        if self.config.read_back:
            num_blocks = -(-seq.num_tokens // BLOCK_SIZE)
            history = b"".join([self._kv[b] for b in seq.table[:num_blocks]])[: 4 * seq.num_tokens]
        else:
            history = seq.num_tokens.to_bytes(4, "little")
        token = next_token(history, sampling.seed, seq.admit.choice_index, self.config.vocab_size, forbidden)
        seq.last_token = token
        seq.num_tokens += 1
        step.tokens.setdefault(seq_id, []).append(token)
        if sampling.HasField("logprobs"):
            step.wants_logprobs.add(seq_id)
        if token in seq.stop:
            step.finish[seq_id] = _STOP
        elif seq.num_tokens >= seq.admit.max_total_tokens:
            step.finish[seq_id] = _LENGTH
        if seq_id in step.finish:
            self._retire(seq_id)

    def fault(self, seq_id: int, message: str) -> None:
        """End a sequence by a numerical fault: the labels of the blocks it wrote are forgotten."""
        seq = self.sequences[seq_id]
        for block_id in seq.table[seq.admit.num_cached_tokens // BLOCK_SIZE :]:
            if self.labels.pop(block_id, None) is not None:
                self._distrusted.add(block_id)
        self._retire(seq_id)
        self._step_id += 1
        self._unreported.append(SimStep(self._step_id, self._last_batch_id, faults={seq_id: message}))

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
    faults: dict[int, str] = {}
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
        faults=[executor_pb2.SequenceFault(seq_id=i, message=text) for i, text in faults.items()],
        num_steps=len(steps),
        step_time_us=round(sum(step.duration_us for step in steps)),
    )


def _logprobs(token_id: int, salt: int) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(token_id=token_id, logprob=-1.0 - (token_id + salt) % 7, rank=1)
