"""A model with the GPU model's face that answers from what the cache holds, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from executor.gpu.engine import GpuEngine
from executor.gpu.model import ChunkRows
from executor.gpu.step_loop import GpuStepLoop
from executor.model.batch import BLOCK_SIZE
from executor.order_loop import OrderLoop, StepLimits
from rorqual.kernels.prefill import PrefillPlan

from .executor_fakes import VOCAB, Driven, FakeModel


class FakeGpuModel(FakeModel):
    """FakeModel's logits, for rows laid out as `executor.gpu.model.GpuModel` takes them.

    A row's hidden state is its number, by which `logits` finds the history that was read back for it.
    """

    def __init__(self, *, max_decode_rows: int, max_rows: int, max_keys: int, max_blocks: int) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(hidden_size=8)
        self.max_keys = max_keys
        self.heads = 4
        embedding = torch.arange(VOCAB, dtype=torch.bfloat16)[:, None].repeat(1, 8)
        self.weights = SimpleNamespace(embedding=embedding)
        self.x = torch.full((max_rows, 8), torch.nan, dtype=torch.bfloat16)
        self.positions = torch.zeros(max_rows, dtype=torch.int64)
        self.slot_mapping = torch.full((max_rows,), -1, dtype=torch.int64)
        self.kv_lens = torch.zeros(max_decode_rows, dtype=torch.int32)
        self.row_tables = torch.zeros((max_decode_rows, max_blocks), dtype=torch.int32)
        self.rows: list[torch.Tensor | None] = []  # each row's history; None: it did not run
        self.num_chunk_rows = 0
        self.forms: list[tuple[int, str]] = []  # (position, form) of chunk rows

    def forward(  # type: ignore[override]
        self,
        num_decode: int,
        chunks: ChunkRows | None,
        caches: Sequence[torch.Tensor],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        column = caches[0].view(-1)
        num_rows = num_decode + (chunks.num_rows if chunks is not None else 0)
        if chunks is not None:
            self.positions[num_decode:num_rows] = chunks.positions
            self.slot_mapping[num_decode:num_rows] = chunks.slot_mapping
        tokens = self.x[:num_rows, 0].double()
        slots = self.slot_mapping[:num_rows]
        running = slots >= 0
        written = slots[running]
        assert written.unique().numel() == written.numel()
        column[written] = tokens[running]
        self.rows = [None] * num_rows
        self.num_attended: dict[int, int] = {}  # by row, of its keys in the slabs so far

        def read(row: int, table: torch.Tensor, length: int) -> None:
            assert length == int(self.positions[row]) + 1
            at = torch.arange(length)
            where = table[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            assert int(where[-1]) == int(slots[row])
            assert self.rows[row] is None
            self.rows[row] = column[where]

        for row in range(num_decode):
            assert bool(running[row]) == bool(self.kv_lens[row] > 0)
            if running[row]:
                read(row, self.row_tables[row], int(self.kv_lens[row]))
        if chunks is not None:
            self.num_chunk_rows += chunks.num_rows
            for group in chunks.prefill:
                self._read_group(group, tokens, read)
            for part in chunks.recomputed:
                for i, row in enumerate(range(part.start, part.end)):
                    read(row, part.block_tables[i], int(part.kv_lens[i]))
                    self.forms.append((int(self.positions[row]), "decode"))
            assert all(row is not None for row in self.rows[num_decode:])
        number = torch.arange(num_rows) if wanted is None else wanted
        return torch.stack((number // 256, number % 256), 1).bfloat16().repeat(1, 4)  # bfloat16 counts to 256

    def _read_group(self, group, tokens, read) -> None:  # type: ignore[no-untyped-def]
        plan = group.plan
        assert plan.num_keys == group.num_keys <= self.max_keys
        assert plan.tensor is not None
        assert torch.equal(plan.tensor[: plan.words.size], torch.from_numpy(plan.words))
        row = group.start
        for i, (q_len, k_len) in enumerate(zip(plan.q_lens, plan.k_lens, strict=True)):
            for q in range(q_len):
                length = k_len - q_len + q + 1
                if group.block_tables is None:
                    assert (plan.key_begin, length) == (0, int(self.positions[row + q]) + 1)
                    self.rows[row + q] = tokens[row : row + q + 1]
                elif not self._attend_slab(row + q, length, plan):
                    continue
                else:
                    read(row + q, group.block_tables[i], length)
                self.forms.append((int(self.positions[row + q]), "prefill"))
            row += q_len
        assert row == group.end

    def _attend_slab(self, row: int, length: int, plan: PrefillPlan) -> bool:
        """Whether the row has attended to its last key; slabs come in order and leave none out."""
        if plan.key_begin >= length:
            assert self.num_attended[row] == length
            return False
        assert self.num_attended.get(row, 0) == plan.key_begin
        self.num_attended[row] = min(plan.key_end, length)
        return self.num_attended[row] == length

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        for i, (high, low) in enumerate(hidden[:, :2].long().tolist()):
            history = self.rows[256 * high + low]
            out[i] = torch.nan if history is None else self.logits_of(history)


class DrivenGpu(Driven):
    """The GPU's step loop over FakeGpuModel."""

    def __init__(self, model: Any = None, *, max_keys: int | None = None, **values: Any) -> None:
        """`max_keys`: latents that one call of the prefill form attends to; None: any history's."""
        self._max_keys = max_keys
        super().__init__(model, **values)

    def make_loop(self, limits: StepLimits, traced: bool) -> OrderLoop:
        poison = self.model.poison
        self.model = FakeGpuModel(
            max_decode_rows=limits.max_num_seqs,
            max_rows=limits.max_num_batched_tokens,
            max_keys=self._max_keys or limits.max_model_len,
            max_blocks=-(-limits.max_model_len // BLOCK_SIZE),
        )
        self.model.poison = poison
        engine = GpuEngine(self.model, limits)  # type: ignore[arg-type]
        engine.use_cache(SimpleNamespace(layers=[self.cache.storage[0]], width=1))  # type: ignore[arg-type]
        return GpuStepLoop(engine, self.cache, limits, traced=traced)
