"""Serves a shape with random weights on one GPU and measures it over HTTP as vLLM's `bench serve` measures vLLM.

    python benchmarks/serving/bench_gpu.py [--concurrencies 1,8,16,32,64,128,256] [--long] [--deterministic]
        [--transformers] [--soak SECONDS] [--out benchmarks/results/h200-v2lite.json] [--plot docs/h200-v2lite.png]
        [--peer-command "vllm serve {model} --port {port} --max-model-len {max_model_len} ..."]

Each part has a server of its own, started as `rorqual up` starts one. Prompts are texts of exactly --input-len tokens,
new ones in every run; answers have exactly --output-len, at temperature 0. Two short runs come first and are discarded.
With --peer-command the peer is started after ours has stopped, with the card to itself, and measured at the same points
by the same client; without it, the figures beside ours are those of --peer, recorded on the same kind of card, and where
it holds a point twice, the faster one counts. Measured rows replace those of the same point in --out, all others there stay.

The last line is one JSON object. Ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import psutil  # noqa: E402
import uvloop  # noqa: E402
from load_client import Answer, Job, LoadError, completion_job, run_jobs, run_load  # noqa: E402
from peer_server import Peer, PeerError, end_blocks_on_sigterm, start_peer  # noqa: E402
from word_tokenizer import random_text, words, write_tokenizer  # noqa: E402

from rorqual.launch import Stack, StackError, make_plan  # noqa: E402

SHAPE = Path(__file__).parent / "shapes" / "deepseek-v2-lite"
RESULTS = ROOT / "benchmarks" / "results"
LONG = (8192, 256, 16)  # input tokens, output tokens, concurrency
REACH = {1: 1.25, 8: 1.1, 16: 1.1, 32: 1.1, 64: 1.05, 128: 1.05, 256: 1.0}
"""Ratios to the peer that each concurrency should reach at least; the long point 1.1 too."""
GPU_SETTINGS = {
    "device": "cuda",
    "load_format": "dummy",
    "gpu_memory_utilization": 0.90,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}


# --- what is measured beside the client ------------------------------------------------------------------------------


class GpuWatch:
    """Memory and power of one GPU, read by NVML every 100 ms. Nothing where there is no NVML."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._watts: list[float] = []
        self._stop = threading.Event()
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the one that the servers take
            by = pynvml.nvmlDeviceGetHandleByIndex if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            self._nvml, self._handle = pynvml, by(int(first) if first.isdigit() else first)
        except Exception:  # NVML's own errors, or no NVML at all
            return
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, self.used_bytes())
            self._watts.append(self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)

    def used_bytes(self) -> int:
        """Of the whole device, now; 0 without NVML."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) if self._handle is not None else 0

    def take_watts(self) -> float | None:
        """Mean since the last call."""
        watts, self._watts = self._watts, []
        return round(sum(watts) / len(watts), 1) if watts else None

    def close(self) -> None:
        self._stop.set()


def scrape(port: int) -> dict[str, float]:
    """A process's Prometheus metrics by name with labels, without the project's prefix."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^rorqual_([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.M)}


