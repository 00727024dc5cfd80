"""What the host tells the device before a step, packed into one pinned buffer and one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class StepUpload:
    """A few pinned buffers in turn, and the device memory that they are copied to.

    A buffer is written again only `num_buffers` steps later; by then the caller has waited for the step that it was
    copied for. The device has one copy: the stream orders its uses.
    """

    def __init__(self, num_words: int, num_buffers: int, device: torch.device) -> None:
        self.num_words = num_words
        pinned = device.type == "cuda"
        self._host = [torch.empty(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(num_buffers)]
        self._device = torch.empty(num_words, dtype=torch.int32, device=device)
        self._turn = 0
        self._used = 0
        self._words: npt.NDArray[np.int32] = self._host[0].numpy()

    def begin(self) -> None:
        """The next step's buffer, empty."""
        self._turn = (self._turn + 1) % len(self._host)
        self._words = self._host[self._turn].numpy()
        self._used = 0

    def reserve(self, num_words: int) -> tuple[npt.NDArray[np.int32], int]:
        """Room for int32 words, 16-byte aligned: the words to write, and where they will be on the device."""
        start = -(-self._used // 4) * 4
        if start + num_words > self.num_words:
            raise ValueError(f"a step's upload has room for {self.num_words} words, {start + num_words} are wanted")
        self._used = start + num_words
        return self._words[start : start + num_words], start

    def put(self, values: npt.NDArray[Any]) -> int:
        """Copy int32 or int64 values in; returns where they will be, for `view`."""
        words, start = self.reserve(values.size * values.itemsize // 4)
        words[:] = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        return start

    def send(self) -> None:
        """Copy what was put to the device, on the current stream."""
        if self._used:
            self._device[: self._used].copy_(self._host[self._turn][: self._used], non_blocking=True)

    def view(self, start: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """`count` values of int32 or int64 at `start`, on the device."""
        num_words = count * dtype.itemsize // 4
        return self._device[start : start + num_words].view(dtype)
