"""A process that compiles grammars for another one, each job in a fork of its own, which may die.

`python -m rorqual.grammar_worker FD` (or a module that calls `serve` with other work) is started by `grammar_process`,
loads a checkpoint's engine once, and forks for every job: that takes milliseconds, and memory, processor time and the
stack that a job takes end with its fork. It has one thread, no gRPC and no device. When its parent closes a job's socket
the fork is killed; when the parent goes, all of them end.

On FD: the length (uint32) and text of a JSON configuration, then a byte and a socket for each job. On a job's socket the
parent writes the length (uint32), the seconds of processor time (float64) and the bytes of the job; frames come back:
their kind (a byte), the length (uint32) and bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .grammar import GrammarCostError, GrammarEngine, GrammarError, open_engine

STARTED, INTERIM, REPLY, DIED = b"S", b"I", b"R", b"X"
"""Kinds of frames: the fork has begun; what holds should it die from here on; the answer; its wait status."""
JOB_HEAD = struct.Struct("<Id")
FRAME_HEAD = struct.Struct("<cI")
MAX_JOB_BYTES = 64 << 20
MEMORY_BYTES = 512 << 20
"""Of data that a job may take beside what is there when it begins."""
_PR_SET_PDEATHSIG = 1

Tell = Callable[[bytes], None]
"""Say what is known so far, and get the processor's time anew for the rest."""
Work = Callable[[bytes, Tell], bytes]


def serve(load: Callable[[dict[str, Any]], Work]) -> None:
    """Fork for each job of the parent, until that has gone. `load` makes the work of the configuration."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent is told too, and ends this
    control = socket.socket(fileno=int(sys.argv[1]))
    (length,) = struct.unpack("<I", _read_exactly(control, 4))
    work = load(json.loads(_read_exactly(control, length)))
    gc.collect()
    gc.freeze()  # what forks share is not written to
    _Nursery(control, work).run()


class _Nursery:
    def __init__(self, control: socket.socket, work: Work) -> None:
        self._control = control
        self._work = work
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._jobs: dict[int, socket.socket] = {}  # by process id
        self._pids: dict[int, int] = {}  # by the socket's number
        self._poll = select.poll()
        self._woken, wakes = socket.socketpair()
        self._woken.setblocking(False)
        wakes.setblocking(False)
        self._wakes = wakes
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    if not self._begin():
                        self._end()
                        return
                elif fd == self._woken.fileno():
                    with contextlib.suppress(BlockingIOError):
                        while self._woken.recv(4096):
                            pass
                elif fd in self._pids:  # its caller has gone
                    self._poll.unregister(fd)
                    os.kill(self._pids[fd], signal.SIGKILL)
            self._reap()

    def _begin(self) -> bool:
        """False where the parent has gone."""
        data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        if not fds:
            return True  # no descriptor is free for it here: its caller reads the end of its socket
        job = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError:  # no process, or no memory, just now: the jobs under way go on
            job.close()
            return True
        if pid == 0:
            self._be_born(job)
        self._jobs[pid] = job
        self._pids[job.fileno()] = pid
        self._poll.register(job, select.POLLRDHUP)
        return True

    def _reap(self) -> None:
        while self._jobs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            job = self._jobs.pop(pid)
            del self._pids[job.fileno()]
            with contextlib.suppress(KeyError):
                self._poll.unregister(job)
            with contextlib.suppress(OSError):
                job.setblocking(False)
                job.send(FRAME_HEAD.pack(DIED, 4) + struct.pack("<i", status))
            job.close()

    def _end(self) -> None:
        for pid in self._jobs:
            os.kill(pid, signal.SIGKILL)

    def _be_born(self, job: socket.socket) -> NoReturn:
        """In the fork: do the job, answer, and exit."""
        code = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPROF):
                signal.signal(number, signal.SIG_DFL)
            for other in (self._control, self._woken, self._wakes, *self._jobs.values()):
                other.close()
            _limit_memory()
            _do(job, self._work)
            code = 0
        except (OSError, EOFError, MemoryError):
            pass  # the caller has gone, or it was too much
        finally:
            os._exit(code)


def _do(job: socket.socket, work: Work) -> None:
    job.setblocking(True)
    job.sendall(FRAME_HEAD.pack(STARTED, 0))
    length, cpu_s = JOB_HEAD.unpack(_read_exactly(job, JOB_HEAD.size))
    if length > MAX_JOB_BYTES:
        raise EOFError
    body = _read_exactly(job, length)

    def tell(interim: bytes) -> None:
        job.sendall(FRAME_HEAD.pack(INTERIM, len(interim)) + interim)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # which ends the process, whatever its threads are at
    reply = work(body, tell)
    signal.setitimer(signal.ITIMER_PROF, 0)
    job.sendall(FRAME_HEAD.pack(REPLY, len(reply)) + reply)


def _limit_memory() -> None:
    """Data beyond what is there now, and cores: none. The system's killer takes this process before any other."""
    data_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")
    )
    limit = (data_kib << 10) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _read_exactly(source: socket.socket, num_bytes: int) -> bytes:
    """EOFError where the other side has gone."""
    parts = bytearray()
    while len(parts) < num_bytes:
        part = source.recv(min(num_bytes - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def load_engine(config: dict[str, Any]) -> GrammarEngine | None:
    """The trial engine of a configuration with `folder` and `vocab_size`."""
    return open_engine(Path(config["folder"]), config["vocab_size"], trial=True)


def _load(config: dict[str, Any]) -> Work:
    engine = load_engine(config)

    def work(body: bytes, tell: Tell) -> bytes:
        """Compile the grammar text `body`: an empty answer, or the error's kind and words."""
        if engine is None:
            return b"N"
        try:
            engine.compile(body.decode())
        except GrammarError as error:
            return (b"C" if isinstance(error, GrammarCostError) else b"E") + str(error).encode("utf-8", "replace")
        return b""

    return work


if __name__ == "__main__":
    serve(_load)
