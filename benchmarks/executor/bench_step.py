"""Steps of the GPU executor without the services around it: where a step's time goes, on the device and on the host.

    python benchmarks/executor/bench_step.py --shape benchmarks/serving/shapes/deepseek-v2-lite --batches 1,8,64

For each batch size: a decode step's time on the device (its graph alone, replayed back to back), the time between
steps when the loop runs, and what the host needs; then prefill steps; with --profile the kernels of a step. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.gpu.backend import GpuBackend
from executor.gpu.step_loop import GpuStepLoop
from executor.kv_cache import LatentCache
from executor.memory import MemoryMeter, plan_cache
from executor.order_loop import StepLimits
from executor.orders import read_batch
from executor.weights import open_source
from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.config import ExecutorConfig
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, executor_pb2


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        config = ExecutorConfig(
            model=args.shape,
            load_format=args.load_format,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            deterministic=args.deterministic,
        )
        started_s = time.monotonic()
        meter = MemoryMeter.of(self.device)
        with open_source(
            args.shape, dtype=torch.bfloat16, device=self.device, load_format=args.load_format, seed=0
        ) as source:
            self.backend = GpuBackend(source, config, args.max_model_len)
        torch.cuda.synchronize()
        meter.close("weights")
        loaded_s = time.monotonic() - started_s
        room = self.backend.kv_room(config, meter)
        plan = plan_cache(
            block_bytes=LatentCache.block_bytes(self.backend.config, torch.bfloat16),
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            is_len_fixed=True,
            kv_cache_bytes=args.kv_cache_bytes,
            memory_bytes=room,
            takes_all=True,
        )
        self.cache = LatentCache(self.backend.config, plan.num_blocks, dtype=torch.bfloat16, device=self.device)
        self.cache.fill_(float("nan"))
        meter.close("kv_cache", self.cache.bytes_per_block * self.cache.num_blocks)
        self.limits = StepLimits(
            vocab_size=self.backend.config.vocab_size,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            deterministic=args.deterministic,
        )
        self.loop: GpuStepLoop = self.backend.make_loop(self.cache, self.limits, traced=False)
        self.loop.on_order_error = _raise
        started_s = time.monotonic()
        self.backend.warm_up(meter)
        ledger = meter.ledger()
        for line in ledger.lines():
            print("memory:", line)
        self.start = {
            "load_s": loaded_s,
            "capture_s": time.monotonic() - started_s,
            "graphs_mib": ledger.graphs / 2**20,
            "ledger_true": ledger.is_true,
            "kv_blocks": plan.num_blocks,
        }
        self.batch_id = 0
        self.next_seq = 1
        self.rng = np.random.default_rng(0)

    def order(self, *orders: executor_pb2.Order) -> None:
        self.batch_id += 1
        self.loop.submit(read_batch(executor_pb2.OrderBatch(batch_id=self.batch_id, orders=list(orders))))

    def admit(self, num_tokens: int, room: int, first_block: int, **sampling: Any) -> tuple[int, int]:
        """Admit a random prompt and order its chunks. Returns its id and the next free block."""
        seq_id = self.next_seq
        self.next_seq += 1
        tokens = self.rng.integers(0, self.limits.vocab_size, num_tokens).tolist()
        num_blocks = -(-(num_tokens + room) // BLOCK_SIZE)
        blocks = list(range(first_block, first_block + num_blocks))
        sampling = {"temperature": 0.0, **sampling}
        orders = [
            executor_pb2.Order(
                admit=executor_pb2.Admit(
                    seq_id=seq_id,
                    num_tokens=num_tokens,
                    num_prompt_tokens=num_tokens,
                    block_tables=[executor_pb2.BlockTable(block_ids=pack_token_ids(blocks))],
                    limit=num_blocks * BLOCK_SIZE,
                    max_total_tokens=self.limits.max_model_len,
                    sampling=common_pb2.SamplingParams(**sampling),
                )
            )
        ]
        budget = self.limits.chunk_budget // BLOCK_SIZE * BLOCK_SIZE
        for start in range(0, num_tokens, budget):
            end = min(start + budget, num_tokens)
            orders.append(
                executor_pb2.Order(
                    prefill=executor_pb2.Prefill(
                        seq_id=seq_id, start=start, end=end, token_ids=pack_token_ids(tokens[start:end])
                    )
                )
            )
        self.order(*orders)
        return seq_id, first_block + num_blocks

    def drop(self, seq_ids: list[int]) -> None:
        self.order(*(executor_pb2.Order(drop=executor_pb2.Drop(seq_id=seq_id)) for seq_id in seq_ids))
        while self.loop.run_once():
            pass
        self.loop.outbox.take()
        self.loop.stats.clear()

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """`batch` sequences of about `context` tokens."""
        free, seq_ids = 0, []
        for _ in range(batch):
            seq_id, free = self.admit(context, steps + 40, free)
            seq_ids.append(seq_id)
        loop = self.loop
        while loop._chunks or loop._inbox or (len(loop._in_flight) and loop._in_flight[-1].chunks):
            loop.run_once()
        for _ in range(5):
            loop.run_once()
        engine = loop._engine
        launch_s, wait_s = [], []
        launch, wait = engine.launch, engine.wait

        def timed_launch(*args: Any) -> Any:
            t = time.perf_counter()
            result = launch(*args)
            launch_s.append(time.perf_counter() - t)
            return result

        def timed_wait(step: Any) -> Any:
            t = time.perf_counter()
            result = wait(step)
            wait_s.append(time.perf_counter() - t)
            return result

        engine.launch, engine.wait = timed_launch, timed_wait  # type: ignore[method-assign]
        started_s = time.perf_counter()
        for _ in range(steps):
            loop.run_once()
        wall_s = (time.perf_counter() - started_s) / steps
        engine.launch, engine.wait = launch, wait  # type: ignore[method-assign]
        size = int(engine._graph_size_of[batch])
        graph = engine._graphs[size]
        torch.cuda.synchronize()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(5):
            began.record()
            for _ in range(4):
                graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 4e3)
        graph_s = statistics.median(times)
        while loop._in_flight:
            loop._finish_step_in_flight()
        report = loop.outbox.take()
        assert report is not None
        assert not report.faults, report.faults[0]
        self.drop(seq_ids)
        return {
            "batch": batch,
            "context": context,
            "graph_size": size,
            "step_us": wall_s * 1e6,
            "graph_us": graph_s * 1e6,
            "gap_share": 1 - graph_s / wall_s,
            "host_us": (wall_s - statistics.mean(wait_s)) * 1e6,
            "launch_us": statistics.mean(launch_s) * 1e6,
            "tokens_per_s": batch / wall_s,
        }

    def prefill(self, prompts: int, length: int, repeats: int) -> dict[str, Any]:
        """Steps that compute `prompts` new prompts of `length`, nothing else running."""
        walls, devices, launches = [], [], []
        engine = self.loop._engine
        for _ in range(repeats):
            free, seq_ids = 0, []
            for _ in range(prompts):
                seq_id, free = self.admit(length, 8, free)
                seq_ids.append(seq_id)
            torch.cuda.synchronize()
            launch = engine.launch
            spent: list[float] = []

            def timed(*args: Any, launch: Any = launch, spent: list[float] = spent) -> Any:
                t = time.perf_counter()
                result = launch(*args)
                spent.append(time.perf_counter() - t)
                return result

            engine.launch = timed  # type: ignore[method-assign]
            started_s = time.perf_counter()
            while self.loop._chunks or self.loop._inbox or not spent:
                self.loop.run_once()
            while self.loop._in_flight:
                self.loop._finish_step_in_flight()
            walls.append(time.perf_counter() - started_s)
            engine.launch = launch  # type: ignore[method-assign]
            launches.append(sum(spent))
            devices.append(sum(s.duration_s for s in self.loop.stats if s.num_prefill_tokens))
            self.drop(seq_ids)
        return {
            "prompts": prompts,
            "length": length,
            "wall_ms": statistics.median(walls) * 1e3,
            "device_ms": statistics.median(devices) * 1e3,
            "launch_ms": statistics.median(launches) * 1e3,
            "tokens_per_s": prompts * length / statistics.median(walls),
        }

    def profile(self, batch: int, context: int, out: Path | None, prompts: int = 0, length: int = 0) -> None:
        """The kernels of one step, by name."""
        free, seq_ids = 0, []
        for _ in range(batch):
            seq_id, free = self.admit(context, 64, free)
            seq_ids.append(seq_id)
        loop = self.loop
        while loop._chunks or loop._inbox:
            loop.run_once()
        for _ in range(4):
            loop.run_once()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            if prompts:
                for _ in range(prompts):
                    seq_id, free = self.admit(length, 8, free)
                    seq_ids.append(seq_id)
                while loop._chunks or loop._inbox:
                    loop.run_once()
            else:
                for _ in range(4):
                    loop.run_once()
            torch.cuda.synchronize()
        self.drop(seq_ids)
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in events)
        per = 1 if prompts else 4
        lines = [
            f"kernels of a step: batch {batch}, context {context}, prompts {prompts} x {length}: {total / per:.0f} us"
        ]
        for event in events[:32]:
            lines.append(
                f"{event.self_device_time_total / per:9.1f} us {event.count / per:7.1f} x "
                f"{event.self_device_time_total / max(event.count, 1):8.2f} us  {event.key[:110]}"
            )
        text = "\n".join(lines)
        print(text, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"profile-{batch}-{prompts}x{length}.txt").write_text(text + "\n")


def _raise(error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="folder with config.json")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prefills", default="1x512,4x512,15x512,1x4096", help="prompts x tokens, comma separated")
    parser.add_argument("--profile", default="", help="batches, or batch:prompts x tokens, to list the kernels of")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the profiles")
    args = parser.parse_args()
    bench = Bench(args)
    print("start:", json.dumps(bench.start), flush=True)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "start": bench.start,
        "decode": [],
        "prefill": [],
    }
    with torch.inference_mode():
        for batch in (int(b) for b in args.batches.split(",") if b):
            row = bench.decode(batch, args.context, args.steps)
            result["decode"].append(row)
            print("decode:", json.dumps({k: round(v, 4) for k, v in row.items()}), flush=True)
        for part in (p for p in args.prefills.split(",") if p):
            prompts, length = (int(n) for n in part.split("x"))
            row = bench.prefill(prompts, length, 5)
            result["prefill"].append(row)
            print("prefill:", json.dumps({k: round(v, 3) for k, v in row.items()}), flush=True)
        for part in (p for p in args.profile.split(",") if p):
            batch, _, rest = part.partition(":")
            prompts, length = (int(n) for n in rest.split("x")) if rest else (0, 0)
            bench.profile(int(batch), args.context, args.out, prompts, length)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
