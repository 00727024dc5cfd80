"""What scheduler, tokenizer and gateway cost and add, with a simulated executor that only makes tokens up.

    python benchmarks/serving/bench_control_plane.py [--parts http,requests,session,rate,replicas,memory,prefix] [--out FILE]

http      CPU time of each process a token while it carries 1 to 1,024 streams over HTTP, and added latency: from a token
          ready in the executor to its chunk on the client's socket, on one clock.
requests  CPU time of each process a request of one token, 16 at once: what a request costs beside its tokens.
session   the share of sequence-steps that stand still for want of a block at 12,500 tokens/s, through the scheduler's
          `Session` alone: 256 sequences at 20 ms a step, 24 at 2 ms.
rate      more and more sequences on several executors: the highest rate at which that share stays below 1 % and all that
          is made is delivered.
replicas  1, 2 and 4 gateways on one port with as many tokenizers, 256 streams: CPU time a token of all together and of the busiest.
memory    what a queued and a running request take in the scheduler.
prefix    time to the first token of a long prompt, 90 % of it cached and none: see bench_prefix_cache.py.

The machine's other work makes CPU times upper bounds, so a small loop of plain Python is timed beside them. The last
line is one JSON object: the row of 256 streams, the largest paused share of `session`, the added latency at 32
streams, and all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import psutil  # noqa: E402
import uvloop  # noqa: E402
from bench_prefix_cache import measure as prefix_row  # noqa: E402
from load_client import Answer, LoadRun, completion_job, run_load, spread_ms  # noqa: E402
from session_load import session, window  # noqa: E402
from word_tokenizer import random_text, words, write_tokenizer  # noqa: E402

from rorqual.launch import Stack, make_plan  # noqa: E402
from rorqual.launch.plan import module_environ  # noqa: E402

VOCAB_SIZE = 8192
WARM_UP_TOKENS = 8
PARTS = ("http", "requests", "session", "rate", "replicas", "memory", "prefix")
MOST_PAUSED = 0.01
ENVIRON = module_environ(ROOT, os.environ)


class Executors:
    """Simulated executors that dial one scheduler, each with a record of what it made."""

    def __init__(self, address: str, model: Path, count: int = 1, **flags: object) -> None:
        self._files = [model / f"executor-{i}.json" for i in range(count)]
        settings = {
            "scheduler": address,
            "model": model,
            "backend": "sim",
            "sim_num_blocks": 16384,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 16384,
            **flags,
        }
        argv = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        program = str(Path(__file__).with_name("sim_executor.py"))
        self._processes = [
            subprocess.Popen([sys.executable, program, str(file), *argv], env=ENVIRON, stderr=subprocess.DEVNULL)
            for file in self._files
        ]

    def cpu_s(self) -> float:
        return sum(cpu_s(psutil.Process(process.pid)) for process in self._processes)

    def stop(self) -> list[dict[str, Any]]:
        """End them; what they recorded."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)
        return [json.loads(file.read_text()) for file in self._files]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def paused_share(records: Sequence[dict[str, Any]], start_s: float, end_s: float) -> tuple[float, int]:
    """(share of the sequence-steps that stood still, tokens made) from `start_s` to `end_s`."""
    tokens = paused = 0
    for record in records:
        times = [step[0] for step in record["steps"]]
        first, last = bisect_left(times, start_s), bisect_right(times, end_s) - 1
        if first < last:
            tokens += record["steps"][last][1] - record["steps"][first][1]
            paused += record["steps"][last][2] - record["steps"][first][2]
    return round(paused / max(paused + tokens, 1), 5), tokens


def added_latency_ms(answers: list[Answer], made_s: dict[str, list[float]]) -> dict[str, float]:
    """From token made to chunk received. Where chunks were read together, a token's is the first read after it."""
    added: list[float] = []
    for answer in answers:
        made, arrivals = made_s[f"{answer.num_prompt_tokens}+{answer.num_output_tokens}"], answer.arrivals_s
        if len(arrivals) >= len(made):
            added += [got_s - at_s for at_s, got_s in zip(made, arrivals, strict=False)]
        else:
            added += [arrivals[min(bisect_left(arrivals, at_s), len(arrivals) - 1)] - at_s for at_s in made]
    figures = spread_ms(added)
    return {"p50": figures["median"], "p99": figures["p99"]} if figures else {}


# --- over HTTP ----------------------------------------------------------------------------------------------------------------


