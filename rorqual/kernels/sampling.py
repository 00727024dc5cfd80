"""Choosing the next tokens and reporting log-probabilities: compiled on CUDA, numpy elsewhere.

What a row's choice depends on lies on the device by slot, a sequence's fixed place: one record of 64 bytes in
`SamplingColumns`, and for the few sequences that ask for it a row of `AdjustPool` (bias, penalties, stop tokens) or of
`MaskPool` (a grammar's allowed tokens). A step names each row's slot. The rules are those of `reference_sampling`; the
kernels' sums round differently, so a token may differ where u lies within some 1e-6 of the edge of its interval.
A row's result depends on its own logits and parameters only, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from . import reference_sampling as reference
from .abi import SampleArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load
from .reference_sampling import MAX_TOP, RECORD

RECORD_WORDS = RECORD.itemsize // 4
_MAX_INT32 = 2**31 - 1


class SamplingParameters(Protocol):
    """What a request says about sampling, every default filled in."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logprobs(self) -> int | None: ...


def has_penalties(spec: SamplingParameters) -> bool:
    """Whether the tokens so far enter the choice."""
    return spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0 or spec.repetition_penalty != 1.0


def needs_adjustment(spec: SamplingParameters) -> bool:
    """Whether the sequence needs a row of `AdjustPool`."""
    return (
        has_penalties(spec)
        or any(bias != 0.0 for bias in spec.logit_bias.values())
        or (spec.min_tokens > 0 and len(spec.stop_token_ids) > 0)
    )


