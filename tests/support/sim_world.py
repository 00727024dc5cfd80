"""The scheduler core, simulated executors and clients in one process, on virtual time and in any order.

`World` performs one small action at a time: a request arrives, a batch leaves, a batch arrives, a step runs, some
steps are reported, a link breaks. Whoever drives it chooses the order; after every action all accounts are checked,
and every token that reaches a client is compared with the run of its request alone.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from executor.sim.device import SimConfig, SimExecutor, expected_tokens
from executor.sim.device import _Sequence as SimSequence
from executor.sim.memory import SimGroup
from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import (
    DEADLINE_UNREACHABLE,
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    LethalRequestError,
    NumericalFaultError,
    PromptTooLongError,
    QueueFullError,
    RorqualError,
    SupersededError,
)
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.events import Cancel, Event, ExecutorConnected, ExecutorLost, FinishEarly, Open, Tick
from services.scheduler.executor_contract import spec_from_hello
from services.scheduler.stream_events import (
    FinishReason,
    StreamEvent,
    StreamFailed,
    StreamFinished,
    StreamStarted,
    StreamTokens,
)
from services.scheduler.wire import fill_batch, reported_from_proto, request_from_proto

KILLER_SEED = 1 << 20
"""A request with this seed + n kills its executor when n tokens are generated: with n = 0, in its first step there."""
IN_PREFILL = 1000
"""As n: when a part of its history is computed."""


def kills_after(proto: generation_pb2.GenerateRequest) -> int | None:
    """n of a request that kills; None for one that does not."""
    return proto.sampling.seed - KILLER_SEED if proto.sampling.seed >= KILLER_SEED else None


@dataclass
class Client:
    """One stream as its caller sees it."""

    stream_id: int
    proto: generation_pb2.GenerateRequest
    deadline_s: float | None
    tokens: list[int] = field(default_factory=list)  # of this stream
    started: bool = False
    finish: FinishReason | None = None
    error: RorqualError | None = None
    num_generated: int = 0
    left_early: bool = False  # cancelled, or told to finish

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass
class Link:
    """One executor's connection, with what is under way on it."""

    link_id: int
    sim: SimExecutor
    down: deque[executor_pb2.OrderBatch] = field(default_factory=deque)


