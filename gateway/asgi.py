"""One HTTP exchange over ASGI: headers, a bounded body, an answer or an event stream, the client's leaving."""

from __future__ import annotations

import asyncio
import codecs
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rorqual.core.errors import CancelledRequestError, DeadlineExceededError, InvalidRequestError
from rorqual.core.limits import REQUEST

from .codings import check_coding, decoded
from .failures import OPENAI_ERRORS, ErrorShape, Failure, body_too_large

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = "application/json"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_CLEAN_ID = re.compile(r"[!-~]{1,128}")


class Exchange:
    """A request and the answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self.request_id = uuid.uuid4().hex  # drawn here; a client's own is only logged and echoed
        client_id = self.headers.get("x-request-id", "")
        self.client_request_id = client_id if _CLEAN_ID.fullmatch(client_id) else ""
        self.status = 0  # 0 until the answer has begun
        self.ended = False
        self.extra_headers: dict[str, str] = {}
        self.errors: ErrorShape = OPENAI_ERRORS
        self.tenant_salt = ""  # keeps the cached prefixes of the key's tenant apart; "" where no keys are asked for
        self.best_priority = 0  # the lowest number that its client may ask for
        self.body_timeout_s = 60.0  # a body that takes longer to arrive is refused
        self._receive = receive
        self._send = send

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body, decoded, without a byte-order mark.

        HttpError 413 over the limit, before the body is read where its length is announced; HttpError 415 for a coding
        that is not known.
        """
        coding = check_coding(self.headers.get("content-encoding", ""))
        body = await decoded(await self._read(limit_bytes), coding, limit_bytes)
        return body.removeprefix(codecs.BOM_UTF8)  # RFC 8259, 8.1, lets a reader ignore it

    async def _read(self, limit_bytes: int) -> bytes:
        announced = self.headers.get("content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
            raise body_too_large(limit_bytes, int(announced))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.body_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise CancelledRequestError("the client went away before its request was whole")
                    if chunk := message.get("body", b""):
                        size += len(chunk)
                        if size > limit_bytes:
                            raise body_too_large(limit_bytes, None)
                        parts.append(chunk)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise DeadlineExceededError(f"the request body did not arrive within {self.body_timeout_s:g} s") from None

    def cache_salt(self, asked: str) -> str:
        """The salt under which prefixes are shared: a client divides its tenant's cache, and reaches no other's."""
        return f"{self.tenant_salt}:{asked}" if self.tenant_salt and asked else self.tenant_salt or asked

    def priority(self, asked: int) -> int:
        """What a client that asks for `asked` gets; 0 asks for nothing. InvalidRequestError for what it may not have.

        It is refused, not moved into the range: the answer would look as if it had been obeyed.
        """
        best = self.best_priority
        if asked == 0:
            return max(0, best)
        if asked < best:
            raise InvalidRequestError(
                f"priority: it may be {best} to {REQUEST['priority'].most} here, got {asked}",
                reason="INVALID_VALUE",
                field="priority",
                metadata={"least": str(best), "most": str(REQUEST["priority"].most)},
            )
        return asked

    def watch_disconnect(self, on_leave: Callable[[], None]) -> asyncio.Task[None]:
        """Calls `on_leave` when the client goes away before the answer has ended. Cancel the task afterwards."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.ended:
                on_leave()

        return asyncio.create_task(watch())

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        merged = {"x-request-id": self.client_request_id or self.request_id, **self.extra_headers, **headers}
        if self.errors.id_header:
            merged[self.errors.id_header] = self.request_id
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def respond(
        self, status: int, body: bytes, content_type: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer at once."""
        length = {"content-type": content_type, "content-length": str(len(body))}
        await self._start(status, {**length, **(headers or {})})
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin_stream(self) -> None:
        """Headers of an event stream."""
        await self._start(200, _STREAM_HEADERS)

    async def write(self, events: bytes) -> None:
        """Bytes of the event stream, sent at once. Waits while the client's window is full."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def fail(self, failure: Failure) -> None:
        """An error answer; in the middle of a stream an error event, then the end."""
        if self.ended:
            return
        failure = self.errors.spell(failure)
        if self.status:
            await self.end_stream(self.errors.events(failure, self.request_id))
            return
        await self.respond(failure.status, self.errors.body(failure, self.request_id), headers=failure.headers)
