"""Reads the answers of all four generation endpoints, streamed or whole, into one shape. Says what is wrong in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .client import Reply


class Wrong(AssertionError):
    """An answer is not what it must be."""


@dataclass
class Choice:
    text: str = ""
    finish: str = ""  # "stop", "length" or "tool_calls", whatever the endpoint calls it
    calls: dict[int, list[str]] = field(default_factory=dict)  # [name, arguments] by index
    num_logprobs: int = 0
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    @property
    def text(self) -> str:
        """All choices' texts and calls, to compare with another's."""
        return "\0".join(f"{c.text}|{sorted(c.calls.items()) or ''}" for _, c in sorted(self.choices.items()))


_MESSAGE_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}


def read(path: str, reply: Reply) -> Answer:
    """The answer of a reply that was not cut. Raises Wrong: a status, an error in a stream, no terminator, no usage."""
    if reply.status != 200:
        raise Wrong(f"status {reply.status}: {reply.body[:400].decode('utf-8', 'replace')}")
    payloads = reply.events if reply.is_stream else [json.loads(reply.body)]
    for payload in payloads:
        if payload.get("error") or payload.get("type") == "error":
            raise Wrong(f"an error after status 200: {json.dumps(payload)[:400]}")
    answer = Answer()
    _READERS[path](payloads, reply, answer)
    if not answer.num_output_tokens and any(c.text or c.calls for c in answer.choices.values()):
        raise Wrong("text came, and usage counts no token")
    for index, choice in answer.choices.items():
        if choice.finish not in ("stop", "length", "tool_calls"):
            raise Wrong(f"choice {index} has the finish reason {choice.finish!r}")
    return answer


def _openai(payloads: list[dict[str, Any]], reply: Reply, answer: Answer) -> None:
    """Chat completions and completions."""
    if reply.is_stream and not reply.has_done:
        raise Wrong("the stream ended without [DONE]")
    usage: dict[str, Any] | None = None
    for payload in payloads:
        usage = payload.get("usage") or usage
        for piece in payload["choices"]:
            choice = answer.choice(piece["index"])
            if choice.finish:
                raise Wrong(f"choice {piece['index']} goes on after its finish reason: {piece}")
            message = piece.get("delta") or piece.get("message") or {}
            choice.text += piece.get("text") or message.get("content") or ""
            choice.finish = piece.get("finish_reason") or ""
            choice.token_ids += piece.get("token_ids") or []
            choice.prompt_logprobs += piece.get("prompt_logprobs") or []
            logprobs = piece.get("logprobs") or {}
            choice.num_logprobs += len(logprobs.get("content") or logprobs.get("tokens") or [])
            for position, call in enumerate(message.get("tool_calls") or []):
                entry = choice.calls.setdefault(call.get("index", position), ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"].get("arguments") or ""
    if usage is None:
        raise Wrong("no usage came")
    answer.num_prompt_tokens, answer.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]


def _responses(payloads: list[dict[str, Any]], reply: Reply, answer: Answer) -> None:
    last, streamed = payloads[-1], ""
    if reply.is_stream:
        if last["type"] not in ("response.completed", "response.incomplete"):
            raise Wrong(f"the stream ended with {last['type']}")
        numbers = [payload["sequence_number"] for payload in payloads]
        if numbers != list(range(len(payloads))):
            raise Wrong("sequence_number does not count from 0 by 1")
        streamed = "".join(p["delta"] for p in payloads if p["type"] == "response.output_text.delta")
        last = last["response"]
    choice = answer.choice(0)
    for item in last["output"]:
        if item["type"] == "message":
            choice.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            choice.calls[len(choice.calls)] = [item["name"], item["arguments"]]
    if reply.is_stream and streamed != choice.text:
        raise Wrong(f"deltas make {streamed!r}, the last event says {choice.text!r}")
    choice.finish = {"completed": "stop", "incomplete": "length"}.get(last["status"], last["status"])
    answer.num_prompt_tokens, answer.num_output_tokens = last["usage"]["input_tokens"], last["usage"]["output_tokens"]


def _messages(payloads: list[dict[str, Any]], reply: Reply, answer: Answer) -> None:
    choice, usage = answer.choice(0), payloads[0].get("usage", {})
    if reply.is_stream:
        if payloads[-1]["type"] != "message_stop":
            raise Wrong(f"the stream ended with {payloads[-1]['type']}")
        for payload in payloads:
            if payload["type"] == "content_block_delta" and payload["delta"]["type"] == "text_delta":
                choice.text += payload["delta"]["text"]
            elif payload["type"] == "message_delta":
                stop, usage = payload["delta"]["stop_reason"], payload["usage"]
    else:
        stop = payloads[0]["stop_reason"]
        choice.text = "".join(block["text"] for block in payloads[0]["content"] if block["type"] == "text")
    choice.finish = _MESSAGE_STOPS.get(stop, stop)
    answer.num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    answer.num_output_tokens = usage["output_tokens"]


_READERS: dict[str, Callable[[list[dict[str, Any]], Reply, Answer], None]] = {
    "/v1/chat/completions": _openai,
    "/v1/completions": _openai,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}


def fault_against(schema: dict[str, Any], value: Any, where: str = "") -> str:
    """What of `value` the schema does not allow, "" for nothing. Knows the keywords that the load's schemas use."""
    if "enum" in schema and value not in schema["enum"]:
        return f"{where}: {value!r} is none of {schema['enum']}"
    types: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    kind = schema.get("type")
    if kind and (not isinstance(value, types[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return f"{where}: {value!r} is no {kind}"
    if isinstance(value, dict):
        members = schema.get("properties", {})
        if missing := [name for name in schema.get("required", []) if name not in value]:
            return f"{where}: {missing} are missing"
        if schema.get("additionalProperties") is False and (extra := [name for name in value if name not in members]):
            return f"{where}: {extra} are not allowed"
        faults = (fault_against(members.get(name, {}), item, f"{where}.{name}") for name, item in value.items())
        return next(filter(None, faults), "")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return f"{where}: {len(value)} items"
        faults = (fault_against(schema.get("items", {}), item, f"{where}[{i}]") for i, item in enumerate(value))
        return next(filter(None, faults), "")
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return f"{where}: {len(value)} characters"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{where}: {value} is out of range"
    return ""
