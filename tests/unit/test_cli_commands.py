"""The command line: help a person can follow, flags that reach the processes that know them, failures in one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.server import bind
from rorqual import __version__
from rorqual.cli import http
from rorqual.cli.app import run
from rorqual.cli.progress import StartProgress, split_log_line
from rorqual.client import SamplingParams
from rorqual.core.config_loader import PROCESSES, resolve_config, settings_of
from rorqual.core.errors import ConfigError, InvalidRequestError
from rorqual.launch import Event, StackPlan, make_plan, stack_settings
from rorqual.launch.plan import WHOLE, WITHOUT_HTTP, flags_for, module_command


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


def test_one_metrics_port_becomes_one_a_process(checkout: Path, plans: list[StackPlan]) -> None:
    plans.append(plan := make_plan({"metrics_port": 9100, "port": 0}, environ={}))
    ports = {
        spec.name: resolve_config(PROCESSES[spec.name], spec.argv, {}).telemetry.metrics_port for spec in plan.processes
    }
    assert ports == {"scheduler": 9100, "executor": 9101, "tokenizer": 9102, "gateway": -1}


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
