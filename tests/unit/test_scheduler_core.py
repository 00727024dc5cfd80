"""What the scheduler core decides, one situation at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from executor.sim.device import SimConfig, SimExecutor
from rorqual.core.blocks import BLOCK_SIZE
from rorqual.core.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NumericalFaultError,
    PreconditionError,
    PromptTooLongError,
    QueueFullError,
    RorqualError,
    SupersededError,
)
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler import policy
from services.scheduler.core import CoreConfig
from services.scheduler.events import Event, ExecutorConnected, Open
from services.scheduler.executor_contract import spec_from_hello
from services.scheduler.executor_state import ExecutorState
from services.scheduler.orders import Admit, Copy, Drop, Extend, Label, Order, Prefill
from services.scheduler.stream_events import FinishReason, StreamAdmitted, StreamFinished, StreamTokens
from services.scheduler.wire import reported_from_proto, request_from_proto
from tests.support.sim_world import Client, Link, World, random_run

VOCAB = 97


def make_world(config: CoreConfig | None = None, **sim: Any) -> tuple[World, Link]:
    world = World(random.Random(0), config)
    return world, world.connect(make_sim(**sim))


def make_sim(**sim: Any) -> SimExecutor:
    defaults = {"num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 264, "max_model_len": 4096}
    return SimExecutor(SimConfig(vocab_size=VOCAB, **{**defaults, **sim}))


def make_proto(num_prompt: int = 100, *, start: int = 0, max_tokens: int | None = 20, **fields: Any) -> Any:
    sampling = common_pb2.SamplingParams(**{"seed": 1, **fields.pop("sampling", {})})
    return generation_pb2.GenerateRequest(
        **{
            "request_id": f"r{start}",
            "token_ids": pack_token_ids((start + 3 * i) % VOCAB for i in range(num_prompt)),
            "num_prompt_tokens": num_prompt,
            "max_tokens": max_tokens,
            "sampling": sampling,
            **fields,
        }
    )


def orders(world: World, link: Link) -> list[Order]:
    """The next batch, which the executor gets too."""
    taken = world.core.take_batch(link.link_id)
    if taken is None:
        return []
    from services.scheduler.wire import fill_batch

    batch = executor_pb2.OrderBatch()
    fill_batch(batch, *taken)
    link.sim.apply(batch)
    return taken[1]


def turn(world: World, link: Link, num_steps: int = 1) -> list[Order]:
    """Orders out, steps, and a report of them."""
    sent = orders(world, link)
    for _ in range(num_steps):
        world.step(link)
    world.report(link)
    return sent


def of(kind: type, sent: list[Order]) -> list[Any]:
    return [order for order in sent if isinstance(order, kind)]


def test_a_request_is_admitted_computed_extended_and_labelled() -> None:
    world, link = make_world()
    client = world.open(make_proto(200, max_tokens=300))
    sent = turn(world, link)
    (admit,) = of(Admit, sent)
    assert (admit.num_tokens, admit.num_cached_tokens, admit.max_total_tokens) == (200, 0, 500)
    assert admit.limit == 64 * len(admit.block_tables[0]) >= 200
    assert [(chunk.start, chunk.end) for chunk in of(Prefill, sent)] == [(0, 200)]
    sent = turn(world, link)
    (label,) = of(Label, sent)
    assert len(label.block_ids) == 3, "of 200 tokens three blocks are full"
    num_blocks, num_labels = len(admit.block_tables[0]), 3
    while not client.ended:
        sent = turn(world, link)
        num_blocks += sum(len(order.block_tables[0]) for order in of(Extend, sent))
        num_labels += sum(len(order.block_ids) for order in of(Label, sent))
    assert num_blocks == 8, "the last token needs no slot: 499 positions"
    assert num_labels <= 7
    assert link.sim.num_paused_steps == 0


def test_chunks_fit_a_step_and_end_at_block_edges() -> None:
    world, link = make_world(max_num_batched_tokens=8 + 200)
    world.open(make_proto(500))
    chunks: list[Prefill] = []
    for _ in range(6):
        chunks += of(Prefill, turn(world, link))
    assert [(c.start, c.end) for c in chunks] == [(0, 192), (192, 384), (384, 500)]


def test_few_chunks_are_with_the_executor_at_a_time() -> None:
    world, link = make_world(max_num_batched_tokens=8 + 128, max_model_len=10_000, num_blocks=1000)
    world.open(make_proto(5000))
    assert len(of(Prefill, orders(world, link))) == 2
    assert orders(world, link) == []


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    world, link = make_world(max_num_batched_tokens=8 + 256, max_model_len=20_000, num_blocks=1000)
    long = world.open(make_proto(10_000))
    turn(world, link)
    shorts = [world.open(make_proto(60, start=i, max_tokens=1)) for i in range(1, 6)]
    for _ in range(8):
        turn(world, link)
    assert all(short.ended for short in shorts)
    assert not long.tokens
    seq = world.core._streams[long.stream_id]
    assert seq.num_computed > 500, "nor does it wait for them"


def test_a_follower_waits_for_the_prefix_and_computes_the_rest() -> None:
    world, link = make_world()
    first = world.open(make_proto(200, request_id="a"))
    second = world.open(make_proto(200, request_id="b"))
    assert first.started
    assert not second.started
    turn(world, link)
    (admit,) = of(Admit, turn(world, link))
    assert admit.num_cached_tokens == 192
    world.run_to_end()
    assert first.tokens == second.tokens
    assert link.sim.num_computed_tokens == 208


def test_a_follower_goes_on_alone_when_its_leader_is_cancelled() -> None:
    world, link = make_world()
    first = world.open(make_proto(200, request_id="a"))
    second = world.open(make_proto(200, request_id="b"))
    world.cancel(first)
    assert second.started
    world.run_to_end()
    assert link.sim.num_computed_tokens <= 400


def test_a_prompt_that_only_hits_leaves_a_token_to_compute() -> None:
    world, link = make_world()
    world.open(make_proto(128))
    world.run_to_end()
    world.open(make_proto(128, request_id="again"))
    (admit,) = of(Admit, turn(world, link))
    assert admit.num_cached_tokens == 64


def test_the_admission_says_why_a_prefix_missed() -> None:
    admitted: list[StreamAdmitted] = []

    def why(
        num_prompt: int, *, start: int = 0, tail: tuple[int, ...] = (), salt: str = ""
    ) -> tuple[int, str, int | None]:
        proto = make_proto(num_prompt, start=start, max_tokens=1, request_id=f"w{len(admitted)}", cache_salt=salt)
        proto.token_ids += pack_token_ids(tail)
        proto.num_prompt_tokens += len(tail)
        world.open(proto)
        world.run_to_end()
        return admitted[-1].num_cached_tokens, admitted[-1].miss, admitted[-1].diverged_at

    world, link = make_world(num_blocks=12)
    take = world._take

    def keep(events: list[Any]) -> None:
        admitted.extend(event for event in events if isinstance(event, StreamAdmitted))
        take(events)

    world._take = keep  # type: ignore[method-assign]
    assert why(200) == (0, "never seen", None)
    assert why(200) == (192, "", None)
    assert why(200, salt="another") == (0, "salt", None)
    assert why(150, tail=(5,) * 60) == (128, "diverged", 150)
    assert why(200, tail=(5,) * 200) == (192, "diverged", 192), "the latest that began alike left earlier"
    assert why(760, start=1) == (0, "never seen", None)
    assert why(200) == (0, "evicted", None)
    world.connect(make_sim(executor_id="other", num_blocks=100))
    world.lose(link, keep_cache=False)
    assert why(200) == (0, "elsewhere", None)
    assert why(40) == (0, "", None), "no full block, nothing to find"


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat() -> None:
    world, link = make_world()
    client = world.open(make_proto(100, max_tokens=100))
    world.run_to_end()
    prompt = client.proto.token_ids + pack_token_ids([*client.tokens, 1, 2, 3])
    world.open(make_proto(203, request_id="next", token_ids=prompt))
    (admit,) = of(Admit, turn(world, link))
    assert admit.num_cached_tokens == 192


def test_deterministic_generated_blocks_serve_a_resume_but_no_other_prompt() -> None:
    world, link = make_world(deterministic=True)
    client = world.open(make_proto(100, max_tokens=100))
    world.run_to_end()
    prompt = client.proto.token_ids + pack_token_ids(client.tokens)
    world.open(make_proto(200, request_id="next", token_ids=prompt))
    (admit,) = of(Admit, turn(world, link))
    assert admit.num_cached_tokens == 64
    world.run_to_end()
    world.resume(client, 95)
    (admit,) = of(Admit, turn(world, link))
    assert admit.num_cached_tokens == 192


def test_without_prefix_caching_only_choices_share() -> None:
    world, link = make_world(CoreConfig(enable_prefix_caching=False))
    for request_id in ("a", "b"):
        for i in range(2):
            world.open(make_proto(230, request_id=request_id, choice_index=i, num_choices=2))
        world.run_to_end()
    assert link.sim.num_computed_tokens == 2 * (230 + 1)


def test_a_sibling_gets_a_copy_of_the_last_block_but_for_a_token() -> None:
    world, link = make_world()
    clients = [world.open(make_proto(230, choice_index=i, num_choices=4)) for i in range(4)]
    turn(world, link)
    sent = turn(world, link)
    admits, copies = of(Admit, sent), of(Copy, sent)
    assert [admit.num_cached_tokens for admit in admits] == [229] * 3
    assert [chunk.start for chunk in of(Prefill, sent)] == [229] * 3
    executor = world.core.executor(link.link_id)
    assert executor is not None
    source = next(seq for seq in executor.sequences.values() if seq.request.choice_index == 0)
    assert copies == [Copy(0, source.tables[0][3], admit.block_tables[0][3], 37) for admit in admits]
    world.run_to_end()
    assert len({tuple(client.tokens) for client in clients}) == 4


@pytest.mark.parametrize(
    ("num_prompt", "num_computed", "sim"),
    [
        (250, 250 + 3, {}),
        (192, 192 + 3, {}),  # of a full block all but the last token
        (193, 193 + 3, {}),  # nothing to copy: the last token has a block of its own
        (199, 199 + 3 * 7, {}),  # too little to be worth it
        (250, 250 + 3 * 58, {"deterministic": True}),  # chunks begin at fixed positions
        (50, 4 * 50, {}),  # no full block to wait for: at once
    ],
)
def test_siblings_copy_or_compute_what_is_cheaper(num_prompt: int, num_computed: int, sim: dict[str, Any]) -> None:
    world, link = make_world(**sim)
    for i in range(4):
        world.open(make_proto(num_prompt, choice_index=i, num_choices=4))
    world.run_to_end()
    assert link.sim.num_computed_tokens == num_computed


def test_nothing_is_copied_from_a_sibling_that_has_ended_or_wants_other_things() -> None:
    world, link = make_world(max_num_seqs=1)
    for i in range(2):
        world.open(make_proto(250, choice_index=i, num_choices=2, max_tokens=3))
    world.run_to_end()
    assert link.sim.num_computed_tokens == 250 + 58
    for num_prompt in (250, 50):
        world, link = make_world()
        world.open(make_proto(num_prompt, num_choices=2, sampling={"prompt_logprobs": 0}))
        turn(world, link)
        world.open(make_proto(num_prompt, choice_index=1, num_choices=2, sampling={"prompt_logprobs": 0}))
        world.run_to_end()
        assert link.sim.num_computed_tokens == 2 * num_prompt


def test_known_tokens_travel_only_with_penalties() -> None:
    world, link = make_world()
    world.open(make_proto(128))
    world.run_to_end()
    world.open(make_proto(128, request_id="b", sampling={"repetition_penalty": 1.5}))
    world.open(make_proto(128, request_id="c"))
    penalised, plain = of(Admit, turn(world, link))
    assert penalised.known_token_ids == make_proto(128).token_ids[:256]
    assert plain.known_token_ids == b""


def test_prompt_logprobs_come_once_and_compute_the_whole_prompt() -> None:
    world, link = make_world()
    world.open(make_proto(200))
    world.run_to_end()
    client = world.open(make_proto(200, request_id="b", sampling={"prompt_logprobs": 1, "logprobs": 0}))
    (admit,) = of(Admit, orders(world, link))
    assert admit.num_cached_tokens == 0
    scored = world.open(make_proto(200, request_id="c", max_tokens=0, sampling={"prompt_logprobs": 1}))
    world.run_to_end()
    assert client.finish is scored.finish is FinishReason.LENGTH
    assert scored.tokens == []
    assert scored.started


# -- ends ---------------------------------------------------------------------------------------------


def test_a_cancelled_sequence_gives_its_blocks_back_at_once() -> None:
    world, link = make_world()
    client = world.open(make_proto(200, max_tokens=500))
    turn(world, link, 5)
    turn(world, link, 5)
    world.cancel(client)
    assert client.finish is FinishReason.ABORTED
    occupancy = world.core.occupancy()
    assert occupancy.num_free_blocks == occupancy.num_total_blocks
    assert len(of(Drop, orders(world, link))) == 1
    world.step(link)
    assert not link.sim.sequences


def test_a_text_that_ended_early_counts_what_the_caller_says() -> None:
    world, link = make_world()
    client = world.open(make_proto(max_tokens=500))
    turn(world, link, 10)
    assert len(client.tokens) == 10
    world.finish_early(client, 7)
    assert (client.finish, client.num_generated) == (FinishReason.STOP, 7)


def test_histories_that_have_ended_are_answered_at_once() -> None:
    world, link = make_world()
    client = world.open(make_proto(max_tokens=20))
    world.run_to_end()
    assert world.resume(client, 20).finish is FinishReason.LENGTH
    stop = client.tokens[4]
    for min_tokens, finish in ((0, FinishReason.STOP), (4, FinishReason.STOP), (5, None)):
        proto = make_proto(request_id=f"m{min_tokens}", sampling={"stop_token_ids": [stop], "min_tokens": min_tokens})
        proto.token_ids += pack_token_ids(client.tokens[:5])
        assert world.open(proto).finish is finish
    assert world.open(make_proto(request_id="nothing", max_tokens=0)).finish is FinishReason.LENGTH
    assert len(of(Admit, orders(world, link))) == 1


def test_a_numerical_fault_ends_one_sequence_and_its_blocks_serve_nobody() -> None:
    world, link = make_world()
    faulty, healthy = world.open(make_proto(200, max_tokens=100)), world.open(make_proto(200, start=1))
    turn(world, link)
    link.sim.fault(min(link.sim.sequences), "NaN in layer 3")
    world.report(link)
    assert isinstance(faulty.error, NumericalFaultError)
    assert "layer 3" in faulty.error.message
    world.open(make_proto(200, request_id="again"))
    (admit,) = of(Admit, orders(world, link))
    assert admit.num_cached_tokens == 0
    world.run_to_end()
    assert healthy.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("", NumericalFaultError),
        ("NUMERICAL_FAULT", NumericalFaultError),
        ("CONSTRAINT_TOO_COMPLEX", InvalidRequestError),
        ("INTERNAL", InternalError),
        ("OF_A_LATER_VERSION", InternalError),
    ],
)
def test_a_fault_says_whose_it_is(reason: str, kind: type[RorqualError]) -> None:
    world, link = make_world()
    faulty, healthy = world.open(make_proto(200, max_tokens=100)), world.open(make_proto(200, start=1))
    turn(world, link)
    world.faulted.add(faulty.stream_id)
    link.sim.fault(min(link.sim.sequences), "what was found", reason)
    world.report(link)
    assert type(faulty.error) is kind
    assert faulty.error.message == "what was found"
    assert faulty.error.reason == (reason if kind is InvalidRequestError else kind.reason)
    world.run_to_end()
    assert healthy.finish is FinishReason.LENGTH


def test_blocks_of_a_sequence_that_was_cancelled_before_its_fault_was_known_serve_nobody() -> None:
    world, link = make_world()
    faulty = world.open(make_proto(200, max_tokens=100))
    turn(world, link)
    link.sim.fault(min(link.sim.sequences), "NaN in layer 3")
    world.cancel(faulty)
    world.report(link)
    world.open(make_proto(200, request_id="again"))
    (admit,) = of(Admit, orders(world, link))
    assert admit.num_cached_tokens == 0
    world.run_to_end()


def test_deadlines() -> None:
    world, link = make_world(max_num_seqs=1)
    running = world.open(make_proto(max_tokens=1000, time_left_us=1_000_000))
    waiting = world.open(make_proto(start=1, time_left_us=500_000))
    late = world.open(make_proto(start=2, time_left_us=0))
    assert isinstance(late.error, DeadlineExceededError)
    turn(world, link)
    assert world.core.next_deadline_s() == pytest.approx(0.5)
    world.pass_time(0.6)
    assert isinstance(waiting.error, DeadlineExceededError)
    assert "in the queue" in waiting.error.message
    world.pass_time(0.6)
    assert isinstance(running.error, DeadlineExceededError)
    world.run_to_end()


def make_queue(world: World, link: Link, num_waiting: int, **fields: Any) -> None:
    """One runs, `num_waiting` wait, and 40 before them have left the queue, one each 32 ms."""
    for i in range(41 + num_waiting):
        world.open(make_proto(start=i, max_tokens=30, **fields))
    while len(world.live) > 1 + num_waiting:
        turn(world, link)
        world.pass_time(0.0)


def test_a_deadline_that_the_queue_alone_would_break_is_refused_early() -> None:
    world, link = make_world(max_num_seqs=1)
    make_queue(world, link, 100)
    now_s = world.now_s
    refused = world.open(make_proto(start=500, time_left_us=1_000_000))
    assert isinstance(refused.error, DeadlineExceededError)
    assert refused.error.reason == "DEADLINE_UNREACHABLE"
    figures = refused.error.metadata
    assert figures["num_waiting_before"] == "100"
    assert figures["time_left_ms"] == "1000"
    assert 1.5 < int(figures["estimated_wait_ms"]) * 1e-3 < 3.2
    assert figures["retry_after_s"] in ("1", "2", "3")
    patient = world.open(make_proto(start=501, time_left_us=30_000_000))
    urgent = world.open(make_proto(start=502, time_left_us=1_000_000, priority=-1))
    resumed = world.open(make_proto(start=503, time_left_us=1_000_000, resume=generation_pb2.GenerateResume()))
    assert all(client.error is None for client in (patient, urgent, resumed))
    while not patient.started:
        turn(world, link)
    assert world.now_s - now_s > int(figures["estimated_wait_ms"]) * 1e-3, "the estimate was on the safe side"
    world.run_to_end()
    assert urgent.error is resumed.error is patient.error is None


def test_a_deadline_is_not_refused_early_on_a_guess() -> None:
    world, link = make_world(max_num_seqs=1)
    for i in range(100):
        world.open(make_proto(start=i, max_tokens=30))
    turn(world, link)
    assert world.open(make_proto(start=500, time_left_us=5_000)).error is None, "nothing has been measured"
    world, link = make_world(max_num_seqs=1)
    make_queue(world, link, 30)
    world.connect(make_sim(executor_id="another", max_num_seqs=1))
    assert world.open(make_proto(start=501, time_left_us=5_000)).error is None, "another one has come to help"


def test_a_full_queue_says_when_to_come_again() -> None:
    world, link = make_world(CoreConfig(max_queue_len=200), max_num_seqs=1)
    make_queue(world, link, 150)
    for i in range(1000, 1050):
        world.open(make_proto(start=i, max_tokens=30))
    refused = world.open(make_proto(start=2000))
    assert isinstance(refused.error, QueueFullError)
    assert 4 <= int(refused.error.metadata["retry_after_s"]) <= 8, "200 of 32 ms"
    world, link = make_world(CoreConfig(max_queue_len=2), max_num_seqs=1)
    for i in range(3):
        world.open(make_proto(start=i))
    refused = world.open(make_proto(start=9))
    assert isinstance(refused.error, QueueFullError)
    assert refused.error.metadata == {"max_queue_len": "2"}, "no rate is known"


# -- a restarted scheduler ----------------------------------------------------------------------------


def test_after_a_restart_inventories_come_first_then_resumed_then_new_requests() -> None:
    world, link = make_world(executor_id="a")
    held = world.open(make_proto(500, max_tokens=200))
    for _ in range(3):
        turn(world, link, 10)
    other = world.connect(make_sim(executor_id="b"))
    empty, warm = other.sim, link.sim
    world.restart(CoreConfig(gather_until_s=world.now_s + 2.0))
    new = world.open(make_proto(100, start=9, max_tokens=5, request_id="new"))
    resumed = world.resume(held, len(held.tokens))
    world.connect(empty)
    assert not new.started, "there is an executor, but the resume says that this is a restart"
    world.pass_time(1.0)
    link = world.connect(warm)
    assert world.core.next_deadline_s() == pytest.approx(world.now_s + 1.0)
    world.pass_time(0.9)
    assert not resumed.started
    world.pass_time(0.2)
    (admit, *_) = of(Admit, orders(world, link))
    assert admit.num_tokens == 500 + len(held.tokens), "where its blocks are, and before the new one"
    assert admit.num_cached_tokens >= 512
    world.run_to_end()
    assert held.tokens + resumed.tokens == world.expected(held)[0]
    assert new.finish is FinishReason.LENGTH


def test_a_first_start_waits_for_nothing() -> None:
    world, _ = make_world(CoreConfig(gather_until_s=10.0))
    assert world.open(make_proto()).started
    assert world.core.next_deadline_s() is None


def test_the_head_of_the_queue_sees_who_came_while_inventories_were_gathered() -> None:
    world, _ = make_world(CoreConfig(gather_until_s=2.0), max_num_seqs=1, executor_id="a")
    world.open(make_proto(100, max_tokens=500))
    refused = world.open(make_proto(100, start=1, max_tokens=5))
    assert not refused.started, "the only executor is full"
    warm = make_sim(executor_id="b", max_num_seqs=1)
    warm.memory[0].labels[0] = b"h" * 32  # from before the restart
    world.connect(warm)
    assert not refused.started
    world.pass_time(2.0)
    assert refused.started
    world.run_to_end()


def test_while_executors_come_back_nothing_is_refused_for_those_that_lack() -> None:
    world, long = make_world(max_model_len=1000, executor_id="long")
    client = world.open(make_proto(400, max_tokens=300))
    turn(world, long)
    sim = long.sim
    world.restart(CoreConfig(gather_until_s=world.now_s + 2.0))
    world.connect(make_sim(max_model_len=300, executor_id="short"))
    resumed = world.resume(client, len(client.tokens))
    assert resumed.error is None
    world.connect(sim)
    world.pass_time(2.0)
    assert resumed.started
    world.run_to_end()
    assert resumed.finish is FinishReason.LENGTH


def test_what_was_used_last_before_a_restart_is_evicted_last() -> None:
    world, link = make_world(num_blocks=20, executor_id="a")
    for start in (0, 1, 0):
        world.open(make_proto(320, start=start, max_tokens=1, request_id=f"r{start}.{world.num_events}"))
        world.run_to_end()
    sim = link.sim
    world.restart(CoreConfig())
    link = world.connect(sim)
    world.open(make_proto(12 * BLOCK_SIZE, start=2, max_tokens=1))
    world.run_to_end()
    world.open(make_proto(320, start=0, max_tokens=1, request_id="again"))
    (admit,) = of(Admit, orders(world, link))
    assert admit.num_cached_tokens == 256


# -- refusals -----------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_figures() -> None:
    world, _ = make_world(num_blocks=10)
    client = world.open(make_proto(500, max_tokens=142))
    assert isinstance(client.error, CapacityError)
    assert client.error.metadata == {"needed_blocks": "11", "total_blocks": "10", "block_size": "64"}
    assert world.open(make_proto(500, start=1, max_tokens=141)).started


def test_without_max_tokens_a_request_takes_what_fits() -> None:
    world, link = make_world(num_blocks=4)
    client = world.open(make_proto(100, max_tokens=None))
    (admit,) = of(Admit, orders(world, link))
    assert admit.max_total_tokens == 257
    world.run_to_end()
    assert len(client.tokens) == 157
    refused = world.open(make_proto(300, start=1, max_tokens=None))
    assert isinstance(refused.error, CapacityError)


def test_a_bad_stop_token_or_bias_is_named() -> None:
    world, _ = make_world()
    world._check_error = lambda _client: None  # type: ignore[method-assign]
    for field, sampling in (
        ("sampling.stop_token_ids", {"stop_token_ids": [VOCAB]}),
        ("sampling.logit_bias", {"logit_bias": {VOCAB + 3: 1.0}}),
    ):
        error = world.open(make_proto(request_id=field, sampling=sampling)).error
        assert isinstance(error, InvalidRequestError)
        assert (error.reason, error.field) == ("TOKEN_OUT_OF_RANGE", field)


def test_attempts() -> None:
    world, _ = make_world()
    world._check_error = lambda _client: None  # type: ignore[method-assign]
    first = world.open(make_proto(attempt=1))
    older, same = world.open(make_proto(attempt=0)), world.open(make_proto(attempt=1))
    assert isinstance(older.error, SupersededError)
    assert isinstance(same.error, InvalidRequestError)
    newer = world.open(make_proto(attempt=2))
    assert isinstance(first.error, SupersededError)
    world.run_to_end()
    assert newer.finish is FinishReason.LENGTH


def test_the_queue_is_bounded_for_new_requests_only() -> None:
    world, link = make_world(CoreConfig(max_queue_len=2), max_num_seqs=1)
    running = world.open(make_proto(max_tokens=50))
    waiting = [world.open(make_proto(start=i)) for i in (1, 2)]
    assert isinstance(world.open(make_proto(start=3)).error, QueueFullError)
    turn(world, link, 10)
    world.cancel(running)
    resumed = world.resume(running, 5)
    assert resumed.error is None
    assert not any(client.error for client in waiting)
    world.run_to_end()


def test_another_model_may_join_only_an_empty_scheduler() -> None:
    world, link = make_world()
    other = make_sim(executor_id="other", fingerprint=b"x" * 32)
    with pytest.raises(PreconditionError) as caught:
        world.core.handle(ExecutorConnected(999, spec_from_hello(other.hello())), 0.0)
    assert caught.value.reason == "MODEL_MISMATCH"
    client = world.open(make_proto(200, max_tokens=50))
    turn(world, link, 3)
    world.lose(link)
    world.connect(other)
    world.run_to_end()
    assert client.finish is FinishReason.LENGTH


# -- order and memory ---------------------------------------------------------------------------------


def test_priority_then_resumes_then_arrival() -> None:
    world, link = make_world(max_num_seqs=1)
    running = world.open(make_proto(max_tokens=5, priority=-5))
    ordinary = world.open(make_proto(start=1, max_tokens=5))
    low = world.open(make_proto(start=2, max_tokens=5, priority=1))
    high = world.open(make_proto(start=3, max_tokens=5, priority=-1))
    resumed = world.open(make_proto(start=4, max_tokens=5, resume=generation_pb2.GenerateResume()))
    started: list[Client] = []
    for _ in range(100):
        turn(world, link)
        started += [c for c in (ordinary, low, high, resumed) if c.started and c not in started]
    assert running.ended
    assert started == [high, resumed, ordinary, low]


def test_a_higher_priority_displaces_a_lower_one() -> None:
    world, link = make_world(max_num_seqs=1)
    low = world.open(make_proto(max_tokens=50, priority=1))
    turn(world, link, 10)
    high = world.open(make_proto(start=1, max_tokens=50))
    assert high.started
    turn(world, link, 3)
    assert not low.ended
    world.run_to_end()
    assert len(low.tokens) == len(high.tokens) == 50
    assert world.core.stats.num_preemptions == 1


def test_a_higher_priority_displaces_a_lower_one_that_waits_for_a_block() -> None:
    world, link = make_world(num_blocks=12)
    for start in (0, 1):
        world.open(make_proto(200, start=start, max_tokens=280, priority=1))
    executor = world.core.executor(link.link_id)
    assert executor is not None
    while not executor.hungry:
        assert len(world.live) == 2
        turn(world, link)
    assert world.core.stats.num_preemptions == 0
    world.open(make_proto(100, start=2, max_tokens=10, priority=1))
    assert world.core.stats.num_preemptions == 0, "one of their own class waits"
    urgent = world.open(make_proto(100, start=3, max_tokens=10, priority=0))
    assert world.core.stats.num_preemptions == 1
    assert [admit.num_tokens for admit in of(Admit, orders(world, link))] == [100]
    world.run_to_end()
    assert urgent.finish is FinishReason.LENGTH


def test_memory_for_one_of_two_long_requests_serves_both() -> None:
    world, link = make_world(num_blocks=10)
    clients = [world.open(make_proto(100, start=i, max_tokens=500)) for i in range(2)]
    world.run_to_end()
    assert [len(client.tokens) for client in clients] == [500, 500]
    assert 1 <= world.core.stats.num_preemptions <= 3, "no back and forth"
    assert link.sim.num_computed_tokens < 1500


def test_a_preempted_sequence_returns_after_its_last_report() -> None:
    world, link = make_world(max_num_seqs=1)
    low = world.open(make_proto(100, max_tokens=200, priority=1))
    turn(world, link, 10)
    high = world.open(make_proto(start=1, max_tokens=1))
    for _ in range(7):
        world.step(link)  # the Drop is still on its way
    assert len(low.tokens) == 10
    world.report(link)
    assert len(low.tokens) == 17, "what it reports until then belongs to it"
    world.run_to_end()
    assert high.ended
    assert len(low.tokens) == 200


def test_grants_shrink_when_memory_is_short() -> None:
    def granted(num_blocks: int) -> int:
        world, link = make_world(num_blocks=num_blocks, max_num_seqs=8)
        for i in range(8):
            world.open(make_proto(60, start=i, max_tokens=1000))
        for _ in range(5):
            turn(world, link)
        return world.core.occupancy().num_granted_unwritten_blocks

    assert granted(1000) >= 16
    assert granted(20) <= 12


def test_grants_follow_the_round_trip_of_the_link() -> None:
    def ahead_after(delay_s: float) -> int:
        world, link = make_world(num_blocks=1000, max_model_len=10_000)
        client = world.open(make_proto(60, max_tokens=5000))
        for _ in range(60):
            orders(world, link)
            world.now_s += delay_s
            for _ in range(10):
                world.step(link)
            world.report(link)
        seq = world.core._streams[client.stream_id]
        return seq.limit - seq.num_tokens

    assert ahead_after(0.0) <= 64 + 64
    assert 100 <= ahead_after(0.1) <= 100 + 200 + 64, "two round trips of 100 ms are 200 steps of 1 ms"
    assert ahead_after(10.0) <= 512 + 64


def test_what_is_granted_ahead_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    def most_ahead() -> int:
        world, link = make_world(num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=64 + 2048)
        most = 0
        for i in range(64):
            world.open(make_proto(20 + i % 30, start=i, max_tokens=1000))
            orders(world, link)
            world.now_s += 10.0  # a link so slow that 512 tokens ahead are wanted
            world.step(link)
            world.report(link)
            most = max(most, world.core.occupancy().num_granted_unwritten_blocks)
        return most

    assert 250 <= most_ahead() <= 1000 // 4 + 64
    monkeypatch.setattr(policy, "most_ahead_blocks", lambda num_blocks: num_blocks)
    assert most_ahead() > 1000 // 4 + 100, "memory alone would allow more"


def test_admission_leaves_the_watermark_to_the_running(monkeypatch: pytest.MonkeyPatch) -> None:
    num_checked = 0
    original = ExecutorState.admit

    def admit(self: ExecutorState, *args: Any) -> None:
        nonlocal num_checked
        has_company = self.num_running > 0
        needed = policy.watermark(self.cache.num_blocks, self.num_running)
        original(self, *args)
        if has_company:
            num_checked += 1
            assert self.cache.num_free >= needed

    monkeypatch.setattr(ExecutorState, "admit", admit)
    for seed in range(12):
        random_run(random.Random(seed), 300)
    assert num_checked > 50


def test_a_higher_priority_does_not_wait_for_the_prompts_of_a_lower_one() -> None:
    world, link = make_world(max_num_batched_tokens=8 + 128, num_blocks=1000, max_num_seqs=8)
    low = [world.open(make_proto(2000, start=i, priority=1)) for i in range(4)]
    assert [client.started for client in low] == [True, True, False, False], "prompts wait already"
    assert not world.open(make_proto(100, start=50, priority=1, max_tokens=1)).started
    high = world.open(make_proto(100, start=51, priority=0, max_tokens=1))
    assert high.started
    for _ in range(4):
        turn(world, link)
    assert high.ended, "and its chunk goes before theirs"
    assert world.core.stats.num_preemptions == 0
    world.run_to_end()


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    world, link = make_world(num_blocks=1000, max_num_seqs=16)
    shared = [(5 * i) % VOCAB for i in range(640)]
    lengths = (640, 640, 500, 320, 70)
    events: list[Event] = []
    for i, length in enumerate(lengths):
        proto = make_proto(1, token_ids=pack_token_ids([*shared[:length], i, i]), num_prompt_tokens=length + 2)
        proto.request_id = f"together-{i}"
        world._num_ids += 1
        client = Client(world._num_ids, proto, None)
        world.clients[client.stream_id] = world.live[client.stream_id] = client
        events.append(Open(client.stream_id, request_from_proto(proto, now_s=0.0), proto.token_ids))
    world._take(world.core.handle_all(events, 0.0).events)
    world.run_to_end()
    recomputed = sum(length % BLOCK_SIZE + 2 for length in lengths[1:])
    assert link.sim.num_computed_tokens == lengths[0] + 2 + recomputed


def test_tokens_of_an_executor_that_is_lost_are_kept() -> None:
    world, link = make_world()
    client = world.open(make_proto(200, max_tokens=100))
    for _ in range(4):
        turn(world, link, 10)
    num_tokens = len(client.tokens)
    assert num_tokens >= 30
    world.step(link)  # and never reported
    sim = world.lose(link)
    assert world.core.occupancy().num_waiting == 1
    link = world.connect(sim)
    (admit,) = of(Admit, orders(world, link))
    assert admit.num_tokens == 200 + num_tokens
    assert admit.num_cached_tokens >= 192, "its inventory was taken in"
    world.run_to_end()
    assert len(client.tokens) == 100


def test_the_executor_with_the_prefix_is_chosen_unless_it_is_loaded() -> None:
    world, first = make_world(executor_id="first")
    world.open(make_proto(1000, max_tokens=1))
    world.run_to_end()
    second = world.connect(make_sim(executor_id="second"))
    world.open(make_proto(1000, request_id="again", max_tokens=300))
    assert of(Admit, orders(world, first))
    world.open(make_proto(1000, request_id="else", start=5, max_tokens=300))
    assert of(Admit, orders(world, second)), "no prefix anywhere: the idle one"
    world.run_to_end()


def test_a_larger_executor_left() -> None:
    world, large = make_world(num_blocks=50, executor_id="large")
    small = world.connect(make_sim(num_blocks=10, executor_id="small"))
    open_ended = world.open(make_proto(300, max_tokens=None))
    fixed = world.open(make_proto(300, start=1, max_tokens=1000))
    turn(world, large)
    turn(world, small)
    sim = world.lose(large)
    for _ in range(1000):
        turn(world, small)
    assert open_ended.finish is FinishReason.LENGTH, "it ends at what is there now"
    assert not fixed.ended, "it waits for one that is large enough"
    world.connect(sim)
    world.run_to_end()
    assert len(fixed.tokens) == 1000


def test_a_prompt_too_long_for_the_executors_that_are_left_waits_for_a_larger_one() -> None:
    world, large = make_world(num_blocks=50, executor_id="large")
    small = world.connect(make_sim(num_blocks=5, executor_id="small"))
    client = world.open(make_proto(1000, max_tokens=None))
    turn(world, large)
    sim = world.lose(large)
    turn(world, small)
    assert not client.ended
    world.connect(sim)
    world.run_to_end()
    assert client.finish is FinishReason.LENGTH
    assert len(client.tokens) == 50 * BLOCK_SIZE + 1 - 1000


def test_a_larger_executor_may_leave_more_than_once() -> None:
    world, large = make_world(num_blocks=50, executor_id="large")
    world.connect(make_sim(num_blocks=5, executor_id="small"))
    client = world.open(make_proto(100, max_tokens=1000))
    for _ in range(3):
        for _ in range(20):
            turn(world, large)
        sim = world.lose(large)
        assert not client.ended
        large = world.connect(sim)
    world.run_to_end()
    assert len(client.tokens) == 1000


def test_a_request_goes_only_where_it_fits() -> None:
    world, short = make_world(max_model_len=300, executor_id="short")
    long = world.connect(make_sim(num_blocks=30, max_model_len=1000, executor_id="long"))
    assert world.core.model is not None
    assert world.core.model.max_model_len == 1000
    clients = [world.open(make_proto(100, start=i, max_tokens=600)) for i in range(3)]
    assert len(of(Admit, orders(world, long))) == 3
    assert orders(world, short) == []
    clients += [world.open(make_proto(50, start=i, max_tokens=20)) for i in range(3, 9)]
    assert of(Admit, orders(world, short)), "a short one goes wherever there is room"
    world.run_to_end()
    assert [len(client.tokens) for client in clients] == [600] * 3 + [20] * 6


def test_what_fits_nowhere_is_refused_at_once_with_the_figures() -> None:
    world, _ = make_world(num_blocks=10, max_model_len=1000, executor_id="long")
    world.connect(make_sim(num_blocks=100, max_model_len=400, executor_id="large"))
    client = world.open(make_proto(300, max_tokens=500))
    assert isinstance(client.error, CapacityError)
    assert "10 blocks with max_model_len 1000, 100 blocks with max_model_len 400" in client.error.message
    client = world.open(make_proto(1000, start=1))
    assert isinstance(client.error, PromptTooLongError)
    assert client.error.metadata["max_model_len"] == "1000"
    world.run_to_end()


def test_what_names_no_end_begins_anywhere_and_runs_on_where_more_fits() -> None:
    world, small = make_world(num_blocks=5, executor_id="small")
    large = world.connect(make_sim(num_blocks=20, executor_id="large"))
    busy = [world.open(make_proto(60, start=i, max_tokens=900)) for i in range(1, 4)]
    assert len(of(Admit, turn(world, large))) == 3
    client = world.open(make_proto(100, max_tokens=None))
    (admit,) = of(Admit, turn(world, small))
    assert admit.max_total_tokens == 5 * BLOCK_SIZE + 1
    for other in busy:
        world.cancel(other)
    while len(client.tokens) < 221:
        turn(world, small)
    assert not client.ended
    (admit,) = of(Admit, turn(world, large))
    assert (admit.num_tokens, admit.max_total_tokens) == (321, 20 * BLOCK_SIZE + 1)
    world.run_to_end()
    assert len(client.tokens) == 20 * BLOCK_SIZE + 1 - 100
    assert small.sim.num_computed_tokens == 100
    again = world.open(make_proto(200, start=5, max_tokens=None))
    assert of(Admit, turn(world, large)), "it would soon leave the small one"
    world.run_to_end()
    assert again.finish is FinishReason.LENGTH


def test_the_head_of_the_queue_may_fit_elsewhere_when_a_larger_executor_left() -> None:
    world, large = make_world(num_blocks=20, max_num_seqs=1, executor_id="large")
    small = world.connect(make_sim(num_blocks=5, executor_id="small"))
    running = world.open(make_proto(100, max_tokens=900))
    waiting = world.open(make_proto(200, start=1, max_tokens=None))
    turn(world, large)
    assert not waiting.started, "it might outgrow the small one soon"
    sim = world.lose(large)
    assert waiting.started, "which now decides where it ends"
    while not waiting.ended:
        turn(world, small)
    assert len(waiting.tokens) == 5 * BLOCK_SIZE + 1 - 200
    world.connect(sim)
    world.run_to_end()
    assert len(running.tokens) == 900


def test_an_end_that_was_the_models_is_never_out_of_reach() -> None:
    world, short = make_world(num_blocks=60, max_model_len=350, executor_id="short")
    client = world.open(make_proto(100, max_tokens=400))
    turn(world, short)
    turn(world, short)
    sim = world.lose(short)
    small = world.connect(make_sim(num_blocks=6, max_model_len=700, executor_id="small"))
    short = world.connect(sim)
    turn(world, small)
    world.run_to_end()
    assert len(client.tokens) == 6 * BLOCK_SIZE + 1 - 100, "neither takes 500 tokens, one takes more than 350"
    resumed = world.resume(client, 50)
    world.run_to_end()
    assert resumed.tokens == client.tokens[50:], "nor is it refused when it is opened again"


def test_grammars_go_where_they_are_taken() -> None:
    grammar = {"grammar": common_pb2.Grammar(text="root ::= .*")}
    world, plain = make_world(executor_id="plain")
    refused = world.open(make_proto(request_id="a", sampling=grammar))
    assert isinstance(refused.error, InvalidRequestError)
    taking = world.connect(make_sim(max_model_len=150, takes_grammars=True, executor_id="taking"))
    client = world.open(make_proto(request_id="b", sampling=grammar, max_tokens=50))
    assert isinstance(world.open(make_proto(150, request_id="c", sampling=grammar)).error, PromptTooLongError)
    assert len(of(Admit, turn(world, taking))) == 1
    turn(world, taking)
    sim = world.lose(taking)
    turn(world, plain)
    assert not client.ended, "it has begun, and waits for one that takes it"
    world.connect(sim)
    world.run_to_end()
    assert len(client.tokens) == 50


def test_an_executor_for_longer_histories_left() -> None:
    world, long = make_world(max_model_len=1000, executor_id="long")
    short = world.connect(make_sim(max_model_len=300, executor_id="short"))
    fixed = world.open(make_proto(100, max_tokens=600))
    clipped = world.open(make_proto(100, start=1, max_tokens=5000))
    for _ in range(5):
        turn(world, long)
    sim = world.lose(long)
    for _ in range(300):
        turn(world, short)
    assert len(clipped.tokens) == 200, "its end was the model's, which is now this one"
    assert fixed.tokens
    assert not fixed.ended
    world.connect(sim)
    world.run_to_end()
    assert len(fixed.tokens) == 600


def test_scoring_a_prompt_of_one_token_brings_no_empty_delta() -> None:
    world, link = make_world()
    client = world.open(make_proto(1, max_tokens=0, sampling={"prompt_logprobs": 0}))
    orders(world, link)
    world.step(link)
    report = link.sim.report()
    assert report is not None
    events = world.core.handle(reported_from_proto(link.link_id, report), 0.0).events
    assert [event.stream_id for event in events if isinstance(event, StreamFinished)] == [client.stream_id]
    assert not [event for event in events if isinstance(event, StreamTokens)]


def test_a_mixed_batch_with_drafts_never_pauses() -> None:
    world, link = make_world(num_draft_tokens=3, max_num_batched_tokens=300)
    for i in range(8):
        world.open(make_proto(50 + i, start=i, max_tokens=400))
    world.run_to_end()
    assert link.sim.num_paused_steps == 0
