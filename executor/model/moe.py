"""The feed-forward half of a layer: a dense gated MLP, or routed and shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rorqual import kernels

from .config import ModelConfig
from .linear import GateUp, Linear, in_tiles, silu_mul_rows

MAX_DENSE_WASTE = 4.0
"""Experts are all computed for every row, and weighted by zero, while they are at most this many times the chosen
ones: three products and no loop, against six calls an expert. Larger models gather the rows of each expert."""
MAX_DENSE_ROWS = 96
"""Up to so many rows; above, arithmetic counts for more than calls. Measured on the embedded model's layer: 4.2 ms
against 4.5 at 96 rows, 9.5 against 6.8 at 256."""


class DenseMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, deterministic: bool, pack: bool
    ) -> None:
        self.gate_up = GateUp(gate, up, deterministic=deterministic, pack=pack)
        self.down = Linear(down, deterministic=deterministic, pack=pack)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [num_rows, hidden] -> residual + MLP."""
        return self.down(self.gate_up(x), residual)


class Router:
    """Scores in float32 and the choice of experts."""

    def __init__(
        self,
        config: ModelConfig,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        deterministic: bool,
        pack: bool,
    ) -> None:
        self.config = config
        self.bias = bias  # float32 [num_experts], for noaux_tc
        self.deterministic = deterministic
        self.linear = Linear(weight, pack=pack)  # float32

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, hidden] -> float32 [num_rows, num_experts]."""
        x = x.float()
        return in_tiles(self._scores, x, None) if self.deterministic else self._scores(x, None)

    def _scores(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return kernels.router_scores(self.linear(x), self.config.scoring_func)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_rows, hidden] -> topk_ids int64 and topk_weights float32, each [num_rows, top_k]."""
        config = self.config
        return kernels.route(
            self.scores(x),
            self.bias,
            top_k=config.num_experts_per_tok,
            topk_method=config.topk_method,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            scale_normed=config.model_type == "deepseek_v3",
            routed_scaling_factor=config.routed_scaling_factor,
        )


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """One layer's experts in the compute dtype; the router's part in float32."""

    router: torch.Tensor  # float32 [num_experts, hidden]
    router_bias: torch.Tensor | None  # float32 [num_experts]
    gate: torch.Tensor  # [num_experts + shared, width, hidden]; the shared MLP cut into pieces of an expert's width
    up: torch.Tensor  # [num_experts + shared, width, hidden]
    down: torch.Tensor  # [num_experts + shared, hidden, width]


