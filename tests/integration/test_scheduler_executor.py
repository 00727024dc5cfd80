"""The scheduler's core and the executor's step loop, joined without a wire, in any order of what each does.

Deterministic, so that all a request yields (tokens, log-probabilities, finish) is what it yields alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from executor.kv_cache import LatentCache
from executor.model.deepseek import DeepseekModel
from executor.order_loop import StepLimits
from executor.orders import OrderError, read_batch
from executor.step_loop import StepLoop
from executor.weights import load_model
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import common_pb2, executor_pb2, generation_pb2
from services.scheduler.core import CoreConfig, SchedulerCore
from services.scheduler.events import (
    Event,
    ExecutorConnected,
    ExecutorLost,
    ExecutorSpec,
    GroupSpec,
    InventoryBlock,
    ModelSpec,
    Open,
)
from services.scheduler.stream_events import FinishReason, StreamFinished, StreamTokens
from services.scheduler.wire import fill_batch, reported_from_proto, request_from_proto
from tests.golden.checkpoints import V3, YARN, random_tensors, write_checkpoint

CONFIG = V3 | {"rope_parameters": YARN, "num_hidden_layers": 2}
VOCAB = CONFIG["vocab_size"]
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower when threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("v3"), CONFIG, random_tensors(CONFIG))
    return load_model(folder, dtype=torch.float32, deterministic=True)


@pytest.fixture(scope="module")
def free_model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekModel:
    """Not deterministic: products over as many rows as there are, chunks that begin anywhere."""
    folder = write_checkpoint(tmp_path_factory.mktemp("v3-free"), CONFIG, random_tensors(CONFIG))
    return load_model(folder, dtype=torch.float32)


@dataclass
class Yield:
    """All that a request brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    finish: FinishReason | None = None


class Pair:
    """One core and one loop. `tick` lets one of them do one thing."""

    def __init__(
        self,
        model: DeepseekModel,
        rng: random.Random,
        *,
        num_blocks: int,
        num_seqs: int,
        room: int,
        deterministic: bool = True,
    ) -> None:
        self.rng = rng
        self.core = SchedulerCore(CoreConfig())
        self.yields: dict[int, Yield] = {}
        cache = LatentCache(model.config, num_blocks, dtype=torch.float32)
        cache.fill_(float("nan"))
        limits = StepLimits(
            vocab_size=VOCAB,
            max_model_len=num_blocks * 64,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + room,
            deterministic=deterministic,
        )
        self._loop = StepLoop(model, cache, limits)
        self._loop.on_order_error = self._fail
        self._limits, self._num_blocks = limits, num_blocks
        self._link_id = 0
        self._down: list[executor_pb2.OrderBatch] = []
        self.num_copies = 0
        self.connect()

    @staticmethod
    def _fail(error: OrderError) -> None:
        raise AssertionError(f"the executor cannot obey: {error}")

    def connect(self) -> None:
        """The link is lost, if there was one, and there is another."""
        self.handle(ExecutorLost(self._link_id))
        inventory = self._loop.reset()
        self._loop.run_once()
        self._down.clear()
        self._link_id += 1
        spec = ExecutorSpec(
            executor_id="e",
            model=ModelSpec(
                "m", self._limits.max_model_len, VOCAB, b"f" * 32, deterministic=self._limits.deterministic
            ),
            groups=(GroupSpec("mla", self._num_blocks),),
            max_num_seqs=self._limits.max_num_seqs,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            inventory=tuple(InventoryBlock(0, e.block_id, e.hash, e.last_used_us) for e in inventory.result()),
        )
        self.handle(ExecutorConnected(self._link_id, spec))

    def open(self, proto: generation_pb2.GenerateRequest) -> Yield:
        stream_id = len(self.yields)
        self.yields[stream_id] = Yield()
        self.handle(Open(stream_id, request_from_proto(proto, now_s=0.0), proto.token_ids))
        return self.yields[stream_id]

    def handle(self, event: Event) -> None:
        for out in self.core.handle(event, 0.0).events:
            got = self.yields[out.stream_id]
            if isinstance(out, StreamTokens):
                got.tokens += unpack_token_ids(bytes(out.token_ids))
                got.logprobs += [(x.token_id, x.logprob, x.rank) for x in out.logprobs or ()]
                got.prompt_logprobs += [(x.token_id, x.logprob, x.rank) for x in out.prompt_logprobs or ()]
            elif isinstance(out, StreamFinished):
                got.finish = out.reason
        self.core.check()

    def tick(self) -> None:
        action = self.rng.choice(("send", "apply", "step", "step", "report"))
        if action == "send" and (taken := self.core.take_batch(self._link_id)) is not None:
            batch = executor_pb2.OrderBatch()
            fill_batch(batch, *taken)
            self.num_copies += sum(order.HasField("copy") for order in batch.orders)
            self._down.append(batch)
        elif action == "apply" and self._down:
            self._loop.submit(read_batch(self._down.pop(0)))
        elif action == "step":
            self._loop.run_once()
        elif action == "report" and (report := self._loop.outbox.take()) is not None:
            self.handle(reported_from_proto(self._link_id, report))

    def run_to_end(self) -> None:
        for _ in range(50_000):
            if all(got.finish is not None for got in self.yields.values()):
                return
            self.tick()
        raise AssertionError("requests that make no progress")


