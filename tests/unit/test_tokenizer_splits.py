"""The published cuts in one pass, and all that Python makes, are those of the library, piece for piece."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.formats.bench_formats import material
from benchmarks.serving.word_tokenizer import byte_alphabet, write_tokenizer
from services.tokenizer.checkpoint import TextCheckpoint, read_checkpoint
from services.tokenizer.pieces import MAX_LEARNED, MAX_PIECE_CHARS, MAX_PIECES, PieceEncoder
from services.tokenizer.splits import Cut, cut_in_one_pass, find_cut
from services.tokenizer.vocabulary import Vocabulary
from tests.support.vocabularies import tiny_checkpoint, v4, v4_checkpoint


@cache
def word_checkpoint() -> TextCheckpoint:
    """Short words, cut as the byte-level pre-tokenizer does by itself."""
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name), 20_000)
        return read_checkpoint(Path(name))


SOURCE: dict[str, Any] = json.loads(v4_checkpoint().tokenizer_json)


def made_of(source: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """A tokenizer of the published cuts and no merges, and whether it was given the one pass."""
    bare = {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": source}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", **bare}))
    return tokenizer, cut_in_one_pass(tokenizer, source)


LIBRARY = Tokenizer.from_str(v4_checkpoint().tokenizer_json)
THREE = LIBRARY.pre_tokenizer
ONE = made_of(SOURCE["pre_tokenizer"])[0].pre_tokenizer

# Of each kind that the expressions tell apart some, in and out of the runs, and what no expression takes.
KINDS = "aZé\u0301 \t\n\r\u3000\u00a0!'-_#。、「ー・゠゛\u3040\u3097\u3099字かカ\u4dff\u4e00\u9fa5\u9fa612Ⅷ½㈠\0\u200b\ue000\u0378😀$€"


@settings(max_examples=1000, deadline=None)
@given(st.text(st.sampled_from(KINDS), max_size=12))
def test_any_neighbours(text: str) -> None:
    assert ONE.pre_tokenize_str(text) == THREE.pre_tokenize_str(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_any_text(text: str) -> None:
    assert ONE.pre_tokenize_str(text) == THREE.pre_tokenize_str(text)


@pytest.mark.parametrize("around", ["a{}b 1", "字{} 。"])
def test_every_character_of_the_first_plane(around: str) -> None:
    characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 8):
        text = "".join(around.format(character) for character in characters[start : start + 8])
        assert ONE.pre_tokenize_str(text) == THREE.pre_tokenize_str(text)


class Pieces:
    """A PieceEncoder whose ids are numbers of pieces."""

    def __init__(self, cut: Cut = Cut.PUBLISHED) -> None:
        self._library = THREE if cut is Cut.PUBLISHED else pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.num_asked = self.num_texts = 0
        self.encoder = PieceEncoder(cut, self._encode, self._encode_texts)

    def _encode(self, pieces: list[str]) -> list[list[int]]:
        assert len(set(pieces)) == len(pieces)
        self.num_asked += len(pieces)
        for piece in pieces:
            if piece not in self.numbers:
                self.numbers[piece] = len(self.names)
                self.names.append(piece)
        return [[self.numbers[piece]] for piece in pieces]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        """As the library: by its own cuts."""
        self.num_texts += len(texts)
        num_asked = self.num_asked
        ids = [[self._encode([piece])[0][0] for piece in self.published(text)] for text in texts]
        self.num_asked = num_asked
        return ids

    def of(self, text: str) -> list[str] | None:
        ids = self.encoder.encode(text)
        return None if ids is None else [self.names[number] for number in ids]

    def published(self, text: str) -> list[str]:
        """The library's pieces, which it gives by their places (in what stands for them it writes bytes)."""
        return [text[start:end] for _, (start, end) in self._library.pre_tokenize_str(text)]


PIECES = {cut: Pieces(cut) for cut in Cut}
each_cut = pytest.mark.parametrize("cut", Cut)


@each_cut
@settings(max_examples=1000, deadline=None)
@given(text=st.text(st.sampled_from(KINDS), max_size=12))
def test_pieces_of_any_neighbours(cut: Cut, text: str) -> None:
    made = PIECES[cut].of(text)
    if made is not None:
        assert made == PIECES[cut].published(text)
    else:
        assert any(PIECES[cut].of(character) is None for character in text)


