"""Grammars over a checkpoint's vocabulary: what the tokenizer tries before a request is sent, and the executor keeps to.

A grammar travels as text, made by one of the `*_grammar` functions. `GrammarEngine.compile` gives a matcher of it: it
takes token ids one by one and says, as a bit for each id, which may come next. Both processes compile with the same
engine, limits and vocabulary, so what the first has compiled the second can compile too.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.core.control_tokens import is_control_token

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 256 << 10
"""Of a grammar's text."""
_MAX_CACHED = 128
_MAX_MESSAGE = 500
_MAX_LEXER_STATES = 50_000
_COST_WORDS = ("fuel", "too large", "too complex", "TooComplex", "limits.")

# White space between the tokens of a JSON text: a blank, or a line with its indent; never an endless run.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,24})"}


class GrammarError(ValueError):
    """A grammar that cannot be compiled; says why, mostly in the engine's words."""


class GrammarCostError(GrammarError):
    """A grammar that would cost more than may be spent on one."""


def json_grammar(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The grammar of JSON values that `schema` allows. `lenient`: keywords that cannot be enforced are left out."""
    options = {**_JSON_OPTIONS, **_options_of(schema), "lenient": lenient}
    return _text({"name": "json_schema", "json_schema": {**schema, "x-guidance": options}})


def _options_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The separators that a schema asks for itself; nothing that would loosen it."""
    given = schema.get("x-guidance")
    return {k: v for k, v in given.items() if k.endswith("_separator")} if isinstance(given, dict) else {}


def regex_grammar(regex: str) -> str:
    """The grammar of texts that match `regex` as a whole."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


def lark_regex(regex: str) -> str:
    """`regex`, in the dialect of JSON Schema, as a terminal of a written grammar."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, 'dw')}/"


def lark_text(text: str) -> str:
    """Exactly this text, in a written grammar."""
    return json.dumps(text, ensure_ascii=False)


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of exactly these texts, none of them empty."""
    alternatives = " | ".join(map(lark_text, texts))
    return _text({"lark_grammar": f"start: CHOICE\nCHOICE: {alternatives}\n"})


def written_grammar(text: str) -> str:
    """A grammar that a caller wrote, in the engine's dialect of Lark or in GBNF. GrammarError where it is neither."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return _text({"lark_grammar": any_to_lark(text)})
    except Exception as error:  # the converter raises whatever its parsing runs into
        raise GrammarError(str(error)[:_MAX_MESSAGE] or "it cannot be read") from error


def composed_grammar(lark: str, parts: Mapping[str, str]) -> str:
    """The grammar that `lark` writes; `@name` in it stands for the grammar of that name in `parts`."""
    inner = [{**json.loads(text)["grammars"][0], "name": name} for name, text in parts.items()]
    return _text({"lark_grammar": lark}, *inner)


def _text(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


class GrammarEngine:
    """Compiles grammars for one vocabulary; from any thread. Compiling releases the interpreter lock."""

    def __init__(self, tokenizer_json: Path, vocab_size: int) -> None:
        """`tokenizer_json`: the checkpoint's; `vocab_size`: bits of a mask, at least the tokenizer's ids."""
        from llguidance import LLParserLimits, LLTokenizer

        source = json.loads(tokenizer_json.read_text(encoding="utf-8-sig"))
        special = []
        for token in source.get("added_tokens") or ():
            # What a grammar calls text holds no special token. The files flag few of the control tokens.
            token["special"] = token.get("special") or is_control_token(token["content"])
            if token["special"]:
                special.append(token["id"])
        if not special:
            raise ValueError(f"{tokenizer_json} has no special token")
        # The engine wants to know what ends a text. Here that is the sequence's own to say, so any token that is no
        # text stands for it; `masks` of it are not looked at.
        self.end_id: int = special[0]
        self._tokenizer = LLTokenizer(json.dumps(source), n_vocab=vocab_size, eos_token=self.end_id)
        # A state of the lexer takes 1 to 2 kB; the other limits, the engine's own, bound what is spent on one mask to some
        # tens of milliseconds, and on compiling to about a second.
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, text: str) -> LLMatcher:
        """A matcher at the beginning of the grammar `text`. GrammarError where it is none, or costs too much."""
        from llguidance import LLMatcher

        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known.deep_copy()
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarCostError(f"it has more than {MAX_GRAMMAR_BYTES >> 10} KiB")
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too complex for its first token fails here
        if matcher.is_error():
            raise _error(matcher.get_error())
        with self._lock:
            self._cache[text] = matcher
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
            return matcher.deep_copy()


def _error(message: str) -> GrammarError:
    """The engine's message, without what means nothing to who wrote the grammar."""
    message = message.removesuffix("<non-verbose/>").strip()
    if any(word in message for word in _COST_WORDS):
        return GrammarCostError(
            "it costs too much to compile: its expressions or alternatives are too many, or too large"
        )
    if message.startswith("NoExtension"):
        return GrammarError("nothing can satisfy it")
    return GrammarError(message[:_MAX_MESSAGE] or "it cannot be compiled")


def open_engine(folder: Path, vocab_size: int) -> GrammarEngine | None:
    """The engine for the checkpoint in `folder`; None, and a line in the log, where there can be none."""
    try:
        return GrammarEngine(folder / "tokenizer.json", vocab_size)
    except Exception as error:  # a missing package or file, a tokenizer that the engine does not know
        _log.warning("structured output is refused: no grammar engine for %s (%s)", folder, error)
        return None
