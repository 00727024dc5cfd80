"""Products with weights that do not change: x W^T, the gated pair of the dense MLP, the absorbed pair of MLA.

Compiled on CUDA, torch elsewhere. On CUDA a weight (and a bias) is read before the stream's previous kernel has ended,
so it must have been written, and the stream synchronised, before the first call. Everything else may come from that
kernel.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .abi import GemmArgs, LinearArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load

BF16 = torch.bfloat16
GATE_ROWS = 8  # of the gate, then of what it gates, and so on: how pack_gate_up lays them
MAX_ROWS_TOKENS = 16  # of the kernel that takes whole rows of the weight
DEPTH = 64  # of a block: what a part of in_features is made of
DETERMINISTIC_PARTS = 8  # of in_features, where a weight has too few rows to keep the device busy with whole sums
# Beyond so many tokens cuBLAS is faster, where the choice is free.
MAX_TOKENS, SMALL_OUT_FEATURES, MAX_TOKENS_SMALL = 32, 512, 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """Which kernel computes a product, and how it is cut. tile_rows are rows of the weight."""

    tile_tokens: int
    tile_rows: int  # under 64: the kernel for at most 16 tokens, which takes whole rows; 0: as many as it chooses
    split: int = 1  # how many share a tile's in_features
    parts: int = 0  # of in_features, each a sum, added in order; 0: as many as share a tile


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """What the products need besides their arguments: nothing now, since parts meet in shared memory."""

    device: torch.device


def make_linear_workspace(device: torch.device) -> LinearWorkspace:
    return LinearWorkspace(torch.device(device))


def choose_tiling(
    num_tokens: int, out_features: int, in_features: int, batch: int = 1, *, deterministic: bool = False
) -> Tiling:
    """The tiling of a product; with `deterministic`, one that adds each output in the same order at any num_tokens."""
    if deterministic:
        return _deterministic_tiling(num_tokens, out_features, in_features, batch)
    if num_tokens <= MAX_ROWS_TOKENS and in_features % 64 == 0 and in_features >= 256:
        large = out_features * in_features >= 32 << 20  # every SM has several tiles
        deep = in_features > 4096 and num_tokens > 8  # x does not stay in registers
        if not large and not deep:
            return Tiling(num_tokens, 0)
    small = out_features <= SMALL_OUT_FEATURES
    if num_tokens <= 64 or (small and num_tokens <= (512 if in_features >= 256 else 128)):
        # Few rows of the weight: more, smaller tiles of tokens.
        per_tile = num_tokens if not small else num_tokens // (4 if batch == 1 else 2)
        tile_tokens = 16 if per_tile <= 16 else 32 if per_tile <= 32 else 64
        tile_rows = 64
    else:
        tile_tokens = 128 if num_tokens < 512 or (small and in_features >= 256) else 256
        tile_rows = 128
    # Parts of the depth, so that about one CTA an SM is at work.
    tiles = max(1, -(-out_features // tile_rows) * -(-num_tokens // tile_tokens) * batch)
    most = max(1, min(8, 132 // tiles, in_features // 512))
    return Tiling(tile_tokens, tile_rows, 1 << most.bit_length() - 1)  # clusters of three did not fit into one wave


def deterministic_parts(out_features: int, in_features: int, batch: int = 1) -> int:
    """In how many parts the sums of a weight are made, whatever num_tokens: by the weight's shape alone."""
    deep_enough = in_features % DEPTH == 0 and in_features >= 2 * DETERMINISTIC_PARTS * DEPTH
    return DETERMINISTIC_PARTS if deep_enough and batch * -(-out_features // 64) < 64 else 1


def _deterministic_tiling(num_tokens: int, out_features: int, in_features: int, batch: int) -> Tiling:
    parts = deterministic_parts(out_features, in_features, batch)
    small = out_features <= SMALL_OUT_FEATURES

    def tiles(tile_tokens: int, tile_rows: int) -> int:
        return batch * -(-out_features // tile_rows) * -(-num_tokens // tile_tokens)

    if parts == 1:
        if num_tokens <= 64 or (small and num_tokens <= (256 if in_features >= 256 else 128)):
            return Tiling(next((n for n in (16, 32) if num_tokens <= n), 64), 64)
        return Tiling(128 if num_tokens < 512 or (small and in_features >= 256) else 256, 128)
    if num_tokens <= 8 or (num_tokens <= MAX_ROWS_TOKENS and in_features <= 2048 and not small):
        return Tiling(num_tokens, 0, parts=parts)
    if num_tokens <= MAX_ROWS_TOKENS:
        return Tiling(32, 64, 8, parts)
    if tiles(192, 128) >= 80 and not small:
        return Tiling(192, 128, parts=parts)
    tile_tokens = 32 if num_tokens <= 32 else 64
    # (Four CTAs with two parts each took longer than two with four.)
    split = next((split for split in (8, 2) if split * tiles(tile_tokens, 64) <= 132), 1)
    return Tiling(tile_tokens, 64, split, parts)


def _launch(
    library: KernelLibrary,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
) -> None:
    """x: [batch, num_tokens, in]; weight: [batch, rows, in]; out: [batch, num_tokens, rows], or rows / 2."""
    batch, num_tokens, in_features = x.shape
    args = LinearArgs(
        out=out.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out_token_stride=out.stride(1) if num_tokens > 1 else 0,
        out_batch_stride=out.stride(0) if batch > 1 else 0,
        x_token_stride=x.stride(1) if num_tokens > 1 else 0,
        x_batch_stride=x.stride(0) if batch > 1 else 0,
        residual_stride=0 if residual is None or num_tokens == 1 else residual.stride(0),
        num_tokens=num_tokens,
        out_features=weight.shape[1],
        in_features=in_features,
        batch=batch,
        out_float32=int(out.dtype == torch.float32),
        silu_mul=int(silu_mul),
        tile_tokens=tiling.tile_tokens,
        tile_rows=tiling.tile_rows,
        split=tiling.split,
        parts=tiling.parts,
    )
    library.call("rorqual_linear", args, current_stream(x.device))


@functools.cache
def _cublas_gemm_ex() -> int:
    """The address of cublasGemmEx in the cuBLAS that torch has loaded; 0 where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcublas.so"):
            return ctypes.cast(ctypes.CDLL(path).cublasGemmEx, ctypes.c_void_p).value or 0
    return 0


def blas_handle(device: torch.device) -> int:
    """Torch's handle of cuBLAS for this thread, which takes the current stream; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    return handle


def _cublas() -> tuple[int, int] | None:
    """The addresses of cublasGemmEx and of torch's handle, whose stream is the current one; None where there is none."""
    gemm_ex = _cublas_gemm_ex()
    return (gemm_ex, blas_handle(torch.device("cuda"))) if gemm_ex else None


def _gemm(
    library: KernelLibrary,
    cublas: tuple[int, int],
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    add: bool,
) -> None:
    """out = x weight^T, or += that, by cuBLAS. All [rows, columns]."""
    num_tokens, in_features = x.shape
    args = GemmArgs(
        gemm_ex=cublas[0],
        handle=cublas[1],
        out=out.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out_stride=out.stride(0) if num_tokens > 1 else weight.shape[0],
        x_stride=x.stride(0) if num_tokens > 1 else in_features,
        num_tokens=num_tokens,
        out_features=weight.shape[0],
        in_features=in_features,
        out_float32=int(out.dtype == torch.float32),
        beta=1.0 if add else 0.0,
    )
    library.call("rorqual_gemm", args, current_stream(x.device))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = BF16,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    deterministic: bool = False,
    workspace: LinearWorkspace | None = None,
    tiling: Tiling | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """x weight^T (+ bias) (+ residual), added in float32 and rounded once: [num_tokens, out_features] out_dtype.

    x: [num_tokens, in_features] bf16, rows may be strided by multiples of 8; weight: [out_features, in_features] bf16
    contiguous; both sizes multiples of 8. bias: [out_features] bf16. residual: [num_tokens, out_features] bf16, rows
    may be strided; may be `out`. out_dtype: bfloat16 or float32. With `deterministic` a row's bits depend on that row
    alone, whatever num_tokens is; otherwise many tokens go to cuBLAS, and there a residual or bias is added after the
    product has been rounded. Nothing is allocated when `out` is given and the product is one of our kernels'.
    """
    check("x", x, (None, None), BF16, x.device)
    num_tokens, in_features = x.shape
    check("weight", weight, (None, in_features), BF16, x.device, contiguous_dims=2)
    out_features = weight.shape[0]
    if out_dtype not in (BF16, torch.float32):
        raise ValueError(f"out_dtype: needs bfloat16 or float32, got {out_dtype}")
    if out is not None:
        check("out", out, (num_tokens, out_features), out_dtype, x.device)
    if residual is not None:
        check("residual", residual, (num_tokens, out_features), BF16, x.device)
    if bias is not None:
        check("bias", bias, (out_features,), BF16, x.device)
    if library is None:
        if x.device.type != "cuda":
            y = x.float() @ weight.float().T
            if bias is not None:
                y += bias.float()
            if residual is not None:
                y += residual.float()
            return y.to(out_dtype) if out is None else out.copy_(y)
        library = load()
    most = MAX_TOKENS if out_features > SMALL_OUT_FEATURES else MAX_TOKENS_SMALL
    if tiling is None and (deterministic or num_tokens <= most):
        tiling = choose_tiling(num_tokens, out_features, in_features, deterministic=deterministic)
    if out is None:
        out = torch.empty((num_tokens, out_features), dtype=out_dtype, device=x.device)
    cublas = _cublas() if tiling is None and bias is None else None
    if cublas is not None and (residual is None or out_dtype == BF16):
        if residual is not None and residual is not out:
            out.copy_(residual)
        _gemm(library, cublas, x, weight, out, add=residual is not None)
    elif tiling is None:
        if residual is not None and out_dtype == BF16:
            torch.addmm(residual, x, weight.T, out=out)
            residual = None
        elif out_dtype == BF16:
            torch.mm(x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
        for term in (bias, residual):
            if term is not None:
                out += term
    else:
        _launch(library, x[None], weight[None], out[None], tiling, bias=bias, residual=residual)
    return out


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 * width, in] for linear_silu_mul, of gate and up [width, in], width a multiple of 8: 8 rows of each in turn."""
    if gate.shape != up.shape or gate.dim() != 2 or gate.shape[0] % GATE_ROWS != 0:
        raise ValueError(f"gate, up: need one shape [8 n, in_features], got {list(gate.shape)} and {list(up.shape)}")
    width, in_features = gate.shape
    pair = torch.stack((gate.view(-1, GATE_ROWS, in_features), up.view(-1, GATE_ROWS, in_features)), dim=1)
    return pair.reshape(2 * width, in_features)


def linear_silu_mul(
    x: torch.Tensor,
    gate_up_packed: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    workspace: LinearWorkspace | None = None,
    tiling: Tiling | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T), in float32 and rounded once: [num_tokens, width] bf16.

    x: [num_tokens, in_features] bf16, rows may be strided by multiples of 8; gate_up_packed: [2 * width, in_features]
    bf16 of pack_gate_up. `deterministic` as in linear. Nothing is allocated when `out` is given.
    """
    check("x", x, (None, None), BF16, x.device)
    num_tokens, in_features = x.shape
    check("gate_up_packed", gate_up_packed, (None, in_features), BF16, x.device, contiguous_dims=2)
    rows = gate_up_packed.shape[0]
    if rows % (2 * GATE_ROWS) != 0:
        raise ValueError(f"gate_up_packed: needs rows in multiples of {2 * GATE_ROWS}, got {rows}")
    if out is not None:
        check("out", out, (num_tokens, rows // 2), BF16, x.device)
    if library is None:
        if x.device.type != "cuda":
            both = (x.float() @ gate_up_packed.float().T).view(num_tokens, -1, 2, GATE_ROWS)
            y = (F.silu(both[:, :, 0]) * both[:, :, 1]).reshape(num_tokens, rows // 2).to(BF16)
            return y if out is None else out.copy_(y)
        library = load()
    if out is None:
        out = torch.empty((num_tokens, rows // 2), dtype=BF16, device=x.device)
    if tiling is None:
        tiling = choose_tiling(num_tokens, rows, in_features, deterministic=deterministic)
    _launch(library, x[None], gate_up_packed[None], out[None], tiling, silu_mul=True)
    return out


def prepare_absorbed(
    kv_b: torch.Tensor, *, nope_dim: int = 128, value_dim: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w_uk [heads, nope_dim, latent], w_uv [heads, latent, value_dim]) of kv_b [heads * (nope_dim + value_dim), latent].

    Both are views of storage in which the summed dimension is innermost, as absorb_q and absorb_v need it.
    """
    per_head = nope_dim + value_dim
    if kv_b.dim() != 2 or kv_b.shape[0] % per_head != 0:
        raise ValueError(f"kv_b: needs shape [heads * {per_head}, latent], got {list(kv_b.shape)}")
    heads = kv_b.view(-1, per_head, kv_b.shape[1])
    w_uk = heads[:, :nope_dim].transpose(1, 2).contiguous().transpose(1, 2)
    w_uv = heads[:, nope_dim:].contiguous().transpose(1, 2)
    return w_uk, w_uv


def absorb_q(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    tiling: Tiling | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """The query in the latent's space, q_h w_uk[h] for every head: [num_tokens, heads, latent] bf16.

    q: [num_tokens, heads, nope_dim] bf16, any strides that are multiples of 8; w_uk of prepare_absorbed; out may be
    strided likewise. `deterministic` as in linear.
    """
    check("q", q, (None, None, None), BF16, q.device)
    num_tokens, heads, nope_dim = q.shape
    check("w_uk, transposed", w_uk.transpose(1, 2), (heads, None, nope_dim), BF16, q.device, contiguous_dims=3)
    if out is None:
        out = torch.empty((num_tokens, heads, w_uk.shape[2]), dtype=BF16, device=q.device)
    check("out", out, (num_tokens, heads, w_uk.shape[2]), BF16, q.device)
    return _per_head(q, w_uk, out, deterministic, tiling, library)


def absorb_v(
    latent: torch.Tensor,
    w_uv: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    tiling: Tiling | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """The values of attention's latent output, latent_h w_uv[h] for every head: [num_tokens, heads * value_dim] bf16.

    latent: [num_tokens, heads, latent] bf16, any strides that are multiples of 8; w_uv of prepare_absorbed; rows of
    `out` may be strided. `deterministic` as in linear.
    """
    check("latent", latent, (None, None, None), BF16, latent.device)
    num_tokens, heads, width = latent.shape
    check("w_uv, transposed", w_uv.transpose(1, 2), (heads, None, width), BF16, latent.device, contiguous_dims=3)
    value_dim = w_uv.shape[2]
    if out is None:
        out = torch.empty((num_tokens, heads * value_dim), dtype=BF16, device=latent.device)
    check("out", out, (num_tokens, heads * value_dim), BF16, latent.device)
    _per_head(latent, w_uv, out.view(num_tokens, heads, value_dim), deterministic, tiling, library)
    return out


def _per_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    deterministic: bool,
    tiling: Tiling | None,
    library: KernelLibrary | None,
) -> torch.Tensor:
    """out[:, h] = x[:, h] weight[h], weight [heads, in, out] with `in` innermost."""
    if library is None:
        if x.device.type != "cuda":
            return out.copy_(torch.einsum("thi,hio->tho", x.float(), weight.float()))
        library = load()
    heads, in_features, out_features = weight.shape
    if tiling is None:
        tiling = choose_tiling(x.shape[0], out_features, in_features, heads, deterministic=deterministic)
    _launch(library, x.transpose(0, 1), weight.transpose(1, 2), out.transpose(0, 1), tiling)
    return out
