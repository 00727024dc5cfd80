"""The tokenizer service over real gRPC, with a scheduler that answers scripted tokens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rorqual.core.errors import QueueFullError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.rpc.prompt_echo import EchoJoiner
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import common_pb2, generation_pb2, text_pb2, text_pb2_grpc
from services.tokenizer.abandon import AbandonedError, abandoned_by, check_wanted
from services.tokenizer.decoder import decode_all
from services.tokenizer.engine import SHORT_ALONE_BYTES, SHORT_BYTES, TextEngine
from tests.support.scripted_scheduler import Script, ScriptedScheduler
from tests.support.text_service import (
    EOS,
    Heard,
    chat,
    complete,
    failure,
    hear,
    pieces,
    serving,
    steps,
    tiny_text,
    wait_for_health,
)
from tests.support.vocabularies import TINY_FOLDER, tiny, v4, v4_folder

V4_TEMPLATE = "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}<｜Assistant｜>{% endfor %}{% if thinking %}<think>{% endif %}"


async def test_a_chat_from_first_event_to_usage() -> None:
    ids = [*tiny().encode("Hello there, friend."), EOS]
    script = Script([ids[:2], ids[2:]], num_cached_tokens=3, queue_time_us=42)
    async with serving(lambda request: script) as stack:
        heard = await hear(stack.stub.Chat(chat(request_id="r1", max_tokens=50)))
        [sent] = stack.scheduler.seen.opened
    assert heard.kinds[0] == "accepted"
    assert heard.kinds[-2:] == ["finished", "usage"]
    assert heard.content == {0: "Hello there, friend."}
    assert heard.token_ids[0] == ids
    assert heard.finished[0].reason == common_pb2.FINISH_REASON_STOP
    assert heard.finished[0].stop_token_id == EOS
    assert heard.usage.num_prompt_tokens == heard.accepted.num_prompt_tokens == sent.num_prompt_tokens
    assert (heard.usage.num_generated_tokens, heard.usage.num_cached_tokens) == (len(ids), 3)
    assert (heard.usage.queue_time_us, heard.accepted.num_cached_tokens) == (42, 3)
    assert heard.accepted.model == "tiny"
    assert sent.request_id == "r1"
    assert (sent.max_tokens, sent.attempt, sent.choice_index, sent.HasField("resume")) == (50, 0, 0, False)
    assert sent.sampling.seed == heard.accepted.seed
    assert list(sent.sampling.stop_token_ids) == [EOS]
    defaults = json.loads((TINY_FOLDER / "generation_config.json").read_text())
    assert sent.sampling.temperature == pytest.approx(defaults["temperature"])


@pytest.mark.parametrize(
    ("script", "stop", "text", "reason", "counted"),
    [
        (["The quick br", "own", " fox", " jumps"], ["own fox"], "The quick br", "stop", 3),
        (["The quick br", "own", " fo", "al"], ["own fox"], "The quick brown foal", "length", 4),
        (["The quick br", "own"], ["own fox"], "The quick brown", "length", 2),
        (["The quick br", "own", " fox", " jumps"], ["jumps", "own fox"], "The quick br", "stop", 3),
        (["The quick br", "own", " fox", " jumps"], ["x"], "The quick brown fo", "stop", 3),
        (["写一首", "诗。", "好"], ["。好"], "写一首诗", "stop", 3),
    ],
)
async def test_stop_strings_across_tokens(
    script: list[str], stop: list[str], text: str, reason: str, counted: int
) -> None:
    for kind in ("chat", "complete"):
        await check_stop_strings(kind, script=script, stop=stop, text=text, reason=reason, counted=counted)


async def check_stop_strings(
    kind: str, *, script: list[str], stop: list[str], text: str, reason: str, counted: int
) -> None:
    async with serving(lambda request: pieces([*script, *([" and"] * 2000 if reason == "stop" else [])])) as stack:
        call = stack.stub.Chat(chat(stop=stop)) if kind == "chat" else stack.stub.Complete(complete(stop=stop))
        heard = await hear(call)
        num_tokens = sum(len(tiny().encode(piece)) for piece in script[:counted])
        if reason == "stop":
            await stack.scheduler.wait_for(lambda: not stack.scheduler.running)
            [(_, finished_at)] = stack.scheduler.seen.finished
            assert finished_at == heard.usage.num_generated_tokens
    assert heard.content[0] == text
    assert heard.kinds.count("finished") == 1
    if reason == "stop":
        assert heard.finished[0].reason == common_pb2.FINISH_REASON_STOP
        assert heard.finished[0].stop_string in stop
        assert heard.usage.num_generated_tokens <= num_tokens
    else:
        assert heard.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
        assert heard.usage.num_generated_tokens == num_tokens
    assert len(heard.token_ids[0]) == heard.usage.num_generated_tokens


@pytest.mark.parametrize("ends", ["by itself", "by its budget", "by the scheduler"])
async def test_a_stop_string_in_what_was_held_back_to_the_end(tmp_path: Path, ends: str) -> None:
    """Newlines may begin a block of calls, so the parser holds them; at the end they are content."""
    ids = [*tiny().encode("ok"), *tiny().encode("\n\n")]
    script = steps([*ids, EOS] if ends == "by itself" else ids)
    async with serving(lambda request: script, chat_format="deepseek-v4") as stack:
        request = chat(stop=["\n\n"], max_tokens=len(ids) if ends == "by its budget" else 50)
        request.tools.add(name="f")
        heard = await hear(stack.stub.Chat(request))
    assert heard.content == {0: "ok"}
    assert heard.finished[0].reason == common_pb2.FINISH_REASON_STOP
    assert heard.finished[0].stop_string == "\n\n"
    assert heard.usage.num_generated_tokens == len(heard.token_ids[0])


async def test_stop_strings_in_the_thought_only_where_asked() -> None:
    async with serving(lambda request: steps([*tiny().encode("<think>Hm 4, so</think>It is 4"), EOS])) as stack:
        heard = [await hear(stack.stub.Chat(chat(stop=["4"], stop_in_reasoning=asked))) for asked in (False, True)]
    assert [answer.finished[0].stop_string for answer in heard] == ["4", "4"]
    assert heard[0].content == {0: "It is "}
    assert (heard[1].reasoning, heard[1].content) == ({0: "Hm "}, {})


async def test_the_stop_string_stays_where_asked() -> None:
    async with serving(lambda request: pieces(["The quick br", "own", " fox", " jumps"])) as stack:
        heard = await hear(stack.stub.Chat(chat(stop=["own fox"], include_stop_str_in_output=True)))
    assert heard.content[0] == "The quick brown fox"


async def test_characters_over_tokens_with_the_published_vocabulary(tmp_path: Path) -> None:
    ids = [28927, 225, 175, 257, 109, 118, 415, 14868, EOS]
    template = tmp_path / "t.jinja"
    template.write_text(V4_TEMPLATE, encoding="utf-8")
    async with serving(lambda request: steps(ids), model=v4_folder(), chat_template=str(template)) as stack:
        logprobs = common_pb2.SamplingParams(logprobs=1)
        for script in [steps(ids, size) for size in (1, 2, 7, 100)]:
            stack.scheduler.script = lambda request, script=script: script
            both = await asyncio.gather(
                hear(stack.stub.Chat(chat())), hear(stack.stub.Complete(complete(sampling=logprobs)))
            )
            cut = await hear(stack.stub.Chat(chat(max_tokens=5)))
            for heard in both:
                assert heard.content[0] == "😀𠮷ぱ乐"
                assert all("\ufffd" not in delta for delta in heard.deltas)
                assert heard.token_ids[0] == ids
            assert b"".join(entry.token_bytes for entry in both[1].logprobs).decode() == "😀𠮷ぱ乐"
            assert [entry.token_id for entry in both[1].logprobs] == ids
            assert both[1].logprobs[0].top[0].token_id == 28927
            assert cut.content[0] == decode_all(v4().plain_text, ids[:5]) == "😀\ufffd"
            assert cut.finished[0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_reasoning_that_the_prompt_or_the_model_opens(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(V4_TEMPLATE, encoding="utf-8")
    said = {"open": "<think>\nAdd them.\n</think>\n\n4", "opened": "Add them.</think>4", "none": "4"}
    answer = "open"

    def script(request: generation_pb2.GenerateRequest) -> Script:
        return steps([*v4().encode(said[answer]), EOS])

    async with serving(script, model=v4_folder(), chat_template=str(template)) as stack:
        opened_by_model = await hear(stack.stub.Chat(chat()))
        answer = "opened"
        request = chat("what is <think>?")
        request.chat_template_kwargs_json = '{"thinking": true}'
        opened_by_prompt = await hear(stack.stub.Chat(request))
        answer = "none"
        without = await hear(stack.stub.Chat(chat("what is <think>?")))
    for heard in (opened_by_model, opened_by_prompt):
        assert heard.reasoning[0] == "Add them."
        assert heard.content[0] == "4"
        assert heard.usage.num_reasoning_tokens > 0
    assert (without.reasoning, without.content, without.usage.num_reasoning_tokens) == ({}, {0: "4"}, 0)


async def test_n_choices_share_the_request_and_count_the_prompt_once() -> None:
    def script(request: generation_pb2.GenerateRequest) -> Script:
        return steps([*tiny().encode("abc" * (request.choice_index + 1)), EOS])

    async with serving(script) as stack:
        heard = await hear(stack.stub.Chat(chat(num_choices=3, request_id="r")))
        opened = stack.scheduler.seen.opened
    assert heard.content == {0: "abc", 1: "abcabc", 2: "abcabcabc"}
    assert {(o.request_id, o.choice_index, o.num_choices) for o in opened} == {("r", n, 3) for n in range(3)}
    assert len({o.sampling.seed for o in opened}) == 1
    assert heard.usage.num_prompt_tokens == opened[0].num_prompt_tokens
    assert heard.usage.num_generated_tokens == sum(len(ids) for ids in heard.token_ids.values())
    assert heard.kinds.count("usage") == heard.kinds.count("accepted") == 1


async def test_echo_and_prompt_logprobs() -> None:
    async with serving(lambda request: steps(tiny().encode(" a time there was"))) as stack:
        plain = await hear(stack.stub.Complete(complete(echo=True, max_tokens=2)))
        sampling = common_pb2.SamplingParams(logprobs=1, prompt_logprobs=1)
        scored = await hear(stack.stub.Complete(complete(echo=True, max_tokens=0, sampling=sampling)))
        nothing = await hear(stack.stub.Complete(complete(echo=True, max_tokens=0)))
        num_opened = len(stack.scheduler.seen.opened)
        await stack.scheduler.wait_for(lambda: not stack.scheduler.running)
    prompt_ids = tiny().encode_prompt("Once upon")
    assert plain.kinds[:2] == ["accepted", "echo"]
    assert plain.echo[0].text == "Once upon"
    assert list(unpack_token_ids(plain.echo[0].token_ids)) == prompt_ids
    assert plain.usage.num_generated_tokens == 2
    assert [entry.token_id for entry in scored.echo[0].logprobs] == prompt_ids
    assert [entry.HasField("logprob") for entry in scored.echo[0].logprobs] == [False] + [True] * (len(prompt_ids) - 1)
    assert scored.usage.num_generated_tokens == 0
    assert scored.content == {}
    assert scored.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
    assert nothing.echo[0].text == "Once upon"
    assert num_opened == 2  # nothing was asked of the scheduler for the last


async def test_a_long_echo_comes_in_several_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 132,000 tokens with 20 alternatives each is longer than a message may be."""
    sampling = common_pb2.SamplingParams(prompt_logprobs=1)
    request = complete(echo=True, max_tokens=2, sampling=sampling)
    request.text = "Once upon a time there was a whale that sang."
    async with serving(lambda request: steps(tiny().encode(" a time there was"))) as stack:
        whole = await hear(stack.stub.Complete(request))
        monkeypatch.setattr("services.tokenizer.run.ECHO_SLICE_TOKENS", 3)
        sliced = await hear(stack.stub.Complete(request))
    joiner = EchoJoiner()
    assert len(whole.echo) == 1
    assert len(sliced.echo) == -(-len(tiny().encode_prompt(request.text)) // 3) > 3
    assert [joiner.join(0, echo) for echo in sliced.echo] == [*[False] * (len(sliced.echo) - 1), True]
    assert sliced.echo[-1] == whole.echo[0]
    assert (sliced.content, sliced.finished) == (whole.content, whole.finished)
    first_text = sliced.kinds.index("content")
    assert "echo" not in sliced.kinds[first_text:]


@pytest.mark.parametrize("where", ["generated", "prompt"])
async def test_log_probabilities_that_cannot_be_read_fail_their_stream_alone(where: str) -> None:
    def script(request: generation_pb2.GenerateRequest) -> Script:
        torn = common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=b"abc", top_logprobs=[-1.0])
        bad = request.sampling.HasField("logprobs") or request.sampling.HasField("prompt_logprobs")
        return Script([[n] for n in tiny().encode("a b c d")], logprob=(lambda _: torn) if bad else None)

    async with serving(script) as stack:
        await stack.scheduler.pause()
        sampling = common_pb2.SamplingParams(**{"logprobs" if where == "generated" else "prompt_logprobs": 1})
        other = asyncio.create_task(hear(stack.stub.Complete(complete())))
        await stack.scheduler.wait_for(lambda: len(stack.scheduler.running) == 1)
        torn = asyncio.create_task(hear(stack.stub.Complete(complete(sampling=sampling))))
        await stack.scheduler.wait_for(lambda: len(stack.scheduler.running) == 2)
        await stack.scheduler.go_on()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await torn
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert (await other).content == {0: "a b c d"}


