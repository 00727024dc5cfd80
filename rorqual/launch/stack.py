"""The processes of one stack: started together, restarted when they die, ended together.

Once the whole stack has been up, no process's death ends the others: it is started again for as long as the stack runs,
after a wait that grows with each death in a row.

A thread owns the processes from start to end (the kernel ties a child's life to the thread that started it), so a
Stack may be made and closed from any thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from rorqual.core.config_loader import EXIT_CONFIG
from rorqual.core.errors import RorqualError

from .logs import LogDir
from .plan import ProcessSpec, StackPlan, module_command

POLL_S = 0.05
STOP_GRACE_S = 8.0
"""How long processes may take to end after SIGTERM before they are killed."""
BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Wait before the n-th restart in a row; the last one holds for all further ones."""
STEADY_S = 30.0
"""A process that was ready so long starts its count of deaths anew."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""A log larger than this is set aside when a process is started."""

EventKind = Literal["starting", "ready", "died", "log", "up"]


class StackError(RorqualError):
    """The stack could not be started, or its launcher failed: the message names the process and quotes its log."""

    reason = "STACK_FAILED"

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Event:
    """Something to show: of one process, or ("up") of the whole stack."""

    kind: EventKind
    name: str = ""
    text: str = ""


@dataclass
class _Child:
    spec: ProcessSpec
    log_path: Path
    ready_path: Path
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    was_ready: bool = False
    num_deaths: int = 0  # in a row
    restart_at: float = 0.0
    ready_at: float = 0.0
    log_start: int = 0  # where the present run's lines begin
    log_offset: int = 0
    log_rest: bytes = b""
    extra: list[str] = field(default_factory=list)

    def tail(self, num_lines: int = 12) -> list[str]:
        """The last lines it logged since it was started."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_start, size - 64 * 1024))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-num_lines:]


class Stack:
    """Runs a plan. `start` returns when the whole chain is ready; `stop` when every process has ended.

    `log_dir`: where `<name>.log` of each process goes; None keeps them in a folder that lives as long as the stack.
    `on_event` is called from the stack's thread. Raises ConfigError where no log can be written.
    """

    def __init__(
        self, plan: StackPlan, *, log_dir: Path | LogDir | None = None, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._plan = plan
        self._on_event = on_event or (lambda event: None)
        self._logs = LogDir(log_dir) if isinstance(log_dir, Path) else log_dir
        self._dir = Path(tempfile.mkdtemp(prefix="rorqual-"))
        self.log_dir = self._logs.path if self._logs is not None else self._dir
        self._children = [
            _Child(spec, self.log_dir / f"{spec.name}.log", self._dir / f"{spec.name}.ready") for spec in plan.processes
        ]
        self._stop = threading.Event()
        self._kill = threading.Event()
        self._started: queue.Queue[StackError | None] = queue.Queue()
        self._ended = threading.Event()
        self._up = False
        self.error: StackError | None = None
        self.http_port = 0
        self._thread = threading.Thread(target=self._run, name="rorqual-stack", daemon=True)

    # --- for its owner --------------------------------------------------------------------------------------------

    @property
    def text_address(self) -> str:
        """ "host:port" of the TextService."""
        return self._plan.text_address

    @property
    def scheduler_address(self) -> str:
        """ "host:port" of the GenerationService."""
        return self._plan.scheduler_address

    @property
    def url(self) -> str:
        """Where HTTP is served; "" without a gateway."""
        if not self._plan.http_host:
            return ""
        host = self._plan.http_host
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{host}:{self.http_port}"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run now."""
        return {c.spec.name: c.process.pid for c in self._children if c.process and c.process.poll() is None}

    def start(self, timeout_s: float | None = None) -> None:
        """Start all processes at once and wait until the chain is ready. Raises StackError; then nothing runs."""
        self._thread.start()
        try:
            error = self._started.get(timeout=timeout_s)
        except queue.Empty:
            waiting = [c.spec.name for c in self._children if not c.ready] or ["the whole chain"]
            error = StackError(f"not ready within {timeout_s:g} s: {', '.join(waiting)}; logs are in {self.log_dir}")
        except BaseException:
            self.stop()
            raise
        if error is not None:
            self.stop()
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the stack has ended by itself or by `stop`; False after `timeout_s`."""
        return self._ended.wait(timeout_s)

    def request_stop(self, *, kill: bool = False) -> None:
        """Begin to end all processes, without waiting; `kill` leaves them no grace. Safe in a signal handler."""
        if kill:
            self._kill.set()
        self._stop.set()

    def stop(self) -> None:
        """End every process; returns when none is left. May be called again."""
        self._stop.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self._plan.close()
        if self._logs is not None:
            self._logs.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for child in self._children:
                self._spawn(child)
            while not self._stop.wait(POLL_S):
                self._step()
        except StackError as error:
            self.error = error
        except Exception as error:
            self.error = StackError(f"the launcher failed: {error!r}")
        finally:
            self._end_all()
            self._ended.set()
            if not self._up:
                self._started.put(self.error or StackError("stopped before it was ready"))

    def _step(self) -> None:
        for child in self._children:
            self._follow_log(child)
            if child.process is None:
                if time.monotonic() >= child.restart_at:
                    self._spawn_again(child)
            elif child.process.poll() is not None:
                self._died(child)
            elif not child.ready and child.ready_path.exists() and self._is_ready(child):
                child.ready = child.was_ready = True
                child.ready_at = time.monotonic()
                self._tell(Event("ready", child.spec.name))
            elif child.ready and child.num_deaths and time.monotonic() - child.ready_at > STEADY_S:
                child.num_deaths = 0
        if not self._up and all(child.ready for child in self._children) and self._chain_is_ready():
            self._up = True
            self._tell(Event("up", text=self.url or self.text_address))
            self._started.put(None)

    def _spawn_again(self, child: _Child) -> None:
        """A machine that is out of processes, memory or disk just now may have some later."""
        try:
            self._spawn(child)
        except (OSError, StackError) as error:
            child.process = None
            why = (error.strerror if isinstance(error, OSError) else "") or error
            self._restart_later(child, f"it could not be started: {why}")

    def _spawn(self, child: _Child) -> None:
        self._dir.mkdir(mode=0o700, exist_ok=True)  # systems clear old files out of /tmp
        child.ready_path.unlink(missing_ok=True)
        child.ready = False
        with contextlib.suppress(OSError):
            if child.log_path.stat().st_size > MAX_LOG_BYTES:
                child.log_path.replace(child.log_path.with_suffix(".log.1"))
        command = module_command(child.spec.module, [*child.spec.argv, *child.extra])
        stub = [sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")), str(os.getpid())]
        environ = {**self._plan.environ, child.spec.ready_variable: str(child.ready_path)}
        log: BinaryIO
        try:
            child.log_path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have cleared it away meanwhile
            log = child.log_path.open("ab")
        except OSError as error:
            raise StackError(f"the log {child.log_path} cannot be written: {error.strerror or error}") from None
        with log:
            child.log_start = child.log_offset = log.seek(0, os.SEEK_END)
            child.log_rest = b""
            child.process = subprocess.Popen(
                [*stub, *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            )
        self._tell(Event("starting", child.spec.name))

    def _tell(self, event: Event) -> None:
        """What is shown to somebody who no longer reads it must not end what serves others."""
        with contextlib.suppress(OSError):
            self._on_event(event)

    def _is_ready(self, child: _Child) -> bool:
        if child.spec.ready_variable != "RORQUAL_PORT_FILE":
            return True
        try:
            text = child.ready_path.read_text().strip()
        except OSError:  # it is out of descriptors, say: it asks again
            return False
        if not text.isdigit():
            return False
        if child.spec.name == "gateway" and not self.http_port:
            self.http_port = int(text)
            child.extra = [f"--port={text}"]  # a restarted one comes back where clients look for it
        return True

    def _chain_is_ready(self) -> bool:
        if self.url:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            num_gateways = sum(child.spec.name.startswith("gateway") for child in self._children)
            try:
                # Where gateways share the port, each connection meets any of them: ask until each has surely answered.
                for _ in range(1 if num_gateways == 1 else 12 * num_gateways):
                    with opener.open(f"{self.url}/health", timeout=2) as response:
                        if response.status != 200:
                            return False
            except (urllib.error.URLError, OSError):
                return False
            return True
        import grpc

        # grpc.health.v1.Health/Check by its bytes: an empty request asks for the whole process, 1 is SERVING.
        with grpc.insecure_channel(self.text_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
            )
            try:
                return bool(check(b"", timeout=2) == b"\x08\x01")
            except grpc.RpcError:
                return False

    def _died(self, child: _Child) -> None:
        assert child.process is not None
        code = child.process.returncode
        self._follow_log(child)
        name, how = child.spec.name, f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        child.process = None
        if not self._up:
            raise self._failure(child, code, f"{name} ended at start ({how})")
        if code == EXIT_CONFIG and (lines := child.tail()):
            # What it is started with has not changed, so something around it has: a file, a variable, a device.
            how = f"it refuses its configuration: {_own_words(child.spec, lines[-1])}"
        self._restart_later(child, how)

    def _restart_later(self, child: _Child, how: str) -> None:
        child.num_deaths += 1
        delay = BACKOFF_S[min(child.num_deaths, len(BACKOFF_S)) - 1]
        child.restart_at = time.monotonic() + delay
        count = f", {child.num_deaths} deaths in a row" if child.num_deaths > 1 else ""
        text = f"{how}{count}; started again in {delay:g} s, the others go on; its log is {child.log_path}"
        self._tell(Event("died", child.spec.name, text))

    def _failure(self, child: _Child, code: int, what: str) -> StackError:
        lines = child.tail()
        if code == EXIT_CONFIG and lines:
            # It was started wrongly and has said so, in its last line.
            return StackError(_own_words(child.spec, lines[-1]), exit_code=EXIT_CONFIG)
        quoted = "".join(f"\n  {line}" for line in lines) or "\n  (it logged nothing)"
        return StackError(f"{what}; its last lines:{quoted}\nthe whole log is {child.log_path}")

    def _follow_log(self, child: _Child) -> None:
        try:
            with child.log_path.open("rb") as log:
                log.seek(child.log_offset)
                data = log.read(256 * 1024)
        except OSError:
            return
        if not data:
            return
        child.log_offset += len(data)
        *lines, child.log_rest = (child.log_rest + data).split(b"\n")
        for line in lines:
            self._tell(Event("log", child.spec.name, line.decode("utf-8", "replace")))

    def _end_all(self) -> None:
        """SIGTERM from the edge inwards, then SIGKILL to what is left; every process is reaped."""
        running = [c.process for c in reversed(self._children) if c.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE_S
        while any(p.poll() is None for p in running) and time.monotonic() < deadline and not self._kill.is_set():
            time.sleep(0.02)
        for process in running:
            # The whole session, for whatever a process started itself.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _own_words(spec: ProcessSpec, line: str) -> str:
    """The message of a process's last line, without its name before it."""
    for prefix in (f"python -m {spec.module}: ", f"{spec.module}: ", f"{spec.name}: "):
        line = line.removeprefix(prefix)
    return line.removeprefix("error: ")
