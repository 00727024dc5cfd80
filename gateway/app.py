"""The ASGI application: routes, keys, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import Any

import msgspec
from prometheus_client.exposition import choose_encoder

from rorqual import __version__
from rorqual.core.api_keys import read_api_keys
from rorqual.core.clock import Clock, SystemClock
from rorqual.core.config import GatewayConfig
from rorqual.core.errors import CancelledRequestError, InternalError, RorqualError, UnavailableError
from rorqual.telemetry import Telemetry

from .anthropic import endpoints as messages
from .anthropic import request as message_request
from .anthropic.errors import ANTHROPIC_ERRORS
from .anthropic.schema import MessageObject, TokenCount
from .asgi import Exchange, Receive, Scope, Send
from .context import GatewayContext
from .cors import Cors
from .failures import HttpError, failure_of, method_not_allowed, not_found
from .keys import KeyRing
from .observe import Meters
from .openai import chat, completions, endpoints, response_request
from .openai.answer_schema import ChatCompletion, Detokenized, ModelList, ModelObject, TextCompletion, Tokenized
from .openai.response_schema import ResponseObject
from .openapi import document, page
from .route import Route
from .upstream.replicas import ReplicaSet

_log = logging.getLogger(__name__)

MODELS_PREFIX = "/v1/models/"
ONE_MODEL = MODELS_PREFIX + "{id}"


class Health(msgspec.Struct, omit_defaults=True):
    """Of the whole chain."""

    status: str
    tokenizers: dict[str, str]  # what each replica's state is, in words, by address
    cause: str | None = None


class Version(msgspec.Struct):
    version: str


class Gateway:
    """One gateway. Two in one process share nothing."""

    def __init__(self, config: GatewayConfig, telemetry: Telemetry, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.replicas = ReplicaSet(config.tokenizers, peer_timeout_s=config.peer_timeout_s, clock=clock)
        self._meters = Meters(telemetry)
        self.context = GatewayContext(
            config=config, telemetry=telemetry, meters=self._meters, clock=clock, replicas=self.replicas
        )
        self._keys = KeyRing(read_api_keys(config.api_key, config.api_key_file))
        self._cors = Cors(config.cors_allow_origins)
        self.draining = False
        self.head_timeout_s = config.head_timeout_s  # for its connections, which see nothing else of it
        self._routes = self._make_routes()

    def _make_routes(self) -> dict[str, Route]:
        """Every path. That of one model stands for all of them."""
        return {
            "/v1/chat/completions": Route(
                method="POST",
                handler=endpoints.chat_completions,
                summary="Continue a conversation.",
                reader=chat.READER,
                answer=ChatCompletion,
                streams=True,
            ),
            "/v1/completions": Route(
                method="POST",
                handler=endpoints.text_completions,
                summary="Continue a text.",
                reader=completions.READER,
                answer=TextCompletion,
                streams=True,
            ),
            "/v1/responses": Route(
                method="POST",
                handler=endpoints.responses,
                summary="Continue a conversation, in OpenAI's newer form. Nothing is kept.",
                reader=response_request.READER,
                answer=ResponseObject,
                streams=True,
            ),
            "/v1/messages": Route(
                method="POST",
                handler=messages.messages,
                summary="Continue a conversation, in Anthropic's form.",
                reader=message_request.READER,
                answer=MessageObject,
                streams=True,
                errors=ANTHROPIC_ERRORS,
            ),
            "/v1/messages/count_tokens": Route(
                method="POST",
                handler=messages.count_tokens,
                summary="How many tokens a conversation in Anthropic's form has.",
                reader=message_request.COUNT_READER,
                answer=TokenCount,
                errors=ANTHROPIC_ERRORS,
            ),
            "/v1/models": Route(
                method="GET", handler=messages.models, summary="The models that can be asked for.", answer=ModelList
            ),
            ONE_MODEL: Route(method="GET", handler=messages.model, summary="One of them.", answer=ModelObject),
            "/tokenize": Route(
                method="POST",
                handler=endpoints.tokenize,
                summary="The token ids of a text, or of a conversation as it is rendered.",
                reader=endpoints.TOKENIZE_READER,
                answer=Tokenized,
            ),
            "/detokenize": Route(
                method="POST",
                handler=endpoints.detokenize,
                summary="The text of token ids, special tokens included.",
                reader=endpoints.DETOKENIZE_READER,
                answer=Detokenized,
            ),
            "/health": Route(
                method="GET",
                handler=self._health,
                summary="Whether a request would be served now; if not, which part is missing.",
                needs_key=False,
                answer=Health,
            ),
            "/health/live": Route(
                method="GET",
                handler=self._live,
                summary="Whether this process runs.",
                needs_key=False,
            ),
            "/version": Route(
                method="GET", handler=self._version, summary="The server's version.", needs_key=False, answer=Version
            ),
            "/metrics": Route(
                method="GET",
                handler=self._metrics,
                summary="Metrics for Prometheus.",
                needs_key=False,
                content_type="text/plain",
            ),
            "/openapi.json": Route(
                method="GET", handler=self._openapi, summary="This API as an OpenAPI document.", needs_key=False
            ),
            "/docs": Route(
                method="GET",
                handler=self._docs,
                summary="The same, to be read.",
                needs_key=False,
                content_type="text/html",
            ),
        }

    @cached_property
    def _document(self) -> dict[str, Any]:
        return document(self._routes)

    async def start(self) -> None:
        """Begin to look for the tokenizers."""
        self.replicas.start()

    async def stop(self) -> None:
        """End every request and connection."""
        self.end_running()
        await self.replicas.stop()

    def end_running(self) -> None:
        """Tell every running request that the process ends."""
        for end in list(self.context.running):
            end(UnavailableError("the gateway is shutting down", reason="SHUTTING_DOWN"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        meters = self._meters
        route_name, route = self._find(exchange)
        meters.in_flight.inc()
        try:
            await self._answer(exchange, route)
        finally:
            meters.in_flight.dec()
            meters.requests.labels(route_name, str(exchange.status or 499)).inc()

    async def _answer(self, exchange: Exchange, route: Route | None) -> None:
        try:
            exchange.extra_headers.update(self._cors.headers(exchange.headers))
            if exchange.path == "*" and exchange.method == "OPTIONS":  # of the server as a whole (RFC 9110, 9.3.7)
                await exchange.respond(204, b"", headers={"allow": "GET, HEAD, OPTIONS, POST"})
                return
            if route is None:
                raise not_found(exchange.path)
            exchange.errors = route.errors
            exchange.best_priority = self.context.config.best_priority
            exchange.body_timeout_s = self.context.config.body_timeout_s
            if exchange.method == "OPTIONS":
                allowed = self._cors.preflight(exchange.headers, route.method)
                if allowed is not None:
                    await exchange.respond(204, b"", headers=allowed)
                    return
            if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
                raise method_not_allowed(exchange.method, exchange.path, route.method)
            if route.needs_key and self._keys:
                key = self._keys.find(exchange.headers)
                exchange.tenant_salt = key.cache_salt
                if key.best_priority is not None:
                    exchange.best_priority = key.best_priority
            await route.handler(self.context, exchange)
        except (RorqualError, HttpError) as error:
            # The request's inbox holds the error, and the frames of its traceback the inbox: without the cut this is
            # a cycle, and those are looked for seldom.
            error.__traceback__ = None
            if isinstance(error, CancelledRequestError):
                return  # nobody is there to be told
            if isinstance(error, InternalError):
                _log.error("request %s failed: %s", exchange.request_id, error)
            await exchange.fail(failure_of(error))
        except Exception as error:
            _log.exception("request %s (client's id: %s) failed", exchange.request_id, exchange.client_request_id)
            await exchange.fail(failure_of(error))
        except asyncio.CancelledError:
            _log.warning("request %s was cut short by the shutdown", exchange.request_id)
            raise

    def _find(self, exchange: Exchange) -> tuple[str, Route | None]:
        """The route, and its name for metrics (a client cannot invent label values)."""
        path = exchange.path
        if len(path) > 1:
            path = path.rstrip("/") or "/"
        if path in self._routes:
            return path, self._routes[path]
        if path.startswith(MODELS_PREFIX):
            return ONE_MODEL, self._routes[ONE_MODEL]
        return "other", None

    async def _health(self, context: GatewayContext, exchange: Exchange) -> None:
        """Ready only when the whole chain is: tokenizer, scheduler and executor."""
        causes = self.replicas.causes()
        if self.draining:
            status, health = 503, Health("draining", causes, "the gateway is shutting down")
        elif self.replicas.ready:
            status, health = 200, Health("ok", causes)
        else:
            status, health = 503, Health("unavailable", causes, "; ".join(causes.values()))
        await exchange.respond(status, msgspec.json.encode(health))

    async def _live(self, context: GatewayContext, exchange: Exchange) -> None:
        await exchange.respond(200, b'{"status":"ok"}')

    async def _version(self, context: GatewayContext, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(Version(__version__)))

    async def _metrics(self, context: GatewayContext, exchange: Exchange) -> None:
        encoder, content_type = choose_encoder(exchange.headers.get("accept", ""))
        await exchange.respond(200, encoder(self.context.telemetry.registry), content_type)

    async def _openapi(self, context: GatewayContext, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(self._document))

    async def _docs(self, context: GatewayContext, exchange: Exchange) -> None:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        await exchange.respond(200, page(self._document).encode(), "text/html; charset=utf-8", policy)
