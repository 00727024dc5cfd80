"""Answers drawn at random among the tokens that a grammar allows."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from executor.constraint import Constraint, Constraints, GrammarSpec
from rorqual.grammar import GrammarEngine
from services.tokenizer.vocabulary import Vocabulary

EOS = 1


@cache
def engine_of(vocabulary: Vocabulary) -> GrammarEngine:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(vocabulary._tokenizer.to_str(), encoding="utf-8")
        return GrammarEngine(path, vocabulary.size)


def begin(vocabulary: Vocabulary, text: str, after: int | None = None, opening: int | None = None) -> Constraint:
    """A constraint whose grammar has been compiled."""
    spec = GrammarSpec(text, after, opening)
    constraint = Constraints(engine_of(vocabulary), vocabulary.size).begin(spec, (EOS,), 0)
    constraint._future.exception(timeout=30)
    return constraint


def allowed(constraint: Constraint, vocab_size: int, num_generated: int = 0) -> list[int]:
    words = constraint.allowed(num_generated)
    if words is None:
        return []
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def walk(
    vocabulary: Vocabulary, constraint: Constraint, seed: int, *, prefer: Iterable[int] = (), most: int = 4000
) -> list[int]:
    """Tokens to the grammar's end, those in `prefer` more often than not: what closes a value ends it early."""
    rng, preferred, ids = random.Random(seed), frozenset(prefer), list[int]()
    while not constraint.has_ended:
        choices = allowed(constraint, vocabulary.size, len(ids))
        wanted = [token_id for token_id in choices if token_id in preferred]
        ids.append(rng.choice(wanted if wanted and rng.random() < 0.7 else choices))
        constraint.observe(ids[-1:])
        assert not constraint.error
        assert len(ids) < most, vocabulary.token_strings(ids[-40:])
    return ids
