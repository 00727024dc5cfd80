"""RMSNorm with residual, and the pass that turns, normalises and stores latents: compiled on CUDA, torch elsewhere."""

from __future__ import annotations

import torch

from . import reference
from .abi import MlaStoreArgs, RmsNormArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load

BLOCK_SIZE = 64
LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; with `residual`, of x + residual.

    x: [num_rows, hidden] bf16, rows may be strided; weight: [hidden] bf16. residual: [num_rows, hidden] bf16,
    becomes x + residual (rounded to bf16), and that sum is normalised. Returns `out`, [num_rows, hidden] bf16
    (new unless given; may be x itself). hidden: a multiple of 8, at most 16,384. On CUDA the weight is read before the
    stream's previous kernel has ended: nothing still running may write it.
    """
    check("x", x, (None, None), torch.bfloat16, x.device)
    num_rows, hidden = x.shape
    check("weight", weight, (hidden,), torch.bfloat16, x.device)
    if residual is not None:
        check("residual", residual, (num_rows, hidden), torch.bfloat16, x.device)
    if out is not None:
        check("out", out, (num_rows, hidden), torch.bfloat16, x.device)
    if library is None:
        if x.device.type != "cuda":
            if residual is not None:
                x = residual.add_(x)
            y = reference.rms_norm(x, weight, eps)
            return y if out is None else out.copy_(y)
        library = load()
    if out is None:
        out = torch.empty((num_rows, hidden), dtype=torch.bfloat16, device=x.device)
    args = RmsNormArgs(
        out=out.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        out_stride=out.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        x_stride=x.stride(0),
        num_rows=num_rows,
        hidden=hidden,
        eps=eps,
    )
    library.call("rorqual_rms_norm", args, current_stream(x.device))
    return out


def mla_store(
    cache: torch.Tensor,
    c_kv: torch.Tensor,
    k_pe: torch.Tensor,
    *,
    q_pe: torch.Tensor | None,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    latent_out: torch.Tensor | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """Normalise c_kv, turn k_pe and q_pe by their positions, write the latents into the paged cache.

    cache: [num_blocks, 64, 576] bf16, written at slot_mapping (int64 [num_tokens]; block * 64 + offset, negative:
    padding, whose query is not turned either). c_kv: [num_tokens, 512] bf16 and k_pe: [num_tokens, 64] bf16, rows
    may be strided. q_pe: [num_tokens, num_heads, 64] bf16 or None, turned in place, any even strides. positions:
    int64 [num_tokens]. cos_sin: float32 [num_positions, 64], 32 cosines then 32 sines of the interleaved pairs.
    norm_weight: [512] bf16, or None if c_kv is normalised already. latent_out: [num_tokens, 576] bf16 or None,
    gets the same rows (those of padding are left alone).
    """
    device = cache.device
    check("cache", cache, (None, BLOCK_SIZE, WIDTH), torch.bfloat16, device, contiguous_dims=2)
    check("c_kv", c_kv, (None, LATENT), torch.bfloat16, device)
    num_tokens = c_kv.shape[0]
    check("k_pe", k_pe, (num_tokens, ROPE), torch.bfloat16, device)
    check("positions", positions, (num_tokens,), torch.int64, device)
    check("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device)
    check("cos_sin", cos_sin, (None, ROPE), torch.float32, device, contiguous_dims=2)
    if q_pe is not None:
        check("q_pe", q_pe, (num_tokens, None, ROPE), torch.bfloat16, device)
    if norm_weight is not None:
        check("norm_weight", norm_weight, (LATENT,), torch.bfloat16, device)
    if latent_out is not None:
        check("latent_out", latent_out, (num_tokens, WIDTH), torch.bfloat16, device, contiguous_dims=2)
    if library is None:
        if device.type != "cuda":
            rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
            slots = slot_mapping[rows]
            cos, sin = cos_sin[positions[rows]].chunk(2, dim=-1)
            latent = c_kv[rows] if norm_weight is None else reference.rms_norm(c_kv[rows], norm_weight, eps)
            row = torch.cat((latent, reference.apply_rope(k_pe[rows], cos, sin)), dim=-1)
            cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = row
            if latent_out is not None:
                latent_out[rows] = row
            if q_pe is not None:
                q_pe[rows] = reference.apply_rope(q_pe[rows], cos, sin)
            return
        library = load()
    args = MlaStoreArgs(
        cache=cache.data_ptr(),
        latent_out=None if latent_out is None else latent_out.data_ptr(),
        q_pe=None if q_pe is None else q_pe.data_ptr(),
        c_kv=c_kv.data_ptr(),
        k_pe=k_pe.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        cos_sin=cos_sin.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        cache_block_stride=cache.stride(0),
        c_kv_stride=c_kv.stride(0),
        k_pe_stride=k_pe.stride(0),
        q_pe_token_stride=0 if q_pe is None else q_pe.stride(0),
        q_pe_head_stride=0 if q_pe is None else q_pe.stride(1),
        num_tokens=num_tokens,
        num_heads=0 if q_pe is None else q_pe.shape[1],
        eps=eps,
    )
    library.call("rorqual_mla_store", args, current_stream(device))
