"""Structured output over the four processes: the embedded model says what its grammar allows, whatever it would rather."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest

from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import common_pb2, text_pb2, text_pb2_grpc

ASK: list[Any] = [{"role": "user", "content": "Tell me about a whale."}]
WORD = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "big": {"type": "boolean"}},
        "required": ["name", "age", "big"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["blue", "grey", "white"]}, "minItems": 2, "maxItems": 3},
    "nested": {
        "type": "object",
        "properties": {"parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 2}},
        "required": ["parts"],
        "additionalProperties": False,
        "$defs": {
            "part": {
                "type": "object",
                "properties": {"id": {"type": "string", "pattern": "^[a-z]{2}[0-9]{2}$"}, "n": {"type": ["integer", "null"], "maximum": 9, "minimum": 0}},
                "required": ["id", "n"],
                "additionalProperties": False,
            }
        },
    },
    "union": {"anyOf": [{"const": "none"}, {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def check(name: str, value: Any) -> None:
    """`value` is what the schema allows."""
    match name:
        case "object":
            assert list(value) == ["name", "age", "big"]
            assert len(value["name"]) <= 12
            assert 0 <= value["age"] <= 99
            assert isinstance(value["big"], bool)
        case "list":
            assert 2 <= len(value) <= 3
            assert set(value) <= {"blue", "grey", "white"}
        case "nested":
            assert 1 <= len(value["parts"]) <= 2
            for part in value["parts"]:
                assert re.fullmatch("[a-z]{2}[0-9]{2}", part["id"])
                assert part["n"] is None or 0 <= part["n"] <= 9
        case "union":
            assert value == "none" or value in (0, 0.5, 1)


def form(name: str) -> Any:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name], "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_of_a_schema_streamed_and_not(client: openai.OpenAI, name: str, temperature: float) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "response_format": form(name), "max_tokens": 400}
    ask |= {"temperature": temperature, "seed": 3}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].finish_reason == "stop", whole.choices[0].message.content
    check(name, json.loads(whole.choices[0].message.content or ""))
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **ask)]
    assert chunks[-1].finish_reason == "stop"
    check(name, json.loads("".join(chunk.delta.content or "" for chunk in chunks)))


def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        response_format={"type": "json_object"},
        max_tokens=600,
        temperature=0,
        logit_bias={"95": 20},  # "}": the model would rather talk on
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3,5}-[0-9]{2}"}}, "[a-c]{3,5}-[0-9]{2}"),
        ({"guided_regex": "whales? (eat|sing)"}, "whales? (eat|sing)"),
        ({"structured_outputs": {"choice": ["blue whale", "blue", "grey"]}}, "blue whale|blue|grey"),
        ({"guided_choice": ["鲸", '"quoted"\n', "a\\b"]}, '鲸|"quoted"\n|a\\\\b'),
        ({"structured_outputs": {"grammar": 'start: "krill" (" and " FISH)?\nFISH: "squid" | "cod"'}}, "krill( and (squid|cod))?"),
        ({"guided_grammar": 'root ::= "sea" [0-9] [0-9]'}, "sea[0-9]{2}"),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 20}}}, "1[0-9]|20"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
    ],
)  # fmt: skip
def test_other_constraints_for_every_choice(client: openai.OpenAI, given: dict[str, Any], allowed: str) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, n=3, temperature=1.2, max_tokens=40, seed=5, extra_body=given
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert re.fullmatch(allowed, choice.message.content or ""), choice.message.content
        assert choice.finish_reason == "stop"
    text = client.completions.create(
        model="tiny", prompt="The whale", temperature=1.2, max_tokens=40, stream=True, extra_body=given
    )
    assert re.fullmatch(allowed, "".join(chunk.choices[0].text for chunk in text))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_where_one_token_is_possible(stack: Any, stream: bool) -> None:
    """They are those of the unconstrained distribution, finite, with the token itself among them."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "krill"}}}
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 5, "response_format": schema, "stream": stream}
    text = httpx.post(f"{stack.url}/v1/chat/completions", json={**body, "max_tokens": 20}, timeout=60).text
    assert not re.search(r"NaN|Infinity", text)
    answers = [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith(("data: {", "{"))
    ]
    choices = [choice for answer in answers for choice in answer["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).startswith(b'"krill"')
    for entry in entries:
        assert -9999.0 <= entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) >= 5
        assert all(-9999.0 <= top["logprob"] <= 0 for top in entry["top_logprobs"])
    if not stream:
        assert len(entries) == answers[0]["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", ["list", "union"])
def test_responses_and_messages(stack: Any, client: openai.OpenAI, name: str) -> None:
    text = {"format": {"type": "json_schema", "name": name, "schema": SCHEMAS[name], "strict": True}}
    answer = client.responses.create(model="tiny", input="A whale?", text=text, max_output_tokens=200)  # type: ignore[call-overload]
    check(name, json.loads(answer.output_text))
    assert answer.text.format.schema_ == SCHEMAS[name]
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60) as messages:
        message = messages.messages.create(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "A whale?"}],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMAS[name]}}},
        )
    check(name, json.loads("".join(block.text for block in message.content if block.type == "text")))


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"items": {"not": {}}}}}}, "text.format.schema.items"),
        ("messages", {"max_tokens": 4, "messages": ASK, "output_config": {"format": {"type": "json_schema", "schema": {"items": {"not": {}}}}}}, "output_config.format.schema.items"),
    ],
)  # fmt: skip
def test_a_bad_schema_elsewhere(stack: Any, path: str, given: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{stack.url}/v1/{path}", json=given, timeout=30)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(param)


def test_a_budget_cuts_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=4, extra_body={"guided_regex": "a{100}"}
    )
    assert answer.choices[0].finish_reason == "length"
    assert re.fullmatch("a+", answer.choices[0].message.content or "")


