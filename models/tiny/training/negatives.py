"""Finds what the model should not have said in its own answers, token by token.

Text sampled at a low temperature falls into loops more often than the text it learned from. Towards the end
of training the model answers training prompts, and the tokens marked here are made less likely
(unlikelihood training, Welleck et al., arXiv:1908.04319, section 5). Pure functions over token ids.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .build_tokenizer import BOS, EOS


def repeated(ids: Sequence[int]) -> list[bool]:
    """Which tokens end a run of 6 that came before, or a run of 4 that came twice before."""
    marks = [False] * len(ids)
    for size, allowed in ((6, 1), (4, 2)):
        seen: Counter[tuple[int, ...]] = Counter()
        for end in range(size, len(ids) + 1):
            run = tuple(ids[end - size : end])
            marks[end - 1] |= seen[run] >= allowed
            seen[run] += 1
    return marks


class Asker:
    """Takes prompts out of the training rows, and marks the answers to them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        token_id = tokenizer.token_to_id
        self.bos, self.eos = token_id(BOS), token_id(EOS)
        self._user, self.assistant = token_id("<｜User｜>"), token_id("<｜Assistant｜>")
        self._comma, self._stop, self._newline, self._five, self._seven = (
            tokenizer.encode(text, add_special_tokens=False).ids[0] for text in "，。\n五七"
        )
        self.han = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
        for code in range(0x3400, 0xA000):  # as poems.HAN
            ids = tokenizer.encode(chr(code), add_special_tokens=False).ids
            self.han[ids[0]] |= len(ids) == 1

    def lines_asked(self, prompt: Sequence[int]) -> int | None:
        """5 or 7 if a Chinese prompt asks for lines of that many characters, else None."""
        five, seven = self._five in prompt, self._seven in prompt
        return (5 if five else 7) if five != seven else None

    def wanted(self, place: int, chars: int) -> int | None:
        """The token a quatrain of `chars` a line has at a place of its answer; None: any Chinese character."""
        line, column = divmod(place, chars + 2)
        if column < chars:
            return None
        if column == chars:
            return self._stop if line % 2 else self._comma
        return self.eos if line == 3 else self._newline

    def misformed(self, answer: Sequence[int], chars: int) -> int | None:
        """The place of the first token that a quatrain of `chars` a line cannot have there; None: there is none."""
        for place, token in enumerate(answer[: 4 * (chars + 2)]):
            want = self.wanted(place, chars)
            if not (self.han[token] if want is None else token == want):
                return place
        return None

    def marks(self, prompt: Sequence[int], answer: Sequence[int]) -> list[bool]:
        """Which tokens of the answer the model should not have said."""
        chars = self.lines_asked(prompt)
        if chars is None:
            return repeated(answer)
        wrong = self.misformed(answer, chars)
        return [place == wrong for place in range(len(answer))]

    def prompts(self, rows: NDArray[np.integer], count: int, rng: random.Random) -> list[list[int]]:
        """First questions of random documents of packed `rows` [num_rows, length], BOS to the assistant's mark.

        Half of them are from long documents, a quarter are requests for quatrains.
        """
        long: list[list[int]] = []
        verse: list[list[int]] = []
        other: list[list[int]] = []
        while min(len(long) / 2, len(verse), len(other)) < count / 4:
            row = rows[rng.randrange(len(rows))]
            starts = [*np.flatnonzero(row == self.bos).tolist(), len(row)]
            for start, end in itertools.pairwise(starts):
                document = row[start:end].tolist()
                if self.assistant not in document or document[1] != self._user:
                    continue
                prompt = document[: document.index(self.assistant) + 1]
                if len(prompt) > 60:
                    continue
                kind = verse if self.lines_asked(prompt) else long if len(document) > 140 else other
                kind.append(prompt)
        return rng.sample(long, count // 2) + rng.sample(verse, count // 4) + rng.sample(other, count // 4)
