"""Orders to an executor: changes to what it goes on doing by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

BlockTables: TypeAlias = list[list[int]]
"""Block ids of one sequence in the order of the positions they hold, one list a cache group.

NO_BLOCK where nothing is held any more, or no snapshot is to be taken. The slots of a state come first.
"""


@dataclass(frozen=True, slots=True)
class Admit:
    """A new sequence. Its chunks follow; after the one that ends its history it decodes by itself."""

    seq_id: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    block_tables: BlockTables
    limit: int  # positions below it may be written
    max_total_tokens: int
    sampling: object  # as the caller sent it; opaque to the core
    choice_index: int
    known_token_ids: bytes  # tokens [0, num_cached_tokens), where penalties need them
    prompt_logprobs_delivered: bool
    trace: object  # span context of the request; opaque to the core
    num_opaque_bytes: int = 0  # of `sampling` and `trace` on the wire


@dataclass(frozen=True, slots=True)
class Copy:
    """The first slots of a block into another, which was handed to a sequence by the Admit before."""

    group_idx: int
    src_block_id: int
    dst_block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute token positions [start, end)."""

    seq_id: int
    start: int
    end: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class Extend:
    """Entries appended to a sequence's tables."""

    seq_id: int
    block_tables: BlockTables
    limit: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The sequence leaves; its blocks are written no more."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Label:
    """Complete blocks and their identities. Grows until its batch is taken."""

    group_idx: int
    block_ids: list[int]
    hashes: list[bytes]


Order: TypeAlias = Admit | Copy | Prefill | Extend | Drop | Label