def steps_between(before: dict[str, float], after: dict[str, float]) -> dict[str, dict[str, float]]:
    """Number and mean time of the executor's steps, by kind, from two scrapes."""
    out: dict[str, dict[str, float]] = {}
    for name, value in after.items():
        if match := re.fullmatch(r'executor_step_seconds_count\{kind="(\w+)"\}', name):
            count = value - before.get(name, 0.0)
            total = name.replace("_count", "_sum")
            if count:
                mean_s = (after[total] - before.get(total, 0.0)) / count
                out[match[1]] = {"num": count, "mean_ms": round(1000 * mean_s, 3)}
    return out


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running stack."""

    stack: Stack
    metrics_port: int
    vocab: list[str]
    ready_s: float
    settings: dict[str, Any]
    num_added: int | None = None  # tokens that the tokenizer adds to a prompt
    failures: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def request_fields(self) -> dict[str, Any]:
        """What its requests need beside the prompt and the lengths."""
        return {}

    def scheduler(self) -> dict[str, float]:
        return scrape(self.metrics_port)

    def executor(self) -> dict[str, float]:
        return scrape(self.metrics_port + 1)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        used = {}
        for name, pid in self.stack.pids.items():
            times = psutil.Process(pid).cpu_times()
            used[name] = times.user + times.system
        return used

    def executors(self) -> list[dict[str, Any]]:
        """What the scheduler says of its executors, and of their memory."""
        import grpc
        from google.protobuf.json_format import MessageToDict

        from rorqual.v1 import admin_pb2, admin_pb2_grpc

        with grpc.insecure_channel(self.stack.scheduler_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            reply = admin_pb2_grpc.AdminServiceStub(channel).ListExecutors(admin_pb2.ListExecutorsRequest(), timeout=5)
        return [MessageToDict(e, preserving_proto_field_name=True) for e in reply.executors]


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    for base in random.sample(range(20000, 32000, 8), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(base, base + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise SystemExit("no free ports")


@contextlib.contextmanager
def model_folder(shape: Path) -> Iterator[tuple[Path, list[str]]]:
    """What to serve, and its words: a shape without a tokenizer gets one of words, any other has none known."""
    if (shape / "tokenizer.json").exists():
        yield shape, []
        return
    vocab_size = json.loads((shape / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / shape.name
        shutil.copytree(shape, model)
        write_tokenizer(model, vocab_size)
        yield model, words(vocab_size)


@contextlib.contextmanager
def serve(
    shape: Path, settings: dict[str, Any], log_dir: Path, timeout_s: float, num_gateways: int = 1
) -> Iterator[Server]:
    """The stack, ready."""
    with model_folder(shape) as (model, vocab):
        base = free_ports(4)
        values = {"model": str(model), "port": 0, "metrics_port": base, "log_level": "info", **settings}
        shutil.rmtree(log_dir, ignore_errors=True)
        lines: list[str] = []
        stack = Stack(
            make_plan(values, num_gateways=num_gateways),
            log_dir=log_dir,
            on_event=lambda event: lines.append(f"{event.kind} {event.name}"),
        )
        started_s = time.perf_counter()
        try:
            stack.start(timeout_s)
        except StackError as error:
            raise SystemExit(f"the server did not start: {error.message}") from None
        try:
            ready_s = time.perf_counter() - started_s
            server = Server(stack, base, vocab, ready_s, settings)
            print(f"ready after {ready_s:.1f} s at {stack.url}", flush=True)
            yield server
            server.failures += [line for line in lines if line.startswith("died")]
        finally:
            stack.stop()


def prompts(server: Server | Peer, count: int, num_tokens: int, rng: random.Random) -> list[str]:
    """Texts of exactly `num_tokens` tokens, what the tokenizer adds included."""
    if not server.vocab:
        candidates = "time people house water light story river stone night morning garden friend little".split()
        server.vocab = [word for word in candidates if len(tokenize(server, f" {word}", bare=True)) == 1]
    if server.num_added is None:
        server.num_added = len(tokenize(server, f" {server.vocab[0]}", bare=False)) - 1
    return [random_text(server.vocab, num_tokens - server.num_added, rng) for _ in range(count)]


def tokenize(server: Server | Peer, text: str, *, bare: bool) -> list[int]:
    """As the server does; `bare`: without what it adds to a prompt."""
    body = {"prompt": text, "add_special_tokens": not bare}
    request = urllib.request.Request(
        f"{server.url}/tokenize", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


# --- one point -------------------------------------------------------------------------------------------------------


async def measure(
    server: Server | Peer,
    gpu: GpuWatch,
    concurrency: int,
    count: int,
    input_len: int,
    output_len: int,
    timeout_s: float,
) -> dict[str, Any]:
    """One run at one concurrency. Raises LoadError where a request failed or had other lengths than asked."""
    texts = prompts(server, count, input_len, random.Random())
    jobs = [completion_job(text, input_len, output_len, **server.request_fields) for text in texts]
    cpu, steps = server.cpu_s(), server.executor()
    gpu.take_watts()
    run = await run_load(server.url, jobs, concurrency, timeout_s)
    watts, steps_after, cpu_after = gpu.take_watts(), server.executor(), server.cpu_s()
    num_tokens = sum(a.num_output_tokens for a in run.answers)
    row = {
        **run.summary(),
        "peak_gib": round(gpu.peak_bytes / 2**30, 2) if gpu.peak_bytes else None,
        "cpu_us_per_token": {
            **{name: round(1e6 * (cpu_after[name] - cpu[name]) / num_tokens, 1) for name in cpu_after if name in cpu},
            "client": round(1e6 * run.client_cpu_s / num_tokens, 1),
        },
        "cpu_share": {
            **{name: round((cpu_after[name] - cpu[name]) / run.wall_s, 3) for name in cpu_after if name in cpu},
            "client": round(run.client_cpu_s / run.wall_s, 3),
        },
        "steps": steps_between(steps, steps_after),
    }
    return row if watts is None else {**row, "mean_watts": watts}


def show(name: str, row: dict[str, Any], beside: dict[str, Any] | None) -> None:
    ttft, tpot = row["ttft_ms"], row["tpot_ms"]
    text = (
        f"{name:>16} {row['output_tok_s']:9.1f} tok/s  TTFT {ttft['mean']:8.1f} /{ttft['p99']:8.1f} ms  "
        f"TPOT {tpot['mean']:6.2f} /{tpot['p99']:6.2f} ms"
    )
    if beside is not None:
        text += f"  x{row['output_tok_s'] / beside['output_tok_s']:.3f} of {beside['output_tok_s']:.0f}"
    shares = " ".join(f"{part}={share:.2f}" for part, share in row["cpu_share"].items())
    print(f"{text}  cores: {shares}  steps: {row['steps']}", flush=True)


# --- soak ------------------------------------------------------------------------------------------------------------


async def soak(server: Server, seconds: float, concurrency: int, seed: int, longest: int) -> dict[str, Any]:
    """Mixed lengths, samplings and clients that leave, for `seconds`; then every block must have come back.

    A numerical fault, a wrong length or any finish but by length fails the soak.
    """
    rng = random.Random(seed)
    deadline_s = time.monotonic() + seconds

    def jobs() -> Iterator[Job]:
        while time.monotonic() < deadline_s:
            length, max_tokens = rng.randint(2, longest), rng.randint(1, longest // 4)
            fields: dict[str, Any] = {"seed": rng.randrange(1 << 31)}
            if rng.random() < 0.5:
                fields |= {"temperature": rng.choice((0.3, 1.0)), "top_p": rng.choice((0.8, 1.0))}
            if rng.random() < 0.2:
                fields |= {"repetition_penalty": 1.2, "top_k": 50}
            leaves = rng.randint(1, max(1, max_tokens // 2)) if rng.random() < 0.15 else 0
            (text,) = prompts(server, 1, length, rng)
            yield completion_job(text, length, max_tokens, leaves, **fields)

    answers: list[Answer] = []
    faults: list[str] = []
    try:
        async with asyncio.timeout(seconds + 60):
            await run_jobs(server.url, jobs(), concurrency, keep=answers.append)
    except* LoadError as errors:
        faults += [str(error)[:500] for error in errors.exceptions]
    except* TimeoutError:
        faults.append("not all requests ended within 60 s after the soak")
    whole = [a for a in answers if not a.cancelled]
    blocks = await blocks_returned(server)
    if blocks["used"] or blocks["granted"]:
        faults.append(f"blocks did not come back: {blocks}")
    finished = {k: v for k, v in server.scheduler().items() if k.startswith("scheduler_finished_total")}
    return {
        "seconds": seconds,
        "concurrency": concurrency,
        "requests": len(answers),
        "cancelled": len(answers) - len(whole),
        "output_tokens": sum(a.num_output_tokens for a in whole),
        "preemptions": server.scheduler().get("scheduler_preemptions_total", 0.0),
        "blocks": blocks,
        "finished": finished,
        "faults": faults,
    }


async def blocks_returned(server: Server, timeout_s: float = 15.0) -> dict[str, float]:
    """KV blocks by state, once none is held or after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        metrics = server.scheduler()
        blocks = {s: metrics[f'scheduler_kv_blocks{{state="{s}"}}'] for s in ("free", "used", "granted")}
        if not (blocks["used"] or blocks["granted"]) or time.monotonic() > deadline_s:
            return blocks
        await asyncio.sleep(0.5)


