"""The endpoints of Anthropic's API."""

from __future__ import annotations

import datetime
from dataclasses import replace

import grpc
import msgspec

from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2

from ..asgi import Exchange
from ..context import GatewayContext
from ..openai import chat, endpoints
from ..openai.answer_schema import ModelObject
from ..openai.constraint import constraint_of
from ..openai.conversation import chat_request, in_place
from ..openai.fields import ignored_header
from ..openai.schema import ChatBody
from ..openai.serve import answer_options, begin, operation, serve_generation
from ..upstream.replicas import CALL_TIMEOUT_S
from . import request
from .answer import PING, MessagesAnswer
from .errors import ANTHROPIC_ERRORS
from .schema import CountTokensBody, ListedModel, ModelPage, TokenCount

VERSION_HEADER = "anthropic-version"
"""Anthropic's clients send it with every request; it tells theirs from OpenAI's where they share a path."""


async def models(context: GatewayContext, exchange: Exchange) -> None:
    """GET /v1/models, in the form of the client that asks."""
    if VERSION_HEADER not in exchange.headers:
        await endpoints.models(context, exchange)
        return
    exchange.errors = ANTHROPIC_ERRORS
    data = [_listed(model) for model in endpoints.served_models(context)]
    page = ModelPage(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None)
    await exchange.respond(200, msgspec.json.encode(page))


async def model(context: GatewayContext, exchange: Exchange) -> None:
    """GET /v1/models/{id}, in the form of the client that asks."""
    if VERSION_HEADER not in exchange.headers:
        await endpoints.model(context, exchange)
        return
    exchange.errors = ANTHROPIC_ERRORS
    await exchange.respond(200, msgspec.json.encode(_listed(endpoints.asked_model(context, exchange))))


def _listed(model: ModelObject) -> ListedModel:
    created = datetime.datetime.fromtimestamp(model.created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ListedModel(id=model.id, display_name=model.id, created_at=created, max_input_tokens=model.max_model_len)


def _chat_body(exchange: Exchange, body: CountTokensBody, unknown: list[str]) -> ChatBody:
    """The chat that `body` means; the answer's header names what it ignores, and errors name a tool where it stands."""
    places: list[str] = []
    rename = ANTHROPIC_ERRORS.rename
    exchange.errors = replace(ANTHROPIC_ERRORS, rename=lambda name: rename(in_place(name, places)))
    chat_body, ignored = request.chat_body(body, places)
    exchange.extra_headers.update(ignored_header(unknown + ignored))
    return chat_body


async def messages(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/messages."""
    with operation(context, exchange, "chat") as span:
        body, unknown = request.READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        chat_body = _chat_body(exchange, body, unknown)
        command = chat.chat_command(chat_body, exchange.request_id)
        options = answer_options(context, exchange, chat_body, "msg_")
        omits = body.thinking is not None and body.thinking.display == "omitted"
        answer = MessagesAnswer(options, max_tokens=body.max_tokens, omit_thinking=omits)
        await serve_generation(context, exchange, span, [command], answer, stream=bool(body.stream), keep_alive=PING)


async def count_tokens(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens: how long the rendered conversation is."""
    with operation(context, exchange, "tokenize") as span:
        body, unknown = request.COUNT_READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        chat_body = _chat_body(exchange, body, unknown)
        question = text_pb2.TokenizeRequest(model=body.model or "", chat=chat_request(chat_body))
        if (constraint := constraint_of(chat_body)) is not None:  # some prompts say it
            question.chat.options.constraint.CopyFrom(constraint[1])
        replica = await context.replicas.acquire(body.model or "")
        try:
            response = await replica.stub.Tokenize(question, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        await exchange.respond(200, msgspec.json.encode(TokenCount(len(response.token_ids) // 4)))
