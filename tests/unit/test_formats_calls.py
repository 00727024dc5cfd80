"""Reasoning, content and calls read from answers in every chat format, whatever the pieces they come in."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from services.tokenizer.choice import ChoiceMachine
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.base import Thinking
from services.tokenizer.formats.marks import DSML, Marks
from services.tokenizer.formats.output import OutputSyntax
from services.tokenizer.formats.reasoning import Start
from tests.support.answers import EOS, Answer, read_pieces, read_tokens, rules_of, stream_text, syntax_of
from tests.support.vocabularies import vocabulary_of

ARGUMENTS: list[dict[str, Any]] = [
    {"code": 123},
    {"a": {"b": "x"}},
    {"l": [1, 2]},
    {"n": None},
    {"s": "```\n"},
    {},
    {"city": "Paris", "text": 'a "b" <c> </d>\n\n```json\n写', "deep": [{"k": [True, 1.5]}], "empty": ""},
]
WITH_CALLS = [name for name, chat_format in FORMATS.items() if chat_format.shape is not None]
THINKING = [name for name, chat_format in FORMATS.items() if chat_format.thinking is not Thinking.NEVER]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def block(format_name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A block of calls, put together from what the format says of them."""
    shape = FORMATS[format_name].shape
    assert shape is not None
    tag = {"deepseek-v4.1": "<｜DSML｜ parameter", "": ""}.get(format_name, "<｜DSML｜parameter")
    text = ""
    for index, (name, arguments) in enumerate(calls):
        text += shape.between if index else shape.begin
        text += name + shape.after_name.replace("{index}", str(index))
        is_dsml = DSML in shape.begin
        if not is_dsml:
            text += as_json(arguments)
        for key, value in arguments.items() if is_dsml else ():
            shown = value if isinstance(value, str) else as_json(value)
            close = tag.replace("<", "</")
            text += f'{tag} name="{key}" string="{"true" if isinstance(value, str) else "false"}">{shown}{close}>\n'
        text += shape.end_call
    return text + shape.end


def expected_calls(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(name, as_json(arguments)) for name, arguments in calls]


def whole(format_name: str, text: str, start: Start = Start.CONTENT) -> Answer:
    return read_pieces(syntax_of(format_name), start, [stream_text(format_name, text)])


def assert_any_pieces(format_name: str, text: str, start: Start, expected: Answer) -> None:
    """Single characters, every cut in two, and some in three."""
    stream = stream_text(format_name, text)
    syntax = syntax_of(format_name)
    assert read_pieces(syntax, start, list(stream)) == expected
    for cut in range(1, len(stream), 1 + len(stream) // 500):
        assert read_pieces(syntax, start, [stream[:cut], stream[cut:]]) == expected, stream[:cut]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=as_json)
@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_calls_of_every_format(format_name: str, arguments: dict[str, Any]) -> None:
    calls = [("get_weather", arguments), ("now", {}), ("f-2", {"x": 1})]
    text = "Let me look." + block(format_name, calls)
    answer = whole(format_name, text)
    assert answer.plain == ("", "Let me look.", expected_calls(calls))
    assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    assert_any_pieces(format_name, text, Start.CONTENT, answer)


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_every_pair_of_cuts_gives_the_same(format_name: str) -> None:
    stream = stream_text(format_name, "ok" + block(format_name, [("f", {"s": "```\n"}), ("g", {})]))
    syntax = syntax_of(format_name)
    expected = read_pieces(syntax, Start.CONTENT, [stream])
    for first in range(1, len(stream)):
        for second in range(first + 1, len(stream)):
            pieces = [stream[:first], stream[first:second], stream[second:]]
            assert read_pieces(syntax, Start.CONTENT, pieces) == expected


@pytest.mark.parametrize("format_name", THINKING)
def test_reasoning_then_calls(format_name: str) -> None:
    made = FORMATS[format_name].shape is not None
    text = "\nHm <b>.\n</think>\n\nOn it." + (block(format_name, [("f", {"a": 1})]) if made else "")
    for start, opened in ((Start.REASONING, text), (Start.UNDECIDED, f"<think>{text}")):
        answer = whole(format_name, opened, start)
        assert answer.reasoning == "Hm <b>."
        assert answer.content == "On it."
        assert [call.name for call in answer.calls] == (["f"] if made else [])
        assert_any_pieces(format_name, opened, start, answer)


