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
    """The exit status: 0 after a signal, 2 where the configuration cannot be served."""
    from rorqual.core.config_loader import load_config

    try:
        config = load_config(GatewayConfig, sys.argv[1:] if argv is None else argv, prog="python -m gateway")
        setup_logging("gateway", config.telemetry)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        uvloop.run(_run(config))
    except ConfigError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return 2
    return 0


async def _run(config: GatewayConfig) -> None:
    telemetry = Telemetry("gateway", config.telemetry)
    try:
        await serve(config, Gateway(config, telemetry), port_file=os.environ.get("RORQUAL_PORT_FILE", ""))
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    sys.exit(main())
