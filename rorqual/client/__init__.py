"""The Python API: `LLM`, `SamplingParams`, and the gRPC client below them. Needs no torch."""

from .aio import AsyncClient
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestOutput, Usage
from .params import SamplingParams

__all__ = ["LLM", "AsyncClient", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "Usage"]
