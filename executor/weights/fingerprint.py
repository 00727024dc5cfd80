"""The model's identity in block hashes: 32 bytes that differ whenever cached KV could differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ..model.config import ModelConfig
from .files import CheckpointFiles
from .names import main_tensors

KV_LAYOUT = "latent-v1: c_kv after norm, k_pe interleaved after rope"
WHOLE_FILE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 64 << 10


def model_fingerprint(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    deterministic: bool = False,
    random_seed: int | None = None,
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """BLAKE2b-256 over all that changes KV.

    Covers: the architecture and rope (overrides included, as they are in `config`), compute and KV dtype, whether
    fixed tiles are used, the KV layout, `extra` (the parallel layout), and of each weight file its size, its
    whole header (names, dtypes, shapes) and its bytes: all of them up to 64 MiB, above that 64 evenly spaced
    samples of 64 KiB, the first and the last bytes among them. So two checkpoints that share every shape and differ
    only between the samples of large files count as one; a fine-tune changes all of a file. File names, and
    so where the folder lies, do not count.

    Of random weights (`random_seed` is given), the names, shapes and seed that they are drawn from, in the files' place;
    `extra` should then name the kind of device, whose random numbers they are.
    """
    digest = hashlib.blake2b(digest_size=32, person=b"rorqual-model")
    facts = {
        "config": {key: str(value) for key, value in dataclasses.asdict(config).items()},
        "dtype": str(dtype),
        "kv_dtype": str(kv_dtype),
        "deterministic": deterministic,
        "layout": KV_LAYOUT,
        "extra": dict(extra or {}),
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    if random_seed is not None:
        shapes = {name: list(shape) for name, shape in main_tensors(config).items()}
        digest.update(json.dumps({"random": random_seed, "shapes": shapes}, sort_keys=True).encode())
        return digest.digest()
    with CheckpointFiles(path) as files:
        for file in files.files:
            header = files.headers[file]
            size = file.stat().st_size
            digest.update(f"{size} {len(header)} ".encode())
            digest.update(header)
            _add_bytes(digest, file, size)
    return digest.digest()


def _add_bytes(digest: hashlib.blake2b, file: Path, size: int) -> None:
    with file.open("rb", buffering=0) as stream:
        if size <= WHOLE_FILE_BYTES:
            while part := stream.read(1 << 20):
                digest.update(part)
            return
        for i in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
