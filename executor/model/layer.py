"""One decoder layer: attention and a feed-forward part, each behind a norm and on the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .mla import MlaAttention
from .moe import DenseMlp, MoeMlp
from .norm import RmsNorm
from .plan import StepPlan


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RmsNorm
    attention: MlaAttention
    post_attention_norm: RmsNorm
    mlp: DenseMlp | MoeMlp

    def __call__(self, x: torch.Tensor, plan: StepPlan, cache: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, hidden] in and out; cache: this layer's rows, written at plan.slots."""
        x = self.attention(self.input_norm(x), x, plan, cache)
        return self.mlp(self.post_attention_norm(x), x)
