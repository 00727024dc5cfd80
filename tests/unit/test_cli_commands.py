"""The command line: help a person can follow, flags that reach the processes that know them, failures in one line."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from gateway.server import bind
from rorqual import __version__
from rorqual.cli import http
from rorqual.cli.app import _announce, run
from rorqual.cli.progress import StartProgress, split_log_line
from rorqual.client import SamplingParams
from rorqual.core.config_loader import PROCESSES, resolve_config, settings_of
from rorqual.core.errors import ConfigError, InvalidRequestError
from rorqual.launch import Event, Stack, StackPlan, make_plan, stack_settings
from rorqual.launch.plan import WHOLE, WITHOUT_HTTP, flags_for, module_command, reserve_port


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("RORQUAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str], environ: None) -> None:
    assert run(argv) == 0
    page = capsys.readouterr().out
    assert all(command in page for command in ("up", "serve", "chat", "generate"))


@pytest.mark.parametrize(("command", "names"), [("up", WHOLE), ("chat", WITHOUT_HTTP), ("generate", WITHOUT_HTTP)])
def test_help_names_every_setting_in_full_at_80_columns(
    command: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str], environ: None
) -> None:
    assert run([command, "--help"]) == 0
    page = capsys.readouterr().out
    for _, setting in stack_settings(names).values():
        shown = setting.flag.replace("--", "--[no-]", 1) if setting.type is bool else setting.flag
        assert re.search(rf"^  {re.escape(shown)}( |$)", page, re.MULTILINE), shown
    assert max(map(len, page.splitlines())) <= 80


def test_help_of_one_process_needs_no_start(capsys: pytest.CaptureFixture[str], environ: None) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["serve", "scheduler", "--help"])
    assert caught.value.code == 0
    assert "--max-queue-len" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"rorqual {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["upp"], "rorqual: error: No such command 'upp'. Did you mean 'up'?"),
        (["up", "--max-modl-len", "5"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["up", "--no-determinstic"], "unknown flag --no-determinstic; did you mean --no-deterministic?"),
        (["up", "tiny"], "unexpected"),
        (["up", "--port"], "--port"),
        (["generate"], "prompt"),
        (["chat", "--temperature", "warm"], "--temperature"),
        (["chat", "--temperature", "-1"], "temperature must be 0 to 100"),
        (["chat", "--url", "grpc://nowhere"], "the URL must be grpc://host:port"),
        (["chat", "--url", "ftp://host"], "the URL must be"),
        (["chat", "--url", "grpc://127.0.0.1:1", "--dtype", "float32"], "a running server has its own settings"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], environ: None
) -> None:
    assert run(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


# --- flags to processes -------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like one, so that planning does not depend on the applications."""
    monkeypatch.setattr("rorqual.launch.plan.checkout_root", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def plans() -> Iterator[list[StackPlan]]:
    plans: list[StackPlan] = []
    yield plans
    for plan in plans:
        plan.close()


def test_every_setting_reaches_the_processes_that_know_it(checkout: Path, plans: list[StackPlan]) -> None:
    given = {
        "model": "/m",
        "port": "0",
        "max_model_len": "512",
        "deterministic": True,
        "enable_prefix_caching": False,
        "api_key": ("a", "b"),
    }
    plans.append(plan := make_plan(given, environ={}))
    built = {spec.name: resolve_config(PROCESSES[spec.name], spec.argv, {}) for spec in plan.processes}
    assert sorted(built) == sorted(WHOLE)
    for name, config in built.items():
        known = settings_of(PROCESSES[name])
        for key, value in {**given, "max_model_len": 512, "port": 0}.items():
            if key in known:
                assert getattr(config, key) == value
    # The wiring: everybody dials what is held for it.
    assert built["tokenizer"].scheduler == built["executor"].scheduler == built["scheduler"].listen
    assert built["gateway"].tokenizers == (built["tokenizer"].listen,) == (plan.text_address,)
    assert plan.api_key == "a"


def test_gateways_share_one_port_that_is_held_for_them(checkout: Path, plans: list[StackPlan]) -> None:
    plans.append(plan := make_plan({"port": 0}, num_gateways=3, environ={}))
    assert [spec.name for spec in plan.processes if spec.module == "gateway"] == ["gateway", "gateway-2", "gateway-3"]
    configs = [resolve_config(PROCESSES["gateway"], s.argv, {}) for s in plan.processes if s.module == "gateway"]
    assert len({config.port for config in configs}) == 1
    assert configs[0].port > 0
    assert all(config.reuse_port for config in configs)
    with contextlib.ExitStack() as listening:
        for config in configs:
            listening.enter_context(contextlib.closing(bind(config))).listen()
        with pytest.raises(ConfigError, match="taken"):  # another stack does not share it unknowingly
            make_plan({"port": configs[0].port}, num_gateways=3, environ={})
    with pytest.raises(ConfigError, match="--gateways must be 1 to 64"):
        make_plan({"port": 0}, num_gateways=0, environ={})


def metrics_ports(plan: StackPlan) -> dict[str, int]:
    """As the processes are told."""
    return {
        spec.name: resolve_config(PROCESSES[spec.name], spec.argv, {}).telemetry.metrics_port for spec in plan.processes
    }


def free_ports(num: int) -> int:
    """The first of `num` ports in a row that are free now."""
    for first in range(20_000, 32_000, num):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + num):
                held.enter_context(reserve_port(port))
            return first
    raise AssertionError("no free ports")


