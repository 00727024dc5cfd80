"""What one path of the API is: its handler, and what its documentation is made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from .asgi import JSON, Exchange
from .context import GatewayContext
from .failures import OPENAI_ERRORS, ErrorShape
from .openai.fields import BodyReader

Handler = Callable[[GatewayContext, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path. `reader` is what the handler reads its body with."""

    method: str
    handler: Handler
    summary: str
    reader: BodyReader[Any] | None = None
    answer: Any = None  # the struct of its answer; None: any JSON object
    content_type: str = JSON
    streams: bool = False  # it can answer with events
    needs_key: bool = True
    errors: ErrorShape = OPENAI_ERRORS
