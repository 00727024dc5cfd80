"""The simulated executor with a record of what it made.

    python benchmarks/serving/sim_executor.py FILE --scheduler HOST:PORT --model DIR --sim-step-ms 10 …

The flags are `python -m executor --backend sim`'s. When it is ended FILE holds JSON: `made_s`, for each request the
perf_counter's seconds at which its tokens were ready, by "prompt tokens+output tokens" (whoever wants to know sends no
two requests of the same lengths); and `steps`, a [when, tokens so far, sequence-steps paused so far] a step.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402

from executor.sim.app import prepare, serve  # noqa: E402
from executor.sim.device import SimStep  # noqa: E402
from executor.sim.loop import SimLoop  # noqa: E402
from rorqual.core.config import ExecutorConfig  # noqa: E402
from rorqual.core.config_loader import load_config  # noqa: E402
from rorqual.telemetry import setup_logging  # noqa: E402
from rorqual.v1 import executor_pb2  # noqa: E402


class Record:
    """Listens to a loop."""

    def __init__(self, loop: SimLoop) -> None:
        self.made_s: dict[str, list[float]] = defaultdict(list)
        self.steps: list[tuple[float, int, int]] = []
        self._num_tokens = 0
        self._lengths: dict[int, str] = {}
        self._device = loop.device
        self._receive = loop.receive
        loop.receive = self._read_orders  # type: ignore[method-assign]
        loop.on_made = self._made

    def _read_orders(self, batch: executor_pb2.OrderBatch) -> None:
        for order in batch.orders:
            if order.HasField("admit"):
                admit = order.admit
                num_prompt = admit.num_prompt_tokens
                self._lengths[admit.seq_id] = f"{num_prompt}+{admit.max_total_tokens - num_prompt}"
        self._receive(batch)

    def _made(self, step: SimStep) -> None:
        now_s = time.perf_counter()
        for seq_id, tokens in step.tokens.items():
            self._num_tokens += len(tokens)
            self.made_s[self._lengths[seq_id]] += [now_s] * len(tokens)
        self.steps.append((now_s, self._num_tokens, self._device.num_paused_steps))


async def run(config: ExecutorConfig, file: Path) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    prepared = prepare(config)
    record = Record(prepared.loop)
    await serve(prepared, stop)
    file.write_text(json.dumps({"made_s": record.made_s, "steps": record.steps}))


if __name__ == "__main__":
    settings = load_config(ExecutorConfig, sys.argv[2:], prog="sim_executor.py")
    setup_logging("executor", settings.telemetry)
    uvloop.run(run(settings, Path(sys.argv[1])))