def test_constrained_and_free_side_by_side(equal_stack: Any) -> None:
    """A greedy free answer is the same with constrained sequences beside it."""
    free: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 24}
    with openai.OpenAI(base_url=f"{equal_stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        alone = client.chat.completions.create(**free).choices[0].message.content
        stream = client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, extra_body={"guided_regex": "[a-z ]{300}"}, max_tokens=200
        )
        next(stream)
        assert client.chat.completions.create(**free).choices[0].message.content == alone
        assert re.fullmatch("[a-z ]*", "".join(c.choices[0].delta.content or "" for c in stream if c.choices))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}}}},
            "response_format.json_schema.schema.properties.a.items",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "$ref": "#/$defs/q", "$defs": {"q": {"type": "string", "pattern": "("}}}}}},
            "response_format.json_schema.schema.$defs.q",
        ),
        ({"guided_json": {"anyOf": [{"type": "string"}, {"not": {}}]}}, "guided_json.anyOf[1]"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_bad_constraint_is_a_400_that_names_the_place(
    stack: Any, given: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"messages": ASK, "max_tokens": 4, "stream": stream, **given}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=30)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_cut_at_every_token_and_resumed(equal_stack: Any) -> None:
    """The grammar's state is rebuilt from the tokens that the caller holds."""
    with grpc.insecure_channel(equal_stack.text_address) as channel:
        service = text_pb2_grpc.TextServiceStub(channel)
        options = text_pb2.TextOptions(
            request_id="cut-0",
            sampling=common_pb2.SamplingParams(temperature=0),
            max_tokens=100,
            constraint=text_pb2.Constraint(json_schema=json.dumps(SCHEMAS["list"])),
        )
        request = text_pb2.CompleteRequest(options=options, text="The whale")
        events = [event for response in service.Complete(request, timeout=60) for event in response.events]
        accepted = next(event.accepted for event in events if event.HasField("accepted"))
        token_ids = [i for event in events for i in unpack_token_ids(event.token_ids)]
        text = "".join(event.content for event in events)
        check("list", json.loads(text))
        for cut in range(1, len(token_ids) + 1):
            resumed = text_pb2.CompleteRequest()
            resumed.CopyFrom(request)
            resumed.options.request_id = f"cut-{cut}"
            resumed.options.attempt = 1
            resume = resumed.options.resume
            resume.num_prompt_tokens, resume.prompt_digest = accepted.num_prompt_tokens, accepted.prompt_digest
            resume.seed, resume.template_time_unix_s = accepted.seed, accepted.template_time_unix_s
            resume.choices.add(choice_index=0, token_ids=pack_token_ids(token_ids[:cut]))
            rest = [event for response in service.Complete(resumed, timeout=60) for event in response.events]
            assert token_ids[:cut] + [i for event in rest for i in unpack_token_ids(event.token_ids)] == token_ids
            assert text.endswith("".join(event.content for event in rest))
            reasons = [event.finished.reason for event in rest if event.HasField("finished")]
            assert reasons == [common_pb2.FINISH_REASON_STOP]


@pytest.mark.parametrize("grammar", ['start: (("a"~100)~100)~100', 'start: ("a"~1000)~100'])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_is_the_callers_to_change(stack: Any, stream: bool, grammar: str) -> None:
    """It compiles, but what its first tokens allow costs more than may be spent on one."""
    options = {"grammar": grammar}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 5, "structured_outputs": options, "stream": stream}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "constraint_too_complex"
    after = httpx.post(f"{stack.url}/v1/completions", json={"prompt": "x", "max_tokens": 5}, timeout=60)
    assert after.status_code == 200
