"""Grammars of calls in every chat format: whatever tokens they allow is read as calls of the tools, by their schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from rorqual.core.errors import InvalidRequestError
from rorqual.grammar import GrammarError
from rorqual.v1 import text_pb2
from services.tokenizer.choice import ChoiceMachine
from services.tokenizer.constraint import compile_constraint
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.base import Thinking
from services.tokenizer.formats.call_grammar import opening_token
from services.tokenizer.formats.output import OutputSyntax
from services.tokenizer.formats.reasoning import Start
from services.tokenizer.prompt import Prompt, PromptBuilder, reasons_first
from services.tokenizer.tool_grammar import compile_calls
from services.tokenizer.vocabulary import Vocabulary
from tests.support.answers import EOS, Answer, read_tokens, rules_of
from tests.support.grammars import allowed, begin, engine_of, walk
from tests.support.vocabularies import tiny, tiny_checkpoint, vocabulary_of, without_marks
from tests.unit.test_formats_calls import WITH_CALLS
from tests.unit.test_formats_rendering import builder

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", 3, None]},
        "id": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "unit", "id"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["at"],
            "additionalProperties": False,
        }
    },
}
DATE = {"type": "object", "properties": {"on": {"type": "string", "format": "date"}}, "required": ["on"], "additionalProperties": False}  # fmt: skip
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}, "look-up": DATE}
NAMED = text_pb2.ToolChoice(function_name="look-up")
REQUIRED = text_pb2.ToolChoice(mode=text_pb2.TOOL_CHOICE_MODE_REQUIRED)


def ask(*, strict: bool = True, thinking: bool | None = None, **fields: Any) -> text_pb2.ChatRequest:
    request = text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="x")], **fields)
    for name, schema in SCHEMAS.items():
        request.tools.add(name=name, parameters_json=json.dumps(schema), strict=strict)
    if thinking is not None:
        request.chat_template_kwargs_json = json.dumps({"thinking": thinking})
    return request


def grammar_of(
    format_name: str, request: text_pb2.ChatRequest, beside: str | None = None
) -> tuple[str, Prompt, int | None]:
    """(the grammar, the prompt, the token that it begins after), as the service puts them together."""
    vocabulary, chat_format = vocabulary_of(format_name), FORMATS[format_name]
    prompt = builder(format_name).chat(request, time_unix_s=0, constrains=True)
    engine = engine_of(vocabulary)
    text, _ = compile_calls(request, chat_format, vocabulary.control, prompt, engine, beside=beside)
    reasons = not prompt.forced_ids and reasons_first(chat_format, prompt.start)
    return text, prompt, vocabulary.think_ids[1] if reasons else None


def closing(vocabulary: Vocabulary, format_name: str) -> list[int]:
    """Tokens that end something."""
    shape = FORMATS[format_name].shape
    assert shape is not None
    marks = [token_id for text, token_id in vocabulary.control.ids.items() if text in shape.end_call + shape.end]
    return [*marks, *vocabulary.encode('"'), *vocabulary.encode("</"), *vocabulary.encode("}"), *vocabulary.encode("`")]


def speak(
    format_name: str, request: text_pb2.ChatRequest, seed: int, beside: str | None = None, prefer: tuple[int, ...] = ()
) -> tuple[list[int], Answer]:
    """Tokens at random to the end of the grammar, and what is read of them."""
    vocabulary = vocabulary_of(format_name)
    text, prompt, after = grammar_of(format_name, request, beside)
    constraint = begin(vocabulary, text, after)
    thought: list[int] = []
    if after is not None:
        thought = [*vocabulary.encode("Hm."), after]
        if prompt.start is Start.UNDECIDED:
            thought = [vocabulary.think_ids[0] or 0, *thought]
        constraint.observe(thought)
    ids = thought + walk(vocabulary, constraint, seed, prefer=(*closing(vocabulary, format_name), *prefer))
    single = bool(request.tool_choice.function_name) or (
        request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    )
    rules = replace(rules_of(format_name, prompt.start), forced_ids=prompt.forced_ids, max_calls=1 if single else None)
    return ids, read_tokens(rules, [[token_id] for token_id in ids])[0]


def check(answer: Answer) -> None:
    assert answer.calls
    assert answer.content == ""
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        assert jsonschema_rs.is_valid(SCHEMAS[call.name], arguments, validate_formats=True), arguments


@pytest.mark.parametrize("format_name", WITH_CALLS)
@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_is_demanded(format_name: str, seed: int) -> None:
    thinking = False if FORMATS[format_name].thinking is Thinking.SWITCH else None
    _, answer = speak(format_name, ask(tool_choice=REQUIRED, thinking=thinking), seed)
    check(answer)
    _, answer = speak(format_name, ask(tool_choice=NAMED, thinking=thinking), seed)
    check(answer)
    assert [call.name for call in answer.calls] == ["look-up"]
    _, answer = speak(format_name, ask(tool_choice=REQUIRED, thinking=thinking, parallel_tool_calls=False), seed)
    check(answer)
    assert len(answer.calls) == 1


@pytest.mark.parametrize("format_name", [name for name in WITH_CALLS if FORMATS[name].thinking is not Thinking.NEVER])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_is_demanded_comes_after_the_reasoning(format_name: str, seed: int) -> None:
    thinking = True if FORMATS[format_name].thinking is Thinking.SWITCH else None
    for choice in (REQUIRED, NAMED):
        _, answer = speak(format_name, ask(tool_choice=choice, thinking=thinking), seed)
        check(answer)
        assert answer.reasoning == "Hm."


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_any_text_or_strict_calls(format_name: str) -> None:
    vocabulary, shape = vocabulary_of(format_name), FORMATS[format_name].shape
    assert shape is not None
    thinking = False if FORMATS[format_name].thinking is Thinking.SWITCH else None
    request = ask(thinking=thinking)
    text, _, after = grammar_of(format_name, request)
    opening = opening_token(FORMATS[format_name], vocabulary.control)
    assert opening in vocabulary.encode(shape.begin)
    constraint = begin(vocabulary, text, after, opening)
    if after is not None:
        assert EOS not in allowed(constraint, vocabulary.size)
        constraint.observe([after])
    # It may end before it has begun, and say anything: only what follows the opening token is bound.
    assert len(allowed(constraint, vocabulary.size)) == vocabulary.size
    plain = vocabulary.encode("a <b> </c> \n\n< 写")
    constraint.observe(plain)
    assert not constraint.error
    assert EOS in allowed(constraint, vocabulary.size)
    constraint.observe(vocabulary.encode(shape.begin))
    assert EOS not in allowed(constraint, vocabulary.size)
    ids = walk(vocabulary, constraint, 1, prefer=closing(vocabulary, format_name))
    whole = [*plain, *vocabulary.encode(shape.begin), *ids]
    answer, _ = read_tokens(rules_of(format_name, Start.CONTENT), [whole])
    assert answer.content == "a <b> </c> \n\n< 写".rstrip("\n")
    check(replace(answer, content=""))


CONTROL = {
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜tool▁call▁begin｜>",
    "<|im_end|>",
    "<|tool_call_end|>",
}


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_an_answer_of_a_schema_or_calls(format_name: str) -> None:
    vocabulary, shape = vocabulary_of(format_name), FORMATS[format_name].shape
    assert shape is not None
    thinking = False if FORMATS[format_name].thinking is Thinking.SWITCH else None
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}  # fmt: skip
    heard = set()
    openings = tuple(vocabulary.encode(shape.begin)[:1])
    for constraint in (
        text_pb2.Constraint(json_schema=json.dumps(schema)),
        text_pb2.Constraint(regex="[0-9]{3}"),
        text_pb2.Constraint(choices=text_pb2.ChoiceList(texts=["yes", "no"])),
        text_pb2.Constraint(grammar='root ::= "sea" [0-9]'),
    ):
        beside = compile_constraint(constraint, engine_of(vocabulary))
        for seed in range(6):
            prefer = openings if seed % 2 else ()
            _, answer = speak(format_name, ask(thinking=thinking, strict=False), seed, beside, prefer)
            if answer.calls:
                assert answer.content == ""
                assert {call.name for call in answer.calls} <= SCHEMAS.keys()
            elif constraint.json_schema:
                assert jsonschema_rs.is_valid(schema, json.loads(answer.content))
            else:
                assert answer.content.isdecimal() or answer.content in ("yes", "no") or answer.content[:3] == "sea"
            heard.add(bool(answer.calls))
    assert heard == {False, True}


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_tokens_alone_rebuild_it(format_name: str) -> None:
    thinking = True if FORMATS[format_name].thinking is Thinking.SWITCH else None
    request = ask(tool_choice=REQUIRED, thinking=thinking)
    vocabulary = vocabulary_of(format_name)
    text, prompt, after = grammar_of(format_name, request)
    ids, whole = speak(format_name, request, 5)
    rules = replace(rules_of(format_name, prompt.start), forced_ids=prompt.forced_ids)
    followed = begin(vocabulary, text, after)
    for cut in range(len(ids)):
        rebuilt = begin(vocabulary, text, after)
        rebuilt.observe(ids[:cut])
        assert not rebuilt.has_ended
        if cut % 7 == 0:
            assert allowed(rebuilt, vocabulary.size, cut) == allowed(followed, vocabulary.size, cut)
        assert ids[cut] in allowed(rebuilt, vocabulary.size, cut)
        followed.observe(ids[cut : cut + 1])
        machine, answer = ChoiceMachine(rules), Answer()
        answer.add(machine.push(ids[:cut]).pieces)
        answer.add(machine.push(ids[cut:]).pieces).add(machine.flush())
        assert answer == whole
    assert followed.has_ended


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
def test_marks_that_the_vocabulary_lacks_are_spelled(format_name: str) -> None:
    vocabulary, chat_format = without_marks(), FORMATS[format_name]
    assert chat_format.shape is not None
    prompts = PromptBuilder(replace(tiny_checkpoint(), chat_templates={}), vocabulary, chat_format=format_name)
    syntax = OutputSyntax(vocabulary.marks, chat_format.calls(vocabulary.marks))
    rules = replace(
        rules_of(format_name, Start.CONTENT),
        table=vocabulary.chat_table(calls=True, show_marks=False),
        syntax=syntax,
    )
    for request in (ask(tool_choice=REQUIRED), ask()):
        prompt = prompts.chat(request, time_unix_s=0, constrains=True)
        engine = engine_of(vocabulary)
        text, opening = compile_calls(request, chat_format, vocabulary.control, prompt, engine, beside=None)
        assert opening is None
        constraint = begin(vocabulary, text)
        ids = list(prompt.forced_ids)
        if not ids:
            ids = vocabulary.encode(f"Hm.{chat_format.shape.begin}")
            constraint.observe(ids)
        ids += walk(vocabulary, constraint, 2, prefer=closing(vocabulary, format_name))
        answer, _ = read_tokens(rules, [ids])
        check(replace(answer, content=""))
        assert answer.content in ("", "Hm.")


def test_a_control_token_in_a_name_is_text() -> None:
    name = "<｜tool▁call▁end｜>"
    request = ask(tool_choice=REQUIRED)
    request.tools[0].name = name
    text, _, _ = grammar_of("deepseek-v3", request)
    control: ControlTokens = vocabulary_of("deepseek-v3").control
    assert json.dumps(name, ensure_ascii=False)[1:-1] in json.loads(text)["grammars"][0]["lark_grammar"]
    assert text.count(f"<[{control.ids[name]}]>") == len(SCHEMAS)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "strin"}}}, ".properties.a"),
        ({"properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, ".properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/nowhere"}}}, ".properties.a"),
    ],
)
@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1", "deepseek-v4"])
def test_a_strict_schema_that_cannot_be_compiled_names_the_place(
    format_name: str, schema: dict[str, Any], place: str
) -> None:
    request = ask(thinking=False if format_name != "deepseek-v3" else None)
    request.tools.add(name="bad", parameters_json=json.dumps(schema), strict=True)
    with pytest.raises(InvalidRequestError) as caught:
        grammar_of(format_name, request)
    assert caught.value.reason == "INVALID_TOOLS"
    assert caught.value.field == f"tools[3].function.parameters{place}"
    # Not strict: what can be enforced is, and the tool may be called all the same.
    request.tools[3].strict = False
    grammar_of(format_name, request)


def test_what_dsml_cannot_say_of_the_whole_object() -> None:
    request = ask(thinking=False)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {}]}
    request.tools.add(name="odd", parameters_json=json.dumps(schema), strict=True)
    with pytest.raises(InvalidRequestError, match="anyOf") as caught:
        grammar_of("deepseek-v4", request)
    assert caught.value.field == "tools[3].function.parameters"
    grammar_of("deepseek-v3.1", request)  # JSON can
    request.tools[3].strict = False
    grammar_of("deepseek-v4", request)


def test_more_than_can_be_compiled_is_refused() -> None:
    request = ask()
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f"^{i}{'x' * 300}$"} for i in range(900)},
    }
    request.tools.add(name="wide", parameters_json=json.dumps(wide), strict=True)
    with pytest.raises(InvalidRequestError, match=r"KiB|costs too much") as caught:
        grammar_of("deepseek-v3", request)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    request.tools[3].strict = False  # then it is any object
    text, _, _ = grammar_of("deepseek-v3", request)
    assert len(text) < 10_000


@pytest.mark.parametrize("value", ["a", "a\nb", "</", "</x>", ""])
def test_raw_strings_hold_what_tags_look_like(value: str) -> None:
    """Only the token ends a value: what merely looks like its tag is text."""
    request = ask(thinking=False)
    del request.tools[1:]
    request.tools[0].parameters_json = json.dumps({"properties": {"s": {"type": "string"}}, "required": ["s"]})
    vocabulary = vocabulary_of("deepseek-v4")
    text, _, _ = grammar_of("deepseek-v4", request)
    constraint = begin(vocabulary, text, opening=opening_token(FORMATS["deepseek-v4"], vocabulary.control))
    made = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        f'<｜DSML｜parameter name="s" string="true">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    )
    ids = vocabulary.encode(made)
    constraint.observe(ids)
    assert not constraint.error
    assert constraint.has_ended
    answer, _ = read_tokens(rules_of("deepseek-v4", Start.CONTENT), [ids])
    assert json.loads(answer.calls[0].arguments) == {"s": value}


def test_text_holds_no_control_token() -> None:
    """Neither a string of JSON nor a free text: the vocabulary flags few of them special."""
    vocabulary = tiny()
    engine = engine_of(vocabulary)
    with pytest.raises(GrammarError):
        engine.compile("{")
    grammar = compile_constraint(text_pb2.Constraint(regex="(.|\n)*"), engine)
    choices = {
        vocabulary.raw_text.bytes_of(i).decode("utf-8", "replace")
        for i in allowed(begin(vocabulary, grammar), vocabulary.size)
    }
    assert "a" in choices
    assert not choices & CONTROL
