"""The cuts that DeepSeek's vocabularies make in a text before they merge bytes, in one pass."""

from __future__ import annotations

import enum
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

# As published from V3 on: digits; in what is left runs of Chinese and Japanese characters; in every piece words,
# punctuation, blanks. Each pass copies all pieces, which is most of what encoding costs.
_RUN = "一-龥぀-ゟ゠-ヿ"
_WORD_AFTER_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_PUBLISHED = [
    r"\p{N}{1,3}",
    f"[{_RUN}]+",
    _WORD_AFTER_MARK + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]

# The same at once. Nothing reaches over the edge of a digit or of a run, and where blanks look ahead such an edge is
# the end of the text. Inside a run the third expression cuts as everywhere, on the run's characters alone; what it
# leaves between two cuts is a piece there, too.
_IN_ONE = "|".join(
    [
        _WORD_AFTER_MARK,
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_RUN}]?[\p{{L}}\p{{M}}&&[^{_RUN}]]+",
        rf" ?[\p{{P}}\p{{S}}&&[^{_RUN}]]+[\r\n]*",
        r"\s*[\r\n]+",
        rf"\s+(?![^\s\p{{N}}{_RUN}])",
        r"\s+",
        r"\p{N}{1,3}",
        rf"[{_RUN}&&[^\p{{L}}\p{{P}}\p{{S}}]]?[{_RUN}&&[\p{{L}}\p{{M}}]]+",
        rf"[{_RUN}&&[\p{{P}}\p{{S}}]]+",
        rf"(?:[{_RUN}&&[^\p{{L}}\p{{M}}\p{{P}}\p{{S}}]](?![{_RUN}&&[\p{{L}}\p{{M}}]]))+",
    ]
)


class Cut(enum.Enum):
    """Cuts that `pieces.py` makes by itself."""

    PUBLISHED = enum.auto()  # of V3's and later vocabularies
    BYTE_LEVEL = enum.auto()  # the byte-level pre-tokenizer's own expression, as of vocabularies of GPT-2's kind


def find_cut(tokenizer: Tokenizer, source: dict[str, Any]) -> Cut | None:
    """Which cut `source`, the pre_tokenizer of `tokenizer`, makes; None for any other. The published one is put into
    one pass."""
    is_published = cut_in_one_pass(tokenizer, source)
    last = source["pretokenizers"][-1] if is_published else source
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if last.get("use_regex", True):
        return None if is_published else Cut.BYTE_LEVEL
    return Cut.PUBLISHED if is_published else None


def cut_in_one_pass(tokenizer: Tokenizer, source: dict[str, Any]) -> bool:
    """Give `tokenizer` one split in place of the three of `source`, its pre_tokenizer; False where it has others."""
    steps = source.get("pretokenizers") or []
    *splits, last = steps or [{}]
    patterns = [split.get("pattern", {}).get("Regex", "").replace("\r", r"\r").replace("\n", r"\n") for split in splits]
    are_plain = all(split["behavior"] == "Isolated" and not split["invert"] for split in splits)
    if patterns != _PUBLISHED or not are_plain or last.get("type") != "ByteLevel":
        return False
    merged = pre_tokenizers.Split(Regex(_IN_ONE), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(
        add_prefix_space=last["add_prefix_space"], trim_offsets=last["trim_offsets"], use_regex=last["use_regex"]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([merged, bytes_of])
    return True
