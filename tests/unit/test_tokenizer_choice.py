"""One choice: what is given after tokens t1…tk depends on t1…tk alone, and a resume continues it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.choice import ChoiceMachine, ChoiceRules, End
from services.tokenizer.decoder import decode_all
from services.tokenizer.formats.events import Event, Kind
from services.tokenizer.formats.output import OutputSyntax
from services.tokenizer.formats.reasoning import Start
from services.tokenizer.stop_strings import compile_stop_strings
from tests.support.answers import Answer, rules_of
from tests.support.vocabularies import v4

EOS = 1


def rules(
    *,
    stops: Sequence[str] = (),
    include: bool = False,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    start: Start | None = None,
    in_reasoning: bool = False,
) -> ChoiceRules:
    return ChoiceRules(
        table=v4().plain_text if start is None else v4().chat_table(calls=False, show_marks=False),
        stop_token_ids=frozenset({EOS}),
        stop_strings=compile_stop_strings(stops, include_in_output=include) if stops else None,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        syntax=OutputSyntax(v4().marks, None) if start is not None else None,
        start=start or Start.CONTENT_CONTINUED,
        stop_in_reasoning=in_reasoning,
    )


def run(machine: ChoiceMachine, chunks: Sequence[Sequence[int]]) -> tuple[str, str, int, End | None]:
    reasoning = content = ""
    consumed = 0
    for chunk in chunks:
        output = machine.push(chunk)
        assert output.num_tokens <= len(chunk)
        assert sum(piece.num_tokens for piece in output.pieces) == output.num_tokens
        reasoning += "".join(piece.text for piece in output.pieces if piece.kind is Kind.REASONING)
        content += "".join(piece.text for piece in output.pieces if piece.kind is Kind.CONTENT)
        consumed += output.num_tokens
        if machine.end is not None:
            break
    return reasoning, content, consumed, machine.end


def test_a_stop_token_is_counted_and_not_shown() -> None:
    machine = ChoiceMachine(rules())
    assert run(machine, [[*v4().encode("Hello"), EOS, 5, 6]]) == ("", "Hello", 2, End(stop_token_id=EOS))
    assert machine.push([7]).num_tokens == 0


def test_the_budget_releases_what_was_held() -> None:
    machine = ChoiceMachine(rules(stops=["Hello world"], max_tokens=1))
    assert run(machine, [v4().encode("Hello world")]) == ("", "Hello", 1, End())
    machine = ChoiceMachine(rules(max_tokens=3))
    assert run(machine, [[175, 257, 109, 118]]) == ("", "\ufffd", 3, End())


def test_without_a_budget_whoever_ends_it_flushes() -> None:
    machine = ChoiceMachine(rules(stops=["Hello world"]))
    assert run(machine, [v4().encode("Hello")])[1] == ""
    assert machine.flush() == [Event(Kind.CONTENT, "Hello")]


def test_no_tokens_asked_for() -> None:
    machine = ChoiceMachine(rules(max_tokens=0))
    assert machine.end == End()
    assert machine.push([5]).num_tokens == 0


def test_stop_strings_begin_after_min_tokens() -> None:
    ids = v4().encode("no no no no")
    assert run(ChoiceMachine(rules(stops=["no"])), [ids])[1:3] == ("", 1)
    assert run(ChoiceMachine(rules(stops=["no"], min_tokens=2)), [ids])[1:3] == ("no no ", 3)


THOUGHT_AND_ANSWER = "<think>\nThe answer: 4\n</think>\n\nSure. The answer: 4"


def test_stop_strings_are_looked_for_in_the_answer() -> None:
    ids = v4().encode(THOUGHT_AND_ANSWER)
    found = End(stop_string="answer:")
    for size in (1, 3, len(ids)):
        chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
        stop = rules(stops=["answer:"], start=Start.UNDECIDED)
        assert run(ChoiceMachine(stop), chunks)[:2] == ("The answer: 4", "Sure. The ")
        both = run(ChoiceMachine(replace(stop, stop_in_reasoning=True)), chunks)
        assert (both[:2], both[3]) == (("The ", ""), found)
    assert run(ChoiceMachine(rules(stops=["answer:"], start=Start.CONTENT)), [ids])[3] == found


def test_a_stop_string_lies_in_the_thought_or_in_the_answer_not_over_both() -> None:
    ids = v4().encode("<think>one</think>two")
    machine = ChoiceMachine(rules(stops=["onetwo", "one two"], start=Start.UNDECIDED, in_reasoning=True))
    assert run(machine, [[*ids, EOS]]) == ("one", "two", len(ids) + 1, End(stop_token_id=EOS))


@pytest.mark.parametrize("format_name", ["deepseek-v3", "deepseek-v4"])
def test_stop_strings_do_not_cut_calls(format_name: str) -> None:
    call = {
        "deepseek-v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a":"x"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek-v4": '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    }[format_name]
    ids = v4().encode(f"Hm, x\n\n</think>ok{call}")
    stops = compile_stop_strings(["x", "\n\n", "a"], include_in_output=False)
    machine = ChoiceMachine(replace(rules_of(format_name, Start.REASONING), stop_strings=stops))
    answer = Answer().add(machine.push([*ids, EOS]).pieces)
    assert machine.end == End(stop_token_id=EOS)
    assert (answer.reasoning, answer.content) == ("Hm, x", "ok")
    assert [call.name for call in answer.calls] == ["f"]
    assert json.loads(answer.calls[0].arguments) == {"a": "x"}


def test_a_stop_string_at_the_end_is_found_where_a_call_might_have_begun() -> None:
    ids = v4().encode("ok\n\n")
    stops = compile_stop_strings(["\n\n"], include_in_output=False)
    stop = replace(rules_of("deepseek-v4", Start.CONTENT), stop_strings=stops)
    by_string = End(stop_string="\n\n")
    for ends in ([EOS], v4().encode("more")):  # the model ends, or goes on
        machine = ChoiceMachine(stop)
        assert Answer().add(machine.push([*ids, *ends]).pieces).plain == ("", "ok", [])
        assert machine.end == by_string
    budget = ChoiceMachine(replace(stop, max_tokens=len(ids)))
    assert Answer().add(budget.push(ids).pieces).content == "ok"
    assert budget.end == by_string
    elsewhere = ChoiceMachine(stop)  # whoever ends it flushes
    answer = Answer().add(elsewhere.push(ids).pieces)
    assert answer.add(elsewhere.flush()).content == "ok"
    assert elsewhere.end == by_string


def test_reasoning_and_content_in_one_chunk() -> None:
    ids = v4().encode("<think>\nAdd them.\n</think>\n\n4")
    machine = ChoiceMachine(rules(start=Start.UNDECIDED))
    output = machine.push([*ids, EOS])
    thought, said = output.pieces
    assert (thought.kind, thought.text, said.kind, said.text) == (Kind.REASONING, "Add them.", Kind.CONTENT, "4")
    assert machine.num_reasoning_tokens == len(v4().encode("\nAdd them.\n"))
    assert 0 < said.num_tokens < thought.num_tokens < len(ids)


def test_conversation_marks_do_not_reach_the_content() -> None:
    ids = v4().encode("4<｜User｜>more<｜Assistant｜><｜tool▁calls▁begin｜>x")
    assert run(ChoiceMachine(rules(start=Start.CONTENT)), [ids])[1] == "4morex"


TOKENS = st.lists(
    st.one_of(
        st.sampled_from([28927, 225, 175, 257, 109, 118, 415, 14868, 128821, 128822, 128803, 2, EOS, 128825]),
        st.sampled_from(v4().encode("abc <think> own fox jumps\n\n</think> the end of it all.")),
        st.integers(0, v4().size - 1),
    ),
    min_size=1,
    max_size=30,
)
RULES = st.builds(
    rules,
    stops=st.lists(st.sampled_from(["own fox", "fox j", " ", "\n", "e", "😀", "</think>", "the end"]), max_size=3),
    include=st.booleans(),
    max_tokens=st.one_of(st.none(), st.integers(1, 30)),
    min_tokens=st.integers(0, 4),
    start=st.one_of(st.none(), st.sampled_from(list(Start))),
    in_reasoning=st.booleans(),
)


@given(TOKENS, RULES, st.data())
@settings(max_examples=200, deadline=None)
def test_any_chunking_and_any_resume_give_the_same(
    token_ids: list[int], rules: ChoiceRules, data: st.DataObject
) -> None:
    one_by_one = [[token_id] for token_id in token_ids]
    reference = run(ChoiceMachine(rules), one_by_one)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    chunks = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    chunked = ChoiceMachine(rules)
    assert run(chunked, chunks) == reference
    # A resume: the first k tokens silently, then the rest.
    k = data.draw(st.integers(0, reference[2]))
    before = run(ChoiceMachine(rules), one_by_one[:k]) if k else ("", "", 0, None)
    resumed = ChoiceMachine(rules)
    resumed.push(token_ids[:k])
    after = run(resumed, one_by_one[k:])
    assert (before[0] + after[0], before[1] + after[1], before[2] + after[2]) == reference[:3]
    assert resumed.end == reference[3]
    assert resumed.num_reasoning_tokens == chunked.num_reasoning_tokens
    assert resumed.flush() == chunked.flush() if reference[3] is None else True


FORCED = {
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "deepseek-v4": '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="',
}
CALL_PIECES = {
    "deepseek-v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f", "\n```json\n", "{}", "\n```",
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "😀", "</think>", "a", "\n", "<｜end▁of▁sentence｜>",
    ],
    "deepseek-v4": [
        "\n\n<｜DSML｜tool_calls>\n", '<｜DSML｜invoke name="', "f", '">\n', '<｜DSML｜parameter name="a" string="true">',
        '<｜DSML｜parameter name="b" string="false">', "1", "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n", "<", "｜DSML｜",
        "</｜DSML｜tool_calls>", "😀", "</think>", "a", "\n", "<｜end▁of▁sentence｜>",
    ],
}  # fmt: skip


@given(st.sampled_from(list(FORCED)), st.booleans(), st.sampled_from([None, 1]), st.data())
@settings(max_examples=300, deadline=None)
def test_any_chunking_and_any_resume_of_calls_give_the_same(
    format_name: str, forced: bool, max_calls: int | None, data: st.DataObject
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(CALL_PIECES[format_name]), min_size=1, max_size=14))
    token_ids = v4().encode("".join(pieces))
    start = Start.CONTENT if forced else data.draw(st.sampled_from(list(Start)))
    stops = data.draw(st.lists(st.sampled_from(["a", "{}", "😀", "\n", ">"]), max_size=1))
    rules = replace(
        rules_of(format_name, start),
        stop_strings=compile_stop_strings(stops, include_in_output=False) if stops else None,
        max_tokens=data.draw(st.one_of(st.none(), st.integers(1, 30))),
        max_calls=max_calls,
        stop_in_reasoning=data.draw(st.booleans()),
        forced_ids=tuple(v4().encode(FORCED[format_name])) if forced else (),
    )
    whole = ChoiceMachine(rules)
    reference = Answer().add(whole.push(token_ids).pieces)
    for cut in range(whole.num_tokens + 1):
        before = ChoiceMachine(rules)
        answer = Answer()
        for token_id in token_ids[:cut]:
            answer.add(before.push([token_id]).pieces)
        after = ChoiceMachine(rules)
        after.push(token_ids[:cut])
        answer.add(after.push(token_ids[cut:]).pieces)
        assert answer == reference
        assert (after.end, after.num_tokens) == (whole.end, whole.num_tokens)
        assert (after.num_calls, after.num_reasoning_tokens) == (whole.num_calls, whole.num_reasoning_tokens)
    assert max_calls is None or len(reference.calls) <= max_calls


def test_the_token_that_ends_the_last_call_may_begin_no_other() -> None:
    text = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜invoke name="g">\n'
    machine = ChoiceMachine(replace(rules_of("deepseek-v4", Start.CONTENT), max_calls=1))
    answer = Answer().add(machine.push(v4().encode(text)).pieces)
    assert machine.end == End(by_calls=True)
    assert answer.plain == ("", "", [("f", "{}")])


@given(TOKENS)
@settings(max_examples=200, deadline=None)
def test_plain_text_equals_one_shot_decoding(token_ids: list[int]) -> None:
    machine = ChoiceMachine(rules())
    _, content, consumed, end = run(machine, [[token_id] for token_id in token_ids])
    if end is None:
        content += "".join(event.text for event in machine.flush())
    shown = token_ids[:consumed]
    assert content == decode_all(v4().plain_text, [t for t in shown if t != EOS])
