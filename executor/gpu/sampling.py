"""What the device needs to choose tokens and report log-probabilities, kept by slot, and what comes back of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rorqual.kernels.sampling import (
    RECORD_WORDS,
    AdjustPool,
    LogprobBuffers,
    MaskPool,
    make_logprob_buffers,
    make_sampling_columns,
    make_sampling_workspace,
    needs_adjustment,
    pack_record,
    prompt_logprobs,
    sample,
)
from rorqual.kernels.step_state import scatter_words

from ..constraint import Constraint, Phase
from ..logprobs import TokenLogprob, checked
from ..sequences import LogprobItem
from ..sequences import Sequence as Seq
from .chunks import PromptPart
from .model import GpuModel
from .rows import ChosenTokens, LaunchedRows
from .upload import StepUpload

Int32s = npt.NDArray[np.int32]

PROMPT_SLAB = 64
"""Rows whose logits are held at a time for a prompt's log-probabilities: no largest step was measured with them."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens that a step computes."""

    sequence: Seq
    targets: Int32s
    slabs: Sequence[LogprobBuffers]  # on the device, one for each so many rows

    def item(self) -> LogprobItem | None:
        """To be called once the step has ended; None for a sequence that has gone, or where there are none."""
        if not self.sequence.is_live or not self.targets.size:
            return None
        entries: list[TokenLogprob] = []
        num_top = self.sequence.num_prompt_logprobs or 0
        for slab in self.slabs:
            host = _HostLogprobs.of(slab)
            count = slab.ranks.shape[0]
            ids = self.targets[len(entries) : len(entries) + count]
            entries += [host.entry(row, int(token_id), num_top) for row, token_id in enumerate(ids)]
        return LogprobItem(self.sequence.seq_id, prompt=checked(entries))


