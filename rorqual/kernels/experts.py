"""The experts of a mixture layer: packing their weights, both products, and the weighted sum that ends the layer.

Shared experts can be experts like the others, which every token chooses with weight 1 (`moe.route(num_shared=…)`).
Compiled on CUDA, torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from . import elementwise
from .abi import ExpertsArgs, ExpertsCombineArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load
from .moe import permute

INTERLEAVE = 8  # gate and up rows alternate by so many
TILE_ROWS, TILE_DEPTH = 128, 64  # a box of a weight in shared memory, [128, 64]
CHUNK_CHOICES = 2048  # choices that one CTA of the plan sorts
FEW_CHOICES = 64  # up to so many, the products sort them themselves
ALONE_TOKENS = 32  # beyond so many, CTAs work in pairs that share a group's tokens


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The two first projections as one weight, in the order that `moe_experts` reads.

    gate, up: [num_experts, width, hidden] bf16; width a multiple of 64, hidden of 128. Returns
    [num_experts, 2 * width, hidden] bf16 on their device. Works expert by expert too: `pack_gate_up_into`.
    """
    if gate.shape != up.shape or gate.dim() != 3:
        raise ValueError(f"gate and up: need one shape [num_experts, width, hidden], got {gate.shape} and {up.shape}")
    num_experts, width, hidden = gate.shape
    packed = gate.new_empty((num_experts, 2 * width, hidden))
    for expert in range(num_experts):
        pack_gate_up_into(packed[expert], gate[expert], up[expert])
    return packed


