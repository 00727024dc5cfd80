"""An executor on virtual time: it follows orders as a real one does, and says how long each step takes.

It computes nothing: a sequence's next token is the next one of the answer that its Admit carries as `sampling`. Orders
are applied at step boundaries; a decode row stands still at its limit; chunks run whole and in the order sent.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.events import ExecutorSpec, GroupSpec, ModelSpec, Reported
from services.scheduler.orders import Admit, Drop, Extend, Order, Prefill
from services.scheduler.stream_events import FinishReason

DEFAULT_MODEL = Path(__file__).with_name("h200-v2lite.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The time of a step from what it holds; milliseconds. See the JSON file for where the figures are from."""

    decode_ms: tuple[tuple[int, float], ...]  # (rows, ms) at `decode_context` tokens a row
    decode_context: int
    decode_ns_per_context_token: float
    prefill_base_ms: float
    prefill_us_per_token: float
    prefill_ns_per_pair: float
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def load(cls, path: Path = DEFAULT_MODEL) -> StepModel:
        data = json.loads(path.read_text(encoding="utf-8"))
        fields = {**data, **data["coefficients"]}
        fields["decode_ms"] = tuple((rows, ms) for rows, ms in data["decode_ms"])
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})

    def decode_step_ms(self, num_rows: int, num_context_tokens: int) -> float:
        """A step of decode rows alone whose contexts are `num_context_tokens` together; straight between points."""
        if num_rows == 0:
            return 0.0
        points = self.decode_ms
        at = min(max(1, bisect_left(points, (num_rows, 0.0))), len(points) - 1)
        (rows0, ms0), (rows1, ms1) = points[at - 1], points[at]
        ms = ms0 + (ms1 - ms0) * (num_rows - rows0) / (rows1 - rows0)
        more_tokens = num_context_tokens - num_rows * self.decode_context
        return max(0.5 * ms, ms + more_tokens * self.decode_ns_per_context_token * 1e-6)

    def step_ms(self, num_rows: int, num_context_tokens: int, chunks: list[tuple[int, int]]) -> float:
        """A step of decode rows and of chunks [start, end)."""
        decode_ms = self.decode_step_ms(num_rows, num_context_tokens)
        if not chunks:
            return decode_ms
        num_tokens = sum(end - start for start, end in chunks)
        num_pairs = sum((end * end - start * start) / 2 for start, end in chunks)
        return (
            max(self.prefill_base_ms, decode_ms)
            + num_tokens * self.prefill_us_per_token * 1e-3
            + num_pairs * self.prefill_ns_per_pair * 1e-6
        )


@dataclass(slots=True, eq=False)
class _Sequence:
    seq_id: int
    answer: bytes  # little-endian uint32
    num_tokens: int
    num_prompt_tokens: int
    max_total: int
    limit: int
    decoding: bool = False


class ModelExecutor:
    """One executor: `receive` batches, `begin_step`, and `end_step` when its time has passed."""

    def __init__(self, executor_id: str, model: StepModel, *, max_model_len: int) -> None:
        self.model = model
        self.spec = ExecutorSpec(
            executor_id=executor_id,
            model=ModelSpec("simulated", max_model_len, 2**32, bytes(32)),
            groups=(GroupSpec("mla", model.num_blocks),),
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
        )
        self.busy = False
        self.busy_s = 0.0
        self._inbox: list[tuple[int, list[Order]]] = []
        self._sequences: dict[int, _Sequence] = {}
        self._decoding: dict[int, _Sequence] = {}
        self._chunks: deque[Prefill] = deque()
        self._last_batch_id = self._acknowledged = 0
        self._step: tuple[list[_Sequence], list[int], list[Prefill], float] | None = None

    def receive(self, batch_id: int, orders: list[Order]) -> None:
        self._inbox.append((batch_id, orders))

    def begin_step(self) -> float | None:
        """Apply what came, and begin a step; its time in seconds, or None where there is nothing to do."""
        for batch_id, orders in self._inbox:
            for order in orders:
                self._apply(order)
            self._last_batch_id = batch_id
        self._inbox.clear()
        rows = [seq for seq in self._decoding.values() if seq.num_tokens <= seq.limit]
        paused = (
            [seq.seq_id for seq in self._decoding.values() if seq.num_tokens > seq.limit]
            if (len(rows) < len(self._decoding))
            else []
        )
        budget = self.model.max_num_batched_tokens - len(self._decoding)
        chunks: list[Prefill] = []
        while self._chunks and self._chunks[0].end - self._chunks[0].start <= budget:
            chunks.append(self._chunks.popleft())
            budget -= chunks[-1].end - chunks[-1].start
        if not rows and not chunks:
            return None
        num_context = sum([seq.num_tokens for seq in rows])
        step_s = 1e-3 * self.model.step_ms(len(rows), num_context, [(c.start, c.end) for c in chunks])
        self._step = rows, paused, chunks, step_s
        self.busy = True
        self.busy_s += step_s
        return step_s

    def end_step(self, link_id: int) -> Reported:
        """What the step brought."""
        assert self._step is not None
        rows, paused, chunks, step_s = self._step
        self._step = None
        self.busy = False
        computed: dict[int, int] = {}
        for chunk in chunks:
            seq = self._sequences[chunk.seq_id]
            computed[chunk.seq_id] = chunk.end
            if chunk.end == seq.num_tokens:
                rows.append(seq)
                self._decoding[seq.seq_id] = seq
        tokens: list[bytes] = []
        finish = bytearray(len(rows))
        any_ended = False
        for i, seq in enumerate(rows):
            at = 4 * (seq.num_tokens - seq.num_prompt_tokens)
            tokens.append(seq.answer[at : at + 4])
            seq.num_tokens += 1
            if seq.num_tokens >= seq.max_total:
                finish[i] = FinishReason.LENGTH
                any_ended = True
                del self._sequences[seq.seq_id], self._decoding[seq.seq_id]
        self._acknowledged = self._last_batch_id
        return Reported(
            link_id=link_id,
            last_batch_id=self._last_batch_id,
            seq_ids=[seq.seq_id for seq in rows],
            num_tokens=[1] * len(rows),
            token_ids=b"".join(tokens),
            finish=bytes(finish) if any_ended else b"",
            computed_seq_ids=list(computed),
            num_computed_tokens=list(computed.values()),
            paused_seq_ids=paused,
            num_steps=1,
            step_time_us=max(1, round(1e6 * step_s)),
        )

    def acknowledgement(self, link_id: int) -> Reported | None:
        """For batches that led to no step."""
        if self._last_batch_id <= self._acknowledged:
            return None
        self._acknowledged = self._last_batch_id
        return Reported(link_id=link_id, last_batch_id=self._last_batch_id)

    def _apply(self, order: Order) -> None:
        if isinstance(order, Admit):
            assert isinstance(order.sampling, bytes)
            self._sequences[order.seq_id] = _Sequence(
                order.seq_id,
                order.sampling,
                order.num_tokens,
                order.num_prompt_tokens,
                order.max_total_tokens,
                order.limit,
            )
        elif isinstance(order, Prefill):
            if order.seq_id in self._sequences:
                self._chunks.append(order)
        elif isinstance(order, Extend):
            if (seq := self._sequences.get(order.seq_id)) is not None:
                seq.limit = order.limit
        elif isinstance(order, Drop) and self._sequences.pop(order.seq_id, None) is not None:
            self._decoding.pop(order.seq_id, None)
            self._chunks = deque(chunk for chunk in self._chunks if chunk.seq_id != order.seq_id)
