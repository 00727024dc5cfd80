"""rms_norm and mla_store against the torch reference."""

from __future__ import annotations

import pytest
import torch

from rorqual.kernels import elementwise, reference
from rorqual.kernels.loader import KernelLibrary

NAN = float("nan")


def assert_within_one_step(got: torch.Tensor, want: torch.Tensor) -> None:
    """At most one bf16 step apart, in few places.

    The kernel sums a row's squares in another order, so 1 / rms may differ in its last float32 bit; where the value
    then lies on a rounding edge, one bf16 rounding may go the other way (and the product's after it).
    """
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert not torch.isnan(got.float()).any()
    assert int(steps.max()) <= 2, int(steps.max())
    assert float((steps > 0).float().mean()) < 0.01


@pytest.mark.parametrize("hidden", [8, 128, 256, 512, 1536, 2048, 7168, 16384, 8 * 251])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    num_rows: int,
    hidden: int,
    with_residual: bool,
) -> None:
    kwargs = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    wide = torch.randn((num_rows, hidden + 16), **kwargs)  # rows of a wider tensor: a stride
    x = wide[:, 8 : 8 + hidden]
    weight = torch.randn(hidden, **kwargs)
    residual = torch.randn((num_rows, hidden), **kwargs) if with_residual else None
    summed = x if residual is None else x + residual
    want = reference.rms_norm(summed, weight, 1e-6)
    before = wide.clone()
    out = torch.full((num_rows, hidden), NAN, device=device, dtype=torch.bfloat16)
    elementwise.rms_norm(x, weight, 1e-6, residual=residual, out=out, library=library)
    assert_within_one_step(out, want)
    assert torch.equal(wide, before)
    if residual is not None:
        assert torch.equal(residual, summed)  # one float32 addition, one rounding: the same bits


def test_rms_norm_of_nothing_and_in_place(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)
    empty = torch.empty((0, 256), device=device, dtype=torch.bfloat16)
    assert elementwise.rms_norm(empty, weight, 1e-6, library=library).shape == (0, 256)
    x = torch.randn((5, 256), device=device, dtype=torch.bfloat16, generator=generator)
    want = reference.rms_norm(x, weight, 1e-6)
    elementwise.rms_norm(x, weight, 1e-6, out=x, library=library)
    assert_within_one_step(x, want)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 65, 127])
@pytest.mark.parametrize("num_heads", [0, 1, 16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_mla_store(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    num_tokens: int,
    num_heads: int,
    with_norm: bool,
) -> None:
    kwargs = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    num_blocks, num_positions = 7, 300
    # As a layer has them: c_kv and k_pe are columns of one projection, q_pe the tail of each head's query.
    kv = torch.randn((num_tokens, 576 + 8), **kwargs)
    c_kv, k_pe = kv[:, :512], kv[:, 512:576]
    q = torch.randn((num_tokens, num_heads, 192), **kwargs)
    norm_weight = torch.randn(512, **kwargs) if with_norm else None
    positions = torch.randint(0, num_positions, (num_tokens,), device=device, generator=generator)
    slots = torch.randperm(num_blocks * 64, device=device, generator=generator)[:num_tokens]
    slots[3::5] = -1
    angle = torch.rand((num_positions, 32), device=device, generator=generator) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)

    # Blocks of another layer lie between ours: the block stride is twice a block.
    pool = torch.full((num_blocks, 2, 64, 576), NAN, device=device, dtype=torch.bfloat16)
    want_pool, want_q = pool.clone(), q.clone()
    want_latent = torch.full((num_tokens, 576), NAN, device=device, dtype=torch.bfloat16)
    latent = want_latent.clone()

    rows = torch.nonzero(slots >= 0).squeeze(1)
    cos, sin = cos_sin[positions[rows]].chunk(2, dim=-1)
    normed = c_kv[rows] if norm_weight is None else reference.rms_norm(c_kv[rows], norm_weight, 1e-6)
    turned = reference.apply_rope(k_pe[rows], cos, sin)
    want_pool[:, 1][slots[rows] // 64, slots[rows] % 64] = torch.cat((normed, turned), dim=-1)
    want_latent[rows] = torch.cat((normed, turned), dim=-1)
    want_q[rows, :, 128:] = reference.apply_rope(q[rows, :, 128:], cos, sin)

    elementwise.mla_store(
        pool[:, 1],
        c_kv,
        k_pe,
        q_pe=q[:, :, 128:],
        positions=positions,
        slot_mapping=slots,
        cos_sin=cos_sin,
        norm_weight=norm_weight,
        latent_out=latent,
        library=library,
    )
    assert torch.equal(q, want_q)
    written = want_pool[:, 1].isnan().logical_not()
    assert torch.equal(pool[:, 1].isnan(), ~written)
    assert pool[:, 0].isnan().all()
    assert torch.equal(pool[:, 1, :, 512:].nan_to_num(), want_pool[:, 1, :, 512:].nan_to_num())
    assert torch.equal(latent.isnan(), want_latent.isnan())
    if len(rows):
        assert_within_one_step(latent[rows], want_latent[rows])
        got = pool[:, 1][slots[rows] // 64, slots[rows] % 64]
        assert torch.equal(got, latent[rows])
