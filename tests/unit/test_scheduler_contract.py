"""What an executor says is held against what it may say: the link of one that lies ends, its streams go on elsewhere."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from executor.sim.device import SimConfig, SimExecutor
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.executor_contract import CONTRACT_BROKEN, MAX_FAULT_CHARS, spec_from_hello
from services.scheduler.stream_events import FinishReason
from services.scheduler.wire import reported_from_proto
from tests.support.sim_world import Client, Link, World

VOCAB = 97


def make_world() -> tuple[World, Link, list[Client]]:
    """An executor in the middle of three answers: one plain, one with log-probabilities, one whose prompt is not all sent."""
    world = World(random.Random(3))
    link = world.connect(
        SimExecutor(
            SimConfig(
                vocab_size=VOCAB, max_num_seqs=8, max_num_batched_tokens=8 + 64, num_blocks=60, takes_grammars=True
            )
        )
    )
    clients = []
    for i in range(3):
        proto = generation_pb2.GenerateRequest(
            request_id=f"r{i}",
            token_ids=pack_token_ids([i] * (num := (70, 70, 400)[i])),
            num_prompt_tokens=num,
            max_tokens=40,
        )
        proto.sampling.seed = i
        if i == 1:
            proto.sampling.logprobs = 2
        if i == 0:
            proto.sampling.stop_token_ids.append(5)
            proto.sampling.min_tokens = 30
        clients.append(world.open(proto))
        if i < 2:
            world.send(link)
            world.apply(link)
            for _ in range(3):
                world.step(link)
            world.report(link)
    world.send(link)
    return world, link, clients


def columns(*entries: tuple[int, list[int]], finish: bytes = b"") -> executor_pb2.Report:
    return executor_pb2.Report(
        last_batch_id=2,
        seq_ids=struct.pack(f"<{len(entries)}Q", *[seq_id for seq_id, _ in entries]),
        num_tokens=pack_token_ids([len(ids) for _, ids in entries]),
        token_ids=pack_token_ids([token for _, ids in entries for token in ids]),
        finish=finish,
    )


def with_logprobs(entry: common_pb2.TokenLogprobs, num: int = 1) -> executor_pb2.Report:
    report = columns((2, [1]))
    report.logprobs.add(seq_id=2, logprobs=[entry] * num)
    return report


def computed(seq_id: int, num_computed: int) -> executor_pb2.Report:
    return executor_pb2.Report(
        last_batch_id=2, computed_seq_ids=struct.pack("<Q", seq_id), num_computed_tokens=pack_token_ids([num_computed])
    )


def entry(**fields: object) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(**{"token_id": 1, "logprob": -1.0, **fields})  # type: ignore[arg-type]


STOP, LENGTH = bytes([FinishReason.STOP]), bytes([FinishReason.LENGTH])

LIES: dict[str, executor_pb2.Report] = {
    "stop without a token": columns((1, []), finish=STOP),
    "stop at no stop token": columns((1, [6]), finish=STOP),
    "stop before min_tokens": columns((1, [5]), finish=STOP),
    "length before the budget": columns((1, [1]), finish=LENGTH),
    "length without a token": columns((1, []), finish=LENGTH),
    "an end that is the scheduler's": columns((1, [1]), finish=bytes([FinishReason.ABORTED])),
    "an end that does not exist": columns((1, [1]), finish=bytes([99])),
    "more tokens than granted": columns((1, [1] * 3000)),
    "a million tokens": columns((1, [1] * 1_000_000)),
    "a token beyond the vocabulary": columns((1, [VOCAB])),
    "the largest token": columns((1, [2**32 - 1])),
    "an entry twice": columns((1, [1]), (1, [1])),
    "tokens before the history was sent": columns((3, [1])),
    "more computed than sent": computed(1, 10_000),
    "an acknowledgement of what was not sent": executor_pb2.Report(last_batch_id=1000),
    "columns of unequal length": executor_pb2.Report(last_batch_id=2, seq_ids=bytes(16), num_tokens=bytes(4)),
    "half an entry": executor_pb2.Report(last_batch_id=2, seq_ids=bytes(7)),
    "no log-probabilities": columns((2, [1])),
    "too many log-probabilities": with_logprobs(entry(), 2),
    "log-probabilities nobody asked for": columns((1, [1])),
    "three bytes of ids": with_logprobs(entry(top_token_ids=b"abc", top_logprobs=[0.0])),
    "more ids than values": with_logprobs(entry(top_token_ids=bytes(8), top_logprobs=[0.0])),
    "a hundred alternatives": with_logprobs(entry(top_token_ids=bytes(400), top_logprobs=[0.0] * 100)),
    "an alternative beyond the vocabulary": with_logprobs(entry(top_token_ids=b"\xff" * 4, top_logprobs=[0.0])),
    "not a number": with_logprobs(entry(logprob=float("nan"))),
    "prompt log-probabilities nobody asked for": executor_pb2.Report(
        last_batch_id=2, logprobs=[executor_pb2.SequenceLogprobs(seq_id=1, prompt_logprobs=[entry()])]
    ),
}
LIES["log-probabilities nobody asked for"].logprobs.add(seq_id=1, logprobs=[entry()])


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_link_and_no_stream(name: str) -> None:
    world, link, clients = make_world()
    with pytest.raises(InvalidRequestError) as caught:
        world.core.handle(reported_from_proto(link.link_id, LIES[name]), world.now_s)
    if caught.value.reason == CONTRACT_BROKEN:
        assert world.core.executor(link.link_id) is None
        del world.links[link.link_id]
        link.sim.reset()
    else:
        world.lose(link)  # as the engine does for columns that do not fit together
    world.core.check()
    world.pass_time(0.0)
    assert not any(client.ended for client in clients)
    for _ in range(3):  # whoever lies is to blame, not what it ran
        assert not world.core.is_isolating
        world.connect(link.sim)
        world.send(link := next(iter(world.links.values())))
        with pytest.raises(InvalidRequestError):
            world.core.handle(reported_from_proto(link.link_id, executor_pb2.Report(last_batch_id=9)), world.now_s)
        del world.links[link.link_id]
        link.sim.reset()
        world.pass_time(0.0)
    world.connect(SimExecutor(SimConfig(executor_id="honest", vocab_size=VOCAB, takes_grammars=True)))
    world.run_to_end()
    assert all(client.finish for client in clients)


def test_a_stop_that_only_the_grammar_explains_is_believed() -> None:
    world = World(random.Random(3))
    link = world.connect(SimExecutor(SimConfig(vocab_size=VOCAB, takes_grammars=True)))
    proto = generation_pb2.GenerateRequest(request_id="r", token_ids=bytes(4), num_prompt_tokens=1, max_tokens=40)
    proto.sampling.seed = 1
    proto.sampling.grammar.text = "start: x"
    world.open(proto)
    world.send(link)
    (seq_id,) = world.core.executor(link.link_id).sequences  # type: ignore[union-attr]
    report = columns((seq_id, [7]), finish=STOP)
    report.last_batch_id = 1
    effects = world.core.handle(reported_from_proto(link.link_id, report), 0.0)
    assert [type(event).__name__ for event in effects.events] == ["StreamTokens", "StreamFinished"]


def test_a_sequence_that_faulted_may_lack_the_token_of_its_last_log_probability() -> None:
    """Two steps in one report: the second brought a log-probability, and then went wrong with the sequence's token."""
    world, link, clients = make_world()
    report = with_logprobs(entry(), 2)
    report.faults.add(seq_id=2, reason="INTERNAL", message="went wrong")
    world.faulted.add(clients[1].stream_id)
    effects = world.core.handle(reported_from_proto(link.link_id, report), world.now_s)
    assert [type(event).__name__ for event in effects.events] == ["StreamFailed"]
    assert world.core.executor(link.link_id) is not None