async def test_logprobs_are_finite_and_one_a_token() -> None:
    def script(request: generation_pb2.GenerateRequest) -> Script:
        return Script(
            [tiny().encode("abc"), [EOS]],
            logprob=lambda token_id: common_pb2.TokenLogprobs(
                token_id=token_id, logprob=-1.0, top_token_ids=pack_token_ids([5]), top_logprobs=[float("-inf")]
            ),
        )

    async with serving(script) as stack:
        heard = await hear(stack.stub.Chat(chat(sampling=common_pb2.SamplingParams(logprobs=1))))
    assert len(heard.logprobs) == heard.usage.num_generated_tokens
    assert {entry.top[0].logprob for entry in heard.logprobs} == {-9999.0}
    assert heard.logprobs[-1].token == "<｜end▁of▁sentence｜>"
    assert heard.logprobs[-1].token_bytes == b""


async def test_a_lost_scheduler_is_not_noticed() -> None:
    ids = [*tiny().encode("The quick brown fox jumps over the lazy dog, again and again."), EOS]
    async with serving(lambda request: steps(ids)) as stack:
        scheduler = stack.scheduler
        await scheduler.pause()
        calls = [
            stack.stub.Chat(chat(request_id=f"r{n}", stop=["never said"], num_choices=2, time_left_us=60_000_000))
            for n in range(3)
        ]
        hearing = [asyncio.create_task(hear(call)) for call in calls]
        await scheduler.wait_for(lambda: len(scheduler.running) == 6)  # all of them share the steps that follow
        await scheduler.pause(after_steps=5)
        await scheduler.wait_for(lambda: all(r.sent >= 2 for r in scheduler.running.values()))
        first = list(scheduler.seen.opened)
        await scheduler.lose()  # the stream breaks, the server stays
        await scheduler.wait_for(lambda: len(scheduler.seen.opened) == 12)
        await scheduler.stop()  # a crash
        await wait_for_health(stack.channel, serving=False)
        num_opened = len(scheduler.seen.opened)
        await scheduler.pause(after_steps=3)
        await scheduler.start()
        await scheduler.wait_for(lambda: len(scheduler.seen.opened) >= num_opened + 6)
        await scheduler.go_on()
        heards = await asyncio.gather(*hearing)
        opened = scheduler.seen.opened
        await wait_for_health(stack.channel, serving=True)
    for heard in heards:
        assert heard.content == {0: tiny_text(ids), 1: tiny_text(ids)}
        assert heard.token_ids == {0: ids, 1: ids}
        assert heard.kinds.count("accepted") == heard.kinds.count("usage") == 1
        assert heard.usage.num_generated_tokens == 2 * len(ids)
    for before in first:
        again = [o for o in opened if (o.request_id, o.choice_index) == (before.request_id, before.choice_index)]
        assert [o.attempt for o in again] == list(range(len(again)))
        assert len(again) >= 3
        assert all(o.HasField("resume") for o in again[1:])
        assert all(o.sampling == before.sampling for o in again)
        assert all(o.token_ids.startswith(before.token_ids) for o in again)
        assert all(o.time_left_us < before.time_left_us for o in again[1:])
        assert len(again[-1].token_ids) >= len(again[1].token_ids) > len(before.token_ids)


