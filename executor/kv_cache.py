"""The paged latent cache: one row of c_kv and k_pe a token a layer, in blocks of 64 tokens."""

from __future__ import annotations

import math

import numpy as np
import torch

from .model.batch import BLOCK_SIZE
from .model.config import ModelConfig

__all__ = ["BLOCK_SIZE", "LatentCache"]


class LatentCache:
    """KV memory of every layer: `layers[i]` is [num_blocks * 64, kv_lora_rank + qk_rope_head_dim].

    A row holds c_kv (after its norm) and then k_pe (after rope, in the checkpoint's interleaved order);
    slot = block_id * 64 + offset. Rows of the MTP layers, where the model has them, follow the main
    layers'. One more block, which no table may name, takes the writes of padding rows, so that a step
    never has to sort them out.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.width = config.kv_lora_rank + config.qk_rope_head_dim
        self.padding_slot = num_blocks * BLOCK_SIZE
        num_layers = config.num_hidden_layers + config.num_mtp_layers
        self.storage = _zeros((num_layers, (num_blocks + 1) * BLOCK_SIZE, self.width), dtype, torch.device(device))
        self.layers: list[torch.Tensor] = [layer[: num_blocks * BLOCK_SIZE] for layer in self.storage]
        self.writable: list[torch.Tensor] = list(self.storage)  # with the padding block at the end

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return self.storage.shape[0] * BLOCK_SIZE * self.width * self.storage.element_size()

    @staticmethod
    def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, before anything is allocated."""
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return (config.num_hidden_layers + config.num_mtp_layers) * BLOCK_SIZE * width * dtype.itemsize

    def fill_(self, value: float) -> None:
        """Overwrite everything, the padding block apart (tests fill what is unused with NaN)."""
        for layer in self.layers:
            layer.fill_(value)


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in pages that take memory only once they are written (torch.zeros writes them all)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
