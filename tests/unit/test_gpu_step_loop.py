"""What is the GPU loop's own: steps launched ahead, and rows laid out for its kernels."""

from __future__ import annotations

import random

from executor.gpu.engine import graph_batch_sizes
from rorqual.v1 import common_pb2
from tests.support.executor_fakes import VOCAB, admit, drop, extend, prefill
from tests.support.gpu_fakes import DrivenGpu

LENGTH = common_pb2.FINISH_REASON_LENGTH


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB) for i in range(n)]


def test_the_next_step_is_launched_before_the_last_ones_tokens_are_seen() -> None:
    d = DrivenGpu()
    tokens = prompt(70)
    d.order(admit(1, tokens, [3, 5], max_total=100), prefill(1, tokens))
    d.step()
    assert d.report()[1].token_ids == []
    d.step()
    assert len(d.report()[1].token_ids) == 1
    d.run()
    assert len(d.loop.stats) == 30  # no step was launched past a budget that is known
    assert d.report()[1].token_ids == d.model.continuation(tokens, 30)
    assert d.received[1].finish == LENGTH


def test_a_step_launched_ahead_writes_nothing_for_a_sequence_that_ended() -> None:
    d = DrivenGpu()
    tokens = prompt(60)
    stop = d.model.continuation(tokens, 3)[2]
    d.order(admit(1, tokens, [3], stop_token_ids=[stop]), prefill(1, tokens))
    d.run()
    made = d.report()[1].token_ids
    assert made == d.model.continuation(tokens, len(made))
    written = ~d.cache.storage[0, :, 0].isnan()
    assert written.sum() == len(tokens) + len(made) - 1  # the last token has no KV


def test_chunks_of_a_step_share_calls_by_whether_a_prefix_is_cached() -> None:
    d = DrivenGpu(max_num_batched_tokens=308)
    a, b, c = prompt(100, 1), prompt(50, 2), prompt(40, 3)
    d.order(admit(1, a, [0, 1], max_total=101), prefill(1, a, 0, 64))
    d.run()
    d.order(
        prefill(1, a, 64, 100),
        admit(2, b, [2], max_total=51),
        prefill(2, b),
        admit(3, c, [3], max_total=41),
        prefill(3, c),
    )
    d.run()
    r = d.report()
    for seq_id, tokens in ((1, a), (2, b), (3, c)):
        assert r[seq_id].token_ids == d.model.continuation(tokens, 1)


def test_a_history_longer_than_a_call_takes_is_attended_to_in_slabs() -> None:
    d = DrivenGpu(max_keys=256, max_num_batched_tokens=328)
    long, other, short = prompt(900, 1), prompt(640, 2), prompt(100, 3)
    d.order(
        admit(1, long, list(range(15)), max_total=902),
        *(prefill(1, long, start, min(start + 256, 900)) for start in range(0, 900, 256)),
    )
    d.order(
        admit(2, other, list(range(15, 26)), max_total=642),
        *(prefill(2, other, start, start + 128) for start in range(0, 640, 128)),
        admit(3, short, [30, 31], max_total=102),
        prefill(3, short),
    )
    d.run()
    r = d.report()
    for seq_id, tokens in ((1, long), (2, other), (3, short)):
        assert r[seq_id].token_ids == d.model.continuation(tokens, 2)


def test_generated_tokens_of_a_history_are_computed_in_the_decode_form_if_deterministic() -> None:
    d = DrivenGpu(deterministic=True, max_num_seqs=3)
    history = prompt(150)
    d.order(admit(1, history, [0, 1, 2], num_prompt=130, max_total=152), prefill(1, history))
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(history, 2)
    forms = dict(d.model.forms)
    assert [forms[p] for p in range(150)] == ["prefill"] * 130 + ["decode"] * 20


def test_a_long_history_is_recomputed_beside_a_small_decode_set() -> None:
    d = DrivenGpu(deterministic=True, max_num_seqs=1, max_num_batched_tokens=600, max_model_len=2048)
    history = prompt(1540)
    d.order(
        admit(1, history, list(range(25)), num_prompt=1024, max_total=1542),
        *(prefill(1, history, start, min(start + 512, 1024)) for start in (0, 512)),
        prefill(1, history, 1024, 1540),
    )
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(history, 2)


def test_a_drop_while_its_step_is_on_the_device_brings_no_more_tokens() -> None:
    d = DrivenGpu()
    tokens, other = prompt(30), prompt(40, 9)
    d.order(admit(1, tokens, [0, 1]), prefill(1, tokens))
    d.step(4)
    seen = len(d.report()[1].token_ids)
    d.order(drop(1), admit(2, other, [0, 1], max_total=60), prefill(2, other))
    d.run()
    r = d.report()
    assert len(r[1].token_ids) == seen
    assert r[2].token_ids == d.model.continuation(other, 20)


def test_an_extend_that_comes_while_the_device_waits_at_the_limit_loses_no_token() -> None:
    d = DrivenGpu()
    tokens = prompt(60)
    d.order(admit(1, tokens, [7], max_total=140), prefill(1, tokens))
    d.step(5)  # the device has met the limit of 64 by now, or is about to
    d.order(extend(1, [8, 9], 192))
    d.run()
    assert d.report()[1].token_ids == d.model.continuation(tokens, 80)
    assert d.received[1].finish == LENGTH


def test_the_ladder_of_graphs_reaches_the_largest_batch() -> None:
    for largest in (1, 2, 5, 16, 64, 100, 256, 1000):
        sizes = graph_batch_sizes(largest)
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        for rows in range(4, largest + 1):
            padded = next(size for size in sizes if size >= rows)
            assert padded <= 1.5 * rows
