"""Orders at step boundaries, and what comes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.model.batch import BLOCK_SIZE, Form
from executor.orders import OrderError, read_batch
from rorqual.v1 import common_pb2, executor_pb2
from tests.support.executor_fakes import VOCAB, Driven, FakeModel, admit, copy, drop, extend, label, prefill
from tests.support.gpu_fakes import DrivenGpu

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


KINDS: list[type[Driven]] = [Driven]


@pytest.fixture(autouse=True, scope="module", params=[Driven, DrivenGpu], ids=["torch", "gpu"])
def kind(request: pytest.FixtureRequest) -> None:
    """Every test drives both loops."""
    KINDS[0] = request.param


def one_step_at_a_time() -> None:
    """For a test that counts steps: a loop that launches ahead takes a step or two more."""
    if KINDS[0] is DrivenGpu:
        pytest.skip("counts steps")


def driven(*args: object, **kwargs: object) -> Driven:
    return KINDS[0](*args, **kwargs)  # type: ignore[arg-type]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(n)]


def start(d: Driven, seq_id: int, tokens: Sequence[int], blocks: Sequence[int], **kwargs: object) -> None:
    d.order(admit(seq_id, tokens, blocks, **kwargs), prefill(seq_id, tokens))  # type: ignore[arg-type]


def test_a_sequence_runs_from_admission_to_its_budget() -> None:
    one_step_at_a_time()
    d = driven()
    tokens = prompt(70)
    start(d, 1, tokens, [3, 5], max_total=100)
    assert d.run() == 30  # the chunk's step brings the first of 30 tokens
    r = d.report()[1]
    assert r.token_ids == d.model.continuation(tokens, 30)
    assert (r.finish, r.computed, r.pauses) == (LENGTH, 70, 0)


def test_the_first_token_comes_from_the_chunk_that_ends_the_history() -> None:
    one_step_at_a_time()
    d = driven()
    tokens = prompt(100)
    d.order(admit(1, tokens, [0, 1], max_total=102), prefill(1, tokens, 0, 64))
    assert d.step(5) == 1  # nothing to do before the next chunk
    assert d.report()[1].token_ids == []
    assert d.report()[1].computed == 64
    d.order(prefill(1, tokens, 64, 100))
    d.step()
    assert d.report()[1].token_ids == d.model.continuation(tokens, 1)


def test_chunks_run_in_order_whole_and_within_the_budget() -> None:
    one_step_at_a_time()
    d = driven(max_num_batched_tokens=108, max_num_seqs=8)  # 100 tokens of chunks a step
    a, b, c = prompt(60, 1), prompt(60, 2), prompt(30, 3)
    d.order(admit(1, a, [0]), prefill(1, a), admit(2, b, [1]), prefill(2, b), admit(3, c, [2]), prefill(3, c))
    d.step()
    assert [s.num_rows for s in d.model.batches[-1].segments] == [60]  # b does not fit, and c must not overtake it
    d.step()
    batch = d.model.batches[-1]
    assert [(s.num_rows, s.form) for s in batch.segments] == [(1, Form.DECODE), (60, Form.PREFILL), (30, Form.PREFILL)]
    assert batch.num_rows <= 108


def test_a_chunk_larger_than_a_step_is_refused() -> None:
    d = driven(max_num_batched_tokens=108, max_num_seqs=8)
    tokens = prompt(101)
    start(d, 1, tokens, [0, 1])
    d.run()
    assert "room for 100" in str(d.errors[0])


def test_consecutive_chunks_of_one_sequence_may_share_a_step() -> None:
    one_step_at_a_time()
    d = driven()
    tokens = prompt(150)
    d.order(admit(1, tokens, [7, 2, 9], max_total=152), prefill(1, tokens, 0, 64), prefill(1, tokens, 64, 150))
    assert d.run() == 2
    r = d.report()[1]
    assert r.token_ids == d.model.continuation(tokens, 2)
    assert r.computed == 150


def test_it_pauses_at_its_limit_and_runs_on_after_an_extend() -> None:
    d = driven()
    tokens = prompt(60)
    start(d, 1, tokens, [0], max_total=140)
    d.run()
    r = d.report()[1]
    # Positions 60 to 63 may be written, so 65 tokens are known when it stops: the newest has no KV yet.
    assert (len(r.token_ids), r.pauses, r.finish) == (5, 1, 0)
    d.order(extend(1, [9], 128))
    d.run()
    assert d.report()[1].pauses == 2
    d.order(extend(1, [4], 192))
    d.run()
    r = d.report()[1]
    assert r.token_ids == d.model.continuation(tokens, 80)
    assert (r.pauses, r.finish) == (2, LENGTH)


def test_a_pause_that_is_over_before_its_report_is_not_reported() -> None:
    d = driven()
    start(d, 1, prompt(60), [0], max_total=200)
    d.run()
    d.order(extend(1, [1], 128))
    d.step()
    assert d.report()[1].pauses == 0


def test_an_extend_before_the_limit_is_reached_costs_no_pause() -> None:
    d = driven()
    tokens = prompt(60)
    start(d, 1, tokens, [0], max_total=100)
    d.step(2)
    d.order(extend(1, [1], 128))
    d.run()
    assert d.report()[1].pauses == 0
    assert d.report()[1].token_ids == d.model.continuation(tokens, 40)


def test_a_stop_token_ends_a_sequence_at_once_and_is_reported() -> None:
    d = driven()
    tokens = prompt(20)
    made = d.model.continuation(tokens, 50)
    stop = made[10]
    start(d, 1, tokens, [0, 1], stop_token_ids=[stop, 10**6])
    d.run()
    r = d.report()[1]
    assert r.token_ids == made[: made.index(stop) + 1]
    assert r.finish == STOP


def test_stop_tokens_are_impossible_before_min_tokens() -> None:
    d = driven()
    tokens = prompt(20)
    stop = d.model.continuation(tokens, 1)[0]
    start(d, 1, tokens, [0, 1], stop_token_ids=[stop], min_tokens=7, max_total=60)
    d.run()
    r = d.report()[1]
    assert stop not in r.token_ids[:7]
    assert len(r.token_ids) >= 7


def test_a_history_that_has_ended_is_answered_with_its_finish() -> None:
    d = driven()
    tokens = prompt(10)
    start(d, 1, tokens, [0], num_prompt=9, stop_token_ids=[tokens[-1]])
    start(d, 2, tokens, [1], max_total=10)
    d.run()
    r = d.report()
    assert (r[1].token_ids, r[1].finish) == ([], STOP)
    assert (r[2].token_ids, r[2].finish) == ([], LENGTH)


def test_a_dropped_sequence_writes_no_more_and_its_blocks_serve_another() -> None:
    one_step_at_a_time()
    d = driven()
    a, b = prompt(40, 1), prompt(40, 2)
    start(d, 1, a, [0, 1])
    d.step(3)
    d.order(drop(1), admit(2, b, [1, 0], max_total=60), prefill(2, b))
    d.run()
    r = d.report()
    assert len(r[1].token_ids) == 3
    assert r[2].token_ids == d.model.continuation(b, 20)
    assert r.last_batch_id == 2


def test_a_drop_takes_queued_chunks_along() -> None:
    one_step_at_a_time()
    d = driven()
    a, b = prompt(200, 1), prompt(40, 2)
    d.order(admit(1, a, [0, 1, 2, 3]), prefill(1, a, 0, 192), prefill(1, a, 192, 200), admit(2, b, [4], max_total=41))
    d.order(drop(1), prefill(2, b))
    assert d.run() == 1
    assert d.report()[1].computed == 0
    assert len(d.report()[2].token_ids) == 1


def test_orders_for_an_ended_sequence_do_nothing() -> None:
    d = driven()
    tokens = prompt(10)
    start(d, 1, tokens, [0], max_total=12)
    d.run()
    d.order(drop(1), extend(1, [1], 128), prefill(1, prompt(12), 10, 12))
    assert d.run() == 0
    assert not d.errors
    assert d.report().last_batch_id == 2


def test_a_batch_without_work_is_acknowledged() -> None:
    d = driven()
    d.order(drop(99))
    d.run()
    report = d.loop.outbox.take()
    assert report is not None
    assert (report.last_batch_id, report.num_steps) == (1, 0)
    assert d.loop.outbox.take() is None


def test_a_full_decode_set_makes_the_next_chunk_wait() -> None:
    d = driven(max_num_seqs=2)
    for i in range(4):
        start(d, i, prompt(5, i), [i], max_total=5 + 10 + i)
    d.step(3)
    assert d.report()[2].computed == 0
    d.run()
    for i in range(4):
        assert d.report()[i].token_ids == d.model.continuation(prompt(5, i), 10 + i)


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ([executor_pb2.Order()], "does not know"),
        ([admit(1, [1, 2], [0], num_cached=2)], "at least one"),
        ([admit(1, [1, 2], [0], num_cached=1, repetition_penalty=1.5)], "must be named"),
        ([executor_pb2.Order(prefill=executor_pb2.Prefill(seq_id=1, start=0, end=2))], "carries 0 tokens"),
        ([executor_pb2.Order(label=executor_pb2.Label(blocks={"group_idx": 1}))], "cache group 1"),
    ],
)
def test_an_order_that_cannot_be_read_is_never_skipped(orders: list[executor_pb2.Order], text: str) -> None:
    with pytest.raises(OrderError, match=text):
        read_batch(executor_pb2.OrderBatch(batch_id=1, orders=orders))


@pytest.mark.parametrize(
    ("orders", "text"),
    [
        ([admit(1, [1], [64])], "does not exist"),
        ([admit(1, [1], [0], limit=65)], "holds 1 blocks"),
        ([admit(1, [1], [0]), admit(1, [1], [1])], "twice"),
        ([admit(1, [1, 2], [0]), prefill(1, [1, 2], 1, 2)], "covers"),
        ([admit(1, [1, 2, 3], [0], limit=1), prefill(1, [1, 2, 3])], "past its limit"),
        ([copy(1, 64, 3)], "does not exist"),
        ([admit(1, [1], [0], max_total=10_001)], "may grow"),
    ],
)
def test_an_impossible_order_ends_the_link(orders: list[executor_pb2.Order], text: str) -> None:
    d = driven()
    start(d, 77, [1, 2], [5], max_total=9)
    d.order(*orders)
    d.order(drop(77))
    d.step(3)
    assert text in str(d.errors[0])
    assert len(d.errors) == 1  # what follows is not applied
    d.reset()
    start(d, 1, [1], [0], max_total=3)
    d.run()
    assert len(d.report()[1].token_ids) == 2


def test_a_missing_batch_ends_the_link() -> None:
    d = driven()
    next(d.batch_ids)
    d.order(drop(1))
    d.run()
    assert "batch 2 came after batch 0" in str(d.errors[0])


def test_a_numerical_fault_ends_that_sequence_alone() -> None:
    d = driven()
    a, b = prompt(30, 1), prompt(30, 2)
    d.order(label([0, 1], [b"a" * 32, b"b" * 32]))
    made = d.model.continuation(a, 6)
    start(d, 1, a, [0, 1])
    start(d, 2, b, [2, 3], max_total=60)
    d.step(1)
    d.loop.inventory.label([0], [b"c" * 32], 1)
    d.model.poison = {made[4]}
    assert made[4] not in d.model.continuation(b, 30) + made[:4]
    d.run()
    r = d.report()
    assert r[1].token_ids == made[:5]
    assert "not finite" in r[1].fault
    assert r[2].token_ids == d.model.continuation(b, 30)
    assert (r[2].finish, r[2].fault) == (LENGTH, "")
    assert d.reset() == []  # its labels are taken back


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_copied_part_of_a_block_serves_a_sibling(copy_first: bool) -> None:
    d = driven()
    tokens = prompt(40)
    start(d, 1, tokens, [0, 1], max_total=50)
    d.step()
    admitted, copied = admit(2, tokens, [5, 6], num_cached=39, max_total=50), copy(0, 5, 39)
    d.order(*((copied, admitted) if copy_first else (admitted, copied)), prefill(2, tokens, 39, 40))
    d.run()
    assert d.report()[2].token_ids == d.report()[1].token_ids == d.model.continuation(tokens, 10)


def test_blocks_keep_their_labels_until_they_are_written() -> None:
    d = driven()
    hashes = [bytes([i]) * 32 for i in range(6)]
    d.order(label(range(6), hashes))
    d.run()
    tokens = prompt(70)
    start(d, 1, tokens[:64], [0])
    d.step()  # block 0 is handed out for writing
    d.order(admit(2, tokens, [0, 1], num_cached=64, limit=70), prefill(2, tokens, 64, 70))  # writes 1 alone
    d.order(extend(2, [2], 192), copy(4, 3, 5))
    d.order(label([0], [b"n" * 32]))
    d.step()
    left = d.reset()
    assert {e.block_id: e.hash for e in left} == {0: b"n" * 32, 4: hashes[4], 5: hashes[5]}
    assert left[-1].block_id == 0  # the youngest


def test_a_reset_drops_all_and_keeps_labels_and_memory() -> None:
    d = driven()
    tokens = prompt(70)
    start(d, 1, tokens, [0, 1], max_total=200)
    d.order(label([0], [b"h" * 32]))
    d.step(4)
    assert [(e.block_id, e.hash) for e in d.reset()] == [(0, b"h" * 32)]
    assert d.step() == 0
    assert d.loop.outbox.take() is None
    d.order(admit(1, tokens, [0, 4], num_cached=64, max_total=80), prefill(1, tokens, 64, 70))
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(tokens, 10)


def test_reports_coalesce_while_the_wire_is_busy() -> None:
    one_step_at_a_time()
    d = driven()
    a, b = prompt(10, 1), prompt(12, 2)
    start(d, 5, a, [0], max_total=30)
    d.step(4)
    start(d, 3, b, [1], max_total=15)
    d.run()
    report = d.loop.outbox.take()
    assert report is not None
    assert report.num_steps == report.step_id == 20
    d.received.add(report)
    assert d.received[5].token_ids == d.model.continuation(a, 20)
    assert d.received[3].token_ids == d.model.continuation(b, 3)


def test_logprobs_of_tokens_and_prompt_whatever_the_chunks() -> None:
    tokens = prompt(130)
    whole = driven()
    start(whole, 1, tokens, [0, 1, 2], max_total=135, logprobs=3, prompt_logprobs=2)
    whole.run()
    expected = whole.report()[1]
    assert [p.token_id for p in expected.prompt_logprobs] == tokens[1:]
    assert [p.token_id for p in expected.logprobs] == expected.token_ids
    assert all(p.rank == 1 and len(p.top_logprobs) == 3 for p in expected.logprobs)
    assert all(len(p.top_token_ids) == 8 for p in expected.prompt_logprobs)
    assert all(p.logprob <= 0 for p in [*expected.logprobs, *expected.prompt_logprobs])
    cut = driven()
    cut.order(
        admit(1, tokens, [0, 1, 2], max_total=135, logprobs=3, prompt_logprobs=2),
        *(prefill(1, tokens, s, min(s + 43, 130)) for s in range(0, 130, 43)),  # three share a step; the last is 1 long
    )
    cut.run()
    assert cut.report()[1].prompt_logprobs == expected.prompt_logprobs
    assert cut.report()[1].logprobs == expected.logprobs
    again = driven()
    start(again, 1, tokens, [0, 1, 2], max_total=132, prompt_logprobs=2, prompt_logprobs_delivered=True)
    again.run()
    assert again.report()[1].prompt_logprobs == again.report()[1].logprobs == []


def test_deterministic_splits_a_history_between_the_forms() -> None:
    one_step_at_a_time()
    d = driven(deterministic=True)
    history = prompt(80)
    start(d, 1, history, [0, 1], num_prompt=70, max_total=82)
    d.step()
    segments = d.model.batches[-1].segments
    assert [(s.start_position, s.num_rows, s.form) for s in segments] == [(0, 70, Form.PREFILL), (70, 10, Form.DECODE)]
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(history, 2)


def test_deterministic_refuses_edges_that_another_run_would_not_have() -> None:
    d = driven(deterministic=True)
    tokens = prompt(80)
    d.order(admit(1, tokens, [0, 1]), prefill(1, tokens, 0, 63))
    d.run()
    assert "edges at multiples of 64" in str(d.errors[0])
    d.reset()
    d.order(admit(1, tokens, [0, 1], num_prompt=66, max_total=82), prefill(1, tokens, 0, 64))
    d.order(prefill(1, tokens, 64, 75), prefill(1, tokens, 75))
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(tokens, 2)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 12},
    {"temperature": 1.2, "min_p": 0.1, "seed": 13, **PENALTIES},
    {"temperature": 0.0, "logit_bias": {4: 2.0, 5: -100.0}, **PENALTIES},
    {"temperature": 1.0, "seed": 2**63 + 5, "stop_token_ids": [1, 2, 3, 4, 5, 6], "min_tokens": 30},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_held", [1, 9, 40])
def test_a_resume_continues_as_if_nothing_had_happened(sampling: dict[str, object], num_held: int) -> None:
    tokens = prompt(50)
    one = driven()
    start(one, 1, tokens, [0, 1], max_total=110, choice_index=3, **sampling)
    one.run()
    expected = one.report()[1].token_ids
    held = tokens + expected[:num_held]
    two = driven()
    start(two, 2, held, [4, 1], num_prompt=50, max_total=110, choice_index=3, **sampling)
    two.run()
    assert two.report()[2].token_ids == expected[num_held:]
    if len(held) > 64:  # the same from a cached prefix
        two.order(
            admit(
                3,
                held,
                [4, 9],
                num_prompt=50,
                num_cached=64,
                max_total=110,
                choice_index=3,
                known=held[:64],
                **sampling,
            ),
            prefill(3, held, 64, len(held)),
        )
        two.run()
        assert two.report()[3].token_ids == expected[num_held:]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_tokens_do_not_depend_on_what_happens_around(data: st.DataObject) -> None:
    """Any mix of admissions, chunk edges, limits, drops and report times: each sequence gets its own tokens."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    d = driven(num_blocks=128, max_num_seqs=rng.choice([1, 3, 8]), max_num_batched_tokens=rng.choice([80, 200]))
    free = list(range(128))
    rng.shuffle(free)
    tables: dict[int, list[int]] = {}
    histories: dict[int, list[int]] = {}
    chunks: list[executor_pb2.Order] = []
    lengths: dict[int, int] = {}
    budget = d.loop._limits.chunk_budget
    for seq_id in range(1, rng.randint(2, 8)):
        tokens = prompt(rng.choice([1, 63, 64, 65, rng.randint(1, 300)]), seq_id)
        histories[seq_id], lengths[seq_id] = tokens, rng.randint(1, 150)
        tables[seq_id] = [free.pop() for _ in range(-(-len(tokens) // BLOCK_SIZE))]
        chunks.append(admit(seq_id, tokens, tables[seq_id], max_total=len(tokens) + lengths[seq_id]))
        at = 0
        while at < len(tokens):
            end = min(len(tokens), at + rng.randint(1, budget))
            chunks.append(prefill(seq_id, tokens, at, end))
            at = end
    dropped: set[int] = set()
    for _ in range(2000):
        d.step(rng.randint(0, 30))
        if rng.random() < 0.5:
            d.report()
        orders = []
        for _ in range(rng.randint(0, 3)):
            if chunks:
                orders.append(chunks.pop(0))
        admitted = [
            s for s in histories if not any(o.WhichOneof("order") == "admit" and o.admit.seq_id == s for o in chunks)
        ]
        for seq_id in admitted:
            needed = -(-(len(histories[seq_id]) + lengths[seq_id]) // BLOCK_SIZE)
            if len(tables[seq_id]) < needed and rng.random() < 0.5:
                tables[seq_id].append(free.pop())
                orders.append(extend(seq_id, tables[seq_id][-1:], BLOCK_SIZE * len(tables[seq_id])))
            if rng.random() < 0.02 and seq_id not in dropped:
                dropped.add(seq_id)
                orders.append(drop(seq_id))
        if orders:
            d.order(*orders)
        d.report()
        if not chunks and all(s in dropped or d.received[s].finish for s in histories):
            break
    d.run()
    assert not d.errors
    r = d.report()
    for seq_id, tokens in histories.items():
        expected = d.model.continuation(tokens, lengths[seq_id])
        if seq_id in dropped:
            assert r[seq_id].token_ids == expected[: len(r[seq_id].token_ids)]
        else:
            assert (r[seq_id].token_ids, r[seq_id].finish) == (expected, LENGTH)


def test_columns_grow_with_long_tables_and_many_stop_tokens() -> None:
    d = driven(max_model_len=64, num_blocks=64)
    tokens = prompt(30)
    start(d, 1, tokens, list(range(8)), max_total=40, stop_token_ids=range(1000, 1020))
    start(d, 2, tokens, list(range(8, 12)), max_total=64)
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(tokens, 10)
    assert d.report()[2].token_ids == d.model.continuation(tokens, 34)


def test_what_spans_need_is_recorded_only_where_it_was_asked_for() -> None:
    d = driven(traced=True)
    tokens = prompt(70)
    d.order(
        admit(1, tokens, [0, 1], max_total=75, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"),
        prefill(1, tokens, 0, 64),
        prefill(1, tokens, 64, 70),
        admit(2, tokens, [2, 3], max_total=75),
        prefill(2, tokens),
    )
    d.run()
    (ended,) = d.loop.ended
    assert (ended.seq_id, ended.finish, ended.num_generated_tokens) == (1, "length", 5)
    assert [name for name, _, _ in ended.trace.events] == ["prefill_chunk", "prefill_chunk", "first_token", "finish"]
    assert ended.trace.num_chunks == 2
    assert np.sum([s.num_prefill_tokens for s in d.loop.stats]) == 140


def test_fake_model_sees_a_wrong_slot() -> None:
    d = driven(FakeModel())
    tokens = prompt(10)
    start(d, 1, tokens, [0], max_total=12)
    d.step()
    d.cache.storage[0, 3] = -1
    d.run()
    assert d.report()[1].token_ids != d.model.continuation(tokens, 2)


def test_a_reset_that_nobody_waits_for_any_more_is_no_fault() -> None:
    d = driven()
    start(d, 1, prompt(10), [0])
    d.step(2)
    assert d.loop.reset().cancel()
    d.run()
    assert d.reset() == []
