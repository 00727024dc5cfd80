"""What goes wrong with one sequence, as against what ends a whole step loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rorqual.kernels.loader import KernelCallError

from .errors import OrderError
from .reports import INTERNAL

_NOBODYS_ALONE = (
    OrderError,  # accounts that do not add up end the link
    KernelCallError,
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
)


class SequenceError(Exception):
    """Ends one sequence. `str(error)` says what was found, `reason` (of executor_pb2.SequenceFault) whose fault it is."""

    def __init__(self, message: str, *, reason: str = INTERNAL) -> None:
        super().__init__(message)
        self.reason = reason


def ends_the_loop(error: Exception) -> bool:
    """Whether an error that was met in handling one sequence concerns them all: the device's state is lost, its memory
    spent, or an order cannot be obeyed."""
    # (An error of CUDA's libraries is a plain RuntimeError.)
    return isinstance(error, _NOBODYS_ALONE) or (isinstance(error, RuntimeError) and "CUDA" in str(error))


@contextmanager
def contained(errors: dict[int, Exception], row: int) -> Iterator[None]:
    """What is done here is for one row of a step alone: an error in it goes to `errors`, and is not raised."""
    try:
        yield
    except Exception as error:
        if ends_the_loop(error):
            raise
        errors[row] = error
