"""The grouped products, their plan and the combination against float32 products, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from rorqual.kernels import elementwise, experts, moe
from rorqual.kernels.experts import ExpertsWorkspace
from rorqual.kernels.loader import KernelLibrary

MAX_TOKENS = 2048
# Experts (shared ones last), choices a token, hidden, width.
SHAPES = {"embedded": (17, 5, 256, 128), "v2_lite": (66, 8, 2048, 1408), "v3": (256, 8, 7168, 2048)}
SHARED = {"embedded": 1, "v2_lite": 2, "v3": 0}
TOKENS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 200, 513, 1025, 2048]


@dataclass(frozen=True)
class Layer:
    name: str
    gate_up: torch.Tensor
    down: torch.Tensor
    workspace: ExpertsWorkspace

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[2]


@pytest.fixture(scope="module", params=SHAPES)
def layer(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Layer]:
    num_experts, top_k, hidden, width = SHAPES[request.param]
    generator = torch.Generator(device=device).manual_seed(1)
    bf16 = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    # Packed as they are: the reference unpacks them, and the packing has tests of its own.
    gate_up = torch.randn((num_experts, 2 * width, hidden), **bf16).mul_(2 * hidden**-0.5)
    down = torch.randn((num_experts, hidden, width), **bf16).mul_(width**-0.5)
    workspace = experts.make_experts_workspace(MAX_TOKENS, top_k, num_experts, hidden, width, device)
    yield Layer(request.param, gate_up, down, workspace)
    del gate_up, down, workspace
    torch.cuda.empty_cache()


def poison(workspace: ExpertsWorkspace) -> None:
    workspace.y.fill_(float("nan"))
    workspace.h.fill_(float("nan"))
    for scratch in ("groups", "expert_starts", "row_of", "chunk_counts"):
        getattr(workspace, scratch).fill_(0x7F7F7F7F)


def random_ids(layer: Layer, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct routed experts, skewed (so that some have none), then the shared ones."""
    shared, top_k = SHARED[layer.name], layer.workspace.top_k
    routed = layer.num_experts - shared
    device = layer.down.device
    liking = torch.arange(routed, device=device) * (-4.0 / routed)
    noise = torch.rand((num_tokens, routed), device=device, generator=generator).clamp_(1e-6, 1 - 1e-6)
    chosen = (liking - (-noise.log()).log()).topk(top_k - shared, dim=-1).indices.to(torch.int32)
    always = torch.arange(routed, routed + shared, dtype=torch.int32, device=device).expand(num_tokens, -1)
    return torch.cat((chosen, always), dim=-1).contiguous()