# --- transformers ----------------------------------------------------------------------------------------------------


def transformers_worker(shape: Path, device: str, input_len: int, output_len: int, batches: Sequence[int]) -> None:
    """Prints one JSON object: tokens a second of `generate` by batch size. Random weights, in the shape's dtype."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(shape)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with contextlib.suppress(AttributeError, ValueError):
        model.set_experts_implementation("grouped_mm")
    result: dict[str, Any] = {
        "version": transformers.__version__,
        "experts": getattr(model.config, "_experts_implementation", None),
        "load_s": round(time.perf_counter() - start_s, 1),
        "tok_s": {},
    }

    def generate(batch: int, new_tokens: int) -> float:
        ids = torch.randint(10, config.vocab_size - 10, (batch, input_len), device=device)
        synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        synchronize()
        start_s = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=config.eos_token_id,
            )
        synchronize()
        assert out.shape == (batch, input_len + new_tokens), out.shape
        return batch * new_tokens / (time.perf_counter() - start_s)

    for batch in batches:
        generate(batch, 4)
        result["tok_s"][str(batch)] = round(generate(batch, output_len), 1)
    print(json.dumps(result), flush=True)


def run_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, with the GPU to itself."""
    command = [sys.executable, __file__, "--transformers-worker", "--model", str(args.model), "--device", args.device]
    done = subprocess.run(
        [*command, f"--input-len={args.input_len}", f"--output-len={args.transformers_len}"],
        capture_output=True,
        text=True,
        timeout=args.start_timeout + args.run_timeout,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the record ------------------------------------------------------------------------------------------------------


def peer_row(record: dict[str, Any], point: tuple[int, int, int]) -> dict[str, Any] | None:
    """The peer's fastest recorded run at (input_len, output_len, concurrency)."""
    runs = [r for r in record["runs"] if (r["input_len"], r["output_len"], r["concurrency"]) == point]
    best = max(runs, key=lambda r: r["output_tok_s"], default=None)
    if best is None:
        return None
    return {
        "name": record["name"],
        "source": record["source"],
        "same_run": False,
        **{k: best[k] for k in best if k.endswith(("_s", "_ms", "_gib"))},
    }


def machine() -> dict[str, Any]:
    """GPU, driver, CPU."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30)}
    with contextlib.suppress(Exception):
        query = "name,driver_version,memory.total,power.limit"
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        found |= dict(zip(("gpu", "driver", "gpu_memory", "power_limit"), line.split(", "), strict=True))
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {**found, "cpu": cpus[0].split(":")[1].strip() if cpus else platform.machine(), "kernel": platform.release()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "grpcio", "uvicorn", "uvloop", "httptools", "nvidia-ml-py"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """Short, with a plus where the tree differs; GIT_COMMIT names it where there is no repository."""
    if named := os.environ.get("GIT_COMMIT"):
        return named

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


class Record:
    """benchmarks/results/h200-v2lite.json, read, updated and written after every point."""

    def __init__(self, path: Path | None, peer: dict[str, Any]) -> None:
        self._path, self._peer = path, peer
        self._measured: set[tuple[str, tuple[int, int, int]]] = set()  # in this call
        self.value: dict[str, Any] = {}
        if path is not None and path.exists():
            self.value = json.loads(path.read_text())
        self.value |= {
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "command": "python benchmarks/serving/bench_gpu.py " + " ".join(sys.argv[1:]),
        }
        self.value.setdefault("serving", [])
        self.value.setdefault("kernels", [])

    def point(
        self, kind: str, point: tuple[int, int, int], row: dict[str, Any], name: str = ""
    ) -> dict[str, Any] | None:
        """`kind`: "ours", "deterministic", or "peer" with its `name`. Returns what the figures are held against there:
        ours against those of a peer measured in this call, else against the recorded ones; a peer's against ours."""
        input_len, output_len, concurrency = point
        names = {"concurrency": concurrency, "input_len": input_len, "output_len": output_len}
        rows = self.value["serving"]
        found = next((r for r in rows if all(r.get(k) == v for k, v in names.items())), None)
        if found is None:
            found = dict(names)
            rows.append(found)
            rows.sort(key=lambda r: (r["input_len"], r["output_len"], r["concurrency"]))
        self._measured.add((kind, point))
        recorded = peer_row(self._peer, point)
        if kind == "peer":
            same_run = ("ours", point) in self._measured
            found["peer"] = {"name": name, "source": "measured by this command", "same_run": same_run, **row}
            if recorded is not None:
                found["peer"]["recorded_output_tok_s"] = recorded["output_tok_s"]
        else:
            found[kind] = {**row, "commit": self.value["commit"]}
            if ("peer", point) not in self._measured:
                found.pop("peer", None)
                found.pop("ratio", None)
                if recorded is not None:
                    found["peer"] = recorded
        if "ours" in found and "peer" in found:
            found["ratio"] = round(found["ours"]["output_tok_s"] / found["peer"]["output_tok_s"], 3)
        if "ours" in found and "deterministic" in found:
            share = found["deterministic"]["output_tok_s"] / found["ours"]["output_tok_s"]
            found["deterministic_share"] = round(share, 3)
        self.write()
        beside: dict[str, Any] | None = found.get("ours" if kind == "peer" else "peer")
        return beside

    def take_kernels(self, path: Path) -> None:
        """Rows of benchmarks/kernels/bench.py's record, in place of those of the same kernels; not of deterministic runs."""
        keys = ("name", "shape", "us", "roofline_share", "peer_us", "ratio")
        record = json.loads(path.read_text())
        rows = [{k: row.get(k) for k in keys} for row in record["kernels"] if not row.get("deterministic")]
        names = {row["name"] for row in rows}
        self.value["kernels"] = rows + [row for row in self.value.get("kernels", []) if row["name"] not in names]
        self.value["kernels_commit"] = record.get("commit")
        self.write()

    def transformers(self, result: dict[str, Any]) -> None:
        """With the ratio of ours at the same concurrency, where it is known."""
        ours = {str(r["concurrency"]): r["ours"]["output_tok_s"] for r in self.value["serving"] if "ours" in r}
        rates = result.get("tok_s", {})
        result["ratio"] = {b: round(ours[b] / rate, 1) for b, rate in rates.items() if b in ours}
        self.value["transformers"] = result
        self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.value, indent=1) + "\n")


