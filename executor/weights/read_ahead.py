"""Brings a checkpoint's tensors to a device before they are asked for: threads, pinned buffers, streams."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rorqual.core.errors import CheckpointError

from .files import CheckpointFiles, TensorInfo

NUM_THREADS = 4
BUFFER_BYTES = 8 << 20
"""One of a thread's two pinned buffers: while one is copied to the device, the file fills the other.

Measured on an H200's machine, 6.6 GB in the page cache: 9.8 GB/s with four threads of 2 x 8 MiB, 9.2 with 2 x 32 MiB,
10.1 with eight threads, 3.0 with one; copying straight out of the mapping 4.4.
"""
AHEAD_BYTES = 2 << 30
"""Tensors on the device that nobody has asked for yet, at most; above the experts of one layer, which a builder takes
in another order than files hold them."""

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(slots=True)
class _Landed:
    """A tensor whose copy to the device has at least been queued."""

    tensor: torch.Tensor
    copied: torch.cuda.Event | None


class ReadAhead:
    """Tensors of `files` on `device`, as stored, read in `order` by threads ahead of `take`.

    Each thread reads a piece of a file into a pinned buffer and queues its copy to the device on a stream of its own.
    (preadv, not a mapping: measured from the page cache, one thread, 4.3 to 4.8 GB/s against 2.8 to 4.0 out of a
    fresh mapping, and a file cut short meanwhile is an error, not a SIGBUS.) Host memory is `num_threads` times two
    buffers, whatever the checkpoint's size. A tensor that is asked for out of turn goes first. On a CPU the same
    threads fill ordinary memory, so the tests need no GPU.

    Use as a context manager: leaving it ends the threads, and drops what was not taken.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        order: Iterable[str],
        device: torch.device,
        *,
        num_threads: int = NUM_THREADS,
        buffer_bytes: int = BUFFER_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`order`: names in `files`. Tensors belong to the stream that is current here, where `take` must be called."""
        self._files = files
        self._device = device
        self._consumer = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._buffer_bytes = buffer_bytes
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._waiting: OrderedDict[str, None] = OrderedDict.fromkeys(order)
        self._wanted: str | None = None  # asked for, and neither read nor being read
        self._in_flight: set[str] = set()
        self._landed: dict[str, _Landed] = {}
        self._bytes_ahead = 0  # of tensors in flight or landed
        self._error: BaseException | None = None
        self._closed = False
        self._fds: dict[Path, int] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._landed.clear()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def take(self, name: str) -> torch.Tensor:
        """The tensor, ready for the consumer's stream. It is the caller's, and is read again if it is asked for again.

        Raises CheckpointError, naming file and tensor, where the file cannot be read.
        """
        with self._changed:
            if name not in self._landed and name not in self._in_flight:
                self._wanted = name
                self._waiting.pop(name, None)
                self._changed.notify_all()
            self._changed.wait_for(lambda: name in self._landed or self._error is not None)
            if self._error is not None:
                raise self._error
            landed = self._landed.pop(name)
            self._bytes_ahead -= self._files.tensors[name].num_bytes
            self._changed.notify_all()
        if landed.copied is not None and self._consumer is not None:
            self._consumer.wait_event(landed.copied)
        return landed.tensor

    def _run(self) -> None:
        try:
            lane = _Lane(self._device, self._buffer_bytes, self._consumer)
            try:
                while (info := self._next()) is not None:
                    landed = lane.read(info, self._fd(info.file))
                    with self._changed:
                        self._in_flight.discard(info.name)
                        self._landed[info.name] = landed
                        self._changed.notify_all()
            finally:
                lane.drain()
        except BaseException as error:  # raised where the tensor is taken
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self) -> TensorInfo | None:
        """The next tensor to read, once there is room for it; None when all is done."""
        with self._changed:
            while True:
                if self._closed or self._error is not None:
                    return None
                if self._wanted is not None:
                    name, self._wanted = self._wanted, None
                    return self._start(name)
                if self._waiting:
                    name = next(iter(self._waiting))
                    size = self._files.tensors[name].num_bytes
                    if self._bytes_ahead == 0 or self._bytes_ahead + size <= self._ahead_bytes:
                        del self._waiting[name]
                        return self._start(name)
                self._changed.wait()

    def _start(self, name: str) -> TensorInfo:
        info = self._files.tensors[name]
        self._in_flight.add(name)
        self._bytes_ahead += info.num_bytes
        return info

    def _fd(self, file: Path) -> int:
        with self._changed:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{file}: cannot be read ({error}).") from error
            return self._fds[file]


class _Lane:
    """One thread's way to the device: two buffers and a stream."""

    def __init__(self, device: torch.device, buffer_bytes: int, consumer: torch.cuda.Stream | None) -> None:
        self._device = device
        self._consumer = consumer
        self._stream = torch.cuda.Stream(device) if consumer is not None else None  # type: ignore[no-untyped-call]
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=self._stream is not None) for _ in range(2)
        ]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        self._emptied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def read(self, info: TensorInfo, fd: int) -> _Landed:
        """Queue the copies of one tensor, piece by piece; returns before the last has arrived."""
        # Allocated for the consumer's stream, so the copies wait for what that stream still does with this memory.
        if self._stream is not None and self._consumer is not None:
            with torch.cuda.stream(self._consumer):
                tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device=self._device)
            self._stream.wait_stream(self._consumer)
        else:
            tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        out = tensor.view(-1).view(torch.uint8)
        piece_bytes = len(self._views[0])
        for start in range(0, info.num_bytes, piece_bytes):
            size = min(piece_bytes, info.num_bytes - start)
            turn = self._turn
            self._turn = 1 - turn
            emptied = self._emptied[turn]
            if emptied is not None:
                emptied.synchronize()
            _fill(self._views[turn][:size], fd, info, start)
            piece = self._buffers[turn][:size]
            if self._stream is None:
                out[start : start + size].copy_(piece)
                continue
            with torch.cuda.stream(self._stream):
                out[start : start + size].copy_(piece, non_blocking=True)
                self._emptied[turn] = self._stream.record_event()
        return _Landed(tensor, None if self._stream is None else self._stream.record_event())

    def drain(self) -> None:
        """Wait for the last copies: the buffers may go."""
        if self._stream is not None:
            self._stream.synchronize()


def _fill(view: memoryview, fd: int, info: TensorInfo, start: int) -> None:
    """Read bytes [start, start + len(view)) of a tensor."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], info.offset + start + done)
        except OSError as error:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} cannot be read ({error}).") from error
        if count == 0:
            raise CheckpointError(
                f"{info.file}: ended within tensor {info.name!r} while it was read; the file was changed: "
                "download it again."
            )
        done += count
