"""The scheduler core against simulated executors, disturbed at random for as many events as are wanted.

    make fuzz-scheduler EVENTS=1000000 [SEED=0]

One run after another, each a world of up to three small executors (`tests/support/sim_world.py`): arrivals, cancels,
deadlines, resumes, faults, executors that leave and return, reports late, coalesced and cut off. After every event all
accounts are checked; every token is compared with the run of its request alone. Run i draws from seed + i, so a failure
is repeated by `SEED=<the seed printed> EVENTS=1`. Ctrl-C (or SIGTERM) ends it early. The last line is JSON: what was done.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.support.sim_world import random_run

ACTIONS_A_RUN = 400


def fuzz(num_events: int, seed: int, progress: Progress | None = None) -> tuple[int, int]:
    """Runs until the core has taken `num_events` events, or to an interrupt; returns (events, runs) completed.

    AssertionError names the seed of the run that failed.
    """
    task = progress.add_task("events", total=num_events) if progress else None
    done = num_runs = 0
    while done < num_events:
        try:
            done += random_run(random.Random(seed + num_runs), ACTIONS_A_RUN).num_events
        except KeyboardInterrupt:
            break
        except Exception as error:
            raise AssertionError(
                f"seed {seed + num_runs} fails after {done} events: {error}\n"
                f"again: make fuzz-scheduler EVENTS=1 SEED={seed + num_runs}"
            ) from error
        num_runs += 1
        if progress is not None and task is not None:
            progress.update(task, completed=min(done, num_events))
    return done, num_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    sys.stderr.write(f"seed {args.seed}\n")
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        num_events, num_runs = fuzz(args.events, args.seed, progress)
    print(
        json.dumps(
            {
                "events": num_events,
                "runs": num_runs,
                "seed": args.seed,
                "failures": 0,
                "cpu_s": round(time.process_time() - start_cpu_s, 1),
                "wall_s": round(time.perf_counter() - start_s, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
