"""The ops of the model, by name: today each is its torch reference, later a compiled kernel where one is built."""

from __future__ import annotations

from .reference import (
    apply_rope,
    fp8_block_dequantize,
    mla_decode,
    mla_prefill,
    mla_store,
    moe_experts,
    rms_norm,
    rope_inv_freq,
    route,
    router_scores,
    silu_mul,
    top_k_lowest_index,
)

__all__ = [
    "apply_rope",
    "fp8_block_dequantize",
    "mla_decode",
    "mla_prefill",
    "mla_store",
    "moe_experts",
    "rms_norm",
    "rope_inv_freq",
    "route",
    "router_scores",
    "silu_mul",
    "top_k_lowest_index",
]