def test_one_metrics_port_becomes_one_a_process(checkout: Path, plans: list[StackPlan]) -> None:
    first = free_ports(3)
    plans.append(plan := make_plan({"metrics_port": first, "port": 0}, environ={}))
    assert metrics_ports(plan) == {"scheduler": first, "executor": first + 1, "tokenizer": first + 2, "gateway": -1}
    assert plan.metrics == {
        name: f"http://127.0.0.1:{first + offset}/metrics"
        for offset, name in enumerate(("scheduler", "executor", "tokenizer"))
    }


def test_metrics_ports_that_the_system_chooses_are_told(checkout: Path, plans: list[StackPlan]) -> None:
    plans.append(plan := make_plan({"metrics_port": 0, "port": 0}, environ={}))
    ports = metrics_ports(plan)
    assert ports.pop("gateway") == -1
    assert len(set(ports.values())) == 3
    assert plan.metrics == {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}
    plans.append(plan := make_plan({"port": 0}, environ={}))
    assert plan.metrics == {}


def test_a_metrics_port_of_its_own_is_kept(checkout: Path, plans: list[StackPlan], tmp_path: Path) -> None:
    first = free_ports(6)
    config = tmp_path / "rorqual.toml"
    config.write_text(f"metrics_port = {first}\n[executor]\nmetrics_port = {first + 5}\n")
    plans.append(plan := make_plan({"port": 0}, config=str(config), environ={}))
    assert metrics_ports(plan) == {"scheduler": first, "executor": first + 5, "tokenizer": first + 1, "gateway": -1}


def test_a_metrics_port_that_cannot_be_had_is_named_with_whose_it_is(checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} is taken .*--metrics-port \(the executor's metrics, from --metrics-port"
        ):
            make_plan({"port": 0, "metrics_port": port - 1}, environ={})
    with pytest.raises(ConfigError, match=r"the scheduler's metrics.*cannot be on port \d+: it is the port of HTTP"):
        make_plan({"port": (port := free_ports(1)), "metrics_port": port}, environ={})
    with pytest.raises(ConfigError, match=r"there is none above 65535"):
        make_plan({"port": 0, "metrics_port": 65535}, environ={})


