"""Products with weights: prepared once at load, and, where asked, with bits that do not depend on the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from rorqual.core.errors import ConfigError

TILE = 16  # rows of one product when bits must not depend on the batch
GRAIN = 32_767  # most elements of an elementwise op that torch surely runs on one thread


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked product works here for `dtype`, tried once.

    Measured on 2 AVX2 cores, float32, 16 rows: 1.2 ms against 2.5 for 8192 x 256, 0.53 against 1.5 for 4352 x 256;
    MKL packs the weight again at every call.
    """
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        x, w = torch.ones(4, 32, dtype=dtype), torch.ones(8, 32, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(w, TILE)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "swish", [], "")
        z = torch.ops.mkldnn._linear_pointwise.binary(x, y, packed, None, "mul")
        z = torch.ops.mkldnn._linear_pointwise.binary(x, z, packed, None, "add")
        return bool((z == 32 * 32 + 32).all())
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] in oneDNN's own order."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE)
    return packed


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, then: str) -> torch.Tensor:
    """x @ weight.T + bias, `then` "none" or "swish" (silu) of it."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, then, [], "")
    return y


def packed_linear_with(
    x: torch.Tensor, other: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, then: str
) -> torch.Tensor:
    """x @ weight.T + bias, `then` "add"ed to or "mul"tiplied with `other`, elementwise."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, then)
    return y


class Linear:
    """x @ weight.T (+ bias) (+ residual).

    `deterministic`: rows are computed in tiles of 16, padded with zeros, each tile one product of the same shape,
    so a row's bits depend on the row alone.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        deterministic: bool = False,
        pack: bool = False,
        tile: int = TILE,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.tile = tile
        self.bias = bias
        self.deterministic = deterministic
        self.packed: torch.Tensor | None = None
        if pack and weight.device.type == "cpu" and packs(weight.dtype):
            self.packed = pack_weight(weight)
        # One row is a matrix-vector product. Measured on 2 AVX2 cores: of 8192 x 256, 0.38 ms with the transpose
        # stored and 1.34 without; of 256 x 2176, 0.22 against 0.09.
        transpose = weight.device.type == "cpu" and self.out_features > self.in_features
        if transpose and weight.dtype == torch.float32:
            self.weight = weight.t().contiguous().t()
        else:
            self.weight = weight.contiguous()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [num_rows, in_features]; residual: [num_rows, out_features], added before the result is rounded where
        the product allows it."""
        if self.deterministic:
            return in_tiles(self._product, x, residual, self.tile)
        return self._product(x, residual)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.packed is not None and x.shape[0] > 1:
            if residual is None:
                return packed_linear(x, self.packed, self.bias, "none")
            return packed_linear_with(x, residual, self.packed, self.bias, "add")
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y


class GateUp:
    """silu(x @ gate.T) * (x @ up.T): the first half of a gated MLP."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, *, deterministic: bool = False, pack: bool = False
    ) -> None:
        self.width = gate.shape[0]
        self.deterministic = deterministic
        self.packed_gate: torch.Tensor | None = None
        self.packed_up: torch.Tensor | None = None
        if pack and gate.device.type == "cpu" and packs(gate.dtype):
            self.packed_gate = pack_weight(gate)
            self.packed_up = pack_weight(up)
        both = torch.cat((gate, up))
        self.weight = both.t().contiguous().t() if both.dtype == torch.float32 else both

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_rows, hidden] -> [num_rows, width]."""
        if self.deterministic:
            return in_tiles(self._product, x, None)
        return self._product(x, None)

    def _product(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.packed_gate is not None and self.packed_up is not None and x.shape[0] > 1:
            gated = packed_linear(x, self.packed_gate, None, "swish")
            return packed_linear_with(x, gated, self.packed_up, None, "mul")
        both = F.linear(x, self.weight)
        gate, up = both[:, : self.width], both[:, self.width :]
        if not self.deterministic:
            return F.silu(gate) * up
        return silu_mul_rows(gate, up)


def in_tiles(
    product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    tile: int = TILE,
) -> torch.Tensor:
    """`product` over x in tiles of `tile` rows, the last one padded with zeros."""
    num_rows = x.shape[0]
    padding = -num_rows % tile if num_rows else tile
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
        residual = None if residual is None else F.pad(residual, (0, 0, 0, padding))
    tiles = [
        product(x[start : start + tile], None if residual is None else residual[start : start + tile])
        for start in range(0, x.shape[0], tile)
    ]
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out[:num_rows] if padding else out


def silu_mul_rows(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up with equal bits for equal rows: gate and up are the halves of one tensor, [num_rows, width].

    Above torch's grain size several threads cut the work anywhere, and what is left over at a cut runs through scalar
    code with another exp. Below it one thread takes row after row, and every row meets the same code.
    """
    rows = max(1, GRAIN // gate.shape[1])
    parts = [F.silu(gate[i : i + rows]) * up[i : i + rows] for i in range(0, gate.shape[0], rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def require_equal_rows(dtype: torch.dtype, device: torch.device, pack: bool) -> None:
    """Try whether a tile's rows have the same bits in every place and among any neighbours, as `deterministic`
    rests on. Raises ConfigError if this machine's products break it."""
    generator = torch.Generator().manual_seed(0)
    for in_features, out_features in ((256, 704), (97, 131), (512, 1024)):
        weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
        x = torch.randn(TILE, in_features, generator=generator).to(device, dtype)
        linear = Linear(weight, deterministic=True, pack=pack)
        whole = linear(x)
        for shift in (1, 7):
            moved = linear(x.roll(shift, 0)).roll(-shift, 0)
            alone = linear(x[shift : shift + 1])
            if not (torch.equal(whole, moved) and torch.equal(whole[shift : shift + 1], alone)):
                raise ConfigError(
                    f"--deterministic cannot be kept here: a product of {TILE} x {in_features} and {in_features} x "
                    f"{out_features} in {dtype} gives a row other bits in another place. Use another --dtype, or "
                    "serve without --deterministic.",
                    field="deterministic",
                )
