"""What a sequence's grammar allows next. Rebuilt from its generated tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rorqual.grammar import GrammarEngine, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """common_pb2.Grammar."""

    text: str
    after_token_id: int | None = None


class Constraint:
    """One sequence's grammar: compiled in another thread, then fed with each token that is generated.

    Lives on the step loop's thread. Until `is_ready` nothing but `observe` may be called.
    """

    def __init__(
        self,
        spec: GrammarSpec,
        matcher: Future[LLMatcher],
        *,
        end_id: int,
        stop_token_ids: Sequence[int],
        min_tokens: int,
        vocab_size: int,
    ) -> None:
        """`end_id`: the token that stands for a text's end in the engine's masks."""
        self._future = matcher
        self._matcher: LLMatcher | None = None
        self._after = spec.after_token_id
        self._end_id = end_id
        self._stop_ids = np.array([i for i in stop_token_ids if i < vocab_size], np.int64)
        self._stops = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._waiting: list[int] = []  # tokens that the matcher has not been given
        self._has_begun = self._after is None
        self._is_stopped = False  # by a stop token, which the grammar allowed
        self.error = ""
        """Why nothing can be allowed any more: the grammar or the history is at fault; empty otherwise."""

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._future.done()

    def observe(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated."""
        ids = [int(i) for i in token_ids]
        if not self._has_begun:
            if self._after not in ids:
                return
            self._has_begun = True
            assert self._after is not None
            ids = ids[ids.index(self._after) + 1 :]
        self._waiting += ids
        if self.is_ready:
            self._advance()

    def _advance(self) -> None:
        """Give the matcher what it has not seen."""
        if self._matcher is None:
            try:
                self._matcher = self._future.result()
            except GrammarError as error:
                self.error = f"the grammar cannot be compiled: {error}"
            except Exception as error:
                self.error = f"the grammar could not be compiled ({type(error).__name__})"
        ids, self._waiting = self._waiting, []
        for token_id in ids:
            if self.error or self._is_stopped or self._matcher is None:
                return
            if token_id in self._stops:
                self._is_stopped = True
            elif not self._matcher.consume_token(token_id):
                self.error = f"the grammar does not take token {token_id}, or is too complex to follow"

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow: the text is what the grammar describes, and whole."""
        self._advance()
        if self.error or self._matcher is None or not self._has_begun:
            return False
        return self._is_stopped or (self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self, num_generated: int) -> Words | None:
        """Bits of the tokens that may come as generated token `num_generated`: int32 [ceil(vocab_size / 32)], id i at
        bit i % 32 of word i // 32. None: nothing can be allowed, `error` says why."""
        self._advance()
        if self.error or self._matcher is None:
            return None
        words = np.full(self._num_words, -1, np.int32)
        if not self._has_begun:  # the reasoning may say anything, and has to end
            _clear(words, self._stop_ids)
            return words
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            self.error = "the grammar is too complex to follow"
            return None
        words[:] = mask[: self._num_words]
        _clear(words, np.array([self._end_id], np.int64))
        if self._vocab_size % 32:
            words[-1] &= np.int32((1 << self._vocab_size % 32) - 1)
        if self._matcher.is_accepting() and (num_generated >= self._min_tokens or not words.any()):
            _set(words, self._stop_ids)
        else:
            _clear(words, self._stop_ids)
        return words

    def mask(self, logits: npt.NDArray[np.float32], num_generated: int) -> None:
        """Make what is not allowed impossible, in place; all of it where nothing can be allowed."""
        words = self.allowed(num_generated)
        if words is None:
            logits[:] = -np.inf
            return
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[0]]
        logits[bits == 0] = -np.inf


def _set(words: Words, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_or.at(words.view(np.uint32), ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))


def _clear(words: Words, ids: npt.NDArray[np.int64]) -> None:
    np.bitwise_and.at(words.view(np.uint32), ids // 32, ~np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))


class Constraints:
    """Compiles the grammars of sequences, each in a worker thread."""

    def __init__(self, engine: GrammarEngine | None, vocab_size: int) -> None:
        """Without an engine every grammar fails, and its sequence with it."""
        self.on_ready: Callable[[], None] = lambda: None  # called from a worker thread
        self._engine = engine
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def begin(self, spec: GrammarSpec, stop_token_ids: Sequence[int], min_tokens: int) -> Constraint:
        """The constraint of a sequence that is admitted; its grammar is compiled from now on."""
        future: Future[LLMatcher]
        if self._engine is None:
            future = Future()
            future.set_exception(GrammarError("this executor takes no grammars"))
        else:
            future = self._pool.submit(self._engine.compile, spec.text)
        future.add_done_callback(lambda _: self.on_ready())
        return Constraint(
            spec,
            future,
            end_id=self._engine.end_id if self._engine is not None else -1,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            vocab_size=self._vocab_size,
        )
