"""A plain torch reference of every op: what a kernel must compute, written to be read.

Each function is pure and states shapes and dtypes. "dtype" is the compute dtype (bfloat16 or float32);
arithmetic inside an op is float32 and rounds once to `dtype` unless it says otherwise. The model on a CPU
uses some of these as they are; the others are the oracle of what it, or a compiled kernel, does faster.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    x: [..., n] dtype; weight: [n] dtype. Returns [..., n] dtype. The normalised value is rounded to dtype
    before the product with the weight, as the published model does.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return h.to(x.dtype) * weight


def rope_inv_freq(
    dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_max_position_embeddings: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> torch.Tensor:
    """Angle per position of each rotary pair: float32 [dim / 2].

    With `original_max_position_embeddings`, YaRN's "NTK by parts" (arXiv 2309.00071, section 3.2): pairs that turn
    more than beta_fast times over the trained length keep their frequency, those that turn less than
    beta_slow times are slowed by `factor`, between them a linear ramp over the pair's index.
    """
    pos_freqs = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated = 1.0 / pos_freqs
    if not original_max_position_embeddings:
        return extrapolated

    def pair_that_turns(times: float) -> float:
        return (dim * math.log(original_max_position_embeddings / (times * 2 * math.pi))) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * pos_freqs) * (1 - keep) + extrapolated * keep


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the interleaved pairs (x0, x1), (x2, x3), … by the rows' angles.

    x: [num_rows, ..., dim] dtype; cos, sin: float32 [num_rows, dim / 2]. Returns x's shape, dtype. Products and
    sums are separate float32 operations, so a value's bits do not depend on where it lies in the tensor.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (x.shape[-1] // 2,)
    cos, sin = cos.view(shape), sin.view(shape)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def mla_store(cache: torch.Tensor, c_kv: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write the rows' latents into the paged cache, in place.

    cache: [num_slots, 576] dtype; c_kv: [num_rows, 512] (after its norm); k_pe: [num_rows, 64] (after rope);
    slot_mapping: int64 [num_rows], -1 for rows that are padding and are not written.
    """
    rows = torch.nonzero(slot_mapping >= 0).squeeze(1)
    cache.index_copy_(0, slot_mapping[rows], torch.cat((c_kv[rows], k_pe[rows]), dim=-1))


def mla_decode(
    q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, softmax_scale: float, kv_lora_rank: int
) -> torch.Tensor:
    """Absorbed attention of one query row over one sequence's latents.

    q: [num_heads, 576] dtype: (q_nope times W_uk, then q_pe); cache: [num_slots, 576]; slots: int64 [context].
    Returns [num_heads, kv_lora_rank] dtype; W_uv comes after. DeepSeek-V2 report, appendix C.
    """
    latents = cache[slots].float()
    weights = torch.softmax(q.float() @ latents.T * softmax_scale, dim=-1)
    return (weights @ latents[:, :kv_lora_rank]).to(q.dtype)


def mla_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start_position: int, softmax_scale: float
) -> torch.Tensor:
    """Causal attention of consecutive rows of one sequence over expanded keys and values.

    q: [num_rows, num_heads, 192] dtype, for positions start_position onward; k: [context + num_rows, num_heads, 192];
    v: [context + num_rows, num_heads, 128]. Returns [num_rows, num_heads, 128] dtype.
    """
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * softmax_scale
    query_position = start_position + torch.arange(q.shape[0], device=q.device)
    hidden = torch.arange(k.shape[0], device=q.device)[None, :] > query_position[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded to dtype after each of the two. gate, up: [..., n] dtype."""
    return F.silu(gate) * up


def top_k_lowest_index(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of each row, largest first, the lower index first among equals: int64 [rows, k]."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def router_scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """Sigmoid of each expert's logit (V3), or softmax over the experts (V2). float32 [num_rows, num_experts]."""
    return torch.sigmoid(logits) if scoring_func == "sigmoid" else torch.softmax(logits, dim=-1)


def route(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    topk_method: str,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scale_normed: bool,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: (topk_ids int64 [num_rows, top_k], topk_weights float32 [num_rows, top_k]).

    scores: float32 [num_rows, num_experts]; bias: float32 [num_experts] for noaux_tc. Ties go to the lower index,
    of groups as of experts.
      greedy                the top_k of all (V2-Lite)
      group_limited_greedy  of the topk_group groups with the best single expert (V2 report, section 2.2.2)
      noaux_tc              experts and groups ranked by score + bias, a group by the sum of its two best; the
                            weights are the scores without bias (V3 report, section 2.1.2)
    Weights are divided by their sum if norm_topk_prob, and multiplied by routed_scaling_factor (for V2, whose
    published code does one or the other, `scale_normed` is False).
    """
    num_rows, num_experts = scores.shape
    ranking = scores if bias is None else scores + bias
    if topk_method != "greedy" and topk_group < n_group:
        grouped = ranking.view(num_rows, n_group, num_experts // n_group)
        best = grouped.topk(2 if topk_method == "noaux_tc" else 1, dim=-1).values
        group_scores = best.sum(dim=-1)
        chosen = top_k_lowest_index(group_scores, topk_group)
        penalty = torch.full_like(group_scores, float("-inf")).scatter_(1, chosen, 0.0)
        ranking = (grouped + penalty[:, :, None]).view(num_rows, num_experts)
    topk_ids = top_k_lowest_index(ranking, top_k)
    topk_weights = scores.gather(1, topk_ids)
    if norm_topk_prob and top_k > 1:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        if not scale_normed:
            return topk_ids, topk_weights
    return topk_ids, topk_weights * routed_scaling_factor


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' MLPs, expert by expert.

    x: [num_rows, hidden] dtype; gate_up: [num_experts, 2 * width, hidden], gate rows first; down:
    [num_experts, hidden, width]; topk_ids: int64 [num_rows, top_k]; topk_weights: float32 [num_rows, top_k].
    Returns [num_rows, hidden] dtype; sums are float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(topk_ids == expert)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(silu_mul(gate, up), down[expert])
        out.index_add_(0, rows, y.float() * topk_weights[rows, choice, None])
    return out.to(x.dtype)


def fp8_block_dequantize(
    weight: torch.Tensor, scale_inv: torch.Tensor, block_size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """weight * scale_inv of its block. weight: float8_e4m3fn [n, k]; scale_inv: float32 [ceil(n / bn), ceil(k / bk)].

    Returns [n, k] dtype, rounded once.
    """
    n, k = weight.shape
    scale = scale_inv.float()
    scale = scale.repeat_interleave(block_size[0], dim=0)[:n].repeat_interleave(block_size[1], dim=1)[:, :k]
    return (weight.float() * scale).to(dtype)