async def test_a_scheduler_that_stays_away_is_said_to() -> None:
    async with serving(lambda request: steps(tiny().encode("abc") * 50), peer_timeout_s=1.5) as stack:
        await stack.scheduler.pause(after_steps=2)
        call = stack.stub.Chat(chat())
        heard = Heard()
        response = await call.read()
        heard.add(response.events)
        await stack.scheduler.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(call, heard)
        await wait_for_health(stack.channel, serving=False)
    error = from_rpc_error(caught.value)
    assert (caught.value.code(), error.reason) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_UNAVAILABLE")


async def test_a_silent_scheduler_counts_as_lost() -> None:
    async with serving(lambda request: steps([*tiny().encode("abc"), EOS]), peer_timeout_s=1.2) as stack:
        stack.scheduler.silent = True
        await stack.scheduler.pause()
        hearing = asyncio.create_task(hear(stack.stub.Chat(chat())))
        await stack.scheduler.wait_for(lambda: len(stack.scheduler.seen.opened) == 2)
        stack.scheduler.silent = False
        await stack.scheduler.go_on()
        assert (await hearing).content[0] == "abc"


@pytest.mark.parametrize("stop", [(), ("fox j", "no such")])
async def test_a_resume_at_every_token_joins_without_a_seam(stop: tuple[str, ...]) -> None:
    ids = [*tiny().encode("<think>hm 𠮷</think> The quick 𠮷 brown fox jumps."), EOS]
    async with serving(lambda request: steps(ids)) as stack:
        whole = await hear(stack.stub.Chat(chat(stop=stop, request_id="r")))
        num_tokens = len(whole.token_ids[0])
        for k in range(num_tokens + 1):
            # What a caller holds that lost its stream after k tokens.
            await stack.scheduler.pause(after_steps=k)
            call = stack.stub.Chat(chat(stop=stop, sampling=common_pb2.SamplingParams(seed=whole.accepted.seed)))
            heard = Heard()
            while len(heard.token_ids.get(0, [])) < k:
                heard.add((await call.read()).events)
            call.cancel()
            await stack.scheduler.go_on()
            request = chat(stop=stop, request_id="r", attempt=1)
            resume = request.options.resume
            resume.num_prompt_tokens = whole.accepted.num_prompt_tokens
            resume.prompt_digest = whole.accepted.prompt_digest
            resume.seed = whole.accepted.seed
            resume.template_time_unix_s = whole.accepted.template_time_unix_s
            if k:
                resume.choices.add(choice_index=0, token_ids=pack_token_ids(heard.token_ids[0]))
            num_opened = len(stack.scheduler.seen.opened)
            heard.finished.clear()
            await hear(stack.stub.Chat(request), heard)
            if k == num_tokens:
                assert len(stack.scheduler.seen.opened) == num_opened  # answered, never continued
            else:
                assert stack.scheduler.seen.opened[-1].attempt == 1 << 16
                assert stack.scheduler.seen.opened[-1].sampling.seed == whole.accepted.seed
            assert (heard.content, heard.reasoning) == (whole.content, whole.reasoning), k
            assert heard.token_ids == whole.token_ids
            assert heard.finished == whole.finished
            assert heard.usage.num_generated_tokens == whole.usage.num_generated_tokens
            assert heard.usage.num_reasoning_tokens == whole.usage.num_reasoning_tokens


