"""Checkpoints: Hugging Face folders of safetensors, checked before anything is served, and the models made of them."""

from __future__ import annotations

from ..model.config import load_config
from .dtype import resolve_dtype
from .files import CheckpointFiles
from .fingerprint import model_fingerprint
from .loader import build_model, load_model
from .source import Progress, TensorSource, open_source

__all__ = [
    "CheckpointFiles",
    "Progress",
    "TensorSource",
    "build_model",
    "load_config",
    "load_model",
    "model_fingerprint",
    "open_source",
    "resolve_dtype",
]
