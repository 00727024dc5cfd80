"""Times the embedded model on this machine's CPU: ours over HTTP against `transformers`' generate, in one run.

Both answer the same prompts, greedily, with the same number of new tokens. The two take turns (ours, theirs, ours, …) so that
a drifting machine speed hits both; the median of the rounds is reported. While one runs the other is idle. Ours is measured
through HTTP streaming with all four processes on the machine; theirs is a bare call in a process of its own.

    python benchmarks/serving/bench_cpu.py [--model DIR] [--new-tokens 64] [--rounds 3] [--out FILE]

The last line is one JSON object. Ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS = 16
PROMPTS = [
    f"Tell me a short story about a {animal} that finds a {thing}."
    for animal, thing in zip(
        "fox owl cat dog hen bear mouse frog duck goat wolf seal crab lion swan deer".split(),
        "kite lamp drum boat key map bell book coin ring rope shoe hat cup door star".split(),
        strict=True,
    )
]


@dataclass
class Run:
    """One measured run of a group of prompts."""

    tokens: int
    wall_s: float
    ttft_s: list[float] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.wall_s


# --- ours ---------------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def stack(model: Path, *flags: str) -> Iterator[tuple[str, float, psutil.Process]]:
    """Our four processes; yields the URL, the seconds until /health said ready, and the launcher."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "rorqual.cli",
        "up",
        "--model",
        str(model),
        "--port",
        str(port),
        "--no-sample",
        *flags,
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(
                    f"`{' '.join(command)}` ended with {process.returncode}:\n{process.stderr.read() if process.stderr else ''}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=1.0).status_code == 200:
                    break
            if time.perf_counter() - start > 120:
                raise SystemExit("the stack was not ready within 120 s")
            time.sleep(0.02)
        yield url, time.perf_counter() - start, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def stream_one(client: httpx.AsyncClient, url: str, prompt: str, new_tokens: int) -> tuple[int, float]:
    """Stream one completion; returns its token count and seconds to the first chunk."""
    body = {
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or time.perf_counter() - start
            usage = json.loads(line[6:]).get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
    return tokens, first


def ours(url: str, prompts: list[str], new_tokens: int, concurrent: bool) -> Run:
    async def run() -> Run:
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=64)) as client:
            start = time.perf_counter()
            if concurrent:
                results = await asyncio.gather(*(stream_one(client, url, p, new_tokens) for p in prompts))
            else:
                results = [await stream_one(client, url, p, new_tokens) for p in prompts]
            return Run(sum(r[0] for r in results), time.perf_counter() - start, [r[1] for r in results])

    return asyncio.run(run())


# --- theirs (a process of its own, told what to do over its stdin) ----------------------------------------------------------------

PEER = r"""
import json, sys, time, warnings, torch
warnings.filterwarnings("ignore")
from transformers import AutoTokenizer, AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error(); logging.disable_progress_bar()
path, dtype = sys.argv[1], sys.argv[2]
torch.set_num_threads(2)
tok = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
model.generation_config.do_sample = False
for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"): setattr(model.generation_config, name, None)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    groups = [job["prompts"]] if job["batch"] else [[p] for p in job["prompts"]]
    tokens, start = 0, time.perf_counter()
    with torch.inference_mode():
        for group in groups:
            inputs = tok(group, return_tensors="pt", padding=True)
            inputs.pop("token_type_ids", None)
            out = model.generate(**inputs, do_sample=False, max_new_tokens=job["n"], min_new_tokens=job["n"], pad_token_id=tok.pad_token_id)
            tokens += (out.shape[1] - inputs["input_ids"].shape[1]) * len(group)
    print(json.dumps([tokens, time.perf_counter() - start]), flush=True)
"""


class Peer:
    """`transformers` in a process of its own."""

    def __init__(self, model: Path, dtype: str) -> None:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(model), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the transformers process ended; its error stands above")
        return json.loads(line)

    def run(self, prompts: list[str], new_tokens: int, batch: bool) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "n": new_tokens, "batch": batch}) + "\n")
        self._process.stdin.flush()
        return Run(*self._read())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


# --- the comparison ---------------------------------------------------------------------------------------------------------------


def median(runs: list[Run]) -> float:
    return statistics.median(r.tok_s for r in runs)


