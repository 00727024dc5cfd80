"""The DeepSeek-V2/V3 model: one forward pass over a flat batch and the paged latent cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .batch import ForwardBatch, ForwardOutput
from .config import ModelConfig
from .layer import DecoderLayer
from .linear import Linear
from .mtp import MtpLayer
from .norm import RmsNorm
from .plan import StepPlan, make_plan
from .rope import Rope

if TYPE_CHECKING:
    from ..kv_cache import LatentCache


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What the loader makes of a checkpoint."""

    embedding: torch.Tensor  # [vocab, hidden] dtype
    layers: Sequence[DecoderLayer]
    norm: RmsNorm
    head: Linear  # float32 [vocab, hidden], so logits are never rounded to a shorter type
    mtp: Sequence[MtpLayer]
    rope: Rope


class DeepseekModel:
    """Weights and arithmetic of one model. Keeps no state between passes: all of it is in the cache.

    `config.num_mtp_layers` is the number of MTP layers that the checkpoint really holds.
    """

    def __init__(
        self,
        config: ModelConfig,
        parts: ModelParts,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.deterministic = deterministic
        self._parts = parts

    @property
    def has_mtp(self) -> bool:
        return bool(self._parts.mtp)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: LatentCache) -> ForwardOutput:
        """Compute the batch's rows, write their KV at `slot_mapping`, return the wanted rows' logits."""
        batch = batch.to(self.device)
        plan = self._plan(batch, kv_cache)
        x = self._parts.embedding.index_select(0, batch.token_ids)
        for layer, cache in zip(self._parts.layers, kv_cache.writable, strict=False):
            x = layer(x, plan, cache)
        if batch.return_all_hidden:
            all_hidden = self._parts.norm(x)
            hidden = all_hidden.index_select(0, batch.logit_rows)
            return ForwardOutput(self._logits(hidden, self._parts.head), hidden, all_hidden)
        hidden = self._parts.norm(x.index_select(0, batch.logit_rows))
        return ForwardOutput(self._logits(hidden, self._parts.head), hidden)

    @torch.inference_mode()
    def forward_mtp(
        self, batch: ForwardBatch, hidden: torch.Tensor, kv_cache: LatentCache, *, depth: int = 0
    ) -> ForwardOutput:
        """One draft step of the MTP layer (DeepSeek-V3 report, section 2.2), over rows that `forward` computed.

        The same batch as for `forward` (positions, slots, segments), except that row i's token is the one
        *after* its position: `token_ids[i]` = t_{p+1} and `hidden[i]` = h_p (`ForwardOutput.all_hidden`, or
        `hidden` of a decode step), for p = positions[i]. The logits are those of t_{p+2}. The layer's KV of
        position p lies in the cache layer `num_hidden_layers + depth`, at the same slot.
        """
        mtp = self._parts.mtp[depth]
        batch = batch.to(self.device)
        plan = self._plan(batch, kv_cache)
        cache = kv_cache.writable[self.config.num_hidden_layers + depth]
        state = mtp(batch.token_ids, hidden, plan, cache)
        wanted = state.index_select(0, batch.logit_rows)
        return ForwardOutput(self._logits(wanted, mtp.head), wanted, state if batch.return_all_hidden else None)

    def _plan(self, batch: ForwardBatch, kv_cache: LatentCache) -> StepPlan:
        rope = self._parts.rope
        rope.grow(max((segment.end_position for segment in batch.segments), default=0))
        return make_plan(
            batch,
            rope.angles(batch.positions),
            padding_slot=kv_cache.padding_slot,
            dtype=self.dtype,
            one_by_one=self.deterministic,
        )

    def _logits(self, hidden: torch.Tensor, head: Linear) -> torch.Tensor:
        return head(hidden.float())
