"""Why a prefix was not cached: a bounded memory of what was seen, for the trace."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from rorqual.core.blocks import BLOCK_SIZE

from .kv_cache import KvCache
from .sequence import Sequence

_MAX_HISTORY_BYTES = 16 << 20
_MAX_FIRST_BLOCKS = 1 << 15  # of about 250 bytes each, all told


class PrefixMemory:
    """The latest history of each first block, and the cache salts that first blocks came with. Forgets the oldest."""

    __slots__ = ("_histories", "_num_bytes", "_salts")

    def __init__(self) -> None:
        self._histories: OrderedDict[bytes, bytes] = OrderedDict()  # by the identity of the first block
        self._num_bytes = 0
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # digest of a first block's tokens -> its latest salt's

    def why_missed(self, seq: Sequence, num_cached_blocks: int, cache: KvCache) -> tuple[str, int | None]:
        """Why block `num_cached_blocks` of `seq` is not in `cache`, and at which token if the history branched off.

        "evicted", "elsewhere" (another executor has or had it), "diverged" (at a token, from the latest history that
        began alike), "salt" (the same first block came with another cache salt), or "never seen".
        """
        num_next = num_cached_blocks + cache.unit  # the shortest prefix that was missed
        if cache.was_evicted(seq.hashes[num_next - 1]):
            return "evicted", None
        known = self._histories.get(seq.hashes[0])
        if known is not None:
            num_common = _num_common_tokens(known, seq.history)
            if num_common >= num_next * BLOCK_SIZE:
                return "elsewhere", None
            return "diverged", max(num_common, num_cached_blocks * BLOCK_SIZE)
        if num_cached_blocks:
            return "diverged", num_cached_blocks * BLOCK_SIZE
        salt = self._salts.get(_first_block(seq))
        return ("never seen" if salt in (None, _salt(seq)) else "salt"), None

    def remember(self, seq: Sequence) -> None:
        """Take in a history of at least one full block."""
        histories, key = self._histories, seq.hashes[0]
        self._num_bytes += len(seq.history) - len(histories.pop(key, b""))
        histories[key] = bytes(seq.history)
        while self._num_bytes > _MAX_HISTORY_BYTES:
            self._num_bytes -= len(histories.popitem(last=False)[1])
        salts, digest = self._salts, _first_block(seq)
        salts.pop(digest, None)
        salts[digest] = _salt(seq)
        if len(salts) > _MAX_FIRST_BLOCKS:
            salts.popitem(last=False)


def _first_block(seq: Sequence) -> bytes:
    return hashlib.blake2b(seq.history[: 4 * BLOCK_SIZE], digest_size=16).digest()


def _salt(seq: Sequence) -> bytes:
    """A digest: a salt may be long, and is another's secret."""
    return hashlib.blake2b(seq.request.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _num_common_tokens(a: bytes, b: bytearray) -> int:
    """Leading tokens that both have."""
    low, high = 0, min(len(a), len(b)) // 4
    first, second = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