def wanted_y(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 [num_tokens, top_k, hidden], not rounded at the end; zero where there is no expert."""
    out = torch.zeros((*ids.shape, layer.hidden), device=x.device)
    for expert in ids.unique().tolist():
        if not 0 <= expert < layer.num_experts:
            continue
        token, choice = torch.where(ids == expert)
        gate, up = experts.unpack_gate_up(layer.gate_up[expert])
        rows = x[token].float()
        h = (F.silu(rows @ gate.float().T) * (rows @ up.float().T)).to(torch.bfloat16).float()
        out[token, choice] = h @ experts.unpack_boxes(layer.down[expert]).float().T
    return out


def got_y(layer: Layer, ids: torch.Tensor) -> torch.Tensor:
    """bf16 [num_tokens, top_k, hidden] from the workspace."""
    row_of = layer.workspace.row_of[: ids.numel()].view(ids.shape).long()
    y = layer.workspace.y[row_of.clamp(min=0)]
    return torch.where(row_of[..., None] >= 0, y, 0.0)


def check_y(layer: Layer, x: torch.Tensor, ids: torch.Tensor) -> None:
    want, got = wanted_y(layer, x, ids), got_y(layer, ids).float()
    assert torch.isfinite(got).all()
    # bf16 rounds y once: 1.7e-3 of a row's norm on average. h is rounded in both, and where the two float32 sums lie on
    # either side of a boundary it differs by a bf16 step, 2^-8 of the value: seldom, but of 128 values one weighs.
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    assert float(error.max() if error.numel() else 0.0) < 4e-3


def randn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=generator.device, dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_products(layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int) -> None:
    if layer.name == "v3" and num_tokens not in (1, 7, 65, 513):
        pytest.skip("the big layer takes few sizes")
    x, ids = randn((num_tokens, layer.hidden), generator), random_ids(layer, num_tokens, generator)
    poison(layer.workspace)
    experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, library=library)
    check_y(layer, x, ids)
    rows = layer.workspace.row_of[: ids.numel()]
    assert torch.equal(rows.long().argsort(), ids.flatten().long().argsort(stable=True))
    if ids.numel() > 64:  # fewer are sorted in the products
        counts = torch.bincount(ids.flatten().long(), minlength=layer.num_experts)
        starts = layer.workspace.expert_starts
        assert torch.equal(starts[1:] - starts[:-1], counts.to(torch.int32))


@pytest.mark.parametrize("num_tokens", [8191, 16384])
def test_large_steps(layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int) -> None:
    if layer.name == "v3":
        pytest.skip("the big layer takes few sizes")
    width, top_k = layer.gate_up.shape[1] // 2, layer.workspace.top_k
    workspace = experts.make_experts_workspace(16384, top_k, layer.num_experts, layer.hidden, width, layer.down.device)
    layer = replace(layer, workspace=workspace)
    x, ids = randn((num_tokens, layer.hidden), generator), random_ids(layer, num_tokens, generator)
    poison(layer.workspace)
    experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, library=library)
    check_y(layer, x, ids)


OPTIONS = [{"group_tokens": n, "even": even} for n in (8, 24, 64, 128, 200, 256) for even in (False, True)]
OPTIONS += [{"group_tokens": n, "paired": True} for n in (32, 64, 128, 152, 256)]


@pytest.mark.parametrize("num_tokens", [1, 5, 65, 700])
def test_any_way_gives_the_same_bits(
    layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int
) -> None:
    if layer.name == "v3":
        pytest.skip("the same code")
    x, ids = randn((num_tokens, layer.hidden), generator), random_ids(layer, num_tokens, generator)
    bits = []
    for options in OPTIONS:
        for few in (False, True):
            if few and (ids.numel() > 64 or options["group_tokens"] > 64):
                continue
            poison(layer.workspace)
            stages = experts.experts_stages(
                x,
                ids,
                layer.gate_up,
                layer.down,
                layer.workspace,
                few=few,
                **{"paired": False, **options},
                library=library,
            )
            for stage in stages:
                stage()
            check_y(layer, x, ids)
            bits.append(got_y(layer, ids))
            assert torch.equal(bits[0], bits[-1]), (options, few)


@pytest.mark.parametrize("num_tokens", [1, 200, 513])
def test_one_expert_for_all(layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int) -> None:
    x = randn((num_tokens, layer.hidden), generator)
    ids = torch.full((num_tokens, layer.workspace.top_k), -1, dtype=torch.int32, device=x.device)
    ids[:, 1] = 3
    ids[:, 2] = layer.num_experts  # no expert either
    poison(layer.workspace)
    experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, library=library)
    check_y(layer, x, ids)
    assert int((layer.workspace.row_of[: ids.numel()] < 0).sum()) == num_tokens * (layer.workspace.top_k - 1)


def test_strided_rows(layer: Layer, library: KernelLibrary, generator: torch.Generator) -> None:
    for num_tokens in (5, 300):
        x = randn((num_tokens, layer.hidden + 64), generator)[:, : layer.hidden]
        ids = random_ids(layer, num_tokens, generator)
        poison(layer.workspace)
        experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, library=library)
        check_y(layer, x, ids)


def test_bits_do_not_depend_on_the_batch(layer: Layer, library: KernelLibrary, generator: torch.Generator) -> None:
    x, ids = randn((MAX_TOKENS, layer.hidden), generator), random_ids(layer, MAX_TOKENS, generator)
    experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, deterministic=True, library=library)
    among_all = got_y(layer, ids)
    for rows in ([0], [0, 1], list(range(7)), list(range(64)), [1000], list(range(700, 1000)), list(range(1100))):
        experts.moe_experts(
            x[rows], ids[rows], layer.gate_up, layer.down, layer.workspace, deterministic=True, library=library
        )
        assert torch.equal(got_y(layer, ids[rows]), among_all[rows]), f"{len(rows)} rows from {rows[0]}"


@pytest.mark.parametrize("num_tokens", [4, 64, 300])
def test_graph(layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int) -> None:
    x, ids = randn((num_tokens, layer.hidden), generator), random_ids(layer, num_tokens, generator)
    weights = torch.rand(ids.shape, device=x.device, generator=generator)
    residual, normed = randn(tuple(x.shape), generator), torch.empty_like(x)
    norm_weight = randn((layer.hidden,), generator)

    def step() -> None:
        experts.moe_experts(x, ids, layer.gate_up, layer.down, layer.workspace, library=library)
        experts.moe_combine(
            layer.workspace, weights, residual, norm_weight=norm_weight, normed_out=normed, library=library
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for _ in range(3):  # other tokens and other routing, every time
        x.copy_(randn(tuple(x.shape), generator))
        ids.copy_(random_ids(layer, num_tokens, generator))
        residual.copy_(randn(tuple(x.shape), generator))
        want = residual.clone()
        poison(layer.workspace)
        for _ in range(3):
            step()
        by_calls, calls_normed = residual.clone(), normed.clone()
        residual.copy_(want)
        poison(layer.workspace)
        graph.replay()
        assert torch.equal(residual, by_calls)
        assert torch.equal(normed, calls_normed)
        check_y(layer, x, ids)


@pytest.mark.parametrize("num_tokens", [0, 1, 65, 2048])
def test_combine(layer: Layer, library: KernelLibrary, generator: torch.Generator, num_tokens: int) -> None:
    ws = layer.workspace
    poison(ws)
    rows = num_tokens * ws.top_k
    ws.y[:rows] = randn((rows, layer.hidden), generator)
    row_of = torch.randperm(rows, device=ws.y.device, generator=generator).to(torch.int32).view(num_tokens, ws.top_k)
    row_of[::3, 1] = -1
    ws.row_of[:rows] = row_of.flatten()
    weights = torch.rand(row_of.shape, device=ws.y.device, generator=generator)
    base = randn((num_tokens, layer.hidden + 8), generator)
    norm_weight = randn((layer.hidden,), generator)
    normed = torch.full((num_tokens, layer.hidden + 16), float("nan"), device=ws.y.device, dtype=torch.bfloat16)
    residual = base.clone()
    experts.moe_combine(
        ws,
        weights,
        residual[:, : layer.hidden],
        norm_weight=norm_weight,
        eps=1e-6,
        normed_out=normed[:, : layer.hidden],
        library=library,
    )
    y = torch.where(row_of[..., None] >= 0, ws.y[row_of.clamp(min=0).long()].double(), 0.0)
    want = base[:, : layer.hidden].double() + (y * weights[..., None].double()).sum(1)
    # Rounded once to bf16: half a step, up to 2^-8 of the value, plus float32 sums' own error near cancellation.
    torch.testing.assert_close(residual[:, : layer.hidden].double(), want, rtol=2.0**-7.99, atol=1e-5)
    assert torch.equal(residual[:, layer.hidden :], base[:, layer.hidden :])
    want_normed = elementwise.rms_norm(residual[:, : layer.hidden].contiguous(), norm_weight, 1e-6, library=library)
    assert torch.equal(normed[:, : layer.hidden], want_normed)
    assert normed[:, layer.hidden :].isnan().all()

    plain = base.clone()
    experts.moe_combine(ws, weights, plain[:, : layer.hidden], library=library)
    assert torch.equal(plain, residual)


def test_shared_experts_are_chosen_by_all(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    logits = torch.randn((37, 64), device=device, generator=generator)
    rules = {"top_k": 6, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    rules |= {"norm_topk_prob": False, "scale_normed": False, "routed_scaling_factor": 1.0}
    ids, weights = moe.route(logits, None, **rules, library=library)
    more_ids, more_weights = moe.route(logits, None, **rules, num_shared=2, library=library)
    assert torch.equal(more_ids[:, :6], ids)
    assert torch.equal(more_weights[:, :6], weights)
    assert more_ids[:, 6:].tolist() == [[64, 65]] * 37
    assert (more_weights[:, 6:] == 1.0).all()
