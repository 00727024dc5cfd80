"""Long texts encoded piece by piece, by looking up pieces that were encoded before."""

from __future__ import annotations

import functools
import re
import time
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from .abandon import check_wanted
from .splits import Cut

Encode = Callable[[list[str]], Sequence[Sequence[int]]]

MAX_PIECES = 1 << 16  # in each of the two halves of the memory
MAX_PIECES_BYTES = 8 << 20  # of each half
_PIECE_BYTES = 200  # of a piece beside its characters and ids
MAX_PIECE_CHARS = 48
"""Longer pieces are seldom met again."""
MAX_LEARNED = 96
"""New pieces of one part that are encoded one by one: a text of nothing but new ones goes through the library whole."""
PART_CHARS = 8192
MAX_PART_CHARS = 8 * PART_CHARS

# Emoji came after Unicode 3.2; these blocks are full since Unicode 9.
_EMOJI = frozenset((*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6C6)))
_RUN = frozenset((*range(0x4E00, 0x9FA6), *range(0x3040, 0x3100)))
_BLANKS = frozenset(
    (*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
)
_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def _kinds() -> dict[str, set[int]]:
    """Characters by the letter of their category: those that every version of Unicode since 3.2 has in the same.

    Another library's tables are of another version than Python's; for these characters that is no matter.
    """
    kinds: dict[str, set[int]] = {letter: set() for letter in "LMNPSZC"}
    for code in (*range(0xD800), *range(0xE000, 0x10000), *_EMOJI):
        now = unicodedata.category(chr(code))
        if now != "Cn" and (code in _EMOJI or now == unicodedata.ucd_3_2_0.category(chr(code))):
            kinds[now[0]].add(code)
    return kinds


def _class(codes: Iterable[int], *, but: bool = False) -> str:
    """A regular expression's class of `codes`, or of all but them."""
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return f"[{'^' if but else ''}{''.join(f'{_escaped(a)}-{_escaped(b)}' for a, b in ranges)}]"


def _escaped(code: int) -> str:
    return f"\\U{code:08x}"


@dataclass(frozen=True, slots=True)
class _Rules:
    """How Python's `re` makes a cut, and where a long text may be divided beforehand: there is a cut at any such place,
    and nothing before it looks beyond."""

    pieces: re.Pattern[str]
    stranger: re.Pattern[str]  # a character that is not the same in all versions of Unicode
    edge: re.Pattern[str]


@functools.cache
def _rules(cut: Cut) -> _Rules:
    kinds = _kinds()
    known = set().union(*kinds.values())
    make, edge = (
        (_published, r"(?<=\n)(?=[A-Za-z])") if cut is Cut.PUBLISHED else (_byte_level, r"(?<=[A-Za-z])(?= [A-Za-z])")
    )
    pieces = re.compile("|".join(make(kinds)))
    return _Rules(pieces, re.compile(_class(known, but=True)), re.compile(edge))


def _published(kinds: dict[str, set[int]]) -> list[str]:
    """The published cuts of V3's and later vocabularies; `splits.py` has their expressions."""
    letters, marks, numbers = kinds["L"], kinds["M"], kinds["N"]
    symbols, blanks, run = kinds["P"] | kinds["S"], _BLANKS, _RUN
    words = letters | marks
    others = set().union(*kinds.values()) - words - numbers - symbols - blanks
    ends = {0x0A, 0x0D}
    word = _class(words - run)
    blank = _class(blanks)
    return [
        f"{_class(map(ord, _MARKS))}[A-Za-z]+",
        f"{_class(ends | letters | symbols | numbers | run, but=True)}?{word}+",
        f" ?{_class(symbols - run)}+{_class(ends)}*",
        f"{blank}*{_class(ends)}+",
        f"{blank}+(?!{_class(blanks | numbers | run, but=True)})",
        f"{blank}+",
        f"{_class(numbers)}{{1,3}}",
        f"{_class(run & marks)}?{_class(run & words)}+",
        f"{_class(run & symbols)}+",
        f"(?:{_class(others)}(?!{word}))+",  # what no expression takes lies between two cuts
    ]


def _byte_level(kinds: dict[str, set[int]]) -> list[str]:
    """The expression that the library's byte-level pre-tokenizer has of its own."""
    letters, numbers, blanks = kinds["L"], kinds["N"], _BLANKS
    blank = _class(blanks)
    return [
        "'(?:[stmd]|re|ve|ll)",
        f" ?{_class(letters)}+",
        f" ?{_class(numbers)}+",
        f" ?{_class(letters | numbers | blanks, but=True)}+",
        f"{blank}+(?!{_class(blanks, but=True)})",
        f"{blank}+",
    ]


class PieceEncoder:
    """A vocabulary's cuts, made by Python's `re`.

    The tokenizers library copies each piece several times, whatever it is; most pieces of a text are tokens as they stand
    or have been met before, and cost a look into a dictionary here. What only that library can do, turning a new piece
    into ids, it does. Safe to use from several threads.
    """

    def __init__(self, cut: Cut, encode: Encode, encode_texts: Encode) -> None:
        """`encode`: the ids of single pieces. `encode_texts`: of texts, which it cuts itself."""
        rules = _rules(cut)
        self._pieces = rules.pieces.findall
        self._stranger = rules.stranger.search
        self._edge = rules.edge
        self._encode = encode
        self._encode_texts = encode_texts
        self._tokens: dict[str, tuple[int]] = {}
        self._new: dict[str, tuple[int, ...]] = {}
        self._new_bytes = 0
        self._old: dict[str, tuple[int, ...]] = {}

    def use_tokens(self, tokens: dict[str, tuple[int]]) -> None:
        """From now on look pieces up in `tokens` first: texts that are encoded as a single token, and which one."""
        self._tokens = tokens

    def encode(self, text: str) -> Sequence[int] | None:
        """The ids of `text`; None where it holds a character that is not the same in all versions of Unicode."""
        if self._stranger(text) is not None:
            return None
        parts: list[Iterable[int] | None] = []
        strange: list[str] = []
        for part in self._parts(text):
            if len(part) > MAX_PART_CHARS:
                return None
            check_wanted()
            if parts:
                time.sleep(0)  # whoever waits for the interpreter gets it: streams go on beside a long text
            ids = self._ids_of(part)
            parts.append(ids)
            if ids is None:
                strange.append(part)
        encoded = iter(self._encode_texts(strange) if strange else ())
        return array("I", chain.from_iterable(ids if ids is not None else next(encoded) for ids in parts))

    def _ids_of(self, part: str) -> Iterable[int] | None:
        """None where most of it is new."""
        pieces = self._pieces(part)
        found: list[tuple[int, ...] | None] = list(map(self._tokens.get, pieces))
        if None not in found:
            return chain.from_iterable(found)  # type: ignore[arg-type]
        gaps = [at for at, ids in enumerate(found) if ids is None]
        new, old = self._new, self._old
        unknown: dict[str, tuple[int, ...]] = {}
        for at in gaps:
            piece = pieces[at]
            ids = new.get(piece)
            if ids is None and (ids := old.get(piece)) is not None:
                new[piece] = ids
            if ids is None:
                unknown[piece] = ()
            found[at] = ids
        learned = list(unknown)[:MAX_LEARNED]
        unknown.update(zip(learned, map(tuple, self._encode(learned) if learned else ()), strict=True))
        if len(new) > MAX_PIECES or self._new_bytes > MAX_PIECES_BYTES:
            self._old, self._new, self._new_bytes = new, {}, 0
        kept = [piece for piece in learned if len(piece) <= MAX_PIECE_CHARS]
        self._new_bytes += sum(_PIECE_BYTES + 4 * len(piece) + 40 * len(unknown[piece]) for piece in kept)
        self._new.update((piece, unknown[piece]) for piece in kept)
        if len(unknown) > len(learned):
            return None
        for at in gaps if unknown else ():
            if found[at] is None:
                found[at] = unknown[pieces[at]]
        return chain.from_iterable(found)  # type: ignore[arg-type]

    def _parts(self, text: str) -> Iterable[str]:
        """`text` in parts of about PART_CHARS."""
        start = 0
        while start < len(text):
            edge = self._edge.search(text, start + PART_CHARS) if len(text) - start > PART_CHARS else None
            end = edge.start() if edge is not None else len(text)
            yield text[start:end]
            start = end
