"""FP8 checkpoints with block scales, dequantised at load, against transformers' model of the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.weights import load_model

from .checkpoints import V2, V3, quantize_fp8, random_tensors, write_checkpoint
from .harness import load_into, oracle, prefill_logits, random_tokens
from .test_float32 import assert_same


@pytest.mark.parametrize("block", [(128, 128), (32, 16)], ids=["128x128", "32x16"])
@pytest.mark.parametrize("config", [V3, V2 | {"q_lora_rank": None}], ids=["v3", "v2"])
def test_fp8_checkpoint(config: dict[str, Any], block: tuple[int, int], tmp_path: Path) -> None:
    """Shapes are no multiple of a block, so the last blocks are partial; 128x128 is one block a tensor, or four."""
    config = config | {"intermediate_size": 200, "kv_lora_rank": 136}
    stored, plain = quantize_fp8(random_tensors(config), block)
    assert sum(name.endswith("_scale_inv") for name in stored) > 10
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    write_checkpoint(tmp_path, config | {"quantization_config": quantization}, stored, num_shards=3)
    model = oracle(config)
    load_into(model, plain)
    tokens = random_tokens(70, seed=5)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_same(prefill_logits(load_model(tmp_path, dtype=torch.float32), tokens, [64, 6]), expected)
