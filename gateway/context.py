"""What every endpoint needs: settings, replicas, telemetry, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rorqual.core.clock import Clock
from rorqual.core.config import GatewayConfig
from rorqual.core.errors import RorqualError
from rorqual.telemetry import Telemetry

from .observe import Meters
from .upstream.replicas import ReplicaSet


@dataclass(frozen=True, kw_only=True)
class GatewayContext:
    """Built once, passed to each endpoint."""

    config: GatewayConfig
    telemetry: Telemetry
    meters: Meters
    clock: Clock
    replicas: ReplicaSet
    # How to end each request that is running, for the end of a shutdown's grace.
    running: set[Callable[[RorqualError], None]] = field(default_factory=set)
