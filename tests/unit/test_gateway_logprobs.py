"""Log-probabilities in the completions form."""

from __future__ import annotations

from gateway.openai.logprobs import CompletionLogprobs
from gateway.upstream.inbox import TokenLogprob, TopLogprob


def entry(raw: bytes, logprob: float | None = -1.0, *top: tuple[str, float]) -> TokenLogprob:
    alternatives = [TopLogprob(token, value, list(token.encode())) for token, value in top]
    return TokenLogprob(raw.decode("utf-8", "replace"), logprob, list(raw), alternatives)


def test_offsets_point_into_the_text() -> None:
    columns = CompletionLogprobs(0)
    echo = [entry(b"<bos>", None), entry("né".encode())]
    assert columns.take(echo, echo="né").text_offset == [0, 0]
    smile = "😀".encode()
    assert columns.take([entry(smile[:2]), entry(smile[2:]), entry(b"!"), entry(b"?")]).text_offset == [2, 3, 3, 4]


def test_a_prompt_without_its_text_still_has_offsets() -> None:
    assert CompletionLogprobs(0).take([entry(b"a"), entry(b"b")]).text_offset == [0, 1]


def test_the_token_itself_is_always_among_the_top_and_the_first_has_none() -> None:
    columns = CompletionLogprobs(2)
    taken = columns.take(
        [entry(b"a", None, ("x", -0.5)), entry(b"b", -3.0, ("x", -0.5), ("y", -1.0)), entry(b"x", -0.5, ("x", -0.5))]
    )
    assert taken.top_logprobs == [None, {"x": -0.5, "y": -1.0, "b": -3.0}, {"x": -0.5}]
    assert taken.token_logprobs == [None, -3.0, -0.5]


def test_of_equal_texts_the_likeliest_counts() -> None:
    (top,) = CompletionLogprobs(2).take([entry(b"\xe2", -2.0, ("\ufffd", -0.5), ("\ufffd", -1.0))]).top_logprobs
    assert top == {"\ufffd": -0.5}
