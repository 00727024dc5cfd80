"""Prefill attention against the torch reference in float64, and bit for bit against itself; gathering of latents."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from rorqual.kernels.loader import KernelLibrary
from rorqual.kernels.prefill import STATE_WIDTH, gather_latents, mla_prefill, plan_prefill
from rorqual.kernels.reference_prefill import mla_prefill_packed

NAN = float("nan")
BF16 = torch.bfloat16
SCALE = 192**-0.5

# The weights are rounded to bf16 (2^-9 relative, each on its own) before they meet the values, and the output once
# more: about 1.6e-3 of a row's norm. Three times that still catches a lost key of a hundred.
ROW_TOLERANCE = 5e-3
# The denominator sums unrounded float32 weights. What is left is the rounding of scores of about ten in products of
# 192 terms, and of the hardware's power of two (2^-22).
LSE_TOLERANCE = 2e-4


@dataclasses.dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_prefill_packed(
            self.q, self.kv, self.k_pe, q_lens=self.q_lens, k_lens=self.k_lens, scale=SCALE, dtype=torch.float64
        )

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned, the rows not contiguous."""
        out = torch.full((*self.q.shape[:2], 144), NAN, dtype=BF16, device=self.q.device)[..., :128]
        return out, torch.full(self.q.shape[:2], NAN, device=self.q.device)

    def run(
        self, library: KernelLibrary, *, half_tiles: bool = False, **options: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.outputs()
        # One head, as far as the plan knows, so that few tiles are enough for half ones.
        plan = plan_prefill(self.q_lens, self.k_lens, num_heads=1 if half_tiles else None).to(self.q.device)
        mla_prefill(self.q, self.kv, self.k_pe, out, plan, scale=SCALE, lse=lse, library=library, **options)
        return out, lse

    def run_in_slabs(self, library: KernelLibrary, slab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of one slab at a time, packed anew; the state begins poisoned."""
        device = self.q.device
        out, lse = self.outputs()
        state = torch.full((*self.q.shape[:2], STATE_WIDTH), NAN, device=device)
        for begin in range(0, max(self.k_lens, default=0), slab):
            plan = plan_prefill(self.q_lens, self.k_lens, key_begin=begin, key_end=begin + slab).to(device)
            rows, first = [], 0
            for k_len in self.k_lens:
                rows.append(torch.arange(first + min(begin, k_len), first + min(begin + slab, k_len), device=device))
                first += k_len
            held = torch.cat(rows)
            kv = torch.full((plan.num_keys + 70, *self.kv.shape[1:]), NAN, dtype=BF16, device=device)
            k_pe = torch.full((plan.num_keys + 70, 64), NAN, dtype=BF16, device=device)
            kv[: plan.num_keys], k_pe[: plan.num_keys] = self.kv[held], self.k_pe[held]
            mla_prefill(self.q, kv, k_pe, out, plan, scale=SCALE, lse=lse, state=state, library=library)
        return out, lse

    def rows_of(self, seq: int) -> slice:
        return slice(sum(self.q_lens[:seq]), sum(self.q_lens[: seq + 1]))

    def chunk(self, seq: int, start: int, end: int) -> Case:
        """Sequence `seq` alone, of it query rows [start, end), with the keys up to there."""
        first_row, first_key = sum(self.q_lens[:seq]), sum(self.k_lens[:seq])
        k_len = self.k_lens[seq] - self.q_lens[seq] + end
        return Case(
            (end - start,),
            (k_len,),
            self.q[first_row + start : first_row + end],
            self.kv[first_key : first_key + k_len],
            self.k_pe[first_key : first_key + k_len],
        )


def make_case(
    device: torch.device, q_lens: Sequence[int], k_lens: Sequence[int], num_heads: int, *, seed: int = 0
) -> Case:
    """Random sequences in strided tensors; rows beyond the last sequence's are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kwargs = {"device": device, "dtype": BF16, "generator": generator}
    num_tokens, num_keys = sum(q_lens), sum(k_lens)
    q = torch.randn((num_tokens + 5, num_heads * 192 + 64), **kwargs) * 1.5
    kv = torch.randn((num_keys + 150, num_heads, 256), **kwargs)
    latents = torch.randn((num_keys + 150, 576), **kwargs)
    q[num_tokens:], kv[num_keys:], latents[num_keys:] = NAN, NAN, NAN
    q_heads = q[:, : num_heads * 192].unflatten(1, (num_heads, 192))
    return Case(tuple(q_lens), tuple(k_lens), q_heads, kv, latents[:, 512:])


def assert_matches(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = got[0].double(), got[1].double()
    want_out, want_lse = want
    assert torch.equal(out.isnan().any(-1), want_lse.isnan()), "rows of no sequence, and no others, keep what they were"
    used = ~want_lse.isnan()
    error = (out - want_out)[used].norm(dim=-1) / want_out[used].norm(dim=-1)
    assert error.numel() == 0 or float(error.max()) <= ROW_TOLERANCE, float(error.max())
    difference = (lse - want_lse)[used].abs()
    assert difference.numel() == 0 or float(difference.max()) <= LSE_TOLERANCE, float(difference.max())


MIX = [1, 0, 64, 500, 3, 129, 65, 1000, 0, 2, 127, 128]


@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 129, 500, 1000, 4097])
def test_one_prompt(device: torch.device, library: KernelLibrary, length: int, num_heads: int) -> None:
    case = make_case(device, [length], [length], num_heads)
    assert_matches(case.run(library), case.reference())


@pytest.mark.parametrize("num_heads", [3, 16, 128])
def test_many_prompts(device: torch.device, library: KernelLibrary, num_heads: int) -> None:
    lengths = MIX if num_heads < 128 else [65, 0, 1, 130]
    case = make_case(device, lengths, lengths, num_heads)
    assert_matches(case.run(library), case.reference())


@pytest.mark.parametrize("heads_per_group", [1, 3, 5, 100])
def test_any_grouping_of_heads(device: torch.device, library: KernelLibrary, heads_per_group: int) -> None:
    case = make_case(device, MIX, MIX, 5)
    assert_matches(case.run(library, heads_per_group=heads_per_group), case.reference())


@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("prefix", [1, 64, 1000])
def test_chunks_after_a_cached_prefix(
    device: torch.device, library: KernelLibrary, prefix: int, num_heads: int
) -> None:
    q_lens = [1, 64, 100, 0, 500, 128, 191]
    k_lens = [n + prefix for n in q_lens[:-1]] + [191]
    case = make_case(device, q_lens, k_lens, num_heads)
    assert_matches(case.run(library), case.reference())


@pytest.mark.parametrize("slab", [128, 1024])
def test_slabs_give_the_bits_of_one_call(device: torch.device, library: KernelLibrary, slab: int) -> None:
    q_lens, k_lens = [1000, 500, 1, 0, 200, 129], [3000, 500, 1, 300, 1500, 1025]
    case = make_case(device, q_lens, k_lens, 4)
    want = case.run(library)
    assert_matches(want, case.reference())
    out, lse = case.run_in_slabs(library, slab)
    num_tokens = sum(q_lens)
    assert torch.equal(out[:num_tokens], want[0][:num_tokens])
    assert torch.equal(lse[:num_tokens], want[1][:num_tokens])


@pytest.mark.parametrize("num_heads", [4, 16])
def test_bits_depend_on_the_sequence_alone(device: torch.device, library: KernelLibrary, num_heads: int) -> None:
    """A prompt alone or among others, whole or in chunks that end at multiples of 64, gives the same bits."""
    case = make_case(device, MIX, MIX, num_heads)
    out, lse = case.run(library)
    for seq, edges in ((7, (0, 64, 320, 704, 1000)), (3, (0, 192, 256, 500)), (5, (0, 128, 129)), (2, (0, 64))):
        rows = case.rows_of(seq)
        for start, end in itertools.pairwise(edges):
            chunk_out, chunk_lse = case.chunk(seq, start, end).run(library)
            part = slice(rows.start + start, rows.start + end)
            assert torch.equal(chunk_out, out[part]), (seq, start, end)
            assert torch.equal(chunk_lse, lse[part]), (seq, start, end)
    for options in ({"heads_per_group": 1}, {"half_tiles": True}):
        again = case.run(library, **options)
        assert torch.equal(again[0][: sum(MIX)], out[: sum(MIX)])
        assert torch.equal(again[1][: sum(MIX)], lse[: sum(MIX)])


def test_other_sequences_may_be_nan(device: torch.device, library: KernelLibrary) -> None:
    lengths = [130, 70, 200, 1, 65]
    case = make_case(device, lengths, lengths, 4)
    want = case.run(library)
    for seq in (1, 3):
        rows = case.rows_of(seq)
        case.q[rows], case.kv[rows], case.k_pe[rows] = NAN, NAN, NAN
    out, lse = case.run(library)
    for seq in (0, 2, 4):
        rows = case.rows_of(seq)
        assert torch.equal(out[rows], want[0][rows])
        assert torch.equal(lse[rows], want[1][rows])
    assert out[case.rows_of(1)].isnan().all()


def test_a_first_row_is_its_value_bit_for_bit(device: torch.device, library: KernelLibrary) -> None:
    case = make_case(device, MIX, MIX, 16)
    out, _ = case.run(library)
    for seq, length in enumerate(MIX):
        if length:
            row = case.rows_of(seq).start
            assert torch.equal(out[row], case.kv[row, :, 128:])


def test_large_scores_do_not_overflow(device: torch.device, library: KernelLibrary) -> None:
    case = make_case(device, [500, 70], [500, 70], 4)
    case = dataclasses.replace(case, q=case.q * 64)
    out, lse = case.run(library)
    want_out, want_lse = case.reference()
    # Scores reach hundreds: float32 holds them to about 1e-4, so a close second weighs a little more or less.
    error = (out[:570].double() - want_out[:570]).norm(dim=-1)
    assert (error <= 2 * ROW_TOLERANCE * want_out[:570].norm(dim=-1)).all()
    assert float((lse[:570].double() - want_lse[:570]).abs().max()) < 0.02


def test_no_sequence(device: torch.device, library: KernelLibrary) -> None:
    case = make_case(device, [0, 0], [0, 0], 4)
    assert case.run(library)[0].isnan().all()


def test_captured_in_a_graph_and_called_again(device: torch.device, library: KernelLibrary) -> None:
    """The queue is left as it was found, so that a plan serves every layer and every replay."""
    if device.type != "cuda":
        pytest.skip("takes a GPU")
    case = make_case(device, MIX, MIX, 16)
    want = case.run(library)
    out, lse = case.outputs()
    plan = plan_prefill(case.q_lens, case.k_lens).to(device)

    def call() -> None:
        mla_prefill(case.q, case.kv, case.k_pe, out, plan, scale=SCALE, lse=lse, library=library)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    for _ in range(3):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out[: sum(MIX)], want[0][: sum(MIX)])
        assert plan.tensor is not None
        assert int(plan.tensor[0]) == 0


