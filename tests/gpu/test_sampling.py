"""The sampling kernels against `reference_sampling`: equal where sums do not enter, by interval where they do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor.sampler import SamplingSpec
from rorqual.kernels import reference_sampling as reference
from rorqual.kernels import sampling
from rorqual.kernels.loader import KernelLibrary

VOCABS = [1, 5, 64, 8191, 8192, 102400, 129280]
GREEDY = SamplingSpec(temperature=0.0)
# What float32 rounding of single weights (1e-7 each, in sums of either sign) may move an interval's edge by.
EDGE = 2e-6


@dataclasses.dataclass
class Batch:
    """Rows with their parameters on the device: row r has slot `slots[r]`."""

    logits: torch.Tensor
    specs: list[SamplingSpec]
    positions: list[int]
    columns: sampling.SamplingColumns
    adjust: sampling.AdjustPool
    mask: sampling.MaskPool
    workspace: sampling.SamplingWorkspace
    slots: torch.Tensor
    tokens: torch.Tensor
    sound: torch.Tensor
    logprobs: sampling.LogprobBuffers

    def run(self, library: KernelLibrary, rows: slice = slice(None), active: torch.Tensor | None = None) -> None:
        positions = torch.tensor(self.positions, device=self.logits.device)[rows]
        sampling.sample(
            self.logits[rows],
            self.slots[rows],
            positions,
            active,
            self.columns,
            self.adjust,
            self.mask,
            self.workspace,
            self.tokens[rows],
            self.sound[rows],
            sampling.LogprobBuffers(
                *(getattr(self.logprobs, field.name)[rows] for field in dataclasses.fields(self.logprobs))
            ),
            library=library,
        )

    def adjusted(self, r: int) -> npt.NDArray[np.float32]:
        """The row as the choice sees it, from what lies on the device now."""
        record = self.record(r)
        bias = states = words = None
        if record["adjust_idx"] >= 0:
            bias = self.adjust.bias[record["adjust_idx"]].cpu().numpy()
            states = self.adjust.states[record["adjust_idx"]].cpu().numpy().view(np.uint32)
        if record["mask_idx"] >= 0:
            words = self.mask.words[record["mask_idx"]].cpu().numpy().view(np.uint32)
        return reference.adjusted_logits(self.logits[r].cpu().numpy(), record, self.positions[r], bias, states, words)

    def record(self, r: int) -> np.void:
        record: np.void = self.columns.records[self.slots[r]].cpu().numpy().view(reference.RECORD)[0]
        return record

    def u(self, r: int) -> float:
        record = self.record(r)
        return reference.uniform(int(record["seed"]), int(record["choice_index"]), self.positions[r])


def make_batch(
    logits: torch.Tensor,
    specs: list[SamplingSpec],
    positions: list[int] | None = None,
    prompts: dict[int, list[int]] | None = None,
    masks: dict[int, npt.NDArray[np.int32]] | None = None,
) -> Batch:
    num_rows, vocab_size = logits.shape
    device = logits.device
    max_seqs = num_rows + 3
    slots = np.random.default_rng(num_rows).permutation(max_seqs)[:num_rows].astype(np.int32)
    columns = sampling.make_sampling_columns(max_seqs, device)
    adjust = sampling.AdjustPool(max(len(prompts or {}), 1), vocab_size, device)
    mask = sampling.MaskPool(max(len(masks or {}), 1), vocab_size, device)
    for idx, r in enumerate(prompts or {}):
        adjust.set_row(idx, specs[r], (prompts or {})[r])
    for idx, words in enumerate((masks or {}).values()):
        mask.set_row(idx, words)
    for r, spec in enumerate(specs):
        record = sampling.pack_record(
            spec,
            r % 3,
            num_prompt_tokens=len((prompts or {}).get(r, [])),
            adjust_idx=list(prompts).index(r) if prompts and r in prompts else -1,
            mask_idx=list(masks).index(r) if masks and r in masks else -1,
        )
        columns.records[int(slots[r])] = torch.from_numpy(record).to(device)
    return Batch(
        logits,
        specs,
        positions or [17 + 3 * r for r in range(num_rows)],
        columns,
        adjust,
        mask,
        sampling.make_sampling_workspace(num_rows + 1, vocab_size, device),
        torch.from_numpy(slots).to(device),
        torch.full((num_rows,), -7, dtype=torch.int32, device=device),
        torch.full((num_rows,), 77, dtype=torch.uint8, device=device),
        sampling.make_logprob_buffers(num_rows, device),
    )


def is_valid(x: npt.NDArray[np.float32], spec: SamplingSpec, u: float, token: int) -> bool:
    """Whether u lies in the token's interval, or so near to it that rounding may have moved an edge."""
    for top_p in {spec.top_p, spec.top_p - 1e-6, min(spec.top_p + 1e-6, 1.0)}:
        for min_p in {spec.min_p, spec.min_p * (1 - 1e-5), spec.min_p * (1 + 1e-5)}:
            kept = reference.kept_mass(
                x, temperature=spec.temperature, top_k=spec.top_k, top_p=top_p, min_p=min(min_p, 1.0)
            )
            if kept[token] > 0:
                whole = kept.sum()
                before = kept[:token].sum() / whole
                if before - EDGE <= u <= before + kept[token] / whole + EDGE:
                    return True
    return False


