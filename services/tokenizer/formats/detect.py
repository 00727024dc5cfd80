"""Which chat format a checkpoint has, from the marks in its template, its vocabulary and its files."""

from __future__ import annotations

from collections.abc import Container

from ..checkpoint import TextCheckpoint
from . import FORMATS
from .base import ChatFormat
from .marks import (
    ASSISTANT,
    CALLS,
    DSML,
    END_THINK,
    KIMI_MIDDLE,
    LATEST_REMINDER,
    OUTPUT,
    OUTPUTS,
    SYSTEM,
    THINK,
    USER,
)


def find_format(checkpoint: TextCheckpoint, tokens: Container[str]) -> ChatFormat | None:
    """The format of `checkpoint`, whose vocabulary has the added `tokens`. None where nothing tells."""
    if checkpoint.chat_templates:
        return format_of_template("\n".join(checkpoint.chat_templates.values()))
    name = _name_without_template(checkpoint, tokens)
    return FORMATS[name] if name else None


def format_of_template(source: str) -> ChatFormat | None:
    """The format that a Jinja template writes."""
    name = _name_of_template(source)
    return FORMATS[name] if name else None


def _name_of_template(source: str) -> str:
    if KIMI_MIDDLE in source:
        return "kimi-k2-thinking" if THINK in source else "kimi-k2"
    if DSML in source:
        return "deepseek-v3.2" if "function_calls" in source else "deepseek-v4"
    if OUTPUT in source and OUTPUTS not in source:
        return "deepseek-v3.1"
    if f"{ASSISTANT}{THINK}" in source:
        return "deepseek-r1"
    if CALLS in source:
        return "deepseek-r1-0528" if END_THINK in source else "deepseek-v3"
    if USER in source:
        return "deepseek-v2.5"
    return "deepseek-v2" if "User: " in source and "Assistant: " in source else ""


def _name_without_template(checkpoint: TextCheckpoint, tokens: Container[str]) -> str:
    if SYSTEM in tokens:
        return "deepseek-v4.1"
    if LATEST_REMINDER in tokens or checkpoint.model_type.startswith("deepseek_v4"):
        return "deepseek-v4-pro" if "Beyond maximum" in checkpoint.encoder else "deepseek-v4"
    if DSML in tokens or checkpoint.model_type == "deepseek_v32" or DSML in checkpoint.encoder:
        return "deepseek-v3.2"
    if KIMI_MIDDLE in tokens:
        return "kimi-k2-thinking" if THINK in tokens else "kimi-k2"
    return ""
