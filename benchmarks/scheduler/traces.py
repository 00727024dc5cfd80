"""Arrival traces: requests with their times and what their prompts have in common, generated or from a file.

A trace file has one JSON object a line:

    {"id": "s0.t1", "at_s": 8.0, "after": "s0.t0", "prompt": [["system-0", 800], ["s0.u0", 60], ["s0.t0", 200],
     ["s0.u1", 40]], "output_tokens": 180, "priority": 0, "salt": "", "time_limit_s": null}

`prompt` is a list of (name of a text, how many of its first tokens). Equal names are equal tokens, so prefixes are
shared where lists begin alike; the id of an earlier request names its answer. `at_s` counts from the start of the
trace or, with `after`, from the end of that request. `after`, `priority`, `salt` and `time_limit_s` may be left out.
"""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path


class TraceError(ValueError):
    """A trace that cannot be read, with where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. See the module's docstring."""

    id: str
    at_s: float
    prompt: tuple[tuple[str, int], ...]
    output_tokens: int
    after: str = ""
    priority: int = 0
    salt: str = ""
    time_limit_s: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.prompt)


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for request in trace:
            out.write(json.dumps(asdict(request)) + "\n")


def read_trace(path: Path) -> list[TraceRequest]:
    """TraceError names the line that is wrong."""
    trace: list[TraceRequest] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            fields["prompt"] = tuple((str(name), int(num_tokens)) for name, num_tokens in fields["prompt"])
            fields["after"] = fields.get("after") or ""
            trace.append(TraceRequest(**fields))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
    return checked(trace)


def checked(trace: list[TraceRequest]) -> list[TraceRequest]:
    """`trace` if its ids are unique and every `after` names an earlier line; TraceError otherwise."""
    seen: set[str] = set()
    for request in trace:
        if request.id in seen:
            raise TraceError(f"request id {request.id!r} comes twice")
        if request.after and request.after not in seen:
            raise TraceError(f"{request.id!r} comes after {request.after!r}, which is not an earlier line")
        if request.output_tokens < 1 or any(n < 1 for _, n in request.prompt) or not request.prompt:
            raise TraceError(f"{request.id!r} needs a prompt and output_tokens of at least 1")
        if not (math.isfinite(request.at_s) and request.at_s >= 0):
            raise TraceError(f"{request.id!r}: at_s is {request.at_s}")
        seen.add(request.id)
    if not trace:
        raise TraceError("the trace is empty")
    return trace


# -- generators ---------------------------------------------------------------------------------------


def poisson(
    rng: random.Random,
    *,
    rate: float = 8.0,
    requests: int = 400,
    input: str = "512",
    output: str = "256",
    limit: str = "",
) -> list[TraceRequest]:
    """Unrelated prompts, `rate` a second; `limit`: seconds until their deadlines, none where it is empty."""
    trace, at_s = [], 0.0
    for i in range(requests):
        at_s += rng.expovariate(rate)
        request = _request(f"r{i}", at_s, [(f"p{i}", _length(rng, input))], _length(rng, output))
        trace.append(_limited(rng, request, limit))
    return trace


