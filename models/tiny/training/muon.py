"""Muon, the optimiser of the matrices: momentum made orthogonal by Newton-Schulz steps.

After Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). Matrices of one
shape, experts among them, are orthogonalised together in one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """g [n, rows, cols] -> about U V^T of each matrix's singular value decomposition, in bfloat16.

    The quintic's coefficients are those of the paper: singular values end between about 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Updates parameters whose last two dimensions are matrices; further ones are a batch of them."""

    def __init__(self, params: Iterable[Tensor], momentum: float, weight_decay: float) -> None:
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in params:
            self._groups[(p.shape[-2], p.shape[-1])].append(p)
        self._buffers = {shape: [torch.zeros_like(p) for p in group] for shape, group in self._groups.items()}
        self._momentum, self._weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for (rows, cols), params in self._groups.items():
            grads = [p.grad for p in params if p.grad is not None]
            buffers = self._buffers[(rows, cols)]
            torch._foreach_lerp_(buffers, grads, 1 - self._momentum)
            nesterov = torch._foreach_lerp(grads, buffers, self._momentum)
            flat = torch.cat([u.reshape(-1, rows, cols) for u in nesterov])
            update = orthogonalise(flat).float() * max(1.0, rows / cols) ** 0.5
            torch._foreach_mul_(params, 1 - lr * self._weight_decay)
            parts = update.split([p.numel() // (rows * cols) for p in params])
            torch._foreach_add_(params, [u.view_as(p) for u, p in zip(parts, params, strict=True)], alpha=-lr)
