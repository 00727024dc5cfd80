"""Prompts of every chat format: byte for byte as published encoders and templates write them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.core.config import CHAT_FORMATS
from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2
from services.tokenizer.formats import FORMATS
from services.tokenizer.prompt import PromptBuilder
from tests.support.vocabularies import tiny_checkpoint, vocabulary_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "chat_formats.json").read_text(encoding="utf-8"))


@cache
def builder(format_name: str) -> PromptBuilder:
    return PromptBuilder(
        replace(tiny_checkpoint(), chat_templates={}), vocabulary_of(format_name), chat_format=format_name
    )


def request_of(case: dict[str, Any], **fields: Any) -> text_pb2.ChatRequest:
    """An OpenAI request's conversation as the gateway sends it."""
    request = text_pb2.ChatRequest(reasoning_effort=case.get("effort", ""), **fields)
    for message in case["messages"]:
        proto = request.messages.add(role=message["role"])
        for key in ("content", "reasoning_content", "tool_call_id", "name"):
            if message.get(key) is not None:
                setattr(proto, key, message[key])
        for call in message.get("tool_calls", ()):
            function = call["function"]
            proto.tool_calls.add(id=call.get("id", ""), name=function["name"], arguments_json=function["arguments"])
    for tool in case.get("tools", ()):
        function = tool["function"]
        request.tools.add(
            name=function["name"],
            description=function["description"],
            parameters_json=json.dumps(function["parameters"]),
        )
    asked = case.get("response_format")
    if asked is not None:
        schema = asked.get("json_schema", {}).get("schema")
        request.options.constraint.CopyFrom(
            text_pb2.Constraint(json_schema=json.dumps(schema))
            if schema is not None
            else text_pb2.Constraint(json_object=True)
        )
    if case.get("thinking") is not None:
        request.chat_template_kwargs_json = json.dumps({"thinking": case["thinking"]})
    return request


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['format']}: {case['case']}")
def test_as_published(case: dict[str, Any]) -> None:
    prompt = builder(case["format"]).chat(request_of(case), time_unix_s=0)
    assert prompt.text == case["text"]
    if case["case"].startswith("repeated tag"):
        return  # a tag that a caller spells is text, where one go would make it a control token
    # As if tokenized in one go: text is cut nowhere else than there.
    assert list(unpack_token_ids(prompt.packed_ids)) == vocabulary_of(case["format"]).encode(case["text"])


TEXT = st.text("ab <>/\n\t写😀{}\"'`|_-:019.", max_size=40)


@given(st.sampled_from(sorted(FORMATS)), st.lists(TEXT, min_size=5, max_size=5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_ordinary_text_has_the_ids_of_tokenizing_in_one_go(name: str, texts: list[str], with_calls: bool) -> None:
    system, question, answer, output, last = texts
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": answer})
    if with_calls and FORMATS[name].shape is not None:
        arguments = json.dumps({output: answer, "n": [question]}, ensure_ascii=False)
        messages[-1]["tool_calls"] = [{"id": "i", "function": {"name": "f", "arguments": arguments}}]
        messages.append({"role": "tool", "tool_call_id": "i", "content": output})
    messages.append({"role": "user", "content": last})
    prompt = builder(name).chat(request_of({"messages": messages}), time_unix_s=0)
    assert list(unpack_token_ids(prompt.packed_ids)) == vocabulary_of(name).encode(prompt.text)


def test_every_format_has_golden_cases_and_a_name_in_the_settings() -> None:
    assert set(CHAT_FORMATS) == set(FORMATS) == {case["format"] for case in GOLDEN}
