"""What an executor keeps of products of other sizes is bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from executor.model.linear import packs

# Products of other numbers of rows than any before, in parts: what each part adds to memory in use, in MiB.
_SCRIPT = """
import ctypes, os, sys
import executor.__main__
assert "torch" not in sys.modules, "it reads its environment when it is loaded"
import torch
from executor.model.linear import Linear

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f uordblks g h".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
torch.set_num_threads(1)
linear = Linear(torch.randn(128, 128), pack=True)
with torch.inference_mode():
    for start in range(2, 802, 200):
        before = libc.mallinfo2().uordblks
        for num_rows in range(start, start + 200):
            linear(torch.zeros(num_rows, 128))
        print((libc.mallinfo2().uordblks - before) / 2**20)
"""


@pytest.mark.skipif(not packs(torch.float32), reason="this CPU's products are not oneDNN's")
def test_products_of_many_sizes_are_not_all_kept() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    if "mallinfo2" in done.stderr:
        pytest.skip("this C library does not say what is in use")
    assert done.returncode == 0, done.stderr
    first, *later = map(float, done.stdout.split())
    assert sum(later) < first / 2, done.stdout
