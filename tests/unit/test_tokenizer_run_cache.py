"""Texts encoded before: the same ids, within a bound of memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.run_cache import MIN_CHARS, RunCache


class Encoder:
    """Code points as ids; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.asked += texts
        return [list(map(ord, text)) for text in texts]


def plain(runs: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(map(chr, run)) for run in runs]


LONG, OTHER = "a" * MIN_CHARS, "b" * MIN_CHARS


def test_a_long_text_is_encoded_once_and_a_short_one_each_time() -> None:
    encode = Encoder()
    cache = RunCache(encode)
    for _ in range(2):
        assert plain(cache.encode([LONG, "short", OTHER, LONG])) == [LONG, "short", OTHER, LONG]
    assert encode.asked == [LONG, "short", OTHER, LONG, "short"]
    assert cache.encode([]) == []


def test_the_least_recently_used_goes_first() -> None:
    encode = Encoder()
    cache = RunCache(encode, max_bytes=2 * (8 * MIN_CHARS + 200))
    cache.encode([LONG, OTHER])
    cache.encode([LONG])
    cache.encode(["c" * MIN_CHARS])
    encode.asked.clear()
    cache.encode([LONG])
    assert encode.asked == []
    cache.encode([OTHER])
    assert encode.asked == [OTHER]


TEXTS = st.lists(st.text("ab", min_size=MIN_CHARS - 2, max_size=MIN_CHARS + 8), max_size=6)


@given(st.lists(TEXTS, max_size=8), st.integers(0, 4000))
@settings(max_examples=100, deadline=None)
def test_whatever_is_kept_the_ids_are_right_and_the_bound_holds(calls: list[list[str]], max_bytes: int) -> None:
    cache = RunCache(Encoder(), max_bytes=max_bytes)
    for texts in calls:
        assert plain(cache.encode(texts)) == texts
        assert 0 <= cache.num_bytes <= max_bytes


def test_many_threads_at_once() -> None:
    cache = RunCache(Encoder(), max_bytes=20_000)
    texts = [f"{n % 40:02}" * MIN_CHARS for n in range(400)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda text: plain(cache.encode([text, "x"])), texts))
    assert made == [[text, "x"] for text in texts]
    assert 0 < cache.num_bytes <= 20_000
