"""The chat formats, by name: each one renders prompts, says how answers are read, and how a call is begun."""

from __future__ import annotations

from collections.abc import Mapping

from .base import ChatFormat, Thinking
from .dsml import V32, v4, v4_pro, v41
from .kimi import KimiK2
from .turns import MarkedTurns, PlainTurns, SwitchedTurns

FORMATS: Mapping[str, ChatFormat] = {
    chat_format.name: chat_format
    for chat_format in (
        PlainTurns(name="deepseek-v2"),
        MarkedTurns(name="deepseek-v2.5"),
        MarkedTurns(name="deepseek-v3"),
        MarkedTurns(name="deepseek-r1", thinking=Thinking.ALWAYS, generation="<think>\n"),
        MarkedTurns(name="deepseek-r1-0528", thinking=Thinking.ALWAYS),
        SwitchedTurns(name="deepseek-v3.1"),
        V32(),
        v4(),
        v4_pro(),
        v41(),
        KimiK2(name="kimi-k2", thinking=Thinking.NEVER, compact_tools=True),
        KimiK2(name="kimi-k2-thinking", thinking=Thinking.ALWAYS, compact_tools=False),
    )
}
