"""Steps on a GPU: launched one ahead of the tokens that the host has seen."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..faults import contained
from ..order_loop import LENGTH, STOP, Chunk, KvCache, OrderLoop, StepLimits
from ..reports import StepOutput, StepStats
from ..sequences import Sequence as Seq
from .engine import MAX_IN_FLIGHT, GpuEngine, LaunchedStep
from .rows import ChosenTokens, DecodeRows


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: LaunchedStep
    chunks: Sequence[Chunk]
    started_s: float


class GpuStepLoop(OrderLoop):
    """Launches a step, then looks at the one before it.

    While a grammar holds for a sequence of the set, the other way round: what it may say next depends on the token before,
    so each step waits for the host to have seen the last one. Masks are computed while the step's layers run. A sequence
    whose grammar begins at a token was launched beyond it before the host saw that: it joins the set again, which discards
    what it said there.
    """

    takes_grammars = True
    launches = True

    def __init__(
        self,
        engine: GpuEngine,
        kv_cache: KvCache,
        limits: StepLimits,
        *,
        traced: bool = False,
        monotonic_s: Callable[[], float] = time.perf_counter,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._engine = engine
        self._decode: DecodeRows = engine.rows
        self._in_flight: deque[_InFlight] = deque()
        super().__init__(kv_cache, engine.rows, limits, traced=traced, monotonic_s=monotonic_s, time_ns=time_ns)

    def _step(self, chunks: Sequence[Chunk]) -> None:
        if not chunks and self._in_flight and not self._decode.may_run:
            self._finish_step_in_flight()
            return
        is_constrained = self._engine.is_constrained or any(
            chunk.joins and chunk.sequence.constraint is not None for chunk in chunks
        )
        if is_constrained and self._in_flight:
            while self._finish_step_in_flight():
                pass
            chunks = [chunk for chunk in chunks if chunk.sequence.is_live]
            if not chunks and not self._decode.num_rows:
                return
        started_s = self._monotonic_s()
        if not self._in_flight:
            self._step_started_s = started_s
        num_compute = self._decode.num_rows
        chunks = [chunk for chunk in chunks if not chunk.joins or self._join(chunk.sequence)]
        if not chunks and not num_compute:
            return
        if is_constrained:
            self._constraints.prepare(self._engine.constraints)
        step = self._engine.launch(chunks, num_compute)
        self._in_flight.append(_InFlight(step, chunks, started_s))
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._finish_step_in_flight()

    def _finish_step_in_flight(self) -> bool:
        if not self._in_flight:
            return False
        item = self._in_flight.popleft()
        results, duration_s = self._engine.wait(item.step)
        self._step_id += 1
        output = StepOutput(self._step_id, duration_s, _NO_SEQ_IDS, _NO_TOKENS)
        rows = item.step.rows
        chosen = self._decode.take(rows, results)
        errors = self._logprobs(item.step, chosen, output)
        for chunk in item.chunks:
            self._finish_chunk(chunk, output)
        self._finish_rows(item, chosen, errors, output)
        self._step_started_s = self._in_flight[0].started_s if self._in_flight else 0.0
        self.outbox.add_step(output)
        self.stats.append(
            StepStats(duration_s, sum(chunk.num_tokens for chunk in item.chunks), rows.num_compute, rows.num_rows)
        )
        self.on_output()
        return True

    def _finish_chunk(self, chunk: Chunk, output: StepOutput) -> None:
        sequence = chunk.sequence
        if not sequence.is_live:
            return
        self._note_computed(chunk, output)
        if chunk.ended_before is not None:
            self._finish(sequence, STOP if chunk.ended_before == "stop" else LENGTH, output)
        elif chunk.joins and sequence.trace is not None:
            sequence.trace.events.append(("first_token", self._time_ns(), {"step_id": self._step_id}))

    def _logprobs(self, step: LaunchedStep, chosen: ChosenTokens, output: StepOutput) -> dict[int, Exception]:
        """Log-probabilities that the step brought. Returns what went wrong with rows, by their place in `chosen`."""
        for part in step.prompt_logprobs:
            with self._alone(part.sequence):
                if (item := part.item()) is not None:
                    output.logprobs.append(item)
        errors: dict[int, Exception] = {}
        for i in np.flatnonzero(chosen.sound).tolist() if step.with_logprobs else ():
            with contained(errors, i):
                output.logprobs += self._engine.logprobs(step, chosen, i)
        return errors

    def _finish_rows(
        self, item: _InFlight, chosen: ChosenTokens, errors: dict[int, Exception], output: StepOutput
    ) -> None:
        """Tokens into the report; rows that met their end, or their limit, leave. `errors`: of rows, by their place in
        `chosen`."""
        rows = item.step.rows
        sound, ended = chosen.sound.copy(), np.zeros(chosen.sound.size, np.bool_)
        sound[list(errors)] = False
        if item.step.prompt_logprobs:  # which may have ended a sequence
            sound &= np.array([rows.sequences[row].is_live for row in chosen.rows.tolist()], np.bool_)
        changed: list[Seq] = []
        for i in np.flatnonzero(sound).tolist() if self._engine.follows_tokens else ():
            sequence = rows.sequences[chosen.rows[i]]
            with contained(errors, i):
                if self._follow(sequence, int(chosen.token_ids[i])):
                    changed.append(sequence)
                ended[i] = sequence.constraint is not None and sequence.constraint.has_ended
        sound[list(errors)] = False
        if sound.all():
            output.seq_ids, output.token_ids = rows.seq_ids[chosen.rows], chosen.token_ids
        else:
            output.seq_ids, output.token_ids = rows.seq_ids[chosen.rows[sound]], chosen.token_ids[sound]
        for i in np.flatnonzero(chosen.halted | ended | ~sound).tolist():
            sequence = rows.sequences[chosen.rows[i]]
            if not sequence.is_live:
                continue
            if i in errors:
                self._fault(sequence, errors[i])
            elif not sound[i]:
                self._unsound(sequence, self._decode.position_of(sequence) - 1)
            elif chosen.stopped[i] or ended[i]:
                self._finish(sequence, STOP, output)
            elif chosen.spent[i]:
                self._finish(sequence, LENGTH, output)
            else:
                self._decode.remove(sequence)
                sequence.is_paused = True
                output.paused.append(sequence.seq_id)
        for sequence in changed:
            if sequence.is_live and sequence.row >= 0:
                self._decode.remove(sequence)
                self._join(sequence)

    @staticmethod
    def _follow(sequence: Seq, token_id: int) -> bool:
        """A token joins the host's copy of what penalties count and the grammar follows; the device's counts have it
        already. Whether the grammar has begun to hold, or has ceased to forbid an end: the sequence has to join again."""
        if sequence.adjuster is None:
            return False
        before = sequence.constraint.phase if sequence.constraint is not None else None
        sequence.adjuster.observe([token_id])
        return sequence.constraint is not None and sequence.constraint.phase is not before


_NO_SEQ_IDS = np.zeros(0, np.uint64)
_NO_TOKENS = np.zeros(0, np.int64)
