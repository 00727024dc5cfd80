"""Checks of tensor arguments, with messages that print both sides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Size = int | None  # None: any


def check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    *,
    contiguous_dims: int = 1,
) -> None:
    """Raise ValueError unless `tensor` has the shape, dtype and device, and its last dims lie contiguously."""
    if tensor.dim() != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name}: needs shape {wanted}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: needs {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: needs to be on {device}, is on {tensor.device}")
    expected = 1
    for dim in range(tensor.dim() - 1, tensor.dim() - 1 - contiguous_dims, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected and tensor.numel():
            raise ValueError(
                f"{name}: its last {contiguous_dims} dimensions must be contiguous, got strides {tensor.stride()}"
            )
        expected *= tensor.shape[dim]
