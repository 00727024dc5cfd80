"""Reading checkpoints: Hugging Face folders of safetensors, checked before anything is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .model.config import ModelConfig, load_config
from .model.deepseek import DeepseekModel

__all__ = ["load_config", "load_model", "model_fingerprint", "resolve_dtype"]

Progress = Callable[[int, int], None]  # (bytes_done, bytes_total)


def resolve_dtype(requested: str, device: str | torch.device) -> torch.dtype:
    """The compute dtype for `--dtype` auto | bfloat16 | float32 on `device`."""
    raise NotImplementedError


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    deterministic: bool = False,
    progress: Progress | None = None,
) -> DeepseekModel:
    """The model of the checkpoint folder `path`, in `dtype` on `device`. Raises CheckpointError."""
    raise NotImplementedError


def model_fingerprint(path: str | Path, config: ModelConfig, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> bytes:
    """32 bytes (BLAKE2b-256) over all that changes KV."""
    raise NotImplementedError
