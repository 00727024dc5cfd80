"""Reading a body: JSON errors in plain words, fields that are refused by name, fields that are ignored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from rorqual.core.errors import InvalidRequestError

from ..policy import Act, Dialect, Rule, rules_of

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_HEADER = "x-rorqual-ignored-fields"
MAX_NAMED_FIELDS = 16
MAX_SEARCHED_BYTES = 1 << 20
"""A larger body is not searched for unknown fields inside others: that reads it once more, and others wait (1 to 2 ms a MB)."""
MAX_SCHEMA_DEPTH = 64

_AT = re.compile(r" - at `(?:key in )?\$?(.*)`$")
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_BRACKETS = re.compile(rb"[\[\]{}]")
_WHOLE_NUMBER = re.compile(r"^Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$\.(\w+)")
_INSIDE = frozenset(".[")  # in a name: it is that of something inside a field
_MISSING = re.compile(r"Object missing required field `([^`]*)`")


class BodyReader(Generic[T]):
    """Decodes one endpoint's body type."""

    def __init__(self, body_type: type[T], dialect: Dialect) -> None:
        """`dialect`: whose rows of the policy's table hold for what `body_type` does not serve."""
        self.body_type = body_type
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(body_type).decode
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
        self._served = frozenset(body_type.__struct_encode_fields__)
        info = msgspec.inspect.type_info(body_type)
        self._ranges = _ranges(info)
        inside = _names_inside(info)
        self._inside = {name: names for name, names in inside.items() if names is not None}
        self.rules = {
            name: rule
            for name, rule in rules_of(dialect).items()
            if name not in self._served and not _INSIDE.intersection(name)
        }

    def read(self, raw: bytes) -> tuple[T, list[str]]:
        """The body, and the names of fields in it that are ignored: by a rule, or, at any depth, as unknown.

        Raises InvalidRequestError.
        """
        try:
            if not raw.isascii():
                raw.decode("utf-8")
            given = self._names(raw)
            ignored = [name for name in given if name not in self._served and self._ignores(name, given[name])]
            body = self._typed(raw, given)
            for name in given.keys() & self._inside.keys() if len(raw) <= MAX_SEARCHED_BYTES else ():
                ignored += _strangers(given[name], self._inside[name], name)
            return body, ignored
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"the body is not valid UTF-8 (byte {error.start})", reason="INVALID_JSON"
            ) from None
        except RecursionError:
            raise InvalidRequestError("the body is nested too deeply", reason="INVALID_JSON") from None
        except msgspec.ValidationError as error:
            raise _explain(str(error), self._ranges) from None
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"the body is not valid JSON: {error}", reason="INVALID_JSON") from None

    def _typed(self, raw: bytes, given: dict[str, msgspec.Raw]) -> T:
        """The body, whose whole numbers may be written with a point: to JSON Schema 4.0 is an integer."""
        for _ in range(len(given)):  # a pass for each such field
            try:
                return self._decode(raw)
            except msgspec.ValidationError as error:
                name = _WHOLE_NUMBER.search(str(error))
                whole = _as_whole(given[name[1]]) if name is not None and name[1] in given else None
                if name is None or whole is None:
                    raise
                given[name[1]] = whole
                raw = msgspec.json.encode(given)
        return self._decode(raw)

    def _ignores(self, name: str, value: msgspec.Raw) -> bool:
        """Whether an unserved field is to be named in the header. Raises where it is refused."""
        rule = self.rules.get(name)
        return rule is None or ignores(rule, msgspec.json.decode(value))


def ignores(rule: Rule, value: Any, place: str = "") -> bool:
    """Whether `value` asks for something that is ignored, and so is to be named. Raises InvalidRequestError where the rule
    refuses it. `place`: where it stands, if not just in the field of the rule's name."""
    if rule.act is Act.TAKEN or not rule.asks(value):
        return False
    if rule.act is Act.REFUSED:
        place = place or rule.name
        raise refuse(place, f"{place} is not supported here{': ' if rule.cure else ''}{rule.cure}")
    return True


