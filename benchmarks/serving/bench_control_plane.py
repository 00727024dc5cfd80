"""CPU time and latency of scheduler, tokenizer and gateway, with a simulated executor that only makes tokens up.

    python benchmarks/serving/bench_control_plane.py [--streams 256] [--step-ms 150] [--new-tokens 64] [--gateways 1]

Each process's CPU time while it carries the load, divided by the tokens; the machine's other work makes it an upper
bound. The simulated executor reports a step's tokens and then waits --step-ms, so TTFT is the way through the processes
and back, and TPOT that of one token above --step-ms. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import psutil  # noqa: E402
import uvloop  # noqa: E402
from load_client import LoadRun, completion_job, run_load  # noqa: E402
from word_tokenizer import random_text, words, write_tokenizer  # noqa: E402

from rorqual.launch import Stack, make_plan  # noqa: E402

VOCAB_SIZE = 8192


async def simulate(address: str, step_s: float) -> None:
    """The executor: every decoding sequence gets a token each step."""
    from tests.support.sim_executor import SimConfig, SimExecutor, SimExecutorLink

    config = SimConfig(
        vocab_size=VOCAB_SIZE, num_blocks=16384, max_num_seqs=512, max_num_batched_tokens=16384, read_back=False
    )
    link = SimExecutorLink(address, SimExecutor(config), step_time_s=step_s)
    await link.start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--input-len", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--simulate", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.simulate:
        uvloop.run(simulate(args.simulate, args.step_ms / 1000))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, VOCAB_SIZE)
        names = ("scheduler", "tokenizer", "gateway")
        plan = make_plan({"model": name, "port": 0}, names=names, num_gateways=args.gateways)
        stack = Stack(plan, log_dir=folder / "logs")
        worker = [sys.executable, __file__, f"--simulate={plan.scheduler_address}", f"--step-ms={args.step_ms}"]
        executor = subprocess.Popen(worker)
        try:
            stack.start(60.0)
            rng, vocab = random.Random(0), words(VOCAB_SIZE)
            processes = {name: psutil.Process(pid) for name, pid in stack.pids.items()}

            def load(new_tokens: int) -> tuple[LoadRun, dict[str, float]]:
                """The run, and CPU us a token by process."""
                texts = [random_text(vocab, args.input_len, rng) for _ in range(max(args.streams, 4))]
                jobs = [completion_job(text, args.input_len, new_tokens) for text in texts]
                before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
                run = uvloop.run(run_load(stack.url, jobs, args.streams, args.timeout))
                spent = {name: 1e6 * (sum(p.cpu_times()[:2]) - before[name]) for name, p in processes.items()}
                spent["client"] = 1e6 * run.client_cpu_s
                num_tokens = len(jobs) * new_tokens
                return run, {name: round(us / num_tokens, 1) for name, us in spent.items()}

            load(8)
            run, us_per_token = load(args.new_tokens)
        finally:
            executor.terminate()
            executor.wait()
            stack.stop()
    print(json.dumps({"streams": args.streams, **run.summary(), "cpu_us_per_token": us_per_token}))


if __name__ == "__main__":
    main()
