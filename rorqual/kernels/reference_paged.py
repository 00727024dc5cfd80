"""A plain torch reference of decode attention as the kernel sees it: paged, several query tokens a sequence."""

from __future__ import annotations

import torch

BLOCK_SIZE = 64


def mla_decode_paged(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    q_starts: torch.Tensor,
    softmax_scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [num_tokens, num_heads, 512] `dtype`, lse [num_tokens, num_heads] `dtype`), computed in `dtype`.

    Arguments as `rorqual.kernels.mla.mla_decode`. Rows without a key are zero with an lse of -inf, and rows that belong
    to no sequence are zero too.
    """
    num_tokens, num_heads, latent = q_latent.shape
    out = torch.zeros((num_tokens, num_heads, latent), dtype=dtype, device=q_latent.device)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=dtype, device=q_latent.device)
    starts, lens = q_starts.tolist(), kv_lens.tolist()
    for seq, kv_len in enumerate(lens):
        start, end = starts[seq], starts[seq + 1]
        if end == start or kv_len <= 0:
            continue
        blocks = block_tables[seq, : -(-kv_len // BLOCK_SIZE)].long()
        keys = cache[blocks].flatten(0, 1)[:kv_len].to(dtype)
        q = torch.cat((q_latent[start:end], q_pe[start:end]), dim=-1).to(dtype)
        scores = torch.einsum("qhd,kd->qhk", q, keys) * softmax_scale
        limit = kv_len - (end - start) + 1 + torch.arange(end - start, device=q.device)
        hidden = torch.arange(kv_len, device=q.device)[None, :] >= limit[:, None]
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
        seen = limit > 0
        out[start:end][seen] = torch.einsum("qhk,kd->qhd", torch.softmax(scores[seen], dim=-1), keys[:, :latent])
        lse[start:end] = torch.logsumexp(scores, dim=-1)
    return out, lse
