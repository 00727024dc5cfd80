"""The products with weights against float64: every tiling, odd sizes, strides, poison, equal bits, chains of kernels."""

from __future__ import annotations

import pytest
import torch

from rorqual.kernels import linear as products
from rorqual.kernels.elementwise import rms_norm
from rorqual.kernels.linear import Tiling
from rorqual.kernels.loader import KernelCallError, KernelLibrary

BF16, F32 = torch.bfloat16, torch.float32
TOKENS = [0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 64, 65, 127, 130, 256, 257]
SHAPES = [(8, 8), (64, 2048), (3648, 2048), (104, 1096), (520, 72), (2048, 10944)]  # out_features, in_features
ROWS = [Tiling(16, rows) for rows in (8, 16, 32)]
TILES = [Tiling(tokens, 64) for tokens in (16, 32, 64)] + [Tiling(tokens, 128) for tokens in (64, 128, 192, 256)]
JOINING = {(32, 64), (64, 64), (192, 128)}  # one CTA may take several parts


def randn(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    made = (torch.randn(shape, device=generator.device, generator=generator) * scale).to(BF16)
    torch.cuda.synchronize()  # weights may not be in the making when a product is launched
    return made


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of NaN, and the larger tensor that it is a view of."""
    whole = torch.full((shape[0] + 2, shape[1] + 16), float("nan"), dtype=dtype, device="cuda")
    return whole[1:-1, 8:-8], whole


def assert_product(out: torch.Tensor, want: torch.Tensor, scale: torch.Tensor) -> None:
    """out is `want` (float64) up to its rounding and that of float32 sums whose terms add up to `scale` in size."""
    rounding = 2**-8 if out.dtype == BF16 else 2**-22
    excess = (out.double() - want).abs() - (rounding * want.abs() + 2e-6 * scale)
    assert not bool((~(excess <= 0)).any()), f"off by up to {float(excess.nan_to_num(9e9).max())} beyond the tolerance"


def check_linear(
    generator: torch.Generator,
    library: KernelLibrary,
    num_tokens: int,
    shape: tuple[int, int],
    *,
    tiling: Tiling | None = None,
    out_dtype: torch.dtype = BF16,
    terms: bool = False,
    deterministic: bool = False,
) -> None:
    out_features, in_features = shape
    x = randn(generator, num_tokens, in_features + 24)[:, 8 : 8 + in_features]
    weight = randn(generator, out_features, in_features)
    bias = randn(generator, out_features, scale=9.0) if terms else None
    residual = randn(generator, num_tokens, out_features + 8, scale=9.0)[:, :out_features] if terms else None
    out, whole = poisoned(num_tokens, out_features, dtype=out_dtype)
    torch.cuda.synchronize()
    products.linear(
        x,
        weight,
        out=out,
        out_dtype=out_dtype,
        residual=residual,
        bias=bias,
        deterministic=deterministic,
        tiling=tiling,
        library=library,
    )
    want = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().T.abs()
    if bias is not None and residual is not None:
        want += bias.double() + residual.double()
        scale += bias.double().abs() + residual.double().abs()
    if tiling is None and terms:
        scale += 2**13 * want.abs()  # cuBLAS's product may be rounded before the terms are added
    assert_product(out, want, scale)
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
) -> None:
    for num_tokens in TOKENS:
        for deterministic in (False, True):
            check_linear(generator, library, num_tokens, shape, out_dtype=out_dtype, deterministic=deterministic)


@pytest.mark.parametrize("tiling", ROWS + TILES, ids=lambda t: f"{t.tile_rows}x{t.tile_tokens}")
def test_every_tiling(device: torch.device, library: KernelLibrary, generator: torch.Generator, tiling: Tiling) -> None:
    few = tiling.tile_rows < 64
    for num_tokens in (1, 7, 8, 9, 16) if few else (1, tiling.tile_tokens - 1, tiling.tile_tokens + 1, 300):
        for shape in (
            ((136, 2048), (520, 64), (4352, 576), (72, 3584)) if few else ((136, 2048), (520, 72), (4352, 520))
        ):
            for split in (1,) if few or tiling.tile_tokens == 192 else (1, 2, 3, 8):
                if split > -(-shape[1] // 64):
                    continue
                cut = Tiling(tiling.tile_tokens, tiling.tile_rows, split)
                check_linear(generator, library, num_tokens, shape, tiling=cut, terms=True)
                check_linear(generator, library, num_tokens, shape, tiling=cut, out_dtype=F32)


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("shape", [(144, 2048), (80, 2816), (4368, 512), (208, 10944)])
def test_parts_give_the_same_bits_whoever_adds_them(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    shape: tuple[int, int],
    silu_mul: bool,
) -> None:
    """Eight parts: in the warps of a CTA, in the CTAs of a cluster, in one CTA after the other, by either instruction."""
    num_tokens = 200
    # Of all sizes, so that another order would give other bits.
    x = (randn(generator, num_tokens, shape[1]).float() * 2 ** torch.randint(
        -6, 7, (num_tokens, shape[1]), device=device, generator=generator
    )).to(BF16)  # fmt: skip
    weight = randn(generator, *shape, scale=shape[1] ** -0.5)
    torch.cuda.synchronize()

    def of(rows: torch.Tensor, tiling: Tiling) -> torch.Tensor:
        if silu_mul:
            return products.linear_silu_mul(rows, weight, tiling=tiling, library=library)
        return products.linear(rows, weight, out_dtype=F32, tiling=tiling, library=library)

    whole = of(x, Tiling(64, 64, 1, 8))
    if not silu_mul:
        assert_product(whole, x.double() @ weight.double().T, x.double().abs() @ weight.double().T.abs())
    for tile in TILES:
        joins = (tile.tile_tokens, tile.tile_rows) in JOINING
        for split in (1,) if tile.tile_tokens == 192 else (1, 2, 4, 8) if joins else (8,):
            for num in (1, 33, num_tokens):
                tiling = Tiling(tile.tile_tokens, tile.tile_rows, split, 8)
                assert torch.equal(of(x[:num], tiling), whole[:num]), (tiling, num)
    for rows in (16, 32) if silu_mul else (0, 8, 16, 32):
        for num in (1, 2, 7, 8, 9, 16):
            assert torch.equal(of(x[20 : 20 + num], Tiling(num, rows, 1, 8)), whole[20 : 20 + num]), (rows, num)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 40, 200, 300])
def test_the_residual_may_be_the_output(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, num_tokens: int
) -> None:
    x, weight = randn(generator, num_tokens, 512), randn(generator, 256, 512)
    residual = randn(generator, num_tokens, 256)
    want = products.linear(x, weight, residual=residual.clone(), library=library)
    out = products.linear(x, weight, residual=residual, out=residual, library=library)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    "tiling", [None, *(t for t in ROWS if t.tile_rows % 16 == 0), *TILES, Tiling(32, 64, 4), Tiling(128, 128, 2)]
)
def test_silu_mul(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, tiling: Tiling | None
) -> None:
    few = tiling is not None and tiling.tile_rows < 64
    for num_tokens in [n for n in TOKENS if n <= 16 or not few]:
        narrow = 64 if few else 72 if tiling is None or tiling.split == 1 else 584
        for width, in_features in ((8, narrow), (328, 2048)):
            x = randn(generator, num_tokens, in_features)
            gate = randn(generator, width, in_features, scale=in_features**-0.5)
            up = randn(generator, width, in_features, scale=in_features**-0.5)
            packed = products.pack_gate_up(gate, up)
            torch.cuda.synchronize()
            out, whole = poisoned(num_tokens, width)
            products.linear_silu_mul(x, packed, out=out, tiling=tiling, library=library)
            a, b = x.double() @ gate.double().T, x.double() @ up.double().T
            assert_product(out, torch.nn.functional.silu(a) * b, 10 * (1 + a.abs()) * (1 + b.abs()))
            assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [4, 16])
def test_absorbed(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    heads: int,
    deterministic: bool,
) -> None:
    kv_b = randn(generator, heads * 256, 512)
    w_uk, w_uv = products.prepare_absorbed(kv_b)
    torch.cuda.synchronize()
    of_head = kv_b.double().view(heads, 256, 512)
    for num_tokens in [*TOKENS, 2049]:
        qkv = randn(generator, num_tokens, heads * 192 + 576)
        q = qkv[:, : heads * 192].unflatten(1, (heads, 192))[..., :128]
        out = torch.full((num_tokens, heads, 576), float("nan"), dtype=BF16, device=device)
        got = products.absorb_q(q, w_uk, out[..., :512], deterministic=deterministic, library=library)
        want = torch.einsum("thd,hdc->thc", q.double(), of_head[:, :128])
        assert_product(got, want, torch.einsum("thd,hdc->thc", q.double().abs(), of_head[:, :128].abs()))
        assert bool(out[..., 512:].isnan().all())

        latent = randn(generator, num_tokens, heads, 512)
        out, whole = poisoned(num_tokens, heads * 128)
        got = products.absorb_v(latent, w_uv, out, deterministic=deterministic, library=library)
        want = torch.einsum("thc,hvc->thv", latent.double(), of_head[:, 128:]).flatten(1)
        scale = torch.einsum("thc,hvc->thv", latent.double().abs(), of_head[:, 128:].abs()).flatten(1)
        assert_product(got, want, scale)
        assert int(whole.isnan().sum()) == whole.numel() - out.numel()


@pytest.mark.parametrize("shape", [(64, 2048), (3648, 2048), (256, 520), (2048, 10944)])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_deterministic_rows_do_not_see_their_neighbours(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
) -> None:
    x, weight = randn(generator, 16384, shape[1]), randn(generator, *shape)

    def of(rows: torch.Tensor) -> torch.Tensor:
        return products.linear(rows, weight, out_dtype=out_dtype, deterministic=True, library=library)

    whole = of(x)
    for num_tokens in [n for n in TOKENS if n > 0] + [63, 511, 512, 2047, 4096]:
        assert torch.equal(of(x[:num_tokens]), whole[:num_tokens]), num_tokens
    assert torch.equal(of(x[70:133]), whole[70:133])
    assert torch.equal(of(x[16383:]), whole[16383:])


def test_deterministic_gate_up_and_absorbed(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    x, packed = randn(generator, 2047, 2048), randn(generator, 1312, 2048, scale=0.02)
    w_uk, w_uv = products.prepare_absorbed(randn(generator, 16 * 256, 512))
    q, latent = randn(generator, 2047, 16, 192)[..., :128], randn(generator, 2047, 16, 512)
    torch.cuda.synchronize()
    calls = (
        lambda n: products.linear_silu_mul(x[:n], packed, deterministic=True, library=library),
        lambda n: products.absorb_q(q[:n], w_uk, deterministic=True, library=library),
        lambda n: products.absorb_v(latent[:n], w_uv, deterministic=True, library=library),
    )
    for call in calls:
        whole = call(2047)
        for num_tokens in (1, 2, 16, 17, 63, 64, 65, 128, 200, 257, 1000):
            assert torch.equal(call(num_tokens), whole[:num_tokens]), num_tokens


@pytest.mark.parametrize("num_tokens", [2, 16, 33, 257])
def test_nan_stays_in_its_row(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, num_tokens: int
) -> None:
    x, weight = randn(generator, num_tokens, 1032), randn(generator, 200, 1032)
    for deterministic in (False, True):
        clean = products.linear(x, weight, deterministic=deterministic, library=library)
        dirty = x.clone()
        dirty[1] = float("nan")
        out = products.linear(dirty, weight, deterministic=deterministic, library=library)
        assert bool(out[1].isnan().all())
        assert torch.equal(out[0], clean[0])
        assert torch.equal(out[2:], clean[2:])
        # And what such a run leaves in shared memory is not taken for the depth's end by a shorter product.
        narrow = weight[:, :72].contiguous()
        torch.cuda.synchronize()
        short = products.linear(x[:, :72], narrow, deterministic=deterministic, library=library)
        assert not bool(short.isnan().any())


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 48, 130])
@pytest.mark.parametrize("deterministic", [False, True])
def test_chains_in_a_graph(
    device: torch.device,
    library: KernelLibrary,
    generator: torch.Generator,
    *,
    num_tokens: int,
    deterministic: bool,
) -> None:
    """Kernels that start before the previous one ends still read what it wrote, and overwrite nothing it reads."""
    heads, hidden, layers = 4, 512, 6
    norm = [randn(generator, hidden) for _ in range(layers)]
    qkv_a = [randn(generator, heads * 192 + 576, hidden, scale=0.05) for _ in range(layers)]
    absorbed = [products.prepare_absorbed(randn(generator, heads * 256, 512, scale=0.05)) for _ in range(layers)]
    o_proj = [randn(generator, hidden, heads * 128, scale=0.05) for _ in range(layers)]
    gate_up = [randn(generator, 2 * 640, hidden, scale=0.05) for _ in range(layers)]
    down = [randn(generator, hidden, 640, scale=0.05) for _ in range(layers)]
    x = randn(generator, num_tokens, hidden)
    normed, qkv = torch.empty_like(x), torch.empty((num_tokens, heads * 192 + 576), dtype=BF16, device=device)
    latent = torch.empty((num_tokens, heads, 512), dtype=BF16, device=device)
    values = torch.empty((num_tokens, heads * 128), dtype=BF16, device=device)
    wide = torch.empty((num_tokens, 640), dtype=BF16, device=device)
    residual = torch.empty_like(x)
    options = {"deterministic": deterministic, "library": library}

    def step(*, settle: bool) -> None:
        def done() -> None:
            if settle:
                torch.cuda.synchronize()

        residual.copy_(x)
        done()
        for i in range(layers):
            rms_norm(residual, norm[i], 1e-6, out=normed, library=library)
            done()
            products.linear(normed, qkv_a[i], out=qkv, **options)
            done()
            q = qkv[:, : heads * 192].unflatten(1, (heads, 192))[..., :128]
            products.absorb_q(q, absorbed[i][0], latent, **options)
            done()
            products.absorb_v(latent, absorbed[i][1], values, **options)
            done()
            products.linear(values, o_proj[i], residual=residual, out=residual, **options)
            done()
            rms_norm(residual, norm[i], 1e-6, out=normed, library=library)
            done()
            products.linear_silu_mul(normed, gate_up[i], out=wide, **options)
            done()
            products.linear(wide, down[i], residual=residual, out=residual, **options)
            done()

    step(settle=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(settle=False)
    for _ in range(20):
        x.copy_(torch.randn(x.shape, device=device, generator=generator))
        step(settle=True)
        want = residual.clone()
        for buffer in (normed, qkv, latent, values, wide, residual):
            buffer.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(residual, want)
        assert not bool(want.isnan().any())


def test_what_the_library_refuses(device: torch.device, library: KernelLibrary, generator: torch.Generator) -> None:
    x, weight = randn(generator, 17, 64), randn(generator, 64, 64)
    with pytest.raises(KernelCallError, match="takes at most 16, and in_features in multiples of 64, got 17 and 64"):
        products.linear(x, weight, tiling=ROWS[0], library=library)
    with pytest.raises(KernelCallError, match="tiles are 64 x 16"):
        products.linear(x, weight, tiling=Tiling(96, 64), library=library)
    with pytest.raises(KernelCallError, match="leave no part without"):
        products.linear(x, weight, tiling=Tiling(32, 64, 2), library=library)
    with pytest.raises(KernelCallError, match="tiles of 128 x 128 need as many parts as split, got 8 and 4"):
        products.linear(
            randn(generator, 17, 512), randn(generator, 64, 512), tiling=Tiling(128, 128, 4, 8), library=library
        )
    with pytest.raises(KernelCallError, match="takes no parts, or 8 of at least 512 in_features, got 8 of 64"):
        products.linear(x[:4], weight, tiling=Tiling(4, 16, 1, 8), library=library)
    with pytest.raises(KernelCallError, match="multiples of 8"):
        products.linear(x[:, :60], weight[:, :60].contiguous(), library=library)