def check_rows(batch: Batch, adjusted: list[npt.NDArray[np.float32]]) -> None:
    """Every row's token, against the logits as they were before the choice."""
    tokens, sound = batch.tokens.tolist(), batch.sound.tolist()
    different = 0
    for r, x in enumerate(adjusted):
        spec = batch.specs[r]
        if not np.isfinite(x.max()) or not np.isfinite(batch.logits[r].max().item()):
            assert (tokens[r], sound[r]) == (0, 0)
            continue
        assert sound[r] == 1
        if spec.temperature < reference.GREEDY_BELOW:
            assert tokens[r] == int(x.argmax())
            continue
        kept = reference.kept_mass(
            x, temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p
        )
        if tokens[r] != reference.choose(kept, batch.u(r)):
            different += 1
            assert is_valid(x, spec, batch.u(r), tokens[r]), (r, spec, tokens[r], batch.u(r))
    # An edge lies within 1e-6 of u seldom: even with a hundred thousand edges in [0, 1), one row in ten.
    assert different <= 2 + len(adjusted) // 4


def random_specs(rng: np.random.Generator, count: int) -> list[SamplingSpec]:
    def spec(r: int) -> SamplingSpec:
        kind = r % 8
        options: dict[str, Any] = {
            "temperature": float(rng.choice([0.1, 0.6, 1.0, 1.3, 2.0])),
            "seed": int(rng.integers(0, 2**64, dtype=np.uint64)),
        }
        if kind in (1, 4, 5, 7):
            options["top_p"] = float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999999]))
        if kind in (2, 4, 6, 7):
            options["top_k"] = int(rng.choice([1, 2, 3, 20, 50, 200, 1000, 10**6]))
        if kind in (3, 5, 6, 7):
            options["min_p"] = float(rng.choice([1e-6, 0.01, 0.05, 0.5, 1.0]))
        return SamplingSpec(**options)

    return [spec(r) for r in range(count)]


def random_logits(
    generator: torch.Generator, num_rows: int, vocab_size: int, padding: int = 0, scale: float | None = None
) -> torch.Tensor:
    """Rows of several spreads, some with impossible tokens; what lies beyond the vocabulary is NaN."""
    storage = torch.full((num_rows, vocab_size + padding), torch.nan, device=generator.device)
    x = torch.randn((num_rows, vocab_size), device=generator.device, generator=generator)
    spread = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0], device=generator.device)[torch.arange(num_rows) % 5, None]
    x = x * (spread if scale is None else scale) + 3.0
    x[2::7, ::3] = -torch.inf
    x[:, 0] = torch.where(torch.isinf(x[:, 0]), 0.0, x[:, 0])
    storage[:, :vocab_size] = x
    return storage[:, :vocab_size]


