"""The Python faces of the kernels: what they refuse, and that they compute the reference where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.kernels import elementwise, moe, reference
from rorqual.kernels.mla import choose_kernel, make_workspace, mla_decode, plan_decode
from rorqual.kernels.reference_paged import mla_decode_paged

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (bf16(2, 8).float(), bf16(8), "x: needs torch.bfloat16, got torch.float32"),
        (bf16(2, 8), bf16(16), r"weight: needs shape \[8\], got \[16\]"),
        (bf16(8), bf16(8), r"x: needs shape \[\*, \*\], got \[8\]"),
        (bf16(8, 2).T, bf16(8), "x: its last 1 dimensions must be contiguous"),
    ],
)
def test_rms_norm_refuses(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elementwise.rms_norm(x, weight, 1e-6)


def test_rms_norm_adds_the_residual_first() -> None:
    x, residual, weight = bf16(3, 64), bf16(4, 64)[:3], bf16(64)
    summed = x + residual
    out = elementwise.rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, summed)
    assert torch.equal(out, reference.rms_norm(summed, weight, 1e-6))


def test_mla_store_writes_what_the_reference_writes() -> None:
    num_tokens = 5
    kv, q, norm = bf16(num_tokens, 576), bf16(num_tokens, 3, 192), bf16(512)
    positions = torch.tensor([4, 0, 9, 2, 2])
    slots = torch.tensor([70, -1, 3, 128, 0])
    angle = torch.rand((10, 32))
    cache = torch.zeros((3, 64, 576), dtype=BF16)
    want, want_q = cache.clone(), q.clone()
    cos, sin = angle.cos()[positions], angle.sin()[positions]
    k_pe = reference.apply_rope(kv[:, 512:], cos, sin)
    reference.mla_store(want.view(-1, 576), reference.rms_norm(kv[:, :512], norm, 1e-6), k_pe, slots)
    kept = slots >= 0
    want_q[kept, :, 128:] = reference.apply_rope(q[..., 128:], cos, sin)[kept]
    elementwise.mla_store(
        cache,
        kv[:, :512],
        kv[:, 512:],
        q_pe=q[..., 128:],
        positions=positions,
        slot_mapping=slots,
        cos_sin=torch.cat((angle.cos(), angle.sin()), dim=-1),
        norm_weight=norm,
    )
    assert torch.equal(cache, want)
    assert torch.equal(q, want_q)


def decode_arguments(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "q_latent": bf16(3, 4, 512),
        "q_pe": bf16(3, 4, 64),
        "cache": bf16(4, 64, 576),
        "block_tables": torch.tensor([[2, 0], [1, 9]], dtype=torch.int32),
        "kv_lens": torch.tensor([70, 3], dtype=torch.int32),
        "q_starts": torch.tensor([0, 2, 3], dtype=torch.int32),
        "workspace": make_workspace(CPU, max_batch=2, num_heads=4, max_q_len=2),
        "softmax_scale": 0.07,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": bf16(4, 32, 576)}, r"cache: needs shape \[\*, 64, 576\], got \[4, 32, 576\]"),
        ({"cache": bf16(4, 64, 640)[..., :576]}, "cache: its last 2 dimensions must be contiguous"),
        ({"q_latent": bf16(3, 5, 512)}, r"q_latent: needs shape \[\*, 4, 512\], got \[3, 5, 512\]"),
        ({"q_pe": bf16(2, 4, 64)}, r"q_pe: needs shape \[3, 4, 64\], got \[2, 4, 64\]"),
        ({"kv_lens": torch.tensor([70, 3])}, "kv_lens: needs torch.int32, got torch.int64"),
        ({"q_starts": torch.tensor([0, 3], dtype=torch.int32)}, r"q_starts: needs shape \[3\], got \[2\]"),
        (
            {"block_tables": torch.zeros((3, 2), dtype=torch.int32)},
            r"block_tables: needs shape \[2, \*\], got \[3, 2\]",
        ),
        ({"workspace": make_workspace(CPU, max_batch=1, num_heads=4)}, "at most 1 sequences, got 2"),
        ({"out": bf16(3, 4, 256)}, r"out: needs shape \[3, 4, 512\], got \[3, 4, 256\]"),
        ({"lse": torch.zeros(3, 4, dtype=BF16)}, "lse: needs torch.float32, got torch.bfloat16"),
    ],
)
def test_mla_decode_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_decode(**decode_arguments(**changes))


def test_mla_decode_is_the_reference_on_a_cpu() -> None:
    arguments = decode_arguments()
    plan_decode(arguments["workspace"], arguments["kv_lens"], arguments["q_starts"])
    lse = torch.zeros((3, 4))
    out = mla_decode(**arguments, lse=lse)
    inputs = {name: value for name, value in arguments.items() if name != "workspace"}
    want, want_lse = mla_decode_paged(**inputs)
    assert torch.equal(out, want.to(BF16))
    assert torch.equal(lse, want_lse)


def test_the_paged_reference_agrees_with_the_plain_one() -> None:
    """Query token i of sequence 0 sees 69 + i positions, of blocks 2 and 0; sequence 1's sees 3 of block 1."""
    arguments = decode_arguments()
    del arguments["workspace"]
    out, lse = mla_decode_paged(**arguments)
    flat = arguments["cache"].view(-1, 576)
    slots = torch.cat((torch.arange(128, 192), torch.arange(6)))
    q = torch.cat((arguments["q_latent"], arguments["q_pe"]), dim=-1)
    for row, seen in ((0, slots[:69]), (1, slots[:70]), (2, torch.arange(64, 67))):
        want = reference.mla_decode(q[row], flat, seen, 0.07, 512)
        torch.testing.assert_close(out[row].to(BF16), want, rtol=1e-2, atol=1e-3)  # one bf16 step
        scores = q[row].float() @ flat[seen].float().T * 0.07
        torch.testing.assert_close(lse[row], torch.logsumexp(scores, dim=-1))


