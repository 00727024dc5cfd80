"""What the mixed load asks for, and what must be true of each answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .answers import Answer, Wrong, fault_against

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
_WORDS = (
    "whale sea tell story about moon dog child rain stone light paper river why how three 你好 秋天 月亮 海洋 讲一个故事 "
    "🙂 🐋 naïve Straße привет"
).split()
_ROW = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    _ROW,
    {"type": "object", "properties": {"rows": {"type": "array", "items": _ROW, "maxItems": 2}}, "required": ["rows"]},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["whale", "鲸", "🐋"]}, "big": {"type": "boolean"}},
        "required": ["kind"],
        "additionalProperties": False,
    },
)
_REGEXES = (r"[a-c]{3,6}-[0-9]{2}", r"(?:whale|鲸){1,3}[.!?]", r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")
_CHOICES = ["a whale", "the sea", "鲸鱼", "🙂"]
_GRAMMAR = 'root ::= item ("," item){0,3}\nitem ::= [a-f]+ "=" [0-9]'
_GRAMMAR_AS_REGEX = r"[a-f]+=[0-9](?:,[a-f]+=[0-9]){0,3}"
_TOOL_ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """One request, and what its answer must be beyond what every answer must."""

    kind: str
    path: str
    body: dict[str, Any]
    check: Callable[[Answer], None] = lambda answer: None
    num_choices: int = 1

    @property
    def max_tokens(self) -> int:
        return int(self.body.get("max_output_tokens") or self.body["max_tokens"])

    def verify(self, answer: Answer) -> None:
        """Raises Wrong."""
        if len(answer.choices) != self.num_choices:
            raise Wrong(f"{len(answer.choices)} choices of {self.num_choices}")
        most = self.max_tokens * self.num_choices
        if answer.num_output_tokens > most:
            raise Wrong(f"{answer.num_output_tokens} tokens where {most} were asked for")
        finishes = {choice.finish for choice in answer.choices.values()}
        if finishes == {"length"} and answer.num_output_tokens != most:
            raise Wrong(f"finished by length after {answer.num_output_tokens} tokens of {most}")
        if answer.num_prompt_tokens < 1:
            raise Wrong("usage counts no prompt token")
        self.check(answer)


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.choice((3, 8, 40, 200))))


def _chat(rng: random.Random, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _text(rng)}], "max_tokens": max_tokens, **_sampling(rng), **fields}


def _completion(rng: random.Random, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": _text(rng), "max_tokens": max_tokens, **_sampling(rng), **fields}


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {"temperature": rng.choice((0, 0.7, 1.0)), "seed": rng.randrange(1 << 31), "top_p": rng.choice((1.0, 0.9))}


def _length(rng: random.Random) -> int:
    return rng.choice((1, 4, 16, 60, 150))


def _matches(pattern: str) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        for choice in answer.choices.values():
            if choice.finish == "stop" and not re.fullmatch(pattern, choice.text):
                raise Wrong(f"{choice.text!r} is not {pattern}")

    return check


def _keeps_to(schema: dict[str, Any]) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        for choice in answer.choices.values():
            if choice.finish == "stop":
                _check_json(schema, choice.text)

    return check


def _check_json(schema: dict[str, Any], text: str) -> None:
    try:
        fault = fault_against(schema, json.loads(text))
    except ValueError as error:
        fault = f"no JSON ({error})"
    if fault:
        raise Wrong(f"{fault}: {text!r}")


# --- the kinds, each drawn at random ---------------------------------------------------------------------------------


def _plain(rng: random.Random) -> Case:
    return Case("chat", CHAT, _chat(rng, _length(rng)))


def _stops(rng: random.Random) -> Case:
    stops = ["the", "。", " a"]

    def check(answer: Answer) -> None:
        if found := [stop for stop in stops if stop in answer.choices[0].text]:
            raise Wrong(f"the text holds its stop strings {found}")

    return Case("stops", CHAT, _chat(rng, _length(rng), stop=stops), check)


def _logprobs(rng: random.Random) -> Case:
    def check(answer: Answer) -> None:
        choice = answer.choices[0]
        if choice.finish == "length" and choice.num_logprobs != answer.num_output_tokens:
            raise Wrong(f"{choice.num_logprobs} log-probabilities for {answer.num_output_tokens} tokens")

    return Case("logprobs", CHAT, _chat(rng, _length(rng), logprobs=True, top_logprobs=rng.choice((0, 2, 20))), check)


def _json(rng: random.Random) -> Case:
    schema = rng.choice(SCHEMAS)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    return Case("json", CHAT, _chat(rng, 100, response_format=wanted), _keeps_to(schema))


def _tools(rng: random.Random) -> Case:
    tool = {"type": "function", "function": {"name": "weather", "parameters": _TOOL_ARGUMENTS}}
    named = {"type": "function", "function": {"name": "weather"}}

    def check(answer: Answer) -> None:
        choice = answer.choices[0]
        if choice.finish == "stop":
            raise Wrong(f"no call where one was demanded: {choice.text!r}")
        if choice.finish == "tool_calls":
            for name, arguments in choice.calls.values():
                if name != "weather":
                    raise Wrong(f"a call of {name!r}")
                _check_json(_TOOL_ARGUMENTS, arguments)

    return Case("tools", CHAT, _chat(rng, 100, tools=[tool], tool_choice=rng.choice(("required", named))), check)


def _several(rng: random.Random) -> Case:
    return Case("n", COMPLETIONS, _completion(rng, _length(rng), n=2, logprobs=rng.choice((None, 2))), num_choices=2)


def _ids(rng: random.Random) -> Case:
    ids = [rng.randrange(3, 250) for _ in range(rng.choice((1, 63, 64, 65, 300)))]
    prompt: list[Any] = rng.choice((ids, [ids, ids[:5]]))
    body = {**_completion(rng, _length(rng)), "prompt": prompt}
    return Case("ids", COMPLETIONS, body, num_choices=1 if prompt is ids else 2)


def _prompt_logprobs(rng: random.Random) -> Case:
    def check(answer: Answer) -> None:
        got = len(answer.choices[0].prompt_logprobs)
        if got != answer.num_prompt_tokens:
            raise Wrong(f"{got} prompt log-probabilities for {answer.num_prompt_tokens} tokens")

    return Case("prompt_logprobs", COMPLETIONS, _completion(rng, 4, prompt_logprobs=rng.choice((0, 3))), check)


def _penalties(rng: random.Random) -> Case:
    num_tokens = _length(rng)
    fields = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1, "min_p": 0.01, "top_k": 40}
    banned = rng.sample(range(300, 900), 30)

    def check(answer: Answer) -> None:
        ids = answer.choices[0].token_ids
        if len(ids) != num_tokens or answer.choices[0].finish != "length":
            raise Wrong(f"{len(ids)} tokens, {answer.choices[0].finish}, where ignore_eos asks for {num_tokens}")
        if found := set(ids) & set(banned):
            raise Wrong(f"the banned tokens {found} came")

    bias = {str(token_id): -100 for token_id in banned}
    body = _completion(rng, num_tokens, ignore_eos=True, return_token_ids=True, logit_bias=bias, **fields)
    return Case("penalties", COMPLETIONS, body, check)


def _min_tokens(rng: random.Random) -> Case:
    least = rng.choice((2, 30))

    def check(answer: Answer) -> None:
        if answer.num_output_tokens < least:
            raise Wrong(f"{answer.num_output_tokens} tokens where min_tokens is {least}")

    return Case("min_tokens", COMPLETIONS, _completion(rng, 60, min_tokens=least), check)


def _regex(rng: random.Random) -> Case:
    pattern = rng.choice(_REGEXES)
    return Case(
        "regex", COMPLETIONS, _completion(rng, 60, structured_outputs={"regex": pattern}), _matches(f"(?:{pattern})")
    )


def _choice(rng: random.Random) -> Case:
    body = _completion(rng, 30, structured_outputs={"choice": _CHOICES}, n=2)
    return Case("choice", COMPLETIONS, body, _matches("|".join(map(re.escape, _CHOICES))), num_choices=2)


def _grammar(rng: random.Random) -> Case:
    body = _completion(rng, 60, structured_outputs={"grammar": _GRAMMAR})
    return Case("grammar", COMPLETIONS, body, _matches(_GRAMMAR_AS_REGEX))


def _response(rng: random.Random) -> Case:
    return Case("responses", RESPONSES, {"input": _text(rng), "max_output_tokens": _length(rng), "temperature": 0.8})


def _response_json(rng: random.Random) -> Case:
    schema = rng.choice(SCHEMAS)
    text = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    return Case(
        "responses_json", RESPONSES, {"input": _text(rng), "max_output_tokens": 100, "text": text}, _keeps_to(schema)
    )


def _message(rng: random.Random) -> Case:
    stops = rng.choice(([], ["e", "。"]))

    def check(answer: Answer) -> None:
        if found := [stop for stop in stops if stop in answer.choices[0].text]:
            raise Wrong(f"the text holds its stop sequences {found}")

    messages = [{"role": "user", "content": _text(rng)}]
    body = {"messages": messages, "max_tokens": _length(rng), "temperature": 0.9, "stop_sequences": stops}
    return Case("messages", MESSAGES, body, check)


_KINDS: dict[str, Callable[[random.Random], Case]] = {
    "chat": _plain,
    "stops": _stops,
    "logprobs": _logprobs,
    "json": _json,
    "tools": _tools,
    "n": _several,
    "ids": _ids,
    "prompt_logprobs": _prompt_logprobs,
    "penalties": _penalties,
    "min_tokens": _min_tokens,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "responses": _response,
    "responses_json": _response_json,
    "messages": _message,
}
KINDS = tuple(_KINDS)
NEED_A_MODEL = ("json", "tools", "regex", "choice", "grammar", "responses_json", "penalties", "min_tokens")
"""Kinds that the simulated executor does not keep: it takes no grammar, and makes its tokens without logits."""


def draw(rng: random.Random, kinds: tuple[str, ...]) -> Case:
    """One request of one of `kinds`, streamed as often as not. `prompt_logprobs` are never streamed."""
    case = _KINDS[rng.choice(kinds)](rng)
    if case.kind != "prompt_logprobs" and rng.random() < 0.6:
        case.body["stream"] = True
        if case.path in (CHAT, COMPLETIONS):
            case.body["stream_options"] = {"include_usage": True}
    return case


# --- probes: requests whose text must never change ---------------------------------------------------------------------


def probes(kinds: tuple[str, ...]) -> list[Case]:
    """Greedy and seeded requests that `--deterministic` answers with the same text whatever else runs."""
    found = []
    for number in range(12):
        case = draw(random.Random(f"probe {number}"), kinds)
        case.body.pop("stream", None)
        case.body.pop("stream_options", None)
        case.body.update(temperature=0.9 if number % 2 else 0, seed=number)
        found.append(case)
    return found


def again(probe: Case, *, stream: bool) -> Case:
    """The same request, streamed or whole."""
    if not stream or probe.kind == "prompt_logprobs":
        return probe
    extra = {"stream_options": {"include_usage": True}} if probe.path in (CHAT, COMPLETIONS) else {}
    return Case(probe.kind, probe.path, {**probe.body, "stream": True, **extra}, probe.check, probe.num_choices)
