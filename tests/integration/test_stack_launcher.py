"""The launcher over stand-in processes: started together, restarted, ended, never orphaned."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rorqual.core.errors import ConfigError
from rorqual.launch import Event, ProcessSpec, Stack, StackError, StackPlan
from rorqual.launch import stack as stack_module
from rorqual.launch.plan import check_port, module_environ, reserve_port

ROOT = Path(__file__).resolve().parents[2]

# Stands in for a process: says something, becomes ready, and lives as its argument tells it to.
STAND_IN = """
import http.server, os, signal, sys, time
name, how, *rest = sys.argv[1:]
print(f"{name} says hello", flush=True)
if how == "refuses":
    sys.stderr.write(f"{name}: error: no such thing\\n")
    sys.exit(2)
if how == "refuses-later":
    if os.path.exists(rest[0]):
        sys.stderr.write(f"{name}: error: the file has gone\\n")
        sys.exit(2)
    open(rest[0], "w").close()
    how = "dies-when-up"
if how == "crashes":
    raise RuntimeError("the sky fell")
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if name == "gateway":
    port = int(next((a.split("=")[1] for a in rest if a.startswith("--port=")), 0))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    open(os.environ["RORQUAL_PORT_FILE"], "w").write(str(server.server_port))
    server.serve_forever()
open(os.environ["RORQUAL_READY_FILE"], "w").write("ready")
if how == "dies-when-up":
    time.sleep(0.3); sys.exit(3)
while True:
    time.sleep(60)