class DeviceSampler:
    """One record a slot; a slot's row of bias and counts, and of its grammar's mask; buffers of log-probabilities in
    turn."""

    def __init__(self, max_rows: int, vocab_size: int, num_buffers: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._columns = make_sampling_columns(max_rows, device)
        self._adjust = AdjustPool(max_rows, vocab_size, device)
        self._masks = MaskPool(max_rows, vocab_size, device)
        self._workspace = make_sampling_workspace(max_rows, vocab_size, device)
        self._logprobs = make_logprob_buffers(max_rows, device)
        self._host = [_HostLogprobs.empty(max_rows, device) for _ in range(num_buffers)]
        self._records: dict[int, Int32s] = {}  # by slot, to be uploaded
        self._uploaded = 0
        self._changes_at = 0
        self._adjusted: dict[int, Seq] = {}
        self._followed: dict[int, Seq] = {}  # by seq_id, those that have a grammar
        self._constrained: dict[int, tuple[int, Seq]] = {}  # those of them whose next token depends on the last one
        self._with_logprobs: dict[int, Seq] = {}

    @property
    def max_upload_words(self) -> int:
        """Of a step's upload, at most."""
        return 2 * RECORD_WORDS * self._max_rows + 8

    def join(self, slot: int, sequence: Seq) -> None:
        """`sequence` takes `slot`, with its history so far."""
        spec = sequence.spec
        constraint = sequence.constraint
        phase = constraint.phase if constraint is not None else Phase.FREE
        if constraint is not None:
            self._followed[sequence.seq_id] = sequence
        if phase is not Phase.FREE:
            spec = replace(spec, min_tokens=0)  # of stop tokens the mask decides
        if spec.top_k >= self._vocab_size:
            spec = replace(spec, top_k=0)  # it cuts nothing off
        if phase is Phase.BOUND:
            self._constrained[sequence.seq_id] = slot, sequence
        elif phase is Phase.REASONING and constraint is not None:  # one mask for all its tokens
            self._set_mask(slot, constraint.allowed(sequence.num_generated))
        adjusts = needs_adjustment(spec) and sequence.adjuster is not None
        self._records[slot] = pack_record(
            spec,
            sequence.admit.choice_index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            adjust_idx=slot if adjusts else -1,
            mask_idx=slot if phase is not Phase.FREE else -1,
        )
        if adjusts and sequence.adjuster is not None:
            self._adjusted[sequence.seq_id] = sequence
            self._adjust.set_row(slot, spec, *sequence.adjuster.history())
        if spec.logprobs is not None:
            self._with_logprobs[sequence.seq_id] = sequence

    def leave(self, slot: int, sequence: Seq) -> None:
        self._adjusted.pop(sequence.seq_id, None)
        self._followed.pop(sequence.seq_id, None)
        self._constrained.pop(sequence.seq_id, None)
        self._with_logprobs.pop(sequence.seq_id, None)

    @property
    def is_constrained(self) -> bool:
        """Whether a sequence of the set has a grammar that holds now."""
        return bool(self._constrained)

    @property
    def constraints(self) -> list[Constraint]:
        """Those that hold now."""
        return [seq.constraint for _, seq in self._constrained.values() if seq.constraint is not None]

    def set_masks(self, num_generated: Callable[[Seq], int]) -> None:
        """What the grammars allow next, whose sequences' tokens the host has all seen: to be called before `sample`.

        `num_generated`: how many tokens a sequence has generated so far.
        """
        for slot, sequence in self._constrained.values():
            assert sequence.constraint is not None
            self._set_mask(slot, sequence.constraint.allowed(num_generated(sequence)))

    def _set_mask(self, slot: int, words: Int32s | None) -> None:
        self._masks.set_row(slot, words if words is not None else np.zeros(self._masks.words.shape[1], np.int32))

    def put(self, upload: StepUpload) -> None:
        """Changed records into the step's upload."""
        self._uploaded = RECORD_WORDS * len(self._records)
        if not self._records:
            return
        words, self._changes_at = upload.reserve(2 * self._uploaded)
        slots = np.fromiter(self._records.keys(), np.int32, len(self._records))
        changes = words.reshape(len(slots), RECORD_WORDS, 2)
        changes[..., 0] = slots[:, None] * RECORD_WORDS + np.arange(RECORD_WORDS, dtype=np.int32)
        changes[..., 1] = np.stack(list(self._records.values()))
        self._records.clear()

    def apply(self, upload: StepUpload) -> None:
        """The upload was sent: change the records."""
        if self._uploaded:
            changes = upload.view(self._changes_at, 2 * self._uploaded).view(-1, 2)
            scatter_words(self._columns.records, changes)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        new_positions: torch.Tensor,
        active: torch.Tensor,
        *,
        tokens: torch.Tensor,
        sound: torch.Tensor,
    ) -> None:
        """Choose each active row's token, and its log-probability where it is wanted."""
        sample(
            logits,
            slots,
            new_positions,
            active,
            self._columns,
            self._adjust,
            self._masks,
            self._workspace,
            tokens,
            sound,
            self._logprobs,
        )

    def copy_logprobs(self, turn: int, rows: LaunchedRows) -> bool:
        """Bring the step's log-probabilities to the host, if a row wants any. Returns whether."""
        if not self._with_logprobs or not rows.num_rows:
            return False
        self._host[turn].fill(self._logprobs, rows.num_rows)
        return True

    def logprobs(self, turn: int, rows: LaunchedRows, chosen: ChosenTokens, i: int) -> list[LogprobItem]:
        """Of the `i`-th row that ran, if it wants them; the step has ended."""
        row = int(chosen.rows[i])
        sequence = rows.sequences[row]
        if sequence.spec.logprobs is None:
            return []
        entry = self._host[turn].entry(row, int(chosen.token_ids[i]), sequence.spec.logprobs)
        return [LogprobItem(sequence.seq_id, generated=(entry,))]

    @property
    def follows_tokens(self) -> bool:
        """Whether a sequence of the set has penalties or a grammar."""
        return bool(self._adjusted or self._followed)

    def prompt_logprobs(self, part: PromptPart, hidden: torch.Tensor, model: GpuModel) -> PromptLogprobs:
        """Launch what computes them for a chunk's rows; keeps the row whose token is yet to come.

        hidden: [rows, hidden] bf16, the step's final states.
        """
        chunk, sequence, count = part.chunk, part.chunk.sequence, part.num_rows
        rows, targets = hidden[part.start_row : part.start_row + count], chunk.token_ids[1 : count + 1]
        if sequence.pending is not None:
            rows, targets = torch.cat((sequence.pending, rows)), chunk.token_ids[: count + 1]
            sequence.pending = None
        if rows.shape[0] > targets.size:
            sequence.pending = rows[-1:].clone()
        host_targets = targets.astype(np.int32)
        device_targets = torch.from_numpy(host_targets).to(self._device)
        slabs: list[LogprobBuffers] = []
        num_top = sequence.num_prompt_logprobs or 0
        slab = min(self._max_rows, PROMPT_SLAB)
        for start in range(0, targets.size, slab):
            end = min(start + slab, targets.size)
            logits = torch.empty((end - start, self._vocab_size), dtype=torch.float32, device=self._device)
            model.logits(rows[start:end], logits)
            out = make_logprob_buffers(end - start, self._device)
            prompt_logprobs(logits, device_targets[start:end], num_top, self._workspace, out)
            slabs.append(out)
        return PromptLogprobs(sequence, host_targets, slabs)


@dataclass(frozen=True, slots=True)
class _HostLogprobs:
    """LogprobBuffers on the host."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, device: torch.device) -> _HostLogprobs:
        like = make_logprob_buffers(max_rows, torch.device("cpu"))
        parts = (like.logprobs, like.ranks, like.top_ids, like.top_logprobs)
        return cls(*(part.pin_memory() if device.type == "cuda" else part for part in parts))

    @classmethod
    def of(cls, buffers: LogprobBuffers) -> _HostLogprobs:
        """A copy; waits for the device."""
        return cls(buffers.logprobs.cpu(), buffers.ranks.cpu(), buffers.top_ids.cpu(), buffers.top_logprobs.cpu())

    def fill(self, buffers: LogprobBuffers, num_rows: int) -> None:
        """Copy the first rows, on the current stream."""
        for mine, theirs in (
            (self.logprobs, buffers.logprobs),
            (self.ranks, buffers.ranks),
            (self.top_ids, buffers.top_ids),
            (self.top_logprobs, buffers.top_logprobs),
        ):
            mine[:num_rows].copy_(theirs[:num_rows], non_blocking=True)

    def entry(self, row: int, token_id: int, num_top: int) -> TokenLogprob:
        ids = [i for i in self.top_ids[row, :num_top].tolist() if i >= 0]
        return TokenLogprob(
            token_id,
            float(self.logprobs[row]),
            int(self.ranks[row]),
            tuple(ids),
            tuple(self.top_logprobs[row, : len(ids)].tolist()),
        )
