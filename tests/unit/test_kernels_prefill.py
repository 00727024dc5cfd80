"""The plan of a prefill and its torch reference: every pair of query and key once, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.kernels import reference
from rorqual.kernels.prefill import STATE_WIDTH, gather_latents, mla_prefill, plan_prefill

BF16 = torch.bfloat16
SCALE = 192**-0.5

LENGTHS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 500)), max_size=6)


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.sampled_from([None, 128, 256, 512]), st.sampled_from([None, 4, 128]))
def test_tiles_cover_every_row_of_every_slab_once(
    lengths: list[tuple[int, int]], slab: int | None, num_heads: int | None
) -> None:
    q_lens, k_lens = [q for q, _ in lengths], [q + prefix for q, prefix in lengths]
    longest = max(k_lens, default=0)
    seen = [np.zeros((q, k), dtype=np.int32) for q, k in zip(q_lens, k_lens, strict=True)]
    finished = np.zeros(sum(q_lens), dtype=np.int32)
    begun = np.zeros(sum(q_lens), dtype=np.int32)
    for begin in range(0, max(longest, 1), slab or max(longest, 1)):
        end = None if slab is None else begin + slab
        plan = plan_prefill(q_lens, k_lens, key_begin=begin, key_end=end, num_heads=num_heads)
        tiles = plan.words[8:].reshape(-1, 8)
        assert tiles.shape[0] == plan.num_tiles
        assert not plan.words[:8].any()
        weights = -(-(tiles[:, 5] - tiles[:, 4]) // 128)
        assert (np.diff(weights) <= 0).all(), "heaviest first"
        for q_row, num_rows, first_limit, kv_row, key_begin, key_end, valid_end, flags in tiles.tolist():
            seq = int(np.searchsorted(plan.q_starts, q_row, side="right")) - 1
            start = q_row - int(plan.q_starts[seq])
            assert 1 <= num_rows <= 128
            assert start + num_rows <= q_lens[seq]
            assert key_begin == begin
            assert key_begin < key_end <= valid_end <= k_lens[seq]
            assert kv_row + key_begin == plan.k_starts[seq]
            assert kv_row + valid_end == plan.k_starts[seq + 1]
            for row in range(num_rows):
                limit = first_limit + row
                assert limit == k_lens[seq] - q_lens[seq] + start + row + 1
                seen[seq][start + row, key_begin : min(limit, key_end)] += 1
            begun[q_row : q_row + num_rows] += flags & 1
            finished[q_row : q_row + num_rows] += flags >> 1
    for counts in seen:
        q, k = counts.shape
        position = k - q + np.arange(q)[:, None]
        assert (counts == (np.arange(k)[None, :] <= position)).all()
    assert (begun == 1).all()
    assert (finished == 1).all()


def test_few_heads_and_rows_take_half_tiles() -> None:
    assert plan_prefill([512], [512]).num_tiles == 4
    assert plan_prefill([512], [512], num_heads=16).num_tiles == 8
    assert plan_prefill([512], [512], num_heads=17).num_tiles == 4
    assert plan_prefill([100, 0, 30], [100, 5, 30], num_heads=4).words[8:].reshape(-1, 8)[:, 1].tolist() == [64, 36, 30]


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "slab", "message"),
    [
        ([2], [1], {}, "need 0 <= q_len <= k_len"),
        ([-1], [1], {}, "need 0 <= q_len <= k_len"),
        ([1, 2], [1], {}, "need equally many lengths"),
        ([300], [300], {"key_begin": 64}, "a slab begins and ends at multiples of 128"),
        ([300], [300], {"key_end": 200}, "a slab begins and ends at multiples of 128"),
        ([300], [300], {"key_begin": 256, "key_end": 128}, "a slab begins and ends at multiples of 128"),
    ],
)
def test_plan_refuses(q_lens: list[int], k_lens: list[int], slab: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_prefill(q_lens, k_lens, **slab)


def inputs(num_tokens: int, num_keys: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return (
        torch.randn((num_tokens, num_heads, 192), generator=generator).to(BF16),
        torch.randn((num_keys, num_heads, 256), generator=generator).to(BF16),
        torch.randn((num_keys, 576), generator=generator).to(BF16)[:, 512:],
    )


def test_reference_agrees_with_that_of_one_sequence() -> None:
    q_lens, k_lens = [5, 0, 70, 1], [5, 0, 200, 40]
    q, kv, k_pe = inputs(sum(q_lens), sum(k_lens), 2)
    out = torch.empty((sum(q_lens), 2, 128), dtype=BF16)
    plan = plan_prefill(q_lens, k_lens)
    mla_prefill(q, kv, k_pe, out, plan, scale=SCALE)
    for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        rows = slice(plan.q_starts[seq], plan.q_starts[seq + 1])
        keys = slice(plan.k_starts[seq], plan.k_starts[seq + 1])
        k = torch.cat((kv[keys, :, :128], k_pe[keys, None].expand(-1, 2, -1)), dim=-1)
        want = reference.mla_prefill(q[rows], k, kv[keys, :, 128:], k_len - q_len, SCALE)
        torch.testing.assert_close(out[rows], want, rtol=2**-7, atol=1e-6)  # a bf16 that rounds the other way


def test_slabs_agree_with_one_call() -> None:
    q_lens, k_lens = [150, 3, 0, 130], [400, 3, 300, 257]
    q, kv, k_pe = inputs(sum(q_lens), sum(k_lens), 2)
    whole, whole_lse = torch.empty((sum(q_lens), 2, 128), dtype=BF16), torch.empty((sum(q_lens), 2))
    mla_prefill(q, kv, k_pe, whole, plan_prefill(q_lens, k_lens), scale=SCALE, lse=whole_lse)
    out, lse = torch.full_like(whole, float("nan")), torch.full_like(whole_lse, float("nan"))
    state = torch.full((sum(q_lens), 2, STATE_WIDTH), float("nan"))
    starts = np.cumsum([0, *k_lens])
    for begin in range(0, 400, 128):
        plan = plan_prefill(q_lens, k_lens, key_begin=begin, key_end=begin + 128)
        held = np.concatenate(
            [np.arange(s + min(begin, n), s + min(begin + 128, n)) for s, n in zip(starts, k_lens, strict=False)]
        )
        mla_prefill(q, kv[held], k_pe[held], out, plan, scale=SCALE, lse=lse, state=state)
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close(out, whole, rtol=2**-7, atol=1e-6)


def test_a_slab_needs_a_state_and_a_plan_its_sizes() -> None:
    q, kv, k_pe = inputs(200, 300, 2)
    out = torch.empty((200, 2, 128), dtype=BF16)
    plan = plan_prefill([200], [300], key_end=128)
    assert plan.needs_state
    with pytest.raises(ValueError, match="state: this plan is of a slab"):
        mla_prefill(q, kv[:128], k_pe[:128], out, plan, scale=SCALE)
    with pytest.raises(ValueError, match="kv: the plan has 300 keys, got 299"):
        mla_prefill(q, kv[:299], k_pe[:299], out, plan_prefill([200], [300]), scale=SCALE)
    with pytest.raises(ValueError, match=r"plan: needs int32 \[>= 24\], got torch.int32 \[23\]"):
        plan_prefill([200], [300]).on(torch.zeros(23, dtype=torch.int32))


def test_gather_latents_copies_positions_in_order() -> None:
    cache = torch.randn((5, 64, 576), generator=torch.Generator().manual_seed(0)).to(BF16)
    tables = torch.tensor([[3, 1, 99], [4, 99, 99], [0, 2, 99]], dtype=torch.int32)
    out = torch.zeros((70 - 64 + 0 + 100 - 64 + 2, 576), dtype=BF16)
    starts = torch.tensor([0, 6, 6, 42], dtype=torch.int32)
    gather_latents(cache, tables, starts, out, key_begin=64)
    assert torch.equal(out[:6], cache[1, :6])
    assert torch.equal(out[6:42], cache[2, :36])
    assert (out[42:] == 0).all()
