"""The KV block: its size and its identity."""

from __future__ import annotations

import hashlib

BLOCK_SIZE = 64
"""Tokens a block, in every cache group."""

HASH_BYTES = 32

NO_BLOCK = 0xFFFF_FFFF
"""In a block table: nothing is held for these positions."""


def root_hash(model_fingerprint: bytes, cache_salt: str) -> bytes:
    """The parent of a history's first block: differs for each model fingerprint and cache salt."""
    return hashlib.blake2b(
        model_fingerprint + cache_salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"rorqual-root"
    ).digest()


def block_hash(parent: bytes, token_ids: bytes, *, num_prompt_tokens: int | None = None) -> bytes:
    """Identity of a full block: BLAKE2b-256 over its parent's hash and its tokens.

    `token_ids`: BLOCK_SIZE little-endian uint32. `num_prompt_tokens` is given, in deterministic serving, for a
    block that holds generated tokens: their KV comes from the decode form and has other bits than a prompt's.
    """
    if len(token_ids) != 4 * BLOCK_SIZE:
        raise ValueError(f"a block holds {BLOCK_SIZE} tokens ({4 * BLOCK_SIZE} bytes), got {len(token_ids)} bytes")
    h = hashlib.blake2b(parent, digest_size=HASH_BYTES, person=b"rorqual-block")
    h.update(token_ids)
    if num_prompt_tokens is not None:
        h.update(b"generated" + num_prompt_tokens.to_bytes(8, "little"))
    return h.digest()
