"""A sequence's grammar: what it allows next, where it ends, and that tokens alone rebuild it."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor.constraint import Constraint, Constraints, GrammarSpec
from rorqual.core.errors import InvalidRequestError
from rorqual.grammar import (
    GrammarEngine,
    GrammarError,
    choice_grammar,
    json_grammar,
    open_engine,
    regex_grammar,
    written_grammar,
)
from rorqual.grammar_bounds import MAX_GRAMMAR_BYTES
from rorqual.v1 import text_pb2
from services.tokenizer.constraint import compile_constraint
from tests.support.vocabularies import tiny

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
VOCAB = 8192
END = 1  # the tokenizer's end of sequence


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    engine = open_engine(FOLDER, VOCAB)
    assert engine is not None
    return engine


def test_a_byte_order_mark_before_the_tokenizer_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + (FOLDER / "tokenizer.json").read_bytes())
    assert open_engine(tmp_path, VOCAB) is not None


@pytest.fixture(scope="module")
def decode() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")).decode


def begin(
    engine: GrammarEngine, text: str, after: int | None = None, stops: tuple[int, ...] = (END,), min_tokens: int = 0
) -> Constraint:
    constraint = Constraints(engine, VOCAB).begin(GrammarSpec(text, after), stops, min_tokens)
    constraint._future.exception(timeout=30)
    return constraint


def allowed(constraint: Constraint, num_generated: int = 0) -> list[int]:
    logits = np.zeros(VOCAB, np.float32)
    constraint.mask(logits, num_generated)
    return [int(i) for i in np.flatnonzero(np.isfinite(logits))]


def walk(constraint: Constraint, seed: int, most: int = 400) -> list[int]:
    """Tokens drawn among those allowed, to the grammar's end."""
    rng, ids = random.Random(seed), []
    while not constraint.has_ended:
        ids.append(rng.choice(allowed(constraint, len(ids))))
        constraint.observe(ids[-1:])
        assert not constraint.error
        assert len(ids) < most
    return ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pattern", ["a{2,5}", "(whale|whales)( sing)?", "[0-9]{3}-[a-f]{2}", "é|鲸鱼", "x*y?z{0,3}"])
def test_random_tokens_match_the_regex(engine: GrammarEngine, decode: Any, pattern: str, seed: int) -> None:
    ids = walk(begin(engine, regex_grammar(pattern)), seed)
    assert re.fullmatch(pattern, decode([i for i in ids if i != END]))


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_are_json_of_the_schema(engine: GrammarEngine, decode: Any, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}, "l": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
        "required": ["n", "s", "l"],
        "additionalProperties": False,
    }  # fmt: skip
    value = json.loads(decode(walk(begin(engine, json_grammar(schema)), seed)))
    assert list(value) == ["n", "s", "l"]
    assert isinstance(value["n"], int)
    assert len(value["s"]) <= 9
    assert len(value["l"]) <= 2


def test_choices_and_written_grammars(engine: GrammarEngine, decode: Any) -> None:
    texts = ["yes", "yess", 'q"\\\n', "鲸"]
    heard = {decode([i for i in walk(begin(engine, choice_grammar(texts)), seed) if i != END]) for seed in range(60)}
    assert heard <= set(texts)
    assert len(heard) > 1
    for text in ('start: "ab" | "cd"', 'root ::= "ab" | "cd"'):
        assert decode(walk(begin(engine, written_grammar(text)), 1)) in ("ab", "cd")


def test_stop_tokens_only_where_the_grammar_may_end(engine: GrammarEngine) -> None:
    a = allowed(begin(engine, regex_grammar("a+")))
    assert a
    assert END not in a
    longer = begin(engine, regex_grammar("a+"))
    longer.observe(a[:1])
    assert END in allowed(longer, 1)
    assert not longer.has_ended
    longer.observe([END])
    assert longer.has_ended
    held = begin(engine, regex_grammar("a+"), min_tokens=3)
    held.observe(a[:1])
    assert END not in allowed(held, 2)
    assert END in allowed(held, 3)
    # Where the request ignores the end of sequence, it is no way out.
    ignored = begin(engine, regex_grammar("a+"), stops=())
    ignored.observe(a[:1])
    assert END not in allowed(ignored, 1)


