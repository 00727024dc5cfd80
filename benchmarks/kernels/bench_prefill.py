"""Time prefill attention, and the gathering of latents, against their rooflines and their best public peer on one GPU.

usage: python benchmarks/kernels/bench_prefill.py [--out FILE] [--variants] [--no-peers] [--only 16x1x8192]

FLOP are those of the pairs that are not masked. "share" is of the recorded bf16 rate, 750 TFLOP/s. Ours and the peers'
are medians of graph replays over one set of inputs, in turn: what the projections have just written is in L2 as far as
it fits. Peers get keys already joined with their rope part; values are padded to 192 where a backend wants equal
widths. Results are compared with a peer's before they are timed. The last line is the record as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import BF16, git_commit, machine, times_us
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from rorqual.kernels.prefill import STATE_WIDTH, gather_latents, mla_prefill, plan_prefill
from rorqual.kernels.reference_prefill import mla_prefill_packed

SCALE = 192**-0.5
PEAK_TFLOP_S = 750.0
# (heads, batch, queries, prefix)
SHAPES = (
    (16, 1, 512, 0),
    (16, 16, 512, 0),
    (16, 1, 2048, 0),
    (16, 4, 2048, 0),
    (16, 1, 8192, 0),
    (16, 1, 32768, 0),
    (16, 1, 2048, 30720),
    (128, 1, 4096, 0),
)


def causal_flop(num_heads: int, batch: int, q_len: int, k_len: int) -> int:
    """Scores (192) and output (128), two operations each, of every pair of a query and a key it attends to."""
    return 2 * (192 + 128) * num_heads * batch * (q_len * (2 * k_len - q_len + 1) // 2)


def peers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, q_len: int, k_len: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that return [batch * q_len, num_heads, >= 128]; q, k, v: [tokens, heads, width]. Some will not run."""
    num_heads = q.shape[1]

    def split(x: torch.Tensor, length: int) -> torch.Tensor:
        return x.view(batch, length, num_heads, -1).transpose(1, 2)

    def sdpa(backend: SDPBackend, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            if q_len == k_len:
                out = F.scaled_dot_product_attention(
                    split(q, q_len), split(k, k_len), split(value, k_len), is_causal=True, scale=SCALE
                )
            else:
                out = F.scaled_dot_product_attention(
                    split(q, q_len),
                    split(k, k_len),
                    split(value, k_len),
                    attn_mask=causal_lower_right(q_len, k_len),
                    scale=SCALE,
                )
        return out.transpose(1, 2).reshape(batch * q_len, num_heads, -1)

    padded = F.pad(v, (0, 64))
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, v),
        "sdpa_cudnn_padded": partial(sdpa, SDPBackend.CUDNN_ATTENTION, padded),
        "sdpa_flash_padded": partial(sdpa, SDPBackend.FLASH_ATTENTION, padded),
    }
    starts_q = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=q.device)
    starts_k = torch.arange(0, batch * k_len + 1, k_len, dtype=torch.int32, device=q.device)
    arguments: dict[str, Any] = {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "max_seqlen_q": q_len,
        "max_seqlen_k": k_len,
        "softmax_scale": SCALE,
        "causal": True,
    }
    try:
        from flash_attn_interface import flash_attn_varlen_func

        def flash3() -> torch.Tensor:
            result = flash_attn_varlen_func(q, k, v, **arguments)
            return result[0] if isinstance(result, tuple) else result

        calls["flash_attention_3"] = flash3
    except ImportError:
        pass
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func as vllm_flash

        calls["flash_attention_3_vllm"] = lambda: vllm_flash(q, k, v, fa_version=3, **arguments)
    except ImportError:
        pass
    return calls


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Bench:
    def __init__(self, variants: bool, with_peers: bool) -> None:
        self.variants, self.with_peers = variants, with_peers
        self.device = torch.device("cuda")
        self.generator = torch.Generator(device=self.device).manual_seed(7)
        self.rows: list[dict[str, Any]] = []

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16, generator=self.generator)

    def shape(self, num_heads: int, batch: int, q_len: int, prefix: int) -> None:
        k_len = q_len + prefix
        q = self.randn(batch * q_len, num_heads, 192)
        kv = self.randn(batch * k_len, num_heads, 256)
        k_pe = self.randn(batch * k_len, 576)[:, 512:]
        out = torch.full((batch * q_len, num_heads, 128), float("nan"), device=self.device, dtype=BF16)
        plan = plan_prefill([q_len] * batch, [k_len] * batch, num_heads=num_heads).to(self.device)
        flop = causal_flop(num_heads, batch, q_len, k_len)
        shape = {"heads": num_heads, "batch": batch, "queries": q_len, "prefix": prefix}
        text = " ".join(f"{key}={value}" for key, value in shape.items())

        def ours(**options: Any) -> torch.Tensor:
            return mla_prefill(q, kv, k_pe, out, plan, scale=SCALE, **options)

        def timed(call: Callable[[], Any]) -> float:
            return statistics.median(times_us([call], replays=11))

        options: list[dict[str, Any]] = [{}]
        if self.variants:
            options += [{"heads_per_group": num_heads}, {"heads_per_group": 1}]
            options += (
                [{"heads_per_group": 4}] if num_heads == 16 else [{"heads_per_group": 8}, {"heads_per_group": 32}]
            )
        ours()
        few = min(4, num_heads)
        rows = slice(0, min(q_len, 2048 if prefix == 0 else 256))
        want, _ = mla_prefill_packed(
            q[rows, :few],
            kv[: prefix + rows.stop, :few],
            k_pe[: prefix + rows.stop],
            q_lens=[rows.stop],
            k_lens=[prefix + rows.stop],
            scale=SCALE,
        )
        error = relative_error(out[rows, :few], want)
        del want
        first_error = error
        best: dict[str, Any] = {}
        for option in options:
            out.fill_(float("nan"))
            ours(**option)
            us = timed(partial(ours, **option))
            row = {
                "name": "mla_prefill",
                "shape": shape,
                **option,
                "us": round(us, 2),
                "flop": flop,
                "tflop_s": round(flop / us / 1e6, 1),
                "share": round(flop / us / 1e6 / PEAK_TFLOP_S, 3),
                "error": first_error,
                "finite": bool(out.isfinite().all()),
            }
            self.rows.append(row)
            best = best or row
            print(
                f"{text:44s} {option!s:28s} {us:9.1f} us {row['tflop_s']:6.1f} TFLOP/s {100 * row['share']:5.1f} %"
                f"  error {first_error:.2e} finite {row['finite']}",
                flush=True,
            )
        if not self.with_peers:
            return
        k = torch.cat((kv[..., :128], k_pe[:, None].expand(-1, num_heads, -1)), dim=-1)
        v = kv[..., 128:].contiguous()
        best["peers"] = {}
        for name, call in peers(q, k, v, batch, q_len, k_len).items():
            try:
                error = relative_error(call()[..., :128], out)
                us = timed(call)
            except Exception as failure:  # a backend that does not take the shape says so in its own way
                print(f"{text:44s} {name:28s} not run: {str(failure).splitlines()[0][:110]}", flush=True)
                continue
            best["peers"][name] = {"us": round(us, 2), "tflop_s": round(flop / us / 1e6, 1), "difference": error}
            print(
                f"{text:44s} {name:28s} {us:9.1f} us {flop / us / 1e6:6.1f} TFLOP/s  difference {error:.2e}"
                f"  x{us / best['us']:.3f}",
                flush=True,
            )
        agreeing = {name: peer["us"] for name, peer in best["peers"].items() if peer["difference"] < 1e-2}
        if agreeing:
            fastest = min(agreeing, key=lambda name: agreeing[name])
            best |= {"peer": fastest, "peer_us": agreeing[fastest], "ratio": round(agreeing[fastest] / best["us"], 3)}

    def slabs(self, num_heads: int, q_len: int, prefix: int, slab: int) -> None:
        """A chunk after a long prefix, the keys in slabs: what carrying the state costs."""
        k_len = q_len + prefix
        q = self.randn(q_len, num_heads, 192)
        kv, k_pe = self.randn(slab, num_heads, 256), self.randn(slab, 64)
        out = torch.empty((q_len, num_heads, 128), device=self.device, dtype=BF16)
        state = torch.empty((q_len, num_heads, STATE_WIDTH), device=self.device)
        plans = [
            plan_prefill([q_len], [k_len], key_begin=begin, key_end=begin + slab).to(self.device)
            for begin in range(0, k_len, slab)
        ]

        def call() -> None:
            for plan in plans:
                mla_prefill(q, kv, k_pe, out, plan, scale=SCALE, state=state)

        us = statistics.median(times_us([call], replays=11))
        flop = causal_flop(num_heads, 1, q_len, k_len)
        row = {
            "name": "mla_prefill_slabs",
            "shape": {"heads": num_heads, "queries": q_len, "prefix": prefix, "slab": slab},
            "us": round(us, 2),
            "tflop_s": round(flop / us / 1e6, 1),
        }
        self.rows.append(row)
        print(f"{row['name']} {row['shape']}: {us:.1f} us {row['tflop_s']} TFLOP/s", flush=True)

    def gather(self, batch: int, k_len: int) -> None:
        blocks = k_len // 64
        cache = self.randn(2 * batch * blocks, 64, 576)
        tables = (
            torch.randperm(cache.shape[0], device=self.device).to(torch.int32)[: batch * blocks].view(batch, blocks)
        )
        starts = torch.arange(0, batch * k_len + 1, k_len, dtype=torch.int32, device=self.device)
        out = torch.empty((batch * k_len, 576), device=self.device, dtype=BF16)
        us = statistics.median(times_us([partial(gather_latents, cache, tables, starts, out)], replays=11))
        num_bytes = 2 * batch * k_len * 1152
        row = {
            "name": "gather_latents",
            "shape": {"batch": batch, "keys": k_len},
            "us": round(us, 2),
            "bytes": num_bytes,
            "gb_s": round(num_bytes / us / 1e3, 1),
        }
        self.rows.append(row)
        print(f"{row['name']} {row['shape']}: {us:.1f} us {row['gb_s']} GB/s (read and written)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("OUT_DIR", ".")) / "prefill.json"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--variants", action="store_true", help="also time other orders of heads")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", default=None, help="HEADSxBATCHxQUERIES[xPREFIX],…")
    parser.add_argument("--once", action="store_true", help="three plain calls of each shape, for a profiler")
    parser.add_argument("--commit", default=None, help="what to record where there is no git")
    args = parser.parse_args()
    bench = Bench(args.variants, not args.no_peers)
    shapes = list(SHAPES)
    if args.only is not None:
        wanted = [[int(n) for n in text.split("x")] for text in args.only.split(",")]
        shapes = [(n[0], n[1], n[2], n[3] if len(n) > 3 else 0) for n in wanted]
    if args.once:
        for num_heads, batch, q_len, prefix in shapes:
            q = bench.randn(batch * q_len, num_heads, 192)
            kv, k_pe = bench.randn(batch * (q_len + prefix), num_heads, 256), bench.randn(batch * (q_len + prefix), 64)
            plan = plan_prefill([q_len] * batch, [q_len + prefix] * batch).to(bench.device)
            for _ in range(3):
                mla_prefill(q, kv, k_pe, torch.empty_like(q[..., :128]), plan, scale=SCALE)
        torch.cuda.synchronize()
        return
    record: dict[str, Any] = {
        "machine": machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
        "commit": args.commit or git_commit(),
        "command": "python benchmarks/kernels/bench_prefill.py" + (" --variants" if args.variants else ""),
        "kernels": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        bench.shape(*shape)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.only is None:
        bench.slabs(16, 2048, 30720, 16384)
        bench.gather(1, 32768)
        bench.gather(16, 512)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