"""

MakePlan = Callable[..., StackPlan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def make(worker: str = "lives", gateway: str = "lives", worker_args: tuple[str, ...] = ()) -> StackPlan:
        return StackPlan(
            processes=(
                ProcessSpec("worker", "stand_in", ("worker", worker, *worker_args), "RORQUAL_READY_FILE"),
                ProcessSpec("gateway", "stand_in", ("gateway", gateway), "RORQUAL_PORT_FILE"),
            ),
            text_address="",
            scheduler_address="",
            http_host="127.0.0.1",
            api_key="",
            root=tmp_path,
            environ=module_environ(tmp_path, os.environ),
        )

    return make


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def start(plan: StackPlan, on_event: Callable[[Event], None] | None = None) -> Stack:
        stack = Stack(plan, log_dir=tmp_path / "logs", on_event=on_event)
        stacks.append(stack)
        stack.start(timeout_s=30)
        return stack

    yield start
    for stack in stacks:
        stack.stop()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_all_start_and_all_end(make_plan: MakePlan, run: Callable[..., Stack]) -> None:
    events: list[Event] = []
    stack = run(make_plan(), events.append)
    kinds = [(e.kind, e.name) for e in events if e.kind != "log"]
    assert kinds[:2] == [("starting", "worker"), ("starting", "gateway")]  # at once, neither waits for the other
    assert kinds[-1] == ("up", "")
    assert stack.url.startswith("http://127.0.0.1:")
    assert sorted(stack.pids) == ["gateway", "worker"]
    pids = list(stack.pids.values())
    stack.stop()
    assert all(gone(pid) for pid in pids)
    stack.stop()  # a second time does nothing


def test_a_dead_process_is_started_again_where_it_was(make_plan: MakePlan, run: Callable[..., Stack]) -> None:
    events: list[Event] = []
    stack = run(make_plan(), events.append)
    url, before = stack.url, stack.pids
    os.kill(before["gateway"], signal.SIGKILL)
    wait_until(lambda: sum(e.kind == "ready" and e.name == "gateway" for e in events) == 2, "the gateway is back")
    assert stack.url == url
    assert stack.pids["gateway"] != before["gateway"]
    assert stack.pids["worker"] == before["worker"]
    assert any(e.kind == "died" and "SIGKILL" in e.text for e in events)


def deaths_of(events: list[Event], name: str) -> list[str]:
    return [event.text for event in list(events) if event.kind == "died" and event.name == name]


def test_a_process_that_keeps_dying_is_started_again_for_ever_and_takes_no_other_with_it(
    make_plan: MakePlan, run: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.01, 0.02))
    events: list[Event] = []
    stack = run(make_plan(worker="dies-when-up"), events.append)
    gateway = stack.pids["gateway"]
    wait_until(lambda: len(deaths_of(events, "worker")) >= 8, "it has died eight times")
    deaths = deaths_of(events, "worker")
    assert deaths[0].startswith("exit code 3; started again in 0.01 s")
    assert deaths[1].startswith("exit code 3, 2 deaths in a row; started again in 0.02 s, the others go on")
    assert deaths[7].startswith("exit code 3, 8 deaths in a row; started again in 0.02 s")
    assert stack.pids["gateway"] == gateway
    assert not deaths_of(events, "gateway")
    assert not stack.wait(0)
    assert stack.error is None


def test_the_count_of_deaths_begins_anew_after_steady_time(
    make_plan: MakePlan, run: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr(stack_module, "STEADY_S", 0.0)  # ready is steady
    events: list[Event] = []
    stack = run(make_plan(), events.append)
    worker = stack._children[0]

    def is_well_after(num_deaths: int) -> bool:
        return len(deaths_of(events, "worker")) == num_deaths and worker.ready and worker.num_deaths == 0

    for num_deaths in (1, 2, 3):
        os.kill(stack.pids["worker"], signal.SIGKILL)
        wait_until(functools.partial(is_well_after, num_deaths), "it is back, and its count reset")
    assert all("in a row" not in death for death in deaths_of(events, "worker"))
    assert len(deaths_of(events, "worker")) == 3


def test_a_configuration_refused_at_a_restart_is_told_and_the_others_go_on(
    make_plan: MakePlan, run: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.01, 0.02))
    events: list[Event] = []
    plan = make_plan(worker="refuses-later", worker_args=(str(tmp_path / "marker"),))
    stack = run(plan, events.append)
    gateway = stack.pids["gateway"]
    wait_until(lambda: len(deaths_of(events, "worker")) >= 3, "it has refused twice")
    assert "it refuses its configuration: the file has gone" in deaths_of(events, "worker")[1]
    assert stack.pids["gateway"] == gateway
    (tmp_path / "marker").unlink()  # the cure, while the stack runs
    wait_until(lambda: "worker" in stack.pids and stack._children[0].ready, "it is back")


def test_a_process_that_cannot_be_started_again_is_tried_again(
    make_plan: MakePlan, run: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "BACKOFF_S", (0.01, 0.02))
    events: list[Event] = []
    stack = run(make_plan(), events.append)
    really = subprocess.Popen
    refusals = iter(range(3))

    def popen(*args: object, **kwargs: object) -> object:
        if next(refusals, None) is not None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return really(*args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr("rorqual.launch.stack.subprocess.Popen", popen)
    os.kill(stack.pids["worker"], signal.SIGKILL)
    wait_until(lambda: sum(e.kind == "ready" and e.name == "worker" for e in events) == 2, "it is back")
    assert "could not be started: Resource temporarily unavailable" in deaths_of(events, "worker")[1]
    assert stack.error is None


def test_a_reader_that_has_gone_ends_nothing(make_plan: MakePlan, run: Callable[..., Stack]) -> None:
    seen: list[str] = []

    def show(event: Event) -> None:
        seen.append(event.kind)
        if "up" in seen:
            raise BrokenPipeError

    stack = run(make_plan(), show)
    os.kill(stack.pids["worker"], signal.SIGKILL)
    wait_until(lambda: seen.count("ready") == 3, "it is back")
    assert stack.error is None


def test_a_refused_start_is_told_in_the_process_s_own_words(make_plan: MakePlan, run: Callable[..., Stack]) -> None:
    with pytest.raises(StackError) as caught:
        run(make_plan(worker="refuses"))
    assert caught.value.message == "no such thing"
    assert caught.value.exit_code == 2


def test_a_crash_at_start_is_named_with_its_last_lines(make_plan: MakePlan, run: Callable[..., Stack]) -> None:
    with pytest.raises(StackError) as caught:
        run(make_plan(worker="crashes"))
    assert "worker ended at start (exit code 1)" in caught.value.message
    assert "RuntimeError: the sky fell" in caught.value.message
    assert "worker.log" in caught.value.message


def test_a_process_that_ignores_sigterm_is_killed(
    make_plan: MakePlan, run: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "STOP_GRACE_S", 0.2)
    stack = run(make_plan(worker="stubborn"))
    pids = list(stack.pids.values())
    stack.stop()
    assert all(gone(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_orphan(make_plan: MakePlan, tmp_path: Path) -> None:
    make_plan()
    script = f"""
import os, sys, threading, time
from pathlib import Path
from rorqual.launch import ProcessSpec, Stack, StackPlan
from rorqual.launch.plan import module_environ
root = Path({str(tmp_path)!r})
plan = StackPlan((ProcessSpec("worker", "stand_in", ("worker", "stubborn"), "RORQUAL_READY_FILE"),
                  ProcessSpec("gateway", "stand_in", ("gateway", "lives"), "RORQUAL_PORT_FILE")),
                 "", "", "127.0.0.1", "", root, module_environ(root, os.environ))
stack = Stack(plan, log_dir=root / "logs")
starter = threading.Thread(target=stack.start)  # a thread that ends must not take the processes with it
starter.start(); starter.join()
time.sleep(0.3)
print(*stack.pids.values(), flush=True)
time.sleep(60)
"""
    environ = module_environ(ROOT, os.environ)
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait()
        if launcher.stdout is not None:
            launcher.stdout.close()
    try:
        wait_until(lambda: all(gone(pid) for pid in pids), "the processes end with their launcher")
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_reserved_port_can_be_served_on_and_is_given_to_nobody_else() -> None:
    held = reserve_port()
    port = held.getsockname()[1]
    with held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConfigError, match=f"port {port} is taken .* --port"):
            check_port("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"):
            reserve_port(port)
