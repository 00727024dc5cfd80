"""Launches that are recorded for one layer and repeated for the others are those that each layer would have made."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from executor.gpu.launches import LayerLaunches, OwnTensors
from executor.gpu.model import ChunkRows, GpuModel, PrefillGroup, RecomputedRows
from executor.gpu.weights import GpuDense, load_gpu_weights
from executor.model.config import parse_config
from executor.weights.random_weights import RandomWeights
from rorqual.kernels import linear
from rorqual.kernels.abi import Launch, OwnPointer, RunLayersArgs, StreamWaitArgs
from rorqual.kernels.loader import KernelLibrary
from rorqual.kernels.prefill import plan_prefill
from tests.golden.checkpoints import V2, V3
from tests.unit.test_gpu_model import SIZES, V2_LITE


class RecordingLibrary(KernelLibrary):
    """Launches nothing, keeps everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.num_runs = 0
        self._names: list[str] = []
        self._structs: dict[str, type[ctypes.Structure]] = {}

    def address(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return 1 + self._names.index(name)

    def call(self, name: str, args: ctypes.Structure, stream: int) -> None:
        if isinstance(args, RunLayersArgs):
            assert name == "rorqual_run_layers"
            self._run_layers(args)
            return
        self._structs[name] = type(args)
        self.calls.append((name, {f[0]: getattr(args, f[0]) for f in args._fields_}))

    def _run_layers(self, args: RunLayersArgs) -> None:
        """What csrc/launch/layers.cpp does."""
        self.num_runs += 1
        launches = (Launch * args.num_launches).from_address(args.launches)
        own_pointers = (OwnPointer * args.num_own_pointers).from_address(args.own_pointers)
        pointers = (ctypes.c_void_p * (args.num_layers * args.num_pointers)).from_address(args.pointers)
        for layer in range(args.num_layers):
            for own in own_pointers:
                ctypes.c_void_p.from_address(own.field).value = pointers[layer * args.num_pointers + own.pointer]
            for launch in launches:
                name = self._names[launch.function - 1]
                self.call(name, self._structs[name].from_address(launch.args), launch.stream or 0)


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
@pytest.mark.parametrize(
    ("num_decode", "with_chunks", "num_wanted"),
    [(3, False, None), (0, True, 0), (0, True, 2), (3, True, 4), (3, True, None)],
)
def test_repeated_launches_are_what_each_layer_would_make(
    raw: dict[str, object],
    deterministic: bool,
    num_decode: int,
    with_chunks: bool,
    num_wanted: int | None,
    monkeypatch: pytest.MonkeyPatch,
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

    wanted = None if num_wanted is None else torch.arange(num_wanted, dtype=torch.int32)

    recorded, plain = RecordingLibrary(), RecordingLibrary()
    model._library = recorded
    model.forward(num_decode, chunks, caches, wanted)
    for i, cache in enumerate(caches):
        model._launches = LayerLaunches(plain, OwnTensors([[]] * 5), i)
        model._attention(i, num_decode, num_rows, chunks, cache)
        if wanted is None or i < 4:
            model._rest(i, num_rows, is_decode=not with_chunks)
        else:
            model._rest_of_wanted(i, num_rows, wanted)
    assert len(recorded.calls) > 5 * 10
    assert recorded.calls == plain.calls
    if with_chunks:  # a second step of these sizes records nothing
        recorded.calls.clear()
        monkeypatch.setattr(model, "_record", None)
        model.forward(num_decode, chunks, caches, wanted)
        assert recorded.calls == plain.calls
    if not with_chunks and "attention_bias" not in raw:
        assert recorded.num_runs == 3  # one dense layer, the attention of one with experts, and the others' two


def test_products_of_cublas_are_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 32 tokens products go to cuBLAS; a whole run of layers is one call all the same."""
    monkeypatch.setattr(linear, "_cublas", lambda: (1, 2))
    monkeypatch.setattr(linear, "MAX_TOKENS_SMALL", 32)  # the model has few outputs
    config = parse_config(V2 | SIZES | V2_LITE | {"num_hidden_layers": 5, "first_k_dense_replace": 2}, "test")
    source = RandomWeights(config, seed=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    model = GpuModel(
        load_gpu_weights(source, 256), max_decode_rows=4, max_rows=64, max_keys=128, max_blocks=4, deterministic=False
    )
    caches = [torch.zeros(8, 64, 576, dtype=torch.bfloat16) for _ in range(5)]
    group = PrefillGroup(0, 50, plan_prefill([50], [50]).to(torch.device("cpu")), 50, None, None)
    chunks = ChunkRows(torch.zeros(50, dtype=torch.int32), torch.arange(50), torch.arange(50), [group], [])
    model._library = library = RecordingLibrary()
    model.forward(0, chunks, caches)
    weights = [args["weight"] for name, args in library.calls if name == "rorqual_gemm"]
    for layer in model.weights.layers:
        for tensor in (layer.attention.qkv_a, layer.attention.kv_b, layer.attention.o):
            assert weights.count(tensor.data_ptr()) == 1
        down = layer.mlp.down if isinstance(layer.mlp, GpuDense) else layer.mlp.shared_down
        assert down is not None
        added = [args for name, args in library.calls if name == "rorqual_gemm" and args["weight"] == down.data_ptr()]
        assert [args["beta"] for args in added] == [1.0]
    assert library.num_runs == 3


class FakeSideStream:
    @contextmanager
    def launched(self, launches: LayerLaunches) -> Iterator[None]:
        launches.call("rorqual_stream_wait", StreamWaitArgs(event=1, other=2), 0)
        yield

    def join(self, launches: LayerLaunches) -> None:
        launches.call("rorqual_stream_wait", StreamWaitArgs(event=3), 2)


def test_shared_experts_run_beside_the_router_of_a_decode_step() -> None:
    config = parse_config(V2 | SIZES | V2_LITE | {"num_hidden_layers": 3, "first_k_dense_replace": 1}, "test")
    source = RandomWeights(config, seed=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    model = GpuModel(
        load_gpu_weights(source, 256), max_decode_rows=4, max_rows=64, max_keys=128, max_blocks=4, deterministic=False
    )
    model._library = library = RecordingLibrary()
    model._side = FakeSideStream()  # type: ignore[assignment]
    model.forward(3, None, [torch.zeros(8, 64, 576, dtype=torch.bfloat16) for _ in range(3)])
    names = [name.removeprefix("rorqual_") for name, _ in library.calls]
    first, second, third, fourth = (i for i, name in enumerate(names) if name == "stream_wait")
    assert names[first : second + 2] == names[third : fourth + 2]
    shared = ["stream_wait", "linear", "linear"]
    routed = ["linear", "moe_route", "experts_plan", "experts_gate_up", "experts_down"]
    assert names[first : second + 2] == [*shared, *routed, "stream_wait", "experts_combine"]
