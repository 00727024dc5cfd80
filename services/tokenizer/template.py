"""Chat templates: Jinja in a sandbox, with the conventions that checkpoints are written for (transformers')."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from rorqual.core.errors import TemplateError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 64 * 1024 * 1024


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A template's namespace that takes no underscore names, which lead into the interpreter."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which is not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. Stateless: it may render in many threads at once."""

    def __init__(self, source: str) -> None:
        """TemplateError where `source` is no valid template."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken",
                field="chat_template",
            )
        self.source = source
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["namespace"] = _Namespace
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has an error in line {error.lineno}: {error.message}", field="chat_template"
            ) from error

    def render(self, variables: Mapping[str, Any], *, time_unix_s: int) -> str:
        """The template's text. `time_unix_s` is what strftime_now shows, in UTC. TemplateError where it fails."""

        def strftime_now(format: str) -> str:
            return datetime.fromtimestamp(time_unix_s, UTC).strftime(format)

        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(strftime_now=strftime_now, **variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateError(f"the chat template writes more than {MAX_RENDERED_CHARS} characters")
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses these messages: {error}", field="messages") from error
        except Exception as error:  # whatever a template's expression runs into
            raise TemplateError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", field="messages"
            ) from error
        return "".join(parts)


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """The compiled template; a caller's own is compiled once while it stays in use."""
    return ChatTemplate(source)
