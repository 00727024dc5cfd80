"""Rotary position embedding: the table of angles and the turning of queries and keys."""

from __future__ import annotations

import torch

from rorqual import kernels

from .config import RopeConfig


class Rope:
    """Angles for every position, grown on demand, and the rotation of interleaved pairs."""

    def __init__(self, config: RopeConfig, dim: int, device: torch.device, *, deterministic: bool) -> None:
        self.dim = dim
        self.deterministic = deterministic
        self.scale = config.cos_sin_scale
        self.inv_freq = kernels.rope_inv_freq(
            dim,
            config.theta,
            factor=config.factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.truncate,
        ).to(device)
        self.table = torch.empty(0, dim // 2, 2, device=device)  # cos and sin, float32
        self.grow(1024)

    def grow(self, num_positions: int) -> None:
        """Make the table reach `num_positions`, at least doubling it."""
        have = self.table.shape[0]
        if num_positions <= have:
            return
        positions = torch.arange(max(num_positions, 2 * have), dtype=torch.float32, device=self.table.device)
        angles = positions[:, None] * self.inv_freq
        self.table = torch.stack((angles.cos() * self.scale, angles.sin() * self.scale), dim=-1)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """cos and sin of the rows: float32 [num_rows, dim / 2, 2]; `grow` has been called."""
        return self.table.index_select(0, positions)

    def turn(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, ..., dim] turned; a new tensor, or x itself where it can be done in place."""
        if self.deterministic or x.dtype != torch.float32:
            return kernels.apply_rope(x, angles[..., 0], angles[..., 1])
        factors = torch.view_as_complex(angles)
        if x.dim() == 3:
            factors = factors[:, None]
        torch.view_as_complex(x.view(*x.shape[:-1], self.dim // 2, 2)).mul_(factors)
        return x
