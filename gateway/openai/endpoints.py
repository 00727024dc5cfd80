"""The endpoints of OpenAI's API, and the two for tokens that its peers have."""

from __future__ import annotations

from dataclasses import replace

import grpc
import msgspec

from rorqual.core.errors import UnavailableError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2

from ..asgi import Exchange
from ..context import GatewayContext
from ..policy import Dialect
from ..upstream.replicas import CALL_TIMEOUT_S, model_not_found
from . import chat, completions, response_request
from .answer_schema import Detokenized, ModelList, ModelObject, Tokenized
from .constraint import constraint_name
from .conversation import chat_request, in_place, leave_out_tools
from .fields import BodyReader, ignored_header, invalid
from .response_answer import ResponsesAnswer
from .response_schema import Reasoning, ResponseObject
from .schema import DetokenizeBody, TokenizeBody
from .serve import answer_options, begin, operation, serve_generation

TOKENIZE_READER = BodyReader(TokenizeBody, Dialect.TOKENIZE)
DETOKENIZE_READER = BodyReader(DetokenizeBody, Dialect.DETOKENIZE)


async def chat_completions(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/chat/completions."""
    with operation(context, exchange, "chat") as span:
        body, unknown = chat.READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        places, ignored = leave_out_tools(body)
        exchange.extra_headers.update(ignored_header(unknown + ignored))
        exchange.errors = replace(exchange.errors, rename=lambda name: in_place(name, places))
        command = chat.chat_command(body, exchange.request_id)
        constrained = constraint_name(body)
        exchange.errors = replace(exchange.errors, rename=lambda name: in_place(constrained(name), places))
        options = answer_options(context, exchange, body, "chatcmpl-")
        answer = chat.ChatAnswer(options)
        echo = body.prompt_logprobs is not None
        await serve_generation(context, exchange, span, [command], answer, stream=bool(body.stream), echo=echo)


async def text_completions(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/completions."""
    with operation(context, exchange, "text_completion") as span:
        body, unknown = completions.READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        commands = completions.completion_commands(body, exchange.request_id)
        exchange.errors = replace(exchange.errors, rename=constraint_name(body))
        options = answer_options(context, exchange, body, "cmpl-", len(commands))
        answer = completions.CompletionAnswer(options)
        echo = bool(body.echo) or body.prompt_logprobs is not None
        await serve_generation(context, exchange, span, commands, answer, stream=bool(body.stream), echo=echo)


async def responses(context: GatewayContext, exchange: Exchange) -> None:
    """POST /v1/responses. Nothing of it is kept."""
    with operation(context, exchange, "chat") as span:
        body, unknown = response_request.READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        exchange.errors = replace(exchange.errors, rename=response_request.field_name)
        tools = response_request.read_tools(body)
        exchange.errors = replace(
            exchange.errors, rename=lambda name: response_request.field_name(in_place(name, tools.places))
        )
        chat_body, ignored = response_request.chat_body(body, tools)
        exchange.extra_headers.update(ignored_header(unknown + ignored))
        command = chat.chat_command(chat_body, exchange.request_id)
        options = answer_options(context, exchange, chat_body, "resp_")
        reasoning = body.reasoning or Reasoning()
        response = ResponseObject(
            id=options.response_id,
            created_at=options.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=options.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=Reasoning(effort=reasoning.effort),
            safety_identifier=body.safety_identifier,
            temperature=body.temperature,
            text={"format": response_request.answered_format(body.text), "verbosity": "medium"},
            tool_choice=body.tool_choice or "auto",
            tools=tools.served,
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            user=body.user,
        )
        answer = ResponsesAnswer(options, response, tools.by_name, now_s=lambda: int(context.clock.time_s()))
        exchange.errors = replace(exchange.errors, events=answer.failed)
        await serve_generation(context, exchange, span, [command], answer, stream=bool(body.stream))


async def models(context: GatewayContext, exchange: Exchange) -> None:
    """GET /v1/models."""
    await exchange.respond(200, msgspec.json.encode(ModelList(data=served_models(context))))


async def model(context: GatewayContext, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    await exchange.respond(200, msgspec.json.encode(asked_model(context, exchange)))


def asked_model(context: GatewayContext, exchange: Exchange) -> ModelObject:
    """The one that the path names. Raises ModelNotFoundError, UnavailableError."""
    name = exchange.path.removeprefix("/v1/models/").rstrip("/")
    served = served_models(context)
    found = next((model for model in served if model.id == name), None)
    if found is None:
        raise model_not_found(name, (model.id for model in served))
    return found


def served_models(context: GatewayContext) -> list[ModelObject]:
    """Each that can be asked for. Raises UnavailableError where no tokenizer has answered yet."""
    out: dict[str, ModelObject] = {}
    responses = context.replicas.models()
    if not responses:
        raise UnavailableError("; ".join(context.replicas.causes().values()))
    for response, _ in responses:
        for info in response.models:
            out.setdefault(
                info.name,
                ModelObject(id=info.name, created=response.created_unix_s, max_model_len=info.max_model_len or None),
            )
    return list(out.values())


async def tokenize(context: GatewayContext, exchange: Exchange) -> None:
    """POST /tokenize: the ids of a text, or of a conversation as it is rendered."""
    with operation(context, exchange, "tokenize") as span:
        body, unknown = TOKENIZE_READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        request = text_pb2.TokenizeRequest(model=body.model or "", return_token_strings=bool(body.return_token_strs))
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        if body.prompt is not None:
            request.text = body.prompt
            if body.add_special_tokens is not None:
                request.add_special_tokens = body.add_special_tokens
        else:
            places, ignored = leave_out_tools(body)
            exchange.extra_headers.update(ignored_header(unknown + ignored))
            exchange.errors = replace(exchange.errors, rename=lambda name: in_place(name, places))
            request.chat.CopyFrom(chat_request(body))
        replica = await context.replicas.acquire(body.model or "")
        try:
            response = await replica.stub.Tokenize(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        ids = unpack_token_ids(response.token_ids)
        strings = list(response.token_strings) if body.return_token_strs else None
        answer = Tokenized(len(ids), response.max_model_len, ids.tolist(), strings)
        await exchange.respond(200, msgspec.json.encode(answer))


async def detokenize(context: GatewayContext, exchange: Exchange) -> None:
    """POST /detokenize: the text of ids, special tokens included."""
    with operation(context, exchange, "detokenize") as span:
        body, unknown = DETOKENIZE_READER.read(await exchange.body(context.config.max_body_bytes))
        begin(context, exchange, span, body.model, unknown)
        exchange.errors = replace(exchange.errors, rename=lambda name: "tokens" if name == "token_ids" else name)
        replica = await context.replicas.acquire(body.model or "")
        request = text_pb2.DetokenizeRequest(model=body.model or "", token_ids=pack_token_ids(body.tokens))
        try:
            response = await replica.stub.Detokenize(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        await exchange.respond(200, msgspec.json.encode(Detokenized(response.text)))
