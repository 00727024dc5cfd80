"""Time the sampler against the read roofline on one GPU.

usage: python benchmarks/kernels/bench_sampling.py [--out sampling.json] [--vocab-size 102400] [--once B KIND]

Medians over replays of a CUDA graph that holds one call for each of several input sets. "hbm": the sets together exceed
the L2 cache; "l2": 8 sets, which a small batch's logits fit in as the LM head leaves them. "share" is the bytes of the
logits, once, over the measured read bandwidth, divided by the median. The last line is the whole record as JSON.
--once runs one call of one kind three times, for a profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from bench import ROTATE_BYTES, git_commit, machine, times_us  # noqa: E402

from rorqual.kernels import sampling  # noqa: E402
from rorqual.kernels.loader import DEFAULT_PATH, KernelLibrary  # noqa: E402

DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop_token_ids": (),
    "min_tokens": 0,
    "logprobs": None,
}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.8}],
    "top_p": [{"temperature": 0.8, "top_p": 0.95}],
    "top_p_top_k": [{"temperature": 0.8, "top_p": 0.95, "top_k": 50}],
    "min_p": [{"temperature": 0.8, "min_p": 0.05}],
    "greedy_logprobs": [{"temperature": 0.0, "logprobs": 5}],
    "mix": [
        {"temperature": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.8, "frequency_penalty": 0.5, "top_k": 40},
        {"temperature": 1.0, "logprobs": 20, "min_p": 0.05},
    ],
}


def make_calls(
    kind: str, batch: int, vocab_size: int, num_sets: int, spread: float, library: KernelLibrary
) -> list[Callable[[], Any]]:
    device = torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(11)
    columns = sampling.make_sampling_columns(batch, device)
    specs = [SimpleNamespace(**{**DEFAULTS, "seed": r, **KINDS[kind][r % len(KINDS[kind])]}) for r in range(batch)]
    adjusted = [r for r in range(batch) if sampling.needs_adjustment(specs[r])]
    pool = sampling.AdjustPool(max(len(adjusted), 1), vocab_size, device)
    for r, spec in enumerate(specs):
        idx = adjusted.index(r) if r in adjusted else -1
        if idx >= 0:
            pool.set_row(idx, spec, np.arange(100), np.arange(50, 300))
        columns.records[r] = torch.from_numpy(sampling.pack_record(spec, 0, adjust_idx=idx)).to(device)
    workspace = sampling.make_sampling_workspace(batch, vocab_size, device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    positions = torch.arange(batch, dtype=torch.int64, device=device) + 1000
    tokens = torch.zeros(batch, dtype=torch.int32, device=device)
    sound = torch.zeros(batch, dtype=torch.uint8, device=device)
    out = sampling.make_logprob_buffers(batch, device)
    return [
        partial(
            sampling.sample,
            torch.randn((batch, vocab_size), device=device, generator=generator) * spread,
            slots,
            positions,
            None,
            columns,
            pool,
            None,
            workspace,
            tokens,
            sound,
            out,
            library=library,
        )
        for _ in range(num_sets)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--vocab-size", type=int, default=102400)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--once", nargs=2, metavar=("B", "KIND"))
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--library", type=Path, default=DEFAULT_PATH)
    options = parser.parse_args()
    library = KernelLibrary(options.library)
    if options.once:
        for call in make_calls(options.once[1], int(options.once[0]), options.vocab_size, 3, 3.0, library):
            call()
        torch.cuda.synchronize()
        return
    source = torch.randint(0, 255, (2 << 30,), device="cuda", dtype=torch.uint8).view(torch.int64)
    read_gb_s = source.nbytes / statistics.median(times_us([source.sum])) / 1e3
    del source
    print(f"read {read_gb_s:.0f} GB/s")
    rows = []
    for batch in options.batches:
        num_bytes = batch * options.vocab_size * 4
        for kind in options.kinds:
            for spread in (3.0,) if "top_p" not in kind else (3.0, 0.3):  # like a model's, and nearly flat
                num_sets, where = max(2, -(-ROTATE_BYTES // num_bytes)), "hbm"
                if num_sets > 16:
                    num_sets, where = 8, "l2"
                times = times_us(make_calls(kind, batch, options.vocab_size, num_sets, spread, library))
                median = statistics.median(times)
                share = num_bytes / read_gb_s / 1e3 / median
                rows.append(
                    {"batch": batch, "vocab_size": options.vocab_size, "kind": kind, "spread": spread, "where": where}
                    | {"us": round(median, 2), "p99_us": round(max(times), 2), "roofline_share": round(share, 3)}
                )
                print(
                    f"B {batch:4d} {kind:16s} spread {spread} {where:4s} {median:8.2f} us  share {share:.2f}",
                    flush=True,
                )
    record = {
        "machine": machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "commit": options.commit or git_commit(),
        "read_gb_s": round(read_gb_s, 1),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
