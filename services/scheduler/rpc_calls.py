"""What both servicers need of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import grpc

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def on_done(context: Context, callback: Callable[[], None]) -> None:
    """Call `callback` when the call is over, whoever ended it."""
    context.add_done_callback(cast(Any, lambda _: callback()))
