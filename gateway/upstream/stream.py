"""One request to the tokenizers, which outlives the loss of any of them."""

from __future__ import annotations

import asyncio

from rorqual.core.clock import Clock
from rorqual.core.errors import RorqualError, UnavailableError
from rorqual.rpc.status import from_error_proto
from rorqual.v1 import text_pb2

from .inbox import Inbox
from .isolation import verdict
from .ledger import Ledger
from .link import SessionLink
from .replicas import Replica, ReplicaSet

MAX_FRUITLESS_ATTEMPTS = 20  # a tokenizer that starts again takes seconds, and refuses each quarter of one
"""Replicas that may refuse a request, or end its session by their own wish, one after another without a token in between.

Sessions lost with their tokenizer are not counted here: see isolation.py.
"""


class TextStream:
    """Opens `command`, hands what comes to the inbox, and resumes on another replica where a session is lost.

    Choices of the command appear in the inbox from `index_base` on.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        command: text_pb2.TextCommand,
        inbox: Inbox,
        clock: Clock,
        *,
        deadline_s: float,
        index_base: int = 0,
        echo_expected: bool = False,
    ) -> None:
        """`command`: a chat or a complete; it is this stream's own from here on. `deadline_s`: on the clock."""
        body = command.chat if command.WhichOneof("command") == "chat" else command.complete
        self._options = body.options
        self._command = command
        self._replicas = replicas
        self._inbox = inbox
        self._clock = clock
        self._deadline_s = deadline_s
        self._index_base = index_base
        self.ledger = Ledger(max(1, self._options.num_choices), echo_expected=echo_expected)
        self.attempt = 0
        self._link: SessionLink | None = None
        self._stream_id = 0
        self._reopening: asyncio.Task[None] | None = None
        self._closed = False
        self._is_guilty = False
        self._num_fruitless = 0
        self._num_tokens_at_loss = -1

    @property
    def num_tokens(self) -> int:
        return self.ledger.num_tokens

    @property
    def model(self) -> str:
        return self._options.model

    async def start(self) -> None:
        """Place the request. Raises UnavailableError, ModelNotFoundError, InvalidRequestError (too large)."""
        replica = await self._replicas.acquire(self._options.model, stream=self)
        if not self._closed:
            self._open(replica)

    def _open(self, replica: Replica) -> None:
        assert replica.link is not None
        left_s = max(0.001, self._deadline_s - self._clock.monotonic_s())
        self._options.time_left_us = int(left_s * 1e6)
        self._options.attempt = self.attempt
        resume = self.ledger.resume()
        if resume is not None:
            self._options.resume.CopyFrom(resume)
        self._stream_id = replica.link.open(self, self._command)
        self._link = replica.link
        self._replicas.isolation.opened(self, replica.link)

    def cancel(self) -> None:
        """No more is wanted. Does nothing on an ended stream."""
        if self._closed:
            return
        self._closed = True
        if self._reopening is not None:
            self._reopening.cancel()
        if self._link is not None:
            self._link.cancel(self._stream_id)
            self._link = None
        self._forget()

    def move(self) -> None:
        """Leave the session for another, or for a later one: nothing is lost but time."""
        if self._link is not None and not self._closed:
            self._link.cancel(self._stream_id)
            self._link = None
            self._reopening = asyncio.create_task(self._reopen())

    def convict(self) -> None:
        self._is_guilty = True

    def _forget(self) -> None:
        """It is over: no death of its counts any more."""
        if self._replicas.isolation.ended(self):
            self._replicas.on_stream_change()

    def on_message(self, message: text_pb2.TextStreamEvents) -> None:
        """What a flush brought. It is taken in whole: see TextStreamEvents."""
        inbox, ledger, base = self._inbox, self.ledger, self._index_base
        try:
            for event in message.events:
                which = event.WhichOneof("event")
                if ledger.record(event, which):
                    inbox.put(base + event.choice_index, event, which)
        except RorqualError as error:
            self.cancel()
            inbox.fail(error)
            return
        if self._replicas.isolation.progressed(self):
            self._replicas.on_stream_change()
        if message.HasField("error"):
            self._on_error(from_error_proto(message.error))
        elif ledger.ended:
            self._close()
            inbox.end_stream()
        elif inbox.error is not None:
            self.cancel()

    def _on_error(self, error: RorqualError) -> None:
        """A replica that cannot serve is left for another that can; any other error is the request's end."""
        if isinstance(error, UnavailableError) and self._link is not None:
            here = frozenset((self._link.address,))
            other = self._replicas.pick(self._options.model, ready_only=True, avoid=here, stream=self)
            if other is not None and self._may_retry():
                self._leave_link()
                self._open_again(other)
                return
        self._close()
        self._inbox.fail(error)

    def on_lost(self, error: RorqualError, *, died: bool) -> None:
        self._link = None
        if self._closed:
            return
        if self._is_guilty:
            self._give_up(verdict(self.num_tokens))
        elif died or self._may_retry():
            self._reopening = asyncio.create_task(self._reopen())
        else:
            self._give_up(error)

    def _give_up(self, error: RorqualError) -> None:
        self._closed = True
        self._forget()
        self._inbox.fail(error)

    def _may_retry(self) -> bool:
        num_tokens = self.ledger.num_tokens
        self._num_fruitless = self._num_fruitless + 1 if num_tokens == self._num_tokens_at_loss else 1
        self._num_tokens_at_loss = num_tokens
        return self._num_fruitless <= MAX_FRUITLESS_ATTEMPTS

    async def _reopen(self) -> None:
        replicas = self._replicas
        try:
            replica = await replicas.acquire(
                self.model, until_s=self._deadline_s, stream=self, wait_s=replicas.peer_timeout_s
            )
            self._open_again(replica)
        except RorqualError as error:
            self._give_up(error)
        finally:
            self._reopening = None

    def _open_again(self, replica: Replica) -> None:
        self.attempt += 1
        try:
            self._open(replica)
        except RorqualError as error:
            self._give_up(error)

    def _leave_link(self) -> None:
        if self._link is not None:
            self._link.forget(self._stream_id)
            self._link = None

    def _close(self) -> None:
        self._closed = True
        self._leave_link()
        self._forget()