def bursts(
    rng: random.Random,
    *,
    size: int = 64,
    every: float = 10.0,
    requests: int = 640,
    input: str = "128-2048",
    output: str = "64-512",
    limit: str = "",
) -> list[TraceRequest]:
    """Unrelated prompts, `size` at once every `every` seconds; `limit`: as in `poisson`."""
    return [
        _limited(
            rng,
            _request(f"r{i}", every * (i // size), [(f"p{i}", _length(rng, input))], _length(rng, output)),
            limit,
        )
        for i in range(requests)
    ]


def flood(
    rng: random.Random,
    *,
    rate: float = 40.0,
    requests: int = 2000,
    better: int = 3,
    others: int = 20,
    input: str = "64-512",
    output: str = "64-256",
) -> list[TraceRequest]:
    """`requests` of a class that is `better` than 0, `rate` a second, and `others` of class 0 in their first half."""
    trace, at_s = [], 0.0
    every = max(1, requests // (2 * others))
    for i in range(requests):
        at_s += rng.expovariate(rate)
        request = _request(f"f{i}", at_s, [(f"p{i}", _length(rng, input))], _length(rng, output))
        trace.append(replace(request, priority=-better))
        if i % every == 0 and i // every < others:
            trace.append(_request(f"o{i}", at_s, [(f"q{i}", _length(rng, input))], _length(rng, output)))
    return trace


def chat(
    rng: random.Random,
    *,
    sessions: int = 100,
    rate: float = 2.0,
    turns: int = 5,
    systems: int = 4,
    system: int = 800,
    user: str = "20-200",
    output: str = "50-400",
    think: str = "2-20",
) -> list[TraceRequest]:
    """`sessions` of several turns, `rate` new ones a second; each begins with one of `systems` system prompts."""
    return _sessions(
        rng,
        [(f"system-{i % systems}", system) for i in range(sessions)],
        rate=rate, turns=turns, first=user, later=user, output=output, think=think,
    )  # fmt: skip


def agents(
    rng: random.Random,
    *,
    sessions: int = 40,
    rate: float = 0.5,
    turns: int = 8,
    tools: int = 4000,
    context: int = 30_000,
    result: str = "200-2000",
    output: str = "50-300",
    think: str = "0.2-3",
) -> list[TraceRequest]:
    """Agents with `context` tokens at their first turn, of which `tools` are common; a tool's result each turn."""
    return _sessions(
        rng,
        [("tools", tools)] * sessions,
        rate=rate, turns=turns, first=str(max(1, context - tools)), later=result, output=output, think=think,
    )  # fmt: skip


def _sessions(
    rng: random.Random,
    roots: list[tuple[str, int]],
    *,
    rate: float,
    turns: int,
    first: str,
    later: str,
    output: str,
    think: str,
) -> list[TraceRequest]:
    trace, start_s = [], 0.0
    for i, root in enumerate(roots):
        start_s += rng.expovariate(rate)
        prompt, before = [root], ""
        for turn in range(turns):
            prompt.append((f"s{i}.u{turn}", _length(rng, later if turn else first)))
            at_s = _between(rng, think) if turn else start_s
            request = _request(f"s{i}.t{turn}", at_s, prompt, _length(rng, output), after=before)
            trace.append(request)
            before = request.id
            prompt.append((request.id, request.output_tokens))
    return trace


def _request(
    id: str, at_s: float, prompt: list[tuple[str, int]], output_tokens: int, *, after: str = ""
) -> TraceRequest:
    return TraceRequest(
        id=id, at_s=round(at_s, 6), prompt=tuple(prompt), output_tokens=output_tokens, after=after
    )  # (microseconds, so that a file says the same)


def _limited(rng: random.Random, request: TraceRequest, limit: str) -> TraceRequest:
    return replace(request, time_limit_s=round(_between(rng, limit), 6)) if limit else request


def _between(rng: random.Random, span: str) -> float:
    """A number of "a" or, evenly in its logarithm, of "a-b"."""
    low, _, high = span.partition("-")
    bottom, top = float(low), float(high or low)
    if not 0 < bottom <= top:
        raise TraceError(f"{span!r} is not a number above 0, or a span of two like 64-512")
    return math.exp(rng.uniform(math.log(bottom), math.log(top)))


def _length(rng: random.Random, span: str) -> int:
    return max(1, round(_between(rng, span)))


GENERATORS: dict[str, Callable[..., list[TraceRequest]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "flood": flood,
    "chat": chat,
    "agents": agents,
}


def make_trace(source: str, seed: int) -> list[TraceRequest]:
    """The trace that `source` names: `poisson:rate=8,requests=400` and its like, or a file."""
    kind, _, arguments = source.partition(":")
    generator = GENERATORS.get(kind)
    if generator is None:
        path = Path(source)
        if not path.is_file():
            raise TraceError(f"{source!r} is neither a file nor one of {', '.join(f'{k}:…' for k in GENERATORS)}")
        return read_trace(path)
    known = {name: p.default for name, p in inspect.signature(generator).parameters.items() if name != "rng"}
    values: dict[str, object] = {}
    for part in filter(None, arguments.split(",")):
        name, _, text = part.partition("=")
        if name not in known:
            raise TraceError(f"{kind} has no {name!r}; it has {', '.join(f'{n}={d}' for n, d in known.items())}")
        try:
            values[name] = type(known[name])(text)
        except ValueError:
            raise TraceError(f"{kind}: {name}={text!r} is not a {type(known[name]).__name__}") from None
        if not isinstance(values[name], str) and not values[name] > 0:  # type: ignore[operator]
            raise TraceError(f"{kind}: {name} must be above 0")
    try:
        return checked(generator(random.Random(seed), **values))
    except ValueError as error:
        raise TraceError(f"{kind}: {error}") from error
