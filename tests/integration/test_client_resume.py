"""The client over a scripted TextService: gathering, errors, order, and streams that go on after a loss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import pytest

from rorqual.client import LLM, AsyncClient, SamplingParams
from rorqual.core.errors import (
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    UnavailableError,
)
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.options import SERVER_OPTIONS
from rorqual.rpc.status import abort_with
from rorqual.v1 import common_pb2, text_pb2, text_pb2_grpc

WORDS = ["Once", " upon", " a", " time", " there", " was", " a", " whale", "."]
DIGEST = bytes(range(32))


class ScriptedText(text_pb2_grpc.TextServiceServicer):
    """Answers every request with WORDS, one token a message; drops the connection where `drop_after` says."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.drop_after: list[int] = []  # tokens of each attempt before the stream is lost
        self.refuse: Exception | None = None
        self.live = 0
        self.most_live = 0
        self.cancelled = threading.Event()
        self.hang = False

    async def Complete(self, request: Any, context: Any) -> AsyncIterator[text_pb2.CompleteResponse]:
        async for events in self._answer(request, context):
            yield text_pb2.CompleteResponse(events=events)

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[text_pb2.ChatResponse]:
        async for events in self._answer(request, context):
            yield text_pb2.ChatResponse(events=events)

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[list[text_pb2.TextEvent]]:
        if self.refuse is not None:
            await abort_with(context, self.refuse)
        self.requests.append(text_pb2.TextOptions.FromString(request.options.SerializeToString()))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            async for events in self._events(request, context):
                yield events
        finally:
            self.live -= 1
            if not context.done() or context.cancelled():
                self.cancelled.set()

    async def _events(self, request: Any, context: Any) -> AsyncIterator[list[text_pb2.TextEvent]]:
        options = request.options
        drop_after = self.drop_after.pop(0) if self.drop_after else None
        held = {c.choice_index: len(unpack_token_ids(c.token_ids)) for c in options.resume.choices}
        accepted = text_pb2.Accepted(
            num_prompt_tokens=3, prompt_digest=DIGEST, seed=42, template_time_unix_s=7, model="scripted",
            num_cached_tokens=2, queue_time_us=5, prompt_token_ids=pack_token_ids([9, 8, 7]),
        )  # fmt: skip
        yield [text_pb2.TextEvent(accepted=accepted)]
        sent = 0
        limit = options.max_tokens or len(WORDS)
        for choice in range(options.num_choices or 1):
            for position in range(held.get(choice, 0), min(limit, len(WORDS))):
                if sent == drop_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
                while self.hang:
                    await asyncio.sleep(0.01)
                sent += 1
                ids = pack_token_ids([100 * choice + position])
                yield [text_pb2.TextEvent(choice_index=choice, token_ids=ids, content=WORDS[position])]
            reason = common_pb2.FINISH_REASON_LENGTH if limit < len(WORDS) else common_pb2.FINISH_REASON_STOP
            yield [
                text_pb2.TextEvent(
                    choice_index=choice, finished=text_pb2.ChoiceFinished(reason=reason, stop_token_id=1)
                )
            ]
        usage = text_pb2.Usage(num_prompt_tokens=3, num_cached_tokens=2, num_generated_tokens=limit, queue_time_us=5)
        yield [text_pb2.TextEvent(usage=usage)]

    async def Tokenize(self, request: Any, context: Any) -> text_pb2.TokenizeResponse:
        return text_pb2.TokenizeResponse(token_ids=pack_token_ids(list(request.text.encode())))

    async def Detokenize(self, request: Any, context: Any) -> text_pb2.DetokenizeResponse:
        return text_pb2.DetokenizeResponse(text=bytes(list(unpack_token_ids(request.token_ids))).decode())


