"""Content codings of request bodies (RFC 9110, 8.4), decoded within a limit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator

from .failures import Failure, HttpError, body_too_large

try:
    from compression import zstd  # Python 3.14
except ImportError:
    try:
        from backports import zstd  # the same module for older ones
    except ImportError:
        zstd = None

_PIECE_BYTES = 256 * 1024
_MAX_ZSTD_WINDOW_LOG = 23  # 8 MiB, which is all that the coding allows (RFC 9659)


def _zlib_pieces(wbits: int) -> Callable[[bytes], Iterator[bytes]]:
    def pieces(data: bytes) -> Iterator[bytes]:
        while data:  # a gzip body may be several members
            decoder = zlib.decompressobj(wbits)
            while not decoder.eof:
                piece = decoder.decompress(data, _PIECE_BYTES)
                data = decoder.unconsumed_tail
                yield piece
                if not piece and not data and not decoder.eof:
                    raise EOFError
            data = decoder.unused_data

    return pieces


def _zstd_pieces(data: bytes) -> Iterator[bytes]:
    options = {zstd.DecompressionParameter.window_log_max: _MAX_ZSTD_WINDOW_LOG}
    while data:  # of one or several frames
        decoder = zstd.ZstdDecompressor(options=options)
        while not decoder.eof:
            piece = decoder.decompress(data, _PIECE_BYTES)
            data = b""
            yield piece
            if not piece and decoder.needs_input and not decoder.eof:
                raise EOFError
        data = decoder.unused_data


_CODINGS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _zlib_pieces(16 + zlib.MAX_WBITS),
    "deflate": _zlib_pieces(zlib.MAX_WBITS),
}
_ERRORS: tuple[type[Exception], ...] = (zlib.error, EOFError)
if zstd is not None:
    _CODINGS["zstd"] = _zstd_pieces
    _ERRORS += (zstd.ZstdError,)

ACCEPT_ENCODING = ", ".join(_CODINGS)


def check_coding(value: str) -> str:
    """The coding that a Content-Encoding of `value` names; "" for none. Raises HttpError 415."""
    name = value.strip().lower()
    name = {"identity": "", "x-gzip": "gzip"}.get(name, name)
    if name and name not in _CODINGS:
        message = f"a body with Content-Encoding {value!r} is not read: send it plain, or as one of {ACCEPT_ENCODING}"
        raise HttpError(
            Failure(
                415,
                message,
                "invalid_request_error",
                code="unsupported_content_encoding",
                headers={"accept-encoding": ACCEPT_ENCODING},
            )
        )
    return name


async def decoded(body: bytes, coding: str, limit_bytes: int) -> bytes:
    """`body` without its `coding`, beside the event loop. HttpError 400 where it is broken, 413 over the limit."""
    return await asyncio.to_thread(_decode, body, coding, limit_bytes) if coding else body


def _decode(body: bytes, coding: str, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        for piece in _CODINGS[coding](body):
            size += len(piece)
            if size > limit_bytes:
                raise body_too_large(limit_bytes, None)
            parts.append(piece)
    except _ERRORS as error:
        why = "it is cut short" if isinstance(error, EOFError) else str(error)
        message = f"the body is not valid {coding}, as its Content-Encoding says: {why}"
        raise HttpError(Failure(400, message, "invalid_request_error", code="invalid_encoding")) from None
    return b"".join(parts)
