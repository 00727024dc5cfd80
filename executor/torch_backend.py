"""Serving on torch's own operations: any CPU, any GPU, any dtype."""

from __future__ import annotations

import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.config import ExecutorConfig

from .kv_cache import LatentCache
from .memory import MemoryMeter, cache_memory
from .model.batch import Form, build_batch
from .order_loop import StepLimits
from .step_loop import StepLoop
from .weights import build_model
from .weights.source import TensorSource


class TorchBackend:
    """The model on one device. Raises ConfigError if `deterministic` cannot be kept there."""

    def __init__(self, source: TensorSource, config: ExecutorConfig, num_threads: int) -> None:
        self.model = build_model(source, deterministic=config.deterministic)
        self._num_threads = num_threads
        self._cache: LatentCache | None = None
        self.config = self.model.config
        self.dtype, self.device = source.dtype, source.device

    def kv_room(self, config: ExecutorConfig, meter: MemoryMeter) -> int:
        """Bytes left for the KV cache."""
        return cache_memory(self.device, config.gpu_memory_utilization)

    def make_loop(self, cache: LatentCache, limits: StepLimits, *, traced: bool) -> StepLoop:
        """The loop over `cache`, not yet started."""
        self._cache = cache
        return StepLoop(self.model, cache, limits, num_threads=self._num_threads, traced=traced)

    def warm_up(self, meter: MemoryMeter) -> None:
        """One prefill and two decode steps on blocks that nobody holds yet; closes the ledger's workspace.

        Runs on the loop's thread, whose pool of compute threads it also starts.
        """
        cache = self._cache
        assert cache is not None
        table = torch.arange(min(2, cache.num_blocks), dtype=torch.int32)
        length = min(BLOCK_SIZE, cache.num_blocks * BLOCK_SIZE - 1)
        tokens = [i % self.config.vocab_size for i in range(length)]
        one = ([1], length, table, Form.DECODE) if table.shape[0] > 1 else ([1], length - 1, table, Form.DECODE)
        for batch in (
            build_batch([(tokens, 0, table, Form.PREFILL)]),
            build_batch([one]),
            build_batch([one, ([2], 3, table, Form.DECODE)]),
        ):
            self.model.forward(batch, cache)
        meter.close("workspace")