def test_it_begins_after_the_reasoning(engine: GrammarEngine, decode: Any) -> None:
    close, text = 500, regex_grammar("ab")
    constraint = begin(engine, text, after=close)
    assert len(allowed(constraint)) == VOCAB - 1  # anything but an end
    constraint.observe([77, 3000, close])
    begun = allowed(constraint, 3)
    assert begun == allowed(begin(engine, text))
    assert "ab" in {decode([i]) for i in begun} <= {"a", "ab"}
    # Tokens that come in one piece with the closing one count.
    at_once = begin(engine, text, after=close)
    at_once.observe([77, close, next(i for i in begun if decode([i]) == "ab")])
    assert at_once.has_ended


def test_tokens_alone_rebuild_it(engine: GrammarEngine) -> None:
    text = json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4})
    ids = walk(begin(engine, text), 11)
    whole = begin(engine, text)
    for cut in range(len(ids)):
        rebuilt = begin(engine, text)
        rebuilt.observe(ids[:cut])
        assert allowed(rebuilt, cut) == allowed(whole, cut)
        assert not rebuilt.has_ended
        whole.observe(ids[cut : cut + 1])
    rebuilt = begin(engine, text)
    rebuilt.observe(ids)
    assert rebuilt.has_ended


@pytest.mark.parametrize("after", [None, 500])
def test_masks_of_another_thread_are_the_same(engine: GrammarEngine, after: int | None) -> None:
    constraints = Constraints(engine, VOCAB)
    text = json_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3})
    ids = walk(begin(engine, text), 3)
    plain, prepared = ([begin(engine, text, after) for _ in range(5)] for _ in range(2))
    for many in (plain, prepared):
        for constraint in many:
            constraint.observe([500] if after else [])
    for cut in range(len(ids)):
        constraints.prepare(prepared)
        if cut % 3 == 2:  # one that is asked for nothing before its next token
            prepared[0].observe(ids[cut : cut + 1])
        for one, other in zip(plain[1:], prepared[1:], strict=True):
            assert allowed(one, cut) == allowed(other, cut)
        for constraint in [*plain, *prepared[cut % 3 == 2 :]]:
            constraint.observe(ids[cut : cut + 1])
    assert all(constraint.has_ended for constraint in (*plain, *prepared))
    constraints.prepare(prepared)  # which have nothing more to say


ASK: dict[str, Callable[[Constraint, int], Any]] = {  # every public member, as the step loops use it
    "is_ready": lambda constraint, token_id: constraint.is_ready,
    "observe": lambda constraint, token_id: constraint.observe([token_id]),
    "needs_mask": lambda constraint, token_id: constraint.needs_mask,
    "has_ended": lambda constraint, token_id: constraint.has_ended,
    "allowed": lambda constraint, token_id: constraint.allowed(0),
    "mask": lambda constraint, token_id: constraint.mask(np.zeros(VOCAB, np.float32), 0),
    "lend": lambda constraint, token_id: constraint.lend().run(),
    "phase": lambda constraint, token_id: constraint.phase,
    "error": lambda constraint, token_id: constraint.error,
    "reason": lambda constraint, token_id: constraint.reason,
    "cancel": lambda constraint, token_id: constraint.cancel(),
}


def test_it_may_be_asked_anything_while_a_worker_computes_its_mask(engine: GrammarEngine) -> None:
    """The engine's matcher raises where two threads use it at once; the first mask of some of these takes 20 ms."""
    constraints = Constraints(engine, VOCAB)
    texts = [
        written_grammar('start: (("a"~1000)~1000)~1000'),
        written_grammar('start: ("ab"~1000)~100'),
        json_grammar({"type": "object", "properties": {f"p{i}": {"pattern": f"^[a-z]{{{i}}}$"} for i in range(200)}}),
    ]
    rng = random.Random(5)
    for _ in range(60):
        many = [begin(engine, text) for text in texts]
        constraints.prepare(many)
        for _ in range(20):
            time.sleep(0)  # a worker gets the interpreter, and gives it back where its mask begins
            for constraint in many:
                name = rng.choice(list(ASK))
                if name != "lend" or constraint.needs_mask:
                    ASK[name](constraint, rng.randrange(3, VOCAB) if rng.random() < 0.1 else 70)
            constraints.prepare(many)
        assert not any("failed" in constraint.error for constraint in many)


