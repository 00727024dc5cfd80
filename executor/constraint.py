"""What a sequence's grammar allows next. Rebuilt from its generated tokens alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from rorqual.grammar import GrammarEngine, GrammarError

from .reports import CONSTRAINT_TOO_COMPLEX, INTERNAL

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]
T = TypeVar("T")

_MAX_MASK_THREADS = 4
_MAX_COMPILE_THREADS = 4
_COMPILE_STACK_BYTES = 256 << 20
"""Of address space; memory is taken as far as a grammar's nesting reaches. The engine's recursion over the rules of a grammar
of 256 KiB needs more than a thread's usual 8 MiB."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """common_pb2.Grammar."""

    text: str
    after_token_id: int | None = None
    opening_token_id: int | None = None


class OwnedMatcher:
    """One sequence's matcher, and the only way to it. It has one owner at a time: this object, or the worker it is lent to.

    The engine's matcher fails if two threads use it at once. So it never leaves this class: each method takes the matcher
    back first, and waits for the worker where it has to. The worker gets the matcher with the loan and returns it with the
    mask. Lives on one thread; only `Loan.run` is called in another.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher: LLMatcher | None = matcher  # None: it is lent
        self._loan: Future[_Returned] | None = None
        self._mask: bytes | None = None  # of the present state
        self.error = ""
        """Why the matcher answers no more: the engine failed; empty otherwise."""

    def _take_back(self) -> LLMatcher:
        """The matcher, from here on this thread's."""
        if self._matcher is None:
            assert self._loan is not None
            returned = self._loan.result()
            self._matcher, self._mask = returned.matcher, returned.mask
            self.error = self.error or returned.error
            self._loan = None
        return self._matcher

    def lend(self) -> Loan:
        """Give the matcher away until `Loan.run` has computed the mask of the present state."""
        loan = Loan(self._take_back())
        self._matcher, self._mask, self._loan = None, None, loan.returned
        return loan

    @property
    def has_mask(self) -> bool:
        """Whether the mask of the present state is known, or is being computed. Never waits."""
        return self._matcher is None or self._mask is not None

    def consume(self, token_id: int) -> bool:
        """Whether the grammar takes this token next."""
        taken = self._ask(lambda matcher: matcher.consume_token(token_id), False)
        self._mask = None
        return taken

    def mask(self) -> bytes | None:
        """What may come next, as a bit for each token id. None: `error` says why."""
        self._take_back()
        if self._mask is None and not self.error:
            self._mask = self._ask(lambda matcher: matcher.compute_bitmask(), None)
        return self._mask

    def is_stopped(self) -> bool:
        return self._ask(lambda matcher: matcher.is_stopped(), False)

    def is_accepting(self) -> bool:
        return self._ask(lambda matcher: matcher.is_accepting(), False)

    def is_error(self) -> bool:
        return self._ask(lambda matcher: matcher.is_error(), True)

    def _ask(self, question: Callable[[LLMatcher], T], otherwise: T) -> T:
        """The engine's answer; `otherwise` where it fails, which `error` says from then on."""
        matcher = self._take_back()
        if self.error:
            return otherwise
        try:
            return question(matcher)
        except BaseException as error:  # a panic of the engine is no Exception
            self.error = _engine_failed(error)
            return otherwise


