"""`python -m services.tokenizer`: serves TextService until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rorqual.core.config import TokenizerConfig
from rorqual.core.errors import RorqualError
from rorqual.core.garbage import collect_seldom
from rorqual.telemetry import setup_logging

_PROG = "python -m services.tokenizer"
_log = logging.getLogger("services.tokenizer")


async def serve(config: TokenizerConfig, port_file: str) -> None:
    """Run one tokenizer process to its end."""
    from .app import TokenizerApp

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    app = TokenizerApp(config)
    try:
        port = await app.start()
        collect_seldom()
        host = config.listen.rpartition(":")[0]
        if port_file:
            write_port(Path(port_file), port)
        _log.info("listening on %s:%d", host, port)
        await stop.wait()
        _log.info("stopping")
    finally:
        await app.stop()


def write_port(path: Path, port: int) -> None:
    """`path` appears with its whole content, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(f"{port}\n", encoding="ascii")
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status 0 after a clean stop, 2 for a configuration or checkpoint that cannot be served."""
    import uvloop

    from rorqual.core.config_loader import ENV_PORT_FILE, exit_with, load_config

    config = load_config(TokenizerConfig, argv, prog=_PROG)
    setup_logging("tokenizer", config.telemetry)
    try:
        uvloop.run(serve(config, os.environ.get(ENV_PORT_FILE, "")))
    except RorqualError as error:
        exit_with(_PROG, error)


if __name__ == "__main__":
    main()
