"""What agents send: tools that are no functions, images that tools gave, hints, lines for somebody's billing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from rorqual.v1 import common_pb2, text_pb2
from tests.integration.test_gateway_responses import named_events
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_tokenizer import EOS, Script, ScriptedTokenizer, event, finish, say, scripted_tokenizer

IGNORED = "x-rorqual-ignored-fields"
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {}}
USER: dict[str, Any] = {"role": "user", "content": "x"}
CALL: dict[str, Any] = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "a", "output": "1"}


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address) as http:
        yield http


def chat_of(tokenizer: ScriptedTokenizer) -> text_pb2.ChatRequest:
    request = tokenizer.requests[-1]
    assert isinstance(request, text_pb2.ChatRequest)
    return request


def ignored(response: httpx.Response) -> list[str]:
    """The ignored fields of an answer, which is one."""
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get(IGNORED, "").split(", ") if name]


def spoken(request: text_pb2.ChatRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content or message.reasoning_content) for message in request.messages]


def calls(*named: tuple[str, str], reason: Any = common_pb2.FINISH_REASON_TOOL_CALLS) -> Script:
    """A model that calls tools, each by its name and arguments, which come in two pieces."""
    steps = []
    for index, (name, arguments) in enumerate(named):
        half = len(arguments) // 2
        head = text_pb2.ToolCallDelta(tool_call_idx=index, id=f"call_{index}", name=name)
        steps.append([event(0, [10 + index], tool_call=head)])
        for piece in (arguments[:half], arguments[half:]):
            delta = text_pb2.ToolCallDelta(tool_call_idx=index, arguments_json_delta=piece)
            steps.append([event(0, [20 + index], tool_call=delta)])
    return Script([*steps, [finish(0, [EOS], reason)]])


# --- /v1/responses: tools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "tool_search",
        "local_shell",
        "image_generation",
        "file_search",
        "mcp",
        "computer_use_preview",
        "new",
    ],
)
async def test_a_tool_that_is_no_function_is_left_out_and_named(
    http: RunningGateway, tokenizer: ScriptedTokenizer, kind: str
) -> None:
    body = {"input": "hi", "max_output_tokens": 4, "tools": [F, {"type": kind}]}
    response = await http.client.post("/v1/responses", json=body)
    assert ignored(response) == ["tools[1]"]
    assert [tool["name"] for tool in response.json()["tools"]] == ["f"]
    assert [tool.name for tool in chat_of(tokenizer).tools] == ["f"]
    demanded = await http.client.post("/v1/responses", json={**body, "tool_choice": {"type": kind}})
    assert (demanded.status_code, demanded.json()["error"]["param"]) == (400, "tool_choice")
    other = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}, {"type": kind}]}
    assert ignored(await http.client.post("/v1/chat/completions", json=other)) == ["tools[1]"]
    assert [tool.name for tool in chat_of(tokenizer).tools] == ["f"]


CODEX_TOOLS: list[dict[str, Any]] = [
    F,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [
        {"type": "function", "name": "spawn", "description": "Begin one.", "strict": False,
         "parameters": {"type": "object", "properties": {"task": {"type": "string"}}}},
        {"type": "function", "name": "f", "description": "Another f."},
        {"type": "web_search"},
    ]},
    {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}]},
    {"type": "custom", "name": "apply_patch", "description": "Change files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "custom", "name": "note", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": False},
]  # fmt: skip


async def test_groups_of_functions_and_texts_are_functions_to_the_model(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    response = await http.client.post("/v1/responses", json={"input": "hi", "tools": CODEX_TOOLS})
    assert {"tools[1].tools[2]", "tools[3].format", "tools[5]"} <= set(ignored(response))
    sent = chat_of(tokenizer).tools
    assert [tool.name for tool in sent] == [
        "f", "multi_agent_v1__spawn", "multi_agent_v1__f", "mcp__files__read", "apply_patch", "note",
    ]  # fmt: skip
    assert [tool.description for tool in sent[1:3]] == ["Agents.\n\nBegin one.", "Another f."]
    assert json.loads(sent[1].parameters_json)["properties"] == {"task": {"type": "string"}}
    assert sent[4].description == "Change files.\n\nThe input is written in this grammar:\nstart: /.+/"
    assert json.loads(sent[5].parameters_json) == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert [tool["type"] for tool in response.json()["tools"]] == [
        "function", "namespace", "namespace", "custom", "custom",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "f", "namespace": "multi_agent_v1"}, "multi_agent_v1__f"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
    ],
)
async def test_what_is_served_can_be_demanded(
    http: RunningGateway, tokenizer: ScriptedTokenizer, choice: Any, name: str
) -> None:
    body = {"input": "hi", "tools": CODEX_TOOLS, "tool_choice": choice}
    assert (await http.client.post("/v1/responses", json=body)).status_code == 200
    assert chat_of(tokenizer).tool_choice.function_name == name


async def test_two_tools_of_one_name_cannot_be_told_apart(http: RunningGateway) -> None:
    group = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}
    tools = [{"type": "function", "name": "a__b"}, group]
    response = await http.client.post("/v1/responses", json={"input": "hi", "tools": tools})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[1].tools[0].name")


async def test_calls_go_back_to_the_client_as_it_knows_its_tools(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    text = '*** Begin "Patch"\n+é\n'
    tokenizer.script = lambda request: calls(
        ("multi_agent_v1__spawn", '{"task":"t"}'), ("apply_patch", json.dumps({"input": text})), ("f", "{}")
    )
    body = {"input": "hi", "tools": CODEX_TOOLS}
    whole = (await http.client.post("/v1/responses", json=body)).json()["output"]
    spawn, patch, plain = whole
    assert (spawn["type"], spawn["namespace"], spawn["name"], spawn["arguments"]) == (
        "function_call", "multi_agent_v1", "spawn", '{"task":"t"}',
    )  # fmt: skip
    assert (patch["type"], patch["name"], patch["input"], patch["call_id"]) == (
        "custom_tool_call", "apply_patch", text, "call_1",
    )  # fmt: skip
    assert "arguments" not in patch
    assert (plain["name"], "namespace" in plain) == ("f", False)
    events = named_events((await http.client.post("/v1/responses", json={**body, "stream": True})).text)
    of_patch = [e for e in events if e.get("output_index") == 1]
    assert [e["type"].removeprefix("response.") for e in of_patch] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    assert (of_patch[1]["delta"], of_patch[2]["input"]) == (text, text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))

    items = [{"role": "user", "content": "hi"}, *whole]
    items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in (spawn, plain)]
    items.append({"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"})
    again = await http.client.post("/v1/responses", json={"input": items, "tools": CODEX_TOOLS})
    assert again.status_code == 200, again.text
    _, assistant, *outputs = chat_of(tokenizer).messages
    assert [(call.name, json.loads(call.arguments_json)) for call in assistant.tool_calls] == [
        ("multi_agent_v1__spawn", {"task": "t"}), ("apply_patch", {"input": text}), ("f", {}),
    ]  # fmt: skip
    assert [(message.tool_call_id, message.content) for message in outputs] == [
        ("call_0", "ok"), ("call_2", "ok"), ("call_1", "done"),
    ]  # fmt: skip


@pytest.mark.parametrize(("written", "text"), [('{"input": "half', '{"input": "half'), ('"x"', '"x"'), ("{}", "{}")])
async def test_a_text_that_was_cut_off_is_given_as_it_is(
    http: RunningGateway, tokenizer: ScriptedTokenizer, written: str, text: str
) -> None:
    tokenizer.script = lambda request: calls(("note", written), reason=common_pb2.FINISH_REASON_LENGTH)
    (item,) = (await http.client.post("/v1/responses", json={"input": "hi", "tools": CODEX_TOOLS})).json()["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", text, "incomplete")


async def test_the_openai_client_reads_them(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = lambda request: calls(("apply_patch", '{"input": "p"}'))
    tools: Any = CODEX_TOOLS
    async with (
        openai.AsyncOpenAI(base_url=http.url + "/v1", api_key="k", max_retries=0) as client,
        client.responses.stream(model="scripted", input="hi", tools=tools) as stream,
    ):
        async for _ in stream:
            pass
        (item,) = (await stream.get_final_response()).output
    assert item.type == "custom_tool_call"
    assert item.input == "p"


# --- /v1/responses: items -----------------------------------------------------------------------------------------

THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}


@pytest.mark.parametrize(
    ("between", "after"),
    [
        ([THOUGHT], [("assistant", "t")]),
        ([{"role": "user", "content": "wait"}], [("user", "wait")]),
        ([{"role": "developer", "content": "note"}], [("developer", "note")]),
        ([{"role": "assistant", "content": "on it"}], [("assistant", "on it")]),
        ([THOUGHT, {"role": "assistant", "content": "on it"}], [("assistant", "on it")]),
        ([], []),
    ],
)
async def test_an_output_belongs_to_its_call_wherever_it_stands(
    http: RunningGateway, tokenizer: ScriptedTokenizer, between: list[Any], after: list[Any]
) -> None:
    body = {"max_output_tokens": 4, "input": [USER, CALL, *between, OUTPUT]}
    response = await http.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    request = chat_of(tokenizer)
    assert spoken(request) == [("user", "x"), ("assistant", ""), ("tool", "1"), *after]
    assert [call.id for call in request.messages[1].tool_calls] == [request.messages[2].tool_call_id] == ["a"]


async def test_a_note_between_two_outputs_and_ids_that_come_again(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    second = {**CALL, "call_id": "b"}
    items = [USER, CALL, second, OUTPUT, {"role": "user", "content": "n"}, {**OUTPUT, "call_id": "b", "output": "2"}]
    items += [CALL, {"role": "user", "content": "m"}, {**OUTPUT, "output": "3"}]
    assert (await http.client.post("/v1/responses", json={"input": items})).status_code == 200
    assert spoken(chat_of(tokenizer)) == [
        ("user", "x"), ("assistant", ""), ("tool", "1"), ("tool", "2"), ("user", "n"),
        ("assistant", ""), ("tool", "3"), ("user", "m"),
    ]  # fmt: skip


async def test_an_output_before_its_call_is_refused_in_words_of_this_api(http: RunningGateway) -> None:
    response = await http.client.post("/v1/responses", json={"input": [USER, OUTPUT, CALL]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1].call_id")


async def test_an_image_that_a_tool_gave_is_a_line_of_text(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    output = {**OUTPUT, "output": [{"type": "input_text", "text": "see"}, image]}
    assert ignored(await http.client.post("/v1/responses", json={"input": [USER, CALL, output]})) == [
        "input[2].output[1]"
    ]
    assert chat_of(tokenizer).messages[2].content == "see\n[image: this model reads text only]"
    asked = {"input": [{"role": "user", "content": [image]}]}
    refused = await http.client.post("/v1/responses", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content[0]")


async def test_what_another_server_did_is_left_out(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    assert "input[1]" in ignored(await http.client.post("/v1/responses", json={"input": [USER, search]}))
    assert spoken(chat_of(tokenizer)) == [("user", "x")]


async def test_hints_are_taken_and_named(http: RunningGateway) -> None:
    body = {
        "input": "hi",
        "text": {"verbosity": "low"},
        "service_tier": "priority",
        "truncation": "auto",
        "store": True,
        "max_tool_calls": 3,
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "reasoning": {"summary": "concise"},
    }
    response = await http.client.post("/v1/responses", json=body)
    assert sorted(ignored(response)) == [
        "context_management", "max_tool_calls", "reasoning.summary", "service_tier", "store", "text.verbosity", "truncation",
    ]  # fmt: skip
    answer = response.json()
    assert (answer["store"], answer["truncation"], answer["service_tier"]) == (False, "disabled", "default")
    assert answer["text"]["verbosity"] == "medium"
    asks_nothing = {
        "input": "hi", "text": {"verbosity": "medium"}, "service_tier": "auto", "truncation": "disabled", "store": False,
        "reasoning": {"summary": "none"}, "context_management": [],
    }  # fmt: skip
    assert ignored(await http.client.post("/v1/responses", json=asks_nothing)) == []
    message = {"messages": [USER], "max_tokens": 4, "speed": "fast", "service_tier": "priority"}
    assert sorted(ignored(await http.client.post("/v1/messages", json=message))) == ["service_tier", "speed"]


# --- /v1/messages -------------------------------------------------------------------------------------------------


def results(*content: Any) -> dict[str, Any]:
    """A conversation whose tool ToolSearch gave `content`."""
    return {
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": list(content)}]},
        ],
        "tools": [
            {"name": "ToolSearch", "input_schema": {"type": "object"}},
            {"name": "WebFetch", "input_schema": {"type": "object"}, "defer_loading": True},
            {"name": "WebFind", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
    }


async def test_a_tool_reference_loads_a_deferred_tool(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    body = results({"type": "tool_reference", "tool_name": "WebFetch"})
    assert ignored(await http.client.post("/v1/messages", json=body)) == []
    request = chat_of(tokenizer)
    assert request.messages[2].content == "WebFetch"
    assert [tool.name for tool in request.tools] == ["ToolSearch", "WebFetch"]
    body["tool_choice"] = {"type": "tool", "name": "WebFind"}
    assert (await http.client.post("/v1/messages", json=body)).status_code == 200
    assert chat_of(tokenizer).tool_choice.function_name == "WebFind"
    counted = {key: body[key] for key in ("messages", "tools")}
    assert (await http.client.post("/v1/messages/count_tokens", json=counted)).status_code == 200


async def test_where_the_search_is_not_served_nothing_is_deferred(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    body = results("found") | {"messages": [USER]}
    body["tools"].append({"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"})
    assert ignored(await http.client.post("/v1/messages", json=body)) == ["tools[3]"]
    assert [tool.name for tool in chat_of(tokenizer).tools] == ["ToolSearch", "WebFetch", "WebFind"]


SEARCH_RESULT = {
    "type": "search_result",
    "source": "http://s",
    "title": "S",
    "content": [{"type": "text", "text": "s"}],
}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "T", "context": "C", "source": {
            "type": "text", "media_type": "text/plain", "data": "d"}}, "T\nC\nd"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "e"}]}}, "e"),
        (SEARCH_RESULT, "S\nhttp://s\ns"),
    ],
)  # fmt: skip
async def test_documents_of_text_and_search_results_are_read(
    http: RunningGateway, tokenizer: ScriptedTokenizer, block: Any, text: str
) -> None:
    assert ignored(await http.client.post("/v1/messages", json=results(block))) == []
    assert chat_of(tokenizer).messages[2].content == text
    asked = {"max_tokens": 8, "messages": [{"role": "user", "content": [block, {"type": "text", "text": "so?"}]}]}
    assert ignored(await http.client.post("/v1/messages", json=asked)) == []
    assert chat_of(tokenizer).messages[0].content == f"{text}\nso?"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
    ],
)
async def test_what_a_tool_gave_and_no_model_can_read_is_a_line(
    http: RunningGateway, tokenizer: ScriptedTokenizer, block: Any
) -> None:
    response = await http.client.post("/v1/messages", json=results({"type": "text", "text": "see"}, block))
    assert ignored(response) == ["messages[2].content[0].content[1]"]
    assert chat_of(tokenizer).messages[2].content == f"see\n[{block['type']}: this model reads text only]"
    asked = {"max_tokens": 8, "messages": [{"role": "user", "content": [block]}]}
    refused = await http.client.post("/v1/messages", json=asked)
    assert refused.status_code == 400
    assert "messages[0].content[0]" in refused.json()["error"]["message"]


@pytest.mark.parametrize("system", ["blocks", "text"])
async def test_the_line_for_billing_is_left_out_of_the_prompt(
    http: RunningGateway, tokenizer: ScriptedTokenizer, system: str
) -> None:
    prompts, line = [], "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch="
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for session in ("36ee5", "0b8"):
            head = f"{line}{session};"
            blocks = [{"type": "text", "text": head}, {"type": "text", "text": "Be brief."}]
            body: dict[str, Any] = {
                "messages": [USER],
                "system": blocks if system == "blocks" else f"{head}\n\nBe brief.",
            }
            response = await http.client.post(path, json=body if path.endswith("tokens") else {**body, "max_tokens": 4})
            assert ignored(response) == ["system[0]" if system == "blocks" else "system"]
            if path == "/v1/messages":
                prompts.append(spoken(chat_of(tokenizer)))
    assert prompts == [[("system", "Be brief."), ("user", "x")]] * 2
    alone = {"messages": [USER], "system": [{"type": "text", "text": line}], "max_tokens": 4}
    assert ignored(await http.client.post("/v1/messages", json=alone)) == ["system[0]"]
    assert spoken(chat_of(tokenizer)) == [("user", "x")]
    quoted = {"messages": [USER], "system": f"The header is {line}", "max_tokens": 4}
    assert ignored(await http.client.post("/v1/messages", json=quoted)) == []


async def test_thinking_that_is_not_shown(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = lambda request: say("4", reasoning=["a", "b"])
    body = {"max_tokens": 8, "messages": [USER], "thinking": {"type": "adaptive", "display": "omitted"}}
    response = await http.client.post("/v1/messages", json=body)
    assert ignored(response) == []
    thinking, text = response.json()["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "", "4")
    assert thinking["signature"]
    events = named_events((await http.client.post("/v1/messages", json={**body, "stream": True})).text)
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["signature_delta", "text_delta"]
    assert deltas[0]["signature"] == thinking["signature"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1]
    history: Any = [USER, {"role": "assistant", "content": [thinking, text]}, {"role": "user", "content": "so?"}]
    async with (
        anthropic.AsyncAnthropic(base_url=http.url, api_key="k", max_retries=0) as client,
        client.messages.stream(
            model="scripted", max_tokens=8, messages=history, thinking={"type": "adaptive", "display": "omitted"}
        ) as stream,
    ):
        final = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert not chat_of(tokenizer).messages[1].HasField("reasoning_content")
    shown = {**body, "thinking": {"type": "adaptive", "display": "summarized"}}
    assert (await http.client.post("/v1/messages", json=shown)).json()["content"][0]["thinking"] == "ab"


async def test_consecutive_turns_of_one_role_are_one(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    def use(call_id: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": "f", "input": {}}]}

    def result(call_id: str, *rest: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "1"}, *rest]}

    text = {"type": "text", "text": "and"}
    turns = [USER, {"role": "user", "content": "y"}, use("a"), use("b"), result("a", text), result("b"), USER]
    body = {"max_tokens": 8, "messages": turns}
    assert ignored(await http.client.post("/v1/messages", json=body)) == []
    request = chat_of(tokenizer)
    assert spoken(request) == [
        ("user", "x\ny"), ("assistant", ""), ("tool", "1"), ("tool", "1"), ("user", "and\nx"),
    ]  # fmt: skip
    assert [call.id for call in request.messages[1].tool_calls] == ["a", "b"]
    body["messages"] = [USER, use("a"), result("a"), result("b")]
    refused = await http.client.post("/v1/messages", json=body)
    assert "messages[3].content[0].tool_use_id" in refused.json()["error"]["message"]


async def test_a_call_that_was_cut_off_has_no_input(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    body = {"max_tokens": 2, "messages": [USER], "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    tokenizer.script = lambda request: calls(("f", '{\n"c'), reason=common_pb2.FINISH_REASON_LENGTH)
    answer = (await http.client.post("/v1/messages", json=body)).json()
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")
    tokenizer.script = lambda request: calls(("f", "no JSON"))
    answer = (await http.client.post("/v1/messages", json=body)).json()
    assert answer["content"][0]["input"] == {"arguments": "no JSON"}  # nothing that was said is lost


async def test_tools_that_a_server_of_anthropics_runs_are_left_out(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, {"name": "f"}]
    response = await http.client.post("/v1/messages", json={"max_tokens": 2, "messages": [USER], "tools": tools})
    assert "tools[0]" in ignored(response)
    assert [tool.name for tool in chat_of(tokenizer).tools] == ["f"]
