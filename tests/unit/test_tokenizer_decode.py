"""Incremental decoding against the library's one-shot decoding, with the real V4 vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.decoder import IncrementalDecoder, decode_all
from services.tokenizer.token_text import build_token_text, byte_level_alphabet
from tests.support.vocabularies import v4, v4_folder

# Half of them from the ids that hold pieces of characters.
BROKEN_IDS = [n for n, text in enumerate(v4().raw_text.texts) if text is None]
TOKEN_IDS = st.lists(st.one_of(st.integers(0, v4().size - 1), st.sampled_from(BROKEN_IDS)), max_size=40)


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return Tokenizer.from_file(str(v4_folder() / "tokenizer.json"))


def stream(table_name: str, token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(getattr(v4(), table_name))
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [("😀", [28927, 225]), ("𠮷", [175, 257, 109, 118]), ("ぱ乐", [415, 14868])],
)
def test_a_character_over_several_tokens_comes_whole(text: str, token_ids: list[int]) -> None:
    assert v4().encode(text) == token_ids
    deltas = stream("plain_text", [*token_ids, 1])
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)
    assert deltas[0] == ""


def test_the_end_inside_a_character_is_one_replacement() -> None:
    assert stream("plain_text", [28927]) == ["", "\ufffd"]
    assert stream("plain_text", [175, 257, 109]) == ["", "", "", "\ufffd"]
    assert decode_all(v4().plain_text, [28927]) == "\ufffd"


@given(TOKEN_IDS)
@settings(max_examples=120, deadline=None)
def test_joined_deltas_equal_the_library(token_ids: list[int]) -> None:
    library = v4()._tokenizer
    for table, skip in (("raw_text", False), ("plain_text", True)):
        expected = library.decode(token_ids, skip_special_tokens=skip)
        assert "".join(stream(table, token_ids)) == expected
        assert decode_all(getattr(v4(), table), token_ids) == expected


def test_text_survives_the_round_trip(library: Tokenizer) -> None:
    text = "naïve café — 你好，世界 👩‍👩‍👧‍👦 \u0000\t\r\n  ½ Ǆ ﷺ 🇩🇪 <|User|> ｜"
    token_ids = v4().encode(text)
    assert token_ids == library.encode(text, add_special_tokens=False).ids
    assert "".join(stream("raw_text", token_ids)) == text


def test_added_tokens_that_are_not_special_stay_in_plain_text() -> None:
    token_ids = v4().encode("<｜User｜>hi<think>x</think><｜end▁of▁sentence｜>")
    assert decode_all(v4().plain_text, token_ids) == "<｜User｜>hi<think>x</think>"
    assert decode_all(v4().raw_text, token_ids) == "<｜User｜>hi<think>x</think><｜end▁of▁sentence｜>"


def test_ids_beyond_the_vocabulary_write_nothing() -> None:
    assert stream("raw_text", [v4().raw_text.size, 28927, v4().raw_text.size + 5, 225]) == ["", "", "", "😀", ""]


def test_the_alphabet_covers_each_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_a_token_outside_the_alphabet_is_its_own_utf8() -> None:
    table = build_token_text([(0, "Ġa"), (1, "a b"), (2, "é")], 4)
    assert table.data == [b" a", b"a b", b"\xe9", b""]
    assert table.texts == [" a", "a b", None, ""]
