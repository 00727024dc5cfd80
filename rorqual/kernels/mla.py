"""MLA decode over the paged latent cache: one plan a step, then one call a layer. Compiled on CUDA, torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .abi import MlaDecodeArgs, MlaPlanArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load
from .reference_paged import mla_decode_paged

BLOCK_SIZE = 64
LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
MAX_HEADS, MAX_QUERY_TOKENS, MAX_BATCH = 128, 8, 8192

# Rows of (query token, head) that one tile of each kernel takes.
TILE_ROWS = (16, 32, 64)
NARROW_16, NARROW_32, WIDE = range(3)
# What starting a sequence costs a CTA, in blocks of 64 tokens: its query, first loads, and output.
OVERHEAD_BLOCKS = 4
# The least blocks a part has, by kernel: more parts make the attention shorter and the combination longer.
MIN_UNITS = (1, 1, 2)
# Blocks of a split of a deterministic run, by default, where splits have no groups: 1,024 tokens.
DETERMINISTIC_SPLIT_BLOCKS = 16
# Blocks of a split, and splits of a group, where they have: 128 and 1,024 tokens.
SINGLE_SPLIT_BLOCKS, GROUP_SPLITS = 2, 8
MAX_SINGLE_GROUPS = 128  # with more groups in a step than this, none is computed a split at a time


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Device memory and choices that every layer of every step shares; made once for a largest batch.

    With `split_blocks` > 0 a sequence is cut every so many blocks whatever the rest of the batch, and the kernel is
    chosen by the number of heads alone, so that a row's bits depend on its own sequence only. Every `group_splits`
    splits are joined in order before anything else; who does this follows the load. With 0 the cuts follow the load.
    """

    max_batch: int
    num_heads: int
    max_q_len: int
    kernel: int
    num_parts: int
    split_blocks: int
    min_units: int
    overhead_blocks: int
    split_capacity: int
    group_splits: int
    plan: torch.Tensor  # int32
    partial_out: torch.Tensor  # float32 [split_capacity, rows, 512]
    partial_lse: torch.Tensor  # float32 [split_capacity, rows]; with groups [2, split_capacity, rows]: and sums

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.plan, self.partial_out, self.partial_lse))


def choose_kernel(num_heads: int, max_q_len: int, *, deterministic: bool) -> int:
    """The kernel with the smallest tile that holds a sequence's rows, or the widest; by heads alone if deterministic."""
    rows = num_heads if deterministic else num_heads * max_q_len
    return next((kernel for kernel in (NARROW_16, NARROW_32) if rows <= TILE_ROWS[kernel]), WIDE)