def rss_mib(launcher: psutil.Process) -> dict[str, float]:
    """Resident memory of each of the four processes."""
    names = {
        "gateway": "gateway",
        "services.tokenizer": "tokenizer",
        "services.scheduler": "scheduler",
        "executor": "executor",
    }
    found: dict[str, float] = {}
    for child in launcher.children(recursive=True):
        command = child.cmdline()
        if "-m" in command and (name := names.get(command[command.index("-m") + 1])):
            found[name] = round(child.memory_info().rss / 2**20, 1)
    return found


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in Path("/proc/cpuinfo").read_text()]
    return {
        "cpu": cpu, "isa": flags, "cores": os.cpu_count(), "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "grpcio", "uvicorn")}, "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-dtype", default="bfloat16", help="bfloat16 is what transformers takes by default from the checkpoint"
    )
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    n: int = args.new_tokens

    with stack(args.model):
        pass  # fills the page cache and compiles bytecode: the next start is a warm one
    peers = {dtype: Peer(args.model, dtype) for dtype in dict.fromkeys((args.peer_dtype, "float32"))}
    results: dict[str, list[Run]] = {}

    def record(name: str, run: Run) -> None:
        results.setdefault(name, []).append(run)
        print(
            f"{name:34s} {run.tok_s:8.1f} tok/s"
            + (f"   first token {1000 * statistics.median(run.ttft_s):6.1f} ms" if run.ttft_s else ""),
            flush=True,
        )

    with stack(args.model) as (url, ready_s, launcher):
        cold = ours(url, PROMPTS[:1], 1, concurrent=False)
        ours(url, PROMPTS[:2], 16, concurrent=True)
        for peer in peers.values():
            peer.run(PROMPTS[:2], 8, batch=True)
        single = PROMPTS[:4]
        for _ in range(args.rounds):
            record("ours, 1 stream", ours(url, single, n, concurrent=False))
            for dtype, peer in peers.items():
                record(f"transformers {dtype}, 1 by 1", peer.run(single, n, batch=False))
            record("ours, 16 streams", ours(url, PROMPTS, n, concurrent=True))
            for dtype, peer in peers.items():
                record(f"transformers {dtype}, batch 16", peer.run(PROMPTS, n, batch=True))
        memory = rss_mib(launcher)
    for peer in peers.values():
        peer.close()

    with stack(args.model, "--deterministic") as (url, _, _), stack(args.model) as (plain_url, _, _):
        for u in (url, plain_url):
            ours(u, PROMPTS[:2], 16, concurrent=True)
        for _ in range(args.rounds):
            record("deterministic, 1 stream", ours(url, single, n, concurrent=False))
            record("default, 1 stream", ours(plain_url, single, n, concurrent=False))
            record("deterministic, 16 streams", ours(url, PROMPTS, n, concurrent=True))
            record("default, 16 streams", ours(plain_url, PROMPTS, n, concurrent=True))

    rate = {name: median(runs) for name, runs in results.items()}
    peer_name = f"transformers {args.peer_dtype}"
    summary = {
        "single_stream_ratio": round(rate["ours, 1 stream"] / rate[f"{peer_name}, 1 by 1"], 2),
        "streams16_ratio": round(rate["ours, 16 streams"] / rate[f"{peer_name}, 1 by 1"], 2),
        "streams16_vs_padded_batch_ratio": round(rate["ours, 16 streams"] / rate[f"{peer_name}, batch 16"], 2),
        "against_transformers_float32": {
            "single_stream_ratio": round(rate["ours, 1 stream"] / rate["transformers float32, 1 by 1"], 2),
            "streams16_ratio": round(rate["ours, 16 streams"] / rate["transformers float32, 1 by 1"], 2),
            "streams16_vs_padded_batch_ratio": round(
                rate["ours, 16 streams"] / rate["transformers float32, batch 16"], 2
            ),
        },
        "deterministic_share_of_default": {
            "1": round(rate["deterministic, 1 stream"] / rate["default, 1 stream"], 2),
            "16": round(rate["deterministic, 16 streams"] / rate["default, 16 streams"], 2),
        },
        "tok_s": {name: round(value, 1) for name, value in rate.items()},
        "ready_s": round(ready_s, 2),
        "first_token_after_start_ms": round(1000 * cold.ttft_s[0], 1),
        "first_token_ms": round(1000 * statistics.median(t for r in results["ours, 1 stream"] for t in r.ttft_s), 1),
        "rss_mib": memory,
    }
    if args.out:
        record_ = {
            "machine": machine(),
            "command": " ".join(sys.argv),
            "new_tokens": n,
            "rounds": args.rounds,
            **summary,
            "runs": {k: [asdict(r) for r in v] for k, v in results.items()},
        }
        args.out.write_text(json.dumps(record_, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
