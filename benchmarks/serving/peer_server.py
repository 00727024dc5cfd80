"""Another engine's server, started by its own command line and measured over HTTP as ours is.

It must have `/health`, `/v1/models`, `/tokenize` and streamed `/v1/completions` with usage, as `vllm serve` has.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_STOP_S = 15.0


class PeerError(RuntimeError):
    """The peer did not start. The message ends with its log's last lines."""


@dataclass
class Peer:
    """A running server. `name` is its owner and version by its own words, `model` what requests must call the model."""

    process: subprocess.Popen[bytes]
    url: str
    name: str
    model: str
    vocab: list[str]
    ready_s: float
    num_added: int | None = None  # tokens that its tokenizer adds to a prompt

    @property
    def request_fields(self) -> dict[str, Any]:
        return {"model": self.model}

    def executor(self) -> dict[str, float]:
        """It has none of our metrics."""
        return {}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, of its processes together."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return {"server": total}


def end_blocks_on_sigterm() -> None:
    """Make SIGTERM, as `timeout` sends it, an exit that ends what is open: a peer left alone would hold the GPU."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def start_peer(command: str, port: int, vocab: list[str], log: Path, timeout_s: float) -> Iterator[Peer]:
    """Runs `command`, which must listen on `port` of the loopback, until the block ends; ready within `timeout_s`.

    All processes of its group end with the block. Raises PeerError.
    """
    url, started_s = f"http://127.0.0.1:{port}", time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(shlex.split(command), stdout=out, stderr=subprocess.STDOUT, process_group=0)
    except (OSError, ValueError) as error:  # no such program, or a quote that is not closed
        raise PeerError(f"cannot be started: {error}") from error
    try:
        while not _is_healthy(url):
            if process.poll() is not None:
                raise PeerError(f"ended with {process.returncode} while starting\n{_last_lines(log)}")
            if time.perf_counter() - started_s > timeout_s:
                raise PeerError(f"not ready after {timeout_s:.0f} s\n{_last_lines(log)}")
            time.sleep(0.1)
        ready_s = time.perf_counter() - started_s
        model = _get(f"{url}/v1/models")["data"][0]
        try:
            release = _get(f"{url}/version")["version"]
        except urllib.error.HTTPError:
            release = ""
        peer = Peer(process, url, f"{model['owned_by']} {release}".strip(), model["id"], vocab, ready_s)
        print(f"peer {peer.name} ready after {ready_s:.1f} s at {url}", flush=True)
        yield peer
    finally:
        _stop(process)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError is one, and so is a refused connection
        return False


def _last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(line[:400] for line in log.read_text(errors="replace").splitlines()[-count:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Its whole group: those that ignore SIGTERM, or outlive their parent, are killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
