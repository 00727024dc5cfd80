"""Running one request: its span, streams out to the tokenizers, pieces back, an answer to the client."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

from rorqual.core.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    QueueFullError,
    RorqualError,
)
from rorqual.telemetry import context_to_proto
from rorqual.v1 import text_pb2

from ..asgi import Exchange
from ..context import GatewayContext
from ..observe import OperationSpan
from ..silence import COMMENT, Silence
from ..upstream.inbox import IDLE, SLOW_CLIENT, Inbox, Piece
from ..upstream.stream import TextStream
from .answer import Answer, AnswerOptions
from .fields import ignored_header
from .schema import ChatBody, CompletionBody, GenerationFields

_log = logging.getLogger(__name__)

PAUSE_S = 0.1
"""A write that waits longer for its client is counted."""


def operation(context: GatewayContext, exchange: Exchange, operation: str) -> OperationSpan:
    """The span and the durations of one request."""
    return OperationSpan(
        context.telemetry,
        context.meters,
        context.clock,
        operation=operation,
        headers=exchange.headers,
        attributes={"http.request.method": exchange.method, "url.path": exchange.path},
    )


def begin(
    context: GatewayContext, exchange: Exchange, span: OperationSpan, model: str | None, unknown: list[str]
) -> None:
    """Name the request in its span and its ignored fields in the answer. Raises ModelNotFoundError."""
    exchange.extra_headers.update(ignored_header(unknown))
    span.describe(exchange.request_id, exchange.client_request_id, model or "")
    context.replicas.check_model(model or "")


def answer_options(
    context: GatewayContext, exchange: Exchange, body: GenerationFields, prefix: str, num_prompts: int = 1
) -> AnswerOptions:
    """The shape of the answer that `body` asks for. `prefix`: of its id."""
    stream_options = body.stream_options
    if isinstance(body, ChatBody):
        num_top = (body.top_logprobs or 0) if body.logprobs else None
    else:
        num_top = body.logprobs if isinstance(body, CompletionBody) else None
    return AnswerOptions(
        response_id=f"{prefix}{exchange.request_id}",
        model=body.model or "",
        fingerprint=context.replicas.fingerprint,
        choices_per_prompt=body.n or 1,
        num_prompts=num_prompts,
        include_usage=bool(stream_options and stream_options.include_usage),
        continuous_usage=bool(stream_options and stream_options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        num_top_logprobs=num_top,
        num_prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionBody) and bool(body.echo),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        created=int(context.clock.time_s()),
    )


async def serve_generation(
    context: GatewayContext,
    exchange: Exchange,
    span: OperationSpan,
    commands: Sequence[text_pb2.TextCommand],
    answer: Answer,
    *,
    stream: bool,
    echo: bool = False,
    keep_alive: bytes = COMMENT,
) -> None:
    """Answer `commands` (one a prompt, with equal n) as one response.

    `keep_alive`: what a stream says after each `keep_alive_s` of silence, before its first token too.
    Raises RorqualError for what the caller has yet to tell the client; CancelledRequestError where it left.
    Whatever happens, nothing of it runs on afterwards.
    """
    clock, config = context.clock, context.config
    inbox = Inbox(clock, num_streams=len(commands), whole=not stream)
    deadline_s = span.began_s + config.request_timeout_s
    streams: list[TextStream] = []
    trace = context_to_proto(span.span)
    for command in commands:
        body = command.chat if command.WhichOneof("command") == "chat" else command.complete
        body.options.trace.CopyFrom(trace)
        if salt := exchange.cache_salt(body.options.cache_salt):
            body.options.cache_salt = salt
        body.options.priority = exchange.priority(body.options.priority)
        num_choices = max(1, body.options.num_choices)
        streams.append(
            TextStream(
                context.replicas,
                command,
                inbox,
                clock,
                deadline_s=deadline_s,
                index_base=len(streams) * num_choices,
                echo_expected=echo,
            )
        )
    late = DeadlineExceededError(f"the request took longer than {config.request_timeout_s:g} s")
    timer = asyncio.get_running_loop().call_later(config.request_timeout_s, inbox.fail, late)
    watcher = exchange.watch_disconnect(functools.partial(_leave, inbox, streams))
    end = functools.partial(_end, inbox, streams)
    context.running.add(end)
    starting: asyncio.Task[None] | None = None
    try:
        if stream:
            starting = asyncio.create_task(_start_all(streams, inbox))  # beside it, for a tokenizer may be waited for
            await _stream_out(context, exchange, inbox, answer, keep_alive)
        else:
            for text_stream in streams:
                await text_stream.start()
                if inbox.error is not None:
                    raise inbox.error
            body_bytes = answer.whole(await inbox.take())
            await exchange.respond(200, body_bytes)
    except CancelledRequestError:
        context.meters.disconnects.inc()
        raise
    except QueueFullError as error:
        if error.reason == SLOW_CLIENT:
            context.meters.slow_clients.inc()
        raise
    finally:
        context.running.discard(end)
        timer.cancel()
        watcher.cancel()
        if starting is not None:
            starting.cancel()
        for text_stream in streams:
            text_stream.cancel()
        span.tokens(inbox)
        span.usage(answer.progress.usages, answer.progress.finish_reasons)


def _leave(inbox: Inbox, streams: Sequence[TextStream]) -> None:
    """The client has gone: tell the tokenizers at once, not when the handler next runs."""
    _end(inbox, streams, CancelledRequestError("the client went away"))


def _end(inbox: Inbox, streams: Sequence[TextStream], error: RorqualError) -> None:
    inbox.fail(error)
    for text_stream in streams:
        text_stream.cancel()


async def _start_all(streams: Sequence[TextStream], inbox: Inbox) -> None:
    """Start `streams`; what hinders one fails the inbox."""
    try:
        for text_stream in streams:
            await text_stream.start()
            if inbox.error is not None:
                return
    except RorqualError as error:
        error.__traceback__ = None  # its frames hold the inbox, which holds it
        inbox.fail(error)
    except Exception:
        _log.exception("a request could not be started")
        inbox.fail(InternalError("a request could not be started"))


async def _stream_out(
    context: GatewayContext, exchange: Exchange, inbox: Inbox, answer: Answer, keep_alive: bytes
) -> None:
    """Headers once the request is accepted, or has waited for long; then a write for each batch of pieces."""
    clock = context.clock
    silence = Silence(asyncio.get_running_loop(), clock, inbox, context.config.keep_alive_s)
    try:
        pieces = await inbox.take()
        await exchange.begin_stream()
        while pieces:
            if pieces[0] is IDLE:
                await exchange.write(keep_alive)
                del pieces[0]
            events = answer.chunks(pieces[0]) if len(pieces) == 1 else await _join(exchange, pieces, answer)
            if events:
                began_s = clock.monotonic_s()
                await exchange.write(events)
                silence.last_write_s = now_s = clock.monotonic_s()
                if now_s - began_s > PAUSE_S:
                    context.meters.slow_client_pauses.inc()
            pieces = await inbox.take()
    finally:
        silence.end()
    await exchange.end_stream(answer.last_chunks())


async def _join(exchange: Exchange, pieces: list[Piece], answer: Answer) -> bytes:
    """The events of all `pieces`. Those before a failed choice are written before its error is raised."""
    events: list[bytes] = []
    try:
        events.extend(answer.chunks(piece) for piece in pieces)
    except Exception:
        await exchange.write(b"".join(events))
        raise
    return b"".join(events)
