"""Writes chat_formats.json: prompts as published encoders and templates make them, for tests to compare with.

    python tests/golden/make_chat_formats.py --sglang DIR --recipe DIR --templates DIR

DIR of --sglang and --recipe: the unpacked wheels sglang 0.5.12 (which carries the encoders that came with V3.2 and V4)
and deepseek-recipe 0.2.0 (DeepSeek's own library: V4 and V4.1). DIR of --templates: r1.jinja (of
DeepSeek-R1-Distill-Qwen-32B), r1-0528.jinja (the same without the opening think tag), v31.jinja (V3.1, with the tools
text of its model card, as sglang's examples have it) and kimi-thinking.jinja (Kimi-K2-Thinking).

Cases of formats for which no encoder was at hand are written below as the formats are documented; `source` says which.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]  # messages, tools, thinking, effort, response_format: as an OpenAI request has them

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Wetter für <Stadt> & "more"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1.5}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "now", "description": "时间", "parameters": {"type": "object", "properties": {}}},
}


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def calls(*made: dict[str, Any], content: str | None = None, reasoning: str | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "tool_calls": list(made)}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def result(text: str, call_id: str, name: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id} | ({"name": name} if name else {})


PARIS = call("get_weather", '{"city": "Paris", "days": 2}', "functions.get_weather:0")
NOW = call("now", "{}", "functions.now:1")

PLAIN: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("1+1=?")],
    "system and three turns": [
        system("Be brief.\nAlways."),
        user("写一首诗 😀\n\n"),
        answer("  床前明月光 "),
        user("<b>x</b> > 0?"),
    ],
}
WITH_THOUGHT = [user("hello"), answer("Hello! I am DeepSeek.", "They greet me."), user("1+1=?")]
ONE_CALL = [user("Weather?"), calls(PARIS), result("sunny\n", "functions.get_weather:0", "get_weather")]
ROUND_TRIP = [*ONE_CALL, answer("Sunny.", "It shines."), user("And the time?")]
PARALLEL = [
    system("Use tools."),
    user("Weather and time?"),
    calls(PARIS, NOW, content="Let me look.", reasoning="Two calls."),
    result("12:00", "functions.now:1"),
    result('{"t": 20.50}', "functions.get_weather:0"),
]
ODD_VALUES = [
    user("x"),
    calls(call("f", '{"s": "a\\"b\\n<c>", "n": null, "l": [1, 2.50, {"k": "ü"}], "b": true, "e": ""}', "a")),
    result("", "a"),
]


def chat_cases(*, results_by_order: bool = True) -> Iterator[tuple[str, Case]]:
    """Cases for the encoders of V3.2 and later."""
    for thinking in (False, True):
        switch = f", thinking {'on' if thinking else 'off'}"
        for name, messages in PLAIN.items():
            yield name + switch, {"messages": messages, "thinking": thinking}
        yield "earlier reasoning" + switch, {"messages": WITH_THOUGHT, "thinking": thinking}
        yield "two systems" + switch, {"messages": [system("A"), user("x"), system("B")], "thinking": thinking}
        yield "tools" + switch, {"messages": PLAIN["one turn"], "tools": [WEATHER, CLOCK], "thinking": thinking}
        for name, messages in (("one call", ONE_CALL), ("round trip", ROUND_TRIP), ("odd values", ODD_VALUES)):
            yield name + switch, {"messages": messages, "tools": [WEATHER], "thinking": thinking}
        parallel = PARALLEL if results_by_order else [*PARALLEL[:3], PARALLEL[4], PARALLEL[3]]
        yield "parallel calls" + switch, {"messages": parallel, "tools": [WEATHER, CLOCK], "thinking": thinking}
        yield "call without tools" + switch, {"messages": ROUND_TRIP, "thinking": thinking}
    late = [user("a"), user("b"), system("S"), user("c")]
    yield "late system", {"messages": late, "tools": [WEATHER], "thinking": False}
    reminder = {"role": "latest_reminder", "content": "now"}
    if results_by_order:
        yield "reminder", {"messages": [user("a"), reminder], "thinking": True}
        yield "earlier reminder", {"messages": [user("a"), reminder, answer("b"), user("c")], "thinking": True}
    yield (
        "two users",
        {"messages": [user("a"), user("b")], "thinking": True}
        if results_by_order
        else {
            "messages": [user("a"), answer("b"), user("c")],
            "thinking": True,
        },
    )


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def hung(case: Case) -> list[dict[str, Any]]:
    """The messages, with the tools and the answer's schema on a system message at the front, as engines put them there."""
    messages = copy.deepcopy(case["messages"])
    hanging = {"tools": case.get("tools"), "response_format": schema_of(case)}
    if any(hanging.values()):
        if messages[0]["role"] != "system":
            messages.insert(0, system(""))
        messages[0] |= {key: value for key, value in hanging.items() if value}
    return messages


