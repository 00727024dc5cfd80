"""HTTP/1.1 on one connection: its heads, the framing of its bodies, its answers in order.

llhttp (through httptools) parses, and is strict: it refuses bare line feeds, folded lines, and a Content-Length beside
a Transfer-Encoding. What it leaves to its user is here, after RFC 9110 and 9112.
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .failures import Failure

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_LINES = 128
MAX_QUEUED = 8
"""Requests that wait on one connection behind the one that runs; then it is not read, nor its end seen."""

HEAD_TIMEOUT_S = 30.0
"""Where the application says nothing else."""
UNREAD_BODY_S = 60.0
"""How long the rest of a body may take after its request was answered."""

LINGER_S = 2.0  # how long a connection that ends is read away, so that the client sees the answer

_CODES = {400: "invalid_http", 408: "deadline_exceeded"}
_NO_FIELD_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NO_FIELD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class _Fault(Exception):
    """A request that gets no further than its head."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with framing that no request can bring out of step.

    An Upgrade is ignored (RFC 9110, 7.8): the body that follows its head is framed and read like any other.
    """

    cycle: _Cycle | None  # type: ignore[assignment]  # the last one that came
    _running: _Cycle | None = None
    _in_head = True  # from the end of a message to the end of the next head
    _replaying = False  # the parser is fed a head that was not received
    _skipping_end = False  # the parser is about to report the end of a message whose body it did not look at
    _progress = 0  # grows with each end of a head, piece of a body and end of a message
    _idle_bytes = 0  # received since then: of a head, of chunk extensions, of trailers
    _fault: _Fault | None = None
    _refusal: bytes | None = None  # the connection's last words; nothing more is read
    _head_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timeout_s = getattr(self.config.app, "head_timeout_s", HEAD_TIMEOUT_S)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head_timer()
        self._forget_close_timer()
        super().connection_lost(exc)
        if self._running is not None:  # which may not be the last one that came
            self._running.disconnected = True
            self._running.message_event.set()
        # Without these the connection would be a cycle, and those are looked for seldom.
        self.pipeline.clear()
        self._fault = self._running = self.cycle = None

    def _expect_head(self) -> None:
        """A connection on which no head comes to an end holds a descriptor for nothing."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _forget_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._idle_bytes:
            self._refuse(408, f"the request's head took over {self._head_timeout_s:g} s")
        else:
            self.transport.close()

    def _close_later(self, delay_s: float) -> None:
        self._forget_close_timer()
        self._close_timer = self.loop.call_later(delay_s, self.transport.close)

    def _forget_close_timer(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._expect_head()
        progress = self._progress
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            fault = self._fault or _fault_of(error)
            self._refuse(fault.status, str(fault))
            return
        if self._progress != progress:
            self._idle_bytes = 0
            return
        self._idle_bytes += len(data)
        if self._idle_bytes > MAX_HEADER_BYTES:
            what = "head is" if self._in_head else "chunk extensions or trailers are"
            self._refuse(431, f"the request's {what} longer than {MAX_HEADER_BYTES} bytes")

    def _feed(self, data: bytes) -> None:
        """Parse `data`. Raises httptools.HttpParserError.

        At the end of a head with an Upgrade, httptools stops and takes the body for another protocol's bytes. A new
        parser goes on in its place: it is told the same framing by a head without the Upgrade.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            framing = b"".join(
                b"%b: %b\r\n" % (name, value)
                for name, value in self.headers
                if name in (b"content-length", b"transfer-encoding")
            )
            self._replaying = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._replaying = False

    def on_message_begin(self) -> None:
        if not self._replaying:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: it may not become a header (RFC 9110, 6.5.1), and none is asked for
        if len(self.headers) >= MAX_HEADER_LINES:
            self._end_with(431, f"the request has over {MAX_HEADER_LINES} header lines")
        self.headers.append((name.lower(), value))

    def _end_with(self, status: int, message: str) -> NoReturn:
        """End the parser's work on the connection."""
        self._fault = _Fault(status, message)
        raise self._fault

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._in_head = False
        self._progress += 1
        self._forget_head_timer()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._end_with(431, f"the request's head is longer than {MAX_HEADER_BYTES} bytes")
        version = self.parser.get_http_version()
        method = self.parser.get_method()
        self._check(version, method)
        self._skipping_end = self.parser.should_upgrade()
        self._set_target()
        self.scope["method"] = method.decode("ascii")
        self.scope["http_version"] = version
        self._start(version)

    def _check(self, version: str, method: bytes) -> None:
        if version not in ("1.0", "1.1"):
            self._end_with(505, f"HTTP/{version} is not served here: use HTTP/1.1")
        if method == b"CONNECT":
            self._end_with(501, "CONNECT is not served here: this is no proxy")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            self._end_with(400, f"a request has one Host header (RFC 9112, 3.2); this one has {num_hosts}")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            self._end_with(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length")
        if codings not in ([], [b"chunked"]):
            self._end_with(501, "the only Transfer-Encoding that is served is 'chunked'")

    def _set_target(self) -> None:
        """The path and the query, of any form of target (RFC 9112, 3.2)."""
        url = self.url
        if url[:1] != b"/" and url != b"*":
            try:
                parsed = httptools.parse_url(url)
            except httptools.HttpParserInvalidURLError:
                self._end_with(400, "the request's target is no path and no URL")
            url = (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
        raw_path, _, query = url.partition(b"#")[0].partition(b"?")
        path = raw_path.decode("ascii")
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = query

    def _start(self, version: str) -> None:
        before = self.cycle
        self.cycle = cycle = _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=version == "1.1"
            and any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.headers),
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))
            if len(self.pipeline) >= MAX_QUEUED:
                self.flow.pause_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._progress += 1
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._skipping_end:
            self._skipping_end = False
            return
        self._in_head = True
        self._progress += 1
        self._forget_close_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        if self._refusal is not None:
            if not self.pipeline:
                self._say_last_words()
                return
        elif not self._in_head and self.cycle is not None and not self.cycle.keep_alive:
            self._refusal = b""
            self._say_last_words()
            return
        elif not self._in_head:
            self._close_later(UNREAD_BODY_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what could not be parsed, after the answers to what came before it, and end the connection."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._forget_head_timer()
        kind = "timeout_error" if status == 408 else "invalid_request_error"
        body = Failure(status, message, kind, code=_CODES.get(status, "invalid_http")).body()
        self._refusal = STATUS_LINE[status] + (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        cycle = self.cycle
        of_next = self._in_head or self._fault is not None  # and not of the body of `cycle`
        if cycle is None or cycle.response_complete:
            if of_next:
                self._say_last_words()
            else:
                self.transport.close()  # its request has an answer
        elif of_next:
            pass  # an earlier request is being answered
        elif self.pipeline:
            self.pipeline.popleft()  # the one whose body is at fault; earlier ones are being answered
        elif cycle.response_started:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
            self._say_last_words()

    def _say_last_words(self) -> None:
        """A socket that is closed while bytes arrive takes its last words back: first end the sending half alone."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if self._refusal:
            self.transport.write(self._refusal)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._close_later(LINGER_S)


def _fault_of(error: httptools.HttpParserError) -> _Fault:
    """What llhttp found; its reasons are fixed texts."""
    if "PRI/Upgrade" in str(error):
        return _Fault(505, "HTTP/2 is not served here: use HTTP/1.1")
    return _Fault(400, f"this is not valid HTTP/1.1: {error}")


class _Cycle(RequestResponseCycle):
    """One request and its answer, which is framed as the request's version and method want it."""

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message["status"], message["headers"])
        elif not self.response_complete:
            self._continue(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        if self.waiting_for_100_continue and self.more_body:
            # A client that was not told to go on may send its body or the next request: nobody could tell.
            self.keep_alive = False
        self.waiting_for_100_continue = False
        bodiless = status in (204, 304)
        self.chunked_encoding = not bodiless and self.scope["http_version"] == "1.1"
        self._num_left: int | None = 0 if bodiless else None  # bytes of the body; None: any number
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            if _NO_FIELD_NAME.search(name) or _NO_FIELD_VALUE.search(value):
                raise RuntimeError("invalid header in an answer")
            if name == b"content-length":
                if bodiless:
                    continue
                self.chunked_encoding, self._num_left = False, int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and value.lower() != b"close"
                continue
            lines += (name, b": ", value, b"\r\n")
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif self._num_left is None:
            self.keep_alive = False  # HTTP/1.0: the body ends with the connection
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self.transport.write(b"".join(lines))

    def _continue(self, body: bytes, more_body: bool) -> None:
        if self.scope["method"] == "HEAD":
            pass
        elif self.chunked_encoding:
            end = b"" if more_body else b"0\r\n\r\n"
            if body:
                self.transport.write(b"%x\r\n%b\r\n%b" % (len(body), body, end))
            elif end:
                self.transport.write(end)
        else:
            if self._num_left is not None:
                self._num_left -= len(body)
                if self._num_left < 0 or (self._num_left > 0 and not more_body):
                    raise RuntimeError("an answer is not as long as its Content-Length")
            if body:
                self.transport.write(body)
        if not more_body:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive and not self.more_body:
                self.transport.close()
            self.on_response()
