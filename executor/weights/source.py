"""Where a model's tensors come from, one by one on the device: a checkpoint's files, or random numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from rorqual import kernels
from rorqual.core.errors import CheckpointError

from ..model.config import ModelConfig, load_config
from .files import CheckpointFiles, check_tokenizer
from .names import SCALE_SUFFIX, check_tensors, main_tensors, mtp_tensors
from .random_weights import RandomWeights
from .read_ahead import ReadAhead

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


class TensorSource(Protocol):
    """A checked model's tensors under their published names."""

    @property
    def config(self) -> ModelConfig:
        """With num_mtp_layers lowered to what there is."""

    @property
    def dtype(self) -> torch.dtype:
        """What `tensor` returns unless told otherwise."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor that `tensor` gives."""

    @property
    def num_elements(self) -> int:
        """In all of them together."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """One tensor, dequantised, on the device: the caller's own, of `dtype` or the source's; or written into `out`
        (of the tensor's shape, in out's dtype), which is then returned.

        On a GPU the tensor is ready for the stream that was current when the source was opened. A source is used by
        one thread. Raises KeyError for a name that is not there, CheckpointError for a file that cannot be read.
        """


class CheckpointSource:
    """A TensorSource over a checkpoint's files; on a GPU they are read ahead, in published order."""

    def __init__(
        self,
        files: CheckpointFiles,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ahead: ReadAhead | None,
        progress: Progress | None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.shapes = {name: info.shape for name, info in files.tensors.items() if not name.endswith(SCALE_SUFFIX)}
        self.num_elements = sum(math.prod(shape) for shape in self.shapes.values())
        self._files = files
        self._ahead = ahead
        self._progress = progress
        self._unread = set(files.tensors)
        self._bytes_read = 0

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str, dtype: torch.dtype | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """See TensorSource.tensor."""
        dtype = out.dtype if out is not None else dtype or self.dtype
        stored = self._stored(name)
        if stored.dtype == torch.float8_e4m3fn:
            assert self.config.fp8_block_size is not None
            scale = self._stored(name + SCALE_SUFFIX)
            stored = kernels.fp8_block_dequantize(stored, scale, self.config.fp8_block_size, dtype)
        if name.endswith("e_score_correction_bias") and not bool(stored.isfinite().all()):
            raise CheckpointError(
                f"{self._files.tensors[name].file}: tensor {name!r} holds values that are not finite, and no expert could "
                "be chosen by it; download the file again."
            )
        if out is not None:
            return out.copy_(stored)
        # What the files give themselves is a view of a mapping, so it is copied in any case.
        return stored.to(device=self.device, dtype=dtype, copy=self._ahead is None)

    def _stored(self, name: str) -> torch.Tensor:
        stored = self._files.read(name) if self._ahead is None else self._ahead.take(name)
        if name in self._unread:
            self._unread.remove(name)
            self._bytes_read += self._files.tensors[name].num_bytes
        if self._progress is not None:
            self._progress(self._bytes_read, self._files.num_bytes)
        return stored


@contextmanager
def open_source(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "safetensors",
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[TensorSource]:
    """The tensors of the checkpoint folder `path`, or with `load_format` "dummy" random ones in the shape that its
    config.json asks for, a function of `seed`.

    Everything that can be wrong with a checkpoint is found before its weights are read. Raises CheckpointError, naming
    file, tensor and cure.
    """
    path = Path(path)
    config = load_config(path)
    if load_format == "dummy":
        check_tokenizer(path, config.vocab_size)
        yield RandomWeights(config, seed=seed, dtype=dtype, device=device, progress=progress)
        return
    with CheckpointFiles(path) as files:
        config = dataclasses.replace(config, num_mtp_layers=check_tensors(files, config))
        check_tokenizer(path, config.vocab_size)
        if device.type == "cpu":
            yield CheckpointSource(files, config, dtype=dtype, device=device, ahead=None, progress=progress)
            return
        with ReadAhead(files, published_order(files, config), device) as ahead:
            yield CheckpointSource(files, config, dtype=dtype, device=device, ahead=ahead, progress=progress)


def published_order(files: CheckpointFiles, config: ModelConfig) -> list[str]:
    """The names in `files`, layer after layer, each FP8 weight before its scales; what no builder asks for is left
    out."""
    shapes = main_tensors(config)
    for depth in range(config.num_mtp_layers):
        needed, optional = mtp_tensors(config, depth)
        shapes |= needed | optional
    names = (part for name in shapes for part in (name, name + SCALE_SUFFIX))
    return [name for name in names if name in files.tensors]
