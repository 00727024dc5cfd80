"""One request under way: its choices on the scheduler, what they have made so far, and what the caller is told."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rorqual.core.clock import Clock
from rorqual.core.errors import DeadlineExceededError, InternalError, NumericalFaultError, RorqualError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.rpc.status import to_error_proto
from rorqual.v1 import common_pb2, generation_pb2, text_pb2

from .choice import ChoiceMachine, ChoiceRules, End, Output, Piece, pieces_of
from .formats.events import Kind
from .link import SchedulerLink, UpstreamStream
from .logprob_text import LogprobWriter
from .outbox import EventList, EventSink, add_call, add_text
from .prompt import Prompt

_log = logging.getLogger(__name__)

ECHO_SLICE_TOKENS = 4096
"""Of a prompt, whose log-probabilities one event holds: with 20 alternatives some 3 MiB, and 0.1 s of the event loop."""
ATTEMPTS_OF_A_CALLER = 1 << 16
"""A caller's attempt counts this many of ours, so that its resume overtakes any of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A request, checked and encoded; all that a resume needs stands here or in the choices' histories."""

    request_id: str
    model: str
    prompt: Prompt
    rules: ChoiceRules
    sampling: common_pb2.SamplingParams
    num_choices: int
    max_tokens: int | None  # as the request has it
    priority: int
    cache_salt: str
    attempt: int
    template_time_unix_s: int
    deadline_s: float | None  # monotonic
    trace: common_pb2.TraceContext
    echo: bool
    return_prompt_token_ids: bool
    logprob_writer: LogprobWriter | None
    eos_ids: frozenset[int]  # tokens by which the model itself ends an answer
    resume: text_pb2.TextResume | None

    def call_id(self, choice_index: int, call_idx: int) -> str:
        """The id of a tool call: the same after a resume, and of no other request."""
        known = f"{self.request_id} {self.sampling.seed} {choice_index} {call_idx}".encode()
        return f"call_{hashlib.blake2b(known, key=self.prompt.digest, digest_size=12).hexdigest()}"


@dataclass(slots=True)
class RunStats:
    """For telemetry: read when the run has ended, and per frame."""

    num_cached_tokens: int | None = None
    queue_time_us: int = 0
    first_token_unix_ns: int = 0  # 0: none has come
    finish_reasons: list[int] = field(default_factory=list)
    error: RorqualError | None = None
    cancelled: bool = False


class TextRun:
    """Lives on the event loop, from acceptance to the last event; then calls `on_done` once."""

    def __init__(
        self,
        spec: RunSpec,
        link: SchedulerLink,
        sink: EventSink,
        clock: Clock,
        *,
        on_tokens: Callable[[int], None],
        on_reopened: Callable[[], None],
        on_done: Callable[[TextRun], None],
    ) -> None:
        self.spec = spec
        self.link = link
        self.sink = sink
        self.clock = clock
        self.on_tokens = on_tokens
        self.on_reopened = on_reopened
        self._on_done = on_done
        self.stats = RunStats()
        self._accepted = False
        self._done = False
        self._deadline: asyncio.TimerHandle | None = None
        resume = spec.resume
        histories = {history.choice_index: history.token_ids for history in resume.choices} if resume else {}
        if resume is not None:
            self.stats.num_cached_tokens = resume.num_cached_tokens
            self.stats.queue_time_us = resume.queue_time_us
        self.choices = [ChoiceRun(self, index, histories.get(index, b"")) for index in range(spec.num_choices)]
        self._num_open = spec.num_choices

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes."""
        return self._done

    def start(self) -> None:
        """Open what has not ended. Raises nothing: failures go to the sink."""
        if self.spec.deadline_s is not None:
            left_s = self.spec.deadline_s - self.clock.monotonic_s()
            self._deadline = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire)
        for choice in self.choices:
            choice.start()
        if self._num_open == 0:
            self.accept()
        for choice in self.choices:
            if choice.ended_before and not self._done:
                choice.finish_by_itself()

    def cancel(self) -> None:
        """The caller is gone."""
        if not self._done:
            self.stats.cancelled = True
            self._close()

    def fail(self, error: RorqualError) -> None:
        """The request as a whole has failed: the other choices are cancelled."""
        if not self._done:
            self.stats.error = error
            self._close()
            self.sink.fail(error)

    def _expire(self) -> None:
        self.fail(DeadlineExceededError("the request's time ran out"))

    def _close(self) -> None:
        self._done = True
        if self._deadline is not None:
            self._deadline.cancel()
        for choice in self.choices:
            choice.close()
        self._on_done(self)
        self.choices = []  # each has this run: nothing of a request is to wait for the collector of cycles

    def accept(self, started: generation_pb2.Started | None = None) -> None:
        """Tell the caller, once, what it needs for a resume; and the prompt where it is echoed."""
        if started is not None and self.stats.num_cached_tokens is None:
            self.stats.num_cached_tokens = started.num_cached_tokens
            self.stats.queue_time_us = started.queue_time_us
        if self._accepted:
            return
        self._accepted = True
        spec = self.spec
        accepted = self.sink.events().add().accepted
        accepted.num_prompt_tokens = spec.prompt.num_tokens
        accepted.prompt_digest = spec.prompt.digest
        accepted.seed = spec.sampling.seed
        accepted.template_time_unix_s = spec.template_time_unix_s
        accepted.model = spec.model
        accepted.num_cached_tokens = self.stats.num_cached_tokens or 0
        accepted.queue_time_us = self.stats.queue_time_us
        if spec.return_prompt_token_ids:
            accepted.prompt_token_ids = spec.prompt.packed_ids
        for choice in self.choices:
            choice.echo_plain()
        self.sink.wake()

    def choice_done(self, reason: common_pb2.FinishReason) -> None:
        """One choice has been told its end. The last one brings the usage."""
        self.stats.finish_reasons.append(int(reason))
        self._num_open -= 1
        if self._num_open:
            return
        usage = self.sink.events().add().usage
        usage.num_prompt_tokens = self.spec.prompt.num_tokens
        usage.num_cached_tokens = self.stats.num_cached_tokens or 0
        usage.num_generated_tokens = sum(choice.machine.num_tokens for choice in self.choices)
        usage.num_reasoning_tokens = sum(choice.machine.num_reasoning_tokens for choice in self.choices)
        usage.queue_time_us = self.stats.queue_time_us
        self._close()
        self.sink.end()


