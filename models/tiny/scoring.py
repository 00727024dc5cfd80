"""Scores of the embedded model's answers. Pure functions over token ids, text and argmaxes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = re.compile(r"[\s，。？！；：、,.?!;:]+")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U000323af]+")


def loops(token_ids: Sequence[int], size: int = 8, times: int = 3) -> bool:
    """Whether some run of `size` tokens occurs `times` times (occurrences may overlap)."""
    runs = Counter(tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))
    return max(runs.values(), default=0) >= times


def quatrain_lines(text: str) -> list[str]:
    """The verse lines of an answer: what punctuation and white space leave."""
    return [part for part in _PUNCTUATION.split(text) if part]


def is_quatrain(text: str, chars_per_line: int) -> bool:
    """Whether `text` is exactly four lines of `chars_per_line` Chinese characters, and nothing else."""
    lines = quatrain_lines(text)
    return len(lines) == 4 and all(len(line) == chars_per_line and _HAN.fullmatch(line) is not None for line in lines)


def agreement(main: Sequence[int], draft: Sequence[int]) -> tuple[int, int]:
    """(agreeing, counted) positions of one document.

    `main[i]` is the main model's argmax for token i+1 and `draft[i]` the MTP layer's for token i+2, each made from
    the document's own tokens. A draft at i is compared with the main model at i+1, wherever the document has a
    token i+2. Raises ValueError if the lists differ in length.
    """
    pairs = list(zip(main[1:-1], draft[:-2], strict=True))
    return sum(m == d for m, d in pairs), len(pairs)


def share(hits: int, total: int) -> float:
    """hits / total, 0.0 of nothing."""
    return hits / total if total else 0.0
