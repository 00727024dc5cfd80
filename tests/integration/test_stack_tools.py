"""Tools through four processes and a model that knows none: what it says is a call because nothing else is possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import anthropic
import grpc
import httpx
import jsonschema_rs
import openai
import pytest

from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.launch import Stack, make_plan
from rorqual.v1 import common_pb2, text_pb2, text_pb2_grpc
from tests.conftest import ServedModel

ASK: Any = [{"role": "user", "content": "How is the weather?"}]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 10},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["city", "days", "units"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ANSWER = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"], "additionalProperties": False}  # fmt: skip
ANSWER_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": True}}


@dataclass(frozen=True)
class Served:
    """A stack whose chats are written in one format."""

    format_name: str
    url: str
    text_address: str
    reasons: bool

    @property
    def extra(self) -> dict[str, Any]:
        """Thinking, cut short by the likeliest end of it: the model was never taught to think."""
        return {"chat_template_kwargs": {"thinking": True}} if self.reasons else {}


@pytest.fixture(scope="module", params=["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
def served(
    request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if request.param == "deepseek-v3":
        stack = request.getfixturevalue("stack")
        yield Served(request.param, stack.url, stack.text_address, reasons=False)
        return
    settings = {"model": served_model.path, **served_model.settings}
    settings |= {"port": 0, "served_model_name": "tiny", "chat_format": request.param}
    stack = Stack(make_plan(settings), log_dir=tmp_path_factory.mktemp("logs"))
    stack.start(timeout_s=120)
    yield Served(request.param, stack.url, stack.text_address, reasons=True)
    stack.stop()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


CLOSE_THINK = 7945  # </think> in the embedded vocabulary
ENDING = {"logit_bias": {str(CLOSE_THINK): 60}}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What they return. They run at once, in the same steps, which cost little more than those of one."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], arguments), arguments
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_demanded(client: openai.OpenAI, choice: Any) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": choice}
    ask |= {"max_tokens": 300, "temperature": 1.3, "seed": 7, "parallel_tool_calls": False}
    answer, chunks = together(
        lambda: client.chat.completions.create(**ask),
        lambda: list(client.chat.completions.create(stream=True, **ask)),
    )
    [whole] = answer.choices
    assert whole.finish_reason == "tool_calls", whole
    check(whole.message.tool_calls)
    assert len(whole.message.tool_calls or []) == 1
    assert not whole.message.content
    arguments, names, reasons = "", [], []
    for chunk in chunks:
        [piece] = chunk.choices
        reasons += [piece.finish_reason] if piece.finish_reason else []
        for delta in piece.delta.tool_calls or []:
            assert delta.index == 0
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
    assert reasons == ["tool_calls"]
    assert len(names) == 1
    assert jsonschema_rs.is_valid(SCHEMAS[str(names[0])], json.loads(arguments))


def test_after_the_reasoning(client: openai.OpenAI, served: Served) -> None:
    if not served.reasons:
        pytest.skip("the format has no reasoning")
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS}
    drawn = {"max_tokens": 600, "temperature": 0.8, "seed": 4, "parallel_tool_calls": False}
    drawn["extra_body"] = {**served.extra, **ENDING}
    required, named, chunks = together(
        lambda: client.chat.completions.create(**ask, **drawn, tool_choice="required"),
        lambda: client.chat.completions.create(**ask, **drawn, tool_choice=NAMED),
        lambda: list(
            client.chat.completions.create(
                **ask, tool_choice="required", max_tokens=8, temperature=0, stream=True, extra_body=served.extra
            )
        ),
    )
    for answer in (required, named):
        [whole] = answer.choices
        assert whole.finish_reason == "tool_calls", whole
        check(whole.message.tool_calls)
    # Before the reasoning ends nothing else may come, and its budget may end it.
    kinds = {key for chunk in chunks for key, value in chunk.choices[0].delta.model_dump().items() if value}
    assert kinds <= {"role", "reasoning_content", "reasoning"}


def test_an_answer_of_the_schema_or_a_call(client: openai.OpenAI, served: Served) -> None:
    def answer_of(seed: int) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, response_format=ANSWER_FORMAT, max_tokens=400, temperature=1.5,
            seed=seed, parallel_tool_calls=False, extra_body={"logit_bias": OPENING_BIAS[seed % 2]},
        )  # fmt: skip

    heard = set()
    for answer in together(*(partial(answer_of, seed) for seed in range(4))):
        [choice] = answer.choices
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            check(choice.message.tool_calls)
            assert not choice.message.content
        else:
            assert choice.finish_reason == "stop"
            assert jsonschema_rs.is_valid(ANSWER, json.loads(choice.message.content or ""))
        heard.add(choice.finish_reason)
    assert heard == {"stop", "tool_calls"}


# Towards an answer, and towards what opens a call in one of the formats: its token, or the empty line before it.
OPENING_BIAS = ({"7929": -100, "337": -100, "201": -100}, {"7929": 80, "337": 40})


def test_strict_tools_that_may_be_called(client: openai.OpenAI) -> None:
    """Text as the model likes it; or a call, of which every one keeps to its schema."""
    free = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=12, temperature=0, logit_bias={"7929": -100},
        extra_body={"min_tokens": 4},
    )  # fmt: skip
    assert free.choices[0].finish_reason in ("length", "stop")
    assert free.choices[0].message.content
    drawn = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=400, temperature=1.0, seed=2, parallel_tool_calls=False,
        logit_bias={"7929": 100, "7946": 100, "30": 40},  # what opens a call, as above, and "<" before it
    )  # fmt: skip
    check(drawn.choices[0].message.tool_calls)
    assert drawn.choices[0].finish_reason == "tool_calls"


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": n, "parameters": s, "strict": True} for n, s in SCHEMAS.items()]

    def answer_of(choice: Any) -> Any:
        return client.responses.create(
            model="tiny", input="Weather?", tools=tools, tool_choice=choice, max_output_tokens=400, temperature=0.9,
            parallel_tool_calls=False,
        )  # fmt: skip

    named = {"type": "function", "name": "now"}
    for answer in together(partial(answer_of, "required"), partial(answer_of, named)):
        [item] = answer.output
        assert item.type == "function_call"
        assert jsonschema_rs.is_valid(SCHEMAS[item.name], json.loads(item.arguments))
        assert answer.status == "completed"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_messages(served: Served, choice: Any) -> None:
    tools: Any = [{"name": name, "input_schema": schema, "strict": True} for name, schema in SCHEMAS.items()]
    choice = {**choice, "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=90) as client:
        ask: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": ASK, "tools": tools}

        def streamed() -> Any:
            with client.messages.stream(**ask, tool_choice=choice) as stream:
                return stream.get_final_message()

        message, final = together(lambda: client.messages.create(**ask, tool_choice=choice), streamed)
    assert message.stop_reason == "tool_use"
    for answer in (message, final):
        [block] = answer.content
        assert block.type == "tool_use"
        assert jsonschema_rs.is_valid(SCHEMAS[block.name], block.input)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": ASK}, "tools[0].function.parameters.properties.a"),
        ("responses", {"input": "x"}, "tools[0].parameters.properties.a"),
        ("messages", {"messages": ASK, "max_tokens": 4}, "tools[0].input_schema.properties.a"),
    ],
)
def test_a_bad_strict_schema_names_the_place(stack: Any, path: str, body: dict[str, Any], param: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool: dict[str, Any] = {
        "chat/completions": {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
        "responses": {"type": "function", "name": "f", "parameters": schema, "strict": True},
        "messages": {"name": "f", "input_schema": schema, "strict": True},
    }[path]
    response = httpx.post(f"{stack.url}/v1/{path}", json={**body, "tools": [tool]}, timeout=30)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ")
    if path != "messages":
        assert response.json()["error"]["param"] == param


def test_cut_at_every_token_and_resumed(served: Served) -> None:
    """The grammar's state, and the parser's, are rebuilt from the tokens that the caller holds."""
    with grpc.insecure_channel(served.text_address) as channel:
        service = text_pb2_grpc.TextServiceStub(channel)
        options = text_pb2.TextOptions(
            request_id="tools-0", sampling=common_pb2.SamplingParams(temperature=0.7, seed=1), max_tokens=300
        )
        request = text_pb2.ChatRequest(options=options, messages=[text_pb2.ChatMessage(role="user", content="x")])
        request.tools.add(name="now", parameters_json=json.dumps(SCHEMAS["now"]))
        request.tool_choice.mode = text_pb2.TOOL_CHOICE_MODE_REQUIRED
        request.parallel_tool_calls = False
        if served.reasons:
            request.chat_template_kwargs_json = json.dumps(served.extra["chat_template_kwargs"])
            request.options.sampling.logit_bias[CLOSE_THINK] = 60
        accepted, token_ids, told, finished = hear(service.Chat(request, timeout=60))
        assert finished == [common_pb2.FINISH_REASON_TOOL_CALLS]
        assert told.startswith("now")
        # Most of DSML, whose state is the richest. (At every token of every format they are cut in the unit tests.)
        for cut in range(1, len(token_ids) + 1, 3 if served.format_name == "deepseek-v4" else 6):
            resumed = text_pb2.ChatRequest()
            resumed.CopyFrom(request)
            resumed.options.request_id = f"tools-{cut}"
            resumed.options.attempt = 1
            resume = resumed.options.resume
            resume.num_prompt_tokens, resume.prompt_digest = accepted.num_prompt_tokens, accepted.prompt_digest
            resume.seed, resume.template_time_unix_s = accepted.seed, accepted.template_time_unix_s
            resume.choices.add(choice_index=0, token_ids=pack_token_ids(token_ids[:cut]))
            _, rest, more, finished = hear(service.Chat(resumed, timeout=60))
            whole = unpack_token_ids(pack_token_ids([*token_ids[:cut], *rest]))
            assert finished == [common_pb2.FINISH_REASON_TOOL_CALLS]
            assert told.endswith(more)
            if whole[cut:] == token_ids[cut:]:  # a seed gives equal tokens on one build, unless two logits tie
                continue
            arguments = told[: len(told) - len(more)] + more
            assert jsonschema_rs.is_valid(SCHEMAS["now"], json.loads(arguments.removeprefix("now")))


def hear(responses: Any) -> tuple[text_pb2.Accepted, list[int], str, list[int]]:
    """(accepted, tokens, names and arguments joined, reasons)"""
    events = [event for response in responses for event in response.events]
    accepted = next(event.accepted for event in events if event.HasField("accepted"))
    return (
        accepted,
        [i for event in events for i in unpack_token_ids(event.token_ids)],
        "".join(event.tool_call.name + event.tool_call.arguments_json_delta for event in events),
        [int(event.finished.reason) for event in events if event.HasField("finished")],
    )
