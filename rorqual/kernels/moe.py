"""Choosing experts and putting the choices in expert order: compiled on CUDA, torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import reference
from .abi import MoePermuteArgs, MoeRouteArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    scoring_func: str,
    topk_method: str,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scale_normed: bool,
    routed_scaling_factor: float,
    num_shared: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    library: KernelLibrary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: (topk_ids int32 [num_tokens, top_k + num_shared], topk_weights float32, the same shape).

    logits: float32 [num_tokens, num_experts], rows may be strided, at most 512 experts in at most 32 groups; bias:
    float32 [num_experts] or None. The rules are `reference.router_scores` and `reference.route`. The last num_shared
    columns are the shared experts, which all tokens choose: ids num_experts, num_experts + 1 …, weight 1. `out`: where
    both go, new tensors unless given.
    """
    if num_shared < 0:
        raise ValueError(f"num_shared must be >= 0, got {num_shared}")
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func: needs softmax or sigmoid, got {scoring_func!r}")
    if topk_method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(f"topk_method: needs greedy, group_limited_greedy or noaux_tc, got {topk_method!r}")
    check("logits", logits, (None, None), torch.float32, logits.device)
    num_tokens, num_experts = logits.shape
    if bias is not None:
        check("bias", bias, (num_experts,), torch.float32, logits.device)
    shape = (num_tokens, top_k + num_shared)
    if out is not None:
        check("out, ids", out[0], shape, torch.int32, logits.device, contiguous_dims=2)
        check("out, weights", out[1], shape, torch.float32, logits.device, contiguous_dims=2)
    if library is None:
        if logits.device.type != "cuda":
            ids, weights = reference.route(
                reference.router_scores(logits, scoring_func),
                bias,
                top_k=top_k,
                topk_method=topk_method,
                n_group=n_group,
                topk_group=topk_group,
                norm_topk_prob=norm_topk_prob,
                scale_normed=scale_normed,
                routed_scaling_factor=routed_scaling_factor,
            )
            shared = torch.arange(num_experts, num_experts + num_shared, dtype=torch.int32).expand(num_tokens, -1)
            ids = torch.cat((ids.to(torch.int32), shared), dim=-1)
            weights = torch.cat((weights, torch.ones(shared.shape)), dim=-1)
            return (ids, weights) if out is None else (out[0].copy_(ids), out[1].copy_(weights))
        library = load()
    if out is None:
        topk_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
        topk_weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    else:
        topk_ids, topk_weights = out
    limited = topk_method != "greedy" and topk_group < n_group
    normalize = norm_topk_prob and top_k > 1
    args = MoeRouteArgs(
        topk_ids=topk_ids.data_ptr(),
        topk_weights=topk_weights.data_ptr(),
        logits=logits.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        logits_stride=logits.stride(0),
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        num_groups=n_group if limited else 1,
        topk_group=topk_group if limited else 1,
        sigmoid=int(scoring_func == "sigmoid"),
        group_by_two=int(topk_method == "noaux_tc"),
        normalize=int(normalize),
        num_shared=num_shared,
        scale=1.0 if normalize and not scale_normed else routed_scaling_factor,
    )
    library.call("rorqual_moe_route", args, current_stream(logits.device))
    return topk_ids, topk_weights


@dataclass(frozen=True, slots=True)
class Permutation:
    """Choices in expert order. Rows of expert e are [expert_starts[e], expert_starts[e + 1]), its padding last."""

    expert_starts: torch.Tensor  # int32 [num_experts + 1], multiples of the alignment
    choice_of: torch.Tensor  # int32 [rows]: token * top_k + choice; -1: padding. Undefined from expert_starts[-1] on
    row_of: torch.Tensor  # int32 [num_tokens, top_k], the inverse; -1: no expert


def permute(
    topk_ids: torch.Tensor, num_experts: int, *, row_alignment: int = 1, library: KernelLibrary | None = None
) -> Permutation:
    """Sort the choices by expert, those of one expert in token order, each expert's rows padded to `row_alignment`.

    topk_ids: int32 [num_tokens, top_k] contiguous; an id outside [0, num_experts) is left out.
    """
    device = topk_ids.device
    check("topk_ids", topk_ids, (None, None), torch.int32, device, contiguous_dims=2)
    if not 1 <= num_experts <= 512:
        raise ValueError(f"num_experts must be in [1, 512], got {num_experts}")
    if row_alignment < 1:
        raise ValueError(f"row_alignment must be >= 1, got {row_alignment}")
    num_choices = topk_ids.numel()
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    num_rows = num_choices + min(num_experts, num_choices) * (row_alignment - 1)
    choice_of = torch.empty(num_rows, dtype=torch.int32, device=device)
    row_of = torch.empty(topk_ids.shape, dtype=torch.int32, device=device)
    if library is None:
        if device.type != "cuda":
            flat = topk_ids.flatten().long()
            kept = torch.nonzero((flat >= 0) & (flat < num_experts)).squeeze(1)
            counts = torch.bincount(flat[kept], minlength=num_experts)
            padded = (counts + row_alignment - 1) // row_alignment * row_alignment
            starts[0] = 0
            starts[1:] = padded.cumsum(0)
            order = kept[torch.argsort(flat[kept], stable=True)]
            rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[flat[order]]
            rows = starts.long()[flat[order]] + rank
            choice_of.fill_(-1)[rows] = order.to(torch.int32)
            row_of.fill_(-1).view(-1)[order] = rows.to(torch.int32)
            return Permutation(starts, choice_of, row_of)
        library = load()
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    args = MoePermuteArgs(
        expert_starts=starts.data_ptr(),
        choice_of=choice_of.data_ptr(),
        row_of=row_of.data_ptr(),
        counts=counts.data_ptr(),
        topk_ids=topk_ids.data_ptr(),
        num_choices=num_choices,
        num_experts=num_experts,
        row_alignment=row_alignment,
    )
    library.call("rorqual_moe_permute", args, current_stream(device))
    return Permutation(starts, choice_of, row_of)
