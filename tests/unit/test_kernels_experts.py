"""Packing of expert weights, and the torch reference of the experts' kernels against the model's own."""

from __future__ import annotations

import pytest
import torch

from rorqual.kernels import elementwise, experts, moe, reference

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 3, 256, 128


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up = randn(NUM_EXPERTS, WIDTH, HIDDEN, seed=1) / 8, randn(NUM_EXPERTS, WIDTH, HIDDEN, seed=2) / 8
    return gate, up, randn(NUM_EXPERTS, HIDDEN, WIDTH, seed=3) / 8


def test_packing_is_undone_and_alternates_by_eight() -> None:
    gate, up, _ = layer()
    packed = experts.pack_gate_up(gate, up)
    assert packed.shape == (NUM_EXPERTS, 2 * WIDTH, HIDDEN)
    rows = experts.unpack_boxes(packed[2])
    assert torch.equal(rows[16:24], gate[2, 8:16])
    assert torch.equal(rows[24:32], up[2, 8:16])
    for expert in range(NUM_EXPERTS):
        got_gate, got_up = experts.unpack_gate_up(packed[expert])
        assert torch.equal(got_gate, gate[expert])
        assert torch.equal(got_up, up[expert])


def test_packing_fills_one_expert_in_place() -> None:
    gate, up, _ = layer()
    packed = torch.full((NUM_EXPERTS, 2 * WIDTH, HIDDEN), float("nan"), dtype=torch.bfloat16)
    experts.pack_gate_up_into(packed[3], gate[3], up[3])
    assert torch.equal(packed[3], experts.pack_gate_up(gate, up)[3])
    assert packed[[0, 1, 2, 4]].isnan().all()


def test_down_is_packed_in_place_too() -> None:
    _, _, down = layer()
    packed = experts.pack_down(down)
    assert torch.equal(experts.unpack_boxes(packed[4]), down[4])
    experts.pack_down_into(down[4], down[4])
    assert torch.equal(down[4], packed[4])


def test_boxes_lie_as_swizzled_shared_memory() -> None:
    weight = torch.arange(256 * 192, dtype=torch.int32).view(256, 192)
    packed = experts.pack_boxes(weight)
    assert torch.equal(experts.unpack_boxes(packed), weight)
    boxes = packed.view(2, 3, 128, 8, 8)
    for tile, step, row, piece in ((0, 0, 0, 0), (1, 2, 77, 3), (0, 1, 127, 7)):
        want = weight[128 * tile + row, 64 * step + 8 * piece :][:8]
        assert torch.equal(boxes[tile, step, row, piece ^ (row % 8)], want)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_reference_agrees_with_the_model(num_tokens: int) -> None:
    gate, up, down = layer()
    x, residual = randn(num_tokens, HIDDEN, seed=4), randn(num_tokens, HIDDEN, seed=5)
    ids = torch.rand((num_tokens, NUM_EXPERTS), generator=torch.Generator().manual_seed(6)).topk(TOP_K).indices
    weights = torch.rand((num_tokens, TOP_K), generator=torch.Generator().manual_seed(7))
    workspace = experts.make_experts_workspace(16, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH, torch.device("cpu"))
    workspace.y.fill_(float("nan"))
    experts.moe_experts(x, ids.to(torch.int32), experts.pack_gate_up(gate, up), experts.pack_down(down), workspace)
    got, normed, norm_weight = residual.clone(), torch.empty_like(x), randn(HIDDEN, seed=8)
    experts.moe_combine(workspace, weights, got, norm_weight=norm_weight, eps=1e-6, normed_out=normed)
    want = residual.float() + reference.moe_experts(
        x.float(), torch.cat((gate, up), dim=1).float(), down.float(), ids, weights
    )
    # h, y and the sum are each rounded to bf16 once: 3 * (2^-9 / sqrt(3))^2 is the error's expected square.
    assert num_tokens == 0 or float((got.float() - want).norm() / want.norm()) < 3e-3
    assert torch.equal(normed, elementwise.rms_norm(got, norm_weight, 1e-6))


def test_a_choice_without_an_expert_adds_nothing() -> None:
    gate, up, down = layer()
    x = randn(2, HIDDEN, seed=4)
    workspace = experts.make_experts_workspace(2, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH, torch.device("cpu"))
    workspace.y.fill_(float("nan"))
    ids = torch.tensor([[-1, NUM_EXPERTS, -5], [-1, 2, -1]], dtype=torch.int32)
    experts.moe_experts(x, ids, experts.pack_gate_up(gate, up), experts.pack_down(down), workspace)
    got = torch.zeros_like(x)
    experts.moe_combine(workspace, torch.ones((2, TOP_K)), got)
    assert (got[0] == 0).all()
    assert torch.equal(got[1], workspace.y[workspace.row_of[4].long()])


def test_sizes_are_checked() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="hidden must be a multiple of 128 and width of 64, got 192 and 128"):
        experts.make_experts_workspace(4, 2, 8, 192, 128, cpu)
    with pytest.raises(ValueError, match="top_k in"):
        experts.make_experts_workspace(4, 33, 8, 256, 128, cpu)
    gate, up, down = layer()
    workspace = experts.make_experts_workspace(4, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH, cpu)
    packed = experts.pack_gate_up(gate, up)
    with pytest.raises(ValueError, match="at most 4 tokens, got 5"):
        experts.moe_experts(randn(5, HIDDEN), torch.zeros((5, TOP_K), dtype=torch.int32), packed, down, workspace)
    with pytest.raises(ValueError, match=r"topk_ids: needs shape \[2, 3\], got \[2, 4\]"):
        experts.moe_experts(randn(2, HIDDEN), torch.zeros((2, 4), dtype=torch.int32), packed, down, workspace)
    with pytest.raises(ValueError, match="give both or neither"):
        experts.moe_combine(workspace, torch.ones((1, TOP_K)), randn(1, HIDDEN), norm_weight=randn(HIDDEN))


def test_shared_experts_come_last() -> None:
    logits = torch.randn((4, 8), generator=torch.Generator().manual_seed(1))
    rules = {"top_k": 2, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    rules |= {"norm_topk_prob": False, "scale_normed": False, "routed_scaling_factor": 1.0}
    ids, weights = moe.route(logits, None, **rules)
    more_ids, more_weights = moe.route(logits, None, **rules, num_shared=2)
    assert more_ids.dtype == torch.int32
    assert torch.equal(more_ids, torch.cat((ids, torch.tensor([[8, 9]] * 4, dtype=torch.int32)), dim=-1))
    assert torch.equal(more_weights, torch.cat((weights, torch.ones((4, 2))), dim=-1))
