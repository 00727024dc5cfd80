"""Control tokens of the family's chat formats, and how they stand in the text that is parsed."""

from __future__ import annotations

from collections.abc import Mapping

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"

CALLS = "<｜tool▁calls▁begin｜>"
END_CALLS = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
END_CALL = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
OUTPUTS = "<｜tool▁outputs▁begin｜>"
END_OUTPUTS = "<｜tool▁outputs▁end｜>"
OUTPUT = "<｜tool▁output▁begin｜>"
END_OUTPUT = "<｜tool▁output▁end｜>"
DSML = "｜DSML｜"

KIMI_SYSTEM = "<|im_system|>"
KIMI_USER = "<|im_user|>"
KIMI_ASSISTANT = "<|im_assistant|>"
KIMI_MIDDLE = "<|im_middle|>"
KIMI_END = "<|im_end|>"
KIMI_CALLS = "<|tool_calls_section_begin|>"
KIMI_END_CALLS = "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_END_CALL = "<|tool_call_end|>"

THINK_MARKS = (THINK, END_THINK)
CALL_MARKS = (
    CALLS, END_CALLS, CALL, END_CALL, SEPARATOR, DSML,
    KIMI_CALLS, KIMI_END_CALLS, KIMI_CALL, KIMI_ARGUMENTS, KIMI_END_CALL,
)  # fmt: skip

_SENTINELS = {spelling: chr(0xD800 + n) for n, spelling in enumerate((*THINK_MARKS, *CALL_MARKS))}


class Marks:
    """How the parsed control tokens of one vocabulary appear in decoded text.

    A token of the vocabulary is one lone surrogate, which no bytes decode to, so that nothing that a model merely
    spells is taken for it. A mark that the vocabulary has no token for is looked for as it is spelled.
    """

    def __init__(self, ids_by_text: Mapping[str, int]) -> None:
        self._present = {spelling for spelling in _SENTINELS if spelling in ids_by_text}
        self.think_sentinels = {ids_by_text[s]: _SENTINELS[s] for s in THINK_MARKS if s in self._present}
        """Sentinel of each token id that divides reasoning from content."""
        self.call_sentinels = {ids_by_text[s]: _SENTINELS[s] for s in CALL_MARKS if s in self._present}
        """Sentinel of each token id that belongs to a tool call."""

    def __call__(self, spelling: str) -> str:
        """`spelling` as it appears in the text that is parsed."""
        return _SENTINELS[spelling] if spelling in self._present else spelling


HIDE_SENTINELS = {ord(sentinel): "" for sentinel in _SENTINELS.values()}
"""For str.translate: control tokens in places where they mean nothing are left out of the text."""
SHOW_SENTINELS = {ord(sentinel): spelling for spelling, sentinel in _SENTINELS.items()}
"""For str.translate: they are spelled."""