def shortfalls(record: dict[str, Any]) -> list[str]:
    """Where ours is below what it should reach, or worse than the peer in TTFT or peak memory."""
    found = []
    for row in record["serving"]:
        ours, peer = row.get("ours"), row.get("peer")
        if ours is None or peer is None:
            continue
        name = f"{row['input_len']}/{row['output_len']}@{row['concurrency']}"
        reach = REACH.get(row["concurrency"], 1.0) if row["input_len"] != LONG[0] else 1.1
        if row["ratio"] < reach:
            found.append(f"{name}: {row['ratio']:.3f} of the peer's tokens a second, {reach} to reach")
        if ours["ttft_ms"]["mean"] > peer["ttft_ms"]["mean"]:
            found.append(f"{name}: TTFT {ours['ttft_ms']['mean']:.1f} ms, the peer's {peer['ttft_ms']['mean']:.1f}")
        if (ours.get("peak_gib") or 0) > (peer.get("peak_gib") or math.inf):
            found.append(f"{name}: peak {ours['peak_gib']} GiB, the peer's {peer['peak_gib']}")
    return found


def plot(record: dict[str, Any], path: Path) -> None:
    """Tokens a second and time per token over concurrency, ours and the peer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shortest = min(row["input_len"] for row in record["serving"])
    rows = [r for r in record["serving"] if r["input_len"] == shortest and "ours" in r]
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    ticks = range(len(rows))
    panels: list[tuple[str, Callable[[dict[str, Any]], float], bool]] = [
        ("output tokens/s", lambda side: side["output_tok_s"], True),
        ("TPOT, ms (mean)", lambda side: side["tpot_ms"]["mean"], False),
        ("TTFT, ms (mean)", lambda side: side["ttft_ms"]["mean"], True),
    ]
    for axis, (title, figure_of, is_log) in zip(axes, panels, strict=True):
        for key, label, style in (("ours", "Rorqual", "o-"), ("peer", None, "s--")):
            known = [(x, r[key]) for x, r in zip(ticks, rows, strict=True) if key in r]
            if known:
                name = label or known[0][1]["name"]
                axis.plot([x for x, _ in known], [figure_of(side) for _, side in known], style, label=name)
        axis.set_title(title)
        axis.set_xticks(list(ticks), [str(r["concurrency"]) for r in rows])
        axis.set_xlabel("concurrent requests")
        axis.grid(alpha=0.3)
        if is_log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


# --- the parts in turn -----------------------------------------------------------------------------------------------


async def run_points(
    server: Server | Peer, gpu: GpuWatch, record: Record, kind: str, points: Sequence[tuple[int, int, int]], args: Any
) -> None:
    name = server.name if isinstance(server, Peer) else ""
    for concurrency, count, output_len in ((min(64, args.warmup), 3 * args.warmup // 2, 48), (8, 16, 48)):
        await measure(server, gpu, concurrency, count, points[0][0], min(output_len, points[0][1]), args.run_timeout)
    for point in points:
        input_len, output_len, concurrency = point
        per_slot = 2 if input_len > 4096 else args.per_slot
        count = min(512, max(8, per_slot * concurrency))
        row = await measure(server, gpu, concurrency, count, input_len, output_len, args.run_timeout)
        row |= {"ready_s": round(server.ready_s, 1)}
        show(f"{kind} {input_len}/{output_len}@{concurrency}", row, record.point(kind, point, row, name))


def part(args: Any, record: Record, settings: dict[str, Any], work: Callable[[Server, GpuWatch], Any]) -> Server:
    """One server from start to end. A failed request or a process that died ends the benchmark."""
    gpu = GpuWatch()
    idle_bytes = gpu.used_bytes()
    log_dir = args.log_dir or Path(tempfile.gettempdir()) / "rorqual-bench-logs"
    try:
        with serve(args.model, settings, log_dir, args.start_timeout, args.gateways) as server:
            try:
                uvloop.run(work(server, gpu))
                executors = server.executors()
                record.value["executors"] = executors
                memory = executors[0].get("memory", {}) if executors else {}
                if gpu.peak_bytes and memory:
                    entries = ("context", "weights", "workspace", "graphs", "kv_cache", "other")
                    ledger = sum(int(memory.get(f"{entry}_bytes", 0)) for entry in entries)
                    seen = gpu.used_bytes() - idle_bytes
                    record.value["memory"] = {
                        "ledger_gib": round(ledger / 2**30, 2),
                        "nvml_gib": round(seen / 2**30, 2),
                        "ledger_share": round(ledger / seen, 4),
                    }
                    print(f"memory: {record.value['memory']}", flush=True)
                record.write()
            except (LoadError, TimeoutError) as error:
                quote_logs(log_dir)
                raise SystemExit(f"failed: {error!r}") from None
    finally:
        gpu.close()
    if server.failures:
        quote_logs(log_dir)
        raise SystemExit(f"processes died: {server.failures}")
    return server


def peer_part(args: Any, record: Record, max_model_len: int, points: Sequence[tuple[int, int, int]]) -> None:
    """--peer-command's server from start to end, at the points that ours has had. Its failure ends the benchmark."""
    gpu = GpuWatch()
    log_dir = args.log_dir or Path(tempfile.gettempdir()) / "rorqual-bench-logs"
    record.value["peer_command"] = args.peer_command
    try:
        with model_folder(args.model) as (model, vocab):
            port, command = free_ports(1), args.peer_command
            for name, value in (("model", model), ("port", port), ("max_model_len", max_model_len)):
                command = command.replace(f"{{{name}}}", str(value))
            log = log_dir.parent / f"{log_dir.name}-peer.log"  # beside the folder, which the next start of ours empties
            with start_peer(command, port, vocab, log, args.peer_start_timeout) as peer:
                uvloop.run(run_points(peer, gpu, record, "peer", points, args))
    except (PeerError, LoadError, TimeoutError) as error:
        raise SystemExit(f"the peer failed: {error!r}") from None
    finally:
        gpu.close()


