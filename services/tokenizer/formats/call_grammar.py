"""The grammar of an answer's calls: names among the tools, arguments as their schemas allow, in a format's own syntax.

Written in the grammar engine's dialect of Lark. A control token stands by its id, and what a grammar calls text holds none,
so a call can neither be spelled nor be closed by an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rorqual.grammar import composed_grammar, json_grammar, lark_regex, lark_text

from ..control_tokens import ControlTokens

if TYPE_CHECKING:
    from .base import ChatFormat

ANY_TEXT = r"(?s:.*)"
_MAX_INDEX = "0|[1-9][0-9]{0,3}"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function that the answer may call."""

    name: str
    schema: dict[str, Any]  # of its arguments, an object
    strict: bool  # the whole schema is enforced, or the request refused; else what of it can be


class UnenforceableError(ValueError):
    """What a strict tool's schema asks for cannot be said in the format's syntax; `path` is the place in the schema."""

    def __init__(self, tool_name: str, path: str, message: str) -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.path = path


class GrammarWriter:
    """Gathers rules and the grammars they refer to. Its methods give terms for the right side of a rule."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._rules: list[str] = []
        self._parts: dict[str, str] = {}

    def literal(self, before: str, plain: str = "", after: str = "") -> str:
        """The format's own text around a caller's `plain` one, in which control tokens are not recognised."""
        terms: list[str] = []
        text = ""
        for part in (before, None, after):
            if part is None:
                text += plain
                continue
            place = 0
            for start, end in self._control.find(part):
                text += part[place:start]
                terms += [lark_text(text)] if text else []
                terms.append(f"<[{self._control.ids[part[start:end]]}]>")
                text, place = "", end
            text += part[place:]
        return " ".join([*terms, lark_text(text)] if text else terms)

    def text_until(self, regex: str, tag: str) -> str:
        """Text that matches `regex`, then `tag`, which ends it."""
        start, end = next(self._control.find(tag), (0, 0))
        if end:  # the token cannot be text, whatever comes before it
            return f"{self.terminal(lark_regex(f'(?:{regex}){_quoted(tag[:start])}'))} {self.literal(tag[start:])}"
        return self.rule(self.terminal(lark_regex(f"(?:{regex}){_quoted(tag)}")), option="[lazy]")

    def text_without(self, tag: str) -> str:
        """Any text that does not hold `tag`."""
        if next(self._control.find(tag), None):
            return self.terminal(lark_regex(ANY_TEXT))
        without = lark_regex(f"{ANY_TEXT}{_quoted(tag)}{ANY_TEXT}")
        return self.terminal(f"{lark_regex(ANY_TEXT)} & ~{without}")

    def value(self, schema: dict[str, Any], *, strict: bool) -> str:
        """A JSON value that `schema` allows."""
        return self.part(json_grammar(schema, lenient=not strict))

    def part(self, grammar: str) -> str:
        """What another grammar describes."""
        name = f"part{len(self._parts)}"
        self._parts[name] = grammar
        return f"@{name}"

    def rule(self, body: str, *, option: str = "") -> str:
        return self._define(f"rule{len(self._rules)}", option, body)

    def terminal(self, body: str) -> str:
        return self._define(f"TEXT{len(self._rules)}", "", body)

    def _define(self, name: str, option: str, body: str) -> str:
        self._rules.append(f"{name}{option}: {body}")
        return name

    def grammar(self, start: str) -> str:
        return composed_grammar("\n".join([f"start: {start}", *self._rules, ""]), self._parts)


def _quoted(text: str) -> str:
    """A regex of exactly this text, in a dialect with fewer escapes than Python's."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$" else char for char in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What of a call's syntax a request leaves open."""

    tools: Sequence[CallableTool]
    single: bool = False  # one call and no more
    has_begun: bool = False  # the prompt ends with what begins the first call
    has_name: bool = False  # and with its name, the only tool's
    beside: str | None = None  # the grammar of an answer that may come instead of calls
    after_text: bool = False  # calls may be left out, and may follow any text; see `opening_token`


def opening_token(chat_format: ChatFormat, control: ControlTokens) -> int | None:
    """The token that opens a block of calls, after which alone a grammar of calls that may be left out holds.

    None where the vocabulary has none for the mark: then the grammar is that of the whole text.
    """
    shape = chat_format.shape
    return control.ids.get(shape.opening[0].lstrip("<")) or control.ids.get(shape.opening[0]) if shape else None


def call_grammar(chat_format: ChatFormat, rules: CallRules, control: ControlTokens) -> str:
    """The grammar of an answer, or of the rest of it, in `chat_format`, which has calls.

    UnenforceableError for a strict tool whose schema the format's syntax cannot keep to.
    """
    shape = chat_format.shape
    assert shape is not None
    out = GrammarWriter(control)
    calls, arguments = [], ""
    for tool in rules.tools:
        arguments = f"{chat_format.arguments(tool, out)} {out.literal(shape.end_call)}"
        before, index, after = shape.after_name.partition("{index}")
        if index:
            number = out.terminal(lark_regex(_MAX_INDEX))
            name = f"{out.literal('', tool.name, before)} {number} {out.literal(after)}"
        else:
            name = out.literal("", tool.name, before)
        calls.append(f"{name} {arguments}")
    call = out.rule(" | ".join(map(out.rule, calls)))
    more = "" if rules.single else f"({out.literal(shape.between)} {call})*"
    first = arguments if rules.has_name else call
    rest = out.rule(f"{first} {more} {out.literal(shape.end)}")
    if rules.has_begun:
        return out.grammar(rest)
    if rules.after_text:
        tag, begins = shape.opening
        if opening_token(chat_format, control) is not None:
            return out.grammar(f"{out.literal(begins)} {rest}")
        text = out.text_without(tag)
        return out.grammar(f"{text} | {out.text_until(ANY_TEXT, tag)} {out.literal(begins)} {rest}")
    # A model that has reasoned puts an empty line between that and what it says.
    blank = '("\\n" | "\\n\\n")? ' if not shape.begin.startswith("\n") else ""
    made = f"{blank}{out.literal(shape.begin)} {rest}"
    return out.grammar(f"{out.part(rules.beside)} | {made}" if rules.beside is not None else made)