class Loan:
    """A matcher on its way to a worker and back."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.returned: Future[_Returned] = Future()

    def run(self) -> None:
        """Compute the mask and return the matcher, whatever happens. To be called once, in any thread."""
        try:
            returned = _Returned(self._matcher, self._matcher.compute_bitmask())
        except BaseException as error:  # a worker that keeps a matcher would stop the step loop
            returned = _Returned(self._matcher, None, _engine_failed(error))
        del self._matcher
        self.returned.set_result(returned)


@dataclass(frozen=True, slots=True)
class _Returned:
    """What a worker gives back."""

    matcher: LLMatcher
    mask: bytes | None
    error: str = ""


def _engine_failed(error: BaseException) -> str:
    return f"the grammar engine failed ({type(error).__name__})"


class Phase(Enum):
    """Where a sequence is. What it may say next depends on its last token only where it is bound."""

    REASONING = "anything but an end"
    FREE = "anything"
    BOUND = "what the grammar allows"


class Constraint:
    """One sequence's grammar: compiled in another thread, then fed with each token that is generated.

    Lives on the step loop's thread, and may be asked anything at any time: what needs the matcher waits for the worker that
    has it. Until `is_ready` it knows only which tokens were generated.
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
        self._matcher: OwnedMatcher | None = None
        self._after = spec.after_token_id
        self._opening = spec.opening_token_id
        self._end_id = end_id
        self._stop_ids = np.array([i for i in stop_token_ids if i < vocab_size], np.int64)
        self._stops = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._waiting: list[int] = []  # tokens that the matcher has not been given
        self.phase = Phase.REASONING if self._after is not None else self._next_phase
        self._is_stopped = False  # by a stop token, which the grammar allowed
        self.error = ""
        """Why nothing can be allowed any more; empty otherwise."""
        self.reason = ""
        """Of that, as in executor_pb2.SequenceFault: whether the grammar or its tokens are at fault, or the engine."""

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or cannot be."""
        return self._future.done()

    def cancel(self) -> None:
        """The sequence has ended: its grammar is not compiled, if nobody has begun to."""
        self._future.cancel()

    def observe(self, token_ids: Sequence[int]) -> None:
        """These tokens were generated."""
        ids = [int(i) for i in token_ids]
        if self.phase is Phase.REASONING:
            if self._after not in ids:
                return
            ids = ids[ids.index(self._after) + 1 :]
            self.phase = self._next_phase
        if self.phase is Phase.FREE:
            if self._opening not in ids:
                return
            ids = ids[ids.index(self._opening) + 1 :]
            self.phase = Phase.BOUND
        self._waiting += ids
        if self.is_ready:
            self._advance()

    @property
    def _next_phase(self) -> Phase:
        """After the reasoning."""
        return Phase.BOUND if self._opening is None else Phase.FREE

    def _advance(self) -> None:
        """Give the matcher what it has not seen. Does nothing before the grammar is compiled."""
        if not self.is_ready:
            return
        if self._matcher is None and not self.error:
            try:
                self._matcher = OwnedMatcher(self._future.result())
            except GrammarError as error:
                self._fail(f"the grammar cannot be compiled: {error}")
            except BaseException as error:
                self._fail(f"the grammar could not be compiled ({type(error).__name__})", INTERNAL)
        ids, self._waiting = self._waiting, []
        for token_id in ids:
            if self.error or self._is_stopped or self._matcher is None:
                return
            if token_id in self._stops:
                self._is_stopped = True
            elif not self._matcher.consume(token_id):
                self._stuck(f"the grammar does not take token {token_id}, or is too complex to follow")

    def _fail(self, error: str, reason: str = CONSTRAINT_TOO_COMPLEX) -> None:
        self.error, self.reason = error, reason

    def _stuck(self, error: str) -> None:
        """The matcher does not go on: `error`, where the engine itself did not fail."""
        engines = self._matcher.error if self._matcher is not None else ""
        self._fail(engines or error, INTERNAL if engines else CONSTRAINT_TOO_COMPLEX)

    @property
    def needs_mask(self) -> bool:
        """Whether the grammar says what comes next, and nobody has asked it yet."""
        self._advance()
        return self._matcher is not None and self.phase is Phase.BOUND and not self.error and not self._matcher.has_mask

    def lend(self) -> Loan:
        """The loan with which a worker computes what the grammar allows next; only where it `needs_mask`."""
        assert self._matcher is not None
        return self._matcher.lend()

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow: the text is what the grammar describes, and whole."""
        self._advance()
        if self.error or self._matcher is None or self.phase is not Phase.BOUND:
            return False
        return self._is_stopped or (self._matcher.is_stopped() and not self._matcher.is_error())

    def allowed(self, num_generated: int) -> Words | None:
        """Bits of the tokens that may come as generated token `num_generated`: int32 [ceil(vocab_size / 32)], id i at
        bit i % 32 of word i // 32. None: nothing can be allowed, `error` says why."""
        self._advance()
        if self.error or self._matcher is None:
            return None
        words = np.full(self._num_words, -1, np.int32)
        if self.phase is not Phase.BOUND:
            if self.phase is Phase.REASONING or num_generated < self._min_tokens:  # the reasoning has to end itself
                _clear(words, self._stop_ids)
            return words
        mask = self._matcher.mask()
        if mask is None or self._matcher.is_error():
            self._stuck("the grammar is too complex to follow: use fewer or shorter repetitions and alternatives")
            return None
        words[:] = np.frombuffer(mask, np.int32)[: self._num_words]
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


