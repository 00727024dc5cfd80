"""Where the device's memory goes: how many blocks the KV cache gets, and the ledger of the rest."""

from __future__ import annotations

import os
from dataclasses import dataclass

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


def plan_cpu_cache(
    *, block_bytes: int, max_num_seqs: int, max_model_len: int, is_len_fixed: bool, kv_cache_bytes: int
) -> CachePlan:
    """Blocks for a CPU: what `max_num_seqs` histories of `max_model_len` need, but no more than 1 GiB; or
    `kv_cache_bytes`, where it is not 0.

    Where one longest history does not fit, `max_model_len` is lowered to what does, unless it was fixed by the user:
    then ConfigError.
    """
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    if kv_cache_bytes:
        num_blocks = kv_cache_bytes // block_bytes
    else:
        num_blocks = min(max_num_seqs * per_sequence, CPU_KV_CACHE_BYTES // block_bytes)
    if num_blocks >= per_sequence:
        return CachePlan(num_blocks=num_blocks, max_model_len=max_model_len)
    fits = num_blocks * BLOCK_SIZE
    needed = per_sequence * block_bytes
    if num_blocks == 0 or is_len_fixed:
        raise ConfigError(
            f"a history of {max_model_len} tokens needs {needed} bytes of KV cache and there are "
            f"{kv_cache_bytes or CPU_KV_CACHE_BYTES} (room for {fits} tokens): raise --kv-cache-bytes to {needed} or "
            f"lower --max-model-len to {max(fits, 2)}",
            field="kv_cache_bytes",
        )
    return CachePlan(num_blocks=num_blocks, max_model_len=fits)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def total_bytes() -> int:
    """Memory of this machine; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