def test_rows_without_a_key_are_zero() -> None:
    arguments = decode_arguments(kv_lens=torch.tensor([1, 0], dtype=torch.int32))
    del arguments["workspace"]
    out, lse = mla_decode_paged(**arguments)
    assert (out[0] == 0).all()
    assert (out[2] == 0).all()
    assert torch.equal(lse[:, 0] == float("-inf"), torch.tensor([True, False, True]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch must be in \[1, 8192\], got 0"),
        ({"num_heads": 129}, r"num_heads must be in \[1, 128\], got 129"),
        ({"max_q_len": 9}, r"max_q_len must be in \[1, 8\], got 9"),
        ({"deterministic": True}, "max_kv_len must be >= 1"),
        ({"deterministic": True, "max_kv_len": 100, "split_blocks": 3}, "split_blocks must be even and >= 2, got 3"),
        ({"split_blocks": 4}, "split_blocks and group_splits belong to deterministic runs"),
        (
            {"deterministic": True, "max_kv_len": 100, "num_heads": 32, "group_splits": 2},
            "group_splits must be 1, or more with tiles of 16 rows, got 2",
        ),
    ],
)
def test_make_workspace_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_workspace(CPU, **({"max_batch": 2, "num_heads": 16} | options))


def test_the_kernel_follows_the_rows_but_only_the_heads_when_deterministic() -> None:
    assert [choose_kernel(16, n, deterministic=False) for n in (1, 2, 3)] == [0, 1, 2]
    assert [choose_kernel(16, n, deterministic=True) for n in (1, 2, 8)] == [0, 0, 0]
    assert choose_kernel(128, 1, deterministic=True) == 2


def test_a_deterministic_workspace_holds_every_split() -> None:
    workspace = make_workspace(
        CPU, max_batch=3, num_heads=16, max_q_len=2, deterministic=True, max_kv_len=1025, split_blocks=4
    )
    assert workspace.split_capacity == 3 * 5
    assert workspace.partial_out.shape == (15, 32, 512)
    assert workspace.num_bytes == 15 * 32 * 513 * 4 + workspace.plan.numel() * 4


def test_a_deterministic_workspace_holds_every_group_and_the_splits_of_some() -> None:
    options = {"num_heads": 16, "deterministic": True}
    few = make_workspace(CPU, max_batch=2, max_kv_len=1025, **options)
    assert (few.split_blocks, few.group_splits, few.split_capacity) == (2, 8, 2 * 2 * 8)
    assert few.partial_lse.shape == (2, 32, 16)
    many = make_workspace(CPU, max_batch=300, max_kv_len=1024, **options)
    assert many.split_capacity == 128 * 8
    long = make_workspace(CPU, max_batch=2, max_kv_len=163_840, **options)
    assert long.split_capacity == 128 * 8
    wide = make_workspace(CPU, max_batch=1, max_kv_len=4096, num_heads=128, deterministic=True)
    assert (wide.split_blocks, wide.group_splits) == (16, 1)


def test_permute_puts_choices_in_expert_order() -> None:
    ids = torch.tensor([[2, 0], [0, -1], [2, 3]], dtype=torch.int32)
    got = moe.permute(ids, 4, row_alignment=2)
    assert got.expert_starts.tolist() == [0, 2, 2, 4, 6]
    assert got.choice_of[:6].tolist() == [1, 2, 0, 4, 5, -1]
    assert got.row_of.tolist() == [[2, 0], [1, -1], [3, 4]]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros((2, 2), dtype=torch.int64), {"num_experts": 4}, "topk_ids: needs torch.int32, got torch.int64"),
        (torch.zeros((2, 2), dtype=torch.int32), {"num_experts": 513}, r"num_experts must be in \[1, 512\], got 513"),
        (torch.zeros((2, 2), dtype=torch.int32), {"num_experts": 4, "row_alignment": 0}, "row_alignment must be >= 1"),
    ],
)
def test_permute_refuses(ids: torch.Tensor, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe.permute(ids, **options)
