"""The multi-token-prediction layer (DeepSeek-V3 report, section 2.2): from h_t and token t+1 to token t+2."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layer import DecoderLayer
from .linear import Linear
from .norm import RmsNorm
from .plan import StepPlan


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A decoder layer over eh_proj([enorm(embedding of t+1), hnorm(h_t)]), with a norm and a head after it."""

    enorm: RmsNorm
    hnorm: RmsNorm
    eh_proj: Linear  # [hidden, 2 * hidden]: the embedding's half first
    layer: DecoderLayer
    norm: RmsNorm  # shared_head.norm
    embedding: torch.Tensor  # [vocab, hidden], the main model's unless stored apart
    head: Linear  # float32 [vocab, hidden], the main model's unless stored apart

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan, cache: torch.Tensor
    ) -> torch.Tensor:
        """token_ids: int64 [num_rows] (t+1); hidden: [num_rows, hidden] (h_t, after the main model's last norm).
        Returns the normed state that the head multiplies."""
        embedded = self.embedding.index_select(0, token_ids)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x, plan, cache))
