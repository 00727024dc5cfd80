"""Where the device's memory goes: how many blocks the KV cache gets, and the ledger of the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import ConfigError

CPU_KV_CACHE_BYTES = 1 << 30
"""What the KV cache takes on a CPU at most, where nobody says otherwise."""
TOLERANCE = 0.02
"""Share of what the driver says this process holds by which the ledger's sum may differ from it."""

Entry = Literal["context", "weights", "workspace", "graphs", "kv_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    num_blocks: int
    max_model_len: int  # what was asked for, or what fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes, measured."""

    weights: int
    workspace: int  # the worst step's activations and the steps' state
    kv_cache: int
    graphs: int = 0
    context: int = 0  # the device context and its libraries
    other: int = 0  # held by the allocator beyond the entries above
    device_used: int = 0  # by this process, as the driver counts; 0: not known

    @property
    def total(self) -> int:
        return self.context + self.weights + self.workspace + self.graphs + self.kv_cache + self.other

    @property
    def is_true(self) -> bool:
        """Whether the entries add up to what the driver shows, within TOLERANCE; True where it shows nothing."""
        return abs(self.total - self.device_used) <= TOLERANCE * self.device_used or self.device_used == 0

    def lines(self) -> list[str]:
        entries = [("weights", self.weights), ("workspace", self.workspace)]
        if self.device_used:
            entries = [("context", self.context), *entries, ("graphs", self.graphs), ("KV cache", self.kv_cache)]
            entries += [("other", self.other), ("sum", self.total), ("the driver shows", self.device_used)]
        else:
            entries.append(("KV cache, when full", self.kv_cache))
        return [f"{name:<20} {size / 2**20:>10,.1f} MiB" for name, size in entries]


class MemoryMeter:
    """Fills a ledger while an executor starts: what was taken since the last `close` belongs to the entry closed.

    `reserved`: bytes that the allocator has taken of the device; `held`: bytes that the driver counts for this
    process, 0 where it does not tell. Made when the allocator holds nothing yet.
    """

    def __init__(self, reserved: Callable[[], int], held: Callable[[], int]) -> None:
        self._reserved, self._held = reserved, held
        self._marked_reserved, self._marked_held = reserved(), held()
        self._entries: dict[Entry, int] = {"context": max(self._marked_held - self._marked_reserved, 0)}

    @classmethod
    def of(cls, device: torch.device) -> MemoryMeter:
        """On a GPU this makes the context. Call it before anything else does: where the driver counts no single
        processes, what the device held before is taken for other processes'."""
        if device.type == "cpu":
            resident = resident_bytes()
            return cls(lambda: resident_bytes() - resident, lambda: 0)
        held = held_on(device)
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)
        torch.cuda.empty_cache()
        return cls(lambda: torch.cuda.memory_reserved(device), held)

    @property
    def held(self) -> int:
        """Bytes of the device that this process holds now, as the driver counts; 0: not known."""
        return self._held()

    def close(self, entry: Entry, num_bytes: int | None = None) -> int:
        """All that was taken since the last entry was closed is this one's (`num_bytes` says better where memory is
        taken later, when it is written). Returns its bytes.

        Graphs hold memory that the allocator does not see, so theirs is the driver's difference where it is larger.
        """
        reserved, held = self._reserved(), self._held()
        taken = reserved - self._marked_reserved
        if entry == "graphs":
            taken = max(taken, held - self._marked_held)
        self._marked_reserved, self._marked_held = reserved, held
        self._entries[entry] = max(taken, 0) if num_bytes is None else num_bytes
        return self._entries[entry]

    def ledger(self) -> Ledger:
        """The entries closed so far; what the allocator took since is `other`."""
        get = self._entries.get
        held = self._held()
        return Ledger(
            context=get("context", 0),
            weights=get("weights", 0),
            workspace=get("workspace", 0),
            graphs=get("graphs", 0),
            kv_cache=get("kv_cache", 0),
            other=max(self._reserved() - self._marked_reserved, 0) if held else 0,
            device_used=held,
        )