def random_sampling(rng: random.Random) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(
        seed=rng.randrange(2**64),
        temperature=rng.choice((0.0, 0.6, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 5, 50)),
        min_p=rng.choice((0.0, 0.02)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        min_tokens=rng.choice((0, 3)),
    )
    if rng.random() < 0.3:
        sampling.stop_token_ids.extend(rng.sample(range(VOCAB), 12))
    if rng.random() < 0.4:
        sampling.logprobs = 2
    if rng.random() < 0.2:
        sampling.prompt_logprobs = 1
    return sampling


@pytest.mark.parametrize("seed", range(6))
def test_what_a_request_yields_does_not_depend_on_what_happens(model: DeepseekModel, seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(128)]
    protos = []
    for i in range(5):
        length = rng.choice(LENGTHS)
        start = rng.choice((0, 64, 100, 128))
        prompt = (shared[:start] + [rng.randrange(VOCAB) for _ in range(129)])[:length]
        protos.append(
            generation_pb2.GenerateRequest(
                request_id=f"r{i}",
                token_ids=pack_token_ids(prompt),
                num_prompt_tokens=length,
                max_tokens=rng.choice((3, 12, 40)),
                sampling=random_sampling(rng),
            )
        )
    alone = []
    for proto in protos:
        pair = Pair(model, rng, num_blocks=5, num_seqs=1, room=256)
        alone.append(pair.open(proto))
        pair.run_to_end()

    crowded = Pair(
        model, rng, num_blocks=rng.choice((5, 7, 30)), num_seqs=rng.choice((3, 8)), room=rng.choice((64, 150))
    )
    together = []
    for proto in protos:
        together.append(crowded.open(proto))
        for _ in range(rng.randrange(60)):
            crowded.tick()
        if rng.random() < 0.2:
            crowded.connect()
    crowded.run_to_end()
    assert together == alone

    for proto, whole in zip(protos, alone, strict=True):
        num_held = rng.randrange(len(whole.tokens) + 1)
        resume = generation_pb2.GenerateRequest()
        resume.CopyFrom(proto)
        resume.attempt = 1
        resume.token_ids += pack_token_ids(whole.tokens[:num_held])
        resume.resume.prompt_logprobs_delivered = True
        rest = crowded.open(resume)
        crowded.run_to_end()
        assert (rest.tokens, rest.finish) == (whole.tokens[num_held:], whole.finish)
        assert rest.logprobs == whole.logprobs[num_held:]


@pytest.mark.parametrize("num_prompt", [100, 128, 150])
def test_choices_that_copy_a_partial_block_choose_what_the_first_one_does(
    free_model: DeepseekModel, num_prompt: int
) -> None:
    """Greedy, so that all choices are alike; log-probabilities as near as float32 over other numbers of rows allows."""
    rng = random.Random(num_prompt)
    pair = Pair(free_model, rng, num_blocks=30, num_seqs=8, room=256, deterministic=False)
    prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
    choices = [
        pair.open(
            generation_pb2.GenerateRequest(
                request_id="r",
                token_ids=pack_token_ids(prompt),
                num_prompt_tokens=num_prompt,
                max_tokens=60,
                choice_index=i,
                num_choices=4,
                sampling=common_pb2.SamplingParams(temperature=0.0, logprobs=0, repetition_penalty=1.2),
            )
        )
        for i in range(4)
    ]
    pair.run_to_end()
    assert pair.num_copies == 3
    first = choices[0]
    assert len(first.tokens) == 60
    for other in choices[1:]:
        assert other.tokens == first.tokens
        assert [p for _, p, _ in other.logprobs] == pytest.approx([p for _, p, _ in first.logprobs], abs=1e-4)
