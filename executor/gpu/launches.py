"""A layer's launches, recorded while the first layer of its kind runs and repeated for the others.

Layers of one kind differ in nothing but the addresses of their weights and cache. To check arguments and fill structs
anew for each costs the host some 25 us a launch, 11 ms a step of V2-Lite; to repeat a recorded launch 3 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rorqual.kernels.loader import KernelLibrary

Pointers = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Launch:
    name: str
    args: ctypes.Structure
    stream: int
    changes: list[tuple[str, int]]  # field of args, index of the layer's tensor whose address it takes


class LayerLaunches(KernelLibrary):
    """A library that passes calls on and keeps them. One for each kind of layer and step."""

    def __init__(self, library: KernelLibrary, own: Pointers) -> None:
        """`own`: the tensors of the recorded layer that are another layer's own too, in a fixed order."""
        self._inner = library
        self._index = {tensor.data_ptr(): i for i, tensor in enumerate(own) if tensor is not None}
        self._steps: list[_Launch | Callable[[Pointers], None]] = []

    @property
    def num_launches(self) -> int:
        return len(self._steps)

    def call(self, name: str, args: ctypes.Structure, stream: int) -> None:
        """Launch and record."""
        self._inner.call(name, args, stream)
        changes = []
        for field, kind, *_ in args._fields_:
            if kind is ctypes.c_void_p:
                index = self._index.get(getattr(args, field) or 0)
                if index is not None:
                    changes.append((field, index))
        self._steps.append(_Launch(name, args, stream, changes))

    def record(self, step: Callable[[Pointers], None]) -> None:
        """Something else that was just done for this layer, as a function of a layer's tensors."""
        self._steps.append(step)

    def index_of(self, tensor: torch.Tensor) -> int:
        """Of one of the layer's own tensors."""
        return self._index[tensor.data_ptr()]

    def repeat(self, own: Pointers) -> None:
        """The same launches for the layer of these tensors."""
        call = self._inner.call
        for step in self._steps:
            if isinstance(step, _Launch):
                args = step.args
                for field, index in step.changes:
                    tensor = own[index]
                    assert tensor is not None
                    setattr(args, field, tensor.data_ptr())
                call(step.name, args, step.stream)
            else:
                step(own)
