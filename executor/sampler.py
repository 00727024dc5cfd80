"""How the next token is chosen from a row of logits.

The definition, for a row of float32 logits l (over the vocabulary), its parameters and one random number u:

1. l += logit_bias; repetition penalty r over prompt and generated tokens (l > 0: l / r, else l * r); minus
   frequency_penalty * count + presence_penalty for generated tokens; stop tokens are impossible before min_tokens.
   Where the sequence has a grammar, tokens that it does not allow are impossible; it decides of stop tokens too.
2. temperature 0 (below 1e-5): the largest l, the lowest id among equals. Otherwise p = softmax(l / T) in float32.
3. Truncation keeps a prefix of the tokens in descending order of p (equals: lower id first): at most top_k of them;
   of these the shortest prefix whose share of their mass is at least top_p; of these those with p >= min_p * max p.
4. The token is the first, in the order of ids, at which the running sum of kept p (float64) exceeds u times the whole.

What a row yields does not depend on the rows beside it, in no bit: softmax, sums and sorts run along one row each, in
an order that its length alone decides. u comes from `random_numbers.uniforms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from .constraint import Constraint, GrammarSpec
from .faults import SequenceError, contained
from .random_numbers import uniforms

MAX_LOGPROBS = 20
"""Alternatives reported beside a token, at most."""
_MOST_CHANGE = 1e9
"""What a logit may be changed by, or multiplied with: by this often, and divided by the least temperature, it stays finite."""
_GREEDY, _PLAIN, _TRUNCATED = 0, 1, 2
_GREEDY_BELOW = 1e-5  # a temperature under it divides differences of logits beyond what float32 holds apart
_UNIFORMS_AHEAD = 64  # random numbers are made for so many positions at a time
_SUM_BLOCK = 128  # running sums go over blocks first: a scan of 8,192 values costs 130 us, one of 64 and 128 five
_FOLD = 32  # the k-th largest of the maxima of disjoint sets of so many tokens bounds the k-th largest of all
_FIRST_GUESS = 64  # candidates that a nucleus is first looked for in
_BIN_BITS = 18  # low bits of a float32 that a histogram of probabilities leaves out: 32 bins for each power of two
_NUM_BINS = (0x3F800000 >> _BIN_BITS) + 1  # up to probability 1

_LARGEST = np.finfo(np.float32).max
_LEAST = np.float32(1e-45)  # the smallest positive float32

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """SamplingParams with every default filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far enter the choice."""
        return self.grammar is not None or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def check_sampling(spec: SamplingSpec) -> None:
    """SequenceError for numbers that common_pb2.SamplingParams excludes and the definition has no meaning for, and for
    those with which logits would leave float32."""
    numbers = {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "min_p": spec.min_p,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "repetition_penalty": spec.repetition_penalty,
    }
    numbers |= {f"logit_bias of token {token_id}": bias for token_id, bias in spec.logit_bias.items()}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise SequenceError(f"{name} must be a finite number, got {value}")
        if abs(value) > _MOST_CHANGE and ("penalty" in name or "bias" in name):
            raise SequenceError(f"{name} must be within {_MOST_CHANGE:g} of 0, got {value}")
    for name, given, is_right, right in (
        ("temperature", spec.temperature, spec.temperature >= 0, "at least 0"),
        ("top_p", spec.top_p, 0 <= spec.top_p <= 1, "in [0, 1]"),
        ("min_p", spec.min_p, 0 <= spec.min_p <= 1, "in [0, 1]"),
        (
            "repetition_penalty",
            spec.repetition_penalty,
            spec.repetition_penalty >= 1 / _MOST_CHANGE,
            f"at least {1 / _MOST_CHANGE:g}",
        ),
        ("logprobs", spec.logprobs, (spec.logprobs or 0) <= MAX_LOGPROBS, f"at most {MAX_LOGPROBS}"),
        (
            "prompt_logprobs",
            spec.prompt_logprobs,
            (spec.prompt_logprobs or 0) <= MAX_LOGPROBS,
            f"at most {MAX_LOGPROBS}",
        ),
    ):
        if not is_right:
            raise SequenceError(f"{name} must be {right}, got {given}")


class LogitAdjuster:
    """Step 1 of the definition for one sequence: it remembers what the penalties count."""

    def __init__(self, spec: SamplingSpec, vocab_size: int, constraint: Constraint | None = None) -> None:
        self._spec = spec
        self.constraint = constraint
        bias = {i: b for i, b in spec.logit_bias.items() if i < vocab_size and b != 0.0}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._biases = np.fromiter(bias.values(), np.float32, len(bias))
        self._stop_ids = np.array([i for i in spec.stop_token_ids if i < vocab_size], np.int64)
        # Of generated tokens the count, and whether a token occurred at all; made only where a penalty asks.
        self._counts = np.zeros(vocab_size, np.float32) if spec.has_penalties else None
        self._seen = np.zeros(vocab_size, np.bool_) if spec.has_penalties else None

    def observe(self, token_ids: Int64s | Sequence[int], num_prompt: int = 0) -> None:
        """Tokens that joined the history; the first `num_prompt` of them are the prompt's."""
        if self.constraint is not None:
            self.constraint.observe(token_ids[num_prompt:])  # type: ignore[arg-type]
        if self._counts is None or self._seen is None:
            return
        ids = np.asarray(token_ids, np.int64)
        self._seen[ids] = True
        np.add.at(self._counts, ids[num_prompt:], np.float32(1.0))

    def history(self) -> tuple[Int64s, Int64s]:
        """Every token that occurred, and the generated ones, as often as they did; empty where no penalty counts."""
        if self._counts is None or self._seen is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        made = np.flatnonzero(self._counts)
        return np.flatnonzero(self._seen), np.repeat(made, self._counts[made].astype(np.int64))

    def is_active(self, num_generated: int) -> bool:
        """Whether `adjust` would change anything when so many tokens have been generated."""
        return (
            self._counts is not None
            or self.constraint is not None
            or self._bias_ids.size > 0
            or (num_generated < self._spec.min_tokens and self._stop_ids.size > 0)
        )

    def adjust(self, logits: Float32s, num_generated: int) -> None:
        """Change one row of logits in place; the next token is generated token number `num_generated`, from 0."""
        spec = self._spec
        logits[self._bias_ids] += self._biases
        if self._counts is not None and self._seen is not None:
            if spec.repetition_penalty != 1.0:
                seen = np.flatnonzero(self._seen)
                x, r = logits[seen], np.float32(spec.repetition_penalty)
                logits[seen] = np.where(x > 0, x / r, x * r)
            if spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0:
                made = np.flatnonzero(self._counts)
                logits[made] -= self._counts[made] * np.float32(spec.frequency_penalty) + np.float32(
                    spec.presence_penalty
                )
        if self.constraint is not None:
            self.constraint.mask(logits, num_generated)
        elif num_generated < spec.min_tokens:
            logits[self._stop_ids] = -np.inf


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A row whose logits its sequence changes before the choice."""

    row: int
    adjuster: LogitAdjuster
    num_generated: int


class Sampler:
    """Chooses tokens for the rows of the decode set. Its columns are filled when a sequence joins, and only then.

    On a CPU the work is shared between torch (softmax, maxima: vectorised) and numpy (small integer work, where a
    torch call costs several times as much); logits on another device are copied to the host first.
    """

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.vocab_size = vocab_size
        self._width = -(-vocab_size // _SUM_BLOCK) * _SUM_BLOCK
        self._kind = np.zeros(max_rows, np.uint8)
        self._temperature = np.ones(max_rows, np.float32)
        self._largest_logit = np.full(max_rows, np.inf, np.float32)
        self._top_p = np.ones(max_rows, np.float64)
        self._top_k = np.zeros(max_rows, np.int64)
        self._min_p = np.zeros(max_rows, np.float64)
        self._seed = np.zeros(max_rows, np.uint64)
        self._choice_index = np.zeros(max_rows, np.uint32)
        self._uniforms = np.zeros((max_rows, _UNIFORMS_AHEAD), np.float64)
        self._uniforms_start = np.full(max_rows, -1, np.int64)
        self._columns = (
            self._kind,
            self._temperature,
            self._largest_logit,
            self._top_p,
            self._top_k,
            self._min_p,
            self._seed,
            self._choice_index,
            self._uniforms,
            self._uniforms_start,
        )
        # Scaled logits; what lies beyond the vocabulary stays impossible.
        self._scaled = torch.full((max_rows, self._width), -torch.inf, dtype=torch.float32)

    def set_row(self, row: int, spec: SamplingSpec, choice_index: int) -> None:
        """A sequence takes `row`."""
        truncated = spec.top_p < 1.0 or 0 < spec.top_k < self.vocab_size or spec.min_p > 0.0
        greedy = spec.temperature < _GREEDY_BELOW
        self._kind[row] = _GREEDY if greedy else _TRUNCATED if truncated else _PLAIN
        self._temperature[row] = 1.0 if greedy else spec.temperature
        self._largest_logit[row] = _LARGEST * min(self._temperature[row], np.float32(1.0))
        self._top_p[row] = spec.top_p
        self._top_k[row] = spec.top_k if 0 < spec.top_k < self.vocab_size else 0
        self._min_p[row] = spec.min_p
        self._seed[row] = spec.seed
        self._choice_index[row] = choice_index
        self._uniforms_start[row] = -1

    def move_row(self, src: int, dst: int) -> None:
        """The sequence of row `src` takes row `dst`."""
        for column in self._columns:
            column[dst] = column[src]

    def sample(
        self,
        logits: torch.Tensor,
        positions: Int64s,
        adjustments: Sequence[Adjustment] = (),
        errors: dict[int, Exception] | None = None,
    ) -> tuple[Int64s, Bools]:
        """The tokens at `positions` (of the history: the number of tokens before it), row by row.

        `logits`: float32 [num_rows, vocab_size], not changed. Returns tokens [num_rows] and whether each row is
        sound: a row with NaN or infinity has no token. Nor has one whose adjustment fails; why goes to `errors`, by row.
        """
        rows = logits.detach().cpu().numpy()
        num_rows = rows.shape[0]
        best_ids = rows.argmax(axis=1)  # the first NaN, where there is one; the lowest id among equals
        best = rows[np.arange(num_rows), best_ids]
        sound = np.isfinite(best)
        if adjustments:
            rows, errors = rows.copy(), {} if errors is None else errors
            for item in adjustments:
                row = rows[item.row]
                with contained(errors, item.row):
                    item.adjuster.adjust(row, item.num_generated)
                if item.row in errors:
                    row[:] = -np.inf
                best_ids[item.row] = row.argmax()
                best[item.row] = row[best_ids[item.row]]
            sound &= np.isfinite(best)
        # What is finite may be infinite once it is divided by its temperature.
        sound &= np.abs(best) <= self._largest_logit[:num_rows]
        kinds = self._kind[:num_rows]
        if not kinds.any():
            return best_ids, sound
        if not sound.all():
            kinds = np.where(sound, kinds, _GREEDY)
        numbers = self._numbers(kinds, positions)
        for kind, choose in ((_PLAIN, self._choose_plain), (_TRUNCATED, self._choose_truncated)):
            chosen = np.flatnonzero(kinds == kind)
            if chosen.size:
                best_ids[chosen] = choose(self._probabilities(rows, chosen), numbers[chosen], chosen)
        return best_ids, sound

    def _numbers(self, kinds: npt.NDArray[np.uint8], positions: Int64s) -> Float64s:
        """u of each row that draws one (others: anything)."""
        num_rows = positions.shape[0]
        start = positions - positions % _UNIFORMS_AHEAD
        for row in np.flatnonzero((self._uniforms_start[:num_rows] != start) & (kinds != _GREEDY)).tolist():
            self._uniforms[row] = uniforms(
                int(self._seed[row]), int(self._choice_index[row]), int(start[row]), _UNIFORMS_AHEAD
            )
            self._uniforms_start[row] = start[row]
        numbers: Float64s = self._uniforms[np.arange(num_rows), positions - start]
        return numbers

    def _probabilities(self, rows: Float32s, chosen: Int64s) -> Float32s:
        """softmax(l / T) of the chosen rows: [len(chosen), width]."""
        picked = rows if chosen.size == rows.shape[0] else rows[chosen]
        scaled = self._scaled[: chosen.size]
        inside = scaled[:, : self.vocab_size]
        torch.div(torch.from_numpy(picked), torch.from_numpy(self._temperature[chosen, None]), out=inside)
        probabilities: Float32s = torch.softmax(scaled, dim=-1).numpy()
        return probabilities

    def _choose_plain(self, p: Float32s, numbers: Float64s, chosen: Int64s) -> Int64s:
        """Step 4 over the whole vocabulary: sums of blocks of ids first, then within one block."""
        num_rows = p.shape[0]
        each = np.arange(num_rows)
        blocks = p.reshape(num_rows, -1, _SUM_BLOCK)
        sums = torch.from_numpy(blocks).sum(dim=-1, dtype=torch.float64).numpy()
        running = np.cumsum(sums, axis=1)
        target = numbers * running[:, -1]
        block = _first_above(running, target, sums > 0)
        inside = blocks[each, block].astype(np.float64)
        before = np.where(block > 0, running[each, block - 1], 0.0)
        offset = _first_above(before[:, None] + np.cumsum(inside, axis=1), target, inside > 0)
        return block * _SUM_BLOCK + offset

    def _choose_truncated(self, p: Float32s, numbers: Float64s, chosen: Int64s) -> Int64s:
        """Steps 3 and 4 among the likeliest tokens: some 64, or as many as top_k asks for.

        Nearly every nucleus lies within them; rows where it does not are cut by a histogram instead.
        """
        top_p, top_k = self._top_p[chosen], self._top_k[chosen]
        # (Beside top_k, top_p's share is of the top k's mass, which min_p must not have cut before.)
        floor = np.where((top_k > 0) & (top_p < 1.0), 0.0, self._min_p[chosen] * p.max(axis=1))
        wants_guess = (top_k == 0) & (top_p < 1.0)
        bound = bound_of_kth_largest(p, np.where(wants_guess, _FIRST_GUESS, top_k))
        tokens, within = self._choose_among(p, np.maximum(bound, floor), numbers, chosen)
        wide = np.flatnonzero(wants_guess & ~within & (bound > floor))
        if wide.size:
            cut = np.stack([_nucleus(p[row], top_p[row]) for row in wide.tolist()])
            cut[cut < floor[wide, None]] = 0.0
            tokens[wide] = self._choose_plain(cut, numbers[wide], chosen[wide])
        return tokens

    def _choose_among(self, p: Float32s, cutoff: Float64s, numbers: Float64s, chosen: Int64s) -> tuple[Int64s, Bools]:
        """Choose among tokens with p >= cutoff. Second value: whether the nucleus is known to lie among them."""
        num_rows = p.shape[0]
        each = np.arange(num_rows)
        top_p, top_k, min_p = self._top_p[chosen], self._top_k[chosen], self._min_p[chosen]
        # Rounded down, so that no token at the cutoff is lost; never zero, so that impossible tokens stay out.
        low = np.nextafter(cutoff.astype(np.float32), np.float32(0.0))
        row, token_ids = np.divmod(np.flatnonzero(p >= np.maximum(low, _LEAST)[:, None]), p.shape[1])
        counts = np.bincount(row, minlength=num_rows)
        column = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        values = np.zeros((num_rows, int(counts.max())), np.float32)  # candidates, in the order of ids
        values[row, column] = p[row, token_ids]
        # One integer that sorts by descending p, then id. (The bits of positive floats sort as integers do.)
        keys = np.full(values.shape, np.iinfo(np.uint64).max, np.uint64)
        keys[row, column] = (
            (np.uint64(0xFFFFFFFF) - values[row, column].view(np.uint32).astype(np.uint64)) << np.uint64(32)
        ) | token_ids.astype(np.uint64)
        ordered = np.sort(keys, axis=1)
        sorted_p = (np.uint64(0xFFFFFFFF) - (ordered >> np.uint64(32))).astype(np.uint32).view(np.float32)
        running = np.cumsum(sorted_p.astype(np.float64), axis=1)
        keep = np.where(top_k > 0, np.minimum(top_k, counts), counts)
        whole = np.where(top_k > 0, running[each, keep - 1], 1.0)
        nucleus = (running < (top_p * whole)[:, None]).sum(axis=1) + 1
        keep = np.minimum(keep, np.where(top_p < 1.0, nucleus, keep))
        likely = (sorted_p.astype(np.float64) >= (min_p * sorted_p[:, 0])[:, None]).sum(axis=1)
        keep = np.minimum(keep, np.maximum(likely, 1))
        last = ordered[each, keep - 1]
        kept = np.where(keys <= last[:, None], values, np.float32(0.0)).astype(np.float64)
        running = np.cumsum(kept, axis=1)
        column = _first_above(running, numbers * running[:, -1], kept > 0)
        return (keys[each, column] & np.uint64(0xFFFFFFFF)).astype(np.int64), nucleus <= counts


def bound_of_kth_largest(x: Float32s, k: Int64s | int) -> Float32s:
    """For each row a number that at least k of its values reach, and few more: the k-th largest of the maxima of
    disjoint sets. -inf where there are fewer sets than k, or k is 0."""
    num_sets = x.shape[1] // _FOLD
    if num_sets == 0:
        return np.full(x.shape[0], -np.inf, np.float32)
    maxima = np.sort(x[:, : num_sets * _FOLD].reshape(x.shape[0], _FOLD, num_sets).max(axis=1), axis=1)
    k = np.broadcast_to(k, x.shape[0])
    in_range = (k > 0) & (k <= num_sets)
    bound = maxima[np.arange(x.shape[0]), num_sets - np.where(in_range, k, 1)]
    return np.where(in_range, bound, np.float32(-np.inf))


def _nucleus(p: Float32s, top_p: float) -> Float32s:
    """One row with what lies outside its nucleus set to 0: a histogram finds where it ends, one bin is sorted."""
    bins = p.view(np.uint32) >> _BIN_BITS
    mass = np.bincount(bins, weights=p, minlength=_NUM_BINS)[::-1].cumsum()  # of this bin and those above
    from_top = int((mass < top_p).sum())
    if from_top >= mass.size:
        return p.copy()
    edge = mass.size - 1 - from_top
    before = mass[from_top - 1] if from_top else 0.0
    inside = np.flatnonzero(bins == edge)
    order = inside[np.argsort(-p[inside], kind="stable")]
    keep = int((before + np.cumsum(p[order].astype(np.float64)) < top_p).sum()) + 1
    cut: Float32s = np.where(bins > edge, p, np.float32(0.0))
    cut[order[:keep]] = p[order[:keep]]
    return cut


def _first_above(running: Float64s, target: Float64s, possible: Bools) -> Int64s:
    """The first column at which `running` exceeds `target`; the last possible one where rounding leaves none."""
    idx: Int64s = (running <= target[:, None]).sum(axis=1)
    lost = np.flatnonzero(idx == running.shape[1])
    if lost.size:
        idx[lost] = running.shape[1] - 1 - possible[lost, ::-1].argmax(axis=1)
    return idx
