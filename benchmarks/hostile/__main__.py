"""Replays every known attack on a running stack, with innocent clients beside it, and says what each one costs them.

    python -m benchmarks.hostile [--only NAME,NAME] [--backend sim] [--url URL --grpc HOST:PORT --scheduler HOST:PORT]

A line an attack: whether its outcome was right, the innocents' worst gap in a stream / first token / short answer in ms,
statuses, memory that moved by 10 MiB and more. Without --url a stack of its own is started (the embedded model), and
started anew where an attack has ended it. Attacks for which a door is not known are left out, and named.

The last line on stdout is one JSON object. Exit code 1: an outcome was wrong, or an innocent failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_gpu import commit, machine, versions
from benchmarks.serving.peer_server import end_blocks_on_sigterm
from benchmarks.soak.client import wait_healthy
from benchmarks.soak.stack import serve
from rorqual.launch import StackError

from .attacks import ATTACKS, Attack
from .innocents import InnocentProcess
from .replay import Result, replay
from .target import Target


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="show the attacks and end")
    add("--only", default="", metavar="NAME,…", help="these alone")
    add("--short", action="store_true", help="the cheap ones alone")
    add("--backend", choices=("auto", "sim"), default="auto", help="sim: no model, and no attacks by grammar")
    add("--gpu", action="store_true", help="DeepSeek-V2-Lite's shape with random weights on one GPU")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the stack")
    add("--url", default="", help="a running server in place of a stack of our own")
    add("--grpc", default="", metavar="HOST:PORT", help="its tokenizer")
    add("--scheduler", default="", metavar="HOST:PORT", help="its scheduler")
    add("--stall-s", type=float, default=5.0, help="the longest that an innocent may wait; 0: as long as it takes")
    add("--log-dir", type=Path, default=None)
    add("--out", type=Path, default=None, help="also write the record to this file")
    args = parser.parse_args(argv)
    if unknown := set(filter(None, args.only.split(","))) - set(ATTACKS):
        parser.error(f"--only: no attack {', '.join(sorted(unknown))}; --list shows them")
    return args


def chosen(args: argparse.Namespace) -> list[Attack]:
    names = set(filter(None, args.only.split(",")))
    return [a for a in ATTACKS.values() if (not names or a.name in names) and (not args.short or a.short)]


def doors(args: argparse.Namespace) -> set[str]:
    """What attacks may need, of what is there."""
    if not args.url:
        return {"text", "scheduler", "stack"} | ({"model"} if args.backend != "sim" else set())
    return {"model", *(("text",) if args.grpc else ()), *(("scheduler",) if args.scheduler else ())}


@contextlib.contextmanager
def target_of(args: argparse.Namespace) -> Iterator[Target]:
    """The running server, or a stack of our own until the block ends."""
    if args.url:
        yield Target(args.url, args.grpc, args.scheduler)
        return
    settings: dict[str, Any] = {"backend": "sim"} if args.backend == "sim" else {}
    settings |= dict(pair.split("=", 1) for pair in args.set)
    with serve(settings, gpu=args.gpu, log_dir=args.log_dir) as stack:
        yield Target(stack.url, stack.text_address, stack.scheduler_address, stack)


def run_until_it_ends(attacks: list[Attack], args: argparse.Namespace, results: list[Result]) -> None:
    """Attack after attack on one server; returns early where one of them has ended it."""
    with target_of(args) as target:
        innocents = InnocentProcess(target.url)
        try:
            for attack in attacks:
                result = asyncio.run(replay(attack, target, innocents, args.stall_s))
                results.append(result)
                print(result.line, flush=True)
                if not asyncio.run(wait_healthy(target.url, 1)):
                    if args.url:
                        raise SystemExit(f"{target.url} is down after {attack.name}")
                    print(f"the stack is down after {attack.name}: starting another", file=sys.stderr, flush=True)
                    return
        finally:
            innocents.close()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    attacks = chosen(args)
    if args.list:
        for attack in attacks:
            print(f"{attack.name:18} {attack.about}")
        return 0
    end_blocks_on_sigterm()
    there = doors(args)
    left_out = [attack.name for attack in attacks if attack.needs - there]
    attacks = [attack for attack in attacks if not attack.needs - there]
    print("                           gap / first token / short answer", flush=True)
    results: list[Result] = []
    try:
        while len(results) < len(attacks):
            run_until_it_ends(attacks[len(results) :], args, results)
    except StackError as error:
        raise SystemExit(f"the stack did not start: {error.message}") from None
    except KeyboardInterrupt:
        return 130
    wrong = [result.name for result in results if result.faults]
    record = {
        "attacks": len(results),
        "wrong": wrong,
        "left_out": left_out,
        "worst_ms": {
            key: max((r.innocents[key] for r in results), default=0.0) for key in ("gap_ms", "first_ms", "short_ms")
        },
        "results": [asdict(result) for result in results],
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
