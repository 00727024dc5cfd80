"""One choice of a request: its tokens become text, until they end. Pure.

What has been given after tokens t1…tk is a function of t1…tk alone, however they came. So a lost stream is opened
again by running the tokens that were delivered through a fresh machine and dropping what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .decoder import IncrementalDecoder
from .formats.reasoning import ReasoningSplitter, Start
from .stop_strings import StopMatcher, StopStrings
from .token_text import TokenText


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What ends a choice, and how its tokens become text; the same for all choices of a request."""

    table: TokenText
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None
    min_tokens: int  # stop strings are not looked for in the text of so many tokens
    max_tokens: int | None  # None: the scheduler ends it
    start: Start | None  # None: plain text, not split
    tags_are_tokens: bool


@dataclass(frozen=True, slots=True)
class End:
    """Why a choice ended by its own tokens: a stop token, a stop string, or neither (its budget)."""

    stop_token_id: int | None = None
    stop_string: str | None = None

    @property
    def is_length(self) -> bool:
        return self.stop_token_id is None and self.stop_string is None


@dataclass(frozen=True, slots=True)
class Output:
    """What a run of tokens brought. Reasoning comes before content."""

    num_tokens: int  # consumed; fewer than were given only where `end` is set
    num_reasoning_tokens: int  # of them, those up to the end of the reasoning text
    reasoning: str
    content: str
    end: End | None


class ChoiceMachine:
    """Decoder, stop strings and reasoning split of one choice, and its count of tokens."""

    __slots__ = ("_decoder", "_matcher", "_rules", "_splitter", "end", "num_reasoning_tokens", "num_tokens")

    def __init__(self, rules: ChoiceRules) -> None:
        self._rules = rules
        self._decoder = IncrementalDecoder(rules.table)
        self._matcher = StopMatcher(rules.stop_strings) if rules.stop_strings is not None else None
        self._splitter = (
            ReasoningSplitter(rules.start, tags_are_tokens=rules.tags_are_tokens) if rules.start is not None else None
        )
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.end: End | None = End() if rules.max_tokens == 0 else None

    def push(self, token_ids: Sequence[int]) -> Output:
        """Consume tokens up to the end of the text; after `end` is set nothing is consumed."""
        rules, decoder, matcher, splitter = self._rules, self._decoder, self._matcher, self._splitter
        stop_ids, max_tokens = rules.stop_token_ids, rules.max_tokens
        reasoning: list[str] = []
        content: list[str] = []
        consumed = split = 0
        for token_id in token_ids:
            if self.end is not None:
                break
            consumed += 1
            self.num_tokens += 1
            if token_id in stop_ids:  # counted and named, not shown
                self.end = End(stop_token_id=token_id)
                text = ""
            else:
                text = decoder.push(token_id)
                if matcher is not None and text and self.num_tokens > rules.min_tokens:
                    text, stop_string = matcher.push(text)
                    if stop_string is not None:
                        self.end = End(stop_string=stop_string)
                if self.end is None and self.num_tokens == max_tokens:
                    self.end = End()
            if splitter is None:
                if text:
                    content.append(text)
                continue
            was_reasoning = splitter.in_reasoning
            if text:
                thought, said = splitter.push(text)
                if thought:
                    reasoning.append(thought)
                    split = consumed
                if said:
                    content.append(said)
            if was_reasoning and splitter.in_reasoning:
                self.num_reasoning_tokens += 1
                split = consumed
        if self.end is not None and consumed:
            thought, said = self.flush()
            reasoning.append(thought)
            content.append(said)
        return Output(consumed, split, "".join(reasoning), "".join(content), self.end)

    def flush(self) -> tuple[str, str]:
        """(reasoning, content) that was still held back; called by `push` at an end of its own, else by whoever ends it."""
        text = ""
        if self.end is None or self.end.stop_string is None:
            text = self._decoder.flush()
            if self._matcher is not None:
                # A replacement character may complete a stop string only in theory; at the end all is released.
                text = self._matcher.flush() + text
        if self._splitter is None:
            return "", text
        reasoning, content = self._splitter.push(text)
        more_reasoning, more_content = self._splitter.flush()
        return reasoning + more_reasoning, content + more_content
