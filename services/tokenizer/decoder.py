"""Incremental decoding: token ids in, text out, never half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable

from .token_text import REPLACEMENT, TokenText


class IncrementalDecoder:
    """Decodes one choice. Joined outputs equal the one-shot decoding of all ids, however they were grouped.

    Bytes that begin a character wait for its rest. Bytes that can no longer become a character turn into U+FFFD
    at once, and those still waiting at the end into one U+FFFD: what `bytes.decode("utf-8", "replace")` gives.
    """

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, table: TokenText) -> None:
        self._texts = table.texts
        self._data = table.data
        self._pending = b""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        try:
            text = self._texts[token_id]
        except IndexError:  # a padding row of the embedding
            return ""
        if text is not None:
            if self._pending and text:
                # `text` begins a character, so what waited is never completed.
                self._pending = b""
                return REPLACEMENT + text
            return text
        data = self._pending + self._data[token_id]
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        """What the end of the tokens makes of bytes still waiting."""
        if not self._pending:
            return ""
        self._pending = b""
        return REPLACEMENT


def decode_all(table: TokenText, token_ids: Iterable[int]) -> str:
    """The text of all `token_ids` at once."""
    return b"".join([table.bytes_of(token_id) for token_id in token_ids]).decode("utf-8", "replace")
