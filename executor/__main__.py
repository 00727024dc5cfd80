"""`python -m executor`: one executor process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from rorqual.core.config import ExecutorConfig
from rorqual.core.config_loader import EXIT_CONFIG, load_config
from rorqual.core.errors import InternalError, RorqualError
from rorqual.telemetry import setup_logging

_log = logging.getLogger("executor")

# How long an idle compute thread spins before it sleeps (some 0.2 ms), for the OpenMP that torch brings; read when
# torch is loaded. Its own default, 300,000, is right where nobody else wants the cores: measured on 2 cores that
# other processes kept busy, 16 streams got 130 to 220 tokens/s with it, and 180 to 320 with this; much less (0) gave
# 270 to 280, but wakes a sleeping thread for every product of a step.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# A product of oneDNN is prepared for its number of rows, which takes some 0.5 MiB beside its machine code, and kept twice: by
# oneDNN and by PyTorch, 1,024 of them each. Steps have any number of rows, so that an executor grew for hours, by up to 1 GiB.
# With 128 each, products of the last few steps stay, and preparing one costs little beside the product (measured with the
# embedded model's weights and 2 to 201 rows: 1.3 ms a product that had to be prepared, 1.5 where it was kept).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean stop; 2 for what another start cannot change (configuration, checkpoint, a
    scheduler that refuses); 1 for a bug."""
    try:
        config = load_config(ExecutorConfig, argv, prog="python -m executor")
        setup_logging("executor", config.telemetry)
        import uvloop

        uvloop.run(_serve(_prepare(config)))
    except InternalError as error:
        _log.critical("%s", error)
        return 1
    except RorqualError as error:
        print(f"executor: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130  # while loading: nothing was served yet
    return 0


def _prepare(config: ExecutorConfig) -> Callable[[asyncio.Event, str], Awaitable[None]]:
    """What serves until the event is set."""
    if config.backend == "sim":
        from .sim import app as sim_app

        return partial(sim_app.serve, sim_app.prepare(config))
    from . import app  # torch: 1.5 s that a wrong flag need not wait for

    return partial(app.serve, app.prepare(config))


async def _serve(serve: Callable[[asyncio.Event, str], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await serve(stop, os.environ.get("RORQUAL_READY_FILE", ""))


if __name__ == "__main__":
    sys.exit(main())
