"""docs/api.md names every field that the API knows: what is served, what is refused, what has no effect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.anthropic import request as messages
from gateway.openai import chat, completions, endpoints, response_request
from gateway.openai.fields import BodyReader
from gateway.policy import RULES, Act, Dialect

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
EVERY, BOTH = "Fields of every generation", "Fields of both completions"
POLICY = "What is ignored and what is refused"

WHERE: dict[str, tuple[BodyReader[Any], tuple[str, ...]]] = {
    "POST /v1/chat/completions": (chat.READER, (EVERY, BOTH)),
    "POST /v1/completions": (completions.READER, (EVERY, BOTH)),
    "POST /v1/responses": (response_request.READER, (EVERY,)),
    "POST /v1/messages": (messages.READER, ()),
    "POST /v1/messages/count_tokens": (messages.COUNT_READER, ("POST /v1/messages",)),
    "POST /tokenize": (endpoints.TOKENIZE_READER, ()),
    "POST /detokenize": (endpoints.DETOKENIZE_READER, ()),
}


def split(section: str) -> tuple[set[str], set[str]]:
    """The names that its tables begin rows with, and those in its paragraphs."""
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    paragraphs = [line for line in section.splitlines() if not line.startswith("|")]
    return set(re.findall(r"`(\w+)`", " ".join(rows))), set(re.findall(r"`(\w+)`", " ".join(paragraphs)))


@pytest.mark.parametrize("title", WHERE)
def test_every_field_is_named(title: str) -> None:
    reader, shared = WHERE[title]
    served: set[str] = set()
    told: set[str] = set()
    for name in (title, *shared):
        rows, paragraphs = split(SECTIONS[name])
        served |= rows
        told |= paragraphs
    fields = set(reader.body_type.__struct_encode_fields__)
    assert fields <= (served if "|" in SECTIONS[title] else served | told)
    assert reader.rules.keys() <= set(re.findall(r"`(\w+)`", SECTIONS[POLICY]))
    # And nothing that it does not know: a row is a field of this section's endpoints.
    own, _ = split(SECTIONS[title])
    assert own <= fields | {"prefix"}


def test_the_policys_table_is_that_of_the_code() -> None:
    told = set()
    for act, where, fields in re.findall(r"^\| (\w+) \| ([\w, ]+) \| (`.+) \|$", SECTIONS[POLICY], re.MULTILINE):
        for name, values in re.findall(r"`([^`]+)`(?: \(([^)]*)\))?", fields):
            harmless = [json.loads(value) for value in re.findall(r"`([^`]*)`", values)]
            told |= {(name, Act(act), Dialect[word.upper()], repr(harmless)) for word in where.split(", ")}
    assert told == {
        (rule.name, rule.act, dialect, repr(list(rule.harmless)))
        for rule in RULES
        for dialect in Dialect.__members__.values()
        if dialect in rule.dialects and dialect is not Dialect.OPENAI
    }


def test_every_path_is_named() -> None:
    for path in ("/v1/models/{id}", "/health/live", "/version", "/metrics", "/openapi.json", "/docs"):
        assert f"{path}`" in TEXT
