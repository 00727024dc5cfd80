"""The DeepSeek-V2/V3 model: one forward pass over a flat batch and the paged latent cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import ForwardBatch, ForwardOutput
from .config import ModelConfig

if TYPE_CHECKING:
    from ..kv_cache import LatentCache


class DeepseekModel:
    """Weights and arithmetic of one model. Keeps no state between passes: all of it is in the cache."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    deterministic: bool

    def forward(self, batch: ForwardBatch, kv_cache: LatentCache) -> ForwardOutput:
        """Compute the batch's rows, write their KV at `slot_mapping`, return the wanted rows' logits."""
        raise NotImplementedError

    def forward_mtp(self, batch: ForwardBatch, hidden: torch.Tensor, kv_cache: LatentCache) -> ForwardOutput:
        """One draft step of the MTP layer (DeepSeek-V3 report, section 2.2), over rows that `forward` computed.

        The same batch as for `forward` (positions, slots, segments), except that row i's token is the one
        *after* its position: `token_ids[i]` = t_{p+1} and `hidden[i]` = h_p (`ForwardOutput.all_hidden`, or
        `hidden` of a decode step), for p = positions[i]. The logits are those of t_{p+2}. The layer's KV of
        position p lies in the cache layer `num_hidden_layers`, at the same slot.
        """
        raise NotImplementedError
