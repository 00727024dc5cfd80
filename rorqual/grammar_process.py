"""The parent's side of `grammar_worker`: the process, started when it is needed, and jobs for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

START_S = 60.0
"""How long the process may take to load a checkpoint's vocabulary."""
_STATUS_S = 1.0
_MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """What one job may take."""

    cpu_s: float
    wall_s: float


@dataclass(slots=True)
class Outcome:
    """What became of a job."""

    reply: bytes | None = None  # None: it died, or took too long
    interim: bytes | None = None  # what it said before
    overran: bool = False  # its processor time
    is_late: bool = False  # it had that, but not within the time: the machine has other things to do
    began: bool = False  # it got as far as its work
    is_lost: bool = False  # the worker process ended beside it, twice: that says nothing of the job


class _Answer:
    """A job's frames, put together from what is read."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.outcome = Outcome()
        self.status: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.outcome.reply is not None

    @property
    def is_settled(self) -> bool:
        """Whether another try would be no different; it would where the worker process itself has ended meanwhile."""
        return self.is_whole or self.status is not None or self.outcome.is_late

    def feed(self, data: bytes) -> None:
        from .grammar_worker import DIED, FRAME_HEAD, INTERIM, REPLY, STARTED

        self._data += data
        while len(self._data) >= FRAME_HEAD.size:
            kind, length = FRAME_HEAD.unpack_from(self._data)
            end = FRAME_HEAD.size + length
            if length > _MAX_ANSWER_BYTES or len(self._data) < end:
                return
            body = bytes(self._data[FRAME_HEAD.size : end])
            del self._data[:end]
            if kind == STARTED:
                self.outcome.began = True
            elif kind == INTERIM:
                self.outcome.interim = body
            elif kind == REPLY:
                self.outcome.reply = body
            elif kind == DIED:
                (self.status,) = struct.unpack("<i", body)
                self.outcome.overran = os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGPROF


class GrammarProcess:
    """One worker process, started anew where it has died. Safe to use from several threads and event loops."""

    def __init__(self, module: str, config: Mapping[str, Any]) -> None:
        """`module`: calls `grammar_worker.serve` when run; `config`: what that is given, as JSON."""
        self._module = module
        self._config = json.dumps(config).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the worker; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Begin to load, in the other process; jobs may be given from now on. Does nothing where it runs."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process and its jobs."""
        with self._lock:
            self._closed = True
            self._stop()

    def run(self, job: bytes, budget: Budget) -> Outcome:
        """Do `job`, waiting for it in this thread."""
        for attempt in (1, 2):
            answer = _Answer()
            with self._connect() as sock, contextlib.suppress(OSError):
                sock.settimeout(START_S)
                sock.sendall(_head(job, budget) + job)
                ends_s = time.monotonic() + START_S
                timed = False
                while not answer.is_whole:
                    if answer.outcome.began and not timed:
                        timed, ends_s = True, time.monotonic() + budget.wall_s
                    left_s = ends_s - time.monotonic()
                    if left_s <= 0:
                        answer.outcome.is_late = True
                        break
                    sock.settimeout(left_s)
                    try:
                        data = sock.recv(1 << 16)
                    except TimeoutError:
                        continue
                    if not data:
                        break
                    answer.feed(data)
            if answer.is_settled or attempt == 2:
                break
        return self._told(answer)

    async def run_async(self, job: bytes, budget: Budget) -> Outcome:
        """Do `job`. Cancelled, it kills what is at work on it."""
        loop = asyncio.get_running_loop()
        for attempt in (1, 2):
            answer = _Answer()
            sock = self._connect()
            try:
                sock.setblocking(False)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(START_S) as limit:
                        sending = asyncio.ensure_future(loop.sock_sendall(sock, _head(job, budget) + job))
                        try:
                            timed = False
                            while not answer.is_whole:
                                if answer.outcome.began and not timed:
                                    timed = True
                                    limit.reschedule(loop.time() + budget.wall_s)
                                data = await loop.sock_recv(sock, 1 << 16)
                                if not data:
                                    break
                                answer.feed(data)
                        finally:
                            sending.cancel()
                            await asyncio.gather(sending, return_exceptions=True)
                if limit.expired():
                    answer.outcome.is_late = True
            finally:
                sock.close()
            if answer.is_settled or attempt == 2:
                break
        return self._told(answer)

    def _told(self, answer: _Answer) -> Outcome:
        outcome = answer.outcome
        outcome.is_lost = not answer.is_settled
        if answer.status and not (outcome.reply is not None or outcome.overran or outcome.is_late):
            _log.warning("a grammar ended the process that compiled it (wait status %d): it is refused", answer.status)
        return outcome

    def _connect(self) -> socket.socket:
        """A socket to a new job. OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                for attempt in (1, 2):
                    self._start()
                    assert self._control is not None
                    try:
                        socket.send_fds(self._control, [b"j"], [theirs.fileno()])
                        break
                    except OSError:
                        self._stop()
                        if attempt == 2:
                            raise
            return ours
        except BaseException:
            ours.close()
            raise

    def _start(self) -> None:
        if self._closed:
            raise OSError("the grammar process is closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        control, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._control = control
        control.sendall(struct.pack("<I", len(self._config)) + self._config)

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _head(job: bytes, budget: Budget) -> bytes:
    from .grammar_worker import JOB_HEAD

    return JOB_HEAD.pack(len(job), budget.cpu_s)
