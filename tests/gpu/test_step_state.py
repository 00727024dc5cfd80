"""The kernels that keep the decode set's state, against their torch references, word for word."""

from __future__ import annotations

import pytest
import torch

from rorqual.kernels import step_state as face

pytestmark = pytest.mark.gpu

SLOTS, BLOCKS, VOCAB = 37, 40, 101


def random_state(generator: torch.Generator) -> torch.Tensor:
    def numbers(high: int) -> torch.Tensor:
        return torch.randint(high, (SLOTS,), generator=generator, dtype=torch.int32)

    state = torch.zeros(SLOTS, face.STATE_WORDS, dtype=torch.int32)
    state[:, face.TOKEN] = numbers(VOCAB)
    state[:, face.POSITION] = numbers(BLOCKS * 64)
    state[:, face.LIMIT] = numbers(BLOCKS * 64)
    state[:, face.MAX_TOTAL] = state[:, face.POSITION] + numbers(5)
    state[:, face.ACTIVE] = (numbers(4) > 0).int()
    state[:, face.FIRST_STOP :] = torch.randint(
        -1, VOCAB, (SLOTS, face.NUM_STOPS), generator=generator, dtype=torch.int32
    )
    return state


def outputs(num_rows: int, num_compute: int, hidden: int, device: str) -> dict[str, torch.Tensor]:
    def full(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 77, dtype=dtype, device=device)

    return {
        "x": full(num_compute, hidden, dtype=torch.bfloat16),
        "positions": full(num_compute, dtype=torch.int64),
        "slot_mapping": full(num_compute, dtype=torch.int64),
        "kv_lens": full(num_compute, dtype=torch.int32),
        "row_tables": full(num_compute, BLOCKS, dtype=torch.int32),
        "new_positions": full(num_rows, dtype=torch.int32),
        "active": full(num_rows, dtype=torch.uint8),
    }


@pytest.mark.parametrize(("num_rows", "num_compute"), [(0, 0), (1, 1), (1, 0), (5, 3), (37, 37), (37, 11)])
@pytest.mark.parametrize("hidden", [8, 256, 2048])
def test_prepare_and_advance(num_rows: int, num_compute: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(num_rows * 7919 + num_compute * 31 + hidden)
    state = random_state(generator)
    tables = torch.randint(1000, (SLOTS, BLOCKS), generator=generator, dtype=torch.int32)
    embedding = torch.randn(VOCAB, hidden, generator=generator).bfloat16()
    slots = torch.randperm(SLOTS, generator=generator)[:num_rows].int()
    slots[torch.rand(num_rows, generator=generator) < 0.2] = -1
    want, got = outputs(num_rows, num_compute, hidden, "cpu"), outputs(num_rows, num_compute, hidden, "cuda")
    face.step_prepare(slots, state, tables, embedding, **want)
    face.step_prepare(slots.cuda(), state.cuda(), tables.cuda(), embedding.cuda(), **got)
    for name, tensor in want.items():
        assert torch.equal(got[name].cpu(), tensor), name

    tokens = torch.randint(VOCAB, (num_rows,), generator=generator, dtype=torch.int32)
    sound = (torch.rand(num_rows, generator=generator) < 0.9).to(torch.uint8)
    device_state, results = state.cuda(), torch.full((num_rows,), 77, dtype=torch.int32, device="cuda")
    want_results = torch.full((num_rows,), 77, dtype=torch.int32)
    face.step_advance(
        slots.cuda(), device_state, tokens=tokens.cuda(), sound=sound.cuda(), active=got["active"], results=results
    )
    face.step_advance(slots, state, tokens=tokens, sound=sound, active=want["active"], results=want_results)
    assert torch.equal(results.cpu(), want_results)
    assert torch.equal(device_state.cpu(), state)


@pytest.mark.parametrize("num_changes", [0, 1, 255, 256, 257, 5000])
def test_scatter_words(num_changes: int) -> None:
    generator = torch.Generator().manual_seed(num_changes)
    words = torch.randint(1 << 30, (7000,), generator=generator, dtype=torch.int32)
    index = torch.randperm(7000, generator=generator)[:num_changes]
    values = torch.randint(1 << 30, (num_changes,), generator=generator)
    changes = torch.stack((index, values), dim=1).int()
    device = words.cuda()
    face.scatter_words(device, changes.cuda())
    face.scatter_words(words, changes)
    assert torch.equal(device.cpu(), words)


@pytest.mark.parametrize("num_rows", [0, 1, 17, 300])
def test_embed(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    embedding = torch.randn(VOCAB, 264, generator=generator).bfloat16().cuda()
    token_ids = torch.randint(VOCAB, (num_rows,), generator=generator, dtype=torch.int32).cuda()
    x = torch.full((num_rows, 264), float("nan"), dtype=torch.bfloat16, device="cuda")
    face.embed(token_ids, embedding, x)
    assert torch.equal(x, embedding[token_ids.long()])
