"""Log-probabilities of token ids, with the text of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import common_pb2, text_pb2

from .token_text import TokenText
from .vocabulary import Vocabulary

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class LogprobWriter:
    """Writes entries whose bytes, joined, are those of the text: a token that is not shown has none."""

    def __init__(self, vocabulary: Vocabulary, table: TokenText, hidden_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._table = table
        self._hidden_ids = hidden_ids  # stop tokens: counted, not shown

    def generated(self, logprobs: Iterable[common_pb2.TokenLogprobs]) -> list[text_pb2.TokenLogprobText]:
        return [self._entry(entry) for entry in logprobs]

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprobs]
    ) -> list[text_pb2.TokenLogprobText]:
        """One for each prompt token; the first has no log-probability."""
        if not token_ids:
            return []
        return [self._token(token_ids[0]), *(self._entry(entry) for entry in logprobs)]

    def prompt_parts(
        self, token_ids: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprobs], most: int
    ) -> Iterator[list[text_pb2.TokenLogprobText]]:
        """What `prompt` returns, in parts of at most `most` entries."""
        yield self.prompt(token_ids, logprobs[: most - 1])
        for start in range(most - 1, len(logprobs), most):
            yield self.generated(logprobs[start : start + most])

    def _entry(self, entry: common_pb2.TokenLogprobs) -> text_pb2.TokenLogprobText:
        result = self._token(entry.token_id, entry.logprob)
        top_ids = unpack_token_ids(entry.top_token_ids)
        result.top.extend(
            self._token(token_id, logprob) for token_id, logprob in zip(top_ids, entry.top_logprobs, strict=True)
        )
        return result

    def _token(self, token_id: int, logprob: float | None = None) -> text_pb2.TokenLogprobText:
        own_bytes = self._vocabulary.raw_text.bytes_of(token_id)
        shown = b"" if token_id in self._hidden_ids else self._table.bytes_of(token_id)
        if logprob is not None and not math.isfinite(logprob):
            logprob = FLOOR
        return text_pb2.TokenLogprobText(
            token=own_bytes.decode("utf-8", "replace"), token_bytes=shown, logprob=logprob, token_id=token_id
        )
