"""The grammar of DSML parameters: the members of an object, in the order of its schema's properties.

A string is raw text where its schema can be said of raw text, else JSON, as every other value is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.grammar import lark_regex

from .call_grammar import ANY_TEXT, CallableTool, GrammarWriter, UnenforceableError

_NAME = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_MAX_REFS = 16  # of each other
_SAYS_NOTHING = {
    "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
_OF_AN_OBJECT = _SAYS_NOTHING | {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}
_OF_A_STRING = _SAYS_NOTHING | {"maxLength", "minLength", "pattern", "type"}
_TYPES = ("array", "boolean", "integer", "null", "number", "object")
_SPECIAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[|^$]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Text:
    regex: str


@dataclass(frozen=True, slots=True)
class _Literal:
    """A value of an enumeration."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Json:
    schema: Any


_Form = _Text | _Literal | _Json


@dataclass(frozen=True, slots=True)
class DsmlParameters:
    """`tag`, `close`: what begins a parameter, up to its name, and what ends it."""

    tag: str
    close: str
    empty: str  # what a call without parameters has in their place

    def write(self, tool: CallableTool, out: GrammarWriter) -> str:
        """A term for the parameters of a call."""
        schema = _resolve(tool.schema, tool.schema)
        schema = schema if isinstance(schema, dict) else {}
        unknown = sorted(schema.keys() - _OF_AN_OBJECT)
        if tool.strict and unknown:
            raise UnenforceableError(
                tool.name, "", f"{unknown[0]!r} of the whole object cannot be enforced in this chat format"
            )
        properties = dict(schema.get("properties") or {})
        required = schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        for name in required:
            if name not in properties:
                if others is False and tool.strict:
                    raise UnenforceableError(tool.name, "", f"{name!r} is required, and no property")
                properties[name] = others or True
        shared: dict[str, Any] = {name: tool.schema[name] for name in ("$defs", "definitions") if name in tool.schema}
        terms = []
        for name, inner in properties.items():
            forms = list(_forms(inner, tool.schema, strict=tool.strict))
            body = out.rule(" | ".join(self._parameter(name, form, shared, tool.strict, out) for form in forms))
            terms.append(body if name in required else f"{body}?")
        if not properties and others is not False:  # a map: any names
            forms = list(_forms(others, tool.schema, strict=tool.strict))
            terms = [f"({' | '.join(self._parameter(None, form, shared, tool.strict, out) for form in forms)})*"]
        if not terms:
            return out.literal(self.empty) if self.empty else ""
        return out.rule(" ".join(terms) + (f" | {out.literal(self.empty)}" if self.empty and not required else ""))

    def _parameter(
        self, name: str | None, form: _Form, shared: Mapping[str, Any], strict: bool, out: GrammarWriter
    ) -> str:
        is_text = isinstance(form, _Text) or (isinstance(form, _Literal) and isinstance(form.value, str))
        after = f'" string="{"true" if is_text else "false"}">'
        if name is None:
            head = f"{out.literal(self.tag)} {out.terminal(lark_regex(_NAME))} {out.literal(after)}"
        else:
            head = out.literal(self.tag, name, after)
        match form:
            case _Text():
                return f"{head} {out.text_until(form.regex, self.close)} {out.literal(_NEWLINE)}"
            case _Literal():
                shown = form.value if isinstance(form.value, str) else _json(form.value)
                return f"{head} {out.literal('', shown, f'{self.close}{_NEWLINE}')}"
            case _Json():
                inner = {**shared, **form.schema} if isinstance(form.schema, dict) else {}
                return f"{head} {out.value(inner, strict=strict)} {out.literal(f'{self.close}{_NEWLINE}')}"


_NEWLINE = "\n"


def _forms(schema: Any, root: Mapping[str, Any], *, strict: bool, depth: int = 0) -> Iterator[_Form]:
    """In how many ways a value that `schema` allows is written; each of them is a value that it allows."""
    schema = _resolve(schema, root)
    if schema is True or (isinstance(schema, dict) and not schema.keys() - _SAYS_NOTHING):
        yield _Text(ANY_TEXT)
        yield _Json({"type": list(_TYPES)})
        return
    if not isinstance(schema, dict):
        yield _Json(schema)
        return
    says = schema.keys() - _SAYS_NOTHING
    for keyword in ("anyOf", "oneOf"):
        if says == {keyword} and isinstance(schema[keyword], list) and depth < _MAX_REFS:
            for inner in schema[keyword]:
                yield from _forms(inner, root, strict=strict, depth=depth + 1)
            return
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and says <= {"const", "enum", "type"}:
        yield from map(_Literal, values)
        return
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    regex = _raw_string(schema, strict=strict) if "string" in kinds else None
    if regex is not None:
        yield _Text(regex)
        kinds = [kind for kind in kinds if kind != "string"]
        if not kinds:
            return
    yield _Json({**schema, "type": kinds} if regex is not None else schema)


def _raw_string(schema: Mapping[str, Any], *, strict: bool) -> str | None:
    """A regex of the strings that `schema` allows; None where there is none that says all of it.

    Not strict: what has none is any text.
    """
    bounds = [schema.get("minLength"), schema.get("maxLength")]
    others = schema.keys() - _OF_A_STRING - set(_KEYWORDS_OF_OTHERS)
    pattern = schema.get("pattern")
    if not others and isinstance(pattern, str) and bounds == [None, None]:
        regex = _whole(pattern)
        if regex is not None:
            return regex
    elif not others and pattern is None and all(bound is None or isinstance(bound, int) for bound in bounds):
        low, high = bounds
        return ANY_TEXT if bounds == [None, None] else f"(?s:.{{{low or 0},{'' if high is None else high}}})"
    return None if strict else ANY_TEXT


_KEYWORDS_OF_OTHERS = (
    "additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maximum", "minItems", "minimum",
    "multipleOf", "prefixItems", "properties", "required",
)  # fmt: skip


def _whole(pattern: str) -> str | None:
    """A pattern of JSON Schema, which may match anywhere, as a regex of the whole text; None where it is not simple."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$")
    inner = pattern[starts : len(pattern) - ends]
    trailing = len(inner) - len(inner.rstrip("\\"))
    if ends and trailing % 2:  # the dollar was escaped
        ends, inner = False, pattern[starts:]
    special = [match.group() for match in _SPECIAL.finditer(inner) if match.group() in ("|", "^", "$")]
    if "^" in special or "$" in special or ("|" in special and (starts or ends)):
        return None
    return f"{'' if starts else ANY_TEXT}(?:{inner}){'' if ends else ANY_TEXT}"


def _resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """`schema`, or what it refers to inside `root` where it is a reference and no more."""
    for _ in range(_MAX_REFS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        if schema.keys() - _SAYS_NOTHING - {"$ref", "$defs", "definitions"}:
            return schema
        match = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", schema["$ref"])
        target = root.get(match[1], {}).get(match[2].replace("~1", "/").replace("~0", "~")) if match else None
        if target is None:
            return schema
        schema = target
    return schema


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
