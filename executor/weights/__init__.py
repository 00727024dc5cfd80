"""Checkpoints: Hugging Face folders of safetensors, checked before anything is served, and the models made of them."""

from __future__ import annotations

from ..model.config import load_config
from .dtype import resolve_dtype
from .files import CheckpointFiles
from .fingerprint import model_fingerprint
from .loader import Progress, load_model

__all__ = ["CheckpointFiles", "Progress", "load_config", "load_model", "model_fingerprint", "resolve_dtype"]
