"""The scheduler's decisions: an event in; orders for executors and events of streams out.

No clock, no I/O: time comes in with each event, and what goes out is picked up by whoever has a wire to send it
on. So the same core runs under property tests, in a simulator on virtual time, and behind gRPC.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    PreconditionError,
    PromptTooLongError,
    RorqualError,
    SupersededError,
)

from .drain_rate import DrainRate
from .events import (
    Cancel,
    Event,
    ExecutorConnected,
    ExecutorLost,
    ExecutorSpec,
    FinishEarly,
    ModelSpec,
    Open,
    Reported,
    Tick,
)
from .executor_contract import CONTRACT_BROKEN, violation
from .executor_state import ExecutorState, Plan
from .isolation import Isolation, verdict
from .kv_cache import blocks_for
from .order_queue import MAX_BATCH_BYTES
from .orders import Order
from .placement import Placed, Placement, cheapest_of
from .prefix_memory import PrefixMemory
from .queue_share import QueueShare
from .refusals import fault_error, not_newer, too_late, too_many_wait
from .sequence import Sequence, State
from .stats import CoreStats, Occupancy
from .stream_events import (
    FinishReason,
    StreamAdmitted,
    StreamEvent,
    StreamFailed,
    StreamFinished,
    StreamPreempted,
    StreamStarted,
    StreamTokens,
)
from .validation import UNSUPPORTED_CONSTRAINT, judge
from .waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The deployment's own bounds; 0: none beyond the executors'."""

    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = True
    max_queue_len: int = 4096
    priority_ageing_s: float = 30.0  # waiting so long makes a class better by one; 0: never
    max_batch_bytes: int = MAX_BATCH_BYTES  # of orders, encoded; one that is larger goes alone
    gather_until_s: float = 0.0  # after a restart: nothing is admitted before, so that all inventories are there


@dataclass(frozen=True, slots=True)
class Effects:
    """What one event brought about."""

    events: list[StreamEvent] = field(default_factory=list)  # of one stream, in order
    links: tuple[int, ...] = ()  # links with orders to take


