"""Log-probabilities of chosen tokens and their likeliest alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .faults import SequenceError
from .reports import NUMERICAL_FAULT
from .sampler import bound_of_kth_largest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: of the model's own distribution, before bias, penalties, temperature and truncation."""

    token_id: int
    logprob: float
    rank: int  # 1 + the number of strictly likelier tokens
    top_token_ids: tuple[int, ...]  # likeliest first, equals by id
    top_logprobs: tuple[float, ...]

    def with_top(self, num_top: int) -> TokenLogprob:
        """The same with fewer alternatives."""
        if len(self.top_token_ids) <= num_top:
            return self
        return TokenLogprob(
            self.token_id, self.logprob, self.rank, self.top_token_ids[:num_top], self.top_logprobs[:num_top]
        )


def checked(entries: Iterable[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """`entries`, of one sequence. SequenceError where they are no numbers: the scheduler ends the link over such a report."""
    whole = tuple(entries)
    if any(math.isnan(sum(entry.top_logprobs, entry.logprob)) for entry in whole):
        raise SequenceError("the logits of its prompt are not finite (NaN or infinity)", reason=NUMERICAL_FAULT)
    return whole


def token_logprobs(
    logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], num_top: int
) -> list[TokenLogprob]:
    """One entry a row. `logits`: [num_rows, vocab_size]; `token_ids`: [num_rows], the tokens that follow them."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    each = np.arange(num_rows)
    best = logits.max(axis=1)
    shifted = logits - best[:, None]
    log_sum = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    own = logits[each, token_ids]
    own_logprob = (shifted[each, token_ids] - log_sum).tolist()
    ranks = ((logits > own[:, None]).sum(axis=1) + 1).tolist()
    ids = token_ids.tolist()
    if num_top == 0:
        return [TokenLogprob(ids[i], own_logprob[i], ranks[i], (), ()) for i in range(num_rows)]
    least = bound_of_kth_largest(logits, num_top)
    result = []
    for i in range(num_rows):
        candidates = np.flatnonzero(logits[i] >= least[i])
        order = np.argsort(-logits[i, candidates], kind="stable")[:num_top]
        top = candidates[order]
        result.append(
            TokenLogprob(
                ids[i],
                own_logprob[i],
                ranks[i],
                tuple(top.tolist()),
                tuple((shifted[i, top] - log_sum[i]).tolist()),
            )
        )
    return result
