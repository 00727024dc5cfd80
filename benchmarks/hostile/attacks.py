"""The attacks, by name: what is sent, and what the right outcome is. None of them may end a process.

An attack notes wrong outcomes on its target. Its runner adds: a process that died, requests left behind, an innocent
that failed or stood still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import struct
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.soak.client import Broken, Cut, post, wait_healthy
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc, text_pb2

from .fake_executor import LIES, FakeExecutor, hello_like
from .target import Target, code_of, drain

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVED_OR_REFUSED = (200, 400)
REFUSED = (400,)
OR_BUSY = (200, 400, 429)


@dataclass(frozen=True)
class Attack:
    """`needs`: of "model" (one that takes grammars), "text" (the tokenizer's gRPC), "scheduler" (its gRPC) and "stack"
    (one of our own, to kill in). `short`: costs a second or two where it is parried. `may_die`: processes that the
    attack itself kills. `innocents_may`: get this status, as a right outcome for them too; 0: none but 200."""

    name: str
    about: str
    run: Callable[[Target], Awaitable[None]]
    needs: frozenset[str] = frozenset()
    short: bool = False
    within_s: float = 90.0
    may_die: frozenset[str] = frozenset()
    innocents_may: int = 0


ATTACKS: dict[str, Attack] = {}


def attack(
    name: str,
    *,
    needs: str = "",
    short: bool = False,
    within_s: float = 90.0,
    may_die: str = "",
    innocents_may: int = 0,
) -> Callable[[Callable[[Target], Awaitable[None]]], Callable[[Target], Awaitable[None]]]:
    """Put a function into the table. The first line of its docstring says what it is."""

    def add(run: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Awaitable[None]]:
        assert name not in ATTACKS
        about = (run.__doc__ or "").splitlines()[0].rstrip(".")
        parts = frozenset(needs.split()), short, within_s, frozenset(may_die.split()), innocents_may
        ATTACKS[name] = Attack(name, about, run, *parts)
        return run

    return add


def completion(prompt: Any = "x", max_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, **fields}


def constrained(kind: str, value: Any, max_tokens: int = 3) -> dict[str, Any]:
    return completion(max_tokens=max_tokens, structured_outputs={kind: value})


def schema_body(schema: Any) -> dict[str, Any]:
    return completion(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


async def one_by_one(t: Target, bodies: Iterable[dict[str, Any]], right: Iterable[int] = SERVED_OR_REFUSED) -> None:
    for number, body in enumerate(bodies):
        t.expect(f"request {number}", await t.status(COMPLETIONS, body, 40), right)


# --- grammars ----------------------------------------------------------------------------------------------------------


@attack("slow-masks", needs="model", within_s=120)
async def _slow_masks(t: Target) -> None:
    """Grammars of sixty bytes whose masks take longer than a step."""
    texts = (
        'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x"',
        'start: ("a"~1000)~100',
        'start: (("a"~1000)~1000)~1000',
    )
    await one_by_one(t, (constrained("grammar", text, 5) for text in texts))


@attack("slow-mask", needs="model", short=True, within_s=60)
async def _slow_mask(t: Target) -> None:
    """One such grammar, of 22 bytes."""
    await one_by_one(t, [constrained("grammar", 'start: ("a"~1000)~100', 5)])


def _rule_chain(length: int) -> str:
    rules = "\n".join(f'r{i}: "x" r{i + 1} | "a"' for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "b"'


def _ref_chain(length: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    defs: dict[str, Any] = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$defs": {**defs, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@attack("rule-chain", needs="model", short=True, within_s=60)
async def _rule_chain_attack(t: Target) -> None:
    """A grammar of 3,000 rules, each naming the next."""
    await one_by_one(t, [constrained("grammar", _rule_chain(3000))])


@attack("chains", needs="model", within_s=180)
async def _chains(t: Target) -> None:
    """Chains of thousands of rules and of references, in every form."""
    await one_by_one(t, (constrained("grammar", _rule_chain(length)) for length in (2500, 5000, 6000)))
    links: list[tuple[int, Callable[[dict[str, str]], dict[str, Any]]]] = [
        (5500, lambda ref: ref),
        (3000, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
        (3500, lambda ref: {"type": "array", "items": ref}),
    ]
    await one_by_one(t, (schema_body(_ref_chain(length, link)) for length, link in links))


@attack("multiple-of", needs="model", short=True, within_s=60)
async def _multiple_of(t: Target) -> None:
    """Three large multipleOf at once, whose product a compiler would count through."""
    parts = [{"type": "integer", "multipleOf": number} for number in (999983, 999979, 999961)]
    await one_by_one(t, [schema_body({"allOf": parts})])


@attack("newlines", needs="model", short=True, within_s=60)
async def _newlines(t: Target) -> None:
    """60 kB of newlines for a grammar, alone and behind a valid one."""
    texts = ("\n" * 60_000, 'root ::= "a"' + "\n" * 60_000)
    await one_by_one(t, (constrained("grammar", text) for text in texts))


@attack("unfollowable", needs="model", within_s=120)
async def _unfollowable(t: Target) -> None:
    """Constraints that compile and cannot be followed: refused as too complex, never a 500."""
    optional = {f"p{i}": {"type": "string"} for i in range(1500)}
    patterns = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(2000)}
    bodies = [
        constrained("grammar", 'start: (("a"~100)~100)~100'),
        schema_body({"type": "object", "properties": optional}),
        schema_body({"type": "object", "properties": patterns}),
        constrained(
            "grammar", "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(2000)) + '\nr2000: "a"'
        ),
    ]
    await one_by_one(t, bodies)


@attack("grammar-bombs", needs="model", within_s=240)
async def _grammar_bombs(t: Target) -> None:
    """Two dozen other schemas, regexes and grammars that blow up in somebody's compiler, one by one."""
    tree: dict[str, Any] = {"t0": {"type": "string"}}
    for i in range(1, 31):
        tree[f"t{i}"] = {"type": "array", "prefixItems": [{"$ref": f"#/$defs/t{i - 1}"}] * 2}
    many = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(40)]
    bodies = [
        schema_body({"enum": [f"e{i}" for i in range(100_000)]}),
        schema_body({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        schema_body({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        schema_body({"$defs": tree, "$ref": "#/$defs/t30"}),
        schema_body({"allOf": [{"anyOf": many[:8]}] * 8}),
        schema_body({"allOf": many}),
        schema_body({"type": "string", "minLength": 1_000_000}),
        schema_body({"type": "string", "minLength": 10**19}),
        schema_body({"type": "integer", "minimum": 3, "maximum": 2}),
        schema_body({"type": "array", "items": {"type": "array", "minItems": 1000}, "minItems": 1000}),
        schema_body({"type": "object", "patternProperties": {"^(a+)+$": {"type": "string"}}}),
        *(constrained("regex", text) for text in (
            "(a+)+$", "(x{1,1000}){1,1000}", ".*a.{200}", r"\p{L}{500}", "(" * 5000 + "a" + ")" * 5000, "[", "a{99999999}",
        )),
        constrained("grammar", 'start: start "a" | "a"'),
        constrained("grammar", 'start: a\na: a a | "x" |'),
        constrained("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        constrained("choice", ["c" * 1_000_000]),
        constrained("choice", [f"c{i}" for i in range(2000)]),
        constrained("choice", [""]),
    ]  # fmt: skip
    await one_by_one(t, bodies)


@attack("many-schemas", needs="model", within_s=120)
async def _many_schemas(t: Target) -> None:
    """120 schemas and 40 heavy regexes, each of them new."""
    for start in range(0, 120, 8):
        schemas = ({"type": "object", "properties": {f"a{i}": {"type": "integer"}}} for i in range(start, start + 8))
        await t.flood(COMPLETIONS, map(schema_body, schemas), (200,))
    for start in range(0, 40, 8):
        regexes = (constrained("regex", f"[a-{'bcdefghi'[i % 8]}]{{1,{100 + i}}}x") for i in range(start, start + 8))
        await t.flood(COMPLETIONS, regexes, OR_BUSY)


@attack("compiles-at-once", needs="model", within_s=90)
async def _compiles_at_once(t: Target) -> None:
    """Sixteen heavy schemas at once: nobody else's prompt waits for a compiler."""
    schemas = ({"enum": [f"{i} {k}" for k in range(5000)]} for i in range(16))
    await t.flood(COMPLETIONS, map(schema_body, schemas), OR_BUSY)


@attack("long-schemas", needs="model", within_s=120)
async def _long_schemas(t: Target) -> None:
    """Three requests of 128 choices with a schema of 240 kB: more than a message holds, if it is sent with each."""
    schema = {"type": "object", "properties": {f"p{i}": {"const": "x" * 2000} for i in range(120)}}
    bodies = [{**schema_body({**schema, "title": f"schema {i}"}), "n": 128} for i in range(3)]
    await t.flood(COMPLETIONS, bodies, OR_BUSY, 90)


# --- numbers -----------------------------------------------------------------------------------------------------------


@attack("numbers", short=True)
async def _numbers(t: Target) -> None:
    """Numbers that fit no field: min_tokens, top_k, seeds and penalties at the edges of their types."""
    bodies: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"min_tokens": 2**31}, REFUSED),
        ({"min_tokens": 2**32 - 1}, REFUSED),
        ({"max_tokens": 2**31, "ignore_eos": False}, SERVED_OR_REFUSED),
        ({"max_tokens": 10**30}, REFUSED),
        ({"max_tokens": -1}, REFUSED),
        ({"top_k": 2**31}, SERVED_OR_REFUSED),
        ({"top_k": 2**63}, SERVED_OR_REFUSED),
        ({"seed": 2**63 - 1}, (200,)),
        ({"seed": 2**64}, REFUSED),
        ({"repetition_penalty": 2e-39}, SERVED_OR_REFUSED),
        ({"repetition_penalty": 1e38}, SERVED_OR_REFUSED),
        ({"temperature": 1e-45}, SERVED_OR_REFUSED),
        ({"min_p": 1e-45}, SERVED_OR_REFUSED),
        ({"priority": 2**31}, REFUSED),
        ({"n": 129}, REFUSED),
        ({"logprobs": 21}, REFUSED),
        ({"stop_token_ids": [2**32 - 1]}, SERVED_OR_REFUSED),
        ({"logit_bias": {str(2**32 - 1): 1}}, SERVED_OR_REFUSED),
    ]
    for fields, right in bodies:
        # (The model's length is an answer's end where max_tokens allow more: kept short by a stop.)
        body = {**completion("x", 4, stop=["e", " ", "。"]), **fields}
        t.expect(str(fields), await t.status(COMPLETIONS, body), right)
    chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 2**31}
    t.expect("chat without max_tokens", await t.status(CHAT, chat), REFUSED)


def _options(**fields: Any) -> text_pb2.TextOptions:
    fields.setdefault("request_id", f"hostile-{random.getrandbits(64):x}")
    fields.setdefault("max_tokens", 2)
    return text_pb2.TextOptions(**fields)


def _complete(num_tokens: int = 8, **fields: Any) -> text_pb2.CompleteRequest:
    ids = struct.pack(f"<{num_tokens}I", *([30] * num_tokens))
    return text_pb2.CompleteRequest(token_ids=ids, options=_options(**fields))


SERVED_OR_INVALID = ("OK", "INVALID_ARGUMENT")


@attack("grpc-numbers", needs="text scheduler", short=True)
async def _grpc_numbers(t: Target) -> None:
    """The same by gRPC, to the tokenizer and to the scheduler: attempts, deadlines and counts beyond their fields."""
    sampling = common_pb2.SamplingParams
    requests = {
        "top_k": _complete(sampling=sampling(top_k=2**31)),
        "min_tokens": _complete(sampling=sampling(min_tokens=2**31)),
        "attempt": _complete(attempt=2**20),
        "time_left": _complete(time_left_us=2**64 - 1),
        "nan": _complete(sampling=sampling(temperature=float("nan"))),
        "choices": _complete(num_choices=2**32 - 1),
        "priority": _complete(priority=-(2**31)),
    }
    async with t.text() as stub:
        for name, request in requests.items():
            code = await code_of(lambda request=request: drain(stub.Complete(request)))  # type: ignore[misc]
            t.expect(f"Complete {name}", code, SERVED_OR_INVALID)
    ids = struct.pack("<4I", 30, 31, 32, 33)
    direct: dict[str, dict[str, Any]] = {
        "attempt": {"attempt": 2**20},
        "time_left": {"time_left_us": 2**64 - 1},
        "prompt beyond ids": {"num_prompt_tokens": 9},
        "no prompt": {"num_prompt_tokens": 0},
        "torn ids": {"token_ids": ids + b"x"},
        "unknown ids": {"token_ids": b"\xff" * 16},
        "top_k": {"sampling": sampling(top_k=2**31)},
        "min_tokens": {"sampling": sampling(min_tokens=2**32 - 1)},
        "choice_index": {"choice_index": 2**32 - 1},
    }
    async with t.scheduler() as channel:
        service = generation_pb2_grpc.GenerationServiceStub(channel)
        for name, fields in direct.items():
            given = {
                "request_id": f"hostile {name}",
                "token_ids": ids,
                "num_prompt_tokens": 4,
                "max_tokens": 2,
                **fields,
            }
            call = service.Generate(generation_pb2.GenerateRequest(**given))
            t.expect(f"Generate {name}", await code_of(lambda call=call: drain(call)), SERVED_OR_INVALID)  # type: ignore[misc]


# --- sizes ---------------------------------------------------------------------------------------------------------------


@attack("tokenize", short=True)
async def _tokenize(t: Target) -> None:
    """/tokenize of 8 MB: refused at once, as a completion of it is."""
    text = " " * 8_000_000
    for path, body in (("/tokenize", {"prompt": text}), (COMPLETIONS, completion(text))):
        t.expect(path, await t.status(path, body), (400, 413))


@attack("tokenize-flood", within_s=120)
async def _tokenize_flood(t: Target) -> None:
    """/tokenize of 4 x 32 MB and 20 x 10 MB, whose callers give up."""
    for count, size in ((4, 32_000_000), (20, 10_000_000)):
        await t.flood("/tokenize", ({"prompt": " " * size} for _ in range(count)), (400, 413, 429), 60)


@attack("long-prompts", within_s=120)
async def _long_prompts(t: Target) -> None:
    """Completions of 1 MB of every kind of text, 2,048 prompts, thousands of messages, deep JSON."""
    kinds = (" ", "a", "\n", "0", "\u0000", "é", "鲸", "🐋", "\u200d", "ا", "<", "\\", "a b ")
    await one_by_one(t, (completion(kind * (1_000_000 // len(kind))) for kind in kinds))
    ids = [[5 + i % 200] for i in range(2048)]
    t.expect("2,048 prompts", await t.status(COMPLETIONS, completion(ids, 1)), OR_BUSY)
    messages = [{"role": "user", "content": "x"}] * 16384
    t.expect("16,384 messages", await t.status(CHAT, {"messages": messages, "max_tokens": 1}), SERVED_OR_REFUSED)
    deep = await t.raw_status(_post_bytes(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 30)
    t.expect("deep JSON", deep, REFUSED)
    unknown = completion(**{f"unknown_{i}": i for i in range(30_000)})
    t.expect("30,000 unknown fields", await t.status(COMPLETIONS, unknown), SERVED_OR_REFUSED)


def _post_bytes(data: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (
            len(data),
            data,
        )
    )


@attack("prompt-logprobs", within_s=120)
async def _prompt_logprobs(t: Target) -> None:
    """Prompt log-probabilities with 20 alternatives of prompts as long as the model takes, and for many choices."""
    (_, models), length = await _get(t, "/v1/models"), 2000
    with contextlib.suppress(KeyError, IndexError, TypeError):
        length = min(int(models["data"][0]["max_model_len"]) - 8, 132_000)
    prompt = [5 + i % 200 for i in range(length)]
    t.expect("long", await t.status(COMPLETIONS, completion(prompt, 1, prompt_logprobs=20), 80), (200,))
    body = completion(prompt[:500], 1, prompt_logprobs=20, n=32)
    t.expect("many choices", await t.status(COMPLETIONS, body, 80), OR_BUSY)


async def _get(t: Target, path: str) -> tuple[int, dict[str, Any]]:
    async with t.connection() as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        data = await reader.read(-1)
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@attack("large-admits", within_s=120)
async def _large_admits(t: Target) -> None:
    """128 choices with a penalty of the longest prompt: their tokens go to the executor with each of them."""
    (_, models), length = await _get(t, "/v1/models"), 2000
    with contextlib.suppress(KeyError, IndexError, TypeError):
        length = min(int(models["data"][0]["max_model_len"]) - 8, 140_000)
    body = completion([5 + i % 200 for i in range(length)], 2, n=128, frequency_penalty=0.1)
    t.expect("128 choices", await t.status(COMPLETIONS, body, 100), OR_BUSY)


@attack("many-choices", within_s=120)
async def _many_choices(t: Target) -> None:
    """Five requests of 128 choices; 100 with all stops; 100 with 1,024 biases; 60 with 20 log-probabilities."""
    stops = [f"{'s' * 1000}{i}" for i in range(16)]
    bias = {str(i): 1 for i in range(1024)}
    for count, body in (
        (5, completion("choices", 50, n=128, ignore_eos=True)),
        (100, completion("stops", 20, stop=stops, stop_token_ids=list(range(8, 264)))),
        (100, completion("bias", 4, logit_bias=bias)),
        (60, completion("logprobs", 60, logprobs=20)),
    ):
        await t.flood(COMPLETIONS, [body] * count, OR_BUSY, 100)


@attack("salts", needs="text", short=True)
async def _salts(t: Target) -> None:
    """Cache salts, request ids and trace fields of megabytes by gRPC: refused as by HTTP, and not kept."""
    trace = common_pb2.TraceContext(traceparent="t" * 2_000_000)
    async with t.text() as stub:
        for name, request, right in (
            ("salt", _complete(cache_salt="s" * 8_000_000), ("INVALID_ARGUMENT",)),
            ("request id", _complete(request_id="r" * 1_000_000), ("INVALID_ARGUMENT",)),
            ("trace", _complete(trace=trace), SERVED_OR_INVALID),
        ):
            code = await code_of(lambda request=request: drain(stub.Complete(request)))  # type: ignore[misc]
            t.expect(name, code, right)
    for name, body, right_status in (
        ("salt by HTTP", completion(cache_salt="s" * 10_000), REFUSED),
        ("metadata", completion(metadata={"m": "x" * 100_000}), REFUSED),
    ):
        t.expect(name, await t.status(COMPLETIONS, body), right_status)


@attack("many-salts", within_s=60)
async def _many_salts(t: Target) -> None:
    """2,000 requests, each with a cache salt of its own of a kilobyte."""
    for start in range(0, 2000, 50):
        salts = (completion("salted", 1, cache_salt=f"{i} {'s' * 1000}") for i in range(start, start + 50))
        await t.flood(COMPLETIONS, salts, OR_BUSY)


# --- connections -----------------------------------------------------------------------------------------------------------


@attack("half-closed", short=True)
async def _half_closed(t: Target) -> None:
    """Clients that shut their sending half after the request: answered or cut, not left hanging."""

    async def one() -> None:
        try:
            async with asyncio.timeout(20), t.connection() as (reader, writer):
                writer.write(t.raw_post(COMPLETIONS, completion()))
                writer.write_eof()
                head = (await reader.read(-1))[:12]
                t.expect("half-closed", head or b"", (b"", b"HTTP/1.1 200", b"HTTP/1.1 429"))
        except TimeoutError:
            t.fault("a half-closed connection is neither answered nor cut within 20 s")

    await asyncio.gather(*(one() for _ in range(20)))


@attack("headers", short=True)
async def _headers(t: Target) -> None:
    """Headers of 60 kB, 70 kB and 10 MB, 12,000 lines of them, request ids with anything in them."""
    body = completion("x", 1)
    cases: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("60 kB", f"X-Long: {'h' * 60_000}\r\n", (200, 431)),
        ("70 kB", f"X-Long: {'h' * 70_000}\r\n", (0, 400, 431)),
        ("10 MB", f"X-Long: {'h' * 10_000_000}\r\n", (0, 400, 431)),
        ("12,000 lines", "a: b\r\n" * 9_000, (200, 400, 431)),
        ("an id with a tab", "x-request-id: a\tb\r\n", SERVED_OR_REFUSED),
        ("an id with a bare CR", "x-request-id: a\rb: c\r\n", (0, 200, 400)),
        ("an id of UTF-8", "x-request-id: 鲸\r\n", SERVED_OR_REFUSED),
        ("a torn trace", "traceparent: 00-zz\r\ntracestate: ,,,=\r\n", (200,)),
        ("two lengths", "Content-Length: 3\r\n", (0, 400)),
    )
    for name, headers, right in cases:
        t.expect(name, await t.raw_status(t.raw_post(COMPLETIONS, body, headers)), right)


@attack("idle", within_s=60)
async def _idle(t: Target) -> None:
    """1,000 connections that say nothing, 300 that send a byte a second, for 8 s."""
    async with contextlib.AsyncExitStack() as held:
        slow = []
        for number in range(1300):
            _, writer = await held.enter_async_context(t.connection())
            if number < 300:
                slow.append(writer)
        data = t.raw_post(COMPLETIONS, completion())
        for at in range(8):
            for writer in slow:
                writer.write(data[at : at + 1])
            await asyncio.sleep(1)


@attack("pipelined", within_s=60)
async def _pipelined(t: Target) -> None:
    """2,000 requests for /health and 200 completions, written at once to one connection."""
    for data, count in (
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 2000),
        (t.raw_post(COMPLETIONS, completion("x", 1)), 200),
    ):
        async with t.connection() as (reader, writer):
            writer.write(data * count)
            seen = 0
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(25):
                    while seen < count and (piece := await reader.readline()):
                        seen += piece.startswith(b"HTTP/1.1 200")
                        if b"HTTP/1.1 200" in piece[1:]:
                            seen += 1
            t.expect("pipelined answers", seen, (count,))


@attack("unread", within_s=90)
async def _unread(t: Target) -> None:
    """50 streams that nobody reads for 8 s; ten are looked at then, all are reset."""
    body = completion("unread", 1500, stream=True, ignore_eos=True, logprobs=5)
    async with contextlib.AsyncExitStack() as held:
        ends = []
        for _ in range(50):
            reader, writer = await held.enter_async_context(t.connection())
            writer.write(t.raw_post(COMPLETIONS, body))
            ends.append((reader, writer))
        await asyncio.sleep(8)
        for reader, _ in ends[:10]:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(5):
                    t.expect("first line", (await reader.readline()).strip(), (b"HTTP/1.1 200 OK",))


@attack("cancel-storm", within_s=60)
async def _cancel_storm(t: Target) -> None:
    """Requests by the thousand for 6 s, each dropped a moment after it was sent."""
    end_s = time.monotonic() + 6

    async def one(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end_s:
            with contextlib.suppress(Broken):
                body = completion("storm " * rng.randrange(1, 50), 50, stream=rng.random() < 0.5)
                await post(t.url, COMPLETIONS, body, cut=Cut(rng.randrange(1, 4), rng.uniform(0, 0.03)), timeout_s=30)

    await asyncio.gather(*(one(number) for number in range(32)))


@attack("cancelled", short=True)
async def _cancelled(t: Target) -> None:
    """40 requests dropped a moment after they were sent, queued ones too: nothing is left behind."""

    async def one(number: int) -> None:
        with contextlib.suppress(Broken):
            body = completion("dropped", 200, stream=number % 2 == 0, ignore_eos=True)
            await post(t.url, COMPLETIONS, body, cut=Cut(1, 0.05), timeout_s=30)

    await asyncio.gather(*(one(number) for number in range(40)))


# --- who comes first ---------------------------------------------------------------------------------------------------------


@attack("priority", within_s=120)
async def _priority(t: Target) -> None:
    """100 long requests that put themselves before all others."""
    body = completion("me first", 400, priority=-(2**31), ignore_eos=True)
    await t.flood(COMPLETIONS, [body] * 100, OR_BUSY, 110)


@attack("priority-one", short=True)
async def _priority_one(t: Target) -> None:
    """A priority better than everybody's: refused, or served as an ordinary one."""
    t.expect("priority", await t.status(COMPLETIONS, completion(priority=-(2**31))), SERVED_OR_REFUSED)
    t.expect("a worse one", await t.status(COMPLETIONS, completion(priority=5)), (200,))


# --- sessions over gRPC --------------------------------------------------------------------------------------------------------


@attack("torn-frames", needs="text scheduler", short=True)
async def _torn_frames(t: Target) -> None:
    """Bytes that are no message, in a session of each service: INVALID_ARGUMENT, and nobody else's session ends."""
    for address, name in ((t.text_address, "TextService"), (t.scheduler_address, "GenerationService")):
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            method: Any = channel.stream_stream(f"/rorqual.v1.{name}/Session")

            async def speak(method: Any = method) -> None:
                call = method()
                await call.write(b"\x0a\xff\xff\xff\xff\x0fgarbage")
                await call.done_writing()
                await drain(call)

            t.expect(name, await code_of(speak), ("INVALID_ARGUMENT",))


def _open(stream_id: int, num_tokens: int = 8, max_tokens: int = 4) -> generation_pb2.GenerationCommand:
    ids = struct.pack(f"<{num_tokens}I", *([30] * num_tokens))
    request = generation_pb2.GenerateRequest(
        request_id=f"hostile session {stream_id}",
        token_ids=ids,
        num_prompt_tokens=num_tokens,
        max_tokens=max_tokens,
    )
    return generation_pb2.GenerationCommand(stream_id=stream_id, open=request)


@attack("stream-id-twice", needs="scheduler", short=True)
async def _stream_id_twice(t: Target) -> None:
    """A frame that opens 20 long streams and then one of them again: refused, and none of the 20 runs on."""
    commands = [_open(number, max_tokens=2000) for number in (*range(1, 21), 1)]
    async with t.scheduler() as channel:

        async def speak() -> None:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Session()
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(generation_pb2.GenerationServiceSessionRequest(commands=commands))
            await drain(call)

        t.expect("twice", await code_of(speak), ("FAILED_PRECONDITION",))


@attack("unread-session", needs="scheduler", within_s=60, innocents_may=429)  # all places are taken
async def _unread_session(t: Target) -> None:
    """20,000 streams in one session of which nothing is read, for 5 s; all blocks come back."""
    async with t.scheduler() as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Session()
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(10):
                for start in range(0, 20_000, 500):
                    commands = [_open(start + i + 1) for i in range(500)]
                    await call.write(generation_pb2.GenerationServiceSessionRequest(commands=commands))
        await asyncio.sleep(5)
        call.cancel()


@attack("large-frames", needs="text scheduler", within_s=60)
async def _large_frames(t: Target) -> None:
    """Messages of 70 MB and a hundred thousand cancels of streams that never were."""
    async with t.scheduler() as channel:
        request = generation_pb2.GenerateRequest(request_id="large", token_ids=b"\0" * 70_000_000, num_prompt_tokens=1)
        service = generation_pb2_grpc.GenerationServiceStub(channel)
        code = await code_of(lambda: drain(service.Generate(request)))
        t.expect("70 MB", code, ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"))

        async def cancels() -> None:
            call = service.Session()
            cancel = generation_pb2.CancelGeneration()
            commands = [generation_pb2.GenerationCommand(stream_id=i + 1, cancel=cancel) for i in range(100_000)]
            await call.write(generation_pb2.GenerationServiceSessionRequest(commands=commands))
            await call.done_writing()
            await drain(call)

        t.expect("cancels", await code_of(cancels), ("OK",))


@attack("false-resumes", needs="text", short=True)
async def _false_resumes(t: Target) -> None:
    """Resumes of a prompt that never was, of tokens that do not exist, of choices that were not asked for."""
    history = text_pb2.ChoiceHistory
    good, bad = struct.pack("<2I", 30, 31), b"\xff" * 8
    resumes = {
        "digest": text_pb2.TextResume(num_prompt_tokens=8, prompt_digest=b"d" * 32),
        "ids": text_pb2.TextResume(choices=[history(token_ids=bad)], num_prompt_tokens=8),
        "twice": text_pb2.TextResume(choices=[history(token_ids=good)] * 2, num_prompt_tokens=8),
        "unknown": text_pb2.TextResume(choices=[history(choice_index=7, token_ids=good)], num_prompt_tokens=8),
        "counts": text_pb2.TextResume(num_prompt_tokens=2**32 - 1, num_cached_tokens=2**32 - 1),
    }
    async with t.text() as stub:
        for name, resume in resumes.items():
            request = _complete(attempt=1, resume=resume)
            code = await code_of(lambda request=request: drain(stub.Complete(request)))  # type: ignore[misc]
            t.expect(f"resume, {name}", code, ("INVALID_ARGUMENT", "FAILED_PRECONDITION"))


# --- an executor that lies -------------------------------------------------------------------------------------------------


@attack("hello-of-blocks", needs="scheduler", short=True, within_s=60)
async def _hello_of_blocks(t: Target) -> None:
    """An executor that says it has 200 million blocks, far beyond its memory: refused at once."""
    async with t.scheduler() as channel:
        hello = await hello_like(channel)
        hello.cache_groups[0].num_blocks = 200_000_000
        fake = FakeExecutor(channel, hello, None)
        running = asyncio.create_task(fake.run())
        done, _ = await asyncio.wait([running], timeout=20)
        t.expect("hello", fake.status if done else "taken", ("INVALID_ARGUMENT", "FAILED_PRECONDITION"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _lie(t: Target, name: str) -> None:
    """One fake beside the real executor, twelve clients: each gets all that it asked for, from the other one."""
    async with t.scheduler() as channel:
        fake = FakeExecutor(channel, await hello_like(channel), LIES[name])
        running = asyncio.create_task(fake.run())
        try:
            async with asyncio.timeout(30):
                await fake.welcomed.wait()
            # (While the fake's cache is empty it is the emptier of the two, and half of them and more go there.)
            body = completion("told by a liar", 40, ignore_eos=True)
            answers = asyncio.gather(*(t.answer(COMPLETIONS, body, 45) for _ in range(12)))
            for status, answer in await answers:
                allowed = (200, 500) if name == "long-fault" else (200,)
                t.expect(f"status under {name}", status, allowed)
                if status == 200 and answer["usage"]["completion_tokens"] != 40:
                    t.fault(f"{name}: {answer['usage']['completion_tokens']} tokens of 40")
                if len(json.dumps(answer)) > 20_000:
                    t.fault(f"{name}: an answer of {len(json.dumps(answer))} bytes")
            if not fake.lied.is_set():
                t.fault(f"{name}: no request met the fake executor, so nothing was tried")
            elif name != "long-fault":
                await asyncio.wait([running], timeout=30)
                t.expect(
                    f"link after {name}", fake.status or "alive", ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "ENDED")
                )
        except TimeoutError:
            t.fault(f"{name}: the fake executor was not welcomed within 30 s")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _add_lies() -> None:
    for name in LIES:

        async def run(t: Target, name: str = name) -> None:
            await _lie(t, name)

        run.__doc__ = f"An executor that reports {name.replace('-', ' ')}: its streams go on elsewhere, whole."
        # (A fault may come from any executor: its streams, innocents' too, end with an error, if the link does not.)
        may = 500 if name == "long-fault" else 0
        attack(f"lie-{name}", needs="scheduler", short=True, within_s=120, innocents_may=may)(run)


_add_lies()


# --- deaths ----------------------------------------------------------------------------------------------------------------


async def _kill(t: Target, *names: str) -> None:
    assert t.stack is not None
    for name in names:
        if pid := t.stack.pids.get(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@attack("deaths-in-a-row", needs="stack", within_s=150, may_die="executor", innocents_may=503)
async def _deaths_in_a_row(t: Target) -> None:
    """The executor dies eight times, each time as soon as it is back: the others live on and it comes back."""
    assert t.stack is not None
    killed: set[int] = set()
    end_s = time.monotonic() + 90
    while len(killed) < 8 and time.monotonic() < end_s:
        pid = t.stack.pids.get("executor")
        if pid is None or pid in killed:
            await asyncio.sleep(0.1)
            if t.stack.wait(0):
                t.fault(f"the stack ended after {len(killed)} deaths")
                return
            continue
        await asyncio.sleep(0.8)
        await _kill(t, "executor")
        killed.add(pid)
    body = completion("meanwhile")
    t.expect("meanwhile", await t.status(COMPLETIONS, body, 40), (200, 503))
    if not await wait_healthy(t.url, 60):
        t.fault("not healthy within 60 s after the last death")


@attack("deaths-together", needs="stack", within_s=120, may_die="executor scheduler tokenizer")
async def _deaths_together(t: Target) -> None:
    """Two and three processes killed at one moment under 24 clients: every answer is whole."""
    for names in (("scheduler", "executor"), ("tokenizer", "scheduler"), ("tokenizer", "scheduler", "executor")):
        bodies = [completion(f"through it {i}", 100, ignore_eos=True) for i in range(24)]
        flood = asyncio.create_task(t.flood(COMPLETIONS, bodies, (200,), 60))
        await asyncio.sleep(0.5)
        await _kill(t, *names)
        await flood
        if not await wait_healthy(t.url, 30):
            t.fault(f"not healthy within 30 s after {names}")