def test_a_faults_message_is_cut() -> None:
    world, link, clients = make_world()
    report = executor_pb2.Report(last_batch_id=2)
    report.faults.add(seq_id=1, message="x" * 9_000_000)
    world.handle(reported_from_proto(link.link_id, report))
    assert clients[0].error is not None
    assert len(clients[0].error.message) <= MAX_FAULT_CHARS


def _change(change: Callable[[executor_pb2.Hello], object]) -> executor_pb2.Hello:
    hello = SimExecutor(SimConfig(num_blocks=100)).hello()
    hello.device.memory_bytes = 1 << 30
    change(hello)
    return hello


HELLOS: dict[str, Callable[[executor_pb2.Hello], object]] = {
    "200 million blocks": lambda h: setattr(h.cache_groups[0], "num_blocks", 200_000_000),
    "the most blocks": lambda h: setattr(h.cache_groups[0], "num_blocks", 2**32 - 1),
    "more than the device has": lambda h: setattr(h.cache_groups[0], "block_bytes", 1 << 30),
    "a thousand groups": lambda h: h.cache_groups.extend([h.cache_groups[0]] * 1000),
    "a long name": lambda h: setattr(h, "executor_id", "x" * 100_000),
    "a long model name": lambda h: setattr(h.model, "name", "x" * 100_000),
    "a model without end": lambda h: setattr(h.model, "max_model_len", 2**32 - 1),
    "a vocabulary without end": lambda h: setattr(h.model, "vocab_size", 2**32 - 1),
    "sequences without end": lambda h: setattr(h, "max_num_seqs", 2**32 - 1),
    "tokens a step without end": lambda h: setattr(h, "max_num_batched_tokens", 2**32 - 1),
    "drafts without end": lambda h: setattr(h, "num_draft_tokens", 2**32 - 1),
    "a block beyond the pool": lambda h: h.inventory.add(
        group_idx=0, block_ids=pack_token_ids([100]), hashes=bytes(32)
    ),
    "more blocks than there are": lambda h: h.inventory.add(
        group_idx=0, block_ids=pack_token_ids([1] * 101), hashes=bytes(32 * 101)
    ),
    "a group that is not there": lambda h: h.inventory.add(group_idx=7, block_ids=bytes(4), hashes=bytes(32)),
    "half a block": lambda h: h.inventory.add(group_idx=0, block_ids=bytes(3), hashes=bytes(32)),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_out_of_all_bounds_is_refused(name: str) -> None:
    spec_from_hello(_change(lambda _hello: None))
    with pytest.raises(InvalidRequestError, match=r"hello\."):
        spec_from_hello(_change(HELLOS[name]))
