"""Serving with the compiled kernels: weights, memory, graphs and the step loop over them."""

from __future__ import annotations

import dataclasses
import logging

import torch

from rorqual.core.config import ExecutorConfig
from rorqual.kernels import loader

from ..kv_cache import LatentCache
from ..memory import MemoryMeter, kv_cache_room
from ..model.config import ModelConfig
from ..order_loop import StepLimits
from ..weights.source import TensorSource
from .engine import GpuEngine, graph_batch_sizes
from .model import LATENT, NOPE, ROPE, VALUE, GpuModel
from .step_loop import GpuStepLoop
from .weights import load_gpu_weights

_log = logging.getLogger(__name__)

HOPPER = (9, 0)
BYTES_PER_GRAPH = 24 << 20
"""Set aside for each CUDA graph before it is captured; the ledger then says what they took."""

SLAB_KEYS = 16384
"""Latents that attention expands to keys and values at a time: of V2-Lite 134 MB, of 128 heads 1 GB. Two slabs instead of
one cost 1.6 % of attention's time."""


def why_not(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why the compiled kernels cannot serve this; empty where they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) != HOPPER:
        return f"they are for Hopper GPUs, not for {torch.cuda.get_device_name(device)}"
    if dtype != torch.bfloat16:
        return f"they compute in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if not loader.DEFAULT_PATH.is_file():
        return "they are not compiled here (run `make kernels`, which needs nvcc)"
    shape = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
    if shape != (LATENT, ROPE, NOPE, VALUE):
        return (
            f"they take heads of kv_lora_rank {LATENT}, qk_rope_head_dim {ROPE}, qk_nope_head_dim {NOPE}, v_head_dim "
            f"{VALUE}, and the model has {shape}"
        )
    return ""


class GpuBackend:
    """The model on one GPU. Raises KernelLibraryError where the compiled kernels are missing."""

    def __init__(
        self, source: TensorSource, config: ExecutorConfig, max_model_len: int, *, slab_keys: int = SLAB_KEYS
    ) -> None:
        """`slab_keys`: latents that attention expands at a time, if that is enough for a step's chunks."""
        if source.device.type == "cuda":
            loader.load()  # before minutes of loading
        # No drafts yet: the KV of an MTP layer would be memory for nothing.
        self.config = dataclasses.replace(source.config, num_mtp_layers=0)
        self.dtype, self.device = source.dtype, source.device
        self._weights = load_gpu_weights(source, max_model_len)
        self._limits = StepLimits(
            vocab_size=self.config.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            deterministic=config.deterministic,
        )
        most = max(config.max_num_batched_tokens, slab_keys)
        self._max_keys = min(max(config.max_num_batched_tokens, max_model_len), -(-most // 128) * 128)
        self._engine: GpuEngine | None = None

    def kv_room(self, config: ExecutorConfig, meter: MemoryMeter) -> int:
        """Bytes left for the KV cache after the largest step was run; closes the ledger's workspace."""
        limits = self._limits
        model = GpuModel(
            self._weights,
            max_decode_rows=limits.max_num_seqs,
            max_rows=limits.max_num_batched_tokens,
            max_keys=self._max_keys,
            max_blocks=-(-limits.max_model_len // 64),
            deterministic=limits.deterministic,
        )
        self._engine = GpuEngine(model, limits)
        self._engine.use_cache(LatentCache(self.config, 1, dtype=self.dtype, device=self.device))
        with torch.inference_mode():
            self._engine.largest_step()
        meter.close("workspace")
        if self.device.type != "cuda":
            return 1 << 30
        free, total = torch.cuda.mem_get_info(self.device)
        return kv_cache_room(
            total_bytes=total,
            utilization=config.gpu_memory_utilization,
            held_bytes=meter.held,
            free_bytes=free,
            to_come_bytes=BYTES_PER_GRAPH * len(graph_batch_sizes(limits.max_num_seqs)),
        )

    def make_loop(self, cache: LatentCache, limits: StepLimits, *, traced: bool) -> GpuStepLoop:
        """The loop over `cache`, not yet started."""
        assert self._engine is not None
        self._engine.use_cache(cache)
        return GpuStepLoop(self._engine, cache, limits, traced=traced)

    def warm_up(self, meter: MemoryMeter) -> None:
        """Capture the graphs; on the loop's thread."""
        assert self._engine is not None
        if self.device.type == "cuda":
            with torch.inference_mode():
                stats = self._engine.capture()
            _log.info("captured %d decode graphs in %.1f s", len(stats.batch_sizes), stats.seconds)
        meter.close("graphs")
