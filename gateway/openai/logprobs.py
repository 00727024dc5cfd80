"""OpenAI's two shapes of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..upstream.inbox import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The chat form."""
    return {"content": entries, "refusal": None}


class CompletionLogprobs:
    """The completions form of one choice, whose text offsets run on from chunk to chunk."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0  # characters

    def take(self, entries: Sequence[TokenLogprob], *, echo: str = "") -> dict[str, Any]:
        """The columns for the next `entries`, of which those that spell `echo` come first.

        An offset counts characters by their first bytes, so a character that is split over tokens counts once. A
        prompt's tokens that are not in its text (begin of sequence) count nothing.
        """
        offsets: list[int] = []
        prompt, position = echo.encode(), 0  # position: bytes
        for entry in entries:
            offsets.append(self._offset)
            token = bytes(entry.bytes)
            if position < len(prompt):
                if not prompt.startswith(token, position):
                    continue
                position += len(token)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """Likeliest first, and the token itself, which is always there. Of equal texts the likeliest counts."""
        if entry.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for other in entry.top_logprobs[: self._num_top]:
            top.setdefault(other.token, other.logprob)
        top.setdefault(entry.token, entry.logprob)
        return top
