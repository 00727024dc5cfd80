"""One configuration, three sources: precedence, round trips, refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.core.config import ExecutorConfig, GatewayConfig, SchedulerConfig, TelemetryConfig, TokenizerConfig
from rorqual.core.config_loader import PROCESSES, Setting, load_config, resolve_config, settings_of
from rorqual.core.errors import ConfigError

CLASSES = tuple(PROCESSES.values())

# --- values that a configuration may have -------------------------------------------------------------------------

# "--" alone means "no more flags", in argparse even after a "=".
WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_./", min_size=1, max_size=12).filter(lambda word: word != "--")
ADDRESS = st.builds(
    "{}:{}".format, st.sampled_from(["127.0.0.1", "scheduler", "[::1]", "0.0.0.0"]), st.integers(0, 65535)
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "listen": ADDRESS,
    "scheduler": ADDRESS,
    "tokenizers": st.lists(ADDRESS, min_size=1, max_size=3).map(tuple),
    "api_key": st.lists(st.text("ABCxyz019_-", min_size=1, max_size=8), max_size=3).map(tuple),
    "cors_allow_origins": st.lists(st.sampled_from(["*", "https://a.example", "http://[::1]:8080"]), max_size=2).map(
        tuple
    ),
    "trace_sample_ratio": st.floats(0, 1),
    "metrics_port": st.integers(-1, 65535),
    "port": st.integers(0, 65535),
    "max_model_len": st.just(0) | st.integers(2, 2**20),
    "max_num_seqs": st.integers(1, 64),
    "max_num_batched_tokens": st.integers(128, 2**20),
    "max_queue_len": st.integers(1, 10**6),
    "peer_timeout_s": st.floats(1.01, 1e6),
    "priority_ageing_s": st.just(0.0) | st.floats(1.0, 86400.0),
    "restart_wait_s": st.floats(0.0, 60.0),
    "request_timeout_s": st.floats(0.01, 1e6),
    "keep_alive_s": st.floats(0, 3600),
    "body_timeout_s": st.floats(0.01, 3600),
    "head_timeout_s": st.floats(0.01, 3600),
    "best_priority": st.integers(-(2**31), 2**31 - 1),
    "gpu_memory_utilization": st.floats(0.01, 1.0),
    "max_body_bytes": st.integers(1024, 2**40),
    "sim_num_blocks": st.integers(1, 2**20),
    "sim_num_drafts": st.integers(0, 64),
}
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: WORD,
    bool: st.booleans(),
    int: st.integers(0, 2**31),
    float: st.floats(0.01, 1e6),
    tuple[str, ...]: st.lists(WORD, max_size=3).map(tuple),
}


def value_of(setting: Setting) -> st.SearchStrategy[Any]:
    if setting.choices:
        return st.sampled_from(setting.choices)
    return SPECIAL[setting.name] if setting.name in SPECIAL else BY_TYPE[setting.type]


@st.composite
def class_and_values(draw: st.DrawFn) -> tuple[type, dict[str, Any]]:
    cls = draw(st.sampled_from(CLASSES))
    known = settings_of(cls)
    names = draw(st.lists(st.sampled_from(sorted(known)), unique=True))
    return cls, {name: draw(value_of(known[name])) for name in names}


def expected(cls: type, values: dict[str, Any]) -> Any:
    common = {f.name for f in dataclasses.fields(TelemetryConfig)}
    own = {k: v for k, v in values.items() if k not in common}
    return cls(**own, telemetry=TelemetryConfig(**{k: v for k, v in values.items() if k in common}))


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_flags(cls: type, values: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in values.items():
        flag = settings_of(cls)[name].flag
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            argv.append(f"{flag}={as_text(value)}")
    return argv


def as_environ(values: dict[str, Any]) -> dict[str, str]:
    return {f"RORQUAL_{name.upper()}": as_text(value) for name, value in values.items()}


def as_toml(values: dict[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        shown = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name} = {json.dumps(shown, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


# --- round trips --------------------------------------------------------------------------------------------------


@given(class_and_values())
def test_flags_round_trip(case: tuple[type, dict[str, Any]]) -> None:
    cls, values = case
    assert resolve_config(cls, as_flags(cls, values), {}) == expected(cls, values)


@given(class_and_values())
def test_environment_round_trip(case: tuple[type, dict[str, Any]]) -> None:
    cls, values = case
    values = {k: v for k, v in values.items() if as_text(v) != ""}  # an empty variable counts as not set
    assert resolve_config(cls, [], as_environ(values)) == expected(cls, values)


@given(class_and_values(), st.booleans())
def test_file_round_trip(case: tuple[type, dict[str, Any]], in_table: bool) -> None:
    cls, values = case
    process = next(name for name, known in PROCESSES.items() if known is cls)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rorqual.toml"
        path.write_text((f"[{process}]\n" if in_table else "") + as_toml(values), encoding="utf-8")
        assert resolve_config(cls, [f"--config={path}"], {}) == expected(cls, values)
        assert resolve_config(cls, [], {"RORQUAL_CONFIG": str(path)}) == expected(cls, values)


@given(class_and_values(), class_and_values(), class_and_values())
def test_flags_win_over_environment_over_file(
    first: tuple[type, dict[str, Any]], second: tuple[type, dict[str, Any]], third: tuple[type, dict[str, Any]]
) -> None:
    cls, flags = first
    known = settings_of(cls)
    environ = {k: v for k, v in second[1].items() if k in known and as_text(v) != ""}
    file = {k: v for k, v in third[1].items() if k in known}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rorqual.toml"
        path.write_text(as_toml(file), encoding="utf-8")
        config = resolve_config(cls, [*as_flags(cls, flags), "--config", str(path)], as_environ(environ))
    assert config == expected(cls, {**file, **environ, **flags})


def test_defaults_are_the_classes_own() -> None:
    for cls in CLASSES:
        assert resolve_config(cls, [], {}) == cls()


def test_another_process_s_settings_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(
        'max_model_len = 512\nport = 9000\n[scheduler]\nmax_queue_len = 7\n[executor]\ndtype = "float32"\n'
        "[gateway]\nport = 9001\n"
    )
    environ = {"RORQUAL_CONFIG": str(path), "RORQUAL_MAX_BODY_BYTES": "2048"}
    assert resolve_config(SchedulerConfig, [], environ) == SchedulerConfig(max_model_len=512, max_queue_len=7)
    assert resolve_config(ExecutorConfig, [], environ) == ExecutorConfig(max_model_len=512, dtype="float32")
    assert resolve_config(GatewayConfig, [], environ) == GatewayConfig(port=9001, max_body_bytes=2048)
    assert resolve_config(TokenizerConfig, [], environ) == TokenizerConfig()


def test_the_launcher_s_own_variables_are_known() -> None:
    environ = {"RORQUAL_PORT_FILE": "/x", "RORQUAL_READY_FILE": "/y", "PATH": "/bin"}
    assert resolve_config(SchedulerConfig, [], environ) == SchedulerConfig()


def test_a_time_s_unit_may_be_left_out() -> None:
    assert resolve_config(SchedulerConfig, ["--peer-timeout", "5"], {}).peer_timeout_s == 5
    assert resolve_config(SchedulerConfig, [], {"RORQUAL_PEER_TIMEOUT": "6"}).peer_timeout_s == 6


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_switches_take_the_usual_words(text: str) -> None:
    assert resolve_config(ExecutorConfig, [], {"RORQUAL_DETERMINISTIC": text}).deterministic


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSED_FLAGS = [
    (["--max-modl-len", "5"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
    (["--max-modl-len=5"], "unknown flag --max-modl-len; did you mean --max-model-len?"),
    (["--no-determinstic"], "did you mean --no-deterministic?"),
    (["--max-model", "5"], "unknown flag --max-model;"),  # no abbreviations: a later flag would change their meaning
    (["--zzz"], "unknown flag --zzz"),
    (["tiny"], "unexpected argument 'tiny'"),
    (["--max-model-len"], "--max-model-len needs a value"),
    (["--max-model-len", "many"], "--max-model-len must be a whole number, got 'many'"),
    (["--max-model-len", "1"], "--max-model-len must be 0, or at least 2, got 1"),
    (["--dtype", "bfloat15"], "did you mean bfloat16?"),
    (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be above 0 and at most 1, got 1.5"),
    (["--gpu-memory-utilization", "nan"], "must be a finite number"),
    (["--scheduler", "nowhere"], "--scheduler must be host:port"),
    (["--trace-sample-ratio", "2"], "--trace-sample-ratio must be between 0 and 1, got 2.0"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED_FLAGS)
def test_flags_are_refused_with_the_nearest_name(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(ExecutorConfig, argv, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


REFUSED_ENVIRON = [
    ({"RORQUAL_MAX_MODEL_LEM": "5"}, "unknown variable RORQUAL_MAX_MODEL_LEM; did you mean RORQUAL_MAX_MODEL_LEN?"),
    ({"RORQUAL_max_model_len": "5"}, "unknown variable RORQUAL_max_model_len"),
    ({"RORQUAL_MAX_MODEL_LEN": "5k"}, "RORQUAL_MAX_MODEL_LEN must be a whole number, got '5k'"),
    ({"RORQUAL_DETERMINISTIC": "maybe"}, "RORQUAL_DETERMINISTIC must be true or false, got 'maybe'"),
    ({"RORQUAL_MAX_MODEL_LEN": "1"}, "(from RORQUAL_MAX_MODEL_LEN)"),
    ({"RORQUAL_CONFIG": "/nonexistent.toml"}, "cannot read the configuration file /nonexistent.toml"),
]


@pytest.mark.parametrize(("environ", "message"), REFUSED_ENVIRON)
def test_variables_are_refused_with_the_nearest_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(ExecutorConfig, [], environ)
    assert message in str(caught.value)


REFUSED_FILES = [
    ("max_model_lem = 5", "unknown key max_model_lem in", "did you mean max_model_len?"),
    ("[schedular]\n", "unknown table schedular in", "did you mean scheduler?"),
    ("[scheduler]\nmax_queue_lem = 1", "unknown key max_queue_lem in [scheduler]", "did you mean max_queue_len?"),
    ("[scheduler]\ndtype = 'auto'", "unknown key dtype in [scheduler]", ""),
    ("max_model_len = '5'", "max_model_len in", "must be a whole number, got '5'"),
    ("max_model_len = true", "max_model_len in", "must be a whole number, got True"),
    ("deterministic = 1", "deterministic in", "must be true or false, got 1"),
    ("tokenizers = [1]", "tokenizers in", "must be a list of texts"),
    ("max_model_len = 1", "--max-model-len must be 0, or at least 2, got 1", "(from max_model_len in"),
    ("gateway = 1", "[gateway] in", "must be a table"),
    ("max_model_len = ", "is not valid TOML", "Invalid value"),
    # A fault in another process's table is a fault of the file.
    ("[gateway]\nport = 'x'", "port in [gateway]", "must be a whole number"),
]


@pytest.mark.parametrize(("text", "message", "more"), REFUSED_FILES)
def test_files_are_refused_with_the_nearest_name(tmp_path: Path, text: str, message: str, more: str) -> None:
    path = tmp_path / "rorqual.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve_config(ExecutorConfig, [], {"RORQUAL_CONFIG": str(path)})
    assert message in str(caught.value)
    assert more in str(caught.value)


def test_a_byte_order_mark_before_a_file_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "rorqual.toml"
    path.write_bytes(b"\xef\xbb\xbfmax_model_len = 99\n")
    assert resolve_config(ExecutorConfig, [], {"RORQUAL_CONFIG": str(path)}).max_model_len == 99


def test_a_secret_is_not_repeated_in_a_refusal() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(GatewayConfig, ["--api-key", "s3cret with blank"], {})
    assert "s3cret" not in str(caught.value)


def test_a_refused_start_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(SchedulerConfig, ["--max-queue-lem", "1"], prog="scheduler", environ={})
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "scheduler: error: unknown flag --max-queue-lem; did you mean --max-queue-len?\n"
    assert captured.out == ""


def test_help_names_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    for name, cls in PROCESSES.items():
        with pytest.raises(SystemExit) as caught:
            load_config(cls, ["--help"], prog=name, environ={})
        assert caught.value.code == 0
        page = capsys.readouterr().out
        for setting in settings_of(cls).values():
            assert setting.flag in page
            assert setting.help.split()[0] in page


def test_loading_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, rorqual.core.config_loader; print([m for m in ('torch', 'grpc', 'typer') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