@pytest.mark.parametrize("key_begin", [0, 128])
def test_gather_latents(device: torch.device, library: KernelLibrary, key_begin: int) -> None:
    k_lens = [0, 1, 63, 64, 65, 0, 129, 500, 193]
    generator = torch.Generator(device=device).manual_seed(1)
    blocks = [-(-k_len // 64) for k_len in k_lens]
    cache = torch.randn((sum(blocks) + 1, 2, 64, 576), device=device, generator=generator).to(BF16)[:, 1]
    order = torch.randperm(sum(blocks) + 1, device=device, generator=generator).to(torch.int32)
    tables = torch.full((len(k_lens), max(blocks)), 2**30, dtype=torch.int32, device=device)
    wanted, starts, first = [], [0], 0
    for seq, (k_len, count) in enumerate(zip(k_lens, blocks, strict=True)):
        tables[seq, :count] = order[first : first + count]
        wanted.append(cache[order[first : first + count].long()].flatten(0, 1)[key_begin:k_len])
        starts.append(starts[-1] + max(k_len - key_begin, 0))
        first += count
    out = torch.full((starts[-1] + 3, 576), 7.0, dtype=BF16, device=device)
    gather_latents(
        cache,
        tables,
        torch.tensor(starts, dtype=torch.int32, device=device),
        out,
        key_begin=key_begin,
        library=library,
    )
    assert torch.equal(out[: starts[-1]], torch.cat(wanted))
    assert (out[starts[-1] :] == 7).all()
