"""`python -m gateway`: read the configuration, serve until told to end."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from rorqual.core.config import GatewayConfig
from rorqual.core.errors import ConfigError
from rorqual.telemetry import Telemetry, setup_logging

from .app import Gateway
from .server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a signal, EXIT_CONFIG where the configuration cannot be served."""
    from rorqual.core.config_loader import ENV_PORT_FILE, EXIT_CONFIG, load_config

    try:
        config = load_config(GatewayConfig, sys.argv[1:] if argv is None else argv, prog="python -m gateway")
        setup_logging("gateway", config.telemetry)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        uvloop.run(_run(config, os.environ.get(ENV_PORT_FILE, "")))
    except ConfigError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


async def _run(config: GatewayConfig, port_file: str) -> None:
    telemetry = Telemetry("gateway", config.telemetry)
    try:
        await serve(config, Gateway(config, telemetry), port_file=port_file)
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    sys.exit(main())