@pytest.mark.parametrize("format_name", THINKING)
def test_reasoning_tokens_are_those_between_the_tags(format_name: str) -> None:
    vocabulary = vocabulary_of(format_name)
    thought, rest = vocabulary.encode("\nHm 𠮷 <b>.\n"), vocabulary.encode("\n\n4")
    opened, closed = vocabulary.think_ids
    assert opened is not None
    assert closed is not None
    for start, ids in (
        (Start.REASONING, [*thought, closed, *rest]),
        (Start.UNDECIDED, [opened, *thought, closed, *rest]),
    ):
        machine = ChoiceMachine(rules_of(format_name, start))
        machine.push(ids)
        assert machine.num_reasoning_tokens == len(thought)
    for start in (Start.UNDECIDED, Start.CONTENT):
        machine = ChoiceMachine(rules_of(format_name, start))
        machine.push([*rest, *thought])
        assert machine.num_reasoning_tokens == 0


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_the_ids_are_the_models_own_where_it_writes_them(format_name: str) -> None:
    answer = whole(format_name, block(format_name, [("f", {}), ("g.h", {})]))
    expected = ["functions.f:0", "functions.g.h:1"] if format_name.startswith("kimi") else ["", ""]
    assert [call.call_id for call in answer.calls] == expected
    assert [call.name for call in answer.calls] == ["f", "g.h"]


