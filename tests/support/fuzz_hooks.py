"""Hooks of the API fuzzer: what it makes is sent as it is, but asks for little work and often for a model that exists.

Read by schemathesis in a process of its own (SCHEMATHESIS_HOOKS names this file, API_FUZZ_MODEL the model).
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MAX_TOKENS = 3
MAX_CHOICES = 2
_LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
_model = os.environ.get("API_FUZZ_MODEL", "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@schemathesis.hook
def before_call(context: Any, case: Any, **kwargs: Any) -> None:
    """Bound what a body costs; leave what is malformed as it is."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = _model
    limit = _LIMITS.get(case.operation.path)
    for name in (limit, "max_tokens", "max_completion_tokens", "min_tokens"):
        if name and _is_count(body.get(name)):
            body[name] = min(body[name], MAX_TOKENS)
    if limit and body.get(limit) is None and body.get("max_completion_tokens") is None:  # which may be null
        body[limit] = MAX_TOKENS
    if _is_count(body.get("n")):
        body["n"] = min(body["n"], MAX_CHOICES)
