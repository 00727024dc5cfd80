"""Time the compiled kernels against their rooflines on one GPU.

usage: python benchmarks/kernels/bench.py [--out benchmarks/results/h200-kernels.json] [--only mla,elementwise,moe] [--variants]

Every time is the median over replays of a CUDA graph that holds one call for each of several input sets, which
together exceed the L2 cache. "share" is the floor, the larger of bytes over the measured read bandwidth and FLOP
over the measured bf16 rate, divided by the median. The last line is the whole record as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rorqual.kernels import elementwise, mla, moe  # noqa: E402
from rorqual.kernels.reference_paged import mla_decode_paged  # noqa: E402

SCALE = 192**-0.5
ROTATE_BYTES = 300 << 20  # five times the L2
BF16 = torch.bfloat16

# Medians in microseconds of the faster public kernel of each shape, FlashMLA or FlashAttention-3's MLA as vLLM 0.26
# ships them, recorded on one H200: (heads, batch, context).
PEER_US = {
    (128, 1, 4096): 18.5,
    (128, 1, 8192): 21.9,
    (128, 32, 4096): 80.0,
    (128, 32, 8192): 136.9,
    (128, 128, 4096): 254.6,
    (128, 128, 8192): 489.8,
    (16, 1, 4096): 15.7,
    (16, 1, 8192): 19.0,
    (16, 32, 4096): 51.2,
    (16, 32, 8192): 86.6,
    (16, 128, 4096): 157.3,
    (16, 128, 8192): 295.4,
}


def times_us(calls: Sequence[Callable[[], Any]], replays: int = 21) -> list[float]:
    """Microseconds a call, of each replay of a graph of all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    repeat = max(1, 8 // len(calls))  # so that the launch of the graph itself weighs little
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / (repeat * len(calls)) for start, end in events]


def eager_us(call: Callable[[], Any], repeats: int = 11) -> list[float]:
    """Microseconds of each of several plain calls: for calls that are long against their launch."""
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[2:]


