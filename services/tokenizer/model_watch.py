"""What the scheduler serves, asked each second: health and the limits of requests depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import grpc

from rorqual.core.errors import PreconditionError
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 2.0


def _what_is_missing(info: generation_pb2.GetServerInfoResponse) -> str:
    if info.num_executors:
        return "the scheduler's executor does not answer: it is silent, or its step does not end"
    return "the scheduler has no executor that serves a model"


class ModelWatch:
    """`model` is None while the scheduler, or its executor, is not there; `last` is what it was then.

    `missing` says in words what keeps requests from being served; empty where nothing does.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        tokenizer_size: int,
        checkpoint_vocab_size: int,
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`on_change` is awaited with whether requests can be served, when that changes."""
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._tokenizer_size = tokenizer_size
        self._checkpoint_vocab_size = checkpoint_vocab_size
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._serving = False
        self.missing = "the scheduler has not answered yet"
        self.model: common_pb2.ModelInfo | None = None
        self.last: common_pb2.ModelInfo | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="model-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def check_vocabulary(self) -> None:
        """PreconditionError (VOCABULARY_MISMATCH) where the served model is not of this checkpoint."""
        if self.last is None:
            return
        served, here = self.last.vocab_size, self._checkpoint_vocab_size or self._tokenizer_size
        if self._tokenizer_size > served or (self._checkpoint_vocab_size and self._checkpoint_vocab_size != served):
            raise PreconditionError(
                f"the tokenizer's checkpoint has a vocabulary of {here}, the served model {self.last.name!r} one of "
                f"{served}: start both with the same --model",
                reason="VOCABULARY_MISMATCH",
                metadata={"tokenizer_vocab_size": str(here), "model_vocab_size": str(served)},
            )

    async def _run(self) -> None:
        while True:
            try:
                info = await self._stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_CALL_TIMEOUT_S)
                self.model = info.model if info.HasField("model") else None
                self.missing = "" if self.model is not None else _what_is_missing(info)
            except grpc.RpcError as error:
                self.model = None
                self.missing = f"the scheduler does not answer ({from_rpc_error(error).reason.lower()})"
            if self.model is not None:
                self.last = self.model
            try:
                self.check_vocabulary()
            except PreconditionError as error:
                if self.model is not None and not self._serving:
                    _log.error("%s", error)
                self.missing = self.missing or error.message
            serving = not self.missing
            if serving != self._serving:
                self._serving = serving
                _log.info("%s", "the model is served" if serving else "no model is served")
                await self._on_change(serving)
            await asyncio.sleep(_INTERVAL_S)