class _Compiler:
    """Compiles grammars in worker threads. Those of one text are compiled one after the other by one worker, for which all
    but the first cost a copy, so that they leave the other workers free."""

    def __init__(self, engine: GrammarEngine, trial: Callable[[str], None] | None) -> None:
        self._engine = engine
        self._trial = trial
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Future[LLMatcher]]] = {}  # by text, where a worker has it or will
        num_threads = max(2, min(_MAX_COMPILE_THREADS, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")

    def begin(self, text: str) -> Future[LLMatcher]:
        """A matcher of `text`, some time; one that is cancelled before is not compiled."""
        future: Future[LLMatcher] = Future()
        with self._lock:
            waiting = self._waiting.get(text)
            if waiting is not None:
                waiting.append(future)
                return future
            self._waiting[text] = [future]
        try:
            with _large_stacks():  # the pool begins its threads in `submit`
                self._pool.submit(self._compile, text)
        except RuntimeError:  # no thread can be started just now: whoever asks for this text next tries again
            with self._lock:
                self._waiting.pop(text, None)
            raise
        return future

    def _compile(self, text: str) -> None:
        """For all who wait for it, those too who come while it is compiled."""
        is_tried = self._trial is None
        error: BaseException | None = None
        while True:
            with self._lock:
                if not self._waiting.get(text):
                    self._waiting.pop(text, None)
                    return
                future = self._waiting[text].pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            matcher: LLMatcher | None = None
            if error is None:
                try:
                    if self._trial is not None and not is_tried:
                        self._trial(text)
                        is_tried = True
                    matcher = self._engine.compile(text)
                except BaseException as caught:  # a panic of the engine is no Exception, and somebody waits
                    error = caught
            if matcher is not None:
                future.set_result(matcher)
            else:
                future.set_exception(error)


_stack_lock = threading.Lock()


@contextmanager
def _large_stacks() -> Iterator[None]:
    """Threads that begin here have room for the engine's recursion. (The size is the interpreter's, not a thread's.)"""
    with _stack_lock:
        before = threading.stack_size(_COMPILE_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


class Constraints:
    """Compiles the grammars of sequences, and computes their masks while a step runs, in worker threads."""

    def __init__(
        self, engine: GrammarEngine | None, vocab_size: int, *, trial: Callable[[str], None] | None = None
    ) -> None:
        """Without an engine every grammar fails, and its sequence with it. `trial`, where there is one, is called before a
        text is compiled, in a worker thread, and raises GrammarError for one that must not be."""
        self.on_ready: Callable[[], None] = lambda: None  # called from a worker thread
        self._engine = engine
        self._vocab_size = vocab_size
        self._compiler = _Compiler(engine, trial) if engine is not None else None
        self._num_mask_threads = max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) // 2))
        self._mask_pool = ThreadPoolExecutor(self._num_mask_threads, thread_name_prefix="mask")

    def begin(self, spec: GrammarSpec, stop_token_ids: Sequence[int], min_tokens: int) -> Constraint:
        """The constraint of a sequence that is admitted; its grammar is compiled from now on."""
        future: Future[LLMatcher]
        if self._compiler is None:
            future = Future()
            future.set_exception(GrammarError("this executor takes no grammars"))
        else:
            future = self._compiler.begin(spec.text)
        future.add_done_callback(lambda _: self.on_ready())
        return Constraint(
            spec,
            future,
            end_id=self._engine.end_id if self._engine is not None else -1,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            vocab_size=self._vocab_size,
        )

    def prepare(self, constraints: Sequence[Constraint]) -> None:
        """Begin to compute what these allow next, in other threads, so that it is there when `allowed` asks for it."""
        wanted = [constraint for constraint in constraints if constraint.needs_mask]
        for part in range(min(self._num_mask_threads, len(wanted))):
            share = wanted[part :: self._num_mask_threads]
            self._mask_pool.submit(_compute_masks, [constraint.lend() for constraint in share])


def _compute_masks(loans: Sequence[Loan]) -> None:
    for loan in loans:
        loan.run()
