"""The ledger against the driver's own figures, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import torch
from executor.memory import MemoryMeter
device = torch.device("cuda", 0)
meter = MemoryMeter.of(device)
weights = torch.ones(3 << 30, dtype=torch.uint8, device=device)
meter.close("weights")
x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
y = x @ x
meter.close("workspace")
cache = torch.zeros(5 << 30, dtype=torch.uint8, device=device)
meter.close("kv_cache")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    for _ in range(200):
        y = (y + x).mul_(0.5)
graph.replay()
torch.cuda.synchronize()
meter.close("graphs")
ledger = meter.ledger()
print("\\n".join(ledger.lines()))
assert ledger.is_true, ledger
assert 3 << 30 <= ledger.weights < (3 << 30) + (64 << 20), ledger
assert 5 << 30 <= ledger.kv_cache < (5 << 30) + (64 << 20), ledger
assert 50 << 20 < ledger.context < 2 << 30, ledger
assert 0 < ledger.graphs < 1 << 30, ledger
free, total = torch.cuda.mem_get_info(device)
print("device used", (total - free) >> 20, "MiB; held", meter.held >> 20, "MiB")
assert meter.held <= total - free + (1 << 30)
"""


def test_the_entries_add_up_to_what_the_driver_shows(device: torch.device) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