@each_cut
@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("'strevmldSTREVMLD \n1字"), max_size=12))
def test_pieces_of_contractions(cut: Cut, text: str) -> None:
    assert PIECES[cut].of(text) == PIECES[cut].published(text)


@functools.cache
def taken_characters(cut: Cut) -> list[str]:
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F300, 0x1F700)]
    return [chr(code) for code in codes if PIECES[cut].of(chr(code)) is not None]


@each_cut
@pytest.mark.parametrize("around", ["a{}b 1", "字{} 。"])
def test_pieces_of_every_character(cut: Cut, around: str) -> None:
    """All that it takes on itself, and enough of it: nearly all characters of texts that are met."""
    pieces, taken = PIECES[cut], taken_characters(cut)
    assert len(taken) > 55_000
    assert set("Straße, naïve “quotes” — 1½ € … Привет мир नमस्ते العربية 한국어 日本語 漢字 ①② ∑ ≠ → █ 😀👍🚀") <= {
        *taken
    }
    for start in range(0, len(taken), 8):
        text = "".join(around.format(character) for character in taken[start : start + 8])
        assert pieces.of(text) == pieces.published(text)


@each_cut
@pytest.mark.parametrize("seed", range(20))
def test_long_texts_are_cut_where_there_is_a_cut(cut: Cut, seed: int) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices("aZ \n\r\t1-'.", k=rng.randint(1, 9))) for _ in range(30)]
    text = "".join(rng.choices(words, k=9000))
    assert PIECES[cut].of(text) == PIECES[cut].published(text)


@pytest.mark.parametrize(("cut", "edge"), [(Cut.PUBLISHED, "\n"), (Cut.BYTE_LEVEL, " ")])
def test_a_part_without_such_a_place_is_left_to_the_library(cut: Cut, edge: str) -> None:
    pieces = PIECES[cut]
    assert pieces.of("x" * 65_536) == ["x" * 65_536]
    assert pieces.of("x" * 65_537) is None
    assert pieces.of(edge.join(["y" * 60_000] * 3)) is not None


def test_pieces_are_encoded_once_and_the_memory_is_bounded() -> None:
    pieces = Pieces()
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    words = [f"w{a}{b}{c}{d}" for a in alphabet[:9] for b in alphabet for c in alphabet for d in alphabet]
    for start in range(0, len(words), MAX_LEARNED - 1):
        pieces.of("\n".join(words[start : start + MAX_LEARNED - 1]))
    asked = pieces.num_asked
    assert (asked, pieces.num_texts) == (len(words) + 1, 0)
    assert len(pieces.encoder._new) + len(pieces.encoder._old) <= 2 * (MAX_PIECES + MAX_LEARNED)
    pieces.of("\n".join(words[-500:]))
    assert pieces.num_asked == asked
    long = "q" * (MAX_PIECE_CHARS + 1)
    for _ in range(2):
        assert pieces.of(f"{long} {long}") == [long, " " + long]
    assert pieces.num_asked == asked + 4


def test_a_text_of_new_pieces_is_the_librarys_and_some_are_learned() -> None:
    pieces = Pieces()
    text = " ".join(f"{word:x}" for word in range(1000))
    expected = pieces.published(text)
    assert pieces.of(text) == expected
    assert (pieces.num_texts, pieces.num_asked) == (1, MAX_LEARNED)
    for _ in range(20):
        assert pieces.of(text) == expected
    assert pieces.num_asked == len(set(expected))


def test_many_threads() -> None:
    pieces = Pieces()
    text = "\n".join(f"line {n} of a text" for n in range(2000))
    expected = pieces.published(text)
    lock = threading.Lock()
    encode = pieces.encoder._encode

    def guarded(new: list[str]) -> Any:
        with lock:
            return encode(new)

    pieces.encoder._encode = guarded
    with ThreadPoolExecutor(8) as pool:
        assert all(made == expected for made in pool.map(pieces.of, [text] * 16))


def test_ids_are_those_of_the_library() -> None:
    text = material()
    assert v4()._pieces is not None
    for start in range(0, len(text), 3001):
        part = text[start : start + 3001]
        expected = LIBRARY.encode(part, add_special_tokens=False).ids
        assert list(v4()._encode_plain([part])[0]) == expected
        assert v4().encode(part) == expected