def schema_of(case: Case) -> Any:
    return case.get("response_format", {}).get("json_schema", {}).get("schema")


def encoder_v32(folder: Path) -> Callable[[Case], str]:
    encoder = module(folder / "sglang/srt/entrypoints/openai/encoding_dsv32.py")
    # The copy has lost the empty lines of the tools text: those of the published test vectors are put back.
    for place in (
        "## Tools\n", "{dsml_token}function_calls>\nString", "objects).\n", "an example:\n",
        "{dsml_token}function_calls>\n<function_results>", "</function_results>\n", "{thinking_end_token}\n",
    ):  # fmt: skip
        first, newline, rest = place.partition("\n")
        assert encoder.TOOLS_SYSTEM_TEMPLATE.count(place) == 1, place
        encoder.TOOLS_SYSTEM_TEMPLATE = encoder.TOOLS_SYSTEM_TEMPLATE.replace(place, f"{first}{newline}\n{rest}")
    return lambda case: str(encoder.encode_messages(hung(case), "thinking" if case.get("thinking") else "chat"))


def encoder_v4(folder: Path) -> Callable[[Case], str]:
    encoder = module(folder / "sglang/srt/entrypoints/openai/encoding_dsv4.py")
    return lambda case: str(
        encoder.encode_messages(
            hung(case), "thinking" if case.get("thinking") else "chat", reasoning_effort=case.get("effort")
        )
    )


def recipe(folder: Path, model: str, encoding: str) -> Callable[[Case], str]:
    sys.path.insert(0, str(folder))
    import deepseek_recipe

    def render(case: Case) -> str:
        body = {"model": model, "messages": case["messages"], "tools": case.get("tools")}
        body["thinking"] = {"type": "enabled" if case.get("thinking") else "disabled"}
        body["response_format"] = case.get("response_format")
        if case.get("effort"):
            body["reasoning_effort"] = case["effort"]
        elif case.get("thinking") and model == "DeepSeek-V4-Pro":
            body["reasoning_effort"] = "low"  # which writes nothing; left out, the library would take "high"
        request = deepseek_recipe.ChatCompletionRequest({k: v for k, v in body.items() if v is not None})
        conversation = request.convert(deepseek_recipe.ConversionOptions()).conversation
        return str(getattr(deepseek_recipe, encoding)().render_conversation(conversation).prompt)

    return render