def test_a_default_grpc_port_that_is_taken_is_told(
    checkout: Path, plans: list[StackPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("rorqual.launch.plan.DEFAULT_GRPC_PORT", port)
        plans.append(plan := make_plan({"port": 0}, grpc_port=None, environ={}))
        (note,) = plan.notes
        assert f"port {port}, where gRPC is served by default, is taken by another program" in note
        assert f"gRPC is on port {plan.text_address.rpartition(':')[2]} this time" in note
        assert "--grpc-port" in note
        with pytest.raises(ConfigError, match=rf"port {port} is taken on 127.0.0.1 .*--grpc-port"):
            make_plan({"port": 0}, grpc_port=port, environ={})
    plans.append(plan := make_plan({"port": 0}, grpc_port=None, environ={}))
    assert plan.text_address == f"127.0.0.1:{port}"
    assert plan.notes == ()


@pytest.mark.parametrize("process", ["tokenizer", "scheduler"])
def test_an_address_that_a_file_names_is_not_moved(process: str, checkout: Path, tmp_path: Path) -> None:
    config = tmp_path / "rorqual.toml"
    default = PROCESSES[process]().listen
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"[{process}]\nlisten = '{address}'\n")
        with pytest.raises(
            ConfigError, match=rf"is taken on 127.0.0.1: .* choose another with listen in \[{process}\]"
        ):
            make_plan({"port": 0}, config=str(config), environ={})
    config.write_text(f"[{process}]\nlisten = '{default}'\n")  # the default, in so many words
    with contextlib.closing(make_plan({"port": 0}, config=str(config), environ={})) as plan:
        assert (plan.text_address if process == "tokenizer" else plan.scheduler_address) == default


def test_one_address_for_two_is_refused(checkout: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot both listen on 127.0.0.1:\d+ \(from RORQUAL_LISTEN\)"):
        make_plan({"port": 0}, environ={"RORQUAL_LISTEN": f"127.0.0.1:{free_ports(1)}"})


def test_variables_of_opentelemetry_that_are_not_heeded_are_told(checkout: Path, plans: list[StackPlan]) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    plans.append(plan := make_plan({"port": 0}, environ=environ))
    (note,) = plan.notes
    assert "no traces are sent" in note


def test_what_up_announces_has_the_notes_and_the_metrics(
    capsys: pytest.CaptureFixture[str], environ: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rorqual.cli.http.model_name", lambda url, key: "m")
    stack = cast(Stack, SimpleNamespace(url="http://h:1", text_address="h:2"))
    out = Console(highlight=False, soft_wrap=True)
    _announce(stack, out, "", {"scheduler": "http://h:3/metrics"}, ["port 50051 [of ours] is taken"])
    page = capsys.readouterr().out
    assert "Note: port 50051 [of ours] is taken" in page
    assert "metrics: scheduler http://h:3/metrics, gateway http://h:1/metrics" in page
    _announce(stack, out, "", {}, [])
    page = capsys.readouterr().out
    assert "Note" not in page
    assert "metrics" not in page


def test_settings_are_checked_before_anything_starts(checkout: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs must be 1 to 4096"):
        make_plan({"max_num_seqs": "9999"}, environ={})
    with pytest.raises(ConfigError, match="RORQUAL_MAX_NUM_SEQZ"):
        make_plan({}, environ={"RORQUAL_MAX_NUM_SEQZ": "1"})


def test_an_outer_launcher_s_files_are_not_the_children_s(checkout: Path, plans: list[StackPlan]) -> None:
    environ = {"RORQUAL_PORT_FILE": "/x", "RORQUAL_READY_FILE": "/y", "RORQUAL_LOG_LEVEL": "debug"}
    plans.append(plan := make_plan({"port": 0}, environ=environ))
    assert "RORQUAL_PORT_FILE" not in plan.environ
    assert "RORQUAL_READY_FILE" not in plan.environ
    assert plan.environ["RORQUAL_LOG_LEVEL"] == "debug"


def test_flags_keep_their_values_whole() -> None:
    assert flags_for("executor", {"model": "a b=c", "deterministic": False, "port": 1, "dtype": None}) == [
        "--model=a b=c",
        "--no-deterministic",
    ]


def test_the_current_folder_does_not_shadow_the_modules() -> None:
    assert module_command("executor", ["--seed=1"])[1:] == ["-P", "-m", "executor", "--seed=1"]


# --- what is shown ------------------------------------------------------------------------------------------------


def test_log_lines_are_split() -> None:
    line = "2026-01-01 12:00:00,000 ERROR   executor executor.weights: lost [it]"
    assert split_log_line(line) == ("ERROR", "lost [it]")
    assert split_log_line("Traceback (most recent call last):") == ("", "Traceback (most recent call last):")


def test_plain_progress_is_lines_and_errors_show(capsys: pytest.CaptureFixture[str], environ: None) -> None:
    progress = StartProgress(["executor"])
    with progress:
        progress.on_event(Event("starting", "executor"))
        progress.on_event(Event("ready", "executor"))
    progress.on_event(Event("log", "executor", "2026-01-01 12:00:00,000 ERROR   executor x: lost [red]it[/red]"))
    progress.on_event(Event("log", "executor", "2026-01-01 12:00:00,000 INFO    executor x: fine"))
    progress.on_event(Event("died", "executor", "signal SIGKILL"))
    progress.on_event(Event("ready", "executor"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "starting executor"
    assert lines[1].startswith("executor is ready after ")
    assert lines[2].startswith("ready in ")
    assert lines[3:] == ["executor lost [red]it[/red]", "executor died: signal SIGKILL", "executor is ready again"]


def test_the_body_of_an_http_request_has_what_was_given() -> None:
    assert http._body(SamplingParams()) == {"stream": True}
    params = SamplingParams(temperature=0, top_k=0, max_tokens=5, stop="x")
    assert http._body(params) == {"temperature": 0, "top_k": 0, "max_tokens": 5, "stop": ["x"], "stream": True}
    with pytest.raises(InvalidRequestError, match="URL"):
        list(http.stream_chat("nowhere", [], SamplingParams()))
