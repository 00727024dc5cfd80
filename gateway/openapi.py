"""The OpenAPI document, made from the structs that validate bodies and encode answers, and a page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import msgspec

from rorqual import __version__

from .openai.fields import IGNORED_HEADER, BodyReader
from .policy import Act
from .route import Route

_REF = "#/components/schemas/"

_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

_ERRORS = {
    "400": "A field is malformed, out of range, or known and not supported; the message names it.",
    "401": "No API key of this server was sent.",
    "404": "The model does not exist here.",
    "408": "The body did not arrive in time, or the request took longer than it may.",
    "413": "The body is larger than is taken.",
    "415": "The body has a Content-Encoding that is not read; Accept-Encoding names those that are.",
    "429": "Too many requests wait; try again after Retry-After.",
    "500": "A fault of the server. Its text stays in the server's log.",
    "503": "A part of the server is missing; the message names it. Try again after Retry-After.",
}


def document(routes: Mapping[str, Route]) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`, by path."""
    types: list[Any] = []
    for route in routes.values():
        types += [route.reader.body_type] if route.reader is not None else []
        types += [route.answer] if route.answer is not None else []
        types.append(route.errors.body_type)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    of_type = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rorqual",
            "version": __version__,
            "description": f"Fields that are not named here are ignored, and named in the header {IGNORED_HEADER}.",
        },
        "paths": {path: {route.method.lower(): _operation(path, route, of_type)} for path, route in routes.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, route: Route, of_type: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.content_type: {"schema": of_type.get(route.answer, _any(route))}}
    if route.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    error = {"application/json": {"schema": of_type[route.errors.body_type]}}
    answers = {"200": {"description": "The answer.", "content": content}}
    if path == "/health":  # says the same when it is not
        answers["503"] = {"description": "Which part is missing.", "content": content}
    wanted = [code for code in _ERRORS if _may_answer(route, path, code)]
    answers |= {code: {"description": _ERRORS[code], "content": error} for code in wanted}
    out: dict[str, Any] = {"operationId": _operation_id(path, route), "summary": route.summary, "responses": answers}
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        out["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.needs_key:
        out["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    if route.reader is not None:
        body = {"schema": of_type[route.reader.body_type]}
        out["requestBody"] = {"required": True, "content": {"application/json": body}}
        out["description"] = _fields_text(route.reader)
    return out


def _any(route: Route) -> dict[str, str]:
    return {"type": "object" if route.content_type == "application/json" else "string"}


def _may_answer(route: Route, path: str, code: str) -> bool:
    if code in ("400", "408", "413", "415"):
        return route.reader is not None
    if code == "401":
        return route.needs_key
    if code == "404":
        return route.reader is not None or "{" in path
    if code == "429":
        return route.streams
    return code == "500" or route.needs_key


def _operation_id(path: str, route: Route) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "_").strip("/").split("/")
    return "_".join([route.method.lower(), *words])


def _fields_text(reader: BodyReader[Any]) -> str:
    """The fields that the schema does not show."""
    lines = []
    for act, words in (
        (Act.REFUSED, "Known and not supported (a 400 names the field)"),
        (Act.IGNORED, "Ignored, and named in the answer's header x-rorqual-ignored-fields"),
        (Act.TAKEN, "Taken without effect"),
    ):
        names = sorted(rule.name for rule in reader.rules.values() if rule.act is act)
        if names:
            lines.append(f"{words}: {', '.join(names)}.")
    return " ".join(lines)


# The page.

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{margin-top:2.5rem;font-size:1.1rem}code{background:#f2f2f2;padding:.1em .3em;border-radius:3px}
table{border-collapse:collapse;width:100%;font-size:.9rem}td,th{border-bottom:1px solid #ddd;padding:.3rem .5rem;
text-align:left;vertical-align:top}summary{cursor:pointer}.m{font-weight:600;color:#06c}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#111}code{background:#222}td,th{border-color:#333}}"""


def page(spec: Mapping[str, Any]) -> str:
    """The document as one HTML page that loads nothing."""
    components = spec["components"]["schemas"]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Rorqual API</title><style>{_STYLE}</style><h1>Rorqual {escape(spec['info']['version'])}</h1>",
        f'<p>{escape(spec["info"]["description"])} The same as a document: <a href="/openapi.json">/openapi.json</a>.</p>',
    ]
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f'<h2 id="{operation["operationId"]}"><span class="m">{method.upper()}</span> {escape(path)}</h2>'
            )
            parts.append(f"<p>{escape(operation['summary'])}</p>")
            if operation.get("description"):
                parts.append(f"<p>{escape(operation['description'])}</p>")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                parts.append(_table("Body", schema, components))
            answers = ((code, answer["description"]) for code, answer in operation["responses"].items())
            rows = "".join(f"<tr><td><code>{code}</code><td>{escape(text)}" for code, text in answers)
            parts.append(f"<details><summary>Answers</summary><table>{rows}</table></details>")
    parts.append("<h1>Objects</h1>")
    parts.extend(
        f'<h2 id="{name}">{name}</h2><p>{escape(schema.get("description", ""))}</p>' + _rows(schema)
        for name, schema in sorted(components.items())
    )
    return "\n".join(parts) + "</html>\n"


def _table(title: str, schema: Mapping[str, Any], components: Mapping[str, Any]) -> str:
    name = schema["$ref"].removeprefix(_REF)
    return f'<p>{title}: <a href="#{name}">{name}</a></p>' + _rows(components[name])


def _rows(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in required else ""
        rows.append(f"<tr><td><code>{escape(name)}</code><td>{_type_text(field)}<td>{needed}")
    return f"<table><tr><th>field<th>type<th>{''.join(rows)}</table>" if rows else ""


_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
}


def _type_text(field: Mapping[str, Any]) -> str:
    """A field's type in words, as HTML."""
    if "$ref" in field:
        name = field["$ref"].removeprefix(_REF)
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in field:
        return _either(_type_text(option) for option in field["anyOf"])
    if "enum" in field:
        return _either(f"<code>{escape(str(value))}</code>" for value in field["enum"])
    if "const" in field:
        return f"<code>{escape(str(field['const']))}</code>"
    kind = field.get("type", "any")
    text = _either(escape(k) for k in (kind if isinstance(kind, list) else [kind]))
    if kind == "array" and field.get("items"):
        text = f"list of {_type_text(field['items'])}"
    bounds = ", ".join(form.format(field[key]) for key, form in _BOUNDS.items() if key in field)
    return f"{text} ({bounds})" if bounds else text


def _either(options: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(options))