async def test_a_resume_of_another_prompt_is_refused() -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        first = await hear(stack.stub.Chat(chat("one")))
        request = chat("two")
        request.options.resume.num_prompt_tokens = first.accepted.num_prompt_tokens
        request.options.resume.prompt_digest = first.accepted.prompt_digest
        error = await failure(stack.stub.Chat(request))
        bad = chat("one")
        bad.options.resume.CopyFrom(request.options.resume)
        bad.options.resume.choices.add(choice_index=1)
        assert (await failure(stack.stub.Chat(bad))).reason == "INVALID_RESUME"
    assert error.reason == "PROMPT_DIGEST_MISMATCH"


async def test_refusals_name_the_field() -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        stub = stack.stub
        for call, reason, where in (
            (stub.Chat(text_pb2.ChatRequest()), "INVALID_MESSAGES", "messages"),
            (stub.Chat(chat(sampling=common_pb2.SamplingParams(top_p=2.0))), "INVALID_SAMPLING", "sampling.top_p"),
            (stub.Chat(chat(stop=[""])), "INVALID_STOP", "stop[0]"),
            (stub.Chat(chat(attempt=65_536)), "INVALID_ARGUMENT", "attempt"),
            (stub.Chat(chat(time_left_us=2**64 - 1)), "INVALID_ARGUMENT", "time_left_us"),
            (stub.Chat(chat(cache_salt="s" * 5000)), "INVALID_ARGUMENT", "cache_salt"),
            (stub.Chat(chat(model="m" * 5000)), "INVALID_ARGUMENT", "model"),
            (stub.Chat(chat(model="other")), "MODEL_NOT_FOUND", "model"),
            (stub.Chat(chat("word " * 5000)), "PROMPT_TOO_LONG", "messages"),
            (
                stub.Complete(text_pb2.CompleteRequest(token_ids=pack_token_ids([8192]))),
                "TOKEN_OUT_OF_RANGE",
                "prompt",
            ),
            (stub.Complete(text_pb2.CompleteRequest(token_ids=b"")), "EMPTY_PROMPT", "prompt"),
            (stub.Complete(text_pb2.CompleteRequest()), "EMPTY_PROMPT", "prompt"),
            (stub.Complete(text_pb2.CompleteRequest(echo=True)), "EMPTY_PROMPT", "prompt"),
            (stub.Chat(chat(cache_salt="")), "INVALID_SAMPLING", "cache_salt"),
            (stub.Complete(text_pb2.CompleteRequest(text="word " * 5000)), "PROMPT_TOO_LONG", "prompt"),
        ):
            error = await failure(call)
            assert (error.reason, error.field) == (reason, where)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(text_pb2.TokenizeRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not stack.scheduler.seen.opened
        assert {"num_prompt_tokens", "max_model_len"} <= set((await failure(stub.Chat(chat("word " * 5000)))).metadata)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object) -> None:
        raise AssertionError("it was encoded")

    for name in ("encode", "encode_prompt", "encode_segments"):
        monkeypatch.setattr(f"services.tokenizer.vocabulary.Vocabulary.{name}", encode)
    longest = tiny().longest_token_chars
    assert longest is not None
    text = " " * (4096 * longest + 1)
    async with serving(lambda request: steps([EOS])) as stack:
        for call, where in (
            (stack.stub.Chat(chat(text)), "messages"),
            (stack.stub.Complete(text_pb2.CompleteRequest(text=text)), "prompt"),
        ):
            error = await failure(call)
            assert (error.reason, error.field) == ("PROMPT_TOO_LONG", where)
            assert "num_chars" in error.metadata


