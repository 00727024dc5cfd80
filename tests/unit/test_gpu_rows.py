"""The GPU's decode set: what is uploaded makes the device's words equal the host's, whatever joins and leaves."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.gpu.rows import DecodeRows
from executor.orders import OrderBatch, read_batch
from executor.sequences import Sequence
from rorqual.core.blocks import BLOCK_SIZE
from rorqual.kernels import step_state as words
from rorqual.v1 import executor_pb2
from tests.support.executor_fakes import VOCAB, admit

MAX_ROWS, MAX_BLOCKS = 5, 12


def make_sequence(seq_id: int, num_tokens: int, blocks: list[int], limit: int, **sampling: object) -> Sequence:
    order = admit(seq_id, [1] * num_tokens, blocks, limit=limit, max_total=num_tokens + 40, **sampling)
    batch: OrderBatch = read_batch(executor_pb2.OrderBatch(batch_id=1, orders=[order]))
    sequence = Sequence(batch.orders[0], VOCAB)  # type: ignore[arg-type]
    sequence.last_token = seq_id % VOCAB
    return sequence


def upload(rows: DecodeRows) -> None:
    changes = np.zeros((rows.num_pending_changes, 2), np.int32)
    count = rows.changes(changes)
    words.scatter_words(rows.words, torch.from_numpy(changes[:count]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_device_sees_what_the_host_has(seed: int) -> None:
    rng = random.Random(seed)
    rows = DecodeRows(MAX_ROWS, MAX_BLOCKS, torch.device("cpu"))
    ids = itertools.count(1)
    paused: list[Sequence] = []
    in_flight = None
    for _ in range(60):
        for _ in range(rng.randint(0, 3)):
            kind = rng.choice(["add", "again", "remove", "extend"])
            if kind == "add" and not rows.is_full:
                blocks = [rng.randrange(1000) for _ in range(rng.randint(1, MAX_BLOCKS - 1))]
                num_tokens = rng.randint(1, len(blocks) * BLOCK_SIZE)
                stops = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3]))]
                rows.add(make_sequence(next(ids), num_tokens, blocks, len(blocks) * BLOCK_SIZE, stop_token_ids=stops))
            elif kind == "again" and paused and not rows.is_full:
                rows.add(paused.pop())
            elif kind == "remove" and rows.sequences:
                sequence = rng.choice(rows.sequences)
                rows.remove(sequence)
                if sequence.num_tokens < MAX_BLOCKS * BLOCK_SIZE:
                    paused.append(sequence)
            elif kind == "extend" and rows.sequences:
                sequence = rng.choice(rows.sequences)
                if sequence.num_blocks < MAX_BLOCKS:
                    sequence.append_blocks(np.array([rng.randrange(1000)]))
                    sequence.limit = sequence.num_blocks * BLOCK_SIZE
                    rows.extended(sequence)
        assert [s.row for s in rows.sequences] == list(range(rows.num_rows))
        upload(rows)
        n = rows.num_rows
        assert (rows.slots[n:] == -1).all()
        slots = rows.slots[:n].long()
        assert slots.unique().numel() == n
        for row, sequence in enumerate(rows.sequences):
            state, slot = rows.state[slots[row]], int(slots[row])
            assert slot == rows.slot_of(sequence)
            assert int(state[words.LIMIT]) == sequence.limit
            assert int(state[words.MAX_TOTAL]) == sequence.admit.max_total_tokens
            assert rows.block_tables[slot, : sequence.num_blocks].tolist() == sequence.block_ids
            assert set(sequence.spec.stop_token_ids) == set(state[words.FIRST_STOP :].tolist()) - {-1}
        # A step is launched; the one before it is looked at.
        launched = rows.launched(n)
        active = torch.zeros(n, dtype=torch.uint8)
        step = {
            "x": torch.zeros(n, 8, dtype=torch.bfloat16),
            "positions": torch.zeros(n, dtype=torch.int64),
            "slot_mapping": torch.zeros(n, dtype=torch.int64),
            "kv_lens": torch.zeros(n, dtype=torch.int32),
            "row_tables": torch.zeros(n, MAX_BLOCKS, dtype=torch.int32),
            "new_positions": torch.zeros(n, dtype=torch.int32),
        }
        embedding = torch.zeros(VOCAB, 8, dtype=torch.bfloat16)
        words.step_prepare(rows.slots[:n], rows.state, rows.block_tables, embedding, active=active, **step)
        results = torch.zeros(n, dtype=torch.int32)
        tokens = torch.tensor([rng.randrange(VOCAB) for _ in range(n)], dtype=torch.int32)
        words.step_advance(
            rows.slots[:n], rows.state, tokens=tokens, sound=torch.ones_like(active), active=active, results=results
        )
        if in_flight is not None:
            old, old_results = in_flight
            chosen = rows.take(old, old_results)
            for i in np.flatnonzero(chosen.halted).tolist():
                sequence = old.sequences[chosen.rows[i]]
                rows.remove(sequence)
                if not chosen.stopped[i] and not chosen.spent[i]:
                    assert not sequence.has_room
        in_flight = launched, results.numpy()


def test_a_leaver_knows_its_newest_token_and_where_it_is() -> None:
    rows = DecodeRows(MAX_ROWS, MAX_BLOCKS, torch.device("cpu"))
    sequence = make_sequence(7, 5, [3], 64)
    rows.add(sequence)
    launched = rows.launched(1)
    chosen = rows.take(launched, np.array([11], np.int32))
    assert chosen.token_ids.tolist() == [11]
    assert not chosen.halted.any()
    rows.remove(sequence)
    assert (sequence.num_tokens, sequence.last_token, sequence.row) == (6, 11, -1)
    again = rows.take(launched, np.array([12], np.int32))
    assert again.rows.size == 0  # it has left


def test_a_sequence_that_paused_and_joined_again_counts_only_the_steps_since() -> None:
    rows = DecodeRows(MAX_ROWS, MAX_BLOCKS, torch.device("cpu"))
    sequence = make_sequence(1, 64, [3], 64)
    rows.add(sequence)
    before, beside = rows.launched(1), rows.launched(1)  # the second finds it at its limit
    assert rows.take(before, np.array([9], np.int32)).halted.all()
    rows.remove(sequence)
    sequence.append_blocks(np.array([4]))
    sequence.limit = 65
    rows.add(sequence)
    rows.launched(1)
    assert rows.take(beside, np.array([words.NOT_RUN], np.int32)).rows.size == 0
    assert not rows.may_run  # the step that was launched since takes it to its limit


def test_a_row_that_did_not_run_is_not_among_the_chosen() -> None:
    rows = DecodeRows(MAX_ROWS, MAX_BLOCKS, torch.device("cpu"))
    for seq_id in (1, 2, 3):
        rows.add(make_sequence(seq_id, 5, [seq_id], 64))
    chosen = rows.take(rows.launched(3), np.array([9, words.NOT_RUN, words.UNSOUND], np.int32))
    assert chosen.rows.tolist() == [0, 2]
    assert chosen.sound.tolist() == [True, False]
    assert chosen.halted.tolist() == [False, True]
