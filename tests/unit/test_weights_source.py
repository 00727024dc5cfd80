"""Where tensors come from: read ahead of the builder in any order, or drawn; the CPU stands in for the device."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor.weights import CheckpointFiles, TensorSource, build_model, load_model, model_fingerprint, open_source
from executor.weights.read_ahead import ReadAhead
from executor.weights.source import CheckpointSource, published_order
from rorqual.core.errors import CheckpointError
from tests.golden.checkpoints import V3, quantize_fp8, random_tensors, write_checkpoint

CPU = torch.device("cpu")
FP8 = V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]}}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[CheckpointFiles]:
    with CheckpointFiles(write_checkpoint(tmp_path, V3, random_tensors(V3, mtp=True), num_shards=3)) as files:
        yield files


def weight_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]


@pytest.mark.parametrize("order", ["as promised", "reversed", "shuffled"])
@pytest.mark.parametrize("ahead_bytes", [1, 40_000, 1 << 30])
def test_every_tensor_arrives_whole_in_whatever_order_it_is_taken(
    order: str, ahead_bytes: int, files: CheckpointFiles
) -> None:
    names = list(files.tensors)
    taken = {"as promised": names, "reversed": names[::-1], "shuffled": random.Random(3).sample(names, len(names))}
    with ReadAhead(files, names, CPU, num_threads=3, buffer_bytes=1000, ahead_bytes=ahead_bytes) as ahead:
        for name in taken[order]:
            assert torch.equal(ahead.take(name), files.read(name)), name
        assert torch.equal(ahead.take(names[5]), files.read(names[5])), "a second time"
    assert weight_threads() == []


def test_no_more_is_read_ahead_than_allowed(files: CheckpointFiles) -> None:
    names = list(files.tensors)
    largest = max(info.num_bytes for info in files.tensors.values())
    with ReadAhead(files, names, CPU, num_threads=4, buffer_bytes=4096, ahead_bytes=largest) as ahead:
        for name in names:
            ahead.take(name)
            assert ahead._bytes_ahead <= largest


def test_leaving_early_ends_the_threads(files: CheckpointFiles) -> None:
    with ReadAhead(files, files.tensors, CPU, num_threads=4, buffer_bytes=64, ahead_bytes=1) as ahead:
        ahead.take(next(iter(files.tensors)))
    assert weight_threads() == []


def test_a_file_that_shrinks_while_it_is_read_is_named(files: CheckpointFiles) -> None:
    info = next(info for info in files.tensors.values() if info.name.endswith("o_proj.weight"))
    os.truncate(info.file, info.offset + info.num_bytes // 2)
    with (
        ReadAhead(files, [], CPU, num_threads=1, buffer_bytes=1 << 20) as ahead,
        pytest.raises(CheckpointError, match=f"{info.file}: ended within tensor '{info.name}'"),
    ):
        ahead.take(info.name)


def test_a_model_built_of_tensors_read_ahead_is_the_model(tmp_path: Path) -> None:
    """FP8 with scales, read by threads, against the mapped files."""
    config = {**FP8, "num_nextn_predict_layers": 0}
    folder = write_checkpoint(tmp_path, config, quantize_fp8(random_tensors(config), (32, 16))[0], num_shards=2)
    plain = load_model(folder, dtype=torch.float32)
    with CheckpointFiles(folder) as files:
        parsed = plain.config
        order = published_order(files, parsed)
        assert sorted(order) == sorted(files.tensors)
        with ReadAhead(files, order, CPU, buffer_bytes=4096, ahead_bytes=30_000) as ahead:
            source = CheckpointSource(files, parsed, dtype=torch.float32, device=CPU, ahead=ahead, progress=None)
            model = build_model(source)
    assert torch.equal(model._parts.embedding, plain._parts.embedding)
    for ours, theirs in zip(model._parts.layers, plain._parts.layers, strict=True):
        assert torch.equal(ours.input_norm.weight, theirs.input_norm.weight)
        x = torch.randn(5, parsed.hidden_size, generator=torch.Generator().manual_seed(1))
        assert torch.equal(ours.mlp(x, x), theirs.mlp(x, x))


class TestOut:
    @pytest.fixture(params=["checkpoint", "dummy"])
    def source(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorSource]:
        folder = write_checkpoint(tmp_path, V3, random_tensors(V3, mtp=True))
        load_format = "dummy" if request.param == "dummy" else "safetensors"
        with open_source(folder, dtype=torch.bfloat16, device=CPU, load_format=load_format) as source:
            yield source

    def test_a_tensor_is_written_where_it_is_wanted(self, source: TensorSource) -> None:
        names = [f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(2)]
        alone = [source.tensor(name) for name in names]
        assert not torch.equal(alone[0], alone[1])
        for dtype in (torch.bfloat16, torch.float32):
            stacked = torch.full((2, *source.shapes[names[0]]), torch.nan, dtype=dtype)
            strided = torch.full((*source.shapes[names[0]], 2), torch.nan, dtype=dtype)
            for i, name in enumerate(names):
                assert source.tensor(name, out=stacked[i]).data_ptr() == stacked[i].data_ptr()
                source.tensor(name, out=strided[..., i])
                assert torch.equal(stacked[i], source.tensor(name, dtype))
                assert torch.equal(strided[..., i], stacked[i])

    def test_names_it_does_not_have(self, source: TensorSource) -> None:
        assert "model.norm.weight" in source
        assert "model.layers.1.mlp.experts.8.up_proj.weight" not in source
        with pytest.raises(KeyError):
            source.tensor("model.layers.1.mlp.experts.8.up_proj.weight")


class TestDummy:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = write_checkpoint(tmp_path, V3, {})
        (folder / "model.safetensors").unlink()
        return folder

    def draw(self, folder: Path, seed: int, names: list[str]) -> dict[str, torch.Tensor]:
        with open_source(folder, dtype=torch.float32, device=CPU, load_format="dummy", seed=seed) as source:
            return {name: source.tensor(name) for name in names}

    def test_a_tensor_is_a_function_of_name_and_seed(self, folder: Path) -> None:
        names = ["lm_head.weight", "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"]
        first, again = self.draw(folder, 1, names), self.draw(folder, 1, names[::-1])
        for name in names:
            assert torch.equal(first[name], again[name])
            assert not torch.equal(first[name], self.draw(folder, 2, [name])[name])
        assert not torch.equal(first[names[1]], first[names[2]])

    def test_values(self, folder: Path) -> None:
        names = ["lm_head.weight", "model.layers.2.post_attention_layernorm.weight"]
        names.append("model.layers.2.mlp.gate.e_score_correction_bias")
        head, norm, bias = self.draw(folder, 0, names).values()
        assert torch.equal(norm, torch.ones(72))
        assert torch.equal(bias, torch.zeros(8))
        # 15,192 numbers: their standard deviation is known to 0.6 %, their mean to 0.008 of it.
        assert head.std().item() == pytest.approx(0.02, rel=0.03)
        assert abs(head.mean().item()) < 0.04 * 0.02
        assert head.unique().numel() > 1000
        assert torch.equal(head, head.bfloat16().float())

    def test_a_model_of_every_layer_is_built(self, folder: Path) -> None:
        seen: list[tuple[int, int]] = []
        with open_source(
            folder, dtype=torch.float32, device=CPU, load_format="dummy", progress=lambda *counts: seen.append(counts)
        ) as source:
            model = build_model(source)
        assert len(model._parts.layers) == 3
        assert len(model._parts.mtp) == 1
        assert seen[-1] == (4 * source.num_elements, 4 * source.num_elements)

    def test_the_fingerprint_needs_no_files_and_tells_seeds_apart(self, folder: Path) -> None:
        with open_source(folder, dtype=torch.float32, device=CPU, load_format="dummy") as source:
            config = source.config
        prints = [
            model_fingerprint(
                folder, config, dtype=torch.float32, kv_dtype=torch.float32, random_seed=seed, extra={"device": device}
            )
            for seed in (0, 1)
            for device in ("cpu", "cuda")
        ]
        assert len(set(prints)) == 4