def test_every_public_member_is_asked() -> None:
    constraint = Constraints(None, VOCAB).begin(GrammarSpec("x"), (END,), 0)
    assert {name for name in dir(constraint) if not name.startswith("_")} == set(ASK)


class Exclusive:
    """A matcher that may not be used by two threads at once, and says that somebody did."""

    def __init__(self) -> None:
        self.in_use, self.was_shared = False, False
        self.may_end = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*args: object) -> Any:
            self.was_shared = self.was_shared or self.in_use
            return {"consume_token": True, "is_accepting": True}.get(name, False)

        return answer

    def compute_bitmask(self) -> bytes:
        self.in_use = True
        self.may_end.wait(30)
        self.in_use = False
        return b"\xff" * (VOCAB // 8)


@pytest.mark.parametrize("name", ["observe", "has_ended", "allowed", "mask"])
def test_who_asks_waits_for_the_worker(name: str) -> None:
    matcher = Exclusive()
    engine = SimpleNamespace(end_id=0, compile=lambda text: matcher)
    constraints = Constraints(engine, VOCAB)  # type: ignore[arg-type]
    constraint = begin(engine, "x")  # type: ignore[arg-type]
    constraints.prepare([constraint])
    asking = threading.Thread(target=ASK[name], args=(constraint, 7))
    asking.start()
    asking.join(0.05)
    assert asking.is_alive()
    assert not constraint.needs_mask  # says so without waiting: the worker is still at it
    matcher.may_end.set()
    asking.join(30)
    assert not matcher.was_shared
    assert not constraint.error


@pytest.mark.parametrize("name", ["compute_bitmask", "consume_token", "is_stopped", "is_error"])
@pytest.mark.parametrize("prepared", [True, False])
def test_an_engine_that_fails_fails_its_constraint(name: str, prepared: bool) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("secret")

    matcher = Exclusive()
    matcher.may_end.set()
    setattr(matcher, name, fail)
    engine = SimpleNamespace(end_id=0, compile=lambda text: matcher)
    constraint = begin(engine, "x")  # type: ignore[arg-type]
    if prepared:
        Constraints(engine, VOCAB).prepare([constraint])  # type: ignore[arg-type]
    constraint.observe([7])
    assert not constraint.has_ended
    assert constraint.allowed(1) is None
    assert constraint.error == "the grammar engine failed (RuntimeError)"


def test_a_history_that_does_not_fit_is_a_fault(engine: GrammarEngine) -> None:
    constraint = begin(engine, regex_grammar("a"))
    constraint.observe([5000])
    assert constraint.allowed(1) is None
    assert "5000" in constraint.error
    assert not constraint.has_ended
    assert allowed(constraint) == []


def test_a_grammar_that_cannot_be_compiled_is_a_fault() -> None:
    constraint = Constraints(None, VOCAB).begin(GrammarSpec("x"), (END,), 0)
    assert constraint.is_ready
    assert allowed(constraint) == []
    assert "no grammars" in constraint.error


def test_engines_are_cached_and_bounded(engine: GrammarEngine) -> None:
    one, two = engine.compile(regex_grammar("cached")), engine.compile(regex_grammar("cached"))
    token = allowed(begin(engine, regex_grammar("cached")))[0]
    assert one.consume_token(token)
    assert two.compute_bitmask() != one.compute_bitmask()  # each has a state of its own
    for i in range(150):
        engine.compile(regex_grammar(f"x{i}"))
    assert len(engine._cache) <= 128
    with pytest.raises(GrammarError, match="KiB"):
        engine.compile(regex_grammar("a" * MAX_GRAMMAR_BYTES))


NEST = itertools.accumulate(range(70), lambda inner, _: {"items": inner}, initial={})
DEEP: Any = list(NEST)[-1]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, ""),
        ({"properties": {"a": {"type": "strin"}}}, ".properties.a"),
        ({"items": {"anyOf": [{"type": "null"}, {"format": "no-such"}]}}, ".items.anyOf[1]"),
        ({"$defs": {"x": {"not": {}}}, "properties": {"p": {"$ref": "#/$defs/x"}}}, ".$defs.x"),
        ({"properties": {"p": {"$ref": "#/$defs/nowhere"}}}, ".properties.p"),
        ({"properties": {"p": {"type": "array", "uniqueItems": True}}}, ".properties.p"),
        ({"x-guidance": {"lenient": True}, "not": {}}, ""),
        (DEEP, ""),
        ({"$ref": "#"}, ""),
        ([], ""),
    ],
)
def test_a_bad_schema_names_the_place(engine: GrammarEngine, schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_constraint(text_pb2.Constraint(json_schema=json.dumps(schema)), engine)
    assert caught.value.field == f"constraint.json_schema{place}"
    assert caught.value.message.startswith(caught.value.field)
    assert caught.value.reason == ("CONSTRAINT_TOO_COMPLEX" if schema is DEEP else "INVALID_CONSTRAINT")


def test_names_that_may_be_any_demand_nothing(engine: GrammarEngine) -> None:
    """zod writes `propertyNames` for every record; a property of that name, and data that looks like it, stay."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    lookalike = {"propertyNames": {"type": "string"}}
    schema = {
        "type": "object",
        "properties": {"r": record, "propertyNames": {"type": "string"}, "c": {"const": lookalike}},
        "required": ["r", "propertyNames", "c"],
        "additionalProperties": False,
        "$defs": {"propertyNames": {"type": "string"}},
    }
    text = compile_constraint(text_pb2.Constraint(json_schema=json.dumps(schema)), engine)
    ids = tiny().encode('{"r":{"any name":1},"propertyNames":"x","c":{"propertyNames":{"type":"string"}}}')
    assert engine.compile(text).try_consume_tokens(ids) == len(ids)
    refused = {"type": "object", "propertyNames": {"pattern": "^a"}}
    with pytest.raises(InvalidRequestError) as caught:
        compile_constraint(text_pb2.Constraint(json_schema=json.dumps(refused)), engine)
    assert "propertyNames" in caught.value.message


@pytest.mark.parametrize("text", ["{", '{"const": NaN}', "[" * 50_000])
def test_a_schema_that_is_no_json(engine: GrammarEngine, text: str) -> None:
    with pytest.raises(InvalidRequestError):
        compile_constraint(text_pb2.Constraint(json_schema=text), engine)


@pytest.mark.parametrize(
    "constraint",
    [
        text_pb2.Constraint(regex="[a-z]{0,50}" * 500),
        text_pb2.Constraint(regex="a" * (MAX_GRAMMAR_BYTES + 1)),
        text_pb2.Constraint(
            json_schema=json.dumps(
                {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "integer"}}} for j in range(6)]} for i in range(6)]}
            )
        ),
    ],
    ids=["regex", "long", "product"],
)  # fmt: skip
def test_what_costs_too_much_has_a_name(engine: GrammarEngine, constraint: text_pb2.Constraint) -> None:
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"costs too much|KiB") as caught:
        compile_constraint(constraint, engine)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    assert "limits." not in caught.value.message
    assert time.process_time() - began_s < 10


def test_costly_regexes_end_in_time(engine: GrammarEngine) -> None:
    """Taken or refused, a thread is not lost to them."""
    for pattern in ("[a-z]{0,50}" * 500, "(a|b)*c" * 200, "(((a?){50}){50}){50}"):
        began_s = time.process_time()
        with contextlib.suppress(InvalidRequestError):
            compile_constraint(text_pb2.Constraint(regex=pattern), engine)
        assert time.process_time() - began_s < 10
