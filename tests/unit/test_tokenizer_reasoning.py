"""The split at think tags: the same for every cut of the same text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.core.control_tokens import is_control_token
from services.tokenizer.formats.events import Kind
from services.tokenizer.formats.marks import END_THINK, THINK, Marks
from services.tokenizer.formats.output import OutputParser, OutputSyntax
from services.tokenizer.formats.reasoning import Start, start_of

AS_TOKENS = Marks({THINK: 1, END_THINK: 2})
OPEN_SENTINEL, CLOSE_SENTINEL = AS_TOKENS(THINK), AS_TOKENS(END_THINK)


def split(pieces: list[str], start: Start, *, tokens: bool = False) -> tuple[str, str]:
    parser = OutputParser(OutputSyntax(AS_TOKENS if tokens else Marks({}), None), start)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    reasoning = "".join(event.text for event in events if event.kind is Kind.REASONING)
    return reasoning, "".join(event.text for event in events if event.kind is Kind.CONTENT)


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (Start.REASONING, "Add them.</think>4", "Add them.", "4"),
        (Start.REASONING, "\nAdd them.\n</think>\n\n4", "Add them.", "4"),
        (Start.REASONING, "<think>\nAdd them.</think>4", "Add them.", "4"),
        (Start.UNDECIDED, "<think>\nAdd them.\n</think>\n\n4", "Add them.", "4"),
        (Start.UNDECIDED, "4", "", "4"),
        (Start.UNDECIDED, " 4 ", "", " 4 "),
        (Start.UNDECIDED, "<thin air", "", "<thin air"),
        (Start.CONTENT, "4", "", "4"),
        (Start.CONTENT, "\n4", "", "4"),
        (Start.CONTENT_CONTINUED, " 4", "", " 4"),
        (Start.REASONING, "never closed", "never closed", ""),
        (Start.REASONING, "a </thin air> b</think> c", "a </thin air> b", "c"),
        (Start.REASONING, "</think>4", "", "4"),
        (Start.REASONING_CONTINUED, " more</think>4", " more", "4"),
    ],
)
def test_whole_and_in_every_two_pieces(start: Start, text: str, reasoning: str, content: str) -> None:
    assert split([text], start) == (reasoning, content)
    assert split(list(text), start) == (reasoning, content)
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]], start) == (reasoning, content)
    with_tokens = text.replace("</think>", CLOSE_SENTINEL).replace("<think>", OPEN_SENTINEL)
    assert split([with_tokens], start, tokens=True) == (reasoning, content)
    assert split(list(with_tokens), start, tokens=True) == (reasoning, content)


def test_where_tags_are_tokens_their_spelling_is_text() -> None:
    assert split(["say </think> twice", CLOSE_SENTINEL, "4 </think>"], Start.REASONING, tokens=True) == (
        "say </think> twice",
        "4 </think>",
    )


def test_tag_tokens_out_of_place_never_reach_the_content() -> None:
    assert split(["a", CLOSE_SENTINEL, "b", OPEN_SENTINEL, "c"], Start.CONTENT, tokens=True) == ("", "abc")


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<", "/", "th", "ink>", " ", "\n", "a", "b", OPEN_SENTINEL, CLOSE_SENTINEL]
)


@given(st.lists(FRAGMENTS, max_size=12), st.sampled_from(list(Start)), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_any_cut_gives_the_same(fragments: list[str], start: Start, tokens: bool, data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split([text], start, tokens=tokens)
    assert split(pieces, start, tokens=tokens) == whole
    assert OPEN_SENTINEL not in "".join(whole)


@pytest.mark.parametrize(
    ("last", "text_follows", "continued", "expected"),
    [
        (10, False, False, Start.REASONING),
        (10, True, True, Start.REASONING_CONTINUED),
        (11, False, False, Start.CONTENT),
        (11, True, True, Start.CONTENT_CONTINUED),
        (5, False, False, Start.UNDECIDED),
        (5, True, False, Start.UNDECIDED),
        (5, True, True, Start.CONTENT_CONTINUED),
        (None, True, False, Start.UNDECIDED),
    ],
)
def test_start_comes_from_the_last_control_token(
    last: int | None, text_follows: bool, continued: bool, expected: Start
) -> None:
    assert start_of(last, 10, 11, text_follows=text_follows, continued=continued) is expected


@pytest.mark.parametrize(
    ("token", "hidden"),
    [
        ("<｜User｜>", True),
        ("<|EOT|>", True),
        ("<｜place▁holder▁no▁17｜>", True),
        ("<｜tool▁calls▁begin｜>", True),
        ("｜DSML｜", True),
        ("</think>", True),
        ("word", False),
        ("<word>", False),
        ("<|a|><|b|>", False),
    ],
)
def test_what_looks_like_a_control_token_is_hidden(token: str, hidden: bool) -> None:
    assert is_control_token(token) is hidden
