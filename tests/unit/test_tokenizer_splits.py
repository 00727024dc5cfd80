"""The cuts in one pass are those of the published three, piece for piece."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from services.tokenizer.splits import cut_in_one_pass
from tests.support.vocabularies import tiny_checkpoint, v4_checkpoint

SOURCE: dict[str, Any] = json.loads(v4_checkpoint().tokenizer_json)


def made_of(source: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """A tokenizer of the published cuts and no merges, and whether it was given the one pass."""
    bare = {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": source}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", **bare}))
    return tokenizer, cut_in_one_pass(tokenizer, source)


THREE = Tokenizer.from_str(v4_checkpoint().tokenizer_json).pre_tokenizer
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