def template(path: Path) -> Callable[[Case], str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = path.read_text(encoding="utf-8")

    def render(case: Case) -> str:
        [text], _ = render_jinja_template(
            [case["messages"]],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=True,
            bos_token=BOS,
            eos_token=EOS,
            thinking=bool(case.get("thinking")),
        )
        return str(text)

    return render


def efforts(*names: str) -> Iterator[tuple[str, Case]]:
    for name in names:
        for first in ([], [system("S")]):
            yield (
                f"effort {name}{', system' if first else ''}",
                {
                    "messages": [*first, user("U")],
                    "thinking": True,
                    "effort": name,
                },
            )


def answer_formats(*, json_object: bool = False) -> Iterator[tuple[str, Case]]:
    """Answers that are held to a schema, or to be any object."""
    schema = {
        "type": "object",
        "properties": {"ü": {"type": "string", "description": '<b> "x"'}, "n": {"type": ["integer", "null"]}},
        "required": ["ü", "n"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    first, question = system("S"), user("As json.")
    yield "answer of a schema", {"messages": [question], "response_format": asked, "thinking": False}
    yield "answer of a schema, system", {"messages": [first, question], "response_format": asked, "thinking": True}
    beside = {"messages": [first, question], "tools": [WEATHER], "response_format": asked, "thinking": True}
    yield "answer of a schema beside tools", beside
    if json_object:
        asked = {"type": "json_object"}
        yield "any object", {"messages": [question], "response_format": asked, "thinking": False}
        yield "any object, system", {"messages": [first, question], "response_format": asked, "thinking": True}


def documented() -> Iterator[tuple[str, str, Case, str]]:
    """Formats of which no encoder was at hand, as their model cards show them."""
    turns = PLAIN["system and three turns"]
    s, u1, a1, u2 = (message["content"] for message in turns)
    yield (
        "deepseek-v2", "system and three turns", {"messages": turns},
        f"{BOS}{s}\n\nUser: {u1}\n\nAssistant: {a1}{EOS}User: {u2}\n\nAssistant:",
    )  # fmt: skip
    for name in ("deepseek-v2.5", "deepseek-v3"):
        yield (
            name, "system and three turns", {"messages": turns},
            f"{BOS}{s}<｜User｜>{u1}<｜Assistant｜>{a1}{EOS}<｜User｜>{u2}<｜Assistant｜>",
        )  # fmt: skip
        described = "\n".join(
            f"- `{tool['function']['name']}`:\n```json\n"
            f"{json.dumps(tool['function'], ensure_ascii=False, indent=4)}\n```"
            for tool in (WEATHER, CLOCK)
        )
        head = "## Tools\n\n### Function\n\nYou have the following functions available:\n\n"
        block = (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        outputs = (
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>12:00<｜tool▁output▁end｜>\n"
            '<｜tool▁output▁begin｜>{"t": 20.50}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>'
        )
        yield (
            name, "parallel calls", {"messages": PARALLEL, "tools": [WEATHER, CLOCK]},
            f"{BOS}Use tools.\n\n{head}{described}<｜User｜>Weather and time?<｜Assistant｜>Let me look.{block}{EOS}{outputs}",
        )  # fmt: skip
    tools = json.dumps([WEATHER, CLOCK], ensure_ascii=False, separators=(",", ":"))
    yield (
        "kimi-k2", "parallel calls", {"messages": PARALLEL[1:], "tools": [WEATHER, CLOCK]},
        f"<|im_system|>tool_declare<|im_middle|>{tools}<|im_end|>"
        "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
        "<|im_user|>user<|im_middle|>Weather and time?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>Let me look.<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.now:1\n12:00<|im_end|>"
        '<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\n{"t": 20.50}<|im_end|>'
        "<|im_assistant|>assistant<|im_middle|>",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("sglang", "recipe", "templates"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    folders = parser.parse_args()
    plain = [(name, {"messages": messages}) for name, messages in PLAIN.items()]
    turns = [*plain, ("one call", {"messages": ONE_CALL}), ("round trip", {"messages": ROUND_TRIP})]
    switched = [
        (f"{name}, thinking {'on' if thinking else 'off'}", {**case, "thinking": thinking})
        for thinking in (False, True)
        for name, case in [
            *turns,
            ("parallel calls", {"messages": PARALLEL, "tools": [WEATHER, CLOCK]}),
            ("tools", {"messages": PLAIN["one turn"], "tools": [WEATHER]}),
            ("two systems", {"messages": [system("A"), user("x"), system("B")]}),
            ("repeated tag", {"messages": [user("x"), answer("a</think>b</think>c"), user("y")]}),
        ]
    ]
    kimi = [
        *turns,
        ("parallel calls", {"messages": PARALLEL[1:], "tools": [WEATHER, CLOCK]}),
        ("earlier reasoning", {"messages": WITH_THOUGHT}),
        ("reasoning of this turn", {"messages": PARALLEL, "tools": [WEATHER]}),
    ]
    sources: list[tuple[str, str, Callable[[Case], str], Any]] = [
        ("deepseek-r1", "template of R1", template(folders.templates / "r1.jinja"), turns),
        ("deepseek-r1-0528", "template of R1-0528", template(folders.templates / "r1-0528.jinja"), turns),
        ("deepseek-v3.1", "template of V3.1", template(folders.templates / "v31.jinja"), switched),
        (
            "deepseek-v3.2", "sglang 0.5.12, encoding_dsv32.py", encoder_v32(folders.sglang),
            [*chat_cases(results_by_order=False), *answer_formats()],
        ),
        (
            "deepseek-v4", "sglang 0.5.12, encoding_dsv4.py", encoder_v4(folders.sglang),
            [*chat_cases(), *efforts("high", "max"), *answer_formats()],
        ),
        (
            "deepseek-v4-pro", "deepseek-recipe 0.2.0", recipe(folders.recipe, "DeepSeek-V4-Pro", "DeepseekV4Encoding"),
            [*chat_cases(), *efforts("low", "medium", "high", "max"), *answer_formats(json_object=True)],
        ),
        (
            "deepseek-v4.1", "deepseek-recipe 0.2.0",
            recipe(folders.recipe, "DeepSeek-V4.1-Flash", "DeepseekV41Encoding"),
            [*chat_cases(), *efforts("low", "medium", "high", "max"), *answer_formats(json_object=True)],
        ),
        ("kimi-k2-thinking", "template of Kimi-K2-Thinking", template(folders.templates / "kimi-thinking.jinja"), kimi),
    ]  # fmt: skip
    entries = [
        {"format": name, "case": case_name, "source": source, **case, "text": render(copy.deepcopy(case))}
        for name, source, render, cases in sources
        for case_name, case in cases
    ]
    entries += [
        {"format": name, "case": case_name, "source": "model card", **case, "text": text}
        for name, case_name, case, text in documented()
    ]
    path = Path(__file__).with_name("chat_formats.json")
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(entries)} cases in {path}")


if __name__ == "__main__":
    main()
