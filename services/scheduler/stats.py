"""Counters of the core, added up as it works; telemetry takes their differences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CoreStats:
    """Totals since start."""

    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # at first admission
    num_computed_prompt_tokens: int = 0
    num_prefix_misses: Counter[str] = field(default_factory=Counter)  # by reason, a first admission each
    num_paused_steps: int = 0  # sequence-steps that waited for an Extend
    num_finished: Counter[str] = field(default_factory=Counter)  # by reason
    queue_times_s: list[float] = field(default_factory=list)  # since telemetry took them last


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the scheduler is now."""

    num_executors: int
    num_running: int
    num_waiting: int
    num_total_blocks: int
    num_free_blocks: int
    num_granted_unwritten_blocks: int