class MoeMlp:
    """The chosen experts, weighted, and the shared ones, which are experts that every row chooses with weight 1."""

    def __init__(self, config: ModelConfig, weights: MoeWeights, *, deterministic: bool, pack: bool) -> None:
        self.num_routed = config.n_routed_experts
        self.num_shared = weights.gate.shape[0] - self.num_routed
        self.top_k = config.num_experts_per_tok
        self.width = weights.gate.shape[1]
        self.deterministic = deterministic
        self.router = Router(config, weights.router, weights.router_bias, deterministic=deterministic, pack=pack)
        total, chosen = self.num_routed + self.num_shared, self.top_k + self.num_shared
        self.all_gate_up: GateUp | None = None
        if pack and total <= MAX_DENSE_WASTE * chosen:
            self.all_gate_up = GateUp(
                weights.gate.flatten(0, 1), weights.up.flatten(0, 1), deterministic=deterministic, pack=pack
            )
            self.all_down = Linear(weights.down.transpose(0, 1).flatten(1), deterministic=deterministic, pack=pack)
        if self.all_gate_up is None or not deterministic:
            self.gate_up = torch.cat((weights.gate, weights.up), dim=1)  # [total, 2 * width, hidden]
            self.down = weights.down.contiguous()
            self.gate_up_of = list(self.gate_up)
            self.down_of = list(self.down)
        self.shared_ids = list(range(self.num_routed, total))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [num_rows, hidden] -> residual + experts."""
        num_rows = x.shape[0]
        if not num_rows:
            return residual
        topk_ids, topk_weights = self.router(x)
        if self.deterministic:
            if self.all_gate_up is not None:
                return self._all_experts(x, residual, topk_ids, topk_weights)
            return self._expert_tiles(x, residual, topk_ids, topk_weights)
        if num_rows == 1:
            return self._one_row(x, residual, topk_ids, topk_weights)
        if self.all_gate_up is not None and num_rows <= MAX_DENSE_ROWS:
            return self._all_experts(x, residual, topk_ids, topk_weights)
        return self._by_expert(x, residual, topk_ids, topk_weights)

    def _all_experts(
        self, x: torch.Tensor, residual: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        assert self.all_gate_up is not None
        weights = topk_weights.new_zeros(x.shape[0], self.num_routed + self.num_shared)
        if self.num_shared:
            weights[:, self.num_routed :] = 1.0
        weights.scatter_(1, topk_ids, topk_weights)
        y = self.all_gate_up(x)
        y.view(x.shape[0], -1, self.width).mul_(weights.to(x.dtype).unsqueeze(2))
        return self.all_down(y, residual)

    def _one_row(
        self, x: torch.Tensor, residual: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """One row reads the weights of its experts and no others: a quarter of the traffic for the embedded model."""
        ids = topk_ids[0].tolist() + self.shared_ids
        vector = x[0]
        both = torch.stack([torch.mv(self.gate_up_of[expert], vector) for expert in ids])
        y = F.silu(both[:, : self.width]) * both[:, self.width :]
        weights = F.pad(topk_weights[0], (0, self.num_shared), value=1.0)
        y = y * weights.to(y.dtype).unsqueeze(1)
        out = residual[0]
        for i, expert in enumerate(ids):
            out = torch.addmv(out, self.down_of[expert], y[i])
        return out.unsqueeze(0)

    def _by_expert(
        self, x: torch.Tensor, residual: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows sorted by expert, one pair of products an expert."""
        order = torch.argsort(topk_ids.flatten(), stable=True)
        counts = torch.bincount(topk_ids.flatten(), minlength=self.num_routed).tolist()
        rows = torch.div(order, self.top_k, rounding_mode="floor")
        gathered = x.index_select(0, rows)
        parts: list[torch.Tensor] = []
        start = 0
        for expert, count in enumerate(counts):
            if count:
                parts.append(self._expert(gathered[start : start + count], expert))
                start += count
        y = torch.cat(parts).float() * topk_weights.flatten()[order].unsqueeze(1)
        out = residual.float().index_add(0, rows, y)
        for expert in self.shared_ids:
            out += self._expert(x, expert)
        return out.to(x.dtype)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        both = F.linear(x, self.gate_up_of[expert])
        return F.linear(F.silu(both[:, : self.width]) * both[:, self.width :], self.down_of[expert])

    def _expert_tiles(
        self, x: torch.Tensor, residual: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """By expert in tiles of 16 rows; a row's parts are summed in the order of its choice, so the sum has the
        same bits whoever else chose the expert."""
        flat = topk_ids.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.num_routed).tolist()
        gathered = x.index_select(0, torch.div(order, self.top_k, rounding_mode="floor"))
        y = torch.empty_like(gathered)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                y[order[start : start + count]] = self._expert_in_tiles(gathered[start : start + count], expert)
                start += count
        chosen = y.view(x.shape[0], self.top_k, -1)
        out = residual.float()
        for choice in range(self.top_k):
            out = out + chosen[:, choice].float() * topk_weights[:, choice : choice + 1]
        for expert in self.shared_ids:
            out = out + self._expert_in_tiles(x, expert)
        return out.to(x.dtype)

    def _expert_in_tiles(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        def product(tile: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            both = F.linear(tile, self.gate_up_of[expert])
            return F.linear(silu_mul_rows(both[:, : self.width], both[:, self.width :]), self.down_of[expert])

        return in_tiles(product, x, None)
