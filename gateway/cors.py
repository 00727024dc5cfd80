"""Cross-origin requests: off unless origins are named."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MAX_AGE_S = 600
EXPOSED = "x-request-id, request-id, x-rorqual-ignored-fields, retry-after"

_HEADER_LIST = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


class Cors:
    """What pages of other origins are told. No credentials are ever allowed: a key is sent by hand."""

    def __init__(self, origins: Collection[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """What every answer to `request` carries; empty where its origin is not allowed."""
        if not self._origins:
            return {}
        if self._any:
            return {"access-control-allow-origin": "*", "access-control-expose-headers": EXPOSED}
        origin = request.get("origin", "")
        out = {"vary": "Origin"}
        if origin in self._origins:
            out |= {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED}
        return out

    def preflight(self, request: Mapping[str, str], method: str) -> dict[str, str] | None:
        """The headers that allow `method`; None where `request` (an OPTIONS) is no preflight of an allowed origin."""
        allowed = self.headers(request)
        if "access-control-allow-origin" not in allowed or "access-control-request-method" not in request:
            return None
        out = {**allowed, "access-control-allow-methods": method, "access-control-max-age": str(MAX_AGE_S)}
        asked = request.get("access-control-request-headers", "")
        if _HEADER_LIST.fullmatch(asked):
            out["access-control-allow-headers"] = asked
        return out
