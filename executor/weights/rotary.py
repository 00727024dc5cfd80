"""The order of rotary rows in projections: pairs side by side, as the rope kernels and references turn them."""

from __future__ import annotations

import torch


def as_pairs(weight: torch.Tensor, num_heads: int, rope_dim: int) -> torch.Tensor:
    """Reorder each head's last rope_dim rows from (x0 … x31, x32 … x63) to (x0, x32, x1, x33, …)."""
    heads = weight.view(num_heads, -1, *weight.shape[1:])
    rest, rotary = heads[:, :-rope_dim], heads[:, -rope_dim:]
    pairs = rotary.view(num_heads, 2, rope_dim // 2, *weight.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat((rest, pairs), dim=1).flatten(0, 1)