def pack_gate_up_into(packed: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Fill one expert's packed weight. packed: [2 * width, hidden] contiguous; gate, up: [width, hidden], same dtype.

    Rows alternate, eight of gate and eight of up, so that a value and its gate meet in one thread's accumulators; the
    whole then lies in boxes (`pack_boxes`).
    """
    width, hidden = gate.shape
    check("gate", gate, (width, hidden), packed.dtype, packed.device)
    check("up", up, (width, hidden), packed.dtype, packed.device)
    check("packed", packed, (2 * width, hidden), packed.dtype, packed.device, contiguous_dims=2)
    _check_sizes(hidden, width)
    halves = [half.reshape(-1, INTERLEAVE, hidden) for half in (gate, up)]
    packed.copy_(pack_boxes(torch.stack(halves, dim=1).view(2 * width, hidden)))


def unpack_gate_up(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's gate and up, [width, hidden] each, of its packed weight [2 * width, hidden]."""
    rows, hidden = packed.shape
    halves = unpack_boxes(packed).view(rows // (2 * INTERLEAVE), 2, INTERLEAVE, hidden)
    return halves[:, 0].reshape(rows // 2, hidden), halves[:, 1].reshape(rows // 2, hidden)


def pack_down(down: torch.Tensor) -> torch.Tensor:
    """The last projection, [num_experts, hidden, width] bf16, in the order that `moe_experts` reads. Same shape."""
    packed = torch.empty_like(down)
    for expert in range(down.shape[0]):
        pack_down_into(packed[expert], down[expert])
    return packed


def pack_down_into(packed: torch.Tensor, down: torch.Tensor) -> None:
    """Fill one expert's packed weight. Both [hidden, width], packed contiguous; they may be the same tensor."""
    hidden, width = down.shape
    check("packed", packed, (hidden, width), down.dtype, down.device, contiguous_dims=2)
    _check_sizes(hidden, width)
    packed.copy_(pack_boxes(down))


def pack_boxes(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] as its boxes of [128, 64], one after the other, each as it lies in swizzled shared memory. Same shape.

    n: a multiple of 128, k of 64. Of a row's eight 16-byte pieces, piece p comes at p ^ (row % 8). A tile's weights are
    then one run of memory, and any rows of a step another: the copy engine takes them faster than rows apart.
    """
    n, k = weight.shape
    boxes = weight.reshape(n // TILE_ROWS, TILE_ROWS, k // TILE_DEPTH, 8, 8).permute(0, 2, 1, 3, 4)
    return _swizzle(boxes).reshape(n, k)


def unpack_boxes(packed: torch.Tensor) -> torch.Tensor:
    """What `pack_boxes` was given."""
    n, k = packed.shape
    boxes = _swizzle(packed.view(n // TILE_ROWS, k // TILE_DEPTH, TILE_ROWS, 8, 8))
    return boxes.permute(0, 2, 1, 3, 4).reshape(n, k)


def _swizzle(boxes: torch.Tensor) -> torch.Tensor:
    """boxes: [..., ..., 128, 8, 8]; exchanges pieces (dim 3) by row (dim 2). Its own inverse."""
    order = torch.arange(8)[None, :] ^ (torch.arange(TILE_ROWS) % 8)[:, None]
    return boxes.gather(3, order.to(boxes.device)[None, None, :, :, None].expand(boxes.shape))


@dataclass(frozen=True, slots=True)
class ExpertsWorkspace:
    """Scratch of `moe_experts` and `moe_combine` for up to max_tokens tokens; layers of one shape share it in turn."""

    max_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    width: int
    num_ctas: int  # multiprocessors
    y: torch.Tensor  # bf16 [max_tokens * top_k, hidden]: the choices' outputs, in expert order
    h: torch.Tensor  # bf16 [max_tokens * top_k, width]
    groups: torch.Tensor  # int32 [1 + groups, 4]: number of groups; then expert, first row, rows, 0
    expert_starts: torch.Tensor  # int32 [num_experts + 1]
    row_of: torch.Tensor  # int32 [max_tokens * top_k]: token * top_k + choice -> its row, -1: no expert
    chunk_counts: torch.Tensor  # int32 [chunks, num_experts]


def make_experts_workspace(
    max_tokens: int, top_k: int, num_experts: int, hidden: int, width: int, device: torch.device
) -> ExpertsWorkspace:
    """Room for max_tokens tokens of top_k choices (shared experts counted in both numbers) of num_experts experts."""
    device = torch.device(device)
    _check_sizes(hidden, width)
    if max_tokens < 1 or not 1 <= top_k <= 32 or not 1 <= num_experts <= 512:
        raise ValueError(
            "needs max_tokens >= 1, top_k in [1, 32] and num_experts in [1, 512], "
            f"got {max_tokens}, {top_k} and {num_experts}"
        )
    rows = max_tokens * top_k
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    return ExpertsWorkspace(
        max_tokens=max_tokens,
        top_k=top_k,
        num_experts=num_experts,
        hidden=hidden,
        width=width,
        num_ctas=num_ctas,
        y=bf16(rows, hidden),
        h=bf16(rows, width),
        groups=int32(1 + num_experts + rows // 8, 4),
        expert_starts=int32(num_experts + 1),
        row_of=int32(rows),
        chunk_counts=int32(-(-rows // CHUNK_CHOICES), num_experts),
    )


def tokens_of_a_group(num_tokens: int) -> int:
    """Tokens of one expert that a tile takes at most, for a step of num_tokens: 8, 16, 32, 128 or 256.

    A tile's cost follows the tokens that it really has; the limit only shares shared memory between tokens and
    weights in flight. An expert with more tokens gets several groups, the later ones with its weights from L2.
    """
    for limit, tokens in ((8, 8), (16, 16), (32, 32), (512, 128)):
        if num_tokens <= limit:
            return tokens
    return 256


def moe_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    workspace: ExpertsWorkspace,
    *,
    deterministic: bool = False,
    library: KernelLibrary | None = None,
) -> None:
    """y = down(silu(gate(x)) * up(x)) of every choice, left in the workspace for `moe_combine`.

    x: [num_tokens, hidden] bf16, rows may be strided. topk_ids: int32 [num_tokens, top_k] contiguous; an id outside
    [0, num_experts) is no expert. gate_up: [num_experts, 2 * width, hidden] bf16 from `pack_gate_up`; down:
    [num_experts, hidden, width] bf16 from `pack_down`. Sums are float32; silu(gate) * up is rounded once, and so is y.

    A choice's y is one sum over k in order, made the same way whatever the other tokens are: its bits depend on its
    token and its expert alone, with `deterministic` or without.
    """
    for stage in experts_stages(x, topk_ids, gate_up, down, workspace, library=library):
        stage()


def experts_stages(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    workspace: ExpertsWorkspace,
    *,
    group_tokens: int | None = None,
    few: bool | None = None,
    paired: bool | None = None,
    even: bool = False,
    library: KernelLibrary | None = None,
) -> list[Callable[[], None]]:
    """The steps of `moe_experts`, to be called in order: plan, gate and up, down. On the CPU it is one.

    For measurements: group_tokens instead of `tokens_of_a_group`, few (no plan, rows of x one by one; at most 64 choices),
    paired (two CTAs share a group's tokens; not if few), even (all CTAs take as many weight rows, not whole tiles).
    """
    device, ws = x.device, workspace
    check("x", x, (None, ws.hidden), torch.bfloat16, device)
    num_tokens = x.shape[0]
    if num_tokens > ws.max_tokens:
        raise ValueError(f"x: the workspace is for at most {ws.max_tokens} tokens, got {num_tokens}")
    check("topk_ids", topk_ids, (num_tokens, ws.top_k), torch.int32, device, contiguous_dims=2)
    check("gate_up", gate_up, (ws.num_experts, 2 * ws.width, ws.hidden), torch.bfloat16, device, contiguous_dims=3)
    check("down", down, (ws.num_experts, ws.hidden, ws.width), torch.bfloat16, device, contiguous_dims=3)
    check("workspace", ws.y, (None, ws.hidden), torch.bfloat16, device)
    if library is None:
        if device.type != "cuda":
            return [partial(_experts_reference, x, topk_ids, gate_up, down, ws)]
        library = load()
    if group_tokens is None:
        group_tokens = tokens_of_a_group(num_tokens)
    if few is None:
        few = num_tokens * ws.top_k <= FEW_CHOICES
    args = ExpertsArgs(
        y=ws.y.data_ptr(),
        h=ws.h.data_ptr(),
        groups=ws.groups.data_ptr(),
        expert_starts=ws.expert_starts.data_ptr(),
        row_of=ws.row_of.data_ptr(),
        chunk_counts=ws.chunk_counts.data_ptr(),
        x=x.data_ptr(),
        topk_ids=topk_ids.data_ptr(),
        gate_up=gate_up.data_ptr(),
        down=down.data_ptr(),
        x_stride=x.stride(0),
        row_capacity=ws.y.shape[0],
        num_tokens=num_tokens,
        top_k=ws.top_k,
        num_experts=ws.num_experts,
        hidden=ws.hidden,
        width=ws.width,
        group_tokens=group_tokens,
        few=int(few),
        paired=int(num_tokens > ALONE_TOKENS if paired is None else paired),
        even=int(even),
        num_ctas=ws.num_ctas,
    )
    names = ("rorqual_experts_plan", "rorqual_experts_gate_up", "rorqual_experts_down")
    return [partial(_call_stage, library, name, args, (x, topk_ids, gate_up, down, ws)) for name in names]


def moe_combine(
    workspace: ExpertsWorkspace,
    topk_weights: torch.Tensor,
    residual: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
    library: KernelLibrary | None = None,
) -> None:
    """residual += sum over the choices of weight * y, in order of choice; then the RMSNorm that follows, if wanted.

    After `moe_experts` with the same tokens. topk_weights: float32 [num_tokens, top_k] contiguous. residual:
    [num_tokens, hidden] bf16, rows may be strided; summed in float32 and rounded once. normed_out: [num_tokens, hidden]
    bf16 or None; gets the new residual's norm times norm_weight ([hidden] bf16), by `elementwise.rms_norm`'s
    arithmetic, bit for bit.
    """
    device, ws = residual.device, workspace
    num_tokens = topk_weights.shape[0]
    check("topk_weights", topk_weights, (num_tokens, ws.top_k), torch.float32, device, contiguous_dims=2)
    check("residual", residual, (num_tokens, ws.hidden), torch.bfloat16, device)
    if num_tokens > ws.max_tokens:
        raise ValueError(f"topk_weights: the workspace is for at most {ws.max_tokens} tokens, got {num_tokens}")
    if (norm_weight is None) != (normed_out is None):
        raise ValueError("norm_weight and normed_out: give both or neither")
    if norm_weight is not None and normed_out is not None:
        check("norm_weight", norm_weight, (ws.hidden,), torch.bfloat16, device)
        check("normed_out", normed_out, (num_tokens, ws.hidden), torch.bfloat16, device)
    if library is None:
        if device.type != "cuda":
            _combine_reference(ws, topk_weights, residual)
            if norm_weight is not None and normed_out is not None:
                elementwise.rms_norm(residual, norm_weight, eps, out=normed_out)
            return
        library = load()
    args = ExpertsCombineArgs(
        residual=residual.data_ptr(),
        normed=None if normed_out is None else normed_out.data_ptr(),
        norm_weight=None if norm_weight is None else norm_weight.data_ptr(),
        y=ws.y.data_ptr(),
        row_of=ws.row_of.data_ptr(),
        topk_weights=topk_weights.data_ptr(),
        residual_stride=residual.stride(0),
        normed_stride=0 if normed_out is None else normed_out.stride(0),
        num_tokens=num_tokens,
        top_k=ws.top_k,
        hidden=ws.hidden,
        eps=eps,
    )
    library.call("rorqual_experts_combine", args, current_stream(device))


def _call_stage(library: KernelLibrary, name: str, args: ExpertsArgs, owners: tuple[Any, ...]) -> None:
    """owners: x first, and whatever else the args point to, kept alive for stages that are called later, or again."""
    library.call(name, args, current_stream(owners[0].device))


def _check_sizes(hidden: int, width: int) -> None:
    if hidden < 1 or hidden % TILE_ROWS or width < 1 or width % TILE_DEPTH:
        raise ValueError(
            f"hidden must be a multiple of {TILE_ROWS} and width of {TILE_DEPTH}, got {hidden} and {width}"
        )


def _experts_reference(
    x: torch.Tensor, topk_ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, workspace: ExpertsWorkspace
) -> None:
    """`moe_experts` in torch, float32 inside, expert by expert."""
    ws = workspace
    order = permute(topk_ids, ws.num_experts)
    ws.expert_starts.copy_(order.expert_starts)
    ws.row_of[: topk_ids.numel()] = order.row_of.flatten()
    num_rows = int(order.expert_starts[-1])
    token_of = order.choice_of[:num_rows] // ws.top_k
    starts = order.expert_starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        rows = x[token_of[start:end].long()].float()
        gate, up = unpack_gate_up(gate_up[expert])
        h = (F.silu(rows @ gate.float().T) * (rows @ up.float().T)).to(torch.bfloat16)
        ws.h[start:end] = h
        ws.y[start:end] = h.float() @ unpack_boxes(down[expert]).float().T


def _combine_reference(workspace: ExpertsWorkspace, topk_weights: torch.Tensor, residual: torch.Tensor) -> None:
    """`moe_combine`'s sum in torch."""
    num_tokens, top_k = topk_weights.shape
    row_of = workspace.row_of[: num_tokens * top_k].view(num_tokens, top_k).long()
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for choice in range(top_k):
        row = row_of[:, choice]
        y = workspace.y[row.clamp(min=0)].float() * topk_weights[:, choice, None]
        total += torch.where(row[:, None] >= 0, y, 0.0)
    residual.copy_(residual.float() + total)