class SchedulerCore:
    """All streams and executors of one model replica."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.stats = CoreStats()
        self.model: ModelSpec | None = None  # the last one served, also while no executor is connected
        self._served_version = 0  # grows whenever a request might fit that did not, or no longer
        self._executors: dict[int, ExecutorState] = {}
        self._placement = Placement()
        self._prefixes = PrefixMemory()
        self._streams: dict[int, Sequence] = {}
        self._by_request: dict[tuple[str, int], Sequence] = {}  # (request id, choice): attempts of one meet here
        self._running_by_priority: Counter[int] = Counter()
        self._waiting = WaitingQueue(config.priority_ageing_s)
        self._isolation = Isolation()
        self._share = QueueShare(config.max_queue_len)
        self._drain = DrainRate()
        self._is_gathering = False
        self._last_refused: Sequence | None = None  # the queue's head that no executor could take
        self._reopened: dict[int, ExecutorState] = {}  # those that sent their backlog on after that
        self._parked: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._num_arrivals = 0
        self._num_seq_ids = 0
        self._capacity_version = 0  # grows whenever what could not be placed might be
        self._events: list[StreamEvent] = []
        self._touched: dict[int, ExecutorState] = {}
        self._now_s = 0.0

    # -- the outside ----------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> Effects:
        """Take in one event. PreconditionError for an executor that cannot join.

        InvalidRequestError (CONTRACT_BROKEN) for a report that no executor may make: its link is lost. What such an event
        has brought about comes with the next.
        """
        return self.handle_all((event,), now_s)

    def handle_all(self, events: Iterable[Event], now_s: float) -> Effects:
        """Take in events that came together, then decide once."""
        self._now_s = now_s
        try:
            for event in events:
                self._apply(event)
        finally:
            # Also after a refused executor: what other events of the batch changed is acted upon.
            self._expire()
            self._schedule()
        out, self._events = self._events, []
        links = tuple(link_id for link_id, executor in self._touched.items() if executor.has_orders)
        self._touched = {}
        return Effects(out, links)

    def take_batch(self, link_id: int) -> tuple[int, list[Order]] | None:
        """The next order batch of a link and its number, when its wire is free; None where there is nothing to send."""
        executor = self._executors.get(link_id)
        return executor.take_batch(self._now_s) if executor is not None else None

    def has_orders(self, link_id: int) -> bool:
        """Whether `take_batch` has one for that link."""
        executor = self._executors.get(link_id)
        return executor is not None and executor.has_orders

    def next_deadline_s(self) -> float | None:
        """When a Tick is due."""
        while self._deadlines and self._deadlines[0][1] not in self._streams:
            heapq.heappop(self._deadlines)
        times_s = (
            self._deadlines[0][0] if self._deadlines else None,
            self._config.gather_until_s if self._is_gathering else None,
            self._isolation.next_s() if not self._is_gathering else None,
        )
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def executor(self, link_id: int) -> ExecutorState | None:
        """The executor of a link that is connected."""
        return self._executors.get(link_id)

    def is_open(self, stream_id: int) -> bool:
        """Whether that stream has not ended."""
        return stream_id in self._streams

    @property
    def is_isolating(self) -> bool:
        """Whether `next_deadline_s` may change with a report: executors died under requests that run again now."""
        return self._isolation.is_active

    def occupancy(self) -> Occupancy:
        executors = self._executors.values()
        num_running = sum(executor.num_running for executor in executors)
        return Occupancy(
            num_executors=len(executors),
            num_running=num_running,
            num_waiting=len(self._streams) - num_running,
            num_total_blocks=sum(executor.cache.num_blocks for executor in executors),
            num_free_blocks=sum(executor.cache.num_free for executor in executors),
            num_granted_unwritten_blocks=sum(executor.num_granted_unwritten for executor in executors),
        )

    # -- events ---------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case Reported():
                self._on_report(event)
            case Open():
                self._on_open(event)
            case Cancel():
                if (seq := self._streams.get(event.stream_id)) is not None:
                    self._finish(seq, FinishReason.ABORTED)
            case FinishEarly():
                if (seq := self._streams.get(event.stream_id)) is not None:
                    self._finish(seq, FinishReason.STOP, num_generated=min(event.num_tokens, seq.num_generated))
            case ExecutorConnected():
                self._on_connected(event.link_id, event.spec)
            case ExecutorLost():
                self._on_lost(event.link_id, is_its_own_fault=event.is_its_own_fault)
            case Tick():
                pass

    def _on_open(self, event: Open) -> None:
        request = event.request
        if event.stream_id in self._streams:
            raise InvalidRequestError(f"stream {event.stream_id} is open already", reason="STREAM_ID_REUSED")
        key = (request.request_id, request.choice_index)
        older = self._by_request.get(key)
        if older is not None:
            if older.request.attempt >= request.attempt:
                self._refuse(event.stream_id, not_newer(request.request_id, older.request.attempt, request.attempt))
                return
            self._fail(older, SupersededError(f"attempt {request.attempt} of this request took over"))
        self._num_arrivals += 1
        seq = Sequence(event.stream_id, request, event.token_ids, self._num_arrivals, self._now_s, event.owner)
        if request.is_resume:
            self._gather()
        # While executors come back one by one, none of them says what fits.
        if self.model is not None and not self._is_gathering:
            error = self._validate(seq, self.model)
            if error is not None:
                self._refuse(event.stream_id, error)
                return
        if seq.is_new and (error := self._too_busy_for(seq)) is not None:
            self._refuse(event.stream_id, error)
            return
        self._streams[event.stream_id] = seq
        self._share.add(seq.owner)
        self._by_request[key] = seq
        if self._finish_if_ended(seq):
            return
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, event.stream_id))
        self._enqueue(seq)

    def _too_busy_for(self, seq: Sequence) -> RorqualError | None:
        """The refusal of a new request because of those that wait: too many, or for longer than it has time."""
        num_waiting = len(self._streams) - self._num_running()
        if self._share.is_full(seq.owner, num_waiting):
            return too_many_wait(num_waiting, self._config.max_queue_len, self._drain, self._now_s)
        return too_late(seq.request, self._waiting.ahead(seq.priority), self._drain, self._now_s)

    def _gather(self) -> None:
        """Something that was here before this scheduler came back: others will follow."""
        self._is_gathering = self._is_gathering or self._now_s < self._config.gather_until_s

    def _on_connected(self, link_id: int, spec: ExecutorSpec) -> None:
        model = spec.model
        if self._config.max_model_len:
            model = replace(model, max_model_len=min(model.max_model_len, self._config.max_model_len))
        served = self.model
        for other in [e for e in self._executors.values() if e.spec.executor_id == spec.executor_id]:
            # It says hello again: the old link is dead, whether we have noticed or not, but the process lives.
            self._on_lost(other.link_id, is_its_own_fault=True)
        if (
            self._executors
            and served is not None
            and (model.fingerprint, model.deterministic) != (served.fingerprint, served.deterministic)
        ):
            raise PreconditionError(
                "executors of another model, or with another --deterministic, are connected "
                f"({served.name}, {served.fingerprint.hex()[:12]}); this one has {model.name}, "
                f"{model.fingerprint.hex()[:12]}: give each model a scheduler of its own",
                reason="MODEL_MISMATCH",
            )
        executor = ExecutorState(
            link_id,
            replace(spec, model=model),
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            caching=self._config.enable_prefix_caching,
            max_batch_bytes=self._config.max_batch_bytes,
        )
        self._executors[link_id] = executor
        self._placement.add(executor)
        self._drain.clear()  # there is one more to serve the queue
        if spec.inventory:
            self._gather()
        self._served_changed()
        self._touch(executor)
        parked, self._parked = self._parked, {}
        for seq in parked.values():
            self._enqueue(seq)

    def _on_lost(self, link_id: int, *, is_its_own_fault: bool = False) -> None:
        executor = self._executors.pop(link_id, None)
        if executor is None:
            return
        self._placement.remove(executor)
        self._served_changed()
        self._reopened.pop(link_id, None)
        self._touched.pop(link_id, None)
        self._capacity_version += 1
        guilty = self._isolation.on_lost(executor, self._now_s, is_its_own_fault=is_its_own_fault)
        for seq in executor.all_followers():
            if seq.state is State.FOLLOWING:
                self._enqueue(seq)
        for seq in executor.sequences.values():
            # What was not reported never happened; what was is the request now.
            if seq.state is State.RUNNING:
                self._note_running(seq, -1)
                self._events.append(StreamPreempted(seq.stream_id, "executor lost"))
            if seq.stream_id in guilty:
                seq.reset_admission()
                seq.state = State.SUSPECT
                self._fail(seq, verdict(seq.num_generated))
            else:
                self._return_to_queue(seq)

    def _served_changed(self) -> None:
        """What is served is what any executor takes; it stays as it was when the last one has left."""
        self._served_version += 1
        self._last_refused = None  # where it fits may have changed
        models = [executor.model for executor in self._executors.values()]
        if models:
            self.model = replace(
                models[0],
                max_model_len=max(model.max_model_len for model in models),
                takes_grammars=any(model.takes_grammars for model in models),
            )

    def _on_report(self, report: Reported) -> None:
        executor = self._executors.get(report.link_id)
        if executor is None:
            return
        if (broken := violation(executor, report)) is not None:
            self._on_lost(report.link_id, is_its_own_fault=True)
            raise InvalidRequestError(f"the executor broke the contract: {broken}", reason=CONTRACT_BROKEN)
        self._touched[report.link_id] = executor
        if report.computed_seq_ids or executor.hungry:
            self._capacity_version += 1
        sequences, stats = executor.sequences, self.stats
        executor.note_times(report, self._now_s)
        stats.num_paused_steps += len(report.paused_seq_ids)
        for seq_id, num_computed in zip(report.computed_seq_ids, report.num_computed_tokens, strict=True):
            seq = sequences.get(seq_id)
            if seq is not None and seq.state is State.RUNNING:
                executor.note_computed(seq, num_computed)
        for seq_id, reason, message in report.faults:
            if (seq := executor.owner(seq_id)) is not None:
                executor.take_back_labels(seq)
            if (seq := sequences.get(seq_id)) is not None:
                self._fail(seq, fault_error(reason, message), is_gone=True)
        logprobs = report.logprobs
        for seq_id, (_, of_prompt) in logprobs.items():
            if of_prompt and (seq := sequences.get(seq_id)) is not None:
                seq.prompt_logprobs.extend(of_prompt)
        self._on_tokens(executor, report)
        self._isolation.on_report(executor, report)
        for seq in executor.acknowledged(report.last_batch_id):
            self._return_to_queue(seq)

    def _on_tokens(self, executor: ExecutorState, report: Reported) -> None:
        """The hot path: a lookup, an append and an event a sequence."""
        get, emit, finish, token_ids = executor.sequences.get, self._events.append, report.finish, report.token_ids
        logprobs = report.logprobs
        num_reported = offset = 0
        for i, (seq_id, num_new) in enumerate(zip(report.seq_ids, report.num_tokens, strict=True)):
            start, offset = offset, offset + 4 * num_new
            seq = get(seq_id)
            if seq is None:
                continue  # cancelled: what it still reports is nobody's
            if num_new:
                num_reported += num_new
                new = token_ids[start:offset]
                if logprobs or seq.prompt_logprobs or seq.scores_prompt_only:
                    self._emit_with_logprobs(seq, new, logprobs.get(seq_id, ([], []))[0])
                    if seq.scores_prompt_only:
                        self._finish(seq, FinishReason.LENGTH, is_gone=bool(finish and finish[i]))
                        continue
                else:
                    emit(StreamTokens(seq.stream_id, new))
                seq.history += new
                seq.num_tokens += num_new
                if seq.num_tokens >= seq.next_check:
                    executor.note_tokens(seq)
            if finish and finish[i] and not (finish[i] == FinishReason.LENGTH and self._runs_on_elsewhere(seq)):
                self._finish(seq, FinishReason(finish[i]), is_gone=True)
        self.stats.num_generated_tokens += num_reported

    def _runs_on_elsewhere(self, seq: Sequence) -> bool:
        """Whether `seq`, which an executor has ended, has only outgrown it; then it is on its way to a larger one."""
        executor, model = seq.executor, self.model
        assert executor is not None
        assert model is not None
        if not seq.is_open_ended or self._validate(seq, model) is not None or seq.num_tokens >= seq.max_total:
            return False
        if seq.state is State.RUNNING:
            executor.leave(seq)
            self._note_running(seq, -1)
            self._touch(executor)
            self._events.append(StreamPreempted(seq.stream_id, "outgrown"))
            self._return_to_queue(seq)
        return True

    def _emit_with_logprobs(self, seq: Sequence, new: bytes, logprobs: list[object]) -> None:
        of_prompt: list[object] | None = None
        if seq.prompt_logprobs and not seq.prompt_logprobs_delivered:
            of_prompt = seq.prompt_logprobs
            seq.prompt_logprobs_delivered = True
        seq.prompt_logprobs = []
        if seq.scores_prompt_only:
            if of_prompt is not None:  # a prompt of one token has none
                self._events.append(StreamTokens(seq.stream_id, b"", None, of_prompt))
        else:
            self._events.append(StreamTokens(seq.stream_id, new, logprobs or None, of_prompt))

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now_s:
            _, stream_id = heapq.heappop(self._deadlines)
            seq = self._streams.get(stream_id)
            if seq is not None:
                waited = self._now_s - seq.arrival_s
                self._fail(
                    seq,
                    DeadlineExceededError(
                        f"the request's time ran out after {waited:.3f} s, "
                        + ("in the queue" if not seq.started else f"with {seq.num_generated} tokens generated")
                    ),
                )

    # -- decisions ------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Let running sequences grow, then others in, then send chunks."""
        for executor in list(self._touched.values()):
            if executor.hungry:
                self._feed(executor)
        if self._isolation.is_active:
            self._isolate()
        for executor in self._touched.values():
            self._placement.refresh(executor)
        self._admit_waiting()
        for executor in self._touched.values():
            had_backlog = executor.has_backlog
            executor.send_chunks()
            if had_backlog and not executor.has_backlog:
                self._reopened[executor.link_id] = executor
            self._placement.refresh(executor)
        if not self._waiting:
            self._drain.clear()

    def _feed(self, executor: ExecutorState) -> None:
        """Blocks for those that need one, best first; who is about to stand still takes them from the worst.

        The best of all is never displaced and fits alone, so it always gets on, and after it the next.
        """
        for seq in sorted(executor.hungry.values(), key=lambda s: s.rank):
            if seq.state is not State.RUNNING:
                continue  # displaced by a better one just now
            if executor.is_urgent(seq):
                while executor.cache.num_free == 0:
                    victim = executor.worst()
                    if victim is None or victim.rank <= seq.rank:
                        return  # it stands still until a better one ends
                    self._preempt(executor, victim, "memory")
            if executor.cache.num_free:
                executor.grant(seq)

    def _isolate(self) -> None:
        """Keep executors for suspects, let these in there, and everybody else into those that are open again."""
        if self._is_gathering:
            return
        isolation = self._isolation
        for seq in isolation.expire(self._now_s):
            self._enqueue(seq)
        for executor in isolation.arrange(self._executors, self._now_s, self._could_run):
            self._last_refused = None
            self._touch(executor)
        for executor in isolation.emptying():
            for seq in [seq for seq in executor.sequences.values() if seq.state is State.RUNNING]:
                self._preempt(executor, seq, "isolation")
        for seq, executor in isolation.placeable():
            if self._is_settled(seq):
                continue
            plan = executor.plan(seq, of_group=True)
            if plan is not None and plan.follow is None:  # else it comes when the block that it wants is there
                self._admit(executor, seq, plan)

    def _could_run(self, seq: Sequence, executor: ExecutorState) -> bool:
        """Whether `seq` would fit on `executor`, were it alone."""
        model = self.model
        assert model is not None
        is_valid = seq.validated_at == self._served_version or self._validate(seq, model) is None
        return is_valid and executor.fits(seq)

    def _admit_waiting(self) -> None:
        if self._is_gathering:
            if self._now_s < self._config.gather_until_s:
                return
            self._is_gathering = False
            self._last_refused = None  # it has not seen what changed meanwhile
        while True:
            # Woken first: they come before what arrived after them.
            for executor in self._touched.values():
                self._wake_followers(executor)
            seq = self._waiting.peek(self._now_s, self._best_running())
            if seq is None or not self._executors or seq.tried_at == self._capacity_version:
                return
            if not self._place(seq):
                seq.tried_at = self._capacity_version
                self._last_refused, self._reopened = seq, {}
                return

    def _place(self, seq: Sequence) -> bool:
        """Admit, park, refuse or let follow the queue's head; False where it has to stay."""
        if self._is_settled(seq):
            return True
        best = self._cheapest_plan(seq) or self._make_room(seq)
        if best is None:
            return False
        executor, plan = best
        self._waiting.discard(seq)
        if plan.follow is not None:
            seq.state = State.FOLLOWING
            executor.follow(seq, plan.follow)
        else:
            self._drain.note(seq.queued_work, self._now_s)
            self._admit(executor, seq, plan)
        return True

    def _is_settled(self, seq: Sequence) -> bool:
        """Whether `seq` is refused, parked or done rather than placed; else it is ready to be placed."""
        model = self.model
        assert model is not None
        if seq.validated_at != self._served_version and (error := self._validate(seq, model)) is not None:
            self._fail_or_park(seq, error)
            return True
        if self._finish_if_ended(seq):
            return True
        seq.hash_blocks(seq.num_tokens // BLOCK_SIZE, model, caching=self._config.enable_prefix_caching)
        return False

    def _cheapest_plan(self, seq: Sequence) -> Placed | None:
        if self._was_refused(seq):
            return cheapest_of(self._changed().values(), seq)
        return self._placement.cheapest(seq)

    def _was_refused(self, seq: Sequence) -> bool:
        """Whether `seq` could be placed nowhere before this event: only executors changed since can take it."""
        return seq is self._last_refused and seq.tried_at >= 0

    def _changed(self) -> dict[int, ExecutorState]:
        return {**self._reopened, **self._touched}

    def _fail_or_park(self, seq: Sequence, error: RorqualError) -> None:
        """The queue's head fits nowhere. One that has run waits for the next executor: a larger one was there."""
        outgrown = isinstance(error, (PromptTooLongError, CapacityError)) or error.reason == UNSUPPORTED_CONSTRAINT
        if outgrown and seq.started and not seq.was_parked:
            self._waiting.discard(seq)
            self._isolation.discard(seq)
            seq.was_parked = True
            seq.state = State.PARKED
            self._parked[seq.stream_id] = seq
        else:
            self._fail(seq, error)

    def _make_room(self, seq: Sequence) -> Placed | None:
        """Displace sequences of a lower priority class for `seq`, if that lets it in."""
        if not any(priority > seq.request.priority for priority in self._running_by_priority):
            return None
        for executor in list((self._changed() if self._was_refused(seq) else self._executors).values()):
            if executor.is_held or not executor.fits(seq):
                continue
            victims = executor.victims_for(seq)
            if victims is None:
                continue
            for victim in victims:
                self._preempt(executor, victim, "priority")
            if (plan := executor.plan(seq)) is not None:
                return executor, plan
        return None

    def _admit(self, executor: ExecutorState, seq: Sequence, plan: Plan) -> None:
        self._num_seq_ids += 1
        miss, diverged_at = "", None
        if self._config.enable_prefix_caching and plan.num_sharable_blocks:
            if plan.num_cached_blocks < plan.num_sharable_blocks:
                miss, diverged_at = self._prefixes.why_missed(seq, plan.num_cached_blocks, executor.cache)
            self._prefixes.remember(seq)
        if not executor.capacity.holds(seq.max_total, seq.max_blocks):
            seq.max_total = executor.capacity.longest
            seq.max_blocks = blocks_for(seq.max_total - 1)
            seq.validated_at = 0
        executor.admit(seq, self._num_seq_ids, plan)
        self._isolation.on_admitted(seq, executor)
        self._note_running(seq, 1)
        self._placement.refresh(executor)
        self._touch(executor)
        request = seq.request
        num_cached = min(seq.num_computed, request.num_prompt_tokens)
        self._events.append(StreamAdmitted(seq.stream_id, seq.seq_id, seq.num_computed, miss, diverged_at))
        seq.is_new = seq.was_parked = False
        if seq.started:
            return
        seq.started = True
        if miss:
            self.stats.num_prefix_misses[miss] += 1
        self.stats.num_cached_prompt_tokens += num_cached
        self.stats.num_computed_prompt_tokens += request.num_prompt_tokens - num_cached
        self.stats.queue_times_s.append(self._now_s - seq.arrival_s)
        if not request.is_resume:
            seq.num_cached_first = num_cached
            seq.queue_time_us = round((self._now_s - seq.arrival_s) * 1e6)
        self._events.append(StreamStarted(seq.stream_id, seq.num_cached_first, seq.queue_time_us, request.seed))

    def _preempt(self, executor: ExecutorState, seq: Sequence, why: str) -> None:
        executor.drain(seq)
        self._note_running(seq, -1)
        self._placement.refresh(executor)
        seq.state = State.DRAINING
        seq.was_preempted = True
        self.stats.num_preemptions += 1
        self._events.append(StreamPreempted(seq.stream_id, why))
        self._touch(executor)

    def _enqueue(self, seq: Sequence) -> None:
        if self._isolation.takes(seq):
            return
        seq.state = State.WAITING
        seq.tried_at = -1
        self._waiting.push(seq, self._now_s)

    def _return_to_queue(self, seq: Sequence) -> None:
        seq.reset_admission()
        if not self._finish_if_ended(seq):
            self._enqueue(seq)

    def _wake_followers(self, executor: ExecutorState) -> None:
        if executor.woken:
            woken, executor.woken = executor.woken, []
            for seq in woken:
                if seq.state is State.FOLLOWING:
                    self._enqueue(seq)

    def _validate(self, seq: Sequence, model: ModelSpec) -> RorqualError | None:
        """Judge a request against what is served now, and set what follows from it."""
        error = judge(seq, model, list(self._placement.capacities))
        if error is None:
            # Again when there is an executor, and when others have come or gone.
            is_served = any(capacity.takes(seq.request) for capacity in self._placement.capacities)
            seq.validated_for, seq.validated_at = (model, self._served_version) if is_served else (None, 0)
        return error

    # -- ends -----------------------------------------------------------------------------------------

    def _finish_if_ended(self, seq: Sequence) -> bool:
        """Answer a history that needs no more tokens with its finish."""
        request = seq.request
        num_generated = seq.num_generated
        if num_generated > request.min_tokens and seq.last_token() in request.stop_token_ids:
            self._finish(seq, FinishReason.STOP)
            return True
        if seq.validated_for is not None and seq.num_tokens >= seq.max_total:
            self._finish(seq, FinishReason.LENGTH)
            return True
        return False

    def _finish(
        self, seq: Sequence, reason: FinishReason, *, num_generated: int | None = None, is_gone: bool = False
    ) -> None:
        """End a stream. `is_gone`: the executor has ended the sequence itself."""
        stop_token_id = None
        if reason is FinishReason.STOP and num_generated is None and seq.num_generated > 0:
            last = seq.last_token()
            stop_token_id = last if last in seq.request.stop_token_ids else None
        self._events.append(
            StreamFinished(
                seq.stream_id,
                reason,
                stop_token_id,
                seq.num_cached_first,
                seq.queue_time_us,
                seq.num_generated if num_generated is None else num_generated,
            )
        )
        self._remove(seq, reason.name.lower(), is_gone=is_gone)

    def _fail(self, seq: Sequence, error: RorqualError, *, is_gone: bool = False) -> None:
        self._events.append(StreamFailed(seq.stream_id, error))
        self._remove(seq, error.reason.lower(), is_gone=is_gone)

    def _refuse(self, stream_id: int, error: RorqualError) -> None:
        """A request that never became a stream."""
        self.stats.num_finished[error.reason.lower()] += 1
        self._events.append(StreamFailed(stream_id, error))

    def _remove(self, seq: Sequence, reason: str, *, is_gone: bool) -> None:
        self.stats.num_finished[reason] += 1
        executor, state = seq.executor, seq.state
        seq.state = State.ENDED
        del self._streams[seq.stream_id]
        self._share.remove(seq.owner)
        key = (seq.request.request_id, seq.request.choice_index)
        if self._by_request.get(key) is seq:
            del self._by_request[key]
        if state is State.WAITING:
            self._drain.note(seq.queued_work, self._now_s)
        self._waiting.discard(seq)
        self._parked.pop(seq.stream_id, None)
        self._isolation.on_removed(seq)
        if executor is None:
            return
        if state is State.RUNNING:
            self._note_running(seq, -1)
            if is_gone:
                executor.leave(seq)
            else:
                executor.drop(seq)
            self._touch(executor)
        elif state is State.DRAINING:
            executor.sequences.pop(seq.seq_id, None)

    def _touch(self, executor: ExecutorState) -> None:
        """Something about `executor` changed that may let others in."""
        self._capacity_version += 1
        self._touched[executor.link_id] = executor

    def _note_running(self, seq: Sequence, change: int) -> None:
        self._running_by_priority[seq.priority] += change
        if not self._running_by_priority[seq.priority]:
            del self._running_by_priority[seq.priority]

    def _best_running(self) -> int | None:
        return min(self._running_by_priority, default=None)

    def _num_running(self) -> int:
        return self._running_by_priority.total()

    # -- invariants, for tests ------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError unless all accounts balance."""
        for executor in self._executors.values():
            running = [s for s in executor.sequences.values() if s.state is State.RUNNING]
            assert len(running) == executor.num_running
            assert all(self._streams[s.stream_id] is s for s in executor.sequences.values()), "an ended sequence runs"
            executor.cache.check((seq.tables, seq.shares) for seq in running)
            executor.check(running)
        self._placement.check()
        self._isolation.check(self._executors, self._streams)
        self._share.check(len(self._streams))
        assert self._num_running() == sum(executor.num_running for executor in self._executors.values())
        states = [seq.state for seq in self._streams.values()]
        assert State.ENDED not in states, "an ended stream is still open"
        assert len(self._waiting) == states.count(State.WAITING)
        assert len(self._parked) == states.count(State.PARKED)
