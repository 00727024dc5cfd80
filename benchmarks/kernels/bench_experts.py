"""Time the experts of a mixture layer, whole and stage by stage, against their roofline on one GPU.

usage: python benchmarks/kernels/bench_experts.py [--out FILE.json] [--tokens 1,8,…] [--variants] [--no-stages]

The layer has DeepSeek-V2-Lite's shape: hidden 2,048, 64 routed experts of width 1,408, 6 a token ("routed", what the
peer was timed with), or these and 2 shared ones ("layer"). A time is the median over replays of a CUDA graph that holds
several calls, each with tokens and random routing of its own and a workspace of its own. Bytes: the weights of the experts
that somebody chose, each once, and the tokens in and out; FLOP: of the choices. "share" is the larger of bytes over the
measured read bandwidth and FLOP over the measured bf16 rate, divided by the median. The last line is the record as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import ROOT, Bench, git_commit, machine, nvcc_version, times_us

from rorqual.kernels import experts

HIDDEN, WIDTH, ROUTED, TOP_K, SHARED = 2048, 1408, 64, 6, 2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# vLLM 0.26's fused MoE, routed experts only, both products, activation and sum: median microseconds on one H200.
PEER_US = {
    1: 38.6,
    8: 187.2,
    16: 227.0,
    32: 270.0,
    64: 292.2,
    128: 304.8,
    256: 298.4,
    512: 312.9,
    2048: 940.5,
    8192: 2103.0,
}


class ExpertsBench:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.device = bench, bench.device
        self.num_experts = ROUTED + SHARED
        self.gate_up = bench.randn(self.num_experts, 2 * WIDTH, HIDDEN).mul_(2 * HIDDEN**-0.5)
        self.down = bench.randn(self.num_experts, HIDDEN, WIDTH).mul_(WIDTH**-0.5)
        self.norm_weight = bench.randn(HIDDEN)

    def ids(self, num_tokens: int, shared: int) -> torch.Tensor:
        noise = torch.rand((num_tokens, ROUTED), device=self.device, generator=self.bench.generator)
        routed = noise.topk(TOP_K, dim=-1).indices.to(torch.int32)
        always = torch.arange(ROUTED, ROUTED + shared, dtype=torch.int32, device=self.device).expand(num_tokens, -1)
        return torch.cat((routed, always), dim=-1).contiguous()

    def time(self, num_tokens: int, shared: int, *, stages: bool, **options: Any) -> None:
        sets = 8 if num_tokens <= 512 else 2
        top_k, num_experts = TOP_K + shared, ROUTED + shared
        gate_up, down = self.gate_up[:num_experts], self.down[:num_experts]
        whole: list[Callable[[], Any]] = []
        by_stage: dict[str, list[Callable[[], Any]]] = {"plan": [], "gate_up": [], "down": [], "combine": []}
        num_bytes = 0.0
        for _ in range(sets):
            x, residual = self.bench.randn(num_tokens, HIDDEN), self.bench.randn(num_tokens, HIDDEN)
            ids, normed = self.ids(num_tokens, shared), torch.empty_like(residual)
            weights = torch.rand(ids.shape, device=self.device, generator=self.bench.generator) / top_k
            ws = experts.make_experts_workspace(num_tokens, top_k, num_experts, HIDDEN, WIDTH, self.device)
            steps = experts.experts_stages(x, ids, gate_up, down, ws, **options)
            combine = partial(
                experts.moe_combine, ws, weights, residual, norm_weight=self.norm_weight, normed_out=normed
            )
            whole.append(partial(run_all, [*steps, combine]))
            for name, step in zip(by_stage, [*steps, combine], strict=True):
                by_stage[name].append(step)
            num_bytes += ids.unique().numel() * 3 * WIDTH * HIDDEN * 2 + 4 * num_tokens * HIDDEN * 2
        run_all(whole)
        error = self.error(x, ids, ws)
        if not error < 5e-3:
            print(f"WRONG: {num_tokens} tokens, {options}: error {error}", flush=True)
            return
        notes = dict(options)
        if stages:
            for name, calls in by_stage.items():
                notes[f"{name}_us"] = round(statistics.median(times_us(calls, replays=7)), 2)
        self.bench.report(
            "experts",
            {"tokens": num_tokens, "experts": num_experts, "top_k": top_k},
            whole,
            num_bytes=int(num_bytes / sets),
            flop=2 * num_tokens * top_k * 3 * HIDDEN * WIDTH,
            peer_us=None if shared else PEER_US.get(num_tokens),
            **notes,
        )

    def error(self, x: torch.Tensor, ids: torch.Tensor, ws: experts.ExpertsWorkspace) -> float:
        """Of one token's outputs in the workspace, against float64."""
        token = x.shape[0] // 2
        worst = 0.0
        for choice, expert in enumerate(ids[token].tolist()):
            gate, up = experts.unpack_gate_up(self.gate_up[expert].double())
            row = x[token].double()
            want = experts.unpack_boxes(self.down[expert]).double() @ (
                torch.nn.functional.silu(gate @ row) * (up @ row)
            )
            got = ws.y[ws.row_of[token * ids.shape[1] + choice].long()].double()
            error = float((got - want).norm() / want.norm())
            worst = worst if error <= worst else error  # NaN too
        return worst


def run_all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "h200-experts.json")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--variants", action="store_true", help="also other group sizes, shares of work, pairs")
    parser.add_argument("--shared", type=int, default=0, help="shared experts of the variants: 0 or 2")
    parser.add_argument("--no-stages", action="store_true", help="only the whole")
    parser.add_argument("--commit", default=None, help="what to record where there is no git")
    parser.add_argument("--once", type=int, default=None, help="tokens: three plain calls, no timing, for a profiler")
    args = parser.parse_args()
    bench = Bench(args.variants)
    run = ExpertsBench(bench)
    if args.once is not None:
        x, ids = bench.randn(args.once, HIDDEN), run.ids(args.once, 0)
        ws = experts.make_experts_workspace(args.once, TOP_K, ROUTED, HIDDEN, WIDTH, bench.device)
        residual = torch.zeros_like(x)
        for _ in range(3):
            experts.moe_experts(x, ids, run.gate_up[:ROUTED], run.down[:ROUTED], ws)
            experts.moe_combine(ws, torch.ones(ids.shape, device=bench.device), residual)
        torch.cuda.synchronize()
        return
    record: dict[str, Any] = {
        "machine": machine(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvcc": nvcc_version(),
        },
        "commit": args.commit or git_commit(),
        "command": "python benchmarks/kernels/bench_experts.py" + (" --variants" if args.variants else ""),
        "ceilings": bench.ceilings(),
        "kernels": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tokens = [int(n) for n in args.tokens.split(",")]
    for shared in (0, SHARED):
        for num_tokens in tokens:
            run.time(num_tokens, shared, stages=not args.no_stages)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.variants:
        for num_tokens in tokens:
            variants: list[dict[str, Any]] = []
            for size in (8, 16, 32, 64, 128, 256):
                if min(num_tokens, 64) // 2 <= size <= 2 * num_tokens or size == 8 > num_tokens:
                    variants += [{"group_tokens": size, "paired": False, "few": False}]
                    variants += [{"group_tokens": size, "paired": False, "even": True, "few": False}] * (size <= 64)
                    variants += [{"group_tokens": size, "paired": True, "few": False}] * (size >= 16)
            if num_tokens * (TOP_K + args.shared) <= experts.FEW_CHOICES:
                variants += [{"few": True, "even": True}]
            for options in variants:
                run.time(num_tokens, args.shared, stages=not args.no_stages, **options)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