class ChoiceRun:
    """One choice: its history here, its stream at the scheduler. The link's listener."""

    __slots__ = (
        "_after_echo",
        "_echo_due",
        "_echoing",
        "_history",
        "_index",
        "_num_opened",
        "_run",
        "_stream",
        "_told",
        "_wants_prompt_logprobs",
        "ended_before",
        "machine",
    )

    def __init__(self, run: TextRun, index: int, history: bytes) -> None:
        spec = run.spec
        self._run = run
        self._index = index
        self._stream: UpstreamStream | None = None
        self._num_opened = 0
        self._told = False  # its end has been told
        self._echoing: asyncio.Task[None] | None = None  # what writes a long prompt's log-probabilities
        self._after_echo: list[Callable[[], None]] = []  # what was said meanwhile
        self.machine = ChoiceMachine(spec.rules)
        # What was delivered before is run silently: the caller has what it made.
        consumed = self.machine.push(unpack_token_ids(history)).num_tokens
        self._history = bytearray(history[: 4 * consumed])
        wants_logprobs = spec.sampling.HasField("prompt_logprobs")
        echoed = spec.resume is not None and (
            bool(history) or (spec.resume.prompt_logprobs_delivered and (spec.num_choices == 1 or not wants_logprobs))
        )
        self._echo_due = (spec.echo or wants_logprobs) and not echoed
        self._wants_prompt_logprobs = wants_logprobs and not echoed
        self.ended_before = self.machine.end is not None and not self._wants_prompt_logprobs

    def start(self) -> None:
        if not self.ended_before:
            self._stream = self._run.link.open(self)

    def close(self) -> None:
        """Whatever it still holds at the scheduler is freed."""
        if self._echoing is not None and self._echoing is not asyncio.current_task():
            self._echoing.cancel()
        self._after_echo.clear()
        if self._stream is not None:
            self._run.link.cancel(self._stream)
            self._stream = None

    def finish_by_itself(self) -> None:
        """Its history has ended already: answered with its end, never continued."""
        self._run.accept()
        assert self.machine.end is not None
        self._tell_end(self.machine.end)

    def generate_request(self) -> generation_pb2.GenerateRequest:
        spec, stats = self._run.spec, self._run.stats
        request = generation_pb2.GenerateRequest(
            request_id=spec.request_id,
            token_ids=spec.prompt.packed_ids + bytes(self._history),
            num_prompt_tokens=spec.prompt.num_tokens,
            sampling=spec.sampling,
            choice_index=self._index,
            num_choices=spec.num_choices,
            attempt=spec.attempt * ATTEMPTS_OF_A_CALLER + self._num_opened,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            trace=spec.trace,
        )
        if spec.max_tokens is not None:
            request.max_tokens = spec.max_tokens
        if not self._wants_prompt_logprobs:
            request.sampling.ClearField("prompt_logprobs")
        if spec.deadline_s is not None:
            request.time_left_us = max(0, int((spec.deadline_s - self._run.clock.monotonic_s()) * 1e6))
        if self._num_opened or self._history or spec.resume is not None:
            request.resume.num_cached_tokens = stats.num_cached_tokens or 0
            request.resume.queue_time_us = stats.queue_time_us
            request.resume.prompt_logprobs_delivered = (
                spec.sampling.HasField("prompt_logprobs") and not self._wants_prompt_logprobs
            )
        if self._num_opened:
            self._run.on_reopened()
        self._num_opened += 1
        return request

    # What the scheduler says.

    def on_started(self, started: generation_pb2.Started) -> None:
        self._run.accept(started)

    def on_delta(self, delta: generation_pb2.TokenDelta) -> None:
        run = self._run
        if self._echoing is not None:
            self._after_echo.append(lambda: self.on_delta(delta))
            return
        run.accept()
        if self._wants_prompt_logprobs and self._echo(delta.prompt_logprobs):  # they come with the first tokens
            delta.ClearField("prompt_logprobs")
            self._after_echo.append(lambda: self.on_delta(delta))
            return
        packed = delta.token_ids
        output = self.machine.push(unpack_token_ids(packed))
        if output.num_tokens * 4 != len(packed):
            packed = packed[: 4 * output.num_tokens]
        if output.num_tokens:
            self._history += packed
            if not run.stats.first_token_unix_ns:
                run.stats.first_token_unix_ns = time.time_ns()
            self._tell_tokens(packed, output, delta)
            run.on_tokens(output.num_tokens)
        if self.machine.end is not None:
            if self._stream is not None:
                # The scheduler may have gone on: what it made after the end does not count.
                run.link.finish(self._stream, self.machine.num_tokens)
                self._stream = None
            self._tell_end(self.machine.end)
        run.sink.wake()

    def on_finished(self, finished: generation_pb2.Finished) -> None:
        run = self._run
        if self._echoing is not None:
            self._after_echo.append(lambda: self.on_finished(finished))
            return
        run.accept()
        self._stream = None
        if self._told:
            return
        if self._echo_due:
            self._echo(())
        events = run.sink.events()
        for piece in pieces_of(self.machine.flush()):
            self._add_piece(events, piece, b"")
        if self.machine.end is not None:  # a stop string stood in what was held back
            self._tell_end(self.machine.end)
            return
        event = events.add()
        event.choice_index = self._index
        event.finished.reason = finished.reason
        if finished.HasField("stop_token_id"):
            event.finished.stop_token_id = finished.stop_token_id
            if self._ends_calls(finished.stop_token_id):
                event.finished.reason = common_pb2.FINISH_REASON_TOOL_CALLS
        elif finished.reason == common_pb2.FINISH_REASON_STOP and self.machine.num_calls:  # by the calls' grammar
            event.finished.reason = common_pb2.FINISH_REASON_TOOL_CALLS
        self._told = True
        run.choice_done(event.finished.reason)
        run.sink.wake()

    def _ends_calls(self, stop_token_id: int) -> bool:
        """Whether the model ended its answer with calls: a stop token of the caller's ends the text only."""
        return self.machine.num_calls > 0 and stop_token_id in self._run.spec.eos_ids

    def on_error(self, error: RorqualError) -> None:
        run = self._run
        self._stream = None
        if self._echoing is not None and isinstance(error, NumericalFaultError):
            self._after_echo.append(lambda: self.on_error(error))
            return
        if not isinstance(error, NumericalFaultError):  # which ends its choice only
            run.fail(error)
            return
        run.accept()
        event = run.sink.events().add()
        event.choice_index = self._index
        event.finished.reason = common_pb2.FINISH_REASON_ERROR
        event.finished.error.CopyFrom(to_error_proto(error))
        self._told = True
        run.choice_done(common_pb2.FINISH_REASON_ERROR)
        run.sink.wake()

    # What the caller is told.

    def echo_plain(self) -> None:
        """The prompt's text, where no log-probabilities are waited for."""
        if self._echo_due and not self._wants_prompt_logprobs:
            self._echo(())

    def _echo(self, logprobs: Sequence[common_pb2.TokenLogprobs]) -> bool:
        """Tell the prompt. Whether that goes on: what else is said of the choice waits for it."""
        prompt, writer = self._run.spec.prompt, self._run.spec.logprob_writer
        self._echo_due = self._wants_prompt_logprobs = False
        token_ids = unpack_token_ids(prompt.packed_ids)
        parts: Iterator[list[text_pb2.TokenLogprobText]] = iter(([],))
        if logprobs and writer is not None:
            if len(logprobs) + 1 != len(token_ids):
                raise ValueError(f"{len(logprobs)} log-probabilities for a prompt of {len(token_ids)} tokens")
            parts = writer.prompt_parts(token_ids, list(logprobs), ECHO_SLICE_TOKENS)
        event = self._run.sink.events().add()
        event.choice_index = self._index
        event.echo.token_ids = prompt.packed_ids
        if self._run.spec.echo:
            event.echo.text = prompt.text
        event.echo.logprobs.extend(next(parts))
        if len(logprobs) < ECHO_SLICE_TOKENS:
            return False
        self._echoing = asyncio.get_running_loop().create_task(self._echo_on(parts))
        return True

    async def _echo_on(self, parts: Iterator[list[text_pb2.TokenLogprobText]]) -> None:
        """The rest of a long prompt's log-probabilities, as events of their own: no message is too long, and other streams
        go on meanwhile. What the scheduler says of this choice waits."""
        run = self._run
        try:
            for part in parts:
                event = run.sink.events().add()
                event.choice_index = self._index
                event.echo.logprobs.extend(part)
                run.sink.wake()
                await asyncio.sleep(0)
            self._echoing = None
            waiting, self._after_echo = self._after_echo, []
            for said in waiting:
                if not run.is_done:
                    said()
        except Exception:
            _log.exception("the log-probabilities of a prompt could not be written")
            self._echoing = None
            run.fail(InternalError("the log-probabilities of the prompt could not be written"))

    def _tell_tokens(self, packed: bytes, output: Output, delta: generation_pb2.TokenDelta) -> None:
        events = self._run.sink.events()
        writer = self._run.spec.logprob_writer
        logprobs = (
            writer.generated(delta.logprobs[: output.num_tokens]) if writer is not None and delta.logprobs else []
        )
        for piece in output.pieces:
            cut = piece.num_tokens
            event = self._add_piece(events, piece, packed[: 4 * cut])
            if logprobs:
                event.logprobs.extend(logprobs[:cut])
            packed, logprobs = packed[4 * cut :], logprobs[cut:]

    def _add_piece(self, events: EventList, piece: Piece, token_ids: bytes) -> text_pb2.TextEvent:
        index = self._index
        if piece.kind is Kind.CALL:
            call_id = piece.call_id or self._run.spec.call_id(index, piece.call_idx)
            delta = text_pb2.ToolCallDelta(tool_call_idx=piece.call_idx, id=call_id, name=piece.text)
            return add_call(events, index, token_ids, delta)
        if piece.kind is Kind.ARGUMENTS:
            delta = text_pb2.ToolCallDelta(tool_call_idx=piece.call_idx, arguments_json_delta=piece.text)
            return add_call(events, index, token_ids, delta)
        return add_text(events, index, token_ids, piece.kind.value if piece.kind else None, piece.text)

    def _tell_end(self, end: End) -> None:
        if self._told:
            return
        self._told = True
        event = self._run.sink.events().add()
        event.choice_index = self._index
        finished = event.finished
        if end.is_length:
            finished.reason = common_pb2.FINISH_REASON_LENGTH
        elif end.by_calls:
            finished.reason = common_pb2.FINISH_REASON_TOOL_CALLS
        else:
            finished.reason = common_pb2.FINISH_REASON_STOP
            if end.stop_token_id is not None:
                finished.stop_token_id = end.stop_token_id
                if self._ends_calls(end.stop_token_id):
                    finished.reason = common_pb2.FINISH_REASON_TOOL_CALLS
            if end.stop_string is not None:
                finished.stop_string = end.stop_string
        self._run.choice_done(finished.reason)
        self._run.sink.wake()
