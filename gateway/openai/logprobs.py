"""OpenAI's two shapes of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.v1 import text_pb2

from ..upstream.inbox import TokenLogprob, finite
from .answer_schema import ChatLogprobs, PromptLogprob, PromptLogprobs, TokenColumns


def chat_logprobs(entries: list[TokenLogprob]) -> ChatLogprobs:
    """The chat form."""
    return ChatLogprobs(entries)


def prompt_logprobs(echo: text_pb2.PromptEcho, num_top: int) -> PromptLogprobs:
    """The prompt's, as the peers answer `prompt_logprobs`: by token id, an entry a token, null for the first.

    An entry has the `num_top` likeliest and the prompt's own, whose rank is null where it is not one of them.
    """
    out: PromptLogprobs = []
    for entry in echo.logprobs:
        if not entry.HasField("logprob"):
            out.append(None)
            continue
        ranks = {top.token_id: rank for rank, top in enumerate(entry.top, start=1)}
        listed = [*entry.top[:num_top], entry]
        out.append(
            {
                str(item.token_id): PromptLogprob(finite(item.logprob), ranks.get(item.token_id), item.token)
                for item in listed
            }
        )
    return out


class CompletionLogprobs:
    """The completions form of one choice, whose text offsets run on from chunk to chunk."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0  # characters

    def take(self, entries: Sequence[TokenLogprob], *, echo: str = "") -> TokenColumns:
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
        return TokenColumns(
            [entry.token for entry in entries],
            [entry.logprob for entry in entries],
            [self._top(entry) for entry in entries],
            offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """Likeliest first, and the token itself, which is always there. Of equal texts the likeliest counts."""
        if entry.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for other in entry.top_logprobs[: self._num_top]:
            top.setdefault(other.token, other.logprob)
        top.setdefault(entry.token, entry.logprob)
        return top
