"""The products with weights where there is no GPU: what they refuse, what they compute, how they would be cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rorqual.kernels import linear as products

BF16 = torch.bfloat16


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(BF16)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (bf16(2, 8).float(), bf16(8, 8), "x: needs torch.bfloat16, got torch.float32"),
        (bf16(2, 8), bf16(8, 16), r"weight: needs shape \[\*, 8\], got \[8, 16\]"),
        (bf16(2, 8), bf16(8, 8).T, "weight: its last 2 dimensions must be contiguous"),
    ],
)
def test_linear_refuses(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        products.linear(x, weight)


def test_linear_refuses_other_outputs() -> None:
    x, weight = bf16(2, 8), bf16(16, 8)
    with pytest.raises(ValueError, match=r"out_dtype: needs bfloat16 or float32, got torch\.float16"):
        products.linear(x, weight, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"out: needs torch\.float32, got torch\.bfloat16"):
        products.linear(x, weight, out_dtype=torch.float32, out=bf16(2, 16))
    with pytest.raises(ValueError, match=r"residual: needs shape \[2, 16\], got \[3, 16\]"):
        products.linear(x, weight, residual=bf16(3, 16))


def test_linear_rounds_once() -> None:
    x, weight, bias, residual = bf16(3, 72), bf16(16, 72), bf16(16), bf16(3, 24)[:, :16]
    exact = x.double() @ weight.double().T + bias.double() + residual.double()
    got = products.linear(x, weight, bias=bias, residual=residual)
    assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-5)
    logits = products.linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    out = torch.empty((3, 16), dtype=BF16)
    assert products.linear(x, weight, bias=bias, residual=residual, out=out) is out
    assert torch.equal(out, got)


def test_silu_mul_takes_packed_weights() -> None:
    x, gate, up = bf16(5, 40), bf16(24, 40), bf16(25, 40)[1:]
    got = products.linear_silu_mul(x, products.pack_gate_up(gate, up))
    want = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert got.shape == (5, 24)
    assert torch.allclose(got.double(), want, rtol=2**-7, atol=1e-4)
    with pytest.raises(ValueError, match="need one shape"):
        products.pack_gate_up(bf16(12, 8), bf16(12, 8))
    with pytest.raises(ValueError, match="rows in multiples of 16, got 24"):
        products.linear_silu_mul(x, bf16(24, 40))


def test_absorbed_products_are_the_expansion() -> None:
    """Scores and outputs through the latent equal those of keys and values expanded by kv_b."""
    heads, num_tokens = 3, 4
    kv_b = bf16(heads * 256, 512)
    w_uk, w_uv = products.prepare_absorbed(kv_b)
    assert w_uk.shape == (heads, 128, 512)
    assert w_uv.shape == (heads, 512, 128)
    q = bf16(num_tokens, heads * 192).unflatten(1, (heads, 192))[..., :128]
    latent = bf16(num_tokens, heads, 512)
    of_head = kv_b.double().view(heads, 256, 512)
    want_q = torch.einsum("thd,hdc->thc", q.double(), of_head[:, :128])
    want_v = torch.einsum("thc,hvc->thv", latent.double(), of_head[:, 128:]).flatten(1)
    assert torch.allclose(products.absorb_q(q, w_uk).double(), want_q, rtol=2**-7, atol=1e-3)
    assert torch.allclose(products.absorb_v(latent, w_uv).double(), want_v, rtol=2**-7, atol=1e-3)
    with pytest.raises(ValueError, match="w_uk, transposed: its last 3 dimensions must be contiguous"):
        products.absorb_q(q, w_uk.contiguous())
    with pytest.raises(ValueError, match=r"kv_b: needs shape \[heads \* 256, latent\], got \[100, 512\]"):
        products.prepare_absorbed(bf16(100, 512))


@pytest.mark.parametrize("in_features", [8, 64, 72, 256, 2048, 7168, 10944, 18432])
@pytest.mark.parametrize("out_features", [8, 64, 2048, 3648, 21888, 102400])
def test_every_tiling_is_one_that_the_library_has(out_features: int, in_features: int) -> None:
    tiles = {(16, 64), (32, 64), (64, 64), (64, 128), (128, 128), (192, 128), (256, 128)}
    joins = {(32, 64), (64, 64), (192, 128)}
    for num_tokens in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 4096, 16384):
        for deterministic in (False, True):
            tiling = products.choose_tiling(num_tokens, out_features, in_features, deterministic=deterministic)
            parts = tiling.parts or tiling.split
            if deterministic:
                assert parts == products.deterministic_parts(out_features, in_features)
            if tiling.tile_rows < 64:
                assert num_tokens <= 16
                assert in_features % 64 == 0
                assert not deterministic or (parts == 8 and in_features >= 512)
                continue
            assert (tiling.tile_tokens, tiling.tile_rows) in tiles
            blocks = -(-in_features // 64)
            assert 1 <= tiling.split <= 8
            assert (tiling.split - 1) * -(-blocks // tiling.split) < blocks
            assert parts % tiling.split == 0
            assert parts <= min(8, blocks)
            assert parts == tiling.split or (tiling.tile_tokens, tiling.tile_rows) in joins
