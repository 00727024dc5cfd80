"""The model's fast paths against the plain reference of each op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from executor.kv_cache import LatentCache
from executor.model import moe as moe_module
from executor.model import plan as plan_module
from executor.model.batch import BLOCK_SIZE, Form, build_batch, slots_of
from executor.model.config import RopeConfig, parse_config
from executor.model.linear import GateUp, Linear, packs
from executor.model.moe import MoeMlp, MoeWeights
from executor.model.plan import make_plan
from executor.model.rope import Rope
from rorqual import kernels
from tests.golden.checkpoints import V2, V3

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class TestRoute:
    def choose(self, scores: list[float], bias: list[float] | None, **changes: Any) -> list[int]:
        arguments: dict[str, Any] = {
            "top_k": 2, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "scale_normed": True, "routed_scaling_factor": 1.0,
        }  # fmt: skip
        ids, _ = kernels.route(
            torch.tensor([scores]), None if bias is None else torch.tensor(bias), **(arguments | changes)
        )
        return ids[0].tolist()

    def test_ties_go_to_the_lower_expert(self) -> None:
        assert self.choose([0.5] * 6, [0.0] * 6, top_k=3) == [0, 1, 2]
        assert self.choose([0.1, 0.5, 0.5, 0.5], None, topk_method="greedy") == [1, 2]

    def test_ties_go_to_the_lower_group(self) -> None:
        grouped = {"n_group": 3, "topk_group": 1}
        assert self.choose([0.2, 0.3, 0.3, 0.2, 0.2, 0.3], [0.0] * 6, **grouped) == [1, 0]
        greedy = grouped | {"topk_method": "group_limited_greedy"}
        assert self.choose([0.1, 0.3, 0.3, 0.2, 0.3, 0.0], None, **greedy) == [1, 0]

    def test_bias_chooses_and_does_not_weigh(self) -> None:
        ids, weights = kernels.route(
            torch.tensor([[0.9, 0.1, 0.2]]),
            torch.tensor([0.0, 5.0, 4.0]),
            top_k=2,
            topk_method="noaux_tc",
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            scale_normed=True,
            routed_scaling_factor=3.0,
        )
        assert ids.tolist() == [[1, 2]]
        torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0]]))

    def test_a_negative_bias_in_a_chosen_group_beats_another_group(self) -> None:
        # Masked groups are out, not at zero: the best remaining score is negative.
        assert self.choose([0.1, 0.1, 0.6, 0.6], [0.9, 0.9, -0.7, -0.8], n_group=2, topk_group=1) == [0, 1]
        assert self.choose([0.9, 0.1, 0.1, 0.1], [0.0, -0.9, 0.0, 0.0], n_group=2, topk_group=1) == [2, 3]

    def test_v2_scales_only_what_it_does_not_norm(self) -> None:
        scores = torch.tensor([[0.2, 0.6, 0.2]])
        common: dict[str, Any] = {
            "top_k": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
            "scale_normed": False, "routed_scaling_factor": 16.0,
        }  # fmt: skip
        _, plain = kernels.route(scores, None, norm_topk_prob=False, **common)
        _, normed = kernels.route(scores, None, norm_topk_prob=True, **common)
        torch.testing.assert_close(plain, torch.tensor([[9.6, 3.2]]))
        torch.testing.assert_close(normed, torch.tensor([[0.75, 0.25]]))


class TestMoe:
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 17, 49, 130])
    @pytest.mark.parametrize("base", [V3, V2 | {"n_routed_experts": 32, "num_experts_per_tok": 2}], ids=["v3", "v2"])
    def test_every_strategy_is_the_reference(
        self, base: dict[str, Any], num_rows: int, pack: bool, deterministic: bool
    ) -> None:
        config = parse_config(base | {"n_shared_experts": 2}, "config.json")
        total, width, hidden = config.n_routed_experts + 2, config.moe_intermediate_size, config.hidden_size
        gate, up = noise(total, width, hidden, seed=1) / 9, noise(total, width, hidden, seed=2) / 9
        down = noise(total, hidden, width, seed=3) / 6
        bias = noise(config.n_routed_experts, seed=4) if config.topk_method == "noaux_tc" else None
        weights = MoeWeights(noise(config.n_routed_experts, hidden, seed=5) / 9, bias, gate, up, down)
        moe = MoeMlp(config, weights, deterministic=deterministic, pack=pack)
        x, residual = noise(num_rows, hidden, seed=6), noise(num_rows, hidden, seed=7)
        kept = residual.clone()
        ids, topk_weights = moe.router(x)
        ids = torch.cat((ids, torch.tensor([[total - 2, total - 1]]).expand(num_rows, 2)), dim=1)
        topk_weights = torch.cat((topk_weights, torch.ones(num_rows, 2)), dim=1)
        expected = residual + kernels.moe_experts(x, torch.cat((gate, up), dim=1), down, ids, topk_weights)
        torch.testing.assert_close(moe(x, residual), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(residual, kept)

    def test_row_counts_cover_the_strategies(self) -> None:
        assert 17 < moe_module.MAX_DENSE_ROWS < 130


class TestLinear:
    @pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 33])
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize(("n", "k"), [(7, 40), (90, 13)])
    def test_products(self, n: int, k: int, pack: bool, deterministic: bool, num_rows: int) -> None:
        weight, bias, x = noise(n, k), noise(n, seed=1), noise(num_rows, k, seed=2)
        residual = noise(num_rows, n, seed=3)
        linear = Linear(weight, bias, deterministic=deterministic, pack=pack)
        torch.testing.assert_close(linear(x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear(x, residual), x @ weight.T + bias + residual, rtol=1e-5, atol=1e-5)
        gate_up = GateUp(weight, noise(n, k, seed=4), deterministic=deterministic, pack=pack)
        expected = kernels.silu_mul(x @ weight.T, x @ noise(n, k, seed=4).T)
        torch.testing.assert_close(gate_up(x), expected, rtol=1e-5, atol=1e-5)

    def test_packing_is_tried_once_and_is_a_fact(self) -> None:
        assert packs(torch.float32) is packs(torch.float32)


class TestRope:
    def test_default_is_the_formula(self) -> None:
        rope = Rope(RopeConfig(rope_type="default", theta=10000.0), 4, CPU, deterministic=False)
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        turned = rope.turn(x.clone(), rope.angles(torch.tensor([5])))
        for pair, frequency in ((0, 1.0), (1, 0.01)):
            even, odd, angle = x[0, 2 * pair].item(), x[0, 2 * pair + 1].item(), 5 * frequency
            assert turned[0, 2 * pair].item() == pytest.approx(even * math.cos(angle) - odd * math.sin(angle))
            assert turned[0, 2 * pair + 1].item() == pytest.approx(odd * math.cos(angle) + even * math.sin(angle))

    @pytest.mark.parametrize("shape", [(5, 16), (5, 3, 16)])
    def test_both_ways_agree(self, shape: tuple[int, ...]) -> None:
        config = RopeConfig(
            rope_type="yarn", theta=10000.0, factor=4.0, original_max_position_embeddings=64, mscale=0.5
        )
        fast, plain = (Rope(config, 16, CPU, deterministic=d) for d in (False, True))
        angles = fast.angles(torch.tensor([0, 1, 63, 64, 1000]))
        torch.testing.assert_close(fast.turn(noise(*shape), angles), plain.turn(noise(*shape), angles))

    def test_grows(self) -> None:
        rope = Rope(RopeConfig(rope_type="default", theta=10000.0), 8, CPU, deterministic=False)
        before = rope.angles(torch.tensor([900]))
        rope.grow(5000)
        assert rope.table.shape[0] >= 5000
        assert torch.equal(rope.angles(torch.tensor([900])), before)


class TestPlan:
    def test_groups_hold_every_decode_row_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan_module, "GATHER_ROWS", 300)
        contexts = [1, 64, 65, 200, 299, 3, 150, 150, 900]
        tables = [torch.randperm(20, dtype=torch.int32) for _ in contexts]
        batch = build_batch([([1], c - 1, t, Form.DECODE) for c, t in zip(contexts, tables, strict=True)])
        plan = make_plan(batch, torch.zeros(9, 1, 2), padding_slot=-7, dtype=torch.float32, one_by_one=False)
        rows = range(9) if plan.decode_rows is None else plan.decode_rows.tolist()
        assert sorted(rows) == list(range(9))
        assert [g.start for g in plan.decode_groups] == [0] + [g.end for g in plan.decode_groups[:-1]]
        for group in plan.decode_groups:
            members = [contexts[rows[i]] for i in range(group.start, group.end)]
            assert group.context == max(members)
            assert len(members) == 1 or len(members) * group.context <= 300
            if group.slots is not None:
                slots = group.slots.view(len(members), group.context)
                for i, context in enumerate(members):
                    table = tables[rows[group.start + i]]
                    assert torch.equal(slots[i, :context], slots_of(table, 0, context))
                    assert (slots[i, context:] == slots[i, 0]).all()

    def test_consecutive_blocks_are_read_in_place(self) -> None:
        table = torch.arange(3, 8, dtype=torch.int32)
        batch = build_batch([([1], 200, table, Form.DECODE)])
        plan = make_plan(batch, torch.zeros(1, 1, 2), padding_slot=0, dtype=torch.float32, one_by_one=False)
        assert plan.decode_groups[0].slots is None
        assert plan.decode_groups[0].first_slot == 3 * BLOCK_SIZE

    def test_padding_rows_go_to_the_padding_block(self) -> None:
        config = parse_config(V3, "config.json")
        cache = LatentCache(config, 2, dtype=torch.float32)
        assert cache.padding_slot == 2 * BLOCK_SIZE
        assert cache.bytes_per_block == LatentCache.block_bytes(config, torch.float32)
        assert all(layer.shape == (2 * BLOCK_SIZE, 56) for layer in cache.layers)
