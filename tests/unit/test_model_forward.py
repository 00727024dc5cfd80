"""What a forward pass promises apart from its numbers: padding, empty batches, which blocks it touches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from executor.kv_cache import BLOCK_SIZE, LatentCache
from executor.model.batch import Form, ForwardBatch, build_batch
from executor.model.deepseek import DeepseekModel
from executor.weights import load_model
from tests.golden.checkpoints import V3, random_tensors, write_checkpoint
from tests.golden.harness import new_cache, random_tokens


@pytest.fixture(scope="module", params=[False, True], ids=["default", "deterministic"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeepseekModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), V3, random_tensors(V3))
    return load_model(folder, dtype=torch.float32, deterministic=request.param)


def padded(batch: ForwardBatch, num_padding: int) -> ForwardBatch:
    zeros = torch.zeros(num_padding, dtype=torch.int64)
    return dataclasses.replace(
        batch,
        token_ids=torch.cat((batch.token_ids, zeros)),
        positions=torch.cat((batch.positions, zeros)),
        slot_mapping=torch.cat((batch.slot_mapping, zeros - 1)),
    )


@pytest.mark.parametrize("form", [Form.PREFILL, Form.DECODE])
def test_padding_rows_change_nothing(model: DeepseekModel, form: Form) -> None:
    tokens = random_tokens(5, seed=1)
    table = torch.tensor([3], dtype=torch.int32)
    batch = build_batch([(tokens, 0, table, form)], range(5))
    plain, cache = new_cache(model, 4), new_cache(model, 4)
    expected = model.forward(batch, plain)
    out = model.forward(padded(batch, 3), cache)
    torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=0 if model.deterministic else 1e-5)
    for layer in cache.layers:
        written = ~layer.isnan().any(-1)
        assert written.nonzero().flatten().tolist() == list(range(3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5))


def test_empty_batches(model: DeepseekModel) -> None:
    cache = new_cache(model, 2)
    out = model.forward(build_batch([]), cache)
    assert out.logits.shape == (0, 211)
    out = model.forward(padded(build_batch([]), 4), cache)
    assert out.logits.shape == (0, 211)
    assert all(layer.isnan().all() for layer in cache.layers)


def test_no_logits_wanted(model: DeepseekModel) -> None:
    cache = new_cache(model, 2)
    batch = build_batch(
        [(random_tokens(70, seed=2), 0, torch.tensor([1, 0]), Form.PREFILL)], [], return_all_hidden=True
    )
    out = model.forward(batch, cache)
    assert out.logits.shape == (0, 211)
    assert out.all_hidden is not None
    assert out.all_hidden.shape == (70, 72)


def test_tables_may_be_longer_than_needed(model: DeepseekModel) -> None:
    """A table's blocks past the last row's are granted but unwritten."""
    tokens = random_tokens(64, seed=3)
    short, long = torch.tensor([2], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    results = []
    for table in (short, long):
        cache = new_cache(model, 4)
        first = model.forward(build_batch([(tokens[:63], 0, table, Form.PREFILL)]), cache).logits
        second = model.forward(build_batch([(tokens[63:], 63, table, Form.DECODE)]), cache).logits
        results.append(torch.cat((first, second)))
    assert torch.equal(*results)


def test_the_cache_refuses_no_blocks(model: DeepseekModel) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        LatentCache(model.config, 0, dtype=torch.float32)


def test_positions_past_the_first_table_of_angles(model: DeepseekModel) -> None:
    tokens = random_tokens(1100, seed=4)
    table = torch.arange(18, dtype=torch.int32)
    cache = new_cache(model, 18)
    whole = model.forward(build_batch([(tokens, 0, table, Form.PREFILL)]), cache).logits
    again = model.forward(build_batch([(tokens[-1:], 1099, table, Form.DECODE)]), cache).logits
    torch.testing.assert_close(whole, again, rtol=0, atol=3e-5)
