"""Random weights in the shape that a config.json asks for, drawn on the device: no checkpoint, host memory or disk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from ..model.config import ModelConfig
from .names import main_tensors, mtp_tensors

STANDARD_DEVIATION = 0.02


class RandomWeights:
    """A TensorSource of normal numbers of standard deviation 0.02; norms are 1, the routers' correction bias 0.

    A tensor is a function of its name, its shape, `seed` and the kind of device alone, whatever was asked for before
    it and in whatever dtype: it is drawn once, as BF16 would store it. Never fails.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.shapes = main_tensors(config)
        for depth in range(config.num_mtp_layers):
            self.shapes |= mtp_tensors(config, depth)[0]
        self.num_elements = sum(math.prod(shape) for shape in self.shapes.values())
        self._progress = progress
        self._drawn: set[str] = set()
        self._elements_drawn = 0

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """See TensorSource.tensor."""
        shape = self.shapes[name]
        dtype = out.dtype if out is not None else dtype or self.dtype
        self._count(name, math.prod(shape))
        in_place = out is not None and out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == shape
        stored = out if out is not None and in_place else torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        if name.endswith("norm.weight"):
            stored.fill_(1.0)
        elif name.endswith("e_score_correction_bias"):
            stored.zero_()
        elif self.device.type == "cpu":  # there normal_ of BF16 draws its uniform numbers in BF16, of 8 bits each
            noise = torch.randn(shape, generator=self._generator(name))
            stored.copy_(noise.mul_(STANDARD_DEVIATION))
        else:
            stored.normal_(0.0, STANDARD_DEVIATION, generator=self._generator(name))
        if out is None:
            return stored.to(dtype)
        return out if in_place else out.copy_(stored)

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def _count(self, name: str, num_elements: int) -> None:
        if name not in self._drawn:
            self._drawn.add(name)
            self._elements_drawn += num_elements
        if self._progress is not None:
            itemsize = self.dtype.itemsize
            self._progress(self._elements_drawn * itemsize, self.num_elements * itemsize)
