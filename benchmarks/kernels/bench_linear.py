"""Time the products with weights at DeepSeek-V2-Lite's shapes, beside cuBLAS.

usage: python benchmarks/kernels/bench_linear.py [--out FILE] [--tokens 1,2,4,…] [--shapes qkv_a,o_proj,…]
           [--variants] [--seconds N]

A time is the median over replays of a CUDA graph that holds one call for each of several weights, which together exceed
the L2 cache, one after the other as in a model. "share" is the floor, the larger of bytes (weight, x and output once)
over the read bandwidth and FLOP over the bf16 rate that bench.py measures, divided by the time. "chain" is all dense
products of a decode step's layers with their norms, in one graph. The last line is the whole record as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from bench import Bench, git_commit, machine, nvcc_version, times_us  # noqa: E402

from rorqual.kernels import linear as products  # noqa: E402
from rorqual.kernels.elementwise import rms_norm  # noqa: E402
from rorqual.kernels.linear import Tiling  # noqa: E402

BF16 = torch.bfloat16
HIDDEN, HEADS, DENSE = 2048, 16, 10944
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
# out_features, in_features, batch
SHAPES = {
    "qkv_a": (3648, HIDDEN, 1),
    "absorb_q": (512, 128, HEADS),
    "absorb_v": (128, 512, HEADS),
    "o_proj": (HIDDEN, HEADS * 128, 1),
    "router": (64, HIDDEN, 1),
    "gate_up": (2 * DENSE, HIDDEN, 1),
    "down": (HIDDEN, DENSE, 1),
    "lm_head": (102400, HIDDEN, 1),
}
ROTATE_BYTES = 300 << 20
LAYERS = 27

Call = Callable[[], Any]


class Products:
    """Calls of one shape, ours and cuBLAS's, each with several weights in turn."""

    def __init__(self, name: str, num_tokens: int, bench: Bench) -> None:
        out_features, in_features, batch = SHAPES[name]
        self.name, self.num_tokens = name, num_tokens
        self.weight_bytes = batch * out_features * in_features * 2
        self.sets = max(1, min(48, -(-ROTATE_BYTES // self.weight_bytes)))
        scale = in_features**-0.5
        self.weights = [bench.randn(batch * out_features, in_features) * scale for _ in range(self.sets)]
        if name == "absorb_q":
            qkv = bench.randn(num_tokens, HEADS * 192 + 576)
            self.x = qkv[:, : HEADS * 192].unflatten(1, (HEADS, 192))[..., :128]
            self.out = torch.empty((num_tokens, HEADS, 512), dtype=BF16, device="cuda")
        elif name == "absorb_v":
            self.x = bench.randn(num_tokens, HEADS, 512)
            self.out = torch.empty((num_tokens, HEADS * 128), dtype=BF16, device="cuda")
        else:
            dtype = torch.float32 if name in ("router", "lm_head") else BF16
            width = out_features // 2 if name == "gate_up" else out_features
            self.x = bench.randn(num_tokens, in_features)
            self.out = torch.empty((num_tokens, width), dtype=dtype, device="cuda")
        self.wide = torch.empty((num_tokens, out_features), dtype=BF16, device="cuda") if name == "gate_up" else None
        self.num_bytes = self.weight_bytes + self.x.numel() * 2 + self.out.numel() * self.out.element_size()
        self.flop = 2 * num_tokens * batch * out_features * in_features
        torch.cuda.synchronize()  # weights are read before the previous kernel has ended

    def ours(self, tiling: Tiling | None, *, deterministic: bool = False) -> list[Call]:
        options: dict[str, Any] = {"out": self.out, "tiling": tiling, "deterministic": deterministic}
        if self.name == "absorb_q":
            views = [w.view(HEADS, 512, 128).transpose(1, 2) for w in self.weights]
            return [partial(products.absorb_q, self.x, w, **options) for w in views]
        if self.name == "absorb_v":
            views = [w.view(HEADS, 128, 512).transpose(1, 2) for w in self.weights]
            return [partial(products.absorb_v, self.x, w, **options) for w in views]
        if self.name == "gate_up":
            return [partial(products.linear_silu_mul, self.x, w, **options) for w in self.weights]
        options["out_dtype"] = self.out.dtype
        return [partial(products.linear, self.x, w, **options) for w in self.weights]

    def cublas(self) -> list[Call]:
        if self.name == "absorb_q":
            x, out = self.x.transpose(0, 1), self.out.transpose(0, 1)
            views = [w.view(HEADS, 512, 128).transpose(1, 2) for w in self.weights]
            return [partial(torch.bmm, x, w, out=out) for w in views]
        if self.name == "absorb_v":
            x, out = self.x.transpose(0, 1), self.out.view(-1, HEADS, 128).transpose(0, 1)
            views = [w.view(HEADS, 128, 512).transpose(1, 2) for w in self.weights]
            return [partial(torch.bmm, x, w, out=out) for w in views]
        if self.name == "gate_up":  # the product alone, without the activation
            return [partial(torch.mm, self.x, w.T, out=self.wide) for w in self.weights]
        if self.out.dtype == torch.float32:
            return [partial(torch.mm, self.x, w.T, out_dtype=torch.float32, out=self.out) for w in self.weights]
        return [partial(torch.mm, self.x, w.T, out=self.out) for w in self.weights]


def variants(name: str, num_tokens: int) -> list[Tiling]:
    """The tilings worth timing for a shape."""
    out_features, in_features, batch = SHAPES[name]
    found = []
    if num_tokens <= 16:
        found += [Tiling(num_tokens, rows) for rows in (8, 16, 32) if rows % 16 == 0 or name != "gate_up"]
    for tile_tokens, tile_rows in ((16, 64), (32, 64), (64, 64), (64, 128), (128, 128), (256, 128)):
        if tile_tokens >= 2 * num_tokens and tile_tokens > 16:
            continue
        if num_tokens > 4 * tile_tokens:
            continue
        tiles = -(-out_features // tile_rows) * batch * -(-num_tokens // tile_tokens)
        blocks = -(-in_features // 64)
        for split in (1, 2, 3, 4, 6, 8):
            if split > 1 and (split * tiles > 528 or blocks < 2 * split):
                break
            if (split - 1) * -(-blocks // split) < blocks:
                found.append(Tiling(tile_tokens, tile_rows, split))
    return found


def chain_us(bench: Bench, num_tokens: int, *, ours: bool) -> float:
    """Microseconds of a layer's norms and dense products, of LAYERS layers in one graph."""
    made = []
    for _ in range(LAYERS):
        w_uk, w_uv = products.prepare_absorbed(bench.randn(HEADS * 256, 512) * 0.04)
        made.append(
            {
                "norm": bench.randn(HIDDEN),
                "qkv_a": bench.randn(SHAPES["qkv_a"][0], HIDDEN) * 0.02,
                "w_uk": w_uk,
                "w_uv": w_uv,
                "o_proj": bench.randn(HIDDEN, HIDDEN) * 0.02,
                "router": bench.randn(64, HIDDEN) * 0.02,
            }
        )
    x, residual = bench.randn(num_tokens, HIDDEN), bench.randn(num_tokens, HIDDEN)
    qkv = torch.empty((num_tokens, 3648), dtype=BF16, device="cuda")
    q = qkv[:, : HEADS * 192].unflatten(1, (HEADS, 192))[..., :128]
    latent = torch.empty((num_tokens, HEADS, 512), dtype=BF16, device="cuda")
    values = torch.empty((num_tokens, HEADS * 128), dtype=BF16, device="cuda")
    logits = torch.empty((num_tokens, 64), dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()

    def step() -> None:
        for w in made:
            rms_norm(x, w["norm"], 1e-6, residual=residual, out=x)
            if ours:
                products.linear(x, w["qkv_a"], out=qkv)
                products.absorb_q(q, w["w_uk"], latent)
                products.absorb_v(latent, w["w_uv"], values)
                products.linear(values, w["o_proj"], out=x)
            else:
                torch.mm(x, w["qkv_a"].T, out=qkv)
                torch.bmm(q.transpose(0, 1), w["w_uk"], out=latent.transpose(0, 1))
                torch.bmm(latent.transpose(0, 1), w["w_uv"], out=values.view(-1, HEADS, 128).transpose(0, 1))
                torch.mm(values, w["o_proj"].T, out=x)
            rms_norm(x, w["norm"], 1e-6, residual=residual, out=x)
            if ours:
                products.linear(x, w["router"], out=logits, out_dtype=torch.float32)
            else:
                torch.mm(x, w["router"].T, out_dtype=torch.float32, out=logits)

    return statistics.median(times_us([step])) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200-linear.json")
    parser.add_argument("--tokens", default=",".join(str(n) for n in TOKENS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--variants", action="store_true", help="time every tiling, not only the chosen one")
    parser.add_argument("--chain", default="1,8,64", help="tokens of the chains; empty: none")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so long")
    parser.add_argument("--commit", default=None, help="what to record where there is no git")
    args = parser.parse_args()
    started = time.monotonic()
    gc.freeze()  # a capture collects garbage first: not what the imports left
    bench = Bench(args.variants)
    record: dict[str, Any] = {
        "machine": machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "nvcc": nvcc_version()},
        "commit": args.commit or git_commit(),
        "command": "python benchmarks/kernels/bench_linear.py",
        "ceilings": bench.ceilings(),
        "chain": [],
        "kernels": bench.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    chain_bytes = sum(2 * b * n * k for name in ("qkv_a", "absorb_q", "absorb_v", "o_proj", "router")
                      for n, k, b in [SHAPES[name]])  # fmt: skip
    for num_tokens in [int(n) for n in args.chain.split(",") if n]:
        row = {"tokens": num_tokens, "floor_us": chain_bytes / bench.read_gb_s / 1e3}
        row |= {key: chain_us(bench, num_tokens, ours=key == "us") for key in ("us", "cublas_us")}
        record["chain"].append({key: round(value, 2) for key, value in row.items()})
        print("chain, one layer:", record["chain"][-1], flush=True)
        save()
    for name in args.shapes.split(","):
        for num_tokens in [int(n) for n in args.tokens.split(",")]:
            if time.monotonic() - started > args.seconds:
                print(f"out of time before {name} at {num_tokens}", flush=True)
                continue
            made = Products(name, num_tokens, bench)
            replays = 21 if num_tokens <= 256 else 7
            floor = max(made.num_bytes / bench.read_gb_s / 1e3, made.flop / bench.tflop_s / 1e6)

            def timed(calls: list[Call], replays: int = replays) -> float:
                return statistics.median(times_us(calls, replays))

            cublas = timed(made.cublas())
            timings: list[tuple[str, Any, float]] = [("ours", None, timed(made.ours(None)))]
            timings.append(("deterministic", None, timed(made.ours(None, deterministic=True))))
            if args.variants:
                timings += [("variant", t, timed(made.ours(t))) for t in variants(name, num_tokens)]
            for kind, tiling, us in timings:
                bench.rows.append(
                    {
                        "name": name,
                        "tokens": num_tokens,
                        "kind": kind,
                        "tiling": None if tiling is None else astuple(tiling),
                        "us": round(us, 2),
                        "gb_s": round(made.num_bytes / us / 1e3, 1),
                        "tflop_s": round(made.flop / us / 1e6, 1),
                        "share": round(floor / us, 3),
                        "cublas_us": round(cublas, 2),
                    }
                )
            best = (
                sorted((us, kind, tiling) for kind, tiling, us in timings if kind == "variant") if args.variants else []
            )
            text = "  ".join(f"{'x'.join(map(str, astuple(t)))} {us:.2f}" for us, _, t in best[:5])
            print(
                f"{name:9s} {num_tokens:5d}  floor {floor:7.2f}  cublas {cublas:7.2f}  ours {timings[0][2]:7.2f}"
                f"  det {timings[1][2]:7.2f}  {100 * floor / timings[0][2]:4.0f} %  {text}",
                flush=True,
            )
            save()
            del made
    print(json.dumps(record))


if __name__ == "__main__":
    main()