async def test_a_chat_with_tools_is_refused_where_no_calls_can_be_read(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}", encoding="utf-8")
    request = chat()
    request.tools.add(name="f", parameters_json="{}")
    async with serving(lambda request: steps([EOS]), chat_template=str(template)) as stack:
        error = await failure(stack.stub.Chat(request))
        assert (error.reason, error.field) == ("UNSUPPORTED_TOOLS", "tools")
        assert not stack.scheduler.seen.opened
        assert (await stack.stub.RenderChat(text_pb2.RenderChatRequest(chat=request))).text
        request.tool_choice.mode = text_pb2.TOOL_CHOICE_MODE_NONE
        assert (await hear(stack.stub.Chat(request))).finished


async def test_an_error_of_the_scheduler_reaches_the_caller() -> None:
    async with serving(
        lambda request: Script([], error=QueueFullError("the queue is full", metadata={"len": "9"}))
    ) as stack:
        error = await failure(stack.stub.Chat(chat(num_choices=2)))
    assert isinstance(error, QueueFullError)
    assert (error.message, error.metadata) == ("the queue is full", {"len": "9"})


async def test_a_disconnect_cancels_down_to_the_scheduler() -> None:
    async with serving(lambda request: steps(tiny().encode("abc") * 500)) as stack:
        scheduler = stack.scheduler
        await scheduler.pause(after_steps=2)
        call = stack.stub.Chat(chat(request_id="gone", num_choices=2))
        await call.read()
        call.cancel()
        await scheduler.wait_for(lambda: scheduler.seen.cancelled == ["gone", "gone"])
        assert not scheduler.running
        other = open_channel(f"127.0.0.1:{stack.port}")
        call = text_pb2_grpc.TextServiceStub(other).Chat(chat(request_id="cut"))
        await scheduler.wait_for(lambda: bool(scheduler.running))
        await other.close()
        await scheduler.wait_for(lambda: "cut" in scheduler.seen.cancelled)


