"""Where the device's memory goes: how many blocks the KV cache gets, and the ledger of the rest."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import ConfigError

CPU_KV_CACHE_BYTES = 1 << 30
"""What the KV cache takes on a CPU at most, where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    num_blocks: int
    max_model_len: int  # what was asked for, or what fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes, measured."""

    weights: int
    workspace: int
    kv_cache: int

    def lines(self) -> list[str]:
        entries = (("weights", self.weights), ("workspace", self.workspace), ("KV cache, when full", self.kv_cache))
        return [f"{name:<20} {size / 2**20:>10,.1f} MiB" for name, size in entries]


def plan_cache(
    *,
    block_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    is_len_fixed: bool,
    kv_cache_bytes: int,
    memory_bytes: int,
) -> CachePlan:
    """Blocks of the cache: what `max_num_seqs` histories of `max_model_len` need, but no more than `memory_bytes`; or
    `kv_cache_bytes`, where it is not 0.

    Where one longest history does not fit, `max_model_len` is lowered to what does, unless it was fixed by the user:
    then ConfigError.
    """
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    if kv_cache_bytes:
        num_blocks = kv_cache_bytes // block_bytes
    else:
        num_blocks = min(max_num_seqs * per_sequence, memory_bytes // block_bytes)
    if num_blocks >= per_sequence:
        return CachePlan(num_blocks=num_blocks, max_model_len=max_model_len)
    fits = num_blocks * BLOCK_SIZE
    needed = per_sequence * block_bytes
    if num_blocks == 0 or is_len_fixed:
        raise ConfigError(
            f"a history of {max_model_len} tokens needs {needed} bytes of KV cache and there are "
            f"{kv_cache_bytes or memory_bytes} (room for {fits} tokens): raise --kv-cache-bytes to {needed} or "
            f"lower --max-model-len to {max(fits, 2)}",
            field="kv_cache_bytes",
        )
    return CachePlan(num_blocks=num_blocks, max_model_len=fits)


def cache_memory(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes the KV cache may take: 1 GiB on a CPU; on a GPU what is left, after the weights, of the share that the
    process may use, less a tenth of the share for the steps' own memory."""
    if device.type == "cpu":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    share = total * gpu_memory_utilization
    return max(int(share - (total - free) - 0.1 * share), 0)


def used_bytes(device: torch.device) -> int:
    """Memory that this process has taken of the device."""
    return resident_bytes() if device.type == "cpu" else torch.cuda.memory_reserved(device)


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
