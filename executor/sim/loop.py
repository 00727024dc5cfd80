"""The simulated device in real time: steps that take as long as they are told to, launched one ahead."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from rorqual.v1 import executor_pb2

from ..errors import OrderError
from ..inbox import Inbox
from ..inventory import InventoryEntry
from ..reports import EndedSequence, StepStats
from .device import SimExecutor, SimStep, make_report

_log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
_LINK_FIRST_S = 0.0005
"""After a step the link gets the interpreter for so long: the device is busy with the next one meanwhile."""


class Outbox:
    """Steps whose time is over, until the link takes them as one report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[SimStep] = []
        self._step_id = 0
        self._batch_id = 0  # the last batch applied, with every token of before on its way
        self._acknowledged = 0

    def add_step(self, step: SimStep) -> None:
        with self._lock:
            self._steps.append(step)
            self._step_id = step.step_id
            self._batch_id = step.last_batch_id

    def applied(self, batch_id: int) -> bool:
        """This is the last batch applied, and no step is under way. Whether that is news."""
        with self._lock:
            is_new = batch_id != self._batch_id
            self._batch_id = batch_id
        return is_new

    def reset(self) -> None:
        """A link ended: what it did not take is nobody's."""
        with self._lock:
            self._steps = []
            self._batch_id = self._acknowledged = 0

    def take(self, *, is_due: bool = False) -> executor_pb2.Report | None:
        """Everything gathered, as one report; None where nothing happened, unless a report `is_due`."""
        with self._lock:
            steps, self._steps = self._steps, []
            step_id, batch_id, acknowledged = self._step_id, self._batch_id, self._acknowledged
            self._acknowledged = batch_id
        if not steps and batch_id == acknowledged and not is_due:
            return None
        report = make_report(steps) if steps else executor_pb2.Report(step_id=step_id)
        report.last_batch_id = batch_id
        return report


@dataclass(slots=True)
class _InFlight:
    step: SimStep
    start_s: float
    end_s: float


class SimLoop:
    """Applies orders at step boundaries and steps while there is work, as a loop on a GPU does.

    A step's tokens are made when it is launched, which is up to a step before the device comes to it, and may be
    reported when its time is over; orders that arrive meanwhile apply to the step after the one already launched.
    One thread owns the device; the link reaches it through what `executor.link.Loop` names.
    """

    def __init__(
        self,
        device: SimExecutor,
        *,
        monotonic_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = device
        self.outbox = Outbox()
        self.stats: deque[StepStats] = deque()
        self.ended: deque[EndedSequence] = deque()  # (no spans are made of simulated sequences)
        self.on_output: Callable[[], None] = lambda: None
        self.on_order_error: Callable[[OrderError], None] = lambda error: None
        self.on_crash: Callable[[BaseException], None] = lambda error: None
        self.on_made: Callable[[SimStep], None] = lambda step: None  # a step's time is over; on the loop's thread
        self._monotonic_s = monotonic_s
        self._sleep = sleep
        self._in_flight: deque[_InFlight] = deque()
        self._idle_since_s = 0.0
        self._num_paused = 0  # while idle
        self._inbox: Inbox[executor_pb2.OrderBatch] = Inbox()
        self._thread: threading.Thread | None = None

    # Called from other threads.

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="sim-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the present step."""
        self._inbox.stop()
        if self._thread is not None:
            self._thread.join(30.0)

    def receive(self, message: executor_pb2.OrderBatch) -> None:
        """Apply a batch at the next step boundary, after those received before."""
        self._inbox.put(message)

    def reset(self) -> Future[list[InventoryEntry]]:
        """Drop every sequence at the next boundary and forget pending orders; resolves to the labelled blocks."""
        return self._inbox.reset()

    def step_running_us(self) -> int:
        """How long the present step has run; 0 when idle."""
        try:
            start_s = self._in_flight[0].start_s
        except IndexError:
            return 0
        return max(round((self._monotonic_s() - start_s) * 1e6), 0)

    # The loop's own thread.

    def _run(self) -> None:
        try:
            while not self._inbox.is_stopped:
                if not self.run_once():
                    self._inbox.wait()
        except BaseException as error:
            _log.critical("the step loop ended", exc_info=error)
            self.on_crash(error)

    def run_once(self) -> bool:
        """Apply what is pending, then launch a step, or wait for the oldest. Returns whether there was one."""
        if (request := self._inbox.take_reset()) is not None:
            while self._in_flight:
                self._finish_step()
            self.device.reset()
            self.outbox.reset()
            request.answer(self.device.inventory())
        while (batch := self._inbox.take()) is not None:
            self.device.apply(batch)
        if self.device.has_work:
            self._launch()
            if len(self._in_flight) >= MAX_IN_FLIGHT:
                self._finish_step()
            return True
        if self._in_flight:
            self._finish_step()
            return True
        self._idle_since_s, self._num_paused = self._monotonic_s(), self.device.num_paused
        if self.outbox.applied(self.device.last_batch_id):
            self.on_output()
        return False

    def _launch(self) -> None:
        start_s = self._monotonic_s()
        if self._in_flight:
            start_s = max(start_s, self._in_flight[-1].end_s)
        if self._num_paused:  # the device was idle, and sequences at their limit missed as many steps
            idle_us = 1e6 * (start_s - self._idle_since_s)
            self.device.num_paused_steps += self._num_paused * int(idle_us / max(self.device.config.step_us, 1.0))
            self._num_paused = 0
        step = self.device.step()
        self._in_flight.append(_InFlight(step, start_s, start_s + step.duration_us / 1e6))

    def _finish_step(self) -> None:
        """Wait for the oldest step that was launched; its tokens may leave."""
        item = self._in_flight[0]
        self._sleep(max(item.end_s - self._monotonic_s(), 0.0))
        self._in_flight.popleft()
        step = item.step
        self.device.take_step()
        self.on_made(step)
        self.outbox.add_step(step)
        self.stats.append(StepStats(step.duration_us / 1e6, step.num_chunk_tokens, step.num_rows, step.num_rows))
        self.on_output()
        if self._in_flight:
            self._sleep(min(_LINK_FIRST_S, 0.25e-6 * self._in_flight[0].step.duration_us))
