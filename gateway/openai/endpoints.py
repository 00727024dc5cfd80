"""The endpoints of OpenAI's API, and the two for tokens that its peers have."""

from __future__ import annotations

import grpc
import msgspec

from rorqual.core.errors import ModelNotFoundError, UnavailableError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2

from ..asgi import Exchange
from ..context import GatewayContext
from ..observe import OperationSpan
from ..upstream.replicas import CALL_TIMEOUT_S
from . import chat, completions
from .answer import AnswerOptions
from .conversation import chat_request
from .fields import BodyReader, ignored_header, invalid
from .schema import ChatBody, CompletionBody, DetokenizeBody, GenerationFields, TokenizeBody
from .serve import serve_generation

_TOKENIZE = BodyReader(TokenizeBody)
_DETOKENIZE = BodyReader(DetokenizeBody)


async def chat_completions(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    with _operation(context, exchange, "chat") as span:
        body, unknown = chat.READER.read(await exchange.body(context.config.max_body_bytes))
        _begin(context, exchange, span, body.model, unknown)
        command = chat.chat_command(body, exchange.request_id)
        options = _answer_options(context, exchange, body, "chatcmpl")
        answer = chat.ChatAnswer(options)
        await serve_generation(context, exchange, span, [command], answer, stream=bool(body.stream))


async def text_completions(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/completions."""
    with _operation(context, exchange, "text_completion") as span:
        body, unknown = completions.READER.read(await exchange.body(context.config.max_body_bytes))
        _begin(context, exchange, span, body.model, unknown)
        commands = completions.completion_commands(body, exchange.request_id)
        options = _answer_options(context, exchange, body, "cmpl", len(commands))
        answer = completions.CompletionAnswer(options)
        await serve_generation(
            context, exchange, span, commands, answer, stream=bool(body.stream), echo=bool(body.echo)
        )


def _operation(context: GatewayContext, exchange: Exchange, operation: str) -> OperationSpan:
    return OperationSpan(
        context.telemetry,
        context.meters,
        context.clock,
        operation=operation,
        headers=exchange.headers,
        attributes={"http.request.method": exchange.method, "url.path": exchange.path},
    )


def _begin(
    context: GatewayContext, exchange: Exchange, span: OperationSpan, model: str | None, unknown: list[str]
) -> None:
    """Name the request in its span and its ignored fields in the answer. Raises ModelNotFoundError."""
    exchange.extra_headers.update(ignored_header(unknown))
    span.describe(exchange.request_id, exchange.client_request_id, model or "")
    context.replicas.check_model(model or "")


def _answer_options(
    context: GatewayContext, exchange: Exchange, body: GenerationFields, prefix: str, num_prompts: int = 1
) -> AnswerOptions:
    stream_options = body.stream_options
    if isinstance(body, ChatBody):
        num_top = (body.top_logprobs or 0) if body.logprobs else None
    else:
        num_top = body.logprobs if isinstance(body, CompletionBody) else None
    return AnswerOptions(
        response_id=f"{prefix}-{exchange.request_id}",
        model=body.model or "",
        fingerprint=context.replicas.fingerprint,
        choices_per_prompt=body.n or 1,
        num_prompts=num_prompts,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        num_top_logprobs=num_top,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        created=int(context.clock.time_s()),
    )


async def models(context: GatewayContext, exchange: Exchange) -> None:
    """GET /v1/models."""
    data = list(_models(context).values())
    await exchange.respond(200, msgspec.json.encode({"object": "list", "data": data}))


async def model(context: GatewayContext, exchange: Exchange, name: str) -> None:
    """GET /v1/models/{name}."""
    found = _models(context).get(name)
    if found is None:
        raise ModelNotFoundError(f"the model {name!r} does not exist here", field="model")
    await exchange.respond(200, msgspec.json.encode(found))


def _models(context: GatewayContext) -> dict[str, dict[str, object]]:
    out: dict[str, dict[str, object]] = {}
    responses = context.replicas.models()
    if not responses:
        raise UnavailableError("; ".join(context.replicas.causes().values()))
    for response, _ in responses:
        for info in response.models:
            out.setdefault(
                info.name,
                {
                    "id": info.name,
                    "object": "model",
                    "created": response.created_unix_s,
                    "owned_by": "rorqual",
                    "max_model_len": info.max_model_len or None,
                },
            )
    return out


async def tokenize(context: GatewayContext, exchange: Exchange) -> None:
    """POST /tokenize: the ids of a text, or of a conversation as it is rendered."""
    with _operation(context, exchange, "tokenize") as span:
        body, unknown = _TOKENIZE.read(await exchange.body(context.config.max_body_bytes))
        _begin(context, exchange, span, body.model, unknown)
        request = text_pb2.TokenizeRequest(model=body.model or "", return_token_strings=bool(body.return_token_strs))
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        if body.prompt is not None:
            request.text = body.prompt
            if body.add_special_tokens is not None:
                request.add_special_tokens = body.add_special_tokens
        else:
            request.chat.CopyFrom(chat_request(body))
        replica = await context.replicas.acquire(body.model or "")
        try:
            response = await replica.stub.Tokenize(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        ids = unpack_token_ids(response.token_ids)
        answer = {
            "count": len(ids),
            "max_model_len": response.max_model_len,
            "tokens": ids.tolist(),
            "token_strs": list(response.token_strings) if body.return_token_strs else None,
        }
        await exchange.respond(200, msgspec.json.encode(answer))


async def detokenize(context: GatewayContext, exchange: Exchange) -> None:
    """POST /detokenize: the text of ids, special tokens included."""
    with _operation(context, exchange, "detokenize") as span:
        body, unknown = _DETOKENIZE.read(await exchange.body(context.config.max_body_bytes))
        _begin(context, exchange, span, body.model, unknown)
        replica = await context.replicas.acquire(body.model or "")
        request = text_pb2.DetokenizeRequest(model=body.model or "", token_ids=pack_token_ids(body.tokens))
        try:
            response = await replica.stub.Detokenize(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        await exchange.respond(200, msgspec.json.encode({"prompt": response.text}))