def quote_logs(log_dir: Path) -> None:
    for path in sorted(log_dir.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        print(f"--- {path.name}\n" + "\n".join(line[:400] for line in lines), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=SHAPE, help="folder with a config.json")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--concurrencies", default="1,8,16,32,64,128,256", help="in turn; empty: none")
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=256)
    add("--per-slot", type=int, default=8, help="prompts a slot; fewer give a rougher figure sooner")
    add("--gateways", type=int, default=1, help="that share the HTTP port")
    add("--warmup", type=int, default=64, help="requests at once in the first warm-up")
    add("--max-model-len", type=int, default=8192)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the stack, e.g. max_num_seqs=512")
    add("--long", action="store_true", help=f"also {LONG[0]} in, {LONG[1]} out at {LONG[2]}")
    add("--deterministic", action="store_true", help="also every point with --deterministic")
    add("--transformers", action="store_true", help="also transformers' generate at batch 1 and 32")
    add("--transformers-len", type=int, default=64, help="tokens it generates")
    add("--transformers-worker", action="store_true", help=argparse.SUPPRESS)
    add("--soak", type=float, default=0.0, metavar="SECONDS", help="also mixed lengths and cancels")
    add("--soak-streams", type=int, default=256)
    add("--soak-longest", type=int, default=2000)
    add("--peer", type=Path, default=RESULTS / "vllm-0.26-h200-v2lite.json", help="figures to put beside ours")
    add(
        "--peer-command",
        metavar="COMMAND",
        help="server to measure in their place, after ours; {model}, {port} and {max_model_len} are filled in",
    )
    add("--peer-start-timeout", type=float, default=330.0)
    add("--kernels", type=Path, default=None, help="a record of benchmarks/kernels/bench.py to take over")
    add("--start-timeout", type=float, default=150.0)
    add("--run-timeout", type=float, default=90.0, help="of each run, in seconds")
    add("--log-dir", type=Path, default=None)
    add("--out", type=Path, default=None, help="record to write; rows not measured now stay")
    add("--plot", type=Path, default=None, help="picture to draw of the record")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.transformers_worker:
        transformers_worker(args.model, args.device, args.input_len, args.transformers_len, (1, 32))
        return
    end_blocks_on_sigterm()
    record = Record(args.out, json.loads(args.peer.read_text()))
    settings: dict[str, Any] = dict(GPU_SETTINGS) if args.device == "cuda" else {"device": "cpu"}
    settings |= {"max_model_len": args.max_model_len, **dict(pair.split("=", 1) for pair in args.set)}
    points = [(args.input_len, args.output_len, int(c)) for c in args.concurrencies.split(",") if c]
    record.value["settings"] = {**settings, "gateways": args.gateways}
    if args.kernels is not None:
        record.take_kernels(args.kernels)
    if points:
        part(args, record, settings, lambda server, gpu: run_points(server, gpu, record, "ours", points, args))
        if args.peer_command:
            peer_part(args, record, args.max_model_len, points)
    if args.long:
        long_settings = {**settings, "max_model_len": 16384}
        part(args, record, long_settings, lambda server, gpu: run_points(server, gpu, record, "ours", [LONG], args))
        if args.peer_command:
            peer_part(args, record, 16384, [LONG])
    if args.deterministic and points:
        fixed = {**settings, "deterministic": True}
        part(args, record, fixed, lambda server, gpu: run_points(server, gpu, record, "deterministic", points, args))
    if args.soak:

        async def work(server: Server, gpu: GpuWatch) -> None:
            record.value["soak"] = await soak(server, args.soak, args.soak_streams, 1, args.soak_longest)
            print(f"soak: {json.dumps(record.value['soak'])}", flush=True)

        part(args, record, settings, work)
    if args.transformers:
        record.transformers(run_transformers(args))
        print(f"transformers: {json.dumps(record.value['transformers'])}", flush=True)
    record.write()
    if args.plot is not None:
        plot(record.value, args.plot)
    for line in shortfalls(record.value):
        print(f"short: {line}")
    print(json.dumps(record.value))
    if record.value.get("soak", {}).get("faults") and args.soak:
        raise SystemExit("the soak found faults")


if __name__ == "__main__":
    main()
