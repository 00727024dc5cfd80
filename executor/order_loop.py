"""The loop of standing orders: applies them at step boundaries, and steps while there is work.

How a step is computed is a subclass's: `step_loop.StepLoop` with torch, `gpu.step_loop.GpuStepLoop` with the compiled
kernels. One plain thread owns torch, the KV memory and all that is here. Others reach it through `submit`, `reset` and
the outbox alone. It waits for no one while a sequence can run.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.v1 import common_pb2, executor_pb2

from .constraint import Constraints
from .errors import OrderError
from .faults import SequenceError, ends_the_loop
from .inbox import Inbox
from .inventory import BlockInventory, InventoryEntry
from .orders import Admit, Copy, Drop, Extend, Ids, Label, OrderBatch, Prefill, read_batch
from .reports import (
    INTERNAL,
    NUMERICAL_FAULT,
    EndedSequence,
    Fault,
    Outbox,
    StepOutput,
    StepStats,
)
from .sequences import EndedBefore, SequenceTrace
from .sequences import Sequence as Seq

_log = logging.getLogger(__name__)

T = TypeVar("T")

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


class KvCache(Protocol):
    """What the loop asks of the KV memory."""

    num_blocks: int
    storage: torch.Tensor  # [num_layers, >= num_blocks * 64, width]


class Rows(Protocol):
    """The decode set: sequences below their limit."""

    max_rows: int

    @property
    def num_rows(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    def add(self, sequence: Seq) -> None: ...

    def remove(self, sequence: Seq) -> None: ...

    def extended(self, sequence: Seq) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Sizes that hold for the life of a loop."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    deterministic: bool = False

    @property
    def chunk_budget(self) -> int:
        """Tokens of chunks a step: what is left when every sequence that may decode does."""
        return self.max_num_batched_tokens - self.max_num_seqs

    @property
    def max_chunks(self) -> int:
        """Chunks a step: more only where most of them are shorter than a block and end no history."""
        return self.max_num_batched_tokens // BLOCK_SIZE + 2 * self.max_num_seqs


@dataclass(slots=True)
class Chunk:
    """An ordered Prefill in the queue."""

    sequence: Seq
    start: int
    end: int
    token_ids: Ids
    is_early: bool = False  # ends the history of a sequence whose grammar is not compiled: it joins later
    is_again: bool = False  # computed before, early; its last row brings the first token
    ended_before: EndedBefore | None = None  # of a last chunk, once it is prepared: the history had ended

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the sequence decodes after it, or ends."""
        return self.end == self.sequence.num_tokens and not self.is_early

    @property
    def joins(self) -> bool:
        """Whether the sequence takes a row of the decode set; known once the chunk is prepared."""
        return self.is_last and self.ended_before is None

    def last_block(self) -> Chunk:
        """The chunk's tokens in the last block, to be computed again. Its edges are allowed in deterministic runs too, and
        what it writes there is what is there, to the bit."""
        start = max(self.start, (self.end - 1) // BLOCK_SIZE * BLOCK_SIZE)
        return Chunk(self.sequence, start, self.end, self.token_ids[start - self.start :], is_again=True)


class OrderLoop(abc.ABC):
    """Standing orders in, tokens out.

    What goes wrong in handling one sequence ends that sequence, with a fault that says why; the others and the loop go on.
    `_alone` is what holds to this, wherever code handles a sequence by itself: its admission, its chunk before a step, its
    joining of the decode set, and what follows for it from a step (its token, its grammar, its log-probabilities). Two
    kinds of error end more, because they are nobody's alone (`faults.ends_the_loop`): the device's end the loop, and a
    scheduler's accounts that do not add up (OrderError) the link.

    A grammar that is still being compiled delays nothing but its own sequence's first token: the KV of the whole history is
    computed and reported at once. When the grammar is ready the last block is computed again, for its last row's logits.
    """

    takes_grammars = False  # whether its steps keep to them
    launches = False  # whether `_step` returns once the device has its work

    def __init__(
        self,
        kv_cache: KvCache,
        rows: Rows,
        limits: StepLimits,
        *,
        num_threads: int = 0,
        traced: bool = False,
        monotonic_s: Callable[[], float] = time.perf_counter,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`traced`: record what spans need. `num_threads`: torch threads of the loop; 0 leaves them."""
        self._kv_cache = kv_cache
        self._rows = rows
        self._limits = limits
        self._num_threads = num_threads
        self._traced = traced
        self._monotonic_s = monotonic_s
        self._time_ns = time_ns

        self.outbox = Outbox()
        self.inventory = BlockInventory()
        self.stats: deque[StepStats] = deque()  # taken by the link with the reports
        self.ended: deque[EndedSequence] = deque()
        self.on_output: Callable[[], None] = lambda: None  # called from the loop's thread: something to report
        self.on_order_error: Callable[[OrderError], None] = lambda error: None
        self.on_crash: Callable[[BaseException], None] = lambda error: None
        self._constraints = Constraints(None, limits.vocab_size)

        self._sequences: dict[int, Seq] = {}
        self._chunks: deque[Chunk] = deque()
        self._held: list[Chunk] = []  # last blocks of sequences whose grammar is not compiled yet
        self._ready: deque[Seq] = deque()  # may decode, wait for a row
        self._step_id = 0
        self._last_batch_id = 0

        self._inbox: Inbox[OrderBatch] = Inbox()
        self._released = False  # a grammar was compiled: chunks that are held may run
        self._refusing = False  # an order error ended the link: nothing is applied before the next reset
        self._step_started_s = 0.0
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def _step(self, chunks: Sequence[Chunk]) -> None:
        """Compute these chunks and the next token of every row, or launch that."""

    def _finish_step_in_flight(self) -> bool:
        """Wait for a step that was launched and not yet looked at; False where there is none."""
        return False

    def use_constraints(self, constraints: Constraints) -> None:
        """Compile the grammars of sequences; called before `start`."""
        self._constraints = constraints
        constraints.on_ready = self._grammar_ready

    # Called from other threads.

    def _grammar_ready(self) -> None:
        self._released = True
        self._inbox.wake()

    def start(self, prepare: Callable[[], T]) -> Future[T]:
        """Run `prepare` on the loop's thread, then step. Resolves to what `prepare` returned."""
        prepared: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(prepare, prepared), name="step-loop", daemon=True)
        self._thread.start()
        return prepared

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the present step."""
        self._inbox.stop()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def receive(self, message: executor_pb2.OrderBatch) -> None:
        """`submit`, from the wire. Raises OrderError for what cannot be an order."""
        self.submit(read_batch(message))

    def submit(self, batch: OrderBatch) -> None:
        """Apply `batch` at the next step boundary, after those submitted before."""
        self._inbox.put(batch)

    def reset(self) -> Future[list[InventoryEntry]]:
        """Drop every sequence at the next boundary and forget pending orders; resolves to the labelled blocks."""
        return self._inbox.reset()

    def step_running_us(self) -> int:
        """How long the present step has run; 0 when idle."""
        started_s = self._step_started_s
        return max(round((self._monotonic_s() - started_s) * 1e6), 0) if started_s else 0

    # The loop's own thread.

    def _run(self, prepare: Callable[[], T], prepared: Future[T]) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            prepared.set_result(prepare())
        except BaseException as error:
            prepared.set_exception(error)
            return
        try:
            while not self._inbox.is_stopped:
                if not self.run_once():
                    self._inbox.wait()
        except BaseException as error:
            _log.critical("the step loop ended", exc_info=error)
            self.on_crash(error)

    @torch.inference_mode()
    def run_once(self) -> bool:
        """Apply what is pending, then step if there is work. Returns whether there was."""
        if (request := self._inbox.take_reset()) is not None:
            while self._finish_step_in_flight():
                pass
            self._drop_all()
            request.answer(self.inventory.entries())
        applied = self._apply_pending()
        if self._ready:
            self._fill_rows()
        if self._released:
            self._release_chunks()
        taken = self._take_chunks() if self._chunks else []
        chunks = self._prepared(taken) if taken else taken
        if not chunks and not self._rows.num_rows:
            if applied:
                self.on_output()
            return self._finish_step_in_flight() or bool(taken)
        acknowledges = applied and bool(chunks)  # a step with a chunk may be long: not only with what it brings
        if acknowledges and not self.launches:
            self.on_output()
        self._step(chunks)
        if acknowledges and self.launches:  # once the device works: the link's thread wants the interpreter for it
            self.on_output()
        return True

    def _drop_all(self) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, "link lost")
        self._chunks.clear()
        self._held.clear()
        self._ready.clear()
        self._last_batch_id = 0
        self._refusing = False
        self.outbox.reset()

    def _apply_pending(self) -> bool:
        applied = False
        while (batch := self._inbox.take()) is not None:
            if self._refusing:
                continue
            try:
                self._apply(batch)
                applied = True
            except OrderError as error:
                self._refusing = True
                self.on_order_error(error)
        return applied and not self._refusing

    def _apply(self, batch: OrderBatch) -> None:
        if batch.batch_id != self._last_batch_id + 1:
            raise OrderError(f"order batch {batch.batch_id} came after batch {self._last_batch_id}")
        unpaused: list[int] = []
        for order in batch.orders:
            match order:
                case Prefill():
                    self._queue_chunk(order)
                case Extend():
                    if self._extend(order):
                        unpaused.append(order.seq_id)
                case Admit():
                    self._admit(order)
                case Drop():
                    sequence = self._sequences.get(order.seq_id)
                    if sequence is not None:
                        unpaused.append(order.seq_id)
                        self._end(sequence, "dropped")
                case Label():
                    self._check_blocks(order.block_ids)
                    self.inventory.label(order.block_ids.tolist(), order.hashes, self._now_us())
                case Copy():
                    self._copy(order)
        self._last_batch_id = batch.batch_id
        self.outbox.applied(batch.batch_id, unpaused)

    def _admit(self, order: Admit) -> None:
        if order.seq_id in self._sequences:
            raise OrderError(f"sequence {order.seq_id} is admitted twice")
        self._check_blocks(order.block_ids)
        if order.num_tokens > self._limits.max_model_len or order.max_total_tokens > self._limits.max_model_len:
            raise OrderError(
                f"sequence {order.seq_id} may grow to {max(order.num_tokens, order.max_total_tokens)} tokens; "
                f"this executor takes {self._limits.max_model_len}"
            )
        self._check_limit(order.seq_id, order.limit, order.block_ids.size)
        num_shared = order.num_cached_tokens // BLOCK_SIZE
        block_ids = order.block_ids.tolist()
        self.inventory.use(block_ids[:num_shared], self._now_us())
        self.inventory.forget(block_ids[num_shared:])
        try:
            sequence = self._make_sequence(order)
        except Exception as error:
            if ends_the_loop(error):
                raise
            self.inventory.distrust(block_ids[num_shared:])
            self._report_fault(order.seq_id, error)
            return
        self._sequences[order.seq_id] = sequence
        if self._traced and order.trace is not None:
            sequence.trace = SequenceTrace(order.trace, self._time_ns())

    def _make_sequence(self, order: Admit) -> Seq:
        constraint = None
        if order.sampling.grammar is not None:
            constraint = self._constraints.begin(
                order.sampling.grammar, order.sampling.stop_token_ids, order.sampling.min_tokens
            )
        try:
            return Seq(order, self._limits.vocab_size, constraint)
        except BaseException:
            if constraint is not None:
                constraint.cancel()
            raise

    def _queue_chunk(self, order: Prefill) -> None:
        sequence = self._sequences.get(order.seq_id)
        if sequence is None:
            return
        if order.start != sequence.num_queued or order.end > sequence.num_tokens:
            raise OrderError(
                f"a chunk of sequence {order.seq_id} covers [{order.start}, {order.end}) of {sequence.num_tokens} "
                f"tokens, of which {sequence.num_queued} were computed or ordered before"
            )
        if order.end > sequence.limit:
            raise OrderError(f"a chunk of sequence {order.seq_id} ends at {order.end}, past its limit {sequence.limit}")
        if order.end - order.start > self._limits.chunk_budget:
            raise OrderError(
                f"a chunk of sequence {order.seq_id} has {order.end - order.start} tokens; "
                f"a step has room for {self._limits.chunk_budget} beside its decodes"
            )
        if self._limits.deterministic and not _has_fixed_edges(order, sequence.num_prompt_tokens):
            raise OrderError(
                f"a chunk of sequence {order.seq_id} covers [{order.start}, {order.end}) of a prompt of "
                f"{sequence.num_prompt_tokens}: a deterministic executor needs edges at multiples of {BLOCK_SIZE}"
            )
        sequence.num_queued = order.end
        self._chunks.append(Chunk(sequence, order.start, order.end, order.token_ids))

    def _extend(self, order: Extend) -> bool:
        """Whether it set a paused sequence free."""
        self._check_blocks(order.block_ids)
        self.inventory.forget(order.block_ids.tolist())
        sequence = self._sequences.get(order.seq_id)
        if sequence is None:
            return False
        sequence.append_blocks(order.block_ids)
        sequence.limit = max(sequence.limit, order.limit)
        self._check_limit(sequence.seq_id, sequence.limit, sequence.num_blocks)
        if sequence.row >= 0:
            self._rows.extended(sequence)
            return False
        if sequence.is_paused and sequence.has_room:
            sequence.is_paused = False
            self._ready.append(sequence)
            return True
        return False

    def _copy(self, order: Copy) -> None:
        self._check_blocks(np.array([order.src_block_id, order.dst_block_id], np.int64))
        if order.num_tokens > BLOCK_SIZE:
            raise OrderError(f"a copy of {order.num_tokens} tokens, of a block of {BLOCK_SIZE}")
        self.inventory.forget((order.dst_block_id,))
        src, dst, n = order.src_block_id * BLOCK_SIZE, order.dst_block_id * BLOCK_SIZE, order.num_tokens
        self._kv_cache.storage[:, dst : dst + n] = self._kv_cache.storage[:, src : src + n]

    def _check_blocks(self, block_ids: Ids) -> None:
        if block_ids.size and int(block_ids.max()) >= self._kv_cache.num_blocks:
            raise OrderError(
                f"block {int(block_ids.max())} does not exist: the cache has {self._kv_cache.num_blocks} blocks"
            )

    def _check_limit(self, seq_id: int, limit: int, num_blocks: int) -> None:
        if limit > num_blocks * BLOCK_SIZE:
            raise OrderError(f"sequence {seq_id} may write up to {limit} and holds {num_blocks} blocks")

    def _now_us(self) -> int:
        return round(self._monotonic_s() * 1e6)

    def _end(self, sequence: Seq, finish: str) -> None:
        """The sequence is over, whatever the reason: nothing of it runs from here on."""
        if sequence.row >= 0:
            self._rows.remove(sequence)
        sequence.is_live = False
        sequence.pending = None
        if sequence.constraint is not None:
            sequence.constraint.cancel()
        del self._sequences[sequence.seq_id]
        self.inventory.use(sequence.block_ids, self._now_us())
        if sequence.trace is not None:
            sequence.trace.last_step_id = self._step_id
            sequence.trace.events.append(("finish", self._time_ns(), {"step_id": self._step_id}))
            self.ended.append(
                EndedSequence(
                    seq_id=sequence.seq_id,
                    trace=sequence.trace,
                    end_ns=self._time_ns(),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    num_cached_tokens=sequence.admit.num_cached_tokens,
                    num_generated_tokens=sequence.num_tokens - sequence.admit.num_tokens,
                    finish=finish,
                )
            )

    def _fill_rows(self) -> None:
        """Sequences that were set free take rows, in the order in which they were."""
        while self._ready and not self._rows.is_full:
            sequence = self._ready.popleft()
            if sequence.is_live:
                self._join(sequence)

    def _join(self, sequence: Seq) -> bool:
        """`sequence` takes the next row. Whether it has; otherwise it has ended."""
        with self._alone(sequence):
            self._rows.add(sequence)
        return sequence.is_live

    def _take_chunks(self) -> list[Chunk]:
        """From the head of the queue what fits this step."""
        taken: list[Chunk] = []
        budget = self._limits.chunk_budget
        free_rows = self._rows.max_rows - self._rows.num_rows - len(self._ready)
        while self._chunks and len(taken) < self._limits.max_chunks:
            chunk = self._chunks[0]
            if not chunk.sequence.is_live:
                self._chunks.popleft()
                continue
            constraint = chunk.sequence.constraint
            is_early = chunk.is_last and constraint is not None and not constraint.is_ready
            takes_row = chunk.is_last and not is_early
            if chunk.num_tokens > budget or (takes_row and free_rows <= 0):
                break
            self._chunks.popleft()
            if is_early:
                self._held.append(chunk.last_block())
                chunk.is_early = True
            taken.append(chunk)
            budget -= chunk.num_tokens
            free_rows -= takes_row
        return taken

    def _release_chunks(self) -> None:
        """Sequences whose grammar has been compiled, or cannot be, may join: their last blocks run next."""
        self._released = False
        held, self._held = self._held, []
        ready: list[Chunk] = []
        for chunk in held:
            if chunk.sequence.is_live:
                is_ready = chunk.sequence.constraint is None or chunk.sequence.constraint.is_ready
                (ready if is_ready else self._held).append(chunk)
        self._chunks.extendleft(reversed(ready))

    def _prepared(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that can run: their tokens are seen by what penalties and grammars count, and of a last one it is
        known whether its sequence joins the decode set."""
        prepared: list[Chunk] = []
        for chunk in chunks:
            if chunk.sequence.is_live:  # not ended by a chunk before
                with self._alone(chunk.sequence):
                    self._prepare(chunk)
                    prepared.append(chunk)
        return prepared

    def _prepare(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if not chunk.is_again:
            largest = int(chunk.token_ids.max())
            if largest >= self._limits.vocab_size:
                raise SequenceError(f"its history holds token {largest}, of a vocabulary of {self._limits.vocab_size}")
            sequence.observe(chunk.token_ids, chunk.start)
        if not chunk.is_last:
            return
        sequence.last_token = int(chunk.token_ids[-1])
        chunk.ended_before = sequence.ended_before
        if sequence.constraint is not None and sequence.constraint.error:
            raise SequenceError(sequence.constraint.error, reason=sequence.constraint.reason)

    def _finish(self, sequence: Seq, reason: common_pb2.FinishReason, output: StepOutput) -> None:
        output.finish[sequence.seq_id] = reason
        self._end(sequence, "stop" if reason == STOP else "length")

    @contextmanager
    def _alone(self, sequence: Seq) -> Iterator[None]:
        """What is done here is for this sequence alone: an error in it ends the sequence, and is not raised."""
        try:
            yield
        except Exception as error:
            if ends_the_loop(error):
                raise
            if sequence.is_live:
                self._fault(sequence, error)

    def _unsound(self, sequence: Seq, position: int) -> None:
        """The logits after `position` let nothing be chosen: the model's fault, or the grammar allows nothing."""
        message = f"the logits after position {position} are not finite (NaN or infinity) at step {self._step_id}"
        self._fault(sequence, SequenceError(message, reason=NUMERICAL_FAULT))

    def _fault(self, sequence: Seq, error: Exception) -> None:
        """The sequence ends by what went wrong with it; labels that its blocks had, or get, are not to be trusted."""
        constraint = sequence.constraint
        if constraint is not None and constraint.error:
            error = SequenceError(constraint.error, reason=constraint.reason)
        self._end(sequence, "error")
        self.inventory.distrust(sequence.block_ids[sequence.admit.num_cached_tokens // BLOCK_SIZE :])
        self._report_fault(sequence.seq_id, error)

    def _report_fault(self, seq_id: int, error: Exception) -> None:
        if isinstance(error, SequenceError):
            _log.error("sequence %d: %s", seq_id, error)
            fault = Fault(seq_id, error.reason, str(error))
        else:
            _log.error("sequence %d ended: the executor failed in handling it", seq_id, exc_info=error)
            fault = Fault(
                seq_id, INTERNAL, f"the executor failed in handling the sequence: {type(error).__name__}: {error}"
            )
        self.outbox.add_fault(fault)
        self.on_output()

    def _note_computed(self, chunk: Chunk, output: StepOutput) -> None:
        if chunk.is_again:
            return  # it was reported before
        output.computed[chunk.sequence.seq_id] = chunk.end
        if chunk.sequence.trace is not None:
            self._trace_chunk(chunk.sequence.trace, chunk)

    def _trace_chunk(self, trace: SequenceTrace, chunk: Chunk) -> None:
        trace.num_chunks += 1
        trace.first_step_id = trace.first_step_id or self._step_id
        trace.events.append(
            ("prefill_chunk", self._time_ns(), {"start": chunk.start, "end": chunk.end, "step_id": self._step_id})
        )


def _has_fixed_edges(order: Prefill, num_prompt_tokens: int) -> bool:
    """Whether a chunk's edges inside the prompt are at multiples of a block, so that they are the same in any run."""
    return (order.start % BLOCK_SIZE == 0 or order.start >= num_prompt_tokens) and (
        order.end % BLOCK_SIZE == 0 or order.end >= num_prompt_tokens
    )
