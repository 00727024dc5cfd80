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
    """Raise ValueError unless `tensor` has the shape, dtype and device, and its last dims lie contiguously.

    (A step makes hundreds of calls of kernels, and each several checks: what is right must pass in about a
    microsecond, so that the fault is only looked for once there is one.)
    """
    have = tensor.shape
    if tensor.dtype is dtype and len(have) == len(shape) and tensor.device == device:
        strides = tensor.stride()
        expected = 1
        for dim in range(len(have) - 1, -1, -1):
            size = have[dim]
            if shape[dim] is not None and size != shape[dim]:
                break
            if len(have) - dim <= contiguous_dims:
                if strides[dim] != expected and size > 1:
                    break
                expected *= size
        else:
            return
        if tensor.numel() == 0 and all(want is None or want == size for want, size in zip(shape, have, strict=True)):
            return
    _raise(name, tensor, shape, dtype, device, contiguous_dims)


def _raise(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    contiguous_dims: int,
) -> None:
    if tensor.dim() != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name}: needs shape {wanted}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: needs {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: needs to be on {device}, is on {tensor.device}")
    raise ValueError(f"{name}: its last {contiguous_dims} dimensions must be contiguous, got strides {tensor.stride()}")
