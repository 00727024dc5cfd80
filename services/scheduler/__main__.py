"""`python -m services.scheduler`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from rorqual.core.config import SchedulerConfig
from rorqual.core.errors import ConfigError
from rorqual.core.garbage import collect_seldom
from rorqual.telemetry import Telemetry, setup_logging

from .server import SchedulerServer

_log = logging.getLogger("services.scheduler")

PORT_FILE_VARIABLE = "RORQUAL_PORT_FILE"
"""Where the launcher wants the port written that `--listen host:0` chose."""


async def serve(config: SchedulerConfig, port_file: str = "") -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    telemetry = Telemetry("scheduler", config.telemetry)
    server = SchedulerServer(config, telemetry)
    try:
        port = await server.start()
        collect_seldom()
        _log.info("listening on %s:%d", config.listen.rpartition(":")[0], port)
        if port_file:
            _write_port(Path(port_file), port)
        await stop.wait()
        _log.info("stopping")
    finally:
        await server.stop()
        telemetry.shutdown()


def _write_port(path: Path, port: int) -> None:
    """Whole or not at all: the launcher may be reading."""
    part = path.with_name(path.name + ".part")
    part.write_text(f"{port}\n")
    part.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    from rorqual.core.config_loader import load_config

    try:
        config = load_config(SchedulerConfig, argv, prog="python -m services.scheduler")
        setup_logging("scheduler", config.telemetry)
        uvloop.run(serve(config, os.environ.get(PORT_FILE_VARIABLE, "")))
    except ConfigError as error:
        print(f"scheduler: {error.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
