"""`rorqual up` as a person runs it: ready, ended, killed, refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rorqual import LLM, SamplingParams
from rorqual.core.errors import ConfigError
from rorqual.launch import StackError
from rorqual.launch.plan import module_environ

ROOT = Path(__file__).resolve().parents[2]
WaitUntil = Callable[..., None]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "rorqual.cli", *argv]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RORQUAL_")}
    return {**module_environ(ROOT, clean), "RORQUAL_PORT_FILE": str(tmp_path / "port"), "NO_COLOR": "1"}


class Up:
    """A running `rorqual up`."""

    def __init__(self, served_model: Any, environ: dict[str, str], folder: Path, wait_until: WaitUntil) -> None:
        self.output = folder / "output"
        self.children: list[int] = []
        flags = ["--port=0", "--grpc-port=0", "--metrics-port=0", f"--log-dir={folder / 'logs'}", *served_model.flags]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command("up", *flags), env=environ, stdout=output, stderr=output, cwd=folder
            )
        port_file = Path(environ["RORQUAL_PORT_FILE"])
        wait_until(lambda: port_file.exists() or self.process.poll() is not None, "the port file", 60)
        assert self.process.poll() is None, self.output.read_text()
        self.url = f"http://127.0.0.1:{port_file.read_text()}"
        launcher = psutil.Process(self.process.pid)
        self.parts = [child.pid for child in launcher.children()]
        self.children = [child.pid for child in launcher.children(recursive=True)]  # parts have processes of their own

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.children:  # a failing test leaves nothing behind either
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def up(served_model: Any, environ: dict[str, str], tmp_path: Path, wait_until: WaitUntil) -> Iterator[Up]:
    up = Up(served_model, environ, tmp_path, wait_until)
    yield up
    up.close()


def test_up_serves_and_sigterm_ends_all_four(up: Up, wait_until: WaitUntil, tmp_path: Path) -> None:
    assert httpx.get(f"{up.url}/health").status_code == 200
    assert len(up.parts) == 4
    wait_until(lambda: "Ctrl-C ends all processes" in up.output.read_text(), "the sample is done", 60)
    text = up.output.read_text()
    assert f"curl -N {up.url}/v1/chat/completions" in text
    assert "> Tell me a short story" in text
    assert "the sample failed" not in text
    assert sorted(p.name for p in (tmp_path / "logs").glob("*.log")) == [
        "executor.log",
        "gateway.log",
        "scheduler.log",
        "tokenizer.log",
    ]
    line = next(line for line in text.splitlines() if line.startswith("metrics: "))
    for told in line.removeprefix("metrics: ").split(", "):
        name, url = told.split()
        assert f"rorqual_{name}_" in httpx.get(url).text or (name, url) == ("gateway", f"{up.url}/metrics")
    # The curl line works as it is printed.
    line = next(line for line in text.splitlines() if line.startswith("curl "))
    if shutil.which("curl"):
        pasted = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        assert pasted.stdout.rstrip().endswith("data: [DONE]")

    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(20) == 0
    assert all(gone(pid) for pid in up.children)


def test_a_killed_launcher_leaves_no_orphan(up: Up, wait_until: WaitUntil) -> None:
    up.process.kill()
    up.process.wait()
    wait_until(lambda: all(gone(pid) for pid in up.children), "the four end with the launcher", 10)


def refused(environ: dict[str, str], *argv: str) -> str:
    """What a command line that is refused says: exit code 2 and one line on stderr."""
    result = subprocess.run(command(*argv), env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    message = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(message) == 1, result.stderr
    return message[0]


def test_an_unknown_flag_is_refused_with_the_nearest(environ: dict[str, str]) -> None:
    assert refused(environ, "up", "--max-modl-len", "5").endswith(
        "unknown flag --max-modl-len; did you mean --max-model-len?"
    )
    assert "did you mean --max-queue-len?" in refused(environ, "serve", "scheduler", "--max-queue-lem", "5")
    assert "Did you mean 'generate'?" in refused(environ, "generat", "x")


def test_unknown_variables_and_keys_are_refused(environ: dict[str, str], tmp_path: Path) -> None:
    message = refused({**environ, "RORQUAL_MAX_MODEL_LEM": "5"}, "up")
    assert message.endswith("unknown variable RORQUAL_MAX_MODEL_LEM; did you mean RORQUAL_MAX_MODEL_LEN?")
    config = tmp_path / "rorqual.toml"
    config.write_text("[executor]\ndtyp = 'auto'\n")
    assert "unknown key dtyp in [executor]" in refused(environ, "up", "--config", str(config))


def test_a_taken_port_is_named_with_its_cure(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(environ, "up", "--port", str(port))
    assert f"port {port} is taken on 127.0.0.1" in message
    assert "--port" in message
    assert "ss -ltnp" in message


def test_a_missing_shard_is_named_before_anything_is_served(
    environ: dict[str, str], served_model: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in served_model.path.glob("*.json"):
        shutil.copy(file, folder)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    flags = [f"--model={folder}", "--port=0", "--grpc-port=0", f"--log-dir={tmp_path / 'logs'}"]
    message = refused(environ, "up", *flags)
    assert "model-00001-of-00002.safetensors" in message


def test_a_bare_wheel_says_that_it_is_only_the_client(tmp_path: Path, environ: dict[str, str]) -> None:
    shutil.copytree(ROOT / "rorqual", tmp_path / "site" / "rorqual", ignore=shutil.ignore_patterns("__pycache__"))
    alone = {**environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *argv],
            env=alone,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
        )

    for argv in (["up"], ["serve", "executor"], ["chat"], ["generate", "x"]):
        result = run("-m", "rorqual.cli", *argv)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        assert "only the client" in result.stderr
        assert "make serve" in result.stderr
    code = "from rorqual import LLM, SamplingParams; LLM(url='grpc://127.0.0.1:9').close(); print('fine')"
    assert run("-c", code).stdout == "fine\n"


def test_the_python_api_starts_and_ends_its_own_processes(served_model: Any) -> None:
    settings = {**served_model.settings, "max_num_seqs": 4, "max_model_len": 512}
    with LLM(model=str(served_model.path), **settings) as llm:
        pids = llm.pids
        assert sorted(pids) == ["executor", "scheduler", "tokenizer"]
        outputs = llm.generate(["Once", "upon"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert all(gone(pid) for pid in pids.values())


def test_the_python_api_leaves_nothing_behind_when_the_program_ends(served_model: Any, environ: dict[str, str]) -> None:
    code = (
        "from rorqual import LLM\n"
        f"llm = LLM(model={str(served_model.path)!r}, **{served_model.settings!r})\n"
        "print(*llm.pids.values(), flush=True)\n"  # and no close()
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


def test_unknown_settings_of_the_python_api_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting max_modl_len; did you mean max_model_len\?"):
        LLM(max_modl_len=5)


def test_the_python_api_names_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises((StackError, ConfigError), match=str(tmp_path)):
        LLM(model=str(tmp_path))