def _as_whole(raw: msgspec.Raw) -> msgspec.Raw | None:
    """A field's value with its whole numbers written without a point; None where that changes nothing."""

    def whole(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [whole(item) for item in value]
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return value

    written = msgspec.json.encode(whole(msgspec.json.decode(raw)))
    return msgspec.Raw(written) if written != bytes(raw) else None


def _ranges(body: msgspec.inspect.Type) -> dict[str, str]:
    """The range of each of the body's numbers in words, by name."""
    assert isinstance(body, msgspec.inspect.StructType)
    out: dict[str, str] = {}
    for field in body.fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for kind in kinds:
            if isinstance(kind, (msgspec.inspect.IntType, msgspec.inspect.FloatType)) and kind.ge is not None:
                out[field.encode_name] = f"{kind.ge} to {kind.le}"
    return out


def _names_inside(kind: msgspec.inspect.Type) -> Any:
    """What may stand inside a value of that type: names to the same of theirs, or a list of that of its items.

    None where there are no names to know.
    """
    if isinstance(kind, msgspec.inspect.StructType):
        return {field.encode_name: _names_inside(field.type) for field in kind.fields}
    if isinstance(kind, msgspec.inspect.ListType):
        item = _names_inside(kind.item_type)
        return None if item is None else [item]
    if isinstance(kind, msgspec.inspect.UnionType):  # of the body's unions none has two kinds of object
        return next((inside for one in kind.types if (inside := _names_inside(one)) is not None), None)
    return None


def _strangers(raw: msgspec.Raw, inside: Any, here: str) -> list[str]:
    """Names in the value of the field `here` that nobody knows, each once, as messages[].name.

    A null asks for nothing. Raises InvalidRequestError for a number that no float holds, which the typed body may have
    skipped.
    """
    try:
        value = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:
        raise invalid(here, _AT.sub("", str(error)).lower()) from None
    found: dict[str, None] = {}
    _look(value, inside, here, found)
    return list(found)


def _look(value: Any, inside: Any, here: str, found: dict[str, None]) -> None:
    """Add to `found`. (As a function within `_strangers` it would be a cycle, which holds `found` until one looks for such.)"""
    if isinstance(inside, list) and isinstance(value, list):
        for item in value:
            _look(item, inside[0], f"{here}[]", found)
    elif isinstance(inside, dict) and isinstance(value, dict):
        for name, item in value.items():
            if name not in inside:
                if item is not None:
                    found[f"{here}.{name}"] = None
            elif inside[name] is not None and item is not None:
                _look(item, inside[name], f"{here}.{name}", found)


def refuse(name: str, message: str) -> InvalidRequestError:
    """A 400 for a known field whose value is not served."""
    return InvalidRequestError(message, reason="UNSUPPORTED_FIELD", field=name)


def invalid(name: str, message: str) -> InvalidRequestError:
    """A 400 for a value that makes no sense."""
    return InvalidRequestError(f"{name}: {message}", reason="INVALID_VALUE", field=name)


def check_depth(schema: bytes, name: str) -> None:
    """Raises InvalidRequestError where the JSON `schema` is nested deeper than any schema that is meant."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", schema)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_SCHEMA_DEPTH:
            raise invalid(name, f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def ignored_header(names: list[str]) -> dict[str, str]:
    """The warning header that names ignored fields; empty where there are none."""
    if not names:
        return {}
    shown = ", ".join(quote(name[:64], safe="[]") or '""' for name in names[:MAX_NAMED_FIELDS])
    rest = f", and {len(names) - MAX_NAMED_FIELDS} more" if len(names) > MAX_NAMED_FIELDS else ""
    return {IGNORED_HEADER: shown + rest}


def _explain(text: str, ranges: Mapping[str, str]) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.messages[0].role`" as a fault of messages[0].role.

    `ranges`: of numbers, by name, which the message gets.
    """
    at = _AT.search(text)
    path = at.group(1).lstrip(".").removesuffix("[...]") if at else ""
    what = _AT.sub("", text).replace("`", "")
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        what = "it is required"
    if not path:
        return InvalidRequestError(
            f"the body must be a JSON object: {what[0].lower()}{what[1:]}", reason="INVALID_JSON"
        )
    allowed = f" ({ranges[path]} is taken)" if path in ranges else ""
    return invalid(path, f"{what[0].lower()}{what[1:]}{allowed}")
