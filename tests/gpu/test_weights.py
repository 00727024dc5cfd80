"""Weights on their way to the GPU: read ahead through pinned buffers, or drawn there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor.weights import CheckpointFiles, open_source
from executor.weights.random_weights import STANDARD_DEVIATION
from executor.weights.read_ahead import ReadAhead
from tests.golden.checkpoints import V3, quantize_fp8, random_tensors, write_checkpoint

WIDE = V3 | {"hidden_size": 520, "intermediate_size": 1000, "vocab_size": 1999}
"""Matrices of up to 2 MB, so that they pass through a buffer in pieces."""


@pytest.mark.parametrize("buffer_bytes", [4096, 100_000, 32 << 20])
@pytest.mark.parametrize("ahead_bytes", [1, 2 << 30])
def test_every_byte_arrives(device: torch.device, tmp_path: Path, buffer_bytes: int, ahead_bytes: int) -> None:
    """The memory behind a tensor was just used by slow work on the consumer's stream, and is used again at once."""
    folder = write_checkpoint(tmp_path, WIDE, random_tensors(WIDE, mtp=True), num_shards=2)
    with CheckpointFiles(folder) as files:
        wanted = {name: files.read(name).to(device) for name in files.tensors}
        order = list(files.tensors)
        noise = torch.randn(2048, 2048, device=device)
        with ReadAhead(files, order, device, buffer_bytes=buffer_bytes, ahead_bytes=ahead_bytes) as ahead:
            for name in order[::3] + order[1::3] + order[2::3]:
                busy = noise @ noise
                got = ahead.take(name)
                del busy
                assert torch.equal(got, wanted[name]), name


def test_a_source_dequantises_and_converts(device: torch.device, tmp_path: Path) -> None:
    config = {
        **WIDE,
        "num_nextn_predict_layers": 0,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    stored, plain = quantize_fp8(random_tensors(config), (128, 128))
    folder = write_checkpoint(tmp_path, config, stored)
    with open_source(folder, dtype=torch.bfloat16, device=device) as source:
        for name, want in plain.items():
            got = source.tensor(name)
            assert got.dtype == torch.bfloat16
            assert got.device.type == "cuda"
            assert torch.equal(got.cpu(), want.bfloat16()), name
            out = torch.full((2, *want.shape), torch.nan, dtype=torch.float32, device=device)
            source.tensor(name, out=out[1])
            assert torch.equal(out[1].cpu(), want.float()), name


def test_random_weights_are_drawn_in_place(device: torch.device, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WIDE, {})
    with open_source(tmp_path, dtype=torch.bfloat16, device=device, load_format="dummy", seed=5) as source:
        name = "model.layers.1.mlp.experts.3.gate_proj.weight"
        drawn = source.tensor(name)
        stacked = torch.full((3, *drawn.shape), torch.nan, dtype=torch.bfloat16, device=device)
        for i in range(3):
            source.tensor(f"model.layers.1.mlp.experts.{i + 2}.gate_proj.weight", out=stacked[i])
        assert torch.equal(stacked[1], drawn)
        assert not torch.equal(stacked[0], drawn)
        assert torch.equal(source.tensor(name, torch.float32), drawn.float())
        head = source.tensor("lm_head.weight").float()
        assert head.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.01)  # 1.04 million numbers: 0.07 %
        assert abs(head.mean().item()) < 0.005 * STANDARD_DEVIATION
