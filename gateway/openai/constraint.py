"""What an answer must be: response_format, structured_outputs and guided_*, as one constraint."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rorqual.v1 import text_pb2

from .fields import check_depth, invalid, refuse
from .schema import NULL, GenerationFields

_SCHEMA = "response_format.json_schema.schema"


def constraint_of(body: GenerationFields) -> tuple[str, text_pb2.Constraint] | None:
    """The field of `body` that sets the constraint, and the constraint. Raises InvalidRequestError."""
    given = [pair for pair in (_response_format(body), _structured_outputs(body), *_guided(body)) if pair is not None]
    if len(given) > 1:
        raise invalid(given[1][0], f"{given[0][0]} is given too: send one of them")
    return given[0] if given else None


def constraint_name(body: GenerationFields) -> Callable[[str], str]:
    """From a place in rorqual.v1's constraint to the same in `body`."""
    given = constraint_of(body)
    if given is None:
        return lambda name: name
    field, constraint = given
    return renamer(field, constraint.WhichOneof("constraint") or "")


def renamer(field: str, kind: str) -> Callable[[str], str]:
    """What the tokenizer calls `constraint.<kind>` is the client's `field`."""
    place = f"constraint.{kind}"

    def rename(name: str) -> str:
        if name == "constraint":
            return field
        return field + name[len(place) :] if name.startswith(place) else name

    return rename


def schema_constraint(schema: msgspec.Raw, field: str) -> text_pb2.Constraint:
    """A JSON schema's, which is an object. Raises InvalidRequestError naming `field`."""
    text = bytes(schema).decode()
    if not text.startswith("{"):
        raise invalid(field, "it must be a JSON schema object")
    check_depth(schema, field)
    return text_pb2.Constraint(json_schema=text)


def _response_format(body: GenerationFields) -> tuple[str, text_pb2.Constraint] | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return "response_format", text_pb2.Constraint(json_object=True)
    if asked.type != "json_schema":
        raise refuse("response_format.type", f"response_format.type {asked.type[:64]!r} is not supported here")
    if asked.json_schema is None:
        raise invalid("response_format.json_schema", "it is required with type 'json_schema'")
    return _SCHEMA, schema_constraint(asked.json_schema.schema, _SCHEMA)


def _structured_outputs(body: GenerationFields) -> tuple[str, text_pb2.Constraint] | None:
    asked = body.structured_outputs
    if asked is None:
        return None
    given = [name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False, NULL)]
    if len(given) != 1:
        raise invalid("structured_outputs", f"one of its fields is set, got {', '.join(given) or 'none'}")
    here = f"structured_outputs.{given[0]}"
    match given[0]:
        case "json":
            return here, _json(asked.json, here)
        case "regex":
            return here, text_pb2.Constraint(regex=asked.regex)
        case "choice":
            return here, _choice(asked.choice or [])
        case "grammar":
            return here, text_pb2.Constraint(grammar=asked.grammar)
        case "json_object":
            return here, text_pb2.Constraint(json_object=True)
        case _:
            raise refuse(here, f"{here} is not supported here")


def _guided(body: GenerationFields) -> list[tuple[str, text_pb2.Constraint]]:
    given: list[tuple[str, text_pb2.Constraint]] = []
    if body.guided_json != NULL:
        given.append(("guided_json", _json(body.guided_json, "guided_json")))
    if body.guided_regex is not None:
        given.append(("guided_regex", text_pb2.Constraint(regex=body.guided_regex)))
    if body.guided_choice is not None:
        given.append(("guided_choice", _choice(body.guided_choice)))
    if body.guided_grammar is not None:
        given.append(("guided_grammar", text_pb2.Constraint(grammar=body.guided_grammar)))
    return given


def _json(value: msgspec.Raw, field: str) -> text_pb2.Constraint:
    """vLLM's: a schema, or its text."""
    if bytes(value).startswith(b'"'):
        try:
            value = msgspec.Raw(msgspec.json.format(msgspec.json.decode(value).encode(), indent=-1))
        except msgspec.DecodeError as error:
            raise invalid(field, f"its text is not valid JSON: {error}") from None
    return schema_constraint(value, field)


def _choice(texts: list[str]) -> text_pb2.Constraint:
    return text_pb2.Constraint(choices=text_pb2.ChoiceList(texts=texts))
