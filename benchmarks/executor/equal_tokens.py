"""How often a sequence gets the same tokens when something around it is different: the GPU executor, embedded model.

    python benchmarks/executor/equal_tokens.py [--deterministic] [--shape models/tiny]

Each of some prompts runs alone first; then again alone, among 63 others, with its prompt cut into chunks of 64, with a
cached prefix, and admitted again after half of its tokens. Greedy and sampled. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from bench_step import Bench

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids, unpack_uint64
from rorqual.v1 import common_pb2, executor_pb2

NEW = 64  # tokens to be generated


class Runner:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.tokens: dict[int, list[int]] = {}
        self.next_block = 0

    def submit(
        self,
        history: list[int],
        *,
        num_prompt: int = 0,
        chunk: int = 0,
        blocks: list[int] | None = None,
        num_cached: int = 0,
        new: int = NEW,
        **sampling: Any,
    ) -> tuple[int, list[int]]:
        """Returns the sequence's id and its blocks."""
        bench = self.bench
        seq_id = bench.next_seq
        bench.next_seq += 1
        num_prompt = num_prompt or len(history)
        total = num_prompt + new
        if blocks is None:
            num_blocks = -(-total // BLOCK_SIZE)
            if self.next_block + num_blocks > bench.cache.num_blocks:
                self.next_block = 0
            blocks = list(range(self.next_block, self.next_block + num_blocks))
            self.next_block += num_blocks
        orders = [
            executor_pb2.Order(
                admit=executor_pb2.Admit(
                    seq_id=seq_id,
                    num_tokens=len(history),
                    num_prompt_tokens=num_prompt,
                    num_cached_tokens=num_cached,
                    block_tables=[executor_pb2.BlockTable(block_ids=pack_token_ids(blocks))],
                    limit=len(blocks) * BLOCK_SIZE,
                    max_total_tokens=total,
                    sampling=common_pb2.SamplingParams(**sampling),
                )
            )
        ]
        step = chunk or bench.limits.chunk_budget // BLOCK_SIZE * BLOCK_SIZE
        for start in range(num_cached, len(history), step):
            end = min(start + step, len(history))
            orders.append(
                executor_pb2.Order(
                    prefill=executor_pb2.Prefill(
                        seq_id=seq_id, start=start, end=end, token_ids=pack_token_ids(history[start:end])
                    )
                )
            )
        bench.order(*orders)
        return seq_id, blocks

    def run(self) -> None:
        while self.bench.loop.run_once():
            pass
        report = self.bench.loop.outbox.take()
        if report is None:
            return
        assert not report.faults, report.faults[0]
        counts, made = unpack_token_ids(report.num_tokens), unpack_token_ids(report.token_ids)
        at = 0
        for seq_id, count in zip(unpack_uint64(report.seq_ids), counts, strict=True):
            self.tokens[seq_id] = list(made[at : at + count])
            at += count


def measure(runner: Runner, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    alone: list[list[int]] = []
    kept: list[list[int]] = []
    for prompt in prompts:
        seq_id, blocks = runner.submit(prompt, **sampling)
        runner.run()
        alone.append(runner.tokens[seq_id])
        kept.append(blocks)
    others = [[(i * 31 + k) % 8000 for k in range(20 + 7 * i)] for i in range(63)]

    def again(**change: Any) -> list[list[int]]:
        made = []
        for prompt in prompts:
            seq_id, _ = runner.submit(prompt, **change, **sampling)
            runner.run()
            made.append(runner.tokens[seq_id])
        return made

    def among() -> list[list[int]]:
        made = []
        for prompt in prompts:
            for other in others[:40]:
                runner.submit(other, new=NEW + 20, temperature=1.0, seed=9)
            seq_id, _ = runner.submit(prompt, **sampling)
            for other in others[40:]:
                runner.submit(other, new=NEW + 20, temperature=1.0, seed=9)
            runner.run()
            made.append(runner.tokens[seq_id])
        return made

    def cached() -> list[list[int]]:
        made = []
        for prompt in prompts:
            first, blocks = runner.submit(prompt, new=2, **sampling)
            runner.run()
            num_cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
            more = -(-(len(prompt) + NEW) // BLOCK_SIZE) - num_cached // BLOCK_SIZE
            fresh = list(range(runner.next_block, runner.next_block + more))
            runner.next_block += more
            seq_id, _ = runner.submit(
                prompt, blocks=blocks[: num_cached // BLOCK_SIZE] + fresh, num_cached=num_cached, **sampling
            )
            runner.run()
            made.append(runner.tokens[seq_id])
            del first
        return made

    def resumed() -> list[list[int]]:
        made = []
        for prompt, tokens in zip(prompts, alone, strict=True):
            held = tokens[: NEW // 2]
            seq_id, _ = runner.submit(prompt + held, num_prompt=len(prompt), chunk=BLOCK_SIZE, **sampling)
            runner.run()
            made.append(held + runner.tokens[seq_id])
        return made

    cases = {
        "alone again": again,
        "among 63 others": among,
        "prompt in chunks of 64": lambda: again(chunk=BLOCK_SIZE),
        "prefix cached": cached,
        "admitted again after half": resumed,
    }
    rows: dict[str, Any] = {}
    for name, case in cases.items():
        runner.next_block = 0
        made = case()
        equal = [a == b for a, b in zip(alone, made, strict=True)]
        firsts = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), NEW)
            for a, b in zip(alone, made, strict=True)
        ]
        rows[name] = {"equal": sum(equal), "of": len(equal), "first_difference": min(firsts)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="models/tiny")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    bench = Bench(
        argparse.Namespace(
            shape=args.shape,
            load_format="safetensors",
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            kv_cache_bytes=1 << 30,
            deterministic=args.deterministic,
        )
    )
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 400, (args.prompts,), generator=generator).tolist()
    prompts = [torch.randint(0, 8000, (n,), generator=generator).tolist() for n in lengths]
    runner = Runner(bench)
    result: dict[str, Any] = {"deterministic": args.deterministic}
    with torch.inference_mode():
        for name, sampling in (
            ("greedy", {"temperature": 0.0}),
            ("sampled", {"temperature": 1.0, "top_p": 0.95, "seed": 7}),
        ):
            result[name] = measure(runner, prompts, sampling)
            for case, row in result[name].items():
                print(
                    f"{name:8} {case:28} {row['equal']:3} of {row['of']} equal, first difference at {row['first_difference']}"
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