def make_workspace(
    device: torch.device,
    *,
    max_batch: int,
    num_heads: int,
    max_q_len: int = 1,
    deterministic: bool = False,
    max_kv_len: int | None = None,
    split_blocks: int | None = None,
    group_splits: int | None = None,
    kernel: int | None = None,
    num_parts: int | None = None,
    min_units: int | None = None,
    overhead_blocks: int = OVERHEAD_BLOCKS,
) -> DecodeWorkspace:
    """Allocate a workspace on `device`.

    `max_kv_len` (tokens) is needed with `deterministic`: the workspace then holds every group of splits of max_batch
    sequences of that length, and the splits of up to 128 groups. `split_blocks` (even, where a group is one split) and
    `group_splits` default to 2 and 8 for tiles of 16 rows, else to 16 and 1; `num_parts` to the number of CTAs of a tile
    that the device holds at once; `kernel`,
    `min_units` (least blocks a part) and `overhead_blocks` are for benchmarks.
    """
    for name, value, largest in (
        ("max_batch", max_batch, MAX_BATCH),
        ("num_heads", num_heads, MAX_HEADS),
        ("max_q_len", max_q_len, MAX_QUERY_TOKENS),
    ):
        if not 1 <= value <= largest:
            raise ValueError(f"{name} must be in [1, {largest}], got {value}")
    if kernel is None:
        kernel = choose_kernel(num_heads, max_q_len, deterministic=deterministic)
    tile = TILE_ROWS[kernel]
    num_tiles = -(-num_heads * max_q_len // tile)
    if num_parts is None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        num_parts = max(1, sms // num_tiles)
    if deterministic:
        if max_kv_len is None or max_kv_len < 1:
            raise ValueError(f"max_kv_len must be >= 1 with deterministic, got {max_kv_len}")
        has_groups = kernel == NARROW_16 and (split_blocks is None if group_splits is None else group_splits > 1)
        if split_blocks is None:
            split_blocks = SINGLE_SPLIT_BLOCKS if has_groups else DETERMINISTIC_SPLIT_BLOCKS
        if group_splits is None:
            group_splits = GROUP_SPLITS if has_groups else 1
        if group_splits < 1 or (group_splits > 1 and not has_groups):
            raise ValueError(
                f"group_splits must be 1, or more with tiles of {TILE_ROWS[NARROW_16]} rows, got {group_splits}"
            )
        if split_blocks < 1 or (split_blocks % 2 and not has_groups):
            raise ValueError(f"split_blocks must be even and >= 2, got {split_blocks}")
        max_groups = max_batch * -(-max_kv_len // (split_blocks * group_splits * BLOCK_SIZE))
        split_capacity = max(max_groups, min(max_groups, MAX_SINGLE_GROUPS) * group_splits)
    else:
        if split_blocks or group_splits:
            raise ValueError("split_blocks and group_splits belong to deterministic runs")
        split_blocks, group_splits, has_groups = 0, 1, False
        split_capacity = max_batch + num_parts  # every boundary between parts cuts at most one sequence
    rows = num_tiles * tile
    plan_words = 4 + 4 * num_parts + 8 * max_batch
    return DecodeWorkspace(
        max_batch=max_batch,
        num_heads=num_heads,
        max_q_len=max_q_len,
        kernel=kernel,
        num_parts=num_parts,
        split_blocks=split_blocks,
        min_units=0 if deterministic else MIN_UNITS[kernel] if min_units is None else min_units,
        overhead_blocks=0 if deterministic else overhead_blocks,
        split_capacity=split_capacity,
        group_splits=group_splits,
        plan=torch.zeros(plan_words, dtype=torch.int32, device=device),
        partial_out=torch.empty((split_capacity, rows, LATENT), dtype=torch.float32, device=device),
        partial_lse=torch.empty(
            (2, split_capacity, rows) if has_groups else (split_capacity, rows), dtype=torch.float32, device=device
        ),
    )


def plan_decode(
    workspace: DecodeWorkspace,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    *,
    library: KernelLibrary | None = None,
) -> None:
    """Cut this step's attention into parts: once a step, before the layers' `mla_decode`, on the same stream.

    kv_lens: int32 [batch], each sequence's length with this step's query tokens; q_starts: int32 [batch + 1].
    """
    device = workspace.plan.device
    batch = _check_batch(workspace, kv_lens, q_starts)
    if library is None:
        if device.type != "cuda":
            return
        library = load()
    args = MlaPlanArgs(
        plan=workspace.plan.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        q_starts=q_starts.data_ptr(),
        batch=batch,
        num_parts=workspace.num_parts,
        split_blocks=workspace.split_blocks,
        min_units=workspace.min_units,
        overhead_blocks=workspace.overhead_blocks,
        split_capacity=workspace.split_capacity,
        group_splits=workspace.group_splits,
    )
    library.call("rorqual_mla_plan", args, current_stream(device))


def mla_decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    workspace: DecodeWorkspace,
    softmax_scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """Absorbed attention of each sequence's last query tokens over its latents.

    q_latent: [num_tokens, num_heads, 512] bf16 (q_nope times W_uk) and q_pe: [num_tokens, num_heads, 64] bf16 (after
    rope), strides multiples of 8. cache: [num_blocks, 64, 576] bf16, blocks may be strided. block_tables: int32
    [batch, n]. Sequence s has query tokens [q_starts[s], q_starts[s + 1]), at most max_q_len, which are the last of
    its kv_lens[s] positions: each attends to all before it and to itself. A row that may attend to nothing gives
    zeros. Returns `out`, [num_tokens, num_heads, 512] bf16 (new unless given); `lse`, float32 [num_tokens, num_heads],
    gets the logarithm of the softmax's denominator. `workspace` must have been planned for these lengths, after block_tables
    and all of the cache but this step's tokens were written: the kernel reads those while its predecessor still runs.
    """
    device = cache.device
    check("cache", cache, (None, BLOCK_SIZE, WIDTH), torch.bfloat16, device, contiguous_dims=2)
    check("q_latent", q_latent, (None, workspace.num_heads, LATENT), torch.bfloat16, device)
    num_tokens = q_latent.shape[0]
    check("q_pe", q_pe, (num_tokens, workspace.num_heads, ROPE), torch.bfloat16, device)
    batch = _check_batch(workspace, kv_lens, q_starts)
    check("block_tables", block_tables, (batch, None), torch.int32, device)
    if out is None:
        out = torch.empty((num_tokens, workspace.num_heads, LATENT), dtype=torch.bfloat16, device=device)
    check("out", out, (num_tokens, workspace.num_heads, LATENT), torch.bfloat16, device)
    if lse is not None:
        check("lse", lse, (num_tokens, workspace.num_heads), torch.float32, device, contiguous_dims=2)
    if library is None:
        if device.type != "cuda":
            out_ref, lse_ref = mla_decode_paged(
                q_latent,
                q_pe,
                cache,
                block_tables=block_tables,
                kv_lens=kv_lens,
                q_starts=q_starts,
                softmax_scale=softmax_scale,
            )
            if lse is not None:
                lse.copy_(lse_ref)
            return out.copy_(out_ref)
        library = load()
    args = MlaDecodeArgs(
        q_latent=q_latent.data_ptr(),
        q_pe=q_pe.data_ptr(),
        cache=cache.data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        block_tables=block_tables.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        q_starts=q_starts.data_ptr(),
        plan=workspace.plan.data_ptr(),
        partial_out=workspace.partial_out.data_ptr(),
        partial_lse=workspace.partial_lse.data_ptr(),
        q_latent_token_stride=q_latent.stride(0),
        q_latent_head_stride=q_latent.stride(1),
        q_pe_token_stride=q_pe.stride(0),
        q_pe_head_stride=q_pe.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        block_table_stride=block_tables.stride(0),
        cache_block_stride=cache.stride(0),
        num_blocks=cache.shape[0],
        batch=batch,
        num_heads=workspace.num_heads,
        max_q_len=workspace.max_q_len,
        num_parts=workspace.num_parts,
        split_blocks=workspace.split_blocks,
        split_capacity=workspace.split_capacity,
        kernel=workspace.kernel,
        group_splits=workspace.group_splits,
        softmax_scale=softmax_scale,
    )
    library.call("rorqual_mla_decode", args, current_stream(device))
    return out


def _check_batch(workspace: DecodeWorkspace, kv_lens: torch.Tensor, q_starts: torch.Tensor) -> int:
    device = workspace.plan.device
    check("kv_lens", kv_lens, (None,), torch.int32, device)
    batch = kv_lens.shape[0]
    check("q_starts", q_starts, (batch + 1,), torch.int32, device)
    if batch > workspace.max_batch:
        raise ValueError(f"kv_lens: the workspace holds at most {workspace.max_batch} sequences, got {batch}")
    return batch
