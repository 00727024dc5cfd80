"""A plain torch reference of prefill attention as the kernel sees it: packed, in slabs of keys, with carried state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

NOPE, VALUE = 128, 128


def mla_prefill_packed(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    *,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_tokens, num_heads, 128] `dtype`, lse [num_tokens, num_heads] `dtype`), computed in `dtype`.

    Arguments as `rorqual.kernels.prefill.mla_prefill`, of one call over all keys. Rows that belong to no sequence are
    NaN in both.
    """
    out = torch.full((*q.shape[:2], VALUE), float("nan"), dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("nan"), dtype=dtype, device=q.device)
    q_start = k_start = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        q_start, k_start = rows.stop, keys.stop
        if q_len == 0:
            continue
        scores = _scores(q[rows].to(dtype), kv[keys].to(dtype), k_pe[keys].to(dtype)) * scale
        scores.masked_fill_(_hidden(q_len, k_len, 0, k_len, q.device), float("-inf"))
        out[rows] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), kv[keys, :, NOPE:].to(dtype))
        lse[rows] = torch.logsumexp(scores, dim=-1).T
    return out, lse


def mla_prefill_slab(
    state: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    *,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    key_begin: int,
    key_end: int,
    scale: float,
) -> None:
    """Carry `state`, float32 [num_tokens, num_heads, 136], over the sequences' keys [key_begin, key_end), in place.

    kv and k_pe hold these keys alone. A row's state is its output before the division by its denominator (128), the
    denominator in four parts, and the greatest score before scaling (at 132); powers are of e against that maximum.
    Rows that attend to no key of the slab keep their state. Key 0 begins a row, whatever its state was.
    """
    q_start = k_start = 0
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        end = min(k_len, key_end)
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + max(end - key_begin, 0))
        q_start, k_start = rows.stop, keys.stop
        if q_len == 0 or end <= key_begin:
            continue
        scores = _scores(q[rows].float(), kv[keys].float(), k_pe[keys].float())
        scores.masked_fill_(_hidden(q_len, k_len, key_begin, end, q.device), float("-inf"))
        scores = scores.transpose(0, 1)  # [q_len, num_heads, keys]
        seen = torch.full_like(scores[..., 0], float("-inf")) if key_begin == 0 else state[rows, :, VALUE + 4]
        top = torch.maximum(seen, scores.amax(dim=-1))
        # Until a row has seen a key both maxima are -inf, and there is nothing to rescale.
        rescale = torch.where(seen == float("-inf"), 0.0, torch.exp((seen - top) * scale))
        nothing = (top == float("-inf"))[..., None]
        weights = torch.where(nothing, 0.0, torch.exp((scores - top[..., None]) * scale))
        earlier = torch.zeros_like(state[rows]) if key_begin == 0 else state[rows].clone()
        state[rows, :, :VALUE] = earlier[..., :VALUE] * rescale[..., None] + torch.einsum(
            "qhk,khd->qhd", weights, kv[keys, :, NOPE:].float()
        )
        state[rows, :, VALUE : VALUE + 4] = earlier[..., VALUE : VALUE + 4] * rescale[..., None]
        state[rows, :, VALUE] += weights.sum(dim=-1)
        state[rows, :, VALUE + 4] = top


def finish(state: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out float32 [..., 128], lse float32 [...]) of rows whose keys have all been seen."""
    denominator = state[..., VALUE : VALUE + 4].sum(dim=-1)
    return state[..., :VALUE] / denominator[..., None], state[..., VALUE + 4] * scale + torch.log(denominator)


def gather_latents(
    cache: torch.Tensor, block_tables: torch.Tensor, k_starts: torch.Tensor, out: torch.Tensor, key_begin: int
) -> None:
    """Copy positions key_begin onward of each sequence to rows [k_starts[s], k_starts[s + 1]) of `out`."""
    block_size = cache.shape[1]
    starts = k_starts.tolist()
    for seq, (start, end) in enumerate(itertools.pairwise(starts)):
        position = key_begin + torch.arange(end - start, device=cache.device)
        blocks = block_tables[seq, position // block_size].long()
        out[start:end] = cache[blocks, position % block_size]


def _scores(q: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """[num_heads, queries, keys], before scaling."""
    return torch.einsum("qhd,khd->hqk", q[..., :NOPE], kv[..., :NOPE]) + torch.einsum(
        "qhd,kd->hqk", q[..., NOPE:], k_pe
    )


def _hidden(q_len: int, k_len: int, key_begin: int, key_end: int, device: torch.device) -> torch.Tensor:
    """[q_len, key_end - key_begin]: which keys lie after the query's own position."""
    position = k_len - q_len + torch.arange(q_len, device=device)
    return torch.arange(key_begin, key_end, device=device)[None, :] > position[:, None]


def causal_flop(q_lens: Sequence[int], k_lens: Sequence[int], num_heads: int) -> int:
    """Floating-point operations of the pairs that are not masked: scores (192) and output (128), two each."""
    pairs = sum(q_len * (2 * k_len - q_len + 1) // 2 for q_len, k_len in zip(q_lens, k_lens, strict=True))
    return 2 * (NOPE + 64 + VALUE) * num_heads * pairs