async def test_deadlines() -> None:
    async with serving(lambda request: steps(tiny().encode("abc") * 500)) as stack:
        await stack.scheduler.pause(after_steps=1)
        error = await failure(stack.stub.Chat(chat(time_left_us=300_000, request_id="late")))
        assert error.reason == "DEADLINE_EXCEEDED"
        [sent] = stack.scheduler.seen.opened
        assert 0 < sent.time_left_us <= 300_000
        await stack.scheduler.wait_for(lambda: stack.scheduler.seen.cancelled == ["late"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(stack.stub.Chat(chat(request_id="late too"), timeout=0.3))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.scheduler.wait_for(lambda: "late too" in stack.scheduler.seen.cancelled)
        assert 0 < stack.scheduler.seen.opened[-1].time_left_us <= 300_000


async def test_tokenize_detokenize_and_render() -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        stub = stack.stub
        tokenized = await stub.Tokenize(text_pb2.TokenizeRequest(text="Hello 诗", return_token_strings=True))
        plain = await stub.Tokenize(text_pb2.TokenizeRequest(text="Hello 诗", add_special_tokens=False))
        ids = list(unpack_token_ids(tokenized.token_ids))
        assert ids == [0, *unpack_token_ids(plain.token_ids)]
        assert tokenized.token_strings[0] == "<｜begin▁of▁sentence｜>"
        assert tokenized.max_model_len == 4096
        detokenize = text_pb2.DetokenizeRequest
        whole = await stub.Detokenize(detokenize(token_ids=tokenized.token_ids))
        assert whole.text == "<｜begin▁of▁sentence｜>Hello 诗"
        assert (
            await stub.Detokenize(detokenize(token_ids=tokenized.token_ids, skip_special_tokens=True))
        ).text == "Hello 诗"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Detokenize(detokenize(token_ids=pack_token_ids([8192])))
        assert from_rpc_error(caught.value).reason == "TOKEN_OUT_OF_RANGE"
        rendered = await stub.RenderChat(text_pb2.RenderChatRequest(chat=chat("<think>")))
        assert rendered.text == "<｜begin▁of▁sentence｜><｜User｜><think><｜Assistant｜>"
        as_chat = await stub.Tokenize(text_pb2.TokenizeRequest(chat=chat("<think>")))
        assert as_chat.token_ids == rendered.token_ids
        await hear(stub.Chat(chat("<think>")))
        assert stack.scheduler.seen.opened[-1].token_ids == rendered.token_ids
        [model] = (await stub.ListModels(text_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 4096, 8192)


async def test_health_follows_the_scheduler_and_its_executor() -> None:
    scheduler = ScriptedScheduler(lambda request: steps([EOS]))
    async with serving(scheduler.script, scheduler=scheduler) as stack:
        model, scheduler.model = scheduler.model, None
        await wait_for_health(stack.channel, serving=False)
        scheduler.model = model
        await wait_for_health(stack.channel, serving=True)


async def test_a_model_of_another_vocabulary_is_refused_with_both_figures() -> None:
    scheduler = ScriptedScheduler(lambda request: steps([EOS]))
    async with serving(scheduler.script, scheduler=scheduler) as stack:
        assert scheduler.model is not None
        scheduler.model.vocab_size = 4096
        await wait_for_health(stack.channel, serving=False)
        error = await failure(stack.stub.Chat(chat()))
    assert error.reason == "VOCABULARY_MISMATCH"
    assert error.metadata == {"tokenizer_vocab_size": "8192", "model_vocab_size": "4096"}


async def test_spans_of_a_request() -> None:
    exporter = InMemorySpanExporter()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(lambda request: steps([*tiny().encode("abc"), EOS]), exporter=exporter) as stack:
        await hear(stack.stub.Chat(chat(request_id="r", trace=common_pb2.TraceContext(traceparent=parent))))
        await hear(stack.stub.Complete(complete(), metadata=(("traceparent", parent),)))
        await failure(stack.stub.Chat(chat(stop=[""])))
        sent = stack.scheduler.seen.opened[0].trace.traceparent
    spans = {span.name: span for span in exporter.get_finished_spans()}
    roots = [s for s in exporter.get_finished_spans() if s.name in ("tokenizer.chat", "tokenizer.complete")]
    chat_span = next(s for s in roots if s.attributes and s.attributes["rorqual.request_id"] == "r")
    assert chat_span.context is not None
    assert chat_span.parent is not None
    assert f"{chat_span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert sent == f"00-0af7651916cd43dd8448eb211c80319c-{chat_span.context.span_id:016x}-01"
    assert {
        "tokenizer.render",
        "tokenizer.encode",
        "tokenizer.detokenize",
        "tokenizer.chat",
        "tokenizer.complete",
    } <= set(spans)
    assert spans["tokenizer.complete"].context is not None
    assert f"{spans['tokenizer.complete'].context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert chat_span.attributes is not None
    assert chat_span.attributes["gen_ai.usage.output_tokens"] == len(tiny().encode("abc")) + 1
    assert [s.status.description for s in roots].count("INVALID_STOP") == 1
    assert all("hello" not in str(span.attributes) for span in exporter.get_finished_spans())


async def test_counts_for_prometheus() -> None:
    async with serving(lambda request: steps([*tiny().encode("abcdef"), EOS])) as stack:
        heard = await hear(stack.stub.Chat(chat(num_choices=2)))
        await stack.scheduler.pause(after_steps=1)
        hearing = asyncio.create_task(hear(stack.stub.Chat(chat())))
        await stack.scheduler.wait_for(lambda: any(r.sent for r in stack.scheduler.running.values()))
        await stack.scheduler.lose()
        await stack.scheduler.go_on()
        await hearing
        value = stack.app.telemetry.registry.get_sample_value
        assert value("rorqual_tokenizer_prompt_tokens_total") == 2 * heard.usage.num_prompt_tokens
        assert value("rorqual_tokenizer_output_tokens_total") == 3 * len(heard.token_ids[0])
        assert value("rorqual_tokenizer_resumes_total") == 1
        assert value("rorqual_tokenizer_render_seconds_count") == 2
        assert value("rorqual_tokenizer_streams") == 0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Those that rendered and encoded a prompt, in turn."""
    found: list[threading.Thread] = []
    prepare = TextEngine._prepare

    def recorded(*args: Any) -> Any:
        found.append(threading.current_thread())
        return prepare(*args)

    monkeypatch.setattr(TextEngine, "_prepare", recorded)
    return found


async def test_where_prompts_are_encoded(threads: list[threading.Thread]) -> None:
    """On the event loop's own thread what is short, the more so while nobody else is served; off it the rest."""
    short, middle, long = (chat("a" * (size - 100)) for size in (SHORT_BYTES, SHORT_ALONE_BYTES, 2 * SHORT_ALONE_BYTES))
    with_template = chat("a")
    with_template.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    scheduler = ScriptedScheduler(lambda request: steps([EOS]), vocab_size=8192, max_model_len=100_000)
    async with serving(lambda request: steps([EOS]), scheduler=scheduler) as stack:
        for request in (middle, with_template, long):  # each alone
            assert (await hear(stack.stub.Chat(request))).finished
        await stack.scheduler.pause()
        calls = []
        for request in (middle, middle, short):
            calls.append(stack.stub.Chat(request))
            await stack.scheduler.wait_for(lambda: len(stack.scheduler.seen.opened) == 3 + len(calls))
    on_loop = [thread is threading.current_thread() for thread in threads]
    assert on_loop == [True, False, False, True, False, True]


async def test_prompts_that_come_together_do_not_hold_the_event_loop(
    threads: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tokenizer.engine.TURN_S", 0.0)  # the first takes longer
    async with serving(lambda request: steps([EOS])) as stack:
        call = stack.stub.Session()
        commands = [text_pb2.TextCommand(stream_id=n, chat=chat(f"number {n}")) for n in range(1, 6)]
        await call.write(text_pb2.TextServiceSessionRequest(commands=commands))
        await stack.scheduler.wait_for(lambda: len(stack.scheduler.seen.opened) == len(commands))
        assert (await hear(stack.stub.Chat(chat("later")))).finished
        call.cancel()
    on_loop = [thread is threading.current_thread() for thread in threads]
    assert on_loop == [True, False, False, False, False, True]


TOKENIZE = text_pb2.TokenizeRequest
DETOKENIZE = text_pb2.DetokenizeRequest


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", TOKENIZE(text=" " * 1_100_000), "prompt"),
        ("Tokenize", TOKENIZE(chat=chat("x" * 1_100_000)), "messages"),
        ("Tokenize", TOKENIZE(chat=chat("x" * 5_000_000)), "messages"),
        ("RenderChat", text_pb2.RenderChatRequest(chat=chat("x" * 5_000_000)), "messages"),
        ("Detokenize", DETOKENIZE(token_ids=bytes(4 * 300_000)), "token_ids"),
    ],
)
async def test_long_texts_without_an_answer_are_refused(method: str, request_: Any, field: str) -> None:
    """32 MB of blanks took the tokenizer 3 GB, and everybody's prompts 13 s."""
    async with serving(lambda request: steps([EOS])) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stack.stub, method)(request_)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == ("TEXT_TOO_LONG", field)
        assert error.metadata["limit"] in error.message
        assert len((await stack.stub.Tokenize(TOKENIZE(text=" " * 1_000_000))).token_ids) > 4


async def test_texts_wait_for_each_other_alone_and_end_with_their_callers() -> None:
    """While one is encoded, and others wait, prompts go on; who goes takes the wait or the work along."""
    async with serving(lambda request: steps(tiny().encode("ok"))) as stack:
        engine = stack.app._engine
        began, go_on, ran = threading.Event(), threading.Event(), []

        def held(name: str) -> Callable[[], None]:
            def work() -> None:
                ran.append(name)
                began.set()
                go_on.wait(20)
                check_wanted()
                ran.append(f"{name} ended")

            return work

        first = asyncio.create_task(engine.in_text_pool(held("first")))
        await asyncio.to_thread(began.wait, 20)
        waiting = asyncio.ensure_future(stack.stub.Tokenize(TOKENIZE(text="waits")))
        gone = [asyncio.create_task(engine.in_text_pool(held("never"))) for _ in range(3)]
        long = complete("whale " * 2000)  # too long for the event loop
        assert (await hear(stack.stub.Complete(long))).content == {0: "ok"}
        for task in (first, *gone):
            task.cancel()
        await asyncio.gather(first, *gone, return_exceptions=True)
        go_on.set()
        assert (await waiting).token_ids
        assert ran == ["first"]
        assert engine._num_texts == 0


async def test_a_long_text_ends_soon_once_nobody_waits() -> None:
    """It is encoded in slices, and asks between them."""
    vocabulary = v4()
    gone = threading.Event()
    with abandoned_by(gone):
        assert vocabulary.encode("whale " * 5_000)
        gone.set()
        with pytest.raises(AbandonedError):
            vocabulary.encode("song " * 5_000)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("Tokenize", TOKENIZE(text="x", model="m" * 2000), "model"),
        ("Detokenize", DETOKENIZE(model="m" * 2000), "model"),
        ("Tokenize", TOKENIZE(chat=chat("x", cache_salt="s" * 10_000)), "cache_salt"),
        ("RenderChat", text_pb2.RenderChatRequest(chat=chat("x", request_id="r" * 1_000_000)), "request_id"),
    ],
)
async def test_names_and_salts_have_the_bounds_of_http(method: str, request_: Any, field: str) -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stack.stub, method)(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field == field


@pytest.mark.parametrize("field", ["request_id", "cache_salt", "model", "traceparent", "tracestate"])
async def test_what_a_generation_carries_has_the_bounds_of_http(field: str) -> None:
    options: dict[str, Any] = {field: "s" * 10_000}
    if field.startswith("trace"):
        options = {"trace": common_pb2.TraceContext(**options)}
    async with serving(lambda request: steps([EOS])) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hear(stack.stub.Complete(complete("x", **options)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field.endswith(field)
        assert not stack.scheduler.seen.opened


@pytest.mark.parametrize("method", ["Tokenize", "Chat", "Session"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str) -> None:
    async with serving(lambda request: steps([EOS])) as stack:
        path, torn = f"/rorqual.v1.TextService/{method}", b"\xff\xff\xff\xff"

        async def send() -> None:
            if method == "Tokenize":
                await stack.channel.unary_unary(path)(torn)
            elif method == "Chat":
                await stack.channel.unary_stream(path)(torn).read()
            else:
                call = stack.channel.stream_stream(path)()
                await call.write(torn)
                while await call.read() is not grpc.aio.EOF:
                    pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"
