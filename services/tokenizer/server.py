"""TextService over gRPC: calls of one request, and sessions of many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from rorqual.core.errors import InvalidRequestError, RorqualError
from rorqual.core.limits import check_strings
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.limits import check_options as check_limits
from rorqual.telemetry import context_from_pairs
from rorqual.v1 import text_pb2, text_pb2_grpc

from .decoder import decode_all
from .engine import TextEngine, TextRequest
from .outbox import CallOutbox
from .session import TextSession

Context = grpc.aio.ServicerContext[Any, Any]


def _check_name(model: str) -> None:
    check_strings([("model", model)])


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Errors leave as RorqualError; the interceptor makes statuses of them."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine

    async def Chat(self, request: text_pb2.ChatRequest, context: Context) -> AsyncIterator[text_pb2.ChatResponse]:
        async for response in self._stream(request, context, CallOutbox(text_pb2.ChatResponse)):
            yield response

    async def Complete(
        self, request: text_pb2.CompleteRequest, context: Context
    ) -> AsyncIterator[text_pb2.CompleteResponse]:
        async for response in self._stream(request, context, CallOutbox(text_pb2.CompleteResponse)):
            yield response

    async def _stream(self, request: TextRequest, context: Context, outbox: CallOutbox[Any]) -> AsyncIterator[Any]:
        run = await self._engine.start(
            request,
            outbox,
            parent=context_from_pairs(context.invocation_metadata()),
            time_left_s=context.time_remaining(),
        )
        try:
            async for response in outbox.responses():
                yield response
        finally:  # end, deadline and disconnect alike
            run.cancel()

    async def Session(
        self, request_iterator: AsyncIterator[text_pb2.TextServiceSessionRequest], context: Context
    ) -> AsyncIterator[text_pb2.TextServiceSessionResponse]:
        session = TextSession(self._engine)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            async for frame in session.frames():
                yield frame
            await reader  # a session that broke the contract ends with that error
        finally:
            session.close()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, RorqualError):
                await reader

    async def Tokenize(self, request: text_pb2.TokenizeRequest, context: Context) -> text_pb2.TokenizeResponse:
        engine, vocabulary = self._engine, self._engine.vocabulary
        _check_name(request.model)
        engine.check_model(request.model)
        max_model_len = engine.model_info().max_model_len
        time_unix_s = engine.now_unix_s()
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError("the request has no input: give text or chat", field="input")
        is_chat = kind == "chat"
        if is_chat:
            check_limits(request.chat.options)
            engine.check_chat(request.chat, field="messages")
        else:
            engine.check_text(len(request.text), unit="characters", field="prompt")

        def work() -> text_pb2.TokenizeResponse:
            if is_chat:
                packed = engine.render_chat(request.chat, time_unix_s).packed_ids
            else:
                with_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                packed = pack_token_ids((vocabulary.encode_prompt if with_special else vocabulary.encode)(request.text))
            strings = vocabulary.token_strings(unpack_token_ids(packed)) if request.return_token_strings else None
            return text_pb2.TokenizeResponse(token_ids=packed, max_model_len=max_model_len, token_strings=strings)

        return await engine.in_text_pool(work)

    async def Detokenize(self, request: text_pb2.DetokenizeRequest, context: Context) -> text_pb2.DetokenizeResponse:
        engine, vocabulary = self._engine, self._engine.vocabulary
        _check_name(request.model)
        engine.check_model(request.model)
        engine.check_text(len(request.token_ids) // 4, unit="tokens", field="token_ids")
        try:
            token_ids = unpack_token_ids(request.token_ids)
        except ValueError as error:
            raise InvalidRequestError(str(error), field="token_ids") from error
        engine.check_ids("token_ids", token_ids)
        table = vocabulary.plain_text if request.skip_special_tokens else vocabulary.raw_text
        return text_pb2.DetokenizeResponse(text=await engine.in_text_pool(lambda: decode_all(table, token_ids)))

    async def RenderChat(self, request: text_pb2.RenderChatRequest, context: Context) -> text_pb2.RenderChatResponse:
        engine, options = self._engine, request.chat.options
        check_limits(options)
        engine.check_model(options.model)
        engine.check_chat(request.chat, field="messages")
        time_unix_s = options.resume.template_time_unix_s if options.HasField("resume") else engine.now_unix_s()
        prompt = await engine.in_text_pool(lambda: engine.render_chat(request.chat, time_unix_s))
        return text_pb2.RenderChatResponse(text=prompt.text, token_ids=prompt.packed_ids)

    async def ListModels(self, request: text_pb2.ListModelsRequest, context: Context) -> text_pb2.ListModelsResponse:
        return text_pb2.ListModelsResponse(
            models=[self._engine.model_info()],
            created_unix_s=self._engine.created_unix_s,
            missing=self._engine.missing,
        )
