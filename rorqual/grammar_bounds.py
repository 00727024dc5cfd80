"""What a grammar's source may hold at most, tested in linear time before any library reads it.

The bounds lie above what has been seen to work: they keep out texts for which even a reader takes long. What they let
through and is too much all the same ends at the limits of the process that compiles it (`grammar_worker`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

MAX_GRAMMAR_BYTES = 256 << 10
"""Of a grammar's text."""
MAX_RULES = 16_384
MAX_NESTING = 500
"""Of brackets in a written grammar or a regex."""
MAX_REF_LINKS = 2_048
"""In a chain of schemas that are a `$ref` each."""
MAX_MULTIPLE = 10**12
"""Least common multiple of the integers that `multipleOf` has in one `allOf`."""

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n){3,}")
_BRACKETS = re.compile(r'"(?:\\.|[^"\\\n])*"|\\.|[()\[\]{}]')
_RULE = re.compile(r"^[ \t]*[\w.\-]+[^\n:\"/]{0,64}:", re.MULTILINE)


def without_blank_lines(text: str) -> str:
    """`text` with no more than two empty lines in a row, which mean nothing in a grammar."""
    return _BLANK_LINES.sub("\n\n\n", text)


def written_fault(text: str) -> str:
    """Why a written grammar is not read at all; empty where it is."""
    if fault := bytes_fault(text) or nesting_fault(text):
        return fault
    num_rules = sum(1 for _ in _RULE.finditer(text))
    return f"it has {num_rules} rules; {MAX_RULES} are the most" if num_rules > MAX_RULES else ""


def bytes_fault(text: str) -> str:
    if len(text) > MAX_GRAMMAR_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        return f"it has more than {MAX_GRAMMAR_BYTES >> 10} KiB"
    return ""


def nesting_fault(text: str) -> str:
    """Of brackets outside string literals. A class in a regex may hold some that open nothing: the bound is far off."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        char = match.group()
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return f"its brackets are nested deeper than {MAX_NESTING} levels" if deepest > MAX_NESTING else ""


def schema_fault(schema: dict[str, Any]) -> str:
    """Why a JSON schema is not compiled at all; empty where it is. `schema` is known not to be nested deeply."""
    for inner in _schemas(schema):
        multiples = [
            part["multipleOf"] for part in (inner, *_parts_of_all(inner)) if isinstance(part.get("multipleOf"), int)
        ]
        if len(multiples) > 1 and math.lcm(*multiples) > MAX_MULTIPLE:
            return f"the least common multiple of its multipleOf is more than {MAX_MULTIPLE}"
    if _longest_chain(schema) > MAX_REF_LINKS:
        return f"more than {MAX_REF_LINKS} $ref follow one another"
    return ""


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _parts_of_all(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = schema.get("allOf")
    return (part for part in parts if isinstance(part, dict)) if isinstance(parts, list) else iter(())


def _longest_chain(schema: dict[str, Any]) -> int:
    """Links of the longest chain of definitions that are a reference and no more."""
    links = {
        f"#/{name}/{key}": target
        for name in ("$defs", "definitions")
        if isinstance(schema.get(name), dict)
        for key, inner in schema[name].items()
        if isinstance(inner, dict) and isinstance(target := inner.get("$ref"), str)
    }
    length: dict[str, int] = {}
    for start in links:
        path: list[str] = []
        here = start
        while here in links and here not in length:
            length[here] = 0  # a circle ends where it closes
            path.append(here)
            here = links[here]
        known = length.get(here, 0)
        for back, name in enumerate(reversed(path), 1):
            length[name] = known + back
    return max(length.values(), default=0)
