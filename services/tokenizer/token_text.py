"""What each token id writes: its bytes, and its text where those bytes are whole characters.

Built once for a vocabulary, so that decoding a token is a list index. Follows the ByteLevel decoder of the
`tokenizers` library, which is the oracle of its test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REPLACEMENT = "\ufffd"


def byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, inverted (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


@dataclass(frozen=True, slots=True)
class TokenText:
    """Both columns are indexed by token id; an id beyond them writes nothing."""

    data: list[bytes]  # what the token writes
    texts: list[str | None]  # the same as text; None where it begins or ends inside a character

    @property
    def size(self) -> int:
        return len(self.data)

    def bytes_of(self, token_id: int) -> bytes:
        return self.data[token_id] if token_id < len(self.data) else b""

    def replaced(self, texts: Mapping[int, str]) -> TokenText:
        """A copy in which the given ids write other text. Lone surrogates have no bytes."""
        data, columns = self.data.copy(), self.texts.copy()
        for token_id, text in texts.items():
            columns[token_id] = text
            data[token_id] = text.encode("utf-8", "ignore")
        return TokenText(data, columns)


def build_token_text(tokens: Iterable[tuple[int, str]], size: int) -> TokenText:
    """The table of a byte-level vocabulary, given (id, token as the vocabulary spells it)."""
    # A character outside the alphabet becomes one that Latin-1 cannot write.
    latin = dict.fromkeys(range(256), "\uffff")
    latin.update({ord(char): chr(byte) for char, byte in byte_level_alphabet().items()})
    data = [b""] * size
    texts: list[str | None] = [""] * size
    for token_id, token in tokens:
        try:
            written = token.translate(latin).encode("latin-1")
        except UnicodeEncodeError:  # an added token, spelled in plain characters
            written = token.encode()
        data[token_id] = written
        try:
            texts[token_id] = written.decode()
        except UnicodeDecodeError:
            texts[token_id] = None
    return TokenText(data, texts)