FENCED = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
BARE = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v3.1"])
@pytest.mark.parametrize(
    "text",
    [
        FENCED,
        BARE,
        f"{FENCED}<｜tool▁calls▁end｜>",
        FENCED.replace("\n```json\n", "\n"),
        FENCED.replace("json", ""),
        FENCED.replace("```json\n", "```json "),
        FENCED.replace("\n```<", "```<"),
        FENCED.replace("\n```<", "<"),
        BARE.replace('{"a": 1}', '\n{"a": 1}\n'),
        BARE.replace('{"a": 1}', '```json\n{"a": 1}\n```'),
        BARE.replace("<｜tool▁calls▁begin｜>", ""),
        BARE.replace("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        BARE.replace("<｜tool▁call▁end｜>", ""),
        FENCED.replace("<｜tool▁call▁end｜>", ""),
    ],
)
def test_either_form_of_a_block_and_what_models_make_of_it(format_name: str, text: str) -> None:
    answer = whole(format_name, text)
    assert answer.plain == ("", "", [("f", '{"a": 1}')])
    assert_any_pieces(format_name, text, Start.CONTENT, answer)


def test_a_tool_that_is_called_function() -> None:
    text = BARE.replace("f<｜tool▁sep｜>", "function<｜tool▁sep｜>")
    assert whole("deepseek-v3.1", text).plain == ("", "", [("function", '{"a": 1}')])


CALLS, CALL, SEP, END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"


@pytest.mark.parametrize(
    ("format_name", "text", "content"),
    [
        ("deepseek-v3", f"a{CALLS}b", "ab"),
        ("deepseek-v3", f"a{CALLS}{CALL}b{END}c", "abc"),
        ("deepseek-v3", f"a{CALLS}{CALL}function{SEP}{END}", "afunction"),
        ("deepseek-v3", f"a{CALLS}{CALL}function{SEP}get_we", "afunctionget_we"),
        ("deepseek-v3", f"a{CALL}{SEP}{{}}{END}", "a{}"),
        ("deepseek-v3.1", f"a{CALLS}{CALL}{'x' * 2000}{SEP}{{}}{END}", "a" + "x" * 2000 + "{}"),
        ("deepseek-v3.1", f"a{SEP}b{END}c", "abc"),
        ("deepseek-v4", "a\n\n<｜DSML｜other>b</｜DSML｜other>", "a\n\n<other>b</other>"),
        ("deepseek-v4", "a\n\n<｜DSML｜function_calls>\nb", "a\n\n<function_calls>\nb"),
        ("deepseek-v3.2", "a\n\n<｜DSML｜tool_calls>\nb", "a\n\n<tool_calls>\nb"),
        ("deepseek-v4", "a\n\n<｜DSML｜tool_calls>\nb</｜DSML｜tool_calls>", "ab"),
        ("deepseek-v4", "a\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=x>", "a<invoke name=x>"),
        ("deepseek-v4", f'a<｜DSML｜invoke name="{"x" * 2000}">', f'a<invoke name="{"x" * 2000}">'),
        ("deepseek-v4", "a\n\n<｜DSML｜tool_cal", "a\n\n<tool_cal"),
        ("deepseek-v4", "a ｜ <｜DSML｜ < </｜DSML｜ \n\n\n", "a ｜ < < </ \n\n\n"),
        ("deepseek-v4", '<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>',
         '<parameter name="a" string="true">b</parameter>'),
        ("deepseek-v4", "<｜DSML｜tool_calls><｜DSML｜tool_calls><｜DSML｜invoke name=\"\">", "<tool_calls><invoke name=\"\">"),
        ("kimi-k2", f"a{KIMI}b", "ab"),
        ("kimi-k2", f"a{KIMI}:0<|tool_call_argument_begin|>{{}}", "a:0{}"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_without_its_marks(format_name: str, text: str, content: str) -> None:
    answer = whole(format_name, text)
    assert answer.plain == ("", content, [])
    assert_any_pieces(format_name, text, Start.CONTENT, answer)


@pytest.mark.parametrize("length", [1000, 1024, 1025, 3000])
@pytest.mark.parametrize(
    "text",
    [
        f"{CALLS}{CALL}function{SEP}[]f\n```json\n{{}}\n```{END}",
        f"{CALLS}{CALL}function{SEP}[]{{}}{END}",
        f"{CALLS}{CALL}function{SEP}f\n[]```json\n{{}}\n```{END}",
        f"{CALLS}{CALL}f[]{SEP}[]```json {{}}{END}",
        f"{CALLS}{CALL}f{SEP}{{}}[]```[]{END}[]after",
        f"[]{CALLS}[]{CALL}f[]",
    ],
)
@pytest.mark.parametrize("filler", [" ", "\n", "`", "x"])
def test_long_stretches_give_the_same_in_any_pieces(text: str, filler: str, length: int) -> None:
    stream = stream_text("deepseek-v3", text.replace("[]", filler * length))
    syntax = syntax_of("deepseek-v3")
    expected = read_pieces(syntax, Start.UNDECIDED, [stream])
    assert read_pieces(syntax, Start.UNDECIDED, list(stream)) == expected
    for size in (7, 1000, 1030):
        pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
        assert read_pieces(syntax, Start.UNDECIDED, pieces) == expected


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v4", "kimi-k2"])
@pytest.mark.parametrize("filler", [" ", "\n", "<", "`", "{"])
def test_a_hostile_answer_costs_linear_time(format_name: str, filler: str) -> None:
    shape = FORMATS[format_name].shape
    assert shape is not None
    begun = f"{shape.begin}f{shape.after_name}"
    for start, head in ((Start.UNDECIDED, ""), (Start.REASONING, ""), (Start.CONTENT, "a"), (Start.CONTENT, begun)):
        pieces = [stream_text(format_name, head), *[filler] * 20_000]
        began_s = time.process_time()
        read_pieces(syntax_of(format_name), start, pieces)
        assert time.process_time() - began_s < 3  # 0.1 s


def invoke(*parameters: str) -> str:
    return '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n' + "\n".join(parameters)


def parameter(value: str, kind: str = "false", close: str = "</｜DSML｜parameter>") -> str:
    return f'<｜DSML｜parameter name="k" string="{kind}">{value}{close}'


END_BLOCK = "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        (invoke(parameter("Paris")) + END_BLOCK, '{"k": "Paris"}', ""),
        (invoke(parameter("NaN")) + END_BLOCK, '{"k": "NaN"}', ""),
        (invoke(parameter("")) + END_BLOCK, '{"k": ""}', ""),
        (invoke(parameter("[" * 1500)) + END_BLOCK, '{"k": "' + "[" * 1500 + '"}', ""),
        (invoke(parameter(' {"a": [1]} ')) + END_BLOCK, '{"k":  {"a": [1]} }', ""),
        (invoke(parameter("a<b></c>", "true")) + END_BLOCK, '{"k": "a<b></c>"}', ""),
        (invoke(parameter("x", "true", close="")) + END_BLOCK, '{"k": "x\\n"}', ""),
        (invoke(parameter("1", close="\n</｜DSML｜invoke>")), '{"k": 1\n}', ""),
        (invoke(parameter("1"), "stray") + END_BLOCK, '{"k": 1}', "stray\n"),
        (invoke("<｜DSML｜other>", parameter("1")) + END_BLOCK, '{"k": 1}', "<other>\n"),
        (invoke(parameter("1")) + END_BLOCK.replace("\n</｜DSML｜invoke>", ""), '{"k": 1}', ""),
        (invoke(parameter("1")) + END_BLOCK + "\n\nafter", '{"k": 1}', "after"),
        (invoke(parameter("1")).replace("<｜DSML｜tool_calls>\n", "") + END_BLOCK, '{"k": 1}', ""),
    ],
)
def test_dsml_that_is_not_quite_right(text: str, arguments: str, content: str) -> None:
    answer = whole("deepseek-v4", text)
    assert answer.plain == ("", content, [("f", arguments)])
    json.loads(arguments)
    assert_any_pieces("deepseek-v4", text, Start.CONTENT, answer)


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_an_answer_that_stops_anywhere_invents_nothing(format_name: str) -> None:
    calls = [("f", {"a": "x", "b": [1]}), ("g", {"c": "y"})]
    stream = stream_text(format_name, "ok" + block(format_name, calls))
    expected = [as_json(arguments) for _, arguments in calls]
    for cut in range(len(stream)):
        answer = read_pieces(syntax_of(format_name), Start.CONTENT, list(stream[:cut]))
        for call, arguments in zip(answer.calls, expected, strict=False):
            assert arguments.startswith(call.arguments)
        if answer.calls:
            assert answer.content == "ok"
        else:
            assert answer.content.startswith("ok"[:cut])
        assert not any("\ud800" <= char <= "\udfff" for char in answer.content)


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_a_vocabulary_that_has_no_tokens_for_the_marks_spells_them(format_name: str) -> None:
    marks = Marks({})
    syntax = OutputSyntax(marks, FORMATS[format_name].calls(marks))
    calls = [("f", {"s": "<x", "n": [1]}), ("g", {})]
    text = "<think>Hm <</think>\n\nok <" + block(format_name, calls) + "\n"
    expected = read_pieces(syntax, Start.UNDECIDED, [text])
    assert expected.plain == ("Hm <", "ok <", expected_calls(calls))
    assert read_pieces(syntax, Start.UNDECIDED, list(text)) == expected
    for first in range(1, len(text)):
        for size in (1, 5, 20):
            pieces = [text[:first], text[first : first + size], text[first + size :]]
            assert read_pieces(syntax, Start.UNDECIDED, pieces) == expected


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_marks_that_the_model_merely_spells_are_text(format_name: str) -> None:
    text = block(format_name, [("f", {"a": 1})])
    assert read_pieces(syntax_of(format_name), Start.CONTENT_CONTINUED, [text]).plain == ("", text, [])


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_without_tools_no_call_is_read_and_no_mark_is_shown(format_name: str) -> None:
    vocabulary = vocabulary_of(format_name)
    text = "ok" + block(format_name, [("f", {"a": 1})])
    ids = vocabulary.encode(text)
    answer, _ = read_tokens(rules_of(format_name, Start.CONTENT, calls=False), [ids])
    plain = text
    for token in vocabulary.control.ids:
        plain = plain.replace(token, "")
    assert answer.plain == ("", plain, [])
    shown, _ = read_tokens(rules_of(format_name, Start.CONTENT, calls=False, show_marks=True), [ids])
    assert shown.content == text


def test_malformed_calls_are_spelled_where_marks_are_shown() -> None:
    text = "a\n\n<｜DSML｜other>b<｜User｜>"
    answer, _ = read_tokens(
        rules_of("deepseek-v4", Start.CONTENT, show_marks=True), [vocabulary_of("deepseek-v4").encode(text)]
    )
    assert answer.content == text


@pytest.mark.parametrize("format_name", WITH_CALLS)
def test_a_call_before_the_end_of_the_reasoning(format_name: str) -> None:
    """Malformed, but for Kimi, whose calls end the reasoning."""
    if format_name not in THINKING:
        return
    text = "hm" + block(format_name, [("f", {"a": 1})])
    answer = whole(format_name, text, Start.REASONING)
    if format_name.startswith("kimi"):
        assert answer.plain == ("hm", "", [("f", '{"a": 1}')])
    else:
        assert answer.content == ""
        assert not answer.calls
        assert answer.reasoning.startswith("hm")
    assert_any_pieces(format_name, text, Start.REASONING, answer)


def test_blanks_around_calls() -> None:
    text = "  " + block("deepseek-v3", [("f", {})]) + "\n \n"
    assert whole("deepseek-v3", text, Start.UNDECIDED).plain == ("", "", [("f", "{}")])
    assert whole("deepseek-v3", "  \n", Start.UNDECIDED).content == "  \n"
    assert whole("deepseek-v4", "a\n\n\n" + block("deepseek-v4", [("f", {})])[2:]).content == "a\n"


BLOCK_FRAGMENTS = [
    CALLS, CALL, SEP, END, "<｜tool▁calls▁end｜>", "function", "f", "\n```json\n", "{}", "\n```", "\n", " "
]  # fmt: skip
KIMI_FRAGMENTS = [
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "{}",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", " ", "x",
]  # fmt: skip


def fragments(format_name: str) -> list[str]:
    """Pieces of a format's syntax, and whole blocks."""
    shape = FORMATS[format_name].shape
    if shape is None:
        return BLOCK_FRAGMENTS
    blocks = [block(format_name, [("f", arguments)]) for arguments in ({}, {"a": "x"})]
    if DSML not in shape.begin:
        return [*(KIMI_FRAGMENTS if format_name.startswith("kimi") else BLOCK_FRAGMENTS), *blocks]
    name = shape.end.removeprefix("</｜DSML｜")
    prefix = " " if name.startswith(" ") else ""
    inner = ('invoke name="f">', "invoke>", 'parameter name="a"', "parameter>")
    return [
        "｜DSML｜", "<", "</", "<｜DSML｜", "</｜DSML｜", "\n", "\n\n", ">", name, *(f"{prefix}{tag}" for tag in inner),
        ' string="true">', ' string="false">', "1", "x", *blocks,
    ]  # fmt: skip


COMMON = ["<think>", "</think>", "a", "\n", " "]
NUM_SPLITS = 100_000
SYNTAXES = ["deepseek-v2", "deepseek-v3", "deepseek-v3.2", "deepseek-v4", "deepseek-v4.1", "kimi-k2"]
"""One format for each syntax that is read; the others share theirs."""


@pytest.mark.parametrize("format_name", SYNTAXES)
def test_random_pieces_of_random_answers(format_name: str) -> None:
    """Whatever is written, and however it is cut: the same answer, no sentinel in it, and nothing raised."""
    rng = random.Random(format_name)
    syntax = syntax_of(format_name)
    parts = [stream_text(format_name, part) for part in (*fragments(format_name), *COMMON)]
    starts = list(Start)
    for number in range(NUM_SPLITS):
        if number % 10 == 0:
            stream = "".join(rng.choices(parts, k=rng.randrange(1, 7)))
            start = rng.choice(starts)
            expected = read_pieces(syntax, start, [stream])
            joined = expected.reasoning + expected.content + "".join(c.name + c.arguments for c in expected.calls)
            assert joined.isascii() or not any("\ud800" <= char <= "\udfff" for char in joined)
        first, second = sorted((rng.randrange(len(stream) + 1), rng.randrange(len(stream) + 1)))
        pieces = stream[:first], stream[first:second], stream[second:]
        assert read_pieces(syntax, start, pieces) == expected, pieces


def test_every_format_is_read_by_one_of_these_syntaxes() -> None:
    known = {repr(FORMATS[name].calls(vocabulary_of(name).marks)) for name in SYNTAXES}
    assert known == {repr(chat_format.calls(vocabulary_of(name).marks)) for name, chat_format in FORMATS.items()}


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_a_resume_at_every_token_joins_without_a_seam(format_name: str) -> None:
    vocabulary = vocabulary_of(format_name)
    text = "<think>\nHm 𠮷.\n</think>\n\nOn it 😀."
    if FORMATS[format_name].shape is not None:
        text += block(format_name, [("f", {"a": "x\n𠮷", "b": [1]}), ("g", {})])
    ids = [*vocabulary.encode(text), EOS]
    rules = rules_of(format_name, Start.UNDECIDED)
    expected, end = read_tokens(rules, [[token_id] for token_id in ids])
    assert end is not None
    assert end.stop_token_id == EOS
    assert read_tokens(rules, [ids]) == (expected, end)
    for cut in range(len(ids) + 1):
        before, _ = read_tokens(rules, [ids[:cut]], ends=False)
        machine = ChoiceMachine(rules)
        machine.push(ids[:cut])  # silently: it was delivered
        before.add(machine.push(ids[cut:]).pieces)
        assert before == expected, cut
        assert machine.end == end
        assert machine.num_reasoning_tokens > 0
