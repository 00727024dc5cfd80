"""Paged MLA decode attention against the torch reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from rorqual.kernels.loader import KernelLibrary
from rorqual.kernels.mla import TILE_ROWS, DecodeWorkspace, make_workspace, mla_decode, plan_decode
from rorqual.kernels.reference_paged import mla_decode_paged

NAN = float("nan")
SCALE = 192**-0.5

# The weights are rounded to bf16 (2^-9 relative, each on its own) before they meet the values, and the output once
# more: about 1.6e-3 of a row's norm. Three times that still catches a lost token of a hundred.
ROW_TOLERANCE = 5e-3
# The denominator sums the same rounded weights: at most 2^-9 relative, so 2e-3 of its logarithm.
LSE_TOLERANCE = 2.5e-3


@dataclasses.dataclass(frozen=True)
class Case:
    q_latent: torch.Tensor
    q_pe: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    q_starts: torch.Tensor

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_decode_paged(
            self.q_latent,
            self.q_pe,
            self.cache,
            block_tables=self.block_tables,
            kv_lens=self.kv_lens,
            q_starts=self.q_starts,
            softmax_scale=SCALE,
            dtype=torch.float64,
        )

    def run(
        self, workspace: DecodeWorkspace, library: KernelLibrary, *, plan: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(self.q_latent, NAN)
        lse = torch.full(self.q_latent.shape[:2], NAN, device=out.device)
        workspace.partial_out.fill_(NAN)
        workspace.partial_lse.fill_(NAN)
        if plan:
            workspace.plan.fill_(-(2**30))
            plan_decode(workspace, self.kv_lens, self.q_starts, library=library)
        mla_decode(
            self.q_latent,
            self.q_pe,
            self.cache,
            block_tables=self.block_tables,
            kv_lens=self.kv_lens,
            q_starts=self.q_starts,
            workspace=workspace,
            softmax_scale=SCALE,
            out=out,
            lse=lse,
            library=library,
        )
        return out, lse

    def only(self, seq: int) -> Case:
        start, end = self.q_starts[seq : seq + 2].tolist()
        return dataclasses.replace(
            self,
            q_latent=self.q_latent[start:end],
            q_pe=self.q_pe[start:end],
            block_tables=self.block_tables[seq : seq + 1],
            kv_lens=self.kv_lens[seq : seq + 1],
            q_starts=torch.tensor([0, end - start], dtype=torch.int32, device=self.kv_lens.device),
        )


def make_case(
    device: torch.device, kv_lens: Sequence[int], num_heads: int, q_lens: Sequence[int] | int = 1, *, seed: int = 0
) -> Case:
    """Random sequences in a shuffled cache whose unused tokens, and unused blocks, are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    kwargs = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    if isinstance(q_lens, int):
        q_lens = [q_lens] * len(kv_lens)
    num_tokens = sum(q_lens)
    blocks = [-(-kv_len // 64) for kv_len in kv_lens]
    num_blocks = sum(blocks) + 2
    cache = torch.randn((num_blocks, 2, 64, 576), **kwargs)[:, 1]  # another layer lies between: a block stride
    order = torch.randperm(num_blocks, device=device, generator=generator).to(torch.int32)
    cache[order[sum(blocks) :].long()] = NAN
    tables = torch.full((len(kv_lens), max([1, *blocks])), 2**30, dtype=torch.int32, device=device)
    first = 0
    for seq, (kv_len, n) in enumerate(zip(kv_lens, blocks, strict=True)):
        tables[seq, :n] = order[first : first + n]
        if kv_len % 64:
            cache[int(order[first + n - 1]), kv_len % 64 :] = NAN
        first += n
    q = torch.randn((num_tokens, num_heads, 576 + 64), **kwargs) * 1.5
    starts = torch.tensor([0, *q_lens], dtype=torch.int64).cumsum(0).to(torch.int32)
    return Case(
        q_latent=q[..., :512],
        q_pe=q[..., 512:576],
        cache=cache,
        block_tables=tables,
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        q_starts=starts.to(device),
    )


def assert_matches(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = got[0].double(), got[1].double()
    want_out, want_lse = want
    assert not out.isnan().any(), f"{int(out.isnan().any(-1).sum())} rows are NaN"
    error = (out - want_out).norm(dim=-1)
    norm = want_out.norm(dim=-1)
    assert (error <= ROW_TOLERANCE * norm).all(), float((error / norm.clamp(min=1e-30)).max())
    empty = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert (out[empty] == 0).all()
    difference = (lse - want_lse)[~empty].abs()
    assert difference.numel() == 0 or float(difference.max()) <= LSE_TOLERANCE, float(difference.max())


LENGTHS = {
    "one_token": [1],
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 191, 0, 2],
    "primes": [3, 61, 997, 1009, 5, 2039],
    "one_long": [9001],
    "long_and_short": [4001, 1, 0, 64, 17, 1999],
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_heads", [4, 16, 20, 32, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_query_token(
    device: torch.device, library: KernelLibrary, lengths: str, num_heads: int, deterministic: bool
) -> None:
    kv_lens = LENGTHS[lengths]
    case = make_case(device, kv_lens, num_heads)
    workspace = make_workspace(
        device,
        max_batch=len(kv_lens) + 3,
        num_heads=num_heads,
        deterministic=deterministic,
        max_kv_len=max(kv_lens) if deterministic else None,
        split_blocks=4 if deterministic else None,
    )
    assert_matches(case.run(workspace, library), case.reference())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_heads", [4, 16, 128])
@pytest.mark.parametrize("max_q_len", [2, 5, 8])
def test_several_query_tokens(
    device: torch.device, library: KernelLibrary, max_q_len: int, num_heads: int, deterministic: bool
) -> None:
    # A sequence without query tokens is one that sits a step out; one shorter than its query has empty rows.
    kv_lens = [max_q_len, 64, 65, 300, 129, 1000, 1, 66]
    q_lens = [max_q_len, 1, 2, max_q_len, 0, max_q_len - 1, max_q_len, max_q_len]
    case = make_case(device, kv_lens, num_heads, q_lens)
    workspace = make_workspace(
        device,
        max_batch=len(kv_lens),
        num_heads=num_heads,
        max_q_len=max_q_len,
        deterministic=deterministic,
        max_kv_len=max(kv_lens) if deterministic else None,
        split_blocks=2 if deterministic else None,
    )
    assert_matches(case.run(workspace, library), case.reference())


@pytest.mark.parametrize("kernel", range(len(TILE_ROWS)))
@pytest.mark.parametrize("num_parts", [1, 3, 7])
def test_any_cut(device: torch.device, library: KernelLibrary, kernel: int, num_parts: int) -> None:
    """Few parts, so that one takes several sequences, and starts and ends in the middle of one.

    80 rows are several tiles of every kernel, and the last tile of some sequences has no valid row.
    """
    case = make_case(device, [130, 700, 0, 64, 333, 1], 40, [2, 1, 2, 1, 2, 0])
    workspace = make_workspace(device, max_batch=6, num_heads=40, max_q_len=2, kernel=kernel, num_parts=num_parts)
    assert_matches(case.run(workspace, library), case.reference())


def parts_of(workspace: DecodeWorkspace, batch: int) -> list[tuple[list[tuple[int, int]], int]]:
    """Of each sequence, the (first, end) blocks that parts take of it, in order, and the splits the plan counts."""
    words = workspace.plan.tolist()
    seqs = [words[4 + 4 * workspace.num_parts + 8 * s :][:8] for s in range(batch)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    for part in range(workspace.num_parts):
        seq, begin, last_seq, last_end = words[4 + 4 * part :][:4]
        while seq <= last_seq and seq < batch:
            end = min(last_end, seqs[seq][3]) if seq == last_seq else seqs[seq][3]
            if begin < end:
                pieces[seq].append((begin, end))
            seq, begin = seq + 1, 0
    return [(pieces[s], seqs[s][6]) for s in range(batch)]


@pytest.mark.parametrize("num_parts", [1, 7, 66, 132])
@pytest.mark.parametrize(
    "kv_lens", [[1], [640] * 16, [4096] * 32, [8192, *[640] * 31], [700, 0, 64, 1, 333] * 30, [1000] * 140, [0, 0]]
)
def test_plan_takes_every_block_once(
    device: torch.device, library: KernelLibrary, kv_lens: list[int], num_parts: int
) -> None:
    workspace = make_workspace(device, max_batch=len(kv_lens), num_heads=16, num_parts=num_parts)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    starts = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=device)
    plan_decode(workspace, lens, starts, library=library)
    longest, total = 0, 0
    for kv_len, (pieces, num_splits) in zip(kv_lens, parts_of(workspace, len(kv_lens)), strict=True):
        num_blocks = -(-kv_len // 64)
        edges = [0, *(end for _, end in pieces)]
        assert [begin for begin, _ in pieces] == edges[:-1]
        assert edges[-1] == num_blocks
        assert num_splits == len(pieces)
        longest, total = max([longest, *(end - begin for begin, end in pieces)]), total + num_blocks
    # Even: no piece is longer than a part of equal parts that start every sequence would be, or a sixteenth more.
    assert longest <= -(-(total + workspace.overhead_blocks * len(kv_lens)) // num_parts) * 17 // 16


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_parts", [1, 7, 66, 132])
@pytest.mark.parametrize(
    "kv_lens", [[1], [640] * 16, [8320] * 16, [8192] * 4, [4096] * 32, [9001, *[640] * 31], [700, 0, 64, 1, 333] * 30]
)
def test_plan_of_fixed_splits(
    device: torch.device, library: KernelLibrary, kv_lens: list[int], num_parts: int, num_heads: int
) -> None:
    """Parts hold whole splits, each block once, and where parts suffice for it none is longer than it must be."""
    workspace = make_workspace(
        device,
        max_batch=len(kv_lens),
        num_heads=num_heads,
        num_parts=num_parts,
        deterministic=True,
        max_kv_len=max(kv_lens),
    )
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    starts = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=device)
    plan_decode(workspace, lens, starts, library=library)
    split = int(workspace.plan[3])
    blocks = [-(-kv_len // 64) for kv_len in kv_lens]
    longest = 0
    for num_blocks, (pieces, num_splits) in zip(blocks, parts_of(workspace, len(kv_lens)), strict=True):
        edges = [0, *(end for _, end in pieces)]
        assert [begin for begin, _ in pieces] == edges[:-1]
        assert edges[-1] == num_blocks
        assert num_splits == -(-num_blocks // split)
        assert all(begin % split == 0 for begin, _ in pieces)
        longest = max([longest, *(end - begin for begin, end in pieces)])
    even = max(1, -(-sum(-(-n // split) for n in blocks) // num_parts)) * split
    assert longest <= even
    if len(kv_lens) <= num_parts:
        for length in range(split, even):
            whole = length // split * split
            if sum(1 + -(-max(n - length, 0) // whole) for n in blocks if n > 0) <= num_parts:
                assert longest <= length
                break


@pytest.mark.parametrize("num_heads", [4, 16, 64])
@pytest.mark.parametrize("num_parts", [10, 40])
def test_many_splits(device: torch.device, library: KernelLibrary, num_parts: int, num_heads: int) -> None:
    """The combination takes another form for many splits, and yet another for many splits of few rows."""
    case = make_case(device, [2600], num_heads)
    workspace = make_workspace(device, max_batch=1, num_heads=num_heads, num_parts=num_parts, min_units=1)
    assert_matches(case.run(workspace, library), case.reference())


@pytest.mark.parametrize("num_heads", [16, 128])
def test_one_token_is_its_value_bit_for_bit(device: torch.device, library: KernelLibrary, num_heads: int) -> None:
    case = make_case(device, [1, 1, 1], num_heads)
    workspace = make_workspace(device, max_batch=3, num_heads=num_heads)
    out, _ = case.run(workspace, library)
    values = case.cache[case.block_tables[:, 0].long(), 0, :512]
    assert torch.equal(out, values[:, None, :].expand_as(out))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_large_scores_do_not_overflow(device: torch.device, library: KernelLibrary, num_heads: int) -> None:
    case = make_case(device, [500, 70], num_heads)
    case = dataclasses.replace(case, q_latent=case.q_latent * 64, q_pe=(case.q_pe * 64).contiguous())
    workspace = make_workspace(device, max_batch=2, num_heads=num_heads)
    out, lse = case.run(workspace, library)
    want_out, want_lse = case.reference()
    # Scores reach thousands: float32 holds them to about 3e-4, so a close second weighs a little more or less.
    assert ((out.double() - want_out).norm(dim=-1) <= 2 * ROW_TOLERANCE * want_out.norm(dim=-1)).all()
    assert float((lse.double() - want_lse).abs().max()) < 0.02


@pytest.mark.parametrize("num_heads", [4, 16, 128])
def test_deterministic_bits_depend_on_the_sequence_alone(
    device: torch.device, library: KernelLibrary, num_heads: int
) -> None:
    """A sequence alone or among others, its query tokens one by one or together, gives the same bits."""
    kv_lens, max_q_len = [70, 1500, 1, 640, 513], 4
    case = make_case(device, kv_lens, num_heads, max_q_len)
    options = {"num_heads": num_heads, "deterministic": True, "max_kv_len": 1500, "split_blocks": 4}
    workspace = make_workspace(device, max_batch=5, max_q_len=max_q_len, **options)
    out, lse = case.run(workspace, library)
    alone = make_workspace(device, max_batch=1, max_q_len=max_q_len, num_parts=2, **options)
    single = make_workspace(device, max_batch=1, max_q_len=1, num_parts=5, **options)
    for seq in (1, 3, 4):
        rows = slice(seq * max_q_len, (seq + 1) * max_q_len)
        own = case.only(seq)
        own_out, own_lse = own.run(alone, library)
        assert torch.equal(own_out, out[rows])
        assert torch.equal(own_lse, lse[rows])
        for query in range(max_q_len):
            step = dataclasses.replace(
                own,
                q_latent=own.q_latent[query : query + 1],
                q_pe=own.q_pe[query : query + 1],
                kv_lens=own.kv_lens - (max_q_len - 1 - query),
                q_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
            )
            step_out, step_lse = step.run(single, library)
            assert torch.equal(step_out[0], out[seq * max_q_len + query])
            assert torch.equal(step_lse[0], lse[seq * max_q_len + query])


def test_how_rows_are_combined_does_not_show(device: torch.device, library: KernelLibrary) -> None:
    """Many rows are combined by a warp each, few by a CTA each: the same bits, also beyond the 32 splits of a warp."""
    kv_lens = [9001, 700, 64, 1, 0, 130, 129, 2000, 4097]
    case = make_case(device, kv_lens, 128)
    options = {"num_heads": 128, "deterministic": True, "max_kv_len": max(kv_lens), "split_blocks": 2}
    out, lse = case.run(make_workspace(device, max_batch=len(kv_lens), **options), library)
    assert_matches((out, lse), case.reference())
    alone = make_workspace(device, max_batch=1, **options)
    for seq in range(len(kv_lens)):
        own_out, own_lse = case.only(seq).run(alone, library)
        assert torch.equal(own_out[0], out[seq])
        assert torch.equal(own_lse[0], lse[seq])


@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("split_blocks", "group_splits"), [(1, 3), (2, 8), (3, 2)])
@pytest.mark.parametrize("num_parts", [1, 3, 132])
def test_groups_of_splits(
    device: torch.device,
    library: KernelLibrary,
    num_parts: int,
    split_blocks: int,
    group_splits: int,
    lengths: str,
    num_heads: int,
) -> None:
    """Joined by the attention kernel where parts are few, by the combination where they are many."""
    kv_lens = LENGTHS[lengths]
    case = make_case(device, kv_lens, num_heads)
    workspace = make_workspace(
        device,
        max_batch=len(kv_lens) + 3,
        num_heads=num_heads,
        deterministic=True,
        max_kv_len=max(kv_lens),
        split_blocks=split_blocks,
        group_splits=group_splits,
        num_parts=num_parts,
    )
    assert_matches(case.run(workspace, library), case.reference())


@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("max_q_len", [1, 4])
def test_who_joins_splits_does_not_show(
    device: torch.device, library: KernelLibrary, max_q_len: int, num_heads: int
) -> None:
    """A sequence has the same bits split by split and group by group, alone and among others, in any batch size."""
    lengths = [1, 63, 70, 127, 128, 129, 640, 1023, 1024, 1025, 1500, 2050, 5000, 9001]
    options = {"num_heads": num_heads, "max_q_len": max_q_len, "deterministic": True, "max_kv_len": 9001}
    case = make_case(device, [max(n, max_q_len) for n in lengths] * 10, num_heads, max_q_len)
    first = len(lengths) * max_q_len
    few, many = (
        make_workspace(device, max_batch=len(lengths) * 10, num_parts=num_parts, **options) for num_parts in (1, 132)
    )
    out, lse = case.run(many, library)
    assert int(many.plan[3]) == 16  # blocks of a split of this step: more groups than parts
    for workspace in (few, many):
        modes = set()
        for seq in range(len(lengths)):
            rows = slice(seq * max_q_len, (seq + 1) * max_q_len)
            own_out, own_lse = case.only(seq).run(workspace, library)
            modes.add(int(workspace.plan[3]))
            assert torch.equal(own_out, out[rows]), (lengths[seq], modes)
            assert torch.equal(own_lse, lse[rows]), (lengths[seq], modes)
        assert 2 in modes if workspace is many else modes == {16}
    together = dataclasses.replace(
        case,
        q_latent=case.q_latent[:first],
        q_pe=case.q_pe[:first],
        block_tables=case.block_tables[: len(lengths)],
        kv_lens=case.kv_lens[: len(lengths)],
        q_starts=case.q_starts[: len(lengths) + 1],
    )
    for workspace in (few, many):
        some_out, some_lse = together.run(workspace, library)
        assert torch.equal(some_out, out[:first])
        assert torch.equal(some_lse, lse[:first])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_nan_is_seen(device: torch.device, library: KernelLibrary, deterministic: bool) -> None:
    """A query that is NaN makes every split NaN, of which the combination must not make zeros."""
    case = make_case(device, [700, 90], 16)
    case.q_latent[0] = NAN
    workspace = make_workspace(
        device, max_batch=2, num_heads=16, deterministic=deterministic, max_kv_len=700 if deterministic else None
    )
    out, _ = case.run(workspace, library)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


def test_too_small_a_workspace_gives_nan(device: torch.device, library: KernelLibrary) -> None:
    case = make_case(device, [1000, 60], 16)
    workspace = make_workspace(
        device, max_batch=2, num_heads=16, deterministic=True, max_kv_len=256, split_blocks=2
    )  # holds 4 splits; the first sequence has 8
    out, _ = case.run(workspace, library)
    assert out[0].isnan().all()
    assert workspace.plan[1] == 1


def test_empty_batch(device: torch.device, library: KernelLibrary) -> None:
    case = make_case(device, [64], 16)
    empty = dataclasses.replace(
        case,
        q_latent=case.q_latent[:0],
        q_pe=case.q_pe[:0],
        block_tables=case.block_tables[:0],
        kv_lens=case.kv_lens[:0],
        q_starts=case.q_starts[:1],
    )
    workspace = make_workspace(device, max_batch=1, num_heads=16)
    assert empty.run(workspace, library)[0].shape == (0, 16, 512)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_very_long(device: torch.device, library: KernelLibrary, num_heads: int) -> None:
    if device.type != "cuda":
        pytest.skip("takes a GPU")
    case = make_case(device, [163_840, 163_839, 1], num_heads)
    workspace = make_workspace(device, max_batch=3, num_heads=num_heads)
    assert_matches(case.run(workspace, library), case.reference())


def test_captured_in_a_graph(device: torch.device, library: KernelLibrary) -> None:
    """One graph serves steps of other lengths: all that a step changes is read on the device."""
    if device.type != "cuda":
        pytest.skip("takes a GPU")
    case = make_case(device, [700, 64, 1], 16)
    workspace = make_workspace(device, max_batch=3, num_heads=16)
    case.run(workspace, library)
    out, lse = torch.full_like(case.q_latent, NAN), torch.zeros((3, 16), device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_decode(workspace, case.kv_lens, case.q_starts, library=library)
        mla_decode(
            case.q_latent,
            case.q_pe,
            case.cache,
            block_tables=case.block_tables,
            kv_lens=case.kv_lens,
            q_starts=case.q_starts,
            workspace=workspace,
            softmax_scale=SCALE,
            out=out,
            lse=lse,
            library=library,
        )
    for lengths in ([700, 64, 1], [1, 0, 1], [699, 33, 0]):
        case.kv_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert_matches((out, lse), case.reference())