@pytest.mark.parametrize("padding", [0, 3, 64])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_greedy_takes_the_lowest_id_of_the_largest(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int, padding: int
) -> None:
    for num_rows in (1, 5, 67):
        logits = random_logits(generator, num_rows, vocab_size, padding)
        logits[1::3] = logits[1::3].round()  # many equals
        logits[3::4] = -logits[3::4].abs().round()  # +0 and -0
        logits[4::9] = -5.0
        batch = make_batch(logits, [GREEDY] * num_rows)
        batch.run(library)
        assert batch.tokens.tolist() == logits.cpu().numpy().argmax(axis=1).tolist()
        assert batch.sound.all()


@pytest.mark.parametrize("vocab_size", [5, 8192, 102400])
def test_rows_without_a_finite_largest_are_not_sound(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int
) -> None:
    specs = [GREEDY, SamplingSpec(), SamplingSpec(top_p=0.9), SamplingSpec(top_k=3, logprobs=2)] * 6
    logits = random_logits(generator, len(specs), vocab_size)
    logits[0:4] = -torch.inf
    logits[4:8, vocab_size // 2] = torch.nan
    logits[8:12, vocab_size - 1] = torch.inf
    logits[12:16, 0] = -torch.tensor(torch.nan)
    batch = make_batch(logits, specs, masks={17: np.zeros(-(-vocab_size // 32), np.int32)})
    batch.run(library)
    unsound = [*range(16), 17]
    assert [r for r in range(24) if not batch.sound[r]] == unsound
    assert batch.tokens[unsound].tolist() == [0] * 17
    assert batch.logprobs.logprobs[3::4].isnan().tolist() == [True] * 4 + [False] * 2
    check_rows(batch, [batch.adjusted(r) for r in range(24)])


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_lie_in_the_interval_of_u(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int, padding: int
) -> None:
    rng = np.random.default_rng(vocab_size + padding)
    num_rows = 40
    batch = make_batch(random_logits(generator, num_rows, vocab_size, padding), random_specs(rng, num_rows))
    batch.run(library)
    check_rows(batch, [batch.adjusted(r) for r in range(num_rows)])


@pytest.mark.parametrize("vocab_size", [64, 8192, 129280])
def test_equals_are_cut_by_id(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int
) -> None:
    options = [{"top_k": k} for k in (1, 7, 33, 1500)] + [{"top_p": p} for p in (0.01, 0.37, 0.87)]
    options += [{"top_k": 50, "top_p": 0.5}, {"top_p": 0.5, "min_p": 0.3}, {"min_p": 1.0}, {}]
    specs = [SamplingSpec(seed=s, **o) for s in range(3) for o in options]  # type: ignore[arg-type]
    logits = torch.randint(0, 3, (len(specs), vocab_size), device=device, generator=generator).float()
    logits[::4] = 0.0  # all equal
    batch = make_batch(logits, specs)
    batch.run(library)
    check_rows(batch, [batch.adjusted(r) for r in range(len(specs))])


def test_flat_rows_with_hardly_anything_cut(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    specs = [SamplingSpec(temperature=2.0, top_p=0.99, seed=s) for s in range(8)]
    specs += [SamplingSpec(temperature=2.0, top_p=0.999, top_k=100_000, seed=s) for s in range(8)]
    specs += [SamplingSpec(temperature=1.3, top_p=0.999999, top_k=1000, seed=s) for s in range(24)]
    batch = make_batch(random_logits(generator, 40, 129280, scale=0.5), specs)
    batch.run(library)
    check_rows(batch, [batch.adjusted(r) for r in range(40)])


@pytest.mark.parametrize("vocab_size", [64, 8191, 102400])
def test_penalties_bias_stops_and_masks_over_steps(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int
) -> None:
    rng = np.random.default_rng(vocab_size)
    bias = {int(i): float(b) for i, b in zip(rng.integers(0, vocab_size, 9), rng.normal(0, 5, 9), strict=True)}
    stops = tuple(int(i) for i in rng.integers(0, vocab_size, 5))
    options: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.8, "logit_bias": bias, "presence_penalty": -0.5},
        {"logit_bias": {**bias, stops[0]: 60.0}, "stop_token_ids": stops, "min_tokens": 4},
        {"frequency_penalty": 1.1, "top_k": 5},
        {"logit_bias": bias, "top_p": 0.8, "repetition_penalty": 1.1},
        {},
    ]
    specs = [SamplingSpec(temperature=t, seed=7, **o) for o in options for t in (0.0, 1.0)]
    num_rows = len(specs)
    prompts = {r: rng.integers(0, vocab_size, 20).tolist() for r in range(num_rows - 2)}
    masks = {
        r: rng.integers(-(2**31), 2**31, -(-vocab_size // 32)).astype(np.int32) | np.int32(1)
        for r in (1, 6, num_rows - 1)
    }
    batch = make_batch(
        random_logits(generator, num_rows, vocab_size, scale=1.0), specs, [20] * num_rows, prompts, masks
    )
    kept = torch.empty_like(batch.logits).copy_(batch.logits)
    made: list[list[int]] = [[] for _ in specs]
    for step in range(6):
        batch.positions = [20 + step] * num_rows
        adjusted = [batch.adjusted(r) for r in range(num_rows)]
        batch.run(library)
        check_rows(batch, adjusted)
        if step < 4:
            assert not set(batch.tokens[6:8].tolist()) & set(stops)
        for r, token in enumerate(batch.tokens.tolist()):
            made[r].append(token)
    assert torch.equal(batch.logits, kept)
    again = sampling.AdjustPool(len(prompts), vocab_size, device)
    for idx, r in enumerate(prompts):
        again.set_row(idx, specs[r], prompts[r], made[r])
        if sampling.has_penalties(specs[r]):
            assert torch.equal(again.states[idx], batch.adjust.states[idx])


def test_a_row_does_not_depend_on_its_neighbours(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    rng = np.random.default_rng(1)
    specs = random_specs(rng, 256)
    for r in range(0, 256, 3):
        specs[r] = dataclasses.replace(specs[r], logprobs=r % 21, temperature=0.0 if r % 2 else 1.0)
    batch = make_batch(random_logits(generator, 256, 102400), specs)
    batch.run(library)
    tokens = batch.tokens.tolist()
    outputs = [getattr(batch.logprobs, field.name).clone() for field in dataclasses.fields(batch.logprobs)]
    alone = [*range(0, 256, 9), 255]
    for r in alone:
        batch.run(library, slice(r, r + 1))
    batch.run(library, slice(100, 131))
    assert batch.tokens.tolist() == tokens
    for field, before in zip(dataclasses.fields(batch.logprobs), outputs, strict=True):
        assert torch.equal(getattr(batch.logprobs, field.name), before)


def test_inactive_rows_are_left_alone(device: torch.device, library: KernelLibrary, generator: torch.Generator) -> None:
    specs = [SamplingSpec(top_k=r % 3, logprobs=3) for r in range(9)]
    for active in (
        torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.uint8, device=device),
        torch.tensor([1, 0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.int32, device=device),
    ):
        logits = random_logits(generator, 9, 8191)
        logits[1] = torch.nan
        batch = make_batch(logits, specs)
        batch.slots[8] = -1
        batch.logprobs.logprobs.fill_(5.0)
        batch.run(library, active=active)
        left = [1, 4, 6, 8]
        assert batch.tokens[left].tolist() == [-7] * 4
        assert batch.sound[left].tolist() == [77] * 4
        assert batch.logprobs.logprobs[left].tolist() == [5.0] * 4
        assert batch.sound[[0, 2, 3, 5, 7]].tolist() == [1] * 5


def test_a_graph_follows_its_parameters(
    device: torch.device, library: KernelLibrary, generator: torch.Generator
) -> None:
    rng = np.random.default_rng(3)
    num_rows, vocab_size = 16, 102400
    batch = make_batch(random_logits(generator, num_rows, vocab_size), [GREEDY] * num_rows)
    positions = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def call() -> None:
        sampling.sample(
            batch.logits,
            batch.slots,
            positions,
            None,
            batch.columns,
            batch.adjust,
            batch.mask,
            batch.workspace,
            batch.tokens,
            batch.sound,
            batch.logprobs,
            library=library,
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in range(4):
        specs = [GREEDY] * num_rows if step == 2 else random_specs(rng, num_rows)
        if step == 3:
            specs = [dataclasses.replace(spec, logprobs=4) for spec in specs]
        records = np.concatenate([sampling.pack_record(spec, 1) for spec in specs]).reshape(num_rows, -1)
        batch.columns.records[batch.slots.long()] = torch.from_numpy(records).to(device)
        batch.specs, batch.positions = specs, [100 + step] * num_rows
        positions.fill_(100 + step)
        graph.replay()
        check_rows(batch, [batch.adjusted(r) for r in range(num_rows)])
    check_logprobs(batch, range(num_rows))


def check_logprobs(batch: Batch, rows: Any) -> None:
    for r in rows:
        n = batch.specs[r].logprobs
        assert n is not None
        token = int(batch.tokens[r])
        want, rank, ids, top = reference.token_logprob(batch.logits[r].cpu().numpy(), token, n)
        assert int(batch.logprobs.ranks[r]) == rank
        assert batch.logprobs.top_ids[r].tolist() == ids.tolist() + [-1] * (20 - ids.size)
        # exp of 102,400 float32s, each within two units of its last place, and x - max rounded once: below 1e-5 in all.
        np.testing.assert_allclose(batch.logprobs.logprobs[r].item(), want, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(batch.logprobs.top_logprobs[r, : ids.size].cpu().numpy(), top, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_logprobs(device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int) -> None:
    wanted = [0, 1, 5, 20]
    specs = [
        SamplingSpec(temperature=t, top_k=k, logprobs=n) for n in wanted for t, k in ((0.0, 0), (1.0, 0), (1.5, 9))
    ]
    logits = random_logits(generator, len(specs), vocab_size)
    logits[1::2] = logits[1::2].round()  # equals
    if vocab_size > 100:
        logits[4, 3:] = -torch.inf  # fewer possible tokens than alternatives
    batch = make_batch(logits, specs)
    batch.run(library)
    check_logprobs(batch, range(len(specs)))


@pytest.mark.parametrize("vocab_size", [5, 8192, 129280])
def test_prompt_logprobs(
    device: torch.device, library: KernelLibrary, generator: torch.Generator, vocab_size: int
) -> None:
    num_rows = 70
    logits = random_logits(generator, num_rows, vocab_size, 1)
    logits[69] = torch.nan
    targets = torch.randint(0, vocab_size, (num_rows,), device=device, generator=generator).to(torch.int32)
    targets[5] = -1
    workspace = sampling.make_sampling_workspace(num_rows, vocab_size, device)
    for num_top in (0, 3, 20):
        out = sampling.make_logprob_buffers(num_rows, device)
        out.ranks.fill_(-9)
        sampling.prompt_logprobs(logits, targets, num_top, workspace, out, library=library)
        assert int(out.ranks[5]) == -9
        assert out.logprobs[69].isnan()
        for r in (*range(5), *range(6, 69, 4)):
            want, rank, ids, top = reference.token_logprob(logits[r].cpu().numpy(), int(targets[r]), num_top)
            assert int(out.ranks[r]) == rank
            assert out.top_ids[r, : ids.size].tolist() == ids.tolist()
            np.testing.assert_allclose(out.logprobs[r].item(), want, rtol=1e-6, atol=1e-5)
            np.testing.assert_allclose(out.top_logprobs[r, : ids.size].cpu().numpy(), top, rtol=1e-6, atol=1e-5)
