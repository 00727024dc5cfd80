"""Streams answers from an OpenAI-compatible server, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rorqual.client import SamplingParams
from rorqual.core.errors import InvalidRequestError, RorqualError, UnavailableError

CONNECT_TIMEOUT_S = 600.0
"""Silence that counts as a lost server: a long prompt on a CPU says nothing for minutes."""


def _body(params: SamplingParams) -> dict[str, Any]:
    body = {
        name: getattr(params, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos")
        if getattr(params, name) is not None and getattr(params, name) is not False
    }
    return {**body, **({"stop": list(params.stop)} if params.stop else {}), "stream": True}


@contextlib.contextmanager
def _request(url: str, path: str, body: Mapping[str, Any] | None, api_key: str) -> Iterator[http.client.HTTPResponse]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"the URL must be http://host:port or grpc://host:port, got {url!r}", field="url")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    base = parts.path.rstrip("/").removesuffix("/v1")
    try:
        try:
            connection.request(
                "GET" if body is None else "POST",
                f"{base}{path}",
                None if body is None else json.dumps(body, ensure_ascii=False).encode(),
                headers,
            )
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"no answer from {url}: {error or type(error).__name__}") from None
        if response.status != 200:
            raise RorqualError(f"HTTP {response.status} from {url}: {_error_text(response.read())}")
        yield response
    finally:
        connection.close()


def _error_text(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode("utf-8", "replace")[:500]


def model_name(url: str, api_key: str = "") -> str:
    """The first model that the server names."""
    with _request(url, "/v1/models", None, api_key) as response:
        return str(json.loads(response.read())["data"][0]["id"])


def _stream(url: str, path: str, body: Mapping[str, Any], api_key: str) -> Iterator[Mapping[str, Any]]:
    with _request(url, path, body, api_key) as response:
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RorqualError(str(chunk["error"].get("message", chunk["error"])))
            yield from chunk.get("choices", ())


def stream_chat(
    url: str, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, api_key: str = "", model: str = ""
) -> Iterator[str]:
    """The answer's text, piece by piece. Raises RorqualError."""
    body = {"model": model or model_name(url, api_key), "messages": list(messages), **_body(params)}
    for choice in _stream(url, "/v1/chat/completions", body, api_key):
        if text := choice.get("delta", {}).get("content"):
            yield text


def stream_completion(
    url: str, prompt: str, params: SamplingParams, *, api_key: str = "", model: str = ""
) -> Iterator[str]:
    """The continuation, piece by piece. Raises RorqualError."""
    body = {"model": model or model_name(url, api_key), "prompt": prompt, **_body(params)}
    for choice in _stream(url, "/v1/completions", body, api_key):
        if text := choice.get("text"):
            yield text