class HttpStack:
    """Gateways, tokenizers and a scheduler; executors come and go."""

    def __init__(self, model: Path, num_replicas: int, **flags: object) -> None:
        names = ("scheduler", "tokenizer", "gateway")
        settings = {"model": model, "port": 0, "max_queue_len": 20_000}
        plan = make_plan(settings, names=names, num_gateways=num_replicas, num_tokenizers=num_replicas)
        self._model = model
        self._address = plan.scheduler_address
        self._stack = Stack(plan, log_dir=model / "logs")
        self._rng, self._vocab = random.Random(0), words(VOCAB_SIZE)
        self.executors = Executors(self._address, model, **flags)
        try:
            self._stack.start(90.0)
        except BaseException:
            self.executors.kill()
            raise
        self._processes = {name: psutil.Process(pid) for name, pid in self._stack.pids.items()}

    def use_executor(self, **flags: object) -> None:
        """In place of the one before, which has been stopped."""
        self.executors = Executors(self._address, self._model, **flags)

    def close(self) -> None:
        self.executors.kill()
        self._stack.stop()

    def measure(self, num_streams: int, new_tokens: int, timeout_s: float) -> dict[str, Any]:
        """A warm-up, then a row; the executor is ended with it."""
        num_jobs = max(num_streams, 4)
        self._load(num_streams, [(8, WARM_UP_TOKENS)] * num_jobs, timeout_s)
        # The tokenizer asks each second what is served: where the executor is a new one, requests wait for its answer.
        time.sleep(1.5)
        while urllib.request.urlopen(f"{self._stack.url}/health", timeout=10).status != 200:
            time.sleep(0.1)
        # No two requests have the same two lengths, so that the executor's record names them.
        least = max(new_tokens, WARM_UP_TOKENS + 1)
        lengths = [(8 + j // 32, least + j % 32) for j in range(num_jobs)]
        num_tokens = sum(count for _, count in lengths)
        before = {name: cpu_s(process) for name, process in self._processes.items()}
        executor_before, start_s = self.executors.cpu_s(), time.perf_counter()
        run = self._load(num_streams, lengths, timeout_s)
        end_s = time.perf_counter()
        spent = {name: cpu_s(process) - before[name] for name, process in self._processes.items()}
        spent |= {"executor": self.executors.cpu_s() - executor_before, "client": run.client_cpu_s}
        us: dict[str, list[float]] = {}
        for name, seconds in spent.items():
            us.setdefault(name.partition("-")[0], []).append(1e6 * seconds / num_tokens)
        records = self.executors.stop()
        return {
            "streams": num_streams,
            **{f"{name}_us_per_token": round(sum(each), 1) for name, each in us.items()},
            **{f"busiest_{name}_us_per_token": round(max(each), 1) for name, each in us.items() if len(each) > 1},
            "paused_share": paused_share(records, start_s, end_s)[0],
            "added_latency_ms": added_latency_ms(run.answers, records[0]["made_s"]),
            **run.summary(),
        }

    def measure_requests(self, num_requests: int, num_streams: int, timeout_s: float) -> dict[str, Any]:
        """CPU time of each process a request of one token."""
        self._load(num_streams, [(8, 1)] * 100, timeout_s)
        before = {name: cpu_s(process) for name, process in self._processes.items()}
        run = self._load(num_streams, [(8, 1)] * num_requests, timeout_s)
        spent = {name: cpu_s(process) - before[name] for name, process in self._processes.items()}
        return {
            "streams": num_streams,
            **{f"{name}_us_per_request": round(1e6 * seconds / num_requests) for name, seconds in spent.items()},
            "requests_s": round(num_requests / run.wall_s),
        }

    def _load(self, num_streams: int, lengths: list[tuple[int, int]], timeout_s: float) -> LoadRun:
        jobs = [completion_job(random_text(self._vocab, prompt, self._rng), prompt, count) for prompt, count in lengths]
        return uvloop.run(run_load(self._stack.url, jobs, num_streams, timeout_s))


def http_rows(model: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    stack = None
    try:
        for num_streams, step_ms, count in zip(args.streams, args.step_ms, args.new_tokens, strict=True):
            if stack is None:
                stack = HttpStack(model, 1, sim_step_ms=step_ms)
            else:
                stack.use_executor(sim_step_ms=step_ms)
            yield {"step_ms": step_ms, **stack.measure(num_streams, count, args.timeout)}
    finally:
        if stack is not None:
            stack.close()


def request_row(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    stack = HttpStack(model, 1, sim_step_ms=2.0)
    try:
        return stack.measure_requests(1000, 16, args.timeout)
    finally:
        stack.close()


def replica_rows(model: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for num_replicas in args.replicas:
        stack = HttpStack(model, num_replicas, sim_step_ms=args.replica_step_ms)
        try:
            row = stack.measure(256, args.replica_new_tokens, args.timeout)
        finally:
            stack.close()
        yield {"gateways": num_replicas, "tokenizers": num_replicas, "step_ms": args.replica_step_ms, **row}


# --- the scheduler alone ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scheduler(model: Path) -> Iterator[tuple[str, psutil.Process]]:
    """One scheduler process: its address, and what it costs."""
    file = model / "scheduler.port"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.scheduler", "--listen=127.0.0.1:0", "--max-queue-len=100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**ENVIRON, "RORQUAL_PORT_FILE": str(file)}, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + 60
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the scheduler did not start")
            time.sleep(0.02)
        yield f"127.0.0.1:{int(file.read_text())}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def _session_row(
    address: str, process: psutil.Process, executors: Executors, streams: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """A row for each number of streams, all on one session; `start_s` and `end_s` of its window are in it."""
    rows: list[dict[str, Any]] = []
    async with session(address, VOCAB_SIZE) as load:
        opened = 0
        for num_streams in streams:
            await load.open(num_streams - opened, prompt_len=64, max_tokens=20_000)
            opened = num_streams
            async with asyncio.timeout(60):
                await load.all_started()
            await asyncio.sleep(1.0)
            before, executors_before = cpu_s(process), executors.cpu_s()
            start_s, end_s, num_tokens = await window(load, seconds)
            spent_s = cpu_s(process) - before
            rows.append(
                {
                    "streams": num_streams,
                    "tok_s": round(num_tokens / (end_s - start_s)),
                    "scheduler_us_per_token": round(1e6 * spent_s / max(num_tokens, 1), 2),
                    "scheduler_cpu_share": round(spent_s / (end_s - start_s), 3),
                    "executor_us_per_token": round(
                        1e6 * (executors.cpu_s() - executors_before) / max(num_tokens, 1), 1
                    ),
                    "start_s": start_s,
                    "end_s": end_s,
                }
            )
    return rows


def session_rows(
    model: Path, streams: Sequence[int], step_ms: float, num_executors: int, seconds: float
) -> list[dict[str, Any]]:
    with scheduler(model) as (address, process):
        executors = Executors(address, model, num_executors, sim_step_ms=step_ms)
        try:
            rows = uvloop.run(_session_row(address, process, executors, streams, seconds))
            records = executors.stop()
        finally:
            executors.kill()
    for row in rows:
        share, made = paused_share(records, start := row.pop("start_s"), end := row.pop("end_s"))
        row |= {"step_ms": step_ms, "paused_share": share, "nominal_tok_s": round(1000 * row["streams"] / step_ms)}
        row["made_tok_s"] = round(made / (end - start))
    return rows


def is_held(row: dict[str, Any]) -> bool:
    """Whether the scheduler kept up: nobody stood still, and what was made was delivered."""
    return bool(row["paused_share"] < MOST_PAUSED and row["tok_s"] > 0.98 * row["made_tok_s"])


def memory_row(model: Path, num_running: int = 1000, num_queued: int = 5000, prompt_len: int = 128) -> dict[str, Any]:
    """Unshared memory of the scheduler's process before and after, a request."""

    async def run(address: str, process: psutil.Process) -> list[int]:
        sizes = []
        async with session(address, VOCAB_SIZE) as load:
            for _ in range(2):  # once to fill what a process fills at its first requests
                await load.open(64, prompt_len, 1)
                await load.until(lambda info: info.num_running == info.num_waiting == 0)
            sizes.append(process.memory_full_info().uss)
            await load.open(num_running, prompt_len, 4096)
            await load.until(lambda info: info.num_running == num_running)
            sizes.append(process.memory_full_info().uss)
            await load.open(num_queued, prompt_len, 4096)
            await load.until(lambda info: info.num_waiting == num_queued)
            sizes.append(process.memory_full_info().uss)
        return sizes

    with scheduler(model) as (address, process):
        executors = Executors(address, model, sim_step_ms=50, max_num_seqs=num_running)
        try:
            idle, running, queued = uvloop.run(run(address, process))
        finally:
            executors.kill()
    return {
        "prompt_tokens": prompt_len,
        "idle_mib": round(idle / 2**20, 1),
        "running_bytes_per_request": round((running - idle) / num_running),
        "queued_bytes_per_request": round((queued - running) / num_queued),
    }


# --- all of it ----------------------------------------------------------------------------------------------------------------


def reference_ns() -> float:
    """A turn of a small loop of plain Python here and now: what the CPU times are to be seen beside."""
    times = []
    for _ in range(5):
        start_s, total = time.process_time(), 0
        for i in range(200_000):
            total += i & 7
        times.append(time.process_time() - start_s)
    return round(1e9 * statistics.median(times) / 200_000, 1)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def numbers(text: str, count: int = 0) -> list[float]:
    """Comma-separated; a single one stands for all."""
    values = [float(part) for part in text.split(",") if part]
    return values * count if count and len(values) == 1 else values


def parse() -> argparse.Namespace:
    num_cpus = len(os.sched_getaffinity(0))
    # What 256 and 1,024 streams bring in a second is what the machine can carry: all processes share its cores.
    is_wide = num_cpus >= 8
    steps, new_tokens = ("10,10,20,80", "150,300,400,64") if is_wide else ("10,10,150,400", "150,300,64,24")
    rates = "1024,2048,3072,4096,5120,6144" if is_wide else "256,512,1024"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--streams", default="1,32,256,1024", help="of part http")
    parser.add_argument("--step-ms", default=steps, help="one a number of streams, or one for all")
    parser.add_argument("--new-tokens", default=new_tokens, help="one a number of streams, or one for all")
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--replica-new-tokens", type=int, default=100 if is_wide else 32)
    parser.add_argument("--replica-step-ms", type=float, default=20.0 if is_wide else 150.0)
    parser.add_argument("--rates", default=rates, help="sequences at 20 ms a step")
    parser.add_argument("--rate-executors", type=int, default=6 if is_wide else 2, help="that share them")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window of parts session and rate")
    parser.add_argument("--timeout", type=float, default=120.0, help="of a run over HTTP")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    args.streams = [int(n) for n in numbers(args.streams)]
    args.step_ms = numbers(args.step_ms, len(args.streams))
    args.new_tokens = [int(n) for n in numbers(args.new_tokens, len(args.streams))]
    args.replicas = [int(n) for n in numbers(args.replicas)]
    args.rates = [int(n) for n in numbers(args.rates)]
    if not len(args.streams) == len(args.step_ms) == len(args.new_tokens):
        parser.error("--streams, --step-ms and --new-tokens need as many values, or one")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def head(result: dict[str, Any]) -> dict[str, Any]:
    """The figures that have targets."""
    by_streams = {row["streams"]: row for row in result["rows"]}
    row = by_streams.get(256) or (result["rows"] or [{}])[-1]
    figures = {key: row[key] for key in row if key == "streams" or key.endswith("_us_per_token")}
    if "session" in result:
        figures["paused_share"] = max(row["paused_share"] for row in result["session"])
    if 32 in by_streams:
        figures["added_latency_ms"] = by_streams[32]["added_latency_ms"]
    return figures


def main() -> None:
    args = parse()
    started_s = time.perf_counter()
    load_before = os.getloadavg()[0]
    machine = {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": round(load_before, 2),
        "state": "busy" if load_before > 0.25 * (os.cpu_count() or 1) else "quiet",
        "reference_loop_ns": reference_ns(),
    }
    result: dict[str, Any] = {"rows": []}

    def show(part: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        shown = []
        for row in rows:
            print(f"{time.perf_counter() - started_s:6.1f} s  {part:8} {json.dumps(row)}", flush=True)
            shown.append(row)
        return shown

    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        write_tokenizer(model, VOCAB_SIZE)
        (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 65536}))
        for part in args.parts:
            if part == "http":
                result["rows"] = show(part, http_rows(model, args))
            elif part == "requests":
                (result["requests"],) = show(part, [request_row(model, args)])
            elif part == "session":
                cases = ((256, 20.0), (24, 2.0))
                rows = (row for n, step_ms in cases for row in session_rows(model, [n], step_ms, 1, args.seconds))
                result["session"] = show(part, rows)
            elif part == "rate":
                rates = show(part, session_rows(model, args.rates, 20.0, args.rate_executors, args.seconds))
                held = [row["tok_s"] for row in rates if is_held(row)]
                result |= {"highest_rate_tok_s": max(held, default=0), "rate": rates}
            elif part == "replicas":
                result["replicas"] = show(part, replica_rows(model, args))
            elif part == "memory":
                (result["memory"],) = show(part, [memory_row(model)])
            elif part == "prefix":
                (result["prefix"],) = show(part, [prefix_row(rounds=1)])
            wall_s = round(time.perf_counter() - started_s, 1)
            last = json.dumps({**head(result), "machine": machine, "wall_s": wall_s, **result})
            if args.out:  # after each part: a run that is cut short leaves what it has
                args.out.write_text(last + "\n")
    print(last)


if __name__ == "__main__":
    main()