class Server:
    """A grpc.aio server on a loop in a thread of its own, as it would be in another process."""

    def __init__(self, servicer: ScriptedText) -> None:

        self.servicer = servicer
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = None
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        text_pb2_grpc.add_TextServiceServicer_to_server(self.servicer, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    def close(self) -> None:

        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(ScriptedText())
    yield server
    server.close()


@pytest.fixture
def llm(server: Server) -> Iterator[LLM]:
    with LLM(url=f"grpc://127.0.0.1:{server.port}", max_concurrency=3) as llm:
        yield llm


WHOLE = "".join(WORDS)


def test_outputs_come_in_the_prompts_order(llm: LLM, server: Server) -> None:
    params = [SamplingParams(max_tokens=n) for n in (3, 1, 9, 2)]
    outputs = llm.generate(["a", [5, 6], "c", "d"], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["".join(WORDS[:n]) for n in (3, 1, 9, 2)]
    assert [o.outputs[0].token_ids for o in outputs] == [list(range(n)) for n in (3, 1, 9, 2)]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "stop", "length"]
    assert [o.prompt for o in outputs] == ["a", None, "c", "d"]
    assert outputs[0].prompt_token_ids == [9, 8, 7]
    assert outputs[0].usage.num_prompt_tokens == 3
    assert outputs[0].usage.num_cached_tokens == 2
    assert outputs[0].model == "scripted"
    assert outputs[2].outputs[0].stop_reason == 1


def test_concurrency_is_bounded(llm: LLM, server: Server) -> None:
    outputs = llm.generate([str(i) for i in range(20)], use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [WHOLE] * 20
    assert 1 < server.servicer.most_live <= 3


def test_a_single_prompt_and_a_single_chat_give_lists_of_one(llm: LLM) -> None:
    assert len(llm.generate("a", use_tqdm=False)) == 1
    assert len(llm.generate([1, 2, 3], use_tqdm=False)) == 1
    one = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    two = llm.chat([[{"role": "user", "content": "hi"}]] * 2, use_tqdm=False)
    assert [len(one), len(two)] == [1, 2]
    assert llm.generate([], use_tqdm=False) == []


def test_the_progress_bar_goes_to_stderr(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


@pytest.mark.parametrize("drops", [[0], [1], [4], [0, 0, 0], [2, 0, 3], [9]])
def test_a_lost_stream_goes_on_without_gap_or_repeat(llm: LLM, server: Server, drops: list[int]) -> None:
    server.servicer.drop_after = list(drops)
    (output,) = llm.generate("a", use_tqdm=False)
    assert output.outputs[0].text == WHOLE
    assert output.outputs[0].token_ids == list(range(len(WORDS)))
    attempts = server.servicer.requests
    assert [a.attempt for a in attempts] == list(range(len(attempts)))
    assert len({a.request_id for a in attempts}) == 1
    last = attempts[-1]
    if last.attempt:
        assert last.resume.prompt_digest == DIGEST
        assert last.resume.seed == last.sampling.seed == 42
        assert last.resume.template_time_unix_s == 7
        assert (last.resume.num_cached_tokens, last.resume.queue_time_us) == (2, 5)


def test_a_resume_of_several_choices_carries_each_history(llm: LLM, server: Server) -> None:
    server.servicer.drop_after = [len(WORDS) + 2]  # the first choice is done, the second has two tokens
    (output,) = llm.generate("a", SamplingParams(n=3), use_tqdm=False)
    assert [c.text for c in output.outputs] == [WHOLE] * 3
    assert [c.index for c in output.outputs] == [0, 1, 2]
    held = {c.choice_index: len(c.token_ids) // 4 for c in server.servicer.requests[1].resume.choices}
    assert held == {0: len(WORDS), 1: 2}


async def test_a_server_that_stays_away_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1", resume_timeout_s=0.3) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.complete("a")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PromptTooLongError("too long", field="prompt"), PromptTooLongError),
        (QueueFullError("full"), QueueFullError),
        (InvalidRequestError("bad"), InvalidRequestError),
    ],
)
def test_errors_keep_their_class(llm: LLM, server: Server, error: Exception, kind: type[Exception]) -> None:
    server.servicer.refuse = error
    with pytest.raises(kind, match=str(error)):
        llm.generate(["a", "b"], use_tqdm=False)


def test_streams_come_piece_by_piece_and_closing_one_cancels_it(llm: LLM, server: Server) -> None:
    assert list(llm.stream_generate("a")) == WORDS
    pieces = llm.stream_chat([{"role": "user", "content": "hi"}])
    assert next(pieces) == "Once"
    server.servicer.hang = True
    pieces.close()  # type: ignore[attr-defined]
    assert server.servicer.cancelled.wait(10)


def test_tokenize_and_back(llm: LLM) -> None:
    assert llm.decode(llm.encode("whale")) == "whale"


def test_a_closed_llm_says_so(server: Server) -> None:
    llm = LLM(url=f"grpc://127.0.0.1:{server.port}")
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("a")
    assert not [t for t in threading.enumerate() if t.name == "rorqual-client"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "127.0.0.1:50051", "grpc://", "grpc://host", "grpc://host:port"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="grpc://host:port"):
        LLM(url=url)


def test_a_running_server_takes_no_settings(server: Server) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(url=f"grpc://127.0.0.1:{server.port}", max_model_len=5)


MESSAGE_FAULTS: Sequence[tuple[Any, str]] = [
    ([{"content": "x"}], r"messages\[0\] must be a mapping with a role"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], r"messages\[1\]\.content must be text"),
    (["hello"], r"messages\[0\]"),
]


@pytest.mark.parametrize(("messages", "message"), MESSAGE_FAULTS)
async def test_wrong_messages_are_named(messages: Any, message: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError, match=message):
            await client.chat(messages)


PARAM_FAULTS: Sequence[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be 0 to 100, got -0.1"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p must be 1.17549e-38 to 1, got 0"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n must be 1 to 128, got 0"),
    ({"n": 129}, "n must"),
    ({"max_tokens": 0}, "max_tokens must be 1 to"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens .3. must not exceed max_tokens .2."),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty must be 0.01 to 100, got 0"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ["a"] * 17}, "at most 16"),
    ({"stop": ""}, "1 to 1024 bytes"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"seed": True}, "seed"),
]


@pytest.mark.parametrize(("values", "message"), PARAM_FAULTS)
def test_impossible_sampling_params_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**values)


def test_unset_params_stay_unset_on_the_wire() -> None:
    proto = SamplingParams().to_proto()
    assert proto == common_pb2.SamplingParams()
    proto = SamplingParams(temperature=0, top_k=-1, seed=0, logprobs=0, stop_token_ids=[7], min_tokens=2).to_proto()
    assert proto.HasField("temperature")
    assert proto.HasField("seed")
    assert proto.HasField("logprobs")
    assert (proto.top_k, list(proto.stop_token_ids), proto.min_tokens) == (0, [7], 2)
