"""What has come for one HTTP request and was not written yet, merged while the client is slow."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import msgspec

from rorqual.core.clock import Clock
from rorqual.core.errors import QueueFullError, RorqualError
from rorqual.v1 import text_pb2

MAX_BACKLOG_BYTES = 8 * 1024 * 1024
"""Text, ids and log-probabilities that may wait for one slow client before its request is given up."""

SLOW_CLIENT = "SLOW_CLIENT"  # reason of the error that gives it up

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of zero, which JSON has no number for."""

_ENTRY_BYTES = 96  # a log-probability entry in memory, roughly

_TEXT_KINDS = frozenset(("content", "reasoning"))


class TopLogprob(msgspec.Struct):
    """One alternative, in OpenAI's shape."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """One position, in the shape of OpenAI's chat log-probabilities."""

    token: str
    logprob: float | None  # None: the prompt's first token, which nothing predicts
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@dataclass(slots=True)
class Piece:
    """One or several merged events of a choice, free of the frame that they came in."""

    choice_index: int  # over the whole HTTP request
    kind: str  # TextEvent's oneof; "" where tokens brought no text
    parts: list[str] = field(default_factory=list)  # of content and reasoning; of a call's arguments, until it is taken
    id_parts: list[bytes] = field(default_factory=list)  # of the tokens consumed, uint32 little-endian
    logprobs: list[TokenLogprob] = field(default_factory=list)
    detail: (
        text_pb2.Accepted
        | text_pb2.ToolCallDelta
        | text_pb2.ChoiceFinished
        | text_pb2.Usage
        | text_pb2.PromptEcho
        | None
    ) = None

    @property
    def text(self) -> str:
        return self.parts[0] if len(self.parts) == 1 else "".join(self.parts)

    @property
    def token_ids(self) -> bytes:
        return b"".join(self.id_parts)


IDLE = Piece(-1, "idle")
"""Stands first among the pieces of a reader that was woken because nothing had come."""


def finite(logprob: float) -> float:
    """`logprob`, or a floor where it is infinite or no number."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def read_logprobs(entries: object) -> list[TokenLogprob]:
    """Plain copies of `entries` (repeated TokenLogprobText)."""
    return [
        TokenLogprob(
            e.token,
            finite(e.logprob) if e.HasField("logprob") else None,
            list(e.token_bytes),
            [TopLogprob(t.token, finite(t.logprob), list(t.token_bytes)) for t in e.top],
        )
        for e in entries  # type: ignore[attr-defined]
    ]


class Inbox:
    """A bounded meeting point: the streams of one HTTP request put events, its handler takes pieces.

    Neighbouring texts of a choice are merged until they are taken, so a slow client gets fewer, larger pieces.
    With `whole`, nothing is handed out before the end.
    """

    def __init__(
        self, clock: Clock, *, num_streams: int = 1, whole: bool = False, max_backlog_bytes: int = MAX_BACKLOG_BYTES
    ) -> None:
        self._clock = clock
        self._open_streams = num_streams
        self._whole = whole
        self._max_backlog_bytes = math.inf if whole else max_backlog_bytes
        self._pieces: list[Piece] = []
        self._tails: dict[int, Piece] = {}  # the last unread piece of each choice, while it may grow
        self._backlog_bytes = 0
        self._error: RorqualError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.first_token_s: float | None = None  # on the clock
        self.last_token_s = 0.0
        self.num_tokens = 0

    @property
    def error(self) -> RorqualError | None:
        """Why the request failed, if it did."""
        return self._error

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self._error is not None or self._open_streams == 0

    def put(self, choice_index: int, event: text_pb2.TextEvent, which: str | None) -> None:
        """Add what `event` brings. `which` is its oneof's name; `choice_index` counts over the HTTP request."""
        if self._error is not None:
            return
        ids = event.token_ids
        logprobs = read_logprobs(event.logprobs) if event.logprobs else []
        if ids or which in _TEXT_KINDS:
            self.last_token_s = self._clock.monotonic_s()
            if self.first_token_s is None:
                self.first_token_s = self.last_token_s
            self.num_tokens += len(ids) // 4
        if which is None or which in _TEXT_KINDS:
            self._put_text(choice_index, getattr(event, which) if which else "", which or "", ids, logprobs)
        elif which == "tool_call":
            self._put_call(choice_index, event.tool_call, ids, logprobs)
        else:
            detail = getattr(event, which)
            copy = type(detail)()
            copy.CopyFrom(detail)
            self._tails.pop(choice_index, None)
            self._pieces.append(Piece(choice_index, which, [], [ids], logprobs, copy))
            self._backlog_bytes += copy.ByteSize()
        self._backlog_bytes += len(ids) + _ENTRY_BYTES * sum(1 + len(entry.top_logprobs) for entry in logprobs)
        if self._backlog_bytes > self._max_backlog_bytes:
            self.fail(QueueFullError("the client reads too slowly: too much text waits for it", reason=SLOW_CLIENT))
        elif not self._whole:
            self._wake()

    def _put_text(self, choice: int, text: str, kind: str, ids: bytes, logprobs: list[TokenLogprob]) -> None:
        tail = self._tails.get(choice)
        if tail is None or (kind and tail.kind and kind != tail.kind):
            self._tails[choice] = tail = Piece(choice, kind, [text] if text else [], [ids], logprobs)
            self._pieces.append(tail)
        else:
            tail.kind = tail.kind or kind
            if text:
                tail.parts.append(text)
            tail.id_parts.append(ids)
            tail.logprobs += logprobs
        self._backlog_bytes += len(text)

    def _put_call(self, choice: int, delta: text_pb2.ToolCallDelta, ids: bytes, logprobs: list[TokenLogprob]) -> None:
        """Arguments are merged like text, apart from the delta that names their call."""
        tail = self._tails.get(choice)
        last = tail.detail if tail is not None else None
        if (
            tail is None
            or not isinstance(last, text_pb2.ToolCallDelta)
            or (last.tool_call_idx, last.id, delta.id) != (delta.tool_call_idx, "", "")
        ):
            copy = text_pb2.ToolCallDelta(tool_call_idx=delta.tool_call_idx, id=delta.id, name=delta.name)
            self._tails[choice] = tail = Piece(choice, "tool_call", detail=copy)
            self._pieces.append(tail)
            self._backlog_bytes += copy.ByteSize()
        if delta.arguments_json_delta:
            tail.parts.append(delta.arguments_json_delta)
            self._backlog_bytes += len(delta.arguments_json_delta)
        tail.id_parts.append(ids)
        tail.logprobs += logprobs

    def idle(self) -> None:
        """Hand IDLE to a reader that waits; does nothing where none does."""
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not self._whole:
            self._pieces.append(IDLE)
            self._wake()

    def end_stream(self) -> None:
        """One of the streams has said all."""
        self._open_streams -= 1
        if self._open_streams == 0:
            self._wake()

    def fail(self, error: RorqualError) -> None:
        """The request is over. What has come before is handed out first, except with `whole`."""
        if not self.done:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """The next pieces, at least one; none at the end. Raises the error that the request failed with."""
        while not self.done and (self._whole or not self._pieces):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None and (self._whole or not self._pieces):
            raise self._error
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            if isinstance(piece.detail, text_pb2.ToolCallDelta):
                piece.detail.arguments_json_delta = piece.text
                piece.parts.clear()
        self._tails.clear()
        self._backlog_bytes = 0
        return pieces
