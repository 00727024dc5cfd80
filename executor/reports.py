"""What steps brought, gathered until the wire is free."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rorqual.core.token_ids import pack_uint64
from rorqual.v1 import common_pb2, executor_pb2

if TYPE_CHECKING:  # they bring torch, which not every loop needs
    from .logprobs import TokenLogprob
    from .sequences import LogprobItem, SequenceTrace


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, for the metrics."""

    duration_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_decode_sequences: int


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """One traced sequence that ended, for its span."""

    seq_id: int
    trace: SequenceTrace
    end_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    finish: str


NUMERICAL_FAULT, CONSTRAINT_TOO_COMPLEX, INTERNAL = "NUMERICAL_FAULT", "CONSTRAINT_TOO_COMPLEX", "INTERNAL"
_MAX_FAULT_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class Fault:
    """executor_pb2.SequenceFault."""

    seq_id: int
    reason: str
    message: str


@dataclass(slots=True)
class StepOutput:
    """What one step brought. Arrays are the receiver's to keep."""

    step_id: int
    duration_s: float
    seq_ids: npt.NDArray[np.uint64]
    token_ids: npt.NDArray[np.int64]
    finish: dict[int, int] = field(default_factory=dict)  # sequence id -> FinishReason
    computed: dict[int, int] = field(default_factory=dict)  # sequence id -> positions in the cache
    paused: list[int] = field(default_factory=list)
    logprobs: list[LogprobItem] = field(default_factory=list)


class Outbox:
    """Gathers steps until the link takes them as one report.

    Filled by the step loop, emptied by the link. While the wire is busy it grows by the tokens of steps that run,
    and those end at the limits that were granted: nothing is queued without bound.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step_id = 0
        self._batch_id = 0
        self._clear()

    def _clear(self) -> None:
        self._changed = False
        self._num_steps = 0
        self._step_time_s = 0.0
        self._seq_ids: list[npt.NDArray[np.uint64]] = []
        self._token_ids: list[npt.NDArray[np.int64]] = []
        self._finish: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        self._paused: dict[int, None] = {}
        self._logprobs: list[LogprobItem] = []
        self._faults: list[Fault] = []

    def reset(self) -> None:
        """A link ended: what it did not take is nobody's."""
        with self._lock:
            self._clear()
            self._batch_id = 0

    def applied(self, batch_id: int, unpaused: Iterable[int]) -> None:
        """An order batch was applied at the boundary before the next step."""
        with self._lock:
            self._batch_id = batch_id
            self._changed = True
            for seq_id in unpaused:
                self._paused.pop(seq_id, None)

    def add_step(self, output: StepOutput) -> None:
        with self._lock:
            self._changed = True
            self._step_id = output.step_id
            self._num_steps += 1
            self._step_time_s += output.duration_s
            if output.seq_ids.size:
                self._seq_ids.append(output.seq_ids)
                self._token_ids.append(output.token_ids)
            self._finish.update(output.finish)
            self._computed.update(output.computed)
            self._paused.update(dict.fromkeys(output.paused))
            self._logprobs += output.logprobs

    def add_fault(self, fault: Fault) -> None:
        """A sequence ended by what went wrong with it; not only in a step."""
        with self._lock:
            self._changed = True
            self._faults.append(fault)

    def take(self, *, is_due: bool = False) -> executor_pb2.Report | None:
        """Everything gathered, as one report; None where nothing happened, unless a report `is_due`."""
        with self._lock:
            if not self._changed and not is_due:
                return None
            step_id, batch_id, num_steps, step_time_s = (
                self._step_id,
                self._batch_id,
                self._num_steps,
                self._step_time_s,
            )
            seq_ids, token_ids, finish = self._seq_ids, self._token_ids, self._finish
            computed, paused, logprobs, faults = self._computed, self._paused, self._logprobs, self._faults
            self._clear()
        report = executor_pb2.Report(
            step_id=step_id,
            last_batch_id=batch_id,
            num_steps=num_steps,
            step_time_us=round(step_time_s * 1e6),
            computed_seq_ids=pack_uint64(computed.keys()),
            num_computed_tokens=np.fromiter(computed.values(), "<u4", len(computed)).tobytes(),
            paused_seq_ids=pack_uint64(paused.keys()),
            faults=[
                executor_pb2.SequenceFault(
                    seq_id=fault.seq_id, reason=fault.reason, message=fault.message[:_MAX_FAULT_MESSAGE]
                )
                for fault in faults
            ],
        )
        _write_tokens(report, seq_ids, token_ids, finish)
        if logprobs:
            _write_logprobs(report, logprobs)
        return report


def _write_tokens(
    report: executor_pb2.Report,
    seq_ids: Sequence[npt.NDArray[np.uint64]],
    token_ids: Sequence[npt.NDArray[np.int64]],
    finish: dict[int, int],
) -> None:
    """The token columns: one entry a sequence, its tokens in the order of its steps."""
    if len(seq_ids) > 1:
        every_seq, every_token = np.concatenate(seq_ids), np.concatenate(token_ids)
        order = np.argsort(every_seq, kind="stable")
        every_seq, every_token = every_seq[order], every_token[order]
        ids, counts = np.unique(every_seq, return_counts=True)
    elif seq_ids:
        ids, every_token = seq_ids[0], token_ids[0]
        counts = np.ones(ids.size, np.int64)
    else:
        ids, every_token, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    reasons = np.zeros(ids.size, np.uint8)
    if finish:
        place = {seq_id: i for i, seq_id in enumerate(ids.tolist())}
        silent = [seq_id for seq_id in finish if seq_id not in place]  # ended without a token
        if silent:
            ids = np.concatenate((ids, np.array(silent, np.uint64)))
            counts = np.concatenate((counts, np.zeros(len(silent), np.int64)))
            reasons = np.zeros(ids.size, np.uint8)
            place = {seq_id: i for i, seq_id in enumerate(ids.tolist())}
        for seq_id, reason in finish.items():
            reasons[place[seq_id]] = reason
    report.seq_ids = ids.astype("<u8", copy=False).tobytes()
    report.num_tokens = counts.astype("<u4").tobytes()
    report.token_ids = every_token.astype("<u4").tobytes()
    report.finish = reasons.tobytes()


def _write_logprobs(report: executor_pb2.Report, items: Iterable[LogprobItem]) -> None:
    by_sequence: dict[int, executor_pb2.SequenceLogprobs] = {}
    for item in items:
        entry = by_sequence.get(item.seq_id)
        if entry is None:
            entry = by_sequence[item.seq_id] = report.logprobs.add(seq_id=item.seq_id)
        entry.logprobs.extend(_to_proto(logprob) for logprob in item.generated)
        entry.prompt_logprobs.extend(_to_proto(logprob) for logprob in item.prompt)


def _to_proto(logprob: TokenLogprob) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top_token_ids=np.array(logprob.top_token_ids, "<u4").tobytes(),
        top_logprobs=logprob.top_logprobs,
    )
