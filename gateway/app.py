"""The ASGI application: routes, keys, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from prometheus_client.exposition import choose_encoder

from rorqual import __version__
from rorqual.core.clock import Clock, SystemClock
from rorqual.core.config import GatewayConfig
from rorqual.core.errors import CancelledRequestError, InternalError, RorqualError, UnavailableError
from rorqual.telemetry import Telemetry

from .asgi import Exchange, Receive, Scope, Send
from .context import GatewayContext
from .failures import HttpError, bad_key, failure_of, method_not_allowed, not_found
from .observe import Meters
from .openai import endpoints
from .upstream.replicas import ReplicaSet

_log = logging.getLogger(__name__)

Handler = Callable[[GatewayContext, Exchange], Awaitable[None]]

MODELS_PREFIX = "/v1/models/"


@dataclass(frozen=True, slots=True)
class Route:
    """One path."""

    method: str
    handler: Handler
    needs_key: bool = True


class Gateway:
    """One gateway. Two in one process share nothing."""

    def __init__(self, config: GatewayConfig, telemetry: Telemetry, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.replicas = ReplicaSet(config.tokenizers, peer_timeout_s=config.peer_timeout_s, clock=clock)
        self._meters = Meters(telemetry)
        self.context = GatewayContext(
            config=config, telemetry=telemetry, meters=self._meters, clock=clock, replicas=self.replicas
        )
        self._key_digests = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self.draining = False
        self._routes: dict[str, Route] = {
            "/v1/chat/completions": Route("POST", endpoints.chat_completions),
            "/v1/completions": Route("POST", endpoints.text_completions),
            "/v1/models": Route("GET", endpoints.models),
            "/tokenize": Route("POST", endpoints.tokenize),
            "/detokenize": Route("POST", endpoints.detokenize),
            "/health": Route("GET", self._health, needs_key=False),
            "/health/live": Route("GET", self._live, needs_key=False),
            "/version": Route("GET", self._version, needs_key=False),
            "/metrics": Route("GET", self._metrics, needs_key=False),
        }

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
            if route is None:
                raise not_found(exchange.path)
            if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
                raise method_not_allowed(exchange.method, exchange.path, route.method)
            if route.needs_key and self._key_digests:
                self._check_key(exchange)
            await route.handler(self.context, exchange)
        except CancelledRequestError:
            pass  # nobody is there to be told
        except (RorqualError, HttpError) as error:
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
            name = path[len(MODELS_PREFIX) :]

            async def one_model(context: GatewayContext, exchange: Exchange) -> None:
                await endpoints.model(context, exchange, name)

            return MODELS_PREFIX + "{id}", Route("GET", one_model)
        return "other", None

    def _check_key(self, exchange: Exchange) -> None:
        scheme, _, key = exchange.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        # All keys are compared, whichever fits: time tells nothing.
        num_equal = sum(hmac.compare_digest(digest, ours) for ours in self._key_digests)
        if num_equal == 0:
            raise bad_key(bool(given))

    async def _health(self, context: GatewayContext, exchange: Exchange) -> None:
        """Ready only when the whole chain is: tokenizer, scheduler and executor."""
        causes = self.replicas.causes()
        if self.draining:
            status, body = 503, {"status": "draining", "cause": "the gateway is shutting down"}
        elif self.replicas.ready:
            status, body = 200, {"status": "ok"}
        else:
            status, body = 503, {"status": "unavailable", "cause": "; ".join(causes.values())}
        await exchange.respond(status, msgspec.json.encode({**body, "tokenizers": causes}))

    async def _live(self, context: GatewayContext, exchange: Exchange) -> None:
        await exchange.respond(200, b'{"status":"ok"}')

    async def _version(self, context: GatewayContext, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode({"version": __version__}))

    async def _metrics(self, context: GatewayContext, exchange: Exchange) -> None:
        encoder, content_type = choose_encoder(exchange.headers.get("accept", ""))
        await exchange.respond(200, encoder(self.context.telemetry.registry), content_type)