def test_short_texts_do_not_wait_for_the_threads_of_the_library() -> None:
    """It takes a text alone in the caller's thread, and several in threads of its own, when those are free."""
    vocabulary = Vocabulary(tiny_checkpoint())
    plain, sizes = vocabulary._plain, list[int]()

    class Spy:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            sizes.append(len(texts))
            return plain.encode_batch_fast(texts, **options)

    vocabulary._plain = Spy()
    for texts, expected in ((["one", "two 2", ""], [1, 1, 1]), (["some words " * 1000] * 3, [3])):
        sizes.clear()
        ids = [run.ids for run in plain.encode_batch_fast(texts, add_special_tokens=False)]
        assert vocabulary._encode_plain(texts) == ids
        assert sizes == expected


SPELLED = [
    "<｜end▁of▁sentence｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜User｜>",
    "<｜",
    "｜>",
    "<",
    "think>",
    "｜",
    " ",
    "\n",
    "a",
    "字",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(SPELLED), max_size=12))
def test_control_tokens_in_a_plain_prompt_are_found_as_by_the_library(parts: list[str]) -> None:
    text = "".join(parts)
    assert v4().encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("checkpoint", [v4_checkpoint(), word_checkpoint()], ids=["published", "byte level"])
def test_tokens_learned_beforehand_change_no_id(checkpoint: TextCheckpoint) -> None:
    vocabulary, library = Vocabulary(checkpoint), Tokenizer.from_str(checkpoint.tokenizer_json)
    vocabulary.learn_tokens()
    pieces = vocabulary._pieces
    assert pieces is not None
    assert len(pieces._tokens) > 0.9 * len([text for text in vocabulary.raw_text.texts if text])
    assert not vocabulary.control_ids.intersection(token_id for (token_id,) in pieces._tokens.values())
    text = material()[:90_000]
    for start in range(0, len(text), 3001):
        part = text[start : start + 3001]
        assert vocabulary.encode(part) == library.encode(part, add_special_tokens=False).ids


def test_a_token_that_no_merge_leads_to_is_not_taken_for_its_text() -> None:
    """ "abc" is in the vocabulary, but "bc" is merged first, and then nothing more."""
    vocab = {token: n for n, token in enumerate([*byte_alphabet(), "bc", "ab", "abc"])}
    source = json.loads(word_checkpoint().tokenizer_json)
    source["model"] |= {"vocab": vocab, "merges": ["b c", "a b", "ab c"]}
    for n, token in enumerate(source["added_tokens"]):
        token["id"] = len(vocab) + n
    vocabulary = Vocabulary(replace(word_checkpoint(), tokenizer_json=json.dumps(source), vocab_size=0))
    vocabulary.learn_tokens()
    assert vocabulary._pieces is not None
    assert "bc" in vocabulary._pieces._tokens
    assert "abc" not in vocabulary._pieces._tokens
    assert vocabulary.encode("abc") == [vocab["a"], vocab["bc"]]


def test_which_cut_is_found() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bare = Tokenizer(models.BPE())
    assert find_cut(bare, byte_level) is Cut.BYTE_LEVEL
    assert find_cut(bare, byte_level | {"use_regex": False}) is None
    assert find_cut(bare, byte_level | {"add_prefix_space": True}) is None
    assert find_cut(bare, {"type": "Sequence", "pretokenizers": [byte_level]}) is None
    assert find_cut(bare, {}) is None
    assert find_cut(bare, SOURCE["pre_tokenizer"]) is Cut.PUBLISHED
    for further in ("use_regex", "add_prefix_space"):  # the last step cuts again, or writes into the pieces
        other = copy.deepcopy(SOURCE["pre_tokenizer"])
        other["pretokenizers"][-1][further] = True
        assert find_cut(bare, other) is None


def test_other_cuts_are_left_as_they_are() -> None:
    others = [json.loads(tiny_checkpoint().tokenizer_json)["pre_tokenizer"], {}, {"type": "ByteLevel"}]
    for change in ("behavior", "invert"):
        other = copy.deepcopy(SOURCE["pre_tokenizer"])
        other["pretokenizers"][0][change] = {"behavior": "Removed", "invert": True}[change]
        others.append(other)
    for source in others:
        assert not cut_in_one_pass(Tokenizer(models.BPE()), source)
    escaped = json.loads(json.dumps(SOURCE["pre_tokenizer"]).replace("\\r\\n", "\\\\r\\\\n"))
    assert escaped != SOURCE["pre_tokenizer"]
    assert made_of(escaped)[1]  # the same expression, spelled with escapes
