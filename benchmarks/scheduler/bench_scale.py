"""What a decision costs with many executors and a long queue: CPU time in the core for each kind of event.

    python -m benchmarks.scheduler.bench_scale [--executors 1,8,64,512] [--queued 0,1000,100000]

Executors of 16 sequences each, all running, prompts of 128 tokens with a first block of their own. Kinds: `open` a
request arrives; `tokens` a report of 16 tokens; `ended` the same in which a sequence ends, so that its slot goes to the
queue's head (with nothing queued: to an arrival, timed as `placed`, among executors that each have room). The last line
is JSON: microseconds, median and p99, one row a combination; bytes a queued request, and a running one (with as many
generated tokens as its prompt has, to which those of its blocks' labels belong).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict

from services.scheduler.core import CoreConfig, Effects, SchedulerCore
from services.scheduler.events import Event, ExecutorConnected, Open, Reported, Request
from services.scheduler.orders import Admit
from services.scheduler.stream_events import FinishReason

from .executor_model import ModelExecutor, StepModel
from .simulator import text, with_limits

SEQS = 16
PROMPT_TOKENS = 128


class Bench:
    """A core whose executors are full, and a queue behind it."""

    def __init__(self, num_executors: int) -> None:
        model = with_limits(StepModel.load(), num_blocks=512, max_num_seqs=SEQS, max_num_batched_tokens=4096 + SEQS)
        self.core = SchedulerCore(CoreConfig(max_queue_len=10**9))
        self.running: dict[int, list[int]] = defaultdict(list)  # link id -> ids of its sequences
        self.num_batches: dict[int, int] = defaultdict(int)
        self.times_us: dict[str, list[float]] = defaultdict(list)
        self.num_streams = 0
        for link_id in range(1, num_executors + 1):
            executor = ModelExecutor(f"sim-{link_id}", model, max_model_len=4096)
            self._handle("", ExecutorConnected(link_id, executor.spec))

    def open(self, kind: str) -> None:
        self.num_streams += 1
        name = f"r{self.num_streams}"
        request = Request(request_id=name, num_prompt_tokens=PROMPT_TOKENS, max_tokens=4000 - PROMPT_TOKENS)
        prompt = text.__wrapped__(name, PROMPT_TOKENS)
        for link_id, seq_ids in self._handle(kind, Open(self.num_streams, request, prompt)).items():
            self._computed(link_id, seq_ids)

    def report(self, link_id: int, *, end_one: bool, kind: str) -> None:
        """A step of one executor: a token for each of its sequences."""
        seq_ids = self.running[link_id]
        finish = b""
        if end_one:
            finish = bytes([FinishReason.LENGTH, *[0] * (len(seq_ids) - 1)])
            self.running[link_id] = seq_ids[1:]
        event = Reported(
            link_id=link_id,
            seq_ids=seq_ids,
            num_tokens=[1] * len(seq_ids),
            token_ids=bytes(4 * len(seq_ids)),
            last_batch_id=self.num_batches[link_id],
            finish=finish,
            num_steps=1,
            step_time_us=10_000,
        )
        for admitted_by, new in self._handle(kind, event).items():
            self._computed(admitted_by, new)

    def _computed(self, link_id: int, seq_ids: list[int]) -> None:
        self.running[link_id] += seq_ids
        columns = {"computed_seq_ids": seq_ids, "num_computed_tokens": [PROMPT_TOKENS] * len(seq_ids)}
        for admitted_by, new in self._handle("computed", Reported(link_id=link_id, **columns)).items():
            self._computed(admitted_by, new)

    def _handle(self, kind: str, event: Event) -> dict[int, list[int]]:
        """Time one event and the orders it leads to; returns who was admitted where."""
        start_s = time.thread_time()
        effects: Effects = self.core.handle(event, 0.0)
        batches = [(link_id, self.core.take_batch(link_id)) for link_id in effects.links]
        self.times_us[kind].append(1e6 * (time.thread_time() - start_s))
        for link_id, batch in batches:
            if batch is not None:
                self.num_batches[link_id] = batch[0]
        admitted: dict[int, list[int]] = {}
        for link_id, batch in batches:
            if batch and (new := [order.seq_id for order in batch[1] if isinstance(order, Admit)]):
                admitted[link_id] = new
        return admitted


def measure(num_executors: int, num_queued: int, num_events: int) -> dict[str, object]:
    """One row of the result."""
    bench = Bench(num_executors)
    for _ in range(num_executors * SEQS):
        bench.open("")
    queue_bytes = 0
    if num_queued:
        tracemalloc.start() if num_executors == 1 else None
        for _ in range(num_queued):
            bench.open("")
        if num_executors == 1:
            queue_bytes = tracemalloc.get_traced_memory()[0] // num_queued
            tracemalloc.stop()
    gc.collect()
    gc.freeze()  # as the server does: the collector is no part of a decision
    gc.disable()
    for i in range(num_events):
        link_id = i % num_executors + 1
        bench.report(link_id, end_one=False, kind="tokens")
        bench.report(link_id, end_one=True, kind="ended")
        bench.open("open" if num_queued else "placed")
    gc.enable()
    gc.unfreeze()
    row: dict[str, object] = {"executors": num_executors, "queued": num_queued}
    for kind in ("open", "placed", "tokens", "ended"):
        if times := sorted(bench.times_us[kind]):
            row[f"{kind}_us"] = {
                "p50": round(statistics.median(times), 1),
                "p99": round(times[len(times) * 99 // 100], 1),
            }
    if queue_bytes:
        row["bytes_per_queued"] = queue_bytes
    return row


def bytes_per_running(num_executors: int = 64) -> int:
    """What a running request takes, when it has generated as many tokens as its prompt has."""
    bench = Bench(num_executors)
    tracemalloc.start()
    for _ in range(num_executors * SEQS):
        bench.open("")
    bench.times_us.clear()
    for _ in range(PROMPT_TOKENS):
        for link_id in range(1, num_executors + 1):
            bench.report(link_id, end_one=False, kind="tokens")
        bench.times_us.clear()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return num_bytes // (num_executors * SEQS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", default="1,8,64,512")
    parser.add_argument("--queued", default="0,1000,100000")
    parser.add_argument("--events", type=int, default=2000, help="of each kind")
    args = parser.parse_args()
    rows = []
    for num_executors in map(int, args.executors.split(",")):
        for num_queued in map(int, args.queued.split(",")):
            rows.append(measure(num_executors, num_queued, args.events))
            sys.stderr.write(f"{rows[-1]}\n")
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({"machine": machine, "rows": rows, "bytes_per_running": bytes_per_running()}))


if __name__ == "__main__":
    main()
