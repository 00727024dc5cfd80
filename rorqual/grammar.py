"""Grammars over a checkpoint's vocabulary: what the tokenizer tries before a request is sent, and the executor keeps to.

A grammar travels as text, made by one of the `*_grammar` functions. `GrammarEngine.compile` gives a matcher of it: it
takes token ids one by one and says, as a bit for each id, which may come next. Both processes compile with the same
engine, limits and vocabulary, so what the first has compiled the second can compile too.

The engine's recursion is native: a text may overflow the stack, and ends the process. So a text from outside is first
compiled where that costs nothing: in a process that may die (`grammar_worker`), with `trial=True`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rorqual.core.control_tokens import is_control_token

from .grammar_bounds import (
    MAX_GRAMMAR_BYTES,
    bytes_fault,
    nesting_fault,
    schema_fault,
    without_blank_lines,
    written_fault,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)

T = TypeVar("T")

TRIAL_STACK_BYTES = 8 << 20
"""Stack on which a trial compiles: a chain of some 2,500 rules fits, the engine's recursion beyond ends the process."""
FOLLOW_STACK_BYTES = 2 << 20
"""Stack on which a trial follows what it has compiled: other threads do so with what is left of theirs."""
COMPILE_STACK_BYTES = 64 << 20
"""Stack on which everybody else compiles: with room for what fitted in a trial. Only pages that are used take memory."""
_MAX_CACHED = 128
_FIRST_TOKENS = 16  # that a trial takes, each by itself
_WALKS, _WALK_TOKENS = 4, 4  # and for how far it goes on after some of them
_MAX_MESSAGE = 500
_MAX_LEXER_STATES = 50_000
_COST_WORDS = ("fuel", "too large", "too complex", "TooComplex", "limits.")

# White space between the tokens of a JSON text: a blank, or a line with its indent; never an endless run.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,24})"}

_ANY_NAME: tuple[Any, ...] = ({"type": "string"}, {}, True)  # the schemas that every name of a property meets
_VALUES = frozenset(("const", "default", "enum", "examples"))  # keywords of JSON Schema whose value is data
_SCHEMAS_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))


class GrammarError(ValueError):
    """A grammar that cannot be compiled; says why, mostly in the engine's words."""


class GrammarCostError(GrammarError):
    """A grammar that would cost more than may be spent on one."""


