"""The compiled library: finding it, checking its ABI, calling it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from rorqual.core.errors import ConfigError, InternalError

ABI_VERSION = 7  # RORQUAL_ABI_VERSION of csrc/include/rorqual/abi.h
DEFAULT_PATH = Path(__file__).resolve().parents[2] / "build" / "librorqual_kernels.so"

_EINVAL = -1


class KernelLibraryError(ConfigError):
    """The compiled kernels are missing, or are not the ones this code was written for."""

    reason = "KERNELS_UNAVAILABLE"


class KernelCallError(InternalError):
    """A kernel refused its arguments, or could not be launched."""

    reason = "KERNEL_CALL_FAILED"


class KernelLibrary:
    """One loaded librorqual_kernels.so.

    Every function of it takes a pointer to a struct of arguments and a stream, and returns 0 or a code
    whose text `rorqual_last_error` holds.
    """

    def __init__(self, path: Path = DEFAULT_PATH) -> None:
        if not path.is_file():
            raise KernelLibraryError(
                f"no compiled kernels at {path}: run `make kernels` (needs nvcc), or use --device cpu",
                metadata={"path": str(path)},
            )
        try:
            library = ctypes.CDLL(str(path))
            version_of = library.rorqual_abi_version
        except (OSError, AttributeError) as error:
            raise KernelLibraryError(
                f"{path} is not a library of Rorqual's kernels ({error}): run `make kernels` again",
                metadata={"path": str(path)},
            ) from error
        version_of.restype = ctypes.c_int
        version_of.argtypes = []
        version = version_of()
        if version != ABI_VERSION:
            raise KernelLibraryError(
                f"{path} has ABI version {version}, this code needs {ABI_VERSION}: run `make kernels` again",
                metadata={"path": str(path), "found": str(version), "needed": str(ABI_VERSION)},
            )
        library.rorqual_last_error.restype = ctypes.c_char_p
        library.rorqual_last_error.argtypes = []
        self.path = path
        self._library = library
        self._functions: dict[str, ctypes._NamedFuncPointer] = {}

    def address(self, name: str) -> int:
        """Where the function `name` is, for structs that point to functions."""
        return ctypes.cast(self._function(name), ctypes.c_void_p).value or 0

    def call(self, name: str, args: ctypes.Structure, stream: int) -> None:
        """Launch `name` on `stream` (a cudaStream_t as an integer). Raises KernelCallError."""
        code = self._function(name)(ctypes.addressof(args), stream)
        if code != 0:
            text = self._library.rorqual_last_error().decode(errors="replace")
            kind = "refused its arguments" if code == _EINVAL else f"failed with CUDA error {code}"
            raise KernelCallError(f"{name} {kind}: {text}", metadata={"code": str(code)})

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        function = self._functions.get(name)
        if function is None:
            function = getattr(self._library, name)
            function.restype = ctypes.c_int
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            self._functions[name] = function
        return function


@functools.cache
def load(path: Path = DEFAULT_PATH) -> KernelLibrary:
    """The library at `path`, loaded once a process."""
    return KernelLibrary(path)


def current_stream(device: torch.device) -> int:
    """torch's current stream on `device`, as the integer that the C interface takes."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
