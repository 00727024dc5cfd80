"""A byte-level tokenizer of any size whose tokens are short words, for loads of an exact number of tokens.

A shape without a published tokenizer can be served with it: every id writes ASCII text, so each generated token is a
chunk of its own, and " abcd" is one token, so a text of n such words is n tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

SPACE = "\u0120"  # how byte-level vocabularies spell a space
BOS, EOS = "<|begin|>", "<|end|>"


def byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else one above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    above = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(above)) for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens by id, merges): bytes, then words of one to four letters after a space, at most `size` - 2 in all."""
    tokens, merges = byte_alphabet(), []
    stems = [SPACE]
    for _ in range(4):
        longer = []
        for stem, letter in itertools.product(stems, string.ascii_lowercase):
            if len(tokens) == size - 2:
                return tokens, merges
            merges.append((stem, letter))
            longer.append(stem + letter)
            tokens.append(stem + letter)
        stems = longer
    return tokens, merges


def words(size: int) -> list[str]:
    """Texts of three or four letters, each one token after a space."""
    return [token[1:] for token in vocabulary(size)[0][256:] if len(token) >= 4]


def random_text(all_words: list[str], num_tokens: int, rng: random.Random) -> str:
    """A text of exactly `num_tokens` tokens."""
    return "".join(" " + word for word in rng.choices(all_words, k=num_tokens))


def write_tokenizer(folder: Path, size: int) -> None:
    """tokenizer.json and tokenizer_config.json of `size` ids into `folder`. The last two are the special tokens."""
    tokens, merges = vocabulary(size)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": len(tokens) + i, "content": text, **special} for i, text in enumerate((BOS, EOS))],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
