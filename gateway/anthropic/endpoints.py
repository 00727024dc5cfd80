"""The endpoints of Anthropic's API."""

from __future__ import annotations

import grpc
import msgspec

from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2

from ..asgi import Exchange
from ..context import GatewayContext
from ..openai import chat
from ..openai.conversation import chat_request
from ..openai.fields import ignored_header
from ..openai.serve import answer_options, begin, operation, serve_generation
from ..upstream.replicas import CALL_TIMEOUT_S
from . import request
from .answer import MessagesAnswer
from .schema import TokenCount


async def messages(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/messages."""
    exchange.extra_headers["request-id"] = exchange.request_id
    with operation(context, exchange, "chat") as span:
        body, unknown = request.READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        chat_body, ignored = request.chat_body(body)
        exchange.extra_headers.update(ignored_header(unknown + ignored))
        command = chat.chat_command(chat_body, exchange.request_id)
        options = answer_options(context, exchange, chat_body, "msg_")
        answer = MessagesAnswer(options, max_tokens=body.max_tokens)
        await serve_generation(context, exchange, span, [command], answer, stream=bool(body.stream))


async def count_tokens(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens: how long the rendered conversation is."""
    exchange.extra_headers["request-id"] = exchange.request_id
    with operation(context, exchange, "tokenize") as span:
        body, unknown = request.COUNT_READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        chat_body, ignored = request.chat_body(body)
        exchange.extra_headers.update(ignored_header(unknown + ignored))
        question = text_pb2.TokenizeRequest(model=body.model or "", chat=chat_request(chat_body))
        replica = await context.replicas.acquire(body.model or "")
        try:
            response = await replica.stub.Tokenize(question, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        await exchange.respond(200, msgspec.json.encode(TokenCount(len(response.token_ids) // 4)))