def pack_record(
    spec: SamplingParameters,
    choice_index: int,
    *,
    num_prompt_tokens: int = 0,
    adjust_idx: int = -1,
    mask_idx: int = -1,
) -> npt.NDArray[np.int32]:
    """A slot's record: int32 [RECORD_WORDS], to be copied to `SamplingColumns.records[slot]`.

    num_prompt_tokens: of the history, what min_tokens does not count; adjust_idx, mask_idx: rows of the pools, -1: none.
    Counts past int32 become its largest value, which is past any vocabulary and history.
    """
    record = np.zeros(1, RECORD)
    record["temperature"] = 0.0 if spec.temperature < reference.GREEDY_BELOW else spec.temperature
    record["top_p"] = spec.top_p
    record["top_k"] = min(max(spec.top_k, 0), _MAX_INT32)
    record["min_p"] = spec.min_p
    record["seed"] = spec.seed & 0xFFFFFFFFFFFFFFFF
    record["choice_index"] = choice_index & 0xFFFFFFFF
    record["num_logprobs"] = -1 if spec.logprobs is None else min(spec.logprobs, MAX_TOP)
    record["adjust_idx"] = adjust_idx
    record["mask_idx"] = mask_idx
    record["num_prompt_tokens"] = num_prompt_tokens
    record["min_tokens"] = min(spec.min_tokens, _MAX_INT32)
    record["presence_penalty"] = spec.presence_penalty
    record["frequency_penalty"] = spec.frequency_penalty
    record["repetition_penalty"] = spec.repetition_penalty
    return record.view(np.int32)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters by slot. `records`: int32 [max_seqs, RECORD_WORDS]; the columns are views of it."""

    records: torch.Tensor

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        offset: int = RECORD.fields[name][1]  # type: ignore[index]
        return self.records.view(dtype)[:, offset // dtype.itemsize]

    @property
    def temperature(self) -> torch.Tensor:
        """float32 [max_seqs]; 0: greedy."""
        return self._column("temperature", torch.float32)

    @property
    def top_p(self) -> torch.Tensor:
        """float32 [max_seqs]; 1: off."""
        return self._column("top_p", torch.float32)

    @property
    def top_k(self) -> torch.Tensor:
        """int32 [max_seqs]; 0: off."""
        return self._column("top_k", torch.int32)

    @property
    def min_p(self) -> torch.Tensor:
        """float32 [max_seqs]; 0: off."""
        return self._column("min_p", torch.float32)

    @property
    def seed(self) -> torch.Tensor:
        """int64 [max_seqs]: the bits of a uint64."""
        return self._column("seed", torch.int64)

    @property
    def choice_index(self) -> torch.Tensor:
        """int32 [max_seqs]."""
        return self._column("choice_index", torch.int32)

    @property
    def num_logprobs(self) -> torch.Tensor:
        """int32 [max_seqs]: alternatives wanted, at most 20; -1: no log-probabilities."""
        return self._column("num_logprobs", torch.int32)

    @property
    def adjust_idx(self) -> torch.Tensor:
        """int32 [max_seqs]: row of the `AdjustPool`; -1: none."""
        return self._column("adjust_idx", torch.int32)

    @property
    def mask_idx(self) -> torch.Tensor:
        """int32 [max_seqs]: row of the `MaskPool`; -1: none."""
        return self._column("mask_idx", torch.int32)

    @property
    def num_prompt_tokens(self) -> torch.Tensor:
        """int32 [max_seqs]."""
        return self._column("num_prompt_tokens", torch.int32)

    @property
    def min_tokens(self) -> torch.Tensor:
        """int32 [max_seqs]."""
        return self._column("min_tokens", torch.int32)

    @property
    def presence_penalty(self) -> torch.Tensor:
        """float32 [max_seqs]."""
        return self._column("presence_penalty", torch.float32)

    @property
    def frequency_penalty(self) -> torch.Tensor:
        """float32 [max_seqs]."""
        return self._column("frequency_penalty", torch.float32)

    @property
    def repetition_penalty(self) -> torch.Tensor:
        """float32 [max_seqs]; 1: none."""
        return self._column("repetition_penalty", torch.float32)


def make_sampling_columns(max_seqs: int, device: torch.device) -> SamplingColumns:
    """Every slot greedy, with nothing asked for."""
    record = np.zeros(max_seqs, RECORD)
    record["top_p"] = record["repetition_penalty"] = 1.0
    record["num_logprobs"] = record["adjust_idx"] = record["mask_idx"] = -1
    return SamplingColumns(torch.from_numpy(record.view(np.int32).reshape(max_seqs, RECORD_WORDS)).to(device))


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy in the stream's order that the host does not wait for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class AdjustPool:
    """Bias, penalties and stop tokens of the sequences that have any: a row each."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        stride = -(-vocab_size // 4) * 4
        self.vocab_size = vocab_size
        self.bias = torch.zeros((num_rows, stride), dtype=torch.float32, device=device)
        # Bit 31: in the prompt; bit 30: a stop token; below: how often it was generated, kept up by the kernel.
        self.states = torch.zeros((num_rows, stride), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Of device memory."""
        return self.bias.nbytes + self.states.nbytes

    def set_row(
        self,
        idx: int,
        spec: SamplingParameters,
        prompt_ids: npt.NDArray[np.integer] | Sequence[int],
        generated_ids: npt.NDArray[np.integer] | Sequence[int] = (),
    ) -> None:
        """A sequence takes row `idx`, with its history so far. In the order of the current stream; never waits."""
        bias, states = self.bias[idx], self.states[idx]
        bias.zero_()
        states.zero_()
        biases = {i: b for i, b in spec.logit_bias.items() if i < self.vocab_size}
        if biases:
            ids = _to_device(np.fromiter(biases.keys(), np.int64, len(biases)), bias.device)
            bias.index_copy_(0, ids, _to_device(np.fromiter(biases.values(), np.float32, len(biases)), bias.device))
        flags = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if has_penalties(spec):
            flags = np.unique(np.asarray(prompt_ids, np.int64)), np.asarray(generated_ids, np.int64)
        stops = np.unique(np.array([i for i in spec.stop_token_ids if i < self.vocab_size], np.int64))
        ids_of = np.concatenate([*flags, stops])
        if ids_of.size:
            # Each bit is added once and counts add up, so that sums are the flags.
            words = np.repeat(
                np.array([reference.PROMPT_BIT, 1, reference.STOP_BIT], np.uint32).view(np.int32),
                [flags[0].size, flags[1].size, stops.size],
            )
            states.index_add_(0, _to_device(ids_of, states.device), _to_device(words, states.device))


class MaskPool:
    """Allowed tokens of sequences under a grammar. `words`: int32 [num_rows, ceil(vocab_size / 32)], bit set: allowed."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.words = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    def set_row(self, idx: int, words: npt.NDArray[np.int32]) -> None:
        """Token i is allowed where bit i % 32 of words[i // 32] is set. In the order of the current stream."""
        if words.shape != self.words.shape[1:]:
            raise ValueError(f"words: needs shape {list(self.words.shape[1:])}, got {list(words.shape)}")
        self.words[idx].copy_(_to_device(words, self.words.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """What rows that ask for log-probabilities get. Of the model's own distribution, before any adjustment."""

    logprobs: torch.Tensor  # float32 [max_rows], of the token; NaN for a row that is not sound
    ranks: torch.Tensor  # int32 [max_rows]: 1 + the number of strictly likelier tokens
    top_ids: torch.Tensor  # int32 [max_rows, 20], likeliest first, equals by id; -1 beyond the number wanted
    top_logprobs: torch.Tensor  # float32 [max_rows, 20]


def make_logprob_buffers(max_rows: int, device: torch.device) -> LogprobBuffers:
    return LogprobBuffers(
        torch.zeros(max_rows, dtype=torch.float32, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
        torch.full((max_rows, MAX_TOP), -1, dtype=torch.int32, device=device),
        torch.zeros((max_rows, MAX_TOP), dtype=torch.float32, device=device),
    )


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch of `sample` and `prompt_logprobs`; calls that share one must be of one stream."""

    memory: torch.Tensor  # uint8; its counters are zero between calls
    max_rows: int
    vocab_size: int


def make_sampling_workspace(max_rows: int, vocab_size: int, device: torch.device) -> SamplingWorkspace:
    num_units = -(-vocab_size // 1024)
    num_bytes = max_rows * (72 + 288 * num_units) + 6 * 256 if device.type == "cuda" else 0
    return SamplingWorkspace(torch.zeros(num_bytes, dtype=torch.uint8, device=device), max_rows, vocab_size)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor | None,
    columns: SamplingColumns,
    adjust: AdjustPool | None,
    mask: MaskPool | None,
    workspace: SamplingWorkspace,
    out_tokens: torch.Tensor,
    out_sound: torch.Tensor,
    logprobs: LogprobBuffers | None = None,
    *,
    library: KernelLibrary | None = None,
) -> None:
    """Choose each row's next token. Two launches, whatever the rows ask for; nothing is allocated or waited for.

    logits: float32 [num_rows, vocab_size], rows may be strided, not changed; slots: int32 [num_rows], no slot twice;
    positions: int32 or int64 [num_rows], the number of tokens before the new one; active: uint8, bool or int32
    [num_rows], or None. A row whose slot is negative or whose `active` is 0 is left alone in every output.
    out_tokens: int32 [>= num_rows]; out_sound: uint8 [>= num_rows], 0 where the largest logit is NaN or infinite, before or
    after the adjustment: then the token is 0. logprobs: written for rows with num_logprobs >= 0.
    The chosen token is counted in the row's `adjust` row. Raises ValueError.
    """
    device = logits.device
    check("logits", logits, (None, None), torch.float32, device)
    num_rows, vocab_size = logits.shape
    check("slots", slots, (num_rows,), torch.int32, device)
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions: needs torch.int32 or torch.int64, got {positions.dtype}")
    check("positions", positions, (num_rows,), positions.dtype, device)
    if active is not None:
        if active.dtype not in (torch.uint8, torch.bool, torch.int32):
            raise ValueError(f"active: needs torch.uint8, torch.bool or torch.int32, got {active.dtype}")
        check("active", active, (num_rows,), active.dtype, device)
    check("records", columns.records, (None, RECORD_WORDS), torch.int32, device, contiguous_dims=2)
    if adjust is not None:
        if adjust.vocab_size != vocab_size:
            raise ValueError(f"adjust: is for a vocabulary of {adjust.vocab_size}, the logits have {vocab_size}")
        check("adjust.bias", adjust.bias, (None, None), torch.float32, device, contiguous_dims=2)
    if mask is not None:
        check("mask.words", mask.words, (None, -(-vocab_size // 32)), torch.int32, device, contiguous_dims=2)
    _check_outputs(num_rows, vocab_size, workspace, logprobs, device)
    for name, tensor, dtype in (("out_tokens", out_tokens, torch.int32), ("out_sound", out_sound, torch.uint8)):
        check(name, tensor, (None,), dtype, device)
        if tensor.shape[0] < num_rows:
            raise ValueError(f"{name}: needs {num_rows} rows, got {tensor.shape[0]}")
    if library is None:
        if device.type != "cuda":
            _sample_reference(logits, slots, positions, active, columns, adjust, mask, out_tokens, out_sound, logprobs)
            return
        library = load()
    args = SampleArgs(
        **_output_args(logprobs),
        out_tokens=out_tokens.data_ptr(),
        out_sound=out_sound.data_ptr(),
        workspace=workspace.memory.data_ptr(),
        workspace_bytes=workspace.memory.nbytes,
        logits=logits.data_ptr(),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        active=None if active is None else active.data_ptr(),
        records=columns.records.data_ptr(),
        bias=None if adjust is None else adjust.bias.data_ptr(),
        states=None if adjust is None else adjust.states.data_ptr(),
        masks=None if mask is None else mask.words.data_ptr(),
        logits_stride=logits.stride(0) if num_rows > 1 else max(vocab_size, logits.stride(0)),
        pool_stride=0 if adjust is None else adjust.bias.stride(0),
        mask_stride=0 if mask is None else mask.words.stride(0),
        num_rows=num_rows,
        vocab_size=vocab_size,
        workspace_rows=workspace.max_rows,
        positions_bytes=positions.element_size(),
        active_bytes=0 if active is None else active.element_size(),
    )
    library.call("rorqual_sample", args, current_stream(device))


def prompt_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    num_top: int,
    workspace: SamplingWorkspace,
    out: LogprobBuffers,
    *,
    library: KernelLibrary | None = None,
) -> None:
    """Log-probability, rank and alternatives of a given token a row.

    logits: float32 [num_rows, vocab_size], rows may be strided; targets: int32 [num_rows], a negative one leaves its row
    of `out` alone; num_top: at most 20. Raises ValueError.
    """
    device = logits.device
    check("logits", logits, (None, None), torch.float32, device)
    num_rows, vocab_size = logits.shape
    check("targets", targets, (num_rows,), torch.int32, device)
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"num_top must be in [0, {MAX_TOP}], got {num_top}")
    _check_outputs(num_rows, vocab_size, workspace, out, device)
    if library is None:
        if device.type != "cuda":
            rows = logits.numpy()
            for r, token in enumerate(targets.tolist()):
                if token >= 0:
                    sound = bool(np.isfinite(rows[r].max()))
                    _report_reference(rows[r], token if sound else None, num_top, r, out)
            return
        library = load()
    args = SampleArgs(
        **_output_args(out),
        workspace=workspace.memory.data_ptr(),
        workspace_bytes=workspace.memory.nbytes,
        logits=logits.data_ptr(),
        targets=targets.data_ptr(),
        logits_stride=logits.stride(0) if num_rows > 1 else max(vocab_size, logits.stride(0)),
        num_rows=num_rows,
        vocab_size=vocab_size,
        workspace_rows=workspace.max_rows,
        num_top=num_top,
    )
    library.call("rorqual_sample", args, current_stream(device))


def _check_outputs(
    num_rows: int,
    vocab_size: int,
    workspace: SamplingWorkspace,
    logprobs: LogprobBuffers | None,
    device: torch.device,
) -> None:
    if num_rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"workspace: is for {workspace.max_rows} rows of {workspace.vocab_size}, got {num_rows} of {vocab_size}"
        )
    if logprobs is None:
        return
    check("logprobs", logprobs.logprobs, (None,), torch.float32, device)
    check("ranks", logprobs.ranks, (None,), torch.int32, device)
    check("top_ids", logprobs.top_ids, (None, MAX_TOP), torch.int32, device, contiguous_dims=2)
    check("top_logprobs", logprobs.top_logprobs, (None, MAX_TOP), torch.float32, device, contiguous_dims=2)
    rows = min(t.shape[0] for t in (logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs))
    if rows < num_rows:
        raise ValueError(f"logprobs: needs {num_rows} rows, got {rows}")


def _output_args(out: LogprobBuffers | None) -> dict[str, int]:
    if out is None:
        return {}
    return {
        "out_logprobs": out.logprobs.data_ptr(),
        "out_ranks": out.ranks.data_ptr(),
        "out_top_ids": out.top_ids.data_ptr(),
        "out_top_logprobs": out.top_logprobs.data_ptr(),
    }


def _sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    active: torch.Tensor | None,
    columns: SamplingColumns,
    adjust: AdjustPool | None,
    mask: MaskPool | None,
    out_tokens: torch.Tensor,
    out_sound: torch.Tensor,
    logprobs: LogprobBuffers | None,
) -> None:
    records = columns.records.numpy().view(RECORD)[:, 0]
    rows = logits.numpy()
    for r, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0 or (active is not None and not active[r]):
            continue
        record = records[slot]
        bias = states = words = None
        if adjust is not None and record["adjust_idx"] >= 0:
            bias = adjust.bias[record["adjust_idx"]].numpy()
            states = adjust.states[record["adjust_idx"]].numpy().view(np.uint32)
        if mask is not None and record["mask_idx"] >= 0:
            words = mask.words[record["mask_idx"]].numpy().view(np.uint32)
        x = reference.adjusted_logits(rows[r], record, position, bias, states, words)
        sound = bool(np.isfinite(rows[r].max()) and np.isfinite(x.max()))
        token = int(x.argmax()) if sound else 0
        if sound and record["temperature"] >= reference.GREEDY_BELOW:
            kept = reference.kept_mass(
                x,
                temperature=float(record["temperature"]),
                top_k=int(record["top_k"]),
                top_p=float(record["top_p"]),
                min_p=float(record["min_p"]),
            )
            token = reference.choose(
                kept, reference.uniform(int(record["seed"]), int(record["choice_index"]), position)
            )
        out_tokens[r], out_sound[r] = token, sound
        if sound and states is not None:
            states[token] += np.uint32(1)
        if logprobs is not None and record["num_logprobs"] >= 0:
            _report_reference(rows[r], token if sound else None, int(record["num_logprobs"]), r, logprobs)


def _report_reference(
    row: npt.NDArray[np.float32], token: int | None, num_top: int, r: int, out: LogprobBuffers
) -> None:
    out.top_ids[r] = -1
    out.top_logprobs[r] = -torch.inf if token is not None else torch.nan
    out.logprobs[r], out.ranks[r] = torch.nan, 0
    if token is None:
        return
    out.logprobs[r], out.ranks[r], ids, logprobs = reference.token_logprob(row, token, num_top)
    out.top_ids[r, : ids.size] = torch.from_numpy(ids)
    out.top_logprobs[r, : ids.size] = torch.from_numpy(logprobs.astype(np.float32))
