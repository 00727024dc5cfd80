"""A load of streamed completions over HTTP/1.1, with the time of every token's arrival.

One process, one connection a slot, each kept alive; events are found by their bytes and not parsed, which takes some
10 us a chunk, so that 256 streams of 12,000 tokens a second leave the client far from being what is measured (its own
CPU time is in every summary). Definitions as in vLLM's `bench serve`: TTFT is the time from the request to its first
token's chunk, TPOT is (latency - TTFT) / (output tokens - 1) with the latency up to the last chunk of the choice, and
output tokens a second are all output tokens over the time from the first request to the last answer's end.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

_HAS_TEXT = re.compile(rb'"text":"[^"]')
_COUNTS = re.compile(rb'"(prompt_tokens|completion_tokens)":(\d+)')
_REASON = re.compile(rb'"finish_reason":"(\w+)"')
_END = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 4096


class LoadError(RuntimeError):
    """A request was not answered as it must be."""


@dataclass(slots=True)
class Answer:
    """What one request brought. Times are perf_counter's, in seconds."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    cancelled: bool = False
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.num_output_tokens - 1, 1)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[Answer] | None = None
        self._tail = b""
        self._is_new = True
        self._cancel_after = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def request(self, body: bytes, cancel_after: int) -> asyncio.Future[Answer]:
        """Send; with `cancel_after` the connection is cut after so many reads with tokens."""
        assert self._transport is not None
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._tail, self._is_new, self._cancel_after = b"", True, cancel_after
        self._done = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._transport.write(head.encode() + body)
        return self._done

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        answer, done = self._answer, self._done
        if done is None or done.done():
            return
        if self._is_new:
            self._is_new = False
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(LoadError(data[:2000].decode("utf-8", "replace")))
                return
        if b'"choices":[{' in data:
            if answer.first_s or _HAS_TEXT.search(data):
                answer.arrivals_s.append(now_s)
                answer.first_s = answer.first_s or now_s
            answer.last_s = now_s
            if self._cancel_after and len(answer.arrivals_s) >= self._cancel_after:
                answer.cancelled = True
                self._close(answer)
                return
        elif b'{"error"' in data:
            self._fail(LoadError(data[:2000].decode("utf-8", "replace")))
            return
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if len(data) < _TAIL_BYTES else data[-_TAIL_BYTES:]
        if self._tail.endswith(_END):
            self._finish(answer, done)

    def _finish(self, answer: Answer, done: asyncio.Future[Answer]) -> None:
        counts = {name: int(number) for name, number in _COUNTS.findall(self._tail)}
        reason = _REASON.search(self._tail)
        answer.num_prompt_tokens = counts.get(b"prompt_tokens", 0)
        answer.num_output_tokens = counts.get(b"completion_tokens", 0)
        answer.finish_reason = reason[1].decode() if reason else ""
        if b"[DONE]" not in self._tail or not answer.num_output_tokens:
            self._fail(LoadError(f"an answer ended early: {self._tail[-500:]!r}"))
        else:
            done.set_result(answer)

    def _fail(self, error: LoadError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        if self._transport is not None:
            self._transport.abort()

    def _close(self, answer: Answer) -> None:
        assert self._done is not None
        assert self._transport is not None
        self._done.set_result(answer)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadError(f"the connection was closed: {exc!r}"))

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and what its answer must be."""

    body: bytes
    num_prompt_tokens: int
    num_output_tokens: int
    cancel_after: int = 0  # reads with tokens after which the client leaves; 0: it stays

    def check(self, answer: Answer) -> None:
        """Raises LoadError where the answer has other lengths, or did not end by its length."""
        got = (answer.num_prompt_tokens, answer.num_output_tokens, answer.finish_reason)
        wanted = (self.num_prompt_tokens, self.num_output_tokens, "length")
        if not answer.cancelled and got != wanted:
            raise LoadError(f"expected (tokens in, tokens out, finish reason) {wanted}, got {got}")


def completion_job(
    prompt: str | list[int], num_prompt_tokens: int, max_tokens: int, cancel_after: int = 0, **fields: Any
) -> Job:
    """What `vllm bench serve --backend openai` sends, for a prompt of text or of ids; `fields` are added or take precedence."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return Job(json.dumps(body).encode(), num_prompt_tokens, max_tokens, cancel_after)


async def run_jobs(url: str, jobs: Iterator[Job], concurrency: int, *, keep: Callable[[Answer], None]) -> None:
    """Answer after answer to `keep`, with `concurrency` requests in flight until `jobs` has no more. Raises an
    ExceptionGroup with the LoadError of a request that failed."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()

    async def slot() -> None:
        connection: _Connection | None = None
        try:
            for job in jobs:
                if connection is None or not connection.is_open:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(parts.netloc), parts.hostname, parts.port
                    )
                answer = await connection.request(job.body, job.cancel_after)
                job.check(answer)
                keep(answer)
        finally:  # also after a failure: uvloop waits at its end for connections left open
            if connection is not None:
                connection.close()

    async with asyncio.TaskGroup() as slots:
        for _ in range(concurrency):
            slots.create_task(slot())


@dataclass
class LoadRun:
    """A finished load."""

    answers: list[Answer]
    wall_s: float
    client_cpu_s: float

    @property
    def output_tok_s(self) -> float:
        return sum(a.num_output_tokens for a in self.answers) / self.wall_s

    def summary(self) -> dict[str, Any]:
        intervals = [
            later - earlier
            for a in self.answers
            for earlier, later in zip(a.arrivals_s[:-1], a.arrivals_s[1:], strict=True)
        ]
        return {
            "output_tok_s": round(self.output_tok_s, 1),
            "ttft_ms": spread_ms([a.ttft_s for a in self.answers]),
            "tpot_ms": spread_ms([a.tpot_s for a in self.answers]),
            "itl_ms": spread_ms(intervals),
            "num_prompts": len(self.answers),
            "wall_s": round(self.wall_s, 2),
        }


def spread_ms(times_s: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, in milliseconds."""
    if not times_s:
        return {}
    ordered = sorted(times_s)
    rank = 0.99 * (len(ordered) - 1)  # interpolated between neighbours
    low = int(rank)
    p99 = ordered[low] + (rank - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])
    figures = {"mean": statistics.fmean(ordered), "median": statistics.median(ordered), "p99": p99}
    return {name: round(1000 * value, 3) for name, value in figures.items()}


async def run_load(url: str, jobs: Sequence[Job], concurrency: int, timeout_s: float) -> LoadRun:
    """All jobs, `concurrency` at a time. Raises TimeoutError, and LoadError for a request that failed."""
    answers: list[Answer] = []
    cpu_s, start_s = time.process_time(), time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await run_jobs(url, iter(jobs), concurrency, keep=answers.append)
    except* LoadError as errors:
        raise LoadError(str(errors.exceptions[0])) from None
    return LoadRun(answers, time.perf_counter() - start_s, time.process_time() - cpu_s)