class Bench:
    def __init__(self, variants: bool) -> None:
        self.variants = variants
        self.device = torch.device("cuda")
        self.generator = torch.Generator(device=self.device).manual_seed(7)
        self.rows: list[dict[str, Any]] = []
        self.read_gb_s = self.tflop_s = 0.0

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16, generator=self.generator)

    def ceilings(self) -> dict[str, float]:
        source = torch.randint(0, 255, (2 << 30,), device=self.device, dtype=torch.uint8).view(torch.int64)
        target = torch.empty_like(source)
        read = statistics.median(times_us([source.sum]))
        copy = statistics.median(eager_us(partial(target.copy_, source)))  # in a graph it would go to a copy engine
        a, b = self.randn(8192, 8192), self.randn(8192, 8192)
        product = statistics.median(times_us([partial(torch.matmul, a, b)]))
        num_bytes = source.numel() * 8
        self.read_gb_s, self.tflop_s = num_bytes / read / 1e3, 2 * 8192**3 / product / 1e6
        ceilings = {
            "read_gb_s": round(self.read_gb_s, 1),
            "copy_gb_s": round(2 * num_bytes / copy / 1e3, 1),
            "bf16_tflop_s": round(self.tflop_s, 1),
        }
        print("ceilings:", ceilings, flush=True)
        return ceilings

    def report(
        self,
        name: str,
        shape: dict[str, Any],
        calls: Sequence[Callable[[], Any]],
        *,
        num_bytes: int,
        flop: int = 0,
        peer_us: float | None = None,
        **notes: Any,
    ) -> None:
        times = sorted(times_us(calls))
        median, p99 = statistics.median(times), times[-1 - len(times) // 100]
        floor = max(num_bytes / self.read_gb_s / 1e3, flop / self.tflop_s / 1e6)
        row: dict[str, Any] = {
            "name": name,
            "shape": shape,
            "us": round(median, 2),
            "p99_us": round(p99, 2),
            "bytes": num_bytes,
            "flop": flop,
            "gb_s": round(num_bytes / median / 1e3, 1),
            "tflop_s": round(flop / median / 1e6, 2),
            "roofline_share": round(floor / median, 3),
            **notes,
        }
        if peer_us is not None:
            row |= {"peer_us": peer_us, "ratio": round(peer_us / median, 3)}
        self.rows.append(row)
        text = " ".join(f"{key}={value}" for key, value in {**shape, **notes}.items())
        peer = "" if peer_us is None else f"  peer {peer_us:7.1f} us  x{peer_us / median:.2f}"
        print(
            f"{name:11s} {text:62s} {median:8.2f} us  p99 {p99:8.2f}  {row['gb_s']:7.1f} GB/s  {row['tflop_s']:6.1f} TFLOP/s"
            f"  {100 * row['roofline_share']:5.1f} %{peer}",
            flush=True,
        )

    def elementwise(self) -> None:
        for num_rows, hidden in ((1, 2048), (64, 2048), (256, 7168), (8192, 2048), (16384, 7168)):
            sets = max(1, min(64, -(-ROTATE_BYTES // (num_rows * hidden * 8))))
            weight = self.randn(hidden)
            tensors = [(self.randn(num_rows, hidden), self.randn(num_rows, hidden)) for _ in range(sets)]
            outs = [torch.empty_like(x) for x, _ in tensors]
            self.report(
                "rms_norm",
                {"rows": num_rows, "hidden": hidden, "residual": True},
                [
                    partial(elementwise.rms_norm, x, weight, 1e-6, residual=r, out=out)
                    for (x, r), out in zip(tensors, outs, strict=True)
                ],
                num_bytes=num_rows * hidden * 8 + hidden * 2,
            )
        angle = torch.rand((8192, 32), device=self.device)
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
        weight = self.randn(512)
        for num_tokens in (1, 64, 8192):
            num_heads = 16
            sets = max(1, min(64, -(-ROTATE_BYTES // (num_tokens * 8192))))
            cache = self.randn(max(256, num_tokens // 64), 64, 576)
            positions = torch.randint(0, 8192, (num_tokens,), device=self.device)
            slots = torch.randperm(cache.shape[0] * 64, device=self.device)[:num_tokens]
            inputs = [(self.randn(num_tokens, 576), self.randn(num_tokens, num_heads, 192)) for _ in range(sets)]
            self.report(
                "mla_store",
                {"tokens": num_tokens, "heads": num_heads, "norm": True},
                [
                    partial(
                        elementwise.mla_store,
                        cache,
                        kv[:, :512],
                        kv[:, 512:],
                        q_pe=q[..., 128:],
                        positions=positions,
                        slot_mapping=slots,
                        cos_sin=cos_sin,
                        norm_weight=weight,
                    )
                    for kv, q in inputs
                ],
                num_bytes=num_tokens * (2 * 1152 + 256 + 16 + num_heads * 256),
            )

    def moe(self) -> None:
        v2_lite: dict[str, Any] = {
            "top_k": 6,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        }
        v3: dict[str, Any] = {
            "top_k": 8,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 8,
            "topk_group": 4,
        }
        for num_experts, options in ((64, v2_lite), (256, v3)):
            for num_tokens in (1, 64, 512, 8192):
                logits = torch.randn((num_tokens, num_experts), device=self.device, generator=self.generator)
                bias = torch.zeros(num_experts, device=self.device) if num_experts == 256 else None
                scaling: dict[str, Any] = {"norm_topk_prob": True, "scale_normed": True, "routed_scaling_factor": 1.0}
                ids, _ = moe.route(logits, bias, **options, **scaling)
                shape = {"tokens": num_tokens, "experts": num_experts, "top_k": options["top_k"]}
                self.report(
                    "moe_route",
                    shape,
                    [partial(moe.route, logits, bias, **options, **scaling)],
                    num_bytes=logits.numel() * 4 + ids.numel() * 8,
                )
                self.report(
                    "moe_permute",
                    shape,
                    [partial(moe.permute, ids, num_experts, row_alignment=64)],
                    num_bytes=ids.numel() * 12,
                )

    def mla(self) -> None:
        for num_heads in (16, 128):
            for batch in (1, 32, 128):
                for context in (4096, 8192):
                    self.mla_shape(num_heads, batch, context)
        for batch in (1, 8, 16, 32, 64, 128, 256):  # chat: many short sequences
            self.mla_shape(16, batch, 640)
        self.mla_shape(16, 16, 8320)
        for num_heads, q_len in ((16, 2), (16, 4), (128, 2)):
            self.mla_shape(num_heads, 32, 4096, q_len=q_len)

    def mla_shape(self, num_heads: int, batch: int, context: int, q_len: int = 1) -> None:
        options: list[dict[str, Any]] = [{}]
        options += [{"deterministic": True, "max_kv_len": context, "split_blocks": n} for n in (None, 16)]
        if self.variants and q_len == 1:
            options += [{"kernel": k} for k in ((1, 2) if num_heads == 16 else ())]
            options += [{"min_units": n} for n in ((0, 2, 3, 4, 6) if batch <= 16 else ())]
            options += [{"overhead_blocks": n} for n in ((1, 2, 3, 6) if batch > 1 else ())]
        elif self.variants:
            options += [{"kernel": k} for k in range(len(mla.TILE_ROWS))]
        self.shape_options(num_heads, batch, context, q_len, options)

    def shape_options(
        self, num_heads: int, batch: int, context: int, q_len: int, options: Sequence[dict[str, Any]]
    ) -> None:
        blocks = context // 64
        sets = max(1, min(64, -(-ROTATE_BYTES // (batch * context * 1152))))
        cache = self.randn(sets * batch * blocks, 64, 576)
        tables = torch.randperm(cache.shape[0], device=self.device).to(torch.int32).view(sets, batch, blocks)
        q = self.randn(batch * q_len, num_heads, 576)
        kv_lens = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        q_starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=self.device)
        out = torch.empty((batch * q_len, num_heads, 512), device=self.device, dtype=BF16)
        for option in options:
            workspace = mla.make_workspace(self.device, max_batch=batch, num_heads=num_heads, max_q_len=q_len, **option)
            mla.plan_decode(workspace, kv_lens, q_starts)
            arguments: list[dict[str, Any]] = [
                {
                    "block_tables": tables[i],
                    "kv_lens": kv_lens,
                    "q_starts": q_starts,
                    "workspace": workspace,
                    "softmax_scale": SCALE,
                    "out": out,
                }
                for i in range(sets)
            ]
            out.fill_(float("nan"))
            mla.mla_decode(q[..., :512], q[..., 512:], cache, **arguments[0])
            want, _ = mla_decode_paged(
                q[:q_len, :, :512],
                q[:q_len, :, 512:],
                cache,
                block_tables=tables[0, :1],
                kv_lens=kv_lens[:1],
                q_starts=q_starts[:2],
                softmax_scale=SCALE,
                dtype=torch.float64,
            )
            error = float((out[:q_len].double() - want).norm() / want.norm())
            if not error < 5e-3:
                print(f"WRONG: heads {num_heads} batch {batch} context {context} {option}: error {error}", flush=True)
                continue
            notes = {key: value for key, value in option.items() if key != "max_kv_len"}
            self.report(
                "mla_decode",
                {"heads": num_heads, "batch": batch, "context": context, "q_len": q_len},
                [partial(mla.mla_decode, q[..., :512], q[..., 512:], cache, **a) for a in arguments],
                num_bytes=batch * context * 1152 + batch * q_len * num_heads * (576 + 512) * 2,
                flop=2 * batch * q_len * num_heads * context * (576 + 512),
                peer_us=PEER_US.get((num_heads, batch, context)) if q_len == 1 and not option else None,
                **notes,
            )
        if num_heads == 16 and q_len == 1 and context == 4096:
            workspace = mla.make_workspace(self.device, max_batch=batch, num_heads=num_heads)
            self.report(
                "mla_plan",
                {"batch": batch},
                [partial(mla.plan_decode, workspace, kv_lens, q_starts)],
                num_bytes=batch * 24 + 16 * workspace.num_parts,
            )

    def once(self, num_heads: int, batch: int, context: int, kernel: int) -> None:
        cache = self.randn(batch * context // 64, 64, 576)
        q = self.randn(batch, num_heads, 576)
        kv_lens = torch.full((batch,), context, dtype=torch.int32, device=self.device)
        q_starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
        workspace = mla.make_workspace(self.device, max_batch=batch, num_heads=num_heads, kernel=kernel)
        mla.plan_decode(workspace, kv_lens, q_starts)
        for _ in range(3):
            mla.mla_decode(
                q[..., :512],
                q[..., 512:],
                cache,
                block_tables=torch.randperm(cache.shape[0], device=self.device).to(torch.int32).view(batch, -1),
                kv_lens=kv_lens,
                q_starts=q_starts,
                workspace=workspace,
                softmax_scale=SCALE,
            )
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.draw,power.limit", "--format=csv,noheader"]
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "nvidia_smi": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
    }


def git_commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def nvcc_version() -> str:
    try:
        text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return "unknown"
    return text.split("release ")[-1].split(",")[0] if "release " in text else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200-kernels.json")
    parser.add_argument("--only", default="mla,elementwise,moe")
    parser.add_argument("--variants", action="store_true", help="also time other cuts, overheads and kernels")
    parser.add_argument(
        "--once", default=None, help="HEADS,BATCH,CONTEXT,KERNEL: three plain calls and no timing, for a profiler"
    )
    parser.add_argument("--commit", default=None, help="what to record where there is no git")
    args = parser.parse_args()
    bench = Bench(args.variants)
    if args.once is not None:
        num_heads, batch, context, kernel = (int(n) for n in args.once.split(","))
        bench.once(num_heads, batch, context, kernel)
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
        "command": "python benchmarks/kernels/bench.py" + (" --variants" if args.variants else ""),
        "ceilings": bench.ceilings(),
        "kernels": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for part in args.only.split(","):
        {"elementwise": bench.elementwise, "mla": bench.mla, "moe": bench.moe}[part]()
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
