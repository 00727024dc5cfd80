"""Launches that are recorded for one layer and repeated for the others are those that each layer would have made."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from executor.gpu.launches import LayerLaunches
from executor.gpu.model import ChunkRows, GpuModel, PrefillGroup, RecomputedRows
from executor.gpu.weights import load_gpu_weights
from executor.model.config import parse_config
from executor.weights.random_weights import RandomWeights
from rorqual.kernels.loader import KernelLibrary
from rorqual.kernels.prefill import plan_prefill
from tests.golden.checkpoints import V2, V3
from tests.unit.test_gpu_model import SIZES, V2_LITE


class RecordingLibrary(KernelLibrary):
    """Launches nothing, keeps everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, name: str, args: ctypes.Structure, stream: int) -> None:
        # (The router's outputs are made anew for each layer.)
        ignored = ("topk_ids", "topk_weights")
        self.calls.append((name, {f[0]: getattr(args, f[0]) for f in args._fields_ if f[0] not in ignored}))


def chunk_rows(num_decode: int) -> ChunkRows:
    def words(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    plan = plan_prefill([9], [9]).to(torch.device("cpu"))
    cached = plan_prefill([5], [69]).to(torch.device("cpu"))
    return ChunkRows(
        torch.zeros(17, dtype=torch.int32),
        torch.arange(17),
        torch.arange(17),
        [
            PrefillGroup(num_decode, num_decode + 9, plan, 9, None, None),
            PrefillGroup(num_decode + 9, num_decode + 14, cached, 69, words(1, 2)[None], words(0, 69)),
        ],
        [RecomputedRows(num_decode + 14, num_decode + 17, words(4, 5, 6), words(3).expand(3, 1))],
    )


@pytest.mark.parametrize("raw", [V3 | SIZES | {"attention_bias": True}, V2 | SIZES | V2_LITE], ids=["v3", "v2-lite"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("num_decode", "with_chunks"), [(3, False), (0, True), (3, True)])
def test_repeated_launches_are_what_each_layer_would_make(
    raw: dict[str, object], deterministic: bool, num_decode: int, with_chunks: bool
) -> None:
    config = parse_config(raw | {"num_hidden_layers": 5, "first_k_dense_replace": 2}, "test")
    source = RandomWeights(config, seed=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    model = GpuModel(
        load_gpu_weights(source, 256),
        max_decode_rows=4,
        max_rows=32,
        max_keys=128,
        max_blocks=4,
        deterministic=deterministic,
    )
    caches = [torch.zeros(8, 64, 576, dtype=torch.bfloat16) for _ in range(5)]
    chunks = chunk_rows(num_decode) if with_chunks else None
    num_rows = num_decode + (17 if with_chunks else 0)

    recorded, plain = RecordingLibrary(), RecordingLibrary()
    model._library = recorded
    model.forward(num_decode, chunks, caches)
    for i, layer in enumerate(model.weights.layers):
        model._launches = LayerLaunches(plain, [])
        model._layer(layer, model._next_norm(i), num_decode, num_rows, chunks, caches[i])
    assert len(recorded.calls) > 5 * 10
    assert recorded.calls == plain.calls