class World:
    """See the module's docstring. `rng` decides sizes; the driver decides the order of actions."""

    def __init__(self, rng: random.Random, config: CoreConfig | None = None, *, vocab_size: int = 97) -> None:
        self.rng = rng
        self.config = config or CoreConfig()
        self.core = SchedulerCore(self.config)
        self.vocab_size = vocab_size
        self.killer_share = 0.0  # of the requests that `open_random` makes
        self.links_break = True  # also where no request kills
        self.dead: list[SimExecutor] = []  # killed by a request, not connected again
        self.num_deaths = 0
        self.num_other_losses = 0  # of links, with no killer to explain it
        self.now_s = 0.0
        self.faulted: set[int] = set()  # streams whose sequence the test lets fault
        self.links: dict[int, Link] = {}
        self.clients: dict[int, Client] = {}
        self.live: dict[int, Client] = {}
        self.num_events = 0
        self._num_ids = 0
        self._num_attempts = 0
        self._expected: dict[tuple[int, bytes], tuple[list[int], int]] = {}
        self._longest: set[int] = set()  # of a history, on the executors that were ever here
        self._prefixes = [
            [rng.randrange(vocab_size) for _ in range(length)] for length in (64, 100, 130, 200)
        ]  # what prompts have in common

    # -- actions --------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give the core one event, take its stream events, and check everything."""
        self.num_events += 1
        effects = self.core.handle(event, self.now_s)
        self._take(effects.events)
        self.core.check()

    def open(self, proto: generation_pb2.GenerateRequest) -> Client:
        self._num_ids += 1
        request = request_from_proto(proto, now_s=self.now_s)
        client = Client(self._num_ids, proto, request.deadline_s)
        self.clients[client.stream_id] = self.live[client.stream_id] = client
        self.handle(Open(client.stream_id, request, proto.token_ids))
        return client

    def open_random(self) -> list[Client]:
        """One request, now and then of several choices."""
        rng = self.rng
        prompt: list[int] = []
        if rng.random() < 0.7:
            prefix = rng.choice(self._prefixes)
            prompt += prefix if rng.random() < 0.7 else prefix[: rng.randrange(1, len(prefix))]
        prompt += [rng.randrange(self.vocab_size) for _ in range(rng.choice((0, 1, 5, 63, 64, 65, 150)))]
        prompt = prompt or [1]
        num_choices = rng.choice((1, 1, 1, 3))
        sampling = common_pb2.SamplingParams(seed=rng.randrange(4))
        if self.killer_share and rng.random() < self.killer_share:
            sampling.seed = KILLER_SEED + rng.choice((0, 0, 1, 5, 40, IN_PREFILL))
        if rng.random() < 0.4:
            sampling.stop_token_ids.extend({rng.randrange(self.vocab_size), rng.randrange(self.vocab_size)})
        if rng.random() < 0.3:
            sampling.min_tokens = rng.randrange(20)
        if rng.random() < 0.1:
            sampling.prompt_logprobs = 0
        if rng.random() < 0.2:
            sampling.logprobs = 1
        if rng.random() < 0.2:
            sampling.repetition_penalty = 1.2
        if rng.random() < 0.05:
            sampling.grammar.text = "root ::= .*"  # which simulated executors allow anything in
        proto = generation_pb2.GenerateRequest(
            request_id=f"r{self._num_ids}",
            token_ids=pack_token_ids(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            num_choices=num_choices,
            priority=rng.choice((0, 0, 0, 0, 0, 0, -1, 1)),
            cache_salt=rng.choice(("", "", "", "salt")),
        )
        if rng.random() < 0.8:
            proto.max_tokens = max(sampling.min_tokens, rng.choice((0, 1, 2, 30, 64, 100, 200, 400)))
        if num_choices > 1 and rng.random() < 0.7:
            proto.max_tokens = 200  # so that the first still runs when the others come
        if rng.random() < 0.1:
            proto.time_left_us = rng.randrange(1, 400_000)
        clients = []
        for choice_index in range(num_choices):
            proto.choice_index = choice_index
            copy = generation_pb2.GenerateRequest()
            copy.CopyFrom(proto)
            clients.append(self.open(copy))
        return clients

    def resume(self, client: Client, num_held: int) -> Client:
        """A client whose stream broke opens it again with the tokens it holds; the old one may still be live."""
        proto = generation_pb2.GenerateRequest()
        proto.CopyFrom(client.proto)
        proto.token_ids += pack_token_ids(client.tokens[:num_held])
        self._num_attempts += 1
        proto.attempt = self._num_attempts
        proto.resume.num_cached_tokens = 7
        return self.open(proto)

    def cancel(self, client: Client) -> None:
        client.left_early = True
        self.handle(Cancel(client.stream_id))
        assert client.ended

    def finish_early(self, client: Client, num_tokens: int) -> None:
        client.left_early = True
        self.handle(FinishEarly(client.stream_id, num_tokens))
        assert client.ended

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.handle(Tick())

    def connect(self, sim: SimExecutor) -> Link:
        self._num_ids += 1
        self._longest |= {sim.config.max_model_len, sim.num_blocks * BLOCK_SIZE + 1}
        hello = executor_pb2.Hello.FromString(sim.hello().SerializeToString())
        self.handle(ExecutorConnected(self._num_ids, spec_from_hello(hello)))
        self.links[self._num_ids] = link = Link(self._num_ids, sim)
        return link

    def lose(self, link: Link, *, keep_cache: bool = True) -> SimExecutor:
        """The link breaks: what was on the wire, and what was not reported, never happened."""
        state = self.core.executor(link.link_id)
        assert state is not None
        running = [self.live[seq.stream_id] for seq in state.sequences.values()]
        self.num_other_losses += all(kills_after(client.proto) is None for client in running)
        del self.links[link.link_id]
        link.sim.reset(keep_cache=keep_cache)
        self.handle(ExecutorLost(link.link_id))
        return link.sim

    def restart(self, config: CoreConfig) -> list[Client]:
        """Another core takes over: links and streams are broken. Returns the clients that had one; none is opened again."""
        for link in self.links.values():
            link.sim.reset()
        broken = list(self.live.values())
        self.links.clear()
        self.live.clear()
        self.config = config
        self.core = SchedulerCore(config)
        return broken

    def send(self, link: Link) -> bool:
        """The wire is free: the core's next batch leaves."""
        taken = self.core.take_batch(link.link_id)
        if taken is not None:
            batch = executor_pb2.OrderBatch()
            fill_batch(batch, *taken)
            if sum(order.WhichOneof("order") != "copy" for order in batch.orders) > 1:
                assert batch.ByteSize() <= self.config.max_batch_bytes
            link.down.append(batch)
        return taken is not None

    def apply(self, link: Link) -> bool:
        """A batch reaches the executor at a step boundary."""
        if link.down:
            link.sim.apply(link.down.popleft())
            return True
        return False

    def step(self, link: Link) -> bool:
        if any(_kills_now(seq) for seq in link.sim.sequences.values()):
            self.num_deaths += 1
            self.dead.append(self.lose(link, keep_cache=False))
            return True
        if link.sim.has_work:
            link.sim.step()
            return True
        return False

    def report(self, link: Link, max_steps: int | None = None) -> bool:
        """Some unreported steps reach the core as one report."""
        report = link.sim.report(max_steps)
        if report is not None:
            self.now_s += 0.001
            self.handle(reported_from_proto(link.link_id, report))
        return report is not None

    def run_to_end(self, *, max_rounds: int = 20_000) -> None:
        """Everything in turn until no stream is live. AssertionError if that never happens."""
        for _ in range(max_rounds):
            if not self.live:
                break
            progress = False
            while self.dead:
                self.connect(self.dead.pop())
            for link in list(self.links.values()):
                progress |= self.send(link)
                while self.apply(link):
                    progress = True
                progress |= self.step(link)
                if link.link_id in self.links:
                    progress |= self.report(link)
            if not progress and self.now_s < self.config.gather_until_s:
                self.pass_time(self.config.gather_until_s - self.now_s)
                continue
            if not progress and (next_s := self.core.next_deadline_s()) is not None:
                self.pass_time(max(0.0, next_s - self.now_s))
                continue
            assert progress, f"nothing moves, but {len(self.live)} streams are live"
        assert not self.live, "streams do not end"
        occupancy = self.core.occupancy()
        assert occupancy.num_free_blocks == occupancy.num_total_blocks, "blocks are lost"
        assert occupancy.num_running == occupancy.num_waiting == occupancy.num_granted_unwritten_blocks == 0

    # -- what clients see -----------------------------------------------------------------------------

    def expected(self, client: Client) -> tuple[list[int], int]:
        """The run of this request alone, on an executor for the longest of histories."""
        proto = client.proto
        key = max(self._longest), proto.SerializeToString(deterministic=True)
        if key not in self._expected:
            max_total = max(self._longest)
            if proto.HasField("max_tokens"):
                max_total = min(max_total, proto.num_prompt_tokens + proto.max_tokens)
            history_ended = (
                len(proto.token_ids) // 4 - proto.num_prompt_tokens > proto.sampling.min_tokens
                and int.from_bytes(proto.token_ids[-4:], "little") in proto.sampling.stop_token_ids
            )
            self._expected[key] = (
                ([], common_pb2.FINISH_REASON_STOP)
                if history_ended
                else expected_tokens(
                    proto.token_ids,
                    proto.num_prompt_tokens,
                    max_total,
                    proto.sampling,
                    choice_index=proto.choice_index,
                    vocab_size=self.vocab_size,
                )
            )
        return self._expected[key]

    def _take(self, events: list[StreamEvent]) -> None:
        for event in events:
            if isinstance(event, StreamTokens):
                self._on_tokens(self.live[event.stream_id], event)
            elif isinstance(event, StreamStarted):
                client = self.live[event.stream_id]
                assert not client.started
                assert not client.tokens
                client.started = True
            elif isinstance(event, StreamFinished):
                self._on_finished(self.live.pop(event.stream_id), event)
            elif isinstance(event, StreamFailed):
                client = self.live.pop(event.stream_id)
                client.error = event.error
                self._check_error(client)

    def _on_tokens(self, client: Client, event: StreamTokens) -> None:
        assert client.started
        new = list(unpack_token_ids(bytes(event.token_ids)))
        proto = client.proto
        if event.prompt_logprobs:
            assert not client.tokens, "prompt log-probabilities come first"
            assert len(event.prompt_logprobs) == proto.num_prompt_tokens - 1
        elif not client.tokens and proto.sampling.HasField("prompt_logprobs"):
            assert proto.resume.prompt_logprobs_delivered or proto.num_prompt_tokens == 1
        if new and proto.sampling.HasField("logprobs"):
            assert event.logprobs is not None
            assert [entry.token_id for entry in event.logprobs] == new
        at = len(client.tokens)
        client.tokens += new
        assert client.tokens[at:] == self.expected(client)[0][at : at + len(new)], (
            f"stream {client.stream_id} differs from its run alone at token {at}"
        )

    def _on_finished(self, client: Client, event: StreamFinished) -> None:
        client.finish, client.num_generated = event.reason, event.num_generated_tokens
        if client.left_early:
            return
        lethal = kills_after(client.proto)
        if lethal is not None and lethal != IN_PREFILL:
            # A step that passes the point may bring drafts too.
            held = len(client.proto.token_ids) // 4 - client.proto.num_prompt_tokens
            assert event.num_generated_tokens <= max(held, lethal + 3 if lethal else 0), "it kills before that"
        tokens, reason = self.expected(client)
        num_total = client.proto.num_prompt_tokens + event.num_generated_tokens
        if event.reason == FinishReason.LENGTH and num_total in self._longest and len(client.tokens) < len(tokens):
            # The longest that fits somewhere; that the tokens are right was checked as they came.
            assert num_total >= self._longest_now(client.proto), "a larger executor is here"
            return
        assert client.tokens == tokens, (
            f"stream {client.stream_id} ended with {len(client.tokens)} of {len(tokens)} tokens"
        )
        assert event.reason == reason
        held = len(client.proto.token_ids) // 4 - client.proto.num_prompt_tokens
        assert event.num_generated_tokens == held + len(tokens)
        if reason == common_pb2.FINISH_REASON_STOP:
            assert event.stop_token_id in client.proto.sampling.stop_token_ids

    def _longest_now(self, proto: generation_pb2.GenerateRequest) -> int:
        """How long the history of `proto`, which names no end within reach, could at least become on the executors here."""
        longest = 0
        for sim in (link.sim for link in self.links.values()):
            if sim.config.takes_grammars or not proto.sampling.HasField("grammar"):
                longest = max(longest, min(sim.config.max_model_len, sim.num_blocks * BLOCK_SIZE + 1))
        return longest

    def _check_error(self, client: Client) -> None:
        error = client.error
        if client.stream_id in self.faulted:
            return
        if isinstance(error, DeadlineExceededError):
            assert client.deadline_s is not None
            if error.reason == DEADLINE_UNREACHABLE:
                assert not client.proto.HasField("resume"), "a resume is never refused for the queue's length"
                assert not client.started
            else:
                assert client.deadline_s <= self.now_s
        elif isinstance(error, QueueFullError):
            assert not client.proto.HasField("resume"), "a resume is never refused for a full queue"
        elif isinstance(error, PromptTooLongError):
            assert len(client.proto.token_ids) // 4 + len(client.tokens) >= min(self._longest)
        elif isinstance(error, InvalidRequestError):
            assert error.reason == "UNSUPPORTED_CONSTRAINT"
            assert client.proto.sampling.HasField("grammar")
        elif isinstance(error, LethalRequestError):
            assert kills_after(client.proto) is not None or self.num_other_losses >= 2, "an innocent request is blamed"
        else:
            assert isinstance(error, (SupersededError, CapacityError, NumericalFaultError)), f"unexpected {error!r}"


def _kills_now(seq: SimSequence) -> bool:
    """Whether the next step with this sequence ends the executor."""
    after = seq.admit.sampling.seed - KILLER_SEED
    if after == IN_PREFILL:
        return seq.admit.num_cached_tokens < seq.num_computed < seq.admit.num_tokens
    return after == 0 or 0 < after <= seq.num_tokens - seq.admit.num_prompt_tokens


def random_groups(rng: random.Random) -> tuple[SimGroup, ...]:
    """Cache groups beside the one that keeps all: often none, or a window, a state and another that keeps all."""
    groups: list[SimGroup] = []
    if rng.random() < 0.7:
        window = rng.choice((1, 64, 100, 200))
        quota = -(-window // BLOCK_SIZE) + 2
        groups.append(SimGroup(name="window", num_blocks=quota + rng.choice((0, 2, 8, 30)), window=window))
    if rng.random() < 0.7:
        num_slots = rng.choice((1, 2))
        num_blocks = num_slots + 1 + rng.choice((0, 2, 8, 30))
        groups.append(SimGroup(name="state", num_blocks=num_blocks, slots_per_sequence=num_slots, prefix_multiple=128))
    if rng.random() < 0.2:
        groups.append(SimGroup(name="index", num_blocks=rng.choice((9, 24, 60)), prefix_multiple=64))
    return tuple(groups)


def random_config(rng: random.Random) -> SimConfig:
    """A small executor: memory and queues that are soon full."""
    max_num_seqs = rng.choice((1, 3, 8, 16))
    num_draft_tokens = rng.choice((0, 0, 1, 3))
    return SimConfig(
        more_groups=random_groups(rng) if rng.random() < 0.5 else (),
        num_blocks=rng.choice((6, 9, 12, 16, 24, 60)),
        max_num_seqs=max_num_seqs,
        num_draft_tokens=num_draft_tokens,
        max_num_batched_tokens=max_num_seqs * (1 + num_draft_tokens) + rng.choice((64, 65, 130, 300)),
        max_model_len=rng.choice((350, 700)),
        takes_grammars=rng.random() < 0.7,
        vocab_size=97,
    )


def random_action(world: World, spare: list[SimExecutor]) -> None:
    """One action, likely ones more often. `spare`: executors that are not connected."""
    rng = world.rng
    dice = rng.random()
    links = list(world.links.values())
    live = list(world.live.values())
    if links and dice < 0.80:
        link = rng.choice(links)
        action = rng.random()
        if action < 0.2:
            world.send(link)
        elif action < 0.4:
            world.apply(link)
        elif action < 0.7:
            for _ in range(rng.choice((1, 1, 5, 20))):
                if link.link_id in world.links:
                    world.step(link)
        else:
            world.report(link, rng.choice((1, 5, 20, None)))
    elif dice < 0.88:
        if len(live) < 25:
            world.open_random()
    elif dice < 0.91:
        if live:
            world.cancel(rng.choice(live))
    elif dice < 0.92:
        if live:
            client = rng.choice(live)
            world.finish_early(client, rng.randrange(len(client.tokens) + 1))
    elif dice < 0.95:
        ended = list(world.clients.values())[-40:]
        candidates = [c for c in ended if c.started and not c.error and len(c.proto.token_ids) < 4 * 600]
        if candidates:
            client = rng.choice(candidates)
            world.resume(client, rng.choice((len(client.tokens), rng.randrange(len(client.tokens) + 1))))
    elif dice < 0.975:
        world.pass_time(rng.choice((0.0, 0.01, 0.3)))
    elif dice < 0.978:
        if links and (sequences := rng.choice(links).sim.sequences):
            sim = next(link.sim for link in links if link.sim.sequences is sequences)
            sim.fault(rng.choice(list(sequences)), "a planted NaN")
    elif dice < 0.980:
        broken = world.restart(replace(world.config, gather_until_s=world.now_s + rng.choice((0.0, 0.05, 1.0))))
        spare += [link.sim for link in links]
        rng.shuffle(broken)
        for client in broken:
            if rng.random() < 0.9:
                world.resume(client, len(client.tokens))
    elif dice < 0.985:
        if links and world.links_break:
            spare.append(world.lose(rng.choice(links), keep_cache=rng.random() < 0.7))
    elif spare or world.dead:
        spare += world.dead
        world.dead.clear()
        world.connect(spare.pop(rng.randrange(len(spare))))


def random_run(rng: random.Random, num_actions: int) -> World:
    """A world of up to three small executors, alike or not, disturbed `num_actions` times and then left to finish."""
    config = CoreConfig(
        max_queue_len=rng.choice((10, 1000)),
        enable_prefix_caching=rng.random() < 0.9,
        max_num_seqs=rng.choice((0, 0, 3)),
        priority_ageing_s=rng.choice((0.0, 0.02, 30.0)),
        max_batch_bytes=rng.choice((1 << 24, 1 << 24, 1, 700)),
    )
    world = World(rng, config)
    world.killer_share = rng.choice((0.0, 0.0, 0.1))
    first = random_config(rng)
    deterministic, are_equal = rng.random() < 0.3, rng.random() < 0.5
    spare: list[SimExecutor] = []
    for i in range(rng.choice((1, 1, 2, 3))):
        each = first if are_equal else random_config(rng)
        copy = SimConfig(**{**vars(each), "executor_id": f"sim-{i}", "deterministic": deterministic})
        spare.append(SimExecutor(copy))
    world.connect(spare.pop())
    for _ in range(num_actions):
        random_action(world, spare)
    while spare:
        world.connect(spare.pop())
    world.run_to_end()
    return world
