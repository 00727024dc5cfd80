"""What became of grammars that were tried before, by a digest of what was asked."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")

MAX_ENTRIES = 1024
MAX_BYTES = 16 << 20
_ENTRY_BYTES = 256  # of an entry beside its value


class OutcomeCache(Generic[Value]):
    """Least recently used first out, within a number of entries and of bytes. Safe to use from several threads."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._values: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    @staticmethod
    def key(job: bytes) -> bytes:
        return hashlib.blake2b(job, digest_size=32).digest()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> Value | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: Value, num_bytes: int) -> None:
        """`num_bytes`: what `value` takes, about. One that is larger than the cache is not kept."""
        num_bytes += _ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._values:
                self.num_bytes -= self._values.pop(key)[1]
            self._values[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes or len(self._values) > self._max_entries:
                self.num_bytes -= self._values.popitem(last=False)[1][1]
