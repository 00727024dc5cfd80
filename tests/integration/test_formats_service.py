"""Chat formats through the real tokenizer service, without a model: a scheduler that answers scripted tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest

from rorqual.client import AsyncClient
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.v1 import common_pb2, generation_pb2, text_pb2, text_pb2_grpc
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.base import Thinking
from tests.support.running_gateway import running_gateway, sse_events
from tests.support.scripted_scheduler import Script
from tests.support.text_service import EOS, Heard, Stack, failure, hear, serving, steps
from tests.support.vocabularies import TINY_FOLDER, tiny
from tests.unit.test_formats_calls import as_json, block

SERVED = ["deepseek-v2.5", "deepseek-r1-0528", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"]
CITY = {"city": "Paris 😀", "days": 2}


def serve(format_name: str, answer: str = "", *, size: int = 1) -> Any:
    """A service of `format_name` whose model says `answer`; the embedded vocabulary has the marks of all of these."""
    return serving(
        lambda request: steps([*tiny().encode(answer), EOS], size), model=TINY_FOLDER, chat_format=format_name
    )


def says(stack: Stack, answer: str, size: int = 1) -> None:
    stack.scheduler.script = lambda request: steps([*tiny().encode(answer), EOS], size)


def ask(content: str = "Weather?", *, tools: bool = True, **fields: Any) -> text_pb2.ChatRequest:
    options = {key: fields.pop(key) for key in list(fields) if key in text_pb2.TextOptions.DESCRIPTOR.fields_by_name}
    request = text_pb2.ChatRequest(
        options=text_pb2.TextOptions(**options), messages=[text_pb2.ChatMessage(role="user", content=content)], **fields
    )
    if tools:
        request.tools.add(name="get_weather", description="d", parameters_json='{"type": "object"}')
        request.tools.add(name="now")
    return request


def thinking(on: bool) -> str:
    return json.dumps({"thinking": on})


def mode(which: int) -> text_pb2.ToolChoice:
    return text_pb2.ToolChoice(mode=which)  # type: ignore[arg-type]


def prompt_text(request: generation_pb2.GenerateRequest) -> str:
    ids = unpack_token_ids(request.token_ids)[: request.num_prompt_tokens]
    return b"".join(tiny().raw_text.bytes_of(token_id) for token_id in ids).decode()


@pytest.mark.parametrize("format_name", SERVED)
async def test_calls_from_first_event_to_usage(format_name: str) -> None:
    answer = "Let me look." + block(format_name, [("get_weather", CITY), ("now", {})])
    async with serve(format_name, answer) as stack:
        heard = await hear(stack.stub.Chat(ask(request_id="r")))
        says(stack, answer, 100)
        at_once = await hear(stack.stub.Chat(ask(request_id="r", sampling=seeded(heard))))
    assert heard.content == {0: "Let me look."}
    calls = heard.calls[0]
    assert [(c.name, json.loads(c.arguments)) for c in calls.values()] == [("get_weather", CITY), ("now", {})]
    assert len({c.call_id for c in calls.values()}) == 2
    assert heard.finished[0].reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert heard.finished[0].stop_token_id == EOS
    assert heard.token_ids[0] == [*tiny().encode(answer), EOS]
    assert heard.usage.num_generated_tokens == len(heard.token_ids[0])
    assert heard.usage.num_reasoning_tokens == 0
    for other in (at_once,):
        assert (other.calls, other.content, other.finished) == (heard.calls, heard.content, heard.finished)


def seeded(heard: Heard) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(seed=heard.accepted.seed)


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
async def test_a_resume_on_another_replica_at_every_token(format_name: str) -> None:
    answer = "<think>Hm 😀</think>On it." + block(format_name, [("get_weather", {"s": "x\n😀", "n": [1]}), ("now", {})])
    ids = [*tiny().encode(answer), EOS]
    switch = thinking(True) if FORMATS[format_name].thinking is Thinking.SWITCH else ""
    async with serve(format_name) as stack, serve_beside(stack, format_name) as other:
        stack.scheduler.script = lambda request: steps(ids)
        whole = await hear(stack.stub.Chat(ask(request_id="r", chat_template_kwargs_json=switch)))
        assert [call.name for call in whole.calls[0].values()] == ["get_weather", "now"]
        assert whole.reasoning == {0: "Hm 😀"}
        assert 0 < whole.usage.num_reasoning_tokens < len(tiny().encode("<think>Hm 😀</think>"))
        for k in range(len(ids) + 1):
            await stack.scheduler.pause(after_steps=k)
            first = ask(request_id="r", sampling=seeded(whole), chat_template_kwargs_json=switch)
            call = stack.stub.Chat(first)
            heard = Heard()
            while len(heard.token_ids.get(0, [])) < k:
                heard.add((await call.read()).events)
            call.cancel()
            await stack.scheduler.go_on()
            request = ask(request_id="r", attempt=1, chat_template_kwargs_json=switch)
            resume = request.options.resume
            resume.num_prompt_tokens = whole.accepted.num_prompt_tokens
            resume.prompt_digest = whole.accepted.prompt_digest
            resume.seed = whole.accepted.seed
            resume.template_time_unix_s = whole.accepted.template_time_unix_s
            if k:
                resume.choices.add(choice_index=0, token_ids=pack(heard.token_ids[0]))
            heard.finished.clear()
            await hear(other.Chat(request), heard)
            assert (heard.calls, heard.content, heard.reasoning) == (whole.calls, whole.content, whole.reasoning), k
            assert (heard.token_ids, heard.finished) == (whole.token_ids, whole.finished)
            assert heard.usage.num_reasoning_tokens == whole.usage.num_reasoning_tokens


def pack(token_ids: list[int]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


@asynccontextmanager
async def serve_beside(stack: Stack, format_name: str) -> AsyncIterator[text_pb2_grpc.TextServiceStub]:
    """Another replica before the same scheduler."""
    from rorqual.core.config import TokenizerConfig
    from services.tokenizer.app import TokenizerApp
    from tests.support.text_service import wait_for_health

    config = TokenizerConfig(
        listen="127.0.0.1:0",
        scheduler=f"127.0.0.1:{stack.scheduler_port}",
        model=str(TINY_FOLDER),
        chat_format=format_name,
    )
    app = TokenizerApp(config)
    channel = open_channel(f"127.0.0.1:{await app.start()}")
    try:
        await wait_for_health(channel, serving=True)
        yield text_pb2_grpc.TextServiceStub(channel)
    finally:
        await channel.close()
        await app.stop(0)


@pytest.mark.parametrize("format_name", [name for name in SERVED if name != "deepseek-r1-0528"])  # which reasons first
async def test_a_call_that_is_demanded_is_begun_in_the_prompt(format_name: str) -> None:
    shape = FORMATS[format_name].shape
    assert shape is not None
    after_name = shape.after_name.replace("{index}", "0")
    made = block(format_name, [("get_weather", CITY)])
    async with serve(format_name) as stack:
        # By name: the model goes on with the arguments.
        begun = f"{shape.begin}get_weather{after_name}"
        says(stack, made.removeprefix(begun))
        named = await hear(stack.stub.Chat(ask(tool_choice=text_pb2.ToolChoice(function_name="get_weather"))))
        assert prompt_text(stack.scheduler.seen.opened[-1]).endswith(begun)
        # Any of several: it goes on with the name.
        says(stack, made.removeprefix(shape.begin))
        required = await hear(stack.stub.Chat(ask(tool_choice=mode(text_pb2.TOOL_CHOICE_MODE_REQUIRED))))
        assert prompt_text(stack.scheduler.seen.opened[-1]).endswith(shape.begin)
        # The only one there is.
        says(stack, made.removeprefix(begun))
        request = ask(tool_choice=mode(text_pb2.TOOL_CHOICE_MODE_REQUIRED))
        del request.tools[1:]
        only = await hear(stack.stub.Chat(request))
        # A model that ends at once has still been made to call.
        stack.scheduler.script = lambda request: steps([EOS])
        nothing = await hear(stack.stub.Chat(ask(tool_choice=text_pb2.ToolChoice(function_name="get_weather"))))
        # Nothing is demanded where tools are forbidden.
        says(stack, "No.")
        none = await hear(stack.stub.Chat(ask(tool_choice=mode(text_pb2.TOOL_CHOICE_MODE_NONE))))
        assert "get_weather" not in prompt_text(stack.scheduler.seen.opened[-1])
    for heard in (named, required, only):
        assert [(c.name, json.loads(c.arguments)) for c in heard.calls[0].values()] == [("get_weather", CITY)]
        assert heard.finished[0].reason == common_pb2.FINISH_REASON_TOOL_CALLS
        assert heard.content == {}
    assert [(c.name, c.arguments) for c in nothing.calls[0].values()] == [("get_weather", "")]
    assert (none.content, none.calls) == ({0: "No."}, {})
    assert none.finished[0].reason == common_pb2.FINISH_REASON_STOP


async def test_a_call_that_cannot_be_demanded_is_refused_by_name() -> None:
    async with serve("deepseek-v4") as stack:
        request = ask(tool_choice=mode(text_pb2.TOOL_CHOICE_MODE_REQUIRED), add_generation_prompt=False)
        error = await failure(stack.stub.Chat(request))
        assert (error.reason, error.field) == ("UNSUPPORTED_TOOL_CHOICE", "tool_choice")
    async with serve("deepseek-v2") as stack:
        error = await failure(stack.stub.Chat(ask()))
        assert (error.reason, error.field) == ("UNSUPPORTED_TOOLS", "tools")


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
async def test_calls_one_at_a_time(format_name: str) -> None:
    answer = "ok" + block(format_name, [("get_weather", CITY), ("now", {})])
    async with serve(format_name) as stack:
        going_on = [*tiny().encode(answer), *tiny().encode(" and") * 500]
        stack.scheduler.script = lambda request: steps(going_on)
        heard = await hear(stack.stub.Chat(ask(parallel_tool_calls=False)))
        await stack.scheduler.wait_for(lambda: not stack.scheduler.running)
        [(_, finished_at)] = stack.scheduler.seen.finished
    assert [call.name for call in heard.calls[0].values()] == ["get_weather"]
    assert json.loads(heard.calls[0][0].arguments) == CITY
    assert heard.finished[0].reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert heard.usage.num_generated_tokens == finished_at == len(heard.token_ids[0]) < len(tiny().encode(answer))


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
async def test_an_answer_that_ends_inside_a_call(format_name: str) -> None:
    answer = "ok" + block(format_name, [("get_weather", {"city": "Paris"})])
    ids = tiny().encode(answer)
    async with serve(format_name, answer) as stack:
        for max_tokens in range(1, len(ids)):
            heard = await hear(stack.stub.Chat(ask(max_tokens=max_tokens)))
            assert heard.finished[0].reason == common_pb2.FINISH_REASON_LENGTH
            for call in heard.calls.get(0, {}).values():
                assert '{"city": "Paris"}'.startswith(call.arguments)
                assert heard.content == {0: "ok"}
        # The caller's own stop token ends the text, not the model's turn; a stop string cuts the content alone.
        stop = common_pb2.SamplingParams(stop_token_ids=[ids[-2]])
        by_token = await hear(stack.stub.Chat(ask(sampling=stop)))
        by_string = await hear(stack.stub.Chat(ask(stop=["k"])))
        not_at_all = await hear(stack.stub.Chat(ask(stop=["Par"])))
    assert by_token.finished[0].reason == by_string.finished[0].reason == common_pb2.FINISH_REASON_STOP
    assert (by_string.content, by_string.calls) == ({0: "o"}, {})
    assert not_at_all.finished[0].reason != common_pb2.FINISH_REASON_STOP or not not_at_all.finished[0].stop_string
    assert json.loads(not_at_all.calls[0][0].arguments) == {"city": "Paris"}


async def test_log_probabilities_of_calls_are_one_a_token() -> None:
    answer = "<think>hm</think>ok" + block("deepseek-v4", [("get_weather", CITY)])
    async with serve("deepseek-v4", answer) as stack:
        for size in (1, 3, 100):
            says(stack, answer, size)
            heard = await hear(stack.stub.Chat(ask(sampling=common_pb2.SamplingParams(logprobs=0))))
            assert [entry.token_id for entry in heard.logprobs] == heard.token_ids[0]
    # Control tokens are named and have no bytes: those of the entries are the answer's text.
    shown = b"".join(entry.token_bytes for entry in heard.logprobs).decode()
    assert shown.startswith("hmok\n\n<tool_calls>\n")
    assert {entry.token for entry in heard.logprobs if not entry.token_bytes} == {
        "<think>", "</think>", "｜DSML｜", "<｜end▁of▁sentence｜>",
    }  # fmt: skip


async def test_the_thinking_switch() -> None:
    said = "Hm.</think>4"
    on = [{"chat_template_kwargs_json": thinking(True)}, {"reasoning_effort": "high"}]
    on.append({"chat_template_kwargs_json": '{"enable_thinking": true, "reasoning_effort": "low"}'})
    off: list[dict[str, Any]] = [{}, {"chat_template_kwargs_json": thinking(False)}, {"reasoning_effort": "none"}]
    for format_name in ("deepseek-v3.1", "deepseek-v3.2", "deepseek-v4"):
        async with serve(format_name) as stack:
            ends = set()
            for fields in on:
                says(stack, said)
                heard = await hear(stack.stub.Chat(ask("1+3?", tools=False, **fields)))
                assert (heard.reasoning, heard.content) == ({0: "Hm."}, {0: "4"})
                assert heard.usage.num_reasoning_tokens == len(tiny().encode("Hm."))
                ends.add(prompt_text(stack.scheduler.seen.opened[-1]))
            for fields in off:
                says(stack, "4")
                heard = await hear(stack.stub.Chat(ask("1+3?", tools=False, **fields)))
                assert (heard.reasoning, heard.content) == ({}, {0: "4"})
                assert heard.usage.num_reasoning_tokens == 0
                ends.add(prompt_text(stack.scheduler.seen.opened[-1]))
            prompt = "<｜begin▁of▁sentence｜><｜User｜>1+3?<｜Assistant｜>"
            assert ends == {f"{prompt}<think>", f"{prompt}</think>"}
            for contradiction in (
                {"chat_template_kwargs_json": thinking(False), "reasoning_effort": "high"},
                {"chat_template_kwargs_json": thinking(True), "reasoning_effort": "none"},
                {"chat_template_kwargs_json": '{"thinking": true, "enable_thinking": false}'},
                {"chat_template_kwargs_json": '{"thinking": "yes"}'},
                {"reasoning_effort": "enormous"},
            ):
                error = await failure(stack.stub.Chat(ask(tools=False, **contradiction)))
                assert error.reason == "INVALID_MESSAGES"
                assert error.field in ("chat_template_kwargs", "reasoning_effort")


async def test_formats_without_the_switch_say_so() -> None:
    for format_name, fields, field in (
        ("deepseek-v3", {"chat_template_kwargs_json": thinking(True)}, "chat_template_kwargs"),
        ("deepseek-r1", {"chat_template_kwargs_json": thinking(False)}, "chat_template_kwargs"),
        ("deepseek-r1", {"reasoning_effort": "none"}, "reasoning_effort"),
    ):
        async with serve(format_name) as stack:
            assert (await failure(stack.stub.Chat(ask(tools=False, **fields)))).field == field
            for harmless in ({"reasoning_effort": "low"}, {}):
                assert (await hear(stack.stub.Chat(ask(tools=False, **harmless)))).finished


GatewayScript = Callable[[generation_pb2.GenerateRequest], Script]


async def test_openais_client_calls_tools_through_gateway_and_tokenizer() -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "now"}},
    ]
    answer = "Let me look." + block("deepseek-v4", [("get_weather", CITY), ("now", {"zone": "UTC"})])
    question: Any = {"role": "user", "content": "Weather?"}
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(serve("deepseek-v4", answer))
        http = await exits.enter_async_context(running_gateway(f"127.0.0.1:{stack.port}"))
        client = await exits.enter_async_context(openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="x"))
        model = (await client.models.list()).data[0].id
        completion = await client.chat.completions.create(model=model, messages=[question], tools=tools)
        message = completion.choices[0].message
        assert completion.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me look."
        made: list[Any] = list(message.tool_calls or [])
        assert [(c.function.name, json.loads(c.function.arguments)) for c in made] == [
            ("get_weather", CITY),
            ("now", {"zone": "UTC"}),
        ]
        body = {"model": model, "messages": [question], "tools": tools, "stream": True}
        events = sse_events((await http.client.post("/v1/chat/completions", json=body)).text)
        deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]" and e["choices"]]
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        for index in (0, 1):
            of_call = [piece for piece in pieces if piece["index"] == index]
            assert sorted(of_call[0]) == ["function", "id", "index", "type"]
            assert all(sorted(piece) == ["function", "index"] for piece in of_call[1:])
            assert [("name" in piece["function"]) for piece in of_call] == [True] + [False] * (len(of_call) - 1)
            joined = "".join(piece["function"]["arguments"] for piece in of_call)
            assert joined == made[index].function.arguments
        # The second round: what the client stored, sent back.
        says(stack, "Sunny.")
        results: list[Any] = [{"role": "tool", "tool_call_id": c.id, "content": c.function.name} for c in made]
        again: Any = [question, message.model_dump(exclude_none=True), *reversed(results)]
        second = await client.chat.completions.create(model=model, messages=again, tools=tools)
        assert second.choices[0].message.content == "Sunny."
        prompt = prompt_text(stack.scheduler.seen.opened[-1])
        assert answer in prompt  # the calls are written again as the model wrote them
        assert "<tool_result>get_weather</tool_result>\n\n<tool_result>now</tool_result><｜Assistant｜>" in prompt
        # Demanded by name; and one at a time.
        shape = FORMATS["deepseek-v4"].shape
        assert shape is not None
        says(stack, answer.removeprefix(f"Let me look.{shape.begin}get_weather{shape.after_name}"))
        choice: Any = {"type": "function", "function": {"name": "get_weather"}}
        forced = await client.chat.completions.create(
            model=model, messages=[question], tools=tools, tool_choice=choice, parallel_tool_calls=False
        )
        [only] = forced.choices[0].message.tool_calls or []
        assert only.type == "function"
        assert json.loads(only.function.arguments) == CITY
        # Before its reasoning has ended nothing is begun.
        says(stack, f"Hm.</think>{answer.removeprefix('Let me look.')}")
        thought = await client.chat.completions.create(
            model=model, messages=[question], tools=tools, tool_choice="required", reasoning_effort="high"
        )
        assert thought.choices[0].message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert [call.id[:5] for call in thought.choices[0].message.tool_calls or []] == ["call_", "call_"]


async def test_the_python_client_calls_tools() -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    question = [{"role": "user", "content": "Weather?"}]
    shape = FORMATS["deepseek-v3.1"].shape
    assert shape is not None
    made = block("deepseek-v3.1", [("get_weather", CITY), ("get_weather", {})])
    async with serve("deepseek-v3.1", f"ok{made}") as stack, AsyncClient(f"127.0.0.1:{stack.port}") as client:
        [choice] = (await client.chat(question, tools=tools)).outputs
        assert (choice.text, choice.finish_reason) == ("ok", "tool_calls")
        assert [json.loads(call.arguments) for call in choice.tool_calls] == [CITY, {}]
        [choice] = (await client.chat(question, tools=tools, parallel_tool_calls=False)).outputs
        assert [json.loads(call.arguments) for call in choice.tool_calls] == [CITY]
        [choice] = (await client.chat(question, tools=tools, tool_choice="none")).outputs
        assert not choice.tool_calls
        says(stack, made.removeprefix(f"{shape.begin}get_weather{shape.after_name}"))
        named: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
        for demanded in ("required", named):
            [choice] = (await client.chat(question, tools=tools, tool_choice=demanded)).outputs
            assert choice.tool_calls[0].name == "get_weather"
            assert json.loads(choice.tool_calls[0].arguments) == CITY
        says(stack, "Hm.</think>4")
        [choice] = (await client.chat(question, reasoning_effort="low")).outputs
        assert (choice.reasoning, choice.text) == ("Hm.", "4")
        for wrong in ("any", {}, {"function": {}}):
            with pytest.raises(InvalidRequestError, match="tool_choice"):
                await client.chat(question, tools=tools, tool_choice=wrong)


async def test_interleaved_requests_never_exchange_what_they_hold_back() -> None:
    answers = [f"{n}😀" + block("deepseek-v4", [("get_weather", {"n": n, "s": f"𠮷{n}"})]) for n in range(4)]

    def script(request: generation_pb2.GenerateRequest) -> Script:
        number = int(prompt_text(request).split("@")[1])
        return steps([*tiny().encode(answers[number]), EOS])

    async with serving(script, model=TINY_FOLDER, chat_format="deepseek-v4") as stack:
        await stack.scheduler.pause()
        hearing = [asyncio.create_task(hear(stack.stub.Chat(ask(f"@{n}@")))) for n in range(4)]
        await stack.scheduler.wait_for(lambda: len(stack.scheduler.running) == 4)
        await stack.scheduler.go_on()
        for number, heard in enumerate(await asyncio.gather(*hearing)):
            assert heard.content == {0: f"{number}😀"}
            assert heard.calls[0][0].arguments == as_json({"n": number, "s": f"𠮷{number}"})


async def test_the_embedded_model_is_made_to_call(equal_stack: Any) -> None:
    """Four processes and a model that knows no tools: what is demanded is begun all the same."""
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "now"}},
    ]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    question: Any = {"role": "user", "content": "Weather?"}
    async with openai.AsyncOpenAI(base_url=f"{equal_stack.url}/v1", api_key="x") as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=[question], tools=tools, tool_choice=choice, max_tokens=12, seed=1
        )
        [call] = completion.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert completion.choices[0].finish_reason in ("length", "tool_calls")
        assert completion.usage is not None
        assert completion.usage.completion_tokens <= 12
        stream = await client.chat.completions.create(
            model="tiny", messages=[question], tools=tools, tool_choice=choice, max_tokens=12, seed=1, stream=True
        )
        arguments = ""
        async for chunk in stream:
            for delta in chunk.choices[0].delta.tool_calls or []:
                arguments += (delta.function.arguments or "") if delta.function else ""
        assert arguments == call.function.arguments


@pytest.mark.parametrize(
    ("format_name", "switch", "reasons"),
    [
        ("deepseek-v3", "", False),
        ("deepseek-r1", "", True),
        ("deepseek-r1-0528", "", True),
        ("deepseek-v3.1", thinking(True), True),
        ("deepseek-v3.1", thinking(False), False),
        ("deepseek-v4", thinking(True), True),
        ("deepseek-v4", thinking(False), False),
    ],
)
async def test_a_constraint_leaves_the_reasoning_free(
    monkeypatch: pytest.MonkeyPatch, format_name: str, switch: str, reasons: bool
) -> None:
    monkeypatch.setattr("services.tokenizer.model_watch._INTERVAL_S", 0.02)
    constraint = text_pb2.Constraint(regex="[0-9]+")
    named = text_pb2.ToolChoice(function_name="get_weather")
    forced = ask(tool_choice=named, chat_template_kwargs_json=switch)
    async with serve(format_name, "7") as stack:
        await hear(stack.stub.Chat(ask(tools=False, constraint=constraint, chat_template_kwargs_json=switch)))
        (request,) = stack.scheduler.seen.opened
        stack.scheduler.model.takes_grammars = False
        async with asyncio.timeout(20):
            while (model := stack.app._watch.model) is None or model.takes_grammars:  # until it has asked again
                await asyncio.sleep(0.01)
        error = await failure(stack.stub.Chat(ask(tools=False, constraint=constraint)))
        assert (error.reason, error.field) == ("UNSUPPORTED_CONSTRAINT", "constraint")
        if reasons and format_name != "deepseek-r1-0528":
            error = await failure(stack.stub.Chat(forced))
            assert (error.reason, error.field) == ("UNSUPPORTED_TOOL_CHOICE", "tool_choice")
        else:
            await hear(stack.stub.Chat(forced))
            unconstrained = stack.scheduler.seen.opened[-1]
            assert not unconstrained.sampling.HasField("grammar")
            assert "get_weather" in prompt_text(unconstrained)[-60:]
        forced.tools[0].strict = True
        error = await failure(stack.stub.Chat(forced))
        assert (error.reason, error.field) == ("UNSUPPORTED_CONSTRAINT", "tools")
    grammar = request.sampling.grammar
    assert "[0-9]+" in grammar.text
    assert grammar.HasField("after_token_id") == reasons
    if reasons:
        assert grammar.after_token_id == tiny().encode("</think>")[0]


@pytest.mark.parametrize("format_name", SERVED)
async def test_what_a_grammar_of_calls_holds_for(format_name: str) -> None:
    """Demanded: from the call's beginning, in the prompt or after the reasoning. Strict: from the token that opens one."""
    shape = FORMATS[format_name].shape
    assert shape is not None
    async with serve(format_name, "x") as stack:
        await hear(stack.stub.Chat(ask(tool_choice=mode(text_pb2.TOOL_CHOICE_MODE_REQUIRED))))
        strict = ask()
        strict.tools[0].strict = True
        await hear(stack.stub.Chat(strict))
        await hear(stack.stub.Chat(ask(parallel_tool_calls=False)))
        demanded, may_call, plain = (request.sampling for request in stack.scheduler.seen.opened)
    reasons = format_name == "deepseek-r1-0528"
    assert "get_weather" in demanded.grammar.text
    assert demanded.grammar.HasField("after_token_id") == may_call.grammar.HasField("after_token_id") == reasons
    assert not demanded.grammar.HasField("opening_token_id")
    assert may_call.grammar.opening_token_id in tiny().encode(shape.opening[0])
    assert not plain.HasField("grammar")
