"""Root-mean-square norms, with the arithmetic that the compute dtype asks for."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual import kernels


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight. See rorqual.kernels.reference.rms_norm."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.shape = tuple(weight.shape)
        self.fused = weight.dtype == torch.float32  # then torch's own has the same roundings in fewer calls

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return kernels.rms_norm(x, self.weight, self.eps)
