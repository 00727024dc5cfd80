"""Random weights in the shape that a config.json asks for, for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from .model.config import load_config
from .weights.names import main_tensors, mtp_tensors

STANDARD_DEVIATION = 0.02


@contextmanager
def dummy_checkpoint(path: str | Path, seed: int) -> Iterator[Path]:
    """A folder with the config.json of `path` and random BF16 tensors: a function of shapes and `seed` alone.

    It passes through the same loader and the same checks as a real one, and is gone afterwards. Raises
    CheckpointError for a config.json that cannot be served.
    """
    config = load_config(path)
    shapes = main_tensors(config)
    for depth in range(config.num_mtp_layers):
        shapes |= mtp_tensors(config, depth)[0]
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="rorqual-dummy-") as name:
        folder = Path(name)
        shutil.copyfile(Path(path) / "config.json", folder / "config.json")
        tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        del tensors
        yield folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape, dtype=torch.float32)
    return (torch.randn(shape, generator=generator) * STANDARD_DEVIATION).to(torch.bfloat16)
