"""CPU time and latency of scheduler, tokenizer and gateway, with a simulated executor that only makes tokens up.

    python benchmarks/serving/bench_control_plane.py [--streams 1,32,256,1024] [--step-ms 10,10,150,600] [--gateways 1]

Each process's CPU time while it carries the load, divided by the tokens; the machine's other work makes it an upper
bound, so a small loop of plain Python is timed beside it. The simulated executor reports a step's tokens and then waits
--step-ms, so TTFT is the way through the processes and back. Added latency is the time from a token made in the
executor to its chunk on the client's socket, on one clock; paused_share, how many of the sequence-steps stood still for
want of a block. The last line is one JSON object: the row of 256 streams (or the last one), and all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import psutil  # noqa: E402
import uvloop  # noqa: E402
from load_client import Answer, LoadRun, completion_job, run_load, spread_ms  # noqa: E402
from word_tokenizer import random_text, words, write_tokenizer  # noqa: E402

from rorqual.launch import Stack, make_plan  # noqa: E402

VOCAB_SIZE = 8192
WARM_UP_TOKENS = 8


async def simulate(address: str, step_s: float, stats_file: str) -> None:
    """The executor: every decoding sequence gets a token each step. When it is ended it writes what it saw."""
    from executor.sim.device import SimConfig, SimExecutor
    from tests.support.sim_link import SimExecutorLink

    class Executor(SimExecutor):
        """Remembers when it made each token, by the lengths of prompt and answer: no two requests have the same."""

        def __init__(self, config: SimConfig) -> None:
            super().__init__(config)
            self.num_row_steps = 0
            self.made_s: dict[str, list[float]] = defaultdict(list)
            self._lengths: dict[int, str] = {}

        def _admit(self, admit: Any) -> None:
            super()._admit(admit)
            num_prompt = admit.num_prompt_tokens
            self._lengths[admit.seq_id] = f"{num_prompt}+{admit.max_total_tokens - num_prompt}"

        def step(self) -> None:
            super().step()
            now_s = time.perf_counter()
            self.num_row_steps += len(self._unreported[-1].tokens)
            for seq_id in self._unreported[-1].tokens:
                self.made_s[self._lengths[seq_id]].append(now_s)

    config = SimConfig(
        vocab_size=VOCAB_SIZE, num_blocks=16384, max_num_seqs=1024, max_num_batched_tokens=16384, read_back=False
    )
    executor = Executor(config)
    link = SimExecutorLink(address, executor, step_time_s=step_s)
    await link.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    stats = {"paused": executor.num_paused_steps, "rows": executor.num_row_steps, "made_s": executor.made_s}
    Path(stats_file).write_text(json.dumps(stats))


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


def reference_ns() -> float:
    """A turn of a small loop of plain Python here and now: what the CPU times are to be seen beside."""
    times = []
    for _ in range(5):
        start_s, total = time.process_time(), 0
        for i in range(200_000):
            total += i & 7
        times.append(time.process_time() - start_s)
    return round(1e9 * statistics.median(times) / 200_000, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,32,256,1024")
    parser.add_argument("--step-ms", default="10,10,150,600", help="one a number of streams, or one for all")
    parser.add_argument("--new-tokens", default="400,400,64,24", help="one a number of streams, or one for all")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--simulate", nargs=2, default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.simulate:
        uvloop.run(simulate(args.simulate[0], float(args.step_ms) / 1000, args.simulate[1]))
        return
    streams = [int(part) for part in args.streams.split(",")]
    steps_ms = [float(part) for part in args.step_ms.split(",")]
    new_tokens = [int(part) for part in args.new_tokens.split(",")]
    steps_ms, new_tokens = (v * len(streams) if len(v) == 1 else v for v in (steps_ms, new_tokens))
    if not len(streams) == len(steps_ms) == len(new_tokens):
        parser.error("--streams, --step-ms and --new-tokens need as many values, or one")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, VOCAB_SIZE)
        names = ("scheduler", "tokenizer", "gateway")
        plan = make_plan({"model": name, "port": 0}, names=names, num_gateways=args.gateways)
        stack = Stack(plan, log_dir=folder / "logs")
        rng, vocab = random.Random(0), words(VOCAB_SIZE)
        stats_file = folder / "executor.json"

        def start_executor(step_ms: float) -> subprocess.Popen[bytes]:
            simulate = [f"--step-ms={step_ms}", "--simulate", plan.scheduler_address, str(stats_file)]
            return subprocess.Popen([sys.executable, __file__, *simulate])

        def end_executor() -> None:
            executor.terminate()
            executor.wait()

        def load(num_streams: int, lengths: list[tuple[int, int]]) -> tuple[LoadRun, dict[str, float]]:
            """The run with prompts and answers of these lengths, and CPU us a token by process."""
            jobs = [completion_job(random_text(vocab, prompt, rng), prompt, count) for prompt, count in lengths]
            before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
            run = uvloop.run(run_load(stack.url, jobs, num_streams, args.timeout))
            spent = {name: 1e6 * (sum(p.cpu_times()[:2]) - before[name]) for name, p in processes.items()}
            spent["client"] = 1e6 * run.client_cpu_s
            return run, {name: round(us / sum(count for _, count in lengths), 1) for name, us in spent.items()}

        rows: list[dict[str, Any]] = []
        executor = start_executor(steps_ms[0])
        try:
            stack.start(60.0)
            processes = {name: psutil.Process(pid) for name, pid in stack.pids.items()}
            for i, (num_streams, step_ms, count) in enumerate(zip(streams, steps_ms, new_tokens, strict=True)):
                if i:
                    end_executor()
                    executor = start_executor(step_ms)
                num_jobs = max(num_streams, 4)
                load(num_streams, [(args.input_len, WARM_UP_TOKENS)] * num_jobs)
                # No two requests have the same two lengths, so that the executor's record names them.
                least = max(count, WARM_UP_TOKENS + 1)
                run, us_per_token = load(
                    num_streams, [(args.input_len + j // 32, least + j % 32) for j in range(num_jobs)]
                )
                end_executor()
                stats = json.loads(stats_file.read_text())
                rows.append(
                    {
                        "streams": num_streams,
                        "step_ms": step_ms,
                        **{f"{name}_us_per_token": us for name, us in us_per_token.items()},
                        "paused_share": round(stats["paused"] / (stats["paused"] + stats["rows"]), 5),
                        "added_latency_ms": added_latency_ms(run.answers, stats["made_s"]),
                        **run.summary(),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
        finally:
            if executor.poll() is None:
                end_executor()
            stack.stop()
    head = next((row for row in rows if row["streams"] == 256), rows[-1])
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": round(load_before, 2),
        "state": "busy" if load_before > 0.25 * (os.cpu_count() or 1) else "quiet",
        "reference_loop_ns": reference_ns(),
    }
    print(json.dumps({**head, "machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
