"""Mixed load on a stack of its own for minutes, with clients that leave and processes that are killed; every answer checked.

    python -m benchmarks.soak [--minutes 30] [--gpu] [--concurrency 24] [--kills executor,scheduler,tokenizer] [--out FILE]

Chats, completions, responses and messages, streamed and whole, with schemas, grammars, tools, stops, several choices and
log-probabilities; one in five is dropped half-way. With --deterministic (the default) fixed requests come again and again
beside the others, and a text that differs from the first is a failure. The gateway is never killed: its streams end with
it. Memory is PSS; its slope is fitted over the last two thirds of each process's longest life.

Progress goes to stderr, the last line on stdout is one JSON object. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_gpu import commit, machine, versions
from benchmarks.serving.peer_server import end_blocks_on_sigterm
from rorqual.launch import StackError

from .answers import Wrong
from .client import Broken
from .load import Deaths, Load, LoadPlan
from .mix import KINDS, NEED_A_MODEL, probes
from .stack import serve

VICTIMS = ("executor", "scheduler", "tokenizer")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of load, exactly; what is under way then is let end")
    add("--concurrency", type=int, default=None, help="requests at once (16; with --gpu 96)")
    add("--gpu", action="store_true", help="the shape of DeepSeek-V2-Lite with random weights on one GPU")
    add("--model", type=Path, default=None, help="folder to serve (models/tiny; with --gpu the shape)")
    add("--backend", choices=("auto", "sim"), default="auto", help="sim: no model at all, and fewer kinds of requests")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the stack")
    add("--url", default="", help="a running server to load instead: nothing is killed, no memory read")
    add("--kinds", default="", help=f"of requests, instead of all: {','.join(KINDS)}")
    add("--kills", default=",".join(VICTIMS), help="processes to kill at random times; empty: none")
    add("--kill-every", type=float, default=None, metavar="SECONDS", help="on average (20; with --gpu 60)")
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True, help="with texts that may not change")
    add("--seed", type=int, default=0, help="of the load and the kills")
    add("--start-timeout", type=float, default=240.0)
    add("--log-dir", type=Path, default=None, help="where the processes' logs stay")
    add("--out", type=Path, default=None, help="also write the record to this file")
    args = parser.parse_args(argv)
    if unknown := set(filter(None, args.kills.split(","))) - set(VICTIMS):
        parser.error(f"--kills: {', '.join(sorted(unknown))} cannot be killed here; there are {', '.join(VICTIMS)}")
    if unknown := set(filter(None, args.kinds.split(","))) - set(KINDS):
        parser.error(f"--kinds: no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return args


def kinds_of(args: argparse.Namespace) -> tuple[str, ...]:
    """What can be asked of this server: the simulated executor has no logits, the shape's vocabulary no calls."""
    if args.kinds:
        return tuple(args.kinds.split(","))
    left_out = {*(NEED_A_MODEL if args.backend == "sim" else ()), *(("tools",) if args.gpu else ())}
    return tuple(kind for kind in KINDS if kind not in left_out)


def plan_of(args: argparse.Namespace) -> LoadPlan:
    kinds = kinds_of(args)
    return LoadPlan(
        load_s=60 * args.minutes,
        concurrency=args.concurrency or (96 if args.gpu else 16),
        kinds=kinds,
        probes=probes(kinds) if args.deterministic else (),
        victims=() if args.url else tuple(filter(None, args.kills.split(","))),
        kill_every_s=args.kill_every or (60.0 if args.gpu else 20.0),
        recover_s=120.0 if args.gpu else 30.0,
        answer_s=240.0 if args.gpu else 120.0,
        seed=args.seed,
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"deterministic": args.deterministic}
    if args.backend == "sim":
        settings["backend"] = "sim"
    return settings | dict(pair.split("=", 1) for pair in args.set)


def record_of(load: Load, args: argparse.Namespace, plan: LoadPlan) -> dict[str, Any]:
    outcome = load.outcome
    return {
        "requests": outcome.requests,
        "failed": outcome.failed,
        "dropped": outcome.dropped,
        "probed": outcome.probed,
        "output_tokens": outcome.output_tokens,
        "kills": {name: outcome.kills[name] for name in plan.victims},
        "slowest_recovery_s": round(max(outcome.recovery_s, default=0.0), 2),
        "mib_per_min": load.memory.mib_per_min(),
        "mib": load.memory.last_mib(),
        "first_failures": outcome.first_failures,
        "kinds": dict(outcome.kinds),
        "settings": {
            "minutes": args.minutes,
            "concurrency": plan.concurrency,
            "gpu": args.gpu,
            "backend": args.backend,
            "deterministic": args.deterministic,
            "seed": args.seed,
            **dict(pair.split("=", 1) for pair in args.set),
        },
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    end_blocks_on_sigterm()
    plan, deaths = plan_of(args), Deaths()
    try:
        if args.url:
            load = Load(args.url, plan)
            asyncio.run(load.run())
        else:
            with serve(
                settings_of(args),
                gpu=args.gpu,
                model=args.model,
                log_dir=args.log_dir,
                on_event=deaths,
                timeout_s=args.start_timeout,
            ) as stack:
                load = Load(stack.url, plan, stack, deaths)
                asyncio.run(load.run())
    except StackError as error:
        raise SystemExit(f"the stack did not start: {error.message}") from None
    except (Wrong, Broken) as error:
        raise SystemExit(f"a probe failed before the load began: {error}") from None
    except KeyboardInterrupt:
        return 130
    record = record_of(load, args, plan)
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
