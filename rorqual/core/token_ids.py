"""Token ids on the wire: little-endian uint32, four bytes a token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Little-endian uint32 of `token_ids`. Raises OverflowError for an id outside [0, 2**32)."""
    column = array("I", token_ids)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack_token_ids(data: bytes) -> array[int]:
    """The ids in `data`. Raises ValueError where its length is no multiple of four."""
    if len(data) % 4:
        raise ValueError(f"token ids are 4 bytes each, got {len(data)} bytes")
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def pack_uint64(values: Iterable[int]) -> bytes:
    """Little-endian uint64 of `values`."""
    column = array("Q", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack_uint64(data: bytes) -> array[int]:
    """The numbers in `data`. Raises ValueError where its length is no multiple of eight."""
    if len(data) % 8:
        raise ValueError(f"entries are 8 bytes each, got {len(data)} bytes")
    column = array("Q")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
