"""The core's counters as Prometheus metrics, taken over from time to time and never for a single token."""

from __future__ import annotations

from collections import Counter

from rorqual.telemetry import Telemetry

from .stats import CoreStats, Occupancy


class CoreMetrics:
    """Adds to each metric what has changed since the last time."""

    def __init__(self, telemetry: Telemetry) -> None:
        metric = telemetry.metric
        self._running = metric("scheduler_running_sequences")
        self._waiting = metric("scheduler_waiting_sequences")
        self._blocks = metric("scheduler_kv_blocks")
        self._preemptions = metric("scheduler_preemptions_total")
        self._prefix_tokens = metric("scheduler_prefix_cache_tokens_total")
        self._queue_time = metric("scheduler_queue_time_seconds")
        self._tokens = metric("scheduler_generated_tokens_total")
        self._executors = metric("scheduler_executors")
        self._paused = metric("scheduler_paused_sequence_steps_total")
        self._finished = metric("scheduler_finished_total")
        self._seen = CoreStats()

    def update(self, stats: CoreStats, occupancy: Occupancy) -> None:
        seen = self._seen
        self._running.set(occupancy.num_running)
        self._waiting.set(occupancy.num_waiting)
        self._executors.set(occupancy.num_executors)
        held = occupancy.num_total_blocks - occupancy.num_free_blocks
        self._blocks.labels("free").set(occupancy.num_free_blocks)
        self._blocks.labels("used").set(held - occupancy.num_granted_unwritten_blocks)
        self._blocks.labels("granted").set(occupancy.num_granted_unwritten_blocks)
        self._preemptions.inc(stats.num_preemptions - seen.num_preemptions)
        self._tokens.inc(stats.num_generated_tokens - seen.num_generated_tokens)
        self._paused.inc(stats.num_paused_steps - seen.num_paused_steps)
        self._prefix_tokens.labels("hit").inc(stats.num_cached_prompt_tokens - seen.num_cached_prompt_tokens)
        self._prefix_tokens.labels("miss").inc(stats.num_computed_prompt_tokens - seen.num_computed_prompt_tokens)
        for reason, count in stats.num_finished.items():
            self._finished.labels(reason).inc(count - seen.num_finished[reason])
        for seconds in stats.queue_times_s:
            self._queue_time.observe(seconds)
        stats.queue_times_s.clear()
        self._seen = CoreStats(
            num_preemptions=stats.num_preemptions,
            num_generated_tokens=stats.num_generated_tokens,
            num_cached_prompt_tokens=stats.num_cached_prompt_tokens,
            num_computed_prompt_tokens=stats.num_computed_prompt_tokens,
            num_paused_steps=stats.num_paused_steps,
            num_finished=Counter(stats.num_finished),
        )
