"""Replay an arrival trace through the scheduler's core on virtual time; no GPU, no process, no real clock.

    rorqual simulate --trace poisson:rate=20,requests=2000 --executors 2
    rorqual simulate --trace chat:sessions=200,turns=5 --executors 4 --plot chat.png --json
    rorqual simulate --trace FILE.jsonl

Traces: poisson:, bursts:, flood:, chat:, agents: (name=value after the colon, an unknown name lists them), or a file in the
format of docs/scheduler.md. Steps take what `benchmarks/scheduler/h200-v2lite.json` says. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from services.scheduler.core import CoreConfig

from .executor_model import DEFAULT_MODEL, StepModel
from .simulator import Result, Simulation, SimulationConfig, with_limits
from .traces import TraceError, make_trace, write_trace


def percentiles(values: list[float], digits: int = 4) -> dict[str, float]:
    """Mean, p50, p90, p99 and the largest; zeros where there are none."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 0.0)
    ordered = sorted(values)
    at = {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 90, 99)}
    figures = {"mean": statistics.fmean(ordered), **at, "max": ordered[-1]}
    return {name: round(value, digits) for name, value in figures.items()}


def summary(result: Result, *, slo_ttft_s: float, slo_tpot_ms: float) -> dict[str, Any]:
    """The figures of a run. Goodput counts the requests that meet both limits; rates are per virtual second."""
    done = [outcome for outcome in result.outcomes if not outcome.error]
    good = sum(1 for o in done if o.ttft_s <= slo_ttft_s and 1e3 * o.tpot_s <= slo_tpot_ms)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    stats, duration_s = result.stats, max(result.duration_s, 1e-9)
    num_prompt = stats.num_cached_prompt_tokens + stats.num_computed_prompt_tokens
    errors = sorted({outcome.error for outcome in result.outcomes if outcome.error})
    waiting = [sample.num_waiting for sample in result.samples] or [0]
    shown = result.samples[:: max(1, len(result.samples) // 40)]
    return {
        "requests": len(result.outcomes) + result.num_skipped,
        "finished": len(done),
        "failed": {error: sum(1 for o in result.outcomes if o.error == error) for error in errors},
        "skipped": result.num_skipped,
        "duration_s": round(result.duration_s, 3),
        "output_tokens_per_s": round(num_output / duration_s, 1),
        "ttft_s": percentiles([outcome.ttft_s for outcome in done]),
        "tpot_ms": percentiles([1e3 * o.tpot_s for o in done if o.num_output_tokens > 1], 3),
        "slo": {"ttft_s": slo_ttft_s, "tpot_ms": slo_tpot_ms},
        "slo_share": round(good / max(1, len(result.outcomes)), 4),
        "goodput_rps": round(good / duration_s, 3),
        "prefix_hit_rate": round(stats.num_cached_prompt_tokens / max(1, num_prompt), 4),
        "prefix_misses": dict(sorted(stats.num_prefix_misses.items())),
        "preemptions": stats.num_preemptions,
        "paused_share": round(stats.num_paused_steps / max(1, stats.num_generated_tokens), 5),
        "executor_busy_share": round(result.busy_share, 4),
        "queue_depth": {
            "mean": round(statistics.fmean(waiting), 1),
            "max": max(waiting),
            "series": [[s.at_s, s.num_waiting, s.num_running, s.kv_usage] for s in shown],
        },
        "events": result.num_events,
        "core_us_per_event": round(1e6 * result.core_s / max(1, result.num_events), 1),
    }


def show(figures: dict[str, Any], source: str) -> None:
    """The same for people."""
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False)
    out.print(f"{source}: {figures['finished']} of {figures['requests']} requests in {figures['duration_s']} s")
    table = Table("", "mean", "p50", "p90", "p99", "max")
    for name, label in (("ttft_s", "TTFT, s"), ("tpot_ms", "TPOT, ms")):
        table.add_row(label, *(f"{value:g}" for value in figures[name].values()))
    out.print(table)
    slo = figures["slo"]
    for label, value in (
        ("output tokens/s", figures["output_tokens_per_s"]),
        (f"goodput at TTFT {slo['ttft_s']} s, TPOT {slo['tpot_ms']} ms",
         f"{figures['goodput_rps']} requests/s ({figures['slo_share']:.1%} of all)"),
        ("prompt tokens from the prefix cache", f"{figures['prefix_hit_rate']:.1%}"),
        ("prefixes missed, by reason", figures["prefix_misses"]),
        ("preemptions", figures["preemptions"]),
        ("executors busy", f"{figures['executor_busy_share']:.1%}"),
        ("failed, skipped", f"{figures['failed'] or 0}, {figures['skipped']}"),
    ):  # fmt: skip
        out.print(f"{label}: {value}", markup=False)
    depth = figures["queue_depth"]
    series = depth["series"]
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, 8 * waiting // max(1, depth["max"] + 1))] for _, waiting, _, _ in series)
    out.print(f"queue over time: {bars} mean {depth['mean']}, max {depth['max']}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rorqual simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True, help="poisson:…, bursts:…, flood:…, chat:…, agents:… or a JSONL file")
    parser.add_argument("--executors", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    parser.add_argument("--plot", type=Path, help="draw the run (needs matplotlib, of the dev extra)")
    parser.add_argument("--save-trace", type=Path, help="write the trace as a file, too")
    parser.add_argument("--slo-ttft-s", type=float, default=1.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=30.0)
    parser.add_argument("--step-model", type=Path, default=DEFAULT_MODEL, help="JSON file with the times of steps")
    parser.add_argument("--link-ms", type=float, default=0.2, help="one way between scheduler and executor")
    parser.add_argument("--num-blocks", type=int, default=0, help="KV blocks an executor; 0: the step model's")
    parser.add_argument("--max-num-seqs", type=int, default=0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0)
    parser.add_argument("--max-queue-len", type=int, default=1_000_000)
    parser.add_argument("--priority-ageing-s", type=float, default=CoreConfig().priority_ageing_s)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(argv)
    if args.executors < 1:
        parser.error("--executors must be at least 1")
    try:
        trace = make_trace(args.trace, args.seed)
    except TraceError as error:
        parser.error(str(error))
    if args.save_trace:
        write_trace(args.save_trace, trace)
    config = SimulationConfig(
        num_executors=args.executors,
        model=with_limits(
            StepModel.load(args.step_model),
            num_blocks=args.num_blocks,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
        ),
        core=CoreConfig(
            max_queue_len=args.max_queue_len,
            enable_prefix_caching=args.enable_prefix_caching,
            priority_ageing_s=args.priority_ageing_s,
        ),
        link_ms=args.link_ms,
    )
    result = Simulation(trace, config).run()
    figures = summary(result, slo_ttft_s=args.slo_ttft_s, slo_tpot_ms=args.slo_tpot_ms)
    if not args.json:
        show(figures, args.trace)
    if args.plot:
        from .plot import plot

        plot(result, args.plot, title=f"{args.trace}, {args.executors} executor(s)")
    print(json.dumps({"trace": args.trace, "seed": args.seed, "executors": args.executors, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
