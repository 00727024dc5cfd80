"""Ids of texts that were encoded before: of a conversation, only what is new since its last turn is encoded again."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_BYTES = 64 * 1024 * 1024
MAX_ENTRY_BYTES = 8 * 1024 * 1024
"""Of a text and its ids: longer ones would put out what many conversations need."""
MIN_CHARS = 64
"""Shorter texts are encoded as fast as they are looked up."""
_ENTRY_BYTES = 200  # of an entry beside its text and ids


class RunCache:
    """Least recently used first out, within `max_bytes`. Safe to use from several threads."""

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]], *, max_bytes: int = MAX_BYTES) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each of `texts`."""
        found: list[Sequence[int] | None] = []
        with self._lock:
            for text in texts:
                ids = self._ids.get(text) if len(text) >= MIN_CHARS else None
                if ids is not None:
                    self._ids.move_to_end(text)
                found.append(ids)
        missing = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        if not missing:
            return [ids for ids in found if ids is not None]
        made = iter(self._encode(missing))
        out = [ids if ids is not None else next(made) for ids in found]
        with self._lock:
            for text, known, made_now in zip(texts, found, out, strict=True):
                if known is None and len(text) >= MIN_CHARS:
                    self._keep(text, array("I", made_now))
        return out

    def _keep(self, text: str, ids: array[int]) -> None:
        if text in self._ids or _size(text, ids) > MAX_ENTRY_BYTES:
            return
        self._ids[text] = ids
        self.num_bytes += _size(text, ids)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._ids.popitem(last=False))


def _size(text: str, ids: array[int]) -> int:
    return 4 * (len(text) + len(ids)) + _ENTRY_BYTES
