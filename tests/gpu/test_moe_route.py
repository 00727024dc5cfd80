"""The router against its torch reference, and the permutation against a stable sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.kernels import moe
from rorqual.kernels.loader import KernelLibrary

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "v2_lite": (
        64,
        {"top_k": 6, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
        | {"norm_topk_prob": False, "scale_normed": False, "routed_scaling_factor": 1.0},
    ),
    "v2": (
        160,
        {"top_k": 6, "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
        | {"norm_topk_prob": False, "scale_normed": False, "routed_scaling_factor": 16.0},
    ),
    "v3": (
        256,
        {"top_k": 8, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4}
        | {"norm_topk_prob": True, "scale_normed": True, "routed_scaling_factor": 2.5},
    ),
    "embedded": (
        16,
        {"top_k": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2}
        | {"norm_topk_prob": True, "scale_normed": True, "routed_scaling_factor": 1.0},
    ),
    "wide": (
        384,
        {"top_k": 8, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
        | {"norm_topk_prob": True, "scale_normed": False, "routed_scaling_factor": 2.5},
    ),
}


def compare(logits: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any], library: KernelLibrary) -> None:
    ids, weights = moe.route(logits, bias, **options, library=library)
    want_ids, want_weights = moe.route(logits.cpu(), None if bias is None else bias.cpu(), **options)
    assert torch.equal(ids.cpu(), want_ids)
    # exp and the order of the softmax's sum differ by a few float32 steps.
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=3e-6, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 131])
@pytest.mark.parametrize("model", MODELS)
def test_route(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, model: str, num_tokens: int
) -> None:
    num_experts, options = MODELS[model]
    # Distinct by 0.02 and more, so that rounding decides no choice between experts; of groups it could, hardly ever.
    order = torch.stack(
        [torch.randperm(num_experts, device=device, generator=generator) for _ in range(num_tokens)]
        or [torch.empty(0, dtype=torch.int64, device=device)]
    ).view(num_tokens, -1 if num_tokens else num_experts)
    padded = torch.empty((num_tokens, num_experts + 3), device=device)
    padded[:, :num_experts] = (order.float() - num_experts / 2) * 0.02
    bias = None
    if options["topk_method"] == "noaux_tc":
        bias = torch.randn(num_experts, device=device, generator=generator) * 0.1
    compare(padded[:, :num_experts], bias, options, library)


@pytest.mark.parametrize("model", MODELS)
def test_ties_go_to_the_lower_index(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, model: str
) -> None:
    num_experts, options = MODELS[model]
    logits = torch.randint(0, 3, (64, num_experts), device=device, generator=generator).float()
    logits[0] = 0.0
    logits[1] = -200.0  # every sigmoid is zero
    bias = torch.zeros(num_experts, device=device) if options["topk_method"] == "noaux_tc" else None
    ids, _ = moe.route(logits, bias, **options, library=library)
    want, _ = moe.route(logits.cpu(), None if bias is None else bias.cpu(), **options)
    assert torch.equal(ids.cpu(), want)
    assert ids[0].tolist() == list(range(options["top_k"]))


def test_nan_still_gives_valid_distinct_experts(device: torch.device, library: KernelLibrary) -> None:
    logits = torch.zeros((2, 64), device=device)
    logits[0] = float("nan")
    logits[1, 7] = float("nan")
    ids, _ = moe.route(logits, None, **MODELS["v2_lite"][1], library=library)
    for row in ids.tolist():
        assert len(set(row)) == 6
        assert all(0 <= expert < 64 for expert in row)


@pytest.mark.parametrize("row_alignment", [1, 64])
@pytest.mark.parametrize("num_experts", [1, 16, 64, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 65, 1009])
def test_permute(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    num_tokens: int,
    num_experts: int,
    row_alignment: int,
) -> None:
    ids = torch.randint(-1, num_experts, (num_tokens, 6), device=device, generator=generator).to(torch.int32)
    if num_experts > 2:
        ids[ids == 2] = 1  # an expert that nobody chose
    got = moe.permute(ids, num_experts, row_alignment=row_alignment, library=library)
    want = moe.permute(ids.cpu(), num_experts, row_alignment=row_alignment)
    assert torch.equal(got.expert_starts.cpu(), want.expert_starts)
    assert torch.equal(got.row_of.cpu(), want.row_of)
    end = int(want.expert_starts[-1])
    assert torch.equal(got.choice_of[:end].cpu(), want.choice_of[:end])
