"""Client channels with the project's settings."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from .options import CHANNEL_OPTIONS


def open_channel(
    address: str, *, interceptors: Sequence[grpc.aio.ClientInterceptor] = (), options: Sequence[tuple[str, int]] = ()
) -> grpc.aio.Channel:
    """An insecure channel to `address` ("host:port"), which reconnects by itself within a second."""
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options], interceptors=list(interceptors))