def json_grammar(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The grammar of JSON values that `schema` allows. `lenient`: keywords that cannot be enforced are left out.

    GrammarCostError for one beyond the bounds.
    """
    _check(schema_fault(schema))
    schema = _without_free_names(schema)
    options = {**_JSON_OPTIONS, **_options_of(schema), "lenient": lenient}
    return _text({"name": "json_schema", "json_schema": {**schema, "x-guidance": options}})


def _without_free_names(schema: Any, *, by_name: bool = False) -> Any:
    """`schema` without any `propertyNames` that demands nothing: zod writes one for every record, and the engine has no
    such keyword. `by_name`: `schema` is an object of schemas, whose names are no keywords."""
    if isinstance(schema, list):
        return [_without_free_names(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value
        if name in _VALUES and not by_name
        else _without_free_names(value, by_name=not by_name and name in _SCHEMAS_BY_NAME)
        for name, value in schema.items()
        if by_name or name != "propertyNames" or value not in _ANY_NAME
    }


def _options_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The separators that a schema asks for itself; nothing that would loosen it."""
    given = schema.get("x-guidance")
    return {k: v for k, v in given.items() if k.endswith("_separator")} if isinstance(given, dict) else {}


def regex_grammar(regex: str) -> str:
    """The grammar of texts that match `regex` as a whole. GrammarCostError for one beyond the bounds."""
    from llguidance import LLMatcher

    _check(bytes_fault(regex) or nesting_fault(regex))

    return str(LLMatcher.grammar_from_regex(regex))


def lark_regex(regex: str) -> str:
    """`regex`, in the dialect of JSON Schema, as a terminal of a written grammar. GrammarCostError beyond the bounds."""
    from llguidance import regex_to_lark

    _check(bytes_fault(regex) or nesting_fault(regex))

    return f"/{regex_to_lark(regex, 'dw')}/"


def lark_text(text: str) -> str:
    """Exactly this text, in a written grammar."""
    return json.dumps(text, ensure_ascii=False)


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of exactly these texts, none of them empty."""
    alternatives = " | ".join(map(lark_text, texts))
    return _text({"lark_grammar": f"start: CHOICE\nCHOICE: {alternatives}\n"})


def written_grammar(text: str) -> str:
    """A grammar that a caller wrote, in the engine's dialect of Lark or in GBNF. GrammarError where it is neither.

    The reader of GBNF holds the interpreter's lock, for longer than the text has lines.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    text = without_blank_lines(text) if len(text) <= MAX_GRAMMAR_BYTES else text
    _check(written_fault(text))
    try:
        return _text({"lark_grammar": any_to_lark(text)})
    except Exception as error:  # the converter raises whatever its parsing runs into
        raise GrammarError(str(error)[:_MAX_MESSAGE] or "it cannot be read") from error


def composed_grammar(lark: str, parts: Mapping[str, str]) -> str:
    """The grammar that `lark` writes; `@name` in it stands for the grammar of that name in `parts`."""
    inner = [{**json.loads(text)["grammars"][0], "name": name} for name, text in parts.items()]
    return _text({"lark_grammar": lark}, *inner)


def _check(fault: str) -> None:
    if fault:
        raise GrammarCostError(fault)


def _text(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


class GrammarEngine:
    """Compiles grammars for one vocabulary; from any thread. Compiling releases the interpreter lock."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, *, trial: bool = False) -> None:
        """`tokenizer_json`: the checkpoint's; `vocab_size`: bits of a mask, at least the tokenizer's ids.

        `trial`: take only what can also be followed from its first tokens, on less stack than elsewhere. For a process
        that may die of it.
        """
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
        self._is_trial = trial
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, text: str) -> LLMatcher:
        """A matcher at the beginning of the grammar `text`. GrammarError where it is none, or costs too much."""
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known.deep_copy()
        _check(bytes_fault(text))
        stack_bytes = TRIAL_STACK_BYTES if self._is_trial else COMPILE_STACK_BYTES
        matcher = _with_stack(stack_bytes, lambda: self._matcher(text))
        if self._is_trial:
            _with_stack(FOLLOW_STACK_BYTES, lambda: self._follow(matcher))
        with self._lock:
            self._cache[text] = matcher
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
            return matcher.deep_copy()

    def _matcher(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too complex for its first token fails here
        if matcher.is_error():
            raise _error(matcher.get_error())
        return matcher

    def _follow(self, matcher: LLMatcher) -> None:
        """Take some of the tokens that may come first, and after some of them a few more.

        The engine notices only then that too much may follow. GrammarCostError.
        """
        allowed = matcher.deep_copy().compute_bitmask()
        for nth, token_id in enumerate(self._some_of(allowed, _FIRST_TOKENS)):
            walk = matcher.deep_copy()
            _step(walk, token_id)
            for step in range(_WALK_TOKENS if nth % (_FIRST_TOKENS // _WALKS) == 0 else 0):
                if walk.is_stopped():
                    break
                mask = walk.compute_bitmask()
                if walk.is_error():
                    raise GrammarCostError(_TOO_MUCH_FOLLOWS)
                following = list(self._some_of(mask, 2))
                if not following:
                    break
                _step(walk, following[step % len(following)])

    def _some_of(self, mask: bytes, most: int) -> Iterator[int]:
        """Ids that `mask` allows: half of `most` are the lowest, short texts mostly, the others are from everywhere."""
        bits = int.from_bytes(mask, "little") & ~(1 << self.end_id)
        ids = [base + bit for base, byte in _bytes_of(bits) for bit in range(8) if byte >> bit & 1]
        low = ids[: most - most // 2]
        yield from low
        rest = ids[len(low) :]
        step = max(1, len(rest) // max(1, most // 2))
        yield from rest[step - 1 :: step][: most // 2]


_TOO_MUCH_FOLLOWS = "it costs too much to follow: its rules, properties or repetitions allow too much at once"


def _bytes_of(bits: int) -> Iterator[tuple[int, int]]:
    """(the number of a byte's lowest bit, the byte) for those that are not zero."""
    packed = bits.to_bytes(-(-bits.bit_length() // 8), "little")
    return ((8 * at, byte) for at, byte in enumerate(packed) if byte)


def _step(matcher: LLMatcher, token_id: int) -> None:
    if not matcher.consume_token(token_id) or matcher.is_error():
        raise GrammarCostError(_TOO_MUCH_FOLLOWS)


_stack_size_lock = threading.Lock()


def _with_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """What `work` returns or raises, done by a thread with a stack of `num_bytes`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="grammar-stack", daemon=True)
    with _stack_size_lock:  # the size is the whole interpreter's; another thread begun meanwhile gets it too
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


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


def open_engine(folder: Path, vocab_size: int, *, trial: bool = False) -> GrammarEngine | None:
    """The engine for the checkpoint in `folder`; None, and a line in the log, where there can be none."""
    try:
        return GrammarEngine(folder / "tokenizer.json", vocab_size, trial=trial)
    except Exception as error:  # a missing package or file, a tokenizer that the engine does not know
        _log.warning("structured output is refused: no grammar engine for %s (%s)", folder, error)
        return None
