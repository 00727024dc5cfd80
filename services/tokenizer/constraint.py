"""What an answer must be, as the grammar that the executor keeps to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rorqual.core.errors import InvalidRequestError
from rorqual.grammar import (
    GrammarCostError,
    GrammarEngine,
    GrammarError,
    choice_grammar,
    json_grammar,
    regex_grammar,
    written_grammar,
)
from rorqual.v1 import text_pb2

MAX_CHOICES = 1024
MAX_DEPTH = 64
_MAX_TRIALS = 256  # schemas that are compiled to find the one at fault,
_MAX_SEARCH_S = 2.0  # and for how long

# Keywords of JSON Schema whose value is a schema, a list of schemas, or an object of schemas.
_ONE = (
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OBJECTS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")


OnFault = Callable[[InvalidRequestError], None]


def compile_constraint(
    constraint: text_pb2.Constraint, engine: GrammarEngine, *, on_fault: OnFault | None = None
) -> str:
    """The grammar's text, known to compile. INVALID_CONSTRAINT, or CONSTRAINT_TOO_COMPLEX, names the place at fault.

    May take long, or end the process: `grammar_worker` calls it. `on_fault` is told of a fault before its place is
    searched for.
    """
    kind = constraint.WhichOneof("constraint") or ""
    place = f"constraint.{kind}"
    match kind:
        case "json_schema" | "json_object":
            schema = _read_schema(constraint.json_schema, place) if kind == "json_schema" else {"type": "object"}
            fault = fault_of(schema, engine)
            if fault is not None:
                refuse_schema(schema, engine, place, fault, on_fault=on_fault)
            return json_grammar(schema)
        case "regex":
            try:
                text = regex_grammar(constraint.regex)
            except GrammarError as error:
                refuse(place, error)
        case "choices":
            texts = list(constraint.choices.texts)
            if not 1 <= len(texts) <= MAX_CHOICES or not all(texts):
                refuse(place, f"1 to {MAX_CHOICES} texts are taken, none of them empty")
            text = choice_grammar(texts)
        case "grammar":
            try:
                text = written_grammar(constraint.grammar)
            except GrammarError as error:
                refuse(place, error)
        case _:
            refuse("constraint", "it says nothing")
    try:
        engine.compile(text)
    except GrammarError as error:
        refuse(place, error)
    return text


def refuse(place: str, fault: GrammarError | str, *, reason: str = "INVALID_CONSTRAINT") -> NoReturn:
    """`reason`: of a fault that is not one of cost."""
    raise _refusal(place, fault, reason)


def _refusal(place: str, fault: GrammarError | str, reason: str) -> InvalidRequestError:
    if isinstance(fault, GrammarCostError):
        reason = "CONSTRAINT_TOO_COMPLEX"
    return InvalidRequestError(f"{place}: {fault}", reason=reason, field=place)


def refuse_schema(
    schema: dict[str, Any],
    engine: GrammarEngine,
    place: str,
    fault: GrammarError,
    *,
    reason: str = "INVALID_CONSTRAINT",
    on_fault: OnFault | None = None,
) -> NoReturn:
    """Refuse `schema`, which has `fault`, with the innermost place at fault."""
    if on_fault is not None:
        on_fault(_refusal(place, fault, reason))
    refuse(*(locate_fault(schema, engine, place) or (place, fault)), reason=reason)


def _read_schema(text: str, place: str) -> dict[str, Any]:
    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        schema = json.loads(text, parse_constant=no_constant)
        deep = _depth(schema) > MAX_DEPTH
    except RecursionError:
        deep = True
    except ValueError as error:
        refuse(place, f"it is not valid JSON: {error}")
    if deep:
        refuse(place, GrammarCostError(f"it is nested deeper than {MAX_DEPTH} levels"))
    if not isinstance(schema, dict):
        refuse(place, "it must be a JSON schema object")
    return schema


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def fault_of(schema: dict[str, Any], engine: GrammarEngine) -> GrammarError | None:
    """Why `schema` cannot be compiled; None where it can."""
    try:
        engine.compile(json_grammar(schema))
    except GrammarError as error:
        return error
    return None


def locate_fault(schema: dict[str, Any], engine: GrammarEngine, place: str) -> tuple[str, GrammarError] | None:
    """The innermost schema that cannot be compiled by itself, and why: the engine's words name no place."""
    shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    trials, ends_s = _MAX_TRIALS, time.monotonic() + _MAX_SEARCH_S

    def search(inside: dict[str, Any], here: str) -> tuple[str, GrammarError] | None:
        nonlocal trials
        for path, inner in _children(inside):
            if trials <= 0 or time.monotonic() > ends_s:
                return None
            trials -= 1
            fault = fault_of({**shared, **inner}, engine)
            if fault is not None:
                return search(inner, here + path) or (here + path, fault)
        return None

    return search(schema, place)


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _OBJECTS:
        value = schema.get(name)
        if isinstance(value, dict):
            yield from ((f".{name}.{key}", inner) for key, inner in value.items() if isinstance(inner, dict))
    for name in _ONE:
        value = schema.get(name)
        if isinstance(value, dict):
            yield f".{name}", value
    for name in _LISTS:
        value = schema.get(name)
        if isinstance(value, list):
            yield from ((f".{name}[{i}]", inner) for i, inner in enumerate(value) if isinstance(inner, dict))
