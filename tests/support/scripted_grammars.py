"""Grammars that are written out token by token, for step loops without a grammar engine."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from rorqual.grammar import GrammarError


class Steps:
    """A matcher of the sequences in which each token is one of the next set; the last set may be left out."""

    def __init__(self, sets: list[set[int]], optional: bool, vocab_size: int) -> None:
        self._sets, self._optional, self._at, self._is_bad = sets, optional, 0, False
        self._vocab_size = vocab_size

    def consume_token(self, token_id: int) -> bool:
        self._is_bad = self._is_bad or self._at >= len(self._sets) or token_id not in self._sets[self._at]
        self._at += 1
        return not self._is_bad

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(self._sets[self._at] if self._at < len(self._sets) else ())] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def is_accepting(self) -> bool:
        return self._at >= len(self._sets) - self._optional

    def is_stopped(self) -> bool:
        return self._is_bad or self._at == len(self._sets)

    def is_error(self) -> bool:
        return self._is_bad


class Scripted:
    """An engine whose grammars are written "1,2;5,6;" for one of 1 and 2, then one of 5 and 6."""

    def __init__(self, vocab_size: int, end_id: int) -> None:
        self.end_id = end_id
        self._vocab_size = vocab_size
        self.may_compile = threading.Event()
        self.may_compile.set()

    def compile(self, text: str) -> Any:
        self.may_compile.wait(10)
        if text == "bad":
            raise GrammarError("it is bad")
        return Steps(token_sets(text), text.endswith("?"), self._vocab_size)


def token_sets(text: str) -> list[set[int]]:
    return [{int(i) for i in part.split(",")} for part in text.rstrip("?").split(";")]


def fits(token_ids: list[int], text: str) -> bool:
    sets = token_sets(text)
    return len(token_ids) <= len(sets) and all(t in s for t, s in zip(token_ids, sets, strict=False))
