"""Rorqual: an open serving engine for the DeepSeek family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from rorqual.client import LLM, SamplingParams


def __getattr__(name: str) -> Any:
    """Load the client on first use, so that `import rorqual.core` stays free of grpc (PEP 562)."""
    if name in ("LLM", "SamplingParams"):
        import rorqual.client

        return getattr(rorqual.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
