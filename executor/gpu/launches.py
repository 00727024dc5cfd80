"""A layer's launches, recorded while the first layer of its kind runs and repeated for the others.

Layers of one kind differ in nothing but the addresses of their weights and cache. To check arguments and fill structs
anew for each costs the host some 25 us a launch, 11 ms a step of V2-Lite. What was recorded is repeated for all layers by
one call, which changes the addresses and launches, and during which the interpreter is free for other threads. A later
step of the same sizes needs no recording.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from rorqual.kernels.abi import Launch, OwnPointer, RunLayersArgs
from rorqual.kernels.loader import KernelLibrary

Pointers = Sequence[torch.Tensor | None]


class OwnTensors:
    """What each layer has to itself, in an order that is the same for all: rows of addresses, as the library reads
    them."""

    def __init__(self, layers: Sequence[Pointers]) -> None:
        self.layers = layers
        self.width = max(len(own) for own in layers)
        addresses = [0 if i >= len(own) else _address(own[i]) for own in layers for i in range(self.width)]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)

    def row(self, layer_idx: int) -> int:
        """The address of a layer's row."""
        return ctypes.addressof(self._addresses) + layer_idx * self.width * ctypes.sizeof(ctypes.c_void_p)


class LayerLaunches(KernelLibrary):
    """A library that passes calls on and keeps them. One for each part of a layer and step."""

    def __init__(self, library: KernelLibrary, own: OwnTensors, layer_idx: int) -> None:
        """`layer_idx`: the layer whose launches are recorded."""
        self._inner = library
        self._index = {tensor.data_ptr(): i for i, tensor in enumerate(own.layers[layer_idx]) if tensor is not None}
        self.parts: list[_Launches | Callable[[Pointers], None]] = []
        self.num_launches = 0

    def call(self, name: str, args: ctypes.Structure, stream: int) -> None:
        """Launch and record."""
        self._inner.call(name, args, stream)
        if not self.parts or not isinstance(self.parts[-1], _Launches):
            self.parts.append(_Launches())
        self.parts[-1].add(self._inner.address(name), args, stream, self._index)  # type: ignore[union-attr]
        self.num_launches += 1

    def record(self, step: Callable[[Pointers], None]) -> None:
        """Something else that was just done for this layer, as a function of a layer's tensors."""
        self.parts.append(step)

    def index_of(self, tensor: torch.Tensor) -> int:
        """Of one of the layer's own tensors."""
        return self._index[tensor.data_ptr()]


class LayerProgram:
    """What was recorded for the parts of one layer, to be done for any of its kind, and again in later steps."""

    def __init__(self, library: KernelLibrary, own: OwnTensors, recorded: Sequence[LayerLaunches]) -> None:
        self._library = library
        self._own = own
        self._parts: list[_Launches | Callable[[Pointers], None]] = []
        for part in (part for launches in recorded for part in launches.parts):
            if isinstance(part, _Launches) and self._parts and isinstance(self._parts[-1], _Launches):
                self._parts[-1] = self._parts[-1].followed_by(part)
            else:
                self._parts.append(part)

    def run(self, start: int, end: int) -> None:
        """For the layers [start, end), in turn."""
        if len(self._parts) == 1 and isinstance(self._parts[0], _Launches):
            self._parts[0].run(self._library, self._own, start, end)
            return
        for layer_idx in range(start, end):
            for part in self._parts:
                if isinstance(part, _Launches):
                    part.run(self._library, self._own, layer_idx, layer_idx + 1)
                else:
                    part(self._own.layers[layer_idx])


class _Launches:
    """Launches that follow one another, with what a layer changes in them."""

    def __init__(self) -> None:
        self._launches: list[tuple[int, int, int]] = []  # addresses of function and arguments; stream
        self._own: list[tuple[int, int]] = []  # address of a field; index of the layer's tensor whose address it takes
        self._args: list[ctypes.Structure] = []  # kept alive
        self._arrays: tuple[ctypes.Array[Launch], ctypes.Array[OwnPointer]] | None = None  # the same for C

    def add(self, function: int, args: ctypes.Structure, stream: int, index: dict[int, int]) -> None:
        start = ctypes.addressof(args)
        self._launches.append((function, start, stream))
        self._args.append(args)
        for name in _pointer_fields(type(args)):
            at = index.get(getattr(args, name) or 0)
            if at is not None:
                self._own.append((start + getattr(type(args), name).offset, at))

    def followed_by(self, other: _Launches) -> _Launches:
        both = _Launches()
        both._launches = self._launches + other._launches
        both._own = self._own + other._own
        both._args = self._args + other._args
        return both

    def run(self, library: KernelLibrary, own: OwnTensors, start: int, end: int) -> None:
        if self._arrays is None:
            self._arrays = (
                (Launch * len(self._launches))(*(Launch(*launch) for launch in self._launches)),
                (OwnPointer * len(self._own))(*(OwnPointer(*pointer) for pointer in self._own)),
            )
        launches, own_pointers = self._arrays
        args = RunLayersArgs(
            launches=ctypes.addressof(launches),
            own_pointers=ctypes.addressof(own_pointers),
            pointers=own.row(start),
            num_launches=len(launches),
            num_own_pointers=len(own_pointers),
            num_layers=end - start,
            num_pointers=own.width,
        )
        library.call("rorqual_run_layers", args, 0)


_POINTER_FIELDS: dict[type[ctypes.Structure], list[str]] = {}


def _pointer_fields(struct: type[ctypes.Structure]) -> list[str]:
    names = _POINTER_FIELDS.get(struct)
    if names is None:
        names = _POINTER_FIELDS[struct] = [name for name, kind, *_ in struct._fields_ if kind is ctypes.c_void_p]
    return names


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