def held_on(device: torch.device) -> Callable[[], int]:
    """A function that tells how many bytes of a GPU this process holds, as the driver counts them.

    NVML's figure for this process; where it knows none (another PID namespace), what the whole device holds more than
    now. Without NVML what the device holds, as if nobody else used it.
    """
    before = _device_used(device)

    def held() -> int:
        own = _process_used(device)
        if own is not None:
            return own
        used = _device_used(device)
        if used is None or before is None:
            free, total = torch.cuda.mem_get_info(device)
            return total - free
        return max(used - before, 0)

    return held


def _device_used(device: torch.device) -> int | None:
    """Of the whole device, without making a context on it."""
    try:
        return torch.cuda.device_memory_used(device.index or 0)
    except Exception:  # NVML's own errors, or no NVML: a figure less, no reason to stop
        return None


def nvml_index(device: torch.device) -> int:
    """NVML's number of a device, which CUDA_VISIBLE_DEVICES does not change."""
    index: int = torch.cuda._get_nvml_device_index(device.index or 0)
    return index


def _process_used(device: torch.device) -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(nvml_index(device))
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:  # as above
        return None
    used: list[int | None] = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return used[0] if used else None


def kv_cache_room(*, total_bytes: int, utilization: float, held_bytes: int, free_bytes: int, to_come_bytes: int) -> int:
    """Bytes the KV cache may take of a GPU: the share `utilization` of its memory, less what this process holds after
    a measured worst-case step and what it will still take (`to_come_bytes`: graphs); never more than is free. Pure.
    """
    return max(min(int(total_bytes * utilization) - held_bytes, free_bytes) - to_come_bytes, 0)


def plan_cache(
    *,
    block_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    is_len_fixed: bool,
    kv_cache_bytes: int,
    memory_bytes: int,
    takes_all: bool = False,
) -> CachePlan:
    """Blocks of the cache: what `max_num_seqs` histories of `max_model_len` need, but no more than `memory_bytes`
    (`takes_all`: all of it, for cached prefixes); or `kv_cache_bytes`, where it is not 0.

    Where one longest history does not fit, `max_model_len` is lowered to what does, unless it was fixed by the user:
    then ConfigError. Pure.
    """
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    num_blocks = (kv_cache_bytes or memory_bytes) // block_bytes
    if not kv_cache_bytes and not takes_all:
        num_blocks = min(max_num_seqs * per_sequence, num_blocks)
    if num_blocks >= per_sequence:
        return CachePlan(num_blocks=num_blocks, max_model_len=max_model_len)
    fits = num_blocks * BLOCK_SIZE
    needed = per_sequence * block_bytes
    there = f"there are {kv_cache_bytes or memory_bytes}"
    if num_blocks == 0:
        cure = f"raise --kv-cache-bytes to {needed}, or to {block_bytes} at least, for histories of {BLOCK_SIZE}"
        if takes_all and not kv_cache_bytes:
            cure = "raise --gpu-memory-utilization, lower --max-num-batched-tokens, or end what else runs on the device"
        raise ConfigError(
            f"one block of {BLOCK_SIZE} tokens takes {block_bytes} bytes of KV cache, a history of {max_model_len} "
            f"tokens {needed}, and {there}: {cure}",
            field="kv_cache_bytes",
        )
    if is_len_fixed:
        raise ConfigError(
            f"a history of {max_model_len} tokens needs {needed} bytes of KV cache and {there} (room for {fits} "
            f"tokens): raise --kv-cache-bytes to {needed} or lower --max-model-len to {fits}",
            field="kv_cache_bytes",
        )
    return CachePlan(num_blocks=num_blocks, max_model_len=fits)


def cache_memory(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes the KV cache may take before any step was measured: 1 GiB on a CPU; on a GPU what is left, after the
    weights, of the share that the process may use, less a tenth of the share for the steps' own memory."""
    if device.type == "cpu":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return kv_cache_room(
        total_bytes=total,
        utilization=gpu_memory_utilization,
        held_bytes=total - free,
        free_bytes=free,
        to_come_bytes=int(0.1 * gpu_memory_utilization * total),
    )


def device_name(device: torch.device) -> str:
    """As its vendor prints it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def total_bytes(device: torch.device) -> int:
    """Memory of the device; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
