"""Stop strings: the earliest match after each token, and no more held back than it takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.stop_strings import StopMatcher, compile_stop_strings

PIECES = ["The quick br", "own", " fox", " jumps"]


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(compile_stop_strings(stops, include_in_output=include))
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    shown.append(matcher.flush())
    return shown, None


def test_a_stop_string_over_three_tokens() -> None:
    shown, stop = run(PIECES, ["own fox"])
    assert "".join(shown) == "The quick br"
    assert stop == "own fox"
    assert all("own" not in text for text in shown)


def test_a_near_miss_loses_nothing() -> None:
    shown, stop = run(["The quick br", "own", " fo", "al"], ["own fox"])
    assert shown == ["The quick br", "", "", "own foal", ""]
    assert stop is None


def test_the_end_releases_what_was_held() -> None:
    assert run(PIECES[:2], ["own fox"]) == (["The quick br", "", "own"], None)


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["jumps", "own fox"], "The quick br", "own fox"),  # the second completes first
        (["x", "own foxes"], "The quick brown fo", "x"),
        ([" "], "The", " "),
        (["fox jumps", "own"], "The quick br", "own"),
        (["own fox jumps over", "own fox"], "The quick br", "own fox"),
    ],
)
def test_the_earliest_match_wins(stops: list[str], text: str, stop: str) -> None:
    shown, found = run(PIECES, stops)
    assert ("".join(shown), found) == (text, stop)


def test_within_one_token_the_match_that_begins_first_wins() -> None:
    assert run(["abcd"], ["bc", "abcd"]) == ([""], "abcd")
    assert run(["xabab"], ["abab", "ab"]) == (["x"], "ab")


def test_included_stop_strings_are_shown_and_hold_nothing_back() -> None:
    assert run(PIECES, ["own fox"], include=True) == (["The quick br", "own", " fox"], "own fox")
    assert run([*PIECES[:2], " fox jumps"], ["own fox"], include=True)[0] == ["The quick br", "own", " fox"]


def test_multi_byte_characters() -> None:
    assert run(["写一", "首。", "好"], ["。好"]) == (["写一", "首", ""], "。好")


TEXT = st.text(alphabet="abc", max_size=30)


@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_equal_to_a_search_of_the_text_after_each_token(pieces: list[str], stops: list[str]) -> None:
    text = ""
    expected: tuple[str, str] | None = None
    for piece in pieces:
        text += piece
        found = [(text.find(stop), text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        if found:
            begin, _, stop = min(found)
            expected = (text[:begin], stop)
            break
    matcher = StopMatcher(compile_stop_strings(stops, include_in_output=False))
    shown = pushed = ""
    for piece in pieces:
        pushed += piece
        delta, stop_found = matcher.push(piece)
        shown += delta
        if stop_found is not None:
            assert expected == (shown, stop_found)
            return
        held = pushed[len(shown) :]
        assert pushed.startswith(shown)
        assert held == "" or any(stop.startswith(held) and len(held) < len(stop) for stop in stops)
    assert expected is None
    assert shown + matcher.flush() == text


def test_a_hostile_pattern_costs_linear_time() -> None:
    import time

    stop = compile_stop_strings([("a" * 1023) + "b"] * 16, include_in_output=False)
    assert len(stop.patterns) == 1
    stop = compile_stop_strings([("a" * n) + "b" for n in range(1000, 1016)], include_in_output=False)
    matcher = StopMatcher(stop)
    began = time.process_time()
    for _ in range(200):
        matcher.push("aaaa")
    assert time.process_time() - began < 1.0
