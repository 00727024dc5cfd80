"""What a refusal suggests: names that are spelled or mean alike, and the truth where there is no counterpart."""

from __future__ import annotations

import pytest

from rorqual.cli.app import run
from rorqual.core.config import ExecutorConfig, GatewayConfig
from rorqual.core.config_loader import PROCESSES, resolve_config, settings_of
from rorqual.core.errors import ConfigError
from rorqual.core.suggestions import _COMMANDS, _FLAGS, nearest, of_command, of_flag

OURS = {setting.flag for cls in PROCESSES.values() for setting in settings_of(cls).values()}
OF_THE_COMMAND = {"--gateways", "--grpc-port", "--log-dir"}
COMMANDS = ("up", "serve", "chat", "generate", "simulate")


def test_no_name_of_ours_is_called_foreign() -> None:
    assert not {f"--{name}" for name in _FLAGS} & (OURS | OF_THE_COMMAND)
    assert not set(_COMMANDS) & set(COMMANDS)


def test_every_counterpart_is_there() -> None:
    negated = {flag.replace("--", "--no-", 1) for flag in OURS}
    targets = {meant for meant in _FLAGS.values() if meant.startswith("--")}
    assert targets
    assert targets <= OURS | negated | OF_THE_COMMAND
    assert {meant for meant in _COMMANDS.values() if meant.isalpha()} <= set(COMMANDS)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--ssl-keyfile", ["TLS is not served here", "put a proxy"]),
        ("--context-length", ["here that is --max-model-len"]),
        ("--mem-fraction-static", ["here that is --gpu-memory-utilization"]),
        ("--disable-radix-cache", ["here that is --no-enable-prefix-caching"]),
        ("--tool-call-parser", ["here that is --chat-format"]),
        ("--tensor-parallel-size", ["no parallelism"]),
        ("-tp", ["no parallelism"]),
        ("--no-enable-chunked-prefill", ["always computed in chunks"]),
        ("--api-server-count", ["here that is --gateways"]),
        ("--max-modl-len", ["did you mean --max-model-len?"]),
    ],
)
def test_flags_of_the_command(flag: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", flag, "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rorqual up: error: unknown flag {flag}; ")
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "words"),
    [
        (["--ssl-certfile=x"], {}, "", "TLS is not served here"),
        (["--max-running-requests", "2"], {}, "", "here that is --max-num-seqs"),
        (["--max-queued-requests", "2"], {}, "", "--max-queue-len is what comes nearest, which this process does not"),
        ([], {"RORQUAL_CONTEXT_LENGTH": "9"}, "", "here that is RORQUAL_MAX_MODEL_LEN"),
        ([], {"RORQUAL_SSL_KEYFILE": "k"}, "", "TLS is not served here"),
        ([], {}, "context_length = 9", "here that is max_model_len"),
        ([], {}, "[executor]\nquantization = 'fp8'", "how the weights are stored is read from the checkpoint"),
        (["--frobnicate"], {}, "", "unknown flag --frobnicate"),
    ],
)
def test_flags_variables_and_keys_of_a_process(
    argv: list[str], environ: dict[str, str], toml: str, words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("config") / "rorqual.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        resolve_config(ExecutorConfig, [*argv, f"--config={file}"], environ)
    assert words in caught.value.message


def test_a_flag_that_means_nothing_near_has_no_end() -> None:
    with pytest.raises(ConfigError, match=r"^unknown flag --zzz$"):
        resolve_config(GatewayConfig, ["--zzz"], {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pu", "; did you mean up?"),
        ("caht", "; did you mean chat?"),
        ("start", "; did you mean up?"),
        ("complete", "; did you mean generate?"),
        ("stop", "Ctrl-C or SIGTERM ends it"),
        ("/models/v2-lite", "`rorqual up --model /models/v2-lite`"),
        ("frobnicate", ""),
    ],
)
def test_commands(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in of_command(command, COMMANDS)
    assert bool(of_command(command, COMMANDS)) == bool(words)
    assert run([command]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert command in error
    assert words.removeprefix("; ").removesuffix("?").removeprefix("did you mean ") in error.replace("'", "")


def test_vllms_way_to_serve_is_told_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "/models/v2-lite", "--port", "1"]) == 2
    assert "to serve a checkpoint: `rorqual up --model /models/v2-lite`" in capsys.readouterr().err
    assert run(["up", "/models/v2-lite"]) == 2
    assert "a checkpoint is given with --model" in capsys.readouterr().err


def test_two_letters_in_the_wrong_order_are_near_and_others_are_not() -> None:
    assert nearest("pu", ["up", "chat"]) == "; did you mean up?"
    assert nearest("xy", ["up", "chat"]) == ""
    assert of_flag("--zz", ["--up"]) == ""
