"""Prefill attention over expanded keys: one plan a step, then one call a layer. Compiled on CUDA, torch elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from . import reference_prefill
from .abi import GatherLatentsArgs, MlaPrefillArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load

BLOCK_SIZE = 64
NOPE, ROPE, VALUE = 128, 64, 128
LATENT_WIDTH = 576
TILE_ROWS, TILE_KEYS = 128, 128
HALF_TILE_ROWS = 64  # what one of the kernel's two warpgroups takes
NUM_SMS = 132
STATE_WIDTH = 136  # of a row carried from slab to slab: 128 of output, 4 partial sums, the maximum, 3 unused

_HEADER_WORDS, _TILE_WORDS = 8, 8
_FIRST, _LAST = 1, 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The tiles of one call, shared by all layers of a step.

    `words` are what the kernel reads: upload them as one int32 tensor, and give it back with `on`. The first word is
    the queue of the call under way: calls with the same tensor must be on one stream.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    key_begin: int
    key_end: int  # keys [key_begin, min(key_end, k_len)) of each sequence are in this call
    q_starts: npt.NDArray[np.int32]  # [batch + 1]: rows of q
    k_starts: npt.NDArray[np.int32]  # [batch + 1]: rows of kv, this call's keys alone
    num_tiles: int
    needs_state: bool  # some row goes on from an earlier call, or goes on in a later one
    words: npt.NDArray[np.int32]  # [8 + 8 * num_tiles], laid out as csrc/include/rorqual/abi.h says
    tensor: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.q_starts[-1])

    @property
    def num_keys(self) -> int:
        return int(self.k_starts[-1])

    def on(self, tensor: torch.Tensor) -> PrefillPlan:
        """This plan with `tensor`, int32, whose first elements are (or will be, when the call runs) `words`."""
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.shape[0] < self.words.shape[0]:
            raise ValueError(f"plan: needs int32 [>= {self.words.shape[0]}], got {tensor.dtype} {list(tensor.shape)}")
        return dataclasses.replace(self, tensor=tensor)

    def to(self, device: torch.device) -> PrefillPlan:
        """This plan with its words copied to `device`."""
        return self.on(torch.from_numpy(self.words).to(device))


def plan_prefill(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    key_begin: int = 0,
    key_end: int | None = None,
    num_heads: int | None = None,
) -> PrefillPlan:
    """Cut the attention of packed sequences into tiles of 128 query rows, heaviest first. On the host, once a step.

    With `num_heads`, tiles are of 64 rows where those of 128 would leave half of the multiprocessors without one.

    Sequence s has q_lens[s] queries, the last of its k_lens[s] keys; query i attends to keys up to
    k_lens[s] - q_lens[s] + i. With `key_begin` and `key_end` (multiples of 128; None: all) the call takes one slab of
    the keys: kv then holds keys [key_begin, min(key_end, k_lens[s])) of each sequence, packed, and rows that have keys
    in other slabs are carried in `state`. Raises ValueError.
    """
    # (In plain Python: a step has at most some hundred tiles, and few of them where its length is felt.)
    q, k = [int(n) for n in q_lens], [int(n) for n in k_lens]
    if len(q) != len(k):
        raise ValueError(f"q_lens and k_lens: need equally many lengths, got {len(q)} and {len(k)}")
    if any(not 0 <= q_len <= k_len for q_len, k_len in zip(q, k, strict=True)):
        raise ValueError(f"k_lens: need 0 <= q_len <= k_len, got q_lens {q}, k_lens {k}")
    longest = max(k, default=0)
    end = longest if key_end is None else key_end
    if key_begin < 0 or key_begin % TILE_KEYS or (end % TILE_KEYS and end < longest) or end < key_begin:
        raise ValueError(f"a slab begins and ends at multiples of {TILE_KEYS}, got [{key_begin}, {end})")
    q_starts = [0, *accumulate(q)]
    k_starts = [0, *accumulate(max(min(k_len, end) - key_begin, 0) for k_len in k)]

    tile_rows = TILE_ROWS
    if num_heads is not None and sum(-(-q_len // TILE_ROWS) for q_len in q) * num_heads <= NUM_SMS // 2:
        tile_rows = HALF_TILE_ROWS
    tiles: list[tuple[int, ...]] = []
    for q_len, k_len, q_start, k_start in zip(q, k, q_starts, k_starts, strict=False):
        for first_row in range(0, q_len, tile_rows):
            num_rows = min(q_len - first_row, tile_rows)
            first_limit = k_len - q_len + first_row + 1
            last_limit = first_limit + num_rows - 1
            tile_end = min(last_limit, end)
            if tile_end <= key_begin:
                continue
            flags = _FIRST * (key_begin == 0) + _LAST * (last_limit <= end)
            in_slab = (k_start - key_begin, key_begin, tile_end, min(k_len, end), flags)
            tiles.append((q_start + first_row, num_rows, first_limit, *in_slab))
    tiles.sort(key=lambda tile: -tile[5] // TILE_KEYS)
    words = np.zeros(_HEADER_WORDS + _TILE_WORDS * len(tiles), np.int32)
    if tiles:
        words[_HEADER_WORDS:].reshape(-1, _TILE_WORDS)[:] = tiles
    return PrefillPlan(
        q_lens=tuple(q),
        k_lens=tuple(k),
        key_begin=key_begin,
        key_end=end,
        q_starts=np.array(q_starts, np.int32),
        k_starts=np.array(k_starts, np.int32),
        num_tiles=len(tiles),
        needs_state=any(tile[7] != _FIRST + _LAST for tile in tiles),
        words=words,
    )


def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    lse: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    heads_per_group: int = 0,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """Causal attention of packed sequences over expanded keys and values.

    q: [T, num_heads, 192] bf16, 128 of nope, then 64 of rope. kv: [C, num_heads, 256] bf16: of each head 128 of key,
    then 128 of value, as the kv_b projection gives them. k_pe: [C, 64] bf16, the last 64 of every head's key; rows
    may be strided. Strides are multiples of 8. Sequence s has rows plan.q_starts[s : s + 2] of q, and rows
    plan.k_starts[s : s + 2] of kv. Fills and returns `out`, [T, num_heads, 128] bf16, and `lse`, float32
    [T, num_heads], the logarithm of the softmax's denominator; rows beyond the sequences' are left alone. A plan of
    a slab needs `state`, float32 [T, num_heads, 136], the same tensor for all slabs, in order from key 0 on; a row of
    out and lse is written in the slab of its last key. The bits of a row do not depend on slabs, on chunks, or on
    other sequences.
    `heads_per_group` is for benchmarks.
    """
    device = q.device
    check("q", q, (None, None, NOPE + ROPE), torch.bfloat16, device)
    num_tokens, num_heads, _ = q.shape
    check("kv", kv, (None, num_heads, NOPE + VALUE), torch.bfloat16, device)
    check("k_pe", k_pe, (kv.shape[0], ROPE), torch.bfloat16, device)
    check("out", out, (num_tokens, num_heads, VALUE), torch.bfloat16, device)
    if num_tokens < plan.num_tokens:
        raise ValueError(f"q: the plan has {plan.num_tokens} tokens, got {num_tokens}")
    if kv.shape[0] < plan.num_keys:
        raise ValueError(f"kv: the plan has {plan.num_keys} keys, got {kv.shape[0]}")
    if lse is not None:
        check("lse", lse, (num_tokens, num_heads), torch.float32, device, contiguous_dims=2)
    if plan.needs_state and state is None:
        raise ValueError("state: this plan is of a slab, and needs one")
    if state is not None:
        check("state", state, (num_tokens, num_heads, STATE_WIDTH), torch.float32, device, contiguous_dims=3)
    if plan.num_tiles == 0:
        return out
    if library is None:
        if device.type != "cuda":
            _prefill_reference(q, kv, k_pe, out, plan, scale, lse, state)
            return out
        library = load()
    if plan.tensor is None or plan.tensor.device != device:
        raise ValueError(f"plan: its words must be on {device}; see PrefillPlan.on")
    args = MlaPrefillArgs(
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        state=None if state is None else state.data_ptr(),
        plan=plan.tensor.data_ptr(),
        q=q.data_ptr(),
        kv=kv.data_ptr(),
        k_pe=k_pe.data_ptr(),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        kv_token_stride=kv.stride(0),
        kv_head_stride=kv.stride(1),
        k_pe_stride=k_pe.stride(0),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        num_tokens=num_tokens,
        num_keys=kv.shape[0],
        num_heads=num_heads,
        num_tiles=plan.num_tiles,
        heads_per_group=heads_per_group,
        softmax_scale=scale,
    )
    library.call("rorqual_mla_prefill", args, current_stream(device))
    return out


def gather_latents(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    k_starts: torch.Tensor,
    out: torch.Tensor,
    *,
    key_begin: int = 0,
    library: KernelLibrary | None = None,
) -> torch.Tensor:
    """Copy cached latents of several sequences into dense rows, bit for bit.

    cache: [num_blocks, 64, 576] bf16, blocks may be strided; block_tables: int32 [batch, n]; k_starts: int32
    [batch + 1].
    Rows [k_starts[s], k_starts[s + 1]) of `out`, [C, 576] bf16 contiguous, get sequence s's positions from `key_begin`
    on; rows from k_starts[batch] on are left alone. Returns `out`.
    """
    device = cache.device
    check("cache", cache, (None, BLOCK_SIZE, LATENT_WIDTH), torch.bfloat16, device, contiguous_dims=2)
    check("k_starts", k_starts, (None,), torch.int32, device)
    batch = k_starts.shape[0] - 1
    check("block_tables", block_tables, (batch, None), torch.int32, device)
    check("out", out, (None, LATENT_WIDTH), torch.bfloat16, device, contiguous_dims=2)
    if library is None:
        if device.type != "cuda":
            reference_prefill.gather_latents(cache, block_tables, k_starts, out, key_begin)
            return out
        library = load()
    args = GatherLatentsArgs(
        out=out.data_ptr(),
        cache=cache.data_ptr(),
        block_tables=block_tables.data_ptr(),
        k_starts=k_starts.data_ptr(),
        cache_block_stride=cache.stride(0),
        block_table_stride=block_tables.stride(0),
        num_rows=out.shape[0],
        batch=batch,
        key_begin=key_begin,
    )
    library.call("rorqual_gather_latents", args, current_stream(device))
    return out


def _prefill_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    lse: torch.Tensor | None,
    state: torch.Tensor | None,
) -> None:
    """The call in float32, tile by tile as the plan says which rows end here."""
    if state is None:
        held = np.diff(plan.k_starts).tolist()  # k_lens, but for sequences without queries
        out_ref, lse_ref = reference_prefill.mla_prefill_packed(
            q, kv, k_pe, q_lens=plan.q_lens, k_lens=held, scale=scale
        )
    else:
        reference_prefill.mla_prefill_slab(
            state,
            q,
            kv,
            k_pe,
            q_lens=plan.q_lens,
            k_lens=plan.k_lens,
            key_begin=plan.key_begin,
            key_end=plan.key_end,
            scale=scale,
        )
        out_ref, lse_ref = reference_prefill.finish(state, scale)
    for first_row, num_rows, *_, flags in plan.words[_HEADER_WORDS:].reshape(-1, _TILE_WORDS).tolist():
        if flags & _LAST:
            rows = slice(first_row, first_row + num_rows)
            out[rows] = out_ref[rows].to(out.dtype)
            if lse is not None:
                lse[rows] = lse_ref[rows]
